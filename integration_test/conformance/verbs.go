package main

import (
	"context"
	"errors"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// verbCases are calls for one limit, on every handle.
func verbCases() []testCase {
	c := func(name string, script func(t *trial)) testCase {
		return testCase{name: name, ways: everyWay(), script: script}
	}
	everywhere := func(name string, script func(t *trial)) testCase {
		return testCase{name: name, ways: append(everyWay(), coalescerWays()...), script: script}
	}
	return []testCase{
		c("Consume: token bucket", tokenBucket),
		c("Consume: fixed window", fixedWindow),
		c("Consume: calendar window", calendarWindow),
		c("Consume: new numbers for old rows", newNumbers),
		c("Consume: a sharded limit", sharded),
		c("Consume: a limit that gets shards, and loses them", resharded),
		everywhere("Reserve: token bucket", reserve),
		everywhere("Reserve: fixed window", reserveWindow),
		everywhere("Take", take),
		everywhere("Take: a sharded limit", takeSharded),
		c("Charge", charge),
		c("Refund by receipt", refund),
		c("Refund: a sharded limit", refundSharded),
		c("Check", check),
		everywhere("Balance", balance),
		c("Reset", reset),
		c("Move: token buckets", move),
		c("Pause and Resume, with and without shards", pauseAndResume),
		c("Move: calendar windows, of which one is sharded", moveCalendar),
		{name: "Wait", ways: append(only(poolWays(), func(w way) bool { return !w.unprepared }), coalescerWays()[0]), script: wait},
	}
}

func tokenBucket(t *trial) {
	ann := t.of(t.bucket("bucket", ratelimit.Capacity(20)), t.key(0))
	r := t.grant("the first use", ann.Count(15))
	t.want(r.Remaining == 5, "5 tokens, came %v", r.Remaining)
	t.grant("the second use", ann.Count(5))
	for _, step := range []string{"a denial", "another denial"} { // of which the second is expected
		r = t.deny(step, ann)
		t.want(r.RetryAfter == 6*time.Second && r.RetryAt.Equal(noon.Add(6*time.Second)), "to retry after 6 s, came %v", r.RetryAfter)
	}
	t.memory.Advance(6*time.Second - time.Microsecond)
	t.deny("a microsecond before RetryAt", ann)
	t.memory.Advance(time.Microsecond)
	t.grant("at RetryAt", ann)
	t.grant("a count of 0", ann.Count(0))
	t.grant("the first use of another key", t.of(t.bucket("bucket", ratelimit.Capacity(20)), t.key(0)+"'").Count(20))
}

func fixedWindow(t *trial) {
	hourly := ratelimit.FixedWindow(t.name("window"), 5, time.Hour, ratelimit.Start(noon))
	ann, bob := t.of(hourly, t.key(0)), t.of(ratelimit.FixedWindow(t.name("hashed"), 5, time.Hour), t.key(0))
	t.grant("the first use", ann.Count(3))
	t.grant("the second use", ann.Count(2))
	r := t.deny("a denial", ann)
	t.want(r.RetryAfter == time.Hour, "to retry after an hour, came %v", r.RetryAfter)
	t.memory.Advance(time.Hour)
	t.grant("in the next window", ann.Count(5))
	t.grant("the first use of a window with a grid of its own", bob.Count(5))
	r = t.deny("a denial there", bob)
	t.memory.Set(r.RetryAt)
	t.grant("at RetryAt there", bob)
}

func calendarWindow(t *trial) {
	monthly := ratelimit.CalendarWindow(t.name("calendar"), 5, ratelimit.Month, ratelimit.Zone("Europe/Berlin"), ratelimit.Capacity(7))
	ann := t.of(monthly, t.key(0))
	t.grant("the first use", ann.Count(6))
	t.grant("the second use", ann)
	r := t.deny("a denial", ann)
	august := time.Date(2026, 7, 31, 22, 0, 0, 0, time.UTC)
	t.want(r.RetryAt.Equal(august), "to retry at %v, came %v", august, r.RetryAt)
	t.memory.Set(august)
	t.grant("in the next month", ann.Count(5))
}

func take(t *trial) {
	ann := t.of(t.bucket("bucket", ratelimit.Capacity(20)), t.key(0))
	t.take("the first use", 15, 15, ann)
	t.take("what is left", 15, 5, ann)
	t.take("a denial", 15, 0, ann)
	t.memory.Advance(15 * time.Second)
	t.take("whole tokens of two and a half", 15, 2, ann)
	t.take("less than one token", 15, 0, ann)
}

func takeSharded(t *trial) {
	ann := t.of(t.bucket("shards", ratelimit.Capacity(40), ratelimit.Shards(4)), t.key(0))
	t.take("the first use", 15, 15, ann)
	t.take("the tokens of all shards", 100, 25, ann)
	t.take("a denial", 1, 0, ann)
}

func newNumbers(t *trial) {
	t.grant("a use under the old numbers", t.of(t.bucket("bucket", ratelimit.Capacity(20)), t.key(0)).Count(5))
	small := t.redefined(t.bucket("bucket", ratelimit.Capacity(8)), t.key(0))
	r := t.grant("a use under a smaller capacity", small)
	t.want(r.Remaining == 7, "7 tokens, came %v", r.Remaining)
}

func sharded(t *trial) {
	ann := t.of(t.bucket("shards", ratelimit.Capacity(40), ratelimit.Shards(4)), t.key(0))
	t.grant("the first use", ann.Count(4))
	t.grant("uses of single shards", ann.Count(6))
	t.grant("more uses of single shards", ann.Count(9))
	t.grant("a count that no shard has alone", ann.Count(20))
	t.grant("the last token, from all shards", ann)
	t.deny("a denial", ann)
	t.memory.Advance(time.Minute)
	t.grant("after a refill", ann.Count(2))
}

func resharded(t *trial) {
	one := t.bucket("bucket", ratelimit.Capacity(30))
	three := t.bucket("bucket", ratelimit.Capacity(30), ratelimit.Shards(3))
	t.grant("without shards", t.of(one, t.key(0)).Count(6))
	t.grant("with shards", t.redefined(three, t.key(0)).Count(3))
	t.grant("with shards again", t.redefined(three, t.key(0)).Count(3))
	r := t.grant("without shards again", t.redefined(one, t.key(0)))
	t.want(near(r.Remaining, 17), "17 tokens, came %v", r.Remaining)
}

func reserve(t *trial) {
	ann := t.of(t.bucket("bucket", ratelimit.MaxReserved(20)), t.key(0))
	t.reserve("the first use", 0, ann.Count(10))
	t.reserve("tokens that are not there yet", 2*time.Minute, ann.Count(20))
	t.denyReserve("more than may be reserved", ann)
	t.deny("a Consume", ann)
	fresh := t.of(t.bucket("fresh"), t.key(0))
	t.reserve("a first use of more than the capacity", 30*time.Second, fresh.Count(15))
}

func reserveWindow(t *trial) {
	hourly := ratelimit.FixedWindow(t.name("window"), 5, time.Hour, ratelimit.Start(noon), ratelimit.MaxReserved(10))
	ann := t.of(hourly, t.key(0))
	t.reserve("the first use", 0, ann.Count(4))
	t.reserve("tokens of the next window", time.Hour, ann.Count(3))
	t.reserve("tokens of the window after it", 2*time.Hour, ann.Count(5))
	t.denyReserve("more than may be reserved", ann.Count(5))
}

func charge(t *trial) {
	ann := t.of(t.bucket("bucket", ratelimit.MaxReserved(0)), t.key(0))
	r := t.charge("the first use", ann.Count(30))
	t.want(r.Remaining == -20, "a debt of 20, came %v", r.Remaining)
	t.charge("the second use", ann.Count(10))
	r = t.deny("a denial because of the debt", ann)
	t.want(r.RetryAfter == 31*6*time.Second, "to retry after 186 s, came %v", r.RetryAfter)
}

func refund(t *trial) {
	ann := t.of(t.bucket("bucket", ratelimit.Capacity(20)), t.key(0))
	receipt := t.grant("a use", ann.Count(6)).Receipt()
	r := t.refund("a refund of a part", receipt, ann.Count(2.5))
	t.want(r.Remaining == 16.5, "16.5 tokens, came %v", r.Remaining)
	t.memory.Advance(12 * time.Second)
	t.refund("a refund of the rest, of which some has been refilled", r.Receipt(), ann.Count(3.5))
	hourly := t.of(ratelimit.FixedWindow(t.name("window"), 5, time.Hour, ratelimit.Start(noon)), t.key(0))
	receipt = t.grant("a use of a window", hourly.Count(4)).Receipt()
	t.refund("its refund", receipt, hourly.Count(4))
}

func refundSharded(t *trial) {
	ann := t.of(t.bucket("shards", ratelimit.Capacity(40), ratelimit.Shards(4)), t.key(0))
	receipt := t.grant("a use", ann.Count(30)).Receipt()
	t.refund("its refund", receipt, ann.Count(12))
}

func check(t *trial) {
	ann := t.of(t.bucket("bucket"), t.key(0))
	r := t.check("before the first use", ann.Count(10))
	t.want(r.OK, "that it would be granted")
	t.grant("a use", ann.Count(7))
	r = t.check("after a use", ann.Count(3))
	t.want(r.OK && r.Remaining == 3, "3 tokens, came %v", r.Remaining)
	r = t.check("more than there is", ann.Count(4))
	t.want(!r.OK && r.RetryAfter == 6*time.Second, "a denial for 6 s, came %v", r.RetryAfter)
}

func balance(t *trial) {
	ann := t.of(t.bucket("bucket"), t.key(0))
	b := t.balances("before the first use", 10, ann)[0]
	t.want(b.Used == 0 && b.Capacity == 10 && b.NextAt.IsZero(), "none used and no next token, came %v and %v", b.Used, b.NextAt)
	t.charge("a debt", ann.Count(12))
	b = t.balances("in debt", -2, ann)[0]
	t.want(b.Used == 12 && b.NextAt.Equal(noon.Add(18*time.Second)), "12 used and the next token after 18 s, came %v and %v", b.Used, b.NextAt)
	hourly := t.of(ratelimit.FixedWindow(t.name("window"), 5, time.Hour, ratelimit.Start(noon)), t.key(0))
	t.grant("a use of a window", hourly.Count(2))
	b = t.balances("of a window", 3, hourly)[0]
	t.want(b.ResetAt.Equal(noon.Add(time.Hour)), "a reset after an hour, came %v", b.ResetAt)
	t.charge("a use of all shards", t.of(t.bucket("shards", ratelimit.Shards(3)), t.key(0)).Count(7))
	t.balances("of a sharded limit", 3, t.of(t.bucket("shards", ratelimit.Shards(3)), t.key(0)))
}

func reset(t *trial) {
	ann := t.of(t.bucket("bucket"), t.key(0))
	t.reset("before the first use", ann)
	t.charge("a debt", ann.Count(100))
	t.reset("the reset", ann)
	t.grant("a use of everything", ann.Count(10))
}

func move(t *trial) {
	small, large := t.of(t.bucket("small"), t.key(0)), t.of(t.bucket("large", ratelimit.Capacity(100)), t.key(0))
	t.grant("a use", small.Count(8))
	t.move("an upgrade, before the first use", small, large)
	r := t.check("after the upgrade", large.Count(0))
	t.want(r.Remaining == 92, "92 tokens, came %v", r.Remaining)
	t.grant("a use of the new plan", large.Count(50))
	t.move("a downgrade", large, small)
	t.deny("a use after the downgrade", small)
	t.memory.Advance(6 * time.Second)
	t.grant("a token that was refilled", small)
	t.move("an upgrade again", small, large)
	r = t.check("after it", large.Count(0))
	t.want(r.Remaining == 43, "43 tokens, came %v", r.Remaining)
}

func pauseAndResume(t *trial) {
	for _, limit := range []ratelimit.Limit{t.bucket("bucket"), t.bucket("shards", ratelimit.Shards(3))} {
		ann, bob := t.of(limit, t.key(0)), t.of(limit, t.key(1))
		t.grant("a use", ann.Count(2))
		until := t.memory.Now().Add(time.Minute)
		t.pause("a pause", time.Minute, ann)
		t.pause("a pause before the first use, with some left", time.Minute, bob.Count(3))
		t.deny("a use in a pause", ann)
		t.grant("a use of what is left", bob.Count(3))
		r := t.check("after it", bob)
		t.want(!r.OK && r.RetryAt.Equal(until.Add(6*time.Second)), "a denial until %v, came %v", until.Add(6*time.Second), r.RetryAt)
		t.memory.Advance(10 * time.Second)
		t.resume("a resume", ann)
		t.resume("a resume of what is not paused", ann)
		t.deny("a use of what was emptied", ann)
		t.memory.Advance(6 * time.Second)
		t.grant("a token that was refilled", ann)
		t.deny("a use of what is paused still", bob)
		t.reset("the reset", ann, bob)
	}
}

func moveCalendar(t *trial) {
	zone := ratelimit.Zone("Europe/Berlin")
	small := t.of(ratelimit.CalendarWindow(t.name("monthly"), 10, ratelimit.Month, zone, ratelimit.Shards(2)), t.key(0))
	large := t.of(ratelimit.CalendarWindow(t.name("more monthly"), 100, ratelimit.Month, zone, ratelimit.MaxReserved(5)), t.key(0))
	t.charge("a debt", large.Count(130))
	t.move("a downgrade of a debt", large, small)
	t.deny("a use after the downgrade", small)
	t.move("back", small, large)
	r := t.check("after it", large.Count(0))
	t.want(r.Remaining == -30, "a debt of 30, came %v", r.Remaining)
	t.memory.Advance(31 * 24 * time.Hour)
	t.grant("a use in the next month", small.Count(10))
}

// wait uses the server's clock.
func wait(t *trial) {
	t.unmodelled = true
	var delay time.Duration
	l := &ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) { delay = d.Result.Requests[0].Delay }}
	ann := t.of(ratelimit.TokenBucket(t.name("wait"), 20, time.Second, ratelimit.Capacity(1)), t.key(0))
	_, err := l.Wait(t.ctx, t.db, ann)
	t.must("the first use", err)
	began := time.Now()
	_, err = l.Wait(t.ctx, t.db, ann)
	t.must("a wait", err)
	waited := time.Since(began)
	t.want(delay <= 50*time.Millisecond, "a wait of 50 ms at most, came %v", delay)
	t.want(waited >= delay, "a wait of %v, came one of %v", delay, waited)
	hourly := t.of(ratelimit.TokenBucket(t.name("hourly"), 1, time.Hour), t.key(0))
	_, err = l.Wait(t.ctx, t.db, hourly)
	t.must("the first use of an hourly limit", err)
	ctx, cancel := context.WithTimeout(t.ctx, t.s.timeout/2)
	defer cancel()
	_, err = l.Wait(ctx, t.db, hourly)
	t.step = "a wait that would take longer than its context"
	if !errors.Is(err, ratelimit.ErrDenied) {
		if err == nil {
			t.wrong("want a denial at once, came a grant")
		}
		t.failed(err)
	}
}
