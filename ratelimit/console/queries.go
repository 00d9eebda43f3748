package console

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// The most rows that the pages show, and read.
const (
	limitsPerPage  = 40
	maxNames       = 5000 // of limits
	maxKeys        = 50   // that a search finds
	maxDeniedKeys  = 20
	maxDefinitions = 100
	maxOverrides   = 50
)

// limitRow is a limit in the list.
type limitRow struct {
	Name      string
	Granted   int64
	Denied    int64
	Failed    int64
	Counted   bool    // a recorder has counted it, now or before
	Kind      *string // of the definition that counts, as the next four; nil: no program defines it now
	Rate      *float64
	Period    *string
	Seconds   *float64 // of the period
	Capacity  *float64
	Programs  *string
	Versions  int64 // different definitions that programs have now
	Varies    bool  // keys may have numbers of their own
	Overrides int64 // in force: 100 stands for more
	Blocked   bool  // for every key
	Total     int64 // of all limits that match the search, as the next two
	AllGrants int64
	AllDenied int64

	Spark spark `db:"-"`
}

// Names are found by index look-ups, one for each: nothing reads the rows of all keys.
const limitsSQL = `
WITH used AS (
    SELECT u.name, least(sum(u.granted), 9223372036854775807)::bigint AS granted, least(sum(u.denied), 9223372036854775807)::bigint AS denied, least(sum(u.failed), 9223372036854775807)::bigint AS failed FROM rate_limit_usage AS u WHERE u.minute > now() - $1::interval AND u.minute < now() + interval '1 day' GROUP BY u.name
),
named AS (
    SELECT u.name FROM used AS u
    UNION SELECT d.name FROM rate_limit_definitions AS d WHERE d.current
    UNION SELECT n.name FROM unnest($4::text[]) AS n (name)
),
listed AS (
    SELECT n.name, coalesce(u.granted, 0) AS granted, coalesce(u.denied, 0) AS denied, coalesce(u.failed, 0) AS failed,
           count(*) OVER () AS total, least(sum(coalesce(u.granted, 0)) OVER (), 9223372036854775807)::bigint AS all_grants, least(sum(coalesce(u.denied, 0)) OVER (), 9223372036854775807)::bigint AS all_denied
      FROM named AS n LEFT JOIN used AS u ON u.name = n.name
     WHERE strpos(lower(n.name), lower($2)) > 0 OR $2 = ''
     ORDER BY denied DESC, granted DESC, n.name
    OFFSET $3 LIMIT $5
)
SELECT l.name, l.granted, l.denied, l.failed, EXISTS (SELECT 1 FROM rate_limit_usage AS u WHERE u.name = l.name) AS counted, d.kind, d.rate, d.period::text AS period, extract(epoch FROM d.period)::float8 AS seconds, d.capacity, p.programs, p.versions, p.varies,
       (SELECT count(*) FROM (SELECT 1 FROM rate_limit_overrides AS o
         WHERE o.name = l.name AND o.removed_at IS NULL AND (o.until IS NULL OR o.until > now()) LIMIT 100) AS o) AS overrides,
       coalesce((SELECT true FROM rate_limit_overrides AS o
         WHERE o.name = l.name AND o.key IS NULL AND o.effect = 'block' AND o.removed_at IS NULL AND (o.until IS NULL OR o.until > now()) LIMIT 1), false) AS blocked,
       l.total, l.all_grants, l.all_denied
  FROM listed AS l
  LEFT JOIN LATERAL (SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = l.name AND d.current ORDER BY d.published_at DESC, d.program LIMIT 1) AS d ON true
 CROSS JOIN LATERAL (
    SELECT string_agg(DISTINCT d.program, ', ') AS programs, count(DISTINCT d.definition) AS versions, coalesce(bool_or(d.varies IS NOT NULL), false) AS varies
      FROM rate_limit_definitions AS d WHERE d.name = l.name AND d.current
  ) AS p
 ORDER BY l.denied DESC, l.granted DESC, l.name`

