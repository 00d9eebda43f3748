package ratelimit

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestOneNameWithTwoDefinitions(t *testing.T) {
	start := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	window := FixedWindow("api", 3, time.Hour, Start(start))
	for name, row := range map[string]struct {
		other Limit
		plan  bool // both are plans of one limit
	}{
		"rate":          {FixedWindow("api", 4, time.Hour, Start(start)), true},
		"capacity":      {FixedWindow("api", 3, time.Hour, Start(start), Capacity(9)), true},
		"maxReserved":   {FixedWindow("api", 3, time.Hour, Start(start), MaxReserved(9)), true},
		"shards":        {FixedWindow("api", 3, time.Hour, Start(start), Shards(2)), true},
		"the same grid": {FixedWindow("api", 3, time.Hour, Start(start.Add(-7*time.Hour))), true},
		"another name":  {TokenBucket("API", 3, time.Minute), true},
		"kind":          {TokenBucket("api", 3, time.Hour), false},
		"period":        {FixedWindow("api", 3, time.Minute, Start(start)), false},
		"start":         {FixedWindow("api", 3, time.Hour, Start(start.Add(time.Minute))), false},
		"without start": {FixedWindow("api", 3, time.Hour), false},
		"everything":    {TokenBucket("api", 30, 24*time.Hour, Capacity(1), MaxReserved(0), Shards(9)), false},
	} {
		var l Limiter
		if _, err := l.newCall(VerbConsume, "", []Request{window.Key("ann")}, nil); err != nil {
			t.Fatal(err)
		}
		_, later := l.newCall(VerbConsume, "", []Request{row.other.Key("ann")}, nil)
		_, together := new(Limiter).newCall(VerbConsume, "", []Request{row.other.Key("bob"), window.Key("ann")}, nil)
		for when, err := range map[string]error{"later": later, "together": together} {
			switch {
			case row.plan && err != nil, !row.plan && !errors.Is(err, ErrInvalid):
				t.Errorf("%s, %s: %v", name, when, err)
			case !row.plan && (!strings.Contains(err.Error(), window.String()) || !strings.Contains(err.Error(), row.other.String())):
				t.Errorf("%s, %s: %q does not name both", name, when, err)
			}
		}
		// The first stays valid.
		if _, err := l.newCall(VerbConsume, "", []Request{window.Key("ann")}, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A refused call must not define its limit: the first valid call does.
func TestARefusedCallDefinesNothing(t *testing.T) {
	var l Limiter
	bucket, window := TokenBucket("api", 3, time.Hour), FixedWindow("api", 3, time.Hour)
	for _, wrong := range [][]Request{{bucket.Key("")}, {bucket.Key("ann").Count(4)}, {bucket.Key("ann"), window.Key("bob")}} {
		if _, err := l.newCall(VerbConsume, "", wrong, nil); err == nil {
			t.Fatalf("%v is granted", wrong)
		}
	}
	if _, err := l.newCall(VerbConsume, "", []Request{window.Key("ann")}, nil); err != nil {
		t.Error(err)
	}
}

func TestSoManyDefinitionsAreRemembered(t *testing.T) {
	var l Limiter
	bucket := func(i int) Request { return TokenBucket(fmt.Sprintf("limit %04d", i), 1, time.Minute).Key("ann") }
	window := func(i int) Request { return FixedWindow(fmt.Sprintf("limit %04d", i), 1, time.Minute).Key("ann") }
	var last []Request // one call
	for i := range maxDefinitions + 10 {
		if i >= maxDefinitions-10 {
			last = append(last, bucket(i))
		} else if _, err := l.newCall(VerbConsume, "", []Request{bucket(i)}, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.newCall(VerbConsume, "", last, nil); err != nil {
		t.Fatal(err)
	}
	for i, remembered := range map[int]bool{0: true, maxDefinitions - 11: true, maxDefinitions - 1: true, maxDefinitions: false, maxDefinitions + 9: false} {
		if _, err := l.newCall(VerbConsume, "", []Request{window(i)}, nil); errors.Is(err, ErrInvalid) != remembered {
			t.Errorf("limit %d: %v", i, err)
		}
	}
	if n := len(*l.definitions.byName.Load()); n != maxDefinitions {
		t.Errorf("%d names are remembered, want %d", n, maxDefinitions)
	}
	// One call for several limits, of which some are unknown.
	if _, err := l.newCall(VerbConsume, "", []Request{bucket(maxDefinitions + 9), window(1)}, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v", err)
	}
}

// Goroutines ask for two definitions of one name at once. All granted calls must have the same definition.
func TestADefinitionIsDecidedOnce(t *testing.T) {
	for round := range 200 {
		var l Limiter
		name := fmt.Sprint("limit ", round)
		requests := []Request{TokenBucket(name, 1, time.Minute).Key("ann"), FixedWindow(name, 1, time.Minute).Key("ann")}
		var granted [2]int
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				_, err := l.newCall(VerbConsume, "", requests[i%2:i%2+1], nil)
				if err != nil && !errors.Is(err, ErrInvalid) {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					granted[i%2]++
				}
			})
		}
		wg.Wait()
		if granted != [2]int{4, 0} && granted != [2]int{0, 4} {
			t.Fatalf("%v of each are granted", granted)
		}
	}
}

func TestAKnownDefinitionIsCheckedWithoutAllocating(t *testing.T) {
	var l Limiter
	c, err := l.newCall(VerbConsume, "", []Request{TokenBucket("api", 1, time.Minute).Key("ann")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { err = l.definitions.check(c.demands) }); n != 0 || err != nil {
		t.Errorf("%v allocations, %v", n, err)
	}
}
