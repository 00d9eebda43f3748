package integration_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// failure is a way to an error of the library.
type failure struct {
	by   string                 // the function that returns it; "its function": one that passes on the error of a function
	is   error                  // what it matches; a *pgconn.PgError has a code
	gone float64                // tokens of the limit that are gone after it
	do   func(c *failing) error // returns it
	bare bool                   // it is about no call, so it names no limit
}

// privateKey is in no error.
const privateKey = "private"

// failing is what a failure works on.
type failing struct {
	*testing.T
	ctx     context.Context
	limiter *ratelimit.Limiter
	limit   ratelimit.Limit // of its own, with 100 tokens that hardly refill, and at most 10 reserved
	pool    *pgxpool.Pool
}

func (c *failing) request() ratelimit.Request { return c.limit.Key(privateKey).Count(1) }

// holdToken is the token of a hold that nobody has.
const holdToken = "~0123456789abcdef0123456789abcdef4:work"

// verb calls a verb for some requests of one limit.
type verbCall func(c *failing, db ratelimit.DB, request ratelimit.Request) error

var callVerb = map[string]verbCall{
	"Consume": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Consume(c.ctx, db, r)
		return err
	},
	"Wait": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Wait(c.ctx, db, r)
		return err
	},
	"Reserve": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Reserve(c.ctx, db, r)
		return err
	},
	"Take": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, _, err := c.limiter.Take(c.ctx, db, 1, r)
		return err
	},
	"Check": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Check(c.ctx, db, r)
		return err
	},
	"Balance": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Balance(c.ctx, db, r)
		return err
	},
	"Charge": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Charge(c.ctx, db, r)
		return err
	},
	"Refund": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Refund(c.ctx, db, receiptOf(time.Now(), c.request()), r)
		return err
	},
	"Reset": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		return c.limiter.Reset(c.ctx, db, r)
	},
	"Move": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		return c.limiter.Move(c.ctx, db, r, ratelimit.TokenBucket("another", 1, time.Hour).Key(privateKey))
	},
	"Pause": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		return c.limiter.Pause(c.ctx, db, time.Now().Add(time.Minute), r)
	},
	"Resume": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		return c.limiter.Resume(c.ctx, db, r)
	},
	"Hold": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Hold(c.ctx, db, "work", time.Minute, r)
		return err
	},
	"Settle": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Settle(c.ctx, db, holdToken, r)
		return err
	},
	"Release": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		return c.limiter.Release(c.ctx, db, holdToken, r)
	},
	"During": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		return c.limiter.During(c.ctx, db, "work", time.Minute, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) { return nil, nil }, r)
	},
	"Once": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Once(c.ctx, db, "event", time.Hour, r)
		return err
	},
	"Each": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Each(c.ctx, db, r)
		return err
	},
	"Override": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Override(c.ctx, db, r, time.Time{}, "", "", ratelimit.Rate(2))
		return err
	},
	"Block": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Block(c.ctx, db, r, time.Time{}, "", "")
		return err
	},
	"Restore": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Restore(c.ctx, db, r, "")
		return err
	},
	"Unblock": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		_, err := c.limiter.Unblock(c.ctx, db, r, "")
		return err
	},
	"QueueConsume": func(c *failing, db ratelimit.DB, r ratelimit.Request) error {
		return c.queued(db, r)
	},
}

// queued sends a batch of a QueueConsume.
func (c *failing) queued(db ratelimit.DB, r ratelimit.Request) error {
	batch := &pgx.Batch{}
	_, err := c.limiter.QueueConsume(c.ctx, batch, r)
	if sender, ok := db.(interface {
		SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
	}); ok && err == nil {
		err = sender.SendBatch(c.ctx, batch).Close()
	}
	return err
}

// Verbs by what they do.
var (
	canDeny    = []string{"Consume", "Wait", "Reserve", "Take", "Check", "Hold", "During", "Once", "QueueConsume"}
	coalesces  = []string{"Consume", "Wait", "Reserve", "Take", "Charge"} // which a Coalescer decides
	repeatable = []string{"Reset", "Move", "Pause", "Resume", "Override", "Block", "Restore", "Unblock"}
	steers     = []string{"Override", "Block", "Restore", "Unblock"} // by the database's clock, whatever is in force
	onlyReads  = []string{"Check", "Balance"}
)

// consumed is a transaction's function that consumes.
func (c *failing) consumed(ctx context.Context, tx pgx.Tx) error {
	_, err := c.limiter.Consume(ctx, tx, c.request())
	return err
}

// batch is a batch that consumes.
func (c *failing) batch() *pgx.Batch {
	batch := &pgx.Batch{}
	if _, err := c.limiter.QueueConsume(c.ctx, batch, c.request()); err != nil {
		c.Fatal(err)
	}
	return batch
}

func (c *failing) sql() *sql.DB {
	db := stdlib.OpenDBFromPool(c.pool)
	c.Cleanup(func() { _ = db.Close() })
	return db
}

// ended returns a context that has ended.
func ended(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}

var longAgo = func() time.Time { return time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC) }

