package usage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/ratelimit"
)

// part is what a flush has taken from a limit.
type part struct {
	of      *limit
	minutes map[int64]counts
	hours   map[int64][]denials
}

// Flush writes what was counted so far. [Recorder.Run] calls it. After an error, the counts are kept for the next flush,
// unless the outcome is unknown: see [Recorder]. It waits for a flush that is under way.
func (r *Recorder) Flush(ctx context.Context) error {
	if err := r.Validate(); err != nil {
		return err
	}
	r.flushing.Lock()
	defer r.flushing.Unlock()
	schema := cmp.Or(inschema.From(ctx, r.Schema), inschema.Default)
	if r.Schema != "" && r.Schema != schema {
		return fmt.Errorf("%w: a usage.Recorder has the schema %q, and Options of Open %q: leave it out", ratelimit.ErrInvalid, r.Schema, schema)
	}
	if r.schema = cmp.Or(r.schema, schema); r.schema != schema { // what it has counted is of the first
		return fmt.Errorf("%w: a usage.Recorder has the counts of the schema %q: use another one for %q", ratelimit.ErrInvalid, r.schema, schema)
	}
	parts := r.collect()
	if len(parts) == 0 && time.Since(r.swept) < sweepAtLeast {
		return nil
	}
	for {
		n := thatFit(parts)
		if err := r.write(ctx, parts[:n]); err != nil {
			r.putBack(parts[n:])
			return fmt.Errorf("usage: flush: %w", err)
		}
		r.swept = time.Now()
		if parts = parts[n:]; len(parts) == 0 {
			return nil
		}
	}
}

// write writes parts by one statement. If that fails, the parts are kept or dropped.
func (r *Recorder) write(ctx context.Context, parts []part) error {
	args := r.params(parts)
	err := r.record(ctx, args)
	switch {
	case err == nil:
		return nil
	case unstorable(err) && len(args.Keys) > 0:
		// A key is the most likely reason: HashKey may return any bytes. It would stop all flushes to come.
		args.DenialNames, args.Hours, args.Keys, args.Denials, args.Asked, args.LastDenied = nil, nil, nil, nil, nil, nil
		if again := r.record(ctx, args); again != nil {
			if notSaved(again) {
				r.putBack(parts)
			} else {
				r.drop(parts)
			}
			return errors.Join(err, again)
		}
		return fmt.Errorf("the denied keys were left out: %w", err)
	case notSaved(err):
		r.putBack(parts)
	default:
		r.drop(parts)
	}
	return err
}

// record calls the function of the database.
func (r *Recorder) record(ctx context.Context, args dbsqlc.RecordUsageParams) error {
	db := r.DB
	if c, ok := db.(*ratelimit.Coalescer); ok {
		db = c.Pool
	}
	if pool, ok := db.(*pgxpool.Pool); ok { // first a connection, so that it is known that nothing was sent if there is none
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return unsentError{err}
		}
		defer conn.Release()
		db = conn
	}
	sql, err := inschema.SQL(dbsqlc.RecordUsage, r.schema)
	if err != nil {
		return unsentError{fmt.Errorf("%w: %w", ratelimit.ErrInvalid, err)}
	}
	return new(ratelimit.Limiter).Retry(ctx, func(ctx context.Context) error {
		var deleted int32
		return db.QueryRow(ctx, sql,
			args.Names, args.Minutes, args.Granted, args.Denied, args.Failed, args.Tokens, args.Refunded, args.Waited,
			args.DenialNames, args.Hours, args.Keys, args.Denials, args.Asked, args.LastDenied, args.Keep).Scan(&deleted)
	})
}

// unsentError is an error from before anything was sent.
type unsentError struct{ error }

func (e unsentError) Unwrap() error { return e.error }

// notSaved reports whether the error of a flush says for certain that nothing was saved.
func notSaved(err error) bool {
	switch state := sqlState(err); {
	case errors.As(err, new(unsentError)), errors.As(err, new(*pgconn.ConnectError)):
		return true
	case errors.Is(err, pgconn.ErrConnClosed): // perhaps closed during the statement, although pgx calls it safe to retry
		return false
	case pgconn.SafeToRetry(err):
		return true
	case len(state) != 5 || state == "40003":
		return false
	case state == "57014": // canceled: a statement_timeout
		return true
	default:
		// A read-only transaction, serialization, a schema, a table or a right that is missing, a full disk, a lock.
		return slices.Contains([]string{"25", "3F", "40", "42", "53", "55"}, state[:2])
	}
}

