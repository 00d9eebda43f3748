// Package keystate reads how keys stand and which overrides are in force, for the tool and the page. All that it says is worked out by
// ratelimit._states and ratelimit._in_force, as in ratelimit.keys. What one answer says is read in one transaction that is REPEATABLE READ, at
// one instant: else an override may be in one part of it, and not in another.
package keystate

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Querier runs queries.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Slots is the kind of a limit of how many may be held at once.
const Slots = "slots"

// Given are numbers in place of published ones. What is nil is as published.
type Given struct {
	Kind           *string
	Rate, Capacity *float64
	Period         *pgtype.Interval
	Start          *time.Time
	Zone, Anchor   *string
}

// Numbers are numbers in force, and what they come from. What there is not is nil.
type Numbers struct {
	Effect                      string // numbers, unlimited, or varies: only the program knows them. Never block
	Override                    *int64 // the id of the override that they are from
	Kind                        string
	Rate, Capacity, MaxReserved *float64
	Period                      pgtype.Interval
	Seconds                     *float64 // of the period
	PeriodText                  *string
	Start                       *time.Time
	Shards                      *int32
	Zone, Anchor                *string
}

// State is how a key stands.
type State struct {
	Key      string
	Effect   string     // of what is in force: numbers, block, unlimited, or varies
	Override *int64     // its id
	Rows     int        // of the key
	Stored   *float64   // the tokens that were left at the last use; nil: it has no row
	LastUse  *time.Time // nil: it has no row
	Broken   bool       // a row is of no program: an instant is infinite, and every call fails
	Used     *float64   // of slots: those that are held, without those whose holds have expired
	// Remaining is the balance in tokens, or the free slots: +Inf if the key is unlimited; nil if it is not known.
	Remaining *float64
	Denied    bool       // one token would be denied or, where the capacity is less, all
	RetryAt   *time.Time // what such a denial says; nil: it is not denied, or for good, or that is not known
	// NotBefore is set if RetryAt is not known: it is not earlier. An override ends then, and what follows is the program's.
	NotBefore *time.Time
	// PausedUntil is the instant before which a token bucket is not refilled, also under a block; nil: it is not paused.
	PausedUntil *time.Time

	// These are of a State of [Of] alone. A block changes no numbers.
	Numbers   Numbers
	OwedUntil *time.Time // nothing is owed from then on; nil: nothing is, or it is never or not known
	FullAt    *time.Time // the same of a full limit
	// KnownUntil is the end of the override after which only the program knows the numbers: what is not earlier is not known. It is nil if there
	// is none.
	KnownUntil *time.Time
}

// Known reports whether the numbers are.
func (s *State) Known() bool { return s.Numbers.Effect != "varies" }

// given is the definition to ask about, as the column g: $1 is the limit, $4 to $11 are the numbers given.
const given = `(
	SELECT CASE WHEN $4 THEN ROW('numbers', NULL, NULL, coalesce($5::text, d.kind), coalesce($6::float8, d.rate), coalesce($8::interval, d.period),
	       ratelimit._capacity(d.rate, d.capacity, $6::float8, $7::float8), d.max_reserved, coalesce($9::timestamptz, d.start), coalesce(d.shards, 1),
	       coalesce($10::text, d.zone), coalesce($11::text::timestamp, d.anchor), NULL)::ratelimit._terms END AS g
	  FROM ratelimit._defined($1::text) AS d OFFSET 0) AS given`

func arguments(name string, keys any, at time.Time, g *Given) []any {
	if g == nil {
		return []any{name, keys, at, false, nil, nil, nil, nil, nil, nil, nil}
	}
	return []any{name, keys, at, true, g.Kind, g.Rate, g.Capacity, g.Period, g.Start, g.Zone, g.Anchor}
}

var columns = `SELECT s.key, s.effect, s.override, s.rows, s.stored, s.last_use, s.broken, s.used, s.remaining, s.retry_at, s.paused_until,
	(s.numbers).effect, (s.numbers).override, coalesce((s.numbers).kind, ''), (s.numbers).rate, (s.numbers).capacity, (s.numbers).max_reserved, (s.numbers).period,
	extract(epoch FROM (s.numbers).period)::float8, (s.numbers).period::text, (s.numbers).start, (s.numbers).shards, (s.numbers).zone,
	` + AnchorText("(s.numbers).anchor") + `,
	s.owed_until, s.full_at, s.not_before, s.known_until FROM ` + given

// Of reads the state of each of some keys, whether it has a row or not, in the order of the keys. The empty key is a limit without keys. A limit that no program
// has published is an error unless its numbers are given.
func Of(ctx context.Context, db Querier, name string, keys []string, at time.Time, g *Given) ([]State, error) {
	return collect(ctx, db, scan, columns+` CROSS JOIN LATERAL ratelimit._states($1::text, $2::text[], $3::timestamptz, given.g, whole => true) AS s ORDER BY s.key`,
		arguments(name, keys, at, g)...)
}

