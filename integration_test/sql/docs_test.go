package sql_test

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/ratelimit"
)

// night has the limits of docs/incidents.md, and a pool with their rows.
type night struct {
	*testing.T
	pool    *pgxpool.Pool
	limiter ratelimit.Limiter
}

var (
	nightMessages = ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20))
	nightSignUps  = ratelimit.FixedWindow("signUps", 100, time.Hour)
)

func (n *night) consume(db ratelimit.DB, request ratelimit.Request) (granted bool) {
	n.Helper()
	_, err := n.limiter.Consume(n.Context(), db, request)
	if err != nil && !harness.Denied(err) {
		n.Fatal(err)
	}
	return err == nil
}

func (n *night) reserve(request ratelimit.Request) {
	n.Helper()
	if _, err := n.limiter.Reserve(n.Context(), n.pool, request); err != nil && !harness.Denied(err) {
		n.Fatal(err)
	}
}

func (n *night) exec(sql string) {
	n.Helper()
	if _, err := n.pool.Exec(n.Context(), sql); err != nil {
		n.Fatalf("%s: %v", sql, err)
	}
}

// is runs a query that answers true or false.
func (n *night) is(sql string, args ...any) (yes bool) {
	n.Helper()
	harness.Succeeds(n, n.pool.QueryRow(n.Context(), sql, args...).Scan(&yes))
	return yes
}

// whileOneWaits makes a transaction consume and another call wait for it. It calls do meanwhile, and then ends the
// transaction.
func (n *night) whileOneWaits(do func(blocker int)) {
	n.Helper()
	key := nightMessages.Key("ann")
	n.consume(n.pool, key) // makes the row: a call that waits to insert it has not written yet
	tx, err := n.pool.Begin(n.Context())
	harness.Succeeds(n, err)
	defer tx.Rollback(context.WithoutCancel(n.Context()))
	n.consume(tx, key)
	done := make(chan error, 1)
	go func() { _, err := n.limiter.Consume(n.Context(), n.pool, key); done <- err }()
	do(harness.ServerPID(n.T, tx))
	if err := tx.Rollback(n.Context()); err != nil {
		n.Error(err)
	}
	if err := <-done; err != nil {
		n.Errorf("when no transaction is in the way: %v", err)
	}
}

// locksInOrder runs a recipe for a sharded key whose rows lie in the table in the other order than that of the locks, while a transaction takes
// from all of them. Locked in another order, the two deadlock.
func (n *night) locksInOrder(name, sql string) {
	n.Helper()
	for _, shard := range []int{2, 1, 0} {
		n.exec(fmt.Sprintf(`INSERT INTO ratelimit.limits VALUES ('%s', 'sharded', %d, 3, 5, now() + interval '1 year')`, name, shard))
	}
	tx, err := n.pool.Begin(n.Context())
	harness.Succeeds(n, err)
	defer tx.Rollback(context.WithoutCancel(n.Context()))
	lock := func(shard int) error {
		return harness.Second(tx.Exec(n.Context(), `SELECT FROM ratelimit.limits WHERE name = $1 AND key = 'sharded' AND shard = $2 FOR UPDATE`, name, shard))
	}
	harness.Succeeds(n, lock(0))
	done := make(chan error, 1)
	go func() { _, err := n.pool.Exec(n.Context(), sql); done <- err }()
	harness.WaitingFor(n.T, n.pool, tx)
	if err := lock(2); err != nil {
		n.Errorf("a call beside the recipe: %v", err)
	}
	if err := tx.Rollback(n.Context()); err != nil {
		n.Error(err)
	}
	if err := <-done; err != nil {
		n.Errorf("the recipe beside a call: %v", err)
	}
	if rows := harness.Scan[int](n.T, n.pool, `SELECT count(*) FROM ratelimit.limits WHERE key = 'sharded'`); rows != 0 {
		n.Errorf("%d rows are left", rows)
	}
}

