package ratelimit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inflight"
)

// verbDuring is for texts of errors: observers see its hold, settle and release.
const verbDuring verb = "during"

// settleTimeout bounds how long During tries to end its hold.
const settleTimeout = 10 * time.Second

// During holds while fn runs: [Limiter.Hold], fn, [Limiter.Settle]. It extends the hold: ttl is how long a dead process
// keeps its slots. Give a minute. If the hold is denied, fn is not called, and the error is that of Hold.
//
// fn must end its work when its ctx ends: with ctx, when the hold is lost or could not be extended, or when a
// [Limiter.Close] is in haste ([context.Cause] says which). That is a tenth of ttl before another process can take the
// slots.
//
// fn returns what was used of tokens, by requests with a Count. What it does not name was used as held. If fn fails or
// panics, or the hold was lost while it ran, the same is settled, but the id is free. fn may Settle held.Token itself,
// in the last transaction of fn, which stores its result; it must not Release it.
//
// The error is fn's, joined to an [ErrHoldLost] if the hold was lost; [ErrInvalid], after all was settled, if fn names
// what was not held; or Settle's, if that fails for 10 seconds.
//
// db is a pool: a *pgxpool.Pool, [SQL] of a *sql.DB, or a [Coalescer], whose pool is used. Otherwise, and with
// [Forever], it is ErrInvalid. Holds are extended on one connection more than the *pgxpool.Pool has, or one of the
// *sql.DB, which needs two.
func (l *Limiter) During(
	ctx context.Context, db DB, id string, ttl time.Duration,
	fn func(ctx context.Context, held Held) (used []Request, err error), requests ...Request,
) error {
	_, err := l.during(ctx, db, id, ttl, fn, nil, requests)
	return err
}

// inFlight is what a middleware runs while it holds.
type inFlight = inflight.Work[Request, Held]

// inFlightTTL is how long the slots of a server that died stay taken.
const inFlightTTL = time.Minute

func init() {
	inflight.Slots = func(requests []Request) bool {
		return slices.ContainsFunc(requests, func(r Request) bool { return r.limit.slots })
	}
	inflight.During = func(ctx context.Context, l *Limiter, db DB, w inFlight, requests ...Request) (Result, error) {
		return l.during(ctx, db, w.ID, inFlightTTL, func(ctx context.Context, held Held) ([]Request, error) {
			w.Serve(ctx, held)
			return w.Used(), nil
		}, &w, requests)
	}
}

// during is During, or the work w of a middleware. The result is that of the Hold.
func (l *Limiter) during(
	ctx context.Context, db DB, id string, ttl time.Duration,
	fn func(ctx context.Context, held Held) (used []Request, err error), w *inFlight, requests []Request,
) (Result, error) {
	unasked := unanswered(verbHold, requests)
	if !l.life.enter() {
		return unasked, limiterClosed(verbDuring, requests)
	}
	defer l.life.leave()
	db, err := poolFor(ctx, db, requests)
	switch {
	case err != nil:
		return unasked, err
	case fn == nil:
		return unasked, invalidCall(requests, "the function is nil")
	case ttl == Forever:
		return unasked, invalidCall(requests, "During needs a ttl: a hold without an end would stay if the process dies")
	case ttl < minTTL || ttl > maxTTL:
		return unasked, invalidCall(requests, fmt.Sprintf("ttl %v is not between %v and %v", ttl, minTTL, maxTTL))
	}
	if result, err := l.refusedUnsent(ctx, db, id, ttl, requests); err != nil {
		return result, err
	}
	deciding := ctx
	if w != nil {
		var cancel context.CancelFunc
		deciding, cancel = context.WithTimeout(ctx, waitUpTo(ctx)+w.Within)
		defer cancel()
	}
	lease, err := l.renewals.enter(deciding, l, db, ttl)
	if err != nil {
		return unasked, explainCall(verbDuring, requests, err)
	}
	defer lease.end()

	var held Held
	var result Result
	err = l.Retry(deciding, func(ctx context.Context) (err error) {
		held, result, err = l.hold(ctx, db, id, ttl, requests)
		return err
	})
	d := &during{l: l, ctx: context.WithoutCancel(ctx), db: db, token: held.Token, held: sumsOf(requests), w: w}
	switch {
	case err == nil:
		if err = d.run(ctx, lease, held.sentAt, ttl, held, fn); err != nil {
			return unasked, err
		}
		return result, nil
	case held.Token == "":
	case w != nil && l.life.enter(): // it may be held; the client need not wait for the end
		go func() {
			defer l.life.leave()
			_ = d.release(zero(d.held))
		}()
	default:
		_ = d.release(zero(d.held))
	}
	return result, err
}

// refusedUnsent is the error of a Hold that needs no database, or nil. Hold itself comes after the connection that extends it, for which a *sql.DB may ask
// the server.
func (l *Limiter) refusedUnsent(ctx context.Context, db DB, id string, ttl time.Duration, requests []Request) (Result, error) {
	began := time.Now()
	c, err := l.callOn(ctx, db, verbHold, about{hold: &holding{id: id, ttl: ttl}}, requests)
	result := unanswered(verbHold, c.requests)
	if err == nil {
		a := c.byPolicy()
		if a == nil {
			return result, nil
		}
		c.fill(&result, a)
		result, err = c.conclude(result, nil)
	}
	l.observe(ctx, verbHold, time.Since(began), result, err)
	return result, err
}

