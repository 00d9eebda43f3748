package ops_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/procstat"
	"github.com/txlimit/txlimit/ratelimit"
)

// A fleet is several servers, each with the keys of some tenants. A guard is a trigger by which a server refuses the others' keys.

// guardTheirs makes a guard that refuses keys that begin with "theirs".
const guardTheirs = `CREATE TRIGGER guard AFTER INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW
	WHEN (starts_with(NEW.key, 'theirs')) EXECUTE FUNCTION ratelimit.refuse()`

// refusedByGuard wants the error of a guard: a clear one, without the key.
func refusedByGuard(t testing.TB, what string, err error) {
	t.Helper()
	if harness.SQLState(err) != "RL004" || harness.Denied(err) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("%s: %v, want the guard's error", what, err)
		return
	}
	e := harness.PgError(t, err)
	for _, text := range []string{e.Message, e.Detail, e.Hint, e.Where, err.Error()} {
		if strings.Contains(text, "theirs") {
			t.Errorf("%s: %q has the key", what, text)
		}
	}
	if !strings.HasSuffix(e.Message, "': the key does not belong to this server") || !strings.Contains(e.Hint, "the trigger guard") {
		t.Errorf("%s: message %q, hint %q", what, e.Message, e.Hint)
	}
}

// inSavepoint runs a call that fails: in a savepoint if the handle is a transaction, which the error would abort.
func inSavepoint(w harness.World, call func(db harness.Handle) error) error {
	w.Helper()
	_, inTx := w.DB.(pgx.Tx)
	if h, ok := w.DB.(harness.SQLHandle); ok {
		_, inTx = h.On.(*sql.Tx)
	}
	if !inTx {
		return call(w.DB)
	}
	savepoint := w.Begin()
	err := call(savepoint)
	w.Do(savepoint.Rollback(w.Context()))
	return err
}

// contents returns the rows of the table.
func contents(w harness.World) (rows string) {
	w.Helper()
	w.Do(w.DB.QueryRow(w.Context(), `SELECT coalesce(string_agg(r::text, E'\n' ORDER BY name, key, shard), '') FROM ratelimit.limits AS r`).Scan(&rows))
	return rows
}