// holds has slots in use, of a key and of none, tokens that are held, an id that is counted, and a key with shards, some time ahead. The
// function that it returns wants the slots to be in use still, and takes all of it away.
func (n *night) holds(ahead time.Duration) (after func()) {
	n.Helper()
	l := ratelimit.Limiter{Clock: func() time.Time { return time.Now().Add(ahead) }}
	slots, all := ratelimit.Slots("renders", 2), ratelimit.Slots("rendersInAll", 9)
	budget := ratelimit.TokenBucket("budget", 10, time.Hour)
	harness.Succeeds(n, harness.Second(l.Hold(n.Context(), n.pool, "job", time.Hour, slots.Key("acme"), all.Global(), budget.Key("acme"))))
	harness.Succeeds(n, harness.Third(l.Once(n.Context(), n.pool, "event", time.Hour, budget.Key("acme"))))
	harness.Succeeds(n, harness.Second(l.Consume(n.Context(), n.pool, ratelimit.TokenBucket("pool", 9, time.Hour, ratelimit.Shards(3)).Key("acme"))))
	return func() {
		n.Helper()
		if got := harness.Lines(n.T, n.pool, "SELECT name, state FROM ratelimit.holds WHERE id = 'job' ORDER BY name"); got != "(budget,lapsed)\n(renders,held)\n(rendersInAll,held)" {
			n.Error(got)
		}
		n.exec("DELETE FROM ratelimit.holds; DELETE FROM ratelimit.limits WHERE name IN ('renders', 'rendersInAll', 'budget', 'pool')")
	}
}

// first returns the first column of a query's result.
func (n *night) first(sql string) (column []string) {
	n.Helper()
	rows, err := n.pool.Query(n.Context(), sql)
	harness.Succeeds(n, err)
	defer rows.Close()
	for rows.Next() {
		values, err := rows.Values()
		harness.Succeeds(n, err)
		column = append(column, strings.TrimSpace(strings.Trim(toText(values[0]), "{}")))
	}
	if rows.Err() != nil {
		n.Fatalf("%s: %v", sql, rows.Err())
	}
	return column
}

func toText(v any) string {
	if s, ok := v.(string); ok {
		return s
	}
	return "?"
}

