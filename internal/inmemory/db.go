package inmemory

import (
	"context"
	"errors"
	"maps"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/algebra"
)

// DB is a database that answers the statements of package ratelimit, and no others. Package ratelimittest documents it.
type DB struct {
	mu        sync.Mutex
	table     Table      // what is committed
	overrides []override // committed, in the order of their ids
	lastID    int64
	now       algebra.Micros
	sleepers  []sleeper
	alone     session       // of a statement that is a transaction by itself: its memory is used again
	numbers   algebra.Limit // of the first limit of the last statement
	open      int           // transactions that have not ended
	over      bool
}

var errOver = errors.New("ratelimittest: the test of this database has ended")

// New makes an empty database.
func New() *DB {
	return &DB{table: Table{}, now: algebra.At(start), alone: session{before: Table{}, table: Table{}}}
}

// End makes later calls errors. It returns how many transactions are open.
func (db *DB) End() (open int) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.over = true
	return db.open
}

// InMemory is for package ratelimit, which knows the type by it.
func (db *DB) InMemory() any { return db.Table() }

// Table is what is committed.
func (db *DB) Table() Table {
	db.mu.Lock()
	defer db.mu.Unlock()
	return maps.Clone(db.table)
}

// Numbers are those of the first limit of the last call, for replays.
func (db *DB) Numbers() algebra.Limit {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.numbers
}

// QueryRow runs a statement of package ratelimit. Any other statement is an error.
func (db *DB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	db.mu.Lock()
	defer db.mu.Unlock()
	s := &db.alone
	clear(s.before)
	clear(s.table)
	*s = session{db: db, before: s.before, table: s.table}
	answer := s.run(ctx, sql, args)
	if answer.err == nil {
		answer.err = s.commit()
	}
	return answer
}

// BeginTx begins a transaction. Of the options, only the isolation level can be set.
func (db *DB) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	level, known := levels[options.IsoLevel]
	if options.IsoLevel = ""; !known || options != (pgx.TxOptions{}) {
		return nil, errors.New("ratelimittest: an option of the transaction is not known")
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.over {
		return nil, errOver
	}
	return &tx{session: db.begin(level, true)}, nil
}
