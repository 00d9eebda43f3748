package ratelimit

import (
	"context"
	"fmt"
	"time"
)

// Verb names a method of [Limiter] that decides, in [Decision.Verb].
type Verb string

// The verbs.
const (
	VerbConsume Verb = "consume"
	VerbCheck   Verb = "check"
	VerbCharge  Verb = "charge"
	VerbRefund  Verb = "refund"
	VerbReset   Verb = "reset"
)

// Consume takes the tokens of all requests, or of none. A denial is an [*DeniedError], and the result beside it says the
// same: what is denied must not look like a success to a caller who forgets to look.
//
// In a transaction, let the error roll it back, or go on: nothing was consumed and the transaction is usable. What was
// consumed comes back if the transaction rolls back.
func (l *Limiter) Consume(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbConsume, time.Time{}, requests)
}

// Check answers as Consume would now, and writes nothing. A denial is an [*DeniedError], as Consume's is, with the result beside it.
//
// To read a balance, check a count of 0: [Result.Remaining] is the answer. Such a check is never denied, even if the limit is in debt.
// Do not check first and consume later where Consume alone would do: in between, others consume.
func (l *Limiter) Check(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbCheck, time.Time{}, requests)
}

// Charge takes the tokens unconditionally, below -maxReserved if need be: a cost that has already been incurred, such as
// what an estimate fell short of. It is always OK; RetryAt is when what is owed will have been refilled.
func (l *Limiter) Charge(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbCharge, time.Time{}, requests)
}

// Refund gives tokens back: all or part of what was consumed at that instant, [Result.At] of the consumption. It never
// fills a limit above its capacity, and it gives nothing back to a fixed window once the window of the consumption is over:
// that would break the present window's cap. (The window of Result.At: for a consumption that waited for the row into the next
// one, that is over, too.) It is always OK; RetryAt is when what is still owed will have been refilled.
//
// Like every statement, it does not see what was committed after the snapshot of a REPEATABLE READ or SERIALIZABLE
// transaction: if the very first use of the key was, there is nothing to give back to, and nothing is.
//
// A rollback refunds by itself. To refund exactly once, do it in the transaction that marks the work as undone.
func (l *Limiter) Refund(ctx context.Context, db DB, consumedAt time.Time, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbRefund, consumedAt, requests)
}

// Reset makes the limits full again for these keys, debts included. How much a request asks for does not matter. Rows that were
// committed after the snapshot of a REPEATABLE READ or SERIALIZABLE transaction are not seen, and stay: what it is to forget
// must have been consumed before it began.
func (l *Limiter) Reset(ctx context.Context, db DB, requests ...Request) error {
	_, err := l.do(ctx, db, VerbReset, time.Time{}, requests)
	return err
}

func (l *Limiter) do(ctx context.Context, db DB, v Verb, consumedAt time.Time, requests []Request) (result Result, err error) {
	began := time.Now()
	c, err := l.newCall(v, consumedAt, requests)
	if noDatabase(db) {
		err = fmt.Errorf("%w: no database", ErrInvalid)
	}
	if err == nil {
		err = errOutside(ctx, v, db)
	}
	if err == nil {
		result, err = c.decide(ctx, db)
	} else {
		result = unanswered(requests)
	}
	l.observe(ctx, v, began, result, err)
	return result, err
}
