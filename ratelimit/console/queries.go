package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/keystate"
)

// The most rows that the pages show, and read.
const (
	limitsPerPage  = 40
	maxNames       = 5000 // of limits
	maxKeys        = 50   // that a search finds
	maxDeniedKeys  = 20
	maxDefinitions = 100
	maxOverrides   = 50
	maxHolds       = 20
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
	Total     int64 // of all limits that match the search, as the next two
	AllGrants int64
	AllDenied int64

	Spark     spark `db:"-"`
	Overrides int64 `db:"-"` // in force: 100 stands for more
	Blocked   bool  `db:"-"` // for every key
}

// Numbers of a row of the list.
func (l limitRow) Numbers() numbers {
	return numbers{Rate: l.Rate, Period: l.Period, Seconds: l.Seconds, Capacity: l.Capacity}
}

// Names are found by index look-ups, one for each: nothing reads the rows of all keys.
const limitsSQL = `
WITH used AS (
    SELECT u.name, least(sum(u.granted), 9223372036854775807)::bigint AS granted, least(sum(u.denied), 9223372036854775807)::bigint AS denied, least(sum(u.failed), 9223372036854775807)::bigint AS failed FROM ratelimit.usage AS u WHERE u.minute > now() - $1::interval AND u.minute < now() + interval '1 day' GROUP BY u.name
),
named AS (
    SELECT u.name FROM used AS u
    UNION SELECT d.name FROM ratelimit.definitions AS d WHERE d.current
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
SELECT l.name, l.granted, l.denied, l.failed, EXISTS (SELECT 1 FROM ratelimit.usage AS u WHERE u.name = l.name) AS counted, d.kind, d.rate, d.period::text AS period, extract(epoch FROM d.period)::float8 AS seconds, d.capacity, p.programs, p.versions, p.varies,
       l.total, l.all_grants, l.all_denied
  FROM listed AS l
  LEFT JOIN LATERAL (SELECT d.* FROM ratelimit.definitions AS d WHERE d.name = l.name AND d.current ORDER BY d.published_at DESC, d.program LIMIT 1) AS d ON true
 CROSS JOIN LATERAL (
    SELECT string_agg(DISTINCT d.program, ', ') AS programs, count(DISTINCT d.definition) AS versions, coalesce(bool_or(d.varies IS NOT NULL), false) AS varies
      FROM ratelimit.definitions AS d WHERE d.name = l.name AND d.current
  ) AS p
 ORDER BY l.denied DESC, l.granted DESC, l.name`

func queryLimits(ctx context.Context, tx pgx.Tx, s span, search string, offset int) ([]limitRow, error) {
	stored, err := column[string](tx.Query(ctx, "SELECT n.name FROM ratelimit._stored_names($1::integer) AS n (name)", maxNames))
	if err != nil {
		return nil, err
	}
	limits, err := collect[limitRow](tx.Query(ctx, limitsSQL, s.Length, search, offset, stored, limitsPerPage))
	if err != nil {
		return nil, err
	}
	names := make([]string, len(limits))
	for i, l := range limits {
		names[i] = l.Name
	}
	inForce, err := collect[inForceRow](tx.Query(ctx, `
		SELECT least(count(o.id), 100) AS overrides, coalesce(bool_or(o.key IS NULL AND o.effect = 'block'), false) AS blocked
		  FROM unnest($1::text[]) WITH ORDINALITY AS n (name, i) LEFT JOIN LATERAL ratelimit._in_force(n.name, NULL, now(), 100) AS o ON true
		 GROUP BY n.i ORDER BY n.i`, names))
	for i, row := range inForce {
		limits[i].Overrides, limits[i].Blocked = row.Overrides, row.Blocked
	}
	return limits, err
}

