package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/visible"
)

// overrides are the rows of the table ratelimit.overrides that are in force, as far as this process knows. [Open]
// loads them, and follows the table. They are applied in the process, before anything is sent: so they cost no round
// trip, and hold on every handle.
type overrides struct {
	db      DB // a pool
	schema  string
	every   time.Duration // between two polls
	listens bool
	onError func(err error) // nil: slog, at most once a minute

	mu       sync.Mutex // one poll at a time
	snapshot string     // of the last poll
	server   time.Time  // that it is of: when it started
	wholeAt  time.Time  // when all were read
	wholeFor time.Duration
	names    map[string]string // one copy of each name
	wrong    []error           // rows that cannot be used

	table  atomic.Pointer[overrideTable] // nil: not loaded
	seen   atomic.Int64                  // when the last poll succeeded: nanoseconds since the process started
	news   atomic.Int64                  // how many polls have read a change
	logged atomic.Int64                  // when an error was logged
	waking atomic.Pointer[chan struct{}] // is closed by the next change; nil: nobody waits
	clocks atomic.Pointer[clocks]        // the database's clock; nil: as the process's

	database atomic.Value // the string that says which it is, once it was asked
}

const (
	defaultEvery = time.Second
	wholeEvery   = time.Minute
	pollTimeout  = 10 * time.Second
	turnTimeout  = time.Minute // for a connection of the pool
	staleAfter   = 5 * time.Minute
	falseAlarms  = 10 // so many notifications in a row may tell of no change
	day          = 24 * time.Hour
)

// override is a row of the table that is in force, or was until less than a day ago: a sweep minds it for so long.
type override struct {
	id     int64
	made   algebra.Micros
	effect effect
	// Each is NaN if it is as defined.
	rate, capacity, maxReserved float64
	until                       algebra.Micros // its end or removal; algebra.Forever: no end
}

type effect byte

const (
	newNumbers effect = iota
	block
	noLimit
)

var effects = map[string]effect{"numbers": newNumbers, "block": block, "unlimited": noLimit}

// overrideTable holds the overrides of each limit and key, blocks first, and then the newest first. The empty key is
// every key. A part of it is replaced as a whole, so that readers need no lock.
type overrideTable struct {
	parts [256]atomic.Pointer[map[limitKey][]override]
	count atomic.Int64
}

func (t *overrideTable) part(id limitKey) *atomic.Pointer[map[limitKey][]override] {
	return &t.parts[maphash.Comparable(hashSeed, id)%uint64(len(t.parts))]
}

func (t *overrideTable) of(id limitKey) []override {
	if m := t.part(id).Load(); m != nil {
		return (*m)[id]
	}
	return nil
}

// change is a row of a poll.
type change struct {
	limitKey
	override
}

