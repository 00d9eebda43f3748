package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/txlimit/txlimit/ratelimit"
)

// email is a job.
type email struct {
	Tenant string `json:"tenant"`
}

func (email) Kind() string { return "email" }

// worker runs the jobs.
type worker struct {
	river.WorkerDefaults[email]
	limits *ratelimit.Limiter
	pool   *pgxpool.Pool
	number int
	mode   mode
}

// Work holds a token and a slot of the tenant, and one of all slots, while it sends the email. A job that is denied is snoozed.
func (w *worker) Work(ctx context.Context, job *river.Job[email]) error {
	requests := []ratelimit.Request{slots.Key(job.Args.Tenant), inAll.Global()}
	if w.mode != reserved {
		requests = append(requests, rates.Key(job.Args.Tenant))
	}
	id := fmt.Sprintf("%s/email/%d", job.Args.Tenant, job.ID)
	err := w.limits.During(ctx, w.pool, id, ttl,
		func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
			if err := w.began(ctx, job, held); err != nil {
				return nil, err
			}
			if err := send(ctx, w.number); err != nil {
				return nil, err
			}
			// The job is completed and its hold is settled together, or neither is. After ErrHoldLost, River tries the job again.
			return nil, w.limits.InTx(ctx, w.pool, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job); err != nil {
					return err
				}
				if err := w.ended(ctx, tx, held); err != nil {
					return err
				}
				_, err := w.limits.Settle(ctx, tx, held.Token)
				return err
			}, ratelimit.Isolation(pgx.ReadCommitted))
		}, requests...)
	if denied, is := errors.AsType[*ratelimit.DeniedError](err); is {
		return snooze(denied, job.Metadata, w.mode != atOnce)
	}
	return err
}

// snooze is what Work returns for a denied job. River does not count it as an attempt.
//
// Every denied job is told the same instant: when there is one token. They would all wake then, and all but one be denied again. So they wake
// later, spread over a time that doubles with each snooze: then about as many jobs wake as there are tokens, however long the backlog is.
func snooze(denied *ratelimit.DeniedError, metadata []byte, spread bool) error {
	var of struct{ Snoozes int }
	if err := json.Unmarshal(metadata, &of); err != nil {
		return err
	}
	var wait time.Duration
	switch {
	case denied.Reason == ratelimit.ReasonSettled:
		return nil // it was done before
	case denied.RetryAt.IsZero():
		return river.JobCancel(denied) // the plan has none, or a block has no end
	case denied.Reason == ratelimit.ReasonQuota:
		for _, s := range denied.Requests {
			switch {
			case s.OK:
			case s.Limit.Name() == rates.Name():
				wait = max(wait, s.RetryAt.Sub(denied.At))
			default:
				wait = max(wait, takes) // a slot is free when a job ends. RetryAt is when a dead worker's would be.
			}
		}
	default:
		wait = denied.RetryAfter // it is held, or blocked
	}
	if spread {
		wait = min(wait, math.MaxInt64-most) + rand.N(min(min(wait, most)<<min(of.Snoozes, 20), most)+1) // a block may last for centuries
	}
	return river.JobSnooze(wait)
}

const (
	takes = 20 * time.Millisecond // a job
	most  = time.Minute           // by which a snooze is longer than it must be
)

// send is what an application does.
func send(ctx context.Context, number int) error {
	if number == hangs {
		select {} // until it is killed
	}
	select {
	case <-time.After(takes):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// began notes for the checks at the end that the job has begun.
func (w *worker) began(ctx context.Context, job *river.Job[email], held ratelimit.Held) error {
	_, err := w.pool.Exec(ctx, "INSERT INTO runs (job, tenant, worker, held) VALUES ($1, $2, $3, $4)", job.ID, job.Args.Tenant, w.number, held.At)
	return err
}

// ended notes that the job has ended. One worker is killed then, before its commit.
func (w *worker) ended(ctx context.Context, tx pgx.Tx, held ratelimit.Held) error {
	_, err := tx.Exec(ctx, "UPDATE runs SET ended = clock_timestamp() WHERE held = $1", held.At)
	if err == nil && w.number == dies {
		var self *os.Process
		if self, err = os.FindProcess(os.Getpid()); err == nil {
			err = self.Kill() // no deferred function runs, and no ROLLBACK is sent
		}
	}
	return err
}

// newRiver makes a client that runs the jobs of a queue.
func newRiver(pool *pgxpool.Pool, queue string, atOnce int, w *worker) (*river.Client[pgx.Tx], error) {
	workers := river.NewWorkers()
	river.AddWorker(workers, w)
	return river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:            map[string]river.QueueConfig{queue: {MaxWorkers: atOnce}},
		Workers:           workers,
		FetchCooldown:     10 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond, // a snoozed job is found by polling: how late it may be
		JobTimeout:        timeout,
		// A job of a dead worker is found again by this alone, an hour later if it is not set. Each such end counts as an attempt.
		RescueStuckJobsAfter: rescue,
		Logger:               slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

// NextRetry tries the job of a dead worker again at once. River's own policy waits for a second, and longer each time.
func (*worker) NextRetry(*river.Job[email]) time.Time { return time.Now() }

const (
	asWorker = "RIVER_DISPATCH_WORKER" // the environment variable of a worker's process: the database's URL
	asNumber = "RIVER_DISPATCH_NUMBER" // and its number
)

// The numbers of workers that are killed.
const (
	dies  = -1 // at the end of its first job, before the commit
	hangs = -2 // at work
)

// process starts this program as a worker, which ends its work when it is told to.
func process(ctx context.Context, pool *pgxpool.Pool, number int) (worker *exec.Cmd, stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	worker = exec.CommandContext(ctx, self)
	worker.Env = append(os.Environ(), asWorker+"="+pool.Config().ConnString(), asNumber+"="+strconv.Itoa(number))
	worker.Stderr = os.Stderr
	stdin, err := worker.StdinPipe() // it is closed, too, if this process dies
	if err != nil {
		return nil, nil, err
	}
	return worker, stdin.Close, worker.Start()
}

// workAsProcess is a worker's process.
func workAsProcess(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	limits, err := open(ctx, pool)
	if err != nil {
		return err
	}
	defer func() { _ = limits.Close(ctx) }()
	number, err := strconv.Atoi(os.Getenv(asNumber))
	if err != nil {
		return err
	}
	atOnce := 20
	if number == dies || number == hangs {
		atOnce = 1
	}
	jobs, err := newRiver(pool, river.QueueDefault, atOnce, &worker{limits: limits, pool: pool, number: number})
	if err == nil {
		err = jobs.Start(ctx)
	}
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	return jobs.Stop(ctx) // the jobs that run are finished
}