// TestOperationsAt3AM runs the SQL of the recipes as printed.
func TestOperationsAt3AM(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	runDoc(t, "docs/incidents.md", map[string]func(n *night, sql string){
		"ratelimit.keys('sendMessage'": func(n *night, sql string) {
			harness.Succeeds(n, new(ratelimit.Limiter).Publish(n.Context(), n.pool, "web", nightMessages))
			n.consume(n.pool, nightMessages.Key("has some").Count(3))
			n.consume(n.pool, nightMessages.Key("limited").Count(20))
			n.reserve(nightMessages.Key("in debt").Count(30))
			if got := n.first(sql); len(got) != 2 || got[0] != "in debt" || got[1] != "limited" {
				n.Errorf("limited are %q", got)
			}
		},
		"ratelimit.keys('signUps'": func(n *night, sql string) {
			n.consume(n.pool, nightSignUps.Key("has some").Count(99))
			for n.consume(n.pool, nightSignUps.Global().Count(50)) { // twice, unless a new hour has just begun
			}
			if got := n.first(sql); len(got) != 1 || got[0] != "" {
				n.Errorf("limited are %q", got)
			}
		},
		"backend_xid": func(n *night, sql string) {
			n.whileOneWaits(func(blocker int) {
				// True once older transactions of other tests have ended.
				harness.Eventually(n.T, "the query shows the open transaction before the one that waits for it", func() bool {
					return n.is(`WITH q AS (`+strings.TrimSuffix(sql, ";")+`)
						SELECT EXISTS (SELECT FROM q AS culprit JOIN q AS victim ON victim.blocked_by = ARRAY[culprit.pid] AND victim.xact_start > culprit.xact_start
							WHERE culprit.pid = $1 AND culprit.blocked_by = '{}')`, blocker)
				})
			})
		},
		"cardinality(pg_blocking_pids": func(n *night, sql string) {
			var blocked func() bool
			n.whileOneWaits(func(blocker int) {
				blocked = func() bool {
					return n.is(`SELECT EXISTS (SELECT FROM (`+strings.TrimSuffix(sql, ";")+`) AS q WHERE blocked_by = ARRAY[$1::integer] AND query ~ '-- name: (Consume|Update[A-Z][a-z]+) ')`, blocker)
				}
				harness.Eventually(n.T, "the query shows which session waits for which", blocked)
			})
			if blocked() {
				n.Error("the query shows a waiting session, but none waits any more")
			}
		},
		"sum(ratelimit.reset('signUps'": func(n *night, sql string) {
			n.locksInOrder("signUps", sql)
			n.holds(0)
			n.consume(n.pool, nightSignUps.Key("another").Count(100))
			for n.consume(n.pool, nightSignUps.Global().Count(100)) { // twice, if a new hour begins
			}
			if rows := harness.Scan[int](n.T, n.pool, sql); rows != 2 {
				n.Errorf("%d rows deleted", rows)
			}
			if !n.consume(n.pool, nightSignUps.Global().Count(100)) || !n.consume(n.pool, nightSignUps.Key("another").Count(100)) {
				n.Error("it is not full")
			}
		},
		"SELECT version, current_database()": func(n *night, sql string) {
			for state, pool := range map[string]*pgxpool.Pool{"": n.pool, "3F000": harness.Connect(n.T, harness.NewDatabase(n.T), 1)} {
				if _, err := pool.Exec(n.Context(), sql); harness.SQLState(err) != state || state == "" && err != nil {
					n.Errorf("%v, want %q", err, state)
				}
			}
			for usage, state := range map[bool]string{true: "", false: "42501"} {
				if _, err := harness.NewRole(n.T, n.pool, usage).Exec(n.Context(), sql); harness.SQLState(err) != state || usage && err != nil {
					n.Errorf("a role with USAGE %v: %v, want %q", usage, err, state)
				}
			}
		},
		"ratelimit.reset('sendMessage', 'user-17'": func(n *night, sql string) {
			user, other := nightMessages.Key("user-17"), nightMessages.Key("user-18")
			for range 3 { // again and again
				n.consume(n.pool, user.Count(20))
				n.reserve(other.Count(20))
				if n.consume(n.pool, user.Count(19)) {
					n.Fatal("not limited")
				}
				if rows := harness.Scan[int](n.T, n.pool, sql); rows != 1 {
					n.Errorf("%d rows deleted", rows)
				}
				if !n.consume(n.pool, user.Count(20)) || n.consume(n.pool, user.Count(19)) {
					n.Error("not its whole capacity can be used")
				}
			}
		},
		"ratelimit.override('signUps', 'acme'": func(n *night, sql string) {
			n.exec(sql)
			if got := n.first("SELECT effect FROM ratelimit._in_force('signUps', '{acme}', now() + interval '119 minutes') LIMIT 1"); len(got) != 1 || got[0] != "numbers" {
				n.Errorf("in force: %q", got)
			}
		},
		"ratelimit.block('sendMessage', 'user-17'": func(n *night, sql string) {
			n.exec(sql)
			follow.By(&n.limiter, follow.Settings{DB: n.pool})
			harness.Succeeds(n, follow.Load(n.Context(), &n.limiter))
			if n.consume(n.pool, nightMessages.Key("user-17")) || !n.consume(n.pool, nightMessages.Key("user-18")) {
				n.Error("not the one key is blocked")
			}
		},
		"'sendMessage', 'user-17', 0, 1, 0, now() + interval '1 hour'": func(n *night, sql string) {
			for _, used := range []bool{false, true} {
				user := nightMessages.Key("user-17")
				n.exec(`DELETE FROM ratelimit.limits`)
				if used {
					n.consume(n.pool, user)
				}
				n.exec(sql)
				result, err := n.limiter.Consume(n.Context(), n.pool, user)
				if !harness.Denied(err) || result.RetryAfter < 59*time.Minute || result.RetryAfter > time.Hour+6*time.Second {
					n.Errorf("shut out for %v, %v", result.RetryAfter, err)
				}
				if !n.consume(n.pool, nightMessages.Key("user-18")) {
					n.Error("another key is shut out")
				}
				if used { // with shards
					n.exec(harness.DocSQL(n.T, "docs/incidents.md", "ratelimit.reset('sendMessage'"))
					sharded := ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20), ratelimit.Shards(3)).Key("user-17")
					later := ratelimit.Limiter{Clock: n.limiter.Clock} // of a version with shards
					if _, err := later.Consume(n.Context(), n.pool, sharded); err != nil {
						n.Error(err)
					}
					n.exec(harness.DocSQL(n.T, "docs/incidents.md", "ratelimit.reset('sendMessage'"))
					n.exec(sql)
					if result, err := later.Consume(n.Context(), n.pool, sharded); !harness.Denied(err) || result.RetryAfter < 59*time.Minute {
						n.Errorf("with shards, shut out for %v, %v", result.RetryAfter, err)
					}
				}
				// An hour later.
				n.exec(`UPDATE ratelimit.limits SET ts = ts - interval '1 hour 1 minute' WHERE key = 'user-17'`)
				if !n.consume(n.pool, user.Count(10)) || n.consume(n.pool, user.Count(5)) {
					n.Error("an hour later, the balance is not as usual")
				}
			}
		},
		"ts > now() + interval '1 minute'": func(n *night, sql string) {
			user := nightMessages.Key("user-17")
			n.exec(`INSERT INTO ratelimit.limits VALUES ('sendMessage', 'user-17', 0, 1, 0, now() + interval '74 years')`)
			n.consume(n.pool, nightMessages.Key("user-18"))
			if n.consume(n.pool, user) {
				n.Error("it is refilled before the clock is back at that time")
			}
			ahead := n.holds(74 * 365 * 24 * time.Hour)
			if keys := harness.Scan[int](n.T, n.pool, sql); keys != 3 {
				n.Errorf("%d keys reset, want user-17, budget and pool", keys)
			}
			ahead()
			if !n.consume(n.pool, user.Count(20)) {
				n.Error("it is not full")
			}
			n.locksInOrder("sendMessage", sql)

			// What the page puts in place of the condition leaves paused keys out.
			page, err := os.ReadFile("../../docs/incidents.md")
			harness.Succeeds(n, err)
			others := regexp.MustCompile("\n- `(ts [^`]+)`").FindAllStringSubmatch(string(page), -1)
			if len(others) != 2 {
				n.Fatalf("the page has %q", others)
			}
			paused := nightMessages.Key("paused")
			harness.Succeeds(n, harness.Second(n.limiter.Pause(n.Context(), n.pool, 30*24*time.Hour, paused)))
			for i, other := range others {
				n.exec(`INSERT INTO ratelimit.limits VALUES ('sendMessage', 'ahead', 0, 1, 0, ` + []string{"'2030-05-01 09:10+00'", "now() + interval '74 years'"}[i] + `)`)
				if keys := harness.Scan[int](n.T, n.pool, strings.Replace(sql, "ts > now() + interval '1 minute'", other[1], 1)); keys != 1 || n.consume(n.pool, paused) {
					n.Errorf("with %s, %d keys are reset", other[1], keys)
				}
			}
			if keys := harness.Scan[int](n.T, n.pool, sql); keys != 1 || !n.consume(n.pool, paused) {
				n.Errorf("%d keys reset, want the paused one", keys)
			}
		},
	})
}

