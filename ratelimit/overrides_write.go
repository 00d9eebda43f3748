package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// Terms say when an override or a block ends, and who decides. Exactly one of For, Until and Forever is given, and
// the end is in the future, else the error is [ErrInvalid]. Reason and Who may be empty; the database also writes
// down the role that is logged in.
type Terms struct {
	For     time.Duration // from now, by the database's clock: 100 ms to 366 days
	Until   time.Time     // before the year 10000
	Forever bool          // it has no end

	Reason string // at most 4096 bytes
	Who    string // at most 255 bytes
}

// End says who ends overrides or blocks: at most 255 bytes, which may be empty.
type End struct{ Who string }

// Override gives a limit other numbers, for one key or for all, and returns the id of the override: [Rate], in tokens
// for each of the limit's periods, [Capacity] and [MaxReserved]; of [Slots], Capacity alone. In a transaction, it holds
// once that is committed; every program of [Open] follows within two seconds.
//
// A number that is not given stays as defined, and a capacity that is the rate follows the rate. [Limit.EveryKey] is
// every key that has no override of its own. Of several, a block in force wins, else the newest. New numbers add no
// tokens: the SQL function ratelimit.add does, with the id.
//
// db is a transaction, a connection or a pool, or [SQL] of one, but no [Coalescer]. On a pool, this Limiter follows
// when the call returns. If the overrides cannot be read any more, blocks and lower numbers stay, and raised numbers and
// unlimited keys count as defined after 5 minutes.
//
// [ErrInvalid] are also a Count, an [Unlimited] limit, a Limiter without Open or with NoOverrides, and a db of another
// database. A name that no program publishes is SQLSTATE 22023. Outside a transaction, after any other error, the
// override may have been made: call it again. docs/overrides.md has the rest.
func (l *Limiter) Override(ctx context.Context, db DB, request Request, terms Terms, numbers ...Option) (id int64, err error) {
	d := decree{what: "override", request: request, terms: terms, effect: newNumbers, numbers: numbers}
	return d.send(ctx, l, db)
}

// Block denies a key everything, or with [Limit.EveryKey] all of them, and returns the id of the block. The verbs that
// can deny do so without asking the database; RetryAt is the end of the block, or zero. Arguments, transactions and
// errors are those of [Limiter.Override]. Refunds, resets and reservations change nothing of it. Charges are recorded.
// A call that was sent before the block was known is decided as it was then.
func (l *Limiter) Block(ctx context.Context, db DB, request Request, terms Terms) (id int64, err error) {
	d := decree{what: "block", request: request, terms: terms, effect: block}
	return d.send(ctx, l, db)
}

// Restore ends all overrides in force for a key, blocks too, or with [Limit.EveryKey] those that are for all keys,
// and returns how many. Transactions and errors are as for [Limiter.Override]. In REPEATABLE READ and SERIALIZABLE,
// an override that was committed after the transaction's snapshot is not seen, and stays.
func (l *Limiter) Restore(ctx context.Context, db DB, request Request, end End) (ended int, err error) {
	d := decree{what: "restore", request: request, terms: Terms{Who: end.Who}, ends: true}
	n, err := d.send(ctx, l, db)
	return int(n), err
}

// Unblock ends the blocks of a key, or with [Limit.EveryKey] the block of all keys, and returns how many. Otherwise
// it is as [Limiter.Restore].
func (l *Limiter) Unblock(ctx context.Context, db DB, request Request, end End) (ended int, err error) {
	d := decree{what: "unblock", request: request, terms: Terms{Who: end.Who}, ends: true, effect: block}
	n, err := d.send(ctx, l, db)
	return int(n), err
}

