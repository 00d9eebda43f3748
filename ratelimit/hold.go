package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/handles"
)

// Held is what [Limiter.Hold] has taken, and what to store with the work. It has no receipt.
type Held struct {
	// At is as in [Result].
	At time.Time

	// Repeated reports whether nothing was taken, since the id is held without an end already.
	Repeated bool

	// Remaining, ResetAt and Requests are as in [Result].
	Remaining float64
	ResetAt   time.Time

	// Requests has the status of each request, in order.
	Requests []Status

	// Token is for [Limiter.Settle] and [Limiter.Release]: one line of text, with the limits and keys of the hold in
	// the clear. Whoever has it can end the hold. Without an end, it is the id. One above 1 MiB is [ErrInvalid] for
	// both.
	Token string

	// Until is when the hold ends, by the clock that decided, unless it is settled or released before. It is zero if
	// it has no end.
	Until time.Time

	sentAt time.Time // when the statement was sent, on a connection that was there
}

// Forever is the ttl of a hold that does not expire, such as that of a thing which exists until it is deleted. No
// computation of durations yields it. [Limiter.During] and [Limiter.Once] refuse it.
const Forever time.Duration = math.MinInt64

// Hold takes the tokens and slots of all requests, or of none, as [Limiter.Consume] does. They come back when the work
// is settled or released, or when ttl is over. In a transaction, it locks the keys until COMMIT, and a rollback undoes
// it: claim the job, hold, commit, work.
//
// id is the work's, not a worker's, with all that makes it one, such as the customer: a key that customers share knows
// the ids of all. It has 1 to 255 bytes of UTF-8, without control characters and without ~ in front.
// ttl is 100 ms to 366 days, or [Forever]. Any other ttl is [ErrInvalid], and so are more than 1000 requests.
//
// A denial is a [*DeniedError], with a zero Held. With [ReasonHeld], another delivery of the work holds the id, until
// RetryAt. With [ReasonSettled], the work was settled within a day: drop the delivery. With Forever, an id that is held
// so is granted again, Repeated, and nothing is taken, or it is [ErrExceedsCapacity] if its Count is above the slots
// that there are now. With [WaitUpTo], it waits for room.
//
// A Token in place of the id, without requests, extends that hold until ttl from now, at least, also one that expired
// if nobody has taken from the key since. [ErrHoldLost]: for the limits that the error names, it is gone. The others
// are extended: Release the Token. This is for a pool or a connection.
//
// Above READ COMMITTED, it may miss what came back after the snapshot, and deny. After [ErrUnknownOutcome], Release the
// Token, which is there beside this error: that also ends a Hold that is still on its way.
func (l *Limiter) Hold(ctx context.Context, db DB, id string, ttl time.Duration, requests ...Request) (Held, error) {
	held, _, err := l.hold(ctx, db, id, ttl, requests)
	return held, err
}

func (l *Limiter) hold(ctx context.Context, db DB, id string, ttl time.Duration, requests []Request) (Held, Result, error) {
	if len(requests) == 0 && strings.HasPrefix(id, "~") {
		held, err := l.extend(ctx, db, id, ttl)
		return held, Result{}, err
	}
	h := &holding{id: id, ttl: ttl}
	if ttl != Forever {
		h.uuid = newUUID()
	}
	var result Result
	var err error
	if waitUpTo(ctx) > 0 {
		result, err = l.holdInTurn(ctx, db, h, requests)
	} else {
		result, err = l.do(ctx, db, verbHold, about{hold: h}, requests)
	}
	if err != nil && !errors.Is(err, ErrUnknownOutcome) {
		return Held{}, result, err
	}
	held := Held{
		At: result.At, Repeated: result.Repeated, Remaining: result.Remaining, ResetAt: result.ResetAt, Requests: result.Requests,
		sentAt: result.held.sentAt,
	}
	if held.Token = id; ttl != Forever {
		held.Token = holdToken(h.uuid, id, result.Requests)
		if err == nil {
			held.Until = result.held.until.Time()
		}
	}
	return held, result, err
}

