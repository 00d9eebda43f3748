package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// job is a job that this worker has started.
type job struct {
	id      int64
	tenant  string
	token   string
	receipt ratelimit.Receipt
	taken   time.Time
	held    time.Time
	lease   time.Time
}

// Two indexes serve it: jobs_waiting has a tenant's oldest jobs, whatever the others have, and jobs_running those whose time is over. The
// planner cannot know a LIMIT that is a column, expects millions of rows, and would compile the query for 100 ms: so without JIT.
const (
	begin = `SELECT clock_timestamp() FROM set_config('jit', 'off', true)`

	putBack = `
		UPDATE jobs SET state = 'waiting', token = NULL
		 WHERE id IN (SELECT id FROM jobs WHERE state = 'running' AND lease <= now() FOR UPDATE SKIP LOCKED)`

	oldest = `
		SELECT j.id, j.tenant FROM tenants AS t CROSS JOIN LATERAL (
			SELECT id, tenant FROM jobs WHERE tenant = t.id AND state = 'waiting' AND due <= now()
			 ORDER BY due, id LIMIT t.weight FOR UPDATE SKIP LOCKED) AS j
		 ORDER BY j.tenant, j.id`
)

// fetch starts the oldest jobs of every tenant, as many as its weight, its rate and its slots allow, in one transaction.
func fetch(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter, worker int) (started []job, err error) {
	err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		started = nil
		var began time.Time
		if err := tx.QueryRow(ctx, begin).Scan(&began); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, putBack); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, oldest)
		if err != nil {
			return err
		}
		jobs, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (j job, err error) {
			err = row.Scan(&j.id, &j.tenant)
			return j, err
		})
		if err == nil {
			jobs, err = withSlots(ctx, tx, limits, jobs)
		}
		if err != nil {
			return err
		}
		if len(jobs) == 0 {
			return note(ctx, tx, began, nil, worker, 0, 0)
		}

		// A token for each job, in one statement; then a slot. If another worker was faster, the token goes back in the same transaction.
		requests := make([]ratelimit.Request, len(jobs))
		for i, j := range jobs {
			requests[i] = rates.Key(j.tenant)
		}
		tokens, err := limits.ConsumeEach(ctx, tx, requests...)
		if err != nil {
			return err
		}
		denied, refunded, full := len(jobs), 0, ""
		for i, token := range tokens.Granted() {
			denied--
			j := jobs[i]
			j.taken, j.receipt = token.At, token.Receipt()
			if j.tenant != full {
				held, err := limits.Hold(ctx, tx, fmt.Sprintf("%s/job/%d", j.tenant, j.id), lease, slots.Key(j.tenant))
				if err == nil && held.Token == "" {
					return fmt.Errorf("job %d waits, and its slot is somebody's", j.id)
				}
				if err == nil {
					j.token, j.held, j.lease = held.Token, held.At, held.Until
					started = append(started, j)
					continue
				}
				if !errors.Is(err, ratelimit.ErrDenied) {
					return err
				}
				full = j.tenant
			}
			if _, err := limits.Refund(ctx, tx, j.receipt); err != nil {
				return err
			}
			refunded++
		}
		return note(ctx, tx, began, started, worker, denied, refunded)
	}, ratelimit.Isolation(pgx.ReadCommitted))
	return started, err
}

// withSlots leaves out the jobs of tenants that have no slot for them: their tokens would only be refunded.
func withSlots(ctx context.Context, tx pgx.Tx, limits *ratelimit.Limiter, jobs []job) (some []job, err error) {
	if len(jobs) == 0 {
		return nil, nil
	}
	requests := make([]ratelimit.Request, len(jobs))
	for i, j := range jobs {
		requests[i] = slots.Key(j.tenant)
	}
	balances, err := limits.Balance(ctx, tx, requests...)
	if err != nil {
		return nil, err
	}
	asked := map[string]float64{}
	for i, j := range jobs {
		if asked[j.tenant]++; asked[j.tenant] <= balances[i].Remaining {
			some = append(some, j)
		}
	}
	return some, nil
}

// fetched counts jobs, each time that one was fetched.
var fetched atomic.Int64

