package integration_test

import (
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

	"github.com/txlimit/txlimit/ratelimit"
)

// slotsAreTheirHolds wants that each row of slots is minus what is held.
func slotsAreTheirHolds(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	if wrong := scan[int](t, db, `SELECT count(*) FROM (
		SELECT name, key, sum(count) AS held FROM rate_limit_holds WHERE state = 'held' AND unit = 'slots' GROUP BY 1, 2) AS h
		FULL JOIN (SELECT name, key, -value AS used FROM rate_limits WHERE name LIKE 'slots%') AS r USING (name, key)
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
			pool := newPool(t, workers+2)
			slots := ratelimit.Slots("slots", n)
			var limits ratelimit.Limiter
			mustExec(t, pool, `CREATE TABLE live (token text PRIMARY KEY, id text NOT NULL, begun timestamptz NOT NULL, ended timestamptz NOT NULL)`)
			var granted, lost, late, repeats atomic.Int64
			began := time.Now()
			goesOn := func() bool { // on a slow machine, until enough has happened
				took := time.Since(began)
				return took < sized(15*time.Second, 3*time.Second) || took < patience && (granted.Load() == 0 || repeats.Load() == 0)
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
						if _, err := pool.Exec(t.Context(), "INSERT INTO live VALUES ($1, $2, $3, $4)", held.Token, id, held.Expires.Add(-ttl), held.Expires); err != nil {
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
						before := scan[time.Time](t, pool, "SELECT clock_timestamp()")
						err = do(func(ctx context.Context, db ratelimit.DB) (err error) {
							if fate > 1 && fate < 6 {
								return limits.Release(ctx, db, held.Token, slots.Key("k"))
							}
							if _, err = limits.Settle(ctx, db, held.Token, slots.Key("k")); err == nil && fate == 1 {
								late.Add(1)
							}
							return err
						})
						if errors.Is(err, ratelimit.ErrHoldLost) && !scan[time.Time](t, pool, "SELECT clock_timestamp()").Before(held.Expires) {
							lost.Add(1)
						} else if err != nil {
							t.Errorf("%v, at %v, of a hold until %v", err, before, held.Expires)
							return
						}
						if before.Before(held.Expires) {
							if _, err := pool.Exec(t.Context(), "UPDATE live SET ended = $2 WHERE token = $1", held.Token, before); err != nil {
								t.Error(err)
								return
							}
						}
						if fate == 1 || fate >= 6 { // a settled id is refused for a day
							if _, err := pool.Exec(t.Context(), "DELETE FROM rate_limit_holds WHERE id = $1 AND state = 'settled'", id); err != nil {
								t.Error(err)
								return
							}
						}
					}
				})
			}
			wait.Wait()
			if most := scan[int](t, pool, `SELECT coalesce(max((SELECT count(*) FROM live AS b WHERE b.begun <= a.begun AND b.ended > a.begun)), 0) FROM live AS a`); most > n {
				t.Errorf("%d holds were live at once, of at most %d", most, n)
			}
			if twice := scan[int](t, pool, `SELECT count(*) FROM live AS a JOIN live AS b ON a.id = b.id AND a.token < b.token AND a.begun < b.ended AND b.begun < a.ended`); twice != 0 {
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

// blocked waits until another session waits for a lock of the transaction.
func blocked(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx, n int) {
	t.Helper()
	pid := serverPID(t, tx)
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if scan[int](t, pool, fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE %d = ANY (pg_blocking_pids(pid)) OR wait_event_type = 'Lock' AND query ~ '_ratelimit_wire_|^-- name: Update'", pid)) >= n {
			return
		}
	}
	t.Fatal("nobody waits")
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
	pool := newPool(t, 8)
	slots := ratelimit.Slots("slots", 5).Global()
	var limits ratelimit.Limiter
	for i := range 5 {
		if _, err := limits.Hold(t.Context(), pool, fmt.Sprint("dead ", i), 100*time.Millisecond, slots); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(150 * time.Millisecond)
	tx := beginAt(t, pool, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), "SELECT FROM rate_limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 5)
	for i := range 5 {
		go func() {
			_, err := limits.Hold(context.Background(), pool, fmt.Sprint("new ", i), time.Minute, slots)
			errs <- err
		}()
	}
	blocked(t, pool, tx, 5)
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
	pool := newPool(t, 4)
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
		for _, level := range levels {
			tx := beginAt(t, pool, level)
			refused(t.Context(), tx)
			for _, table := range []string{"rate_limits", "rate_limit_holds"} {
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
		mustExecIn(t, tx, "SELECT FROM rate_limits FOR UPDATE")
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		refused(ctx, pool)
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := limits.Release(t.Context(), pool, held.Token); err != nil {
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
					pool := newPool(t, 3)
					var limits ratelimit.Limiter
					if !first {
						if _, err := limits.Hold(t.Context(), pool, "before", time.Minute, request); err != nil {
							t.Fatal(err)
						}
					}
					tx := beginAt(t, pool, level)
					if _, err := tx.Exec(t.Context(), "SELECT 1 FROM rate_limits"); err != nil {
						t.Fatal(err)
					}
					held, err := limits.Hold(t.Context(), pool, "a", time.Minute, request)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := limits.Settle(t.Context(), tx, held.Token); sqlState(err) != "40001" {
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
	pool := newPool(t, 2)
	slots := ratelimit.Slots("slots", 1).Global()
	var limits ratelimit.Limiter
	mustExec(t, pool, "CREATE TABLE results (id text)")
	for _, level := range levels {
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
		if err := limits.Release(t.Context(), pool, other.Token); err != nil {
			t.Fatal(err)
		}
	}
	if n := scan[int](t, pool, "SELECT count(*) FROM results"); n != 0 {
		t.Errorf("%d results were stored", n)
	}
}

// TestHoldsARollbackTakesNothing: what a transaction held, it held only if it was committed. Also after ROLLBACK TO.
func TestHoldsARollbackTakesNothing(t *testing.T) {
	pool := newPool(t, 2)
	slots := ratelimit.Slots("slots", 1).Global()
	var limits ratelimit.Limiter
	for _, level := range levels {
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
		if err := limits.Release(t.Context(), tx, again.Token); err != nil {
			t.Error(err)
		}
		if _, err := limits.Hold(t.Context(), tx, "a", time.Minute, slots); err != nil {
			t.Error(err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := scan[int](t, pool, "SELECT count(*) FROM rate_limit_holds"); n != 0 {
			t.Errorf("%d holds are left", n)
		}
	}
}

// TestHoldsNeverDeadlock: single calls wait for each other in one order.
func TestHoldsNeverDeadlock(t *testing.T) {
	pool := newPool(t, 16)
	all := []ratelimit.Request{
		ratelimit.Slots("slots", 2).Key("k"), ratelimit.TokenBucket("bucket", 1000, time.Hour).Key("k"),
		ratelimit.FixedWindow("sharded", 1000, time.Hour, ratelimit.Shards(3)).Key("k"), ratelimit.Unlimited("unlimited").Key("k"),
	}
	var limits ratelimit.Limiter
	ctx, stop := context.WithTimeout(t.Context(), sized(12*time.Second, 3*time.Second))
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
						err = limits.Release(t.Context(), pool, held.Token)
					default:
						_, err = pool.Exec(t.Context(), "SELECT _ratelimit_sweep_holds('', '', '', NULL)")
					}
				} else if denied(err) {
					err = nil
					if r.IntN(2) == 0 {
						_, err = pool.Exec(t.Context(), "DELETE FROM rate_limit_holds WHERE state = 'settled'")
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

// TestHoldsReclaimPassesOverALockedHold: an expired hold that is being extended or settled is not waited for.
func TestHoldsReclaimPassesOverALockedHold(t *testing.T) {
	pool := newPool(t, 3)
	slots := ratelimit.Slots("slots", 1).Global()
	var limits ratelimit.Limiter
	if _, err := limits.Hold(t.Context(), pool, "a", 100*time.Millisecond, slots); err != nil {
		t.Fatal(err)
	}
	time.Sleep(110 * time.Millisecond)
	tx := beginAt(t, pool, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), "SELECT FROM rate_limit_holds FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	held, err := limits.Hold(ctx, pool, "b", time.Minute, slots)
	if !denied(err) || held.RetryAfter < time.Second || held.RetryAfter > 3*time.Second {
		t.Errorf("%v, retry after %v", err, held.RetryAfter)
	}
}

// TestHoldsAReleaseAfterASettleWaitsForNothing: a deferred Release costs no lock of a limit that others have.
func TestHoldsAReleaseAfterASettleWaitsForNothing(t *testing.T) {
	pool := newPool(t, 3)
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
	if _, err := tx.Exec(t.Context(), "SELECT FROM rate_limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := limits.Release(ctx, pool, held.Token); err != nil {
		t.Error(err)
	}
}
