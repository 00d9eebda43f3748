package integration_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
)

// model is the whole limiter as a pure function over a map: it says what the table should contain and what each call should
// answer. Its decisions are those of internal/inmemory, the database of package ratelimittest.
type model inmemory.Table

type (
	rowsOf   = inmemory.ID
	modelRow = inmemory.Row
)

// ask is a request as the model sees it.
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

// sum is the total of several asks for the same rows.
type sum struct {
	rowsOf
	numbers      algebra.Limit
	shards       int
	count, floor float64
	most         float64 // of a take. Then count is 1 or, once known, the taken count
}

func (d sum) demand(rows []algebra.Row) algebra.Demand {
	return algebra.Demand{Limit: d.numbers, Rows: rows, Shards: d.shards, Count: d.count, Lowest: d.numbers.Lowest(d.floor), Floor: d.floor}
}

// forfeits reports whether a grant may forfeit tokens until its work runs.
func forfeits(verb string, ds []sum) bool {
	return verb == "reserve" && (len(ds) > 1 || ds[0].numbers.Window)
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

func (g grant) algebra(id rowsOf) algebra.Taken {
	p := g.taken[id]
	part := 1.0
	if p.rows < p.shards {
		part = 1 / float64(p.shards)
	}
	return algebra.Taken{At: g.at, RunAt: g.runAt, Count: p.count, Held: p.held, Part: part}
}

// readReceipt returns the content of a receipt. The model's must be exactly equal.
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

func sums(verb string, asks []ask) []sum {
	var ds []sum
	for _, a := range asks {
		c := a.limit.Config()
		floor := 0.0
		switch {
		case verb == "charge", verb == "balance", verb == "reserve" && c.MaxReserved == nil:
			floor = math.Inf(-1)
		case verb == "reserve":
			floor = -*c.MaxReserved
		}
		i := slices.IndexFunc(ds, func(d sum) bool { return d.rowsOf == a.id() })
		if i < 0 {
			i = len(ds)
			ds = append(ds, sum{rowsOf: a.id(), numbers: numbers(a.limit, a.key), shards: c.Shards, floor: floor})
		}
		if verb == "take" {
			ds[i].most, a.count = a.count, 1
		}
		ds[i].count += a.count
	}
	slices.SortFunc(ds, func(a, b sum) int { return compareRowsOf(a.rowsOf, b.rowsOf) })
	return ds
}

// possible reports whether the asks can ever be granted.
func possible(ds []sum) bool {
	return !slices.ContainsFunc(ds, func(d sum) bool { return d.numbers.Capacity-d.count < d.numbers.Lowest(d.floor) })
}

// do carries out a call at now. pick is the two shards to look at. A refund is of g, which then has what is left.
func (m model) do(verb string, ds []sum, pick shardpick.Func, g *grant, now algebra.Micros) inmemory.Answer {
	demands := make([]inmemory.Demand, len(ds))
	ids := make([]rowsOf, len(ds))
	taken := make([]algebra.Taken, len(ds))
	for i, d := range ds {
		demands[i] = inmemory.Demand{ID: d.rowsOf, Limit: d.numbers, Shards: d.shards, Count: d.count, Lowest: d.numbers.Lowest(d.floor)}
		if d.shards > 1 {
			a, b := pick(d.shards)
			demands[i].Pick = [2]int{a, b}
		}
		ids[i], taken[i] = d.rowsOf, g.algebra(d.rowsOf)
	}
	switch table := inmemory.Table(m); verb {
	case "reset":
		table.Reset(ids)
		return inmemory.Answer{Granted: true}
	case "refund":
		answer := table.Refund(demands, taken, now)
		*g = g.refund(ds, answer, now)
		return answer
	case "check", "balance":
		return table.Check(demands, now)
	case "take":
		answer := table.Take(demands, ds[0].most, now)
		for i := range ds {
			if answer.Granted {
				ds[i].count = answer.Taken
			}
		}
		return answer
	default:
		return table.Consume(demands, forfeits(verb, ds), algebra.Forever, inmemory.ReadCommitted, now)
	}
}

// refund returns the receipt after a refund that found the answer's rows.
func (g grant) refund(ds []sum, answer inmemory.Answer, now algebra.Micros) grant {
	left := grant{g.at, g.runAt, maps.Clone(g.taken)}
	for i, d := range ds {
		p, rows := left.taken[d.rowsOf], answer.Rows[i]
		if len(rows) > 0 {
			back := d.numbers.Refund(rows, g.algebra(d.rowsOf), d.count, now)
			p.held += min(back, max(-d.numbers.Total(rows, now), 0))
		}
		p.held += d.count
		p.refunded += d.count
		left.taken[d.rowsOf] = p
		if p.count > 0 && p.count-p.refunded <= 1e-12*p.count {
			delete(left.taken, d.rowsOf)
		}
	}
	return left
}

// grantOf returns the content of a granted call's receipt.
func grantOf(ds []sum, answer inmemory.Answer, now, runAt algebra.Micros) grant {
	g := grant{now, runAt, map[rowsOf]grantPart{}}
	for i, d := range ds {
		p := grantPart{count: d.count, rows: len(answer.Rows[i]), shards: d.shards}
		for _, row := range answer.Rows[i] {
			p.held += row.Value
		}
		g.taken[d.rowsOf] = p
	}
	return g
}

// retryAt returns when a call that was denied would be granted.
func (m model) retryAt(verb string, ds []sum, now algebra.Micros) algebra.Micros {
	at := now
	var demands []algebra.Demand
	for _, d := range ds {
		demands = append(demands, d.demand(m.rows(d.rowsOf)))
		at = max(at, d.numbers.When(m.rows(d.rowsOf), d.count, d.floor, now))
	}
	if forfeits(verb, ds) {
		return algebra.WhenReserved(demands, now, algebra.Forever)
	}
	return at
}

// owns returns, after a grant, when each limit alone lets the work run.
func (m model) owns(verb string, ds []sum, answer inmemory.Answer, now algebra.Micros) map[rowsOf]algebra.Micros {
	own := map[rowsOf]algebra.Micros{}
	for i, d := range ds {
		// If one shard had enough, the work runs at once, whatever the others owe since the clock stepped back.
		if own[d.rowsOf] = now; verb == "reserve" && (d.shards == 1 || len(answer.Rows[i]) > 1) {
			own[d.rowsOf] = d.numbers.Repaid(m.rows(d.rowsOf), now)
		}
	}
	return own
}

// runAt returns, after a grant, when the work may run.
func (m model) runAt(verb string, ds []sum, answer inmemory.Answer, now algebra.Micros) algebra.Micros {
	at := now
	for _, own := range m.owns(verb, ds, answer, now) {
		at = max(at, own)
	}
	return at
}

// compare compares what a call was told with the model, after it was carried out there.
func (m model) compare(verb string, asks []ask, ds []sum, got answered, answer inmemory.Answer, now algebra.Micros) error {
	switch {
	case verb == "reset", verb == "move":
		return nil
	case verb == "balance":
		return m.compareBalances(asks, got.balances, now)
	case !answer.Granted:
		if want := m.retryAt(verb, ds, now).Time(); !got.RetryAt.Equal(want) || got.RetryAfter != want.Sub(now.Time()) {
			return fmt.Errorf("RetryAt %v, RetryAfter %v, by the model %v", got.RetryAt, got.RetryAfter, want)
		}
	case !got.RetryAt.IsZero() || got.RetryAfter != 0:
		return fmt.Errorf("a grant has a RetryAt: %v, %v", got.RetryAt, got.RetryAfter)
	case got.receipt != "" && verb != "refund":
		if want := m.runAt(verb, ds, answer, now).Time(); !got.runAt.Equal(want) {
			return fmt.Errorf("the work may run at %v, by the model %v", got.runAt, want)
		}
	}
	if verb == "take" && got.took != int(answer.Taken) {
		return fmt.Errorf("%d taken, by the model %v", got.took, answer.Taken)
	}
	for i, s := range got.Requests {
		want := 0.0
		switch {
		case !answer.Granted || verb == "refund":
		case verb == "take":
			want = answer.Taken
		default:
			want = asks[i].count
		}
		if s.Taken != want {
			return fmt.Errorf("request %d took %v, by the model %v", i, s.Taken, want)
		}
	}
	return nil
}

// compareBalances compares balances with the model.
func (m model) compareBalances(asks []ask, got []ratelimit.Balance, now algebra.Micros) error {
	if len(got) != len(asks) {
		return fmt.Errorf("%d balances of %d requests", len(got), len(asks))
	}
	for i, a := range asks {
		rows, n := m.rows(a.id()), numbers(a.limit, a.key)
		left := n.Shown(n.Total(rows, now))
		want := ratelimit.Balance{
			Limit: a.limit, Key: got[i].Key, At: now.Time(), Remaining: left, Used: n.Capacity - left, Capacity: n.Capacity,
			ResetAt: n.NextWindow(now).Time(), Decides: "definition",
		}
		if !n.Window {
			want.ResetAt = n.When(rows, n.Capacity, 0, now).Time()
		}
		if one := max(n.Whole(rows, math.Inf(1), now), 0) + 1; n.Holds(one) { // otherwise there is never one more
			want.NextAt = n.When(rows, one, 0, now).Time()
		}
		if got[i] != want {
			return fmt.Errorf("balance %d: %+v, by the model %+v", i, got[i], want)
		}
	}
	return nil
}

func (m model) rows(id rowsOf) []algebra.Row {
	var rows []algebra.Row
	for _, row := range m[id] {
		rows = append(rows, row.Row)
	}
	return rows
}

// readTable reads the table as a model.
func readTable(t *testing.T, db querier) model {
	t.Helper()
	rows, err := db.Query(t.Context(), `SELECT name, key, shard, shards, value, ts FROM rate_limits ORDER BY name, key, shard`)
	if err != nil {
		t.Fatal(err)
	}
	m := model{}
	var id rowsOf
	var shard, shards int
	var value float64
	var ts time.Time
	_, err = pgx.ForEachRow(rows, []any{&id.Name, &id.Key, &shard, &shards, &value, &ts}, func() error {
		if shard != len(m[id]) {
			return fmt.Errorf("%v: shard %d after %d others", id, shard, len(m[id]))
		}
		m[id] = append(m[id], modelRow{Row: algebra.Row{Value: value, TS: algebra.At(ts)}, Shards: shards})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestModel plays random sequences of every operation against the database and the model. Limits change, shards come and
// go, and the clock steps back and forth. Answers and tables must be equal, to the last bit.
func TestModel(t *testing.T) {
	t.Parallel()
	for i := range 4 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			playModel(t, 2500)
		})
	}
}

func playModel(t *testing.T, calls int) {
	r := newRand(t)
	pool := newPool(t, 1)
	if _, err := pool.Exec(t.Context(), "SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	_, clock := newLimiter() // each call has its own Limiter: a Limiter refuses a name with two definitions
	m := model{}
	limits := make([]ratelimit.Limit, 4)
	var consumptions []consumption
	granted, denied, moves := 0, 0, 0
	called := map[string]int{}
	for n := range calls {
		for i := range limits {
			if n == 0 || r.IntN(40) == 0 {
				limits[i] = randomLimit(r, fmt.Sprintf("limit %d", i), 1+r.IntN(5))
			}
		}
		clock.Advance(time.Duration(oneOf(r, 0, 1, r.Int64N(2e3), r.Int64N(1e6), r.Int64N(1e8), r.Int64N(1e11), -r.Int64N(1e9))) * time.Microsecond)
		now := algebra.At(clock.now)

		verb := oneOf(r, randomVerbs...)
		if verb == "reset" && r.IntN(4) > 0 {
			continue
		}
		if verb == "move" {
			from, to := randomMove(r, limits)
			err := (&ratelimit.Limiter{Clock: clock.Now}).Move(t.Context(), pool, from.request(), to.request())
			if together := m.move(from, to, now); together != (err == nil) || !together && !errors.Is(err, ratelimit.ErrInvalid) {
				t.Fatalf("call %d at %v: move from %+v to %+v: %v; by the model, they refill together: %v", n, clock.now, from, to, err, together)
			} else if together {
				moves++
			}
			if table := readTable(t, pool); !maps.EqualFunc(table, m, slices.Equal) {
				t.Fatalf("call %d at %v: move from %+v to %+v\nthe table:  %v\nthe model: %v", n, clock.now, from, to, table, m)
			}
			continue
		}
		var asks []ask
		for range oneOf(r, 1, 1, 1, 2, 3, 4) {
			limit := oneOf(r, limits...)
			asks = append(asks, ask{limit: limit, key: oneOf(r, "", "a", "b"), count: randomTokens(r, limit.Capacity())})
		}
		if verb == "take" {
			asks = randomTake(r, asks)
		}
		from := &consumption{}
		if verb == "refund" {
			if from, asks = randomRefund(r, consumptions, limits); asks == nil {
				continue
			}
		}
		called[verb]++
		pick := randomPick(rand.New(rand.NewPCG(r.Uint64(), 0)))

		ds := sums(verb, asks)
		result, err := call(shardpick.With(t.Context(), pick.again()), &ratelimit.Limiter{Clock: clock.Now}, pool, verb, from.receipt, asks)
		story := fmt.Sprintf("call %d at %v: %s %s %+v -> %+v, %v", n, clock.now, verb, from.receipt, asks, result, err)
		if verb != "refund" && verb != "reset" && verb != "balance" && !possible(ds) {
			if !errors.Is(err, ratelimit.ErrExceedsCapacity) {
				t.Fatalf("%s\ncan never be granted", story)
			}
			continue
		}
		left := from.grant
		answer := m.do(verb, ds, pick.again(), &left, now)
		want := answer.Granted
		var exceeded *ratelimit.DeniedError
		got := err == nil && (result.OK || verb == "reset" || verb == "balance")
		if err != nil && !errors.As(err, &exceeded) || got != want {
			t.Fatalf("%s\nthe model says %v", story, want)
		}
		if err := m.compare(verb, asks, ds, result, answer, now); err != nil {
			t.Fatalf("%s\n%v", story, err)
		}
		if got {
			granted++
		} else {
			denied++
		}
		if table := readTable(t, pool); !maps.EqualFunc(table, m, slices.Equal) {
			t.Fatalf("%s\nthe table:  %v\nthe model: %v", story, table, m)
		}
		switch receipt := result.receipt; {
		case (verb == "consume" || verb == "reserve" || verb == "take") && got:
			left = grantOf(ds, answer, now, m.runAt(verb, ds, answer, now))
			fallthrough
		case verb == "refund":
			if told := readReceipt(t, receipt); !told.equal(left) {
				t.Fatalf("%s\nthe receipt: %s\nthe model:   %+v", story, receipt, left)
			}
			if verb == "refund" && r.IntN(4) > 0 { // otherwise the old receipt is used again
				*from = consumption{receipt, left}
			} else {
				consumptions = append(consumptions, consumption{receipt, left})
			}
		case receipt != "":
			t.Fatalf("%s\na receipt, of nothing: %s", story, receipt)
		}
	}
	if granted < calls/10 || denied < calls/20 || moves < calls/40 {
		t.Errorf("%d grants, %d denials and %d moves in %d calls: this tested too little", granted, denied, moves, calls)
	}
	for verb, least := range map[string]int{"reserve": calls / 20, "take": calls / 20, "balance": calls / 20, "check": calls / 40, "charge": calls / 40, "refund": calls / 40} {
		if called[verb] < least {
			t.Errorf("%d of %d calls were of %s: this tested too little", called[verb], calls, verb)
		}
	}
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

// move moves, and reports whether it can be.
func (m model) move(from, to ask, now algebra.Micros) (together bool) {
	demand := func(a ask) inmemory.Demand {
		return inmemory.Demand{ID: rowsOf{Name: a.limit.Name(), Key: a.key}, Limit: numbers(a.limit, a.key), Shards: a.limit.Config().Shards}
	}
	a, b := demand(from), demand(to)
	if a.ID == b.ID || a.Limit.Window != b.Limit.Window || a.Limit.Window && (a.Limit.Period != b.Limit.Period || a.Limit.Start != b.Limit.Start) {
		return false
	}
	floor := 0.0
	if most := to.limit.Config().MaxReserved; most != nil {
		floor = -*most
	}
	inmemory.Table(m).Move(a, b, floor, now)
	return true
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

func (g grant) equal(other grant) bool {
	return len(g.taken) == 0 && len(other.taken) == 0 || g.at == other.at && g.runAt == other.runAt && maps.Equal(g.taken, other.taken)
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
		got.balances, err = l.Balance(ctx, db, requests...)
	case "charge":
		got.Result, err = l.Charge(ctx, db, requests...)
	case "refund":
		got.Result, err = l.Refund(ctx, db, receipt, requests...)
	case "move":
		err = l.Move(ctx, db, requests[0], requests[1])
	default:
		err = l.Reset(ctx, db, requests...)
	}
	got.receipt = got.Receipt()
	return got, err
}

// TestModelHoldsForConcurrentCallers runs transactions of every level that consume and refund a few keys at once, by the
// database's clock. Some roll back. For each key, all grants must fit the capacity, the refill between the first and the
// last grant, and maxReserved.
func TestModelHoldsForConcurrentCallers(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 16)
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 5, time.Second, ratelimit.Capacity(40), ratelimit.MaxReserved(10)),
		ratelimit.TokenBucket("sharded", 5, time.Second, ratelimit.Capacity(40), ratelimit.MaxReserved(10), ratelimit.Shards(4)),
		// The rest of a window is lost, and a slow machine needs time to take it.
		ratelimit.FixedWindow("window", 10, 2*time.Second, ratelimit.Capacity(30), ratelimit.MaxReserved(0)),
		ratelimit.FixedWindow("sharded window", 10, 2*time.Second, ratelimit.MaxReserved(20), ratelimit.Shards(3)),
	}
	type account struct {
		net         float64 // granted and not refunded
		first, last time.Time
		grants      int
	}
	accounts := map[rowsOf]*account{}
	var mu sync.Mutex
	var limiter ratelimit.Limiter
	errRollback := errors.New("changed my mind")

	bound := func(limit ratelimit.Limit, key string, acc *account) float64 {
		n := numbers(limit, key)
		refill := acc.last.Sub(acc.first).Seconds() / n.Period.Seconds() * n.Rate
		if n.Window {
			refill = float64(n.UpTo(algebra.At(acc.last))-n.UpTo(algebra.At(acc.first))) / float64(n.Period.Microseconds()) * n.Rate
		}
		return n.Capacity + refill + *limit.Config().MaxReserved
	}
	// reached reports whether every limit granted so much that only the bound stops it.
	reached := func() bool {
		mu.Lock()
		defer mu.Unlock()
		for _, limit := range limits {
			for _, key := range []string{"a", "b"} {
				acc := accounts[rowsOf{Name: limit.Name(), Key: key}]
				if acc == nil || acc.net < 0.8*bound(limit, key, acc) {
					return false
				}
			}
		}
		return true
	}

	var wg sync.WaitGroup
	r := newRand(t)
	begin := time.Now()
	for range 16 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for since := time.Duration(0); since < sized(4*time.Second, time.Second) || since < time.Minute && !reached(); since = time.Since(begin) {
				var asks []ask
				var requests []ratelimit.Request
				reserve := r.IntN(3) == 0
				for range 1 + r.IntN(3) {
					a := ask{limit: oneOf(r, limits...), key: oneOf(r, "a", "b"), count: oneOf(r, 1, 1, 2, 0.5, 20)}
					asks, requests = append(asks, a), append(requests, a.request())
				}
				refund := r.IntN(10) == 0 // a request that had to wait gets no refund
				var result answered
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) (err error) {
					if result, err = decide(ctx, &limiter, tx, reserve, requests...); err == nil && r.IntN(10) == 0 {
						err = errRollback
					}
					if err == nil && refund {
						_, err = limiter.Refund(ctx, tx, result.receipt, requests...)
					}
					return err
				}, ratelimit.Isolation(oneOf(r, levels...)), ratelimit.Attempts(1000))
				var exceeded *ratelimit.DeniedError
				switch {
				case errors.As(err, &exceeded):
					time.Sleep(time.Millisecond)
				case err != nil && !errors.Is(err, errRollback) && !errors.Is(err, ratelimit.ErrExceedsCapacity):
					t.Errorf("%+v: %v", asks, err)
				case err == nil:
					at := result.At
					mu.Lock()
					for _, a := range asks {
						id := rowsOf{Name: a.limit.Name(), Key: a.key}
						if accounts[id] == nil {
							accounts[id] = &account{first: at, last: at}
						}
						acc := accounts[id]
						if acc.grants++; !refund {
							acc.net += a.count
						}
						acc.first, acc.last = minTime(acc.first, at), maxTime(acc.last, at)
					}
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	if !reached() {
		t.Error("much less was granted than could be: the test does not reach the bound")
	}
	for _, limit := range limits {
		for _, key := range []string{"a", "b"} {
			acc := accounts[rowsOf{Name: limit.Name(), Key: key}]
			if acc == nil {
				t.Errorf("%s %s: nothing was granted", limit.Name(), key)
				continue
			}
			bound := bound(limit, key, acc)
			t.Logf("%s %s: %d grants, %.1f tokens kept of at most %.1f", limit.Name(), key, acc.grants, acc.net, bound)
			if acc.net > bound+1e-6 {
				t.Errorf("%s %s: over-granted", limit.Name(), key)
			}
		}
	}
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
