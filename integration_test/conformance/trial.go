package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
)

// trial is one run of a case in one way. Each call is also made on a database in memory, by the same clock: the two answers
// must be equal, to the last bit.
type trial struct {
	s    *suite
	c    testCase
	way  way
	keys string

	ctx       context.Context
	db        ratelimit.DB
	limiter   *ratelimit.Limiter
	coalescer *ratelimit.Coalescer // of the way, or one on the pool, for callers that contend

	memory *inmemory.DB
	batch  *pgx.Batch // not sent yet

	model      ratelimit.DB // memory, or a transaction on it
	modelTx    pgx.Tx
	unmodelled bool // the script has counted for itself: what is stored is not compared with the model

	tally    tally    // of callers that contend
	cleanups []string // SQL that deletes what the trial has left in other tables than ratelimit.limits

	attempt    int // of InTx
	step       string
	steps      int
	used       []use
	rollback   bool                      // the script wants a rollback
	afterwards func(ctx context.Context) // runs once the way has committed or rolled back
	condition  string
	note       string
}

// use is a limit and key that the trial has used.
type use struct {
	request ratelimit.Request
	name    string
	key     string
	sharded bool
}

var noon = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

func newTrial(s *suite, c testCase, w way, keys string) *trial {
	t := &trial{s: s, c: c, way: w, keys: keys, memory: inmemory.New()}
	t.memory.Set(noon)
	t.limiter = &ratelimit.Limiter{Clock: t.memory.Now}
	return t
}

// begin makes the trial ready for a script on a handle. InTx may run it several times.
func (t *trial) begin(ctx context.Context, db ratelimit.DB) {
	t.end(false)
	t.ctx, t.db, t.attempt = ctx, db, t.attempt+1
	t.rollback, t.afterwards, t.condition, t.note = false, nil, "", ""
	t.memory.Set(noon)
	t.limiter = &ratelimit.Limiter{Clock: t.memory.Now}
	if c, ok := db.(*ratelimit.Coalescer); ok {
		t.coalescer = c
	}
	t.model = t.memory
	if t.way.inTx() && t.way.call == nil {
		tx, err := t.memory.BeginTx(ctx, pgx.TxOptions{IsoLevel: t.way.level})
		if err != nil {
			panic(err)
		}
		t.model, t.modelTx = tx, tx
	}
}

// end ends the model's transaction as the server's was.
func (t *trial) end(committed bool) {
	if t.modelTx == nil {
		return
	}
	if committed {
		if err := t.modelTx.Commit(context.Background()); err != nil {
			panic(err)
		}
	} else {
		_ = t.modelTx.Rollback(context.Background())
	}
	t.modelTx = nil
}

// guard runs a part of a script, and returns what stopped it.
func (t *trial) guard(f func()) (stopped *stop) {
	defer func() {
		if p := recover(); p != nil {
			s, ok := p.(*stop)
			if !ok {
				panic(p)
			}
			stopped = s
		}
	}()
	f()
	return nil
}

// wrong ends the trial: the server's answer is not the right one.
func (t *trial) wrong(format string, args ...any) {
	panic(&stop{outcome: outcome{Verdict: wrong, Step: t.step, Detail: fmt.Sprintf(format, args...)}})
}

// failed ends the trial: a step had an error.
func (t *trial) failed(err error) {
	panic(&stop{outcome: fromError(t.ctx, t.step, err, t.c.clear...), err: err})
}

// must ends the trial if a step had an error.
func (t *trial) must(step string, err error) {
	t.step = step
	if err != nil {
		t.failed(err)
	}
}

// name is the full name of a limit of the trial. InTx may use another one in each attempt.
func (t *trial) name(name string) string {
	return fmt.Sprintf("%s_%d_%d_%s", t.s.prefix, t.s.trials, t.attempt, name)
}

// key is one of the keys for a call for several limits: the same one, or one that falls on any partition.
func (t *trial) key(i int) string {
	if t.keys == oneKey {
		i = 0
	}
	return fmt.Sprintf("key-%d-%d", t.s.trials, i)
}

// bucket makes a token bucket that refills 10 tokens a minute.
func (t *trial) bucket(name string, options ...ratelimit.Option) ratelimit.Limit {
	return ratelimit.TokenBucket(t.name(name), 10, time.Minute, options...)
}

// still makes a bucket with almost no refill.
func (t *trial) still(name string, capacity float64, options ...ratelimit.Option) ratelimit.Limit {
	return ratelimit.TokenBucket(t.name(name), 1e-9, time.Hour, append(options, ratelimit.Capacity(capacity))...)
}

