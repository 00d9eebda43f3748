package ratelimit

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// A hold is extended every third of its ttl. If that fails, or somebody has locked it, it is tried again after a twelfth. Its work ends a tenth of
// the ttl before the time that is certain: one ttl from before the last extension was sent, by the monotonic clock. So neither a step of the
// server's clock nor an answer that comes late makes it too long.
const (
	third   = 3
	twelfth = 12
	tenth   = 10

	maxExtended = 1000 // rows in one statement: they are locked until its end

	// An extension without an answer is given up after this, or after a third of the shortest ttl in it. The others of the pool wait for it, so a long
	// ttl must not make them wait for a connection that has died silently. A ttl of 10 s has time for its own extension after that.
	extendWithin = 5 * time.Second
)

// renewals extend the holds of the During calls of a Limiter. The zero value is ready.
type renewals struct {
	mu sync.Mutex
	by map[any]*renewer // by pool
}

// renewer extends the holds of one pool, as long as there are any.
type renewer struct {
	of     *renewals // whose mutex guards all of it
	pool   any       // its place there
	line   extender
	users  int             // leases that have not ended
	leases map[*lease]bool // to extend
	wake   chan struct{}   // of one place
	ctx    context.Context // ends when there are no users
	stop   context.CancelFunc
}

// extender sends extensions, one at a time.
type extender interface {
	open(ctx context.Context, ttl time.Duration) error // may be called again, and beside the others
	extend(ctx context.Context, args dbsqlc.ExtendParams) (dbsqlc.ExtendRow, error)
	close()
}

// lease is a hold that is extended, from begin to end.
type lease struct {
	r      *renewer
	cancel context.CancelCauseFunc // ends the work
	ready  chan struct{}           // closed once the hold is certain for long enough to begin the work
	begun  bool                    // ready is closed

	ttl    time.Duration
	limits string // for errors
	rows   []leaseRow
	next   time.Time   // when to extend it
	timer  *time.Timer // ends the work in time
	failed error       // of the last attempt
}

// leaseRow is a row of a hold.
type leaseRow struct {
	name, key, id, uuid string

	certain time.Time // until when it is held, for certain
	over    bool      // settled or lost: it is not extended any more
}

// enter makes a lease. A connection that might not be had later is there before anything is held.
func (all *renewals) enter(ctx context.Context, l *Limiter, db DB, ttl time.Duration) (*lease, error) {
	pool := poolOf(db)
	if pool == nil { // a type of the caller's
		if pool = db; !reflect.ValueOf(db).Comparable() {
			pool = new(byte)
		}
	}
	all.mu.Lock()
	r := all.by[pool]
	if r == nil {
		r = all.start(pool, newLine(l, db))
		if l.life != nil { // Close waits for it, as for the caller
			l.life.calls.Add(1)
		}
		go func() {
			defer l.life.leave()
			r.run()
		}()
	}
	r.users++
	all.mu.Unlock()
	e := &lease{r: r, ready: make(chan struct{})}
	if err := r.line.open(ctx, ttl); err != nil {
		e.end()
		return nil, err
	}
	return e, nil
}

// start is called with the mutex.
func (all *renewals) start(pool any, line extender) *renewer {
	r := &renewer{of: all, pool: pool, line: line, leases: map[*lease]bool{}, wake: make(chan struct{}, 1)}
	r.ctx, r.stop = context.WithCancel(context.Background())
	if all.by == nil {
		all.by = map[any]*renewer{}
	}
	all.by[pool] = r
	return r
}

// begin extends a hold from now on. sent is when it was asked for. The context ends with ctx or the hold.
func (e *lease) begin(ctx context.Context, rows []leaseRow, sent time.Time, ttl time.Duration) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	e.r.of.mu.Lock()
	defer e.r.of.mu.Unlock()
	now := time.Now()
	e.cancel, e.rows, e.ttl, e.next = cancel, rows, ttl, sent.Add(ttl/third)
	if e.begun = e.next.After(now); e.begun {
		close(e.ready)
	} else { // it has waited for a row: it is extended before the work begins, or never begins
		sent = now
	}
	for i := range e.rows {
		e.rows[i].certain = sent.Add(ttl)
	}
	e.timer = time.AfterFunc(e.left(now), e.late)
	e.r.leases[e] = true
	select {
	case e.r.wake <- struct{}{}:
	default:
	}
	return ctx
}

