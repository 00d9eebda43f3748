package model_test

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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
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
	harness.NeedsToPrepareAgain(t)
	for _, i := range harness.SomeOf(t, 2, 0, 1, 2, 3) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			playModel(t, harness.Sized(2000, 1000))
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
	result harness.Answered
	err    string
}

func playModel(t *testing.T, rounds int) {
	s := &sides{T: t, r: harness.NewRand(t), pool: harness.NewPool(t, 1), memory: ratelimittest.New(t), limits: make([]ratelimit.Limit, 4), told: map[string]int{}}
	if _, err := s.pool.Exec(t.Context(), "SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	for n := range rounds {
		for i := range s.limits {
			if n == 0 || s.r.IntN(40) == 0 {
				s.limits[i] = harness.RandomLimitOfAnyKind(s.r, fmt.Sprintf("limit %d", i), 1+s.r.IntN(5))
			}
		}
		s.memory.Advance(time.Duration(harness.OneOf(s.r, 0, 0, 0, 1, s.r.Int64N(2e3), s.r.Int64N(1e6), s.r.Int64N(1e8), s.r.Int64N(1e11), s.r.Int64N(1e13), -s.r.Int64N(1e9))) * time.Microsecond)
		switch s.r.IntN(4) {
		case 0:
			s.inTx(n)
		case 1:
			s.sendTx(n)
		default:
			s.both(n, s.call())
		}
		if table, memory := harness.ReadTable(t, s.pool), s.memory.InMemory().(inmemory.Table); !maps.EqualFunc(table, memory, slices.Equal) {
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
	pick := harness.RandomPick(rand.New(rand.NewPCG(s.r.Uint64(), 0)))
	ctx := func() context.Context { return shardpick.With(s.Context(), pick.Again()) }
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
	verb := harness.OneOf(s.r, append(randomVerbs, "refund", "refund", "pause", "resume", "each")...)
	var asks []harness.Ask
	for range harness.OneOf(s.r, 1, 1, 1, 2, 3, 4) {
		asks = append(asks, s.ask())
	}
	if verb == "move" {
		from, to := randomMove(s.r, s.limits)
		asks = []harness.Ask{from, to}
	}
	if verb == "take" {
		asks = harness.RandomTake(s.r, asks)
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
		result, err := harness.Call(ctx, limiter, db, verb, receipt, asks)
		s.note(verb, result, err)
		return []outcome{{fmt.Sprint(verb, asks), result, harness.TextOf(err)}}
	}
}

// each decides asks one by one.
func (s *sides) each(asks []harness.Ask) step {
	var requests []ratelimit.Request
	for _, a := range asks {
		requests = append(requests, a.Request())
	}
	return func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
		results, err := harness.InOrder(limiter.ConsumeEach(ctx, db, requests...))
		told := []outcome{{fmt.Sprint("each", asks), harness.Answered{}, harness.TextOf(err)}}
		for _, result := range results {
			told = append(told, outcome{"of each", harness.Answered{Result: result, Slip: result.Receipt()}, ""})
		}
		s.note("each", harness.Answered{}, err)
		return told
	}
}

// pause pauses the token buckets of asks, or ends their pauses.
func (s *sides) pause(verb string, asks []harness.Ask) step {
	var requests []ratelimit.Request
	for _, a := range harness.RandomTake(s.r, asks) {
		if a.Limit.Config().Kind == "token bucket" && a.Key != "" { // Global is refused where the limit has keys
			requests = append(requests, a.Plain().Count(harness.RandomTokens(s.r, a.Limit.Capacity())))
		}
	}
	lasts := time.Duration(harness.OneOf(s.r, -1e6, 1000, s.r.Int64N(1e6), s.r.Int64N(1e8), s.r.Int64N(1e12))) * time.Microsecond
	return func(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB) []outcome {
		until, err := limiter.Pause(ctx, db, lasts, requests...)
		if verb == "resume" {
			err = limiter.Resume(ctx, db, harness.KeysOf(requests...)...)
		}
		s.note(verb, harness.Answered{}, err)
		return []outcome{{fmt.Sprint(verb, until, asks), harness.Answered{}, harness.TextOf(err)}}
	}
}

func (s *sides) ask() harness.Ask {
	limit := harness.OneOf(s.r, s.limits...)
	return harness.Ask{Limit: limit, Key: harness.OneOf(s.r, "", "a", "b"), Count: harness.RandomTokens(s.r, limit.Capacity())}
}

// note counts outcomes, and keeps receipts.
func (s *sides) note(verb string, result harness.Answered, err error) {
	switch {
	case err == nil && verb != "consume" && verb != "check" && verb != "charge":
		s.told[verb]++
	case err == nil:
		s.told["granted"]++
	case harness.Denied(err):
		s.told["denied"]++
	}
	if err == nil && result.Slip != "" && !slices.Contains(s.receipts[max(len(s.receipts)-5, 0):], result.Slip) { // of both sides
		s.receipts = append(s.receipts, result.Slip)
	}
}

var errOfOurs = errors.New("changed my mind")

// inTx runs a random transaction.
func (s *sides) inTx(n int) {
	level := ratelimit.Isolation(harness.OneOf(s.r, harness.Levels...))
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
		return append(told, outcome{what: "the transaction", err: harness.TextOf(err)})
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
					return []outcome{{what: "savepoint", err: harness.TextOf(err)}}
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
				return append(told, outcome{what: "the savepoint", err: harness.TextOf(err)}, outcome{what: "and again", err: harness.TextOf(nested.Rollback(ctx))})
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
		told = append(told, outcome{what: fmt.Sprint("result ", i), result: harness.Answered{Result: *result}})
	}
	return append(told, outcome{what: "the batch", err: harness.TextOf(err)})
}

// queue makes random calls to queue. A calendar's windows are computed when the call is queued, so it needs a
// Limiter.Clock.
func (s *sides) queue() func(ctx context.Context) (*pgx.Batch, []*ratelimit.Result, []outcome) {
	var calls [][]ratelimit.Request
	for range 1 + s.r.IntN(3) {
		calls = append(calls, []ratelimit.Request{s.ask().Request(), s.ask().Request()}[:1+s.r.IntN(2)])
	}
	return func(ctx context.Context) (batch *pgx.Batch, results []*ratelimit.Result, told []outcome) {
		limiter := &ratelimit.Limiter{Clock: s.memory.Now}
		batch = &pgx.Batch{}
		for _, requests := range calls {
			result, err := limiter.QueueConsume(ctx, batch, requests...)
			if told = append(told, outcome{what: fmt.Sprint("queue ", requests), err: harness.TextOf(err)}); err == nil {
				results = append(results, result)
			}
		}
		return batch, results, told
	}
}

// sendTx sends a random batch, with BEGIN and COMMIT or as a transaction by itself.
func (s *sides) sendTx(n int) {
	queue, alone := s.queue(), s.r.IntN(3) == 0
	level := ratelimit.Isolation(harness.OneOf(s.r, harness.Levels...))
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
		case harness.Denied(err):
			s.told["batch denied"]++
		}
		return append(told, batched(results, err)...)
	})
}