// end is when an override ends, as an instant or a duration; both are nothing for one without an end.
func (t *Terms) end(l *Limiter, db DB) (until *time.Time, lasts pgtype.Interval, err error) {
	given := 0
	for _, is := range []bool{!t.Until.IsZero(), t.For != 0, t.Forever} {
		if is {
			given++
		}
	}
	switch {
	case given != 1:
		return nil, lasts, errors.New("one of For, Until and Forever has to say when it ends")
	case t.Forever:
		return nil, lasts, nil
	case t.For != 0 && (t.For < minTTL || t.For > maxTTL):
		return nil, lasts, fmt.Errorf("a For of %v is not between %v and %v (a bare number in Go is nanoseconds): say Until or Forever", t.For, minTTL, maxTTL)
	case t.For != 0:
		return nil, pgtype.Interval{Microseconds: t.For.Microseconds(), Valid: true}, nil
	}
	at, err := timestamp("the end", t.Until)
	if err == nil && algebra.At(at.Time) <= l.overrides.moment(clockOf(db)).high {
		err = fmt.Errorf("the end, %v, is not in the future", at.Time)
	}
	return &at.Time, lasts, err
}

// The bounds of the columns, in bytes.
const (
	maxReasonLen = 4096
	maxWhoLen    = 255
)

// decree is what somebody decides about a limit: a new override, or the end of those in force.
type decree struct {
	what    string
	request Request
	terms   Terms
	effect  effect
	ends    bool // it ends what has the effect or, if that is newNumbers, everything
	numbers []Option
}

// send validates a decree, and has the database write it down.
func (d *decree) send(ctx context.Context, l *Limiter, db DB) (n int64, err error) {
	asked := []Request{d.request}
	if !l.life.enter() {
		return 0, limiterClosed(verb(d.what), asked)
	}
	defer l.life.leave()
	args, err := d.validate(l, db)
	if err == nil {
		err = errOutside(ctx, verb(d.what), db, asked)
	}
	if err != nil {
		return 0, err
	}
	if err := l.overrides.sameDatabase(ctx, db); err != nil {
		return 0, explainCall(verb(d.what), asked, err)
	}
	forget(ctx, db, asked)
	defer forget(ctx, db, asked)
	on, release, err := ofPool(ctx, db)
	if err == nil {
		defer release()
		n, err = d.ask(ctx, wire{db: on, schema: l.Schema}, args)
	}
	if err != nil {
		return 0, explainCall(verb(d.what), asked, err)
	}
	switch pool := poolOf(db); {
	case pool == nil:
		whenCommitted(ctx, l.overrides)
	case pool == poolOf(l.overrides.db):
		l.overrides.followOn(ctx, on, release)
	default:
		release()
		l.overrides.follow(ctx)
	}
	return n, nil
}

// ask sends the statement.
func (d *decree) ask(ctx context.Context, w wire, args dbsqlc.OverrideParams) (int64, error) {
	switch {
	case d.ends && d.effect == block:
		n, err := query(ctx, w, (*dbsqlc.Queries).Unblock, dbsqlc.UnblockParams{Name: args.Name, Key: args.Key, Who: args.Who, Global: args.Global, EveryKey: args.EveryKey})
		return int64(n), err
	case d.ends:
		n, err := query(ctx, w, (*dbsqlc.Queries).Restore, dbsqlc.RestoreParams{Name: args.Name, Key: args.Key, Who: args.Who, Global: args.Global, EveryKey: args.EveryKey})
		return int64(n), err
	case d.effect == block:
		return query(ctx, w, (*dbsqlc.Queries).Block, dbsqlc.BlockParams{Name: args.Name, Key: args.Key, Until: args.Until, Lasts: args.Lasts, Reason: args.Reason, Who: args.Who, Forever: args.Forever, Global: args.Global, EveryKey: args.EveryKey})
	}
	return query(ctx, w, (*dbsqlc.Queries).Override, args)
}