// extend is a Hold of a token.
func (l *Limiter) extend(ctx context.Context, db DB, token string, ttl time.Duration) (Held, error) {
	if !l.life.enter() {
		return Held{}, limiterClosed(verbHold, nil)
	}
	defer l.life.leave()
	read, err := readToken(token)
	var held []Request // for errors
	for _, t := range read.list {
		held = append(held, l.unnamed(t, false))
	}
	switch {
	case err != nil:
		return Held{}, invalidCall(nil, err.Error())
	case len(read.list) == 0:
		return Held{}, invalidCall(nil, "the token does not say of which limits it is, and cannot be extended")
	case ttl < minTTL || ttl > maxTTL:
		return Held{}, invalidCall(held, fmt.Sprintf("ttl %s is not between %v and %v", ttlText(ttl), minTTL, maxTTL))
	}
	if coalescer, ok := coalescerOf(db); ok {
		db = coalescer.Pool
	}
	switch {
	case noDatabase(db):
		return Held{}, invalidCall(held, noDatabaseText)
	case isInMemory(db):
		return Held{}, invalidCall(held, "the database in memory of package ratelimittest has no holds: test them with Postgres")
	case handles.IsTx(db) || inTransaction(db):
		return Held{}, invalidCall(held, "in a transaction, a hold would stay locked, and another could not extend or settle it: extend it on a pool")
	}
	if err = errOutside(ctx, verbHold, db, held); err != nil {
		return Held{}, err
	}
	now, err := l.now()
	if err != nil {
		return Held{}, invalidCall(held, err.Error())
	}
	args := dbsqlc.ExtendParams{Now: nullable(now)}
	for _, t := range read.list {
		args.Names, args.Keys = append(args.Names, t.limit), append(args.Keys, t.key)
		args.Ids, args.Tokens, args.Ttls = append(args.Ids, read.id), append(args.Tokens, read.uuid), append(args.Ttls, ttl)
	}
	line := line{l: l, own: db, ended: func() {}, turn: make(chan struct{}, 1)}
	if handles.IsOne(db) {
		defer line.dying.Wait() // the connection is the caller's again
	}
	for attempt := 1; ; attempt++ {
		answer, err := line.extend(ctx, args)
		switch {
		case err != nil:
			return Held{}, explainCall(verbHold, held, err)
		case len(answer.Lost)+len(answer.Ended) > 0:
			return Held{}, lostInPart(held, answer)
		case len(answer.Busy) == 0:
			return Held{At: answer.At.Time.UTC(), Token: token, Until: answer.Until.Time.UTC()}, nil
		case !backOff(ctx, attempt): // a transaction has locked it, to settle it perhaps
			return Held{}, explainCall(verbHold, held, over(ctx))
		}
	}
}

// lostInPart is the error of an extension of which the answer has lost some or all: it names these.
func lostInPart(held []Request, answer dbsqlc.ExtendRow) error {
	var lost []Request
	for _, place := range slices.Concat(answer.Lost, answer.Ended) {
		lost = append(lost, held[place-1])
	}
	rest := ""
	switch {
	case len(lost) == len(held):
	case len(answer.Busy) > 0:
		rest = "; the others may be extended: Release the Token"
	default:
		rest = "; the others are extended: Release the Token"
	}
	return fmt.Errorf("%w: %sit was ended, or given back%s", ErrHoldLost, limitsOf(lost), rest)
}

// Settle ends a hold: the Counts are what was used. Of tokens, less than what is held comes back by the rule of
// [Limiter.Refund] ([Status.Refunded]), and more is charged ([Status.Taken]). Slots are freed, whatever their Count.
// For tokens, a request without Count is [ErrInvalid]. Call it in the transaction that stores the result.
//
// It ends all of the token. What the requests do not name was used as held; its Statuses come last, and Remaining is
// NaN if the Limiter does not know the limit or it [Varies]. A hold without an end ends for the limits that are named;
// without requests, it is ErrInvalid.
//
// If the hold expired, and nobody has taken from the key since, it is as if in time. If it was given back: of tokens,
// what was used and not kept is charged, once its window is over only what is more than was held; of slots, or once the
// id is another's, it is [ErrHoldLost], as for a hold that is not there. Then nothing is changed: return the error, to
// roll back.
//
// A second Settle is Repeated and does nothing, so after [ErrUnknownOutcome], call it again. For a day, the id is
// refused ([ReasonSettled]). While an override lifts the limit, nothing is charged.
func (l *Limiter) Settle(ctx context.Context, db DB, token string, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbSettle, about{hold: &holding{token: token}}, requests)
}

// Release ends a hold whose work is not done, and its id is free. Everything comes back but what was used: the Counts
// of its requests, 0 without one. A hold that has ended is no error: released is false. (If it expired, what was used
// and not kept is charged, once.) So defer it, on the pool, with a context that does not end with the work:
//
//	defer limits.Release(context.WithoutCancel(ctx), pool, held.Token)
//
// After [ErrUnknownOutcome], call it again; released is false then if the first call did it. Name a limit that the
// Limiter does not know or that [Varies], or its tokens may stay used.
//
// A hold that has an end is released by its Token alone: its id with requests is [ErrHoldLost], and without
// [ErrInvalid]. A request for a limit or key that the Token does not have is ErrInvalid.
func (l *Limiter) Release(ctx context.Context, db DB, token string, requests ...Request) (released bool, err error) {
	result, err := l.do(ctx, db, verbRelease, about{hold: &holding{token: token}}, requests)
	return err == nil && result.held.state != heldLate, err
}

