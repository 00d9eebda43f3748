// Concurrency lets at most 3 exports of each team run at once, in several processes, some of which are killed. Jobs are delivered at
// least once, so the same export may be started twice at the same time. The example then checks that no team ever had more than 3,
// that each export was finished once, and that every slot came back.
//
//	go run ./examples/concurrency
package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	atOnce    = 3 // exports of a team
	teams     = 5
	each      = 8 // exports
	processes = 4
	workers   = 5 // of a process
	kills     = 6
)

// exports are slots: a work holds one while it runs. If its process dies, the slot comes back after ttl.
var exports = ratelimit.Slots("exports", atOnce)

const ttl = 10 * time.Second // short, since processes are killed all the time here; a minute is a good one

// open is how every process starts.
func open(ctx context.Context, pool *pgxpool.Pool) (*ratelimit.Limiter, error) {
	return ratelimit.Open(ctx, pool, ratelimit.Options{Program: "concurrency", Limits: []ratelimit.Limit{exports}, SweepEvery: time.Minute})
}

// export does one delivery of a job.
func export(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool, job int, team string) error {
	return limits.During(ctx, pool, fmt.Sprintf("%s/export/%d", team, job), ttl, func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
		var run int
		err := pool.QueryRow(ctx, "INSERT INTO runs (job, team, pid, began) VALUES ($1, $2, $3, clock_timestamp()) RETURNING id", job, team, os.Getpid()).Scan(&run)
		if err != nil {
			return nil, err
		}
		select {
		case <-time.After(100*time.Millisecond + rand.N(200*time.Millisecond)): // the work
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		// The result and the end of the hold are committed together, or neither is.
		return nil, limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "UPDATE jobs SET finished = finished + 1 WHERE id = $1", job); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, "UPDATE runs SET ended = clock_timestamp() WHERE id = $1", run); err != nil {
				return err
			}
			_, err := limits.Settle(ctx, tx, held.Token)
			return err
		})
	}, exports.Key(team))
}

// worker takes any unfinished job, also one that another worker has: a queue that delivers at least once.
func worker(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool) error {
	for {
		var job int
		var team string
		err := pool.QueryRow(ctx, "SELECT id, team FROM jobs WHERE finished = 0 ORDER BY random() LIMIT 1").Scan(&job, &team)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err == nil {
			err = export(ctx, limits, pool, job, team)
		}
		if errors.Is(err, ratelimit.ErrDenied) {
			// The team has 3 (ReasonQuota), another delivery of the job runs (ReasonHeld), or it is done (ReasonSettled): take another job.
			time.Sleep(50 * time.Millisecond)
			continue
		}
		if err != nil {
			return err
		}
	}
}

// working is the environment variable of a worker's process. It has the database's URL.
const working = "CONCURRENCY_EXAMPLE_WORKER"

func main() {
	if url := os.Getenv(working); url != "" {
		if err := work(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	demo.Main(story)
}

func work(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	limits, err := open(ctx, pool)
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits)
	group, ctx := errgroup.WithContext(ctx)
	for range workers {
		group.Go(func() error { return worker(ctx, limits, pool) })
	}
	return group.Wait()
}

func story(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `
		CREATE TABLE jobs (id int PRIMARY KEY, team text NOT NULL, finished int NOT NULL DEFAULT 0);
		CREATE TABLE runs (id serial PRIMARY KEY, job int NOT NULL, team text NOT NULL, pid int NOT NULL, began timestamptz NOT NULL, ended timestamptz);
		INSERT INTO jobs SELECT i, 'team ' || i % `+fmt.Sprint(teams)+` + 1 FROM generate_series(1, `+fmt.Sprint(teams*each)+`) AS i`)
	if err != nil {
		return err
	}
	limits, err := open(ctx, pool)
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits)
	if err := runUntilDone(ctx, pool); err != nil {
		return err
	}
	return check(ctx, limits, pool)
}

// runUntilDone starts the processes, kills some of them, and starts others in their place.
func runUntilDone(ctx context.Context, pool *pgxpool.Pool) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	victims := make(chan struct{}, kills)
	go func() {
		for range kills {
			time.Sleep(200 * time.Millisecond)
			victims <- struct{}{}
		}
	}()
	group, ctx := errgroup.WithContext(ctx)
	for range processes {
		group.Go(func() error {
			for {
				child := exec.CommandContext(ctx, self)
				child.Env = append(os.Environ(), working+"="+pool.Config().ConnString())
				child.Stderr = os.Stderr
				if err := child.Start(); err != nil {
					return err
				}
				ended := make(chan error, 1)
				go func() { ended <- child.Wait() }()
				select {
				case err := <-ended:
					return err
				case <-victims:
				}
				// A victim runs until it has begun some export, and is killed then. No function of it runs afterwards.
				for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
					var runs int
					if err := pool.QueryRow(ctx, "SELECT count(*) FROM runs WHERE pid = $1 AND ended IS NULL", child.Process.Pid).Scan(&runs); err != nil {
						return err
					}
					if runs > 0 {
						break
					}
				}
				if err := errors.Join(child.Process.Kill(), exited(<-ended)); err != nil {
					return err
				}
				tag, err := pool.Exec(ctx, "UPDATE runs SET ended = clock_timestamp() WHERE pid = $1 AND ended IS NULL", child.Process.Pid)
				if err != nil {
					return err
				}
				fmt.Fprintf(os.Stderr, "process %d was killed with %d exports running\n", child.Process.Pid, tag.RowsAffected())
			}
		})
	}
	return group.Wait()
}

// exited is nil if a process ended, in whatever way.
func exited(err error) error {
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil
	}
	return err
}

func check(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool) error {
	var finished, once, runs int
	if err := pool.QueryRow(ctx, "SELECT count(*) FILTER (WHERE finished > 0), count(*) FILTER (WHERE finished = 1) FROM jobs").Scan(&finished, &once); err != nil {
		return err
	}
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM runs").Scan(&runs); err != nil {
		return err
	}
	fmt.Printf("%d exports of %d teams, in %d processes of which some were killed: %d finished, %d of them once\n", teams*each, teams, processes, finished, once)
	fmt.Fprintf(os.Stderr, "they were begun %d times\n", runs)
	if once != teams*each {
		return errors.New("an export was not finished once")
	}

	// Runs overlap most when one begins: then count those that run.
	var most int
	err := pool.QueryRow(ctx, `
		SELECT max((SELECT count(*) FROM runs AS r WHERE r.team = first.team AND r.began <= first.began AND r.ended > first.began)) FROM runs AS first`).Scan(&most)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "at most %d of a team ran at once\n", most)
	if most > atOnce {
		return fmt.Errorf("%d exports of a team ran at once", most)
	}
	fmt.Printf("no team ever had more than %d at once\n", atOnce)

	for team := range teams {
		for free := 0.0; free != atOnce; time.Sleep(50 * time.Millisecond) { // those of killed processes come back after ttl
			balances, err := limits.Balance(ctx, pool, exports.Key(fmt.Sprint("team ", team+1)))
			if err != nil {
				return err
			}
			free = balances[0].Remaining
		}
	}
	fmt.Printf("every slot has come back\n")
	return nil
}