// TestOperationsInProduction runs the SQL of the sections on production as printed.
func TestOperationsInProduction(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	runDoc(t, "docs/operations.md", map[string]func(n *night, sql string){
		"ratelimit.sweep('sendMessage'": func(n *night, sql string) {
			n.sweeps(sql, nightMessages.Name())
		},
		"DISABLE TRIGGER limit_messages": func(n *night, sql string) {
			harness.MustExec(n.T, n.pool, harness.DocSQL(n.T, "docs/sql.md", "CREATE TRIGGER"))
			load := func(tx pgx.Tx, rows int) error {
				return harness.Second(tx.Exec(n.Context(), fmt.Sprintf(`INSERT INTO public.messages SELECT 'acme', 'x' FROM generate_series(1, %d)`, rows)))
			}
			// As a dump is loaded: with an empty search_path, and then the rows of the limit.
			restore := func(rows int) error {
				return pgx.BeginFunc(n.Context(), n.pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(n.Context(), `SELECT set_config('search_path', '', true)`); err != nil {
						return err
					}
					if err := load(tx, rows); err != nil {
						return err
					}
					_, err := tx.Exec(n.Context(), `INSERT INTO ratelimit.limits VALUES ('messages', 'acme', 0, 1, 50, now())`)
					return err
				})
			}
			wants := func(how string, rows int, state string) {
				n.Helper()
				if err := restore(rows); harness.SQLState(err) != state || state == "" && err != nil {
					n.Errorf("%s, %d rows: %v, want %q", how, rows, err, state)
				}
			}
			wants("with the trigger", 150, "23505")
			wants("with the trigger", 300, "22023")
			disable, enable, ok := strings.Cut(sql, "-- Load the rows here.")
			if !ok {
				n.Fatal("the block does not say where to load the rows")
			}
			harness.MustExec(n.T, n.pool, disable)
			wants("disabled", 300, "")
			harness.MustExec(n.T, n.pool, enable)
			if err := pgx.BeginFunc(n.Context(), n.pool, func(tx pgx.Tx) error { return load(tx, 201) }); harness.SQLState(err) != "22023" {
				n.Errorf("enabled again: %v", err)
			}
		},
		"INSERT INTO other.": func(n *night, sql string) {
			n.renamesItsSchema()
			n.consume(n.pool, nightMessages.Key("ann").Count(15))
			harness.MustExec(n.T, n.pool, `SELECT ratelimit.publish('night', '[{"name": "renders", "kind": "slots", "capacity": 2},
					{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1 minute", "capacity": 20}]');
				SELECT ratelimit.hold('renders', 'ann', 'job', forever => true);
				SELECT ratelimit.block('sendMessage', 'eve', forever => true), ratelimit.block('sendMessage', 'fay', forever => true);
				INSERT INTO ratelimit.usage VALUES ('messages', now(), 1, 2, 3, 4, 5, 6);
				INSERT INTO ratelimit.denials VALUES ('messages', now(), 'ann', 1, 2, now())`)
			harness.Succeeds(n, migrated.UpIn(n.Context(), n.pool.Config().ConnString(), "other"))
			harness.MustExec(n.T, n.pool, sql)
			tables := n.first(`SELECT tablename FROM pg_tables WHERE schemaname = 'ratelimit' AND tablename !~ 'goose|sweeps|limits_' ORDER BY 1`) // whose turn it is to sweep is not moved
			if len(tables) != 6 {
				n.Errorf("the tables are %v", tables)
			}
			for _, table := range tables {
				before, after := harness.Lines(n.T, n.pool, "SELECT * FROM ratelimit."+table+" AS t ORDER BY t"), harness.Lines(n.T, n.pool, "SELECT * FROM other."+table+" AS t ORDER BY t")
				if before == "" || before != after {
					n.Errorf("%s had\n%s\nand has\n%s", table, before, after)
				}
			}
			n.limiter = ratelimit.Limiter{Schema: "other"}
			if !n.consume(n.pool, nightMessages.Key("ann").Count(5)) || n.consume(n.pool, nightMessages.Key("ann").Count(5)) {
				n.Error("the new key does not have the rest of the old one")
			}
			if granted := harness.Scan[bool](n.T, n.pool, "SELECT granted FROM other.try('sendMessage', 'eve')"); granted {
				n.Error("a blocked key is granted")
			}
			if id := harness.Scan[int64](n.T, n.pool, "SELECT other.block('sendMessage', 'gil', forever => true)"); id != 3 {
				n.Errorf("the next override has the id %d, want 3", id)
			}
			if ended := harness.Scan[bool](n.T, n.pool, "SELECT other.release('renders', 'ann', 'job')"); !ended {
				n.Error("the hold is not there")
			}
		},
		"name = 'a limit of last year'": func(n *night, sql string) {
			harness.MustExec(n.T, n.pool, `SELECT ratelimit.publish('night', '[{"name": "a limit of last year", "kind": "slots", "capacity": 2}]');
				SELECT ratelimit.hold('a limit of last year', 'ann', 'job', forever => true)`)
			n.consume(n.pool, nightMessages.Key("ann"))
			harness.MustExec(n.T, n.pool, sql)
			if names := n.first(`SELECT name FROM ratelimit.limits UNION ALL SELECT name FROM ratelimit.holds`); !slices.Equal(names, []string{nightMessages.Name()}) {
				n.Errorf("rows are left of %q", names)
			}
		},
	})
}

