package verbs_test

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// failuresOfOpen are those of Open and Close.
func failuresOfOpen(conflicting *pgxpool.Pool) map[string]failure {
	invalid := ratelimit.ErrInvalid
	state := func(code string) error { return &pgconn.PgError{Code: code} }
	// The server refuses everything, so an error that is another one was made before anything was sent.
	unsent := func(change func(c *failing, o *ratelimit.Options)) func(c *failing) error {
		return func(c *failing) error {
			return c.opens(harness.Refusing{Code: "55P03"}, func(o *ratelimit.Options) {
				o.NoSweep = true // which needs a pool, and so hides what is sent
				change(c, o)
			})
		}
	}
	noRight := func(change func(db ratelimit.DB, o *ratelimit.Options)) failure {
		return failure{by: "Open", is: state("42501"), bare: true, do: func(c *failing) error {
			role := harness.CreateRole(c.T, c.pool)
			harness.MustExec(c.T, c.pool, harness.Execute(role)+"; GRANT USAGE ON SCHEMA ratelimit TO "+role)
			app := harness.AsRole(c.T, c.pool, role, 1)
			return c.opens(app, func(o *ratelimit.Options) { change(app, o) })
		}}
	}
	readOnly := func(change func(db ratelimit.DB, o *ratelimit.Options)) failure {
		return failure{by: "Open", is: state("25006"), bare: true, do: func(c *failing) error {
			standby := harness.Reconfigured(c.T, c.pool, func(config *pgxpool.Config) {
				harness.StartWith(c.T, config.ConnConfig, map[string]string{"default_transaction_read_only": "on"})
			})
			return c.opens(standby, func(o *ratelimit.Options) { change(standby, o) })
		}}
	}
	lastFlush := func(noBackground bool) failure {
		return failure{by: "Close", is: state("42P01"), gone: 1, bare: true, do: func(c *failing) error {
			limits := c.opened(func(o *ratelimit.Options) {
				o.NoBackground = noBackground
				o.Usage = &usage.Recorder{DB: c.pool, Every: time.Hour, OnError: func(error) {}}
			})
			if _, err := limits.Consume(c.ctx, c.pool, c.request()); err != nil {
				return err
			}
			harness.MustExec(c.T, c.pool, "ALTER TABLE ratelimit.usage RENAME TO away")
			defer harness.MustExec(c.T, c.pool, "ALTER TABLE ratelimit.away RENAME TO usage")
			return limits.Close(c.ctx)
		}}
	}
	return map[string]failure{
		"Open: no database":                {by: "Open", is: invalid, bare: true, do: func(c *failing) error { return c.opens(nil, func(*ratelimit.Options) {}) }},
		"Open: a Coalescer without a pool": {by: "Open", is: invalid, bare: true, do: func(c *failing) error { return c.opens(&ratelimit.Coalescer{}, func(*ratelimit.Options) {}) }},
		"Open: a connection": {by: "Open", is: invalid, bare: true, do: func(c *failing) error {
			return c.opens(harness.Acquire(c.T, c.pool), func(*ratelimit.Options) {})
		}},
		"Open: a transaction": {by: "Open", is: invalid, bare: true, do: func(c *failing) error {
			return c.limiter.InTx(c.ctx, c.pool, func(_ context.Context, tx pgx.Tx) error { return c.opens(tx, func(*ratelimit.Options) {}) })
		}},
		"Open: a DB that begins no transactions": {by: "Open", is: invalid, bare: true, do: func(c *failing) error {
			return c.opens(harness.Refusing{Code: "55P03"}, func(*ratelimit.Options) {})
		}},
		"Open: no program":  {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.Program = "" })},
		"Open: no limits":   {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.Limits = nil })},
		"Open: SweepEvery":  {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.SweepEvery = -1 })},
		"Open: a slow poll": {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.OverridesEvery = time.Hour })},
		"Open: overrides and none": {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) {
			o.OverridesListen, o.NoOverrides = true, true
		})},
		"Open: a Recorder of another schema": {by: "Open", is: invalid, bare: true, do: func(c *failing) error {
			return c.opens(c.pool, func(o *ratelimit.Options) { o.Usage = &usage.Recorder{DB: c.pool, Schema: "another"} })
		}},
		"Open: sweeps and none": {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.SweepEvery = time.Hour })},
		"Open: a background and none": {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) {
			o.NoBackground, o.OverridesEvery = true, time.Second
		})},
		"Open: a poll before the last": {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.OverridesEvery = -1 })},
		"Open: it listens on a pool of another driver": {by: "Open", is: invalid, bare: true, do: func(c *failing) error {
			return c.opens(ratelimit.SQL(c.sql()), func(o *ratelimit.Options) { o.OverridesListen = true })
		}},
		"Open: it listens on one connection": {by: "Open", is: invalid, bare: true, do: func(c *failing) error {
			return c.opens(harness.Connect(c.T, c.pool.Config().ConnString(), 1), func(o *ratelimit.Options) { o.OverridesListen = true })
		}},
		"Open: a name that no schema has": {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.Schema = "a.b" })},
		"Open: a Recorder without a pool": {by: "Open", is: invalid, bare: true, do: unsent(func(_ *failing, o *ratelimit.Options) { o.Usage = new(usage.Recorder) })},
		"Open: a limit twice":             {by: "Open", is: invalid, do: unsent(func(c *failing, o *ratelimit.Options) { o.Limits = []ratelimit.Limit{c.limit, c.limit} })},
		"Open: a limit that is invalid": {by: "Open", is: invalid, do: unsent(func(c *failing, o *ratelimit.Options) {
			o.Limits = []ratelimit.Limit{ratelimit.TokenBucket(c.limit.Name(), -1, time.Hour)}
		})},

		"Open: a schema that is not migrated": {by: "Open", is: migrations.ErrBehind, bare: true, do: func(c *failing) error {
			return c.opens(harness.Connect(c.T, harness.NewDatabase(c.T), 1), func(*ratelimit.Options) {})
		}},
		"Open: an older schema": {by: "Open", is: migrations.ErrBehind, bare: true, do: func(c *failing) error {
			pool := harness.Connect(c.T, harness.NewDatabase(c.T), 1)
			harness.MustExec(c.T, pool, "CREATE SCHEMA ratelimit; CREATE FUNCTION ratelimit.schema(OUT version integer, OUT hash text) LANGUAGE sql AS $$SELECT 0, ''$$")
			return c.opens(pool, func(*ratelimit.Options) {})
		}},
		"Open: the context has ended": {by: "Open", is: context.Canceled, bare: true, do: func(c *failing) error {
			c.ctx = ended(c.ctx)
			return c.opens(c.pool, func(*ratelimit.Options) {})
		}},
		"Open: an error of the server": {by: "Open", is: state("55P03"), bare: true, do: unsent(func(*failing, *ratelimit.Options) {})},
		"Open: no database of this name": {by: "Open", is: state("3D000"), bare: true, do: func(c *failing) error {
			return c.opens(harness.Refusing{Code: "3D000"}, func(o *ratelimit.Options) { o.NoSweep = true })
		}},
		"Open: the login is refused": {by: "Open", is: state("28P01"), bare: true, do: func(c *failing) error {
			return c.opens(harness.Refusing{Code: "28P01"}, func(o *ratelimit.Options) { o.NoSweep = true })
		}},
		"Open: no tables": {by: "Open", is: state("42P01"), bare: true, do: func(c *failing) error {
			return c.opens(harness.Refusing{Code: "42P01"}, func(o *ratelimit.Options) { o.NoSweep = true })
		}},
		"Open: no right to read overrides": noRight(func(ratelimit.DB, *ratelimit.Options) {}),
		"Open: no right to sweep":          noRight(func(_ ratelimit.DB, o *ratelimit.Options) { o.NoOverrides = true }),
		"Open: no right to record usage": noRight(func(db ratelimit.DB, o *ratelimit.Options) {
			o.NoOverrides, o.NoSweep, o.Usage = true, true, &usage.Recorder{DB: db}
		}),
		"Open: no right to publish":   noRight(func(_ ratelimit.DB, o *ratelimit.Options) { o.NoOverrides, o.NoSweep = true, true }),
		"Open: no sweep in a standby": readOnly(func(ratelimit.DB, *ratelimit.Options) {}),
		"Open: no usage in a standby": readOnly(func(db ratelimit.DB, o *ratelimit.Options) {
			o.NoSweep, o.Usage = true, &usage.Recorder{DB: db}
		}),
		"Open: nothing is published in a standby": readOnly(func(_ ratelimit.DB, o *ratelimit.Options) { o.NoSweep = true }),
		"Open: a limit of another program": {by: "Open", is: state("22023"), do: func(c *failing) error {
			if err := new(ratelimit.Limiter).Publish(c.ctx, c.pool, "another", ratelimit.FixedWindow(c.limit.Name(), 1, time.Hour)); err != nil {
				return err
			}
			return c.opens(c.pool, func(*ratelimit.Options) {})
		}},
		"Open: conflicts without end": {by: "Open", is: ratelimit.ErrAttemptsExhausted, bare: true, do: func(c *failing) error {
			ctx, cancel := context.WithCancel(c.ctx)
			defer cancel()
			c.ctx = ctx
			return c.opens(harness.Reconfigured(c.T, conflicting, func(config *pgxpool.Config) { config.ConnConfig.Tracer = afterConflict{cancel} }),
				func(*ratelimit.Options) {})
		}},

		"Close: a Coalescer, and a call is under way when the context ends": {by: "Close", is: context.Canceled, gone: 1, bare: true, do: func(c *failing) (closed error) {
			coalescer := &ratelimit.Coalescer{Pool: c.pool}
			coalescer.OnBatch = func(int) { closed = coalescer.Close(ended(c.ctx)) }
			harness.Succeeds(c, harness.Second(c.limiter.Consume(c.ctx, coalescer, c.request())))
			harness.CloseCoalescer(c, coalescer)
			return closed
		}},
		"Close: a Coalescer, and what is ahead cannot come back": {by: "Close", bare: true, do: func(c *failing) error {
			for {
				pool := harness.Reconfigured(c.T, c.pool, func(*pgxpool.Config) {})
				coalescer := &ratelimit.Coalescer{Pool: pool, Ahead: time.Second}
				for range 100 {
					harness.Succeeds(c, harness.Second(new(ratelimit.Limiter).Consume(c.ctx, coalescer, harness.Slow("ahead", 1e6).Global())))
				}
				pool.Close()
				if err := coalescer.Close(c.ctx); err != nil { // else it came back before, on a slow machine
					return err
				}
			}
		}},
		"Close: a call is under way when the context ends": {by: "Close", is: context.Canceled, gone: 1, bare: true, do: func(c *failing) (closed error) {
			var limits *ratelimit.Limiter
			limits = c.opened(func(o *ratelimit.Options) {
				o.Observer = func(ctx context.Context, _ ratelimit.Decision) { closed = limits.Close(ended(ctx)) }
			})
			if _, err := limits.Consume(c.ctx, c.pool, c.request()); err != nil {
				return err
			}
			harness.CloseLimiter(c, limits)
			return closed
		}},
		"Close: the last flush fails":                       lastFlush(false),
		"Close: the last flush fails, without a background": lastFlush(true),
	}
}

// opening opens a Limiter with a list of one limit, and options that were changed.
func (c *failing) opening(db ratelimit.DB, change func(o *ratelimit.Options)) (*ratelimit.Limiter, error) {
	o := ratelimit.Options{Program: "failing " + rand.Text(), Limits: []ratelimit.Limit{c.limit}, OnError: harness.NoError(c)}
	change(&o)
	return ratelimit.Open(c.ctx, db, o)
}

// opens wants no Limiter.
func (c *failing) opens(db ratelimit.DB, change func(o *ratelimit.Options)) error {
	limits, err := c.opening(db, change)
	if (limits == nil) != (err != nil) {
		c.Errorf("a Limiter, %v, and an error, %v", limits, err)
	}
	if limits != nil {
		harness.CloseLimiter(c, limits)
	}
	return err
}

// opened is a Limiter without a background, unless the options are changed.
func (c *failing) opened(change func(o *ratelimit.Options)) *ratelimit.Limiter {
	limits, err := c.opening(c.pool, func(o *ratelimit.Options) {
		o.NoBackground = true
		change(o)
	})
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { harness.CloseLimiter(c, limits) })
	return limits
}
