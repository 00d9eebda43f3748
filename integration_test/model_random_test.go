package integration_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
)

type rowsOf = inmemory.ID

// ask is a random request.
type ask struct {
	limit ratelimit.Limit
	key   string
	count float64 // of a take, the most
}

func (a ask) request() ratelimit.Request { return a.plain().Count(a.count) }

// plain is the request without its count.
func (a ask) plain() ratelimit.Request {
	if a.key == "" {
		return a.limit.Global()
	}
	return a.limit.Key(a.key)
}

func (a ask) id() rowsOf { return rowsOf{Name: a.limit.Name(), Key: a.key} }

// numbers returns the limit's definition for the algebra, with the key's grid.
func numbers(limit ratelimit.Limit, key string) algebra.Limit {
	c := limit.Config()
	n := algebra.Limit{Rate: *c.Rate, Period: period(c), Capacity: *c.Capacity, Window: c.Kind == "fixed window"}
	if n.Window {
		sum := sha256.Sum256([]byte(cmp.Or(key, c.Name)))
		offset := algebra.Micros(binary.BigEndian.Uint64(sum[:]) >> 1)
		if c.Start != nil {
			offset = algebra.At(*c.Start) - algebra.Min
		}
		n.Start = algebra.Min + offset%algebra.Micros(n.Period.Microseconds())
	}
	return n
}

// grant is the content of a receipt.
type grant struct {
	at, runAt algebra.Micros
	taken     map[rowsOf]grantPart
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
	g := grant{algebra.At(r.At), algebra.At(r.RunAt), map[rowsOf]grantPart{}}
	for _, p := range r.Taken {
		g.taken[rowsOf{Name: p.Limit, Key: p.Key}] = grantPart{p.Count, p.Refunded, p.Held, p.Rows, p.Shards}
	}
	return g
}

// readTable reads the table.
func readTable(t *testing.T, db querier) inmemory.Table {
	t.Helper()
	rows, err := db.Query(t.Context(), `SELECT name, key, shard, shards, value, ts, promised FROM ratelimit.limits ORDER BY name, key, shard`)
	if err != nil {
		t.Fatal(err)
	}
	m := inmemory.Table{}
	var id rowsOf
	var shard, shards int
	var value float64
	var ts time.Time
	var promised pgtype.Timestamptz
	_, err = pgx.ForEachRow(rows, []any{&id.Name, &id.Key, &shard, &shards, &value, &ts, &promised}, func() error {
		if shard != len(m[id]) {
			return fmt.Errorf("%v: shard %d after %d others", id, shard, len(m[id]))
		}
		row := inmemory.Row{Row: algebra.Row{Value: value, TS: algebra.At(ts)}, Shards: shards}
		switch {
		case promised.InfinityModifier == pgtype.Infinity:
			row.Promised = algebra.Max
		case promised.Valid:
			row.Promised = algebra.At(promised.Time)
		}
		m[id] = append(m[id], row)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// randomVerbs are the verbs of random calls, in their proportions.
var randomVerbs = []string{"consume", "consume", "consume", "reserve", "reserve", "take", "check", "balance", "charge", "refund", "reset", "move"}

// randomMove chooses what to move. Most often, the second limit is defined anew, such that it refills with the first.
func randomMove(r *rand.Rand, limits []ratelimit.Limit) (from, to ask) {
	i, j := r.IntN(len(limits)), r.IntN(len(limits))
	key := oneOf(r, "", "a", "b")
	if i != j && key != "" && r.IntN(4) > 0 {
		c, other := limits[i].Config(), randomLimit(r, limits[j].Name(), 1+r.IntN(5)).Config()
		c.Name, c.Rate, c.Capacity, c.MaxReserved, c.Shards = other.Name, other.Rate, other.Capacity, other.MaxReserved, other.Shards
		limits[j], _ = c.Limit()
		return ask{limit: limits[i], key: key, count: 1}, ask{limit: limits[j], key: key, count: 1}
	}
	return ask{limit: limits[i], key: key, count: 1}, ask{limit: limits[j], key: oneOf(r, "", "a", "b"), count: 1}
}

// randomTake turns a call into a take: of each key once, and of the same number of all.
func randomTake(r *rand.Rand, asks []ask) (all []ask) {
	most := float64(1 + r.IntN(1+int(min(2*asks[0].limit.Capacity(), 1e9))))
	for _, a := range asks {
		if !slices.ContainsFunc(all, func(other ask) bool { return other.id() == a.id() }) {
			a.count = most
			all = append(all, a)
		}
	}
	return all
}

// consumption is a grant that can be refunded.
type consumption struct {
	receipt ratelimit.Receipt
	grant   grant
}

// randomRefund chooses one of the latest consumptions, and a part of it.
func randomRefund(r *rand.Rand, consumptions []consumption, limits []ratelimit.Limit) (from *consumption, asks []ask) {
	if len(consumptions) == 0 {
		return nil, nil
	}
	from = &consumptions[len(consumptions)-1-r.IntN(min(len(consumptions), 5))]
	for _, id := range slices.SortedFunc(maps.Keys(from.grant.taken), compareRowsOf) {
		i := slices.IndexFunc(limits, func(l ratelimit.Limit) bool { return l.Name() == id.Name })
		p := from.grant.taken[id]
		count := (p.count - p.refunded) * oneOf(r, 1, 1, 1, 0.5, r.Float64())
		if i >= 0 && (count == 0 || count >= 1e-15) && r.IntN(4) > 0 {
			asks = append(asks, ask{limit: limits[i], key: id.Key, count: count})
		}
	}
	return from, asks
}

func compareRowsOf(a, b rowsOf) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Key, b.Key))
}

// picks is a sequence of random choices that can be repeated.
type picks struct{ seed uint64 }

func randomPick(r *rand.Rand) picks { return picks{r.Uint64()} }

func (p picks) again() shardpick.Func {
	r := rand.New(rand.NewPCG(p.seed, 0))
	return func(n int) (int, int) {
		if n == 1 {
			return 0, 0
		}
		a := r.IntN(n)
		return a, (a + 1 + r.IntN(n-1)) % n
	}
}

// call calls a verb by its name.
func call(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB, verb string, receipt ratelimit.Receipt, asks []ask) (got answered, err error) {
	var requests, plain []ratelimit.Request
	for _, a := range asks {
		requests, plain = append(requests, a.request()), append(plain, a.plain())
	}
	switch verb {
	case "consume", "reserve":
		return decide(ctx, l, db, verb == "reserve", requests...)
	case "take":
		most := 1
		if len(asks) > 0 {
			most = int(asks[0].count)
		}
		if got.took, got.Result, err = l.Take(ctx, db, most, plain...); err == nil {
			got.runAt = got.At
		}
	case "check":
		got.Result, err = l.Check(ctx, db, requests...)
	case "balance":
		got.balances, err = l.Balance(ctx, db, plain...)
	case "charge":
		got.Result, err = l.Charge(ctx, db, requests...)
	case "refund":
		got.Result, err = l.Refund(ctx, db, receipt, requests...)
	case "move":
		err = l.Move(ctx, db, requests[0], requests[1])
	default:
		keyed := plain[:0] // Global is refused where the limit has keys
		for i, a := range asks {
			if a.key != "" {
				keyed = append(keyed, plain[i])
			}
		}
		if len(keyed) > 0 || len(asks) == 0 {
			err = l.Reset(ctx, db, keyed...)
		}
	}
	got.receipt = got.Receipt()
	return got, err
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
