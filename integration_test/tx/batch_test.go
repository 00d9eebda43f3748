package tx_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// batchWays are the ways to send a batch, each as its own transaction. The connection must be clean afterwards.
var batchWays = map[string]func(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch) error{
	"pool": func(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch) error {
		return pool.SendBatch(ctx, batch).Close()
	},
	"conn": func(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch) error {
		return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error { return conn.Conn().SendBatch(ctx, batch).Close() })
	},
	"tx": func(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return tx.SendBatch(ctx, batch).Close() })
	},
	"SendTx": func(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch) error {
		return new(ratelimit.Limiter).SendTx(ctx, pool, batch)
	},
	"SendTx read committed, on a conn": func(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch) error {
		return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
			return new(ratelimit.Limiter).SendTx(ctx, conn.Conn(), batch, ratelimit.Isolation(pgx.ReadCommitted))
		})
	},
}

// inBatchWays runs a test in every way, on a pool of one connection. The connection must not be replaced.
func inBatchWays(t *testing.T, test func(t *testing.T, pool *pgxpool.Pool, send func(*pgx.Batch) error)) {
	t.Helper()
	for way, send := range batchWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewJobs(t, 1)
			pid := backend(t, pool)
			test(t, pool, func(batch *pgx.Batch) error { return send(t.Context(), pool, batch) })
			if now := backend(t, pool); now != pid || pool.Stat().NewConnsCount() != 1 {
				t.Errorf("backend %d became %d: the connection was not clean", pid, now)
			}
		})
	}
}

func backend(t *testing.T, pool *pgxpool.Pool) (pid uint32) {
	t.Helper()
	err := pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
		if status := conn.Conn().PgConn().TxStatus(); status != 'I' {
			t.Errorf("transaction status %c", status)
		}
		pid = conn.Conn().PgConn().PID()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// sameAsConsume compares random batches with Consume in another database.
func sameAsConsume(t *testing.T, pool *pgxpool.Pool, send func(ctx context.Context, pool *pgxpool.Pool, batch *pgx.Batch) error) {
	t.Helper()
	r := harness.NewRand(t)
	limiter, clock := harness.NewLimiter()
	consumed := harness.NewPool(t, 1)
	limits := []ratelimit.Limit{ratelimit.TokenBucket("o'messages", 1, 30*time.Second, ratelimit.Capacity(10), ratelimit.MaxReserved(3))}
	for i := range 5 {
		limits = append(limits, harness.RandomLimit(r, fmt.Sprint("limit", i), 1))
	}
	grants, denials := 0, 0
	for range 100 {
		var requests []ratelimit.Request
		for range 1 + r.IntN(2) {
			limit := harness.OneOf(r, limits...)
			requests = append(requests, limit.Key(`a\'n"n`).Count(harness.RandomTokens(r, limit.Capacity())))
		}
		// With shards, where the result does not depend on the picked shard.
		if r.IntN(5) == 0 {
			requests = append(requests, ratelimit.TokenBucket("sharded", 7, time.Minute, ratelimit.Shards(3)).Key("ann").Count(7))
		}
		if r.IntN(8) == 0 { // which may leave a debt
			for _, db := range []ratelimit.DB{pool, consumed} {
				if _, err := limiter.Reserve(t.Context(), db, requests[0]); err != nil && !harness.Denied(err) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
					t.Fatal(err)
				}
			}
		}
		want, wantErr := limiter.Consume(t.Context(), consumed, requests...)
		var batch pgx.Batch
		result, err := limiter.QueueConsume(t.Context(), &batch, requests...)
		if err != nil {
			if err.Error() != wantErr.Error() || batch.Len() != 0 {
				t.Fatalf("queued %d: %v, Consume: %v", batch.Len(), err, wantErr)
			}
			continue
		}
		clear(requests) // the caller may reuse it
		err = send(t.Context(), pool, &batch)
		if !reflect.DeepEqual(*result, want) || !reflect.DeepEqual(err, wantErr) {
			t.Fatalf("batch:   %+v, %v\nConsume: %+v, %v", *result, err, want, wantErr)
		}
		if harness.Denied(err) {
			denials++
		} else {
			grants++
		}
		clock.Advance(time.Duration(r.IntN(int(20 * time.Second))).Truncate(time.Microsecond))
	}
	if grants < 5 || denials < 5 {
		t.Errorf("only %d grants and %d denials", grants, denials)
	}
	if got, want := table(t, pool), table(t, consumed); !reflect.DeepEqual(got, want) {
		t.Errorf("the batches left %v\nConsume left     %v", got, want)
	}
}

