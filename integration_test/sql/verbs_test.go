package sql_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// reserveByHand decides as ratelimit.reserve does, and wants a reservation whose work may run after a delay.
func reserveByHand(w harness.World, arguments string, delay time.Duration, remaining float64) {
	w.Helper()
	var retryAt, at time.Time
	var wait, left float64
	err := w.DB.QueryRow(w.Context(), fmt.Sprintf("SELECT retry_at, extract(epoch FROM retry_after), remaining, at FROM ratelimit._by_hand('reserve', %s, now => '%s')",
		arguments, w.Clock.At.Format(time.RFC3339Nano))).Scan(&retryAt, &wait, &left, &at)
	if err != nil || !at.Equal(w.Clock.At) || !retryAt.Equal(at.Add(delay)) || wait != delay.Seconds() || left != remaining && !harness.Near(left, remaining) {
		w.Fatalf("ratelimit.reserve(%s): run at %v, after %v s, %v left, at %v, %v, want %v and %v", arguments, retryAt, wait, left, at, err, delay, remaining)
	}
}

// takeByHand decides as ratelimit.take does, and wants it to take n.
func takeByHand(w harness.World, arguments string, n int, remaining float64) {
	w.Helper()
	var taken, left float64
	err := w.DB.QueryRow(w.Context(), fmt.Sprintf("SELECT taken, remaining FROM ratelimit._by_hand('take', %s, now => '%s')", arguments, w.Clock.At.Format(time.RFC3339Nano))).Scan(&taken, &left)
	if err != nil || taken != float64(n) || left != remaining && !harness.Near(left, remaining) {
		w.Fatalf("ratelimit.take(%s): took %v, %v left, %v, want %d and %v", arguments, taken, left, err, n, remaining)
	}
}

// denyByHand wants a call to raise PT429 with a time to retry, or none if it is "".
func denyByHand(w harness.World, call, retryAt string) {
	w.Helper()
	savepoint := w.Begin()
	verbs := strings.NewReplacer("ratelimit.consume(", "ratelimit._by_hand('consume', ", "ratelimit.reserve(", "ratelimit._by_hand('reserve', ", "ratelimit.take(", "ratelimit._by_hand('take', ")
	_, err := savepoint.Exec(w.Context(), fmt.Sprintf("SELECT FROM %s, now => '%s')", strings.TrimSuffix(verbs.Replace(call), ")"), w.Clock.At.Format(time.RFC3339Nano)))
	w.Do(savepoint.Rollback(w.Context()))
	if err == nil || harness.SQLState(err) != "PT429" {
		w.Fatalf("%s: %v, want PT429", call, err)
	}
	var at string
	w.Do(w.DB.QueryRow(w.Context(), `SELECT coalesce(to_char(($1::json->>'retry_at')::timestamptz AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), '')`, harness.PgError(w.T, err).Detail).Scan(&at))
	if at != retryAt {
		w.Fatalf("%s: retry at %s, want %s", call, at, retryAt)
	}
}

// A reservation of a window runs when the window of its last token begins, and forfeits what earlier windows have left.
func TestByHandReserveOfWindows(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			window := fmt.Sprintf("'window %d', 'ann', 6, '1 hour', kind => 'fixed window', start => '2026-07-01 12:00Z', shards => %[1]d, max_reserved => 6", shards)
			reserveByHand(w, window+", count => 2", 0, 4)
			reserveByHand(w, window+", count => 5", time.Hour, -5)
			denyByHand(w, "ratelimit.reserve("+window+", count => 6)", "2026-07-01 13:00:00")
			month := fmt.Sprintf("'month %d', 'ann', 6, '1 month', kind => 'calendar window', zone => 'Europe/Berlin', anchor => '2026-01-31', shards => %[1]d, max_reserved => 6", shards)
			next := harness.UTC("2026-07-30 22:00:00").Sub(harness.Noon) // midnight of the 31st in Berlin
			reserveByHand(w, month+", count => 4", 0, 2)
			reserveByHand(w, month+", count => 3", next, -3)
			denyByHand(w, "ratelimit.reserve("+month+", count => 6)", "2026-07-30 22:00:00")
			denyByHand(w, fmt.Sprintf("ratelimit.take('month %d', 'ann', 6, '1 month', kind => 'calendar window', most => 100, zone => 'Europe/Berlin', anchor => '2026-01-31', shards => %[1]d)", shards),
				"2026-07-30 22:00:00")
			if got := w.Balance(ratelimit.FixedWindow(fmt.Sprint("window ", shards), 6, time.Hour, ratelimit.Start(harness.Noon), ratelimit.Shards(shards)).Key("ann")); !harness.Near(got, -5) {
				w.Fatalf("the library says that %v are left, want -5", got)
			}
		}
	})
}

