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
	return l.do(ctx, db, VerbConsume, "", requests)
}

// Check answers as Consume would now, and writes nothing. A denial is an [*DeniedError], as Consume's is, with the result beside it.
//
// To read a balance, check a count of 0: [Result.Remaining] is the answer. Such a check is never denied, even if the limit is in debt.
// Do not check first and consume later where Consume alone would do: in between, others consume.
func (l *Limiter) Check(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbCheck, "", requests)
}

// Charge takes the tokens unconditionally, below -maxReserved if need be: a cost that has already been incurred, such as
// what an estimate fell short of. It is always OK; RetryAt is when what is owed will have been refilled.
func (l *Limiter) Charge(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbCharge, "", requests)
}

// Refund gives tokens back: all or part of what the receipt says was consumed ([Result.Receipt]). A request that is not in the receipt, or
// asks for more than is left in it, is [ErrInvalid]. Refund is always OK, and its result has the receipt for what is left: store that
// in the place of the old one, in the same transaction. An old receipt that is used again is not found out. [Status] says how many
// tokens came back.
//
// A refund gives back as much as harms no promise. It never fills a limit above its capacity, and it breaks no RetryAt that a
// reservation was told. A token bucket gets what would still be missing if nobody else had taken anything since, less what is owed
// to those who wait. Under saturation that is all of it if MaxReserved + rate × the time that the work takes + the refund is at most the
// capacity. A fixed window gets all of it while the window in which the work was to run is the last that anything was promised in.
// Afterwards it gets nothing. docs/refunds.md says more.
//
// A refund of what was taken before a [Limiter.Reset], or before the limit's numbers were changed, may give back too much, up to its
// count: settle it first.
//
// Like every statement, Refund does not see what was committed after the snapshot of a REPEATABLE READ or SERIALIZABLE
// transaction: if that holds the first use of the key, nothing is given back.
//
// A rollback refunds by itself. To refund exactly once, do it in the transaction that marks the work as done.
func (l *Limiter) Refund(ctx context.Context, db DB, receipt Receipt, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbRefund, receipt, requests)
}

// Reset makes the limits full again for these keys, debts included. How much a request asks for does not matter. Rows that were
// committed after the snapshot of a REPEATABLE READ or SERIALIZABLE transaction are not seen, and stay: what it is to forget
// must have been consumed before it began.
func (l *Limiter) Reset(ctx context.Context, db DB, requests ...Request) error {
	_, err := l.do(ctx, db, VerbReset, "", requests)
	return err
}

func (l *Limiter) do(ctx context.Context, db DB, v Verb, receipt Receipt, requests []Request) (result Result, err error) {
	began := time.Now()
	c, err := l.newCall(v, receipt, requests)
	if noDatabase(db) {
		err = programError{fmt.Errorf("%w: no database", ErrInvalid)}
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
