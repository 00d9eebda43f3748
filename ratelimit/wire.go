package ratelimit

import (
	"context"
	"encoding/hex"

	"github.com/jackc/pgx/v5"
)

// wire asks a DB in the form that its connection calls for.
type wire struct {
	DB
	commits bool // what is asked is a transaction of its own, and writes
}

func (db wire) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	r := &wireRow{commits: db.commits}
	r.Row = db.DB.QueryRow(ctx, sql, r.prependTo(args)...)
	return r
}

// wireRow is the row of an answer, and the pgx.QueryRewriter that is told on which connection it will be.
type wireRow struct {
	pgx.Row
	portable bool
	commits  bool
	sent     bool    // there was a connection to send it on
	args     [12]any // what prependTo returns: the row and the 11 arguments of Consume; for more, append allocates
}

// prependTo is the arguments with the row in front of them, where pgx looks for a QueryRewriter.
func (r *wireRow) prependTo(args []any) []any {
	r.args[0] = r
	return append(r.args[:1], args...)
}

// RewriteQuery chooses the form. Without a conn, which is one of pgx, it is the portable one.
func (r *wireRow) RewriteQuery(_ context.Context, conn *pgx.Conn, sql string, args []any) (string, []any, error) {
	r.sent = conn == nil || !conn.IsClosed()
	if r.portable = conn == nil || !inBinary(conn); r.portable {
		return portable(sql, args)
	}
	return sql, args, nil
}

func (r *wireRow) Scan(dest ...any) error {
	err := r.scan(dest)
	if r.commits && r.sent {
		err = unknownUnless(err)
	}
	return err
}

func (r *wireRow) scan(dest []any) error {
	if !r.portable {
		return r.Row.Scan(dest...)
	}
	var answer string
	if err := r.Row.Scan(&answer); err != nil {
		return err
	}
	record, err := hex.DecodeString(answer)
	if err != nil {
		return err
	}
	return scanRecord(record, dest...)
}

// inBinary says whether a connection's query mode has answers in the binary format. It notes that down at the connection,
// since the only way to ask is to have all of the configuration copied.
func inBinary(conn *pgx.Conn) bool {
	const key = "txlimit: binary"
	notes := conn.PgConn().CustomData()
	is, known := notes[key].(bool)
	if !known {
		mode := conn.Config().DefaultQueryExecMode
		is = mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol
		notes[key] = is
	}
	return is
}
