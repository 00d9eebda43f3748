package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// fleetCases are about several processes: what one of them, or an operator, has written must be seen by the others. A second pool stands for
// another process.
func fleetCases() []testCase {
	pool := poolWays()[:1]
	return []testCase{
		{name: "Overrides: another process follows within two seconds", ways: pool, clear: absent, script: follow},
		{name: "Definitions: published, replaced and forgotten, for other processes", ways: pool, clear: absent, script: forget},
		{name: "Open: publishes, follows, sweeps and records", ways: only(poolWays(), func(w way) bool { return !w.sql }), clear: absent, script: openAll},
		{name: "Sweep by name: deletes idle rows alone", ways: pool, clear: absent, script: sweepByName},
		{name: "Sweep by name: batch after batch", ways: pool, clear: absent, script: sweepBatches},
		{name: "Keys: names, and keys in pages", ways: pool, clear: absent, script: keyPages},
	}
}

// otherProcess makes a pool of another process.
func (t *trial) otherProcess() *pgxpool.Pool {
	pool, err := t.s.connect(t.ctx, 2, 0)
	t.must("another pool", err)
	return pool
}

// followed is how soon another process must follow. In a short run, the machine may be busy with others: the report says how long it took.
func (c config) followed() time.Duration {
	if c.short {
		return 10 * time.Second
	}
	return 2 * time.Second
}

// follow makes overrides on one pool, which a process on another one follows.
func follow(t *trial) {
	limit := t.still("bucket", 1000)
	t.published(limit)
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.overrides WHERE name = '"+limit.Name()+"'")
	other := t.otherProcess()
	defer other.Close()
	every, soon := time.Duration(0), 3*time.Second // the default
	if t.s.short {
		every, soon = 50*time.Millisecond, 500*time.Millisecond
	}
	l, err := ratelimit.Open(t.ctx, other, ratelimit.Options{
		NoPublish: true, NoSweep: true, OverridesEvery: every, OnError: func(error) {}, // about rows of others
	})
	t.must("Open", err)
	defer func() { _ = l.Close(context.WithoutCancel(t.ctx)) }()
	ann, bob := t.of(limit, t.key(0)), t.of(limit, t.key(0)+"'")
	// What the other process knows of a key: its capacity, 0 if it is blocked, and -1 if it is unlimited.
	knows := func(request ratelimit.Request) float64 {
		if _, err := l.Check(t.ctx, other, request); errors.Is(err, ratelimit.ErrDenied) {
			return 0
		} else if err != nil {
			t.failed(err)
		}
		all, err := l.Balance(t.ctx, other, request)
		if err != nil {
			t.failed(err)
		}
		if math.IsInf(all[0].Capacity, 1) || math.IsInf(all[0].Remaining, 1) {
			return -1
		}
		return all[0].Capacity
	}
	slowest := time.Duration(0)
	// follows reports whether the other process saw it before it ended.
	follows := func(step string, request ratelimit.Request, want float64, from, ends time.Time) bool {
		t.step = step
		for {
			got, took := knows(request), time.Since(from)
			if got == want {
				slowest = max(slowest, took)
				return true
			}
			if !ends.IsZero() && time.Now().After(ends) {
				return false
			}
			t.want(took < t.s.followed(), "%v within %v, came %v still after %v", want, t.s.followed(), got, took.Round(time.Millisecond))
			time.Sleep(pause)
		}
	}
	does := func(step, sql string, request ratelimit.Request, want float64) {
		t.value(step, fmt.Sprintf(sql, limit.Name(), t.key(0)))
		follows(step, request, want, time.Now(), time.Time{})
	}
	// while makes an override that ends soon. If it ended before the other process saw it, the next one is longer.
	while := func(step, sql string, want float64) (ends time.Time) {
		for lasts := soon; ; lasts *= 2 {
			t.value(step, fmt.Sprintf(sql, limit.Name(), t.key(0), lasts))
			ends = time.Now().Add(lasts) // it has ended by then
			if follows(step, ann, want, time.Now(), ends) {
				return ends
			}
			t.want(lasts < t.s.followed(), "%v within %v, came nothing", want, lasts)
		}
	}
	t.step = "before any override"
	t.want(knows(ann) == 1000, "1000, as defined, came %v", knows(ann))
	does("a raised key", "SELECT ratelimit.override('%s', '%s', capacity => 5000, forever => true)", ann, 5000)
	t.want(knows(bob) == 1000, "another key as defined, came %v", knows(bob))
	ends := while("a newer one, for a while", "SELECT ratelimit.override('%s', '%s', capacity => 20, until => clock_timestamp() + interval '%s')", 20)
	does("a block before both", "SELECT ratelimit.block('%s', '%s', forever => true)", ann, 0)
	time.Sleep(time.Until(ends))
	does("the end of the block, after that of the newer one", "SELECT ratelimit.unblock('%s', '%s')", ann, 5000)
	ends = while("no limit for a while", "SELECT ratelimit.unlimited('%s', '%s', until => clock_timestamp() + interval '%s')", -1)
	follows("the one before it, once that has ended", ann, 5000, ends, time.Time{})
	does("one for every key", "SELECT ratelimit.override('%s', every_key => true, capacity => 70, forever => true) WHERE '%s' <> ''", bob, 70)
	t.want(knows(ann) == 5000, "a key's own override before one for every key, came %v", knows(ann))
	does("the end of the key's own", "SELECT ratelimit.restore('%s', '%s')", ann, 70)
	does("the end of the one for every key", "SELECT ratelimit.restore('%s', every_key => true) WHERE '%s' <> ''", ann, 1000)
	t.note = fmt.Sprintf("followed after %v at most", slowest.Round(time.Millisecond))
}

