package model_test

import (
	"cmp"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// grant is the content of a receipt.
type grant struct {
	at, runAt algebra.Micros
	taken     map[harness.RowsOf]grantPart
}

type grantPart struct {
	count, refunded, held float64
	rows, shards          int
}

// readReceipt returns the content of a receipt.
func readReceipt(t *testing.T, text ratelimit.Receipt) grant {
	t.Helper()
	var r struct {
		V         int
		At, RunAt time.Time
		Taken     []struct {
			Limit, Key            string
			Count, Refunded, Held float64
			Rows, Shards          int
		}
	}
	if text == "" {
		return grant{}
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	g := grant{algebra.At(r.At), algebra.At(r.RunAt), map[harness.RowsOf]grantPart{}}
	for _, p := range r.Taken {
		g.taken[harness.RowsOf{Name: p.Limit, Key: p.Key}] = grantPart{p.Count, p.Refunded, p.Held, p.Rows, p.Shards}
	}
	return g
}

// randomVerbs are the verbs of random calls, in their proportions.
var randomVerbs = []string{"consume", "consume", "consume", "reserve", "reserve", "take", "check", "balance", "charge", "refund", "reset", "move"}

// randomMove chooses what to move. Most often, the second limit is defined anew, such that it refills with the first.
func randomMove(r *rand.Rand, limits []ratelimit.Limit) (from, to harness.Ask) {
	i, j := r.IntN(len(limits)), r.IntN(len(limits))
	key := harness.OneOf(r, "", "a", "b")
	if i != j && key != "" && r.IntN(4) > 0 {
		c, other := limits[i].Config(), harness.RandomLimit(r, limits[j].Name(), 1+r.IntN(5)).Config()
		c.Name, c.Rate, c.Capacity, c.MaxReserved, c.Shards = other.Name, other.Rate, other.Capacity, other.MaxReserved, other.Shards
		limits[j], _ = c.Limit()
		return harness.Ask{Limit: limits[i], Key: key, Count: 1}, harness.Ask{Limit: limits[j], Key: key, Count: 1}
	}
	return harness.Ask{Limit: limits[i], Key: key, Count: 1}, harness.Ask{Limit: limits[j], Key: harness.OneOf(r, "", "a", "b"), Count: 1}
}

// consumption is a grant that can be refunded.
type consumption struct {
	receipt ratelimit.Receipt
	grant   grant
}

// randomRefund chooses one of the latest consumptions, and a part of it.
func randomRefund(r *rand.Rand, consumptions []consumption, limits []ratelimit.Limit) (from *consumption, asks []harness.Ask) {
	if len(consumptions) == 0 {
		return nil, nil
	}
	from = &consumptions[len(consumptions)-1-r.IntN(min(len(consumptions), 5))]
	for _, id := range slices.SortedFunc(maps.Keys(from.grant.taken), compareRowsOf) {
		i := slices.IndexFunc(limits, func(l ratelimit.Limit) bool { return l.Name() == id.Name })
		p := from.grant.taken[id]
		count := (p.count - p.refunded) * harness.OneOf(r, 1, 1, 1, 0.5, r.Float64())
		if i >= 0 && (count == 0 || count >= 1e-15) && r.IntN(4) > 0 {
			asks = append(asks, harness.Ask{Limit: limits[i], Key: id.Key, Count: count})
		}
	}
	return from, asks
}

func compareRowsOf(a, b harness.RowsOf) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Key, b.Key))
}