// A calendar window gets the refill of every window, although the row was not used for many, and although nobody says how much may be owed.
func TestByHandADebtOfManyCalendarWindowsIsRefilled(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		const daily = "'daily', 'ann', 1, '1 day', kind => 'calendar window'"
		reserveByHand(w, daily+", count => 50", 48*24*time.Hour+12*time.Hour, -49)
		w.Clock.Advance(40 * 24 * time.Hour)
		denyByHand(w, "ratelimit.consume("+daily+")", "2026-08-20 00:00:00")
		reserveByHand(w, daily, 9*24*time.Hour+12*time.Hour, -10)
		w.Clock.Advance(12 * 24 * time.Hour)
		takeByHand(w, "'daily', 'ann', 1, '1 day', most => 5, kind => 'calendar window'", 1, 0)
	})
}

// The arguments that only these functions have. TestByHandRefusesWhatIsWrong has the others.
func TestByHandReserveAndTakeRefuseWhatIsWrong(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for call, text := range map[string]string{
			`ratelimit.reserve('l', 'ann', 10, '1 minute', max_reserved => -1)`:                                               `max_reserved must be 0 or between 1e-15 and 1e15, not -1`,
			`ratelimit.reserve('l', 'ann', 10, '1 minute', max_reserved => 1e-16)`:                                            `max_reserved must be 0 or between 1e-15 and 1e15, not 1e-16`,
			`ratelimit.reserve('l', 'ann', 10, '1 minute', max_reserved => 'NaN')`:                                            `max_reserved must be 0 or between 1e-15 and 1e15, not NaN`,
			`ratelimit.reserve('l', 'ann', 10, '1 minute', max_reserved => 'Infinity')`:                                       `max_reserved must be 0 or between 1e-15 and 1e15, not Infinity`,
			`ratelimit.reserve('l', 'ann', 0, '1 minute', max_reserved => 1)`:                                                 `capacity and max_reserved must be NULL or 0 with a rate of 0, not`,
			`ratelimit.reserve('l', 'ann', max_reserved => 1)`:                                                                `between 1e-15 and 1e15, not NULL`,
			`ratelimit.reserve('l', 'ann', 10, '1 minute', 12.1, max_reserved => 2)`:                                          `count must be at most 12, not 12.1: more can never be granted`,
			`ratelimit.reserve('l', 'ann', 10, '1 day', 1011, 'calendar window')`:                                             `count must be at most 1010, not 1011: more can never be granted`,
			`ratelimit.take('l', 'ann')`:                                                                                      `no program has published it`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => NULL)`:                                                        `most must be a whole number between 1 and 1e15, not NULL`,
			`ratelimit.take('l', 'ann', rate => 10, period => '1 minute')`:                                                    `most must be a whole number between 1 and 1e15, not NULL`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => 0)`:                                                           `most must be a whole number between 1 and 1e15, not 0`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => -1)`:                                                          `most must be a whole number between 1 and 1e15, not -1`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => 1000000000000001)`:                                            `must be a whole number between 1 and 1e15`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => -9223372036854775808)`:                                        `must be a whole number between 1 and 1e15`,
			`ratelimit.take('l', 'ann', 0, '1 minute', most => 0)`:                                                            `most must be a whole number between 1 and 1e15, not 0`,
			`ratelimit.take('l', 'ann', 0.5, '1 minute', most => 1)`:                                                          `capacity must be at least 1 to take whole tokens, not 0.5`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => 1, capacity => 0)`:                                            `capacity must be at least 1 to take whole tokens, not 0`,
			`ratelimit.take('l', '', 10, '1 minute', most => 1)`:                                                              `key must have 1 to 1024 bytes, not`,
			`ratelimit.take('l', NULL, 10, '1 minute', most => 1)`:                                                            `key must have 1 to 1024 bytes, not`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => 1, global => true)`:                                           `key must be NULL with global => true`,
			`ratelimit.take('', 'ann', 10, '1 minute', most => 1)`:                                                            `name must have 1 to 255 bytes, not`,
			`ratelimit.take('l', 'ann', 'NaN', '1 minute', most => 1)`:                                                        `between 1e-15 and 1e15, not NaN`,
			`ratelimit.take('l', 'ann', 10, '1 month', most => 1)`:                                                            `without months and years`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => 1, kind => 'leaky bucket')`:                                   `kind must be 'token bucket', 'fixed window' or 'calendar window', not 'leaky bucket'`,
			`ratelimit.take('l', 'ann', 10, '1 minute', most => 1, shards => 101)`:                                            `shards must be a whole number between 1 and 100, not 101`,
			`ratelimit._by_hand('take', 'l', 'ann', 10, '1 minute', most => 1, now => 'infinity')`:                            `now must be between the years 1000 and 9999, not infinity`,
			`ratelimit.take('l', 'ann', 10, '1 day', most => 1, kind => 'calendar window', zone => 'x''; DROP TABLE y; --/')`: `zone must be 'UTC' or a name with a slash`,
		} {
			sqlRefused(w, "SELECT FROM "+call, text)
		}
		if rows := w.Rows(); rows != "" {
			w.Errorf("something was written:\n%s", rows)
		}
		for _, call := range []string{
			`ratelimit.reserve('o''limit', 'a''b"c%s$1', 10, '1 minute', 20)`, `ratelimit.take('o''limit', 'b''; DROP TABLE ratelimit.limits; --', 10, '1 minute', most => 5)`,
			`ratelimit._by_hand('reserve', 'l', 'fay', 10, '1 minute', 9.5, now => '9999-12-31 23:59:59.999999Z')`,
			`ratelimit._by_hand('reserve', 'l', 'fay', 10, '1 minute', 9.5, now => '9999-12-31 23:59:59.999999Z')`,
			`ratelimit.reserve('l', 'gus', 1e15, '100 milliseconds', 1e15, max_reserved => 1e15)`, `ratelimit.take('l', 'gus', 1e15, '100 milliseconds', most => 1000000000000000)`,
		} {
			w.Must("SELECT FROM " + call)
		}
	})
}

