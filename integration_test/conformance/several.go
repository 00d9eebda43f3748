package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// severalCases are calls for several limits, on every handle: with one key, and with keys that any partitioning spreads.
func severalCases() []testCase {
	c := func(name string, script func(t *trial)) testCase {
		return testCase{name: name, ways: everyWay(), spread: true, script: script}
	}
	return []testCase{
		c("Several limits: first uses", severalFirst),
		c("Several limits: later uses, all or nothing", severalLater),
		c("Several limits: sharded ones", severalSharded),
		c("Several limits: with windows and calendars", severalKinds),
		c("Several limits: Reserve", severalReserve),
		c("Several limits: Take", severalTake),
		c("Several limits: Charge", severalCharge),
		c("Several limits: Refund by receipt", severalRefund),
		c("Several limits: Check", severalCheck),
		c("Several limits: Balance", severalBalance),
		c("Several limits: Reset", severalReset),
		c("ConsumeEach: keys of one bucket", eachKeys),
		c("ConsumeEach: shards, windows and calendars", eachKinds),
	}
}

// eight are requests for as many limits: few enough for one call, and so many that their keys do not all share a partition.
func (t *trial) eight(options ...ratelimit.Option) (requests []ratelimit.Request) {
	for i := range 8 {
		requests = append(requests, t.of(t.bucket(fmt.Sprint("limit", i), options...), t.key(i)))
	}
	return requests
}

func counts(requests []ratelimit.Request, tokens float64) (counted []ratelimit.Request) {
	for _, r := range requests {
		counted = append(counted, r.Count(tokens))
	}
	return counted
}

func severalFirst(t *trial) {
	eight := t.eight()
	r := t.grant("the first use of all", counts(eight, 4)...)
	t.want(r.Remaining == 6, "6 tokens in each, came %v", r.Remaining)
}

func severalLater(t *trial) {
	eight := t.eight()
	for i, r := range eight { // one by one: a server may refuse first uses of several
		t.grant(fmt.Sprintf("the first use of limit %d alone", i+1), r.Count(4))
	}
	t.grant("a use of all", counts(eight, 3)...)
	t.grant("all that one of them has", eight[5].Count(3))
	r := t.deny("a denial by one of them", eight...)
	t.want(r.RetryAfter == 6*time.Second, "to retry after 6 s, came %v", r.RetryAfter)
	t.grant("a use of the others, which the denial took nothing from", counts(eight[:5], 3)...)
	t.deny("a denial by all", eight...)
}

func severalSharded(t *trial) {
	limits := []ratelimit.Request{
		t.of(t.bucket("shards0", ratelimit.Shards(2)), t.key(0)), t.of(t.bucket("plain"), t.key(1)),
		t.of(t.bucket("shards1", ratelimit.Shards(5)), t.key(2)), t.of(t.bucket("shards2", ratelimit.Shards(3)), t.key(3)),
	}
	t.grant("the first use", limits...)
	t.grant("a use that combines shards", counts(limits, 8)...)
	t.deny("a denial", counts(limits, 2)...)
}

func severalKinds(t *trial) {
	requests := []ratelimit.Request{
		t.of(t.bucket("bucket"), t.key(0)),
		t.of(ratelimit.FixedWindow(t.name("window"), 5, time.Hour, ratelimit.Start(noon)), t.key(1)),
		t.of(ratelimit.CalendarWindow(t.name("calendar"), 5, ratelimit.Month), t.key(2)),
		t.of(ratelimit.CalendarWindow(t.name("daily"), 7, ratelimit.Day, ratelimit.Zone("America/New_York")), t.key(3)),
	}
	t.grant("the first use", counts(requests, 3)...)
	t.grant("the second use", counts(requests, 2)...)
	t.deny("a denial", requests...)
}

func severalReserve(t *trial) {
	requests := counts(t.eight(ratelimit.MaxReserved(20)), 15)
	t.reserve("the first use", 30*time.Second, requests...)
	t.reserve("the second use", 2*time.Minute, requests...)
	t.denyReserve("more than may be reserved", requests...)
}