func queryLimits(ctx context.Context, tx pgx.Tx, s span, search string, offset int) ([]limitRow, error) {
	stored, err := column[string](tx.Query(ctx, "SELECT n.name FROM _ratelimit_stored_names($1::integer) AS n (name)", maxNames))
	if err != nil {
		return nil, err
	}
	return collect[limitRow](tx.Query(ctx, limitsSQL, s.Length, search, offset, stored, limitsPerPage))
}

// binRow is what a limit granted and denied in one bin of a chart.
type binRow struct {
	Name                     string
	At                       time.Time
	Granted, Denied, Failed  int64
	Tokens, Refunded, Waited float64
}

const binsSQL = `
SELECT u.name, date_bin($3::interval, u.minute, timestamptz 'epoch') AS at, least(sum(u.granted), 9223372036854775807)::bigint AS granted, least(sum(u.denied), 9223372036854775807)::bigint AS denied, least(sum(u.failed), 9223372036854775807)::bigint AS failed,
       sum(u.tokens) AS tokens, sum(u.refunded) AS refunded, sum(u.waited) AS waited
  FROM unnest($1::text[]) AS n (name)
 CROSS JOIN LATERAL (SELECT u.* FROM rate_limit_usage AS u WHERE u.name = n.name COLLATE "C" AND u.minute >= $2 AND u.minute < now() + interval '1 day') AS u
 GROUP BY 1, 2 ORDER BY 1, 2`

func queryBins(ctx context.Context, tx pgx.Tx, since time.Time, bin time.Duration, names ...string) ([]binRow, error) {
	return collect[binRow](tx.Query(ctx, binsSQL, names, since, bin))
}

// definitionRow is the definition of a limit that a program has published.
type definitionRow struct {
	Program, Kind string
	numbers
	Varies      bool
	Current     bool
	InUse       bool // a process has said within five minutes that it uses it
	Counts      bool // for this page, the tool and SQL: no current one was published later
	PublishedAt time.Time
}

// numbers are the numbers of a limit. Those that are not there are nil.
type numbers struct {
	Rate, Seconds, Capacity, MaxReserved *float64
	Period                               *string
	Start                                *time.Time
	Shards                               *int32
	Zone                                 *string
	Anchor                               *string
}

// Numbers are for templates, which cannot name what is embedded.
func (n numbers) Numbers() numbers { return n }

// anchorText is a column of rate_limit_definitions as people write it: a date, and the time of day if it is not midnight.
const anchorText = `to_char(d.anchor, CASE WHEN d.anchor::time = '00:00' THEN 'YYYY-MM-DD' WHEN extract(second FROM d.anchor) = 0 THEN 'YYYY-MM-DD HH24:MI' ELSE 'YYYY-MM-DD HH24:MI:SS' END)`

// queryDefinitions reads the definitions of a limit: first those that count, which are alike.
func queryDefinitions(ctx context.Context, tx pgx.Tx, name string) ([]definitionRow, error) {
	return collect[definitionRow](tx.Query(ctx, `
		SELECT d.program, d.kind, d.rate, extract(epoch FROM d.period)::float8 AS seconds, d.capacity, d.max_reserved, d.period::text AS period,
		       CASE WHEN isfinite(d.start) THEN d.start END AS start, d.shards, d.zone, `+anchorText+` AS anchor, d.varies IS NOT NULL AS varies, d.current, d.in_use, `+shownTime("d.published_at")+` AS published_at,
		       d.current AND d.definition = first_value(d.definition) OVER (ORDER BY d.current DESC, d.published_at DESC, d.program) AS counts
		  FROM (SELECT DISTINCT ON (d.program, d.definition) d.*, coalesce(d.alive_until > clock_timestamp(), false) AS in_use -- several lists of a program may have it
		          FROM rate_limit_definitions AS d WHERE d.name = $1 AND (d.current OR d.published_at > clock_timestamp() - interval '7 days')
		         ORDER BY d.program, d.definition, d.current DESC, in_use DESC, d.published_at DESC) AS d
		 ORDER BY counts DESC, d.current DESC, d.published_at DESC, d.program LIMIT $2`, name, maxDefinitions))
}

