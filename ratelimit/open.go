package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/migrations"
)

// Options say what [Open] does.
type Options struct {
	// Program is the name under which all processes of a program publish their limits, 1 to 255 bytes. Required, unless
	// NoPublish.
	Program string

	// Limits are all limits of the program, each name once. Required, unless NoPublish and NoSweep. A call for another
	// limit is [ErrInvalid].
	Limits []Limit

	// Usage records what is granted and denied: a [*usage.Recorder] on the same pool, for one Schema. nil: nothing is
	// recorded.
	//
	// [*usage.Recorder]: https://pkg.go.dev/github.com/txlimit/txlimit/ratelimit/usage#Recorder
	Usage interface {
		Validate() error                         // is called first: its error is that of Open
		Observe(ctx context.Context, d Decision) // is called after each call, as an Observer
		Flush(ctx context.Context) error         // is called by Open once
		Run(ctx context.Context) error           // records until ctx ends, and then once more
	}

	// OverridesEvery is the time between two polls of the overrides: 1 ms to 1 s, the default for 0.
	OverridesEvery time.Duration

	// OverridesListen also keeps one connection of the pool, a *pgxpool.Pool of two or more, to be told of changes at
	// once (LISTEN). It does not work through PgBouncer in transaction mode.
	OverridesListen bool

	// Schema, Clock, Observer and OnRetry are those of [Limiter]. Usage takes the schema, too. Observer is called
	// before Usage.
	Schema   string
	Clock    func() time.Time
	Observer func(ctx context.Context, d Decision)
	OnRetry  func(ctx context.Context, attempt int, err error)

	// OnError is told what goes wrong in the background, of a sweep that another session keeps out, of a schema that
	// differs, and of other numbers that are published. It is called by several goroutines. nil: slog.Default(), for
	// the polls once a minute. Errors of Usage go to the Recorder's.
	OnError func(err error)

	// SweepEvery is about the time from one sweep to the next, and before the first. 0: 10 minutes. Less than 1 ms is
	// [ErrInvalid].
	SweepEvery time.Duration

	// Each switches a part off. docs/start-and-stop.md says when, and which rights each part needs.
	NoOverrides  bool // blocks and other numbers do not hold in this process
	NoPublish    bool // the limits are published elsewhere, for example when the program migrates
	NoSweep      bool // another program sweeps
	NoBackground bool // for a process that ends soon: nothing is swept, overrides are read once, usage is written by Close. See [Open]

	overrides *overrides
	told      string // what differs from what is published
}

const (
	defaultSweepEvery = 10 * time.Minute
	otherSweepPause   = 50 * time.Millisecond
	sweepPauses       = 1200 // so many: a minute
	sweepKeptOut      = 3    // times in a row are told
	heartbeatEvery    = time.Minute
)

// Open starts what a program needs, and returns its Limiter:
//
//	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
//		Program: "shop",
//		Limits:  []ratelimit.Limit{signUps, sendMessage},
//		Usage:   &usage.Recorder{DB: pool},
//	})
//	if err != nil {
//		return err
//	}
//
// In this order; if a part fails, the error names it and says what to grant (SQLSTATE 42501) or to switch off (25006,
// on a standby), and nothing runs:
//
//  1. It checks the options ([ErrInvalid]), before anything is sent.
//  2. It checks the schema: [migrations.ErrBehind] if it is older than the library needs.
//  3. It loads the overrides ([Limiter.Override]), so that they hold from the first call on.
//  4. It checks that it may sweep, and write the usage.
//  5. It publishes the limits ([Limiter.Publish]).
//
// In the background, until [Limiter.Close], it follows the overrides, sweeps ([Limiter.Sweep]) and writes the usage.
// ctx bounds Open alone. With NoBackground, the overrides are those of Open, until the next Override, Block, Restore or
// Unblock of this Limiter.
//
// db is a pool: a *pgxpool.Pool, [SQL] of a *sql.DB, or a [Coalescer], whose pool is used. A connection or a
// transaction is [ErrInvalid]. On a DB of package ratelimittest, nothing is checked, swept or published. With
// several servers, open one Limiter for each.
func Open(ctx context.Context, db DB, options Options) (*Limiter, error) {
	o := options
	pool, err := o.check(db)
	if err != nil {
		return nil, err
	}
	l := &Limiter{Schema: o.Schema, Clock: o.Clock, Observer: o.observer(), OnRetry: o.OnRetry, overrides: o.overrides, life: newLife()}
	l.life.fields = l.fields()
	if len(o.Limits) > 0 {
		l.definitions.only(o.Limits)
	}
	sweeps := !o.NoSweep && !o.NoBackground && !isInMemory(pool)
	var inTx inReadCommitted
	if sweeps {
		if inTx, err = l.readCommitted(pool); err != nil {
			return nil, err
		}
	}
	if err := o.start(ctx, pool, l, sweeps); err != nil {
		return nil, err
	}

	background, end := context.WithCancel(inschema.With(context.WithoutCancel(ctx), o.Schema))
	l.life.over, l.life.end = background, end
	if !o.NoBackground {
		if !o.NoPublish && !isInMemory(pool) {
			l.life.background.Go(func() { o.keepPublished(background, pool, l) })
		}
		if l.overrides != nil {
			l.life.background.Go(func() { l.overrides.run(background) })
		}
		if sweeps {
			l.life.background.Go(func() { l.keepSweeping(background, inTx, &o) })
		}
	}
	if o.Usage != nil {
		l.life.background.Go(func() { l.life.err = l.life.record(background, &o) })
	}
	return l, nil
}

