package world_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// This file has the calls of a world that wait for their row: callers give them up and do what the docs advise, or get an answer that is
// older than others. The world plays one step at a time, so such a step locks the row itself.

// lossyPool is a pool whose next cancel request is lost, if lose says so: the server goes on with the statement.
type lossyPool struct {
	*pgxpool.Pool
	name string // of the application
	lose atomic.Bool
}

func (w *everything) newLossyPool() *lossyPool {
	p := &lossyPool{name: fmt.Sprintf("world %x", rand.Uint64())}
	config, err := pgxpool.ParseConfig(w.url)
	w.must(err)
	config.MaxConns = 6
	config.ConnConfig.RuntimeParams["application_name"] = p.name
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if p.lose.CompareAndSwap(true, false) {
			return nil, errors.New("a world loses this request")
		}
		return dial(ctx, network, addr)
	}
	p.Pool, err = pgxpool.NewWithConfig(w.Context(), config)
	w.must(err)
	w.Cleanup(p.Close)
	return p
}

// connected has connections for a step: one that is made meanwhile could be taken for a cancel request.
func (p *lossyPool) connected(ctx context.Context) error {
	for range 3 {
		conn, err := p.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
	}
	return nil
}

// backends counts the backends of the pool that wait for a lock, or that still run something.
func (w *everything) backends() (waiting, active int) {
	w.must(w.pool.QueryRow(w.Context(), "SELECT count(*) FILTER (WHERE wait_event_type = 'Lock'), count(*) FILTER (WHERE state = 'active') FROM pg_stat_activity WHERE application_name = $1",
		w.lossy.name).Scan(&waiting, &active))
	return waiting, active
}

// until waits for a condition, for patience or until done is closed.
func (w *everything) until(patience time.Duration, done <-chan struct{}, is func() bool) bool {
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if is() {
			return true
		}
		select {
		case <-done:
			return false
		case <-time.After(time.Millisecond):
		}
	}
	return false
}

// locked runs f while another transaction has locked the rows of a key, also those that are not there. A key without rows, the slots of a
// key and the tokens are alike.
func (w *everything) locked(name string, key *string, f func()) {
	tx, err := w.pool.Begin(w.Context())
	w.must(err)
	defer func() { w.must(tx.Rollback(context.WithoutCancel(w.Context()))) }()
	_, err = tx.Exec(w.Context(), `INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts)
		SELECT $1, coalesce($2, ''), shard, 4, 0, now() FROM generate_series(0, 3) AS shard ON CONFLICT DO NOTHING`, name, key)
	w.must(err)
	_, err = tx.Exec(w.Context(), "SELECT FROM ratelimit.limits WHERE name = $1 AND key = coalesce($2, '') ORDER BY shard FOR UPDATE", name, key)
	w.must(err)
	f()
}

// givenUp makes a call whose caller gives it up while it waits for its row, does what is advised then, and lets both go on. waited: it has.
func (w *everything) givenUp(name string, key *string, lost bool, call, advised func(ctx context.Context, db ratelimit.DB) error) (waited bool, callErr, err error) {
	ctx, cancel := context.WithCancel(w.Context())
	defer cancel()
	w.must(w.lossy.connected(w.Context()))
	called, ended := make(chan struct{}), make(chan struct{})
	w.locked(name, key, func() {
		go func() { defer close(called); callErr = call(ctx, w.lossy) }()
		waited = w.until(harness.Patience, called, func() bool { waiting, _ := w.backends(); return waiting > 0 })
		w.lossy.lose.Store(waited && lost)
		cancel()
		if !waited {
			<-called
			return
		}
		go func() {
			defer close(ended)
			if <-called; advised != nil {
				err = advised(w.Context(), w.lossy)
			}
		}()
		w.until(100*time.Millisecond, ended, func() bool { waiting, _ := w.backends(); return waiting > 1 })
	})
	w.lossy.lose.Store(false)
	if waited {
		<-ended
		if !w.until(harness.Patience, nil, func() bool { _, active := w.backends(); return active == 0 }) {
			w.failf("a call that was given up does not end")
		}
	}
	return waited, callErr, err
}

