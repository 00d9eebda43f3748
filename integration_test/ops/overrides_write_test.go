package ops_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// history is the overrides of a limit, in order, as they were written.
func history(w testing.TB, db ratelimit.DB, name string) string {
	w.Helper()
	return harness.Scan[string](w, db, `SELECT coalesce(string_agg(concat_ws(' ', coalesce(key, 'NULL'), effect, rate, capacity, max_reserved,
		date_part('epoch', until)::bigint, quote_literal(reason), made_by = 'ann', removed_by), '; ' ORDER BY id), '') FROM ratelimit.overrides WHERE name = '`+name+"'")
}

// TestGoOverridesAsSQLDoes: on every handle, and at each isolation level, the rows are those that the SQL functions write.
func TestGoOverridesAsSQLDoes(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		names := [2]string{"go " + w.Name(), "sql " + w.Name()}
		api, until := ratelimit.TokenBucket(names[0], 10, time.Minute), time.Now().Add(time.Hour).Truncate(time.Second)
		sql := func(call string) {
			w.Helper()
			harness.Scan[int64](w, w.DB, "SELECT "+strings.ReplaceAll(strings.ReplaceAll(call, "UNTIL", fmt.Sprintf("to_timestamp(%d)", until.Unix())), "'api'", "'"+names[1]+"'"))
		}
		same := func() {
			w.Helper()
			if got, want := history(w, w.DB, names[0]), history(w, w.DB, names[1]); got != want || got == "" {
				w.Fatalf("Go wrote\n%s\nand SQL\n%s", got, want)
			}
		}
		follow.By(w.Limiter, follow.Settings{DB: w.DB})
		w.Do(follow.Load(w.Context(), w.Limiter))
		id, err := w.Limiter.Override(w.Context(), w.DB, api.Key("eu", "a|b"), ratelimit.Terms{Until: until, Reason: "their 'conference'", Who: "ann"}, ratelimit.Rate(500), ratelimit.Capacity(700), ratelimit.MaxReserved(0))
		w.Do(err)
		if newest := harness.Scan[int64](w, w.DB, "SELECT max(id) FROM ratelimit.overrides WHERE name = '"+names[0]+"'"); id != newest {
			w.Fatalf("the id is %d, want %d", id, newest)
		}
		sql(`ratelimit.override('api', ratelimit.key('eu', 'a|b'), 500, 700, 0, UNTIL, 'their ''conference''', 'ann')`)
		same()
		_, err = w.Limiter.Override(w.Context(), w.DB, api.EveryKey(), ratelimit.Terms{Forever: true}, ratelimit.Capacity(0))
		w.Do(err)
		sql(`ratelimit.override('api', every_key => true, capacity => 0, forever => true)`)
		same()
		_, err = w.Limiter.Block(w.Context(), w.DB, api.Key("ann"), ratelimit.Terms{Until: until, Reason: "guesses", Who: "ann"})
		w.Do(err)
		sql(`ratelimit.block('api', 'ann', UNTIL, 'guesses', 'ann')`)
		same()
		_, err = w.Limiter.Block(w.Context(), w.DB, api.EveryKey(), ratelimit.Terms{Forever: true})
		w.Do(err)
		sql(`ratelimit.block('api', every_key => true, forever => true)`)
		same()
		_, err = w.Limiter.Override(w.Context(), w.DB, api.Key("ann"), ratelimit.Terms{Forever: true, Who: "bob"}, ratelimit.Rate(1))
		w.Do(err)
		sql(`ratelimit.override('api', 'ann', rate => 1, who => 'bob', forever => true)`)
		ended := func(n int, err error, want int) {
			w.Helper()
			if w.Do(err); n != want {
				w.Fatalf("%d ended, want %d", n, want)
			}
			same()
		}
		n, err := w.Limiter.Unblock(w.Context(), w.DB, api.Key("ann"), ratelimit.End{Who: "eve"})
		sql(`ratelimit.unblock('api', 'ann', 'eve')`)
		ended(n, err, 1)
		n, err = w.Limiter.Unblock(w.Context(), w.DB, api.Key("ann"), ratelimit.End{Who: "eve"})
		ended(n, err, 0)
		n, err = w.Limiter.Restore(w.Context(), w.DB, api.Key("ann"), ratelimit.End{})
		sql(`ratelimit.restore('api', 'ann')`)
		ended(n, err, 1)
		n, err = w.Limiter.Restore(w.Context(), w.DB, api.EveryKey(), ratelimit.End{Who: "dan"})
		sql(`ratelimit.restore('api', every_key => true, who => 'dan')`)
		ended(n, err, 2)
	})
}

