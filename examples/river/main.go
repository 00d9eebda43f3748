// River reserves the tokens of 200 calls of a language model. It enqueues each call as a job of River, in the same
// transaction, for the instant at which its tokens will be there. The jobs then run without asking again, and keep the
// limit.
//
//	go run ./examples/river
//
// In between, a connection and a process are killed between reserve and commit: neither a token nor a job is lost.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/examples/internal/timeline"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	minute = 4 * time.Second // shortened, so that the example ends in seconds: everything is 15 times as fast

	documents  = 20
	parts      = 10    // calls per document
	tokens     = 600   // per call
	perMinute  = 40000 // tokens
	atOnce     = 6000  // less than the provider grants at once: the difference is for jobs that start late
	maxWaiting = 3 * perMinute
)

var (
	limits    *ratelimit.Limiter // of Open
	llmTokens = ratelimit.TokenBucket("llmTokens", perMinute, minute, ratelimit.Capacity(atOnce), ratelimit.MaxReserved(maxWaiting))
)

// call is a job: it sends a part of a document to the language model. With the receipt, a call that costs less can be
// refunded (examples/settle). The two instants are for the checks at the end.
type call struct {
	Document, Part    int
	Receipt           ratelimit.Receipt
	ReservedAt, RunAt time.Time
}

func (call) Kind() string { return "call" }

// enqueue reserves the tokens for a document and enqueues its calls: all or nothing.
func enqueue(ctx context.Context, tx pgx.Tx, jobs *river.Client[pgx.Tx], document int) error {
	for part := range parts {
		reserved, err := limits.Reserve(ctx, tx, llmTokens.Global().Count(tokens))
		if err != nil {
			return err // the jobs that wait already take the tokens of three minutes
		}
		var options river.InsertOpts
		if reserved.Delay > 0 {
			// River starts a job when it is due by the database's now(), the same clock as RetryAt. Every 5 s, River looks
			// for jobs with a ScheduledAt that are due in the next 5 s. A job that is due sooner may be up to 5 s late. So
			// a job that may run at once gets no ScheduledAt.
			options.ScheduledAt = reserved.RetryAt
		}
		args := call{
			Document: document, Part: part,
			Receipt: reserved.Receipt(), ReservedAt: reserved.At, RunAt: reserved.RetryAt,
		}
		if _, err := jobs.InsertTx(ctx, tx, args, &options); err != nil {
			return err
		}
	}
	return nil
}

// worker runs the jobs. It does not know the limit.
type worker struct{ river.WorkerDefaults[call] }