// forget publishes a limit twice, has another program publish it, too, and has both forget it. Another process asks for the numbers that
// count.
func forget(t *trial) {
	limit := t.bucket("bucket", ratelimit.Capacity(20))
	another := t.name("another program")
	t.published(limit)
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.definitions WHERE program = '"+another+"'")
	other := t.otherProcess()
	defer other.Close()
	t.of(limit, t.key(0))
	counts := func(step, want string) {
		var got string
		t.step = step
		err := other.QueryRow(t.ctx, "SELECT concat(n.rate, ' a ', n.period, ', ', n.capacity) FROM ratelimit._numbers('"+limit.Name()+"', NULL, clock_timestamp()) AS n").Scan(&got)
		if sqlState(err) == "22023" {
			got, err = "not published", nil
		}
		t.must(step, err)
		t.want(got == want, "%q, came %q", want, got)
	}
	publish := func(step, program string, limits ...ratelimit.Limit) {
		t.must(step, new(ratelimit.Limiter).Publish(t.ctx, t.db, program, limits...))
	}
	program := t.name("program")
	counts("a published limit", "10 a 00:01:00, 20")
	var remaining float64
	t.must("ratelimit.try in another process", other.QueryRow(t.ctx, "SELECT floor(remaining) FROM ratelimit.try('"+limit.Name()+"', '"+t.key(0)+"', count => 4)").Scan(&remaining))
	t.want(remaining == 16, "16 tokens, came %v", remaining)
	publish("other numbers", program, t.bucket("bucket", ratelimit.Capacity(40)))
	counts("other numbers", "10 a 00:01:00, 40")
	publish("another program's numbers", another, t.bucket("bucket", ratelimit.Capacity(60)))
	counts("another program's numbers", "10 a 00:01:00, 60")
	t.value("forgotten by that program", "SELECT ratelimit.withdraw('"+another+"')::text")
	counts("forgotten by that program", "10 a 00:01:00, 40")
	t.value("forgotten by both", "SELECT ratelimit.withdraw('"+program+"')::text")
	counts("forgotten by both", "not published")
}

