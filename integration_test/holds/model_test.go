package holds_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// modelHold is a hold in the model: what it has of slots and of a budget that refills nothing while the test runs.
type modelHold struct {
	token   string
	state   string // held, lapsed, settled
	slots   int
	count   float64 // of the budget; of a lapsed one, what did not come back
	until   time.Time
	settled time.Time
}

// holdsModel is the rule of section 2 of the design in a few lines: slots and a window, at one clock.
type holdsModel struct {
	n      int
	used   int
	budget float64               // what is there
	holds  map[string]*modelHold // by id; one that lapsed before its id was held again: by ~ and its token
}

const modelBudget = 100

// move gives back, or charges what is below zero.
func (m *holdsModel) move(x float64) float64 {
	m.budget += x
	return x
}

// lacks reports whether there is too little, with what expired holds give back.
func (m *holdsModel) lacks(now time.Time, slots int, count float64) bool {
	with := *m
	for _, h := range m.holds {
		if h.expired(now) {
			with.used, with.budget = with.used-h.slots, with.budget+h.count
		}
	}
	return with.used+slots > m.n || with.budget < count
}

func (h *modelHold) expired(now time.Time) bool { return h.state == "held" && !h.until.After(now) }

func (m *holdsModel) reclaim(now time.Time) {
	for _, h := range m.holds {
		if h.expired(now) {
			m.used -= h.slots
			h.state, h.count, h.slots = "lapsed", h.count-m.move(h.count), 0
		}
	}
}

// hold takes, or returns why not.
func (m *holdsModel) hold(id, token string, ttl time.Duration, slots int, count float64, now time.Time) ratelimit.Reason {
	if h := m.holds[id]; h != nil {
		switch {
		case h.state == "held" && h.until.After(now):
			return ratelimit.ReasonHeld
		case h.state == "settled" && h.settled.Add(24*time.Hour).After(now):
			return ratelimit.ReasonSettled
		}
	}
	if m.lacks(now, slots, count) { // which writes nothing
		return ratelimit.ReasonQuota
	}
	m.reclaim(now)
	m.used += slots
	m.budget -= count
	if h := m.holds[id]; h != nil && h.state == "lapsed" {
		m.holds["~"+h.token] = h
	}
	m.holds[id] = &modelHold{token: token, state: "held", slots: slots, count: count, until: now.Add(ttl)}
	return ""
}

