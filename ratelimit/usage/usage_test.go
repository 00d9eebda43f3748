package usage

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

var noon = time.Date(2026, time.July, 1, 12, 0, 0, 0, time.UTC)

// sums are a Recorder's counts by limit and minute, which are taken from it.
func sums(r *Recorder) map[string]counts {
	all := map[string]counts{}
	for _, p := range r.collect() {
		for minute, c := range p.minutes {
			all[fmt.Sprintf("%s %s", p.of.name, time.Unix(60*minute, 0).UTC().Format("15:04"))] = c
		}
	}
	return all
}

func TestDecisionCountsWhatTheResultSays(t *testing.T) {
	db, now := ratelimittest.New(t), noon
	recorder := &Recorder{}
	limiter := &ratelimit.Limiter{Clock: func() time.Time { return now }, Observer: recorder.Observe}
	ctx := t.Context()
	perUser, perSite := ratelimit.TokenBucket("perUser", 10, time.Minute), ratelimit.FixedWindow("perSite", 100, time.Minute)
	user, site := perUser.Key("ann"), perSite.Global()
	want := func(what string, err, target error) {
		t.Helper()
		if !errors.Is(err, target) {
			t.Fatalf("%s: %v, want %v", what, err, target)
		}
	}

	_, err := limiter.Consume(ctx, db, user.Count(10), site)
	want("consume", err, nil)
	_, err = limiter.Consume(ctx, db, user.Count(3))
	want("consume", err, ratelimit.ErrDenied)
	_, err = limiter.Consume(ctx, db, user, site) // which would have been granted
	want("consume", err, ratelimit.ErrDenied)
	_, err = limiter.Reserve(ctx, db, user.Count(5)) // in 30 s
	want("reserve", err, nil)
	_, err = limiter.Check(ctx, db, user)
	want("check", err, ratelimit.ErrDenied)
	_, err = limiter.Check(ctx, db, site)
	want("check", err, nil)
	_, err = limiter.Consume(ctx, db, user.Count(11))
	want("consume", err, ratelimit.ErrExceedsCapacity)
	_, err = limiter.Consume(ctx, db, perUser.Key(""))
	want("consume", err, ratelimit.ErrInvalid)
	_, err = limiter.Consume(ctx, db, ratelimit.TokenBucket("bad \xff name", 1, time.Minute).Key("ann"))
	want("consume", err, ratelimit.ErrInvalid)
	now = noon.Add(61 * time.Second)
	_, err = limiter.Charge(ctx, db, site.Count(2.5))
	want("charge", err, nil)
	want("reset", limiter.Reset(ctx, db, user), nil)
	n, took, err := limiter.Take(ctx, db, 100, user)
	want("take", err, nil)
	if n != 10 || took.Requests[0].Taken != 10 {
		t.Fatalf("%+v", took)
	}
	_, err = limiter.Refund(ctx, db, took.Receipt(), user.Count(4))
	want("refund", err, nil)
	_, err = limiter.Wait(ctx, db, perSite.Key("else").Count(4))
	want("wait", err, nil)
	_, err = limiter.Consume(ctx, db, ratelimit.Unlimited("free").Key("ann").Count(7), ratelimit.TokenBucket("closed", 0, time.Minute).Key("ann"))
	want("consume", err, ratelimit.ErrDenied)

	now = time.Now() // of what failed
	got := sums(recorder)
	failures := int64(0)
	for name, c := range got { // in the minute, or the minutes, of the test
		if c.failed > 0 && strings.HasPrefix(name, "perUser ") {
			failures += c.failed
			delete(got, name)
		}
	}
	wanted := map[string]counts{
		"perUser 12:00": {granted: 2, denied: 2, tokens: 15, waited: 30},
		"perSite 12:00": {granted: 1, tokens: 1},
		"perSite 12:01": {granted: 1, tokens: 6.5},
		"perUser 12:01": {granted: 1, tokens: 10, refunded: 4},
		"closed 12:01":  {denied: 1},
	}
	if !maps.Equal(got, wanted) || failures != 2 {
		t.Errorf("counted\n%+v\nand %d failures, want\n%+v\nand 2", got, failures, wanted)
	}
	if left := sums(recorder); len(left) != 0 {
		t.Errorf("counted twice: %+v", left)
	}
}

