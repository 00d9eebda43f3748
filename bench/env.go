package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // for goose

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
)

// env is the environment of a figure. The first figure that needs a server starts it, and the later figures share it.
type env struct {
	out      io.Writer
	postgres *postgres.Server
	redis    *redisServer
	quick    bool           // a figure runs only for a moment, on small tables: it shows that it works, and measures nothing
	undos    []func() error // close what the current figure has opened
}

// moment is how long something runs.
func (e *env) moment(d time.Duration) time.Duration {
	if e.quick {
		return min(d, 50*time.Millisecond)
	}
	return d
}

// few is how many rows, tokens or rounds there are.
func (e *env) few(n int) int {
	if e.quick {
		return min(n, 1000)
	}
	return n
}

// compare is compare, for a moment if that is enough.
func (e *env) compare(ctx context.Context, pairs int, slice time.Duration, a, b *side, beside ...*side) (*comparison, error) {
	if e.quick {
		pairs = 1
	}
	return compare(ctx, e.out, pairs, e.moment(slice), a, b, beside...)
}

// undo closes and drops everything that a figure has opened. A checkpoint then lets the next figure begin with an empty write-ahead log.
func (e *env) undo(ctx context.Context) error {
	err := e.undoTo(0)
	if e.postgres != nil && ctx.Err() == nil {
		err = errors.Join(err, e.checkpoint(ctx))
	}
	return err
}

// undoTo closes and drops all but the first `first` things that were opened.
func (e *env) undoTo(first int) error {
	var errs []error
	for len(e.undos) > first {
		last := len(e.undos) - 1
		errs = append(errs, e.undos[last]())
		e.undos = e.undos[:last]
	}
	return errors.Join(errs...)
}

func (e *env) close() error {
	err := e.undo(context.Background())
	if e.redis != nil {
		err = errors.Join(err, e.redis.close())
	}
	if e.postgres != nil {
		err = errors.Join(err, e.postgres.Close())
	}
	return err
}

// newDatabase makes a database with the tables and functions of this library and of the other contenders, and returns its URL. Each
// side of a comparison has its own.
func (e *env) newDatabase(ctx context.Context) (string, error) {
	if e.postgres == nil {
		server, err := postgres.Start(ctx)
		if err != nil {
			return "", err
		}
		e.postgres = server
		fmt.Fprintln(e.out, "on", server)
	}
	template, err := migrated.Template(ctx, e.postgres)
	if err != nil {
		return "", err
	}
	url, drop, err := e.postgres.NewDatabase(ctx, template)
	if err != nil {
		return "", err
	}
	e.undos = append(e.undos, drop)
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, othersTables)
	return url, err
}

// newPool makes a database and a pool with conns connections to it.
func (e *env) newPool(ctx context.Context, conns int, tracer pgx.QueryTracer) (*pgxpool.Pool, error) {
	url, err := e.newDatabase(ctx)
	if err != nil {
		return nil, err
	}
	return e.connect(ctx, url, conns, tracer)
}

func (e *env) connect(ctx context.Context, url string, conns int, tracer pgx.QueryTracer) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(conns)
	config.ConnConfig.Tracer = tracer
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	e.undos = append(e.undos, func() error { pool.Close(); return nil })
	return pool, nil
}

// checkpoint does nothing if the role is not allowed to.
func (e *env) checkpoint(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, e.postgres.URL())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, "CHECKPOINT")
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "42501" {
		return nil
	}
	return err
}

// recycle leaves the server with segments of the write-ahead log to use again, like a server that has been in use. Without them,
// Postgres writes and syncs 16 MB of zeros for each new segment, and every commit waits for that.
func (e *env) recycle(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, fmt.Sprintf(`CREATE TABLE used AS SELECT repeat('x', 100) FROM generate_series(1, %d); DROP TABLE used`, e.few(800_000))); err != nil {
		return err
	}
	return errors.Join(e.checkpoint(ctx), e.checkpoint(ctx)) // the second frees the segments with which the first began
}