// table returns the rows of ratelimit.limits, read in the binary format. Unlike harness.TableOf, it does not depend on the session's
// settings.
func table(t *testing.T, pool *pgxpool.Pool) (rows []any) {
	t.Helper()
	var (
		keys   []string
		values []float64
		ts     []time.Time
	)
	err := pool.QueryRow(t.Context(), `SELECT array_agg(concat_ws(' ', name, key, shard, shards) ORDER BY name, key, shard),
		array_agg(value ORDER BY name, key, shard), array_agg(ts AT TIME ZONE 'UTC' ORDER BY name, key, shard) FROM ratelimit.limits`).Scan(&keys, &values, &ts)
	if err != nil {
		t.Fatal(err)
	}
	return []any{keys, values, ts}
}

func TestABatchAnswersAsConsumeDoes(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for _, mode := range harness.ExecModes {
		for way, send := range batchWays {
			t.Run(mode.String()+", "+way, func(t *testing.T) {
				t.Parallel()
				harness.NeedsMode(t, mode)
				pool := harness.Reconfigured(t, harness.NewPool(t, 1), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
				sameAsConsume(t, pool, send)
				if n := pool.Stat().NewConnsCount(); n != 1 {
					t.Errorf("%d connections were needed", n)
				}
			})
		}
	}
	for _, settings := range []map[string]string{
		{"extra_float_digits": "0"},
		{"extra_float_digits": "-15", "DateStyle": "SQL, DMY", "TimeZone": "Asia/Kathmandu", "IntervalStyle": "sql_standard", "lc_messages": "C", "lc_numeric": "C"},
		{"extra_float_digits": "3", "DateStyle": "German", "TimeZone": "America/St_Johns", "bytea_output": "escape"},
	} {
		t.Run(fmt.Sprint(settings), func(t *testing.T) {
			t.Parallel()
			pool := harness.Reconfigured(t, harness.NewPool(t, 1), func(c *pgxpool.Config) {
				harness.StartWith(t, c.ConnConfig, settings)
				if harness.Server.Pooled() { // in a binary mode: in these settings, the test could not read text
					c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
				}
			})
			sameAsConsume(t, pool, batchWays["SendTx"])
			for name, want := range settings {
				var now string
				if err := pool.QueryRow(t.Context(), "SELECT current_setting($1)", name).Scan(&now); err != nil || !strings.HasPrefix(now, want) {
					t.Errorf("%s: a denial left %q, %v, want %q", name, now, err, want)
				}
			}
		})
	}
}

func TestADenialStopsABatchWhereverItStands(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	bucket := ratelimit.TokenBucket("bucket", 1, time.Minute)
	other := ratelimit.TokenBucket("other", 100, time.Minute)
	wide := ratelimit.TokenBucket("wide", 3, time.Minute, ratelimit.Shards(3))
	calls := map[string]func(key string) []ratelimit.Request{ // only one of them is granted
		"one limit": func(key string) []ratelimit.Request { return []ratelimit.Request{bucket.Key(key)} },
		"several": func(key string) []ratelimit.Request {
			return []ratelimit.Request{bucket.Key(key), other.Key(key).Count(5)}
		},
		"sharded": func(key string) []ratelimit.Request { return []ratelimit.Request{wide.Key(key).Count(3)} },
		"several, one of them sharded": func(key string) []ratelimit.Request {
			return []ratelimit.Request{bucket.Key(key), wide.Key(key).Count(2)}
		},
	}
	inBatchWays(t, func(t *testing.T, pool *pgxpool.Pool, send func(*pgx.Batch) error) {
		limiter, _ := harness.NewLimiter()
		for name, call := range calls {
			for place := range 4 {
				try := func() (*ratelimit.Result, error) {
					var batch pgx.Batch
					var result *ratelimit.Result
					for i := range 4 {
						if i == place {
							result = harness.Queue(t, limiter, &batch, call(fmt.Sprint(name, place))...)
						}
						if i < 3 {
							batch.Queue("INSERT INTO jobs VALUES ($1)", 10*place+10+i)
						}
					}
					return result, send(&batch)
				}
				result, err := try()
				if err != nil || !result.OK {
					t.Fatalf("%s, place %d: %+v, %v, want a grant", name, place, result, err)
				}
				if n := harness.Jobs(t, pool, "count(*)"); n != 5 {
					t.Fatalf("%s, place %d: %d jobs, want 5", name, place, n)
				}
				if _, err := pool.Exec(t.Context(), "DELETE FROM jobs WHERE n >= 10"); err != nil {
					t.Fatal(err)
				}
				result, err = try()
				exceeded, ok := errors.AsType[*ratelimit.DeniedError](err)
				if !ok || result.OK || !harness.SaysTheSame(exceeded, *result) || result.RetryAfter <= 0 {
					t.Fatalf("%s, place %d: %+v, %v, want a denial", name, place, result, err)
				}
				if name == "several" && (result.RetryAfter != time.Minute || result.Requests[1].Remaining != 95 || len(harness.DeniedBy(*result)) != 1) {
					t.Fatalf("%s, place %d: %+v, %v, want a denial by the first", name, place, result, err)
				}
				if n := harness.Jobs(t, pool, "count(*)"); n != 2 {
					t.Fatalf("%s, place %d: %d jobs, want those from before", name, place, n)
				}
			}
		}
	})
}

func TestABatchOwesNothing(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	inBatchWays(t, func(t *testing.T, pool *pgxpool.Pool, send func(*pgx.Batch) error) {
		limiter, clock := harness.NewLimiter()
		w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
		request := ratelimit.TokenBucket("bucket", 1, time.Minute, ratelimit.MaxReserved(2)).Key("k")
		for i := range 4 {
			if i == 3 {
				w.Runs(w.Reserve(request), time.Minute)
			}
			var batch pgx.Batch
			result := harness.Queue(t, limiter, &batch, request)
			switch err := send(&batch); {
			case i == 0 && err == nil && result.OK && result.RetryAt.IsZero() && result.RetryAfter == 0:
			case i == 1 && harness.Denied(err), i == 2 && harness.Denied(err):
				w.Retries(*result, time.Minute)
			case i == 3 && harness.Denied(err):
				w.Retries(*result, 2*time.Minute) // behind the reservation
			default:
				t.Fatalf("request %d: %+v, %v", i, result, err)
			}
		}
		w.Holds(request, -1)
	})
}

func TestOneBatchMayHoldSeveralConsumptions(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	inBatchWays(t, func(t *testing.T, pool *pgxpool.Pool, send func(*pgx.Batch) error) {
		limiter, _ := harness.NewLimiter()
		limit := ratelimit.TokenBucket("bucket", 2, time.Minute)
		var batch pgx.Batch
		first, second := harness.Queue(t, limiter, &batch, limit.Key("k")), harness.Queue(t, limiter, &batch, limit.Key("k"))
		third, fourth := harness.Queue(t, limiter, &batch, limit.Key("k")), harness.Queue(t, limiter, &batch, limit.Key("k"))
		err := send(&batch)
		if !harness.Denied(err) || !first.OK || !second.OK || third.OK || third.RetryAfter != 30*time.Second || fourth.OK || !fourth.At.IsZero() {
			t.Errorf("%v: %+v, %+v, %+v, %+v", err, first, second, third, fourth)
		}
		if result, err := limiter.Check(t.Context(), pool, limit.Key("k").Count(2)); err != nil || !result.OK {
			t.Errorf("%+v, %v: the granted tokens did not come back", result, err)
		}
	})
}

func TestInvalidRequestsAreNotQueued(t *testing.T) {
	t.Parallel()
	var seen []ratelimit.Decision
	limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d) }}
	limit := ratelimit.TokenBucket("bucket", 1, time.Minute)
	var batch pgx.Batch
	for _, row := range []struct {
		requests []ratelimit.Request
		want     error
	}{
		{nil, ratelimit.ErrInvalid},
		{[]ratelimit.Request{limit.Key("")}, ratelimit.ErrInvalid},
		{[]ratelimit.Request{limit.Key("k"), limit.Key("k").Count(-1)}, ratelimit.ErrInvalid},
		{[]ratelimit.Request{limit.Key("k").Count(2)}, ratelimit.ErrExceedsCapacity},
	} {
		result, err := limiter.QueueConsume(t.Context(), &batch, row.requests...)
		if result != nil || !errors.Is(err, row.want) || batch.Len() != 0 {
			t.Errorf("%+v: %+v, %v, %d queued", row.requests, result, err, batch.Len())
		}
	}
	if len(seen) != 4 || !errors.Is(seen[3].Err, ratelimit.ErrExceedsCapacity) {
		t.Errorf("seen: %+v", seen)
	}
	wrongClock := ratelimit.Limiter{Clock: func() time.Time { return time.Time{} }}
	if _, err := wrongClock.QueueConsume(t.Context(), &batch, limit.Key("k")); !errors.Is(err, ratelimit.ErrInvalid) || batch.Len() != 0 {
		t.Errorf("a clock in the year 1: %v", err)
	}
}