// unstorable reports whether the database refuses the rows for what they hold, and would again.
func unstorable(err error) bool {
	state := sqlState(err)
	return len(state) == 5 && slices.Contains([]string{"22", "23", "54"}, state[:2]) // 54: too long for an index
}

// collect takes all counts.
func (r *Recorder) collect() (parts []part) {
	known := r.limits.Load()
	if known == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(*known)) {
		l := (*known)[name]
		for i := range l.cells {
			r.empty(l, &l.cells[i])
		}
		l.mu.Lock()
		p := part{of: l, minutes: l.minutes}
		hours := l.hours
		l.minutes, l.hours = nil, nil
		l.mu.Unlock()
		if len(p.minutes)+len(hours) == 0 {
			continue
		}
		p.hours = map[int64][]denials{}
		for hour, s := range hours {
			p.hours[hour] = s.worst()
		}
		parts = append(parts, p)
	}
	return parts
}

// empty moves a cell's counts to the limit's.
func (r *Recorder) empty(l *limit, of *cell) {
	of.mu.Lock()
	slots := of.slot
	for i := range of.slot {
		of.slot[i].counts = counts{}
	}
	of.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range slots {
		if slots[i].counts != (counts{}) {
			r.addMinute(l, slots[i].minute, slots[i].counts)
		}
	}
}

// putBack keeps what could not be written for the next flush.
func (r *Recorder) putBack(parts []part) {
	for _, p := range parts {
		p.of.mu.Lock()
		for minute, c := range p.minutes {
			r.addMinute(p.of, minute, c)
		}
		for hour, keys := range p.hours {
			s := p.of.sketch(hour)
			for _, d := range keys {
				s.add(d)
			}
		}
		p.of.mu.Unlock()
	}
}

// drop notes that parts are lost.
func (r *Recorder) drop(parts []part) {
	for _, p := range parts {
		for _, c := range p.minutes {
			r.dropped.Add(c.requests())
		}
	}
}

// thatFit is how many of the parts the next statement should write.
func thatFit(parts []part) (n int) {
	rows, keys := 0, 0
	for n < len(parts) && rows < maxRows && keys < maxKept {
		rows += len(parts[n].minutes)
		for _, list := range parts[n].hours {
			keys += len(list)
		}
		n++
	}
	return n
}

// params are the arguments of the statement for some parts.
func (r *Recorder) params(parts []part) (args dbsqlc.RecordUsageParams) {
	args.Keep = r.Keep
	if r.Keep == 0 {
		args.Keep = DefaultKeep
	}
	for _, p := range parts {
		for minute, c := range p.minutes {
			args.Names = append(args.Names, p.of.name)
			args.Minutes = append(args.Minutes, instant(time.Unix(60*minute, 0)))
			args.Granted = append(args.Granted, c.granted)
			args.Denied = append(args.Denied, c.denied)
			args.Failed = append(args.Failed, c.failed)
			args.Tokens = append(args.Tokens, c.tokens)
			args.Refunded = append(args.Refunded, c.refunded)
			args.Waited = append(args.Waited, c.waited)
		}
		for hour, list := range p.hours {
			for _, d := range r.hashed(list) {
				args.DenialNames = append(args.DenialNames, p.of.name)
				args.Hours = append(args.Hours, instant(time.Unix(3600*hour, 0)))
				args.Keys = append(args.Keys, d.key)
				args.Denials = append(args.Denials, d.n)
				args.Asked = append(args.Asked, d.asked)
				args.LastDenied = append(args.LastDenied, instant(time.UnixMicro(d.last)))
			}
		}
	}
	return args
}

// hashed is a list of keys with their hashes in place of them. Keys whose hashes are equal become one.
func (r *Recorder) hashed(list []denials) []denials {
	if r.HashKey == nil {
		return list
	}
	place := map[string]int{}
	var joined []denials
	for _, d := range list {
		if d.key != "" { // the limit has keys
			d.key = r.HashKey(d.key)
		}
		i, known := place[d.key]
		if !known {
			place[d.key] = len(joined)
			joined = append(joined, d)
			continue
		}
		joined[i].add(d)
	}
	return joined
}

func instant(t time.Time) pgtype.Timestamptz {
	return pgtype.Timestamptz{Time: t.UTC(), Valid: true}
}