// TestABlockByGoHoldsAtOnce in its own program, once it is committed, and within two seconds in others. Nothing polls here.
func TestABlockByGoHoldsAtOnce(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	other := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool})
	is := func(when, key string, blocked bool) {
		t.Helper()
		if _, err := limits.Consume(t.Context(), pool, api.Key(key)); harness.Denied(err) != blocked || err != nil && !harness.Denied(err) {
			t.Fatalf("%s: %v, want blocked: %v", when, err, blocked)
		}
	}
	block := func(ctx context.Context, db ratelimit.DB, key string) error {
		return harness.Second(limits.Block(ctx, db, api.Key(key), ratelimit.Terms{For: time.Hour, Reason: "spam", Who: "ann"}))
	}
	harness.Succeeds(t, block(t.Context(), pool, "pool"))
	is("on a pool", "pool", true)
	harness.Eventually(t, "another program follows", func() bool {
		_, err := other.Check(t.Context(), pool, api.Key("pool"))
		return harness.Denied(err)
	})
	if n, err := limits.Unblock(t.Context(), pool, api.Key("pool"), ratelimit.End{Who: "ann"}); n != 1 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	is("unblocked", "pool", false)

	on := stdlib.OpenDBFromPool(pool)
	defer on.Close()
	mine := errors.New("mine")
	for _, level := range harness.Levels {
		for _, rollback := range []error{nil, mine} {
			key := fmt.Sprint("pgx ", level, rollback)
			err := limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				if err := block(ctx, tx, key); err != nil {
					return err
				}
				if _, err := limits.Check(ctx, tx, api.Key(key)); err != nil {
					t.Errorf("%s: in the transaction, what is not committed holds: %v", key, err)
				}
				return rollback
			}, ratelimit.Isolation(level))
			if !errors.Is(err, rollback) {
				t.Fatal(err)
			}
			is("in a transaction "+key, key, rollback == nil)
			key = "sql " + key
			err = limits.InSQLTx(t.Context(), on, func(ctx context.Context, tx *sql.Tx) error {
				if err := block(ctx, ratelimit.SQL(tx), key); err != nil {
					return err
				}
				return rollback
			}, ratelimit.Isolation(level))
			if !errors.Is(err, rollback) {
				t.Fatal(err)
			}
			is("in a transaction "+key, key, rollback == nil)
		}
	}
	// Of a transaction of another's, nobody tells the commit: the next poll does.
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	harness.Succeeds(t, block(t.Context(), tx, "tx"))
	harness.Succeeds(t, tx.Commit(t.Context()))
	is("before the poll", "tx", false)
	harness.Eventually(t, "another program follows", func() bool {
		_, err := other.Check(t.Context(), pool, api.Key("tx"))
		return harness.Denied(err)
	})
}

