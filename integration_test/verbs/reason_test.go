package verbs_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestADenialTellsWhy: by its quota, its plan or a block, and whether waiting helps. Of several reasons, it is the one that
// lasts longest: a plan, then a block.
func TestADenialTellsWhy(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		pool := harness.NewPool(w, 2)
		api, month := ratelimit.TokenBucket("api", 10, time.Minute), ratelimit.CalendarWindow("month", 10, ratelimit.Month, ratelimit.Shards(2))
		follow.By(w.Limiter, follow.Settings{DB: pool})
		until := harness.Scan[time.Time](w, pool, "SELECT date_trunc('second', now()) + interval '1 hour'").UTC()
		for _, key := range []string{"blocked", "later"} {
			harness.Scan[int64](w, pool, "SELECT ratelimit.block('api', $1, until => $2)", key, until.Add(time.Duration(len(key)-7)*time.Minute))
		}
		harness.Scan[int64](w, pool, "SELECT ratelimit.block('api', 'banned', forever => true)")
		harness.Scan[int64](w, pool, "SELECT ratelimit.block('exports.free', 'blocked', until => $1)", until)
		harness.Scan[int64](w, pool, "SELECT ratelimit.block($1, 'blocked', until => $2)", enterprise.Name(), until)
		for key, sql := range map[string]string{"trial": "ratelimit.override('exports.free', 'trial', rate => 5, forever => true)", "friend": "ratelimit.unlimited('exports.free', 'friend', forever => true)"} {
			harness.Scan[int64](w, pool, "SELECT "+sql)
			harness.Scan[int64](w, pool, "SELECT ratelimit.block('exports.free', $1, until => $2)", key, until)
		}
		w.Do(follow.Load(w.Context(), w.Limiter))
		w.Clock.At = until.Add(-time.Hour)
		w.Grant(api.Key("used").Count(10), month.Key("used").Count(10))
		w.Charge(api.Key("later").Count(500))
		used, blocked, later, banned := api.Key("used"), api.Key("blocked"), api.Key("later"), api.Key("banned")
		end, laterEnd := until, until.Add(-2*time.Minute)
		nextMonth := time.Date(w.Clock.At.Year(), w.Clock.At.Month()+1, 1, 0, 0, 0, 0, time.UTC)
		never := time.Time{}
		for name, c := range map[string]struct {
			requests []ratelimit.Request
			reason   ratelimit.Reason
			retryAt  time.Time
		}{
			"quota":                        {[]ratelimit.Request{used}, ratelimit.ReasonQuota, w.Clock.At.Add(6 * time.Second)},
			"two quotas":                   {[]ratelimit.Request{used, month.Key("used")}, ratelimit.ReasonQuota, nextMonth},
			"plan":                         {[]ratelimit.Request{free.Key("ann")}, ratelimit.ReasonPlan, never},
			"block with an end":            {[]ratelimit.Request{blocked}, ratelimit.ReasonBlock, end},
			"block without an end":         {[]ratelimit.Request{banned}, ratelimit.ReasonBlock, never},
			"two blocks":                   {[]ratelimit.Request{later, blocked}, ratelimit.ReasonBlock, end},
			"the earlier block":            {[]ratelimit.Request{later}, ratelimit.ReasonBlock, laterEnd},
			"blocks with and without end":  {[]ratelimit.Request{banned, blocked}, ratelimit.ReasonBlock, never},
			"block over quota":             {[]ratelimit.Request{used, blocked, month.Key("used")}, ratelimit.ReasonBlock, end},
			"plan over quota":              {[]ratelimit.Request{used, free.Key("ann")}, ratelimit.ReasonPlan, never},
			"plan over block":              {[]ratelimit.Request{blocked, free.Key("ann")}, ratelimit.ReasonPlan, never},
			"plan over block over quota":   {[]ratelimit.Request{used, month.Key("used"), blocked, free.Key("ann")}, ratelimit.ReasonPlan, never},
			"plan over block without end":  {[]ratelimit.Request{free.Key("ann"), banned}, ratelimit.ReasonPlan, never},
			"a plan that is blocked":       {[]ratelimit.Request{free.Key("blocked")}, ratelimit.ReasonPlan, never},
			"a trial that is blocked":      {[]ratelimit.Request{free.Key("trial")}, ratelimit.ReasonBlock, end},
			"a lifted plan, blocked":       {[]ratelimit.Request{free.Key("friend")}, ratelimit.ReasonBlock, end},
			"no limit, but for a quota":    {[]ratelimit.Request{enterprise.Key("ann"), used}, ratelimit.ReasonQuota, w.Clock.At.Add(6 * time.Second)},
			"unlimited, but for a block":   {[]ratelimit.Request{enterprise.Key("blocked")}, ratelimit.ReasonBlock, end},
			"a granted one and a block":    {[]ratelimit.Request{api.Key("ann"), blocked}, ratelimit.ReasonBlock, end},
			"a granted one and a quota":    {[]ratelimit.Request{api.Key("ann"), used}, ratelimit.ReasonQuota, w.Clock.At.Add(6 * time.Second)},
			"a granted one and a plan":     {[]ratelimit.Request{api.Key("ann"), free.Key("ann")}, ratelimit.ReasonPlan, never},
			"a plan, and the same unasked": {[]ratelimit.Request{free.Key("bob"), banned, later}, ratelimit.ReasonPlan, never},
			"quota beside 0 of a plan":     {[]ratelimit.Request{free.Key("ann").Count(0), used}, ratelimit.ReasonQuota, w.Clock.At.Add(6 * time.Second)},
			"block beside 0 of a plan":     {[]ratelimit.Request{free.Key("ann").Count(0), blocked}, ratelimit.ReasonBlock, end},
			"block of 0":                   {[]ratelimit.Request{blocked.Count(0)}, ratelimit.ReasonBlock, end},
			"block of 0 in debt":           {[]ratelimit.Request{later.Count(0)}, ratelimit.ReasonBlock, laterEnd},
			"block without end, of 0":      {[]ratelimit.Request{used, banned.Count(0)}, ratelimit.ReasonBlock, never},
			"a blocked plan, of 0":         {[]ratelimit.Request{free.Key("blocked").Count(0)}, ratelimit.ReasonBlock, end},
			"unlimited, but blocked, of 0": {[]ratelimit.Request{enterprise.Key("blocked").Count(0)}, ratelimit.ReasonBlock, end},
		} {
			var errs = map[string]error{}
			_, errs["consume"] = w.Limiter.Consume(w.Context(), w.DB, c.requests...)
			_, errs["check"] = w.Limiter.Check(w.Context(), w.DB, c.requests...)
			if !slices.ContainsFunc(c.requests, ofNothing) {
				_, _, errs["take"] = w.Limiter.Take(w.Context(), w.DB, 5, c.requests...)
			}
			if c.reason != ratelimit.ReasonQuota { // it may owe
				_, errs["reserve"] = w.Limiter.Reserve(w.Context(), w.DB, c.requests...)
			}
			for verb, err := range errs {
				denies(w, name+", "+verb, err, c.reason, c.retryAt)
			}
		}

		w.Grant(free.Key("ann").Count(0), api.Key("ann").Count(0))
	})
}

