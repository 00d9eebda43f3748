package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// call is one use of a verb, as newCall has validated it.
type call struct {
	verb       Verb
	requests   []Request
	demands    []demand
	consumedAt pgtype.Timestamptz // of a refund
	now        pgtype.Timestamptz // NULL: by the database's clock
}

func (l *Limiter) newCall(v Verb, consumedAt time.Time, requests []Request) (c call, err error) {
	c = call{verb: v, requests: requests}
	if c.demands, err = demands(v, requests); err != nil {
		return c, err
	}
	if l.Clock != nil {
		if c.now, err = timestamp("the clock's time", l.Clock()); err != nil {
			return c, err
		}
	}
	if v == VerbRefund {
		c.consumedAt, err = timestamp("the time of consumption", consumedAt)
	}
	return c, err
}

// goesAlone says whether a Coalescer decides the call by a statement of its own.
func (c *call) goesAlone() bool { return sharded(c.demands) }

// timestamp checks an instant that the caller gave. The grids of fixed windows begin in the first 292 years.
func timestamp(what string, t time.Time) (pgtype.Timestamptz, error) {
	t = t.UTC()
	if t.Year() < 1000 || t.Year() > 9999 {
		return pgtype.Timestamptz{}, fmt.Errorf("%w: %s, %v, is not between the years 1000 and 9999", ErrInvalid, what, t)
	}
	return pgtype.Timestamptz{Time: t, Valid: true}, nil
}

// querierOn is how a database is asked for a verb. What writes in a transaction of its own can end with an unknown outcome.
func querierOn(db DB, v Verb) querier {
	if coalescer, ok := db.(*Coalescer); ok && (v == VerbConsume || v == VerbCharge) {
		return coalescing{coalescer: coalescer}
	}
	return queriesOn(db, v != VerbCheck && !isTx(db))
}

// querier is how the database is asked: by queries; by those whose answer is there already (asked), when a batch is read; or by a
// coalescer with its own (coalescing).
type querier interface {
	Consume(ctx context.Context, arg dbsqlc.ConsumeParams) (consumeRow, error)
	ConsumeSharded(ctx context.Context, arg dbsqlc.ConsumeShardedParams) (applyRow, error)
	ConsumeSeveral(ctx context.Context, arg dbsqlc.ConsumeSeveralParams) (applyRow, error)
	Apply(ctx context.Context, arg dbsqlc.ApplyParams) (applyRow, error)
	Reset(ctx context.Context, arg dbsqlc.ResetParams) error
}

// decide asks the database, and makes what the caller gets of the answer. It may be called again: SendTx may send a batch again.
func (c *call) decide(ctx context.Context, q querier) (Result, error) {
	result := unanswered(c.requests)
	var err error
	switch coalesced, ok := q.(coalescing); {
	case ok:
		err = coalesced.coalescer.decide(ctx, c, &result)
	case c.verb == VerbReset:
		err = c.reset(ctx, q)
		result.OK = err == nil
	case c.verb == VerbConsume || c.verb == VerbCharge:
		err = c.take(ctx, q, &result)
	default:
		err = c.apply(ctx, q, &result)
	}
	switch {
	case err != nil: // perhaps after an answer, at COMMIT
		return unanswered(c.requests), explain(c.verb, err)
	case c.verb == VerbConsume && !result.OK:
		return result, &DeniedError{Result: result}
	}
	return result, nil
}

// unanswered is the result of a call about which nothing is known.
func unanswered(requests []Request) Result {
	result := Result{Requests: make([]Status, len(requests))}
	for i, r := range requests {
		result.Requests[i] = Status{Limit: r.limit, Key: r.key, Count: r.tokens}
	}
	return result
}

// explain says what the library did when the database failed.
func explain(verb Verb, err error) error {
	if sqlState(err) == "42883" { // undefined_function, which has several causes
		return fmt.Errorf("ratelimit: %s: %w (has the schema of package migrations been migrated, is it in the search_path, and may this role use it?)", verb, err)
	}
	return fmt.Errorf("ratelimit: %s: %w", verb, err)
}
