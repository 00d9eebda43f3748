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
		same  bool // or of another name
	}{
		"the same":      {FixedWindow("api", 3, time.Hour, Start(start.In(time.FixedZone("", 3600)))), true},
		"another name":  {TokenBucket("API", 3, time.Minute), true},
		"rate":          {FixedWindow("api", 4, time.Hour, Start(start)), false},
		"capacity":      {FixedWindow("api", 3, time.Hour, Start(start), Capacity(9)), false},
		"maxReserved":   {FixedWindow("api", 3, time.Hour, Start(start), MaxReserved(9)), false},
		"shards":        {FixedWindow("api", 3, time.Hour, Start(start), Shards(2)), false},
		"kind":          {TokenBucket("api", 3, time.Hour), false},
		"period":        {FixedWindow("api", 3, time.Minute, Start(start)), false},
		"start":         {FixedWindow("api", 3, time.Hour, Start(start.Add(time.Minute))), false},
		"without start": {FixedWindow("api", 3, time.Hour), false},
		"varies":        {FixedWindow("api", 3, time.Hour, Start(start), Varies(time.Hour)), false},
		"other numbers": {FixedWindow("api", 2, time.Hour, Start(start), Varies(time.Hour)).With(Rate(3)), false},
		"unlimited":     {Unlimited("api"), false},
		"rate 0":        {FixedWindow("api", 0, time.Hour, Start(start)), false},
		"everything":    {TokenBucket("api", 30, 24*time.Hour, Capacity(1), MaxReserved(0), Shards(9)), false},
	} {
		var l Limiter
		if _, err := l.newCall(verbConsume, about{}, []Request{window.Key("ann")}, nil); err != nil {
			t.Fatal(err)
		}
		_, later := l.newCall(verbConsume, about{}, []Request{row.other.Key("ann")}, nil)
		_, together := new(Limiter).newCall(verbConsume, about{}, []Request{row.other.Key("bob"), window.Key("ann")}, nil)
		_, hot := txOptions{hot: []Request{row.other.Key("bob"), window.Key("ann")}}.turns(t.Context())
		var full Limiter // which remembers no more names
		full.definitions.byName.Store(new(fullOfNames()))
		_, beyond := full.newCall(verbConsume, about{}, []Request{row.other.Key("bob"), window.Key("ann")}, nil)
		list := definitionsOnly([]Limit{window, row.other})
		for when, err := range map[string]error{"later": later, "together": together, "hot": hot, "beyond": beyond, "list": list} {
			if when == "list" && name == "the same" {
				if !errors.Is(err, ErrInvalid) {
					t.Errorf("a list that has a limit twice: %v", err)
				}
				continue
			}
			second := row.other
			if when != "list" {
				second = second.definition()
			}
			switch {
			case row.same && err != nil, !row.same && !errors.Is(err, ErrInvalid):
				t.Errorf("%s, %s: %v", name, when, err)
			case !row.same && (!strings.Contains(err.Error(), window.String()) && name != "other numbers" || !strings.Contains(err.Error(), second.String())):
				t.Errorf("%s, %s: %q does not name both", name, when, err)
			}
		}
		// The first stays valid.
		if _, err := l.newCall(verbConsume, about{}, []Request{window.Key("ann")}, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func fullOfNames() map[string]*Limit {
	names := map[string]*Limit{}
	for i := range maxDefinitions {
		l := Unlimited(fmt.Sprint("limit ", i))
		names[l.name] = &l
	}
	return names
}

// A refused call must not define its limit: the first valid call does.
func TestARefusedCallDefinesNothing(t *testing.T) {
	var l Limiter
	bucket, window := TokenBucket("api", 3, time.Hour), FixedWindow("api", 3, time.Hour)
	for _, wrong := range [][]Request{{bucket.Key("")}, {bucket.Key("ann").Count(4)}, {bucket.Key("ann"), window.Key("bob")}} {
		if _, err := l.newCall(verbConsume, about{}, wrong, nil); err == nil {
			t.Fatalf("%v is granted", wrong)
		}
	}
	if _, err := l.newCall(verbConsume, about{}, []Request{window.Key("ann")}, nil); err != nil {
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
		} else if _, err := l.newCall(verbConsume, about{}, []Request{bucket(i)}, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.newCall(verbConsume, about{}, last, nil); err != nil {
		t.Fatal(err)
	}
	for i, remembered := range map[int]bool{0: true, maxDefinitions - 11: true, maxDefinitions - 1: true, maxDefinitions: false, maxDefinitions + 9: false} {
		if _, err := l.newCall(verbConsume, about{}, []Request{window(i)}, nil); errors.Is(err, ErrInvalid) != remembered {
			t.Errorf("limit %d: %v", i, err)
		}
	}
	if n := len(*l.definitions.byName.Load()); n != maxDefinitions {
		t.Errorf("%d names are remembered, want %d", n, maxDefinitions)
	}
	// One call for several limits, of which some are unknown.
	if _, err := l.newCall(verbConsume, about{}, []Request{bucket(maxDefinitions + 9), window(1)}, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v", err)
	}
}

// Goroutines ask for two definitions of one name at once. All granted calls must have the same definition.
func TestADefinitionIsDecidedOnce(t *testing.T) {
	for round := range 2000 {
		var l Limiter
		name := fmt.Sprint("limit ", round)
		requests := []Request{TokenBucket(name, 1, time.Minute).Key("ann"), FixedWindow(name, 1, time.Minute).Key("ann")}
		var granted [2]int
		var mu sync.Mutex
		var wg sync.WaitGroup
		start := make(chan struct{})
		for i := range 8 {
			wg.Go(func() {
				<-start
				_, err := l.newCall(verbConsume, about{}, requests[i%2:i%2+1], nil)
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
		close(start)
		wg.Wait()
		if granted != [2]int{4, 0} && granted != [2]int{0, 4} {
			t.Fatalf("%v of each are granted", granted)
		}
	}
}

func TestAKnownDefinitionIsCheckedWithoutAllocating(t *testing.T) {
	var l Limiter
	c, err := l.newCall(verbConsume, about{}, []Request{TokenBucket("api", 1, time.Minute).Key("ann")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { err = l.definitions.check(c.requests) }); n != 0 || err != nil {
		t.Errorf("%v allocations, %v", n, err)
	}
}
