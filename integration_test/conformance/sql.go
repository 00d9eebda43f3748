package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// sqlCases are the functions for SQL by hand. They must decide as the library does.
func sqlCases() []testCase {
	return []testCase{
		{name: "SQL by hand: ratelimit.try with numbers", ways: everyWay(), script: byHand},
		{name: "SQL by hand: ratelimit.try of a sharded limit", ways: everyWay(), script: byHandSharded},
		{name: "SQL by hand: ratelimit.reserve", ways: everyWay(), script: reserveByHand},
		{name: "SQL by hand: ratelimit.take", ways: everyWay(), script: takeByHand},
		{name: "SQL by hand: a denial raised by ratelimit", ways: poolWays(), script: raising},
		{name: "SQL by hand: several limits by ratelimit.consume_all", ways: poolWays(), script: raisingAll},
		{name: "SQL by hand: ratelimit.keys with numbers", ways: everyWay(), script: listKeys},
		{name: "SQL by hand: ratelimit.reset", ways: everyWay(), spread: true, script: resetByHand},
		{name: "SQL by hand: ratelimit.sweep", ways: poolWays()[:1], script: sweepByHand},
	}
}

// numbers are a limit's as arguments of the functions for SQL by hand.
func numbers(limit ratelimit.Limit) string {
	c := limit.Config()
	period := strings.NewReplacer("1m", "1 minute", "1h", "1 hour").Replace(c.Period)
	text := fmt.Sprintf("rate => %v, period => '%s', kind => '%s', capacity => %v", *c.Rate, period, c.Kind, *c.Capacity)
	if c.Start != nil {
		text += fmt.Sprintf(", start => '%s'", c.Start.Format(time.RFC3339Nano))
	}
	if c.Zone != "" {
		text = strings.Replace(text, c.Period, "1 "+strings.TrimPrefix(c.Period, "1 "), 1) + fmt.Sprintf(", zone => '%s'", c.Zone)
	}
	return text
}

func (t *trial) now() string { return "now => '" + t.memory.Now().Format(time.RFC3339Nano) + "'" }

// ask decides as ratelimit.try does, and wants what the library answers on the model.
func (t *trial) ask(step string, limit ratelimit.Limit, request ratelimit.Request, options string, exact bool) {
	t.step = step
	key := t.key(0)
	var ok bool
	var remaining float64
	var retryAt int64 // 0: NULL
	shards := limit.Config().Shards
	query := fmt.Sprintf("SELECT granted, remaining, coalesce((extract(epoch FROM retry_at) * 1000000)::bigint, 0) FROM ratelimit._by_hand('try', '%s', '%s', %s, shards => %d, %s%s)",
		limit.Name(), key, numbers(limit), shards, t.now(), options)
	if err := t.db.QueryRow(t.ctx, query).Scan(&ok, &remaining, &retryAt); err != nil {
		t.failed(err)
	}
	want, _ := (&ratelimit.Limiter{Clock: t.memory.Now}).Consume(context.Background(), t.model, request)
	wantRetryAt := int64(0)
	if !want.RetryAt.IsZero() {
		wantRetryAt = want.RetryAt.UnixMicro()
	}
	if ok != want.OK || exact && (remaining != want.Remaining || retryAt != wantRetryAt) {
		t.wrong("want %s; came ok %v, %v remain, retry at %s", show(want), ok, remaining, instant(time.UnixMicro(retryAt)))
	}
}

func byHand(t *trial) {
	bucket := t.bucket("bucket", ratelimit.Capacity(20))
	window := ratelimit.FixedWindow(t.name("window"), 5, time.Hour)
	calendar := ratelimit.CalendarWindow(t.name("calendar"), 5, ratelimit.Month, ratelimit.Zone("Europe/Berlin"))
	for _, limit := range []ratelimit.Limit{bucket, window, calendar} {
		ann := t.of(limit, t.key(0))
		kind := limit.Config().Kind
		t.ask(kind+": the first use", limit, ann.Count(3), ", count => 3", true)
		t.ask(kind+": the second use", limit, ann, "", true)
	}
	t.memory.Advance(-time.Second)
	t.ask("token bucket: a use at an earlier time", bucket, bucket.Key(t.key(0)).Count(16), ", count => 16", true)
	t.ask("token bucket: a denial", bucket, bucket.Key(t.key(0)), "", true)
}

