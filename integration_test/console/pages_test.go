package console_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/console"
)

// TestNoNumberOfAPageDependsOnTheSession: a role may have settings that change how values are written.
func TestNoNumberOfAPageDependsOnTheSession(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 2)
	harness.Publish(t, pool, `[{"name": "slow", "kind": "token bucket", "rate": 1, "period": "1000 days", "capacity": 1000}]`)
	harness.MustExec(t, pool, "INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('slow', 'acme', 0, 2, 218.5, now()), ('slow', 'acme', 1, 2, 219, now())")
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	harness.StartWith(t, config.ConnConfig, harness.Strange)
	for _, mode := range harness.ExecModes {
		t.Run(mode.String(), func(t *testing.T) {
			harness.NeedsMode(t, mode)
			config := config.Copy()
			config.ConnConfig.DefaultQueryExecMode = mode
			db, err := pgxpool.NewWithConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(db.Close)
			p := harness.NewConsole(t, db, "ann")
			p.Get(http.StatusOK, "", "slow")
			p.Get(http.StatusOK, "limit?name=slow&q=a", "acme", "437")
			p.Get(http.StatusOK, "key?name=slow&key=acme", "437")
		})
	}
}

func TestTheConsoleShowsLimitsAndKeys(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1 minute", "capacity": 20},
		{"name": "signUps", "kind": "fixed window", "rate": 100, "period": "1 hour"},
		{"name": "reports", "kind": "calendar window", "rate": 5, "period": "1 month", "zone": "Europe/Berlin", "anchor": "2026-01-31 15:00"},
		{"name": "free", "kind": "unlimited"}, {"name": "never", "kind": "token bucket", "rate": 0, "period": "1 hour"},
		{"name": "shared", "kind": "token bucket", "rate": 1, "period": "1 hour"}]`)
	harness.MustExec(t, pool, `SELECT ratelimit.publish('worker', '[{"name": "shared", "kind": "token bucket", "rate": 9, "period": "1 hour"}]')`) // later
	limiter := new(ratelimit.Limiter)
	bucket := ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20))
	for _, request := range []ratelimit.Request{bucket.Key("user-17").Count(15), ratelimit.FixedWindow("signUps", 100, time.Hour).Key("acme").Count(40), ratelimit.TokenBucket("unpublished", 1, time.Hour).Key("x")} {
		if _, err := limiter.Consume(t.Context(), pool, request); err != nil {
			t.Fatal(err)
		}
	}
	harness.RecordUsage(t, pool, "sendMessage", 1200, 34, "user-16", "user-17")
	harness.RecordUsage(t, pool, "signUps", 7, 56)
	p := harness.NewConsole(t, pool, "ann")

	list := p.Get(http.StatusOK, "", "90 denied and 1,207 granted", "34 denied and 1,200 granted", "10 per minute, at most 20 at once", "unpublished", "9 per hour · api, worker · 2 definitions", "denies everything")
	if strings.Index(list, "signUps") > strings.Index(list, "sendMessage") {
		t.Error("the limit that denies most is not the first")
	}
	if n := strings.Count(list, ">not counted<"); n != 5 || strings.Contains(list, "Failed") {
		t.Errorf("%d limits are not counted, want 5, or some have failed", n)
	}
	if _, err := pool.Exec(t.Context(), "INSERT INTO ratelimit.usage VALUES ('free', now() - interval '7 days', 1, 0, 0, 1, 0, 0), ('never', date_trunc('minute', now()), 0, 9, 4321, 0, 0, 0)"); err != nil {
		t.Fatal(err)
	}
	failed := p.Get(http.StatusOK, "", "99 denied", "Failed", "4,321")
	if n := strings.Count(failed, ">not counted<"); n != 3 {
		t.Errorf("%d limits are not counted, want 3: one was counted a week ago", n)
	}
	found := p.Get(http.StatusOK, "?q=SIGN", "signUps")
	if strings.Contains(found, "sendMessage") {
		t.Error("a search finds what it should not")
	}
	p.Get(http.StatusOK, "limit?name=sendMessage", "1,200", "user-17", "user-16", "10 per minute")
	p.Get(http.StatusOK, "limit?name=sendMessage&q=user-1", "user-17", "Used, beginning with “user-1”")
	p.Get(http.StatusOK, "limit?name=shared", "workerpublished", "9 per hour", "apipublished", "1 per hour token bucketdoes not count here")
	p.Get(http.StatusOK, "limit?name=reports", "calendar window, Europe/Berlin from 2026-01-31 15:00")
	p.Get(http.StatusOK, "limit?name=unpublished", "No program publishes this limit")
	p.Get(http.StatusOK, "key?name=sendMessage&key=user-17", "5", "of 20 tokens", "Full in", "2 times")
	p.Get(http.StatusOK, "key?name=sendMessage&key=user-16", "Once, last")
	p.Get(http.StatusOK, "key?name=sendMessage", "This limit has 1 key with rows")
	p.Get(http.StatusOK, "key?name=sendMessage&key=user-18", "20 of 20 tokens", "nothing is stored")
	p.Get(http.StatusOK, "key?name=signUps&key=acme", "60 of 100 tokens")
	p.Get(http.StatusOK, "key?name=reports&key=acme", "5 of 5 tokens", "5 per month")
	p.Get(http.StatusOK, "key?name=free&key=acme", "Unlimited")
	p.Get(http.StatusOK, "key?name=never&key=acme", "Denied")
	p.Get(http.StatusOK, "key?name=shared&key=acme", "9 of 9 tokens", "does not count here")
	harness.MustExec(t, pool, "SELECT ratelimit.withdraw('worker')")
	p.Get(http.StatusOK, "key?name=shared&key=acme", "1 of 1 tokens")
	p.Get(http.StatusOK, "limit?name=shared", "workeruntil", "9 per hour")
	p.Get(http.StatusOK, "key?name=unpublished&key=x", "Not known")
	p.Get(http.StatusNotFound, "limit?name=nowhere", "There is no such limit")
	usage := p.Get(http.StatusOK, "usage.json?name=sendMessage")
	if !strings.Contains(usage, ",1200") || !strings.Contains(usage, ",34") { // the last minute, or the one before
		t.Errorf("the chart has %s", usage)
	}

	p.Post(http.StatusOK, "key?name=sendMessage&key=user-17", url.Values{"action": {"block"}, "end": {"2h"}, "reason": {"a flood"}}, "Blocked. Every program denies", "a flood", "ann")

	// A block changes no numbers: those of the key's newest other override hold beside it.
	harness.MustExec(t, pool, "SELECT ratelimit.override('signUps', 'acme', rate => 500, forever => true), ratelimit.block('signUps', 'acme', until => now() + interval '1 hour')")
	p.Get(http.StatusOK, "key?name=signUps&key=acme", "Blocked", "in forceoverridden500 per")

	// A pause is no use that lies ahead.
	harness.MustExec(t, pool, "SELECT ratelimit.pause('sendMessage', 'paused', until => now() + interval '2 hours', remaining => 1)")
	if text := p.Get(http.StatusOK, "key?name=sendMessage&key=paused", "1 of 20 tokens", "Paused: nothing is refilled for 2 h."); strings.Contains(text, "Last granted") {
		t.Errorf("a paused key is shown as granted:\n%s", text)
	}
}

// A key with numbers of its own has no balance until somebody gives them, and then the one that the program has.
func TestTheConsoleAsksForTheNumbersOfAKey(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	month := ratelimit.CalendarWindow("reports", 1000, "month", ratelimit.Zone("Europe/Berlin"), ratelimit.Varies(32*24*time.Hour))
	bucket := ratelimit.TokenBucket("crawls", 100, 1000*time.Hour, ratelimit.Varies(1000*time.Hour))
	if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "api", month, bucket); err != nil {
		t.Fatal(err)
	}
	limiter := new(ratelimit.Limiter)
	anchor := time.Now().UTC().AddDate(0, 0, -10).Format(time.DateOnly)
	for _, request := range []ratelimit.Request{
		month.With(ratelimit.Rate(20), ratelimit.Anchor(anchor)).Key("acme").Count(20), bucket.With(ratelimit.Rate(7)).Key("acme").Count(4), bucket.Key("blocked"),
	} {
		if _, err := limiter.Consume(t.Context(), pool, request); err != nil {
			t.Fatal(err)
		}
	}
	_, err := limiter.Consume(t.Context(), pool, month.With(ratelimit.Rate(20), ratelimit.Anchor(anchor)).Key("acme"))
	denied, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok {
		t.Fatal(err)
	}
	harness.RecordUsage(t, pool, "crawls", 1, 9, "acme", "blocked", "nobody")
	harness.MustExec(t, pool, "SELECT ratelimit.block('crawls', 'blocked', forever => true)")
	p := harness.NewConsole(t, pool, "ann")
	lacks := func(text string, numbers ...string) {
		t.Helper()
		for _, n := range numbers {
			if strings.Contains(text, n) {
				t.Errorf("the page has %q:\n%s", n, text)
			}
		}
	}
	p.Get(http.StatusOK, "", "1,000 per month, or a key's own numbers", "100 per 1,000 hours, or a key's own numbers")
	const acme = "key?name=reports&key=acme"
	lacks(p.Get(http.StatusOK, acme, "Not known", "The numbers of this key are the program's. 0 tokens were left at the last use", "Its own numbers"),
		"of 1,000", "name=\"rate\" inputmode=\"decimal\" autocomplete=\"off\" value=\"\" placeholder=\"1,000\"><small>", "data-series=\"{", "Denied now", "Full in", "class=\"level\"")
	p.Get(http.StatusOK, "key?name=reports&key=nobody", "Not known", "it is full, unless the program gives it a rate of 0")
	own := acme + "&rate=20&anchor=" + url.QueryEscape(anchor)
	text := p.Get(http.StatusOK, own, "0 of 20 tokens", "Denied now", "By the numbers that were given", "20 per month")
	left := time.Until(denied.RetryAt)
	if days := int(left.Hours() / 24); !strings.Contains(text, fmt.Sprintf("in %d d", days)) && !strings.Contains(text, fmt.Sprintf("in %d d", days+1)) { // it is rounded up
		t.Errorf("the program says %v, and the page:\n%s", left, text)
	}
	p.Get(http.StatusOK, "key?name=crawls&key=acme&rate=7", "3 of 7 tokens", "Full in")
	p.Get(http.StatusOK, "key?name=crawls&key=acme&rate=7&capacity=1%2C000", "3 of 1,000 tokens")
	for query, want := range map[string]string{
		"&rate=many": "The rate is not a number", "&capacity=-1": "Capacity -1 is neither 0 nor between", "&zone=Nowhere%2FNo": "zone", "&anchor=tomorrow": "Anchor \"tomorrow\" is not a date", "&rate=1e99": "Rate 1e+99 is neither",
	} {
		p.Get(http.StatusBadRequest, acme+query, "Not known", want)
	}
	p.Get(http.StatusBadRequest, "key?name=crawls&key=acme&zone=UTC", "Only a calendar window has a zone and an anchor")

	p.Get(http.StatusOK, "limit?name=crawls&q=a", "acme3 at the last use")
	text = p.Get(http.StatusOK, "limit?name=crawls", "3 at the last use", "nothing stored", "A key may have numbers of its own")
	if lacks(text, "of 100"); strings.Count(text, `<td class="n">0</td>`) != 1 { // the blocked one
		t.Errorf("the keys have other tokens:\n%s", text)
	}
	// An override that says all there is to know.
	everyKey := url.Values{"action": {"numbers"}, "rate": {"50"}, "capacity": {"60"}, "end": {"1h"}, "reason": {"r"}, "sure": {"1"}}
	p.Post(http.StatusOK, "limit?name=crawls", everyKey, "Overridden", "1 key has an override of its own, and keeps it", "Keys to which the program gives numbers of their own get these, too")
	p.Get(http.StatusOK, "key?name=crawls&key=acme", "3 of 60 tokens", "50 per 1,000 hours")
	everyKey.Set("capacity", "")
	p.Post(http.StatusOK, "limit?name=crawls", everyKey)
	p.Get(http.StatusOK, "key?name=crawls&key=acme", "Not known", "rate 50")
	p.Get(http.StatusOK, "key?name=crawls&key=acme&rate=7", "3 of 50 tokens")

	// Of a calendar window, zone and anchor stay the program's.
	harness.MustExec(t, pool, "SELECT ratelimit.override('reports', 'acme', rate => 30, capacity => 40, forever => true)")
	lacks(p.Get(http.StatusOK, acme, "Not known", "rate 30, capacity 40"), "of 40", "Denied now")
	p.Get(http.StatusOK, acme+"&anchor="+url.QueryEscape(anchor), "0 of 40 tokens", "Denied now", "30 per month")
	lacks(p.Get(http.StatusOK, "limit?name=reports&q=acme", "0 at the last use"))

	// What is added depends on the capacity that the program alone knows. The page keeps the numbers that were given.
	const crawler = "key?name=crawls&key=acme&rate=7"
	form := url.Values{"action": {"numbers"}, "rate": {"20"}, "end": {"2h"}, "reason": {"r"}, "add": {"1"}}
	p.Post(http.StatusBadRequest, crawler, form, "Nothing was changed", "give the new capacity and, unless an override has it, the capacity until now")
	form.Set("capacity", "80")
	p.Post(http.StatusBadRequest, crawler, form, "Nothing was changed", "give the new capacity and, unless an override has it, the capacity until now")
	form.Set("capacity_now", "seven")
	p.Post(http.StatusBadRequest, crawler, form, "Nothing was changed", "The capacity until now is not a number")
	form.Set("capacity_now", "7")
	p.Post(http.StatusOK, crawler, form, "the difference of the capacities is added", "20 added", "23 of 80 tokens", "By the numbers that were given") // every key has had 60
	// The override in force knows it.
	form.Set("capacity", "85")
	p.Post(http.StatusBadRequest, crawler, form, "Nothing was changed", "The capacity until now is 80 by override", "and not 7")
	form.Set("capacity_now", "")
	p.Post(http.StatusOK, crawler, form, "the difference of the capacities is added", "5 added", "28 of 85 tokens")
	p.Post(http.StatusOK, "key?name=crawls&key=acme", url.Values{"action": {"restore"}}, "Not known", "28 tokens were left")
}

// countedDB notes how many transactions of a pool are open at most.
type countedDB struct {
	*pgxpool.Pool
	mu         sync.Mutex
	open, most int
}

type countedTx struct {
	pgx.Tx
	end func()
}

func (db *countedDB) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	add := func(n int) {
		db.mu.Lock()
		defer db.mu.Unlock()
		db.open += n
		db.most = max(db.most, db.open)
	}
	add(1)
	tx, err := db.Pool.BeginTx(ctx, options)
	if err != nil {
		add(-1)
		return nil, err
	}
	return countedTx{tx, sync.OnceFunc(func() { add(-1) })}, nil
}

func (tx countedTx) Commit(ctx context.Context) error {
	defer tx.end()
	return tx.Tx.Commit(ctx)
}

func (tx countedTx) Rollback(ctx context.Context) error {
	defer tx.end()
	return tx.Tx.Rollback(ctx)
}

// Many readers of the page leave the application connections of its pool, and statements end by themselves.
func TestTheConsoleLeavesThePoolToTheApplication(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1 hour"}]`)
	db := &countedDB{Pool: pool}
	h := &console.Handler{DB: db}
	ctx, cancel := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	for i := range 40 {
		readers.Go(func() {
			for n := 0; ctx.Err() == nil || n < 2; n++ {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, []string{"/", "/limit?name=signUps", "/key?name=signUps&key=a", "/usage.json?name=signUps"}[i%4], nil))
				if w.Code != http.StatusOK && w.Header().Get("Retry-After") == "" {
					t.Errorf("%d: %s", w.Code, w.Body)
				}
			}
		})
	}
	for range 20 { // while they read
		if _, err := pool.Exec(t.Context(), "SELECT 1"); err != nil {
			t.Error(err)
		}
	}
	cancel()
	readers.Wait()
	if db.most > 2 || db.most == 0 || db.open != 0 {
		t.Errorf("the page had %d of 4 connections at once, and has %d", db.most, db.open)
	}

	// A statement that waits is ended by the server.
	holder := harness.Acquire(t, pool)
	if _, err := holder.Exec(t.Context(), "BEGIN; LOCK TABLE ratelimit.definitions"); err != nil {
		t.Fatal(err)
	}
	h = &console.Handler{DB: deafDB{pool}, Timeout: 200 * time.Millisecond}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "took too long") {
		t.Errorf("%d: %s", w.Code, w.Body)
	}
}

// deafDB is a pool whose transactions do not know of a deadline of their client.
type deafDB struct{ pool *pgxpool.Pool }

func (db deafDB) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	tx, err := db.pool.BeginTx(context.WithoutCancel(ctx), options)
	return deafTx{tx}, err
}

type deafTx struct{ pgx.Tx }

func (tx deafTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return tx.Tx.Exec(context.WithoutCancel(ctx), sql, args...)
}

func (tx deafTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return tx.Tx.Query(context.WithoutCancel(ctx), sql, args...)
}

func (tx deafTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return tx.Tx.QueryRow(context.WithoutCancel(ctx), sql, args...)
}