func TestSomeErrorsAreNoFailures(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	state := func(code string) error { return fmt.Errorf("ratelimit: consume: %w", &pgconn.PgError{Code: code}) }
	for _, test := range []struct {
		ctx  context.Context
		err  error
		want int64
	}{
		{t.Context(), state("40001"), 0},
		{t.Context(), state("40P01"), 0},
		{t.Context(), state("42P01"), 1},
		{t.Context(), state("57014"), 1},
		{canceled, state("57014"), 0},
		{late, state("57014"), 1},
		{canceled, fmt.Errorf("%w: %w", ratelimit.ErrUnknownOutcome, context.Canceled), 0},
		{late, fmt.Errorf("%w: %w", ratelimit.ErrUnknownOutcome, context.DeadlineExceeded), 1},
		{t.Context(), ratelimit.ErrClosed, 1},
	} {
		r := &Recorder{}
		status := ratelimit.Status{Limit: ratelimit.TokenBucket("limit", 1, time.Minute), Key: "ann", Count: 1}
		r.Observe(test.ctx, ratelimit.Decision{Verb: "consume", Err: test.err, Result: ratelimit.Result{Requests: []ratelimit.Status{status}}})
		var failed int64
		for _, c := range sums(r) {
			failed += c.failed
		}
		if failed != test.want {
			t.Errorf("%v: %d failures, want %d", test.err, failed, test.want)
		}
	}
}

// Of a hold and of what is counted once, the first delivery counts. What comes back or is charged counts when the hold ends.
func TestRepeatedDeliveriesAreNotCounted(t *testing.T) {
	r := &Recorder{}
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	for _, verb := range []string{"hold", "once"} {
		for _, reason := range []ratelimit.Reason{ratelimit.ReasonHeld, ratelimit.ReasonSettled, ratelimit.ReasonQuota} {
			d := deny(limit, "ann", noon)
			d.Verb, d.Err = verb, &ratelimit.DeniedError{Requests: d.Result.Requests, Reason: reason}
			r.Observe(t.Context(), d)
		}
		d := grant(limit, "ann", noon)
		d.Verb = verb
		r.Observe(t.Context(), d)
		d.Result.Repeated = true
		r.Observe(t.Context(), d)
	}
	for _, verb := range []string{"settle", "release"} {
		r.Observe(t.Context(), ratelimit.Decision{Verb: verb, Result: ratelimit.Result{OK: true, At: noon, Requests: []ratelimit.Status{{Limit: limit, Key: "ann", OK: true, Taken: 2, Refunded: 3}}}})
	}
	want := map[string]counts{"limit 12:00": {granted: 2, denied: 2, tokens: 6, refunded: 6}}
	if got := sums(r); !maps.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// grant and deny are decisions on a limit and key.
func grant(limit ratelimit.Limit, key string, at time.Time) ratelimit.Decision {
	return ratelimit.Decision{Verb: "consume", Result: ratelimit.Result{OK: true, At: at, Requests: []ratelimit.Status{
		{Limit: limit, Key: key, Count: 1, Taken: 1, OK: true},
	}}}
}

func deny(limit ratelimit.Limit, key string, at time.Time) ratelimit.Decision {
	result := ratelimit.Result{At: at, RetryAt: at.Add(time.Second), Requests: []ratelimit.Status{
		{Limit: limit, Key: key, Count: 1, RetryAt: at.Add(time.Second)},
	}}
	return ratelimit.Decision{Verb: "consume", Result: result, Err: &ratelimit.DeniedError{Requests: result.Requests}}
}

// Goroutines whose calls come from two minutes in turns, with a collection at any time, lose no count.
func TestNoCountIsLostOrCountedTwice(t *testing.T) {
	r := &Recorder{}
	limits := []ratelimit.Limit{ratelimit.TokenBucket("one", 1, time.Minute), ratelimit.TokenBucket("two", 1, time.Minute)}
	const goroutines, calls = 8, 4000
	var calling sync.WaitGroup
	for g := range goroutines {
		calling.Go(func() {
			for i := range calls {
				at := noon.Add(time.Duration(i%3) * time.Minute) // the third minute displaces the first
				if i%4 == 0 {
					r.Observe(t.Context(), deny(limits[i/2%2], fmt.Sprint("key ", g), at))
				} else {
					r.Observe(t.Context(), grant(limits[i/2%2], "ann", at))
				}
			}
		})
	}
	got, keys := map[string]counts{}, map[string]int64{}
	collect := func() {
		for _, p := range r.collect() {
			for minute, c := range p.minutes {
				name := fmt.Sprintf("%s %d", p.of.name, minute-noon.Unix()/60)
				sum := got[name]
				sum.add(c)
				got[name] = sum
			}
			for _, list := range p.hours {
				for _, d := range list {
					keys[d.key] += d.n
				}
			}
		}
	}
	done := make(chan struct{})
	go func() { calling.Wait(); close(done) }()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
			runtime.Gosched()
		}
		collect()
	}
	want := map[string]counts{}
	for i := range calls {
		name := fmt.Sprintf("%s %d", limits[i/2%2].Name(), i%3)
		sum := want[name]
		if i%4 == 0 {
			sum.denied += goroutines
		} else {
			sum.granted += goroutines
			sum.tokens += goroutines
		}
		want[name] = sum
	}
	if !maps.Equal(got, want) {
		t.Errorf("counted\n%+v, want\n%+v", got, want)
	}
	for g := range goroutines {
		if key := fmt.Sprint("key ", g); keys[key] != calls/4 {
			t.Errorf("%s: %d, want %d", key, keys[key], calls/4)
		}
	}
}

