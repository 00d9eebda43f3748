package main

import (
	"context"
	"fmt"
	"io"
	"math/bits"
	"runtime"
	"slices"
	"sync"
	"time"
)

// side is one side of a comparison: goroutines that make one call after another.
type side struct {
	name       string
	goroutines int
	before     func(ctx context.Context) error // runs before each slice; or nil
	call       func(ctx context.Context, worker int) error
}

// tally is the result of running a side for a while.
type tally struct {
	calls     int
	elapsed   time.Duration
	latencies histogram
	mallocs   uint64 // of this process
	cpu       cpuTime
}

func (t *tally) add(u *tally) {
	t.calls += u.calls
	t.elapsed += u.elapsed
	t.latencies.merge(&u.latencies)
	t.mallocs += u.mallocs
	t.cpu.all += u.cpu.all
	t.cpu.stolen += u.cpu.stolen
}

func (t *tally) perSecond() float64 { return float64(t.calls) / t.elapsed.Seconds() }

func (t *tally) String() string {
	return fmt.Sprintf("%9s per s   p50 %8s   p99 %8s", thousands(t.perSecond()), short(t.latencies.quantile(0.5)), short(t.latencies.quantile(0.99)))
}

// run runs a side for a duration. It counts the calls that end in time. It waits for the others, and counts only their latencies.
func (s *side) run(ctx context.Context, d time.Duration) (*tally, error) {
	if s.before != nil {
		if err := s.before(ctx); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	type worker struct {
		calls     int
		latencies histogram
	}
	workers := make([]worker, s.goroutines)
	start := make(chan struct{})
	var deadline time.Time
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			// Each goroutine has its own context, as requests do: drivers attach state to it, which goroutines then do not share.
			ctx, done := context.WithCancel(ctx)
			defer done()
			w := &workers[i]
			<-start
			last := time.Now()
			for {
				if err := s.call(ctx, i); err != nil {
					cancel(fmt.Errorf("%s: %w", s.name, err))
					return
				}
				now := time.Now()
				w.latencies.add(now.Sub(last))
				if now.After(deadline) {
					return
				}
				w.calls++
				last = now
			}
		})
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu := readCPUTime()
	deadline = time.Now().Add(d)
	close(start)
	wg.Wait()
	cpu = cpu.until(readCPUTime())
	runtime.ReadMemStats(&after)
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	t := &tally{elapsed: d, mallocs: after.Mallocs - before.Mallocs, cpu: cpu}
	for i := range workers {
		t.calls += workers[i].calls
		t.latencies.merge(&workers[i].latencies)
	}
	return t, nil
}

// comparison is the result of sides that ran in turn.
type comparison struct {
	slice  time.Duration
	totals []tally     // by side: a, b, and the sides beside them
	turns  [][]float64 // by side: its throughput in each turn
}

// compare warms the sides up and runs them in turn: a b, b a, a b, ... Further sides take turns with them.
func compare(ctx context.Context, out io.Writer, pairs int, slice time.Duration, a, b *side, beside ...*side) (*comparison, error) {
	sides := append([]*side{a, b}, beside...)
	width := 0
	for _, s := range sides {
		width = max(width, len(s.name))
		if _, err := s.run(ctx, slice); err != nil { // warms up
			return nil, err
		}
	}
	c := &comparison{slice: slice, totals: make([]tally, len(sides)), turns: make([][]float64, len(sides))}
	order := make([]int, len(sides))
	for i := range order {
		order[i] = i
	}
	for range pairs {
		for _, i := range order {
			t, err := sides[i].run(ctx, slice)
			if err != nil {
				return nil, err
			}
			c.totals[i].add(t)
			c.turns[i] = append(c.turns[i], t.perSecond())
		}
		slices.Reverse(order)
	}
	for i, s := range sides {
		fmt.Fprintf(out, "  %-*s %v   %5.3g of the second\n", width, s.name, &c.totals[i], c.ratio(i, 1))
	}
	ratios := c.ratios(0, 1)
	fmt.Fprintf(out, "  ratio %.3f, the median of %d pairs of %v each (%.3f to %.3f)\n", median(ratios), pairs, slice, slices.Min(ratios), slices.Max(ratios))
	return c, nil
}

// ratios are the ratios of the throughputs of two sides, turn by turn.
func (c *comparison) ratios(i, j int) []float64 {
	ratios := make([]float64, len(c.turns[i]))
	for turn := range ratios {
		ratios[turn] = c.turns[i][turn] / c.turns[j][turn]
	}
	return ratios
}

// ratio is the median of ratios.
func (c *comparison) ratio(i, j int) float64 { return median(c.ratios(i, j)) }

// outcome makes the ratio of the first two sides the outcome of a figure.
func (c *comparison) outcome() outcome { return c.share(1) }

// share makes the share of a floor that the first side reaches the outcome of a figure: no more than the floor can be asked for.
func (c *comparison) share(floor int) outcome {
	ratios := c.ratios(0, floor)
	return outcome{
		value: median(ratios),
		note: fmt.Sprintf("%s/s : %s/s, %d pairs of %v: %.3g to %.3g", thousands(c.totals[0].perSecond()), thousands(c.totals[floor].perSecond()),
			len(ratios), c.slice, slices.Min(ratios), slices.Max(ratios)),
	}
}

func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// histogram counts durations in bins that are at most 3 % wide. It does not allocate.
type histogram struct {
	counts [40 * 32]uint32
	n      int
}

func (h *histogram) add(d time.Duration) {
	h.counts[bin(d)]++
	h.n++
}

func (h *histogram) merge(other *histogram) {
	for i, n := range other.counts {
		h.counts[i] += n
	}
	h.n += other.n
}

// bin returns the bin of a duration: the number of bits below the upper six, and the upper six without the first.
func bin(d time.Duration) int {
	v := uint64(max(d, 0))
	shift := max(bits.Len64(v)-6, 0)
	return min(shift*32+int(v>>shift), len(histogram{}.counts)-1)
}

// quantile returns the upper end of the bin in which the quantile lies.
func (h *histogram) quantile(q float64) time.Duration {
	rank := int(q * float64(h.n))
	for i, n := range h.counts {
		if rank -= int(n); rank < 0 {
			if i < 64 {
				return time.Duration(i)
			}
			shift := i/32 - 1
			return time.Duration(uint64(i-shift*32+1) << shift)
		}
	}
	return 0
}

// short formats a duration with about three digits.
func short(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.2f ms", d.Seconds()*1000)
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1000)
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// thousands formats a number as 1,234,567.
func thousands(v float64) string {
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
