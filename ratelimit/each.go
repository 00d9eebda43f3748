package ratelimit

import (
	"context"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/decide"
	"github.com/txlimit/txlimit/internal/handles"
)

// EachResult is the answer to a [Limiter.ConsumeEach]: what a Consume of each request would have returned.
type EachResult struct {
	results []Result // by request
}

// Granted yields the place of each request that was granted, from 0 on, and its result.
func (r EachResult) Granted() iter.Seq2[int, Result] { return r.those(true) }

// Denied yields the place of each request that was denied, from 0 on, and its result.
func (r EachResult) Denied() iter.Seq2[int, Result] { return r.those(false) }

// those are the results that are OK or, without ok, those that are not.
func (r EachResult) those(ok bool) iter.Seq2[int, Result] {
	return func(yield func(int, Result) bool) {
		for place, result := range r.results {
			if result.OK == ok && !yield(place, result) {
				return
			}
		}
	}
}

// ConsumeEach decides several requests in one statement, each by itself, as [Limiter.Consume] would one after another.
// A denial is no error here: its request is among Denied, and the others are granted.
//
// RetryAt of a denied result is zero if waiting does not help, also for a count that the limit can never hold, which is
// no [ErrExceedsCapacity] here.
//
// In a transaction, all keys that were granted are locked until it ends. Two calls of ConsumeEach do not deadlock,
// unless both have two requests for one key of a limit with [Shards]. Above READ COMMITTED, another transaction's
// change of a key is 40001. Outside a transaction, all that is granted is committed together.
//
// No requests, a mistake in one of them, or other numbers for a key twice are [ErrInvalid], before anything is sent.
// After an error, there are no results, and nothing was taken, except after [ErrUnknownOutcome].
func (l *Limiter) ConsumeEach(ctx context.Context, db DB, requests ...Request) (EachResult, error) {
	began := time.Now()
	if coalescer, ok := coalescerOf(db); ok && !noDatabase(db) {
		db = coalescer.Pool
	}
	var err error
	if l.life.enter() {
		defer l.life.leave()
	} else {
		err = limiterClosed(verbEach, requests)
	}
	var results []Result
	var denials []error
	if err == nil {
		results, denials, err = l.each(ctx, db, requests)
	}
	took := time.Since(began)
	if err != nil {
		l.observe(ctx, verbConsume, took, unanswered(verbEach, requests), err)
		return EachResult{}, err
	}
	for i := range results {
		l.observe(ctx, verbConsume, took, results[i], denials[i])
	}
	return EachResult{results}, nil
}

// each decides the requests. A denial is an error at the place of its request.
func (l *Limiter) each(ctx context.Context, db DB, requests []Request) (results []Result, denials []error, err error) {
	whole, err := l.callOn(ctx, db, verbEach, about{}, requests)
	if err != nil {
		return nil, nil, err
	}
	whole.lookBack() // what is unsure cannot be asked again: its locks would come after those of later keys
	results, denials = make([]Result, len(requests)), make([]error, len(requests))
	statuses := unanswered(verbEach, whole.requests).Requests
	conclude := func(place int, c *call, fill func(*Result)) {
		r := &results[place]
		r.Requests = statuses[place : place+1 : place+1]
		fill(r)
		*r, denials[place] = c.conclude(*r, nil)
	}
	for i := range whole.rowless {
		place, c := whole.callFor(&whole.rowless[i])
		c.rowless = whole.rowless[i : i+1]
		conclude(place, &c, func(r *Result) { c.fill(r, c.byPolicy()) })
	}
	if len(whole.demands) == 0 {
		return results, denials, nil
	}
	args := whole.eachArguments(ctx)
	r := replyTo(args, !handles.IsTx(db), &whole)
	answers, err := readEach(wire{db, l.Schema, r.commits}.sendFor(ctx, r, dbsqlc.Each, args), len(whole.demands))
	if err != nil {
		return nil, nil, explainCall(verbEach, requests, r.unknownIfSent(err))
	}
	for i := range whole.demands {
		place, c := whole.callFor(&whole.demands[i])
		c.demands = whole.demands[i : i+1]
		conclude(place, &c, func(r *Result) { c.fill(r, &answers[i]) })
	}
	return results, denials, nil
}