// TestAScriptWithOneConnection sees what it decides at once, and with it what others have decided. It polls nothing.
func TestAScriptWithOneConnection(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	others := harness.Connect(t, url, 1)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	for name, db := range map[string]ratelimit.DB{"pgx": harness.Connect(t, url, 1), "sql": ratelimit.SQL(harness.OpenSQL(t, "pgx", url, 1))} {
		limits := harness.Open(t, db, ratelimit.Options{NoPublish: true, NoSweep: true, NoBackground: true})
		is := func(when, key string, blocked bool) {
			t.Helper()
			if _, err := limits.Consume(t.Context(), db, api.Key(name, key)); harness.Denied(err) != blocked || err != nil && !harness.Denied(err) {
				t.Errorf("%s: %s: %v, want blocked: %v", name, when, err, blocked)
			}
		}
		block := func(ctx context.Context, db ratelimit.DB, key string) error {
			return harness.Second(limits.Block(ctx, db, api.Key(name, key), ratelimit.Terms{Forever: true}))
		}
		harness.Succeeds(t, block(t.Context(), db, "own"))
		is("on a pool", "own", true)
		harness.MustExec(t, others, "SELECT ratelimit.block('api', ratelimit.key('"+name+"', 'of another'), forever => true)")
		is("before its next decision", "of another", false)
		if pool, ok := db.(*pgxpool.Pool); ok {
			harness.Succeeds(t, limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error { return block(ctx, tx, "tx") }))
			is("in a transaction", "tx", true)
			if n := pool.Stat().CanceledAcquireCount(); n != 0 {
				t.Errorf("%d times, a second connection was waited for", n)
			}
		} else {
			harness.Succeeds(t, block(t.Context(), db, "tx"))
		}
		is("after its next decision", "of another", true)
	}

	// Somebody else waits for the connection: the block holds before that.
	pool := harness.OpenSQL(t, "pgx", url, 1)
	limits := harness.Open(t, ratelimit.SQL(pool), ratelimit.Options{NoPublish: true, NoSweep: true, NoBackground: true})
	first, err := pool.Conn(t.Context())
	harness.Succeeds(t, err)
	blocked, waits := make(chan error), pool.Stats().WaitCount
	go func() {
		blocked <- harness.Second(limits.Block(t.Context(), ratelimit.SQL(pool), api.Key("crowd"), ratelimit.Terms{Forever: true}))
	}()
	harness.Eventually(t, "it waits for a connection", func() bool { return pool.Stats().WaitCount > waits })
	harness.Succeeds(t, first.Close())
	second := make(chan *sql.Conn)
	go func() {
		conn, err := pool.Conn(t.Context())
		if err != nil {
			t.Error(err)
		}
		second <- conn
	}()
	harness.Succeeds(t, <-blocked)
	on := <-second
	defer func() { _ = on.Close() }()
	if _, err := limits.Check(t.Context(), ratelimit.SQL(on), api.Key("crowd")); !harness.Denied(err) {
		t.Errorf("once it is blocked: %v", err)
	}
}

