package holds_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// slotsAreTheirHolds wants that each row of slots is minus what is held.
func slotsAreTheirHolds(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	if wrong := harness.Scan[int](t, db, `SELECT count(*) FROM (
		SELECT name, key, sum(count) AS held FROM ratelimit.holds WHERE state = 'held' AND unit = 'slots' GROUP BY 1, 2) AS h
		FULL JOIN (SELECT name, key, -value AS used FROM ratelimit.limits WHERE name LIKE 'slots%') AS r USING (name, key)
		WHERE coalesce(held, 0) <> coalesce(used, 0)`); wrong != 0 {
		t.Errorf("%d rows of slots are not minus what is held", wrong)
	}
}

// TestHoldsAtMostNLive: at any instant of the database's clock, at most n holds are live, whatever holders die or come late. Every dead
// one comes back, and no id is held twice.
func TestHoldsAtMostNLive(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{"", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			const n, workers, ttl = 3, 8, 150 * time.Millisecond
			pool := harness.NewPool(t, workers+2)
			slots := ratelimit.Slots("slots", n)
			var limits ratelimit.Limiter
			harness.MustExec(t, pool, `CREATE TABLE live (token text PRIMARY KEY, id text NOT NULL, begun timestamptz NOT NULL, ended timestamptz NOT NULL)`)
			var granted, lost, late, repeats atomic.Int64
			began := time.Now()
			goesOn := func() bool { // on a slow machine, until enough has happened
				took := time.Since(began)
				return took < harness.Sized(15*time.Second, time.Second) || took < harness.Patience && (granted.Load() == 0 || repeats.Load() == 0)
			}
			do := func(fn func(ctx context.Context, db ratelimit.DB) error) error {
				if level == "" {
					return fn(t.Context(), pool)
				}
				return limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx) }, ratelimit.Isolation(level))
			}
			var wait sync.WaitGroup
			for w := range workers {
				r := rand.New(rand.NewPCG(uint64(w), 7))
				wait.Go(func() {
					for goesOn() {
						id := fmt.Sprint("job ", r.IntN(12))
						var held ratelimit.Held
						err := do(func(ctx context.Context, db ratelimit.DB) (err error) {
							held, err = limits.Hold(ctx, db, id, ttl, slots.Key("k"))
							return err
						})
						var denial *ratelimit.DeniedError
						switch {
						case errors.As(err, &denial):
							if denial.Reason == ratelimit.ReasonHeld {
								repeats.Add(1)
							}
							time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
							continue
						case err != nil:
							t.Error(err)
							return
						}
						granted.Add(1)
						// It is live until it ends it or, for who dies or comes late, until its time is over.
						if _, err := pool.Exec(t.Context(), "INSERT INTO live VALUES ($1, $2, $3, $4)", held.Token, id, held.Until.Add(-ttl), held.Until); err != nil {
							t.Error(err)
							return
						}
						fate := r.IntN(10)
						switch fate {
						case 0: // dies
							continue
						case 1: // comes late
							time.Sleep(ttl + time.Duration(r.IntN(100))*time.Millisecond)
						default:
							time.Sleep(time.Duration(r.IntN(50)) * time.Millisecond)
						}
						before := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()")
						err = do(func(ctx context.Context, db ratelimit.DB) (err error) {
							if fate > 1 && fate < 6 {
								return harness.Second(limits.Release(ctx, db, held.Token, slots.Key("k")))
							}
							if _, err = limits.Settle(ctx, db, held.Token, slots.Key("k")); err == nil && fate == 1 {
								late.Add(1)
							}
							return err
						})
						if errors.Is(err, ratelimit.ErrHoldLost) && !harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()").Before(held.Until) {
							lost.Add(1)
						} else if err != nil {
							t.Errorf("%v, at %v, of a hold until %v", err, before, held.Until)
							return
						}
						if before.Before(held.Until) {
							if _, err := pool.Exec(t.Context(), "UPDATE live SET ended = $2 WHERE token = $1", held.Token, before); err != nil {
								t.Error(err)
								return
							}
						}
						if fate == 1 || fate >= 6 { // a settled id is refused for a day
							if _, err := pool.Exec(t.Context(), "DELETE FROM ratelimit.holds WHERE id = $1 AND state = 'settled'", id); err != nil {
								t.Error(err)
								return
							}
						}
					}
				})
			}
			wait.Wait()
			if most := harness.Scan[int](t, pool, `SELECT coalesce(max((SELECT count(*) FROM live AS b WHERE b.begun <= a.begun AND b.ended > a.begun)), 0) FROM live AS a`); most > n {
				t.Errorf("%d holds were live at once, of at most %d", most, n)
			}
			if twice := harness.Scan[int](t, pool, `SELECT count(*) FROM live AS a JOIN live AS b ON a.id = b.id AND a.token < b.token AND a.begun < b.ended AND b.begun < a.ended`); twice != 0 {
				t.Errorf("%d times, an id was held twice", twice)
			}
			slotsAreTheirHolds(t, pool)
			time.Sleep(ttl + 50*time.Millisecond)
			if _, err := limits.Hold(t.Context(), pool, "last", time.Minute, slots.Key("k").Count(n)); err != nil {
				t.Errorf("once all is over: %v", err)
			}
			slotsAreTheirHolds(t, pool)
			if granted.Load() == 0 || repeats.Load() == 0 {
				t.Errorf("%d were granted, and %d ids were held", granted.Load(), repeats.Load())
			}
			t.Logf("%d granted, %d ids held, %d lost, %d settled late", granted.Load(), repeats.Load(), lost.Load(), late.Load())
		})
	}
}

