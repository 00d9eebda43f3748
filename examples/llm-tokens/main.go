// Llm-tokens gives each team a budget of tokens of a language model: what is over it is told when there will be enough, or
// may queue up; what turns out cheaper than estimated is given back.
//
//	go run ./examples/llm-tokens
//
// The teams' limit is sharded, since a busy team commits more often than one row can. Examples/river runs what has queued up
// at its instant; examples/settle gives back exactly once, whatever dies in between.
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits ratelimit.Limiter

	// A team may use 6,000 tokens a minute, 20,000 at once, and queue up for ten minutes' worth.
	llmTokens = ratelimit.TokenBucket("llmTokens", 6_000, time.Minute,
		ratelimit.Capacity(20_000), ratelimit.MaxReserved(60_000), ratelimit.Shards(4))
)

// estimate is what a call may cost at the most: its prompt, by a rule of thumb, and the longest answer that is asked for.
func estimate(prompt string, maxAnswer int) float64 {
	return math.Ceil(float64(len(prompt))/4) + float64(maxAnswer)
}

// chat answers a person who waits: at once or not at all. What the answer was shorter than estimated is given back, and what
// the rule of thumb fell short of is charged.
func chat(ctx context.Context, pool *pgxpool.Pool, team, prompt string) error {
	estimated := estimate(prompt, 1_496)
	result, err := limits.Consume(ctx, pool, llmTokens.Key(team).Count(estimated))
	if err != nil {
		return err
	}
	used := answer(prompt)
	if used > estimated { // what is spent is spent
		_, err = limits.Charge(ctx, pool, llmTokens.Key(team).Count(used-estimated))
	} else {
		_, err = limits.Refund(ctx, pool, result.Receipt(), llmTokens.Key(team).Count(estimated-used))
	}
	return err
}

// batch takes what can wait. Its result says when it will run.
func batch(ctx context.Context, pool *pgxpool.Pool, team, prompt string, maxAnswer int) (result ratelimit.Result, err error) {
	err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		result, err = limits.Consume(ctx, tx, llmTokens.Key(team).Count(estimate(prompt, maxAnswer)).Reserve())
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO prompts (team, prompt, receipt, run_at) VALUES ($1, $2, $3, $4)", team, prompt, result.Receipt(), result.RetryAt)
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted))
	return result, err
}

// answer calls the language model and says what it took.
var answer func(prompt string) (tokens float64)

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, "CREATE TABLE prompts (team text, prompt text, receipt text, run_at timestamptz)"); err != nil {
		return err
	}

	// 20 people of one team ask at the same time, for 1,500 tokens each at the most: that is what 13 of them can have.
	const people = 20
	var answered atomic.Int64
	var asked sync.WaitGroup
	asked.Add(people)
	answer = func(string) float64 { // here one would call the language model
		asked.Done()
		asked.Wait() // nobody has his answer before all have asked
		return 400
	}
	waits := make([]time.Duration, people)
	asking, askCtx := errgroup.WithContext(ctx)
	for i := range people {
		asking.Go(func() error {
			err := chat(askCtx, pool, "red", "What is this?  ")
			var exceeded *ratelimit.DeniedError
			switch {
			case errors.As(err, &exceeded):
				waits[i] = exceeded.RetryAfter
				asked.Done()
				return nil
			case err == nil:
				answered.Add(1)
			}
			return err
		})
	}
	if err := asking.Wait(); err != nil {
		return err
	}
	wait := slices.Max(waits)
	fmt.Printf("red: of %d chats at once, %d are answered, the others are told to come back within 10s\n", people, answered.Load())
	if answered.Load() != 13 || wait <= 0 || wait > 10*time.Second {
		return fmt.Errorf("%d answered, the others after %v, want 13 and at most 10s", answered.Load(), wait)
	}
	left, err := limits.Check(ctx, pool, llmTokens.Key("red").Count(0))
	if err != nil {
		return err
	}
	fmt.Println("red: the answers took 400 tokens each, the rest is given back: more than 14 thousand are left")
	if left.Remaining < 14_800 { // 20,000 - 13 * 400, and what has come in meanwhile
		return fmt.Errorf("%v tokens are left, want at least 14,800", left.Remaining)
	}

	answer = func(string) float64 { return 3_000 }
	if err := chat(ctx, pool, "blue", "What is this?  "); err != nil {
		return err
	}
	if left, err = limits.Check(ctx, pool, llmTokens.Key("blue").Count(0)); err != nil {
		return err
	}
	fmt.Println("blue: has a budget of its own, and is answered, for twice the tokens that were estimated")
	if remaining := left.Remaining; remaining >= 18_000 { // 20,000 - 3,000, and what has come in meanwhile
		return fmt.Errorf("blue has %v tokens left, want about 17,000", remaining)
	}

	report, err := batch(ctx, pool, "red", "Sum up the year.", 34_996)
	if err != nil {
		return err
	}
	fmt.Printf("red: a report of 35000 tokens at the most is scheduled, and runs in %v\n", report.RetryAfter.Round(time.Minute))
	if report.RetryAfter < 150*time.Second || report.RetryAfter > 203*time.Second { // what is owed: up to 20,200
		return fmt.Errorf("it runs in %v, want just below 3m22s", report.RetryAfter)
	}

	_, err = batch(ctx, pool, "red", "Sum up the century.", 51_995)
	var exceeded *ratelimit.DeniedError
	if !errors.As(err, &exceeded) {
		return fmt.Errorf("52,000 tokens more: %w, want a denial", err)
	}
	fmt.Printf("red: another 52000 tokens are more than may queue up; again in %v\n", exceeded.RetryAfter.Round(time.Minute))

	_, err = batch(ctx, pool, "red", "Sum up everything.", 99_995)
	if !errors.Is(err, ratelimit.ErrExceedsCapacity) {
		return fmt.Errorf("100,000 tokens: %w, want an error that says never", err)
	}
	fmt.Println("red: 100000 tokens will never fit: split it")

	var scheduled int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM prompts WHERE run_at > now()").Scan(&scheduled); err != nil {
		return err
	}
	if scheduled != 1 {
		return fmt.Errorf("%d prompts are scheduled, want the one report", scheduled)
	}
	return nil
}
