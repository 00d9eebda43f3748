package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// coalescerCases are calls that a Coalescer decides together. Their clock stands still, so the sums are known.
func coalescerCases() []testCase {
	c := func(name string, script func(t *trial)) testCase {
		return testCase{name: name, ways: coalescerWays(), spread: true, script: script}
	}
	return []testCase{
		c("Coalescer: one limit, all granted", coalesceGrants),
		c("Coalescer: one limit, partly denied", coalesceDenials),
		c("Coalescer: several limits, a call for each", coalesceMixed),
		c("Coalescer: calls for several limits, all or nothing", coalesceSeveral),
		c("Coalescer: calls for several limits, all granted", coalesceSeveralGrants),
		c("Coalescer: fixed windows", coalesceWindows),
		c("Coalescer: a year and an hour in one call", coalesceCalendars),
		{name: "Coalescer: rows that look alike", ways: coalescerWays(), script: coalesceAlike},
		{name: "Coalescer: rows of several limits that look alike", ways: coalescerWays(), script: coalesceAlikeLimits},
		{name: "Coalescer: calls of different counts for one key", ways: coalescerWays(), script: coalesceCounts},
		{name: "Coalescer: a sharded limit", ways: coalescerWays(), script: coalesceSharded},
	}
}

// keysOf makes places for keys of one limit: one place, or several.
func (t *trial) keysOf(limit ratelimit.Limit, several int) (places []*place) {
	if t.keys == oneKey {
		several = 1
	}
	for i := range several {
		places = append(places, t.place(limit, t.key(i)))
	}
	return places
}

func coalesceGrants(t *trial) {
	places := t.keysOf(t.still("bucket", 1000), 32)
	for _, step := range []string{"first uses", "later uses"} {
		t.race(step, 400, places, func(i int) []int { return []int{i % len(places)} })
	}
	t.settle(exactly)
}

func coalesceDenials(t *trial) {
	places := t.keysOf(t.still("bucket", 10), 16)
	calls := 15 * len(places)
	for _, step := range []string{"first uses", "later uses"} {
		t.race(step, calls, places, func(i int) []int { return []int{i % len(places)} })
	}
	t.settle(exactly)
}

func coalesceMixed(t *trial) {
	var places []*place
	for i := range 4 {
		places = append(places, t.keysOf(t.still(fmt.Sprint("limit", i), float64(10+20*i)), 8)...)
	}
	for _, step := range []string{"first uses", "later uses"} {
		t.race(step, 20*len(places), places, func(i int) []int { return []int{i % len(places)} })
	}
	t.settle(exactly)
}

// coalesceSeveral asks for a limit that all share, and for one of their own.
func coalesceSeveral(t *trial) {
	places := []*place{t.place(t.still("shared", 100), t.key(0))}
	for i := range 8 {
		places = append(places, t.place(t.still(fmt.Sprint("own", i), 1000), t.key(1+i)))
	}
	for _, step := range []string{"first uses", "later uses"} {
		t.race(step, 120, places, func(i int) []int { return []int{0, 1 + i%8} })
	}
	t.settle(func(p *place) (least, most int64) {
		if p == places[0] {
			return 100, 100
		}
		return 0, 1000
	})
}

func coalesceSeveralGrants(t *trial) {
	var places []*place
	for i := range 8 {
		places = append(places, t.place(t.still(fmt.Sprint("limit", i), 1000), t.key(i)))
	}
	for _, step := range []string{"first uses", "later uses"} {
		t.race(step, 160, places, func(i int) []int { return []int{i % 8, (i + 3) % 8} })
	}
	t.settle(exactly)
}

func coalesceWindows(t *trial) {
	places := t.keysOf(ratelimit.FixedWindow(t.name("window"), 10, time.Hour), 16)
	for _, step := range []string{"first uses", "later uses"} {
		t.race(step, 8*len(places), places, func(i int) []int { return []int{i % len(places)} })
	}
	t.settle(exactly)
}

// coalesceCalendars asks for two limits of each key. The years begin in zones of their own.
func coalesceCalendars(t *trial) {
	var years, hours []*place
	for i, zone := range []string{"UTC", "Europe/Berlin", "Asia/Tokyo", "America/Sao_Paulo"} {
		years = append(years, t.place(ratelimit.CalendarWindow(t.name(fmt.Sprint("year", i)), 10, ratelimit.Year, ratelimit.Zone(zone)), t.key(0)))
		hours = append(hours, t.place(ratelimit.FixedWindow(t.name(fmt.Sprint("hour", i)), 1000, time.Hour), t.key(0)))
	}
	for _, step := range []string{"first uses", "later uses"} {
		t.race(step, 8*len(years), slices.Concat(years, hours), func(i int) []int { return []int{i % len(years), len(years) + i%len(years)} })
	}
	t.settle(func(*place) (least, most int64) { return 10, 10 }) // of an hour, too, since the year denies the whole call
}

// coalesceCounts asks for 1, 2 or 3 tokens of one key. There are enough for all but a few calls.
func coalesceCounts(t *trial) {
	ann := t.place(t.still("bucket", 150), t.key(0))
	t.raceFor("calls of 1, 2 and 3 tokens", 90, []*place{ann}, func(int) []int { return []int{0} }, func(i int) int { return 1 + i%3 })
	t.settle(func(*place) (least, most int64) { return 148, 150 })
}

func coalesceSharded(t *trial) {
	places := []*place{t.place(t.still("shards", 60, ratelimit.Shards(4)), t.key(0))}
	t.race("uses", 100, places, func(int) []int { return []int{0} })
	t.settle(exactly)
}

// coalesceAlike gives many keys the same tokens at the same instant, and then consumes those of some. Rows that lie at the
// same place of different partitions differ in nothing else than their keys.
func coalesceAlike(t *trial) {
	limit := t.still("bucket", 1000)
	var places []*place
	for i := range 96 {
		places = append(places, t.place(limit, t.key(i)))
	}
	alike(t, places)
}

func coalesceAlikeLimits(t *trial) {
	var places []*place
	for i := range 96 {
		places = append(places, t.place(t.still(fmt.Sprint("limit", i%3), 1000), t.key(i)))
	}
	alike(t, places)
}

func alike(t *trial, places []*place) {
	t.race("first uses", len(places), places, func(i int) []int { return []int{i} })
	for n := range 4 {
		t.race("uses of every other key", len(places)/2, places, func(i int) []int { return []int{2*i + n%2} })
	}
	t.settle(exactly)
}