// of is a request for a limit and a key, which are cleaned up afterwards.
func (t *trial) of(limit ratelimit.Limit, key string) ratelimit.Request {
	for _, u := range t.used {
		if u.name == limit.Name() && u.key == key {
			return limit.Key(key) // with other numbers, perhaps
		}
	}
	t.used = append(t.used, use{request: limit.Key(key), name: limit.Name(), key: key, sharded: limit.Config().Shards > 1})
	return limit.Key(key)
}

// redefined is like of, and says that the limit has these numbers from now on: for another version of the program, with a Limiter of
// its own.
func (t *trial) redefined(limit ratelimit.Limit, key string) ratelimit.Request {
	t.limiter = &ratelimit.Limiter{Clock: t.memory.Now}
	t.of(limit, key)
	for i, u := range t.used {
		if u.name == limit.Name() && u.key == key {
			t.used[i].request, t.used[i].sharded = limit.Key(key), limit.Config().Shards > 1
		}
	}
	return limit.Key(key)
}

// verb is a call, to be made on the server and on the model.
type verb[T any] func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (T, error)

// both makes a call on the server and on the model, and wants the same answer.
func (t *trial) both(step string, call verb[ratelimit.Result]) ratelimit.Result {
	r, _ := answers(t, step, call, show)
	return r
}

// answers is both for an answer of any type, which show puts into words. It reports whether the call was granted.
func answers[T any](t *trial, step string, call verb[T], show func(T) string) (got T, granted bool) {
	t.step = step
	t.steps++
	shard := t.steps
	pick := shardpick.Func(func(n int) (int, int) { return shard % n, shard % n })
	got, err := call(shardpick.With(t.ctx, pick), t.limiter, t.db)
	if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
		t.failed(err)
	}
	want, wantErr := call(shardpick.With(context.WithoutCancel(t.ctx), pick), &ratelimit.Limiter{Clock: t.memory.Now}, t.model)
	if wantErr != nil && !errors.Is(wantErr, ratelimit.ErrDenied) {
		panic(fmt.Errorf("case %q, %s: the model fails: %w", t.c.name, step, wantErr))
	}
	if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(err, wantErr) {
		t.wrong("want %s (%v); came %s (%v)", show(want), wantErr, show(got), err)
	}
	return got, err == nil
}

// show is a result in words.
func show(r ratelimit.Result) string {
	text := "denied"
	if r.OK {
		text = "granted"
	}
	text += fmt.Sprintf(" at %s, retry at %s", instant(r.At), instant(r.RetryAt))
	for i, s := range r.Requests {
		text += fmt.Sprintf(", request %d: ok %v, %v remain, taken %v, refunded %v, reset at %s", i+1, s.OK, s.Remaining, s.Taken, s.Refunded, instant(s.ResetAt))
	}
	return text
}

func instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.999999") }

// grant consumes and wants a grant.
func (t *trial) grant(step string, requests ...ratelimit.Request) ratelimit.Result {
	r := t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return l.Consume(ctx, db, requests...)
	})
	t.want(r.OK, "a grant, came a denial")
	return r
}

// deny consumes and wants a denial.
func (t *trial) deny(step string, requests ...ratelimit.Request) ratelimit.Result {
	r := t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return l.Consume(ctx, db, requests...)
	})
	t.want(!r.OK, "a denial, came a grant")
	return r
}

// reserve reserves and wants a reservation for work that may run after a delay.
func (t *trial) reserve(step string, delay time.Duration, requests ...ratelimit.Request) {
	r, granted := t.reservation(step, requests)
	t.want(granted, "a reservation, came a denial")
	t.want(r.Delay == delay && r.RetryAt.Equal(r.At.Add(delay)), "that the work runs after %v, came %v", delay, r.Delay)
}

// denyReserve reserves and wants a denial.
func (t *trial) denyReserve(step string, requests ...ratelimit.Request) {
	_, granted := t.reservation(step, requests)
	t.want(!granted, "a denial, came a reservation")
}

func (t *trial) reservation(step string, requests []ratelimit.Request) (ratelimit.Reservation, bool) {
	return answers(t, step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Reservation, error) {
		return l.Reserve(ctx, db, requests...)
	}, func(r ratelimit.Reservation) string {
		return fmt.Sprintf("a reservation at %s, to run at %s, %v remain", instant(r.At), instant(r.RetryAt), r.Remaining)
	})
}

// taken is the answer to a Take.
type taken struct {
	n      int
	result ratelimit.Result
}

// take takes up to most tokens and wants n. If n is 0, it wants a denial.
func (t *trial) take(step string, most, n int, requests ...ratelimit.Request) {
	r, granted := answers(t, step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (r taken, err error) {
		r.n, r.result, err = l.Take(ctx, db, most, requests...)
		return r, err
	}, func(r taken) string { return fmt.Sprintf("%d taken, %s", r.n, show(r.result)) })
	t.want(granted == (n > 0) && r.n == n, "%d taken, came %d", n, r.n)
}

