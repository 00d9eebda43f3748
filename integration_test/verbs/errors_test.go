package verbs_test

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

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
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

func panics(context.Context) error { panic("it is not called") }

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

// verbCalls call each verb for some requests of one limit.
func verbCalls(c *failing, db ratelimit.DB, r ratelimit.Request) map[string]func() error {
	l, ctx := c.limiter, c.ctx
	return map[string]func() error{
		"Consume": func() error { return harness.Second(l.Consume(ctx, db, r)) },
		"Wait":    func() error { return harness.Second(l.Wait(ctx, db, r)) },
		"Reserve": func() error { return harness.Second(l.Reserve(ctx, db, r)) },
		"Take":    func() error { return c.takes(db, 1, r) },
		"Check":   func() error { return harness.Second(l.Check(ctx, db, r)) },
		"Balance": func() error { return harness.Second(l.Balance(ctx, db, r)) },
		"Charge":  func() error { return harness.Second(l.Charge(ctx, db, r)) },
		"Refund":  func() error { return harness.Second(l.Refund(ctx, db, c.receipt(), r)) },
		"Reset":   func() error { return l.Reset(ctx, db, r) },
		"Move": func() error {
			return l.Move(ctx, db, r, ratelimit.TokenBucket("another", 1, time.Hour).Key(privateKey))
		},
		"Pause":       func() error { return harness.Second(l.Pause(ctx, db, time.Minute, r)) },
		"Resume":      func() error { return l.Resume(ctx, db, r) },
		"Hold":        func() error { return harness.Second(l.Hold(ctx, db, "work", time.Minute, r)) },
		"Settle":      func() error { return harness.Second(l.Settle(ctx, db, holdToken, r)) },
		"Release":     func() error { return harness.Second(l.Release(ctx, db, holdToken, r)) },
		"During":      func() error { return l.During(ctx, db, "work", time.Minute, noWork, r) },
		"Once":        func() error { return harness.Third(l.Once(ctx, db, "event", time.Hour, r)) },
		"ConsumeEach": func() error { return harness.Second(l.ConsumeEach(ctx, db, r)) },
		"Override": func() error {
			return harness.Second(l.Override(ctx, db, r, ratelimit.Terms{Forever: true}, ratelimit.Rate(2)))
		},
		"Block":        func() error { return harness.Second(l.Block(ctx, db, r, ratelimit.Terms{Forever: true})) },
		"Restore":      func() error { return harness.Second(l.Restore(ctx, db, r, ratelimit.End{})) },
		"Unblock":      func() error { return harness.Second(l.Unblock(ctx, db, r, ratelimit.End{})) },
		"QueueConsume": func() error { return c.queued(db, r) },
	}
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
	harness.Succeeds(c, harness.Second(c.limiter.QueueConsume(c.ctx, batch, c.request())))
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
	invalid, bad, exceeds, unknown := ratelimit.ErrInvalid, ratelimit.ErrBadRequest, ratelimit.ErrExceedsCapacity, ratelimit.ErrUnknownOutcome
	denied, exhausted := ratelimit.ErrDenied, ratelimit.ErrAttemptsExhausted
	state := func(code string) error { return &pgconn.PgError{Code: code} }
	all := map[string]failure{}
	for by := range verbCalls(new(failing), nil, ratelimit.Request{}) {
		call := func(c *failing, db ratelimit.DB, r ratelimit.Request) error { return verbCalls(c, db, r)[by]() }
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
		after := func(change func(c *failing)) func(c *failing) error {
			return func(c *failing) error {
				change(c)
				return call(c, c.pool, c.request())
			}
		}
		add("the zero request", failure{is: invalid, bare: true, do: asking(func(*failing) ratelimit.Request { return ratelimit.Request{} })})
		add("an empty key", failure{is: bad, do: asking(func(c *failing) ratelimit.Request { return c.limit.Key("a", "") })})
		add("a key with a NUL byte", failure{is: bad, do: asking(func(c *failing) ratelimit.Request { return c.limit.Key("\x00") })})
		count := failure{is: bad, do: asking(func(c *failing) ratelimit.Request { return c.request().Count(math.NaN()) })}
		if by == "Take" || slices.Contains(steers, by) { // which take none
			count.is = invalid
		}
		if by == "Reset" || by == "Resume" || by == "Balance" {
			add("a count that means nothing", failure{is: invalid, do: asking(func(c *failing) ratelimit.Request { return c.request().Count(2) })})
		}
		add("a count", count)
		if !slices.Contains(steers, by) {
			add("a clock", failure{is: invalid, do: after(func(c *failing) { c.limiter.Clock = longAgo })})
		} else {
			add("overrides that it does not follow", failure{is: invalid, do: after(func(c *failing) { c.limiter = new(ratelimit.Limiter) })})
		}
		add("another definition", failure{is: invalid, do: after(func(c *failing) {
			c.known(ratelimit.TokenBucket(c.limit.Name(), 7, time.Hour))
		})})
		if by != "QueueConsume" { // SendTx returns it, as it comes from pgx
			add("literals that pgx does not write", failure{do: func(c *failing) error {
				db := harness.Reconfigured(c.T, c.pool, func(config *pgxpool.Config) {
					config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
					harness.StartWith(c.T, config.ConnConfig, map[string]string{"standard_conforming_strings": "off"})
				})
				return call(c, db, c.request())
			}})
		}
		add("a limit that is not in the list", failure{is: invalid, do: after(func(c *failing) {
			c.limiter = c.opened(func(o *ratelimit.Options) { o.Limits = []ratelimit.Limit{harness.Slow("listed", 1)} })
		})})
		if !slices.Contains([]string{"Charge", "Refund", "Settle", "Release"}, by) { // which a closed Limiter takes
			add("a closed Limiter", failure{is: ratelimit.ErrClosed, do: after(func(c *failing) {
				c.limiter = c.opened(func(*ratelimit.Options) {})
				harness.CloseLimiter(c, c.limiter)
			})})
		}
		add("a field that was changed after Open", failure{is: invalid, do: after(func(c *failing) {
			c.limiter = c.opened(func(*ratelimit.Options) {})
			c.limiter.Schema = "another"
		})})
		add("a context that has ended", failure{is: context.Canceled, bare: by == "QueueConsume", do: after(func(c *failing) { c.ctx = ended(c.ctx) })})
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
				harness.CloseCoalescer(c, coalescer)
				return coalescer
			})})
		}
		if slices.Contains(coalesces, by) {
			add("conflicts without end on a Coalescer", failure{is: exhausted, do: on(func(c *failing) ratelimit.DB {
				return &ratelimit.Coalescer{Pool: c.untilConflict(conflicting)}
			})})
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
		add("an error of the server", failure{is: state("55P03"), do: on(func(*failing) ratelimit.DB { return harness.Refusing{Code: "55P03"} })})
		add("a schema that is not migrated", failure{is: state("3F000"), do: on(func(*failing) ratelimit.DB { return harness.Refusing{Code: "3F000"} })})
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
		if slices.Contains([]string{"Override", "Block", "Restore", "Unblock"}, by) { // which take only names that are published, if any is
			lost.do = func(c *failing) error {
				if err := new(ratelimit.Limiter).Publish(c.ctx, c.pool, c.limit.Name(), c.limit); err != nil {
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
	ending := func(sql string) func(c *failing) error {
		return func(c *failing) error { return c.sends(c.pool, func(batch *pgx.Batch) { batch.Queue(sql) }) }
	}
	add := func(f failure, ways map[string]func(c *failing) error) {
		for name, do := range ways {
			f.by, _, _ = strings.Cut(name, ": ")
			f.do = do
			all[name] = f
		}
	}
	add(failure{is: bad}, map[string]func(c *failing) error{
		"Consume: a sum": func(c *failing) error {
			return harness.Second(c.limiter.Consume(c.ctx, c.pool, c.request().Count(9e14), c.request().Count(9e14)))
		},
		"Take: nothing": func(c *failing) error { return c.takes(c.pool, 0, c.request()) },
		"Hold: an id that could be a token": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, "~work", time.Minute, c.request()))
		},
		"Hold: an empty id": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, "", time.Minute, c.request()))
		},
		"Hold: half a slot": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, "work", time.Minute, c.slots().Count(1.5)))
		},
		"Once: an empty id": func(c *failing) error {
			return harness.Third(c.limiter.Once(c.ctx, c.pool, "", time.Hour, c.request()))
		},
		"InTx: Hot of an empty key": func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, c.consumed, ratelimit.Hot(c.limit.Key("")))
		},
		"InSQLTx: Hot of an empty key": func(c *failing) error {
			return c.limiter.InSQLTx(c.ctx, c.sql(), c.consumedSQL, ratelimit.Hot(c.limit.Key("")))
		},
	})
	add(failure{is: invalid}, map[string]func(c *failing) error{
		"Consume: one key with two numbers": func(c *failing) error {
			return harness.Second(c.limiter.Consume(c.ctx, c.pool, c.varying().Key(privateKey), c.varying().With(ratelimit.Rate(2)).Key(privateKey)))
		},
		"Consume: slots":     func(c *failing) error { return harness.Second(c.limiter.Consume(c.ctx, c.pool, c.slots())) },
		"Consume: every key": func(c *failing) error { return harness.Second(c.limiter.Consume(c.ctx, c.pool, c.limit.EveryKey())) },
		"Wait: a transaction": func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				return harness.Second(c.limiter.Wait(ctx, tx, c.request()))
			})
		},
		"Take: a count": func(c *failing) error { return c.takes(c.pool, 2, c.request().Count(2)) },
		"Take: twice":   func(c *failing) error { return c.takes(c.pool, 2, c.request(), c.request()) },

		"Refund: an empty receipt":        func(c *failing) error { return harness.Second(c.limiter.Refund(c.ctx, c.pool, "", c.request())) },
		"Refund: all of an unknown limit": func(c *failing) error { return harness.Second(c.limiter.Refund(c.ctx, c.pool, c.receipt())) },
		"Refund: all of a limit that varies": func(c *failing) error {
			return harness.Second(c.known(c.varying()).limiter.Refund(c.ctx, c.pool, c.receipt()))
		},
		"Refund: all of a key that cannot be": func(c *failing) error {
			return harness.Second(c.known(c.limit).limiter.Refund(c.ctx, c.pool, c.altered(privateKey, `\u0000`)))
		},
		"Refund: a receipt that is too long": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, ratelimit.Receipt(strings.Repeat(" ", 1<<20+1)), c.request()))
		},
		"Refund: more text": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, c.receipt()+"{}", c.request()))
		},
		"Refund: another version": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, `{"v": 2}`, c.request()))
		},
		"Refund: of another schema": func(c *failing) error {
			return harness.Second((&ratelimit.Limiter{Schema: "another"}).Refund(c.ctx, c.pool, c.receipt(), c.request()))
		},
		"Refund: of a schema": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, c.altered(`"v":1`, `"v":1,"schema":"another"`), c.request()))
		},
		"Refund: an instant": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, harness.ReceiptOf(longAgo(), c.request()), c.request()))
		},
		"Refund: a key that is there twice": func(c *failing) error {
			entry := regexp.MustCompile(`\[(.*)\]`)
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, ratelimit.Receipt(entry.ReplaceAllString(string(c.receipt()), "[$1,$1]")), c.request()))
		},
		"Refund: an altered receipt": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, c.altered(`"count":1`, `"count":-1`), c.request()))
		},
		"Refund: another key": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, c.receipt(), c.limit.Key("another")))
		},
		"Refund: too much": func(c *failing) error {
			return harness.Second(c.limiter.Refund(c.ctx, c.pool, c.receipt(), c.request().Count(2)))
		},

		"Hold: a ttl": func(c *failing) error { // that nobody has computed
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, "work", -1, c.request()))
		},
		"Hold: waiting for nanoseconds": func(c *failing) error {
			return harness.Second(c.limiter.Hold(ratelimit.WaitUpTo(c.ctx, 5), c.pool, "work", time.Minute, c.request()))
		},
		"Hold: in memory": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, ratelimittest.New(c), "work", time.Minute, c.request()))
		},
		"Hold: extended in a transaction": func(c *failing) error {
			return c.begun(func(conn *pgx.Conn) error {
				return harness.Second(c.limiter.Hold(c.ctx, conn, c.holdOf(), time.Minute))
			})
		},
		"Hold: extended, to no end": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, c.holdOf(), ratelimit.Forever))
		},
		"Release: a receipt": func(c *failing) error {
			result, err := c.limiter.Consume(c.ctx, c.pool, c.request().Count(0))
			harness.Succeeds(c, err)
			return harness.Second(c.limiter.Release(c.ctx, c.pool, string(result.Receipt()), c.request()))
		},
		"Hold: waiting in a transaction": func(c *failing) error {
			return c.begun(func(conn *pgx.Conn) error {
				return harness.Second(c.limiter.Hold(ratelimit.WaitUpTo(c.ctx, time.Minute), conn, "work", time.Minute, c.request()))
			})
		},
		"Once: in memory": func(c *failing) error {
			return harness.Third(c.limiter.Once(c.ctx, ratelimittest.New(c), "event", time.Hour, c.request()))
		},
		"Once: keep": func(c *failing) error { return harness.Third(c.limiter.Once(c.ctx, c.pool, "event", -1, c.request())) },
		"Once: slots": func(c *failing) error {
			return harness.Third(c.limiter.Once(c.ctx, c.pool, "event", time.Hour, c.slots()))
		},
		"During: no function": func(c *failing) error { return c.limiter.During(c.ctx, c.pool, "work", time.Minute, nil, c.request()) },
		"During: no end":      func(c *failing) error { return c.during(c.pool, ratelimit.Forever, using()) },
		"During: a connection": func(c *failing) error {
			return c.during(harness.Acquire(c.T, harness.Reconfigured(c.T, c.pool, func(*pgxpool.Config) {})), time.Minute, using())
		},
		"During: a sql.DB of one connection": func(c *failing) error {
			db := c.sql()
			db.SetMaxOpenConns(1)
			return c.during(ratelimit.SQL(db), time.Minute, using())
		},
		"Balance: slots in memory": func(c *failing) error {
			return harness.Second(c.limiter.Balance(c.ctx, ratelimittest.New(c), c.slots()))
		},
		"Settle: no count": func(c *failing) error {
			return harness.Second(c.limiter.Settle(c.ctx, c.pool, holdToken, c.limit.Key(privateKey)))
		},
		"Settle: an altered token": func(c *failing) error {
			return harness.Second(c.limiter.Settle(c.ctx, c.pool, holdToken[1:]+"~\n", c.request()))
		},
		"Settle: a token of no id": func(c *failing) error {
			return harness.Second(c.limiter.Settle(c.ctx, c.pool, holdToken[:30], c.request()))
		},
		"Settle: another key": func(c *failing) error {
			return harness.Second(c.limiter.Settle(c.ctx, c.pool, c.holdOf(), c.limit.Key("another").Count(1)))
		},

		"Move: a count": func(c *failing) error {
			return c.limiter.Move(c.ctx, c.pool, c.request().Count(2), harness.Slow("another", 1).Key(privateKey))
		},
		"Move: to itself": func(c *failing) error { return c.limiter.Move(c.ctx, c.pool, c.request(), c.request()) },
		"Move: other instants": func(c *failing) error {
			return c.limiter.Move(c.ctx, c.pool, c.request(), ratelimit.FixedWindow("another", 1, time.Hour).Key(privateKey))
		},
		"Pause: a window": func(c *failing) error { return harness.Second(c.limiter.Pause(c.ctx, c.pool, time.Minute, c.window())) },
		"Pause: a year": func(c *failing) error {
			return harness.Second(c.limiter.Pause(c.ctx, c.pool, 366*24*time.Hour, c.request()))
		},
		"Pause: one key twice": func(c *failing) error {
			return harness.Second(c.limiter.Pause(c.ctx, c.pool, time.Minute, c.request(), c.request()))
		},
		"Resume: a window": func(c *failing) error { return c.limiter.Resume(c.ctx, c.pool, c.window()) },

		"Override: no numbers":           func(c *failing) error { return c.overrides() },
		"Override: a rate of 0":          func(c *failing) error { return c.overrides(ratelimit.Rate(0)) },
		"Override: a number":             func(c *failing) error { return c.overrides(ratelimit.Capacity(-1)) },
		"Override: another option":       func(c *failing) error { return c.overrides(ratelimit.Shards(2)) },
		"Block: an end in the past":      func(c *failing) error { return c.blocks(c.pool, time.Now().Add(-time.Hour), "") },
		"Block: an end that is too late": func(c *failing) error { return c.blocks(c.pool, time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), "") },
		"Block: no end": func(c *failing) error {
			return harness.Second(c.limiter.Block(c.ctx, c.pool, c.request(), ratelimit.Terms{Reason: "spam"}))
		},
		"Block: two ends": func(c *failing) error {
			return harness.Second(c.limiter.Block(c.ctx, c.pool, c.request(), ratelimit.Terms{For: time.Hour, Forever: true}))
		},
		"Block: for too long": func(c *failing) error {
			return harness.Second(c.limiter.Block(c.ctx, c.pool, c.request(), ratelimit.Terms{For: math.MaxInt64}))
		},
		"Block: a reason": func(c *failing) error { return c.blocks(c.pool, time.Time{}, strings.Repeat("r", 4097)) },
		"Block: a Coalescer": func(c *failing) error {
			coalescer := &ratelimit.Coalescer{Pool: c.pool}
			defer harness.CloseCoalescer(c, coalescer)
			return c.blocks(coalescer, time.Time{}, "")
		},
		"Block: in another database": func(c *failing) error {
			c.limiter = c.opened(func(*ratelimit.Options) {})
			return c.blocks(harness.NewPool(c.T, 1), time.Time{}, "")
		},
		"Unblock: a count": func(c *failing) error { return verbCalls(c, c.pool, c.request().Count(2))["Unblock"]() },

		"QueueConsume: no batch": func(c *failing) error { return harness.Second(c.limiter.QueueConsume(c.ctx, nil, c.request())) },
		"InTx: Hot inside Hot": func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, _ pgx.Tx) error {
				return c.limiter.InTx(ctx, c.pool, c.consumed, ratelimit.Hot(c.request()))
			}, ratelimit.Hot(c.request()))
		},
		"Sweep: a limit of one key": func(c *failing) error {
			return harness.Second(c.limiter.Sweep(c.ctx, c.pool, c.varying().With(ratelimit.Rate(2))))
		},
		"Sweep: twice": func(c *failing) error { return harness.Second(c.limiter.Sweep(c.ctx, c.pool, c.limit, c.limit)) },
		"Sweep: two definitions": func(c *failing) error {
			return harness.Second(c.limiter.Sweep(c.ctx, c.pool, c.limit, ratelimit.TokenBucket(c.limit.Name(), 2, 24*time.Hour)))
		},
		"Sweep: a clock": func(c *failing) error {
			c.limiter.Clock = longAgo
			return harness.Second(c.limiter.Sweep(c.ctx, c.pool, c.limit))
		},
		"Limit: a kind": func(c *failing) error { _, err := (ratelimit.Config{Name: c.limit.Name()}).Limit(); return err },
		"Limit: slots with a rate": func(c *failing) error {
			half, one := 0.5, 1.0
			_, err := (ratelimit.Config{Name: c.limit.Name(), Kind: "slots", Capacity: &half, Rate: &one, Varies: "1h"}).Limit()
			return err
		},
		"Validate: a rate of NaN": func(c *failing) error { return ratelimit.TokenBucket(c.limit.Name(), math.NaN(), time.Hour).Validate() },
		"Validate: a period of 0": func(c *failing) error { return ratelimit.FixedWindow(c.limit.Name(), 1, 0).Validate() },
		"Validate: a capacity of NaN": func(c *failing) error {
			return ratelimit.TokenBucket(c.limit.Name(), 1, time.Hour, ratelimit.Capacity(math.NaN())).Validate()
		},
		"Validate: MaxReserved of NaN": func(c *failing) error {
			return ratelimit.TokenBucket(c.limit.Name(), 1, time.Hour, ratelimit.MaxReserved(math.NaN())).Validate()
		},
		"Validate: With without Varies": func(c *failing) error { return c.limit.With(ratelimit.Rate(1)).Validate() },
		"Validate: With Shards":         func(c *failing) error { return c.varying().With(ratelimit.Shards(2)).Validate() },
		"UnmarshalJSON: a field": func(c *failing) error {
			return new(ratelimit.Config).UnmarshalJSON([]byte(`{"name": "` + c.limit.Name() + `", "rat": 1}`))
		},
	})
	add(failure{is: invalid, gone: 1}, map[string]func(c *failing) error{
		"During: what was not held": func(c *failing) error {
			return c.during(c.pool, time.Minute, using(c.limit.Global().Count(1)))
		},
		"During: no count": func(c *failing) error {
			return c.during(c.pool, time.Minute, using(c.limit.Key(privateKey)))
		},
		"During: a count": func(c *failing) error {
			return c.during(c.pool, time.Minute, using(c.request().Count(-1)))
		},
	})
	add(failure{is: invalid, bare: true}, map[string]func(c *failing) error{
		"Hold: an extension by the id":    func(c *failing) error { return harness.Second(c.limiter.Hold(c.ctx, c.pool, "work", time.Minute)) },
		"Consume: no requests":            func(c *failing) error { return harness.Second(c.limiter.Consume(c.ctx, c.pool)) },
		"Refund: all of an empty receipt": func(c *failing) error { return harness.Second(c.limiter.Refund(c.ctx, c.pool, "")) },
		"Refund: all of nothing": func(c *failing) error {
			return harness.Second(c.known(c.limit).limiter.Refund(c.ctx, c.pool, c.altered(`"count":1`, `"count":1e-15,"refunded":9e-16`)))
		},
		"Hold: extended, of no limit": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, holdToken, time.Minute))
		},
		"Settle: a token of no limit": func(c *failing) error { return harness.Second(c.limiter.Settle(c.ctx, c.pool, holdToken)) },
		"Settle: all of no token":     func(c *failing) error { return harness.Second(c.limiter.Settle(c.ctx, c.pool, "~")) },
		"Settle: two fields": func(c *failing) error {
			return harness.Second(c.limiter.Settle(c.ctx, c.pool, holdToken+`[["of", "`+privateKey+`"]]`))
		},
		"InTx: no function": func(c *failing) error { return c.limiter.InTx(c.ctx, c.pool, nil) },
		"InTx: a connection in a transaction": func(c *failing) error {
			return c.begun(func(conn *pgx.Conn) error { return c.limiter.InTx(c.ctx, conn, c.consumed) })
		},
		"InSQLTx: no function": func(c *failing) error { return c.limiter.InSQLTx(c.ctx, c.sql(), nil) },
		"InTx: a level": func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, c.consumed, ratelimit.Isolation("no level"))
		},
		"InTx: no level":   func(c *failing) error { return c.limiter.InTx(c.ctx, c.pool, c.consumed, ratelimit.Isolation("")) },
		"SendTx: no level": func(c *failing) error { return c.limiter.SendTx(c.ctx, c.pool, c.batch(), ratelimit.Isolation("")) },
		"InSQLTx: a level": func(c *failing) error {
			return c.limiter.InSQLTx(c.ctx, c.sql(), c.consumedSQL, ratelimit.Isolation("no level"))
		},
		"SendTx: COMMIT":              ending("COMMIT"),
		"SendTx: begin, by a comment": ending("-- mine\n/* of * mine */ ; begin"),
		"SendTx: rollback;":           ending("\trollback;"),
		"SendTx: END":                 ending("END WORK"),
		"SendTx: START":               ending("start transaction"),
		"SendTx: ABORT":               ending("Abort--"),
		"SendTx: PREPARE TRANSACTION": ending("PREPARE  TRANSACTION 'x'"),
		"InSQLTx: no database":        func(c *failing) error { return c.limiter.InSQLTx(c.ctx, nil, c.consumedSQL) },
		"InSQLTx: a nil database":     func(c *failing) error { return c.limiter.InSQLTx(c.ctx, (*sql.DB)(nil), c.consumedSQL) },
		"InSQLTx: Hot of no limit": func(c *failing) error {
			return c.limiter.InSQLTx(c.ctx, c.sql(), c.consumedSQL, ratelimit.Hot(ratelimit.Request{}))
		},
		"SendTx: no batch":    func(c *failing) error { return c.limiter.SendTx(c.ctx, c.pool, nil) },
		"SendTx: no database": func(c *failing) error { return c.limiter.SendTx(c.ctx, nil, c.batch()) },
		"SendTx: a connection in a transaction": func(c *failing) error {
			return c.begun(func(conn *pgx.Conn) error { return c.limiter.SendTx(c.ctx, conn, c.batch()) })
		},
		"SendTx: Hot":        func(c *failing) error { return c.limiter.SendTx(c.ctx, c.pool, c.batch(), ratelimit.Hot(c.request())) },
		"Retry: no function": func(c *failing) error { return new(ratelimit.Limiter).Retry(c.ctx, nil) },
		"Retry: Isolation":   func(c *failing) error { return c.limiter.Retry(c.ctx, panics, ratelimit.Isolation(pgx.Serializable)) },
		"Retry: Hot": func(c *failing) error {
			return c.limiter.Retry(c.ctx, panics, ratelimit.Attempts(2), ratelimit.Hot(c.request()))
		},
		"Retry: nil":         func(c *failing) error { return c.limiter.Retry(c.ctx, panics, nil) },
		"InTx: nil":          func(c *failing) error { return c.limiter.InTx(c.ctx, c.pool, c.consumed, ratelimit.Attempts(2), nil) },
		"SendTx: nil":        func(c *failing) error { return c.limiter.SendTx(c.ctx, c.pool, c.batch(), nil) },
		"Sweep: no limit":    func(c *failing) error { return harness.Second(c.limiter.Sweep(c.ctx, c.pool)) },
		"Sweep: no database": func(c *failing) error { return harness.Second(c.limiter.Sweep(c.ctx, nil, c.limit)) },
		"Sweep: a transaction": func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(_ context.Context, tx pgx.Tx) error { return harness.Second(c.limiter.Sweep(c.ctx, tx, c.limit)) })
		},
		"Publish: no limits": func(c *failing) error {
			return new(ratelimit.Limiter).Publish(c.ctx, c.pool, "p", []ratelimit.Limit{}...)
		},
		"Publish: no database": func(c *failing) error { return new(ratelimit.Limiter).Publish(c.ctx, nil, "p", c.limit) },
		"Publish: no program":  func(c *failing) error { return new(ratelimit.Limiter).Publish(c.ctx, c.pool, "", c.limit) },
		"Publish: a bad name":  func(c *failing) error { return new(ratelimit.Limiter).Publish(c.ctx, c.pool, "\xff", c.limit) },
		"Publish: a long name": func(c *failing) error {
			return new(ratelimit.Limiter).Publish(c.ctx, c.pool, strings.Repeat("n", 256), c.limit)
		},
		"Validate: the zero Limit": func(*failing) error { return ratelimit.Limit{}.Validate() },
		"UnmarshalJSON: no object": func(*failing) error { return new(ratelimit.Config).UnmarshalJSON([]byte("1")) },
	})
	add(failure{is: exceeds}, map[string]func(c *failing) error{
		"Wait: more than the capacity": func(c *failing) error { return verbCalls(c, c.pool, c.request().Count(101))["Wait"]() },
		"Take: a capacity below one token": func(c *failing) error {
			return c.takes(c.pool, 2, ratelimit.TokenBucket(c.limit.Name(), 0.5, time.Hour).Key(privateKey))
		},
		"Hold: more slots than there are": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, "work", time.Minute, c.slots().Count(3)))
		},
	})
	add(failure{is: denied}, map[string]func(c *failing) error{
		"SendTx: a denial": func(c *failing) error {
			return c.sends(c.pool, func(batch *pgx.Batch) {
				if _, err := c.limiter.QueueConsume(c.ctx, batch, c.request().Count(100)); err != nil {
					c.Error(err)
				}
			})
		},
	})
	add(failure{is: ratelimit.ErrHoldLost}, map[string]func(c *failing) error{
		"Hold: extended, no hold": func(c *failing) error {
			return harness.Second(c.limiter.Hold(c.ctx, c.pool, c.holdOf(), time.Minute))
		},
		"Settle: no hold": func(c *failing) error { return harness.Second(c.limiter.Settle(c.ctx, c.pool, holdToken, c.request())) },
	})
	add(failure{is: ratelimit.ErrHoldLost, gone: 1}, map[string]func(c *failing) error{
		"Release: the id of a hold with an end": func(c *failing) error {
			if _, err := c.limiter.Hold(c.ctx, c.pool, "work", time.Minute, c.request()); err != nil {
				c.Error(err)
			}
			return harness.Second(c.limiter.Release(c.ctx, c.pool, "work", c.request()))
		},
		"During: the hold is lost": func(c *failing) error {
			return c.during(c.pool, 6*time.Second, func(ctx context.Context) ([]ratelimit.Request, error) {
				_, err := c.pool.Exec(ctx, "DELETE FROM ratelimit.holds WHERE name = $1", c.limit.Name())
				<-ctx.Done()
				return nil, errors.Join(err, context.Cause(ctx))
			})
		},
		"During: the hold is not extended": func(c *failing) error {
			return c.during(notExtending{c.pool}, 3*time.Second, func(ctx context.Context) ([]ratelimit.Request, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			})
		},
	})
	add(failure{is: exhausted}, map[string]func(c *failing) error{
		"During: conflicts without end": func(c *failing) error {
			return c.during(c.untilConflict(conflicting), time.Minute, using())
		},
		"InTx: conflicts without end": func(c *failing) error { return c.limiter.InTx(c.ctx, conflicting, c.consumed, ratelimit.Attempts(2)) },
		"InTx: the context ends between conflicts": func(c *failing) error {
			cancel := c.cancelable()
			return c.limiter.InTx(c.ctx, conflicting, func(ctx context.Context, tx pgx.Tx) error {
				defer cancel()
				return c.consumed(ctx, tx)
			})
		},
		"InTx: the context ends in the second attempt": func(c *failing) error {
			cancel, attempts := c.cancelable(), 0
			return c.limiter.InTx(c.ctx, conflicting, func(ctx context.Context, tx pgx.Tx) error {
				if attempts++; attempts == 2 {
					cancel()
					return ctx.Err()
				}
				return c.consumed(ctx, tx)
			})
		},
		"InSQLTx: conflicts without end": func(c *failing) error {
			db := stdlib.OpenDBFromPool(conflicting)
			defer db.Close()
			return c.limiter.InSQLTx(c.ctx, db, c.consumedSQL, ratelimit.Attempts(2))
		},
		"SendTx: conflicts without end": func(c *failing) error { return c.limiter.SendTx(c.ctx, conflicting, c.batch(), ratelimit.Attempts(2)) },
		"Retry: conflicts without end": func(c *failing) error {
			return new(ratelimit.Limiter).Retry(c.ctx, func(context.Context) error { return verbCalls(c, conflicting, c.request())["Consume"]() }, ratelimit.Attempts(2))
		},
		"Sweep: conflicts without end": func(c *failing) error {
			c.ctx = soonEnded(c)
			return harness.Second(c.limiter.Sweep(c.ctx, beginRefused{c.pool, "40001"}, c.limit))
		},
	})
	add(failure{is: exhausted, bare: true}, map[string]func(c *failing) error{
		"Publish: conflicts without end": func(c *failing) error {
			return new(ratelimit.Limiter).Publish(soonEnded(c), harness.Refusing{Code: "40001"}, "p", c.limit)
		},
	})
	add(failure{is: context.Canceled}, map[string]func(c *failing) error{
		"During: the context ends before the function is called": func(c *failing) error {
			cancel := c.cancelable()
			c.limiter.Observer = func(context.Context, ratelimit.Decision) { cancel() }
			return c.during(c.pool, time.Minute, using())
		},
		"InTx: the context ends in the queue": func(c *failing) error {
			return c.limiter.InTx(ended(c.ctx), c.pool, c.consumed, ratelimit.Hot(c.request()))
		},
	})
	add(failure{is: context.Canceled, gone: 100}, map[string]func(c *failing) error{
		"Wait: the context ends meanwhile": func(c *failing) error { return c.waits(c.pool, func() {}) },
	})
	add(failure{is: context.Canceled, bare: true}, map[string]func(c *failing) error{
		"InTx: the context ends before COMMIT": func(c *failing) error {
			ctx, cancel := context.WithCancelCause(c.ctx)
			return c.limiter.InTx(ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				defer cancel(errors.New("the caller went home"))
				return c.consumed(ctx, tx)
			})
		},
		"InSQLTx: the context ends before COMMIT": func(c *failing) error {
			cancel := c.cancelable()
			return c.limiter.InSQLTx(c.ctx, c.sql(), func(ctx context.Context, tx *sql.Tx) error {
				defer cancel()
				return c.consumedSQL(ctx, tx)
			})
		},
		"SendTx: no connection": func(c *failing) error { return c.limiter.SendTx(ended(c.ctx), c.pool, c.batch()) },
	})
	add(failure{is: unknown}, map[string]func(c *failing) error{
		"Sweep: the answer to COMMIT is lost": func(c *failing) error { return harness.Second(c.limiter.Sweep(c.ctx, commitLost{c.pool}, c.limit)) },
	})
	add(failure{is: unknown, gone: 1}, map[string]func(c *failing) error{
		"QueueConsume: a lost answer":            func(c *failing) error { return c.queued(c.cutPool(aRow), c.request()) },
		"SendTx: the answer to the call is lost": func(c *failing) error { return c.limiter.SendTx(c.ctx, c.cutPool(aRow), c.batch()) },
	})
	add(failure{is: unknown, gone: 101}, map[string]func(c *failing) error{
		"Wait: the context ends meanwhile, and the database has gone": func(c *failing) error {
			pool := harness.Reconfigured(c.T, c.pool, func(*pgxpool.Config) {})
			return c.waits(pool, pool.Close)
		},
	})
	add(failure{is: unknown, bare: true}, map[string]func(c *failing) error{
		"InTx: ended by a statement": func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error { return harness.Second(tx.Exec(ctx, "ROLLBACK")) })
		},
		"SendTx: a pooler loses its server": func(c *failing) error {
			return c.sends(c.pool, func(batch *pgx.Batch) {
				batch.Queue("DO $$ BEGIN RAISE 'server conn crashed?' USING ERRCODE = '08P01'; END $$")
				batch.QueuedQueries[1].Fn = func(results pgx.BatchResults) error {
					_, err := results.Exec()
					return fmt.Errorf("mine: %w", err)
				}
			})
		},
	})
	add(failure{is: unknown, gone: 1, bare: true}, map[string]func(c *failing) error{
		"InTx: the answer to COMMIT is lost": func(c *failing) error { return c.limiter.InTx(c.ctx, commitLost{c.pool}, c.consumed) },
		"InTx: the function commits": func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				return errors.Join(c.consumed(ctx, tx), tx.Commit(ctx))
			})
		},
		"InSQLTx: the function commits": func(c *failing) error {
			return c.limiter.InSQLTx(c.ctx, c.sql(), func(ctx context.Context, tx *sql.Tx) error {
				return errors.Join(c.consumedSQL(ctx, tx), tx.Commit())
			})
		},
		"SendTx: a function fails after COMMIT": func(c *failing) error {
			return c.sends(c.pool, func(batch *pgx.Batch) {
				batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error { return errors.New("mine") })
			})
		},
		"SendTx: a function fails as if by a conflict or a denial, and the answer to COMMIT is lost": func(c *failing) error {
			return c.sends(c.cutPool(theCommit), func(batch *pgx.Batch) {
				batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error { return errors.Join(state("40001"), &ratelimit.DeniedError{}) })
			})
		},
		"SendTx: the answer to COMMIT is lost": func(c *failing) error { return c.limiter.SendTx(c.ctx, c.cutPool(theCommit), c.batch()) },
	})
	add(failure{is: state("3F000")}, map[string]func(c *failing) error{
		"SendTx: a schema that is not migrated": func(c *failing) error {
			return c.limiter.SendTx(c.ctx, harness.Connect(c.T, harness.NewDatabase(c.T), 1), c.batch())
		},
		"Sweep: a schema that is not migrated": func(c *failing) error {
			return harness.Second(c.limiter.Sweep(c.ctx, harness.Connect(c.T, harness.NewDatabase(c.T), 1), c.limit))
		},
	})
	maps.Copy(all, map[string]failure{
		"Consume: a Coalescer of another schema": {by: "Consume", is: invalid, do: func(c *failing) error {
			coalescer := &ratelimit.Coalescer{Pool: c.pool}
			harness.Succeeds(c.T, harness.Second(new(ratelimit.Limiter).Consume(c.ctx, coalescer, ratelimit.TokenBucket("another", 1, time.Hour).Global())))
			return harness.Second((&ratelimit.Limiter{Schema: "another"}).Consume(c.ctx, coalescer, c.request()))
		}},
		"Consume: a Coalescer with a wrong Ahead": {by: "Consume", is: invalid, do: func(c *failing) error {
			return harness.Second(c.limiter.Consume(c.ctx, &ratelimit.Coalescer{Pool: c.pool, Ahead: 50}, c.request()))
		}},
		"Consume: a Coalescer with Ahead and AsyncCommit": {by: "Consume", is: invalid, do: func(c *failing) error {
			return harness.Second(c.limiter.Consume(c.ctx, &ratelimit.Coalescer{Pool: c.pool, Ahead: time.Second, AsyncCommit: true}, c.request()))
		}},
		"Consume: a Coalescer with a wrong Pace": {by: "Consume", is: invalid, do: func(c *failing) error {
			return harness.Second(c.limiter.Consume(c.ctx, &ratelimit.Coalescer{Pool: c.pool, Pace: 3}, c.request()))
		}},
		"QueueConsume: a lost answer in a transaction": {by: "QueueConsume", is: io.ErrUnexpectedEOF, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.cutPool(aRow), func(ctx context.Context, tx pgx.Tx) error { return tx.SendBatch(ctx, c.batch()).Close() })
		}},
		"QueueConsume: an error of the server": {by: "QueueConsume", is: state("40001"), do: func(c *failing) error {
			return c.queued(conflicting, c.request())
		}},
		"InTx: rolled back by hand": {by: "InTx", is: pgx.ErrTxCommitRollback, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				return errors.Join(c.consumed(ctx, tx), tx.Rollback(ctx))
			})
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
		"SendTx: COMMIT is refused": {by: "SendTx", is: state("23505"), bare: true, do: func(c *failing) error {
			return c.sends(c.pool, func(batch *pgx.Batch) { batch.Queue("INSERT INTO later VALUES (1)") })
		}},
		"Retry: an unknown outcome beside a conflict": {by: "its function", is: unknown, gone: 1, do: func(c *failing) error {
			return new(ratelimit.Limiter).Retry(c.ctx, func(context.Context) error {
				return errors.Join(state("40001"), verbCalls(c, answerLost{c.pool}, c.request())["Consume"]())
			})
		}},
		"Sweep: holds": {by: "Sweep", is: state("42883"), bare: true, do: func(c *failing) error {
			pool := harness.NewPool(c.T, 1)
			harness.MustExec(c.T, pool, "DROP FUNCTION ratelimit._sweep_holds")
			return harness.Second(c.limiter.Sweep(c.ctx, pool, c.limit))
		}},
		"Publish: no right": {by: "Publish", is: state("42501"), bare: true, do: func(c *failing) error {
			return new(ratelimit.Limiter).Publish(c.ctx, harness.Refusing{Code: "42501"}, "p", c.limit)
		}},
	})
	maps.Copy(all, failuresOfOpen(conflicting))
	return all
}

