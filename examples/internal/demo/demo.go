// Package demo gives each example what an application already has: a migrated database, a pool of connections to it, and a
// context that ends with Ctrl-C.
package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
)

// Main runs an example and ends the process. If the example fails, it prints the error on stderr and exits with 1.
func Main(story func(ctx context.Context, pool *pgxpool.Pool) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	end(run(ctx, story))
}

// Serve is [Main] for an example that goes on for longer than twenty minutes, or until Ctrl-C.
func Serve(story func(ctx context.Context, pool *pgxpool.Pool) error) {
	end(run(context.Background(), story))
}

func end(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, story func(ctx context.Context, pool *pgxpool.Pool) error) (err error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	pool, closePool, err := Pool(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closePool()) }()
	return story(ctx, pool)
}

// Close closes a Limiter of ratelimit.Open or a Coalescer, with time left for what it writes although ctx may have ended.
func Close(ctx context.Context, limits interface {
	Close(ctx context.Context) error
}) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if err := limits.Close(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// Pool finds or starts a Postgres (see package internal/postgres), and makes a database there with the limiter's tables and
// functions. It names the server on stderr. closePool removes everything.
func Pool(ctx context.Context) (pool *pgxpool.Pool, closePool func() error, err error) {
	server, err := postgres.Start(ctx)
	if err != nil {
		return nil, nil, err
	}
	fmt.Fprintln(os.Stderr, "On", server)
	url, _, err := server.NewDatabase(ctx, "")
	if err == nil {
		err = migrated.Up(ctx, url)
	}
	if err == nil {
		pool, err = open(ctx, url)
	}
	if err != nil {
		return nil, nil, errors.Join(err, server.Close())
	}
	return pool, func() error { pool.Close(); return server.Close() }, nil
}

// open connects to the application's database.
func open(ctx context.Context, url string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 32 // so that 32 transactions can run at once
	return pgxpool.NewWithConfig(ctx, config)
}
