package verbs_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
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
	if strings.Contains(sql, "ratelimit._extend") {
		return harness.Refusing{Code: "57014"}
	}
	return p.Pool.QueryRow(ctx, sql, args...)
}

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
	return harness.Reconfigured(c.T, c.pool, func(config *pgxpool.Config) {
		harness.WrapConns(config, func(conn net.Conn) net.Conn { return cutConn{conn, before, new(bytes.Buffer)} })
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
	if harness.SQLState(end.Err) == "40001" {
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

// cancelable makes the context one that the returned function ends.
func (c *failing) cancelable() func() {
	ctx, cancel := context.WithCancel(c.ctx)
	c.Cleanup(cancel)
	c.ctx = ctx
	return cancel
}

// soonEnded is a context that ends while an endless conflict is retried.
func soonEnded(c *failing) context.Context {
	ctx, cancel := context.WithTimeout(c.ctx, 100*time.Millisecond)
	c.Cleanup(cancel)
	return ctx
}

// untilConflict is the pool, and the context ends with the first conflict on it.
func (c *failing) untilConflict(pool *pgxpool.Pool) *pgxpool.Pool {
	cancel := c.cancelable()
	return harness.Reconfigured(c.T, pool, func(config *pgxpool.Config) { config.ConnConfig.Tracer = afterConflict{cancel} })
}

// begun calls with a connection on which a transaction has begun.
func (c *failing) begun(call func(conn *pgx.Conn) error) error {
	acquired, err := c.pool.Acquire(c.ctx)
	if err != nil {
		return err
	}
	defer acquired.Release() // every row needs one
	conn := acquired.Conn()
	if _, err := conn.Exec(c.ctx, "BEGIN"); err != nil {
		return err
	}
	defer func() {
		if status := conn.PgConn().TxStatus(); status != 'T' {
			c.Errorf("the transaction is %c", status)
		}
		_, _ = conn.Exec(c.ctx, "ROLLBACK")
	}()
	return call(conn)
}

// waits waits for a token, and its context ends meanwhile, after gone was called.
func (c *failing) waits(pool *pgxpool.Pool, gone func()) error {
	if _, err := c.limiter.Consume(c.ctx, pool, c.request().Count(100)); err != nil {
		return err
	}
	cancel, asked := c.cancelable(), 0
	c.limiter.Clock = func() time.Time {
		if asked++; asked == 2 { // by the call, and by the sleep
			gone()
			cancel()
		}
		return time.Now()
	}
	return verbCalls(c, pool, c.request())["Wait"]()
}

// known makes a limit known to the limiter.
func (c *failing) known(limit ratelimit.Limit) *failing {
	if _, err := c.limiter.Check(c.ctx, c.pool, limit.Key(privateKey)); err != nil {
		c.Error(err)
	}
	return c
}

// varying is a limit of the same name whose keys may have other numbers, window a request for a window of the same name, and slots one for
// one of two slots.
func (c *failing) varying() ratelimit.Limit {
	return ratelimit.TokenBucket(c.limit.Name(), 1, time.Hour, ratelimit.Varies(24*time.Hour))
}

func (c *failing) window() ratelimit.Request {
	return ratelimit.FixedWindow(c.limit.Name(), 1, time.Hour).Key(privateKey)
}

func (c *failing) slots() ratelimit.Request {
	return ratelimit.Slots(c.limit.Name(), 2).Key(privateKey)
}

// receipt is one for the request, and holdOf a token for it.
func (c *failing) receipt() ratelimit.Receipt { return harness.ReceiptOf(time.Now(), c.request()) }

func (c *failing) altered(old, altered string) ratelimit.Receipt {
	return ratelimit.Receipt(strings.ReplaceAll(string(c.receipt()), old, altered))
}

func (c *failing) holdOf() string {
	return holdToken + `[["` + c.limit.Name() + `", "` + privateKey + `", 1]]`
}

func (c *failing) takes(db ratelimit.DB, most int, requests ...ratelimit.Request) error {
	_, _, err := c.limiter.Take(c.ctx, db, most, requests...)
	return err
}

// during does work during a hold.
func (c *failing) during(db ratelimit.DB, ttl time.Duration, work func(ctx context.Context) ([]ratelimit.Request, error)) error {
	return c.limiter.During(c.ctx, db, "work", ttl, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
		return work(ctx)
	}, c.request())
}

func noWork(context.Context, ratelimit.Held) ([]ratelimit.Request, error) { return nil, nil }

// using is work that says what it has used.
func using(requests ...ratelimit.Request) func(context.Context) ([]ratelimit.Request, error) {
	return func(context.Context) ([]ratelimit.Request, error) { return requests, nil }
}

func (c *failing) overrides(numbers ...ratelimit.Option) error {
	return harness.Second(c.limiter.Override(c.ctx, c.pool, c.request(), ratelimit.Terms{Forever: true}, numbers...))
}

func (c *failing) blocks(db ratelimit.DB, until time.Time, reason string) error {
	_, err := c.limiter.Block(c.ctx, db, c.request(), ratelimit.Terms{Until: until, Forever: until.IsZero(), Reason: reason})
	return err
}

// sends sends a batch that consumes, and what is added to it.
func (c *failing) sends(db *pgxpool.Pool, add func(batch *pgx.Batch)) error {
	batch := c.batch()
	add(batch)
	return c.limiter.SendTx(c.ctx, db, batch)
}

func (c *failing) consumedSQL(ctx context.Context, tx *sql.Tx) error {
	_, err := c.limiter.Consume(ctx, ratelimit.SQL(tx), c.request())
	return err
}
