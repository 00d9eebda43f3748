package usage_test

import (
	"context"
	"log"
	"os"
	"os/signal"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	recorder := &usage.Recorder{DB: pool}
	limits := &ratelimit.Limiter{Observer: recorder.Observe}

	recording, end := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		if err := recorder.Run(recording); err != nil {
			log.Print(err)
		}
	})
	serve(ctx, pool, limits) // until ctx ends
	end()                    // after the last call, so that it is counted
	done.Wait()
}

// A limiter has one observer, which may call several.
func ExampleRecorder_Observe() {
	recorder := &usage.Recorder{}
	limits := &ratelimit.Limiter{
		Observer: func(ctx context.Context, d ratelimit.Decision) {
			recorder.Observe(ctx, d)
			slowCalls(ctx, d)
		},
	}
	_ = limits // the application's one limiter
}

func serve(context.Context, *pgxpool.Pool, *ratelimit.Limiter) {}

func slowCalls(context.Context, ratelimit.Decision) {}
