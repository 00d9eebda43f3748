package ratelimit

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/decide"
)

// verb is one of the verbs of [Limiter]; [Decision.Verb] has its name.
type verb string

const (
	verbConsume verb = "consume"
	verbWait    verb = "wait"
	verbReserve verb = "reserve"
	verbTake    verb = "take"
	verbCheck   verb = "check"
	verbBalance verb = "balance"
	verbCharge  verb = "charge"
	verbRefund  verb = "refund"
	verbReset   verb = "reset"
	verbMove    verb = "move"
	verbPause   verb = "pause"
	verbResume  verb = "resume"
	verbHold    verb = "hold"
	verbSettle  verb = "settle"
	verbRelease verb = "release"
	verbOnce    verb = "once"
	verbEach    verb = "consumeEach" // which observers see as several of consume
)

// rules are what a verb does.
type rules struct {
	takes        bool   // it takes tokens for good; a Coalescer decides it together with other calls, unless it holds
	deniable     bool   // it may be denied, by a block too
	refunds      bool   // it gives back what a receipt says
	settles      bool   // it is about work that was granted before: it is served after Close
	moves        bool   // it has two requests: from and to
	pauses       bool   // it is about when token buckets are refilled
	holds        bool   // it is about an id: see holding
	slots        bool   // it is for slots, too
	upTo         bool   // it takes what is there, up to the count
	each         bool   // each request is decided by itself
	atMostFull   bool   // a count above the capacity is refused
	ignoresCount bool   // it is about keys, not tokens
	owes         owes   // how far below zero it may leave a balance
	writes       writes // whether it changes rows
	answers      answers
	op           string // see package decide, and ratelimit._apply
}

// verbs has a row for each verb.
var verbs = map[verb]*rules{
	verbConsume: {takes: true, deniable: true, writes: onceOnly, op: decide.Consume},
	verbWait:    {takes: true, deniable: true, writes: onceOnly, op: decide.Consume, owes: upToMaxReserved, atMostFull: true},
	verbReserve: {takes: true, deniable: true, writes: onceOnly, op: decide.Consume, owes: upToMaxReserved},
	verbTake:    {takes: true, deniable: true, writes: onceOnly, op: decide.Take, upTo: true},
	verbCheck:   {deniable: true, op: decide.Check},
	verbBalance: {op: decide.Check, owes: anything, ignoresCount: true, answers: balances, slots: true},
	verbCharge:  {takes: true, settles: true, writes: onceOnly, op: decide.Consume, owes: anything},
	verbRefund:  {refunds: true, settles: true, writes: onceOnly, op: decide.Refund},
	verbReset:   {writes: repeatable, ignoresCount: true, answers: nothing, op: decide.Reset},
	verbMove:    {moves: true, writes: repeatable, ignoresCount: true, answers: nothing, op: decide.Move},
	verbPause:   {pauses: true, writes: repeatable, owes: anything, answers: nothing, op: decide.Pause},
	verbResume:  {pauses: true, writes: repeatable, ignoresCount: true, answers: nothing, op: decide.Resume},
	verbHold:    {holds: true, slots: true, deniable: true, writes: onceOnly},
	verbSettle:  {holds: true, slots: true, settles: true, writes: onceOnly, owes: anything},
	verbRelease: {holds: true, slots: true, settles: true, writes: onceOnly, owes: anything},
	verbOnce:    {holds: true, takes: true, deniable: true, writes: onceOnly},
	verbEach:    {takes: true, deniable: true, writes: onceOnly, each: true, op: decide.Each},
}

// standing are the rules of what holds whatever is asked: a block changes no numbers.
var standing = &rules{owes: upToMaxReserved, ignoresCount: true, answers: balances}

// owes is how far below zero a verb may leave a balance.
type owes byte

const (
	noTokens owes = iota
	upToMaxReserved
	anything
)

// writes is whether a verb changes rows, and whether it can safely be done again if its outcome is not known.
type writes byte

const (
	never writes = iota
	onceOnly
	repeatable
)

// answers is what the database answers.
type answers byte

