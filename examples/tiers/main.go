// Tiers reads a limit for each plan from a file, plans.json. A mistake in the file is an error at the start of the program.
// Each user's row names the plan. A plan is a limit with a name of its own. The pro plan varies: a customer of it may have a quota
// of its own, which is in the customer's row. A plan with a rate of 0 grants nothing, and an unlimited plan grants everything:
// neither has a balance.
//
//	go run ./examples/tiers
package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

//go:embed plans.json
var shipped []byte // the first file, which the example edits

// app is the program with its plans. Its Limiter knows one definition of each name: other plans need another Limiter.
type app struct {
	plans  map[string]ratelimit.Limit
	limits *ratelimit.Limiter
}

// start starts the program with the plans of a file. The definitions that it had before are replaced.
func start(ctx context.Context, pool *pgxpool.Pool, path string) (*app, error) {
	a, err := load(path)
	if err != nil {
		return nil, err
	}
	a.limits, err = ratelimit.Open(ctx, pool, ratelimit.Options{Program: "tiers", Limits: slices.Collect(maps.Values(a.plans))})
	return a, err
}

// load reads the plans of a file. Its error says what is wrong with each of them.
func load(path string) (*app, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var configs map[string]ratelimit.Config
	if err := json.NewDecoder(file).Decode(&configs); err != nil { // a misspelt "capacity" must not count as unset
		return nil, err
	}
	a, errs := &app{plans: map[string]ratelimit.Limit{}}, []error(nil)
	for _, plan := range slices.Sorted(maps.Keys(configs)) {
		limit, err := configs[plan].Limit()
		if err != nil {
			errs = append(errs, fmt.Errorf("plan %s: %w", plan, err))
		}
		a.plans[plan] = limit
	}
	return a, errors.Join(errs...)
}

// request is the user's work. It is limited by the user's plan, in the transaction that looks the plan up. FOR NO KEY UPDATE makes a
// change of the row wait until this transaction has ended, so no request goes by an old quota. In READ COMMITTED, who has waited goes
// on; above, it would run again.
func (a *app) request(ctx context.Context, pool *pgxpool.Pool, user string) error {
	return a.limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		var plan string
		var quota *float64 // of its own, a day
		if err := tx.QueryRow(ctx, "SELECT plan, quota FROM users WHERE name = $1 FOR NO KEY UPDATE", user).Scan(&plan, &quota); err != nil {
			return err
		}
		limit := a.plans[plan] // a plan that is not in the file gives the zero Limit, which is an error
		if quota != nil {
			limit = limit.With(ratelimit.Rate(*quota), ratelimit.Capacity(*quota))
		}
		_, err := a.limits.Consume(ctx, tx, limit.Key(user))
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted))
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `CREATE TABLE users (name text, plan text, quota float8);
		INSERT INTO users VALUES ('ann', 'free', NULL), ('bob', 'pro', NULL), ('cid', 'enterprise', NULL), ('dan', 'ended', NULL), ('eve', 'pro', 48)`)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "tiers")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	edit := func(from, to string) (*app, error) {
		path := filepath.Join(dir, "plans.json")
		if err := os.WriteFile(path, bytes.Replace(shipped, []byte(from), []byte(to), 1), 0o600); err != nil {
			return nil, err
		}
		return start(ctx, pool, path)
	}

	for _, mistake := range [][2]string{{`"rate": 3`, `"rate": -3`}, {`"rate": 3, `, ``}, {`"capacity"`, `"capasity"`}, {`"1d"`, `"one day"`}} {
		_, err := edit(mistake[0], mistake[1])
		fmt.Printf("a file with %s in place of %s: %v\n", cmp.Or(mistake[1], "nothing"), mistake[0], err)
		if err == nil {
			return errors.New("nobody noticed")
		}
	}
	program, err := edit("", "")
	if err != nil {
		return err
	}
	defer func() { demo.Close(ctx, program.limits) }()
	if err := program.use(ctx, pool, "ann", 3, 8*time.Hour); err != nil {
		return err
	}
	if err := program.use(ctx, pool, "bob", 10, time.Hour); err != nil {
		return err
	}
	for range 1000 {
		if err := program.request(ctx, pool, "cid"); err != nil {
			return err
		}
	}
	fmt.Println("cid: 1000 requests granted, unlimited")
	if err := program.use(ctx, pool, "dan", 0, never); err != nil {
		return err
	}
	fmt.Println("eve has the pro plan, and a quota of her own")
	if err := program.use(ctx, pool, "eve", 48, 30*time.Minute); err != nil {
		return err
	}
	fmt.Println("the free plan is raised to 6 a day: the next version of the program goes by it, and what was used stays used")
	if err := program.limits.Close(ctx); err != nil {
		return err
	}
	if program, err = edit(`"rate": 3`, `"rate": 6`); err != nil {
		return err
	}
	if err := program.use(ctx, pool, "ann", 0, 4*time.Hour); err != nil {
		return err
	}
	fmt.Println("ann pays for the pro plan: what was used of the free one counts")
	if err := program.upgrade(ctx, pool, "ann", "pro"); err != nil {
		return err
	}
	return program.use(ctx, pool, "ann", 4, time.Hour) // 10 less the 6 that are used
}

// upgrade books another plan, and moves what is used, in one transaction.
func (a *app) upgrade(ctx context.Context, pool *pgxpool.Pool, user, plan string) error {
	return a.limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		var before string
		if err := tx.QueryRow(ctx, "SELECT plan FROM users WHERE name = $1 FOR UPDATE", user).Scan(&before); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "UPDATE users SET plan = $2 WHERE name = $1", user, plan); err != nil {
			return err
		}
		return a.limits.Move(ctx, tx, a.plans[before].Key(user), a.plans[plan].Key(user))
	}, ratelimit.Isolation(pgx.ReadCommitted))
}

const never = -1

// use makes requests until one is denied.
func (a *app) use(ctx context.Context, pool *pgxpool.Pool, user string, want int, wantWait time.Duration) error {
	for granted := 0; ; granted++ {
		err := a.request(ctx, pool, user)
		if denial, denied := errors.AsType[*ratelimit.DeniedError](err); denied {
			wait := denial.RetryAfter.Round(time.Minute)
			if denial.RetryAt.IsZero() { // over HTTP this is a 403; other denials are 429
				wait = never
				fmt.Printf("%s: %d requests granted, and none later: %v\n", user, granted, err)
			} else {
				fmt.Printf("%s: %d requests granted, the next one in %v\n", user, granted, wait)
			}
			if granted != want || wait != wantWait {
				return fmt.Errorf("want %d and %v", want, wantWait)
			}
			return nil
		} else if err != nil {
			return err
		}
	}
}