func TestAGuardRefusesForeignKeysInEveryVerb(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var (
			tokens   = ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.Capacity(20))
			window   = ratelimit.FixedWindow("window", 10, time.Minute)
			calendar = ratelimit.CalendarWindow("calendar", 10, ratelimit.Day)
			sharded  = ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Capacity(20), ratelimit.Shards(4))
			reserves = ratelimit.TokenBucket("reserves", 10, time.Minute, ratelimit.MaxReserved(50))
		)
		// Rows that were there before the guard.
		receipt := w.Grant(tokens.Key("theirs old").Count(15)).Receipt()
		for _, limit := range []ratelimit.Limit{window, calendar, sharded, reserves} {
			w.Grant(limit.Key("theirs old").Count(2))
		}
		w.Must(guardTheirs)
		defer w.Must("DROP TRIGGER guard ON ratelimit.limits") // other tests use the database
		before := contents(w)

		consume := func(requests ...ratelimit.Request) func(db harness.Handle) error {
			return func(db harness.Handle) error {
				result, err := w.Limiter.Consume(w.Context(), db, requests...)
				if result.OK {
					w.Error("granted")
				}
				return err
			}
		}
		reserve := func(request ratelimit.Request) func(db harness.Handle) error {
			return func(db harness.Handle) error {
				reserved, err := w.Limiter.Reserve(w.Context(), db, request)
				if !reserved.RetryAt.IsZero() {
					w.Error("reserved")
				}
				return err
			}
		}
		take := func(request ratelimit.Request) func(db harness.Handle) error {
			return func(db harness.Handle) error {
				n, result, err := w.Limiter.Take(w.Context(), db, 3, request)
				if result.OK || n != 0 {
					w.Errorf("took %d", n)
				}
				return err
			}
		}
		byHand := func(call string) func(db harness.Handle) error {
			return func(db harness.Handle) error {
				_, err := db.Exec(w.Context(), "SELECT * FROM "+call)
				return err
			}
		}
		calls := map[string]func(db harness.Handle) error{}
		for _, key := range []string{"theirs old", "theirs new"} {
			maps.Copy(calls, map[string]func(db harness.Handle) error{
				"consume, " + key:             consume(tokens.Key(key)),
				"window, " + key:              consume(window.Key(key)),
				"calendar window, " + key:     consume(calendar.Key(key)),
				"sharded, " + key:             consume(sharded.Key(key)),
				"all of the shards, " + key:   consume(sharded.Key(key).Count(12)),
				"take, " + key:                take(tokens.Key(key)),
				"reserve, " + key:             reserve(reserves.Key(key).Count(20)),
				"several, " + key:             consume(tokens.Key("mine"), window.Key(key)),
				"several with " + key:         consume(window.Key(key), sharded.Key("mine"), tokens.Key("mine")),
				"several with shards, " + key: consume(window.Key("mine"), sharded.Key(key)),
				"charge, " + key: func(db harness.Handle) error {
					_, err := w.Limiter.Charge(w.Context(), db, tokens.Key(key).Count(100))
					return err
				},
				"wait, " + key: func(db harness.Handle) error {
					_, err := w.Limiter.Wait(w.Context(), db, tokens.Key(key))
					return err
				},
				"ratelimit.try, " + key:     byHand("ratelimit.try('tokens', '" + key + "', 10, '1 minute', capacity => 20)"),
				"ratelimit.reserve, " + key: byHand("ratelimit.reserve('tokens', '" + key + "', 10, '1 minute', capacity => 20)"),
				"ratelimit.take, " + key:    byHand("ratelimit.take('tokens', '" + key + "', most => 2, rate => 10, period => '1 minute', capacity => 20)"),
				"ratelimit, " + key:         byHand("ratelimit.consume('window', '" + key + "', 10, '1 minute', kind => 'fixed window')"),
			})
		}
		calls["refund"] = func(db harness.Handle) error {
			_, err := w.Limiter.Refund(w.Context(), db, receipt, tokens.Key("theirs old").Count(5))
			return err
		}
		if _, isWait := w.DB.(*pgxpool.Pool); !isWait { // Wait is for a pool
			for what := range calls {
				if strings.HasPrefix(what, "wait") {
					delete(calls, what)
				}
			}
		}
		for what, call := range calls {
			refusedByGuard(w, what, inSavepoint(w, call))
		}
		if after := contents(w); after != before {
			w.Errorf("the rows were\n%s\nand are\n%s", before, after)
		}

		// What grants nothing writes nothing, so no guard sees it.
		w.Deny(tokens.Key("theirs old").Count(6))
		if left := w.Check(tokens.Key("theirs new")).Remaining; left != 20 {
			w.Errorf("a check of a foreign key says %v, want a full limit", left)
		}
		if _, err := w.Limiter.Refund(w.Context(), w.DB, harness.ReceiptOf(w.Clock.At, tokens.Key("theirs new").Count(5)), tokens.Key("theirs new").Count(5)); err != nil {
			w.Errorf("a refund to a full limit: %v", err)
		}
		if err := w.Limiter.Reset(w.Context(), w.DB, window.Key("theirs old"), window.Key("theirs new")); err != nil {
			w.Errorf("reset: %v", err)
		}

		// The server's own keys are not affected.
		w.Grant(tokens.Key("mine"), window.Key("mine"), sharded.Key("mine"))
		w.Grant(tokens.Key("mine").Count(19))
		w.Deny(tokens.Key("mine"))
	})
}