// overrideRow is an override, in force or not.
type overrideRow struct {
	ID                          int64
	Key                         *string
	Effect                      string
	Rate, Capacity, MaxReserved *float64
	Until                       *time.Time
	Reason, MadeBy, MadeAs      string
	MadeAt                      time.Time
	Added                       *float64
	RemovedBy, RemovedAs        *string
	RemovedAt                   *time.Time
	Over                        bool // it has been removed, or its end has come

	Now time.Time `db:"-"`
}

// OtherMaker is the role that was logged in when the override was made, if that is another name than who made it.
func (o *overrideRow) OtherMaker() string { return otherRole(&o.MadeBy, &o.MadeAs) }

// OtherRemover is the role that was logged in when it was ended, if that is another name than who ended it.
func (o *overrideRow) OtherRemover() string { return otherRole(o.RemovedBy, o.RemovedAs) }

func otherRole(who, as *string) string {
	if as == nil || who != nil && *who == *as {
		return ""
	}
	return *as
}

// shownTime is an instant of a column that a page can show: one of the years 1 to 9999, whatever a row by hand says.
func shownTime(column string) string {
	return "least(greatest(" + column + ", '0001-01-01 00:00+00'), '9999-12-31 00:00+00')"
}

var shownMadeAt, shownRemovedAt, shownLastUse = shownTime("o.made_at"), "CASE WHEN o.removed_at IS NOT NULL THEN " + shownTime("o.removed_at") + " END", "CASE WHEN count(*) > 0 THEN " + shownTime("max(r.ts)") + " END"

var overrideColumns = `o.id, o.key, o.effect, o.rate, o.capacity, o.max_reserved, CASE WHEN isfinite(o.until) THEN ` + shownTime("o.until") + ` END AS until, o.reason, o.made_by, o.made_as, ` + shownMadeAt + ` AS made_at, o.added, o.removed_by, o.removed_as, ` + shownRemovedAt + ` AS removed_at,
	o.removed_at IS NOT NULL OR coalesce(o.until <= now(), false) AS over`

// queryOverridesInForce reads those of a limit, by key: first those for every key.
func queryOverridesInForce(ctx context.Context, tx pgx.Tx, name string) ([]overrideRow, error) {
	return collect[overrideRow](tx.Query(ctx, `
		SELECT * FROM (
			(SELECT `+overrideColumns+` FROM rate_limit_overrides AS o
			  WHERE o.name = $1 AND o.key IS NULL AND o.removed_at IS NULL AND (o.until IS NULL OR o.until > now()) ORDER BY o.made_at DESC, o.id DESC LIMIT $2)
			UNION ALL
			(SELECT `+overrideColumns+` FROM rate_limit_overrides AS o
			  WHERE o.name = $1 AND o.key IS NOT NULL AND o.removed_at IS NULL AND (o.until IS NULL OR o.until > now()) ORDER BY o.key, o.made_at, o.id LIMIT $2)
		) AS o ORDER BY o.key NULLS FIRST, o.effect = 'block' DESC, o.made_at DESC, o.id DESC LIMIT $2`, name, maxOverrides))
}

// queryHistory reads the newest overrides of a limit, whatever their key.
func queryHistory(ctx context.Context, tx pgx.Tx, name string) ([]overrideRow, error) {
	return collect[overrideRow](tx.Query(ctx, `SELECT `+overrideColumns+` FROM rate_limit_overrides AS o WHERE o.name = $1 ORDER BY o.made_at DESC, o.id DESC LIMIT $2`, name, maxOverrides))
}