func (worker) Work(ctx context.Context, _ *river.Job[call]) error {
	select { // an application calls the language model here
	case <-time.After(50 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func main() {
	if url := os.Getenv(crashing); url != "" {
		fmt.Fprintln(os.Stderr, "not killed:", crash(context.Background(), url))
		os.Exit(1)
	}
	demo.Main(story)
}

func start(ctx context.Context, pool *pgxpool.Pool) (err error) {
	limits, err = ratelimit.Open(ctx, pool, ratelimit.Options{Program: "river", Limits: []ratelimit.Limit{llmTokens}})
	return err
}

func story(ctx context.Context, pool *pgxpool.Pool) error {
	if err := start(ctx, pool); err != nil {
		return err
	}
	defer demo.Close(ctx, limits) // after the River client has stopped
	jobs, err := newRiver(ctx, pool)
	if err != nil {
		return err
	}
	// The transactions are SERIALIZABLE, and all want the same row. With Hot, they take turns.
	run := func(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
		return limits.InTx(ctx, pool, fn, ratelimit.Hot(llmTokens.Global()))
	}
	enqueueAll := func(from, to int) error {
		atOnce, ctx := errgroup.WithContext(ctx)
		for document := from; document < to; document++ {
			atOnce.Go(func() error {
				return run(ctx, func(ctx context.Context, tx pgx.Tx) error { return enqueue(ctx, tx, jobs, document) })
			})
		}
		return atOnce.Wait()
	}

	fmt.Printf("%d documents in %d calls of %d tokens each, %d tokens a minute, %d of them at once\n", documents, parts, tokens, perMinute, atOnce)
	if err := enqueueAll(0, documents/2); err != nil {
		return err
	}
	const half = documents / 2 * parts
	if err := agree(ctx, pool, "half of them enqueued, at the same time", half); err != nil {
		return err
	}

	err = run(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := enqueue(ctx, tx, jobs, documents/2); err != nil {
			return err
		}
		_, err := pool.Exec(ctx, "SELECT pg_terminate_backend($1, 10000)", tx.Conn().PgConn().PID())
		return err // no error here: the commit must fail
	})
	if err == nil {
		return errors.New("a transaction was committed on a connection that was killed before")
	}
	fmt.Fprintln(os.Stderr, "the commit on a killed connection:", err)
	if err := agree(ctx, pool, "connection killed between reserve and commit", half); err != nil {
		return err
	}

	if err := killedProcess(ctx, pool); err != nil {
		return err
	}
	if err := agree(ctx, pool, "process killed between reserve and commit", half); err != nil {
		return err
	}

	if err := enqueueAll(documents/2, documents); err != nil {
		return err
	}
	if err := agree(ctx, pool, "the other half enqueued", documents*parts); err != nil {
		return err
	}

	if err := work(ctx, jobs, documents*parts); err != nil {
		return err
	}
	return check(ctx, pool)
}

// newRiver makes River's tables, and a client that enqueues and, once started, runs jobs.
func newRiver(ctx context.Context, pool *pgxpool.Pool) (*river.Client[pgx.Tx], error) {
	driver := riverpgxv5.New(pool)
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	migrator, err := rivermigrate.New(driver, &rivermigrate.Config{Logger: logger})
	if err != nil {
		return nil, err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return nil, err
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, worker{})
	return river.NewClient(driver, &river.Config{
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 50}},
		Workers:           workers,
		FetchCooldown:     10 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond, // how late an available job may start
		Logger:            logger,
	})
}

// work runs River until a number of jobs are completed.
func work(ctx context.Context, jobs *river.Client[pgx.Tx], n int) error {
	completed, cancel := jobs.Subscribe(river.EventKindJobCompleted)
	defer cancel()
	if err := jobs.Start(ctx); err != nil {
		return err
	}
	for range n {
		select {
		case <-completed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return jobs.Stop(ctx)
}

// crashing is the environment variable of the process that is to be killed. It has the database's URL.
const crashing = "RIVER_EXAMPLE_CRASH"

// killedProcess runs this program as another process, which must be killed.
func killedProcess(ctx context.Context, pool *pgxpool.Pool) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.CommandContext(ctx, self)
	child.Env = append(os.Environ(), crashing+"="+pool.Config().ConnString())
	child.Stderr = os.Stderr
	err = child.Run()
	if killed := (*exec.ExitError)(nil); !errors.As(err, &killed) || killed.Exited() {
		return fmt.Errorf("the process was not killed: %w", err)
	}
	fmt.Fprintln(os.Stderr, "the killed process:", err)
	return nil
}

// crash reserves and enqueues, and kills its process before the commit.
func crash(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	if err := start(ctx, pool); err != nil {
		return err
	}
	jobs, err := river.NewClient(riverpgxv5.New(pool), &river.Config{})
	if err != nil {
		return err
	}
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := enqueue(ctx, tx, jobs, documents/2); err != nil {
			return err
		}
		self, err := os.FindProcess(os.Getpid())
		if err != nil {
			return err
		}
		if err := self.Kill(); err != nil { // SIGKILL: no deferred function runs, and no ROLLBACK is sent
			return err
		}
		select {}
	})
}