func TestAGuardEndsTransactionsAndBatches(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.MustExec(t, pool, guardTheirs+"; CREATE TABLE notes (id int)")
	limit, sharded := harness.Slow("limit", 100), harness.Slow("sharded", 100, ratelimit.Shards(4))
	db := harness.OpenSQL(t, "pgx", pool.Config().ConnString(), 2)
	for _, level := range harness.Levels {
		for _, request := range []ratelimit.Request{limit.Key("theirs"), sharded.Key("theirs")} {
			attempts := 0
			limiter := ratelimit.Limiter{OnRetry: func(context.Context, int, error) { attempts++ }}
			ways := map[string]func() error{
				"InTx": func() error {
					return limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						if _, err := tx.Exec(ctx, "INSERT INTO notes VALUES (1)"); err != nil {
							return err
						}
						_, err := limiter.Consume(ctx, tx, limit.Key("mine"), request)
						return err
					}, ratelimit.Isolation(level))
				},
				"InTx, Hot": func() error {
					return limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						_, err := limiter.Consume(ctx, tx, request)
						return err
					}, ratelimit.Isolation(level), ratelimit.Hot(request))
				},
				"InSQLTx": func() error {
					return limiter.InSQLTx(t.Context(), db, func(ctx context.Context, tx *sql.Tx) error {
						if _, err := tx.ExecContext(ctx, "INSERT INTO notes VALUES (1)"); err != nil {
							return err
						}
						_, err := limiter.Consume(ctx, ratelimit.SQL(tx), request)
						return err
					}, ratelimit.Isolation(level))
				},
				"SendTx": func() error {
					var batch pgx.Batch
					batch.Queue("INSERT INTO notes VALUES (1)")
					if _, err := limiter.QueueConsume(t.Context(), &batch, request); err != nil {
						return err
					}
					return limiter.SendTx(t.Context(), pool, &batch, ratelimit.Isolation(level))
				},
			}
			for way, run := range ways {
				refusedByGuard(t, fmt.Sprint(way, ", ", level), run())
			}
			if attempts != 0 {
				t.Errorf("%s: %d attempts more, want none: the key stays foreign", level, attempts)
			}
		}
	}
	if rows := harness.TableOf(t, pool); rows != "" {
		t.Errorf("the rows are\n%s", rows)
	}
	var notes int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM notes").Scan(&notes); err != nil || notes != 0 {
		t.Errorf("%d notes were stored, %v", notes, err)
	}
}

// Calls that share a statement with a call for a foreign key are decided all the same.
func TestAGuardRefusesOnlyTheForeignCallsOfABatch(t *testing.T) {
	t.Parallel()
	limit := harness.Slow("limit", 100)
	other := ratelimit.FixedWindow("other", 100, 24*time.Hour)
	for what, calls := range map[string][][]ratelimit.Request{
		"keys of one limit":      {{limit.Key("a")}, {limit.Key("theirs 1")}, {limit.Key("b")}, {limit.Key("theirs 2")}, {limit.Key("a")}},
		"keys of several limits": {{limit.Key("a")}, {other.Key("theirs 1")}, {other.Key("b")}},
		"calls for several":      {{limit.Key("a"), other.Key("a")}, {limit.Key("b"), other.Key("theirs 1")}, {limit.Key("b")}},
		"one foreign key":        {{limit.Key("theirs 1")}, {limit.Key("theirs 1")}},
	} {
		for _, first := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, first use %v", what, first), func(t *testing.T) {
				t.Parallel()
				pool := harness.NewPool(t, 4)
				if !first { // the rows are there, as if they had been left behind
					var limiter ratelimit.Limiter
					for _, requests := range calls {
						if _, err := limiter.Consume(t.Context(), pool, requests...); err != nil {
							t.Fatal(err)
						}
					}
				}
				harness.MustExec(t, pool, guardTheirs)
				coalescer := &ratelimit.Coalescer{Pool: pool}
				defer harness.CloseCoalescer(t, coalescer)
				for range 2 { // the second time, the rows of the own keys are there
					release := harness.HoldFlights(t, coalescer, pool)
					f := harness.EnqueueSeveral(t.Context(), t, coalescer, calls...)
					release()
					f.Wg.Wait()
					for i, requests := range calls {
						if foreign := strings.Contains(fmt.Sprintf("%+v", requests), "theirs"); foreign {
							refusedByGuard(t, fmt.Sprint("call ", i), f.Errs[i])
						} else if f.Errs[i] != nil {
							t.Errorf("call %d, whose keys are all its own: %v", i, f.Errs[i])
						}
					}
				}
			})
		}
	}
}

// newFleet makes n servers, each with a migrated database. If there is but one server (TXLIMIT_TEST_DATABASE_URL), they are databases of it.
func newFleet(t *testing.T, n int) (pools []*pgxpool.Pool) {
	t.Helper()
	pools = append(pools, harness.NewPool(t, 8))
	for range n - 1 {
		another, err := postgres.Start(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := another.Close(); err != nil {
				t.Error(err)
			}
		})
		url, _, err := another.NewDatabase(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		harness.Migrate(t, url)
		pools = append(pools, harness.Connect(t, url, 8))
	}
	return pools
}