// openAll opens a program as users do, beside another process of it.
func openAll(t *trial) {
	t.unmodelled = true
	limit, idle := t.still("bucket", 10), t.bucket("idle")
	program := t.name("program")
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.overrides WHERE name = '"+limit.Name()+"'")
	for _, table := range []string{"ratelimit.usage", "ratelimit.denials", "ratelimit.sweeps"} {
		t.cleanups = append(t.cleanups, "DELETE FROM "+table+" WHERE name IN ('"+limit.Name()+"', '"+idle.Name()+"')")
	}
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.definitions WHERE program = '"+program+"'")
	ann := t.of(limit, t.key(0))
	_, err := usedEarlier().Consume(t.ctx, t.s.pool, t.of(idle, t.key(0)).Count(5))
	t.must("a use three hours ago", err)

	var mu sync.Mutex
	var told []error
	open := func() *ratelimit.Limiter {
		l, err := ratelimit.Open(t.ctx, t.db, ratelimit.Options{
			Program: program, Limits: []ratelimit.Limit{limit, idle}, Usage: &usage.Recorder{DB: t.db, Keep: centuries}, SweepEvery: 20 * time.Millisecond,
			OverridesEvery: 50 * time.Millisecond,
			OnError: func(err error) {
				if strings.HasPrefix(err.Error(), "ratelimit: overrides: ") { // about rows of others
					return
				}
				mu.Lock()
				defer mu.Unlock()
				told = append(told, err)
			},
		})
		t.must("Open", err)
		return l
	}
	l, beside := open(), open()
	defer func() { // after a failure; a second Close does nothing
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), t.s.timeout/2)
		defer cancel()
		_ = errors.Join(l.Close(ctx), beside.Close(ctx))
	}()
	for i := range 12 {
		_, err := []*ratelimit.Limiter{l, beside}[i%2].Consume(t.ctx, t.db, ann)
		t.step = fmt.Sprintf("use %d of 10", i+1)
		t.wantGrant(i < 10, err)
	}
	t.value("ratelimit.unlimited", "SELECT ratelimit.unlimited('"+limit.Name()+"', '"+t.key(0)+"', forever => true)")
	t.step = "a call under the override"
	for began := time.Now(); ; time.Sleep(pause) {
		_, err := l.Consume(t.ctx, t.db, ann)
		if err == nil {
			break
		}
		t.want(errors.Is(err, ratelimit.ErrDenied) && time.Since(began) < t.s.followed(), "a grant within %v, came %v", t.s.followed(), err)
	}
	t.step = "the sweep"
	for began := time.Now(); t.value("the idle key's rows", "SELECT count(*)::text FROM ratelimit.keys('"+idle.Name()+"')") != "0"; time.Sleep(pause) {
		mu.Lock()
		var first error
		if len(told) > 0 {
			first = told[0]
		}
		mu.Unlock()
		if first != nil && time.Since(began) > t.s.followed() {
			t.failed(first)
		}
		t.want(time.Since(began) < t.s.timeout/2, "the idle row deleted within %v", t.s.timeout/2)
	}
	ctx, cancel := context.WithTimeout(t.ctx, t.s.timeout/2)
	defer cancel()
	t.must("Close", errors.Join(l.Close(ctx), beside.Close(ctx)))
	got := t.value("ratelimit.usage", "SELECT concat(sum(granted) >= 11, sum(denied) >= 2) FROM ratelimit.usage('"+limit.Name()+"')")
	t.want(got == "tt", "11 granted and 2 denied at least, came %s", got)
}

// usedEarlier is a Limiter whose clock is three hours slow.
func usedEarlier() *ratelimit.Limiter {
	return &ratelimit.Limiter{Clock: func() time.Time { return time.Now().Add(-3 * time.Hour) }}
}

// sweepByName sweeps a limit by its published numbers. Rows of other limits, and those that are not full, stay.
func sweepByName(t *trial) {
	limit, second := t.bucket("bucket", ratelimit.Shards(2)), t.bucket("second")
	t.published(limit, second)
	use := func(step string, l *ratelimit.Limiter, limit ratelimit.Limit, kind string, keys int, count float64) {
		for i := range keys {
			_, err := l.Charge(t.ctx, t.s.pool, t.of(limit, fmt.Sprintf("%s-%s-%d", t.key(0), kind, i)).Count(count))
			t.must(step, err)
		}
	}
	use("uses three hours ago", usedEarlier(), limit, "idle", 12, 3)
	use("debts", usedEarlier(), limit, "debt", 5, 1e6)
	use("uses now", new(ratelimit.Limiter), limit, "used", 4, 3)
	use("uses of another limit", usedEarlier(), second, "idle", 3, 3)
	keys := func(limit ratelimit.Limit) string {
		return t.value("ratelimit.keys", "SELECT coalesce(string_agg(key, ' ' ORDER BY key COLLATE \"C\"), '') FROM ratelimit.keys('"+limit.Name()+"')")
	}
	t.want(len(strings.Fields(keys(limit))) == 21, "21 keys, came %q", keys(limit))
	for _, want := range []string{"24", "0"} { // two rows for each key
		got := t.value("ratelimit.sweep", "SELECT concat(deleted, next) FROM ratelimit.sweep('"+limit.Name()+"')")
		t.want(got == want, "%s rows deleted, came %s", want, got)
	}
	left := keys(limit)
	t.want(len(strings.Fields(left)) == 9 && !strings.Contains(left, "idle"), "the 9 keys that are not idle, came %q", left)
	t.want(len(strings.Fields(keys(second))) == 3, "the keys of the other limit, came %q", keys(second))
	got := t.value("a sweep of nobody's limit", "SELECT concat(deleted, next) FROM ratelimit.sweep('"+second.Name()+"')")
	t.want(got == "3", "3 rows deleted, came %s", got)
}