// runDoc runs tests of a page's blocks. Words in a block identify it.
func runDoc(t *testing.T, page string, tests map[string]func(n *night, sql string)) {
	t.Helper()
	for words, test := range tests {
		t.Run(words, func(t *testing.T) {
			t.Parallel()
			test(&night{T: t, pool: harness.NewPool(t, 4)}, harness.DocSQL(t, page, words))
		})
	}
}

// TestEverySQLBlockOfTheDocsIsTested wants a call of harness.DocSQL or runDoc for every SQL block of the README and of the pages
// under docs/.
func TestEverySQLBlockOfTheDocsIsTested(t *testing.T) {
	t.Parallel()
	asked := askedBlocks(t)
	pages, err := filepath.Glob("../../docs/*.md")
	harness.Succeeds(t, err)
	tested := 0
	for _, file := range append(pages, "../../README.md") {
		page := strings.TrimPrefix(filepath.ToSlash(file), "../../")
		blocks := harness.DocBlocks(t, page)
		text, err := os.ReadFile(file)
		harness.Succeeds(t, err)
		if n := strings.Count(string(text), "```sql"); n != len(blocks) {
			t.Errorf("%s has %d blocks of SQL, %d of them as docBlocks finds them: not indented", page, n, len(blocks))
		}
		for _, block := range blocks {
			if !slices.ContainsFunc(asked[page], func(words string) bool { return strings.Contains(block, words) }) {
				t.Errorf("%s: no test runs\n%s", page, block)
			} else {
				tested++
			}
		}
	}
	if tested == 0 {
		t.Error("no page has any SQL")
	}
}

