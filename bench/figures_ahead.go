package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// aheadVsRedis compares a coalescer with Ahead with go-redis. It also prints rueidis, the coalescer without Ahead, and calls that their
// limit decides by itself: what is left then is the way through the library.
func aheadVsRedis(goroutines int, pick func(worker int) string) func(ctx context.Context, e *env) (outcome, error) {
	return func(ctx context.Context, e *env) (outcome, error) {
		var sides []*side
		for _, way := range []contender{
			{name: "txlimit, Ahead", open: openAhead},
			{name: "Redis, EVALSHA, go-redis", open: openGoRedis},
			{name: "Redis, EVALSHA, rueidis", open: openRueidis},
			{name: "txlimit, coalesced", open: openCoalesced},
			{name: "txlimit, unlimited", open: openUnlimited},
		} {
			it, err := way.open(ctx, e, plenty(goroutines))
			if err != nil {
				return outcome{}, err
			}
			sides = append(sides, it.side(way.name, goroutines, pick))
		}
		c, err := e.compare(ctx, 2*pairs, slice, sides[0], sides[1], sides[2:]...)
		if err != nil {
			return outcome{}, err
		}
		result := c.outcome()
		result.note += fmt.Sprintf("; p50 %s, p99 %s; of go-redis: rueidis %.3g, coalesced %.3g, unlimited %.3g", short(c.totals[0].latencies.quantile(0.5)),
			short(c.totals[0].latencies.quantile(0.99)), c.ratio(2, 1), c.ratio(3, 1), c.ratio(4, 1))
		return result, nil
	}
}

// aheadTwoLimits compares calls for a month and a minute, with and without Ahead.
func aheadTwoLimits(ctx context.Context, e *env) (outcome, error) {
	const goroutines = 64
	minute := ratelimit.TokenBucket("a minute", 1e9, time.Minute)
	month := ratelimit.CalendarWindow("a month", 1e9, ratelimit.Month, ratelimit.Zone("Europe/Berlin"))
	var sides []*side
	for _, ahead := range []time.Duration{aheadOf, 0} {
		pool, err := e.newPool(ctx, plenty(goroutines).conns, nil)
		if err != nil {
			return outcome{}, err
		}
		coalescer := &ratelimit.Coalescer{Pool: pool, Ahead: ahead}
		e.undos = append(e.undos, func() error { return coalescer.Close(context.Background()) })
		sides = append(sides, &side{name: fmt.Sprintf("Ahead %v", ahead), goroutines: goroutines, call: func(ctx context.Context, worker int) error {
			_, err := limits.Consume(ctx, coalescer, month.Key(ownKey(worker)), minute.Key(ownKey(worker)))
			return err
		}})
	}
	c, err := e.compare(ctx, 2*pairs, slice, sides[0], sides[1])
	if err != nil {
		return outcome{}, err
	}
	return c.outcome(), nil
}

// The open load: calls come at a steady pace, whatever the answers take, for one of many customers.
const (
	openPerSecond = 5_000
	openCustomers = 500
	openWorkers   = 256
	openSpan      = time.Second // 10 calls of each customer
	openSlice     = 4 * openSpan
	openTurns     = 3
)