// reserveByHand decides as ratelimit.reserve does, and wants what the library answers on the model.
func reserveByHand(t *trial) {
	reserve := func(step string, limit ratelimit.Limit, count float64) {
		t.step = step
		var retryAt int64
		var remaining float64
		query := fmt.Sprintf("SELECT (extract(epoch FROM retry_at) * 1000000)::bigint, remaining FROM ratelimit._by_hand('reserve', '%s', '%s', %s, %s, count => %v)",
			limit.Name(), t.key(0), numbers(limit), t.now(), count)
		if err := t.db.QueryRow(t.ctx, query).Scan(&retryAt, &remaining); err != nil {
			t.failed(err)
		}
		want, err := (&ratelimit.Limiter{Clock: t.memory.Now}).Reserve(context.Background(), t.model, t.of(limit, t.key(0)).Count(count))
		t.want(err == nil && retryAt == want.RetryAt.UnixMicro() && remaining == want.Remaining,
			"that the work runs at %s, with %v remaining; came %s and %v", instant(want.RetryAt), want.Remaining, instant(time.UnixMicro(retryAt)), remaining)
	}
	bucket := t.bucket("bucket", ratelimit.Capacity(20))
	window := ratelimit.FixedWindow(t.name("window"), 5, time.Hour)
	calendar := ratelimit.CalendarWindow(t.name("calendar"), 5, ratelimit.Month, ratelimit.Zone("Europe/Berlin"))
	for _, limit := range []ratelimit.Limit{bucket, window, calendar} {
		kind := limit.Config().Kind
		reserve(kind+": the first use", limit, 3)
		reserve(kind+": tokens of which some are not there yet", limit, 5)
	}
	t.memory.Advance(-time.Second)
	reserve("token bucket: a reservation at an earlier time", bucket, 20)
}

// takeByHand decides as ratelimit.take does, and wants what the library answers on the model.
func takeByHand(t *trial) {
	take := func(step string, limit ratelimit.Limit, most, n int) {
		t.step = step
		var taken int
		query := fmt.Sprintf("SELECT taken FROM ratelimit._by_hand('take', '%s', '%s', most => %d, %s, shards => %d, %s)",
			limit.Name(), t.key(0), most, numbers(limit), limit.Config().Shards, t.now())
		if err := t.db.QueryRow(t.ctx, query).Scan(&taken); err != nil {
			t.failed(err)
		}
		want, _, err := (&ratelimit.Limiter{Clock: t.memory.Now}).Take(context.Background(), t.model, most, t.of(limit, t.key(0)))
		t.want(err == nil && taken == n && want == n, "%d taken; came %d, and %d by the model", n, taken, want)
	}
	for _, limit := range []ratelimit.Limit{
		t.bucket("bucket", ratelimit.Capacity(20)), t.bucket("shards", ratelimit.Capacity(20), ratelimit.Shards(3)),
		ratelimit.FixedWindow(t.name("window"), 20, time.Hour), ratelimit.CalendarWindow(t.name("calendar"), 20, ratelimit.Month, ratelimit.Zone("Europe/Berlin")),
	} {
		take(limit.Name()+": the first use", limit, 15, 15)
		take(limit.Name()+": what is left", limit, 15, 5)
	}
}

func byHandSharded(t *trial) {
	limit := t.bucket("shards", ratelimit.Capacity(30), ratelimit.Shards(3))
	ann := t.of(limit, t.key(0))
	for _, count := range []int{3, 25, 2} {
		t.ask(fmt.Sprintf("a use of %d", count), limit, ann.Count(float64(count)), fmt.Sprintf(", count => %d", count), false)
	}
	t.ask("a denial", limit, ann, "", false)
}

func raising(t *trial) {
	limit := t.bucket("bucket")
	t.grant("a use by the library", t.of(limit, t.key(0)).Count(9))
	query := fmt.Sprintf("SELECT remaining FROM ratelimit._by_hand('consume', '%s', '%s', %s, %s)", limit.Name(), t.key(0), numbers(limit), t.now())
	var left float64
	t.must("a grant", t.db.QueryRow(t.ctx, query).Scan(&left))
	_, _ = (&ratelimit.Limiter{Clock: t.memory.Now}).Consume(context.Background(), t.model, limit.Key(t.key(0)))
	err := t.db.QueryRow(t.ctx, query).Scan(&left)
	t.step = "a denial"
	switch {
	case err == nil:
		t.wrong("want an error with SQLSTATE PT429, came a grant: %v left", left)
	case sqlState(err) != "PT429":
		t.failed(err)
	}
}