// record writes the usage until ctx ends, and then for the last time. With a context that has ended, Run writes it at
// once.
func (f *life) record(ctx context.Context, o *Options) error {
	if o.NoBackground {
		<-ctx.Done()
	}
	err := o.Usage.Run(ctx)
	if f.early.Load() { // what the calls under way use is written when they have ended
		<-f.idle
		err = o.Usage.Run(ctx)
	}
	return err
}

// check checks the options, fills in their defaults, and returns the pool.
func (o *Options) check(db DB) (pool DB, err error) {
	if noDatabase(db) {
		return nil, fmt.Errorf("%w: open: %s", ErrInvalid, noDatabaseText)
	}
	if coalescer, ok := coalescerOf(db); ok {
		db = coalescer.Pool
	}
	if handles.IsOne(db) {
		return nil, fmt.Errorf("%w: open: a %s is no pool: several goroutines use it until Close", ErrInvalid, handles.Type(db))
	}
	if !o.NoPublish {
		if err := checkText("Options.Program", o.Program, maxNameLen); err != nil {
			return nil, fmt.Errorf("%w: open: %w", ErrInvalid, err)
		}
	}
	if len(o.Limits) == 0 && !(o.NoPublish && o.NoSweep) {
		return nil, fmt.Errorf("%w: open: Options.Limits is empty: list all limits of the program, or set NoPublish and NoSweep", ErrInvalid)
	}
	if err := definitionsOnly(o.Limits); err != nil {
		return nil, err
	}
	switch {
	case o.NoSweep && o.SweepEvery != 0:
		return nil, fmt.Errorf("%w: open: Options has NoSweep, and SweepEvery", ErrInvalid)
	case o.NoBackground && (o.SweepEvery != 0 || o.OverridesEvery != 0 || o.OverridesListen):
		return nil, fmt.Errorf("%w: open: Options has NoBackground, and says how often the background works", ErrInvalid)
	}
	for name, every := range map[string]time.Duration{"SweepEvery": o.SweepEvery, "OverridesEvery": o.OverridesEvery} {
		if every != 0 && every < time.Millisecond {
			return nil, fmt.Errorf("%w: open: Options.%s is %v: it must be 1ms or more, or 0 for the default (a bare number in Go is nanoseconds)", ErrInvalid, name, every)
		}
	}
	o.SweepEvery = cmp.Or(o.SweepEvery, defaultSweepEvery)
	if o.Schema != "" {
		if err := inschema.Check(o.Schema); err != nil {
			return nil, fmt.Errorf("%w: open: Options.Schema: %w", ErrInvalid, err)
		}
	}
	if handles.IsNil(o.Usage) {
		o.Usage = nil
	} else if err := o.Usage.Validate(); err != nil {
		return nil, err
	}
	if o.NoOverrides {
		if o.OverridesEvery != 0 || o.OverridesListen {
			return nil, fmt.Errorf("%w: open: Options has NoOverrides, and says how they are followed", ErrInvalid)
		}
		return db, nil
	}
	o.overrides = &overrides{db: db, schema: o.Schema, every: cmp.Or(o.OverridesEvery, defaultEvery), listens: o.OverridesListen, onError: o.OnError}
	if err := o.overrides.validate(); err != nil {
		return nil, err
	}
	return db, nil
}