// TestWhatGoRefusesToOverrideIsNotSent: a SQL error would abort the caller's transaction. What SQL refuses, Go does, and no more.
func TestWhatGoRefusesToOverrideIsNotSent(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	limits := follow.By(new(ratelimit.Limiter), follow.Settings{DB: pool})
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	type number = ratelimit.Option
	for name, c := range map[string]struct {
		until       time.Time
		reason, who string
		numbers     []number
		sql         string // NULL: only Go can say it
		refused     bool
	}{
		"no numbers":          {refused: true, sql: "ratelimit.override('api', 'k', forever => true)"},
		"a rate of 0":         {refused: true, numbers: []number{ratelimit.Rate(0)}, sql: "ratelimit.override('api', 'k', rate => 0, forever => true)"},
		"a rate below 0":      {refused: true, numbers: []number{ratelimit.Rate(-1)}, sql: "ratelimit.override('api', 'k', rate => -1, forever => true)"},
		"the smallest rate":   {numbers: []number{ratelimit.Rate(1e-15)}, sql: "ratelimit.override('api', 'k', rate => 1e-15, forever => true)"},
		"the largest rate":    {numbers: []number{ratelimit.Rate(1e15)}, sql: "ratelimit.override('api', 'k', rate => 1e15, forever => true)"},
		"a rate too small":    {refused: true, numbers: []number{ratelimit.Rate(9e-16)}, sql: "ratelimit.override('api', 'k', rate => 9e-16, forever => true)"},
		"a rate too large":    {refused: true, numbers: []number{ratelimit.Rate(1.1e15)}, sql: "ratelimit.override('api', 'k', rate => 1.1e15, forever => true)"},
		"a rate of NaN":       {refused: true, numbers: []number{ratelimit.Rate(math.NaN())}, sql: "ratelimit.override('api', 'k', rate => 'NaN', forever => true)"},
		"a capacity of 0":     {numbers: []number{ratelimit.Capacity(0)}, sql: "ratelimit.override('api', 'k', capacity => 0, forever => true)"},
		"a capacity of NaN":   {refused: true, numbers: []number{ratelimit.Capacity(math.NaN())}, sql: "ratelimit.override('api', 'k', capacity => 'NaN', forever => true)"},
		"an infinite debt":    {refused: true, numbers: []number{ratelimit.MaxReserved(math.Inf(1))}, sql: "ratelimit.override('api', 'k', max_reserved => 'infinity', forever => true)"},
		"another option":      {refused: true, numbers: []number{ratelimit.Rate(1), ratelimit.Shards(2)}},
		"a zone":              {refused: true, numbers: []number{ratelimit.Rate(1), ratelimit.Zone("UTC")}},
		"a long reason":       {reason: strings.Repeat("ä", 2048), numbers: []number{ratelimit.Rate(1)}, sql: "ratelimit.override('api', 'k', rate => 1, reason => repeat('ä', 2048), forever => true)"},
		"a longer reason":     {refused: true, reason: strings.Repeat("ä", 2049), numbers: []number{ratelimit.Rate(1)}, sql: "ratelimit.override('api', 'k', rate => 1, reason => repeat('ä', 2049), forever => true)"},
		"a reason with NUL":   {refused: true, reason: "a\x00b", numbers: []number{ratelimit.Rate(1)}},
		"a long who":          {who: strings.Repeat("w", 255), numbers: []number{ratelimit.Rate(1)}, sql: "ratelimit.override('api', 'k', rate => 1, who => repeat('w', 255), forever => true)"},
		"a longer who":        {refused: true, who: strings.Repeat("w", 256), numbers: []number{ratelimit.Rate(1)}, sql: "ratelimit.override('api', 'k', rate => 1, who => repeat('w', 256), forever => true)"},
		"a who without UTF-8": {refused: true, who: "\xff", numbers: []number{ratelimit.Rate(1)}},
		"an end in the past":  {refused: true, until: time.Now().Add(-time.Second), numbers: []number{ratelimit.Rate(1)}, sql: "ratelimit.override('api', 'k', rate => 1, until => now() - interval '1 second')"},
		"an end after 9999":   {refused: true, until: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), numbers: []number{ratelimit.Rate(1)}},
	} {
		_, err := limits.Override(t.Context(), tx, api.Key("k"), ratelimit.Terms{Until: c.until, Forever: c.until.IsZero(), Reason: c.reason, Who: c.who}, c.numbers...)
		if errors.Is(err, ratelimit.ErrInvalid) != c.refused || err != nil && !c.refused || c.refused && !strings.Contains(err.Error(), `"api"`) {
			t.Errorf("%s: %v, want it refused: %v", name, err, c.refused)
		}
		if c.sql != "" {
			if _, err := pool.Exec(t.Context(), "SELECT "+c.sql); (harness.SQLState(err) == "22023") != c.refused || err != nil && !c.refused {
				t.Errorf("%s, in SQL: %v, want it refused: %v", name, err, c.refused)
			}
		}
	}
	coalescer, unopened := &ratelimit.Coalescer{Pool: pool}, new(ratelimit.Limiter)
	defer harness.CloseCoalescer(t, coalescer)
	without := harness.Open(t, pool, ratelimit.Options{NoOverrides: true, NoPublish: true, NoSweep: true})
	for name, err := range map[string]error{
		"a Coalescer":           harness.Second(limits.Block(t.Context(), coalescer, api.Key("k"), ratelimit.Terms{Forever: true})),
		"a count":               harness.Second(limits.Block(t.Context(), tx, api.Key("k").Count(2), ratelimit.Terms{Forever: true})),
		"a count to restore":    harness.Second(limits.Restore(t.Context(), tx, api.Key("k").Count(2), ratelimit.End{})),
		"an empty key":          harness.Second(limits.Unblock(t.Context(), tx, api.Key(""), ratelimit.End{})),
		"a long who, restore":   harness.Second(limits.Restore(t.Context(), tx, api.Key("k"), ratelimit.End{Who: strings.Repeat("w", 256)})),
		"no overrides followed": errors.Join(harness.Second(unopened.Block(t.Context(), tx, api.Key("k"), ratelimit.Terms{Forever: true})), harness.Second(unopened.Restore(t.Context(), tx, api.Key("k"), ratelimit.End{}))),
		"overrides off":         harness.Second(without.Override(t.Context(), pool, api.Key("k"), ratelimit.Terms{Forever: true}, ratelimit.Rate(1))),
		"unlimited":             harness.Second(limits.Override(t.Context(), tx, ratelimit.Unlimited("open").Key("k"), ratelimit.Terms{Forever: true}, ratelimit.Rate(1))),
		"a block in the past":   harness.Second(limits.Block(t.Context(), tx, api.Key("k"), ratelimit.Terms{Until: time.Now().Add(-time.Minute)})),
	} {
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := harness.Scan[int](t, tx, "SELECT count(*) FROM ratelimit.overrides WHERE effect = 'block'"); n != 0 { // and the transaction is usable
		t.Errorf("%d blocks were written", n)
	}
	// A name that no program has published, only the server knows.
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", ratelimit.TokenBucket("others", 1, time.Minute)))
	if _, err := limits.Block(t.Context(), pool, api.Key("k"), ratelimit.Terms{Forever: true}); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "others") {
		t.Errorf("a name that is not published: %v", err)
	}
}