// raisingAll takes of two limits and one key, which every kind of server allows.
func raisingAll(t *trial) {
	bucket, window := t.bucket("bucket"), ratelimit.FixedWindow(t.name("window"), 5, time.Hour)
	take := func(fromBucket, fromWindow int) error {
		list := fmt.Sprintf(`[{"name": "%s", "key": "%s", "rate": %v, "period": "1 hour", "kind": "fixed window", "count": %d}, {"name": "%s", "key": "%s", "rate": %v, "period": "1 minute", "count": %d}]`,
			window.Name(), t.key(0), window.Capacity(), fromWindow, bucket.Name(), t.key(0), bucket.Capacity(), fromBucket)
		var rows int
		return t.db.QueryRow(t.ctx, fmt.Sprintf("SELECT count(*) FROM ratelimit._all('%s', '%s')", list, t.memory.Now().Format(time.RFC3339Nano))).Scan(&rows)
	}
	t.must("a grant of both", take(3, 4))
	_, _ = (&ratelimit.Limiter{Clock: t.memory.Now}).Consume(context.Background(), t.model, bucket.Key(t.key(0)).Count(3), window.Key(t.key(0)).Count(4))
	err := take(1, 2)
	t.step = "a denial by one of them"
	switch {
	case err == nil:
		t.wrong("want an error with SQLSTATE PT429, came a grant")
	case sqlState(err) != "PT429":
		t.failed(err)
	}
	t.grant("what the denial left", t.of(bucket, t.key(0)).Count(7), t.of(window, t.key(0)))
}

func listKeys(t *trial) {
	limit := t.bucket("bucket")
	for i := range 8 {
		t.charge(fmt.Sprintf("a use of key %d", i+1), t.of(limit, fmt.Sprintf("%s-%d", t.key(0), i)).Count(float64(2*i)))
	}
	t.memory.Advance(6 * time.Second)
	t.pause("a pause that leaves what is there", time.Minute, t.of(limit, t.key(0)+"-1").Count(20))
	for keys, want := range map[string]string{
		"NULL": "8 keys, 31 tokens, 2 limited, 1 paused", // 10, 9, 7, 5, 3, 1, -1 and -3 tokens
		fmt.Sprintf("ARRAY['%s-1', '%[1]s-7', '%[1]s-nobody']", t.key(0)): "2 keys, 6 tokens, 1 limited, 1 paused",
	} {
		var got string
		t.must("ratelimit.keys", t.db.QueryRow(t.ctx, fmt.Sprintf(
			"SELECT concat(count(*), ' keys, ', sum(remaining), ' tokens, ', count(retry_at), ' limited, ', count(paused_until), ' paused') FROM ratelimit._keys('%s', %s, start => NULL, zone => NULL, anchor => NULL, keys => %s, %s)",
			limit.Name(), numbers(limit), keys, t.now())).Scan(&got))
		t.want(got == want, "%s, came %s", want, got)
	}
}

func resetByHand(t *trial) {
	var names, keys []string
	for i := range 8 {
		limit := t.bucket(fmt.Sprint("limit", i))
		t.charge(fmt.Sprintf("a debt of limit %d", i+1), t.of(limit, t.key(i)).Count(30))
		names, keys = append(names, limit.Name()), append(keys, t.key(i))
		_ = (&ratelimit.Limiter{Clock: t.memory.Now}).Reset(context.Background(), t.model, limit.Key(t.key(i)))
	}
	var deleted int
	t.must("ratelimit.reset", t.db.QueryRow(t.ctx, fmt.Sprintf("SELECT ratelimit._reset(ARRAY['%s'], ARRAY['%s'])",
		strings.Join(names, "', '"), strings.Join(keys, "', '"))).Scan(&deleted))
	t.want(deleted == 8, "8 rows deleted, came %d", deleted)
}

func sweepByHand(t *trial) {
	limit := t.bucket("bucket")
	for i := range 8 {
		t.grant(fmt.Sprintf("a use of key %d", i+1), t.of(limit, fmt.Sprintf("%s-%d", t.key(0), i)))
	}
	t.memory.Advance(2 * time.Hour)
	var deleted int
	t.must("ratelimit.sweep", t.db.QueryRow(t.ctx, fmt.Sprintf("SELECT deleted FROM ratelimit._sweep('%s', %s, start => NULL, first => '', varies => NULL, %s)", limit.Name(), numbers(limit), t.now())).Scan(&deleted))
	t.want(deleted == 8, "8 rows deleted, came %d", deleted)
}