// Once is a [Limiter.Consume] that counts once for an id. A second call for the id, within keep, takes nothing and is
// granted, but is not the first, also when there are no tokens left. Beside an error, first is false. Call Once in the
// transaction that handles the event: if that rolls back, the next delivery counts. On a pool, it only counts. A denial
// is not remembered. After [ErrUnknownOutcome], call it again.
//
// id is as for [Limiter.Hold], which shares it. If one of several limits knows it, nothing is taken of any. keep is 100
// ms to 366 days. A block denies also an id that was counted. Slots are [ErrInvalid]. The result of a repeated event
// has no receipt. After a refund of the first call, the id stays counted.
func (l *Limiter) Once(ctx context.Context, db DB, id string, keep time.Duration, requests ...Request) (first bool, result Result, err error) {
	result, err = l.do(ctx, db, verbOnce, about{hold: &holding{id: id, ttl: keep}}, requests)
	return err == nil && !result.Repeated, result, err
}

const (
	minTTL    = 100 * time.Millisecond
	maxTTL    = 366 * 24 * time.Hour
	maxIDLen  = 255  // bytes
	maxInHold = 1000 // limits and keys of a hold: what must be looked up one by one
)

// slotsPeriod is sent for slots, and means nothing.
const slotsPeriod = time.Second

// holding is what a call about holds is about.
type holding struct {
	id    string
	ttl   time.Duration // of a Hold; of a Once, how long its id is known
	token string        // of Settle and Release: as the caller has it
	uuid  string        // in it; empty: it has no end, or is of a Once
	list  []heldTokens  // in it
}

// token128 is the token as an argument.
func (h *holding) token128() any {
	if h.uuid == "" {
		return nil
	}
	return h.uuid
}

// interval is the ttl as an argument.
func (h *holding) interval() pgtype.Interval {
	return pgtype.Interval{Microseconds: h.ttl.Microseconds(), Valid: h.ttl != Forever}
}

// matches reports whether the token says that a demand is for what is held: for tokens, and as many.
func (h *holding) matches(d *demand) bool {
	return !d.limit.slots && slices.Contains(h.list, heldTokens{d.limit.name, d.key, d.count})
}

// names reports whether a request is for a limit and key of the token. One without a list names none, and may be for any.
func (h *holding) names(r *Request) bool {
	return len(h.list) == 0 || slices.ContainsFunc(h.list, func(t heldTokens) bool { return r.isFor(t) })
}

// isFor reports whether the request is for the limit and key of what is held.
func (r *Request) isFor(t heldTokens) bool { return r.limit.name == t.limit && r.key == t.key }

// held is the database's answer to a call about holds.
type held struct {
	state  string
	until  algebra.Micros
	freeAt []algebra.Micros // by demand: see ratelimit._held
	moved  []float64        // by demand: what came back; below zero: what was charged
	lost   []int            // positions of the statement; of a Refund, those that owe tokens which waiting work was promised
	sentAt time.Time        // when the statement was sent, on a connection that was there
}

// The states of a held. Of Settle and Release, they are done, late, repeated and lost.
const (
	heldTaken    = "taken"
	heldDenied   = "denied"
	heldBefore   = "held" // by an earlier call, in time
	heldSettled  = "settled"
	heldRepeated = "repeated"
	heldLate     = "late" // nothing was held any more
	heldLost     = "lost"
	heldReleased = "released" // the token of a Hold was, before it came
)

// validate checks what a call about holds has besides its requests.
func (h *holding) validate(v verb) error {
	if v == verbHold || v == verbOnce {
		switch {
		case h.ttl >= minTTL && h.ttl <= maxTTL, h.ttl == Forever && v == verbHold:
			return nil
		case v == verbOnce:
			return fmt.Errorf("keep %s is not between %v and %v", ttlText(h.ttl), minTTL, maxTTL)
		}
		return fmt.Errorf("ttl %v is not between %v and %v, nor Forever", h.ttl, minTTL, maxTTL)
	}
	read, err := readToken(h.token)
	if err == nil {
		h.id, h.uuid, h.list = read.id, read.uuid, read.list
	}
	return err
}

func ttlText(ttl time.Duration) string {
	if ttl == Forever {
		return "Forever"
	}
	return ttl.String()
}