// TestEveryErrorMatchesASentinel causes every error that package ratelimit can return. Each names its limit and no key, matches what
// it should, and says that the outcome is unknown if tokens are gone. The table in errors.go says the same, and no constructor of
// an error in the source is left out.
func TestEveryErrorMatchesASentinel(t *testing.T) {
	t.Parallel()
	pool, conflicting := harness.NewPool(t, 4), harness.NewPool(t, 2)
	harness.MustExec(t, pool, "CREATE TABLE later (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
	harness.MustExec(t, pool, "INSERT INTO later VALUES (1)")
	harness.MustExec(t, conflicting, "CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE serialization_failure; END'")
	harness.MustExec(t, conflicting, "CREATE TRIGGER conflict BEFORE INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW EXECUTE FUNCTION conflict()")
	harness.MustExec(t, conflicting, "CREATE TRIGGER conflict BEFORE INSERT OR UPDATE ON ratelimit.definitions FOR EACH ROW EXECUTE FUNCTION conflict()")
	sentinels := map[string]error{
		"ErrDenied": ratelimit.ErrDenied, "ErrInvalid": ratelimit.ErrInvalid, "ErrBadRequest": ratelimit.ErrBadRequest, "ErrExceedsCapacity": ratelimit.ErrExceedsCapacity,
		"ErrHoldLost": ratelimit.ErrHoldLost, "migrations.ErrBehind": migrations.ErrBehind, "ErrClosed": ratelimit.ErrClosed, "ErrAttemptsExhausted": ratelimit.ErrAttemptsExhausted, "ErrUnknownOutcome": ratelimit.ErrUnknownOutcome,
	}
	seen := map[string][]string{}
	var texts []string
	follows := follow.By(new(ratelimit.Limiter), follow.Settings{DB: pool})
	harness.Succeeds(t, follow.Load(t.Context(), follows))
	for name, f := range failures(conflicting) {
		c := &failing{t, t.Context(), new(ratelimit.Limiter), ratelimit.TokenBucket("of "+name, 1, 24*time.Hour, ratelimit.Capacity(100), ratelimit.MaxReserved(10)), pool}
		follow.With(c.limiter, follows)
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
			if harness.SQLState(err) != want.Code {
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
		gone := 100 - harness.ReadBalance(t, new(ratelimit.Limiter), pool, c.request())
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
	source, err := os.ReadFile("../../ratelimit/errors.go")
	harness.Succeeds(t, err)
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
	"another program sweeps, or has swept":                       "it ends a sweep of the background, and is not returned",
	"nobody sweeps it: a session keeps its row of ratelimit.sweeps locked, or a batch takes minutes. End the first; its pid is one of: SELECT pid FROM pg_locks WHERE relation = 'ratelimit.sweeps'::regclass AND database = (SELECT oid FROM pg_database WHERE datname = current_database())": "it is told to Options.OnError",
	"ratelimit: schema: ": "it is told to Options.OnError",
	"ratelimit: publish: other numbers are published: limit %s": "it is told to Options.OnError",
	"ratelimit: publish: other numbers are published: another version of program %q is in use, or was within five minutes, and this one defines other limits": "it is told to Options.OnError",
	"ratelimit: overrides: the row with id %d, of limit %q, is passed over: its effect or a number is not valid":                                              "it is told to Options.OnError",
}

// constructors are the errors that the source of package ratelimit makes, by place.
func constructors(t *testing.T) map[string]constructor {
	t.Helper()
	files, err := filepath.Glob("../../ratelimit/*.go")
	harness.Succeeds(t, err)
	all := map[string]constructor{}
	set := token.NewFileSet()
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(set, path, nil, 0)
		harness.Succeeds(t, err)
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