func (o *Options) observer() func(ctx context.Context, d Decision) {
	switch {
	case o.Usage == nil:
		return o.Observer
	case o.Observer == nil:
		return o.Usage.Observe
	}
	return func(ctx context.Context, d Decision) {
		o.Observer(ctx, d)
		o.Usage.Observe(ctx, d)
	}
}

// start does what has to be done before the first call.
func (o *Options) start(ctx context.Context, db DB, l *Limiter, sweeps bool) error {
	if !isInMemory(db) {
		schema, err := migrations.Check(ctx, db, o.Schema)
		if err != nil {
			return o.refused("schema", err, "", "")
		}
		if text := schema.Differs(); text != "" {
			o.tell(errors.New("ratelimit: schema: " + text))
		}
	}
	if l.overrides != nil {
		if err := l.overrides.load(ctx); err != nil {
			return o.refused("", err, "SELECT on ratelimit.overrides", "set Options.NoOverrides")
		}
	}
	if sweeps {
		may, err := wire{db: db, schema: o.Schema}.queries().MaySweep(ctx)
		switch {
		case err != nil:
		case may.ReadOnly:
			err = stateError{"the session is read-only", "25006"}
		case may.Missing != "":
			err = stateError{"a right is missing", "42501"}
		}
		if err != nil {
			return o.refused("sweep", err, may.Missing, "set Options.NoSweep")
		}
	}
	if o.Usage != nil {
		if err := o.Usage.Flush(inschema.With(ctx, o.Schema)); err != nil {
			return o.refused("", fmt.Errorf("ratelimit: %w", inner{err}), "SELECT, INSERT, UPDATE and DELETE on ratelimit.usage and ratelimit.denials", "leave Options.Usage nil")
		}
	}
	if !o.NoPublish { // last, so that an Open that fails has published nothing
		if err := o.publish(ctx, db, l); err != nil {
			return o.refused("", err, "SELECT, INSERT, UPDATE and DELETE on ratelimit.definitions", "set Options.NoPublish")
		}
	}
	return nil
}

// publish publishes the list, or says that this process still uses it. It tells what is not as published, unless that
// was told before.
func (o *Options) publish(ctx context.Context, db DB, l *Limiter) error {
	row, err := l.publish(ctx, db, o.Program, pgtype.Bool{Bool: !o.NoBackground, Valid: true}, o.Limits)
	if err != nil {
		return err
	}
	var differ []error
	if !row.Counts.Bool {
		differ = append(differ, fmt.Errorf("ratelimit: publish: other numbers are published: another version of program %q is in use, or was within five minutes, and this one defines other limits", o.Program))
	}
	for _, other := range row.Others {
		differ = append(differ, fmt.Errorf("ratelimit: publish: other numbers are published: limit %s", other))
	}
	if text := fmt.Sprint(differ); text != o.told {
		o.told = text
		for _, err := range differ {
			o.tell(err)
		}
	}
	return nil
}

// keepPublished says every minute, until ctx ends, that this process uses its list. One that has not for five minutes
// is taken for dead.
func (o *Options) keepPublished(ctx context.Context, db DB, l *Limiter) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(heartbeatEvery - heartbeatEvery/8 + rand.N(heartbeatEvery/4)):
		}
		bounded, cancel := context.WithTimeout(ctx, heartbeatEvery/2)
		err := o.publish(bounded, db, l)
		cancel()
		if err != nil && ctx.Err() == nil {
			o.tell(err)
		}
	}
}

