package soak

import (
	"fmt"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestCallsOfOneInstantExplainTheirOwnChanges lets calls change a row in another order than that of their clocks. Those that were
// behind the row's instant left it as it was, so that each fits the changes of the others but for what its caller was told.
func TestCallsOfOneInstantExplainTheirOwnChanges(t *testing.T) {
	noon := time.Date(2024, 5, 1, 12, 0, 0, 0, time.UTC)
	p := place{0, "k"} // a bucket of 4, one token a second
	receipt := func(at time.Time, held float64) ratelimit.Receipt {
		stamp := at.Format(time.RFC3339Nano)
		return ratelimit.Receipt(fmt.Sprintf(`{"At":%q,"RunAt":%q,"Taken":[{"Limit":"bucket","Key":"k","Count":1,"Held":%v,"Rows":1,"Shards":1}]}`, stamp, stamp, held))
	}
	one := func(op int64, verb string, ago time.Duration, left ratelimit.Receipt, runAt time.Time) *outsider {
		return &outsider{newTracked(call{Verb: verb, Asks: []ask{{0, "k", 1}},
			answer: answer{At: noon.Add(-ago), Granted: true, Left: left, RetryAt: runAt}}), grantID{op, 0}}
	}
	for name, tt := range map[string]struct {
		from  float64
		calls []*outsider // in the order of their clocks
	}{
		"without a receipt, first": {3, []*outsider{one(1, "consume", 2*time.Millisecond, "", time.Time{}),
			one(2, "consume", time.Millisecond, receipt(noon.Add(-time.Millisecond), 2), time.Time{})}},
		"reservations without receipts": {0, []*outsider{one(1, "reserve", 2*time.Millisecond, "", noon.Add(2*time.Second)),
			one(2, "reserve", time.Millisecond, "", noon.Add(time.Second))}},
	} {
		t.Run(name, func(t *testing.T) {
			app := appName(1, "pool 0.0")
			row := func(value float64) *algebra.Row { return &algebra.Row{Value: value, TS: algebra.At(noon)} }
			c := &checker{TB: t, promises: newPromises(), seed: 1, counts: map[string]int{}, rows: map[place][]*algebra.Row{p: {row(tt.from)}},
				alone: map[string][]*outsider{owner(app, []place{p}): tt.calls}, strict: map[place]*meter{}, inserted: map[place]string{}}
			for n := range 2 {
				c.madeOutside([]change{{place: p, old: row(tt.from - float64(n)), new: row(tt.from - float64(n) - 1), app: app, xid: fmt.Sprint(n), at: algebra.At(noon)}})
			}
			if left := c.alone[owner(app, []place{p})]; len(left) > 0 {
				t.Errorf("%d calls explain nothing", len(left))
			}
		})
	}
}