// TestHoldsGiveBackOnce plays random calls, with every token that ever was, against the model: what is there is the same after each.
func TestHoldsGiveBackOnce(t *testing.T) {
	for _, level := range append([]pgx.TxIsoLevel{""}, harness.Levels...) {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			r := harness.NewRand(t)
			var db harness.Handle = harness.ReusedPool(t, 2, 0)
			if level != "" {
				tx, err := harness.Acquire(t, harness.ReusedPool(t, 1, 0)).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
				if err != nil {
					t.Fatal(err)
				}
				db = tx
				t.Cleanup(func() { _ = tx.Commit(t.Context()) })
			}
			h := newHolder(t, db)
			m := &holdsModel{n: 3, budget: modelBudget, holds: map[string]*modelHold{}}
			slots, budget := ratelimit.Slots("slots", m.n).Key("k"), ratelimit.FixedWindow("budget", modelBudget, 1e6*time.Hour, ratelimit.Start(harness.Noon)).Key("k")
			type given struct{ id, token string }
			var tokens []given
			for range harness.Sized(1500, 300) {
				h.clock.Advance(time.Duration(r.IntN(3)) * 10 * time.Second)
				now := h.clock.At
				switch r.IntN(5) {
				case 0, 1:
					id := fmt.Sprint("id ", r.IntN(5))
					k, count, ttl := 1+r.IntN(2), float64(r.IntN(40)), time.Duration(1+r.IntN(6))*10*time.Second
					held, err := h.limits.Hold(t.Context(), db, id, ttl, slots.Count(float64(k)), budget.Count(count))
					reason := ratelimit.Reason("")
					if denial, is := errors.AsType[*ratelimit.DeniedError](err); is {
						reason = denial.Reason
					} else if err != nil {
						t.Fatal(err)
					}
					if want := m.hold(id, held.Token, ttl, k, count, now); reason != want {
						t.Fatalf("Hold %s: %q, want %q", id, reason, want)
					}
					if err == nil {
						tokens = append(tokens, given{id, held.Token})
					}
				case 2, 3:
					if len(tokens) == 0 {
						continue
					}
					of := tokens[len(tokens)-1-r.IntN(min(len(tokens), 8))]
					used := float64(r.IntN(50))
					x := m.holds[of.id]
					mine := x != nil && x.token == of.token
					want := "lost"
					switch {
					case mine && x.state == "settled" && x.settled.Add(24*time.Hour).After(now):
						want = "repeated"
					case mine && x.state == "held":
						want = "done"
						m.used -= x.slots
						m.move(x.count - used)
						x.state, x.settled = "settled", now
					}
					result, err := h.limits.Settle(t.Context(), db, of.token, slots, budget.Count(used))
					got := "done"
					switch {
					case errors.Is(err, ratelimit.ErrHoldLost):
						got = "lost"
					case err != nil:
						t.Fatal(err)
					case result.Repeated:
						got = "repeated"
					}
					if got != want {
						t.Fatalf("Settle %s: %s, want %s", of.id, got, want)
					}
				default:
					if len(tokens) == 0 {
						continue
					}
					of := tokens[len(tokens)-1-r.IntN(min(len(tokens), 8))]
					used := 0.0
					requests := []ratelimit.Request{}
					if r.IntN(2) == 0 {
						used = float64(r.IntN(20))
						requests = []ratelimit.Request{slots, budget.Count(used)}
					}
					x := m.holds[of.id]
					if x == nil || x.token != of.token {
						of.id = "~" + of.token
						x = m.holds[of.id]
					}
					if x != nil && x.state != "settled" {
						m.used -= x.slots
						if used = x.count - used; x.state == "lapsed" {
							used = min(used, 0)
						}
						m.move(used)
						delete(m.holds, of.id)
					}
					h.release(of.token, requests...)
				}
				// Expired holds count as given back.
				expired, tokens := 0, 0.0
				for _, x := range m.holds {
					if x.expired(now) {
						expired += x.slots
						tokens += x.count
					}
				}
				h.has(slots, float64(m.n-m.used+expired))
				h.has(budget, m.budget+tokens)
			}
		})
	}
}