func beginAt(t *testing.T, pool *pgxpool.Pool, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// TestHoldsWhoWaitedAsksAgain: of five callers that find five expired holds and wait for one another, each gets a slot.
func TestHoldsWhoWaitedAsksAgain(t *testing.T) {
	pool := harness.NewPool(t, 8)
	slots := ratelimit.Slots("slots", 5).Global()
	var limits ratelimit.Limiter
	for i := range 5 {
		if _, err := limits.Hold(t.Context(), pool, fmt.Sprint("dead ", i), 100*time.Millisecond, slots); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(150 * time.Millisecond)
	tx := beginAt(t, pool, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 5)
	for i := range 5 {
		go func() {
			_, err := limits.Hold(context.Background(), pool, fmt.Sprint("new ", i), time.Minute, slots)
			errs <- err
		}()
	}
	harness.Blocked(t, pool, tx, 5)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	slotsAreTheirHolds(t, pool)
}

// TestHoldsADuplicateTakesNothing: a delivery that is turned away waits for no row, locks none, and writes none, not even one that is rolled back.
// So it does not stop the holder, or anybody, however long its transaction is.
func TestHoldsADuplicateTakesNothing(t *testing.T) {
	pool := harness.NewPool(t, 4)
	for name, r := range map[string]ratelimit.Request{
		"slots": ratelimit.Slots("slots", 5).Key("k"), "bucket": ratelimit.TokenBucket("bucket", 10, time.Hour).Key("k"),
	} {
		var limits ratelimit.Limiter
		held, err := limits.Hold(t.Context(), pool, "a", time.Minute, r)
		if err != nil {
			t.Fatal(err)
		}
		refused := func(ctx context.Context, db ratelimit.DB) {
			t.Helper()
			_, err := limits.Hold(ctx, db, "a", time.Minute, r)
			if denial, ok := errors.AsType[*ratelimit.DeniedError](err); !ok || denial.Reason != ratelimit.ReasonHeld {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, level := range harness.Levels {
			tx := beginAt(t, pool, level)
			refused(t.Context(), tx)
			for _, table := range []string{"ratelimit.limits", "ratelimit.holds"} {
				if _, err := pool.Exec(t.Context(), "SELECT FROM "+table+" FOR UPDATE NOWAIT"); err != nil {
					t.Errorf("%s, %s: %v", name, level, err)
				}
			}
			var xid *string
			err := tx.QueryRow(t.Context(), "SELECT pg_current_xact_id_if_assigned()::text").Scan(&xid)
			if err != nil || xid != nil && level != pgx.Serializable { // which may not look first
				t.Errorf("%s, %s: it has written: %v", name, level, err)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		tx := beginAt(t, pool, pgx.ReadCommitted)
		harness.MustExecIn(t, tx, "SELECT FROM ratelimit.limits FOR UPDATE")
		ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
		defer cancel()
		refused(ctx, pool)
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := harness.Second(limits.Release(t.Context(), pool, held.Token)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHoldsSnapshotBeforeTheHold: above READ COMMITTED, a hold that is newer than the snapshot is 40001 for who settles it, and never lost, of
// rows, of no rows, and of shards.
func TestHoldsSnapshotBeforeTheHold(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, request := range map[string]ratelimit.Request{
			"slots": ratelimit.Slots("slots", 5).Key("k"), "bucket": ratelimit.TokenBucket("bucket", 5, time.Hour).Key("k"),
			"shards": ratelimit.TokenBucket("sharded", 50, time.Hour, ratelimit.Shards(5)).Key("k"), "unlimited": ratelimit.Unlimited("unlimited").Key("k"),
		} {
			for _, first := range []bool{true, false} {
				t.Run(fmt.Sprint(level, name, first), func(t *testing.T) {
					pool := harness.NewPool(t, 3)
					var limits ratelimit.Limiter
					if !first {
						if _, err := limits.Hold(t.Context(), pool, "before", time.Minute, request); err != nil {
							t.Fatal(err)
						}
					}
					tx := beginAt(t, pool, level)
					if _, err := tx.Exec(t.Context(), "SELECT 1 FROM ratelimit.limits"); err != nil {
						t.Fatal(err)
					}
					held, err := limits.Hold(t.Context(), pool, "a", time.Minute, request)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := limits.Settle(t.Context(), tx, held.Token); harness.SQLState(err) != "40001" {
						t.Errorf("Settle: %v, want 40001", err)
					}
					if _, err := limits.Settle(t.Context(), pool, held.Token); err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
}

// TestHoldsLostRollsBack: the transaction that stores the result of a lost hold is not committed, and is usable until then.
func TestHoldsLostRollsBack(t *testing.T) {
	pool := harness.NewPool(t, 2)
	slots := ratelimit.Slots("slots", 1).Global()
	var limits ratelimit.Limiter
	harness.MustExec(t, pool, "CREATE TABLE results (id text)")
	for _, level := range harness.Levels {
		held, err := limits.Hold(t.Context(), pool, "a "+string(level), 100*time.Millisecond, slots)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(110 * time.Millisecond)
		other, err := limits.Hold(t.Context(), pool, "b "+string(level), time.Minute, slots)
		if err != nil {
			t.Fatal(err)
		}
		err = limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO results VALUES ('a')"); err != nil {
				return err
			}
			_, err := limits.Settle(ctx, tx, held.Token, slots)
			if !errors.Is(err, ratelimit.ErrHoldLost) || !strings.Contains(err.Error(), `"slots"`) {
				t.Errorf("%v", err)
			}
			if _, usable := tx.Exec(ctx, "SELECT 1"); usable != nil {
				t.Error(usable)
			}
			return err
		}, ratelimit.Isolation(level))
		if !errors.Is(err, ratelimit.ErrHoldLost) {
			t.Errorf("%v", err)
		}
		if err := harness.Second(limits.Release(t.Context(), pool, other.Token)); err != nil {
			t.Fatal(err)
		}
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM results"); n != 0 {
		t.Errorf("%d results were stored", n)
	}
}

// TestHoldsARollbackTakesNothing: what a transaction held, it held only if it was committed. Also after ROLLBACK TO.
func TestHoldsARollbackTakesNothing(t *testing.T) {
	pool := harness.NewPool(t, 2)
	slots := ratelimit.Slots("slots", 1).Global()
	var limits ratelimit.Limiter
	for _, level := range harness.Levels {
		tx := beginAt(t, pool, level)
		inner, err := tx.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held, err := limits.Hold(t.Context(), inner, "a", time.Minute, slots)
		if err != nil {
			t.Fatal(err)
		}
		if err := inner.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := limits.Settle(t.Context(), tx, held.Token); !errors.Is(err, ratelimit.ErrHoldLost) {
			t.Errorf("%v", err)
		}
		again, err := limits.Hold(t.Context(), tx, "a", time.Minute, slots)
		if err != nil {
			t.Fatal(err)
		}
		if err := harness.Second(limits.Release(t.Context(), tx, again.Token)); err != nil {
			t.Error(err)
		}
		if _, err := limits.Hold(t.Context(), tx, "a", time.Minute, slots); err != nil {
			t.Error(err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.holds"); n != 0 {
			t.Errorf("%d holds are left", n)
		}
	}
}

// TestHoldsNeverDeadlock: single calls wait for each other in one order.
func TestHoldsNeverDeadlock(t *testing.T) {
	pool := harness.NewPool(t, 16)
	all := []ratelimit.Request{
		ratelimit.Slots("slots", 2).Key("k"), ratelimit.TokenBucket("bucket", 1000, time.Hour).Key("k"),
		ratelimit.FixedWindow("sharded", 1000, time.Hour, ratelimit.Shards(3)).Key("k"), ratelimit.Unlimited("unlimited").Key("k"),
	}
	var limits ratelimit.Limiter
	ctx, stop := context.WithTimeout(t.Context(), harness.Sized(12*time.Second, 3*time.Second))
	defer stop()
	var wait sync.WaitGroup
	var done atomic.Int64
	for w := range 16 {
		r := rand.New(rand.NewPCG(uint64(w), 8))
		wait.Go(func() {
			for ctx.Err() == nil {
				requests := make([]ratelimit.Request, 0, len(all))
				for _, i := range r.Perm(len(all))[:1+r.IntN(len(all))] {
					requests = append(requests, all[i])
				}
				id := fmt.Sprint(r.IntN(3))
				held, err := limits.Hold(t.Context(), pool, id, 100*time.Millisecond, requests...)
				if err == nil {
					switch r.IntN(4) {
					case 0:
						_, err = limits.Settle(t.Context(), pool, held.Token)
						if errors.Is(err, ratelimit.ErrHoldLost) {
							err = nil
						}
					case 1, 2:
						err = harness.Second(limits.Release(t.Context(), pool, held.Token))
					default:
						_, err = pool.Exec(t.Context(), "SELECT ratelimit._sweep_holds('', '', '', NULL)")
					}
				} else if harness.Denied(err) {
					err = nil
					if r.IntN(2) == 0 {
						_, err = pool.Exec(t.Context(), `DELETE FROM ratelimit.holds WHERE (name, key, id) IN (
							SELECT name, key, id FROM ratelimit.holds WHERE state = 'settled' FOR UPDATE SKIP LOCKED)`)
					}
				}
				if err != nil {
					t.Error(err)
					return
				}
				done.Add(1)
			}
		})
	}
	wait.Wait()
	slotsAreTheirHolds(t, pool)
	t.Logf("%d calls", done.Load())
}

// TestAnEndOfNothingLocksInOrder: whoever ends a token that is not there meets the rows of the id in the order of names, whether they are limited or not.
func TestAnEndOfNothingLocksInOrder(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	var limits ratelimit.Limiter
	held, err := limits.Hold(t.Context(), pool, "job", time.Hour, harness.Slow("limited", 100).Key("k"), ratelimit.Unlimited("a").Key("k"))
	harness.Succeeds(t, err)
	tx := beginAt(t, pool, pgx.ReadCommitted)
	harness.MustExecIn(t, tx, "SELECT FROM ratelimit.holds WHERE name = 'a' FOR UPDATE")
	ended := make(chan error, 1)
	go func() {
		ended <- harness.Second(limits.Release(t.Context(), pool, "~"+strings.Repeat("0", 32)+held.Token[33:]))
	}()
	harness.WaitingFor(t, pool, tx)
	harness.MustExecIn(t, tx, "SELECT FROM ratelimit.holds WHERE name = 'limited' FOR UPDATE")
	harness.Succeeds(t, tx.Rollback(t.Context()))
	harness.Succeeds(t, <-ended)
}

// TestHoldsReclaimPassesOverALockedHold: an expired hold that is being extended or settled is not waited for.
func TestHoldsReclaimPassesOverALockedHold(t *testing.T) {
	pool := harness.NewPool(t, 3)
	slots := ratelimit.Slots("slots", 1).Global()
	var limits ratelimit.Limiter
	if _, err := limits.Hold(t.Context(), pool, "a", 100*time.Millisecond, slots); err != nil {
		t.Fatal(err)
	}
	time.Sleep(110 * time.Millisecond)
	tx := beginAt(t, pool, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.holds FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	denial, ok := errors.AsType[*ratelimit.DeniedError](harness.Second(limits.Hold(ctx, pool, "b", time.Minute, slots)))
	if !ok || denial.RetryAfter < time.Second || denial.RetryAfter > 3*time.Second {
		t.Errorf("%v", denial)
	}
}

// TestHoldsAReleaseAfterASettleWaitsForNothing: a deferred Release costs no lock of a limit that others have.
func TestHoldsAReleaseAfterASettleWaitsForNothing(t *testing.T) {
	pool := harness.NewPool(t, 3)
	slots := ratelimit.Slots("slots", 1).Global()
	var limits ratelimit.Limiter
	held, err := limits.Hold(t.Context(), pool, "a", time.Minute, slots)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limits.Settle(t.Context(), pool, held.Token); err != nil {
		t.Fatal(err)
	}
	tx := beginAt(t, pool, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	if err := harness.Second(limits.Release(ctx, pool, held.Token)); err != nil {
		t.Error(err)
	}
}

// lateDB sends each statement once its gate is open, on a connection of its own, and goes on when the caller has given up: its cancel was lost.
type lateDB struct {
	conn *pgx.Conn
	gate chan struct{} // nil: it is open
	sent sync.WaitGroup
}

type lateRow struct {
	ctx    context.Context
	answer chan error
	bytes  []byte
}

func (r *lateRow) Scan(dest ...any) error {
	select {
	case err := <-r.answer:
		*dest[0].(*[]byte) = r.bytes
		return err
	case <-r.ctx.Done():
		return r.ctx.Err()
	}
}

func (d *lateDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	sql, args, err := args[0].(pgx.QueryRewriter).RewriteQuery(ctx, d.conn, sql, args[1:])
	row := &lateRow{ctx: ctx, answer: make(chan error, 1)}
	d.sent.Go(func() {
		if d.gate != nil {
			<-d.gate
		}
		if err == nil {
			err = d.conn.QueryRow(context.Background(), sql, args...).Scan(&row.bytes)
		}
		row.answer <- err
	})
	return row
}

// TestAnEndWaitsForItsHold has a Hold wait for a row, or on the way to the server, and gives it up. Whoever ends its token then has ended it: it is not
// held by nobody afterwards. The id is free at once.
func TestAnEndWaitsForItsHold(t *testing.T) {
	slots, bucket := ratelimit.Slots("slots", 2), ratelimit.TokenBucket("bucket", 100, time.Hour)
	kinds := map[string]struct {
		limits []ratelimit.Limit
		new    bool // its rows are not there
		level  string
		ttl    time.Duration
		before string // the state of a mark of the id that is over
	}{
		"slots": {limits: []ratelimit.Limit{slots}}, "tokens": {limits: []ratelimit.Limit{bucket}},
		"two": {limits: []ratelimit.Limit{slots, bucket}}, "new": {limits: []ratelimit.Limit{slots}, new: true},
		"shards":          {limits: []ratelimit.Limit{ratelimit.TokenBucket("sharded", 100, time.Hour, ratelimit.Shards(3))}},
		"unlimited":       {limits: []ratelimit.Limit{ratelimit.Unlimited("unlimited")}, new: true},
		"repeatable read": {limits: []ratelimit.Limit{slots}, level: "repeatable read"}, "serializable": {limits: []ratelimit.Limit{slots}, level: "serializable"},
		"without an end": {limits: []ratelimit.Limit{slots}, ttl: ratelimit.Forever}, "tokens without an end": {limits: []ratelimit.Limit{bucket}, ttl: ratelimit.Forever},
		"without an end, settled long ago": {limits: []ratelimit.Limit{bucket}, ttl: ratelimit.Forever, before: "settled"},
		"without an end, taken long ago":   {limits: []ratelimit.Limit{slots}, ttl: ratelimit.Forever, before: "once"},
	}
	inTx := func(level pgx.TxIsoLevel) func(limits *ratelimit.Limiter, pool *pgxpool.Pool, key, token string, requests []ratelimit.Request) error {
		return func(limits *ratelimit.Limiter, pool *pgxpool.Pool, _, token string, requests []ratelimit.Request) error {
			return limits.InTx(context.Background(), pool, func(ctx context.Context, tx pgx.Tx) error {
				return harness.Second(limits.Release(ctx, tx, token, requests...))
			}, ratelimit.Isolation(level))
		}
	}
	ends := map[string]func(limits *ratelimit.Limiter, pool *pgxpool.Pool, key, token string, requests []ratelimit.Request) error{
		"release": func(limits *ratelimit.Limiter, pool *pgxpool.Pool, _, token string, requests []ratelimit.Request) error {
			return harness.Second(limits.Release(context.Background(), pool, token, requests...))
		},
		"release one": func(limits *ratelimit.Limiter, pool *pgxpool.Pool, _, token string, requests []ratelimit.Request) error {
			return harness.Second(limits.Release(context.Background(), pool, token, requests[len(requests)-1]))
		},
		"release all": func(limits *ratelimit.Limiter, pool *pgxpool.Pool, _, token string, _ []ratelimit.Request) error {
			return harness.Second(limits.Release(context.Background(), pool, token))
		},
		"settle": func(limits *ratelimit.Limiter, pool *pgxpool.Pool, _, token string, _ []ratelimit.Request) error {
			if _, err := limits.Settle(context.Background(), pool, token); !errors.Is(err, ratelimit.ErrHoldLost) {
				return err // nil: it has come before
			}
			return nil
		},
		"read committed": inTx(pgx.ReadCommitted), "repeatable read": inTx(pgx.RepeatableRead), "serializable": inTx(pgx.Serializable),
		"sql": func(_ *ratelimit.Limiter, pool *pgxpool.Pool, key, token string, _ []ratelimit.Request) error {
			for name := range strings.SplitSeq("slots bucket sharded unlimited", " ") {
				if _, err := pool.Exec(context.Background(), "SELECT ratelimit.release($1, $2, $3)", name, key, token); err != nil && !strings.Contains(err.Error(), "of other limits") {
					return err
				}
			}
			return nil
		},
	}
	for kind, of := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			var limits ratelimit.Limiter
			harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "test", of.limits...))
			conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
			harness.Succeeds(t, err)
			defer func() { _ = conn.Close(context.Background()) }()
			if of.level != "" {
				_, err := conn.Exec(t.Context(), "SET default_transaction_isolation = '"+of.level+"'")
				harness.Succeeds(t, err)
			}
			for end, ends := range ends {
				for _, waits := range []bool{true, false} {
					if of.ttl < 0 && (!waits || end == "release all" || end == "settle") { // then a Hold that comes to the server later is another one
						continue
					}
					ttl, key := cmp.Or(of.ttl, time.Minute), fmt.Sprint(end, " ", waits)
					var requests []ratelimit.Request
					for _, l := range of.limits {
						requests = append(requests, l.Key(key))
					}
					before, err := limits.Hold(t.Context(), pool, "before", time.Minute, requests...)
					harness.Succeeds(t, err)
					harness.Succeeds(t, harness.Second(limits.Release(t.Context(), pool, before.Token)))
					if of.new {
						harness.MustExec(t, pool, "DELETE FROM ratelimit.limits WHERE key = '"+key+"'")
					}
					if of.before != "" {
						harness.MustExec(t, pool, "INSERT INTO ratelimit.holds (name, key, id, state, unit, count, taken_at, rest, part, until) SELECT DISTINCT name, key, 'job', '"+of.before+
							"', 'none', 0, now() - interval '2 days', 0, 1, now() - interval '1 day' FROM ratelimit.limits WHERE key = '"+key+"'")
					}
					late := &lateDB{conn: conn}
					tx := beginAt(t, pool, pgx.ReadCommitted)
					if waits {
						harness.MustExecIn(t, tx, "SELECT FROM ratelimit.limits WHERE key = '"+key+"' FOR UPDATE")
						if of.new { // it waits for this first use
							_, err := limits.Hold(t.Context(), tx, "another", time.Minute, requests...)
							harness.Succeeds(t, err)
						}
					} else {
						late.gate = make(chan struct{})
					}
					ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
					held, err := limits.Hold(ctx, late, "job", ttl, requests...)
					cancel()
					if !errors.Is(err, ratelimit.ErrUnknownOutcome) && (err != nil || kind != "unlimited" || !waits) || held.Token == "" { // that one waits for nothing
						t.Fatal(err)
					}
					ended := make(chan error, 1)
					go func() { ended <- ends(&limits, pool, key, held.Token, requests) }()
					if waits {
						select {
						case err := <-ended:
							ended <- err
						case <-time.After(50 * time.Millisecond):
						}
					}
					harness.Succeeds(t, tx.Rollback(t.Context()))
					harness.Succeeds(t, <-ended)
					if !waits {
						close(late.gate)
					}
					late.sent.Wait()
					if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.holds WHERE key = $1 AND state = 'held'", key); n != 0 {
						t.Errorf("%s: %d are held by nobody", key, n)
					}
					slotsAreTheirHolds(t, pool)
					if end != "settle" {
						again, err := limits.Hold(t.Context(), pool, "job", ttl, requests...)
						if err != nil || again.Token == held.Token && ttl > 0 {
							t.Errorf("%s: the id is not free: %v", key, err)
						}
					}
				}
			}
		})
	}
}

// TestAnEndWaitsForACommit: a Hold whose transaction is open is waited for, also of a key without rows, and without an end.
func TestAnEndWaitsForACommit(t *testing.T) {
	for name, limit := range map[string]ratelimit.Limit{"slots": ratelimit.Slots("limit", 2), "unlimited": ratelimit.Unlimited("limit")} {
		for _, ttl := range []time.Duration{time.Minute, ratelimit.Forever} {
			for _, byHand := range []bool{false, true} {
				t.Run(fmt.Sprint(name, ttl, byHand), func(t *testing.T) {
					t.Parallel()
					pool := harness.NewPool(t, 4)
					var limits ratelimit.Limiter
					harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "test", limit))
					tx := beginAt(t, pool, pgx.ReadCommitted)
					held, err := limits.Hold(t.Context(), tx, "job", ttl, limit.Key("k"))
					harness.Succeeds(t, err)
					ended := make(chan error, 1)
					go func() {
						if byHand {
							_, err := pool.Exec(context.Background(), "SELECT ratelimit.release('limit', 'k', $1)", held.Token)
							ended <- err
						} else {
							ended <- harness.Second(limits.Release(context.Background(), pool, held.Token, limit.Key("k")))
						}
					}()
					select {
					case err := <-ended:
						t.Errorf("it has not waited: %v", err)
					case <-time.After(300 * time.Millisecond):
						harness.Succeeds(t, tx.Commit(t.Context()))
						harness.Succeeds(t, <-ended)
					}
					if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.holds"); n != 0 {
						t.Errorf("%d rows are left", n)
					}
				})
			}
		}
	}
}

// TestCanceledWorkLeavesNothing cancels During while it holds, works or waits for a row that all want. Nothing is held by nobody afterwards.
func TestCanceledWorkLeavesNothing(t *testing.T) {
	pool := harness.NewPool(t, 12)
	slots := ratelimit.Slots("slots", 1000).Global()
	var limits ratelimit.Limiter
	var canceled, unknown atomic.Int64
	var wait sync.WaitGroup
	for w := range 32 {
		r := rand.New(rand.NewPCG(uint64(w), 9))
		wait.Go(func() {
			for i := range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(60_000))*time.Microsecond)
				err := limits.During(ctx, pool, fmt.Sprint(w, "-", i), time.Minute, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}, slots)
				cancel()
				if err != nil {
					canceled.Add(1)
				}
				if errors.Is(err, ratelimit.ErrUnknownOutcome) {
					unknown.Add(1)
				}
			}
		})
	}
	wait.Wait()
	time.Sleep(time.Second) // for statements whose cancel was lost
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.holds WHERE state = 'held'"); n != 0 {
		t.Errorf("%d of %d canceled are held by nobody", n, canceled.Load())
	}
	slotsAreTheirHolds(t, pool)
	t.Logf("%d canceled, %d of them with an unknown outcome", canceled.Load(), unknown.Load())
}
