package integration_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// docBlocks is the SQL of a page of the docs, as it is printed. The page is a path from the root of the repository.
func docBlocks(t *testing.T, page string) (blocks []string) {
	t.Helper()
	text, err := os.ReadFile("../" + page)
	if err != nil {
		t.Fatal(err)
	}
	for _, match := range regexp.MustCompile("(?s)\n```sql\n(.*?)\n```\n").FindAllStringSubmatch(string(text), -1) {
		blocks = append(blocks, match[1])
	}
	return blocks
}

// docSQL is the one block of a page that has these words in it.
func docSQL(t *testing.T, page, words string) (block string) {
	t.Helper()
	for _, b := range docBlocks(t, page) {
		if strings.Contains(b, words) {
			if block != "" {
				t.Fatalf("two blocks of %s have %q in them", page, words)
			}
			block = b
		}
	}
	if block == "" {
		t.Fatalf("no block of %s has %q in it", page, words)
	}
	return block
}

// night is the limits of the README at 3 a.m., and a pool with their rows.
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
	if err != nil && !denied(err) {
		n.Fatal(err)
	}
	return err == nil
}

func (n *night) exec(sql string) int64 {
	n.Helper()
	tag, err := n.pool.Exec(n.Context(), sql)
	if err != nil {
		n.Fatalf("%s: %v", sql, err)
	}
	return tag.RowsAffected()
}

// is asks a query that answers yes or no.
func (n *night) is(sql string, args ...any) (yes bool) {
	n.Helper()
	if err := n.pool.QueryRow(n.Context(), sql, args...).Scan(&yes); err != nil {
		n.Fatal(err)
	}
	return yes
}

// whileOneWaits has one transaction consume and another call wait for it, while do looks at that, and then ends it.
func (n *night) whileOneWaits(do func(blocker int)) {
	n.Helper()
	key := nightMessages.Key("ann")
	n.consume(n.pool, key) // so that there is a row: whoever waits to insert one has not written yet
	tx, err := n.pool.Begin(n.Context())
	if err != nil {
		n.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(n.Context()))
	n.consume(tx, key)
	done := make(chan error, 1)
	go func() { _, err := n.limiter.Consume(n.Context(), n.pool, key); done <- err }()
	do(serverPID(n.T, tx))
	if err := tx.Rollback(n.Context()); err != nil {
		n.Error(err)
	}
	if err := <-done; err != nil {
		n.Errorf("when nobody stands in the way: %v", err)
	}
}