// Without numbers, the two functions use those that are published, under the override in force.
func TestByHandReserveAndTakeWithoutNumbers(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	harness.MustExec(t, pool, `
		SELECT ratelimit.override('bucket', 'raised', rate => 100, capacity => 100, forever => true), ratelimit.override('bucket', 'deeper', max_reserved => 50, forever => true),
		       ratelimit.block('bucket', 'blocked', until => '9000-01-01 00:00+00'), ratelimit.block('bucket', 'for good', forever => true), ratelimit.unlimited('bucket', 'free', forever => true)`)
	limiter, clock := harness.NewLimiter()
	w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
	reserveByHand(w, "'bucket', 'ann', count => 25", 30*time.Second, -5) // the limit's own max_reserved
	denyByHand(w, "ratelimit.reserve('bucket', 'ann')", "2026-07-01 12:00:06")
	reserveByHand(w, "'bucket', 'deeper', count => 70", 5*time.Minute, -50)
	reserveByHand(w, "'bucket', 'raised', count => 105", 3*time.Second, -5)
	denyByHand(w, "ratelimit.reserve('bucket', 'raised')", "2026-07-01 12:00:00")
	denyByHand(w, "ratelimit.reserve('bucket', 'blocked')", "9000-01-01 00:00:00")
	denyByHand(w, "ratelimit.reserve('bucket', 'for good', count => 0)", "")
	denyByHand(w, "ratelimit.reserve('none', 'ann')", "")
	reserveByHand(w, "'none', 'ann', count => 0", 0, 0)
	takeByHand(w, "'bucket', 'bob', most => 30", 20, 0)
	takeByHand(w, "'sharded', 'bob', most => 30", 12, 0)
	takeByHand(w, "'bucket', 'free', most => 1000000000000000", 1e15, math.Inf(1))
	takeByHand(w, "'open', 'ann', most => 7", 7, math.Inf(1))
	reserveByHand(w, "'open', 'ann', count => 1e15", 0, math.Inf(1))
	denyByHand(w, "ratelimit.take('bucket', 'blocked', most => 5)", "9000-01-01 00:00:00")
	denyByHand(w, "ratelimit.take('bucket', 'for good', most => 5)", "")
	denyByHand(w, "ratelimit.take('none', 'ann', most => 5)", "")
	denyByHand(w, "ratelimit.take('bucket', 'blocked', 10, '1 minute', capacity => 20, most => 30)", "9000-01-01 00:00:00")
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.take('bucket', 'blocked', most => 0)"); harness.SQLState(err) != "22023" {
		t.Errorf("a most of 0 of a blocked key: %v", err)
	}
}

