package outcome

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
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
	pool  *pgxpool.Pool
	conn  *pgx.Conn // only for the probe that runs
	watch sync.Once

	mu      sync.Mutex
	probing bool
	asked   time.Time // when a call failed last
	ended   time.Time // when a probe was answered last
	failing time.Time // when the first of the probes that have failed since began; zero: the last one was answered
}

var reaches sync.Map // *reach by *pgxpool.Pool, since a middleware may be mounted anew for each request

// Watch opens the connection that Unreachable needs, in the background. db is a pool, or a Coalescer's. Of others nothing is known
// but what their errors say.
func Watch(db ratelimit.DB) {
	if r := reachOf(db); r != nil {
		r.watch.Do(func() { r.silent() })
	}
}

func reachOf(db ratelimit.DB) *reach {
	pool, _ := db.(*pgxpool.Pool)
	if c, ok := db.(*ratelimit.Coalescer); ok {
		pool = c.Pool
	}
	if pool == nil {
		return nil
	}
	r, _ := reaches.LoadOrStore(pool, &reach{pool: pool})
	return r.(*reach)
}

// Unreachable reports whether a call failed because the database of db cannot be reached. What the server or a pooler has answered
// says that it can, but for 57P03: it starts or stops. A limiter that has not loaded its overrides may have to block the key, and
// one that is closed decides nothing.
func Unreachable(db ratelimit.DB, err error) bool {
	if errors.Is(err, ratelimit.ErrNotLoaded) || errors.Is(err, ratelimit.ErrClosed) || answered(err) {
		return false
	}
	r := reachOf(db)
	return nobodyThere(err) || r != nil && r.silent()
}

func answered(err error) bool {
	var answer interface{ SQLState() string }
	return errors.As(err, &answer) && answer.SQLState() != "57P03"
}

// nobodyThere reports whether dialing failed for a reason that no load can have, here or there. A timeout is none, nor is a lack
// of ports or file descriptors.
func nobodyThere(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return false // one of several addresses may be busy
	}
	var dial *net.OpError
	var name *net.DNSError
	var errno syscall.Errno
	var answer interface{ SQLState() string }
	switch {
	case errors.As(err, &answer):
		return true // 57P03
	case errors.As(err, &name):
		return name.IsNotFound
	case errors.As(err, &dial) && dial.Op == "dial" && errors.As(err, &errno):
		return slices.Contains([]syscall.Errno{syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ENOENT}, errno)
	}
	return false
}

// silent reports whether the database has answered no probe for some seconds. It begins to probe if nobody does.
func (r *reach) silent() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = time.Now()
	if !r.probing && r.asked.Sub(r.ended) >= probeEvery {
		r.probing = true
		go r.probe()
	}
	return !r.failing.IsZero() && r.asked.Sub(r.failing) >= patience
}

// probe goes on until it is answered, or nobody asks any more.
func (r *reach) probe() {
	for began := time.Now(); !r.done(began, r.ask()); began = time.Now() {
		time.Sleep(probeEvery)
	}
}

func (r *reach) done(began time.Time, err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if err != nil && !answered(err) && now.Sub(r.asked) < probeFor {
		if r.failing.IsZero() {
			r.failing = began
		}
		return false
	}
	r.probing, r.ended, r.failing = false, now, time.Time{}
	return true
}

// ask asks on the open connection, and on a new one if that fails: a pooler may be there while all its servers are taken.
func (r *reach) ask() error {
	if r.conn != nil {
		ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
		defer cancel()
		err := r.conn.Ping(ctx)
		if err == nil {
			return nil
		}
		_ = r.conn.Close(ctx)
		r.conn = nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	config := r.pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	r.conn = conn
	return err
}