// compare says which of two overrides that are in force for the same goes first: a block, and else the newest.
func (o override) compare(other override) int {
	kind := func(o override) int {
		if o.effect == block {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(kind(o), kind(other)), cmp.Compare(other.made, o.made), cmp.Compare(other.id, o.id))
}

// same reports whether two rows say the same. NaN is as defined.
func (o override) same(other override) bool {
	return o.id == other.id && o.made == other.made && o.effect == other.effect && o.until == other.until &&
		math.Float64bits(o.rate) == math.Float64bits(other.rate) && math.Float64bits(o.capacity) == math.Float64bits(other.capacity) &&
		math.Float64bits(o.maxReserved) == math.Float64bits(other.maxReserved)
}

// apply puts changes into the table, and reports whether there were any: a distributed schema reports changes again
// for 5 minutes. fresh: nobody reads it yet.
func (t *overrideTable) apply(changes []change, fresh bool) (changed bool) {
	byPart := map[*atomic.Pointer[map[limitKey][]override]][]change{}
	for _, c := range changes {
		if !slices.ContainsFunc(t.of(c.limitKey), c.same) {
			byPart[t.part(c.limitKey)] = append(byPart[t.part(c.limitKey)], c)
		}
	}
	for part, changes := range byPart {
		m := map[limitKey][]override{}
		if old := part.Load(); old != nil {
			if m = *old; !fresh {
				m = maps.Clone(m)
			}
		}
		for _, c := range changes {
			list := m[c.limitKey]
			at := slices.IndexFunc(list, func(o override) bool { return o.id == c.id })
			if list = slices.Clone(list); at >= 0 {
				list = slices.Delete(list, at, at+1)
			} else {
				t.count.Add(1)
			}
			at, _ = slices.BinarySearchFunc(list, c.override, override.compare)
			m[c.limitKey] = slices.Insert(list, at, c.override)
		}
		part.Store(&m)
	}
	return len(byPart) > 0
}

// load reads all overrides, in pages of 10,000. If it fails, what was known before stays in force.
func (o *overrides) load(ctx context.Context) error {
	return o.poll(ctx, func(db DB) error {
		if err := o.read(ctx, db, true); err != nil || isInMemory(db) || o.database.Load() != nil {
			return err
		}
		if ours, err := (wire{db: db, schema: o.schema}).queries().Database(ctx); err == nil {
			o.database.Store(ours) // now: in a transaction, it would take a second connection
		}
		return nil
	})
}

// run follows the table until ctx ends.
func (o *overrides) run(ctx context.Context) {
	wake := make(chan struct{}, 1)
	if o.listens {
		var listening sync.WaitGroup
		listening.Go(func() { o.listen(ctx, wake) })
		defer listening.Wait()
	}
	every := o.every
	woken, believed := false, falseAlarms
	for {
		news := o.news.Load()
		if err := o.poll(ctx, func(db DB) error { return o.next(ctx, db) }); err != nil && ctx.Err() == nil {
			o.tell(err)
		}
		if woken && o.news.Load() == news {
			believed--
		}
		hear := wake
		if woken = false; believed <= 0 {
			hear = nil
		}
		timer := time.NewTimer(every)
		select {
		case <-ctx.Done():
		case <-timer.C:
			believed = min(believed+1, falseAlarms)
		case <-hear:
			woken = true
			timer.Reset(every / 20) // many changes share a poll
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// next reads what has changed or, if it is time for that, everything. If that fails, it can still be that a short
// reading works.
func (o *overrides) next(ctx context.Context, db DB) error {
	loaded := o.table.Load() != nil
	if loaded && time.Since(o.wholeAt) <= max(wholeEvery, 100*o.wholeFor) {
		return o.read(ctx, db, false)
	}
	began := time.Now()
	err := o.read(ctx, db, true)
	if err != nil && loaded {
		o.wholeAt, o.wholeFor = time.Now(), time.Since(began) // not at once again
		err = errors.Join(err, o.read(ctx, db, false))
	}
	return err
}

// poll has something read, one at a time, and then tells of the rows that cannot be used. It waits for a connection in
// turn with all callers of the pool, for long: if it gave up, it would be the last again, and under load never come.
func (o *overrides) poll(ctx context.Context, read func(db DB) error) error {
	waiting, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	db, release, err := ofPool(waiting, o.db)
	if err != nil {
		return explain("overrides", err)
	}
	return o.pollOn(db, release, read)
}

// pollOn is poll on a connection, which it releases.
func (o *overrides) pollOn(db DB, release func(), read func(db DB) error) error {
	o.mu.Lock()
	err := read(db)
	if err != nil {
		err = explain("overrides", err)
	}
	wrong := o.wrong
	o.wrong = nil
	o.mu.Unlock()
	release()
	for _, w := range wrong { // which may call a verb
		o.tell(w)
	}
	return err
}

func (o *overrides) validate() error {
	switch {
	case o.every < 0 || o.every > defaultEvery:
		return fmt.Errorf("%w: open: Options.OverridesEvery is %v, which is not between 0 and %v", ErrInvalid, o.every, defaultEvery)
	case o.listens && o.pool() == nil:
		return fmt.Errorf("%w: open: Options.OverridesListen needs a *pgxpool.Pool, and this is a %s", ErrInvalid, handles.Type(o.db))
	case o.listens && o.pool().Config().MaxConns < 2:
		return fmt.Errorf("%w: open: Options.OverridesListen needs a pool of at least 2 connections", ErrInvalid)
	}
	return nil
}

func (o *overrides) pool() *pgxpool.Pool {
	pool, _ := o.db.(*pgxpool.Pool)
	return pool
}

func (o *overrides) tell(err error) {
	if o.onError != nil {
		o.onError(err)
		return
	}
	now := int64(time.Since(started)) + int64(wholeEvery) // 0: never
	if last := o.logged.Load(); last <= now-int64(wholeEvery) && o.logged.CompareAndSwap(last, now) {
		slog.Error("the overrides of rate limits cannot be followed", "error", visible.Error(err))
	}
}

// read reads what has changed since the last poll, or everything.
func (o *overrides) read(ctx context.Context, db DB, whole bool) error {
	began := time.Now()
	table, args := o.table.Load(), dbsqlc.OverridesParams{Since: &o.snapshot}
	if whole {
		table, args.Since, o.names = new(overrideTable), nil, map[string]string{}
	}
	snapshot, changed := "", whole
	for more := true; more; {
		page, err := o.page(ctx, db, args)
		if err != nil {
			return err
		}
		if snapshot == "" { // what commits between two pages is not in it, and so comes with the next poll
			snapshot = page.Snapshot.String
		}
		if !whole && (!page.Server.Time.Equal(o.server) || xmaxOf(snapshot) < xmaxOf(o.snapshot)) { // another server, whose transactions have other numbers
			return o.read(ctx, db, true)
		}
		o.server = page.Server.Time
		changed = table.apply(o.usable(page), whole) || changed
		if more = page.More.Bool; more {
			args.After = page.Ids[len(page.Ids)-1]
		}
	}
	if whole {
		o.wholeAt, o.wholeFor = time.Now(), time.Since(began)
	}
	o.snapshot = snapshot
	o.seen.Store(int64(time.Since(started)))
	o.table.Store(table)
	if changed {
		o.news.Add(1)
		if waking := o.waking.Swap(nil); waking != nil {
			close(*waking)
		}
	}
	return nil
}

// follow reads what has changed, for the program that has changed it: also if ctx has ended meanwhile, since it may
// be the only poll. If that fails, the next one reads it.
func (o *overrides) follow(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pollTimeout)
	defer cancel()
	if err := o.poll(ctx, func(db DB) error { return o.next(ctx, db) }); err != nil {
		o.tell(err)
	}
}

// followOn is follow on the connection that has made the change: in a crowd, another would be free too late.
func (o *overrides) followOn(ctx context.Context, db DB, release func()) {
	if err := o.pollOn(db, release, func(db DB) error { return o.next(context.WithoutCancel(ctx), db) }); err != nil {
		o.tell(err)
	}
}

// sameDatabase refuses a handle of another database: its overrides would not hold here. Of other pools, it asks.
func (o *overrides) sameDatabase(ctx context.Context, db DB) error {
	if isInMemory(db) || isInMemory(o.db) || poolOf(db) != nil && poolOf(db) == poolOf(o.db) {
		return nil
	}
	theirs, err := wire{db: db, schema: o.schema}.queries().Database(ctx)
	if err != nil || theirs == "" {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	if known, _ := o.database.Load().(string); known == theirs {
		return nil
	}
	ours, err := wire{db: o.db, schema: o.schema}.queries().Database(ctx)
	if err != nil || ours == "" {
		return nil // it is not proven
	}
	if o.database.Store(ours); ours != theirs {
		return fmt.Errorf("%w: it is another database than that whose overrides this Limiter follows: Open a Limiter for each", ErrInvalid)
	}
	return nil
}

// changed is closed when overrides have changed.
func (o *overrides) changed() <-chan struct{} {
	for {
		if waking := o.waking.Load(); waking != nil {
			return *waking
		}
		waking := make(chan struct{})
		o.waking.CompareAndSwap(nil, &waking)
	}
}

// xmaxOf is the xmax of a snapshot, whose text is xmin:xmax:...
func xmaxOf(snapshot string) uint64 {
	_, rest, _ := strings.Cut(snapshot, ":")
	xmax, _, _ := strings.Cut(rest, ":")
	n, _ := strconv.ParseUint(xmax, 10, 64)
	return n
}

// clocks is how far the database's clock is ahead of this process's: between low and high, as of an instant of the
// latter. A poll that waited says little, so what earlier polls said counts, too.
type clocks struct {
	low, high, at time.Duration
}

// drift bounds how fast the clocks may drift apart: a millisecond in a second.
const drift = 1000

// polled takes in what a poll says that was sent and answered at instants of the process's clock.
func (o *overrides) polled(sent, answered time.Duration, at time.Time) {
	said := clocks{low: at.Sub(started.Add(answered)), high: at.Sub(started.Add(sent)), at: answered}
	if before := o.clocks.Load(); before != nil {
		since := max(answered-before.at, 0) / drift
		low, high := max(said.low, before.low-since), min(said.high, before.high+since)
		if low <= high { // otherwise a clock was set
			said.low, said.high = low, high
		}
	}
	o.clocks.Store(&said)
}

// page reads one page.
func (o *overrides) page(ctx context.Context, db DB, args dbsqlc.OverridesParams) (dbsqlc.OverridesRow, error) {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	sent := time.Since(started)
	page, err := query(ctx, wire{db: db, schema: o.schema}, (*dbsqlc.Queries).Overrides, args)
	if err == nil {
		o.polled(sent, time.Since(started), page.At.Time)
	}
	return page, err
}

// usable are the rows of a page that can be used, as ratelimit._usable says.
func (o *overrides) usable(page dbsqlc.OverridesRow) []change {
	changes := make([]change, 0, len(page.Ids))
	for i, id := range page.Ids {
		name, known := o.names[page.Names[i]]
		if !known {
			name = page.Names[i]
			o.names[name] = name
		}
		e, known := effects[page.Effects[i]]
		c := change{limitKey{name, page.Keys[i]}, override{
			id: id, effect: e, rate: orNaN(page.Rates[i]), capacity: orNaN(page.Capacities[i]), maxReserved: orNaN(page.MaxReserveds[i]),
			made: algebra.Micros(page.Mades[i]), until: algebra.Micros(page.Untils[i]),
		}}
		if page.Untils[i] == math.MaxInt64 {
			c.until = algebra.Forever
		}
		valid := known && page.Rates[i] != 0
		for _, n := range []float64{page.Rates[i], page.Capacities[i], page.MaxReserveds[i]} {
			valid = valid && (n == asDefined || countable(n))
		}
		if !valid {
			o.wrong = append(o.wrong, fmt.Errorf("ratelimit: overrides: the row with id %d, of limit %q, is passed over: its effect or a number is not valid", id, name))
			continue
		}
		changes = append(changes, c)
	}
	return changes
}

// asDefined stands for NULL in a page.
const asDefined = -1

func orNaN(n float64) float64 {
	if n == asDefined {
		return math.NaN()
	}
	return n
}

// listen wakes the polls when the database tells of a change. Without a connection, it tries again.
func (o *overrides) listen(ctx context.Context, wake chan<- struct{}) {
	for ctx.Err() == nil {
		err := o.pool().AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
			listening := conn.Conn()
			channel, err := inschema.Text("ratelimit.overrides", o.schema)
			if err != nil {
				return err
			}
			if _, err := listening.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
				return err
			}
			for {
				select {
				case wake <- struct{}{}: // also at first: there may have been a change before LISTEN
				default:
				}
				if _, err := listening.WaitForNotification(ctx); err != nil {
					_ = listening.Close(context.WithoutCancel(ctx)) // it must not go back to the pool: it listens
					return err
				}
			}
		})
		if ctx.Err() != nil {
			return
		}
		o.tell(explain("overrides: listen", err))
		select {
		case <-ctx.Done():
		case <-time.After(lastPause):
		}
	}
}

// Tests say by package follow when overrides are read.
func init() {
	follow.Set = func(limiter any, s follow.Settings) {
		l := limiter.(*Limiter)
		l.overrides = &overrides{db: s.DB, schema: l.Schema, every: cmp.Or(s.Every, defaultEvery), listens: s.Listen, onError: s.OnError}
	}
	follow.With = func(limiter, other any) { limiter.(*Limiter).overrides = other.(*Limiter).overrides }
	follow.Load = func(ctx context.Context, limiter any) error { return limiter.(*Limiter).overrides.load(ctx) }
	follow.Run = func(ctx context.Context, limiter any) { limiter.(*Limiter).overrides.run(ctx) }
}
