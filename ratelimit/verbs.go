package ratelimit

import (
	"context"
	"fmt"
	"time"
)

// Verb names one of the verbs of [Limiter], in [Decision.Verb].
type Verb string

// The verbs.
const (
	VerbConsume Verb = "consume"
	VerbWait    Verb = "wait"
	VerbCheck   Verb = "check"
	VerbCharge  Verb = "charge"
	VerbRefund  Verb = "refund"
	VerbReset   Verb = "reset"
)

// Consume takes the tokens of all requests, or of none. A denial is a [*DeniedError], so that a caller that ignores the
// result does not mistake it for a grant. The result beside the error says the same.
//
// After a denial in a transaction, nothing was consumed and the transaction is usable: return the error to roll back, or go
// on. If the transaction rolls back, consumed tokens come back.
func (l *Limiter) Consume(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbConsume, "", requests)
}

// Check answers as Consume would now, and writes nothing. A denial is a [*DeniedError], as for Consume, with the result
// beside it.
//
// To read a balance, check a count of 0: the answer is [Result.Remaining]. Such a check is never denied, even if the limit
// is in debt. Do not check before Consume: other calls may consume in between, and Consume checks anyway.
func (l *Limiter) Check(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbCheck, "", requests)
}

// Charge takes the tokens unconditionally, even below -maxReserved. Use it for a cost that has already been incurred, such
// as the excess over an estimate. It is always OK. RetryAt is when the debt will have been refilled.
func (l *Limiter) Charge(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbCharge, "", requests)
}

// Refund gives back all or part of the tokens in a receipt ([Result.Receipt]). A request that is not in the receipt, or
// asks for more than is left in it, is [ErrInvalid]. Refund is always OK. [Status.Refunded] says how many tokens came back.
//
// The result has a receipt for the rest. Store it in place of the old one, in the same transaction: Refund cannot detect an
// old receipt that is used again. To refund exactly once, refund in the transaction that marks the work as done. A rollback
// needs no refund, since it gives back all tokens.
//
// A refund never fills a limit above its capacity, and never breaks the RetryAt of another reservation:
//
//   - A token bucket gets back the tokens that would still be missing if nothing else had been taken since. Tokens owed to
//     waiting work are subtracted. Under saturation, the whole refund comes back if MaxReserved + rate × duration of the
//     work + refund is at most the capacity.
//   - A fixed or calendar window gets everything back while the window of the work is the last one with promised work.
//     Afterwards it gets nothing.
//
// docs/refunds.md says more. Refund before a [Limiter.Reset] and before a change of the limit's numbers: a later refund may
// give back too much, up to its count.
//
// In REPEATABLE READ and SERIALIZABLE, Refund, like every statement, does not see commits after the transaction's snapshot.
// If the first use of the key is among them, nothing is given back.
func (l *Limiter) Refund(ctx context.Context, db DB, receipt Receipt, requests ...Request) (Result, error) {
	return l.do(ctx, db, VerbRefund, receipt, requests)
}

// Reset makes the limits full again for these keys, and forgets debts. Counts are ignored. In REPEATABLE READ and
// SERIALIZABLE, rows committed after the transaction's snapshot are not seen, and stay. So the tokens to forget must have
// been consumed before the transaction began.
func (l *Limiter) Reset(ctx context.Context, db DB, requests ...Request) error {
	_, err := l.do(ctx, db, VerbReset, "", requests)
	return err
}

func (l *Limiter) do(ctx context.Context, db DB, v Verb, receipt Receipt, requests []Request) (result Result, err error) {
	began := time.Now()
	c, err := l.newCall(v, receipt, requests, db)
	if noDatabase(db) {
		err = programError{fmt.Errorf("%w: the DB is nil, or is a Coalescer without a Pool", ErrInvalid)}
	}
	if err == nil && v == VerbWait {
		err = errInTx(ctx, db)
		c.bound(ctx)
	}
	if err == nil {
		err = errOutside(ctx, v, db)
	}
	if err == nil {
		result, err = c.decide(ctx, db)
	} else {
		result = unanswered(c.requests)
	}
	l.observe(ctx, v, began, result, err)
	return result, err
}
