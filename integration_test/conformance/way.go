package main

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// way is how a case is tried: on which handle, at which level.
type way struct {
	name       string
	level      pgx.TxIsoLevel // of the transaction; empty: none
	unprepared bool           // the query mode prepares no statement
	simple     bool           // the simple protocol
	sql        bool           // database/sql
	coalesced  bool

	// on runs do on the handle. In a transaction, an error of do rolls back, and without one it commits.
	on func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error
	// call is one Consume that commits, for callers that contend.
	call caller
}

func (w way) inTx() bool { return w.level != "" }

// caller makes one Consume and commits it.
type caller func(ctx context.Context, t *trial, requests ...ratelimit.Request) error

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

var sqlLevels = map[pgx.TxIsoLevel]sql.IsolationLevel{
	pgx.ReadCommitted: sql.LevelReadCommitted, pgx.RepeatableRead: sql.LevelRepeatableRead, pgx.Serializable: sql.LevelSerializable,
}

func onPool(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
	return do(ctx, s.pool)
}

func onSQL(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
	return do(ctx, ratelimit.SQL(s.sql))
}

// poolWays are pools, in each query mode, and database/sql.
func poolWays() []way {
	ways := []way{{name: "pool", on: onPool}}
	for _, mode := range modes[1:] {
		ways = append(ways, way{
			name: "pool in mode " + mode.String(), simple: mode == pgx.QueryExecModeSimpleProtocol,
			unprepared: mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol,
			on: func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
				pool, err := s.inMode(ctx, mode)
				if err != nil {
					return err
				}
				defer pool.Close()
				return do(ctx, pool)
			},
		})
	}
	return append(ways, way{name: "sql.DB", sql: true, on: onSQL})
}

// txWays are transactions that the caller begins, at each level.
func txWays() (ways []way) {
	for _, level := range levels {
		ways = append(ways, way{
			name: "pgx.Tx " + string(level), level: level,
			on: func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
				return pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return do(ctx, tx) })
			},
		}, way{
			name: "sql.Tx " + string(level), level: level, sql: true,
			on: func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
				tx, err := s.sql.BeginTx(ctx, &sql.TxOptions{Isolation: sqlLevels[level]})
				if err != nil {
					return err
				}
				if err := do(ctx, ratelimit.SQL(tx)); err != nil {
					_ = tx.Rollback()
					return err
				}
				return tx.Commit()
			},
		}, way{
			name: "InTx " + string(level), level: level,
			on: func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
				return new(ratelimit.Limiter).InTx(ctx, s.pool, func(ctx context.Context, tx pgx.Tx) error { return do(ctx, tx) }, ratelimit.Isolation(level))
			},
		}, way{
			name: "InSQLTx " + string(level), level: level, sql: true,
			on: func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
				return new(ratelimit.Limiter).InSQLTx(ctx, s.sql, func(ctx context.Context, tx *sql.Tx) error { return do(ctx, ratelimit.SQL(tx)) }, ratelimit.Isolation(level))
			},
		})
	}
	return ways
}

func everyWay() []way { return append(poolWays(), txWays()...) }

// calledWays are the ways in which callers contend. Each has a call.
func calledWays() []way {
	ways := []way{{name: "pool", on: onPool, call: func(ctx context.Context, t *trial, requests ...ratelimit.Request) error {
		_, err := t.limiter.Consume(ctx, t.s.pool, requests...)
		return err
	}}, {name: "pool, by the database's clock", on: onPool, call: func(ctx context.Context, t *trial, requests ...ratelimit.Request) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, t.s.pool, requests...)
		return err
	}}}
	for _, level := range levels {
		for _, hot := range []bool{false, true} {
			w := way{name: "InTx " + string(level), on: onPool, level: level}
			if hot {
				w.name += " with Hot"
			}
			w.call = func(ctx context.Context, t *trial, requests ...ratelimit.Request) error {
				options := []ratelimit.TxOption{ratelimit.Isolation(level)}
				if hot {
					options = append(options, ratelimit.Hot(requests...))
				}
				return t.limiter.InTx(ctx, t.s.pool, func(ctx context.Context, tx pgx.Tx) error {
					_, err := t.limiter.Consume(ctx, tx, requests...)
					return err
				}, options...)
			}
			ways = append(ways, w)
		}
	}
	return append(ways,
		way{name: "InSQLTx serializable", on: onPool, level: pgx.Serializable, sql: true, call: func(ctx context.Context, t *trial, requests ...ratelimit.Request) error {
			return t.limiter.InSQLTx(ctx, t.s.sql, func(ctx context.Context, tx *sql.Tx) error {
				_, err := t.limiter.Consume(ctx, ratelimit.SQL(tx), requests...)
				return err
			})
		}},
		way{name: "SendTx serializable", on: onPool, level: pgx.Serializable, call: func(ctx context.Context, t *trial, requests ...ratelimit.Request) error {
			var batch pgx.Batch
			if _, err := t.limiter.QueueConsume(ctx, &batch, requests...); err != nil {
				return err
			}
			return t.limiter.SendTx(ctx, t.s.pool, &batch)
		}},
		coalescerWays()[0],
	)
}

// coalescerWays are settings of a Coalescer.
func coalescerWays() []way {
	call := func(ctx context.Context, t *trial, requests ...ratelimit.Request) error {
		_, err := t.limiter.Consume(ctx, t.coalescer, requests...)
		return err
	}
	var ways []way
	for _, async := range []bool{false, true} {
		name := "Coalescer"
		if async {
			name += " with AsyncCommit"
		}
		ways = append(ways, way{name: name, coalesced: true, call: call, on: func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
			c := s.coalescer(s.pool, async)
			defer c.Close(ctx) //nolint:errcheck // nothing is ahead
			return do(ctx, c)
		}})
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		ways = append(ways, way{
			name: "Coalescer in mode " + mode.String(), coalesced: true, unprepared: true, simple: mode == pgx.QueryExecModeSimpleProtocol, call: call,
			on: func(ctx context.Context, s *suite, do func(ctx context.Context, db ratelimit.DB) error) error {
				pool, err := s.inMode(ctx, mode)
				if err != nil {
					return err
				}
				defer pool.Close()
				c := s.coalescer(pool, false)
				defer c.Close(ctx) //nolint:errcheck // nothing is ahead
				return do(ctx, c)
			},
		})
	}
	return ways
}

// only keeps the ways that a test is about.
func only(ways []way, keep func(w way) bool) (kept []way) {
	for _, w := range ways {
		if keep(w) {
			kept = append(kept, w)
		}
	}
	return kept
}

// errRollback makes a way roll back.
var errRollback = errors.New("conformance: roll back")