// askedBlocks returns the words, by page, with which the tests ask harness.DocSQL and runDoc for blocks.
func askedBlocks(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob("../*/*.go")
	harness.Succeeds(t, err)
	asked := map[string][]string{}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		harness.Succeeds(t, err)
		ast.Inspect(parsed, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 3 {
				return true
			}
			if name := strings.TrimPrefix(types.ExprString(call.Fun), "harness."); name != "DocSQL" && name != "runDoc" {
				return true
			}
			words := []ast.Expr{call.Args[2]}
			if tests, ok := call.Args[2].(*ast.CompositeLit); ok {
				words = nil
				for _, test := range tests.Elts {
					words = append(words, test.(*ast.KeyValueExpr).Key)
				}
			}
			for _, w := range words {
				if w := literal(w); w != "" {
					asked[literal(call.Args[1])] = append(asked[literal(call.Args[1])], w)
				}
			}
			return true
		})
	}
	return asked
}

// literal returns the value of a string literal, or "" for any other expression.
func literal(e ast.Expr) string {
	lit, ok := e.(*ast.BasicLit)
	if !ok {
		return ""
	}
	s, err := strconv.Unquote(lit.Value)
	if err != nil {
		return ""
	}
	return s
}

// sweeps wants a sweep of more rows than a batch has to delete exactly those that have been full for an hour.
func (n *night) sweeps(sql, name string) {
	n.Helper()
	rows := func(keys, ts string, value int) {
		n.Helper()
		n.exec(fmt.Sprintf(`INSERT INTO ratelimit.limits SELECT '%s', %s, 0, 1, %d, %s FROM generate_series(1, 3000) AS i ON CONFLICT DO NOTHING`, name, keys, value, ts))
	}
	rows(`'idle ' || i`, `now() - interval '2 hours'`, 0)
	rows(`'in debt'`, `now() - interval '2 hours'`, -1e9)
	rows(`'full for a minute'`, `now() - interval '1 minute'`, 20)
	rows(`'ahead'`, `now() + interval '1 hour'`, 20)
	rows(`'locked'`, `now() - interval '2 hours'`, 0)
	tx, err := n.pool.Begin(n.Context())
	harness.Succeeds(n, err)
	defer tx.Rollback(n.Context())
	harness.Succeeds(n, harness.Second(tx.Exec(n.Context(), `SELECT FROM ratelimit.limits WHERE key = 'locked' FOR UPDATE`)))
	n.exec(sql)
	if got := strings.Join(n.first(`SELECT key FROM ratelimit.limits ORDER BY key`), "; "); got != "ahead; full for a minute; in debt; locked" {
		n.Errorf("left are %s", got)
	}
}