// queryKeyHistory reads the newest overrides that were for a key, or for every key.
func queryKeyHistory(ctx context.Context, tx pgx.Tx, name, key string) ([]overrideRow, error) {
	return collect[overrideRow](tx.Query(ctx, `
		SELECT * FROM (
			(SELECT `+overrideColumns+` FROM rate_limit_overrides AS o WHERE o.name = $1 AND o.key = $2 ORDER BY o.made_at DESC, o.id DESC LIMIT $3)
			UNION ALL
			(SELECT `+overrideColumns+` FROM rate_limit_overrides AS o WHERE o.name = $1 AND o.key IS NULL ORDER BY o.made_at DESC, o.id DESC LIMIT $3)
		) AS o ORDER BY o.made_at DESC, o.id DESC LIMIT $3`, name, key, maxOverrides))
}

// keyRow is a key in a list.
type keyRow struct {
	Key        string
	Denied     *int64
	LastDenied *time.Time

	Remaining *float64 `db:"-"` // nil: not known
	InUse     *float64 `db:"-"` // of slots whose number is not known
	Stored    *float64 `db:"-"` // the tokens that were left at the last use; nil: nothing is stored
	Share     float64  `db:"-"` // of the most denied key
}

func queryDenied(ctx context.Context, tx pgx.Tx, name string, since time.Time, search string) ([]keyRow, error) {
	return collect[keyRow](tx.Query(ctx, `SELECT d.key, d.denied, `+shownTime("d.last_denied")+` AS last_denied FROM ratelimit_denials($1, $2) AS d
		WHERE strpos(lower(d.key), lower($3)) > 0 OR $3 = '' LIMIT $4`, name, since, search, maxDeniedKeys))
}

// queryKeys finds the keys that begin with a prefix. Each key is one look-up in the primary key, however many shards it has.
func queryKeys(ctx context.Context, tx pgx.Tx, name, prefix string) ([]keyRow, error) {
	return collect[keyRow](tx.Query(ctx, `
		SELECT f.key, NULL::bigint AS denied, NULL::timestamptz AS last_denied FROM _ratelimit_stored_keys($1::text, $2::text, $3::text, $4::integer) AS f (key)`, name, prefix, above(prefix), maxKeys))
}

// above is the first text that does not begin with a prefix, in the order of the bytes, or nil if there is none.
func above(prefix string) *string {
	runes := []rune(prefix)
	for i, r := range slices.Backward(runes) {
		next := r + 1
		if next == 0xD800 { // surrogates are no characters
			next = 0xE000
		}
		if next <= 0x10FFFF {
			s := string(append(runes[:i:i], next))
			return &s
		}
	}
	return nil
}

// givenNumbers are the numbers of a key that the reader has given, as text. What is empty is as defined.
type givenNumbers struct{ Rate, Capacity, Zone, Anchor string }

// parsedNumbers are givenNumbers that are valid. nil is as defined.
type parsedNumbers struct {
	rate, capacity *float64
	zone, anchor   *string
}

// balanceRow is what is stored of a key, and what it has by the numbers in force, if they are known.
type balanceRow struct {
	Kind string
	numbers
	Known     bool // the numbers, and what follows from them
	Broken    bool // a row of the key is of no program: its ts is infinite
	Own       bool // its numbers are those of the override
	Rows      int64
	LastUse   *time.Time
	Stored    *float64   // the tokens that were left at the last use
	Remaining *float64   // tokens, or free slots
	NextAt    *time.Time // for one token, or for all that the limit holds
	FullAt    *time.Time
	At        time.Time
	InUse     *float64 `db:"-"` // of slots: those that are held, without those whose holds have expired
}

// PausedUntil is the instant before which a token bucket is not refilled; nil: it is not paused. A row that was used a moment later than At
// is not.
func (b *balanceRow) PausedUntil() *time.Time {
	if b.Kind == "token bucket" && b.LastUse != nil && b.LastUse.After(b.At.Add(time.Second)) {
		return b.LastUse
	}
	return nil
}

// Free is how many slots are free.
func (b *balanceRow) Free() float64 { return max(*b.Remaining, 0) }

// Stuck reports whether no slot is free, and no expiry frees one.
func (b *balanceRow) Stuck() bool { return b.NextAt != nil && b.NextAt.Year() == 9999 }