// note writes what was started, and what the checks at the end want to know.
func note(ctx context.Context, tx pgx.Tx, began time.Time, started []job, worker, denied, refunded int) error {
	fetched.Add(int64(len(started) + denied + refunded))
	batch := &pgx.Batch{}
	for _, j := range started {
		batch.Queue("UPDATE jobs SET state = 'running', token = $2, lease = $3 WHERE id = $1", j.id, j.token, j.lease)
		batch.Queue("INSERT INTO starts (job, tenant, worker, began, taken, held) VALUES ($1, $2, $3, $4, $5, $6)", j.id, j.tenant, worker, began, j.taken, j.held)
	}
	if !*measured {
		batch.Queue("INSERT INTO fetches VALUES ($1, clock_timestamp(), $2, $3)", began, refunded, denied)
	}
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	if worker == dies {
		self, err := os.FindProcess(os.Getpid())
		if err == nil {
			err = self.Kill() // no deferred function runs, and no ROLLBACK is sent
		}
		return err
	}
	return nil
}

// finish marks a job as done, and frees its slot: both or neither. If its time was over, it is somebody else's by now.
func finish(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter, j job) error {
	err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, "UPDATE jobs SET state = 'done' WHERE id = $1 AND token = $2", j.id, j.token)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		settled, err := limits.Settle(ctx, tx, j.token, slots.Key(j.tenant).Count(1))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "UPDATE starts SET ended = $3 WHERE job = $1 AND held = $2", j.id, j.held, settled.At)
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted))
	if errors.Is(err, ratelimit.ErrHoldLost) { // rolled back: another worker starts it again
		return nil
	}
	return err
}

// work fetches and runs jobs until stop is closed.
func work(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter, worker int, stop <-chan struct{}, run func(job)) error {
	var running sync.WaitGroup
	defer running.Wait()
	var mu sync.Mutex
	var failed error
	for {
		started, err := fetch(ctx, pool, limits, worker)
		mu.Lock()
		err = errors.Join(err, failed)
		mu.Unlock()
		if err != nil {
			return err
		}
		for _, j := range started {
			running.Go(func() {
				run(j)
				if err := finish(ctx, pool, limits, j); err != nil {
					mu.Lock()
					failed = errors.Join(failed, err)
					mu.Unlock()
				}
			})
		}
		pause := time.Duration(0)
		if len(started) == 0 {
			pause = 10 * time.Millisecond
		}
		select {
		case <-stop:
			return nil
		case <-time.After(pause):
		}
	}
}

// asWorker is the environment variable of a worker's process. It has the database's URL.
const asWorker = "DISPATCH_EXAMPLE_WORKER"

// The numbers of workers that are killed. The others have the numbers of their processes.
const (
	dies  = -1 // before the commit of its first fetch
	hangs = -2 // at work
)

const asNumber = "DISPATCH_EXAMPLE_NUMBER"

// startProcess starts this program as a worker.
func startProcess(ctx context.Context, pool *pgxpool.Pool, number int) *exec.Cmd {
	worker, _ := process(ctx, pool, number)
	if err := worker.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return worker
}

// startStoppable starts a worker that ends its work when it is told to.
func startStoppable(ctx context.Context, pool *pgxpool.Pool) (worker *exec.Cmd, stop func() error) {
	worker, stdin := process(ctx, pool, 0)
	if err := worker.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return worker, stdin.Close
}

func process(ctx context.Context, pool *pgxpool.Pool, number int) (*exec.Cmd, io.Closer) {
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	worker := exec.CommandContext(ctx, self)
	worker.Env = append(os.Environ(), asWorker+"="+pool.Config().ConnString(), asNumber+"="+strconv.Itoa(number))
	worker.Stderr = os.Stderr
	stdin, err := worker.StdinPipe() // it is closed, too, if this process dies
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	return worker, stdin
}

// workAsProcess is a worker's process.
func workAsProcess(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "dispatch", Limits: []ratelimit.Limit{rates, slots}})
	if err != nil {
		return err
	}
	defer func() { _ = limits.Close(ctx) }()
	number, err := strconv.Atoi(os.Getenv(asNumber))
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	return work(ctx, pool, limits, number, stop, func(job) {
		if number == hangs {
			select {}
		}
		time.Sleep(20 * time.Millisecond) // an application works here
	})
}

func collect(rows pgx.Rows) ([]string, error) { return pgx.CollectRows(rows, pgx.RowTo[string]) }
