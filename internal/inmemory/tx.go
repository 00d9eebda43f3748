package inmemory

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/inschema"
)

var levels = map[pgx.TxIsoLevel]Isolation{
	"":                  ReadCommitted,
	pgx.ReadUncommitted: ReadCommitted,
	pgx.ReadCommitted:   ReadCommitted,
	pgx.RepeatableRead:  Higher,
	pgx.Serializable:    Higher,
}

// session is a transaction. It works on copies of the rows that it uses, and COMMIT fails if another transaction has changed
// one of them meanwhile. DB.mu guards it.
type session struct {
	db        *DB
	level     Isolation
	before    Table      // the rows that it uses, as they were committed when it first used them
	table     Table      // and as it sees them
	changes   []override // of overrides
	aborted   bool       // by an error of a statement
	ended     bool
	committed bool

	explicit bool // the caller has to end it
}

func (db *DB) begin(level Isolation, explicit bool) *session {
	if explicit {
		db.open++
	}
	return &session{db: db, level: level, before: Table{}, table: Table{}, explicit: explicit}
}

// usable is the error of a statement that cannot be sent, or does not run.
func (s *session) usable(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case s.db.over:
		return errOver
	case s.aborted:
		return &pgconn.PgError{
			Severity: "ERROR", Code: "25P02", Message: "current transaction is aborted, commands ignored until end of transaction block",
		}
	}
	return nil
}

// run runs a statement. An error of the statement aborts the transaction, as in Postgres.
func (s *session) run(ctx context.Context, sql string, args []any) row {
	if err := s.usable(ctx); err != nil {
		return row{err: err}
	}
	if strings.HasPrefix(inschema.Back(sql), "lock table ratelimit.turn_") { // by Hot: nothing ever waits here
		return row{}
	}
	err := s.ask(sql, args)
	s.aborted = err != nil
	return row{err}
}

// checkKeyless refuses the empty key, where it has no row and another key of the limit has one.
func (s *session) checkKeyless(id ID) error {
	seen := maps.Clone(s.db.table)
	maps.Copy(seen, s.table)
	if id.Key != "" || len(seen[id]) > 0 {
		return nil
	}
	for other, rows := range seen {
		if other.Name == id.Name && len(rows) > 0 {
			return &pgconn.PgError{Severity: "ERROR", Code: "22023", Message: fmt.Sprintf("rate limit '%s': it has keys: name one", id.Name)}
		}
	}
	return nil
}

// touch copies the rows of a limit and key into the transaction, unless they are there.
func (s *session) touch(id ID) {
	if _, used := s.before[id]; !used {
		rows := s.db.table[id]
		s.before[id], s.table[id] = rows, rows
	}
}

// end ends the transaction. Without a commit before, it is rolled back.
func (s *session) end() {
	if !s.ended && s.explicit {
		s.db.open--
	}
	s.ended = true
}

// commit commits and ends the transaction.
func (s *session) commit() error {
	s.end()
	if s.aborted {
		return pgx.ErrTxCommitRollback
	}
	maps.DeleteFunc(s.before, func(id ID, rows []Row) bool { return slices.Equal(s.table[id], rows) }) // only read
	for id, rows := range s.before {
		if !slices.Equal(s.db.table[id], rows) {
			return &pgconn.PgError{Severity: "ERROR", Code: "40001", Message: "could not serialize access due to concurrent update"}
		}
	}
	s.db.overrides = changed(s.db.overrides, s.changes)
	for id := range s.before {
		if rows := s.table[id]; len(rows) > 0 {
			s.db.table[id] = rows
		} else {
			delete(s.db.table, id)
		}
	}
	s.committed = true
	return nil
}

// tx is a transaction of the caller's, or a nested one, which is a savepoint.
type tx struct {
	*session
	nested        bool
	before, table Table // the session's at the savepoint
	changes       []override
	closed        bool
}

// InMemory is for package ratelimit, which knows the type by it.
func (t *tx) InMemory() any { return t.db.InMemory() }

// Now is the clock by which the calls of the transaction are decided.
func (t *tx) Now() time.Time { return t.db.Now() }

// Committed is for package ratelimit: whether it was committed.
func (t *tx) Committed() bool {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	return t.committed
}

// use calls f if the transaction has not ended.
func (t *tx) use(f func() error) error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if t.closed || t.ended {
		return pgx.ErrTxClosed
	}
	return f()
}

func (t *tx) Begin(ctx context.Context) (nested pgx.Tx, err error) {
	err = t.use(func() error {
		nested = &tx{session: t.session, nested: true, before: maps.Clone(t.session.before), table: maps.Clone(t.session.table), changes: t.session.changes}
		return t.usable(ctx)
	})
	if err != nil {
		return nil, err
	}
	return nested, nil
}

func (t *tx) Commit(ctx context.Context) error {
	return t.use(func() error {
		t.closed = true
		switch {
		case t.nested:
			return t.usable(ctx)
		case ctx.Err() != nil: // COMMIT is not sent
			t.end()
			return ctx.Err()
		}
		return t.commit()
	})
}

func (t *tx) Rollback(context.Context) error {
	return t.use(func() error {
		t.closed = true
		if !t.nested {
			t.end()
			return nil
		}
		for id, rows := range t.session.before {
			if _, used := t.before[id]; !used {
				t.table[id] = rows
			}
		}
		t.session.table, t.session.changes, t.aborted = t.table, t.changes, false
		return nil
	})
}

func (t *tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	var answer row
	if err := t.use(func() error { answer = t.run(ctx, sql, args); return nil }); err != nil {
		return row{err: err}
	}
	return answer
}

func (t *tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, t.use(func() error { return t.run(ctx, sql, args).err })
}

func (t *tx) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	return failed(t.refuse(sql)).Query()
}

func (t *tx) Prepare(_ context.Context, _, sql string) (*pgconn.StatementDescription, error) {
	return nil, t.refuse(sql)
}

func (t *tx) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, t.refuse("COPY")
}

// LargeObjects cannot return an error: all methods of the result do.
func (t *tx) LargeObjects() pgx.LargeObjects { return failed(t.refuse("lo_open")).Tx().LargeObjects() }

func (t *tx) Conn() *pgx.Conn { return nil }

// refuse aborts the transaction with the error of a statement that cannot be run here.
func (t *tx) refuse(sql string) error {
	return t.use(func() error { t.aborted = true; return refused(sql) })
}

func refused(sql string) error {
	return fmt.Errorf("ratelimittest: this is a database in memory for rate limits only, and cannot run %q", sql)
}

// failed is the results of a batch that could not be sent.
func failed(err error) pgx.BatchResults {
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(batch, err)
}