// callFor is the request of one demand as a call of its own, without demands, and its place. It makes the demand one of that call.
func (c *call) callFor(d *demand) (place int, alone call) {
	place, alone = d.requests[0], *c
	d.requests = sole
	alone.asked, alone.requests, alone.demands, alone.rowless = c.asked[place:place+1], c.requests[place:place+1], nil, nil
	if c.inForce != nil {
		alone.inForce = c.inForce[place : place+1]
	}
	return place, alone
}

// sole are the requests of the demand of a call with one request.
var sole = []int{0}

// eachArguments has the demands in groups, which share all but keys and counts: those of different keys of one token bucket, or one alone.
func (c *call) eachArguments(ctx context.Context) []any {
	n := len(c.demands)
	heads, ends, keys, counts := make([]demand, 0, 1), make([]int32, 0, 1), make([]string, n), make([]float64, n)
	a, b := picks(ctx, c.demands)
	for i, d := range c.demands {
		keys[i], counts[i] = d.key, d.count
		if i > 0 && c.demands[i-1].key != d.key && groups(heads[len(heads)-1], d) {
			ends[len(ends)-1]++
			continue
		}
		a[len(heads)], b[len(heads)] = a[i], b[i]
		heads, ends = append(heads, d), append(ends, int32(i+1))
	}
	m := columnsOf(heads)
	return arguments(
		ends, m.names,
		m.rates, m.periods, m.capacities, m.starts, shardsOf(heads), m.floors,
		a[:len(heads)], b[:len(heads)], keys, counts, nullable(c.now),
		m.windows, m.firsts, m.lasts,
	)
}

// groups reports whether one UPDATE can decide the demands of two keys.
func groups(a, b demand) bool {
	return a.limit.name == b.limit.name && !a.numbers.Window && a.limit.shards == 1 && b.limit.shards == 1 &&
		a.numbers == b.numbers && a.lowest() == b.lowest()
}

// readEach reads a record of ratelimit._each: the answers for demands that are decided by themselves.
func readEach(reply *reply, demands int) (answers []answer, err error) {
	if all, ok := reply.answer.([]decide.Answer); ok {
		for i := range all {
			answers = append(answers, *answerOf(all[i]))
		}
		return answers, reply.Scan()
	}
	var b []byte
	if err := reply.Scan(&b); err != nil {
		return nil, err
	}
	r := record{rest: b}
	r.expect(5)
	ord := r.array(pgtype.Int4ArrayOID, pgtype.Int4OID, 4)
	granted := r.array(pgtype.Int4ArrayOID, pgtype.Int4OID, 4)
	at := r.array(pgtype.TimestamptzArrayOID, pgtype.TimestamptzOID, 8)
	values := r.array(pgtype.Float8ArrayOID, pgtype.Float8OID, 8)
	ts := r.array(pgtype.TimestamptzArrayOID, pgtype.TimestamptzOID, 8)
	if n := len(ord); !r.ended() || len(granted) != n || len(at) != n || len(values) != n || len(ts) != n {
		return nil, errRecord
	}
	answers = make([]answer, demands)
	heads, rows := make([][]algebra.Row, demands), make([]algebra.Row, len(ord))
	for i, place := range ord {
		if place < 1 || place > uint64(demands) {
			return nil, errRecord
		}
		a := &answers[place-1]
		a.granted, a.at = granted[i] == 1, sinceY2K(at[i])
		rows[i] = algebra.Row{Value: math.Float64frombits(values[i]), TS: sinceY2K(ts[i])}
		if rows[i].TS == algebra.Min { // there is none
			a.rows = heads[place-1 : place]
		} else if a.rows == nil {
			a.rows, heads[place-1] = heads[place-1:place], rows[i:i+1:i+1]
		} else {
			a.rows[0] = append(a.rows[0], rows[i])
		}
	}
	if slices.ContainsFunc(answers, func(a answer) bool { return a.rows == nil }) {
		return nil, errRecord
	}
	return answers, nil
}
