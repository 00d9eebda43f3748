package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/ratelimit"
)

const defaultTable = "txlimit_conformance"

// suite is a server under test.
type suite struct {
	config
	load
	pool    *pgxpool.Pool
	sql     *sql.DB
	prefix  string // of the names of limits
	trials  int
	sent    sent         // of the library's statements
	largest atomic.Int64 // batch of a trial's Coalescer

	mu       sync.Mutex
	leftover string // what could not be deleted, first

	business      string // the table for business rows
	businessError error  // why there is none
}

// open connects to the server.
func open(ctx context.Context, c config) (*suite, error) {
	s := &suite{config: c, load: c.load()}
	random := make([]byte, 4)
	rand.Read(random) // never fails
	s.prefix = "conformance_" + hex.EncodeToString(random)
	var err error
	if s.pool, err = s.connect(ctx, s.goroutines+2, 0); err != nil {
		return nil, err
	}
	if err := s.pool.Ping(ctx); err != nil {
		s.pool.Close()
		return nil, err
	}
	options := s.pool.Config().ConnConfig.Copy()
	s.sql = stdlib.OpenDB(*options)
	s.sql.SetMaxOpenConns(s.goroutines)
	s.sql.SetMaxIdleConns(s.goroutines)
	s.business = c.table
	if s.business == "" {
		s.business = defaultTable
		if _, s.businessError = s.pool.Exec(ctx, "SELECT FROM "+defaultTable+" LIMIT 0"); s.businessError != nil {
			_, s.businessError = s.pool.Exec(ctx, "CREATE TABLE IF NOT EXISTS "+defaultTable+" (id text PRIMARY KEY)")
		}
	}
	return s, nil
}

// leave notes what could not be deleted.
func (s *suite) leave(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leftover == "" {
		s.leftover = what
	}
}

// coalescer makes a Coalescer that notes its largest batch.
func (s *suite) coalescer(pool *pgxpool.Pool, async bool) *ratelimit.Coalescer {
	s.largest.Store(0)
	return &ratelimit.Coalescer{Pool: pool, AsyncCommit: async, OnBatch: func(calls int) {
		for n := s.largest.Load(); n < int64(calls) && !s.largest.CompareAndSwap(n, int64(calls)); n = s.largest.Load() {
		}
	}}
}

func (s *suite) close() {
	s.sql.Close()
	s.pool.Close()
}

// connect makes a pool in a query mode; 0 is the mode of the URL.
func (s *suite) connect(ctx context.Context, conns int, mode pgx.QueryExecMode) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(s.url)
	if err != nil {
		return nil, err // pgx hides the password
	}
	config.MaxConns = int32(conns)
	if mode != 0 {
		config.ConnConfig.DefaultQueryExecMode = mode
	}
	config.ConnConfig.Tracer = tracer{&s.sent, config.ConnConfig.DefaultQueryExecMode}
	return pgxpool.NewWithConfig(ctx, config)
}

func (s *suite) inMode(ctx context.Context, mode pgx.QueryExecMode) (*pgxpool.Pool, error) {
	return s.connect(ctx, 4, mode)
}

// testCase is a line of the table.
type testCase struct {
	name   string
	ways   []way
	spread bool     // it asks for several limits in one call: try it with one key and with several
	clear  []string // SQLSTATEs that are clear errors here
	tool   bool     // it runs the program txlimit
	long   bool     // it takes seconds: not in a short run
	script func(t *trial)
}

// Which keys a trial uses, for cases that spread.
const (
	oneKey      = "one key"
	severalKeys = "several keys"
)

// tries is how often a trial is run that fails with a conflict, although it is alone.
const tries = 10

// try runs a case in each of its ways.
func (s *suite) try(ctx context.Context, c testCase) result {
	r := result{Name: c.name}
	keys := []string{""}
	if c.spread {
		keys = []string{oneKey, severalKeys}
	}
	for _, w := range c.ways {
		for _, k := range keys {
			r.Trials = append(r.Trials, tried{Way: w.name, Keys: k, outcome: s.retryTrial(ctx, c, w, k), way: w})
		}
	}
	r.conclude()
	return r
}

// retryTrial runs a trial, and again if it fails with a conflict, as its caller should.
func (s *suite) retryTrial(ctx context.Context, c testCase, w way, keys string) (o outcome) {
	var first outcome
	for i := range tries {
		o = s.runTrial(ctx, c, w, keys)
		switch {
		case i == 0:
			first = o
		case !o.conflict && (o.Verdict == works || o.Verdict == conditional):
			o.again(w, fmt.Sprintf("the call had to be run again (Retry, InTx) after %d conflicts, although nobody else was there: %s", i, first.text()))
		}
		if !o.conflict {
			return o
		}
	}
	o.Detail = fmt.Sprintf("%d times in a row, although nobody else was there: %s", tries, o.Detail)
	return o
}

// runTrial runs a case once in one way, looks at what is stored afterwards, and deletes it.
func (s *suite) runTrial(ctx context.Context, c testCase, w way, keys string) (o outcome) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	s.trials++
	t := newTrial(s, c, w, keys)
	defer t.clean(context.WithoutCancel(ctx))
	o = s.runWay(ctx, t)
	if o.Verdict != wrong {
		if stored := t.guard(func() { t.stored(ctx, o.Verdict) }); stored != nil {
			if o.Verdict == refused {
				stored.Detail = fmt.Sprintf("%s. That was after the error at %s", stored.Detail, o.text())
			}
			o = stored.outcome
		}
	}
	o.Condition, o.Note = join(o.Condition, t.condition), join(o.Note, t.note)
	if o.Verdict == works && o.Condition != "" {
		o.Verdict = conditional
	}
	return o
}

// runWay runs the script on its handle.
func (s *suite) runWay(ctx context.Context, t *trial) outcome {
	var stopped *stop
	err := t.way.on(ctx, s, func(ctx context.Context, db ratelimit.DB) error {
		t.begin(ctx, db)
		stopped = t.guard(func() { t.c.script(t) })
		if stopped != nil {
			t.end(false)
			return stopped
		}
		if t.rollback {
			t.end(false)
			return errRollback
		}
		return nil
	})
	switch {
	case stopped != nil && (err == nil || errors.Is(err, stopped)):
		return stopped.outcome
	case stopped != nil: // InTx gave up
		return fromError(ctx, stopped.Step, err, t.c.clear...)
	case errors.Is(err, errRollback):
		return outcome{Verdict: works}
	case err != nil:
		t.end(false)
		return fromError(ctx, "begin or commit", err, t.c.clear...)
	}
	t.end(true)
	o := outcome{Verdict: works}
	if t.attempt > 1 {
		o.again(t.way, fmt.Sprintf("InTx ran it %d times, although nobody else was there", t.attempt))
	}
	return o
}

// again notes conflicts: a condition, unless at a level where callers have to expect them.
func (o *outcome) again(w way, told string) {
	if w.level == pgx.RepeatableRead || w.level == pgx.Serializable {
		o.Note = join(o.Note, told)
		return
	}
	o.Verdict, o.Condition = conditional, join(o.Condition, told)
}

// allCases are the lines of the table.
func allCases() []testCase {
	return slices.Concat(verbCases(), severalCases(), holdCases(), transactionCases(), batchCases(), sqlCases(), modeCases(), operationsCases(), fleetCases(), toolCases(), coalescerCases(), contentionCases())
}

// counter gives numbers to goroutines.
type counter struct{ n atomic.Int64 }

func (c *counter) next() int64 { return c.n.Add(1) - 1 }

const pause = 5 * time.Millisecond
