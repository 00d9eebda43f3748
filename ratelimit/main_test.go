package ratelimit_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// The examples use these. An application has them too: one limiter for the process, and a pool.
var (
	ctx    = context.Background()
	limits ratelimit.Limiter // the zero value is ready
	pool   *pgxpool.Pool
)

// TestMain gives the examples the database in TXLIMIT_DATABASE_URL, whose schema has only the limiter's objects. This module has
// no database: integration_test/verbs runs the examples with its own one, and checks that they ran. To run them by hand:
//
//	go run ./internal/postgres/cmd/withpostgres -migrated -- go test -v -run Example ./ratelimit
//
// Without it, the examples are compiled and not run.
func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	flag.Parse()
	url := os.Getenv("TXLIMIT_DATABASE_URL")
	if url == "" {
		skip := flag.Lookup("test.skip").Value
		if skip.String() != "" {
			_ = skip.Set(skip.String() + "|^Example") // a string takes everything
		} else {
			_ = skip.Set("^Example")
		}
		return m.Run()
	}
	var err error
	if pool, err = pgxpool.New(ctx, url); err == nil {
		defer pool.Close()
		_, err = pool.Exec(ctx, `
			CREATE TABLE messages (sender text, body text);
			CREATE TABLE users (email text);
			CREATE TABLE customers (id text PRIMARY KEY, plan text NOT NULL, quota bigint, zone text NOT NULL, anchor timestamp NOT NULL);
			CREATE TABLE jobs (prompt text, run_at timestamptz);
			CREATE TABLE emails (id bigint GENERATED ALWAYS AS IDENTITY, address text)`)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "the examples have no database:", err)
		return 1
	}
	return m.Run()
}
