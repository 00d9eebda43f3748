package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/ratelimit"
)

// holdCases are calls about an id. The model has none, so the scripts count for themselves.
func holdCases() []testCase {
	everywhere := append(everyWay(), coalescerWays()...)
	return []testCase{
		{name: "Hold, Settle and Release: tokens", ways: everywhere, script: holdTokens},
		{name: "Hold, Settle and Release: several limits", ways: everyWay(), spread: true, script: holdSeveral},
		{name: "Hold, Settle and Release: slots", ways: everywhere, script: holdSlots},
		{name: "Once", ways: everywhere, spread: true, script: once},
		{name: "During: extends what it holds", ways: poolWays(), script: during},
		{name: "Holds by SQL: many ids, their release, and a recount", ways: everyWay(), script: manyHolds},
	}
}

// holding begins a script about holds.
func (t *trial) holding() {
	t.unmodelled = true
	for _, table := range []string{"ratelimit.holds", "ratelimit.limits"} {
		t.cleanups = append(t.cleanups, fmt.Sprintf("DELETE FROM %s WHERE name LIKE '%s%%'", table, t.name("")))
	}
}

// job is an id of the trial.
func (t *trial) job(n int) string { return fmt.Sprintf("%s job %d", t.key(0), n) }

// hold wants a grant.
func (t *trial) held(step string, job int, requests ...ratelimit.Request) (token string) {
	held, err := t.limiter.Hold(t.ctx, t.db, t.job(job), time.Minute, requests...)
	t.must(step, err)
	t.want(held.Until.Equal(t.memory.Now().Add(time.Minute)), "a hold of a minute, came %v", held.Until)
	return held.Token
}

// notHeld wants a denial.
func (t *trial) notHeld(step string, reason ratelimit.Reason, job int, requests ...ratelimit.Request) {
	_, err := t.limiter.Hold(t.ctx, t.db, t.job(job), time.Minute, requests...)
	t.wantReason(step, err, reason)
}

func (t *trial) wantReason(step string, err error, reason ratelimit.Reason) {
	t.step = step
	var denial *ratelimit.DeniedError
	if !errors.As(err, &denial) {
		if err == nil {
			t.wrong("want a denial, came a grant")
		}
		t.failed(err)
	}
	t.want(denial.Reason == reason, "%s, came %s", reason, denial.Reason)
}

func (t *trial) settled(step, token string, requests ...ratelimit.Request) {
	_, err := t.limiter.Settle(t.ctx, t.db, token, requests...)
	t.must(step, err)
}

func (t *trial) lost(step, token string, requests ...ratelimit.Request) {
	_, err := t.limiter.Settle(t.ctx, t.db, token, requests...)
	if t.step = step; !errors.Is(err, ratelimit.ErrHoldLost) {
		if err == nil {
			t.wrong("want ErrHoldLost, came none")
		}
		t.failed(err)
	}
}

func (t *trial) released(step, token string, requests ...ratelimit.Request) {
	_, err := t.limiter.Release(t.ctx, t.db, token, requests...)
	t.must(step, err)
}

// left wants so many tokens or slots.
func (t *trial) left(step string, want float64, request ratelimit.Request) {
	all, err := t.limiter.Balance(t.ctx, t.db, request)
	t.must(step, err)
	t.want(near(all[0].Remaining, want), "%v left, came %v", want, all[0].Remaining)
}

func holdTokens(t *trial) {
	t.holding()
	ann := t.of(t.still("bucket", 10), t.key(0))
	token := t.held("a hold", 1, ann.Count(6))
	t.left("what it left", 4, ann)
	t.notHeld("the same id", ratelimit.ReasonHeld, 1, ann.Count(1))
	t.notHeld("too much", ratelimit.ReasonQuota, 2, ann.Count(5))
	t.settled("what was used", token, ann.Count(2))
	t.left("what came back", 8, ann)
	t.settled("a second Settle", token, ann.Count(2))
	t.notHeld("a settled id", ratelimit.ReasonSettled, 1, ann)
	t.released("its Release", t.held("another hold", 2, ann.Count(8)), ann)
	t.left("after the Release", 8, ann)
	token = t.held("a hold whose worker dies", 3, ann.Count(8))
	t.memory.Advance(time.Minute)
	other := t.held("a hold that needs its tokens", 4, ann.Count(5))
	t.settled("a late Settle charges", token, ann.Count(1))
	t.left("after it", 2, ann)
	t.settled("what was more", other, ann.Count(6))
	t.left("after that", 1, ann)
}

func holdSeveral(t *trial) {
	t.holding()
	bucket, shards := t.of(t.still("bucket", 10), t.key(0)), t.of(t.still("shards", 10, ratelimit.Shards(3)), t.key(1))
	window, slots := t.of(ratelimit.FixedWindow(t.name("window"), 10, 100*time.Hour), t.key(2)), ratelimit.Slots(t.name("slots"), 2).Key(t.key(3))
	all := []ratelimit.Request{bucket.Count(4), slots, shards.Count(7), window.Count(1)}
	t.lost("a Settle of what was never held", fmt.Sprintf("~%032x%d:%s", 1, len(t.job(1)), t.job(1)), all...) // also where a Hold is refused
	token := t.held("a hold", 1, all...)
	t.notHeld("a hold that one limit denies", ratelimit.ReasonQuota, 2, all...)
	t.notHeld("an id that one limit knows", ratelimit.ReasonHeld, 1, slots, t.of(t.still("other", 10), t.key(0)))
	t.settled("a Settle", token, bucket.Count(1), slots, shards.Count(9), window.Count(0))
	for i, r := range []ratelimit.Request{bucket, shards, window, slots} {
		t.left("what is left", []float64{9, 1, 10, 2}[i], r)
	}
}