// A router that sends calls to any server, as pgdog does with a SELECT without FROM and without a hint, lets each of them grant
// the whole limit. Guards stop it: a call that reaches a wrong server is an error.
func TestAWrongRouterCannotOvergrantAGuardedFleet(t *testing.T) {
	t.Parallel()
	servers := newFleet(t, 2)
	var coalescers []*ratelimit.Coalescer
	var dbs []*sql.DB
	for _, pool := range servers {
		coalescer := &ratelimit.Coalescer{Pool: pool}
		t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
		coalescers = append(coalescers, coalescer)
		dbs = append(dbs, harness.OpenSQL(t, "pgx", pool.Config().ConnString(), 4))
	}
	var limiter ratelimit.Limiter
	ways := map[string]func(ctx context.Context, to int, request ratelimit.Request) error{
		"pool": func(ctx context.Context, to int, request ratelimit.Request) error {
			_, err := limiter.Consume(ctx, servers[to], request)
			return err
		},
		"Coalescer": func(ctx context.Context, to int, request ratelimit.Request) error {
			_, err := limiter.Consume(ctx, coalescers[to], request)
			return err
		},
		"SQL": func(ctx context.Context, to int, request ratelimit.Request) error {
			_, err := limiter.Consume(ctx, ratelimit.SQL(dbs[to]), request)
			return err
		},
		"SendTx": func(ctx context.Context, to int, request ratelimit.Request) error {
			var batch pgx.Batch
			if _, err := limiter.QueueConsume(ctx, &batch, request); err != nil {
				return err
			}
			return limiter.SendTx(ctx, servers[to], &batch, ratelimit.Isolation(pgx.ReadCommitted))
		},
	}
	for _, level := range harness.Levels {
		for _, hot := range []bool{false, true} {
			ways[fmt.Sprintf("InTx %s, hot %v", level, hot)] = func(ctx context.Context, to int, request ratelimit.Request) error {
				options := []ratelimit.TxOption{ratelimit.Isolation(level), ratelimit.Attempts(100)}
				if hot {
					options = append(options, ratelimit.Hot(request))
				}
				return limiter.InTx(ctx, servers[to], func(ctx context.Context, tx pgx.Tx) error {
					_, err := limiter.Consume(ctx, tx, request)
					return err
				}, options...)
			}
		}
	}

	const keys, capacity = 3, 4
	// send makes twice as many calls for each key as both servers could grant.
	send := func(t *testing.T, limit ratelimit.Limit, consume func(ctx context.Context, to int, request ratelimit.Request) error, route func(key int) int) (granted [keys]int64, foreign int64) {
		t.Helper()
		var grants [keys]atomic.Int64
		var refused atomic.Int64
		var wg sync.WaitGroup
		for key := range keys {
			for range 4 {
				wg.Go(func() {
					for range capacity {
						switch err := consume(t.Context(), route(key), limit.Key(fmt.Sprint("theirs ", key))); { // no error may have the key
						case err == nil:
							grants[key].Add(1)
						case harness.SQLState(err) == "RL004":
							refusedByGuard(t, "a foreign call", err)
							refused.Add(1)
						case !harness.Denied(err):
							t.Error(err)
						}
					}
				})
			}
		}
		wg.Wait()
		for key := range keys {
			granted[key] = grants[key].Load()
		}
		return granted, refused.Load()
	}
	inTurn := func() func(key int) int {
		var calls [keys]atomic.Int64
		return func(key int) int { return int(calls[key].Add(1)) % len(servers) }
	}

	granted, foreign := send(t, harness.Slow("unguarded", capacity), ways["pool"], inTurn())
	for key, n := range granted {
		if n != 2*capacity { // if no longer, this test shows nothing
			t.Errorf("without guards, key %d was granted %d times, want %d: a whole limit from each server", key, n, 2*capacity)
		}
	}
	if foreign != 0 {
		t.Errorf("%d calls were refused without a guard", foreign)
	}

	for i, pool := range servers {
		harness.MustExec(t, pool, fmt.Sprintf(`DELETE FROM ratelimit.limits; CREATE TRIGGER guard AFTER INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW
			WHEN (hashtextextended(NEW.key, 0) & 1 <> %d) EXECUTE FUNCTION ratelimit.refuse()`, i))
	}
	r := harness.NewRand(t)
	var mu sync.Mutex
	atRandom := func(int) int {
		mu.Lock()
		defer mu.Unlock()
		return r.IntN(len(servers))
	}
	for way, consume := range ways {
		for name, route := range map[string]func(key int) int{"in turn": inTurn(), "at random": atRandom} {
			for _, shards := range []int{1, 2} {
				limit := harness.Slow(fmt.Sprintf("%s, %s, %d", way, name, shards), capacity, ratelimit.Shards(shards))
				granted, foreign := send(t, limit, consume, route)
				for key, n := range granted {
					// At random, fewer calls than that may reach the key's server.
					if n > capacity || name == "in turn" && n < capacity {
						t.Errorf("%s: key %d was granted %d times of %d", limit.Name(), key, n, capacity)
					}
				}
				if half := int64(keys * 4 * capacity / 2); name == "in turn" && foreign != half {
					t.Errorf("%s: %d calls were refused, want the %d that reached the wrong server", limit.Name(), foreign, half)
				}
			}
		}
	}
	for i, pool := range servers {
		var own, others int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE hashtextextended(key, 0) & 1 = $1),
			count(*) FILTER (WHERE hashtextextended(key, 0) & 1 <> $1) FROM ratelimit.limits`, i).Scan(&own, &others)
		if err != nil || own == 0 || others != 0 {
			t.Errorf("server %d has %d rows of its keys and %d of others', %v", i, own, others, err)
		}
	}
}

// The SQL of docs/distributed.md.
func TestTheGuardsOfTheDocs(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	limit := harness.Slow("limit", 100)
	consume := func(t *testing.T, db ratelimit.DB, key string) error {
		_, err := new(ratelimit.Limiter).Consume(t.Context(), db, limit.Key(strings.Split(key, "|")...))
		return err
	}
	trigger := harness.DocSQL(t, "docs/distributed.md", "NOT starts_with")
	page, err := os.ReadFile("../../docs/distributed.md")
	if err != nil {
		t.Fatal(err)
	}
	conditions := regexp.MustCompile("(?m)^\\| [^|]+ \\| `(\\(.*\\))` ?\\|$").FindAllStringSubmatch(string(page), -1)
	if len(conditions) != 4 { // the hash of a tenant is one of them
		t.Fatalf("the page has %d conditions that need no function, want 4", len(conditions))
	}
	for _, condition := range conditions {
		t.Run(condition[1], func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 1)
			harness.MustExec(t, pool, strings.Replace(trigger, "(NOT starts_with(NEW.key, 'eu|'))", strings.ReplaceAll(condition[1], `\|`, "|"), 1))
			own, foreign := 0, 0
			for tenant := range 40 {
				switch err := consume(t, pool, []string{"eu|", "us|"}[tenant%2]+fmt.Sprint(tenant)); {
				case err == nil:
					own++
				case harness.SQLState(err) == "RL004":
					foreign++
				default:
					t.Fatal(err)
				}
			}
			if own+foreign != 40 || own == 0 || foreign == 0 {
				t.Errorf("%d keys are the server's own, %d are foreign", own, foreign)
			}
		})
	}

	// A tenant is closed. The UPDATE waits for the transactions that have taken tokens, and no other is granted afterwards, not even
	// one that began before.
	tenants := harness.DocSQL(t, "docs/distributed.md", "CREATE TABLE tenants")
	for _, level := range harness.Levels {
		for _, used := range []bool{false, true} {
			t.Run(fmt.Sprintf("closing a tenant, %s, used %v", level, used), func(t *testing.T) {
				t.Parallel()
				pool := harness.NewPool(t, 4)
				harness.MustExec(t, pool, tenants+"; INSERT INTO tenants VALUES ('acme', true), ('other', true)")
				if used {
					if err := consume(t, pool, "acme|ann"); err != nil {
						t.Fatal(err)
					}
				}
				var txs []pgx.Tx
				for range 2 {
					tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
					if err != nil {
						t.Fatal(err)
					}
					defer tx.Rollback(context.WithoutCancel(t.Context()))
					if _, err := tx.Exec(t.Context(), "SELECT 1 FROM tenants"); err != nil { // a snapshot
						t.Fatal(err)
					}
					txs = append(txs, tx)
				}
				scans := func() (table, index int) {
					err := txs[0].QueryRow(t.Context(), "SELECT seq_scan, idx_scan FROM pg_stat_xact_user_tables WHERE relid = 'tenants'::regclass").Scan(&table, &index)
					if err != nil {
						t.Fatal(err)
					}
					return table, index
				}
				tableBefore, indexBefore := scans()
				if err := consume(t, txs[0], "acme|ann"); err != nil {
					t.Fatal(err)
				}
				if table, index := scans(); table != tableBefore || index != indexBefore+1 {
					t.Errorf("the guard has scanned the table %d times and the index %d times, want once, by the index", table-tableBefore, index-indexBefore)
				}
				closed := make(chan error)
				go func() {
					err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
						_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended('acme', 0));
							UPDATE tenants SET here = false WHERE id = 'acme'`, pgx.QueryExecModeSimpleProtocol)
						return err
					})
					closed <- err
				}()
				harness.WaitingFor(t, pool, txs[0])
				if err := txs[0].Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := <-closed; err != nil {
					t.Fatal(err)
				}
				if err := consume(t, txs[1], "acme|bob"); harness.SQLState(err) != "RL004" && (level == pgx.ReadCommitted || harness.SQLState(err) != "40001") {
					t.Errorf("in a transaction that began before: %v", err)
				}
				if err := consume(t, pool, "acme|ann"); harness.SQLState(err) != "RL004" {
					t.Errorf("afterwards: %v", err)
				}
				if err := consume(t, pool, "other|ann"); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// What a guard costs: the processor time of the server's process for a call on a pool, in µs. Slices of 100 calls take turns, so that
