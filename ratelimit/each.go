package ratelimit

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// Each decides several requests, each by itself, as [Limiter.Consume] would one after another. It returns what Consume would for each
// request, in their order, and is one statement. It is for a worker that fetches jobs of many tenants, in the transaction that fetches them:
//
//	results, err := limits.Each(ctx, tx, perTenant.Key("acme"), perTenant.Key("globex"), perTenant.Key("acme"))
//	for i := range results {
//		if results[i].OK { // run job i: results[i].Receipt() gives its token back
//
// A denial is no error here, so look at OK of each result. What is denied takes nothing, and the others are granted all the same. Requests
// for one key are decided in order, until its tokens are used up. RetryAt of a denied result is zero if waiting does not help: for a block
// without an end, a rate of 0, or a count that the limit can never hold. The last is no [ErrExceedsCapacity] here, since an override or a
// smaller plan of one key must not stop the others. If an override forbids the count, RetryAt is when that ends, and Remaining is not asked.
//
// In a transaction, all keys that were granted are locked until it ends, in the one order of all calls. Two calls of Each do not deadlock,
// unless both have two requests for one key of a limit with [Shards]. Above READ COMMITTED, another transaction's change of a key is 40001:
// [Limiter.InTx] runs the transaction again. Outside a transaction, all that is granted is committed together. On a [Coalescer], its pool
// is used.
//
// Keys of one token bucket without shards, all of them used before, cost least together. Other requests are decided one after another within
// the statement. No requests, a mistake in one of them, or other numbers for a key twice are [ErrInvalid], before anything is sent. After an
// error, there are no results, and nothing was taken, except after [ErrUnknownOutcome]. The Observer is told of each request, as of a Consume.
func (l *Limiter) Each(ctx context.Context, db DB, requests ...Request) ([]Result, error) {
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
	var parts []part
	if err == nil {
		parts, err = l.each(ctx, db, requests)
	}
	if err != nil {
		l.observe(ctx, verbConsume, time.Since(began), unanswered(verbEach, requests), err)
		return nil, err
	}
	results, took := make([]Result, len(parts)), time.Since(began)
	for i := range parts {
		results[i], err = parts[i].conclude(parts[i].result, nil)
		l.observe(ctx, verbConsume, took, results[i], err)
	}
	return results, nil
}

// part is a request of an Each as a call of its own.
type part struct {
	call
	result Result
}

// each decides the requests.
func (l *Limiter) each(ctx context.Context, db DB, requests []Request) ([]part, error) {
	whole, err := l.newCall(verbEach, about{}, requests, db)
	if noDatabase(db) {
		err = invalidCall(requests, noDatabaseText)
	}
	if err == nil {
		err = errOutside(ctx, verbEach, db, requests)
	}
	if err != nil {
		return nil, err
	}
	whole.lookBack() // what is unsure cannot be asked again: its locks would come after those of later keys
	parts := make([]part, len(requests))
	for i := range parts {
		p := &parts[i]
		p.call = whole
		p.asked, p.requests, p.demands, p.rowless = whole.asked[i:i+1], whole.requests[i:i+1], nil, nil
		if whole.inForce != nil {
			p.inForce = whole.inForce[i : i+1]
		}
		p.result = unanswered(verbEach, p.requests)
	}
	of := func(d demand) (p *part, alone []demand) { // the demand as that of its part
		p = &parts[d.requests[0]]
		d.requests = []int{0}
		return p, []demand{d}
	}
	for _, d := range whole.rowless {
		p, alone := of(d)
		p.rowless = alone
		p.fill(&p.result, p.byPolicy())
	}
	sent := whole
	sent.demands = nil
	for _, d := range whole.demands {
		if p, alone := of(d); d.tooMuch {
			p.refuseTooMuch(alone)
		} else {
			p.demands = alone
			sent.demands = append(sent.demands, d)
		}
	}
	if len(sent.demands) == 0 {
		return parts, nil
	}
	reply := wire{db, !isTx(db)}.send(ctx, dbsqlc.Each, sent.eachArguments(ctx))
	answers, err := readEach(reply, len(sent.demands))
	if err != nil {
		return nil, explainCall(verbEach, requests, reply.judge(err))
	}
	for i, d := range sent.demands {
		p := &parts[d.requests[0]]
		p.fill(&p.result, &answers[i])
	}
	return parts, nil
}

// refuseTooMuch fills in the result of a request that the numbers can never grant. Nothing is asked: what comes after an override can.
func (p *part) refuseTooMuch(alone []demand) {
	now := p.overrides.now(p.local)
	p.result.At = now.Time()
	p.result.retry(p.allowedAt(now, alone))
	p.result.Requests[0].RetryAt = p.result.RetryAt
}

func (c *call) eachArguments(ctx context.Context) []any {
	m, n := columnsOf(c.demands), len(c.demands)
	shards, a, b := make([]int32, n), make([]int32, n), make([]int32, n)
	for i, d := range c.demands {
		shards[i] = int32(d.limit.shards)
		a[i], b[i] = pick(ctx, d)
	}
	return arguments(
		m.names, m.keys,
		m.rates, m.periods, m.capacities, m.starts, shards,
		m.counts, m.floors, a, b, nullable(c.now),
		m.windows, m.firsts, m.lasts,
	)
}

// readEach reads a record of _ratelimit_each: the answers for demands that are decided by themselves.
func readEach(reply pgx.Row, demands int) ([]answer, error) {
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
	answers := make([]answer, demands)
	for i, place := range ord {
		if place < 1 || place > uint64(demands) {
			return nil, errRecord
		}
		a := &answers[place-1]
		a.granted, a.at = granted[i] == 1, sinceY2K(at[i])
		if a.rows == nil {
			a.rows = make([][]algebra.Row, 1)
		}
		a.rows[0] = append(a.rows[0], algebra.Row{Value: math.Float64frombits(values[i]), TS: sinceY2K(ts[i])})
	}
	if slices.ContainsFunc(answers, func(a answer) bool { return a.rows == nil }) {
		return nil, errRecord
	}
	return answers, nil
}