// holdRequests are the requests of a call about holds, once what is beside them is valid. Those of a Settle and a
// Release say what was used, and what else the token has comes after them.
func (l *Limiter) holdRequests(c *call) ([]Request, error) {
	if c.does.deniable { // not of a token, which the program has stored
		if err := checkID(c.hold.id); err != nil {
			return nil, fmt.Errorf("%w: %s%w", ErrBadRequest, limitsOf(c.requests), err)
		}
	}
	if err := c.hold.validate(c.verb); err != nil {
		return nil, invalidCall(c.requests, err.Error())
	}
	if n := len(c.requests); n > maxInHold {
		return nil, invalidCall(c.requests, fmt.Sprintf("a %s has at most %d requests, not %d", c.verb, maxInHold, n))
	}
	switch {
	case c.verb == verbHold && len(c.requests) == 0:
		return nil, invalidCall(nil, "the call has no requests (to extend a hold, pass its Token in place of the id)")
	case c.does.deniable:
		return c.requests, nil
	case len(c.requests) == 0 && len(c.hold.list) == 0:
		return nil, fmt.Errorf("%w: the token does not say of which limits it is: name them by requests", ErrInvalid)
	}
	requests := slices.Clone(c.requests)
	for i := range requests {
		switch r := &requests[i]; {
		case r.err != nil:
		case !c.hold.names(r):
			return nil, invalidCall(requests[i:i+1], "the token is of a hold of other limits or keys")
		case r.counts:
		case c.verb == verbRelease:
			r.tokens = 0
		case !r.limit.slots:
			return nil, fmt.Errorf("%w: limit %q: Settle needs the Count of what was used", ErrInvalid, r.limit.name)
		}
	}
	for _, t := range c.hold.list {
		if !slices.ContainsFunc(c.requests, func(r Request) bool { return r.isFor(t) }) {
			requests = append(requests, l.unnamed(t, c.verb == verbRelease))
		}
	}
	return requests, nil
}

// unnamed is the request for what a Settle or a Release does not name: it was used as held, or not at all. If the Limiter does not know the
// numbers of the key, the database looks for those that are published.
func (l *Limiter) unnamed(t heldTokens, release bool) Request {
	limit, known := l.definitions.of(t.limit)
	if !known || limit.doesVary() {
		limit = Limit{name: t.limit, slots: true, numbers: algebra.Limit{Period: slotsPeriod, Capacity: math.NaN()}}
	}
	if release {
		t.count = 0
	}
	return Request{limit: limit, key: t.key, tokens: t.count, counts: true}
}

// lift notes which demands of a Settle are unlimited by an override: nothing is charged for them.
func (c *call) lift() {
	if c.inForce == nil {
		return
	}
	requests, _ := c.overrides.applied(verbs[verbCharge], c.asked, c.local)
	c.lifted = make([]bool, len(c.demands))
	for i := range c.demands {
		l := &requests[c.demands[i].requests[0]].limit
		c.lifted[i] = l.unlimited()
	}
}

// sortedRowless are the demands without rows, in the order of their names and keys.
func (c *call) sortedRowless() []demand {
	return slices.SortedFunc(slices.Values(c.rowless), func(a, b demand) int {
		if a.limit.name != b.limit.name {
			return strings.Compare(a.limit.name, b.limit.name)
		}
		return strings.Compare(a.key, b.key)
	})
}

// holdStatement takes the demands under an id. Those without rows come last.
func (c *call) holdStatement(ctx context.Context, now *time.Time) statement {
	all := slices.Concat(c.demands, c.sortedRowless())
	m, n := columnsOf(all), len(all)
	units := make([]string, n)
	a, b := picks(ctx, all)
	for i := range all {
		d := &all[i]
		units[i] = "tokens"
		switch {
		case i >= len(c.demands):
			units[i] = "none"
			m.rates[i], m.periods[i], m.capacities[i], m.floors[i] = 0, slotsPeriod, 0, 0
		case d.limit.slots:
			units[i] = "slots"
		}
	}
	return statement{sql: dbsqlc.Hold, demands: len(c.demands), read: readHeld, args: arguments(
		c.hold.id, c.hold.token128(), c.hold.interval(), int32(len(c.demands)), units, m.names, m.keys,
		m.rates, m.periods, m.capacities, m.starts, shardsOf(all), m.counts, m.floors, a, b, now,
		m.windows, m.firsts, m.lasts,
	)}
}