// TestAnExpiredHoldComesBackAtItsEnd: whenever somebody looks or comes, a key is as one whose holds were given back at the instant at which they ended. So
// what is there never shrinks, and no RetryAt recedes, until somebody takes.
func TestAnExpiredHoldComesBackAtItsEnd(t *testing.T) {
	for name, limit := range map[string]ratelimit.Limit{
		"bucket":   ratelimit.TokenBucket("bucket", 3, 10*time.Second, ratelimit.Capacity(6), ratelimit.MaxReserved(4)),
		"window":   ratelimit.FixedWindow("window", 3, 10*time.Second, ratelimit.Capacity(7), ratelimit.Start(harness.Noon), ratelimit.MaxReserved(4)),
		"calendar": ratelimit.CalendarWindow("calendar", 3, ratelimit.Day, ratelimit.Capacity(8)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := harness.NewRand(t)
			pool := harness.NewPool(t, 2)
			harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "api", limit))
			step := time.Second
			if name == "calendar" {
				step = 3 * time.Hour
			}
			for range harness.Sized(60, 20) {
				harness.MustExec(t, pool, "TRUNCATE ratelimit.limits, ratelimit.holds")
				h := newHolder(t, pool)
				keys := []ratelimit.Request{limit.Key("late"), limit.Key("at once")} // of the second, somebody comes whenever a hold ends
				var said []string
				var ends []time.Time
				held := [2][]string{}
				receipts := [2][]ratelimit.Receipt{}
				both := func(what string, do func(i int, r ratelimit.Request) string) {
					got := [2]string{}
					for i, key := range keys {
						got[i] = do(i, key)
					}
					said = append(said, fmt.Sprintf("%v %s: %s", h.clock.At.Sub(harness.Noon), what, got[0]))
					if got[0] != got[1] {
						t.Fatalf("%s\nand %s, if each hold is given back as it ends", strings.Join(said, "\n"), got[1])
					}
				}
				look := func() {
					both("balance", func(_ int, r ratelimit.Request) string {
						b, err := h.limits.Balance(t.Context(), pool, r)
						harness.Succeeds(t, err)
						five, err := h.limits.Check(t.Context(), pool, r.Count(5))
						if err != nil && !harness.Denied(err) {
							t.Fatal(err)
						}
						var remaining float64
						harness.Succeeds(t, pool.QueryRow(t.Context(), "SELECT coalesce(max(remaining), $4) FROM ratelimit._keys($1, NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, $2, $3)", name, []string{b[0].Key}, h.clock.At, b[0].Capacity).Scan(&remaining))
						return fmt.Sprintf("%.6f, five at %v; %.6f, next at %v, full at %v; in a list %.6f", five.Remaining, five.RetryAt.Round(time.Millisecond), b[0].Remaining,
							b[0].NextAt.Round(time.Millisecond), b[0].ResetAt.Round(time.Millisecond), remaining)
					})
				}
				for range 12 {
					until := h.clock.At.Add(time.Duration(r.IntN(6)) * step)
					for {
						slices.SortFunc(ends, time.Time.Compare)
						if len(ends) == 0 || ends[0].After(until) {
							break
						}
						h.clock.At, ends = ends[0], ends[1:]
						_, err := h.limits.Charge(t.Context(), pool, keys[1].Count(0))
						harness.Succeeds(t, err)
					}
					h.clock.At = until
					look()
					count := float64(1 + r.IntN(3))
					switch r.IntN(6) {
					case 0, 1:
						ttl := time.Duration(1+r.IntN(8)) * step
						granted := false
						both(fmt.Sprint("hold ", count, " for ", ttl), func(i int, r ratelimit.Request) string {
							got, err := h.limits.Hold(t.Context(), pool, fmt.Sprint("job ", len(said)), ttl, r.Count(count))
							if granted = err == nil; granted {
								held[i] = append(held[i], got.Token)
							} else if !harness.Denied(err) {
								t.Fatal(err)
							}
							return fmt.Sprint(granted)
						})
						if granted {
							ends = append(ends, h.clock.At.Add(ttl))
						}
					case 2:
						both(fmt.Sprint("consume ", count), func(i int, r ratelimit.Request) string {
							got, err := h.limits.Consume(t.Context(), pool, r.Count(count))
							if err == nil {
								receipts[i] = append(receipts[i], got.Receipt())
							} else if !harness.Denied(err) {
								t.Fatal(err)
							}
							return fmt.Sprint(err == nil)
						})
					case 3:
						both(fmt.Sprint("reserve or charge ", count), func(_ int, r ratelimit.Request) string {
							if name == "calendar" {
								return fmt.Sprint(harness.Second(h.limits.Charge(t.Context(), pool, r.Count(count))))
							}
							got, err := h.limits.Reserve(t.Context(), pool, r.Count(count))
							if err != nil && !harness.Denied(err) {
								t.Fatal(err)
							}
							return fmt.Sprint(err == nil, got.Delay.Round(time.Millisecond))
						})
					case 4:
						if n := len(held[0]); n > 0 {
							j := r.IntN(n)
							both(fmt.Sprint("release ", j), func(i int, _ ratelimit.Request) string {
								_, err := h.limits.Release(t.Context(), pool, held[i][j])
								return fmt.Sprint(err)
							})
						}
					case 5:
						if n := len(receipts[0]); n > 0 {
							j := r.IntN(n)
							both(fmt.Sprint("refund ", j), func(i int, _ ratelimit.Request) string {
								got, err := h.limits.Refund(t.Context(), pool, receipts[i][j])
								harness.Succeeds(t, err)
								receipts[i] = slices.Delete(receipts[i], j, j+1)
								return fmt.Sprint(math.Round(got.Requests[0].Refunded * 1e6))
							})
						}
					}
					look()
				}
			}
		})
	}
}