// failures are ways to every error. conflicting is a pool on whose tables every write is a serialization failure.
func failures(conflicting *pgxpool.Pool) map[string]failure {
	invalid, exceeds, unknown := ratelimit.ErrInvalid, ratelimit.ErrExceedsCapacity, ratelimit.ErrUnknownOutcome
	denied, exhausted := ratelimit.ErrDenied, ratelimit.ErrAttemptsExhausted
	state := func(code string) error { return &pgconn.PgError{Code: code} }
	all := map[string]failure{}
	for by, call := range callVerb {
		add := func(name string, f failure) {
			f.by = by
			all[by+": "+name] = f
		}
		on := func(db func(c *failing) ratelimit.DB) func(c *failing) error {
			return func(c *failing) error { return call(c, db(c), c.request()) }
		}
		asking := func(r func(c *failing) ratelimit.Request) func(c *failing) error {
			return func(c *failing) error { return call(c, c.pool, r(c)) }
		}
		add("the zero request", failure{is: invalid, bare: true, do: asking(func(*failing) ratelimit.Request { return ratelimit.Request{} })})
		add("an empty key", failure{is: invalid, do: asking(func(c *failing) ratelimit.Request { return c.limit.Key("a", "") })})
		add("a key with a NUL byte", failure{is: invalid, do: asking(func(c *failing) ratelimit.Request { return c.limit.Key("\x00") })})
		add("a count", failure{is: invalid, do: asking(func(c *failing) ratelimit.Request { return c.request().Count(math.NaN()) })})
		if !slices.Contains(steers, by) {
			add("a clock", failure{is: invalid, do: func(c *failing) error {
				c.limiter.Clock = longAgo
				return call(c, c.pool, c.request())
			}})
			add("overrides that are not loaded", failure{is: ratelimit.ErrNotLoaded, do: func(c *failing) error {
				c.limiter.Overrides = &ratelimit.Overrides{DB: c.pool}
				return call(c, c.pool, c.request())
			}})
			add("overrides that cannot be loaded", failure{is: ratelimit.ErrNotLoaded, do: func(c *failing) error {
				c.limiter.Overrides = &ratelimit.Overrides{DB: c.pool}
				if err := c.limiter.Overrides.Load(ended(c.ctx)); err == nil {
					c.Error("overrides are loaded by a context that has ended")
				}
				return call(c, c.pool, c.request())
			}})
		}
		add("another definition", failure{is: invalid, do: func(c *failing) error {
			if _, err := c.limiter.Check(c.ctx, c.pool, ratelimit.TokenBucket(c.limit.Name(), 7, time.Hour).Key(privateKey)); err != nil {
				return err
			}
			return call(c, c.pool, c.request())
		}})
		if by != "QueueConsume" { // SendTx returns it, as it comes from pgx
			add("literals that pgx does not write", failure{do: func(c *failing) error {
				db := reconfigured(c.T, c.pool, func(config *pgxpool.Config) {
					config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
					startWith(c.T, config.ConnConfig, map[string]string{"standard_conforming_strings": "off"})
				})
				return call(c, db, c.request())
			}})
		}
		add("a limit that is not in the list", failure{is: invalid, do: func(c *failing) error {
			c.limiter = c.opened(func(o *ratelimit.Options) { o.Limits = []ratelimit.Limit{slow("listed", 1)} })
			return call(c, c.pool, c.request())
		}})
		if !slices.Contains([]string{"Charge", "Refund", "Settle", "Release"}, by) { // which a closed Limiter takes
			add("a closed Limiter", failure{is: ratelimit.ErrClosed, do: func(c *failing) error {
				c.limiter = c.opened(func(*ratelimit.Options) {})
				closeLimiter(c, c.limiter)
				return call(c, c.pool, c.request())
			}})
		}
		add("a context that has ended", failure{is: context.Canceled, bare: by == "QueueConsume", do: func(c *failing) error {
			c.ctx = ended(c.ctx)
			return call(c, c.pool, c.request())
		}})
		if slices.Contains(canDeny, by) {
			add("a denial", failure{is: denied, gone: 100, do: func(c *failing) error {
				if _, err := c.limiter.Consume(c.ctx, c.pool, c.request().Count(100)); err != nil {
					return err
				}
				if by == "Reserve" || by == "Wait" { // which may owe
					return call(c, c.pool, c.request().Count(50))
				}
				return call(c, c.pool, c.request())
			}})
		}
		if slices.Contains(canDeny, by) && by != "Take" {
			add("more than the capacity", failure{is: exceeds, do: asking(func(c *failing) ratelimit.Request { return c.request().Count(1000) })})
		}
		if slices.Contains(coalesces, by) && by != "Charge" { // which goes on
			add("a closed Coalescer", failure{is: ratelimit.ErrClosed, do: on(func(c *failing) ratelimit.DB {
				coalescer := &ratelimit.Coalescer{Pool: c.pool}
				coalescer.Close()
				return coalescer
			})})
		}
		if slices.Contains(coalesces, by) {
			add("conflicts without end on a Coalescer", failure{is: exhausted, do: func(c *failing) error {
				ctx, cancel := context.WithCancel(c.ctx)
				defer cancel()
				c.ctx = ctx
				pool := reconfigured(c.T, conflicting, func(config *pgxpool.Config) { config.ConnConfig.Tracer = afterConflict{cancel} })
				return call(c, &ratelimit.Coalescer{Pool: pool}, c.request())
			}})
		}
		if by == "QueueConsume" {
			continue // it sends nothing
		}
		add("no database", failure{is: invalid, do: on(func(*failing) ratelimit.DB { return nil })})
		for what, none := range map[string]ratelimit.DB{
			"SQL(nil)": ratelimit.SQL(nil), "SQL of a nil *sql.DB": ratelimit.SQL((*sql.DB)(nil)), "SQL of a nil *sql.Tx": ratelimit.SQL((*sql.Tx)(nil)),
		} {
			add(what, failure{is: invalid, do: on(func(*failing) ratelimit.DB { return none })})
		}
		add("a Coalescer without a pool", failure{is: invalid, do: on(func(*failing) ratelimit.DB { return &ratelimit.Coalescer{} })})
		add("an error of the server", failure{is: state("55P03"), do: on(func(*failing) ratelimit.DB { return refusing{"55P03"} })})
		add("a schema that is not migrated", failure{is: state("42883"), do: on(func(*failing) ratelimit.DB { return refusing{"42883"} })})
		lost := failure{is: unknown, gone: 1, do: on(func(c *failing) ratelimit.DB { return answerLost{c.pool} })}
		if slices.Contains(onlyReads, by) || slices.Contains(repeatable, by) {
			lost.is, lost.gone = io.ErrUnexpectedEOF, 0
		}
		if by == "Refund" || by == "Settle" || by == "Release" || by == "During" {
			lost.gone = 0 // it had nothing to give back, or has given it back
		}
		if by == "Pause" {
			lost.gone = 99 // its count is left
		}
		if by == "Override" || by == "Block" { // which take only names that are published, if any is
			lost.do = func(c *failing) error {
				if err := ratelimit.Publish(c.ctx, c.pool, c.limit.Name(), c.limit); err != nil {
					return err
				}
				return call(c, answerLost{c.pool}, c.request())
			}
		}
		add("a lost answer", lost)
		if !slices.Contains(repeatable, by) { // whose answers say nothing about tokens
			if slices.Contains(onlyReads, by) {
				lost.is = nil
			}
			lost.do = on(func(c *failing) ratelimit.DB { return garbled{c.pool} })
			add("an answer that cannot be read", lost)
		}
		if !slices.Contains(onlyReads, by) {
			add("the pool inside a transaction of the pool", failure{is: invalid, do: func(c *failing) error {
				return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, _ pgx.Tx) error {
					c.ctx = ctx
					return call(c, c.pool, c.request())
				})
			}})
		}
	}
	maps.Copy(all, map[string]failure{
		"Consume: no requests": {by: "Consume", is: invalid, bare: true, do: func(c *failing) error {
			_, err := c.limiter.Consume(c.ctx, c.pool)
			return err
		}},
		"Consume: a sum": {by: "Consume", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Consume(c.ctx, c.pool, c.request().Count(9e14), c.request().Count(9e14))
			return err
		}},
		"Consume: one key with two numbers": {by: "Consume", is: invalid, do: func(c *failing) error {
			limit := ratelimit.TokenBucket(c.limit.Name(), 1, time.Hour, ratelimit.Varies(24*time.Hour))
			_, err := c.limiter.Consume(c.ctx, c.pool, limit.Key(privateKey), limit.With(ratelimit.Rate(2)).Key(privateKey))
			return err
		}},
		"Wait: more than the capacity": {by: "Wait", is: exceeds, do: func(c *failing) error {
			_, err := c.limiter.Wait(c.ctx, c.pool, c.request().Count(101))
			return err
		}},
		"Wait: a transaction": {by: "Wait", is: invalid, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := c.limiter.Wait(ctx, tx, c.request())
				return err
			})
		}},
		"Wait: the context ends meanwhile": {by: "Wait", is: context.Canceled, gone: 100, do: func(c *failing) error { return c.waits(c.pool, func() {}) }},
		"Wait: the context ends meanwhile, and the database has gone": {by: "Wait", is: unknown, gone: 101, do: func(c *failing) error {
			pool := reconfigured(c.T, c.pool, func(*pgxpool.Config) {})
			return c.waits(pool, pool.Close)
		}},
		"Take: a count": {by: "Take", is: invalid, do: func(c *failing) error {
			_, _, err := c.limiter.Take(c.ctx, c.pool, 2, c.request().Count(2))
			return err
		}},
		"Take: nothing": {by: "Take", is: invalid, do: func(c *failing) error {
			_, _, err := c.limiter.Take(c.ctx, c.pool, 0, c.request())
			return err
		}},
		"Take: twice": {by: "Take", is: invalid, do: func(c *failing) error {
			_, _, err := c.limiter.Take(c.ctx, c.pool, 2, c.request(), c.request())
			return err
		}},
		"Take: a capacity below one token": {by: "Take", is: exceeds, do: func(c *failing) error {
			_, _, err := c.limiter.Take(c.ctx, c.pool, 2, ratelimit.TokenBucket(c.limit.Name(), 0.5, time.Hour).Key(privateKey))
			return err
		}},
		"Refund: an empty receipt":        {by: "Refund", is: invalid, do: func(c *failing) error { return c.refunds("") }},
		"Refund: all of an empty receipt": {by: "Refund", is: invalid, bare: true, do: func(c *failing) error { return c.refundsAll("") }},
		"Refund: all of an unknown limit": {by: "Refund", is: invalid, do: func(c *failing) error {
			return c.refundsAll(receiptOf(time.Now(), c.request()))
		}},
		"Refund: all of a limit that varies": {by: "Refund", is: invalid, do: func(c *failing) error {
			return c.refundsAll(receiptOf(time.Now(), c.request()), ratelimit.Varies(24*time.Hour))
		}},
		"Refund: all of a key that cannot be": {by: "Refund", is: invalid, do: func(c *failing) error {
			return c.refundsAll(ratelimit.Receipt(strings.ReplaceAll(string(receiptOf(time.Now(), c.request())), privateKey, `\u0000`)), nil)
		}},
		"Refund: all of nothing": {by: "Refund", is: invalid, bare: true, do: func(c *failing) error {
			return c.refundsAll(ratelimit.Receipt(strings.ReplaceAll(string(receiptOf(time.Now(), c.request())), `"count":1`, `"count":1e-15,"refunded":9e-16`)), nil)
		}},
		"Refund: a receipt that is too long": {by: "Refund", is: invalid, do: func(c *failing) error { return c.refunds(ratelimit.Receipt(strings.Repeat(" ", 1<<20+1))) }},
		"Refund: more text":                  {by: "Refund", is: invalid, do: func(c *failing) error { return c.refunds(receiptOf(time.Now(), c.request()) + "{}") }},
		"Refund: another version":            {by: "Refund", is: invalid, do: func(c *failing) error { return c.refunds(`{"v": 2}`) }},
		"Refund: an instant": {by: "Refund", is: invalid, do: func(c *failing) error {
			return c.refunds(receiptOf(time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC), c.request()))
		}},
		"Refund: a key that is there twice": {by: "Refund", is: invalid, do: func(c *failing) error {
			begin, entry, _ := strings.Cut(string(receiptOf(time.Now(), c.request())), "[")
			entry, end, _ := strings.Cut(entry, "]")
			return c.refunds(ratelimit.Receipt(begin + "[" + entry + "," + entry + "]" + end))
		}},
		"Refund: an altered receipt": {by: "Refund", is: invalid, do: func(c *failing) error {
			return c.refunds(ratelimit.Receipt(strings.ReplaceAll(string(receiptOf(time.Now(), c.request())), `"count":1`, `"count":-1`)))
		}},
		"Refund: another key": {by: "Refund", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Refund(c.ctx, c.pool, receiptOf(time.Now(), c.request()), c.limit.Key("another"))
			return err
		}},
		"Refund: too much": {by: "Refund", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Refund(c.ctx, c.pool, receiptOf(time.Now(), c.request()), c.request().Count(2))
			return err
		}},
		"Hold: an id that could be a token": {by: "Hold", is: invalid, do: func(c *failing) error { return c.holds("~work", time.Minute, c.request()) }},
		"Hold: an empty id":                 {by: "Hold", is: invalid, do: func(c *failing) error { return c.holds("", time.Minute, c.request()) }},
		"Hold: a ttl":                       {by: "Hold", is: invalid, do: func(c *failing) error { return c.holds("work", -time.Minute, c.request()) }},
		"Hold: half a slot":                 {by: "Hold", is: invalid, do: func(c *failing) error { return c.holds("work", time.Minute, c.slots().Count(1.5)) }},
		"Hold: more slots than there are":   {by: "Hold", is: exceeds, do: func(c *failing) error { return c.holds("work", time.Minute, c.slots().Count(3)) }},
		"Hold: in memory": {by: "Hold", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Hold(c.ctx, ratelimittest.New(c), "work", time.Minute, c.request())
			return err
		}},
		"Once: in memory": {by: "Once", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Once(c.ctx, ratelimittest.New(c), "event", time.Hour, c.request())
			return err
		}},
		"Once: an empty id": {by: "Once", is: invalid, do: func(c *failing) error { return c.onces("", time.Hour, c.request()) }},
		"Once: keep":        {by: "Once", is: invalid, do: func(c *failing) error { return c.onces("event", -1, c.request()) }},
		"Once: slots":       {by: "Once", is: invalid, do: func(c *failing) error { return c.onces("event", time.Hour, c.slots()) }},
		"During: no function": {by: "During", is: invalid, do: func(c *failing) error {
			return c.limiter.During(c.ctx, c.pool, "work", time.Minute, nil, c.request())
		}},
		"During: no end": {by: "During", is: invalid, do: func(c *failing) error { return c.during(c.pool, -1, nil) }},
		"During: a connection": {by: "During", is: invalid, do: func(c *failing) error {
			return c.during(acquire(c.T, reconfigured(c.T, c.pool, func(*pgxpool.Config) {})), time.Minute, nil)
		}},
		"During: a sql.DB of one connection": {by: "During", is: invalid, do: func(c *failing) error {
			db := c.sql()
			db.SetMaxOpenConns(1)
			return c.during(ratelimit.SQL(db), time.Minute, nil)
		}},
		"During: what was not held": {by: "During", is: invalid, gone: 1, do: func(c *failing) error {
			return c.during(c.pool, time.Minute, func(context.Context) ([]ratelimit.Request, error) {
				return []ratelimit.Request{c.limit.Global().Count(1)}, nil
			})
		}},
		"During: no count": {by: "During", is: invalid, gone: 1, do: func(c *failing) error {
			return c.during(c.pool, time.Minute, func(context.Context) ([]ratelimit.Request, error) {
				return []ratelimit.Request{c.limit.Key(privateKey)}, nil
			})
		}},
		"During: a count": {by: "During", is: invalid, gone: 1, do: func(c *failing) error {
			return c.during(c.pool, time.Minute, func(context.Context) ([]ratelimit.Request, error) {
				return []ratelimit.Request{c.request().Count(-1)}, nil
			})
		}},
		"During: conflicts without end": {by: "During", is: exhausted, do: func(c *failing) error {
			ctx, cancel := context.WithCancel(c.ctx)
			defer cancel()
			c.ctx = ctx
			return c.during(reconfigured(c.T, conflicting, func(config *pgxpool.Config) { config.ConnConfig.Tracer = afterConflict{cancel} }), time.Minute, nil)
		}},
		"During: the hold is lost": {by: "During", is: ratelimit.ErrHoldLost, gone: 1, do: func(c *failing) error {
			return c.during(c.pool, 6*time.Second, func(ctx context.Context) ([]ratelimit.Request, error) {
				_, err := c.pool.Exec(ctx, "DELETE FROM rate_limit_holds WHERE name = $1", c.limit.Name())
				<-ctx.Done()
				return nil, errors.Join(err, context.Cause(ctx))
			})
		}},
		"During: the hold is not extended": {by: "During", is: ratelimit.ErrHoldLost, gone: 1, do: func(c *failing) error {
			return c.during(notExtending{c.pool}, 3*time.Second, func(ctx context.Context) ([]ratelimit.Request, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			})
		}},
		"During: the context ends before the function is called": {by: "During", is: context.Canceled, do: func(c *failing) error {
			ctx, cancel := context.WithCancel(c.ctx)
			c.limiter.Observer = func(context.Context, ratelimit.Decision) { cancel() }
			c.ctx = ctx
			return c.during(c.pool, time.Minute, nil)
		}},
		"Balance: slots in memory": {by: "Balance", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Balance(c.ctx, ratelimittest.New(c), c.slots())
			return err
		}},
		"Consume: slots": {by: "Consume", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Consume(c.ctx, c.pool, c.slots())
			return err
		}},
		"Settle: no hold":             {by: "Settle", is: ratelimit.ErrHoldLost, do: func(c *failing) error { return c.settles(holdToken, c.request()) }},
		"Settle: no count":            {by: "Settle", is: invalid, do: func(c *failing) error { return c.settles(holdToken, c.limit.Key(privateKey)) }},
		"Settle: an altered token":    {by: "Settle", is: invalid, do: func(c *failing) error { return c.settles(holdToken[1:]+"~\n", c.request()) }},
		"Settle: a token of no id":    {by: "Settle", is: invalid, do: func(c *failing) error { return c.settles(holdToken[:30], c.request()) }},
		"Settle: a token of no limit": {by: "Settle", is: invalid, bare: true, do: func(c *failing) error { return c.settles(holdToken) }},
		"Settle: all of no token":     {by: "Settle", is: invalid, bare: true, do: func(c *failing) error { return c.settles("~") }},
		"Settle: all of an unknown limit": {by: "Settle", is: invalid, do: func(c *failing) error {
			return c.settles(holdToken + `[["` + c.limit.Name() + `", "` + privateKey + `", 1]]`)
		}},
		"Settle: all of a limit that varies": {by: "Settle", is: invalid, do: func(c *failing) error {
			limit := ratelimit.TokenBucket(c.limit.Name(), 1, time.Hour, ratelimit.Varies(24*time.Hour))
			if _, err := c.limiter.Check(c.ctx, c.pool, limit.Key(privateKey)); err != nil {
				return err
			}
			return c.settles(holdToken + `[["` + c.limit.Name() + `", "` + privateKey + `", 1]]`)
		}},
		"Settle: two fields": {by: "Settle", is: invalid, bare: true, do: func(c *failing) error { return c.settles(holdToken + `[["of", "` + privateKey + `"]]`) }},
		"Limit: slots with a rate": {by: "Limit", is: invalid, do: func(c *failing) error {
			half, one := 0.5, 1.0
			_, err := (ratelimit.Config{Name: c.limit.Name(), Kind: "slots", Capacity: &half, Rate: &one, Varies: "1h"}).Limit()
			return err
		}},

		"Move: a count": {by: "Move", is: invalid, do: func(c *failing) error {
			return c.limiter.Move(c.ctx, c.pool, c.request().Count(2), slow("another", 1).Key(privateKey))
		}},
		"Move: to itself": {by: "Move", is: invalid, do: func(c *failing) error {
			return c.limiter.Move(c.ctx, c.pool, c.request(), c.request())
		}},
		"Move: other instants": {by: "Move", is: invalid, do: func(c *failing) error {
			return c.limiter.Move(c.ctx, c.pool, c.request(), ratelimit.FixedWindow("another", 1, time.Hour).Key(privateKey))
		}},

		"Pause: a window": {by: "Pause", is: invalid, do: func(c *failing) error {
			return c.limiter.Pause(c.ctx, c.pool, time.Now().Add(time.Minute), ratelimit.FixedWindow(c.limit.Name(), 1, time.Hour).Key(privateKey))
		}},
		"Pause: no end": {by: "Pause", is: invalid, do: func(c *failing) error {
			return c.limiter.Pause(c.ctx, c.pool, time.Time{}, c.request())
		}},
		"Pause: a year": {by: "Pause", is: invalid, do: func(c *failing) error {
			return c.limiter.Pause(c.ctx, c.pool, time.Now().AddDate(1, 0, 0), c.request())
		}},
		"Pause: one key twice": {by: "Pause", is: invalid, do: func(c *failing) error {
			return c.limiter.Pause(c.ctx, c.pool, time.Now().Add(time.Minute), c.request(), c.request())
		}},
		"Resume: a window": {by: "Resume", is: invalid, do: func(c *failing) error {
			return c.limiter.Resume(c.ctx, c.pool, ratelimit.FixedWindow(c.limit.Name(), 1, time.Hour).Key(privateKey))
		}},

		"Override: no numbers": {by: "Override", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Override(c.ctx, c.pool, c.request(), time.Time{}, "", "")
			return err
		}},
		"Override: a rate of 0": {by: "Override", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Override(c.ctx, c.pool, c.request(), time.Time{}, "", "", ratelimit.Rate(0))
			return err
		}},
		"Override: a number": {by: "Override", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Override(c.ctx, c.pool, c.request(), time.Time{}, "", "", ratelimit.Capacity(-1))
			return err
		}},
		"Override: another option": {by: "Override", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Override(c.ctx, c.pool, c.request(), time.Time{}, "", "", ratelimit.Shards(2))
			return err
		}},
		"Block: an end in the past": {by: "Block", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Block(c.ctx, c.pool, c.request(), time.Now().Add(-time.Hour), "", "")
			return err
		}},
		"Block: an end that is too late": {by: "Block", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Block(c.ctx, c.pool, c.request(), time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), "", "")
			return err
		}},
		"Block: a reason": {by: "Block", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Block(c.ctx, c.pool, c.request(), time.Time{}, strings.Repeat("r", 4097), "")
			return err
		}},
		"Block: a Coalescer": {by: "Block", is: invalid, do: func(c *failing) error {
			coalescer := &ratelimit.Coalescer{Pool: c.pool}
			defer coalescer.Close()
			_, err := c.limiter.Block(c.ctx, coalescer, c.request(), time.Time{}, "", "")
			return err
		}},
		"Unblock: a count": {by: "Unblock", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.Unblock(c.ctx, c.pool, c.request().Count(2), "")
			return err
		}},

		"QueueConsume: no batch": {by: "QueueConsume", is: invalid, do: func(c *failing) error {
			_, err := c.limiter.QueueConsume(c.ctx, nil, c.request())
			return err
		}},
		"QueueConsume: a lost answer": {by: "QueueConsume", is: unknown, gone: 1, do: func(c *failing) error {
			return c.queued(c.cutPool(aRow), c.request())
		}},
		"QueueConsume: a lost answer in a transaction": {by: "QueueConsume", is: io.ErrUnexpectedEOF, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.cutPool(aRow), func(ctx context.Context, tx pgx.Tx) error {
				return tx.SendBatch(ctx, c.batch()).Close()
			})
		}},
		"QueueConsume: an error of the server": {by: "QueueConsume", is: state("40001"), do: func(c *failing) error {
			return c.queued(conflicting, c.request())
		}},

		"InTx: rolled back by hand": {by: "InTx", is: pgx.ErrTxCommitRollback, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := c.limiter.Consume(ctx, tx, c.request()); err != nil {
					return err
				}
				return tx.Rollback(ctx)
			})
		}},
		"InTx: ended by a statement": {by: "InTx", is: unknown, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "ROLLBACK")
				return err
			})
		}},
		"InTx: no function": {by: "InTx", is: invalid, bare: true, do: func(c *failing) error { return c.limiter.InTx(c.ctx, c.pool, nil) }},
		"InTx: a connection in a transaction": {by: "InTx", is: invalid, bare: true, do: func(c *failing) error {
			conn := acquire(c.T, c.pool)
			if _, err := conn.Exec(c.ctx, "BEGIN"); err != nil {
				return err
			}
			defer func() { _, _ = conn.Exec(c.ctx, "ROLLBACK") }()
			return c.limiter.InTx(c.ctx, conn, c.consumed)
		}},
		"InTx: Hot inside Hot": {by: "InTx", is: invalid, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, _ pgx.Tx) error {
				return c.limiter.InTx(ctx, c.pool, c.consumed, ratelimit.Hot(c.request()))
			}, ratelimit.Hot(c.request()))
		}},
		"InTx: the context ends in the queue": {by: "InTx", is: context.Canceled, do: func(c *failing) error {
			return c.limiter.InTx(ended(c.ctx), c.pool, c.consumed, ratelimit.Hot(c.request()))
		}},
		"InTx: no turns": {by: "InTx", is: state("42501"), do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, beginRefused{c.pool, "42501"}, c.consumed, ratelimit.Hot(c.request()))
		}},
		"InTx: no transaction": {by: "InTx", is: state("53300"), bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, beginRefused{c.pool, "53300"}, c.consumed)
		}},
		"InTx: the connection breaks before COMMIT": {by: "InTx", is: pgconn.ErrConnClosed, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				return errors.Join(c.consumed(ctx, tx), tx.Conn().Close(ctx))
			})
		}},
		"InTx: the context ends before COMMIT": {by: "InTx", is: context.Canceled, bare: true, do: func(c *failing) error {
			ctx, cancel := context.WithCancelCause(c.ctx)
			return c.limiter.InTx(ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				defer cancel(errors.New("the caller went home"))
				return c.consumed(ctx, tx)
			})
		}},
		"InTx: the answer to COMMIT is lost": {by: "InTx", is: unknown, gone: 1, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, commitLost{c.pool}, c.consumed)
		}},
		"InTx: the function commits": {by: "InTx", is: unknown, gone: 1, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				return errors.Join(c.consumed(ctx, tx), tx.Commit(ctx))
			})
		}},
		"InTx: conflicts without end": {by: "InTx", is: exhausted, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, conflicting, c.consumed, ratelimit.Attempts(2))
		}},
		"InTx: the context ends between conflicts": {by: "InTx", is: exhausted, do: func(c *failing) error {
			ctx, cancel := context.WithCancel(c.ctx)
			return c.limiter.InTx(ctx, conflicting, func(ctx context.Context, tx pgx.Tx) error {
				defer cancel()
				return c.consumed(ctx, tx)
			})
		}},

		"InTx: the context ends in the second attempt": {by: "InTx", is: exhausted, do: func(c *failing) error {
			ctx, cancel := context.WithCancel(c.ctx)
			attempts := 0
			return c.limiter.InTx(ctx, conflicting, func(ctx context.Context, tx pgx.Tx) error {
				if attempts++; attempts == 2 {
					cancel()
					return ctx.Err()
				}
				return c.consumed(ctx, tx)
			})
		}},

		"InSQLTx: no function": {by: "InSQLTx", is: invalid, bare: true, do: func(c *failing) error { return c.limiter.InSQLTx(c.ctx, c.sql(), nil) }},
		"InSQLTx: a level": {by: "InSQLTx", is: invalid, bare: true, do: func(c *failing) error {
			return c.limiter.InSQLTx(c.ctx, c.sql(), c.consumedSQL, ratelimit.Isolation("no level"))
		}},
		"InSQLTx: no database":    {by: "InSQLTx", is: invalid, bare: true, do: func(c *failing) error { return c.limiter.InSQLTx(c.ctx, nil, c.consumedSQL) }},
		"InSQLTx: a nil database": {by: "InSQLTx", is: invalid, bare: true, do: func(c *failing) error { return c.limiter.InSQLTx(c.ctx, (*sql.DB)(nil), c.consumedSQL) }},
		"InSQLTx: Hot of no limit": {by: "InSQLTx", is: invalid, bare: true, do: func(c *failing) error {
			return c.limiter.InSQLTx(c.ctx, c.sql(), c.consumedSQL, ratelimit.Hot(ratelimit.Request{}))
		}},
		"InSQLTx: the context ends before COMMIT": {by: "InSQLTx", is: context.Canceled, bare: true, do: func(c *failing) error {
			ctx, cancel := context.WithCancel(c.ctx)
			return c.limiter.InSQLTx(ctx, c.sql(), func(ctx context.Context, tx *sql.Tx) error {
				defer cancel()
				return c.consumedSQL(ctx, tx)
			})
		}},
		"InSQLTx: the function commits": {by: "InSQLTx", is: unknown, gone: 1, bare: true, do: func(c *failing) error {
			return c.limiter.InSQLTx(c.ctx, c.sql(), func(ctx context.Context, tx *sql.Tx) error {
				return errors.Join(c.consumedSQL(ctx, tx), tx.Commit())
			})
		}},
		"InSQLTx: conflicts without end": {by: "InSQLTx", is: exhausted, do: func(c *failing) error {
			db := stdlib.OpenDBFromPool(conflicting)
			defer db.Close()
			return c.limiter.InSQLTx(c.ctx, db, c.consumedSQL, ratelimit.Attempts(2))
		}},

		"SendTx: no batch":    {by: "SendTx", is: invalid, bare: true, do: func(c *failing) error { return c.limiter.SendTx(c.ctx, c.pool, nil) }},
		"SendTx: no database": {by: "SendTx", is: invalid, bare: true, do: func(c *failing) error { return c.limiter.SendTx(c.ctx, nil, c.batch()) }},
		"SendTx: a connection in a transaction": {by: "SendTx", is: invalid, bare: true, do: func(c *failing) error {
			conn := acquire(c.T, c.pool)
			if _, err := conn.Exec(c.ctx, "BEGIN"); err != nil {
				return err
			}
			defer func() { _, _ = conn.Exec(c.ctx, "ROLLBACK") }()
			return c.limiter.SendTx(c.ctx, conn, c.batch())
		}},
		"SendTx: Hot": {by: "SendTx", is: invalid, bare: true, do: func(c *failing) error {
			return c.limiter.SendTx(c.ctx, c.pool, c.batch(), ratelimit.Hot(c.request()))
		}},
		"SendTx: a denial": {by: "SendTx", is: denied, do: func(c *failing) error {
			batch := c.batch()
			if _, err := c.limiter.QueueConsume(c.ctx, batch, c.request().Count(100)); err != nil {
				return err
			}
			return c.limiter.SendTx(c.ctx, c.pool, batch)
		}},
		"SendTx: no connection": {by: "SendTx", is: context.Canceled, bare: true, do: func(c *failing) error {
			return c.limiter.SendTx(ended(c.ctx), c.pool, c.batch())
		}},
		"SendTx: a schema that is not migrated": {by: "SendTx", is: state("42883"), do: func(c *failing) error {
			return c.limiter.SendTx(c.ctx, connect(c.T, newSchema(c.T), 1), c.batch())
		}},
		"SendTx: conflicts without end": {by: "SendTx", is: exhausted, do: func(c *failing) error {
			return c.limiter.SendTx(c.ctx, conflicting, c.batch(), ratelimit.Attempts(2))
		}},
		"SendTx: COMMIT is refused": {by: "SendTx", is: state("23505"), bare: true, do: func(c *failing) error {
			batch := c.batch()
			batch.Queue("INSERT INTO later VALUES (1)")
			return c.limiter.SendTx(c.ctx, c.pool, batch)
		}},
		"SendTx: a function fails after COMMIT": {by: "SendTx", is: unknown, gone: 1, bare: true, do: func(c *failing) error {
			batch := c.batch()
			batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error { return errors.New("mine") })
			return c.limiter.SendTx(c.ctx, c.pool, batch)
		}},
		"SendTx: a function fails as if by a conflict or a denial, and the answer to COMMIT is lost": {by: "SendTx", is: unknown, gone: 1, bare: true, do: func(c *failing) error {
			batch := c.batch()
			batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error {
				return errors.Join(&pgconn.PgError{Code: "40001"}, &ratelimit.DeniedError{})
			})
			return c.limiter.SendTx(c.ctx, c.cutPool(theCommit), batch)
		}},
		"SendTx: a pooler loses its server": {by: "SendTx", is: unknown, bare: true, do: func(c *failing) error {
			batch := c.batch()
			batch.Queue("DO $$ BEGIN RAISE 'server conn crashed?' USING ERRCODE = '08P01'; END $$")
			batch.QueuedQueries[1].Fn = func(results pgx.BatchResults) error {
				_, err := results.Exec()
				return fmt.Errorf("mine: %w", err)
			}
			return c.limiter.SendTx(c.ctx, c.pool, batch)
		}},
		"SendTx: the answer to the call is lost": {by: "SendTx", is: unknown, gone: 1, do: func(c *failing) error {
			return c.limiter.SendTx(c.ctx, c.cutPool(aRow), c.batch())
		}},
		"SendTx: the answer to COMMIT is lost": {by: "SendTx", is: unknown, gone: 1, bare: true, do: func(c *failing) error {
			return c.limiter.SendTx(c.ctx, c.cutPool(theCommit), c.batch())
		}},

		"Retry: no function": {by: "Retry", is: invalid, bare: true, do: func(c *failing) error { return new(ratelimit.Limiter).Retry(c.ctx, nil) }},
		"Retry: conflicts without end": {by: "Retry", is: exhausted, do: func(c *failing) error {
			return new(ratelimit.Limiter).Retry(c.ctx, func(ctx context.Context) error {
				_, err := c.limiter.Consume(ctx, conflicting, c.request())
				return err
			}, ratelimit.Attempts(2))
		}},
		"Retry: an unknown outcome beside a conflict": {by: "its function", is: unknown, gone: 1, do: func(c *failing) error {
			return new(ratelimit.Limiter).Retry(c.ctx, func(ctx context.Context) error {
				_, err := c.limiter.Consume(ctx, answerLost{c.pool}, c.request())
				return errors.Join(&pgconn.PgError{Code: "40001"}, err)
			})
		}},

		"Sweep: no limit": {by: "Sweep", is: invalid, bare: true, do: func(c *failing) error { return c.sweeps(c.pool) }},
		"Sweep: a limit of one key": {by: "Sweep", is: invalid, do: func(c *failing) error {
			limit := ratelimit.TokenBucket(c.limit.Name(), 1, time.Hour, ratelimit.Varies(24*time.Hour))
			return c.sweeps(c.pool, limit.With(ratelimit.Rate(2)))
		}},
		"Sweep: twice": {by: "Sweep", is: invalid, do: func(c *failing) error { return c.sweeps(c.pool, c.limit, c.limit) }},
		"Sweep: two definitions": {by: "Sweep", is: invalid, do: func(c *failing) error {
			return c.sweeps(c.pool, c.limit, ratelimit.TokenBucket(c.limit.Name(), 2, 24*time.Hour))
		}},
		"Sweep: no database": {by: "Sweep", is: invalid, bare: true, do: func(c *failing) error { return c.sweeps(nil, c.limit) }},
		"Sweep: a transaction": {by: "Sweep", is: invalid, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(_ context.Context, tx pgx.Tx) error { return c.sweeps(tx, c.limit) })
		}},
		"Sweep: a clock": {by: "Sweep", is: invalid, do: func(c *failing) error {
			c.limiter.Clock = longAgo
			return c.sweeps(c.pool, c.limit)
		}},
		"Sweep: a schema that is not migrated": {by: "Sweep", is: state("42883"), do: func(c *failing) error {
			return c.sweeps(connect(c.T, newSchema(c.T), 1), c.limit)
		}},
		"Sweep: holds": {by: "Sweep", is: state("42883"), bare: true, do: func(c *failing) error {
			pool := newPool(c.T, 1)
			mustExec(c.T, pool, "DROP FUNCTION _ratelimit_sweep_holds")
			return c.sweeps(pool, c.limit)
		}},
		"Sweep: the answer to COMMIT is lost": {by: "Sweep", is: unknown, do: func(c *failing) error {
			return c.sweeps(commitLost{c.pool}, c.limit)
		}},
		"Sweep: conflicts without end": {by: "Sweep", is: exhausted, do: func(c *failing) error {
			ctx, cancel := context.WithTimeout(c.ctx, 100*time.Millisecond)
			defer cancel()
			c.ctx = ctx
			return c.sweeps(beginRefused{c.pool, "40001"}, c.limit)
		}},

		"Publish: no database": {by: "Publish", is: invalid, bare: true, do: func(c *failing) error { return ratelimit.Publish(c.ctx, nil, "p", c.limit) }},
		"Publish: no program":  {by: "Publish", is: invalid, bare: true, do: func(c *failing) error { return ratelimit.Publish(c.ctx, c.pool, "", c.limit) }},
		"Publish: a bad name":  {by: "Publish", is: invalid, bare: true, do: func(c *failing) error { return ratelimit.Publish(c.ctx, c.pool, "\xff", c.limit) }},
		"Publish: a long name": {by: "Publish", is: invalid, bare: true, do: func(c *failing) error { return ratelimit.Publish(c.ctx, c.pool, strings.Repeat("n", 256), c.limit) }},
		"Publish: no right":    {by: "Publish", is: state("42501"), bare: true, do: func(c *failing) error { return ratelimit.Publish(c.ctx, refusing{"42501"}, "p", c.limit) }},
		"Publish: conflicts without end": {by: "Publish", is: exhausted, bare: true, do: func(c *failing) error {
			ctx, cancel := context.WithTimeout(c.ctx, 100*time.Millisecond)
			defer cancel()
			return ratelimit.Publish(ctx, refusing{"40001"}, "p", c.limit)
		}},

		"Limit: a kind":                 {by: "Limit", is: invalid, do: func(c *failing) error { _, err := (ratelimit.Config{Name: c.limit.Name()}).Limit(); return err }},
		"Validate: With without Varies": {by: "Validate", is: invalid, do: func(c *failing) error { return c.limit.With(ratelimit.Rate(1)).Validate() }},
		"Validate: the zero Limit":      {by: "Validate", is: invalid, bare: true, do: func(*failing) error { return ratelimit.Limit{}.Validate() }},
		"Validate: With Shards": {by: "Validate", is: invalid, do: func(c *failing) error {
			limit := ratelimit.TokenBucket(c.limit.Name(), 1, time.Hour, ratelimit.Varies(24*time.Hour))
			return limit.With(ratelimit.Shards(2)).Validate()
		}},
		"UnmarshalJSON: no object": {by: "UnmarshalJSON", is: invalid, bare: true, do: func(*failing) error { return new(ratelimit.Config).UnmarshalJSON([]byte("1")) }},
		"UnmarshalJSON: a field": {by: "UnmarshalJSON", is: invalid, do: func(c *failing) error {
			return new(ratelimit.Config).UnmarshalJSON([]byte(`{"name": "` + c.limit.Name() + `", "rat": 1}`))
		}},

		"Load: no database": {by: "Load", is: invalid, bare: true, do: func(c *failing) error { return new(ratelimit.Overrides).Load(c.ctx) }},
		"Load: Every":       {by: "Load", is: invalid, bare: true, do: func(c *failing) error { return (&ratelimit.Overrides{DB: c.pool, Every: time.Hour}).Load(c.ctx) }},
		"Load: Listen":      {by: "Load", is: invalid, bare: true, do: func(c *failing) error { return (&ratelimit.Overrides{DB: refusing{}, Listen: true}).Load(c.ctx) }},
		"Run: no database":  {by: "Run", is: invalid, bare: true, do: func(c *failing) error { return new(ratelimit.Overrides).Run(c.ctx) }},
		"Run: one connection": {by: "Run", is: invalid, bare: true, do: func(c *failing) error {
			return (&ratelimit.Overrides{DB: connect(c.T, c.pool.Config().ConnString(), 1), Listen: true}).Run(c.ctx)
		}},
		"Run: the context ends": {by: "Run", is: context.Canceled, bare: true, do: func(c *failing) error {
			return (&ratelimit.Overrides{DB: c.pool}).Run(ended(c.ctx))
		}},
	})
	maps.Copy(all, failuresOfOpen(conflicting))
	return all
}