func TestTheObserverSeesTheDecisionsOfABatch(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	inBatchWays(t, func(t *testing.T, _ *pgxpool.Pool, send func(*pgx.Batch) error) {
		limiter, _ := harness.NewLimiter()
		var seen []ratelimit.Decision
		limiter.Observer = func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d) }
		limit := ratelimit.TokenBucket("bucket", 1, time.Minute)
		var batch pgx.Batch
		first, second := harness.Queue(t, limiter, &batch, limit.Key("k")), harness.Queue(t, limiter, &batch, limit.Key("k"))
		if len(seen) != 0 {
			t.Fatalf("seen before it was sent: %+v", seen)
		}
		err := send(&batch)
		if len(seen) != 2 || seen[0].Err != nil || !reflect.DeepEqual(seen[0].Result, *first) ||
			!reflect.DeepEqual(seen[1].Err, err) || !reflect.DeepEqual(seen[1].Result, *second) || seen[1].Verb != "consume" || !harness.Denied(err) {
			t.Errorf("seen: %+v; %v", seen, err)
		}
	})
}

func TestAnothersPT429IsPassedOn(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	inBatchWays(t, func(t *testing.T, pool *pgxpool.Pool, send func(*pgx.Batch) error) {
		_, err := pool.Exec(t.Context(), `CREATE FUNCTION full_up() RETURNS int LANGUAGE plpgsql AS
			$$ BEGIN RAISE SQLSTATE 'PT429' USING MESSAGE = 'full up', DETAIL = '{"at": 0, "ord": [1], "value": [0], "ts": [0]}'; END $$`)
		if err != nil {
			t.Fatal(err)
		}
		limiter, _ := harness.NewLimiter()
		limit := ratelimit.TokenBucket("bucket", 100, time.Minute)
		for _, before := range []bool{true, false} {
			var batch pgx.Batch
			if before {
				batch.Queue("SELECT full_up()")
			}
			result := harness.Queue(t, limiter, &batch, limit.Key("k"))
			if !before {
				batch.Queue("SELECT full_up()")
			}
			err := send(&batch)
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Message != "full up" || harness.Denied(err) || result.OK == before {
				t.Errorf("%+v, %v", result, err)
			}
		}
		// The same holds for an error out of our own statement.
		for _, detail := range []string{``, `{}`, `1`, `{"at": 1, "ord": [2], "value": [1], "ts": [1]}`, `{"at": 1, "ord": [1], "value": [], "ts": [1]}`, `{"at": 1, "ord": [1], "value": [1], "ts": [1], "more": 1}`} {
			_, err := pool.Exec(t.Context(), fmt.Sprintf(`CREATE OR REPLACE FUNCTION full_up_trigger() RETURNS trigger LANGUAGE plpgsql AS
				$$ BEGIN RAISE SQLSTATE 'PT429' USING MESSAGE = 'full up', DETAIL = '%s'; END $$;
				CREATE OR REPLACE TRIGGER full_up BEFORE INSERT ON ratelimit.limits FOR EACH ROW EXECUTE FUNCTION full_up_trigger()`, detail))
			if err != nil {
				t.Fatal(err)
			}
			var batch pgx.Batch
			result := harness.Queue(t, limiter, &batch, limit.Key("k"))
			err = send(&batch)
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Message != "full up" || harness.Denied(err) || result.OK {
				t.Errorf("%q: %+v, %v", detail, result, err)
			}
		}
	})
}

