package world_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
	"github.com/txlimit/txlimit/ratelimit/rpclimit"
)

// worldAnswer is the answer to a call, whatever the way. What the way does not tell is zero.
type worldAnswer struct {
	granted, never bool
	permanent      bool
	retryAt        time.Time     // of a denial
	retryAfter     time.Duration // of a denial that does not tell retryAt; whole: rounded up to seconds
	whole          bool
	taken          float64
	runAt          time.Time
	reason         ratelimit.Reason
	receipt        ratelimit.Receipt
	result         ratelimit.Result
	shown          string // the header field RateLimit
	failed         error  // no decision
}

func (t worldAnswer) String() string {
	switch {
	case t.failed != nil:
		return "failed: " + t.failed.Error()
	case t.granted:
		return fmt.Sprintf("granted, took %v, runs at %v", t.taken, t.runAt)
	case t.never:
		return "never"
	case t.permanent:
		return "denied for good"
	}
	return fmt.Sprintf("denied until %v or for %v", t.retryAt, t.retryAfter)
}

// agrees reports whether two answers at an instant are the same, as far as both tell. Instants may be apart by what rounding forgives if
// the rows are of another number of shards than the limit.
func (w *everything) agrees(p *worldProgram, ids []worldKey, t, other worldAnswer) bool {
	now, within := w.clock.At, time.Duration(0)
	for _, at := range []time.Time{t.retryAt, other.retryAt, t.runAt, other.runAt} {
		if w.resharded && at.After(now) && at.Year() < 9990 {
			within = max(within, at.Sub(w.early(p, at, ids...)))
		}
	}
	return t.agrees(other, now, within)
}

func (t worldAnswer) agrees(other worldAnswer, now time.Time, within time.Duration) bool {
	if t.granted != other.granted || t.never != other.never || t.permanent != other.permanent {
		return false
	}
	if t.granted {
		return harness.Near(t.taken, other.taken) && (t.runAt.IsZero() || other.runAt.IsZero() || t.runAt.Sub(other.runAt).Abs() <= within)
	}
	if t.never || t.permanent {
		return true
	}
	if t.retryAt.IsZero() {
		t, other = other, t
	}
	switch after := t.retryAt.Sub(now); {
	case !other.retryAt.IsZero():
		return t.retryAt.Sub(other.retryAt).Abs() <= within
	case other.whole:
		return math.Abs(math.Ceil(after.Seconds())-other.retryAfter.Seconds()) <= 1e-6*after.Seconds()+1+within.Seconds() && other.retryAfter.Seconds() > after.Seconds()-1e-3-within.Seconds()
	default:
		return (other.retryAfter - min(after, math.MaxInt64/2)).Abs() <= within
	}
}

// answerOf makes an answer of what a verb has returned.
func answerOf(result ratelimit.Result, err error) worldAnswer {
	t := worldAnswer{result: result}
	exceeded, denied := errors.AsType[*ratelimit.DeniedError](err)
	switch {
	case errors.Is(err, ratelimit.ErrExceedsCapacity):
		t.never = true
	case denied:
		t.result, t.permanent, t.retryAt, t.reason = harness.ResultIn(exceeded), exceeded.RetryAt.IsZero(), exceeded.RetryAt, exceeded.Reason
	case err != nil:
		t.failed = err
	default:
		t.granted, t.receipt, t.runAt = true, result.Receipt(), result.At
		if len(result.Requests) > 0 {
			t.taken = result.Requests[0].Taken
		}
	}
	return t
}

// shownTokens finds the tokens in the header field RateLimit.
var shownTokens = regexp.MustCompile(`;r=([0-9]+)`)

// worldPatience is the deadline of a Wait. Nothing of a world sleeps: what could be there before is not waited for.
const worldPatience = harness.Patience

// counted are requests for a count each.
func counted(count float64, requests []ratelimit.Request) (all []ratelimit.Request) {
	for _, r := range requests {
		all = append(all, r.Count(count))
	}
	return all
}