func severalTake(t *trial) {
	eight := t.eight()
	t.grant("a use of one of them", eight[3].Count(4))
	t.take("what all have", 8, 6, eight...)
	t.take("a denial", 8, 0, eight...)
}

func severalCharge(t *trial) {
	eight := t.eight()
	t.charge("the first use", counts(eight, 12)...)
	r := t.charge("the second use", counts(eight, 12)...)
	t.want(r.Remaining == -14, "debts of 14, came %v", r.Remaining)
}

func severalRefund(t *trial) {
	eight := t.eight()
	receipt := t.grant("a use", counts(eight, 6)...).Receipt()
	t.refund("its refund", receipt, counts(eight, 5)...)
}

func severalCheck(t *trial) {
	eight := t.eight()
	t.grant("a use of one of them", eight[2].Count(8))
	t.check("whether all would be granted", counts(eight, 2)...)
	r := t.check("whether more would be granted", counts(eight, 3)...)
	t.want(!r.OK, "a denial")
}

func severalBalance(t *trial) {
	eight := t.eight()
	t.balances("before the first use", 10, eight...)
	t.charge("debts", counts(eight, 12)...)
	t.balances("in debt", -2, eight...)
}

func severalReset(t *trial) {
	eight := t.eight()
	for i, r := range eight {
		t.charge(fmt.Sprintf("a debt of limit %d", i+1), r.Count(50))
	}
	t.reset("the reset", eight...)
}

// inOrder has the results at the places of their requests.
func inOrder(decided ratelimit.EachResult, err error) ([]ratelimit.Result, error) {
	all := maps.Collect(decided.Granted())
	maps.Insert(all, decided.Denied())
	results := make([]ratelimit.Result, len(all))
	for place, result := range all {
		results[place] = result
	}
	return results, err
}

// each has every request decided by itself, and wants a + for each grant and a - for each denial.
func (t *trial) each(step, want string, requests ...ratelimit.Request) {
	results, _ := answers(t, step, func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) ([]ratelimit.Result, error) {
		return inOrder(l.ConsumeEach(ctx, db, requests...))
	}, func(results []ratelimit.Result) (text string) {
		for i, r := range results {
			text += fmt.Sprintf("%d: %s; ", i+1, show(r))
		}
		return text
	})
	got := bytes.Repeat([]byte("-"), len(results))
	for i, r := range results {
		if r.OK {
			got[i] = '+'
		}
	}
	t.want(string(got) == want, "%s, came %s", want, got)
}

func eachKeys(t *trial) {
	var requests []ratelimit.Request
	for i := range 6 {
		requests = append(requests, t.of(t.bucket("bucket"), t.key(i)).Count(3))
	}
	if t.keys == oneKey {
		t.each("a key six times", "+++---", requests...)
		t.each("the same", "------", requests...)
		return
	}
	t.each("the first use of all", "++++++", requests...)
	t.grant("a use of one", requests[2].Count(7))
	t.each("a use of all", "++-+++", requests...)
	t.each("more than one can hold", "++--++", append(append(requests[:3:3], requests[3].Count(11)), requests[4:]...)...)
	t.each("a use of what only one has", "---+--", requests...)
}

func eachKinds(t *trial) {
	requests := []ratelimit.Request{
		t.of(t.bucket("shards", ratelimit.Shards(3)), t.key(0)).Count(2), t.of(t.bucket("bucket"), t.key(1)).Count(6),
		t.of(ratelimit.FixedWindow(t.name("window"), 5, time.Hour, ratelimit.Start(noon)), t.key(2)).Count(2),
		t.of(ratelimit.CalendarWindow(t.name("calendar"), 5, ratelimit.Month), t.key(3)).Count(2),
	}
	t.each("the first use", "++++", requests...)
	t.each("the second use", "+-++", requests...)
	t.each("the third use", "+---", requests...)
}
