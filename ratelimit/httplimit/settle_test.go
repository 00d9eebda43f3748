package httplimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

var (
	llmTokens = ratelimit.TokenBucket("llmTokens", 100, time.Minute)
	calls     = ratelimit.TokenBucket("calls", 100, time.Minute)
)

// granting is the costs of a request that was granted.
func granting(outer *costs, requests ...ratelimit.Request) *costs {
	// A Limiter that has no database answers an error, and a result that names the requests.
	result, _ := new(ratelimit.Limiter).Consume(context.Background(), nil, requests...)
	for i := range result.Requests {
		result.Requests[i].Taken = result.Requests[i].Count
	}
	return &costs{outer: outer, requests: requests, result: result, byLimit: map[string]float64{}}
}

func TestOnlyTheDifferenceIsSettled(t *testing.T) {
	text := func(list []ratelimit.Request) string {
		result, _ := new(ratelimit.Limiter).Consume(context.Background(), nil, list...)
		var b strings.Builder
		for _, s := range result.Requests {
			fmt.Fprintf(&b, "%s %s %v,", s.Limit.Name(), s.Key, s.Count)
		}
		return b.String()
	}
	for _, row := range []struct {
		name           string
		requests       []ratelimit.Request
		costs          map[string]float64
		free           bool
		charge, refund string
	}{
		{"nothing is set", []ratelimit.Request{llmTokens.Key("ann").Count(10)}, nil, false, "", ""},
		{"more", []ratelimit.Request{llmTokens.Key("ann").Count(10)}, map[string]float64{"llmTokens": 25}, false, "llmTokens ann 15,", ""},
		{"less", []ratelimit.Request{llmTokens.Key("ann").Count(10)}, map[string]float64{"llmTokens": 4}, false, "", "llmTokens ann 6,"},
		{"nothing was used", []ratelimit.Request{llmTokens.Key("ann").Count(10)}, map[string]float64{"llmTokens": 0}, false, "", "llmTokens ann 10,"},
		{"the same", []ratelimit.Request{llmTokens.Key("ann").Count(10)}, map[string]float64{"llmTokens": 10}, false, "", ""},
		{"a little more", []ratelimit.Request{llmTokens.Key("ann").Count(0.3)}, map[string]float64{"llmTokens": math.Nextafter(0.3, 1)}, false, "", ""},
		{"a little less", []ratelimit.Request{llmTokens.Key("ann").Count(0.3)}, map[string]float64{"llmTokens": math.Nextafter(0.3, 0)}, false, "", ""},
		{"nothing was estimated", []ratelimit.Request{llmTokens.Key("ann").Count(0)}, map[string]float64{"llmTokens": 7}, false, "llmTokens ann 7,", ""},
		{"one of two limits", []ratelimit.Request{calls.Key("ann"), llmTokens.Key("ann").Count(10)},
			map[string]float64{"llmTokens": 25}, false, "llmTokens ann 15,", ""},
		{"two limits", []ratelimit.Request{calls.Key("ann"), llmTokens.Key("ann").Count(10)},
			map[string]float64{"llmTokens": 4, "calls": 3}, false, "calls ann 2,", "llmTokens ann 6,"},
		{"two keys", []ratelimit.Request{llmTokens.Key("ann").Count(10), llmTokens.Key("bob").Count(20)},
			map[string]float64{"llmTokens": 15}, false, "llmTokens ann 5,", "llmTokens bob 5,"},
		{"two requests for one key", []ratelimit.Request{llmTokens.Key("ann").Count(10), calls.Key("ann"), llmTokens.Key("ann").Count(20)},
			map[string]float64{"llmTokens": 45}, false, "llmTokens ann 15,", ""},
		{"parts of a key", []ratelimit.Request{llmTokens.Key("a|b", "c").Count(10)}, map[string]float64{"llmTokens": 11}, false, `llmTokens a\|b|c 1,`, ""},
		{"free", []ratelimit.Request{calls.Key("ann"), llmTokens.Key("ann").Count(10)}, nil, true, "", "calls ann 1,llmTokens ann 10,"},
		{"free, whatever is set", []ratelimit.Request{llmTokens.Key("ann").Count(10)}, map[string]float64{"llmTokens": 25}, true, "", "llmTokens ann 10,"},
	} {
		c := granting(nil, row.requests...)
		if row.costs != nil {
			c.byLimit = row.costs
		}
		charge, refund := c.end(row.free)
		if text(charge) != row.charge || text(refund) != row.refund {
			t.Errorf("%s: charge %q, refund %q, want %q, %q", row.name, text(charge), text(refund), row.charge, row.refund)
		}
	}
}

func TestSetCost(t *testing.T) {
	outer := granting(nil, calls.Key("ann"), llmTokens.Key("ann"))
	inner := granting(outer, llmTokens.Key("ann").Count(10))
	ended := granting(nil, llmTokens.Key("ann"))
	ended.end(false)
	within := func(c *costs) context.Context { return context.WithValue(t.Context(), costsKey{}, c) }
	other := ratelimit.TokenBucket("other", 1, time.Second)
	for _, row := range []struct {
		name  string
		ctx   context.Context
		limit ratelimit.Limit
		cost  float64
		want  string // of the error
	}{
		{"the first", within(inner), llmTokens, 4, ""},
		{"the last", within(inner), llmTokens, 5, ""},
		{"of the middleware around it", within(inner), calls, 1e15, ""},
		{"of no limit that it knows", within(inner), other, 1, "did not ask for this limit"},
		{"of no limit", within(inner), ratelimit.Limit{}, 1, "did not ask for this limit"},
		{"NaN", within(inner), llmTokens, math.NaN(), "NaN is not between 0 and 1e+15"},
		{"negative", within(inner), llmTokens, -1e-9, "-1e-09 is not between"},
		{"infinite", within(inner), llmTokens, math.Inf(1), "+Inf is not between"},
		{"too much", within(inner), llmTokens, 1.1e15, "1.1e+15 is not between"},
		{"too late", within(ended), llmTokens, 1, "the handler has returned"},
		{"no middleware", t.Context(), llmTokens, 1, "no Middleware with Settle"},
		{"nothing was taken", within(&costs{}), llmTokens, 1, ""},
		{"nothing was taken within", within(&costs{outer: outer}), calls, 2, ""},
		{"nothing was taken around it", within(granting(&costs{}, llmTokens.Key("ann"))), calls, 2, ""},
		{"nothing was taken, but that is no cost", within(&costs{}), llmTokens, math.NaN(), "NaN is not between"},
	} {
		err := SetCost(row.ctx, row.limit, row.cost)
		if (err == nil) != (row.want == "") || err != nil && (!errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), row.want)) {
			t.Errorf("%s: %v, want %q", row.name, err, row.want)
		}
	}
	if len(inner.byLimit) != 1 || inner.byLimit["llmTokens"] != 5 || len(outer.byLimit) != 1 || outer.byLimit["calls"] != 2 {
		t.Errorf("set: %v, and around it %v", inner.byLimit, outer.byLimit)
	}
}