// waits waits for a token, and its context ends meanwhile, after gone was called.
func (c *failing) waits(pool *pgxpool.Pool, gone func()) error {
	if _, err := c.limiter.Consume(c.ctx, pool, c.request().Count(100)); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(c.ctx)
	asked := 0
	c.limiter.Clock = func() time.Time {
		if asked++; asked == 2 { // by the call, and by the sleep
			gone()
			cancel()
		}
		return time.Now()
	}
	_, err := c.limiter.Wait(ctx, pool, c.request())
	return err
}

func (c *failing) refunds(receipt ratelimit.Receipt) error {
	_, err := c.limiter.Refund(c.ctx, c.pool, receipt, c.request())
	return err
}

// slots is a request for one of two slots of a limit of the same name.
func (c *failing) slots() ratelimit.Request {
	return ratelimit.Slots(c.limit.Name(), 2).Key(privateKey)
}

func (c *failing) holds(id string, ttl time.Duration, requests ...ratelimit.Request) error {
	_, err := c.limiter.Hold(c.ctx, c.pool, id, ttl, requests...)
	return err
}

func (c *failing) onces(id string, keep time.Duration, requests ...ratelimit.Request) error {
	_, err := c.limiter.Once(c.ctx, c.pool, id, keep, requests...)
	return err
}