// end ends the extensions, also if begin was not called.
func (e *lease) end() {
	r := e.r
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	delete(r.leases, e)
	if e.timer != nil {
		e.timer.Stop()
		e.cancel(nil)
	}
	if r.users--; r.users == 0 {
		delete(r.of.by, r.pool)
		r.stop()
	}
}

// left is how long the work may go on. Once all rows are over, that is not asked.
func (e *lease) left(now time.Time) time.Duration {
	left := e.ttl
	for i := range e.rows {
		if row := &e.rows[i]; !row.over {
			left = min(left, row.certain.Sub(now))
		}
	}
	return left - e.ttl/tenth
}

// late ends the work of a hold that was not extended in time.
func (e *lease) late() {
	e.r.of.mu.Lock()
	defer e.r.of.mu.Unlock()
	if !e.r.leases[e] {
		return
	}
	if left := e.left(time.Now()); left > 0 { // meanwhile it was extended
		e.timer.Reset(left)
		return
	}
	why := ""
	if e.failed != nil {
		why = ": " + inner{e.failed}.Error()
	}
	e.cancel(fmt.Errorf("%w: %sit could not be extended in time%s", ErrHoldLost, e.limits, why))
}

// run extends holds until nobody uses the renewer.
func (r *renewer) run() {
	defer r.line.close()
	for r.ctx.Err() == nil {
		batch, wait := r.due(time.Now())
		if len(batch) > 0 {
			r.renew(batch)
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-r.wake:
		case <-r.ctx.Done():
		}
		timer.Stop()
	}
}

// due are holds to extend now, or how long to wait. Those that would be due soon go with the others.
func (r *renewer) due(now time.Time) (batch []*lease, wait time.Duration) {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	wait = time.Hour
	for e := range r.leases {
		wait = min(wait, e.next.Sub(now))
	}
	if wait > 0 {
		return nil, wait
	}
	rows := 0
	for e := range r.leases {
		if now.Before(e.next.Add(-e.ttl / twelfth)) {
			continue
		}
		if rows += len(e.rows); rows > maxExtended && len(batch) > 0 {
			break
		}
		batch = append(batch, e)
	}
	return batch, 0
}

// renew extends holds by one statement.
func (r *renewer) renew(batch []*lease) {
	var args dbsqlc.ExtendParams
	var rows []*leaseRow
	var of []*lease
	shortest := batch[0].ttl
	r.of.mu.Lock()
	for _, e := range batch {
		shortest = min(shortest, e.ttl)
		for i := range e.rows {
			if row := &e.rows[i]; !row.over {
				rows, of = append(rows, row), append(of, e)
				args.Names, args.Keys = append(args.Names, row.name), append(args.Keys, row.key)
				args.Ids, args.Tokens = append(args.Ids, row.id), append(args.Tokens, row.uuid)
				args.Ttls = append(args.Ttls, e.ttl)
			}
		}
	}
	r.of.mu.Unlock()

	sent := time.Now()
	ctx, cancel := context.WithTimeout(r.ctx, min(shortest/third, extendWithin))
	answer, err := r.line.extend(ctx, args)
	cancel()

	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	now := time.Now()
	for _, e := range batch {
		if e.failed, e.next = err, sent.Add(e.ttl/third); err != nil {
			e.next = now.Add(e.ttl / twelfth)
		}
	}
	if err != nil {
		return
	}
	for i, row := range rows {
		if e, place := of[i], int32(i+1); contains(answer.Busy, place) {
			e.next = now.Add(e.ttl / twelfth)
		} else if contains(answer.Ended, place) {
			row.over = true
		} else if contains(answer.Lost, place) {
			row.over = true
			e.cancel(fmt.Errorf("%w: limit %q", ErrHoldLost, row.name))
		} else {
			row.certain = sent.Add(e.ttl)
		}
	}
	for _, e := range batch {
		e.extended(now)
	}
}

// extended is called after an answer.
func (e *lease) extended(now time.Time) {
	r := e.r
	if !r.leases[e] { // it has ended meanwhile
		return
	}
	over := true
	for i := range e.rows {
		over = over && e.rows[i].over
	}
	if over {
		e.timer.Stop()
		delete(r.leases, e)
		return
	}
	if busy := !e.next.After(now.Add(e.ttl / twelfth)); !busy && !e.begun {
		e.begun = true
		close(e.ready)
	}
	e.timer.Reset(e.left(now))
}

// contains reports whether a sorted list has a number.
func contains(sorted []int32, n int32) bool {
	_, found := slices.BinarySearch(sorted, n)
	return found
}