// balances reads balances, and wants what remains.
func (t *trial) balances(step string, remaining float64, requests ...ratelimit.Request) []ratelimit.Balance {
	all, _ := answers(t, step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) ([]ratelimit.Balance, error) {
		return l.Balance(ctx, db, requests...)
	}, func(all []ratelimit.Balance) (text string) {
		for i, b := range all {
			text += fmt.Sprintf("balance %d at %s: %v of %v remain, %v used, next at %s, reset at %s, ", i+1, instant(b.At), b.Remaining, b.Capacity, b.Used,
				instant(b.NextAt), instant(b.ResetAt))
		}
		return text
	})
	for _, b := range all {
		t.want(near(b.Remaining, remaining), "%v tokens, came %v", remaining, b.Remaining)
	}
	return all
}

func (t *trial) check(step string, requests ...ratelimit.Request) ratelimit.Result {
	return t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return l.Check(ctx, db, requests...)
	})
}

func (t *trial) charge(step string, requests ...ratelimit.Request) ratelimit.Result {
	return t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return l.Charge(ctx, db, requests...)
	})
}

func (t *trial) refund(step string, receipt ratelimit.Receipt, requests ...ratelimit.Request) ratelimit.Result {
	return t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return l.Refund(ctx, db, receipt, requests...)
	})
}

func (t *trial) reset(step string, requests ...ratelimit.Request) {
	t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return ratelimit.Result{}, l.Reset(ctx, db, requests...)
	})
}

func (t *trial) pause(step string, lasts time.Duration, request ratelimit.Request) {
	t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		_, err := l.Pause(ctx, db, lasts, request)
		return ratelimit.Result{}, err
	})
}

func (t *trial) resume(step string, request ratelimit.Request) {
	t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return ratelimit.Result{}, l.Resume(ctx, db, request)
	})
}

func (t *trial) move(step string, from, to ratelimit.Request) {
	t.both(step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		return ratelimit.Result{}, l.Move(ctx, db, from, to)
	})
}

// want ends the trial unless what the script expects is so. (The model could be wrong as the server is.)
func (t *trial) want(so bool, format string, args ...any) {
	if !so {
		t.wrong("want "+format, args...)
	}
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-6 }

// balance reads what a limit and key have, on the pool. Where that is refused, a charge of nothing says it, too.
func (t *trial) balance(ctx context.Context, u use) (float64, error) {
	all, err := t.limiter.Balance(ctx, t.s.pool, u.request)
	if err == nil {
		return all[0].Remaining, nil
	}
	if !isClear(err) || u.sharded {
		return 0, err
	}
	r, err := t.limiter.Charge(ctx, t.s.pool, u.request.Count(0))
	return r.Remaining, err
}

// stored compares what is stored with the model: after a refusal, too, nothing may have been taken.
func (t *trial) stored(ctx context.Context, v verdict) {
	t.ctx = ctx
	if v != refused && t.afterwards != nil {
		t.afterwards(ctx)
	}
	if t.unmodelled {
		return
	}
	t.step = "the balances afterwards"
	for _, u := range t.used {
		all, err := new(ratelimit.Limiter).Balance(context.Background(), t.memory, u.request)
		if err != nil {
			panic(err)
		}
		want := all[0]
		got, err := t.balance(ctx, u)
		if err != nil {
			o := fromError(ctx, t.step, err)
			if o.Verdict == refused {
				t.note = join(t.note, "the balance afterwards could not be read: "+o.Detail)
				return
			}
			t.failed(err)
		}
		if !near(got, want.Remaining) {
			after := "COMMIT"
			switch {
			case v == refused:
				after = "the refusal"
			case t.rollback:
				after = "ROLLBACK"
			}
			t.wrong("want a balance of %v after %s, came %v (limit %s)", want.Remaining, after, got, u.name[len(t.s.prefix)+1:])
		}
	}
}

// clean deletes the rows of the trial.
func (t *trial) clean(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, t.s.timeout)
	defer cancel()
	var next counter
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := next.next(); i < int64(len(t.used)); i = next.next() {
				if err := new(ratelimit.Limiter).Reset(ctx, t.s.pool, t.used[i].request); err != nil {
					t.s.leave(fmt.Sprintf("rows of limits named %s..., since Reset failed: %s", t.s.prefix, errorText(err)))
				}
			}
		})
	}
	wg.Wait()
	for _, sql := range t.cleanups {
		if _, err := t.s.pool.Exec(ctx, sql); err != nil {
			t.s.leave(fmt.Sprintf("%q failed: %s", sql, errorText(err)))
		}
	}
}
