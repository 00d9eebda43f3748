// Llm-budget lets a team spend 100,000 tokens of a language model in a month. How many a call uses is known only afterwards. So each call
// holds an estimate, and settles what it used: the rest comes back. It also comes back if the client hangs up, and if the worker dies.
//
//	go run ./examples/llm-budget
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	budgetTokens = 100_000
	estimate     = 3_000            // max_tokens of a call, and its prompt
	ttl          = 10 * time.Second // short, since a worker is killed here; a minute is a good one
)

var budget = ratelimit.CalendarWindow("llmBudget", budgetTokens, ratelimit.Month)

func open(ctx context.Context, pool *pgxpool.Pool) (*ratelimit.Limiter, error) {
	return ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "llm-budget", Limits: []ratelimit.Limit{budget},
		SweepEvery: time.Second, // it also gives back what expired holds hold; the default is 10 minutes
	})
}

// stream is a model's answer, which uses some tokens. The client may hang up after some of them: 0 means that it does not.
func stream(ctx context.Context, uses, hangsUpAfter int) (used int, err error) {
	if hangsUpAfter > 0 {
		return hangsUpAfter, errors.New("the client hung up")
	}
	return uses, ctx.Err()
}

// team is the only one here: each has a budget of its own.
const team = "acme"

// ask makes a call. Whatever happens in it, what it has used is charged, and the rest of the estimate comes back.
func ask(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool, id string, uses, hangsUpAfter int) error {
	return limits.During(ctx, pool, team+"/"+id, ttl, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
		used, err := stream(ctx, uses, hangsUpAfter)
		return []ratelimit.Request{budget.Key(team).Count(float64(used))}, err
	}, budget.Key(team).Count(estimate))
}

// dying is the environment variable of the worker that is killed in the middle of a call. It has the database's URL.
const dying = "LLM_BUDGET_EXAMPLE_DIES"

func main() {
	if url := os.Getenv(dying); url != "" {
		if err := die(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1)
	}
	demo.Main(story)
}

// die begins a call, and kills its process: no deferred function runs.
func die(url string) error {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	limits, err := open(ctx, pool)
	if err != nil {
		return err
	}
	return limits.During(ctx, pool, team+"/call of the dead", ttl, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) {
		self, err := os.FindProcess(os.Getpid())
		if err != nil {
			return nil, err
		}
		if err := self.Kill(); err != nil {
			return nil, err
		}
		select {}
	}, budget.Key(team).Count(estimate))
}

func story(ctx context.Context, pool *pgxpool.Pool) error {
	limits, err := open(ctx, pool)
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits)
	used := 0.0
	// left prints what is left, and wants it to be the budget less what was used.
	left := func(what string) error {
		balances, err := limits.Balance(ctx, pool, budget.Key(team))
		if err != nil {
			return err
		}
		fmt.Printf("%-62s %6.0f left\n", what, balances[0].Remaining)
		if balances[0].Remaining != budgetTokens-used {
			return fmt.Errorf("%v were used", used)
		}
		return nil
	}

	if err := ask(ctx, limits, pool, "call 1", 1_200, 0); err != nil {
		return err
	}
	used += 1_200
	if err := left("a call of 1,200 tokens, with 3,000 held:"); err != nil {
		return err
	}
	if err := ask(ctx, limits, pool, "call 2", 2_000, 300); err == nil {
		return errors.New("nobody hung up")
	}
	used += 300
	if err := left("the client hung up after 300:"); err != nil {
		return err
	}
	if err := ask(ctx, limits, pool, "call 3", 3_500, 0); err != nil {
		return err
	}
	used += 3_500
	if err := left("a call of 3,500, more than was held:"); err != nil {
		return err
	}

	// A worker dies.
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.CommandContext(ctx, self)
	child.Env = append(os.Environ(), dying+"="+pool.Config().ConnString())
	child.Stderr = os.Stderr
	if killed := (*exec.ExitError)(nil); !errors.As(child.Run(), &killed) || killed.Exited() {
		return errors.New("the worker was not killed")
	}
	used += estimate
	if err := left("a worker was killed during a call:"); err != nil {
		return err
	}
	used -= estimate
	for deadline := time.Now().Add(10 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		balances, err := limits.Balance(ctx, pool, budget.Key(team))
		if err != nil {
			return err
		}
		if balances[0].Remaining == budgetTokens-used || time.Now().After(deadline) {
			break
		}
	}
	if err := left("once its time was over:"); err != nil {
		return err
	}

	// Many at once. All estimates together are more than the budget, but what comes back is there for the next calls.
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(20)
	for i := range 80 {
		uses := 137 * i % 2000
		used += float64(uses)
		group.Go(func() error {
			for {
				err := ask(groupCtx, limits, pool, fmt.Sprint("one of many ", i), uses, 0)
				if !errors.Is(err, ratelimit.ErrDenied) {
					return err
				}
				select {
				case <-time.After(50 * time.Millisecond):
				case <-groupCtx.Done():
					return groupCtx.Err()
				}
			}
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := left("80 calls, 20 at a time:"); err != nil {
		return err
	}
	var held int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM ratelimit.holds WHERE state = 'held'").Scan(&held); err != nil {
		return err
	}
	fmt.Printf("tokens were used: %.0f; calls that still hold some: %d\n", used, held)
	if held != 0 {
		return errors.New("something is held")
	}
	return nil
}