// sweepBatches sweeps more rows than a batch looks at.
func sweepBatches(t *trial) {
	const keys = 1100
	limit := t.bucket("bucket")
	t.published(limit)
	var requests []ratelimit.Request
	for i := range keys {
		requests = append(requests, t.of(limit, fmt.Sprintf("%s-%04d", t.key(0), i)))
	}
	var next counter
	var wg sync.WaitGroup
	errs := make([]error, 8)
	l := usedEarlier()
	for g := range errs {
		wg.Go(func() {
			for i := next.next(); i < keys && errs[g] == nil; i = next.next() {
				_, errs[g] = l.Consume(t.ctx, t.s.pool, requests[i])
			}
		})
	}
	wg.Wait()
	t.must("uses three hours ago", errors.Join(errs...))
	deleted, batches := 0, 0
	for first := ""; ; batches++ {
		var n int
		var after *string
		t.must("ratelimit.sweep", t.db.QueryRow(t.ctx, "SELECT deleted, next FROM ratelimit.sweep('"+limit.Name()+"', first => $1)", first).Scan(&n, &after))
		deleted += n
		if after == nil {
			break
		}
		t.want(*after > first, "a batch that begins after %q, came %q", first, *after)
		first = *after
	}
	t.want(deleted == keys, "%d rows deleted, came %d", keys, deleted)
	t.note = fmt.Sprintf("%d batches", batches+1)
}

// keyPages reads names and keys in pages, as the tool and the page for operators do.
func keyPages(t *trial) {
	limit, shards := t.still("pages", 10), t.still("pages of shards", 10, ratelimit.Shards(3))
	t.published(limit, shards)
	var want []string
	for i := range 40 {
		key := fmt.Sprintf("%s-%02d", t.key(0), i)
		want = append(want, key)
		for _, limit := range []ratelimit.Limit{limit, shards} {
			_, err := new(ratelimit.Limiter).Charge(t.ctx, t.s.pool, t.of(limit, key).Count(float64(i%3)))
			t.must("a use", err)
		}
	}
	read := func(step, query string, args ...any) []string {
		t.step = step
		var page string
		t.must(step, t.db.QueryRow(t.ctx, "SELECT coalesce(string_agg(f.k, ' '), '') FROM "+query, args...).Scan(&page))
		return strings.Fields(page)
	}
	for _, limit := range []ratelimit.Limit{limit, shards} {
		step := "ratelimit.keys of " + limit.Name()
		got := read(step, "(SELECT key FROM ratelimit.keys('"+limit.Name()+"') ORDER BY key COLLATE \"C\") AS f (k)")
		t.want(slices.Equal(got, want), "40 keys, came %q", got)
		step, got = "pages of "+limit.Name(), nil
		for first := ""; ; {
			page := read(step, "ratelimit._stored_keys('"+limit.Name()+"', $1, NULL, 7) AS f (k)", first)
			if got = append(got, page...); len(page) < 7 {
				break
			}
			t.want(len(page) == 7 && len(got) <= len(want), "pages of 7 keys, came %q", page)
			first = page[6] + "\x01"
		}
		t.want(slices.Equal(got, want), "40 keys in order, came %q", got)
	}
	names := read("the names", "ratelimit._stored_names(NULL) AS f (k)")
	t.want(slices.Contains(names, limit.Name()), "the name %s among %q", limit.Name(), names)
}