func TestABatchSaysWhenTheSchemaIsMissing(t *testing.T) {
	t.Parallel()
	harness.InQueryModes(t, harness.NewUnmigrated, func(t *testing.T, pool *pgxpool.Pool) {
		var limiter ratelimit.Limiter
		limit := ratelimit.TokenBucket("bucket", 1, time.Minute)
		for _, requests := range [][]ratelimit.Request{{limit.Key("k")}, {limit.Key("k"), limit.Global()}} {
			var batch pgx.Batch
			result := harness.Queue(t, &limiter, &batch, requests...)
			err := limiter.SendTx(t.Context(), pool, &batch)
			if result.OK || harness.SQLState(err) != "3F000" || !strings.Contains(err.Error(), "has the schema of package migrations been migrated") {
				t.Errorf("%v", err)
			}
		}
		if n := pool.Stat().NewConnsCount(); n != 1 {
			t.Errorf("%d connections", n)
		}
	})
}

func TestABatchEndsWithItsContext(t *testing.T) {
	t.Parallel()
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("bucket", 1, 24*time.Hour)
	for way, send := range batchWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewJobs(t, 1)
			for _, wait := range []time.Duration{0, 100 * time.Millisecond} {
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				var batch pgx.Batch
				result := harness.Queue(t, &limiter, &batch, limit.Key("k"))
				batch.Queue("SELECT pg_sleep(5)")
				err := send(ctx, pool, &batch)
				cancel()
				if !errors.Is(err, context.DeadlineExceeded) || harness.Denied(err) {
					t.Errorf("after %v: %+v, %v", wait, result, err)
				}
			}
			var batch pgx.Batch
			result := harness.Queue(t, &limiter, &batch, limit.Key("k"))
			if err := send(t.Context(), pool, &batch); err != nil || !result.OK {
				t.Errorf("afterwards: %+v, %v", result, err)
			}
		})
	}
}

func TestADenialNamesNoKeys(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	var limiter ratelimit.Limiter
	var batch pgx.Batch
	limit, other := ratelimit.TokenBucket("bucket", 1, 24*time.Hour), ratelimit.TokenBucket("other", 1, 24*time.Hour)
	harness.Queue(t, &limiter, &batch, limit.Key("ann@example.org"))
	harness.Queue(t, &limiter, &batch, limit.Key("ann@example.org"), limit.Key("bob"), other.Key("bob"))
	results := pool.SendBatch(t.Context(), &batch)
	if _, err := results.Exec(); err != nil {
		t.Fatal(err)
	}
	_, err := results.Exec() // without the library, it is the server's error
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code != "PT429" || pgErr.Message != "rate limit exceeded: bucket, other" || strings.Contains(fmt.Sprintf("%+v", *pgErr), "ann@") {
		t.Errorf("%+v", err)
	}
	if err := results.Close(); harness.SQLState(err) != "PT429" {
		t.Errorf("%v", err)
	}
}