// TestAReservationInSQLIsNoPermission: no call that could be taken for a grant owes tokens, and no denial can be overlooked.
func TestAReservationInSQLIsNoPermission(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, function := range []string{"ratelimit.consume", "ratelimit.try"} {
			for _, argument := range []string{"reserve => true", "max_reserved => 5", "up_to => true"} {
				w.SQLFails("42883", "SELECT "+function+"('l', 'ann', 1, '1 hour', "+argument+")")
			}
		}
		// No grant owes tokens, whatever the numbers, and none has a time to retry.
		granted := 0
		for _, kind := range []string{"token bucket", "fixed window", "calendar window"} {
			for _, shards := range []int{1, 3} {
				for range 5 {
					var ok bool
					var left float64
					var retryAt *time.Time
					w.Do(w.DB.QueryRow(w.Context(), "SELECT granted, remaining, retry_at FROM ratelimit.try($1, 'ann', 4, $2::interval, count => 1.5, kind => $1, shards => $3)",
						kind, map[bool]string{true: "1 day", false: "1000 hours"}[kind == "calendar window"], shards).Scan(&ok, &left, &retryAt))
					if ok != (retryAt == nil) || left < 0 {
						w.Fatalf("%s: ok %v, %v left, retry at %v", kind, ok, left, retryAt)
					}
					if ok {
						granted++
					}
				}
			}
		}
		if granted != 3*2 { // the rows of another number of shards are the same rows
			w.Errorf("%d grants of 1.5 of 4, want 2 for each kind", granted)
		}
		// A denied reservation or take raises, also where nobody looks at the result.
		w.Must(`CREATE TABLE messages (sender text)`)
		for function, perform := range map[string]string{
			"reserves": "PERFORM ratelimit.reserve('sends', NEW.sender, rate => 2, period => '1000 hours', max_reserved => 1)",
			"takes":    "PERFORM ratelimit.take('takes', NEW.sender, most => 1, rate => 3, period => '1000 hours')",
		} {
			w.Must(fmt.Sprintf(`CREATE FUNCTION %[1]s() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN %[2]s; RETURN NEW; END $$`, function, perform))
			w.Must(fmt.Sprintf(`CREATE TRIGGER %[1]s BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION %[1]s()`, function))
			w.Must(`INSERT INTO messages SELECT 'ann' FROM generate_series(1, 3)`)
			w.SQLFails("PT429", `INSERT INTO messages VALUES ('ann')`)
			w.Must(fmt.Sprintf(`DROP FUNCTION %s CASCADE`, function))
		}
		w.Must(`DROP TABLE messages`)
	})
}