// validate refuses what the database would, as far as that can be known here: a SQL error aborts the caller's
// transaction.
func (d *decree) validate(l *Limiter, db DB) (args dbsqlc.OverrideParams, err error) {
	r := &d.request
	asked := []Request{d.request}
	if r.err == nil && r.limit.name == "" {
		r.err = r.limit.Validate()
	}
	if err := l.changed(asked); err != nil {
		return args, err
	}
	_, coalesces := coalescerOf(db)
	switch {
	case r.err != nil:
		return args, r.err
	case noDatabase(db):
		return args, invalidCall(asked, noDatabaseText)
	case coalesces:
		return args, invalidCall(asked, d.what+" on a Coalescer: pass its Pool, or a transaction")
	case r.tokens != 1:
		return args, noCounts(d.what, asked)
	case l.overrides == nil:
		return args, invalidCall(asked, fmt.Sprintf("this Limiter follows no overrides: Open it, without NoOverrides (or use the SQL function ratelimit.%s, or txlimit %s)", d.what, d.what))
	}
	if err := l.definitions.check(asked); err != nil {
		return args, err
	}
	args = dbsqlc.OverrideParams{Name: r.limit.name, Key: textOrNull(r.key), Reason: d.terms.Reason, Who: textOrNull(d.terms.Who), Forever: d.terms.Forever, Global: r.key == "" && !r.every, EveryKey: r.every}
	if err := d.texts(); err != nil {
		return args, fmt.Errorf("%w: %s%w", ErrInvalid, limitsOf(asked), err)
	}
	if !d.ends {
		if args.Until, args.Lasts, err = d.terms.end(l, db); err != nil {
			return args, fmt.Errorf("%w: %s%w", ErrInvalid, limitsOf(asked), err)
		}
	}
	if d.effect == newNumbers && !d.ends {
		err = d.fillNumbers(&args)
	}
	return args, err
}

func (d *decree) texts() error {
	if d.terms.Reason != "" {
		if err := checkText("reason", d.terms.Reason, maxReasonLen); err != nil {
			return err
		}
	}
	if d.terms.Who != "" {
		return checkText("who", d.terms.Who, maxWhoLen)
	}
	return nil
}

// fillNumbers validates the numbers of an override, and puts them into the arguments.
func (d *decree) fillNumbers(args *dbsqlc.OverrideParams) error {
	if d.request.limit.unlimited() {
		return d.invalid("numbers change nothing of an unlimited limit: use Block")
	}
	var named Config
	if named.set(d.numbers, []string{"Rate", "Capacity", "MaxReserved"}) != nil {
		return d.invalid("Override changes only Rate, Capacity and MaxReserved, each once")
	}
	var given int
	for _, number := range []struct {
		what string
		from **float64
		to   *pgtype.Float8
	}{{"rate", &named.Rate, &args.Rate}, {"capacity", &named.Capacity, &args.Capacity}, {"maxReserved", &named.MaxReserved, &args.MaxReserved}} {
		n := *number.from
		if n == nil {
			continue
		}
		given++
		switch {
		case !countable(*n):
			return d.invalid(fmt.Sprintf("%s %v is neither 0 nor between %v and %v", number.what, *n, algebra.MinTokens, algebra.MaxTokens))
		case d.request.limit.slots && number.what != "capacity":
			return d.invalid("slots have only a Capacity: how many there are")
		case d.request.limit.slots && !wholeSlots(*n):
			return d.invalid(fmt.Sprintf("capacity %v of slots is not a whole number between 0 and %v", *n, maxSlots))
		case number.what == "rate" && *n == 0:
			return d.invalid("a rate of 0 grants nothing: use Block")
		}
		*number.to = pgtype.Float8{Float64: *n, Valid: true}
	}
	if given == 0 {
		return d.invalid("Override needs a Rate, a Capacity or a MaxReserved")
	}
	return nil
}

func (d *decree) invalid(why string) error {
	return fmt.Errorf("%w: %s%s", ErrInvalid, limitsOf([]Request{d.request}), why)
}

// textOrNull is NULL for the empty text.
func textOrNull(s string) pgtype.Text { return pgtype.Text{String: s, Valid: s != ""} }