// refused is the error of a part of Open, with what can be done if the role or the server refuses it.
func (o *Options) refused(part string, err error, grant, without string) error {
	if part != "" {
		err = fmt.Errorf("ratelimit: %s: %w", part, inner{err})
	}
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Hint != "" && pgErr.Code == "22023" {
		return fmt.Errorf("%w: %s", err, pgErr.Hint)
	}
	switch state := sqlState(err); {
	case state == "3D000":
		return fmt.Errorf("%w: the server has no such database: correct the connection string", err)
	case strings.HasPrefix(state, "28"):
		return fmt.Errorf("%w: the server refused the login: correct the role, its password, or pg_hba.conf", err)
	case state == "42P01": // what lacks the schema says so already
		return fmt.Errorf("%w: is it the right database, and was the schema not renamed? Otherwise migrate (`txlimit migrate`)", err)
	case state == "42501":
		if grant == "" {
			grant = "CONNECT on the database, and what SELECT ratelimit.grant('its name', 'consume') gives"
		}
		if without != "" {
			grant += ", or " + without
		}
		grant, _ = inschema.Text(grant, o.Schema) // it was checked
		return fmt.Errorf("%w: grant this role %s", err, grant)
	case state == "25006":
		return fmt.Errorf("%w: this is a standby, or its sessions are read-only: %s here", err, without)
	}
	return err
}

// stateError is what the server would have said.
type stateError struct{ text, state string }

func (e stateError) Error() string    { return e.text + " (SQLSTATE " + e.state + ")" }
func (e stateError) SQLState() string { return e.state }

func (o *Options) tell(err error) {
	if o.OnError != nil {
		o.OnError(err)
		return
	}
	slog.Warn("rate limits", "error", visible.Error(err))
}

// keepSweeping sweeps until ctx ends.
func (l *Limiter) keepSweeping(ctx context.Context, inTx inReadCommitted, o *Options) {
	turns := &sweepTurns{inTx: inTx, schema: o.Schema, every: o.SweepEvery, marks: map[string]*time.Time{}, kept: map[string]int{}}
	next := time.NewTimer(rand.N(o.SweepEvery)) // processes that start together do not sweep together
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		_, errs := l.sweepAll(ctx, turns.run, o.Limits)
		for _, err := range errs {
			if ctx.Err() == nil {
				o.tell(err)
			}
		}
		next.Reset(o.SweepEvery - o.SweepEvery/8 + rand.N(o.SweepEvery/4+1))
	}
}

// sweepTurns are those of one process among all programs: a limit is swept once in the time between two sweeps,
// whoever does it.
type sweepTurns struct {
	inTx   inReadCommitted
	schema string
	every  time.Duration
	marks  map[string]*time.Time // by limit: which pass is this process's
	kept   map[string]int        // by limit, how many times in a row somebody who does not sweep has kept this process out
}

var (
	errNotItsTurn  = errors.New("another program sweeps, or has swept")
	errSweepLocked = errors.New("nobody sweeps it: a session keeps its row of ratelimit.sweeps locked, or a batch takes minutes. End the first; its pid is one of: " +
		"SELECT pid FROM pg_locks WHERE relation = 'ratelimit.sweeps'::regclass AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
)

// run runs a step of the pass over a limit, in a transaction. A pass that has begun waits for its row, or none would
// ever end, but not for long.
func (t *sweepTurns) run(ctx context.Context, name, step string, fn func(ctx context.Context, tx DB) error) error {
	for range sweepPauses {
		var at time.Time
		err := t.inTx(ctx, func(ctx context.Context, tx DB) error {
			turn, err := wire{db: tx, schema: t.schema}.queries().SweepTurn(ctx, dbsqlc.SweepTurnParams{Name: name, Step: step, Since: t.every * 3 / 4, Mine: t.marks[name]})
			switch {
			case err != nil:
				return err
			case turn.State.String == "locked":
				return errSweepLocked
			case turn.State.String != "mine":
				return errNotItsTurn
			}
			at = turn.At.Time
			return fn(ctx, tx)
		})
		switch {
		case err == nil:
			t.marks[name] = &at
			fallthrough
		case !errors.Is(err, errSweepLocked):
			t.kept[name] = 0
			return err
		case step == sweepBegins:
			if t.kept[name]++; t.kept[name] < sweepKeptOut {
				err = errNotItsTurn
			}
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(otherSweepPause):
		}
	}
	return errSweepLocked
}