// the load of the machine is mostly the same for all guards. It needs a server on this machine, and Linux.
//
//	go test ./integration_test -run '^$' -bench Guard -benchtime 200x
func BenchmarkGuard(b *testing.B) {
	const trigger = "; CREATE TRIGGER guard AFTER INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW WHEN (%s) EXECUTE FUNCTION ratelimit.refuse()"
	const tenants = `; CREATE TABLE tenants (id text COLLATE "C" PRIMARY KEY, here boolean NOT NULL); INSERT INTO tenants SELECT n::text, true FROM generate_series(0, 999) AS n;
		CREATE FUNCTION tenant_is_here(key text) RETURNS boolean LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM FROM tenants WHERE id = (ratelimit.key_parts(key))[1] AND here %s;
			RETURN FOUND;
		END $$`
	guards := []struct {
		name, sql string
		pool      *pgxpool.Pool
		pid       int
		before    time.Duration
	}{
		{name: "none"},
		{name: "prefix", sql: fmt.Sprintf(trigger, "NOT starts_with(NEW.key, '')")},
		{name: "hash", sql: fmt.Sprintf(trigger, "hashtextextended(NEW.key, 0) & 0 <> 0")},
		{name: "CHECK", sql: "; ALTER TABLE ratelimit.limits ADD CONSTRAINT guard CHECK (hashtextextended(key, 0) & 0 = 0)"},
		{name: "table", sql: fmt.Sprintf(tenants, "") + fmt.Sprintf(trigger, "NOT tenant_is_here(NEW.key)")},
		{name: "table-FOR-SHARE", sql: fmt.Sprintf(tenants, "FOR SHARE") + fmt.Sprintf(trigger, "NOT tenant_is_here(NEW.key)")},
	}
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("limit", 1e9, time.Second)
	consume := func(pool *pgxpool.Pool, calls int) {
		for i := range calls {
			if _, err := limiter.Consume(b.Context(), pool, limit.Key(fmt.Sprint(i%1000))); err != nil {
				b.Fatal(err)
			}
		}
	}
	for i := range guards {
		g := &guards[i]
		g.pool = harness.NewPool(b, 1)
		if err := g.pool.AcquireFunc(b.Context(), func(conn *pgxpool.Conn) error {
			// The disk is not measured.
			_, err := conn.Conn().PgConn().Exec(b.Context(), "SET synchronous_commit = off"+g.sql).ReadAll()
			return err
		}); err != nil {
			b.Fatal(err)
		}
		if err := g.pool.QueryRow(b.Context(), "SELECT pg_backend_pid()").Scan(&g.pid); err != nil {
			b.Fatal(err)
		}
		consume(g.pool, 1000)
		g.before = processorTime(b, g.pid)
	}
	for range b.N {
		for i := range guards {
			consume(guards[i].pool, 100)
		}
	}
	for _, g := range guards {
		b.ReportMetric(float64((processorTime(b, g.pid)-g.before).Microseconds())/float64(100*b.N), g.name+"-µs/op")
	}
}

func processorTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	p, err := procstat.Read(pid)
	if err != nil {
		b.Fatal(err)
	}
	return p.CPU
}