// The sums are the engine's own. $1 is the name, $2 the key, $3 to $6 are the numbers that were given, $7 is the instant. The numbers in force are those, or
// the defined ones, under the newest override that is no block: a block denies, and changes no numbers. A key with numbers of its own that were not given has known ones only if an override leaves nothing out.
var keySQL = `
WITH given AS (
    SELECT d.kind, d.period, d.start, d.shards, d.max_reserved, coalesce($3::float8, d.rate) AS rate, _ratelimit_capacity(d.rate, d.capacity, $3::float8, $4::float8) AS capacity,
           coalesce($5::text, d.zone) AS zone, coalesce($6::text::timestamp, d.anchor) AS anchor,
           num_nonnulls($3::float8, $4::float8, $5::text, $6::text) = 0
               AND EXISTS (SELECT 1 FROM rate_limit_definitions AS v WHERE v.name = $1 AND v.current AND v.varies IS NOT NULL) AS varies
      FROM rate_limit_definitions AS d WHERE d.name = $1 AND d.current ORDER BY d.published_at DESC, d.program LIMIT 1
),
inforce AS (
    SELECT d.kind, CASE WHEN d.kind <> 'slots' THEN coalesce(o.rate, d.rate) END AS rate, d.period,
           CASE WHEN d.kind <> 'slots' THEN _ratelimit_capacity(d.rate, d.capacity, o.rate, o.capacity) ELSE coalesce(floor(o.capacity), d.capacity) END AS capacity,
           coalesce(o.max_reserved, d.max_reserved) AS max_reserved, d.start, d.shards, d.zone, d.anchor, o.id IS NOT NULL AS own,
           NOT d.varies OR (o.rate IS NOT NULL OR d.kind = 'slots') AND o.capacity IS NOT NULL AND d.kind <> 'calendar window' AS known
      FROM given AS d
      LEFT JOIN (SELECT o.* FROM (
            (SELECT o.* FROM rate_limit_overrides AS o
              WHERE o.name = $1 AND o.key = $2 AND o.effect <> 'block' AND o.removed_at IS NULL AND (o.until IS NULL OR o.until > $7::timestamptz) ORDER BY o.made_at DESC, o.id DESC LIMIT 1)
            UNION ALL
            (SELECT o.* FROM rate_limit_overrides AS o
              WHERE o.name = $1 AND o.key IS NULL AND o.effect <> 'block' AND o.removed_at IS NULL AND (o.until IS NULL OR o.until > $7::timestamptz) ORDER BY o.made_at DESC, o.id DESC LIMIT 1)
            ORDER BY key NULLS LAST LIMIT 1
          ) AS o WHERE o.effect = 'numbers') AS o ON d.kind <> 'unlimited'
),
stored AS (
    SELECT coalesce(array_agg(r.value ORDER BY r.shard), '{}') AS value, coalesce(array_agg(r.ts ORDER BY r.shard), '{}') AS ts, ` + shownLastUse + ` AS last_use, sum(r.value) AS total,
           count(*) AS rows, coalesce(bool_and(isfinite(r.ts)), true) AS sound
      FROM rate_limits AS r WHERE r.name = $1 AND r.key = $2
),
windowed AS (
    SELECT f.*, CASE WHEN f.kind = 'calendar window' AND f.rate > 0 THEN
                _ratelimit_windows(f.period, f.zone, f.anchor, $7::timestamptz, _ratelimit_back(f.rate, f.capacity), 100) END AS windows
      FROM inforce AS f
),
grids AS (
    SELECT w.*, CASE w.kind WHEN 'fixed window' THEN _ratelimit_grid($1, $2, w.period, w.kind, w.start) WHEN 'calendar window' THEN w.windows[1] END AS grid,
           CASE w.kind WHEN 'calendar window' THEN _ratelimit_longest(w.period) ELSE w.period END AS longest
      FROM windowed AS w
)`