// first is the first column of what a query answers.
func (n *night) first(sql string) (column []string) {
	n.Helper()
	rows, err := n.pool.Query(n.Context(), sql)
	if err != nil {
		n.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		values, err := rows.Values()
		if err != nil {
			n.Fatal(err)
		}
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

// TestTheReadmeAt3AM runs every query of that section as it is printed.
func TestTheReadmeAt3AM(t *testing.T) {
	t.Parallel()
	runDoc(t, "At 3 a.m.", map[string]func(n *night, sql string){
		"ratelimit_keys('sendMessage'": func(n *night, sql string) {
			n.consume(n.pool, nightMessages.Key("has some").Count(3))
			n.consume(n.pool, nightMessages.Key("limited").Count(20))
			n.consume(n.pool, nightMessages.Key("in debt").Count(30).Reserve())
			if got := n.first(sql); len(got) != 2 || got[0] != "in debt" || got[1] != "limited" {
				n.Errorf("limited are %q", got)
			}
		},
		"ratelimit_keys('signUps'": func(n *night, sql string) {
			n.consume(n.pool, nightSignUps.Key("has some").Count(99))
			for n.consume(n.pool, nightSignUps.Global().Count(50)) { // twice, unless a new hour has just begun
			}
			if got := n.first(sql); len(got) != 1 || got[0] != "" {
				n.Errorf("limited are %q", got)
			}
		},
		"last_used": func(n *night, sql string) {
			n.consume(n.pool, nightMessages.Key("ann"))
			n.exec(`UPDATE rate_limits SET ts = ts - interval '1 day'`)
			n.consume(n.pool, ratelimit.TokenBucket("other", 10, time.Minute).Global())
			if got := n.first(sql); len(got) != 2 || got[0] != "other" || got[1] != "sendMessage" {
				n.Errorf("the limits are %q", got)
			}
		},
		"backend_xid": func(n *night, sql string) {
			n.whileOneWaits(func(blocker int) {
				// Once the transactions of other tests that are older have ended.
				eventually(n.T, "the query shows who is open, before who waits for him", func() bool {
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
					return n.is(`SELECT EXISTS (SELECT FROM (`+strings.TrimSuffix(sql, ";")+`) AS q WHERE blocked_by = ARRAY[$1::integer] AND query LIKE '%-- name: Consume %')`, blocker)
				}
				eventually(n.T, "the query shows who waits for whom", blocked)
			})
			if blocked() {
				n.Error("the query shows somebody who waits, when nobody does any more")
			}
		},
		"DELETE FROM rate_limits WHERE name = 'sendMessage' AND key = 'user-17'": func(n *night, sql string) {
			user, other := nightMessages.Key("user-17"), nightMessages.Key("user-18")
			for range 3 { // again and again
				n.consume(n.pool, user.Count(20))
				n.consume(n.pool, other.Count(20).Reserve())
				if n.consume(n.pool, user.Count(19)) {
					n.Fatal("not limited")
				}
				if rows := n.exec(sql); rows != 1 {
					n.Errorf("%d rows deleted", rows)
				}
				if !n.consume(n.pool, user.Count(20)) || n.consume(n.pool, user.Count(19)) {
					n.Error("it is not the capacity that it may use")
				}
			}
		},
		"'sendMessage', 'user-17', 0, 1, 0, now() + interval '1 hour'": func(n *night, sql string) {
			for _, used := range []bool{false, true} {
				user := nightMessages.Key("user-17")
				n.exec(`DELETE FROM rate_limits`)
				if used {
					n.consume(n.pool, user)
				}
				n.exec(sql)
				result, err := n.limiter.Consume(n.Context(), n.pool, user)
				if !denied(err) || result.RetryAfter < 59*time.Minute || result.RetryAfter > time.Hour+6*time.Second {
					n.Errorf("shut out for %v, %v", result.RetryAfter, err)
				}
				if !n.consume(n.pool, nightMessages.Key("user-18")) {
					n.Error("somebody else is shut out")
				}
				if used { // with shards
					n.exec(docSQL(n.T, "At 3 a.m.", "DELETE FROM rate_limits WHERE name = 'sendMessage' AND key"))
					sharded := ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20), ratelimit.Shards(3)).Key("user-17")
					n.consume(n.pool, sharded)
					n.exec(docSQL(n.T, "At 3 a.m.", "DELETE FROM rate_limits WHERE name = 'sendMessage' AND key"))
					n.exec(sql)
					if result, err := n.limiter.Consume(n.Context(), n.pool, sharded); !denied(err) || result.RetryAfter < 59*time.Minute {
						n.Errorf("with shards, shut out for %v, %v", result.RetryAfter, err)
					}
				}
				// An hour later.
				n.exec(`UPDATE rate_limits SET ts = ts - interval '1 hour 1 minute' WHERE key = 'user-17'`)
				if !n.consume(n.pool, user.Count(10)) || n.consume(n.pool, user.Count(5)) {
					n.Error("an hour later it is not as after any hour")
				}
			}
		},
	})
}

// TestTheReadmeOnSweeping runs every query of that section as it is printed.
func TestTheReadmeOnSweeping(t *testing.T) {
	t.Parallel()
	runDoc(t, "Sweeping", map[string]func(n *night, sql string){
		"ratelimit_sweep('sendMessage'": func(n *night, sql string) {
			n.sweeps(sql, nightMessages.Name())
		},
		"name = 'a limit of last year'": func(n *night, sql string) {
			n.exec(`INSERT INTO rate_limits VALUES ('a limit of last year', 'ann', 0, 1, 5, now())`)
			n.consume(n.pool, nightMessages.Key("ann"))
			if rows := n.exec(sql); rows != 1 || len(n.first(`SELECT key FROM rate_limits`)) != 1 {
				n.Errorf("%d rows deleted", rows)
			}
		},
	})
}

// runDoc runs the tests of a page's blocks, each of which is named by words that are in it. A block without a test is a
// failure.
func runDoc(t *testing.T, page string, tests map[string]func(n *night, sql string)) {
	t.Helper()
	for words, test := range tests {
		t.Run(words, func(t *testing.T) {
			t.Parallel()
			test(&night{T: t, pool: newPool(t, 4)}, docSQL(t, page, words))
		})
	}
	blocks := docBlocks(t, page)
	if len(blocks) != len(tests) {
		t.Errorf("%s has %d blocks of SQL, %d are tested", page, len(blocks), len(tests))
	}
}

// sweeps wants a sweep, of more rows than are in a batch, to delete those that have been full for an hour, and no others.
func (n *night) sweeps(sql, name string) {
	n.Helper()
	rows := func(keys, ts string, value int) {
		n.Helper()
		n.exec(fmt.Sprintf(`INSERT INTO rate_limits SELECT '%s', %s, 0, 1, %d, %s FROM generate_series(1, 3000) AS i ON CONFLICT DO NOTHING`, name, keys, value, ts))
	}
	rows(`'idle ' || i`, `now() - interval '2 hours'`, 0)
	rows(`'in debt'`, `now() - interval '2 hours'`, -1e9)
	rows(`'full for a minute'`, `now() - interval '1 minute'`, 20)
	rows(`'ahead'`, `now() + interval '1 hour'`, 20)
	rows(`'locked'`, `now() - interval '2 hours'`, 0)
	tx, err := n.pool.Begin(n.Context())
	if err != nil {
		n.Fatal(err)
	}
	defer tx.Rollback(n.Context())
	if _, err := tx.Exec(n.Context(), `SELECT FROM rate_limits WHERE key = 'locked' FOR UPDATE`); err != nil {
		n.Fatal(err)
	}
	n.exec(sql)
	if got := strings.Join(n.first(`SELECT key FROM rate_limits ORDER BY key`), "; "); got != "ahead; full for a minute; in debt; locked" {
		n.Errorf("left are %s", got)
	}
}

// What the README says does not work.
func TestNoRowLiftsALimit(t *testing.T) {
	t.Parallel()
	for _, limit := range []ratelimit.Limit{nightMessages, nightSignUps} {
		n := &night{T: t, pool: newPool(t, 1)}
		for _, row := range []string{`1e15, now()`, `1e15, now() + interval '1 hour'`, `1e15, now() - interval '1 hour'`, `'Infinity', now()`} {
			n.exec(`DELETE FROM rate_limits`)
			n.exec(`INSERT INTO rate_limits SELECT '` + limit.Name() + `', 'user-17', 0, 1, ` + row)
			if !n.consume(n.pool, limit.Key("user-17").Count(limit.Capacity())) || n.consume(n.pool, limit.Key("user-17").Count(limit.Capacity()/2)) {
				n.Errorf("%v: a row of %s grants something else than the capacity", limit, row)
			}
		}
	}
}

// The queries on the keys are for a replica, too: they run where nothing may be written.
func TestTheKeysCanBeReadInAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		for _, name := range []string{"sendMessage", "signUps"} {
			if _, err := tx.Exec(t.Context(), docSQL(t, "At 3 a.m.", "ratelimit_keys('"+name+"'")); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// The calls of the section on SQL are those of the Go limits that the README has elsewhere.
func TestTheReadmesCallsFromSQL(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	calls := docSQL(t, "From SQL", "FROM ratelimit(")
	results, err := acquire(t, pool).PgConn().Exec(context.WithoutCancel(t.Context()), calls).ReadAll()
	if err != nil || len(results) != 3 {
		t.Fatalf("%d results, %v", len(results), err)
	}
	for i, want := range []string{"19", "99", "38500"} {
		row := results[i].Rows[0]
		if string(row[0]) != "t" || string(row[1]) != want {
			t.Errorf("call %d: %s, want %s", i, row, want)
		}
	}
}