// Many callers reserve and take of the same keys, at every level, in SQL and in Go. Together they get no more than there is, and no debt is
// exceeded.
func TestByHandAndTheLibraryShareALimit(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for _, level := range harness.Levels {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 60, 1000*time.Hour, ratelimit.MaxReserved(20)),
			ratelimit.TokenBucket("sharded", 60, 1000*time.Hour, ratelimit.MaxReserved(20), ratelimit.Shards(3)),
			ratelimit.FixedWindow("window", 60, 1000*time.Hour, ratelimit.MaxReserved(20)),
		} {
			t.Run(fmt.Sprintf("%s, %s", level, limit.Name()), func(t *testing.T) {
				t.Parallel()
				pool := harness.NewPool(t, 8)
				harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", limit))
				coalescer := &ratelimit.Coalescer{Pool: pool}
				defer harness.CloseCoalescer(t, coalescer)
				var limiter ratelimit.Limiter
				var got [4]atomic.Int64 // by way
				inTx := func(call func(ctx context.Context, tx pgx.Tx) error) error {
					return limiter.InTx(t.Context(), pool, call, ratelimit.Isolation(level), ratelimit.Attempts(1000))
				}
				ways := []func() (n int, err error){
					func() (n int, err error) {
						return n, inTx(func(ctx context.Context, tx pgx.Tx) error {
							return tx.QueryRow(ctx, "SELECT taken FROM ratelimit.take($1, 'take', most => 2)", limit.Name()).Scan(&n)
						})
					},
					func() (int, error) {
						return 1, inTx(func(ctx context.Context, tx pgx.Tx) error {
							return harness.Second(limiter.Consume(ctx, tx, limit.Key("take")))
						})
					},
					func() (int, error) {
						return 1, harness.Second(limiter.Consume(t.Context(), coalescer, limit.Key("take")))
					},
					func() (int, error) {
						return 1, inTx(func(ctx context.Context, tx pgx.Tx) error {
							return harness.Second(tx.Exec(ctx, "SELECT ratelimit.reserve($1, 'reserve')", limit.Name()))
						})
					},
				}
				var wg sync.WaitGroup
				for g := range 8 {
					wg.Go(func() {
						for {
							n, err := ways[g%len(ways)]()
							if harness.SQLState(err) == "PT429" || harness.Denied(err) {
								return
							}
							if err != nil {
								t.Error(err)
								return
							}
							got[g%len(ways)].Add(int64(n))
						}
					})
				}
				wg.Wait()
				if n := got[0].Load() + got[1].Load() + got[2].Load(); n != 60 {
					t.Errorf("%d taken, want 60", n)
				}
				if n := got[3].Load(); n != 80 {
					t.Errorf("%d reserved, want 60 and 20 that are owed", n)
				}
			})
		}
	}
}

// The statements of docs/sql.md that schedule and fetch work.
func TestTheDocumentedJobsInSQL(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.MustExec(t, pool, `
		CREATE TABLE emails (address text, run_at timestamptz);
		CREATE TABLE outbox (id int GENERATED ALWAYS AS IDENTITY, address text);
		INSERT INTO outbox (address) SELECT 'user-' || n FROM generate_series(1, 12) AS n`)
	reserve := harness.DocSQL(t, "docs/sql.md", "ratelimit.reserve('emails'")
	for n := range 111 {
		_, err := pool.Exec(t.Context(), reserve)
		if n < 110 && err != nil || n == 110 && harness.SQLState(err) != "PT429" {
			t.Fatalf("email %d: %v", n+1, err)
		}
	}
	if got := harness.Scan[string](t, pool, "SELECT concat(count(*) FILTER (WHERE run_at <= now()), ' ', count(*) FILTER (WHERE run_at > now() + interval '9 minutes')) FROM emails"); got != "10 10" {
		t.Errorf("emails that run now, and in the last minute: %s", got)
	}
	harness.MustExec(t, pool, "DELETE FROM ratelimit.limits; SELECT ratelimit.consume('emails', 'team-a', 10, '1 minute', 3)")
	fetch := harness.DocSQL(t, "docs/sql.md", "ratelimit.take('emails'")
	fetched := func() (addresses []string, err error) {
		rows, err := pool.Query(t.Context(), fetch)
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if addresses, err := fetched(); err != nil || len(addresses) != 7 || harness.Scan[string](t, pool, "SELECT string_agg(address, ' ' ORDER BY id) FROM outbox") != "user-8 user-9 user-10 user-11 user-12" {
		t.Fatalf("with 7 tokens: %q, %v", addresses, err)
	}
	if addresses, err := fetched(); harness.SQLState(err) != "PT429" {
		t.Fatalf("without tokens: %q, %v", addresses, err)
	}
	harness.MustExec(t, pool, "DELETE FROM ratelimit.limits")
	if addresses, err := fetched(); err != nil || len(addresses) != 5 {
		t.Fatalf("more tokens than jobs: %q, %v", addresses, err)
	}
	if addresses, err := fetched(); err != nil || len(addresses) != 0 {
		t.Fatalf("without jobs: %q, %v", addresses, err)
	}
	if left := harness.Scan[float64](t, pool, "SELECT value FROM ratelimit.limits"); left < 5 || left > 6 {
		t.Errorf("%v tokens left of 10 after 5 jobs", left)
	}
}
