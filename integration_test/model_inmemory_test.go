package integration_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// TestModel plays random calls on a Postgres and on the database in memory: single calls, batches, and transactions of every
// level with savepoints that are rolled back. Limits change, shards come and go, and the clock steps back and forth. Every
// answer, every error and, after each transaction, the table must be equal, to the last bit.
func TestModel(t *testing.T) {
	t.Parallel()
	needsToPrepareAgain(t)
	for _, i := range someOf(t, 2, 0, 1, 2, 3) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			playModel(t, sized(2000, 1000))
		})
	}
}

// sides are the two databases, and what happened on them.
type sides struct {
	*testing.T
	r        *rand.Rand
	pool     *pgxpool.Pool
	memory   *ratelimittest.DB
	limits   []ratelimit.Limit
	receipts []ratelimit.Receipt
	told     map[string]int // how often each outcome occurred
}

// transactor is the interface of both databases.
type transactor interface {
	ratelimit.DB
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// step is an action on a handle of either database. It returns its outcomes.
type step func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome

// outcome is the result of a call.
type outcome struct {
	what   string
	result answered
	err    string
}

// textOf returns an error's text. In an aborted transaction, it depends on what pgx has prepared before.
func textOf(err error) string {
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Code == "25P02" {
		return pgErr.Error()
	}
	if err == nil {
		return ""
	}
	return err.Error()
}

func playModel(t *testing.T, rounds int) {
	s := &sides{T: t, r: newRand(t), pool: newPool(t, 1), memory: ratelimittest.New(t), limits: make([]ratelimit.Limit, 4), told: map[string]int{}}
	if _, err := s.pool.Exec(t.Context(), "SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	for n := range rounds {
		for i := range s.limits {
			if n == 0 || s.r.IntN(40) == 0 {
				s.limits[i] = randomLimitOfAnyKind(s.r, fmt.Sprintf("limit %d", i), 1+s.r.IntN(5))
			}
		}
		s.memory.Advance(time.Duration(oneOf(s.r, 0, 0, 0, 1, s.r.Int64N(2e3), s.r.Int64N(1e6), s.r.Int64N(1e8), s.r.Int64N(1e11), s.r.Int64N(1e13), -s.r.Int64N(1e9))) * time.Microsecond)
		switch s.r.IntN(4) {
		case 0:
			s.inTx(n)
		case 1:
			s.sendTx(n)
		default:
			s.both(n, s.call())
		}
		if table, memory := readTable(t, s.pool), s.memory.InMemory().(inmemory.Table); !maps.EqualFunc(table, memory, slices.Equal) {
			t.Fatalf("round %d at %v\nPostgres:  %v\nin memory: %v", n, s.memory.Now(), table, memory)
		}
	}
	t.Log(s.told)
	for _, what := range []string{"granted", "denied", "reserve", "take", "balance", "refund", "reset", "move", "pause", "resume", "each", "savepoint rolled back", "aborted", "rolled back", "committed", "batch sent", "batch denied"} {
		if s.told[what] < rounds/100 {
			t.Errorf("%d of %d rounds were %s: this tested too little", s.told[what], rounds, what)
		}
	}
}

// both takes the same step on both sides and wants the same outcomes. Postgres' limiter uses the other database's clock.
func (s *sides) both(n int, do step) {
	s.Helper()
	pick := randomPick(rand.New(rand.NewPCG(s.r.Uint64(), 0)))
	ctx := func() context.Context { return shardpick.With(s.Context(), pick.again()) }
	want := do(ctx(), &ratelimit.Limiter{Clock: s.memory.Now}, s.pool)
	got := do(ctx(), &ratelimit.Limiter{}, s.memory)
	for i := range min(len(got), len(want)) {
		if !reflect.DeepEqual(got[i], want[i]) {
			s.Fatalf("round %d at %v, with %v, after %+v\nPostgres:  %+v\nin memory: %+v", n, s.memory.Now(), s.limits, got[:i], want[i], got[i])
		}
	}
	if len(got) != len(want) {
		s.Fatalf("round %d: %d outcomes in Postgres, %d in memory", n, len(want), len(got))
	}
}

// call makes a random call of any verb.
func (s *sides) call() step {
	verb := oneOf(s.r, append(randomVerbs, "refund", "refund", "pause", "resume", "each")...)
	var asks []ask
	for range oneOf(s.r, 1, 1, 1, 2, 3, 4) {
		asks = append(asks, s.ask())
	}
	if verb == "move" {
		from, to := randomMove(s.r, s.limits)
		asks = []ask{from, to}
	}
	if verb == "take" {
		asks = randomTake(s.r, asks)
	}
	var receipt ratelimit.Receipt
	if verb == "refund" && len(s.receipts) > 0 {
		receipt = s.receipts[len(s.receipts)-1-s.r.IntN(min(len(s.receipts), 5))]
		_, asks = randomRefund(s.r, []consumption{{receipt, readReceipt(s.T, receipt)}}, s.limits)
	}
	switch verb {
	case "pause", "resume":
		return s.pause(verb, asks)
	case "each":
		return s.each(asks)
	}
	return func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
		result, err := call(ctx, limiter, db, verb, receipt, asks)
		s.note(verb, result, err)
		return []outcome{{fmt.Sprint(verb, asks), result, textOf(err)}}
	}
}

