package ratelimit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// refuses is the server's end of a connection: it answers each statement with an error.
func refuses(conn net.Conn, code string) {
	server := pgproto3.NewBackend(conn, conn)
	if _, err := server.ReceiveStartupMessage(); err != nil {
		return
	}
	server.Send(&pgproto3.AuthenticationOk{})
	for {
		server.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		if server.Flush() != nil {
			return
		}
		for failed := false; ; {
			message, err := server.Receive()
			if err != nil {
				return
			}
			if _, is := message.(*pgproto3.Sync); is {
				break
			}
			if !failed {
				failed = true
				server.Send(&pgproto3.ErrorResponse{Severity: "ERROR", Code: code})
			}
		}
	}
}

// TestALineThatIsSilentIsReplaced: the next extension does not wait until pgx has closed the connection, which takes 15 seconds.
func TestALineThatIsSilentIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config, err := pgxpool.ParseConfig("postgres://u@127.0.0.1/d?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		var dialed atomic.Int32
		config.ConnConfig.DialFunc = func(ctx context.Context, _, addr string) (net.Conn, error) {
			if addr == "pipe" { // to cancel the statement: this server is gone
				<-ctx.Done()
				return nil, ctx.Err()
			}
			client, server := net.Pipe()
			if dialed.Add(1) == 1 {
				go func() {
					backend := pgproto3.NewBackend(server, server)
					_, _ = backend.ReceiveStartupMessage()
					backend.Send(&pgproto3.AuthenticationOk{})
					backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
					_ = backend.Flush()
				}()
			} else {
				go refuses(server, "42P01")
			}
			return client, nil
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		n := newLine(new(Limiter), pool)
		for _, want := range []string{"", "42P01", "42P01"} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := n.extend(ctx, dbsqlc.ExtendParams{})
			cancel()
			if got := sqlState(err); got != want || want == "" && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v, want the state %q", err, want)
			}
		}
		n.close()
		pool.Close()
	})
}

// fakeDriver opens connections whose statements fail.
type fakeDriver struct {
	fails func(ctx context.Context) error // nil: no connection can be opened
	asked atomic.Int32                    // for a connection
}

func (f *fakeDriver) Connect(context.Context) (driver.Conn, error) {
	f.asked.Add(1)
	if f.fails == nil {
		return nil, errors.New("connection refused")
	}
	return &fakeConn{f}, nil
}

func (f *fakeDriver) Driver() driver.Driver            { return f }
func (f *fakeDriver) Open(string) (driver.Conn, error) { return nil, errors.ErrUnsupported }

type fakeConn struct{ of *fakeDriver }

func (c *fakeConn) QueryContext(ctx context.Context, _ string, _ []driver.NamedValue) (driver.Rows, error) {
	return nil, c.of.fails(ctx)
}
func (c *fakeConn) CheckNamedValue(*driver.NamedValue) error { return nil }
func (c *fakeConn) Prepare(string) (driver.Stmt, error)      { return nil, errors.ErrUnsupported }
func (c *fakeConn) Begin() (driver.Tx, error)                { return nil, errors.ErrUnsupported }
func (c *fakeConn) Close() error                             { return nil }

// TestAnExtensionEndsInTimeOnAnyDriver: lib/pq waits for the answer of a connection that has died silently.
func TestAnExtensionEndsInTimeOnAnyDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		released := make(chan struct{})
		f := &fakeDriver{fails: func(context.Context) error {
			if asked.Add(1) == 1 {
				<-released
			}
			return &pgconn.PgError{Code: "42P01"}
		}}
		db := sql.OpenDB(f)
		n := newLine(new(Limiter), SQL(db))
		began := time.Now()
		for _, want := range []string{"", "42P01"} {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			_, err := n.extend(ctx, dbsqlc.ExtendParams{})
			cancel()
			if got := sqlState(err); got != want || time.Since(began) != 5*time.Second {
				t.Errorf("after %v: %v, want the state %q", time.Since(began), err, want)
			}
		}
		close(released)
		n.close()
		if left := db.Stats().InUse; left != 0 {
			t.Errorf("%d connections were not given back", left)
		}
		_ = db.Close()
	})
}

// TestACallThatWaitsForTheLineEndsWithItsContext: another one waits for the same connection, for longer.
func TestACallThatWaitsForTheLineEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{fails: func(context.Context) error { return nil }}
		db := sql.OpenDB(f)
		db.SetMaxOpenConns(1)
		busy, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		n := newLine(new(Limiter), SQL(db))
		first := make(chan error, 1)
		go func() { first <- n.open(t.Context(), time.Minute) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		second := make(chan error, 1)
		began := time.Now()
		go func() { second <- n.open(ctx, time.Minute) }()
		select {
		case err := <-second:
			if took := time.Since(began); took != 200*time.Millisecond || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("after %v: %v", took, err)
			}
		case err := <-first:
			t.Errorf("it waits for the other call: %v", err)
		}
		_ = busy.Close()
		if err := <-first; err != nil || db.Stats().InUse != 1 {
			t.Errorf("the other call: %v, and %d connections are in use", err, db.Stats().InUse)
		}
		n.close()
		_ = db.Close()
	})
}

// TestALineIsKeptWhileTheServerAnswers: in a pool whose connections are all in use, another caller would get it.
func TestALineIsKeptWhileTheServerAnswers(t *testing.T) {
	for name, row := range map[string]struct {
		err  error
		kept bool
	}{
		"a canceled statement": {&pgconn.PgError{Code: "57014"}, true},
		"a missing function":   {&pgconn.PgError{Code: "42883"}, true},
		"a shutdown":           {&pgconn.PgError{Code: "57P01"}, false},
		"a broken protocol":    {&pgconn.PgError{Code: "08P01"}, false},
		"a failed transaction": {&pgconn.PgError{Code: "25P02"}, false},
		"a replica":            {&pgconn.PgError{Code: "25006"}, false},
		"no answer":            {io.ErrUnexpectedEOF, false},
		"late":                 {nil, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			db := sql.OpenDB(&fakeDriver{fails: func(ctx context.Context) error {
				if row.err == nil {
					<-ctx.Done()
					return &pgconn.PgError{Code: "57014"} // as lib/pq says it, whose connection does not survive
				}
				return row.err
			}})
			db.SetMaxOpenConns(1)
			n := newLine(new(Limiter), SQL(db))
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if _, err := n.extend(ctx, dbsqlc.ExtendParams{}); err == nil || row.err != nil && !errors.Is(err, row.err) {
				t.Errorf("%s: %v", name, err)
			}
			cancel()
			synctest.Wait()
			if kept := db.Stats().InUse == 1; kept != row.kept {
				t.Errorf("%s: kept %v, want %v", name, kept, row.kept)
			}
			n.close()
			_ = db.Close()
		})
	}
}