// TestOperatorsNameAKeyOfALimitWithKeys: their verbs refuse Global where all rows of the limit have keys, and write nothing. Four know EveryKey.
func TestOperatorsNameAKeyOfALimitWithKeys(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	api, bare, far := ratelimit.TokenBucket("api", 10, time.Minute), ratelimit.TokenBucket("bare", 10, time.Minute), ratelimit.Terms{Forever: true}
	memory := ratelimittest.New(t)
	for name, db := range map[string]ratelimit.DB{"Postgres": pool, "memory": memory} {
		ctx, limits := t.Context(), follow.By(&ratelimit.Limiter{}, follow.Settings{DB: db})
		harness.Succeeds(t, follow.Load(ctx, limits))
		harness.Succeeds(t, harness.Second(limits.Consume(ctx, db, api.Key("ann"))))
		if _, err := limits.Consume(ctx, db, api.EveryKey()); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "EveryKey is only for Override") {
			t.Errorf("%s: Consume of EveryKey: %v", name, err)
		}
		for verb, do := range map[string]func(ratelimit.Request) error{
			"Pause":  func(r ratelimit.Request) error { return harness.Second(limits.Pause(ctx, db, time.Minute, r)) },
			"Resume": func(r ratelimit.Request) error { return limits.Resume(ctx, db, r) },
			"Reset":  func(r ratelimit.Request) error { return limits.Reset(ctx, db, r) },
			"Override": func(r ratelimit.Request) error {
				return harness.Second(limits.Override(ctx, db, r, far, ratelimit.Rate(5)))
			},
			"Block":   func(r ratelimit.Request) error { return harness.Second(limits.Block(ctx, db, r, far)) },
			"Restore": func(r ratelimit.Request) error { return harness.Second(limits.Restore(ctx, db, r, ratelimit.End{})) },
			"Unblock": func(r ratelimit.Request) error { return harness.Second(limits.Unblock(ctx, db, r, ratelimit.End{})) },
		} {
			if err := do(api.Global()); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "it has keys: name one") {
				t.Errorf("%s: %s of Global: %v", name, verb, err)
			}
			if err := do(bare.Global()); err != nil {
				t.Errorf("%s: %s of a limit without keys: %v", name, verb, err)
			}
			known := slices.Contains([]string{"Override", "Block", "Restore", "Unblock"}, verb)
			if err := do(api.EveryKey()); errors.Is(err, ratelimit.ErrInvalid) == known || known && err != nil {
				t.Errorf("%s: %s of EveryKey: %v", name, verb, err)
			}
		}
	}
	for _, call := range []string{
		"override('api', rate => 5, forever => true, ", "block('api', forever => true, ", "unlimited('api', forever => true, ", "restore('api', ", "unblock('api', ", "reset('api', ",
		"resume('api', ", "pause('api', until => now() + interval '1 minute', rate => 10, period => '1 minute', ",
	} {
		if _, err := pool.Exec(t.Context(), "SELECT ratelimit."+call+"global => true)"); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "it has keys: name one") {
			t.Errorf("%s: %v", call, err)
		}
	}
	if keys := harness.Scan[string](t, pool, "SELECT string_agg(DISTINCT name || ' ' || key, ', ') FROM ratelimit.limits WHERE name <> 'bare'"); keys != "api ann" {
		t.Errorf("rows were written: %s", keys)
	}
}