const (
	decisions answers = iota
	balances
	nothing
)

// receipt reports whether a grant has a receipt.
func (r *rules) receipt() bool { return r.takes && r.deniable }

// liftable reports whether an override can grant the call everything.
func (r *rules) liftable() bool { return r.takes || r.deniable || r.answers == balances }

// floor is the lowest balance that the verb may leave of a limit.
func (r *rules) floor(l *Limit) float64 {
	if l.slots {
		return -l.numbers.Capacity
	}
	switch r.owes {
	case upToMaxReserved:
		return max(-l.maxOwed(), -maxHeld) // -Inf is a charge, which promises nothing
	case anything:
		return math.Inf(-1)
	}
	return 0
}

// rowless reports whether a demand's limit decides it by itself, without its rows. A block does, where it denies.
func (r *rules) rowless(d *demand) bool {
	return d.limit.rowless() || r.deniable && d.limit.grantsNothing()
}

// Consume takes the tokens of all requests, or of none. A denial is a [*DeniedError], so that a caller that ignores the
// result does not mistake it for a grant. The result beside the error says the same.
//
// After a denial in a transaction, nothing was consumed and the transaction is usable: return the error to roll back, or go
// on. If the transaction rolls back, consumed tokens come back.
func (l *Limiter) Consume(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbConsume, about{}, requests)
}

// Reserve takes tokens that may not be there yet: the balance may fall to -maxReserved ([MaxReserved]). The work may
// run at [Reservation.RetryAt], when the tokens will have been refilled, not before. Schedule it in the same
// transaction.
//
// All requests are reserved, or none. A denial is a [*DeniedError], with a zero Reservation: more would be owed than
// maxReserved allows, until RetryAt. Several limits wait for each other, and forfeit what they refill above their
// capacity meanwhile.
//
// If the transaction rolls back, reserved tokens come back. To cancel a reservation later, [Limiter.Refund] its
// receipt.
func (l *Limiter) Reserve(ctx context.Context, db DB, requests ...Request) (Reservation, error) {
	result, err := l.do(ctx, db, verbReserve, about{}, requests)
	if err != nil {
		return Reservation{}, err
	}
	return Reservation{
		At: result.At, RetryAt: result.runAt.Time(), Delay: result.delay(),
		Remaining: result.Remaining, ResetAt: result.ResetAt, Requests: result.Requests, receipt: result.Receipt(),
	}, nil
}

// Take takes the largest whole number of tokens that all limits have, at least 1 and at most the given number, which
// may be above the capacity, and returns it. To give back what was not needed, [Limiter.Refund] a Count.
//
// If a limit has not one whole token, the call is denied with a [*DeniedError] and n is 0. Every request has the
// default Count of 1, and no two are for the same limit and key. Otherwise it is [ErrInvalid], as for a most below 1 or
// above 1e15.
func (l *Limiter) Take(ctx context.Context, db DB, most int, requests ...Request) (n int, result Result, err error) {
	requests = slices.Clone(requests)
	for i := range requests {
		r := &requests[i]
		switch {
		case r.err != nil:
		case most < 1:
			r.err = fmt.Errorf("%w: limit %q: at most %d tokens to take, which is less than 1", ErrBadRequest, r.limit.name, most)
		case r.tokens != 1:
			r.err = fmt.Errorf("%w: limit %q: a Take has no Count: it takes up to its own number", ErrInvalid, r.limit.name)
		}
		r.tokens = float64(most)
	}
	result, err = l.do(ctx, db, verbTake, about{}, requests)
	if err == nil {
		n = int(result.Requests[0].Taken)
	}
	return n, result, err
}

// Check answers as Consume would now, and writes nothing. A denial is a [*DeniedError], as for Consume, with the result
// beside it. To read a balance, use [Limiter.Balance].
func (l *Limiter) Check(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbCheck, about{}, requests)
}

// Charge takes the tokens unconditionally, even below -maxReserved. Use it for a cost that has been incurred, such as
// the excess over an estimate. It is always OK.
//
// Charge and Refund settle work that was granted before. So they go on after [Limiter.Close] and [Coalescer.Close], while db
// answers. Then nobody records their usage.
func (l *Limiter) Charge(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbCharge, about{}, requests)
}