// inForceRow says what overrides of a limit are in force.
type inForceRow struct {
	Overrides int64
	Blocked   bool
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
       sum(greatest(least(u.tokens, 1e100), -1e100)) AS tokens, sum(greatest(least(u.refunded, 1e100), -1e100)) AS refunded,
       sum(greatest(least(u.waited, 1e100), -1e100)) AS waited
  FROM unnest($1::text[]) AS n (name)
 CROSS JOIN LATERAL (SELECT u.* FROM ratelimit.usage AS u WHERE u.name = n.name COLLATE "C" AND u.minute >= $2 AND u.minute < now() + interval '1 day') AS u
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

// queryDefinitions reads the definitions of a limit: first those that count, which are alike.
func queryDefinitions(ctx context.Context, tx pgx.Tx, name string) ([]definitionRow, error) {
	return collect[definitionRow](tx.Query(ctx, `
		SELECT d.program, d.kind, d.rate, extract(epoch FROM d.period)::float8 AS seconds, d.capacity, d.max_reserved, d.period::text AS period,
		       CASE WHEN isfinite(d.start) THEN d.start END AS start, d.shards, d.zone, `+keystate.AnchorText("d.anchor")+` AS anchor, d.varies IS NOT NULL AS varies, d.current, d.in_use, `+keystate.ShownTime("d.published_at")+` AS published_at,
		       d.current AND d.definition = first_value(d.definition) OVER (ORDER BY d.current DESC, d.published_at DESC, d.program) AS counts
		  FROM (SELECT DISTINCT ON (d.program, d.definition) d.*, coalesce(d.alive_until > clock_timestamp(), false) AS in_use -- several lists of a program may have it
		          FROM ratelimit.definitions AS d WHERE d.name = $1 AND (d.current OR d.published_at > clock_timestamp() - interval '7 days')
		         ORDER BY d.program, d.definition, d.current DESC, in_use DESC, d.published_at DESC) AS d
		 ORDER BY counts DESC, d.current DESC, d.published_at DESC, d.program LIMIT $2`, name, maxDefinitions))
}

// overrideRow is an override, in force or not.
type overrideRow struct {
	keystate.Override
	Over bool // it has been removed, or its end has come
	Now  time.Time
}

func overrideRows(list []keystate.Override, err error) ([]overrideRow, error) {
	rows := make([]overrideRow, len(list))
	for i, o := range list {
		rows[i] = overrideRow{Override: o, Over: o.RemovedAt != nil || o.State == keystate.StateExpired || o.State == keystate.StateDone}
	}
	return rows, err
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

// queryOverridesInForce reads those of a limit, by key: first those for every key.
func queryOverridesInForce(ctx context.Context, tx pgx.Tx, name string, now time.Time) ([]overrideRow, error) {
	every, err := keystate.InForce(ctx, tx, &name, []string{""}, now, 0)
	if err != nil {
		return nil, err
	}
	list, err := keystate.InForce(ctx, tx, &name, nil, now, maxOverrides)
	ofKey := func(o keystate.Override) bool { return o.Key != nil }
	list = slices.Concat(slices.DeleteFunc(every, ofKey), slices.DeleteFunc(list, func(o keystate.Override) bool { return !ofKey(o) }))
	return overrideRows(list[:min(len(list), maxOverrides)], err)
}

// queryHistory reads the newest overrides of a limit, whatever their key.
func queryHistory(ctx context.Context, tx pgx.Tx, name string) ([]overrideRow, error) {
	return overrideRows(keystate.History(ctx, tx, `ratelimit.overrides AS o WHERE o.name COLLATE "POSIX" = $1 ORDER BY o.made_at DESC, o.id DESC LIMIT $2`, name, maxOverrides))
}

// queryKeyHistory reads the newest overrides that were for a key, or for every key.
func queryKeyHistory(ctx context.Context, tx pgx.Tx, name, key string) ([]overrideRow, error) {
	return overrideRows(keystate.KeyHistory(ctx, tx, name, &key, maxOverrides))
}

// holdRow is what an id holds of a key.
type holdRow struct{ keystate.Hold }

// Seen is when it was taken, for a form that ends this hold and no later one of its id.
func (h holdRow) Seen() string { return h.Since.Format(time.RFC3339Nano) }

// queryHolds reads the oldest holds of a key, and how many there are.
func queryHolds(ctx context.Context, tx pgx.Tx, name, key string, now time.Time) (rows []holdRow, all int64, err error) {
	list, all, err := keystate.Holds(ctx, tx, name, &key, nil, now, maxHolds)
	for _, h := range list {
		rows = append(rows, holdRow{h})
	}
	return rows, all, err
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

// setState fills in how the key stands.
func (k *keyRow) setState(s *keystate.State) {
	switch {
	case s.Used != nil && s.Effect == "varies": // nobody knows how many there are
		k.InUse = s.Used
		return
	case s.Used == nil:
		k.Stored = s.Stored
	}
	switch {
	case s.Effect == keystate.EffectBlock:
		k.Remaining = new(float64)
	case s.Used != nil:
		free := max(*s.Remaining, 0)
		k.Remaining = &free
	default:
		k.Remaining = s.Remaining
	}
}

func queryDenied(ctx context.Context, tx pgx.Tx, name string, since time.Time, search string) ([]keyRow, error) {
	return collect[keyRow](tx.Query(ctx, `SELECT d.key, d.denied, `+keystate.ShownTime("d.last_denied")+` AS last_denied FROM ratelimit.denials($1, $2) AS d
		WHERE strpos(lower(d.key), lower($3)) > 0 OR $3 = '' LIMIT $4`, name, since, search, maxDeniedKeys))
}

// queryKeys finds the keys that begin with a prefix. Each key is one look-up in the primary key, however many shards it has.
func queryKeys(ctx context.Context, tx pgx.Tx, name, prefix string) ([]keyRow, error) {
	return collect[keyRow](tx.Query(ctx, `
		SELECT f.key, NULL::bigint AS denied, NULL::timestamptz AS last_denied FROM ratelimit._stored_keys($1::text, $2::text, $3::text, $4::integer) AS f (key)`, name, prefix, above(prefix), maxKeys))
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

// balanceRow is what is stored of a key, and what it has by the numbers in force, if they are known.
type balanceRow struct {
	keystate.State
	numbers
	Kind  string
	Known bool // the numbers, and what follows from them
	Own   bool // its numbers are those of an override
}

// Numbers are for templates: those in force.
func (b *balanceRow) Numbers() numbers { return b.numbers }

// Free is how many slots are free.
func (b *balanceRow) Free() float64 { return max(*b.Remaining, 0) }

// Stuck reports whether no slot is free, and no expiry frees one.
func (b *balanceRow) Stuck() bool { return b.Denied && b.RetryAt == nil }

// Later is the end of an override after which only the program knows the numbers, if something that the page says would be later.
func (b *balanceRow) Later() *time.Time {
	if b.NotBefore != nil || b.Short() {
		return b.KnownUntil
	}
	return nil
}

// Short reports whether the key is not full, and it is never, or not known when.
func (b *balanceRow) Short() bool {
	return b.FullAt == nil && b.Used == nil && b.Remaining != nil && b.Capacity != nil && *b.Remaining < *b.Capacity*(1-1e-9)
}

// queryBalance reads what a key has. A program must define the limit.
func queryBalance(ctx context.Context, tx pgx.Tx, name, key string, given *keystate.Given, now time.Time) (*balanceRow, error) {
	states, err := keystate.Of(ctx, tx, name, []string{key}, now, given)
	if err != nil {
		return nil, err
	}
	s := states[0]
	n := s.Numbers
	b := &balanceRow{State: s, Kind: n.Kind, Known: s.Known(), Own: n.Override != nil && n.Effect == keystate.EffectNumbers && n.Kind != "unlimited",
		numbers: numbers{Rate: n.Rate, Seconds: n.Seconds, Capacity: n.Capacity, MaxReserved: n.MaxReserved, Period: n.PeriodText, Start: n.Start, Shards: n.Shards, Zone: n.Zone, Anchor: n.Anchor}}
	if !b.Known {
		b.Rate, b.Capacity = nil, nil
	}
	if n.Rate != nil && *n.Rate == 0 { // nothing is there, and nothing is refilled
		b.Remaining = nil
	}
	return b, nil
}

// queryOverride reads the override in force for a key, and which ones a form shows that ends those of the key or, if it is empty, of every key.
func queryOverride(ctx context.Context, tx pgx.Tx, name, key string, now time.Time) (*overrideRow, shownOverrides, error) {
	rows, err := overrideRows(keystate.InForce(ctx, tx, &name, []string{key}, now, 0))
	if len(rows) == 0 {
		return nil, nil, err
	}
	first := rows[0]
	rows = slices.DeleteFunc(rows, func(o overrideRow) bool { return (o.Key == nil) != (key == "") })
	slices.SortFunc(rows, func(a, b overrideRow) int { return cmp.Or(b.MadeAt.Compare(a.MadeAt), cmp.Compare(b.ID, a.ID)) })
	var ids shownOverrides
	for _, o := range rows[:min(len(rows), maxOverrides)] {
		ids = append(ids, o.ID)
	}
	return &first, ids, nil
}

// shownOverrides are the ids of the overrides in force that a page has shown, of one key or of every key: the newest maxOverrides.
type shownOverrides []int64

// String is what a form has.
func (ids shownOverrides) String() string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint([]int64(ids))), ","), "[]")
}

