// Tiers reads a limit for each plan from a file, plans.json. A mistake in the file is an error at the start of the program.
// Each user's row names the plan. A change of plan takes effect at the next call. All plans share one name, so a user has
// one balance, and a change of plan creates no tokens. A plan with a rate of 0 grants nothing, and an unlimited plan grants
// everything: neither has a balance.
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

var limits ratelimit.Limiter

//go:embed plans.json
var shipped []byte // the first file, which the example edits

type plans map[string]ratelimit.Limit

// load reads the plans of a file. Its error says what is wrong with each of them.
func load(path string) (plans, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var configs map[string]ratelimit.Config
	if err := json.NewDecoder(file).Decode(&configs); err != nil { // a misspelt "capacity" must not count as unset
		return nil, err
	}
	plans, errs := plans{}, []error(nil)
	for _, plan := range slices.Sorted(maps.Keys(configs)) {
		limit, err := ratelimit.New(configs[plan])
		if err != nil {
			errs = append(errs, fmt.Errorf("plan %s: %w", plan, err))
		}
		plans[plan] = limit
	}
	return plans, errors.Join(errs...)
}

// request is the user's work. It is limited by the user's plan, in the transaction that looks the plan up.
func (p plans) request(ctx context.Context, pool *pgxpool.Pool, user string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var plan string
		if err := tx.QueryRow(ctx, "SELECT plan FROM users WHERE name = $1", user).Scan(&plan); err != nil {
			return err
		}
		_, err := limits.Consume(ctx, tx, p[plan].Key(user)) // a plan that is not in the file gives the zero Limit, which is an error
		return err
	})
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, "CREATE TABLE users (name text, plan text); INSERT INTO users VALUES ('ann', 'free'), ('bob', 'pro'), ('cid', 'enterprise'), ('dan', 'ended')")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "tiers")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	edit := func(from, to string) (plans, error) {
		path := filepath.Join(dir, "plans.json")
		if err := os.WriteFile(path, bytes.Replace(shipped, []byte(from), []byte(to), 1), 0o600); err != nil {
			return nil, err
		}
		return load(path)
	}

	for _, mistake := range [][2]string{{`"rate": 3`, `"rate": -3`}, {`"rate": 3, `, ``}, {`"capacity"`, `"capasity"`}, {`"1d"`, `"1 day"`}} {
		_, err := edit(mistake[0], mistake[1])
		fmt.Printf("a file with %s in place of %s: %v\n", cmp.Or(mistake[1], "nothing"), mistake[0], err)
		if err == nil {
			return errors.New("nobody noticed")
		}
	}
	plans, err := edit("", "")
	if err != nil {
		return err
	}
	if err := plans.use(ctx, pool, "ann", 3, 8*time.Hour); err != nil {
		return err
	}
	if err := plans.use(ctx, pool, "bob", 10, time.Hour); err != nil {
		return err
	}
	for range 1000 {
		if err := plans.request(ctx, pool, "cid"); err != nil {
			return err
		}
	}
	fmt.Println("cid: 1000 requests granted, unlimited")
	if err := plans.use(ctx, pool, "dan", 0, never); err != nil {
		return err
	}
	fmt.Println("the free plan is raised to 6 a day: the next call goes by it, and what was used stays used")
	if plans, err = edit(`"rate": 3`, `"rate": 6`); err != nil {
		return err
	}
	if err := plans.use(ctx, pool, "ann", 0, 4*time.Hour); err != nil {
		return err
	}
	fmt.Println("ann pays for the pro plan, and gets the difference at once")
	if err := upgrade(ctx, pool, "ann", plans["free"], plans["pro"]); err != nil {
		return err
	}
	return plans.use(ctx, pool, "ann", 4, time.Hour) // 10 less the 6 that are used
}

// upgrade changes a user's plan. Used tokens stay used, and the user gets the difference of the capacities at once. Without
// this, the balance would stay as it is until the next refill.
func upgrade(ctx context.Context, pool *pgxpool.Pool, user string, old, upgraded ratelimit.Limit) error {
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "UPDATE users SET plan = 'pro' WHERE name = $1", user); err != nil {
			return err
		}
		balances, err := limits.Balance(ctx, tx, old.Key(user))
		if err != nil {
			return err
		}
		if err := limits.Reset(ctx, tx, old.Key(user)); err != nil {
			return err
		}
		_, err = limits.Charge(ctx, tx, upgraded.Key(user).Count(balances[0].Used))
		return err
	})
}

const never = -1

// use makes requests until one is denied.
func (p plans) use(ctx context.Context, pool *pgxpool.Pool, user string, want int, wantWait time.Duration) error {
	for granted := 0; ; granted++ {
		err := p.request(ctx, pool, user)
		if denial, denied := errors.AsType[*ratelimit.DeniedError](err); denied {
			wait := denial.RetryAfter.Round(time.Hour)
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