// during does work during a hold; nil: none.
func (c *failing) during(db ratelimit.DB, ttl time.Duration, work func(ctx context.Context) ([]ratelimit.Request, error)) error {
	return c.limiter.During(c.ctx, db, "work", ttl, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
		if work == nil {
			return nil, nil
		}
		return work(ctx)
	}, c.request())
}

func (c *failing) settles(token string, requests ...ratelimit.Request) error {
	_, err := c.limiter.Settle(c.ctx, c.pool, token, requests...)
	return err
}

// refundsAll refunds all of a receipt. With options, the limiter was asked for a limit with these before; nil is none.
func (c *failing) refundsAll(receipt ratelimit.Receipt, known ...ratelimit.Option) error {
	if known != nil {
		options := slices.DeleteFunc(known, func(o ratelimit.Option) bool { return o == nil })
		if _, err := c.limiter.Check(c.ctx, c.pool, ratelimit.TokenBucket(c.limit.Name(), 100, 24*time.Hour, options...).Key(privateKey)); err != nil {
			return err
		}
	}
	_, err := c.limiter.Refund(c.ctx, c.pool, receipt)
	return err
}

func (c *failing) sweeps(db ratelimit.DB, limits ...ratelimit.Limit) error {
	_, err := c.limiter.Sweep(c.ctx, db, limits...)
	return err
}