// line is a connection for extensions alone: the pool's own may all be in use, by the work whose holds are to be extended.
type line struct {
	l     *Limiter
	of    DB
	begin bool           // the database's default isolation level is not READ COMMITTED
	dying sync.WaitGroup // statements, and connections that were given up

	turn  chan struct{} // of one place: a goroutine that has filled it may change what follows
	own   DB            // nil: it is not open
	ended func()
}

func newLine(l *Limiter, of DB) *line { return &line{l: l, of: of, turn: make(chan struct{}, 1)} }

// open takes the connection of a *sql.DB, before the work takes all of them. One of a *pgxpool.Pool is there before a hold that could not wait for it.
// Others are opened for the first extension, which many calls do not need.
func (n *line) open(ctx context.Context, ttl time.Duration) error {
	switch poolOf(n.of).(type) {
	case *sql.DB:
		return n.connect(ctx, true)
	case *pgxpool.Pool:
		if ttl < third*extendWithin {
			return n.connect(ctx, true)
		}
	}
	return nil
}

// connect opens the line. A *pgxpool.Pool gets another one beside it, of one connection, which its first statement opens unless it is wanted early.
func (n *line) connect(ctx context.Context, early bool) error {
	select {
	case n.turn <- struct{}{}:
		defer func() { <-n.turn }()
	case <-ctx.Done(): // another call waits for a connection of the pool
		return over(ctx)
	}
	if n.own != nil {
		return nil
	}
	switch db := poolOf(n.of).(type) {
	case *pgxpool.Pool:
		config := db.Config()
		config.MaxConns, config.MinConns, config.MinIdleConns = 1, 0, 0
		pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), config)
		if err != nil {
			return err
		}
		if early {
			err = pool.Ping(ctx)
		}
		if err != nil {
			pool.Close()
			return err
		}
		n.own, n.ended = pool, pool.Close
	case *sql.DB:
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		n.own, n.ended = SQL(conn), func() { _ = conn.Close() }
	default:
		n.own, n.ended = n.of, func() {}
	}
	return nil
}

// giveUp has the next extension open another connection. It does not wait for the end of this one: that takes pgx 15 seconds, if the server is silent,
// and lib/pq as long as the network. It is called by the renewer, as close is.
func (n *line) giveUp() {
	n.turn <- struct{}{}
	defer func() { <-n.turn }()
	if n.own != nil {
		n.dying.Go(n.ended)
		n.own = nil
	}
}

func (n *line) close() {
	n.giveUp()
	n.dying.Wait()
}

// extend is one statement, and needs BEGIN only if the database's default isolation level is not READ COMMITTED.
func (n *line) extend(ctx context.Context, args dbsqlc.ExtendParams) (row dbsqlc.ExtendRow, err error) {
	if err := n.connect(ctx, false); err != nil {
		return row, err
	}
	now, err := n.l.now()
	if err != nil {
		return row, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	args.Now = nullable(now)
	row, err = n.send(ctx, args)
	if !n.begin && sqlState(err) == stateIsolation {
		n.begin = true
		row, err = n.send(ctx, args)
	}
	if err != nil && (ctx.Err() != nil || !survives(err)) {
		n.giveUp()
	}
	return row, err
}

// survives reports whether a connection is well after an error: the server has answered, and does not end the session, in which no transaction has
// failed (class 25) and which may write. In a *sql.DB whose connections are all in use, one that is given up is another caller's.
func survives(err error) bool {
	state := sqlState(err)
	return len(state) == 5 && state[:2] != "08" && state[:2] != "25" && state[:3] != "57P"
}

// send ends with ctx, whatever the driver does: lib/pq waits for the answer of a connection that has died silently.
func (n *line) send(ctx context.Context, args dbsqlc.ExtendParams) (dbsqlc.ExtendRow, error) {
	var answer dbsqlc.ExtendRow
	ask := func(ctx context.Context, db DB) (err error) {
		answer, err = wire{db: db, schema: n.l.Schema}.queries().Extend(ctx, args)
		return err
	}
	own, begin := n.own, n.begin
	answered := make(chan error, 1)
	n.dying.Go(func() {
		if !begin {
			answered <- ask(ctx, own)
			return
		}
		inTx, err := n.l.readCommitted(own)
		if err == nil {
			err = inTx(ctx, ask)
		}
		answered <- err
	})
	select {
	case err := <-answered:
		return answer, err
	case <-ctx.Done():
		return dbsqlc.ExtendRow{}, ctx.Err()
	}
}