// A call of Decision counts the request first and the key then. A collection may come in between.
func TestADeniedKeyMayBeCountedAfterItsMinute(t *testing.T) {
	r := &Recorder{}
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	r.Observe(t.Context(), deny(limit, "ann", noon))
	l := (*r.limits.Load())["limit"]
	hours := l.hours
	l.hours = nil
	if parts := r.collect(); len(parts) != 1 || len(parts[0].minutes) != 1 || len(parts[0].hours) != 0 {
		t.Fatalf("%+v", parts)
	}
	l.hours = hours
	if parts := r.collect(); len(parts) != 1 || len(parts[0].minutes) != 0 || len(parts[0].hours) != 1 {
		t.Errorf("%+v", parts)
	}
}

func TestLimitsBeyondTheBoundAreCountedTogether(t *testing.T) {
	r := &Recorder{}
	for i := range 2 * maxLimits {
		limit := ratelimit.TokenBucket(fmt.Sprint("limit ", i), 1, time.Minute)
		r.Observe(t.Context(), grant(limit, "ann", noon))
		r.Observe(t.Context(), deny(limit, "ann", noon))
	}
	parts := r.collect()
	if len(parts) != maxLimits+1 || parts[0].of.name != others {
		t.Fatalf("%d limits, the first is %q", len(parts), parts[0].of.name)
	}
	if c := parts[0].minutes[noon.Unix()/60]; c != (counts{granted: maxLimits, denied: maxLimits, tokens: maxLimits}) || len(parts[0].hours) != 0 {
		t.Errorf("the others: %+v, keys %v", c, parts[0].hours)
	}
	if c := parts[1].minutes[noon.Unix()/60]; c != (counts{granted: 1, denied: 1, tokens: 1}) || len(parts[1].hours) != 1 {
		t.Errorf("%s: %+v, keys %v", parts[1].of.name, c, parts[1].hours)
	}
	// A statement has some of them. All statements together have all.
	statements := 0
	for rest := parts; len(rest) > 0; statements++ {
		n := thatFit(rest)
		if n < 1 {
			t.Fatal("a statement of nothing")
		}
		rest = rest[n:]
	}
	if statements != 2 {
		t.Errorf("%d statements", statements)
	}
}

func TestWhatCannotBeWrittenIsKeptForAnHour(t *testing.T) {
	r := &Recorder{}
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	for i := range maxMinutes + 10 {
		at := noon.Add(time.Duration(i) * time.Minute)
		r.Observe(t.Context(), grant(limit, "ann", at))
		r.Observe(t.Context(), deny(limit, "bob", at))
		r.putBack(r.collect())
	}
	parts := r.collect()
	if n := r.dropped.Load(); n != 20 || len(parts) != 1 || len(parts[0].minutes) != maxMinutes {
		t.Fatalf("%d requests dropped, %+v", n, parts)
	}
	if first := earliest(parts[0].minutes); first != noon.Unix()/60+10 {
		t.Errorf("the first minute is %d", first-noon.Unix()/60)
	}
	if hours := parts[0].hours; len(hours) != 2 || hours[noon.Unix()/3600][0].n != 60 || hours[noon.Unix()/3600+1][0].n != 10 {
		t.Errorf("denied keys: %+v", hours)
	}
}

func TestUpToItsCountersASketchIsExact(t *testing.T) {
	s, want := &sketch{place: map[string]int{}}, map[string]int64{}
	r := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		key := fmt.Sprint(r.IntN(maxKeys))
		s.add(denials{key: key, n: 1, asked: 2})
		want[key]++
	}
	for _, c := range s.heap {
		if c.n != want[c.key] || c.asked != float64(2*c.n) || c.rank != c.n {
			t.Errorf("key %s: %+v, want %d", c.key, c, want[c.key])
		}
	}
	worst := s.worst()
	if len(worst) != maxWorst || worst[0].n != slices.Max(slices.Collect(maps.Values(want))) ||
		!slices.IsSortedFunc(worst, func(a, b denials) int { return int(b.n - a.n) }) {
		t.Errorf("worst %+v", worst)
	}
}