// queryBalance reads what a key has, or nil if no program defines the limit. NextAt and FullAt are by the override in force or, once it has
// ended, by what follows.
func queryBalance(ctx context.Context, tx pgx.Tx, name, key string, given parsedNumbers, now time.Time) (*balanceRow, error) {
	untils, err := column[time.Time](tx.Query(ctx, `
		SELECT e.until
		  FROM (SELECT o.until FROM rate_limit_overrides AS o WHERE o.name = $1 AND o.key = $2 AND o.removed_at IS NULL AND o.until > $3
		        UNION SELECT o.until FROM rate_limit_overrides AS o WHERE o.name = $1 AND o.key IS NULL AND o.removed_at IS NULL AND o.until > $3) AS e
		 WHERE e.until < '9999-12-31 00:00+00'`, name, key, now))
	var ends []endRow
	if err == nil && len(untils) > 0 {
		ends, err = collect[endRow](tx.Query(ctx, `
			SELECT e.until, (SELECT o.effect FROM _ratelimit_override_of($1::text, $2::text, e.until) AS o) AS effect,
			       (SELECT o.effect FROM _ratelimit_override_of($1::text, $2::text, e.until, standing => true) AS o) AS standing
			  FROM unnest($3::timestamptz[]) AS e (until) ORDER BY e.until`, name, key, untils))
	}
	if err != nil {
		return nil, err
	}
	b, err := queryBalanceAt(ctx, tx, name, key, given, now)
	if err != nil || b == nil {
		return b, err
	}
	for _, end := range ends {
		late := func(t *time.Time) bool { return t != nil && !t.Before(end.Until) }
		if !late(b.NextAt) && !late(b.FullAt) {
			break
		}
		then, err := queryBalanceAt(ctx, tx, name, key, given, end.Until)
		if err != nil {
			return nil, err
		}
		next, never := end.Until, time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
		free := end.Effect != nil && *end.Effect == "unlimited" || !then.Known
		switch {
		case !late(b.NextAt):
		case end.Effect != nil && *end.Effect == "block", !free && then.Remaining == nil:
			b.NextAt = &never // unless that ends, too
		default:
			if b.NextAt = then.NextAt; free || b.NextAt == nil {
				b.NextAt = &next
			}
		}
		free = end.Standing != nil && *end.Standing == "unlimited" || !then.Known
		if late(b.FullAt) && (free || then.Remaining != nil) {
			if b.FullAt = then.FullAt; free || b.FullAt == nil {
				b.FullAt = &next
			}
		}
	}
	return b, nil
}

// endRow is the end of an override, and the effect of the one that follows it.
type endRow struct {
	Until    time.Time
	Effect   *string // nil: the definition follows
	Standing *string // the same beside a block
}