// asked calls a verb on a handle, for a count of each request.
func (w *everything) asked(ctx context.Context, p *worldProgram, db ratelimit.DB, verb string, count float64, requests ...ratelimit.Request) worldAnswer {
	if verb != "take" {
		requests = counted(count, requests)
	}
	switch verb {
	case "reserve":
		r, err := p.limits.Reserve(ctx, db, requests...)
		t := answerOf(ratelimit.Result{OK: true, At: r.At, Requests: r.Requests}, err)
		if err == nil {
			t.receipt, t.runAt = r.Receipt(), r.RetryAt
			if r.Delay != r.RetryAt.Sub(r.At) {
				w.failf("a reservation at %v for %v is after %v", r.At, r.RetryAt, r.Delay)
			}
		}
		return t
	case "take":
		n, result, err := p.limits.Take(ctx, db, max(1, int(count)), requests...)
		t := answerOf(result, err)
		t.taken = float64(n)
		return t
	case "wait":
		ctx, cancel := context.WithTimeout(ctx, worldPatience)
		defer cancel()
		return answerOf(p.limits.Wait(ctx, db, requests[0]))
	case "check":
		return answerOf(p.limits.Check(ctx, db, requests...))
	}
	return answerOf(p.limits.Consume(ctx, db, requests...))
}

// try makes a call at an instant, and rolls it back.
func (w *everything) try(p *worldProgram, now time.Time, verb string, count float64, requests ...ratelimit.Request) (t worldAnswer) {
	before := w.clock.At
	w.clock.At = now
	defer func() { w.clock.At = before }()
	if verb != "check" { // checks are no denials, and not counted
		p = &worldProgram{limits: p.asks}
	}
	w.must(rolledBack(w.Context(), w.pool, func(tx pgx.Tx) { t = w.asked(w.Context(), p, tx, verb, count, requests...) }))
	if t.failed != nil {
		w.failf("%s at %v: %v", verb, now, t.failed)
	}
	return t
}

// harness.ByHand asks the SQL functions, without numbers.
func (w *everything) byHand(db ratelimit.DB, verb string, i, k int, count float64) (t worldAnswer) {
	name := map[string]string{"consume": "try", "reserve": "reserve", "take": "take"}[verb]
	var retryAt *time.Time
	var taken *float64
	if verb == "take" {
		count = max(1, math.Floor(count))
	}
	err := db.QueryRow(w.Context(), "SELECT granted, taken, retry_at FROM ratelimit._by_hand($1, $2, $3, count => $4, most => $4, global => $5, now => $6)",
		name, w.limits[i].Name(), w.stored(k), count, w.stored(k) == nil, w.clock.At).Scan(&t.granted, &taken, &retryAt)
	switch harness.SQLState(err) {
	case "":
		w.must(err)
		if t.granted {
			if t.taken = count; verb == "take" && taken != nil {
				t.taken = *taken
			}
			if verb == "reserve" && retryAt != nil {
				t.runAt = *retryAt
			}
			return t
		}
	case "22023":
		t.never = true
		return t
	case "PT429":
		pgErr, _ := errors.AsType[*pgconn.PgError](err)
		var detail struct {
			RetryAt *time.Time `json:"retry_at"`
		}
		w.must(json.Unmarshal([]byte(pgErr.Detail), &detail))
		retryAt = detail.RetryAt
	default:
		t.failed = err
		return t
	}
	if t.permanent = retryAt == nil; retryAt != nil {
		t.retryAt = *retryAt
	}
	return t
}

// tryByHand asks the SQL functions, and rolls it back.
func (w *everything) tryByHand(verb string, id worldKey, count float64) (t worldAnswer) {
	_ = rolledBack(w.Context(), w.pool, func(tx pgx.Tx) { t = w.byHand(tx, verb, id.limit, id.key, count) })
	return t
}