// giveUp is a step in which a caller gives a call up while it waits, and does what the docs advise: whatever became of the call, nobody
// holds what nobody works on, and nothing counts twice.
func (w *everything) giveUp(p *worldProgram, s worldStep, r *rand.Rand) {
	id, lost := worldKey{s.Limit, s.Key}, r.IntN(3) > 0
	what := harness.OneOf(r, "hold", "hold", "hold", "during", "once", "consume", "settle", "release")
	var h *worldHold
	if w.looks(); what == "settle" || what == "release" {
		i := slices.IndexFunc(w.holds, func(h *worldHold) bool {
			return h.ended == "" && w.inTime(h, h.tokens) && (!h.slot || w.inTime(h, h.inSlots))
		})
		if i < 0 {
			return
		}
		h = w.holds[i]
		id = h.of
	}
	before := w.balances(p, id)[0]
	if w.uneven(before) || len(w.expired(id)) > 0 {
		return
	}
	count := s.Count
	if count <= 0 || count > before.Remaining {
		count = min(1, before.Remaining)
	}
	if h == nil && (count < 1e-15 || !counts(before)) {
		return
	}
	requests := []ratelimit.Request{w.request(id.limit, id.key).Count(count)}
	spare := -count
	if h != nil {
		used := 0.0
		if what == "settle" {
			used = h.count * harness.OneOf(r, 0, 0.5, 1, 1.5)
		}
		spare = h.count - used
		requests[0] = requests[0].Count(used)
	}
	slot := h != nil && h.slot || h == nil && (what == "hold" || what == "during") && r.IntN(2) == 0
	if slot {
		requests = append(requests, w.slots(id.key))
	}
	name := w.limits[id.limit].Name()
	if slot && r.IntN(3) == 0 {
		name = worldSlotsLimit.Name()
	}
	job, ttl := fmt.Sprintf("job %d.%d|%d", id.limit, id.key, 2*r.IntN(2)+1-bit(slot)), time.Hour
	if what == "hold" && r.IntN(4) == 0 {
		job, ttl = fmt.Sprintf("job %d.%d|4", id.limit, id.key), ratelimit.Forever
	}
	if what != "once" && h == nil && slices.ContainsFunc(w.holds, func(h *worldHold) bool { return h.id == job && h.ended == "" }) {
		return
	}
	by := harness.OneOf(r, "pool", "pool", "tx", "sql")
	var token string
	var call, advised func(ctx context.Context, db ratelimit.DB) error
	repeat := func(again func(ctx context.Context, db ratelimit.DB) error) { call, advised = again, again }
	switch what {
	case "hold":
		call = func(ctx context.Context, db ratelimit.DB) error {
			held, err := p.asks.Hold(ctx, db, job, ttl, requests...)
			token = held.Token
			return err
		}
		advised = func(ctx context.Context, db ratelimit.DB) error { // as deferred: docs/holds.md
			varies := w.limits[id.limit].Config().Varies != ""
			switch {
			case token == "":
				return nil
			case by == "tx":
				return p.asks.InTx(ctx, w.lossy.Pool, func(ctx context.Context, tx pgx.Tx) error {
					return harness.Second(p.asks.Release(ctx, tx, token, zeroed(requests)...))
				}, ratelimit.Isolation(harness.Levels[s.Level]))
			case by == "sql" && !varies && w.hasClock:
				var err error
				w.session(func(conn *pgx.Conn) {
					for _, name := range []string{w.limits[id.limit].Name(), worldSlotsLimit.Name()}[:len(requests)] {
						key := w.stored(id.key)
						_, failed := conn.Exec(ctx, "SELECT ratelimit.release($1, $2, $3, global => $4)", name, key, token, key == nil)
						err = errors.Join(err, failed)
					}
				})
				// The mark of an id without an end is for older statements: by the server's clock, and not by the session's.
				_, failed := w.pool.Exec(ctx, "UPDATE ratelimit.holds SET taken_at = clock_timestamp() WHERE state = 'released'")
				return errors.Join(err, failed)
			case varies, ttl < 0, r.IntN(2) == 0:
				return harness.Second(p.asks.Release(ctx, db, token, zeroed(requests)...))
			}
			return harness.Second(p.asks.Release(ctx, db, token))
		}
	case "during":
		call = func(ctx context.Context, _ ratelimit.DB) error {
			return p.asks.During(ctx, w.lossy.Pool, job, ttl, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) {
				return zeroed(requests), harness.ErrRollBack
			}, requests...)
		}
	case "once":
		repeat(func(ctx context.Context, db ratelimit.DB) error {
			_, _, err := p.asks.Once(ctx, db, fmt.Sprintf("event %d", w.step), ttl, requests...)
			return err
		})
	case "consume":
		call = func(ctx context.Context, db ratelimit.DB) error {
			_, err := p.asks.Consume(ctx, db, requests...)
			return err
		}
	case "settle":
		repeat(func(ctx context.Context, db ratelimit.DB) error {
			_, err := p.asks.Settle(ctx, db, h.token, requests...)
			return err
		})
	default:
		repeat(func(ctx context.Context, db ratelimit.DB) error {
			return harness.Second(p.asks.Release(ctx, db, h.token, requests...))
		})
	}
	waited, callErr, err := w.givenUp(name, w.stored(id.key), lost, call, advised)
	text := fmt.Sprintf("a %s %q of %v of %v, for %v, with a slot: %t, waited for a row of %s: %t, was given up, lost: %t: %v, and then by %s: %v", what, job, count, id, ttl, slot, name, waited, lost, callErr, by, err)
	if waited {
		w.meets(id, "give-up")
		delete(w.log, id)
	}
	if harness.Denied(err) {
		err = nil
	}
	if waited && err != nil {
		w.failf("%s", text)
	}
	if h != nil && (waited || callErr == nil) {
		h.ended, h.when = map[string]string{"settle": "settled", "release": "released"}[what], w.clock.At
	}
	after := w.balances(p, id)[0]
	back, slack := after.Remaining-before.Remaining, w.slack(before)+w.slack(after)+1e-9*count
	plain := before.Decides == "definition" && !w.clock.At.Before(w.latest) && !w.liesAhead(id.limit, w.stored(id.key), w.clock.At)
	switch what {
	case "hold", "during":
		var held int
		w.must(w.pool.QueryRow(w.Context(), "SELECT count(*) FROM ratelimit.holds WHERE id = $1 AND state = 'held' AND until > $2", job, w.clock.At).Scan(&held))
		if held > 0 || plain && math.Abs(back) > slack {
			w.failf("%s: %d rows hold, and %v came back", text, held, back)
		}
	case "once":
		if taken := back < -slack; plain && taken && math.Abs(back-spare) > slack {
			w.failf("%s: %v came back", text, back)
		}
	case "consume":
		if math.Abs(back) > slack && math.Abs(back-spare) > slack {
			w.failf("%s: %v came back", text, back)
		}
	default:
		if counts(before) && (back > max(spare, 0)+slack || back < min(spare, 0)-slack) {
			w.failf("%s: %v came back of %v", text, back, spare)
		}
	}
}