// parseShown reads what a form has. A form without it has shown none.
func parseShown(text string) (ids shownOverrides, ok bool) {
	if text == "" {
		return nil, true
	}
	for field := range strings.SplitSeq(text, ",") {
		id, err := strconv.ParseInt(field, 10, 64)
		if err != nil || len(ids) == maxOverrides {
			return nil, false
		}
		ids = append(ids, id)
	}
	return ids, true
}

// queryUnseen finds an override that this transaction has ended, of a key (nil: of every key), and that a form has not shown; nil: there is none. since is
// an instant of this transaction before that. It looks at what was ended, since an override may be committed until the moment in which
// ratelimit.restore looks. Several servers number transactions each by itself: there, what was ended since counts, whoever ended it.
func queryUnseen(ctx context.Context, tx pgx.Tx, name string, key *string, ids shownOverrides, since time.Time) (*overrideRow, error) {
	rows, err := overrideRows(keystate.History(ctx, tx, `ratelimit.overrides AS o
		WHERE o.name = $1 AND (o.key = $2 OR $2::text IS NULL AND o.key IS NULL) AND o.removed_at IS NOT NULL AND (o.changed_in = pg_current_xact_id() OR NOT ratelimit._one_server() AND o.removed_at >= $3)
		  AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved) AND o.id <> ALL ($4::bigint[])
		  AND NOT (cardinality($4::bigint[]) = $5 AND o.made_at < (SELECT min(s.made_at) FROM ratelimit.overrides AS s WHERE s.id = ANY ($4::bigint[])))
		ORDER BY o.effect = 'block' DESC, o.made_at DESC, o.id DESC LIMIT 1`, name, key, since, append([]int64{}, ids...), maxOverrides))
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
		SELECT d.hour, d.denied, `+keystate.ShownTime("d.last_denied")+` AS last_denied
		  FROM generate_series(date_trunc('hour', now(), 'UTC') - interval '47 hours', now(), interval '1 hour') AS h
		 CROSS JOIN LATERAL (SELECT d.* FROM ratelimit.denials AS d WHERE d.name = $1 AND d.hour = h AND d.key = $2) AS d
		 ORDER BY d.hour`, name, key))
}

// queryStates reads how some keys stand. A program must define the limit.
func queryStates(ctx context.Context, tx pgx.Tx, name string, keys []string, now time.Time) (map[string]*keystate.State, error) {
	states, err := keystate.Of(ctx, tx, name, keys, now, nil)
	left := make(map[string]*keystate.State)
	for i := range states {
		left[states[i].Key] = &states[i]
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