// Refund gives back all or part of the tokens in a receipt ([Result.Receipt]). Without requests, it gives back all that
// is left; with requests, their counts, and without a Count all that is left of the key. It is always OK:
// [Status.Refunded] says how many came back. Call it in the transaction that marks the work as done, and store the
// receipt of its result in place of the old one, which counts again.
//
// A refund never fills a limit above its capacity, and never breaks the RetryAt of another reservation:
//
//   - A token bucket gets back the tokens that would still be missing if nothing else had been taken since, less those
//     owed to waiting work.
//   - A window gets everything back while the window of the work is the last one with promised work, afterwards
//     nothing.
//
// A request for more than is left in the receipt is [ErrInvalid]. Without requests, so is a limit whose numbers the
// Limiter does not know, and one that [Varies].
//
// After a [Limiter.Reset] or a change of the limit's numbers, too much may come back, up to the count. Above READ
// COMMITTED, nothing comes back if the first use of the key was committed after the snapshot. docs/refunds.md says
// more.
func (l *Limiter) Refund(ctx context.Context, db DB, receipt Receipt, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbRefund, about{receipt: receipt}, requests)
}

// Reset makes the limits full again for these keys, and forgets debts. Holds of their tokens are lost: a
// [Limiter.During] ends its work. A limit of slots is [ErrInvalid]: release its holds. So is a Count. In
// REPEATABLE READ and SERIALIZABLE, rows committed after the transaction's snapshot stay.
//
// To say who has decided it, call the SQL function ratelimit.reset instead, in the same transaction.
func (l *Limiter) Reset(ctx context.Context, db DB, requests ...Request) error {
	_, err := l.do(ctx, db, verbReset, about{}, requests)
	return err
}

// about is what a call is about besides its requests: the receipt of a Refund, the hold of a verb about holds, or how
// long a Pause lasts.
type about struct {
	receipt Receipt
	hold    *holding
	lasts   time.Duration
	exact   bool // a Wait is bounded by the statement, and not by a floor
}

// do is a use of a verb from beginning to end: Close waits for it, and the observer is told.
func (l *Limiter) do(ctx context.Context, db DB, v verb, of about, requests []Request) (Result, error) {
	began := time.Now()
	var result Result
	var err error
	if l.life.enter() {
		defer l.life.leave() // once it was observed: Close writes what was counted
	} else if !verbs[v].settles {
		result, err = unanswered(v, requests), limiterClosed(v, requests)
	}
	if err == nil {
		result, err = l.run(ctx, db, v, of, requests)
	}
	l.observe(ctx, v, time.Since(began), result, err)
	return result, err
}

// run makes a call, and has it decided.
func (l *Limiter) run(ctx context.Context, db DB, v verb, of about, requests []Request) (Result, error) {
	c, err := l.callOn(ctx, db, v, of, requests)
	if err != nil {
		return unanswered(v, c.requests), err
	}
	switch {
	case c.does.answers == nothing: // what a Coalescer has of the keys is no longer so
		forget(ctx, db, c.requests)
		defer forget(ctx, db, c.requests)
	case c.does.settles:
		doubt(c.requests)
		defer doubt(c.requests)
	}
	result, err := c.decide(ctx, db)
	if err == nil && c.does.holds && c.does.settles {
		l.waits.wake(c.requests)
	}
	return result, err
}

// callOn makes a call for a handle, and refuses a handle that the verb cannot use.
func (l *Limiter) callOn(ctx context.Context, db DB, v verb, of about, requests []Request) (call, error) {
	c, err := l.newCall(v, of, requests, db)
	if noDatabase(db) {
		err = invalidCall(requests, noDatabaseText)
	}
	if err == nil && v == verbWait {
		err = errWaitInTx(ctx, db, requests, "Wait", "wait before it begins, or use Reserve")
		c.bound(ctx, of.exact)
	}
	if err == nil {
		err = errOutside(ctx, v, db, requests)
	}
	return c, err
}