func bit(is bool) int {
	if is {
		return 1
	}
	return 0
}

// zeroed are requests of which nothing was used.
func zeroed(requests []ratelimit.Request) (none []ratelimit.Request) {
	for _, r := range requests {
		none = append(none, r.Count(0))
	}
	return none
}

// queue is a step in which a call waits for its row while another program takes later, before it or after it: both are granted what is there.
// What the first gives back is what it took, less at most the refill while it waited (docs/refunds.md). Then there is no more than without it.
func (w *everything) queue(p *worldProgram, s worldStep, r *rand.Rand) {
	id, at := worldKey{s.Limit, s.Key}, w.clock.At
	wait := max(s.For, 0)
	w.looks()
	before, later := w.balances(p, id)[0], w.balanceAt(p, at.Add(wait), id)
	if before.Decides != "definition" || later.Decides != "definition" || !counts(before) || w.resharded || w.limits[id.limit].Config().Shards > 1 ||
		len(w.pending(id)) > 0 || len(w.expired(id)) > 0 || w.expires(at.Add(wait), id) || w.liesAhead(id.limit, w.stored(id.key), w.clock.At) {
		return
	}
	count := min(1, before.Remaining/2)
	if count < 1e-12 {
		return
	}
	request, hold, overtaken := w.request(id.limit, id.key).Count(count), wait < 366*24*time.Hour && r.IntN(2) == 0, r.IntN(2) == 0
	var first ratelimit.Result
	var held ratelimit.Held
	var firstErr, secondErr error
	done := make(chan struct{})
	tx, err := w.pool.Begin(w.Context())
	w.must(err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(w.Context())) }()
	_, secondErr = p.asks.Consume(w.Context(), tx, request.Count(1e-15)) // the row is there, and locked
	w.must(secondErr)
	go func() {
		defer close(done)
		if hold {
			held, firstErr = p.asks.Hold(w.Context(), w.lossy, fmt.Sprintf("queued %d", w.step), 366*24*time.Hour, request)
		} else {
			first, firstErr = p.asks.Consume(w.Context(), w.lossy, request)
		}
	}()
	if !w.until(harness.Patience, done, func() bool { waiting, _ := w.backends(); return waiting > 0 }) {
		w.failf("a call does not wait for its row: %v", firstErr)
	}
	w.flush()
	w.clock.Advance(wait)
	w.latest = harness.MaxTime(w.latest, w.clock.At)
	if overtaken {
		_, secondErr = p.asks.Consume(w.Context(), tx, request)
	}
	w.must(tx.Commit(w.Context()))
	<-done
	if !overtaken {
		_, secondErr = p.asks.Consume(w.Context(), w.pool, request)
	}
	what := fmt.Sprintf("two calls for %v each of %v, of which %v were there, and later %v, %v apart, the later one first: %t, a hold: %t", count, id, before.Remaining, later.Remaining, wait, overtaken, hold)
	if firstErr != nil || secondErr != nil {
		w.failf("%s: %v, %v", what, firstErr, secondErr)
	}
	w.meets(id, "queue")
	delete(w.log, id)
	after := w.balances(p, id)[0]
	slack := w.slack(before) + w.slack(later) + 1e-9*count + 1e-14
	if least := later.Remaining - 2*count; after.Remaining < least-slack || overtaken && after.Remaining > least+slack {
		w.failf("%s: %v are left, %v later", what, after.Remaining, wait)
	}
	if hold {
		w.must(harness.Second(p.asks.Release(w.Context(), w.lossy, held.Token, request.Count(0))))
	} else {
		_, err := p.asks.Refund(w.Context(), w.pool, first.Receipt(), request)
		w.must(err)
	}
	end := w.balances(p, id)[0]
	back, refilled := end.Remaining-after.Remaining, 0.0
	switch c := w.own(id.limit, id.key).Config(); {
	case c.Kind == "token bucket":
		refilled = *c.Rate * float64(wait) / float64(harness.Period(c))
	case !before.ResetAt.Equal(after.ResetAt): // the window is over
		refilled = count
	}
	if back < count-refilled-slack || end.Remaining > later.Remaining-count+slack {
		w.failf("%s: %v are left, and %v came back at once", what, after.Remaining, back)
	}
}

// worldScramble is a limit of its own: nobody holds its slot when a step begins or ends.
var worldScramble = ratelimit.Slots("scramble", 1)

// scramble is a step in which callers want a slot at once, again and again: each denial says when there is one, since all holds end.
func (w *everything) scramble(p *worldProgram, s worldStep) {
	request := worldScramble.Key(w.keys[s.Key]...)
	if w.keys[s.Key] == nil {
		request = worldScramble.Global()
	}
	var mu sync.Mutex
	var failed []string
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for j := range 12 {
				held, err := p.asks.Hold(w.Context(), w.pool, fmt.Sprintf("scramble %d %d", i, j), time.Hour, request)
				denial, is := errors.AsType[*ratelimit.DeniedError](err)
				if err == nil {
					err = harness.Second(p.asks.Release(w.Context(), w.pool, held.Token))
				}
				if err != nil && !is || is && (denial.RetryAt.IsZero() || denial.RetryAt.Before(w.clock.At)) {
					mu.Lock()
					failed = append(failed, fmt.Sprintf("%v: %+v", err, denial))
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	for i := range w.limits {
		w.meets(worldKey{i, s.Key}, "scramble")
	}
	if failed != nil {
		w.failf("a scramble for a slot: %v", failed)
	}
}
