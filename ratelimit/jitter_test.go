package ratelimit

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func TestJitterIsTheSameForTheSameKeyAndWithinTheSpan(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 10_000 {
		at := time.UnixMicro(r.Int64N(4e15) - 2e15).UTC()
		span := time.Duration(r.Int64N(1 << (1 + r.IntN(62))))
		key, more := fmt.Sprint(r.Uint32()), fmt.Sprint(r.IntN(3))
		got := Jitter(at, span, key, more)
		if got.Before(at) || span >= time.Microsecond && !got.Before(at.Add(span)) || got.Nanosecond()%1000 != 0 {
			t.Fatalf("seed %d: %v + %v, key %q: %v", seed, at, span, key, got)
		}
		if again := Jitter(at, span, key, more); !again.Equal(got) {
			t.Fatalf("seed %d: key %q: %v, then %v", seed, key, got, again)
		}
		// A key has the same share of every span.
		share := got.Sub(at).Seconds() / span.Seconds()
		if hour := Jitter(at, time.Hour, key, more).Sub(at).Hours(); span > time.Second && math.Abs(hour-share) > 2e-6 {
			t.Fatalf("seed %d: key %q: %v of %v, but %v of an hour", seed, key, share, span, hour)
		}
	}
	at := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	for _, span := range []time.Duration{math.MinInt64, -time.Hour, 0, time.Microsecond} {
		if got := Jitter(at, span, "ann"); !got.Equal(at) {
			t.Errorf("a span of %v: %v", span, got)
		}
	}
	if got := Jitter(at, math.MaxInt64, "ann"); got.Before(at) {
		t.Errorf("the longest span overflows: %v", got)
	}
	// The result is the same in another process, version or language, since the formula is public. These are from Python's hashlib.
	if got := Jitter(at, time.Hour, "sendMessage", "user|17").Sub(at); got != 32*time.Minute+13*time.Second+612238*time.Microsecond {
		t.Errorf("the share of this key has changed: %v", got)
	}
	if Jitter(at, time.Hour, "a", "b|c").Equal(Jitter(at, time.Hour, "a|b", "c")) {
		t.Error("a part that has the separator in it is the same as two")
	}
}

// The keys are numbered users, as in an application. The chi-squared test is on 100 equal parts of the span. One in a million
// truly uniform samples exceeds its bound. The keys are the same in each run, so luck plays no part.
func TestJitterSpreadsKeysEvenly(t *testing.T) {
	const keys, parts = 100_000, 100
	at := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	var counts [parts]int
	for i := range keys {
		counts[Jitter(at, parts*time.Second, "sendMessage", fmt.Sprintf("user-%d", i)).Sub(at)/time.Second]++
	}
	chi2 := 0.0
	for _, n := range counts {
		chi2 += math.Pow(float64(n)-keys/parts, 2) / (keys / parts)
	}
	if chi2 > 174.5 { // the quantile 1 - 1e-6 for 99 degrees of freedom
		t.Errorf("chi squared %.1f, parts hold %v", chi2, counts)
	}
}