func queryBalanceAt(ctx context.Context, tx pgx.Tx, name, key string, given parsedNumbers, at time.Time) (*balanceRow, error) {
	rows, err := collect[balanceRow](tx.Query(ctx, keySQL+`
		SELECT d.kind, CASE WHEN d.known THEN d.rate END AS rate, extract(epoch FROM d.period)::float8 AS seconds, CASE WHEN d.known THEN d.capacity END AS capacity,
		       d.max_reserved, d.period::text AS period, d.start, d.shards, CASE WHEN d.known THEN d.zone END AS zone, CASE WHEN d.known THEN `+anchorText+` END AS anchor, d.known, NOT s.sound AS broken, d.own, s.rows, s.last_use, s.total AS stored, $7::timestamptz AS at,
		       CASE WHEN d.known AND s.sound AND d.rate > 0 THEN _ratelimit_shown(_ratelimit_total(s.value, s.ts, $7::timestamptz, d.rate, d.longest, d.capacity, d.grid, d.windows), d.rate, d.capacity) END AS remaining,
		       CASE WHEN d.known AND s.sound AND d.rate > 0 AND s.rows > 0 THEN nullif(_ratelimit_when(s.value, s.ts, $7::timestamptz, d.rate, d.longest, d.capacity, d.grid, s.rows::integer,
		           least(d.capacity, 1), 0, false, d.windows), $7::timestamptz) END AS next_at,
		       CASE WHEN d.known AND s.sound AND d.rate > 0 AND s.rows > 0 THEN nullif(_ratelimit_when(s.value, s.ts, $7::timestamptz, d.rate, d.longest, d.capacity, d.grid, s.rows::integer,
		           d.capacity, 0, false, d.windows), $7::timestamptz) END AS full_at
		  FROM grids AS d CROSS JOIN stored AS s`, name, key, given.rate, given.capacity, given.zone, given.anchor, at))
	if len(rows) == 0 {
		return nil, err
	}
	b := &rows[0]
	if b.Kind != kindSlots {
		return b, nil
	}
	var used float64
	var next pgtype.Timestamptz
	b.Stored = nil
	err = tx.QueryRow(ctx, "SELECT f.used, f.free, f.retry_at FROM _ratelimit_free_slots($1::text, $2::text, $3::float8, $4::timestamptz) AS f", name, key, b.Capacity, at).
		Scan(&used, &b.Remaining, &next)
	if b.InUse = &used; next.Valid && next.InfinityModifier == pgtype.Finite {
		t := next.Time.UTC()
		b.NextAt = &t
	} else if next.Valid {
		never := time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC) // unless an override ends, or a slot is released
		b.NextAt = &never
	}
	return b, err
}

// pointRow is a point of the curve of a balance.
type pointRow struct {
	At        time.Time
	Remaining float64
}

// queryCurve computes what a key has between two instants if nothing more is taken.
func queryCurve(ctx context.Context, tx pgx.Tx, name, key string, given parsedNumbers, now, from, to time.Time) ([]pointRow, error) {
	return collect[pointRow](tx.Query(ctx, keySQL+`
		SELECT t.at, _ratelimit_total(s.value, s.ts, t.at, d.rate, d.longest, d.capacity, d.grid, d.windows) AS remaining
		  FROM grids AS d CROSS JOIN stored AS s
		 CROSS JOIN LATERAL (SELECT $8::timestamptz + ($9::timestamptz - $8::timestamptz) * (n / 120.0::float8) AS at FROM generate_series(0, 120) AS n) AS t
		 WHERE s.sound ORDER BY t.at`, name, key, given.rate, given.capacity, given.zone, given.anchor, now, from, to))
}

// queryOverride reads the override in force for a key.
func queryOverride(ctx context.Context, tx pgx.Tx, name, key string) (*overrideRow, error) {
	rows, err := collect[overrideRow](tx.Query(ctx, `SELECT `+overrideColumns+` FROM _ratelimit_override_of($1, $2, now()) AS o`, name, key))
	if len(rows) == 0 {
		return nil, err
	}
	return &rows[0], nil
}

// hourRow is how often a key was denied in an hour.
type hourRow struct {
	Hour       time.Time
	Denied     int64
	LastDenied time.Time
}

func queryKeyDenials(ctx context.Context, tx pgx.Tx, name, key string) ([]hourRow, error) {
	return collect[hourRow](tx.Query(ctx, `
		SELECT d.hour, d.denied, `+shownTime("d.last_denied")+` AS last_denied
		  FROM generate_series(date_trunc('hour', now(), 'UTC') - interval '47 hours', now(), interval '1 hour') AS h
		 CROSS JOIN LATERAL (SELECT d.* FROM rate_limit_denials AS d WHERE d.name = $1 AND d.hour = h AND d.key = $2) AS d
		 ORDER BY d.hour`, name, key))
}

// leftRow is what a key has under the override in force for it: 0 if it is blocked.
type leftRow struct {
	Key       string
	Remaining *float64 // tokens, or free slots; nil: not known
	InUse     *float64 // of slots whose number is not known
	Stored    *float64 // tokens
}

// storedRow is a row of rate_limits.
type storedRow struct {
	Key   string
	Shard int32
	Value float64
	Ts    pgtype.Timestamptz // which may be infinite
}