// All reads the states of the keys of a limit that have rows, or a block or no limit of their own: at most so many (0: all), first those that
// have the least. denied: only those that would be denied or, if their numbers are not known, that may be: what they had at the last use is less
// than one token, and within idle before at (nil: ever).
func All(ctx context.Context, db Querier, name string, at time.Time, g *Given, denied bool, idle *pgtype.Interval, most int) ([]State, error) {
	return collect(ctx, db, scan, columns+` CROSS JOIN LATERAL ratelimit._states($1::text, $2::text[], $3::timestamptz, given.g) AS s
		 WHERE NOT $12 OR s.retry_at IS NOT NULL OR s.effect = 'varies' AND CASE WHEN s.used IS NOT NULL THEN s.used > 0
		       ELSE s.stored < 1 AND NOT coalesce(s.override IS NULL AND s.stored > -1e-15 AND s.last_use < $3::timestamptz - $13::interval, false) END
		 ORDER BY coalesce(s.remaining, CASE WHEN s.effect = 'varies' THEN coalesce(-s.used, s.stored) END) NULLS FIRST, s.key COLLATE "C" LIMIT nullif($14::bigint, 0)`,
		append(arguments(name, nil, at, g), denied, idle, most)...)
}

func scan(row pgx.CollectableRow) (s State, err error) {
	var retryAt pgtype.Timestamptz
	n := &s.Numbers
	err = row.Scan(&s.Key, &s.Effect, &s.Override, &s.Rows, &s.Stored, &s.LastUse, &s.Broken, &s.Used, &s.Remaining, &retryAt, &s.PausedUntil,
		&n.Effect, &n.Override, &n.Kind, &n.Rate, &n.Capacity, &n.MaxReserved, &n.Period, &n.Seconds, &n.PeriodText, &n.Start, &n.Shards, &n.Zone, &n.Anchor,
		&s.OwedUntil, &s.FullAt, &s.NotBefore, &s.KnownUntil)
	if s.Denied = retryAt.Valid; s.Denied && retryAt.InfinityModifier == pgtype.Finite {
		s.RetryAt = &retryAt.Time
	}
	for _, t := range []*time.Time{s.LastUse, s.RetryAt, s.PausedUntil, n.Start, s.OwedUntil, s.FullAt, s.NotBefore, s.KnownUntil} {
		if t != nil {
			*t = t.UTC()
		}
	}
	return s, err
}

// ShownTime is an instant of a column, in SQL, that a time.Time and its JSON can be: one of the years 1 to 9999, whatever a row by hand says.
func ShownTime(column string) string {
	return "least(greatest(" + column + ", '0001-01-01 00:00+00'), '9999-12-31 00:00+00')"
}

// AnchorText is the anchor in a column, in SQL, as people write it: a date, and the time of day if it is not midnight.
func AnchorText(column string) string {
	return fmt.Sprintf("to_char(%[1]s, CASE WHEN %[1]s::time = '00:00' THEN 'YYYY-MM-DD' WHEN extract(second FROM %[1]s) = 0 THEN 'YYYY-MM-DD HH24:MI' ELSE 'YYYY-MM-DD HH24:MI:SS' END)", column)
}

// Point is a point of the curve of a balance.
type Point struct {
	At        time.Time
	Remaining float64
}

// Curve works out what a key with known numbers has between two instants, if nothing more is taken.
func Curve(ctx context.Context, db Querier, name, key string, at time.Time, g *Given, from, to time.Time) ([]Point, error) {
	return collect(ctx, db, pgx.RowToStructByPos[Point], `
		SELECT t.at, ratelimit._total(r.value, r.ts, t.at, q.rate, q.period, q.capacity, q.start, l.windows)
		  FROM `+given+`
		 CROSS JOIN LATERAL ratelimit._numbers($1::text, nullif($2::text, ''), $3::timestamptz, varying => true, standing => true, given => given.g) AS n
		 CROSS JOIN LATERAL ratelimit._ask($1::text, $2::text, n, $3::timestamptz, given.g) AS q
		 CROSS JOIN LATERAL ratelimit._lapsed($1::text, $2::text, $3::timestamptz, q.rate, q.period, q.capacity, q.start, q.windows) AS r
		 CROSS JOIN LATERAL (SELECT ratelimit._reaching(q, r.value, r.ts, $3::timestamptz, q.capacity, 0) AS windows OFFSET 0) AS l -- to where it is full
		 CROSS JOIN LATERAL (SELECT $12::timestamptz + ($13::timestamptz - $12::timestamptz) * (n / 120.0::float8) AS at FROM generate_series(0, 120) AS n) AS t
		 WHERE q.effect = 'numbers' AND r.value IS NOT NULL ORDER BY t.at`, append(arguments(name, key, at, g), from, to)...)
}

func collect[T any](ctx context.Context, db Querier, row pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, row)
}