func (c *failing) consumedSQL(ctx context.Context, tx *sql.Tx) error {
	_, err := c.limiter.Consume(ctx, ratelimit.SQL(tx), c.request())
	return err
}

// TestEveryErrorMatchesASentinel causes every error that package ratelimit can return. Each names its limit and no key, matches what
// it should, and says that the outcome is unknown if tokens are gone. The table in errors.go says the same, and no constructor of
// an error in the source is left out.
func TestEveryErrorMatchesASentinel(t *testing.T) {
	t.Parallel()
	pool, conflicting := newPool(t, 4), newPool(t, 2)
	mustExec(t, pool, "CREATE TABLE later (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
	mustExec(t, pool, "INSERT INTO later VALUES (1)")
	mustExec(t, conflicting, "CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE serialization_failure; END'")
	mustExec(t, conflicting, "CREATE TRIGGER conflict BEFORE INSERT OR UPDATE ON rate_limits FOR EACH ROW EXECUTE FUNCTION conflict()")
	mustExec(t, conflicting, "CREATE TRIGGER conflict BEFORE INSERT OR UPDATE ON rate_limit_definitions FOR EACH ROW EXECUTE FUNCTION conflict()")
	sentinels := map[string]error{
		"ErrDenied": ratelimit.ErrDenied, "ErrInvalid": ratelimit.ErrInvalid, "ErrExceedsCapacity": ratelimit.ErrExceedsCapacity,
		"ErrNotLoaded": ratelimit.ErrNotLoaded, "ErrHoldLost": ratelimit.ErrHoldLost, "migrations.ErrBehind": migrations.ErrBehind, "ErrClosed": ratelimit.ErrClosed, "ErrAttemptsExhausted": ratelimit.ErrAttemptsExhausted, "ErrUnknownOutcome": ratelimit.ErrUnknownOutcome,
	}
	seen := map[string][]string{}
	var texts []string
	for name, f := range failures(conflicting) {
		c := &failing{t, t.Context(), new(ratelimit.Limiter), ratelimit.TokenBucket("of "+name, 1, 24*time.Hour, ratelimit.Capacity(100), ratelimit.MaxReserved(10)), pool}
		err := f.do(c)
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		text := err.Error()
		texts = append(texts, text)
		var want *pgconn.PgError
		switch {
		case errors.As(f.is, &want):
			if sqlState(err) != want.Code {
				t.Errorf("%s: %v, want SQLSTATE %s", name, err, want.Code)
			}
		case f.is != nil && !errors.Is(err, f.is):
			t.Errorf("%s: %v, want %v", name, err, f.is)
		}
		if names := strings.Contains(text, c.limit.Name()); names == f.bare && (f.bare || f.by != "Validate") {
			t.Errorf("%s: it names its limit: %v: %s", name, names, text)
		}
		if strings.Count(text, "ratelimit: ") > 1 {
			t.Errorf("%s: a prefix is there twice: %s", name, text)
		}
		if strings.Contains(text, privateKey) {
			t.Errorf("%s: it names the key: %s", name, text)
		}
		for sentinel, is := range sentinels {
			if errors.Is(err, is) != errors.Is(f.is, is) {
				t.Errorf("%s: %v matches %s: %v", name, err, sentinel, errors.Is(err, is))
			}
			if errors.Is(f.is, is) && f.by != "its function" && !slices.Contains(seen[sentinel], f.by) {
				seen[sentinel] = append(seen[sentinel], f.by)
			}
		}
		gone := 100 - readBalance(t, new(ratelimit.Limiter), pool, c.request())
		if math.Abs(gone-f.gone) > 0.01 {
			t.Errorf("%s: %v tokens are gone, want %v: %v", name, gone, f.gone, err)
		}
	}
	for sentinel, by := range documentedErrors(t) {
		slices.Sort(by)
		slices.Sort(seen[sentinel])
		if !slices.Equal(by, seen[sentinel]) {
			t.Errorf("%s: the table in errors.go has\n%q, and returned was by\n%q", sentinel, by, seen[sentinel])
		}
		delete(sentinels, sentinel)
	}
	if len(sentinels) > 0 {
		t.Errorf("not in the table of errors.go: %v", sentinels)
	}
	for at, constructor := range constructors(t) {
		if reason, never := neverMade[constructor.format]; never {
			t.Logf("%s: %s", at, reason)
		} else if !slices.ContainsFunc(texts, constructor.text.MatchString) {
			t.Errorf("%s: no error was made here: %s", at, constructor.format)
		}
	}
}

// documentedErrors are the functions that the table in errors.go has for each sentinel.
func documentedErrors(t *testing.T) map[string][]string {
	t.Helper()
	source, err := os.ReadFile("../ratelimit/errors.go")
	if err != nil {
		t.Fatal(err)
	}
	table := map[string][]string{}
	sentinel := ""
	for line := range strings.SplitSeq(string(source), "\n") {
		cells, in := strings.CutPrefix(line, "//\t")
		if !in {
			continue
		}
		if first, rest, found := strings.Cut(cells, "  "); found && first != "" {
			if sentinel, cells = first, rest; !strings.Contains(first, "Err") {
				break
			}
			_, cells, _ = strings.Cut(cells, ":")
		}
		cells = regexp.MustCompile(`\(.*\)`).ReplaceAllString(cells, "")
		table[sentinel] = append(table[sentinel], regexp.MustCompile(`[A-Z]\w+`).FindAllString(cells, -1)...)
	}
	return table
}

// constructor is a place in the source that makes an error.
type constructor struct {
	format string
	text   *regexp.Regexp
}

// neverMade are the errors that no call can cause, or that are not returned.
var neverMade = map[string]string{
	"argument %d: %w":                "pgx can encode all arguments of this package",
	"%d columns for %d destinations": "the queries of this package have the columns that it reads",
	"%w: the database and the library disagree about a decision": "a defect",
	"an entry has three fields":                                  "it is replaced by the error of the token",
	"another program sweeps":                                     "it ends a sweep of the background, and is not returned",
	"ratelimit: schema: ":                                        "it is told to Options.OnError",
	"other numbers are published":                                "it is told to Options.OnError",
	"ratelimit: publish: %w: limit %s":                           "it is told to Options.OnError",
	"ratelimit: publish: %w: another version of program %q is in use, or was within five minutes, and this one defines other limits": "it is told to Options.OnError",
	"ratelimit: overrides: the row with id %d, of limit %q, is passed over: its effect or a number is not valid":                     "it is told to Overrides.OnError",
}

// constructors are the errors that the source of package ratelimit makes, by place.
func constructors(t *testing.T) map[string]constructor {
	t.Helper()
	files, err := filepath.Glob("../ratelimit/*.go")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]constructor{}
	set := token.NewFileSet()
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(set, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(node ast.Node) bool {
			call, is := node.(*ast.CallExpr)
			if !is {
				return true
			}
			var name string
			switch f := call.Fun.(type) {
			case *ast.SelectorExpr:
				name = fmt.Sprint(f.X, ".", f.Sel)
			case *ast.Ident:
				name = f.Name
			}
			if !slices.Contains([]string{"errors.New", "fmt.Errorf", "invalidCall"}, name) {
				return true
			}
			format := literals(call.Args)
			if parts := regexp.MustCompile(`%\w|%#\w`).Split(format, -1); strings.Trim(strings.Join(parts, ""), ": ;") != "" {
				for i := range parts {
					parts[i] = regexp.QuoteMeta(parts[i])
				}
				all[set.Position(call.Pos()).String()] = constructor{format, regexp.MustCompile(`(?s)` + strings.Join(parts, ".*"))}
			}
			return true
		})
	}
	if len(all) < 50 {
		t.Fatalf("only %d constructors of errors found", len(all))
	}
	return all
}

// literals joins the strings among expressions and their sums.
func literals(args []ast.Expr) string {
	text := ""
	for _, arg := range args {
		ast.Inspect(arg, func(node ast.Node) bool {
			switch n := node.(type) {
			case *ast.CallExpr: // another constructor's
				return false
			case *ast.BasicLit:
				if s, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
					text += s
				}
			}
			return true
		})
	}
	return text
}