func holdSlots(t *trial) {
	t.holding()
	slots := ratelimit.Slots(t.name("slots"), 2).Key(t.key(0))
	t.left("all at first", 2, slots)
	first := t.held("a slot", 1, slots)
	t.memory.Advance(30 * time.Second)
	second := t.held("the last slot", 2, slots)
	t.notHeld("no slot", ratelimit.ReasonQuota, 3, slots)
	t.left("none", 0, slots)
	t.released("a Release", second, slots)
	second = t.held("its slot", 3, slots)
	t.memory.Advance(30 * time.Second)
	t.left("an expired one is free", 1, slots)
	third := t.held("the slot of a dead worker", 4, slots)
	t.lost("its Settle", first, slots)
	t.settled("a Settle", second, slots)
	t.settled("another", third, slots)
	t.left("all", 2, slots)
}

func once(t *trial) {
	t.holding()
	a, b := t.of(t.still("a", 10), t.key(0)), t.of(t.still("b", 10), t.key(1))
	call := func(step string, repeated bool, event int, requests ...ratelimit.Request) {
		_, r, err := t.limiter.Once(t.ctx, t.db, t.job(event), time.Hour, requests...)
		t.must(step, err)
		t.want(r.Repeated == repeated, "repeated %v, came %v", repeated, r.Repeated)
	}
	call("an event", false, 1, a.Count(6), b)
	call("the same event", true, 1, b, a.Count(6))
	_, _, err := t.limiter.Once(t.ctx, t.db, t.job(2), time.Hour, a.Count(5), b)
	t.wantReason("too much", err, ratelimit.ReasonQuota)
	call("the rest", false, 2, a.Count(4), b)
	call("the first event again", true, 1, a.Count(6))
	t.left("of a", 0, a)
	t.left("of b", 8, b)
	t.memory.Advance(time.Hour)
	call("an event that is forgotten", false, 1, b)
	t.left("of b then", 7, b)
}

// during uses the server's clock, and waits for an extension.
func during(t *trial) {
	t.holding()
	limits, slots := new(ratelimit.Limiter), ratelimit.Slots(t.name("slots"), 1).Key(t.key(0))
	if !t.way.sql { // also where a Hold is refused
		none := []string{}
		_, err := dbsqlc.New(t.db.(dbsqlc.DBTX)).Extend(t.ctx, dbsqlc.ExtendParams{Names: none, Keys: none, Ids: none, Tokens: none, Ttls: []time.Duration{}})
		t.must("an extension of nothing", err)
	}
	held, err := limits.Hold(t.ctx, t.db, t.job(2), time.Minute, t.still("budget", 10).Key(t.key(0)))
	t.must("a hold of tokens", err)
	_, err = limits.Settle(t.ctx, t.db, held.Token) // by the plain statement
	t.must("its Settle", err)
	err = limits.During(t.ctx, t.db, t.job(1), 3*time.Second, func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
		for {
			var extended bool
			err := t.s.pool.QueryRow(t.ctx, "SELECT until > $3 FROM ratelimit.holds WHERE name = $1 AND id = $2", t.name("slots"), t.job(1), held.Until).Scan(&extended)
			switch {
			case err != nil || extended:
				return nil, err
			case ctx.Err() != nil:
				return nil, context.Cause(ctx)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}, slots)
	t.must("work that takes longer than its ttl", err)
	all, err := limits.Balance(t.ctx, t.db, slots)
	t.must("the Balance", err)
	t.want(all[0].Remaining == 1, "a free slot, came %v", all[0].Remaining)
}

// manyHolds holds and releases things by the functions for many ids, and counts them again when the row of their limit is lost.
func manyHolds(t *trial) {
	t.holding()
	slots := ratelimit.Slots(t.name("slots"), 5)
	t.publishedOn(t.s.pool, slots) // a transaction has no snapshot yet, and could not publish above READ COMMITTED
	t.cleanups = append(t.cleanups, fmt.Sprintf("DELETE FROM ratelimit.holds WHERE name = '%s'", slots.Name()))
	call := func(step, function, ids, want string) {
		got := t.value(step, fmt.Sprintf("SELECT %s('%s', '%s'%s)::text", function, slots.Name(), t.key(0), ids))
		t.want(got == want, "%s, came %s", want, got)
	}
	call("many holds", "ratelimit.hold_many", ", '{a,b,c}'", "3")
	call("of which some are held", "ratelimit.hold_many", ", '{c,d,a}'", "1")
	t.left("the slots that are left", 1, slots.Key(t.key(0)))
	call("a release of many", "ratelimit.release_many", ", '{b,d,e}'", "2")
	call("a second one", "ratelimit.release_many", ", '{b,d,e}'", "0")
	t.left("the slots that came back", 3, slots.Key(t.key(0)))
	t.must("the row is lost", t.db.QueryRow(t.ctx, fmt.Sprintf("WITH lost AS (DELETE FROM ratelimit.limits WHERE name = '%s' AND key = '%s' RETURNING name) SELECT name FROM lost", slots.Name(), t.key(0))).Scan(new(string)))
	call("a recount", "ratelimit.recount", "", "2")
	t.left("the slots that are counted", 3, slots.Key(t.key(0)))
}
