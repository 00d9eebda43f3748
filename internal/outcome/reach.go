package outcome

import (
	"context"
	"errors"
	"net"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
	"weak"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

const (
	patience     = 5 * time.Second // how long all probes must have failed
	probeTimeout = 3 * time.Second
	probeEvery   = time.Second // while probes fail, or calls do
	probeFor     = time.Minute // after the last call that failed
)

// reach is what is known of a pool's database. It tells one that cannot be reached from one that is busy, for FailOpen: a client
// who can slow the database down must not lift the limits by that. A call that took too long looks the same in both cases. So a
// connection of its own asks. It is opened while all is well, and stays open, since a busy server refuses new ones.
type reach struct {
	config *pgxpool.Config

	asking    sync.Mutex // held while the connection is used
	conn      *pgx.Conn
	forgotten bool // the pool is gone

	mu      sync.Mutex
	probing bool
	asked   time.Time // when a call failed last
	ended   time.Time // when a probe was answered last
	failing time.Time // when the first of the probes that have failed since began; zero: the last one was answered
}

// reaches has a *reach by weak.Pointer[pgxpool.Pool], while the pool is in use: a middleware may be mounted anew for each request.
var reaches sync.Map

// Watch opens the connection that Unreachable needs, in the background. db is a pool, or a Coalescer's. For other
// DBs, only the error counts.
func Watch(db ratelimit.DB) { reachOf(db) }

func reachOf(db ratelimit.DB) *reach {
	pool, _ := db.(*pgxpool.Pool)
	if c, ok := db.(*ratelimit.Coalescer); ok {
		pool = c.Pool
	}
	if pool == nil {
		return nil
	}
	key := weak.Make(pool)
	if r, ok := reaches.Load(key); ok {
		return r.(*reach)
	}
	r, known := reaches.LoadOrStore(key, &reach{config: pool.Config()})
	one := r.(*reach)
	if !known {
		runtime.AddCleanup(pool, func(one *reach) {
			reaches.Delete(key)
			go one.forget()
		}, one)
		one.silentFor(patience) // opens the connection
	}
	return one
}

// Unreachable reports whether a call failed because the database of db cannot be reached. What the server or a pooler has answered
// says that it can, but for 57P03: it starts or stops. If nobody listens at any address, one probe must have failed, too: a load
// balancer may take a busy server away from new connections. If the call took too long, all probes of some seconds must have.
// A limiter that is closed decides nothing.
func Unreachable(db ratelimit.DB, err error) bool {
	if errors.Is(err, ratelimit.ErrClosed) {
		return false
	}
	answered, gone := inspect(err)
	switch r := reachOf(db); {
	case answered:
		return false
	case r == nil:
		return gone
	case gone:
		return r.silentFor(0)
	default:
		return r.silentFor(patience)
	}
}

// inspect says of an error, which may be of several addresses, whether a server has answered at one, and whether nobody is at any of
// them. Nobody is there if dialing failed for a reason that no load can have, here or there. A timeout is none, nor is a lack of ports
// or file descriptors.
func inspect(err error) (answered, gone bool) {
	switch e := err.(type) { //nolint:errorlint // it walks the tree: one match says nothing about the others
	case interface{ SQLState() string }:
		return e.SQLState() != "57P03", e.SQLState() == "57P03"
	case *net.DNSError:
		return false, e.IsNotFound
	case *net.OpError:
		var errno syscall.Errno
		if _, name := e.Err.(*net.DNSError); name { //nolint:errorlint // as above
			return inspect(e.Err)
		}
		return false, e.Op == "dial" && errors.As(e.Err, &errno) &&
			slices.Contains([]syscall.Errno{syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ENOENT}, errno)
	case interface{ Unwrap() []error }:
		gone = true
		for _, one := range e.Unwrap() {
			a, g := inspect(one)
			answered, gone = answered || a, gone && g
		}
		return answered, gone
	case interface{ Unwrap() error }:
		if inside := e.Unwrap(); inside != nil {
			return inspect(inside)
		}
	}
	return false, false
}

// silentFor reports whether the database has answered no probe for so long. It begins to probe if nobody does.
func (r *reach) silentFor(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = time.Now()
	if !r.probing && r.asked.Sub(r.ended) >= probeEvery {
		r.probing = true
		go r.probe()
	}
	return !r.failing.IsZero() && r.asked.Sub(r.failing) >= d
}

// probe goes on until it is answered, or nobody asks any more.
func (r *reach) probe() {
	for began := time.Now(); !r.done(began, r.answers()); began = time.Now() {
		time.Sleep(probeEvery)
	}
}

func (r *reach) done(began time.Time, answers bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if !answers && now.Sub(r.asked) < probeFor {
		if r.failing.IsZero() {
			r.failing = began
		}
		return false
	}
	r.probing, r.ended, r.failing = false, now, time.Time{}
	return true
}

// answers asks on the open connection, and on a new one if that fails: a pooler may be there while all its servers are taken. For the
// same reason a login that cannot be validated in time (target_session_attrs) is an answer.
func (r *reach) answers() bool {
	r.asking.Lock()
	defer r.asking.Unlock()
	if r.forgotten {
		return true // nobody asks any more
	}
	if r.conn != nil {
		if r.ping() {
			return true
		}
		r.conn = nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	config, loggedIn := r.config.ConnConfig.Copy(), false
	if r.config.BeforeConnect != nil {
		if r.config.BeforeConnect(ctx, config) != nil {
			return false
		}
	}
	if validate := config.ValidateConnect; validate != nil {
		config.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
			err := validate(ctx, conn)
			loggedIn = loggedIn || err != nil && (ctx.Err() != nil || pgconn.Timeout(err))
			return err
		}
	}
	config.AfterConnect = nil // it may ask the server for more than a login
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		answered, _ := inspect(err)
		return answered || loggedIn
	}
	r.conn = conn
	return true
}

// ping closes a connection that does not answer.
func (r *reach) ping() bool {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	err := r.conn.Ping(ctx)
	if err != nil {
		_ = r.conn.Close(ctx)
	}
	return err == nil
}

// forget closes the connection.
func (r *reach) forget() {
	r.asking.Lock()
	defer r.asking.Unlock()
	r.forgotten = true
	if r.conn != nil {
		ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
		defer cancel()
		_ = r.conn.Close(ctx)
	}
}