// A key with more than 1/256 of the denials is found in any order, however many others there are. No key's number is too high.
func TestASketchFindsFrequentKeysInAFlood(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		const all, frequent = 50_000, 20
		var keys []string
		for i := range frequent {
			keys = append(keys, slices.Repeat([]string{fmt.Sprint("frequent ", i)}, all/maxKeys+1)...)
		}
		for len(keys) < all {
			keys = append(keys, fmt.Sprint("once ", len(keys)))
		}
		if seed > 0 { // or else the frequent ones come first
			r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		}
		s, came := &sketch{place: map[string]int{}}, map[string]int64{}
		for _, key := range keys {
			s.add(denials{key: key, n: 1})
			came[key]++
		}
		if len(s.heap) != maxKeys || len(s.place) != maxKeys {
			t.Fatalf("%d counters, %d places", len(s.heap), len(s.place))
		}
		for i, c := range s.heap {
			if s.place[c.key] != i || c.n > came[c.key] || c.rank < came[c.key] || i > 0 && c.rank < s.heap[(i-1)/2].rank {
				t.Fatalf("seed %d: key %s at %d: %+v, came %d times", seed, c.key, i, c, came[c.key])
			}
		}
		for i := range frequent {
			if key := fmt.Sprint("frequent ", i); came[key] != all/maxKeys+1 {
				t.Fatal("the test is wrong")
			} else if _, found := s.place[key]; !found {
				t.Errorf("seed %d: %s is not found", seed, key)
			}
		}
	}
}

func TestHashesThatAreEqualBecomeOneKey(t *testing.T) {
	r := &Recorder{HashKey: func(key string) string { return key[:1] }}
	got := r.hashed([]denials{{"ann", 3, 3, 30}, {"bob", 2, 2, 20}, {"alf", 1, 1, 40}, {"", 1, 1, 10}})
	if want := []denials{{"a", 4, 4, 40}, {"b", 2, 2, 20}, {"", 1, 1, 10}}; !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestOnlyCertainFailuresKeepTheCounts(t *testing.T) {
	state := func(code string) error { return fmt.Errorf("sent: %w", &pgconn.PgError{Code: code}) }
	for _, test := range []struct {
		err  error
		want bool
	}{
		{unsentError{context.DeadlineExceeded}, true},
		{&pgconn.ConnectError{}, true},
		{state("40001"), true},
		{state("42501"), true},
		{state("42883"), true},
		{state("55P03"), true},
		{state("57014"), true},
		{state("25006"), true},
		{state("53100"), true},
		{state("53200"), true},
		{state("40003"), false},
		{state("57P01"), false},
		{state("08006"), false},
		{context.DeadlineExceeded, false},
		{context.Canceled, false},
		{pgconn.ErrConnClosed, false},
		{errors.New("unexpected EOF"), false},
		{pgx.ErrNoRows, false},
	} {
		if got := notSaved(test.err); got != test.want {
			t.Errorf("%v: %v, want %v", test.err, got, test.want)
		}
	}
}

func TestFieldsOfARecorderAreChecked(t *testing.T) {
	db := ratelimittest.New(t)
	tx, err := db.BeginTx(t.Context(), pgx.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	for _, r := range []*Recorder{
		{}, {DB: db, Every: -1}, {DB: db, Keep: -1},
		{DB: (*pgxpool.Pool)(nil)}, {DB: &ratelimit.Coalescer{}}, {DB: tx}, {DB: (*pgx.Conn)(nil)}, {DB: new(pgx.Conn)}, {DB: ratelimit.SQL(new(sql.Tx))},
	} {
		if err := r.Validate(); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%+v: Validate: %v", r, err)
		}
		if err := r.Run(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%+v: Run: %v", r, err)
		}
		if err := r.Flush(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%+v: Flush: %v", r, err)
		}
	}
}

// Known limits and keys cost no allocation.
func TestDecisionAllocatesNothing(t *testing.T) {
	r := &Recorder{}
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	for what, d := range map[string]ratelimit.Decision{"a grant": grant(limit, "ann", noon), "a denial": deny(limit, "ann", noon)} {
		if n := testing.AllocsPerRun(1000, func() { r.Observe(t.Context(), d) }); n != 0 {
			t.Errorf("%s: %v allocations", what, n)
		}
	}
}