// queryLeft reads what some keys have. A program must define the limit. It does not use ratelimit_keys, which reads all overrides of the limit.
func queryLeft(ctx context.Context, tx pgx.Tx, name string, keys []string) (map[string]leftRow, error) {
	// Two statements: Citus runs no function that reads a table beside a table of a distributed schema.
	stored, err := collect[storedRow](tx.Query(ctx, "SELECT r.key, r.shard, r.value, r.ts FROM rate_limits AS r WHERE r.name = $1 AND r.key = ANY ($2)", name, keys))
	if err != nil {
		return nil, err
	}
	ofKeys, shards, values, times := make([]string, len(stored)), make([]int32, len(stored)), make([]float64, len(stored)), make([]pgtype.Timestamptz, len(stored))
	for i, r := range stored {
		ofKeys[i], shards[i], values[i], times[i] = r.Key, r.Shard, r.Value, r.Ts
	}
	rows, err := collect[leftRow](tx.Query(ctx, `
		SELECT k.key, CASE WHEN n.kind IS DISTINCT FROM 'slots' THEN s.total END AS stored,
		       CASE WHEN n.kind = 'slots' AND n.effect = 'varies' THEN (SELECT f.used FROM _ratelimit_free_slots($1, k.key, 0, now()) AS f) END AS in_use, CASE
		       WHEN n.effect = 'varies' OR n.effect = 'numbers' AND NOT s.sound THEN NULL
		       WHEN n.effect = 'block' OR n.effect = 'numbers' AND n.rate <= 0 THEN 0
		       WHEN n.effect = 'unlimited' THEN 'Infinity'
		       WHEN n.kind = 'slots' THEN (SELECT greatest(f.free, 0) FROM _ratelimit_free_slots($1, k.key, n.capacity, now()) AS f)
		       ELSE _ratelimit_shown(_ratelimit_total(s.value, s.ts, now(), n.rate, CASE n.kind WHEN 'calendar window' THEN _ratelimit_longest(n.period) ELSE n.period END, n.capacity,
		           CASE n.kind WHEN 'fixed window' THEN _ratelimit_grid($1, k.key, n.period, n.kind, n.start) WHEN 'calendar window' THEN w.windows[1] END, w.windows), n.rate, n.capacity) END AS remaining
		  FROM unnest($2::text[]) AS k (key)
		 CROSS JOIN LATERAL _ratelimit_numbers($1, k.key, now(), varying => true) AS n
		 CROSS JOIN LATERAL (SELECT CASE WHEN n.effect = 'numbers' AND n.kind = 'calendar window' AND n.rate > 0 THEN
		           _ratelimit_windows(n.period, n.zone, n.anchor, now(), _ratelimit_back(n.rate, n.capacity), 100) END AS windows OFFSET 0) AS w
		 CROSS JOIN LATERAL (SELECT coalesce(array_agg(r.value ORDER BY r.shard), '{}') AS value, coalesce(array_agg(r.ts ORDER BY r.shard), '{}') AS ts, sum(r.value) AS total,
		           coalesce(bool_and(isfinite(r.ts)), true) AS sound
		      FROM unnest($3::text[], $4::integer[], $5::float8[], $6::timestamptz[]) AS r (key, shard, value, ts) WHERE r.key = k.key) AS s`,
		name, keys, ofKeys, shards, values, times))
	left := make(map[string]leftRow)
	for _, row := range rows {
		left[row.Key] = row
	}
	return left, err
}

func queryNow(ctx context.Context, tx pgx.Tx) (now time.Time, err error) {
	err = tx.QueryRow(ctx, "SELECT now()").Scan(&now)
	return now.UTC(), err
}

// column reads rows of one column.
func column[T any](rows pgx.Rows, err error) ([]T, error) {
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[T])
}

// collect reads rows into structs, by the names of their columns.
func collect[T any](rows pgx.Rows, err error) ([]T, error) {
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByNameLax[T])
}
