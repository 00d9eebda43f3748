package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// operationsCases are what operators and background jobs do.
func operationsCases() []testCase {
	handles := poolWays()
	pool, few := handles[:1], only(handles, func(w way) bool { return w.name == "pool" || w.sql })
	return []testCase{
		{name: "Sweep: idle rows of many keys", ways: append(slices.Clip(few), coalescerWays()[0]), script: sweepIdle},
		{name: "Sweep: nothing is idle", ways: few, script: sweepNothing},
		{name: "Sweep: shards, windows and calendars", ways: handles, script: sweepKinds},
		{name: "Publish, and SQL by hand without numbers", ways: handles, clear: absent, script: publish},
		{name: "Overrides: other numbers, a block, no limit", ways: handles, clear: absent, script: overrides},
		{name: "Overrides: ratelimit.add", ways: pool, clear: absent, script: add},
		{name: "Usage: a Recorder, and what it has recorded", ways: handles, clear: absent, script: recordUsage},
	}
}

func sweepIdle(t *trial) {
	limit := t.bucket("bucket")
	// Idle rows and others take turns, so that they lie at the same places of different partitions.
	for i := range 40 {
		key := t.of(limit, fmt.Sprintf("%s-%d", t.key(0), i))
		if i%2 == 0 {
			t.grant(fmt.Sprintf("a use of key %d", i+1), key)
		} else {
			t.charge(fmt.Sprintf("a debt of key %d", i+1), key.Count(1e6))
		}
	}
	t.memory.Advance(2 * time.Hour)
	t.sweeps(20, limit)
	t.sweeps(0, limit)
	t.grant("a use of a swept key", t.of(limit, fmt.Sprintf("%s-%d", t.key(0), 4)).Count(10))
}

// sweeps sweeps and wants a number of deleted rows.
func (t *trial) sweeps(want int64, limits ...ratelimit.Limit) {
	deleted, err := t.limiter.Sweep(t.ctx, t.db, limits...)
	t.must("Sweep", err)
	t.want(deleted == want, "%d rows deleted, came %d", want, deleted)
}

func sweepNothing(t *trial) {
	limit := t.bucket("bucket")
	for i := range 8 {
		t.charge(fmt.Sprintf("a use of key %d", i+1), t.of(limit, fmt.Sprintf("%s-%d", t.key(0), i)).Count(1e6))
	}
	t.memory.Advance(2 * time.Hour)
	t.sweeps(0, limit)
}

func sweepKinds(t *trial) {
	limits := []ratelimit.Limit{
		t.bucket("shards", ratelimit.Shards(3)),
		ratelimit.FixedWindow(t.name("window"), 5, time.Hour),
		ratelimit.CalendarWindow(t.name("calendar"), 5, ratelimit.Day),
	}
	for _, limit := range limits {
		for i := range 4 {
			t.grant(fmt.Sprintf("a use of %s, key %d", limit.Config().Kind, i+1), t.of(limit, fmt.Sprintf("%s-%d", t.key(0), i)).Count(4))
		}
	}
	t.memory.Advance(10 * 24 * time.Hour)
	t.sweeps(20, limits...) // 4 keys with 3 rows, 8 with one
}

// published publishes limits until the trial is over.
func (t *trial) published(limits ...ratelimit.Limit) { t.publishedOn(t.db, limits...) }

func (t *trial) publishedOn(db ratelimit.DB, limits ...ratelimit.Limit) {
	t.unmodelled = true // by the server's clock
	program := t.name("program")
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.definitions WHERE program = '"+program+"'")
	t.must("Publish", new(ratelimit.Limiter).Publish(t.ctx, db, program, limits...))
}

// value is a query's only value, as text.
func (t *trial) value(step, query string) (text string) {
	t.must(step, t.db.QueryRow(t.ctx, query).Scan(&text))
	return text
}

func publish(t *trial) {
	bucket, calendar := t.bucket("bucket", ratelimit.Capacity(20)), ratelimit.CalendarWindow(t.name("calendar"), 5, ratelimit.Year)
	t.published(bucket, calendar, ratelimit.Unlimited(t.name("open")))
	key := t.key(0)
	for _, limit := range []ratelimit.Limit{bucket, calendar} {
		t.of(limit, key)
		_, err := new(ratelimit.Limiter).Consume(t.ctx, t.db, limit.Key(key).Count(4))
		t.must("a use by the library", err)
	}
	for _, q := range []struct{ query, want string }{
		{"SELECT concat(granted, ' ', floor(remaining)) FROM ratelimit.try('" + bucket.Name() + "', '" + key + "', count => 10)", "t 6"},
		{"SELECT concat(granted, ' ', floor(remaining)) FROM ratelimit.try('" + bucket.Name() + "', '" + key + "', count => 19)", "f 6"},
		{"SELECT concat(granted, ' ', floor(remaining)) FROM ratelimit.try('" + calendar.Name() + "', '" + key + "')", "t 0"},
		{"SELECT concat(granted, ' ', floor(remaining)) FROM ratelimit.try('" + t.name("open") + "', '" + key + "', count => 1e6)", "t Infinity"},
		{"SELECT concat(count(*), ' ', sum(floor(remaining))) FROM ratelimit.keys('" + bucket.Name() + "')", "1 6"},
		{"SELECT concat(deleted, next) FROM ratelimit.sweep('" + bucket.Name() + "')", "0"},
	} {
		got := t.value(q.query, q.query)
		t.want(got == q.want, "%q, came %q", q.want, got)
	}
}

