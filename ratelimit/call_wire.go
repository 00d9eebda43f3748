package ratelimit

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/decide"
	"github.com/txlimit/txlimit/internal/inschema"
)

// statement is the SQL of a call: one of the queries in queries/ratelimit.sql, its arguments in their order there, and the
// function that reads the answer. It is sent on a DB (wire.ask), or queued on a batch of the caller's (QueueConsume).
type statement struct {
	sql     string
	args    []any // the first place is free: see replyTo
	asks    *call // for a database in memory; nil: none is asked
	demands int   // number of demands
	read    func(reply pgx.Row, demands int) (*answer, error)
	update  updater // for which a plain UPDATE may be sent first; or nil
}

// arguments leaves the first place free, for replyTo.
func arguments(args ...any) []any { return append(make([]any, 1, 1+len(args)), args...) }

// wire sends statements to a DB, in the form that its connection needs.
type wire struct {
	db      DB
	schema  string // of the limits; "": ratelimit
	commits bool   // a statement writes, and is a transaction of its own unless its connection is in one
}

// ask runs a statement and reads its answer.
func (w wire) ask(ctx context.Context, s statement) (*answer, error) {
	r := replyTo(s.args, w.commits, s.asks)
	r.update, r.schema = s.update, w.schema
	a, err := w.sendFor(ctx, r, s.sql, s.args).read(s)
	if r.updates != nil && r.updates.missed(err) {
		return w.ask(ctx, s.update.instead(s))
	}
	if err == nil {
		a.held.sentAt = r.sentAt
	}
	return a, r.unknownIfSent(err)
}

// sendFor sends a query for a reply, which is its first argument.
func (w wire) sendFor(ctx context.Context, r *reply, sql string, args []any) *reply {
	sql, err := inschema.SQL(sql, w.schema)
	if err != nil {
		r.row = failedResults(unsentError{fmt.Errorf("%w: %w", ErrInvalid, err)}).QueryRow()
		return r
	}
	r.function = sql
	if late, ok := w.db.(*lateTx); ok {
		r.row = late.queryOwn(ctx, sql, args)
	} else {
		r.row = w.db.QueryRow(ctx, sql, args...)
	}
	return r
}

// queries are sqlc's, of which one is run: SQL that is not the statement of a call.
func (w wire) queries() *dbsqlc.Queries { return dbsqlc.New(sqlcWire{w, &reply{commits: w.commits}}) }

// query runs one of sqlc's queries. A database in memory gets its parameters, and answers with its row.
func query[P, R any](ctx context.Context, w wire, run func(*dbsqlc.Queries, context.Context, P) (R, error), params P) (R, error) {
	r := &reply{commits: w.commits, asks: params}
	row, err := run(dbsqlc.New(sqlcWire{w, r}), ctx, params)
	if inMemory, ok := r.answer.(R); ok {
		row = inMemory
	}
	return row, err
}

// sqlcWire sends a query of sqlc's.
type sqlcWire struct {
	w wire
	r *reply
}

func (s sqlcWire) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	args = arguments(args...)
	args[0] = s.r
	return s.w.sendFor(ctx, s.r, sql, args)
}

// Exec and Query are only there because sqlc's interface has them: every query of this package returns one row.
func (sqlcWire) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errors.ErrUnsupported
}

// Query is like Exec.
func (sqlcWire) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errors.ErrUnsupported
}

// reply is the row of an answer. It is also the first argument, where pgx looks for a pgx.QueryRewriter: that is the only
// way to learn the connection, and so the query mode, in which pgx sends the query. A database in memory asks it there.
type reply struct {
	row      pgx.Row
	portable bool
	commits  bool
	sent     bool      // there was a connection to send it on, which was not in a transaction
	sentAt   time.Time // when there was one
	asks     any       // a *call, or the parameters of a query of sqlc's; nil: no database in memory is asked
	answer   any       // by a database in memory
	update   updater   // for which a plain UPDATE may be sent instead of the function
	function string    // the SQL of it
	schema   string    // of the limits
	updates  *updates  // of the connection on which it was sent
}

// replyTo is the reply to a query with these arguments. It takes their first place, which is free.
func replyTo(args []any, commits bool, asks *call) *reply {
	r := &reply{commits: commits, asks: asks}
	args[0] = r
	return r
}

// read reads the answer to a statement of a call.
func (r *reply) read(s statement) (*answer, error) {
	a, ok := r.answer.(decide.Answer)
	if !ok {
		return s.read(r, s.demands)
	}
	if err := r.Scan(); err != nil && (a.Granted || sqlState(err) != denialState) {
		return nil, err
	}
	return answerOf(a), nil
}

// RewriteQuery chooses the form. Without a connection of pgx, it is the portable one.
func (r *reply) RewriteQuery(ctx context.Context, conn *pgx.Conn, sql string, args []any) (_ string, _ []any, err error) {
	if conn != nil && unsendable(conn) {
		return "", nil, errUnsendable
	}
	r.sentAt = time.Now()
	r.sent = conn == nil || !conn.IsClosed() && conn.PgConn().TxStatus() == 'I'
	if r.portable = conn == nil || !inBinary(conn); r.portable {
		return portable(sql, args)
	}
	if r.update != nil && r.sent && sql == r.function { // else a DB has added something to it
		if r.updates, err = updatesOf(ctx, conn, r.update.note(), r.schema); err != nil {
			return "", nil, unsentError{err}
		} else if r.updates != nil {
			sql, args = r.update.update()
			sql, _ = inschema.SQL(sql, r.schema) // it was valid for the function
		}
	}
	return sql, args, nil
}

func (r *reply) Scan(dest ...any) error {
	return r.unknownIfSent(r.scan(dest))
}

// unknownIfSent marks an error as unknown if the query may have been committed.
func (r *reply) unknownIfSent(err error) error {
	if r.commits && r.sent && !errors.Is(err, ErrUnknownOutcome) {
		return unknownUnless(err)
	}
	return err
}

func (r *reply) scan(dest []any) error {
	if r.answer != nil {
		return r.row.Scan()
	}
	if !r.portable {
		return r.row.Scan(dest...)
	}
	var answer string
	if err := r.row.Scan(&answer); err != nil {
		return err
	}
	record, err := hex.DecodeString(answer)
	if err != nil {
		return err
	}
	return scanRecord(record, dest...)
}

// inBinary reports whether a connection's query mode has binary answers.
func inBinary(conn *pgx.Conn) bool {
	mode := modeOf(conn)
	return mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol
}

// modeOf is a connection's query mode. It is noted on the connection, since asking pgx copies the whole configuration.
func modeOf(conn *pgx.Conn) pgx.QueryExecMode {
	const key = "txlimit: mode"
	notes := conn.PgConn().CustomData()
	mode, known := notes[key].(pgx.QueryExecMode)
	if !known {
		mode = conn.Config().DefaultQueryExecMode
		notes[key] = mode
	}
	return mode
}

// unsendable reports whether pgx would send no query with arguments on a connection. Its own error does not say that nothing was sent.
func unsendable(conn *pgx.Conn) bool {
	return modeOf(conn) == pgx.QueryExecModeSimpleProtocol &&
		(conn.PgConn().ParameterStatus("standard_conforming_strings") != "on" || conn.PgConn().ParameterStatus("client_encoding") != "UTF8")
}

var errUnsendable = unsentError{errors.New("pgx sends nothing by the simple protocol unless standard_conforming_strings is on and client_encoding is UTF8: set them, or choose another QueryExecMode")}
