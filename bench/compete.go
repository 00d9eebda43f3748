package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// mode is one distribution of keys that every contender is measured on.
type mode struct {
	title, file string
	pick        func(worker int) string
}

var modes = []mode{
	{"one hot key", "hot_key.svg", hotKey},
	{"a key of its own for each goroutine", "own_keys.svg", ownKey},
}

// goroutineSteps are the steps of the charts' x axis. The table shows tableGoroutines.
var goroutineSteps = []int{1, 4, 16, 64, 256}

const (
	tableGoroutines = 64

	contenderSlice  = 500 * time.Millisecond
	contenderRounds = 3
)

// measurement is everything that was measured of one contender.
type measurement struct {
	contender
	modes  []inMode
	grants grants
}

type inMode struct {
	at                  map[int]*tally // by number of goroutines
	statements, retries float64        // per decision, at tableGoroutines
}

// measureContenders measures all contenders in turn. At each number of goroutines, every contender runs for a slice, and then all run
// again.
func measureContenders(ctx context.Context, e *env) ([]measurement, error) {
	measured := make([]measurement, len(contenders))
	for i, c := range contenders {
		measured[i] = measurement{contender: c, modes: make([]inMode, len(modes))}
	}
	for m, mode := range modes {
		for _, goroutines := range goroutineSteps {
			fmt.Fprintf(e.out, "%s, %d goroutines\n", mode.title, goroutines)
			if err := step(ctx, e, measured, m, goroutines); err != nil {
				return nil, err
			}
			if err := e.undo(ctx); err != nil {
				return nil, err
			}
		}
	}
	fmt.Fprintf(e.out, "grants of one key, %d goroutines\n", grantGoroutines)
	for i := range measured {
		c := &measured[i]
		if c.floor {
			continue
		}
		it, err := c.open(ctx, e, setting{perSecond: grantRate, burst: grantBurst, conns: 16, goroutines: grantGoroutines})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		c.grants, err = countGrants(ctx, 3*time.Second, grantGoroutines, func(ctx context.Context) (bool, error) { return it.take(ctx, "hot") })
		if err = errors.Join(err, e.undo(ctx)); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		fmt.Fprintf(e.out, "  %-28s %v\n", c.name, c.grants)
	}
	return measured, nil
}

// step measures all contenders at one number of goroutines.
func step(ctx context.Context, e *env, measured []measurement, m, goroutines int) error {
	sides := make([]*side, len(measured))
	for i, c := range measured {
		it, err := c.open(ctx, e, plenty(goroutines))
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		sides[i] = it.side(c.name, goroutines, modes[m].pick)
		if _, err := sides[i].run(ctx, contenderSlice/2); err != nil {
			return err
		}
	}
	totals := make([]tally, len(measured))
	for range contenderRounds {
		for i, s := range sides {
			t, err := s.run(ctx, contenderSlice)
			if err != nil {
				return err
			}
			totals[i].add(t)
		}
	}
	for i := range measured {
		c := &measured[i]
		if c.modes[m].at == nil {
			c.modes[m].at = map[int]*tally{}
		}
		c.modes[m].at[goroutines] = &totals[i]
		fmt.Fprintf(e.out, "  %-28s %v\n", c.name, &totals[i])
		if goroutines == tableGoroutines && !c.redis {
			if err := countStatements(ctx, e, &c.modes[m], c.contender, modes[m]); err != nil {
				return err
			}
		}
	}
	return nil
}

// countStatements counts statements and retries. It needs a run of its own, since counting takes time.
func countStatements(ctx context.Context, e *env, in *inMode, c contender, m mode) (err error) {
	opened := len(e.undos)
	defer func() { err = errors.Join(err, e.undoTo(opened)) }() // there are not enough connections for all
	counter := &statements{}
	o := plenty(tableGoroutines)
	o.tracer = counter
	it, err := c.open(ctx, e, o)
	if err != nil {
		return err
	}
	s := it.side(c.name, tableGoroutines, m.pick)
	if _, err := s.run(ctx, contenderSlice/2); err != nil { // first uses
		return err
	}
	before, retries := counter.n.Load(), it.retries.Load()
	t, err := s.run(ctx, contenderSlice)
	if err != nil {
		return err
	}
	decisions := float64(t.latencies.n)
	in.statements = float64(counter.n.Load()-before) / decisions
	in.retries = float64(it.retries.Load()-retries) / decisions
	return nil
}