// renamesItsSchema wants all calls to fail while the schema has another name, or to use the schema that has the old name
// now.
func (n *night) renamesItsSchema() {
	n.Helper()
	key := nightMessages.Key("ann")
	harness.MustExec(n.T, n.pool, "ALTER SCHEMA ratelimit RENAME TO renamed")
	for _, schema := range []string{"ratelimit", "renamed"} {
		limiter := ratelimit.Limiter{Schema: schema}
		for name, err := range map[string]error{
			"Consume":           harness.Second(limiter.Consume(n.Context(), n.pool, key)),
			"several":           harness.Second(limiter.Consume(n.Context(), n.pool, key, nightSignUps.Global())),
			"Check":             harness.Second(limiter.Check(n.Context(), n.pool, key)),
			"Reset":             limiter.Reset(n.Context(), n.pool, key),
			"ratelimit.consume": harness.Second(n.pool.Exec(n.Context(), `SELECT FROM `+schema+`.consume('l', 'ann', 1, '1 hour')`)),
			"ratelimit.keys":    harness.Second(n.pool.Exec(n.Context(), `SELECT FROM `+schema+`.keys('l', 1, '1 hour')`)),
		} {
			if harness.Denied(err) || harness.SQLState(err) != "3F000" && harness.SQLState(err) != "42P01" {
				n.Errorf("%s of the schema %s, which was renamed: %v, want 3F000 or 42P01", name, schema, err)
			}
		}
	}
	harness.MustExec(n.T, n.pool, harness.SchemaSQL(n.T))
	if !n.consume(n.pool, key) {
		n.Error("denied")
	}
	if !n.is(`SELECT EXISTS (SELECT FROM ratelimit.limits) AND NOT EXISTS (SELECT FROM renamed.limits)`) {
		n.Error("it did not consume from the schema of the old name")
	}
	harness.MustExec(n.T, n.pool, "DROP SCHEMA ratelimit CASCADE; ALTER SCHEMA renamed RENAME TO ratelimit")
	harness.Works(n.T, n.pool)
}

// docs/incidents.md says that this does not work.
func TestNoRowLiftsALimit(t *testing.T) {
	t.Parallel()
	for _, limit := range []ratelimit.Limit{nightMessages, nightSignUps} {
		n := &night{T: t, pool: harness.NewPool(t, 1)}
		for _, row := range []string{`1e15, now()`, `1e15, now() + interval '1 hour'`, `1e15, now() - interval '1 hour'`, `'Infinity', now()`} {
			n.exec(`DELETE FROM ratelimit.limits`)
			n.exec(`INSERT INTO ratelimit.limits SELECT '` + limit.Name() + `', 'user-17', 0, 1, ` + row)
			if !n.consume(n.pool, limit.Key("user-17").Count(limit.Capacity())) || n.consume(n.pool, limit.Key("user-17").Count(limit.Capacity()/2)) {
				n.Errorf("%v: a row of %s does not grant exactly the capacity", limit, row)
			}
		}
	}
}