// allByHand wants ratelimit.consume_all to answer on a copy as the library does.
func (w *everything) allByHand(ids []worldKey, count float64, want worldAnswer, what string) {
	var requests []map[string]any
	for _, id := range ids {
		if w.limits[id.limit].Config().Varies != "" {
			return
		}
		request := map[string]any{"name": w.limits[id.limit].Name(), "count": count}
		if key := w.stored(id.key); key != nil {
			request["key"] = *key
		} else {
			request["global"] = true
		}
		requests = append(requests, request)
	}
	text, err := json.Marshal(requests)
	w.must(err)
	var got worldAnswer
	err = pgx.BeginFunc(w.Context(), w.pool, func(tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(w.Context(), "SELECT count(*) FROM ratelimit._all($1::text::jsonb, $2)", string(text), w.clock.At).Scan(&n); err != nil {
			return err
		}
		return harness.ErrRollBack
	})
	got.taken = count
	switch pgErr, _ := errors.AsType[*pgconn.PgError](err); {
	case errors.Is(err, harness.ErrRollBack):
		got.granted = true
	case harness.SQLState(err) == "22023":
		got.never = true
	case harness.SQLState(err) == "PT429":
		var detail struct {
			RetryAt *time.Time `json:"retry_at"`
		}
		w.must(json.Unmarshal([]byte(pgErr.Detail), &detail))
		if got.permanent = detail.RetryAt == nil; detail.RetryAt != nil {
			got.retryAt = *detail.RetryAt
		}
	default:
		w.failf("%s: ratelimit.consume_all: %v", what, err)
	}
	if got.granted != want.granted || got.never != want.never || want.reason == ratelimit.ReasonQuota && !w.agrees(w.programs[0], ids, got, want) { // after a block, SQL reads the other rows, too
		w.failf("%s: ratelimit.consume_all says %v, the library %v", what, got, want)
	}
}

// way makes the call of a step in its way. committed: what was taken stays.
func (w *everything) way(ctx context.Context, p *worldProgram, s worldStep, count float64, requests ...ratelimit.Request) (t worldAnswer, committed bool) {
	committed = true
	end := func() error {
		if s.Rollback {
			committed = false
			return harness.ErrRollBack
		}
		return nil
	}
	ended := func(err error) {
		if err != nil && !errors.Is(err, harness.ErrRollBack) {
			w.failf("%s: %v", s.Way, err)
		}
	}
	level := ratelimit.Isolation(harness.Levels[s.Level])
	switch s.Way {
	case "tx":
		tx, err := w.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: harness.Levels[s.Level]})
		w.must(err)
		t = w.asked(ctx, p, tx, s.Do, count, requests...)
		if end() != nil {
			w.must(tx.Rollback(ctx))
		} else {
			w.must(tx.Commit(ctx))
		}
	case "intx":
		err := p.limits.InTx(ctx, w.pool, func(ctx context.Context, tx pgx.Tx) error {
			t = w.asked(ctx, p, tx, s.Do, count, requests...)
			return end()
		}, level, ratelimit.Hot(requests...))
		if !errors.Is(err, harness.ErrRollBack) {
			w.must(err)
		}
	case "insqltx":
		err := p.limits.InSQLTx(ctx, w.sqlDB, func(ctx context.Context, tx *sql.Tx) error {
			t = w.asked(ctx, p, ratelimit.SQL(tx), s.Do, count, requests...)
			return end()
		}, level)
		if !errors.Is(err, harness.ErrRollBack) {
			w.must(err)
		}
	case "sql":
		t = w.asked(ctx, p, ratelimit.SQL(w.sqlDB), s.Do, count, requests...)
	case "coalescer":
		t = w.asked(ctx, p, p.coalescer, s.Do, count, requests...)
	case "canceled":
		ended, cancel := context.WithCancel(ctx)
		cancel()
		t, committed = w.asked(ended, p, w.pool, s.Do, count, requests...), false
	case "batch":
		var batch pgx.Batch
		result, err := p.limits.QueueConsume(ctx, &batch, counted(count, requests)...)
		if err == nil {
			if s.Rollback {
				batch.Queue("SELECT 1/0")
				committed = false
			}
			if err = p.limits.SendTx(ctx, w.pool, &batch, level); s.Rollback && harness.SQLState(err) == "22012" {
				err = nil
			}
		}
		if result == nil {
			result = new(ratelimit.Result)
		}
		t = answerOf(*result, err)
	case "by hand":
		err := pgx.BeginTxFunc(ctx, w.pool, pgx.TxOptions{IsoLevel: harness.Levels[s.Level]}, func(tx pgx.Tx) error {
			t = w.byHand(tx, s.Do, s.Limit, s.Key, count)
			if t.granted {
				return end()
			}
			return harness.ErrRollBack
		})
		ended(err)
	case "each":
		db, end := ratelimit.DB(p.coalescer), func() error { return nil }
		if s.Level > 0 {
			tx, err := w.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: harness.Levels[s.Level]})
			w.must(err)
			if db, end = tx, func() error { return tx.Commit(ctx) }; s.Rollback {
				committed, end = false, func() error { return tx.Rollback(ctx) }
			}
		}
		results, err := harness.InOrder(p.limits.ConsumeEach(ctx, db, counted(count, requests)...))
		w.must(end())
		if err != nil {
			return worldAnswer{failed: err}, false
		}
		if t = answerOf(results[0], nil); !results[0].OK {
			t = worldAnswer{result: results[0], retryAt: results[0].RetryAt, permanent: results[0].RetryAt.IsZero()}
		}
	case "middleware":
		m := httplimit.Middleware{Limiter: p.limits, DB: p.coalescer, Requests: harness.Always(counted(count, requests)...)}
		recorder := httptest.NewRecorder()
		m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(recorder, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
		t = w.answerOfHTTP(recorder.Result(), count)
	case "rpc":
		i := rpclimit.Interceptor{Limiter: p.limits, DB: w.pool, Requests: func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) {
			return counted(count, requests), nil
		}}
		_, err := i.UnaryServer()(ctx, nil, &grpc.UnaryServerInfo{FullMethod: harness.MethodSay}, func(context.Context, any) (any, error) { return nil, nil })
		t = w.answerOfRPC(status.Convert(err), count)
	default:
		t = w.asked(ctx, p, w.pool, s.Do, count, requests...)
	}
	return t, committed
}