// settleStatement ends the hold of the demands, by Settle or Release.
func (c *call) settleStatement(now *time.Time) statement {
	all := slices.Concat(c.demands, c.sortedRowless())
	m := columnsOf(all)
	lifted := make([]bool, len(all))
	copy(lifted, c.lifted)
	for i := len(c.demands); i < len(all); i++ {
		m.rates[i], m.periods[i], m.capacities[i] = 0, slotsPeriod, 0
	}
	return statement{sql: dbsqlc.Settle, demands: len(c.demands), read: readSettled, args: arguments(
		c.verb == verbRelease, c.hold.id, c.hold.token128(), int32(len(c.demands)), lifted, m.names, m.keys,
		m.rates, m.periods, m.capacities, m.starts, shardsOf(all), m.counts, now,
		m.windows, m.firsts, m.lasts,
	)}
}

// fillHeld fills in the result of a call about holds that no limit denied.
func (c *call) fillHeld(r *Result, a *answer) {
	r.held, r.At = a.held, a.at.Time()
	r.runAt = a.at
	switch a.held.state {
	case heldBefore, heldSettled:
		r.known = ReasonSettled
		until := algebra.Forever
		if a.held.state == heldBefore {
			r.known, until = ReasonHeld, a.held.until
		}
		r.setRetryAt(until)
		for i := range r.Requests {
			r.Requests[i].RetryAt = r.RetryAt
		}
		return
	case heldReleased:
		return
	case heldLost:
		for i := range r.Requests {
			r.Requests[i].OK = true
		}
		all := slices.Concat(c.demands, c.sortedRowless())
		for _, place := range a.held.lost {
			for _, request := range all[place-1].requests {
				r.Requests[request].OK = false
			}
		}
		return
	case heldRepeated:
		if r.Repeated = true; c.does.settles {
			break
		}
		r.OK = true
		for i := range r.Requests {
			r.Requests[i].OK = true
		}
		for i, counted := range a.rows { // by the first call
			if requests := c.demands[i].requests; len(counted) > 0 && len(requests) == 1 {
				r.Requests[requests[0]].Count = counted[0].Value
			}
		}
		return
	case heldLate:
		if slices.ContainsFunc(a.rows, func(rows []algebra.Row) bool { return len(rows) > 0 }) {
			break
		}
		r.OK, r.Remaining = true, math.NaN() // no row was read
		for i := range r.Requests {
			r.Requests[i].OK, r.Requests[i].Remaining = true, math.NaN()
		}
		return
	}
	c.fillRows(r, a)
	for i := range c.demands {
		for _, request := range c.demands[i].requests {
			s := &r.Requests[request]
			if a.held.moved != nil {
				s.Refunded, s.Taken = max(a.held.moved[i], 0), max(-a.held.moved[i], 0)
			}
		}
	}
}

// lost is the error of a Settle or Release whose hold is lost.
func (h *holding) lost(r Result) error {
	var lost []Status
	for _, s := range r.Requests {
		if !s.OK {
			lost = append(lost, s)
		}
	}
	why := ""
	switch {
	case r.held.state == heldReleased:
		why = ": its token was released or settled before it came"
	case h.uuid == "":
		why = ": if the hold has an end, pass its Token, not its id"
	}
	return fmt.Errorf("%w: %s%s", ErrHoldLost, strings.TrimSuffix(limitsIn(lost), ": "), why)
}

// readHeld reads a ratelimit._held.
func readHeld(reply pgx.Row, demands int) (*answer, error) {
	var b []byte
	if err := reply.Scan(&b); err != nil {
		return nil, err
	}
	r := record{rest: b}
	r.expect(7)
	a := &answer{held: held{state: r.text()}}
	a.held.until = r.instantOrNull()
	a.at = r.instant()
	r.rows(a, demands)
	if a.granted = a.held.state == heldTaken; a.held.state == heldDenied {
		a.held.freeAt = r.instants(demands)
	} else {
		r.instants(0)
	}
	if !r.ended() {
		return nil, errRecord
	}
	return a, nil
}

// readSettled reads a ratelimit._settled.
func readSettled(reply pgx.Row, demands int) (*answer, error) {
	var b []byte
	if err := reply.Scan(&b); err != nil {
		return nil, err
	}
	r := record{rest: b}
	r.expect(7)
	a := &answer{granted: true, held: held{state: r.text()}}
	a.at = r.instant()
	r.rows(a, demands)
	for _, v := range r.array(pgtype.Float8ArrayOID, pgtype.Float8OID, 8) {
		a.held.moved = append(a.held.moved, math.Float64frombits(v))
	}
	for _, v := range r.array(pgtype.Int4ArrayOID, pgtype.Int4OID, 4) {
		a.held.lost = append(a.held.lost, int(int32(v)))
	}
	if !r.ended() || len(a.held.moved) < demands {
		return nil, errRecord
	}
	return a, nil
}