// The queries on the keys must also run on a replica, in a read-only transaction.
func TestTheKeysCanBeReadInAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", nightMessages))
	harness.Succeeds(t, pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		for _, name := range []string{"sendMessage", "signUps"} {
			if _, err := tx.Exec(t.Context(), harness.DocSQL(t, "docs/incidents.md", "ratelimit.keys('"+name+"'")); err != nil {
				return err
			}
		}
		return nil
	}))
}

// The calls in docs/sql.md are the Go limits of other pages, and its block that swallows a denial does.
func TestTheDocumentedCallsInSQL(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	calls := harness.DocSQL(t, "docs/sql.md", "FROM ratelimit.consume('signUps'")
	results, err := harness.Acquire(t, pool).PgConn().Exec(context.WithoutCancel(t.Context()), calls).ReadAll()
	if err != nil || len(results) != 3 {
		t.Fatalf("%d results, %v", len(results), err)
	}
	for i, want := range []string{"19", "99", "38500"} {
		row := results[i].Rows[0]
		if string(row[0]) != want {
			t.Errorf("call %d: %s, want %s", i, row, want)
		}
	}
	if _, err := pool.Exec(t.Context(), harness.DocSQL(t, "docs/sql.md", "SELECT ratelimit.consume('sendMessage', 'user-17');")); harness.SQLState(err) != "22023" {
		t.Errorf("without numbers, before they are published: %v", err)
	}
	granted := 0
	for both := []string{harness.DocSQL(t, "docs/sql.md", "FROM ratelimit.consume_all('["), harness.DocSQL(t, "docs/sql.md", "jsonb_build_object")}; granted < 1000; granted++ {
		if _, err := pool.Exec(t.Context(), both[granted%2]); harness.SQLState(err) == "PT429" {
			break
		} else if err != nil {
			t.Fatalf("several limits: %v", err)
		}
	}
	if granted < 10 || granted == 1000 {
		t.Errorf("%d calls of several limits were granted of 10 a minute", granted)
	}
	var ok bool
	var retryAfter *time.Duration
	if err := pool.QueryRow(t.Context(), harness.DocSQL(t, "docs/sql.md", "$1"), "user-17").Scan(&ok, &retryAfter); err != nil || !ok || retryAfter != nil {
		t.Errorf("with a parameter: %v, %v, %v", ok, retryAfter, err)
	}
	swallows := "CREATE TABLE inbox (tenant text); CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN " +
		harness.DocSQL(t, "docs/sql.md", "EXCEPTION WHEN OTHERS") + " RETURN NEW; END $$; CREATE TRIGGER swallow BEFORE INSERT ON inbox FOR EACH ROW EXECUTE FUNCTION swallow()"
	harness.MustExec(t, pool, swallows)
	harness.MustExec(t, pool, "INSERT INTO inbox SELECT 'acme' FROM generate_series(1, 150)")
	var left float64
	if err := pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.keys('messages', 100, '1 minute') WHERE key = 'acme'`).Scan(&left); err != nil || left > 50 {
		t.Errorf("after 150 rows of a limit of 100, %v are left, %v", left, err)
	}
	if err := pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.keys('sendMessage', 10, '1 minute', capacity => 20) WHERE key = 'user-17'`).Scan(&left); err != nil || left < 18 || left >= 19 {
		t.Errorf("after two calls of user-17 %v are left, %v", left, err)
	}
}

// The tests of a partitioned table and make conformance run what the page says.
func TestThePartitionedTableOfTheDocs(t *testing.T) {
	t.Parallel()
	tested, err := os.ReadFile("../harness/testdata/partitioned.sql")
	harness.Succeeds(t, err)
	_, statements, _ := strings.Cut(string(tested), "\n")
	if page := harness.DocSQL(t, "docs/databases.md", "PARTITION BY HASH"); strings.TrimSpace(page) != strings.TrimSpace(statements) {
		t.Errorf("the page has\n%s\nand the tests run\n%s", page, statements)
	}
}