// poolFor is the pool on which During works.
func poolFor(ctx context.Context, db DB, requests []Request) (DB, error) {
	if noDatabase(db) {
		return nil, invalidCall(requests, noDatabaseText)
	}
	if coalescer, ok := coalescerOf(db); ok {
		db = coalescer.Pool
	}
	if handles.IsOne(db) {
		return nil, invalidCall(requests, fmt.Sprintf("During needs a pool, since it works beside fn and outside its transactions; this is a %s", handles.Type(db)))
	}
	if pool, is := poolOf(db).(*sql.DB); is && pool.Stats().MaxOpenConnections == 1 {
		return nil, invalidCall(requests, "During needs a *sql.DB of two or more connections, one of which extends its hold")
	}
	return db, errOutside(ctx, verbDuring, db, requests)
}

// during is a call of During whose hold may be there.
type during struct {
	l     *Limiter
	ctx   context.Context // which does not end
	db    DB
	token string
	held  []Request // one for each limit and key, with the count that was held
	w     *inFlight // nil: a During of the caller's
}

// run calls fn, and ends the hold.
func (d *during) run(
	ctx context.Context, lease *lease, sent time.Time, ttl time.Duration, held Held,
	fn func(ctx context.Context, held Held) (used []Request, err error),
) error {
	lease.limits = limitsOf(d.held)
	outer := ctx
	ctx = lease.begin(WaitUpTo(ctx, 0), d.rows(), sent, ttl)
	if f := d.l.life; f != nil {
		defer context.AfterFunc(f.over, func() { lease.cancel(limiterClosed(verbDuring, d.held)) })()
	}
	select {
	case <-lease.ready:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return joined(explainCall(verbDuring, d.held, over(ctx)), d.release(zero(d.held)))
	}
	returned := false
	defer func() {
		switch {
		case returned:
		case d.w != nil:
			all, wrong := d.used(d.w.Used())
			d.w.Ended(joined(wrong, d.release(all)))
		default: // a panic, or runtime.Goexit: the caller is on its way up
			_ = d.release(d.held)
		}
	}()
	used, err := fn(ctx, held)
	returned = true
	lost := context.Cause(ctx)
	if !errors.Is(lost, ErrHoldLost) || errors.Is(context.Cause(outer), lost) { // that of a During around this one is not lost here
		lost = nil
	}
	all, wrong := d.used(used)
	if d.w != nil {
		d.w.Ended(joined(lost, wrong, d.release(all)))
		return nil
	}
	if err == nil && lost == nil {
		if err = d.settle(all); !errors.Is(err, ErrHoldLost) {
			return joined(err, wrong)
		}
	}
	if errors.Is(err, ErrHoldLost) {
		lost = nil
	}
	return joined(err, lost, wrong, d.release(all))
}

// joined is the one error, or all of them.
func joined(errs ...error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if len(errs) == 1 {
		return errs[0]
	}
	for i := range errs {
		if i > 0 && strings.HasPrefix(errs[0].Error(), "ratelimit: ") {
			errs[i] = inner{errs[i]}
		}
	}
	return errors.Join(errs...)
}

// rows are the rows of the hold: where, and under which id and token.
func (d *during) rows() []leaseRow {
	read, err := readToken(d.token)
	if err != nil {
		panic(err) // never: Hold has made it
	}
	rows := make([]leaseRow, len(d.held))
	for i, r := range d.held {
		rows[i] = leaseRow{name: r.limit.name, key: r.key, id: read.id, uuid: read.uuid}
	}
	return rows
}

// used is what to settle, and what fn has named wrongly.
func (d *during) used(named []Request) (all []Request, wrong error) {
	all = slices.Clone(d.held)
	first := make([]bool, len(all))
	for _, u := range named {
		i := slices.IndexFunc(all, u.isOf)
		switch {
		case u.err != nil:
			wrong = u.err
		case i < 0:
			wrong = invalidCall([]Request{u}, "the function has used what was not held")
		case !u.counts && !u.limit.slots:
			wrong = invalidCall([]Request{u}, "the function needs the Count of what was used")
		default:
			if !first[i] {
				first[i], all[i].tokens = true, 0
			}
			all[i].tokens += u.tokens
		}
	}
	for i := range all {
		if !countable(all[i].tokens) {
			wrong = invalidCall(all[i:i+1], fmt.Sprintf("the function has used %v tokens", all[i].tokens))
			all[i].tokens = d.held[i].tokens
		}
	}
	return all, wrong
}

// isOf reports whether two requests are for the same limit and key.
func (r Request) isOf(other Request) bool {
	return r.limit.name == other.limit.name && r.key == other.key
}

// sumsOf are requests, one for each limit and key.
func sumsOf(requests []Request) []Request {
	var sums []Request
	for _, r := range requests {
		if i := slices.IndexFunc(sums, r.isOf); i >= 0 {
			sums[i].tokens += r.tokens
			continue
		}
		r.counts = true
		sums = append(sums, r)
	}
	return sums
}

// zero are requests of which nothing was used.
func zero(requests []Request) []Request {
	none := slices.Clone(requests)
	for i := range none {
		none[i].tokens = 0
	}
	return none
}

func (d *during) settle(used []Request) error {
	return d.try(func(ctx context.Context) error {
		_, err := d.l.Settle(ctx, d.db, d.token, used...)
		return err
	})
}

func (d *during) release(used []Request) error {
	return d.try(func(ctx context.Context) error {
		_, err := d.l.Release(ctx, d.db, d.token, used...)
		return err
	})
}

// try tries again for a while. What was settled or released stays so, when it is tried again.
func (d *during) try(end func(ctx context.Context) error) error {
	within := settleTimeout
	if d.w != nil {
		within = d.w.Within
	}
	ctx, cancel := context.WithTimeout(d.ctx, within)
	defer cancel()
	for attempt := 1; ; attempt++ {
		err := end(ctx)
		if err == nil || errors.Is(err, ErrHoldLost) || errors.Is(err, ErrInvalid) || !backOff(ctx, attempt) {
			return err
		}
	}
}
