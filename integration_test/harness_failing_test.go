package integration_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// answerLost is a pool that loses the answers of statements that have run.
type answerLost struct{ *pgxpool.Pool }

func (p answerLost) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return unheardRow{p.Pool.QueryRow(ctx, sql, args...)}
}

type unheardRow struct{ pgx.Row }

func (r unheardRow) Scan(dest ...any) error {
	if err := r.Row.Scan(dest...); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}

// garbled is a pool whose answers cannot be read.
type garbled struct{ *pgxpool.Pool }

func (p garbled) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return garbledRow{p.Pool.QueryRow(ctx, sql, args...)}
}

type garbledRow struct{ pgx.Row }

func (r garbledRow) Scan(dest ...any) error {
	if err := r.Row.Scan(dest...); err != nil {
		return err
	}
	switch answer := dest[0].(type) {
	case *[]byte:
		*answer = nil
	case *string: // in text: a record of binary columns, of which the first is emptied
		record, err := hex.DecodeString(*answer)
		if err != nil {
			return err
		}
		const head = 4 + 4 + 4 // how many columns; the first one's type and length
		rest := record[head+binary.BigEndian.Uint32(record[head-4:]):]
		clear(record[head-4 : head])
		*answer = hex.EncodeToString(append(record[:head:head], rest...))
	}
	return nil
}

// notExtending is a pool, of a type of its own, that extends no holds.
type notExtending struct{ *pgxpool.Pool }

func (p notExtending) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if strings.Contains(sql, "_ratelimit_extend") {
		return refusing{"57014"}
	}
	return p.Pool.QueryRow(ctx, sql, args...)
}

// refusing is a DB on which every statement fails with this error of the server.
type refusing struct{ code string }

func (r refusing) QueryRow(context.Context, string, ...any) pgx.Row { return r }
func (r refusing) Scan(...any) error                                { return &pgconn.PgError{Code: r.code, Message: "no"} }

// commitLost is a pool that loses the answer to COMMIT.
type commitLost struct{ *pgxpool.Pool }

func (p commitLost) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	tx, err := p.Pool.BeginTx(ctx, options)
	return unheardTx{tx}, err
}

type unheardTx struct{ pgx.Tx }

func (t unheardTx) Commit(ctx context.Context) error {
	return errors.Join(t.Tx.Commit(ctx), io.ErrUnexpectedEOF)
}

// cutConn breaks before a message of the server's.
type cutConn struct {
	net.Conn
	before func(kind byte, body []byte) bool
	rest   *bytes.Buffer // of the message that is being read
}

func (c cutConn) Read(p []byte) (int, error) {
	if c.rest.Len() == 0 {
		head := make([]byte, 5)
		if _, err := io.ReadFull(c.Conn, head); err != nil {
			return 0, err
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:])-4)
		if _, err := io.ReadFull(c.Conn, body); err != nil {
			return 0, err
		}
		if c.before(head[0], body) {
			return 0, io.ErrUnexpectedEOF
		}
		c.rest.Write(head)
		c.rest.Write(body)
	}
	return c.rest.Read(p)
}

// cutPool is a pool whose connections break before such a message.
func (c *failing) cutPool(before func(kind byte, body []byte) bool) *pgxpool.Pool {
	return reconfigured(c.T, c.pool, func(config *pgxpool.Config) {
		wrapConns(config, func(conn net.Conn) net.Conn { return cutConn{conn, before, new(bytes.Buffer)} })
	})
}

// A row, and the end of a COMMIT. The server sends them when the transaction is committed: only then, the batch ends.
func aRow(kind byte, _ []byte) bool      { return kind == 'D' }
func theCommit(kind byte, b []byte) bool { return kind == 'C' && string(b) == "COMMIT\x00" }

// afterConflict cancels when a statement has failed by a conflict.
type afterConflict struct{ cancel func() }

func (afterConflict) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (a afterConflict) TraceQueryEnd(_ context.Context, _ *pgx.Conn, end pgx.TraceQueryEndData) {
	if sqlState(end.Err) == "40001" {
		a.cancel()
	}
}

// beginRefused is a pool on which no transaction begins.
type beginRefused struct {
	*pgxpool.Pool
	code string
}

func (p beginRefused) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	return nil, &pgconn.PgError{Code: p.code, Message: "no"}
}
