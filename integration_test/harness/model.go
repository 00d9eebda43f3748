package harness

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/replay"
)

// Skewed is a database whose clock differs from the program's.
type Skewed struct {
	ratelimit.DB
	Clock, Now time.Time
}

// QueryRow changes what comes back.
func (s Skewed) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	replaced := 0
	for i := range args {
		if at, ok := args[i].(*time.Time); ok && at != nil && at.Equal(s.Clock) {
			args[i] = &s.Now
			replaced++
		}
	}
	if replaced != 1 {
		panic(fmt.Sprintf("%d arguments are the clock's time", replaced))
	}
	return s.DB.QueryRow(ctx, sql, args...)
}

// Taken is a grant. The row's ts, up to which the refill counted, lies between the two instants.
type Taken struct {
	From, To algebra.Micros
	Tokens   float64
}

// Worst finds the span that exceeds the bound by most, and returns by how much.
func Worst(grants []Taken, most func(from, to algebra.Micros) float64) (above float64, from, to algebra.Micros) {
	above = -1e300
	byEnd := slices.Clone(grants)
	slices.SortFunc(byEnd, func(a, b Taken) int { return int(a.To - b.To) })
	for _, first := range grants {
		sum := 0.0
		for _, g := range byEnd {
			if g.From < first.From {
				continue
			}
			sum += g.Tokens
			if over := sum - most(first.From, g.To); over > above {
				above, from, to = over, first.From, g.To
			}
		}
	}
	return above, from, to
}

// TextOf returns an error's text. In an aborted transaction, it depends on what pgx has prepared before.
func TextOf(err error) string {
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Code == "25P02" {
		return pgErr.Error()
	}
	if err == nil {
		return ""
	}
	return err.Error()
}

// RandomLimitOfAnyKind makes a bucket, a fixed window or a calendar window.
func RandomLimitOfAnyKind(r *rand.Rand, name string, shards int) ratelimit.Limit {
	limit := RandomLimit(r, name, shards)
	if r.IntN(3) > 0 {
		return limit
	}
	c := limit.Config()
	rate := OneOf(r, 1.0, 3, 10, 0.5, 1.0/3, 100*r.Float64())
	c.Kind, c.Rate, c.Start = "calendar window", &rate, nil
	c.Period = "1 " + string(OneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Quarter, ratelimit.Year))
	c.Zone = OneOf(r, "", "UTC", "Europe/Berlin", "America/Sao_Paulo", "Pacific/Apia")
	c.Anchor = OneOf(r, "", "2001-01-31", RandomAnchor(r))
	for _, numbers := range []*float64{c.Capacity, c.MaxReserved} {
		if numbers != nil {
			*numbers = OneOf(r, 0, rate/2, 2*rate, rate*10*r.Float64())
		}
	}
	limit, err := c.Limit()
	if err != nil {
		panic(err)
	}
	return limit
}

// RowsOf is the key of rows.
type RowsOf = inmemory.ID

// Ask is a random request.
type Ask struct {
	Limit ratelimit.Limit
	Key   string
	Count float64 // of a take, the most
}

// Request is the request with its count.
func (a Ask) Request() ratelimit.Request { return a.Plain().Count(a.Count) }

// Plain is the request without its count.
func (a Ask) Plain() ratelimit.Request {
	if a.Key == "" {
		return a.Limit.Global()
	}
	return a.Limit.Key(a.Key)
}

func (a Ask) id() RowsOf { return RowsOf{Name: a.Limit.Name(), Key: a.Key} }

// Numbers returns the limit's definition for the algebra, with the key's grid.
func Numbers(limit ratelimit.Limit, key string) algebra.Limit {
	c := limit.Config()
	n := algebra.Limit{Rate: *c.Rate, Period: Period(c), Capacity: *c.Capacity, Window: c.Kind == "fixed window"}
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

// ReadTable reads the table.
func ReadTable(t *testing.T, db Querier) inmemory.Table {
	t.Helper()
	rows, err := db.Query(t.Context(), `SELECT name, key, shard, shards, value, ts, promised FROM ratelimit.limits ORDER BY name, key, shard`)
	if err != nil {
		t.Fatal(err)
	}
	m := inmemory.Table{}
	var id RowsOf
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

// RandomTake turns a call into a take: of each key once, and of the same number of all.
func RandomTake(r *rand.Rand, asks []Ask) (all []Ask) {
	most := float64(1 + r.IntN(1+int(min(2*asks[0].Limit.Capacity(), 1e9))))
	for _, a := range asks {
		if !slices.ContainsFunc(all, func(other Ask) bool { return other.id() == a.id() }) {
			a.Count = most
			all = append(all, a)
		}
	}
	return all
}

// Picks is a sequence of random choices that can be repeated.
type Picks struct{ seed uint64 }

// RandomPick picks shards at random.
func RandomPick(r *rand.Rand) Picks { return Picks{r.Uint64()} }

// Again picks the same shards once more, from the first.
func (p Picks) Again() shardpick.Func {
	r := rand.New(rand.NewPCG(p.seed, 0))
	return func(n int) (int, int) {
		if n == 1 {
			return 0, 0
		}
		a := r.IntN(n)
		return a, (a + 1 + r.IntN(n-1)) % n
	}
}

// Call calls a verb by its name.
func Call(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB, verb string, receipt ratelimit.Receipt, asks []Ask) (got Answered, err error) {
	var requests, plain []ratelimit.Request
	for _, a := range asks {
		requests, plain = append(requests, a.Request()), append(plain, a.Plain())
	}
	switch verb {
	case "consume", "reserve":
		return Decide(ctx, l, db, verb == "reserve", requests...)
	case "take":
		most := 1
		if len(asks) > 0 {
			most = int(asks[0].Count)
		}
		if got.took, got.Result, err = l.Take(ctx, db, most, plain...); err == nil {
			got.RunAt = got.At
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
			if a.Key != "" {
				keyed = append(keyed, plain[i])
			}
		}
		if len(keyed) > 0 || len(asks) == 0 {
			err = l.Reset(ctx, db, keyed...)
		}
	}
	got.Slip = got.Receipt()
	return got, err
}

// MaxTime is the later instant.
func MaxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Replayed returns the report on events for one limit.
func Replayed(t *testing.T, events []replay.Event, limit ratelimit.Limit) *replay.Report {
	t.Helper()
	report, err := replay.Run(func(yield func(replay.Event, error) bool) {
		for _, event := range events {
			if !yield(event, nil) {
				return
			}
		}
	}, limit)
	if err != nil {
		t.Fatal(err)
	}
	return report
}