// each decides asks one by one.
func (s *sides) each(asks []ask) step {
	var requests []ratelimit.Request
	for _, a := range asks {
		requests = append(requests, a.request())
	}
	return func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
		results, err := inOrder(limiter.ConsumeEach(ctx, db, requests...))
		told := []outcome{{fmt.Sprint("each", asks), answered{}, textOf(err)}}
		for _, result := range results {
			told = append(told, outcome{"of each", answered{Result: result, receipt: result.Receipt()}, ""})
		}
		s.note("each", answered{}, err)
		return told
	}
}

// pause pauses the token buckets of asks, or ends their pauses.
func (s *sides) pause(verb string, asks []ask) step {
	var requests []ratelimit.Request
	for _, a := range randomTake(s.r, asks) {
		if a.limit.Config().Kind == "token bucket" && a.key != "" { // Global is refused where the limit has keys
			requests = append(requests, a.plain().Count(randomTokens(s.r, a.limit.Capacity())))
		}
	}
	lasts := time.Duration(oneOf(s.r, -1e6, 1, s.r.Int64N(1e6), s.r.Int64N(1e8), s.r.Int64N(1e12))) * time.Microsecond
	return func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
		until, err := limiter.Pause(ctx, db, lasts, requests...)
		if verb == "resume" {
			err = limiter.Resume(ctx, db, keysOf(requests...)...)
		}
		s.note(verb, answered{}, err)
		return []outcome{{fmt.Sprint(verb, until, asks), answered{}, textOf(err)}}
	}
}

func (s *sides) ask() ask {
	limit := oneOf(s.r, s.limits...)
	return ask{limit: limit, key: oneOf(s.r, "", "a", "b"), count: randomTokens(s.r, limit.Capacity())}
}

// note counts outcomes, and keeps receipts.
func (s *sides) note(verb string, result answered, err error) {
	switch {
	case err == nil && verb != "consume" && verb != "check" && verb != "charge":
		s.told[verb]++
	case err == nil:
		s.told["granted"]++
	case denied(err):
		s.told["denied"]++
	}
	if err == nil && result.receipt != "" && !slices.Contains(s.receipts[max(len(s.receipts)-5, 0):], result.receipt) { // of both sides
		s.receipts = append(s.receipts, result.receipt)
	}
}

var errOfOurs = errors.New("changed my mind")

// inTx runs a random transaction.
func (s *sides) inTx(n int) {
	level := ratelimit.Isolation(oneOf(s.r, levels...))
	steps, rollBack := s.steps(1), s.r.IntN(3) == 0
	s.both(n, func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
		var told []outcome
		err := limiter.InTx(ctx, db.(transactor), func(ctx context.Context, tx pgx.Tx) error {
			for _, step := range steps {
				told = append(told, step(ctx, limiter, tx)...)
			}
			if rollBack {
				return errOfOurs
			}
			return nil
		}, level)
		switch {
		case errors.Is(err, errOfOurs):
			s.told["rolled back"]++
		case err == nil:
			s.told["committed"]++
		case errors.Is(err, pgx.ErrTxCommitRollback):
			s.told["aborted"]++
		}
		return append(told, outcome{what: "the transaction", err: textOf(err)})
	})
}