func overrides(t *trial) {
	limit := t.still("bucket", 10)
	t.published(limit)
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.overrides WHERE name = '"+limit.Name()+"'")
	for _, key := range []string{"raised", "blocked", "free", "other"} {
		t.of(limit, key)
	}
	options := ratelimit.Options{NoPublish: true, NoSweep: true, NoBackground: true, OnError: func(error) {}} // about rows of others
	l, err := ratelimit.Open(t.ctx, t.db, options)
	t.must("Open", err)
	_, err = l.Override(t.ctx, t.db, limit.Key("raised"), ratelimit.Terms{Forever: true, Reason: "more", Who: "conformance"}, ratelimit.Capacity(50))
	t.must("Override", err)
	t.value("ratelimit.unlimited", "SELECT ratelimit.unlimited('"+limit.Name()+"', 'free', forever => true)")
	_, err = l.Block(t.ctx, t.db, limit.Key("blocked"), ratelimit.Terms{Forever: true})
	t.must("Block", err)
	consume := func(step, key string, count float64, want error) {
		_, err := l.Consume(t.ctx, t.db, limit.Key(key).Count(count))
		t.step = step
		if want == nil && err != nil || want != nil && err != nil && !errors.Is(err, want) {
			t.failed(err)
		}
		t.want((err == nil) == (want == nil), "%v, came a grant", want)
	}
	consume("a raised key", "raised", 50, nil)
	consume("a blocked key", "blocked", 1, ratelimit.ErrDenied)
	consume("an unlimited key", "free", 1e6, nil)
	consume("a key without an override", "other", 11, ratelimit.ErrExceedsCapacity)
	if got := t.value("ratelimit.try of a blocked key", "SELECT granted::text FROM ratelimit.try('"+limit.Name()+"', 'blocked')"); got != "false" {
		t.wrong("want a denial, came ok %s", got)
	}
	ended, err := l.Unblock(t.ctx, t.db, limit.Key("blocked"), ratelimit.End{Who: "conformance"})
	t.must("Unblock", err)
	restored, err := l.Restore(t.ctx, t.db, limit.Key("raised"), ratelimit.End{Who: "conformance"})
	t.must("Restore", err)
	t.want(ended == 1 && restored == 1, "a block and an override to end, came %d and %d", ended, restored)
	other := t.otherProcess()
	defer other.Close()
	restored, err = l.Restore(t.ctx, other, limit.Key("raised"), ratelimit.End{}) // asks both pools for their database
	t.must("the Restore on another pool", err)
	t.want(restored == 0, "no override to end, came %d", restored)
	consume("a key that is no longer blocked", "blocked", 10, nil)
	consume("a key that is as defined again", "raised", 11, ratelimit.ErrExceedsCapacity)
}

func add(t *trial) {
	limit := t.still("bucket", 10)
	t.published(limit)
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.overrides WHERE name = '"+limit.Name()+"'")
	ann := t.of(limit, t.key(0))
	_, err := new(ratelimit.Limiter).Consume(t.ctx, t.db, ann.Count(10))
	t.must("a use of everything", err)
	id := t.value("ratelimit.override", "SELECT ratelimit.override('"+limit.Name()+"', '"+t.key(0)+"', capacity => 15, forever => true)")
	added := t.value("ratelimit.add", "SELECT ratelimit.add("+id+")::text")
	t.want(added == "5", "5 tokens added, came %s", added)
	raised := t.still("bucket", 15).Key(t.key(0))
	r, err := new(ratelimit.Limiter).Consume(t.ctx, t.db, raised.Count(5))
	t.step = "a use of the 5 tokens"
	if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
		t.failed(err)
	}
	t.want(r.OK && near(r.Remaining, 0), "a grant that leaves nothing, came %s", show(r))
}

// centuries keep what other programs have recorded.
const centuries = 250 * 365 * 24 * time.Hour

func recordUsage(t *trial) {
	t.unmodelled = true
	limit := t.still("bucket", 3)
	t.cleanups = append(t.cleanups,
		"DELETE FROM ratelimit.usage WHERE name = '"+limit.Name()+"'",
		"DELETE FROM ratelimit.denials WHERE name = '"+limit.Name()+"'")
	recorder := &usage.Recorder{DB: t.db, Keep: centuries}
	l := &ratelimit.Limiter{Observer: recorder.Observe}
	ann := t.of(limit, t.key(0))
	for range 2 {
		for range 5 {
			_, err := l.Consume(t.ctx, t.db, ann)
			t.step = "a use"
			if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
				t.failed(err)
			}
		}
		t.must("Recorder.Flush", recorder.Flush(t.ctx))
	}
	if got := t.value("ratelimit.usage", "SELECT concat(sum(granted), ' granted, ', sum(denied), ' denied') FROM ratelimit.usage('"+limit.Name()+"')"); got != "3 granted, 7 denied" {
		t.wrong("want 3 granted, 7 denied; came %s", got)
	}
	if got := t.value("ratelimit.denials", "SELECT concat(count(*), ' keys, ', sum(denied), ' denied') FROM ratelimit.denials('"+limit.Name()+"')"); got != "1 keys, 7 denied" {
		t.wrong("want 1 keys, 7 denied; came %s", got)
	}
}