// ofNothing reports whether a request has a Count of 0, which a Take refuses.
func ofNothing(r ratelimit.Request) bool { return r == r.Count(0) }

// denies wants a denial for a reason. A zero retryAt: for good.
func denies(w harness.World, what string, err error, reason ratelimit.Reason, retryAt time.Time) {
	w.Helper()
	denial, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok || denial.Reason != reason || denial.RetryAt.IsZero() != retryAt.IsZero() || !denial.RetryAt.Equal(retryAt) {
		w.Fatalf("%s: %+v, %v; want a denial by the %s until %v", what, denial, err, reason, retryAt)
	}
	wait := time.Duration(math.MaxInt64 / 2)
	if !retryAt.IsZero() {
		wait = min(retryAt.Sub(w.Clock.At), wait)
	}
	if text := err.Error(); denial.RetryAfter != wait || strings.Contains(text, "by policy") != retryAt.IsZero() {
		w.Fatalf("%s: after %v, %q", what, denial.RetryAfter, text)
	}
	if reason == ratelimit.ReasonPlan && (!strings.Contains(err.Error(), "the rate is 0") || strings.Contains(err.Error(), "exports.free (1 asked, blocked")) {
		w.Fatalf("%s: the error says %q", what, err)
	}
}

// TestADenialTellsWhyOnEveryWayIn covers the ways that do not call Consume on a handle.
func TestADenialTellsWhyOnEveryWayIn(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limiter, clock := harness.NewLimiter()
	w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
	follow.By(limiter, follow.Settings{DB: pool})
	until := harness.Scan[time.Time](t, pool, "SELECT date_trunc('second', now()) + interval '1 hour'").UTC()
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'blocked', until => $1)", until)
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('sharded', every_key => true, forever => true)")
	w.Do(follow.Load(t.Context(), limiter))
	clock.At = until.Add(-time.Hour)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	api := ratelimit.TokenBucket("api", 10, time.Minute, ratelimit.MaxReserved(0))
	w.Grant(api.Key("used").Count(10))
	for _, c := range []struct {
		request ratelimit.Request
		reason  ratelimit.Reason
		retryAt time.Time
	}{
		{api.Key("used"), ratelimit.ReasonQuota, clock.At.Add(6 * time.Second)},
		{api.Key("blocked"), ratelimit.ReasonBlock, until},
		{api.Key("blocked").Count(0), ratelimit.ReasonBlock, until},
		{ratelimit.FixedWindow("sharded", 10, time.Minute, ratelimit.Shards(3)).Key("for good"), ratelimit.ReasonBlock, time.Time{}},
		{free.Key("ann"), ratelimit.ReasonPlan, time.Time{}},
	} {
		errs := map[string]error{}
		_, errs["coalescer"] = limiter.Consume(t.Context(), coalescer, c.request)
		_, errs["reserve"] = limiter.Reserve(t.Context(), coalescer, c.request)
		if !ofNothing(c.request) {
			_, _, errs["take"] = limiter.Take(t.Context(), coalescer, 5, c.request)
		}
		_, errs["wait"] = limiter.Wait(t.Context(), pool, c.request)
		_, errs["hold"] = limiter.Hold(t.Context(), pool, "id", time.Minute, c.request)
		_, _, errs["once"] = limiter.Once(t.Context(), pool, "id", time.Minute, c.request)
		each, err := limiter.ConsumeEach(t.Context(), pool, c.request)
		w.Do(err)
		for range each.Granted() {
			t.Errorf("each: a grant beside a denial by the %s", c.reason)
		}
		var batch pgx.Batch
		if _, errs["batch"] = limiter.QueueConsume(t.Context(), &batch, c.request); errs["batch"] == nil {
			errs["batch"] = limiter.SendTx(t.Context(), pool, &batch)
		}
		errs["hot"] = limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			return harness.Second(limiter.Consume(ctx, tx, c.request))
		}, ratelimit.Hot(c.request))
		for way, err := range errs {
			denies(w, way, err, c.reason, c.retryAt)
		}
	}
	if rows := harness.TableOf(t, pool); strings.Count(rows, "\n") > 0 || !strings.HasPrefix(rows, "(api,used,") {
		t.Errorf("a denial without a look at the rows made some:\n%s", rows)
	}
}
