// Llm-tokens gives each team a budget of tokens of a language model. A call above the budget is told when there will be
// enough, or it may queue. If a call costs less than estimated, the rest is refunded.
//
//	go run ./examples/llm-tokens
//
// The limit is sharded, since a busy team commits more often than one row allows. Examples/river runs queued work at its
// instant. Examples/settle refunds exactly once, whatever crashes in between.
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
	limits *ratelimit.Limiter // of Open

	// A team may use 6,000 tokens a minute, 20,000 at once, and queue for the tokens of ten minutes.
	llmTokens = ratelimit.TokenBucket("llmTokens", 6_000, time.Minute,
		ratelimit.Capacity(20_000), ratelimit.MaxReserved(60_000), ratelimit.Shards(4))
)

// estimate returns the most that a call may cost: its prompt, by a rule of thumb, and the longest answer that it asks for.
func estimate(prompt string, maxAnswer int) float64 {
	return math.Ceil(float64(len(prompt))/4) + float64(maxAnswer)
}

// chat answers a waiting person, at once or not at all. If the call costs less than estimated, the rest is refunded. If it
// costs more, the difference is charged.
func chat(ctx context.Context, pool *pgxpool.Pool, team, prompt string) error {
	estimated := estimate(prompt, 1_496)
	result, err := limits.Consume(ctx, pool, llmTokens.Key(team).Count(estimated))
	if err != nil {
		return err
	}
	used := answer(prompt)
	if used > estimated { // it is spent, so it is charged
		_, err = limits.Charge(ctx, pool, llmTokens.Key(team).Count(used-estimated))
	} else {
		_, err = limits.Refund(ctx, pool, result.Receipt(), llmTokens.Key(team).Count(estimated-used))
	}
	return err
}

// batch accepts work that can wait. The reservation says when the work may run.
func batch(ctx context.Context, pool *pgxpool.Pool, team, prompt string, maxAnswer int) (reserved ratelimit.Reservation, err error) {
	err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		reserved, err = limits.Reserve(ctx, tx, llmTokens.Key(team).Count(estimate(prompt, maxAnswer)))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO prompts (team, prompt, receipt, run_at) VALUES ($1, $2, $3, $4)", team, prompt, reserved.Receipt(), reserved.RetryAt)
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted))
	return reserved, err
}

// answer calls the language model and returns the tokens used.
var answer func(prompt string) (tokens float64)

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "llm-tokens", Limits: []ratelimit.Limit{llmTokens}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	if _, err := pool.Exec(ctx, "CREATE TABLE prompts (team text, prompt text, receipt text, run_at timestamptz)"); err != nil {
		return err
	}

	// 20 people of one team ask at the same time, for at most 1,500 tokens each: there are enough for 13 of them.
	const people = 20
	var answered atomic.Int64
	var asked sync.WaitGroup
	asked.Add(people)
	answer = func(string) float64 { // an application calls the language model here
		asked.Done()
		asked.Wait() // no answer comes before all have asked
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
	fmt.Printf("red: of %d chats at once, %d are answered, the others may retry within 10s\n", people, answered.Load())
	if answered.Load() != 13 || wait <= 0 || wait > 10*time.Second {
		return fmt.Errorf("%d answered, the others after %v, want 13 and at most 10s", answered.Load(), wait)
	}
	left, err := limits.Balance(ctx, pool, llmTokens.Key("red"))
	if err != nil {
		return err
	}
	fmt.Println("red: the answers took 400 tokens each, the rest is refunded: more than 14 thousand are left")
	if left[0].Remaining < 14_800 { // 20,000 - 13 * 400, and the refill meanwhile
		return fmt.Errorf("%v tokens are left, want at least 14,800", left[0].Remaining)
	}

	answer = func(string) float64 { return 3_000 }
	if err := chat(ctx, pool, "blue", "What is this?  "); err != nil {
		return err
	}
	if left, err = limits.Balance(ctx, pool, llmTokens.Key("blue")); err != nil {
		return err
	}
	fmt.Println("blue: has its own budget, and is answered, for twice the estimated tokens")
	if remaining := left[0].Remaining; remaining >= 18_000 { // 20,000 - 3,000, and the refill meanwhile
		return fmt.Errorf("blue has %v tokens left, want about 17,000", remaining)
	}

	report, err := batch(ctx, pool, "red", "Sum up the year.", 34_996)
	if err != nil {
		return err
	}
	fmt.Printf("red: a report of at most 35000 tokens is scheduled, and runs in %v\n", report.Delay.Round(time.Minute))
	if report.Delay < 150*time.Second || report.Delay > 203*time.Second { // the debt is up to 20,200
		return fmt.Errorf("it runs in %v, want just below 3m22s", report.Delay)
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