// agree compares the jobs with the limit's row: the row must have exactly what these reservations leave.
func agree(ctx context.Context, pool *pgxpool.Pool, what string, want int) error {
	reserved, err := events(ctx, pool, "(args->>'ReservedAt')::timestamptz")
	if err != nil {
		return err
	}
	var value float64 // at ts
	var ts time.Time
	err = pool.QueryRow(ctx, "SELECT value, ts FROM ratelimit.limits WHERE name = $1", llmTokens.Name()).Scan(&value, &ts)
	if err != nil {
		return err
	}
	left := timeline.Left(reserved, atOnce, perMinute, minute)
	fmt.Printf("%-45s %3d jobs, and the tokens of %3.0f are gone\n", what+":", len(reserved), float64(len(reserved))+(left-value)/tokens)
	if len(reserved) != want || !ts.Equal(reserved[want-1].At) || math.Abs(left-value) > 1e-6 {
		return fmt.Errorf("%d jobs, want %d; the row holds %v since %v, want %v since the last reservation", len(reserved), want, value, ts, left)
	}
	return nil
}

// events returns all jobs as events, in order, at the instant of an SQL expression.
func events(ctx context.Context, pool *pgxpool.Pool, at string) ([]timeline.Event, error) {
	return timeline.Read(ctx, pool, fmt.Sprintf("SELECT %s, %d::float8 FROM river_job", at, tokens))
}

// check compares the instants of all jobs with the limit.
func check(ctx context.Context, pool *pgxpool.Pool) error {
	reserved, err := events(ctx, pool, "(args->>'ReservedAt')::timestamptz")
	if err != nil {
		return err
	}
	due, err := events(ctx, pool, "(args->>'RunAt')::timestamptz")
	if err != nil {
		return err
	}
	started, err := events(ctx, pool, "attempted_at")
	if err != nil {
		return err
	}
	// From the last job, whose tokens have been refilled by then, back to the first refill.
	const refill = (documents*parts*tokens - atOnce) * minute / perMinute
	begin := due[len(due)-1].At.Add(-refill)
	label := func(quarter int) string { return fmt.Sprintf("%d:%02d", quarter/4, quarter%4*15) }
	fmt.Fprintf(os.Stderr, "Tokens of the calls that may run from then on (minutes):\n%sWhen they ran:\n%s",
		timeline.Chart(due, begin, minute/4, label), timeline.Chart(started, begin, minute/4, label))

	var completed, early int
	var late time.Duration
	err = pool.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE state = 'completed' AND attempt = 1),
		       count(*) FILTER (WHERE attempted_at < (args->>'RunAt')::timestamptz),
		       max(attempted_at - (args->>'RunAt')::timestamptz)
		  FROM river_job`).Scan(&completed, &early, &late)
	if err != nil {
		return err
	}
	fmt.Printf("\n%d calls ran once each, %d of them before its instant\n", completed, early)
	if completed != documents*parts || early != 0 {
		return fmt.Errorf("%d calls ran, %d of them early, want %d and none", completed, early, documents*parts)
	}

	// Over any span of time, not only over minutes by the clock, at most this much and span * rate / period. A job that
	// starts late may coincide with jobs that start in time: as many as are due while it is late.
	const microsecond = perMinute / (float64(minute) / 1000) // in tokens; instants are rounded to a microsecond
	for _, c := range []struct {
		what   string
		events []timeline.Event
		most   float64
		out    *os.File // text that varies goes to stderr
	}{
		{"calls when they may run", due, atOnce, os.Stdout},
		{fmt.Sprintf("calls when they ran, up to %v late", late), started, atOnce + late.Seconds()*perMinute/minute.Seconds(), os.Stderr},
		{"reservations", reserved, atOnce + maxWaiting, os.Stderr},
	} {
		burst := timeline.Burst(c.events, perMinute, minute)
		fmt.Fprintf(c.out, "%s: over no span of time more than the rate and %.0f tokens, of %.0f allowed\n", c.what, burst, c.most)
		if burst > c.most+microsecond {
			return fmt.Errorf("%s: the rate and %v tokens over some span, more than %v", c.what, burst, c.most)
		}
	}
	fmt.Println("calls when they ran: over no span of time more than that and the refill during the longest delay")
	return nil
}