// steps makes the random steps of a transaction: calls, batches and nested transactions.
func (s *sides) steps(depth int) (steps []step) {
	for range 1 + s.r.IntN(4) {
		switch s.r.IntN(6) {
		case 0:
			steps = append(steps, s.batch())
		case 1, 2:
			if depth > 3 {
				continue
			}
			inner, commit := s.steps(depth+1), s.r.IntN(2) == 0
			steps = append(steps, func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
				nested, err := db.(pgx.Tx).Begin(ctx)
				if err != nil {
					return []outcome{{what: "savepoint", err: textOf(err)}}
				}
				var told []outcome
				for _, step := range inner {
					told = append(told, step(ctx, limiter, nested)...)
				}
				if commit {
					err = nested.Commit(ctx)
				} else {
					err = nested.Rollback(ctx)
					s.told["savepoint rolled back"]++
				}
				return append(told, outcome{what: "the savepoint", err: textOf(err)}, outcome{what: "and again", err: textOf(nested.Rollback(ctx))})
			})
		default:
			steps = append(steps, s.call())
		}
	}
	return steps
}

// batch makes a random batch on a transaction.
func (s *sides) batch() step {
	queue := s.queue()
	return func(ctx context.Context, _ *ratelimit.Limiter, db ratelimit.DB) []outcome {
		batch, results, told := queue(ctx)
		err := db.(pgx.Tx).SendBatch(ctx, batch).Close()
		return append(told, batched(results, err)...)
	}
}

// batched is the outcome of a batch.
func batched(results []*ratelimit.Result, err error) (told []outcome) {
	for i, result := range results {
		told = append(told, outcome{what: fmt.Sprint("result ", i), result: answered{Result: *result}})
	}
	return append(told, outcome{what: "the batch", err: textOf(err)})
}

// queue makes random calls to queue. A calendar's windows are computed when the call is queued, so it needs a
// Limiter.Clock.
func (s *sides) queue() func(ctx context.Context) (*pgx.Batch, []*ratelimit.Result, []outcome) {
	var calls [][]ratelimit.Request
	for range 1 + s.r.IntN(3) {
		calls = append(calls, []ratelimit.Request{s.ask().request(), s.ask().request()}[:1+s.r.IntN(2)])
	}
	return func(ctx context.Context) (batch *pgx.Batch, results []*ratelimit.Result, told []outcome) {
		limiter := &ratelimit.Limiter{Clock: s.memory.Now}
		batch = &pgx.Batch{}
		for _, requests := range calls {
			result, err := limiter.QueueConsume(ctx, batch, requests...)
			if told = append(told, outcome{what: fmt.Sprint("queue ", requests), err: textOf(err)}); err == nil {
				results = append(results, result)
			}
		}
		return batch, results, told
	}
}

// sendTx sends a random batch, with BEGIN and COMMIT or as a transaction by itself.
func (s *sides) sendTx(n int) {
	queue, alone := s.queue(), s.r.IntN(3) == 0
	level := ratelimit.Isolation(oneOf(s.r, levels...))
	s.both(n, func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
		batch, results, told := queue(ctx)
		var err error
		if alone {
			err = db.(transactor).SendBatch(ctx, batch).Close()
		} else {
			err = limiter.SendTx(ctx, db.(transactor), batch, level)
		}
		switch {
		case err == nil && len(results) > 0:
			s.told["batch sent"]++
		case denied(err):
			s.told["batch denied"]++
		}
		return append(told, batched(results, err)...)
	})
}

// randomLimitOfAnyKind makes a bucket, a fixed window or a calendar window.
func randomLimitOfAnyKind(r *rand.Rand, name string, shards int) ratelimit.Limit {
	limit := randomLimit(r, name, shards)
	if r.IntN(3) > 0 {
		return limit
	}
	c := limit.Config()
	rate := oneOf(r, 1.0, 3, 10, 0.5, 1.0/3, 100*r.Float64())
	c.Kind, c.Rate, c.Start = "calendar window", &rate, nil
	c.Period = "1 " + string(oneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Quarter, ratelimit.Year))
	c.Zone = oneOf(r, "", "UTC", "Europe/Berlin", "America/Sao_Paulo", "Pacific/Apia")
	c.Anchor = oneOf(r, "", "2001-01-31", randomAnchor(r))
	for _, numbers := range []*float64{c.Capacity, c.MaxReserved} {
		if numbers != nil {
			*numbers = oneOf(r, 0, rate/2, 2*rate, rate*10*r.Float64())
		}
	}
	limit, err := c.Limit()
	if err != nil {
		panic(err)
	}
	return limit
}
