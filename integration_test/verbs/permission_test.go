package verbs_test

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestNothingOfARequestChangesTheVerb: what a call does with a request is what the method of Limiter says.
func TestNothingOfARequestChangesTheVerb(t *testing.T) {
	t.Parallel()
	for _, of := range []reflect.Type{reflect.TypeFor[ratelimit.Request](), reflect.TypeFor[*ratelimit.Request]()} {
		var methods []string
		for method := range of.Methods() {
			methods = append(methods, method.Name)
		}
		if want := []string{"Count", "LogValue"}; !slices.Equal(methods, want) {
			t.Errorf("%v has the methods %v, want %v", of, methods, want)
		}
	}
	if of := reflect.TypeFor[ratelimit.Request](); slices.ContainsFunc(reflect.VisibleFields(of), reflect.StructField.IsExported) {
		t.Errorf("%v has exported fields", of)
	}
}

// TestAGrantOwesNothing makes random calls of every verb. A Result that is OK never has a RetryAt, and a Consume or a Take
// never leaves a balance below 0, whatever was reserved before.
func TestAGrantOwesNothing(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	clock := &harness.Clock{At: harness.Noon}
	grants := map[string]int{}
	debts := 0
	for n := 0; n < harness.Sized(1500, 400) || debts < 10 && n < 4000; n++ {
		var limits []ratelimit.Limit
		for i := range 2 {
			limits = append(limits, harness.RandomLimit(r, fmt.Sprint("limit ", n/50, i), harness.OneOf(r, 1, 1, 3)))
		}
		limiter := &ratelimit.Limiter{Clock: clock.Now}
		var requests []ratelimit.Request
		for _, limit := range limits[:1+r.IntN(2)] {
			requests = append(requests, limit.Key("ann").Count(harness.OneOf(r, 0, 1, 1, limit.Capacity()*r.Float64(), limit.Capacity()/2)))
		}
		clock.Advance(time.Duration(r.Int64N(int64(harness.OneOf(r, time.Second, time.Minute, time.Hour)))).Truncate(time.Microsecond))
		var result ratelimit.Result
		var err error
		v := harness.OneOf(r, "consume", "consume", "consume", "take", "check", "reserve", "charge")
		switch v {
		case "consume":
			result, err = limiter.Consume(t.Context(), pool, requests...)
		case "take":
			for i := range requests {
				requests[i] = requests[i].Count(1)
			}
			_, result, err = limiter.Take(t.Context(), pool, 1+r.IntN(100), requests...)
		case "check":
			result, err = limiter.Check(t.Context(), pool, requests...)
		case "charge":
			result, err = limiter.Charge(t.Context(), pool, requests...)
		case "reserve":
			if reserved, err := limiter.Reserve(t.Context(), pool, requests...); err == nil && reserved.Delay > 0 {
				debts++
			}
			continue
		}
		if err != nil {
			if result.OK {
				t.Fatalf("call %d: OK beside %v: %+v", n, err, result)
			}
			continue
		}
		grants[v]++
		if !result.OK || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
			t.Fatalf("call %d: %s: %+v", n, v, result)
		}
		for i, s := range result.Requests {
			if !s.OK || !s.RetryAt.IsZero() || v != "charge" && s.Remaining < 0 {
				t.Fatalf("call %d: %s, request %d: %+v", n, v, i, s)
			}
		}
	}
	if grants["consume"] < 50 || grants["take"] < 10 || grants["check"] < 10 || grants["charge"] < 10 || debts < 10 {
		t.Errorf("%v granted, %d debts: this tested too little", grants, debts)
	}
}