// answerOfHTTP is what a client of the middleware learns.
func (w *everything) answerOfHTTP(response *http.Response, count float64) (t worldAnswer) {
	seconds := response.Header.Get("Retry-After")
	switch response.StatusCode {
	case http.StatusOK:
		t.granted, t.taken, t.shown = true, count, response.Header.Get("RateLimit")
	case http.StatusBadRequest:
		t.never = true
	case http.StatusForbidden:
		t.permanent = true
	case http.StatusTooManyRequests:
		n, err := strconv.ParseInt(seconds, 10, 64)
		if err != nil || n < 1 {
			w.failf("Retry-After %q", seconds)
		}
		t.whole, t.retryAfter = true, time.Duration(min(float64(n)*1e9, math.MaxInt64))
		if float64(n)*1e9 > math.MaxInt64 {
			t.retryAfter = math.MaxInt64
		}
		return t
	default:
		w.failf("the middleware answered %d", response.StatusCode)
	}
	if seconds != "" {
		w.failf("%d with Retry-After %q", response.StatusCode, seconds)
	}
	return t
}

// answerOfRPC is what a client of the interceptor learns.
func (w *everything) answerOfRPC(s *status.Status, count float64) (t worldAnswer) {
	switch s.Code() {
	case codes.OK:
		t.granted, t.taken = true, count
	case codes.PermissionDenied:
		t.permanent = true
	case codes.ResourceExhausted:
		t.never = true
		for _, detail := range s.Details() {
			if info, ok := detail.(*errdetails.RetryInfo); ok {
				t.never, t.retryAfter = false, info.RetryDelay.AsDuration()
			}
		}
	default:
		w.failf("the interceptor answered %v", s)
	}
	return t
}