// aheadOpen compares what calls of an open load cost the server, with Ahead and without: statements, or bytes of the write-ahead log. It prints
// both, also for a shorter Ahead. Each slice begins after the load has lasted for two Aheads: before, what is ahead grows.
func aheadOpen(cost string) func(ctx context.Context, e *env) (outcome, error) {
	return func(ctx context.Context, e *env) (outcome, error) {
		type way struct {
			*side
			statements statements
			calls      float64
			spent      map[string][]float64 // per call, in each turn
		}
		admin, err := e.newPool(ctx, 1, nil)
		if err != nil {
			return outcome{}, err
		}
		var ways []*way
		for _, ahead := range []time.Duration{openSpan, 0, aheadOf} {
			w := &way{spent: map[string][]float64{}}
			o := plenty(openWorkers)
			pool, err := e.newPool(ctx, o.conns, &w.statements)
			if err != nil {
				return outcome{}, err
			}
			it := coalescedOn(e, &ratelimit.Coalescer{Pool: pool, Ahead: ahead}, o)
			if err := takeEach(ctx, it, openCustomers); err != nil {
				return outcome{}, err
			}
			w.side = it.side(fmt.Sprintf("Ahead %v", ahead), openWorkers, anyKey(openCustomers))
			w.call = paced(openPerSecond, openWorkers, w.call)
			ways = append(ways, w)
		}
		turns := openTurns
		if e.quick {
			turns = 1
		}
		order := slices.Clone(ways)
		for range turns {
			for _, w := range order {
				if _, err := w.run(ctx, e.moment(2*openSpan)); err != nil {
					return outcome{}, err
				}
				wal, err := readWAL(ctx, admin)
				if err != nil {
					return outcome{}, err
				}
				sent := w.statements.n.Load()
				t, err := w.run(ctx, e.moment(openSlice))
				if err != nil {
					return outcome{}, err
				}
				after, err := readWAL(ctx, admin)
				if err != nil {
					return outcome{}, err
				}
				calls := float64(t.latencies.n)
				w.calls += float64(t.calls)
				w.spent["statements"] = append(w.spent["statements"], float64(w.statements.n.Load()-sent)/calls)
				w.spent["WAL bytes"] = append(w.spent["WAL bytes"], (after-wal)/calls)
			}
			slices.Reverse(order)
		}
		long, without := ways[0], ways[1]
		share := func(w *way, cost string) float64 {
			ratios := make([]float64, turns)
			for i := range ratios {
				ratios[i] = w.spent[cost][i] / without.spent[cost][i]
			}
			return median(ratios)
		}
		var notes []string
		for _, w := range ways {
			note := fmt.Sprintf("%s: %.3f statements and %.0f WAL bytes a call at %s calls/s", w.name, median(w.spent["statements"]), median(w.spent["WAL bytes"]),
				thousands(w.calls/float64(turns)/e.moment(openSlice).Seconds()))
			if w != without {
				note += fmt.Sprintf(" (%.3g and %.3g of those without)", share(w, "statements"), share(w, "WAL bytes"))
			}
			fmt.Fprintln(e.out, " ", note)
			notes = append(notes, note)
		}
		return outcome{value: share(long, cost), note: strings.Join(notes, "; ")}, nil
	}
}

// aheadFlood measures the latency of calls for other keys while one key, which is denied, is flooded: with Ahead, before and during the flood. It
// prints the same without Ahead.
func aheadFlood(ctx context.Context, e *env) (outcome, error) {
	turns := floodTurns
	if e.quick {
		turns = 1
	}
	scarce := ratelimit.TokenBucket("scarce", 1e6, time.Second, ratelimit.Capacity(99)) // each call for it is asked
	from := func() netip.Addr { return floods[1].from(0) }
	var notes []string
	var value float64
	for _, ahead := range []time.Duration{aheadOf, 0} {
		var sent statements
		own, err := e.newPool(ctx, floodPool, &sent)
		if err != nil {
			return outcome{}, err
		}
		if err := e.recycle(ctx, own); err != nil {
			return outcome{}, err
		}
		coalescer := &ratelimit.Coalescer{Pool: own, Ahead: ahead}
		e.undos = append(e.undos, func() error { return coalescer.Close(context.Background()) })
		probe := func(ctx context.Context, i int) error {
			_, err := limits.Consume(ctx, coalescer, scarce.Key(ownKey(i)))
			return err
		}
		before, during := &floodWay{name: "before", probe: probe}, &floodWay{name: "during the flood", probe: probe, db: coalescer}
		ways, counts := []*floodWay{before, during}, map[*floodWay]float64{}
		for turn := range 1 + turns {
			for _, way := range ways {
				n := sent.n.Load()
				if err := way.run(ctx, own, from, e.moment(floodSlice), turn > 0); err != nil {
					return outcome{}, err
				}
				if turn > 0 {
					counts[way] += float64(sent.n.Load()-n) / float64(turns) / e.moment(floodSlice).Seconds()
				}
			}
			slices.Reverse(ways)
		}
		note := fmt.Sprintf("Ahead %v: p99 of other keys %s before, %s during a flood of %s requests/s (%.3g); %.0f and %.0f statements/s", ahead,
			short(before.latencies.quantile(0.99)), short(during.latencies.quantile(0.99)),
			thousands(float64(during.answered())/(time.Duration(turns)*e.moment(floodSlice)).Seconds()), during.over(before), counts[before], counts[during])
		fmt.Fprintln(e.out, " ", note)
		if notes = append(notes, note); ahead > 0 {
			value = during.over(before)
		}
	}
	return outcome{value: value, note: strings.Join(notes, "; ")}, nil
}
