package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/ratelimit"
)

// definition is a row of rate_limit_definitions.
type definition struct {
	Program string `json:"program"`
	ratelimit.Config
	Current     bool      `json:"current"` // the program published it last
	PublishedAt time.Time `json:"publishedAt"`
}

// definitions reads the definitions of a limit or, without a name, of all.
func definitions(ctx context.Context, db querier, name *string) ([]definition, error) {
	return collect(ctx, db, func(row pgx.CollectableRow) (d definition, err error) {
		var period pgtype.Interval
		var shards *int
		var zone *string
		var anchor pgtype.Timestamp
		err = row.Scan(&d.Program, &d.Name, &d.Kind, &d.Rate, &period, &d.Capacity, &d.MaxReserved, &d.Start, &shards, &zone, &anchor, &d.Current, &d.PublishedAt)
		d.PublishedAt = d.PublishedAt.UTC()
		if shards != nil {
			d.Shards = *shards
		}
		if zone != nil {
			d.Zone = *zone
		}
		if anchor.Valid {
			d.Anchor = calendar.AnchorText(anchor.Time)
		}
		if d.Start != nil {
			*d.Start = d.Start.UTC()
		}
		if period.Valid {
			d.Period = periodOf(period, d.Kind)
		}
		return d, err
	}, `SELECT program, name, kind, rate, period, capacity, max_reserved, start, shards, zone, anchor, current, published_at
	      FROM rate_limit_definitions WHERE name = $1 OR $1 IS NULL ORDER BY name, program, NOT current, plan`, name)
}

// unitIntervals are the units of the calendar as intervals.
var unitIntervals = map[string]pgtype.Interval{
	"day": {Days: 1, Valid: true}, "week": {Days: 7, Valid: true},
	"month": {Months: 1, Valid: true}, "quarter": {Months: 3, Valid: true}, "year": {Months: 12, Valid: true},
}

// periodOf is an interval as Config.Period has it.
func periodOf(p pgtype.Interval, kind ratelimit.Kind) string {
	if kind == ratelimit.KindCalendarWindow {
		for unit, interval := range unitIntervals {
			if p == interval {
				return "1 " + unit
			}
		}
	}
	return calendar.PeriodText(time.Duration(p.Microseconds)*time.Microsecond + time.Duration(p.Days)*24*time.Hour)
}

// intervalOf is a valid Config.Period as an interval.
func intervalOf(period string) pgtype.Interval {
	fixed, unit, _ := calendar.ParsePeriod(period)
	if unit != "" {
		return unitIntervals[unit]
	}
	return pgtype.Interval{Microseconds: fixed.Microseconds(), Valid: true}
}

// describe is a Config as text, without its name.
func describe(c ratelimit.Config) string {
	limit, err := ratelimit.New(c)
	if err != nil {
		return fmt.Sprintf("%s, which this program cannot read: %s", printable(string(c.Kind)), oneLine(err.Error()))
	}
	return strings.TrimPrefix(limit.String(), c.Name+": ")
}

// The effects of an override.
const (
	effectNumbers   = "numbers"
	effectBlock     = "block"
	effectUnlimited = "unlimited"
)

// override is a row of rate_limit_overrides.
type override struct {
	ID          int64      `json:"id"`
	Limit       string     `json:"limit"`
	Key         *string    `json:"key"` // nil: every key
	Effect      string     `json:"effect"`
	Rate        *float64   `json:"rate,omitempty"`
	Capacity    *float64   `json:"capacity,omitempty"`
	MaxReserved *float64   `json:"maxReserved,omitempty"`
	Until       *time.Time `json:"until"` // nil: for good
	Reason      string     `json:"reason"`
	MadeBy      string     `json:"madeBy"`
	MadeAt      time.Time  `json:"madeAt"`
	Added       *float64   `json:"added,omitempty"`
	RemovedBy   *string    `json:"removedBy,omitempty"`
	RemovedAt   *time.Time `json:"removedAt,omitempty"`
	State       string     `json:"state"` // in force, expired, removed
}

// The states of an override.
const (
	stateInForce = "in force"
	stateExpired = "expired"
	stateRemoved = "removed"
)

const overrideColumns = `id, name, key, effect, rate, capacity, max_reserved, CASE WHEN isfinite(until) THEN until END, reason, made_by, made_at, added, removed_by, removed_at,
	CASE WHEN removed_at IS NOT NULL THEN 'removed' WHEN until <= clock_timestamp() THEN 'expired' ELSE 'in force' END`

// What holds of an override in force.
const inForce = `removed_at IS NULL AND (until IS NULL OR until > clock_timestamp())`

func overrides(ctx context.Context, db querier, where string, args ...any) ([]override, error) {
	list, err := collect(ctx, db, pgx.RowToStructByPos[override], "SELECT "+overrideColumns+" FROM rate_limit_overrides WHERE "+where, args...)
	for i := range list {
		o := &list[i]
		o.MadeAt = o.MadeAt.UTC()
		for _, t := range []*time.Time{o.Until, o.RemovedAt} {
			if t != nil {
				*t = t.UTC()
			}
		}
	}
	return list, err
}

// inForceFor reads the override in force for a key, or nil: the newest, and the key's own before that of every key.
func inForceFor(ctx context.Context, db querier, name string, key *string) (*override, error) {
	list, err := overrides(ctx, db, "name = $1 AND (key = $2 OR key IS NULL) AND "+inForce+" ORDER BY key IS NULL, id DESC LIMIT 1", name, key)
	if len(list) == 0 {
		return nil, err
	}
	return &list[0], nil
}

// text is what the override does.
func (o *override) text() string {
	if o.Effect != effectNumbers {
		return o.Effect
	}
	var parts []string
	for _, p := range []struct {
		n    *float64
		form string
	}{{o.Rate, "rate %s"}, {o.Capacity, "capacity %s"}, {o.MaxReserved, "at most %s reserved"}} {
		if p.n != nil {
			parts = append(parts, fmt.Sprintf(p.form, number(*p.n)))
		}
	}
	return strings.Join(parts, ", ")
}

// under is a definition under an override: a capacity that is the rate follows the rate. A rate of 0 has no capacity.
func under(c ratelimit.Config, o *override) ratelimit.Config {
	if o == nil || o.Effect != effectNumbers || c.Kind == ratelimit.KindUnlimited || o.Rate == nil && c.Rate != nil && *c.Rate == 0 {
		return c
	}
	if o.Capacity != nil {
		c.Capacity = o.Capacity
	} else if o.Rate != nil && (c.Capacity == nil || c.Rate != nil && *c.Capacity == *c.Rate) {
		c.Capacity = o.Rate
	}
	if o.Rate != nil {
		c.Rate = o.Rate
	}
	if o.MaxReserved != nil {
		c.MaxReserved = o.MaxReserved
	}
	return c
}

// numbers are the flags that say which numbers a limit has: a plan of those that are published, or others.
type numbers struct {
	plan                string
	kind, period, start string
	zone, anchor        string
	rate, capacity      float64
	command             *cobra.Command
}

func (n *numbers) flags(command *cobra.Command) {
	n.command = command
	f := command.Flags()
	f.StringVar(&n.plan, "plan", "", "the plan of a limit with several: a part of its `text` that no other plan has")
	f.Float64Var(&n.rate, "rate", 0, "tokens per period, of a limit that no program has published")
	f.StringVar(&n.period, "period", "", "its period, such as 1m, 1h30m, 1d, \"1 month\"")
	f.Float64Var(&n.capacity, "capacity", 0, "its capacity in tokens (default: the rate)")
	f.StringVar(&n.kind, "kind", string(ratelimit.KindTokenBucket), "its kind: \"token bucket\", \"fixed window\", \"calendar window\"")
	f.StringVar(&n.start, "start", "", "the start of a fixed window, in RFC 3339")
	f.StringVar(&n.zone, "zone", "", "the zone of a calendar window (default UTC)")
	f.StringVar(&n.anchor, "anchor", "", "the anchor of a calendar window, such as 2026-01-31 or \"2026-01-31 15:00\" (default 2001-01-01)")
	choices(command, "kind", string(ratelimit.KindTokenBucket), string(ratelimit.KindFixedWindow), string(ratelimit.KindCalendarWindow))
	command.MarkFlagsMutuallyExclusive("plan", "rate")
	command.MarkFlagsRequiredTogether("rate", "period")
}

// config is the definition that the flags give, or nil.
func (n *numbers) config(name string) (*ratelimit.Config, error) {
	changed := n.command.Flags().Changed
	if !changed("rate") {
		for _, flag := range []string{"capacity", "kind", "start", "zone", "anchor"} {
			if changed(flag) {
				return nil, usagef("--%s needs --rate and --period", flag)
			}
		}
		return nil, nil
	}
	c := ratelimit.Config{Name: name, Kind: ratelimit.Kind(n.kind), Rate: &n.rate, Period: n.period, Zone: n.zone, Anchor: n.anchor}
	if changed("capacity") {
		c.Capacity = &n.capacity
	}
	if n.start != "" {
		start, err := time.Parse(time.RFC3339, n.start)
		if err != nil {
			return nil, usagef("--start %q is not an instant, such as 2026-01-31T00:00:00Z", n.start)
		}
		c.Start = &start
	}
	limit, err := ratelimit.New(c)
	if err != nil {
		return nil, usageError{err}
	}
	c = limit.Config()
	return &c, nil
}

// defined is a definition, and the programs that have it.
type defined struct {
	ratelimit.Config
	programs []string
}

// resolve returns the definition of a limit: that of the flags, or the published one. o is the override that it is asked for.
func (n *numbers) resolve(ctx context.Context, db querier, name string, o *override) (defined, error) {
	given, err := n.config(name)
	if err != nil || given != nil {
		if err != nil {
			return defined{}, err
		}
		return defined{Config: *given}, nil
	}
	all, err := definitions(ctx, db, &name)
	if err != nil {
		return defined{}, err
	}
	var plans []defined
	var texts []string
	for _, d := range all {
		if !d.Current {
			continue
		}
		text := describe(under(d.Config, o))
		if i := slices.Index(texts, text); i >= 0 {
			plans[i].programs = append(plans[i].programs, d.Program)
		} else if n.plan == "" || hasPart(text, n.plan) || hasPart(describe(d.Config), n.plan) {
			plans, texts = append(plans, defined{d.Config, []string{d.Program}}), append(texts, text)
		}
	}
	switch {
	case len(plans) == 1:
		return plans[0], nil
	case len(plans) > 1:
		return defined{}, usagef("the limit %s has several plans. Say which with --plan and a part of its text that no other has: %s", printable(name), strings.Join(texts, "; "))
	case n.plan != "" && len(all) > 0:
		for _, d := range all {
			texts = append(texts, describe(d.Config))
		}
		return defined{}, usagef("no plan of the limit %s has %q in its text: %s", printable(name), n.plan, strings.Join(slices.Compact(texts), "; "))
	}
	known, err := knownLimits(ctx, db)
	if err != nil {
		return defined{}, err
	}
	if !slices.Contains(known, name) {
		return defined{}, noSuchLimit(name, known)
	}
	return defined{}, usagef("no program has published the numbers of the limit %s. Give them: --rate and --period, and --kind, --capacity and --start where they differ from the defaults", printable(name))
}

// hasPart reports whether a text has a part that does not begin or end within a number or a word.
func hasPart(text, part string) bool {
	inWord := func(s string, i int) bool {
		return i >= 0 && i < len(s) && (s[i] == '.' || s[i] >= '0' && s[i] <= '9' || s[i] >= 'a' && s[i] <= 'z')
	}
	for from := 0; ; {
		i := strings.Index(text[from:], part)
		if i < 0 || part == "" {
			return false
		}
		if i += from; !inWord(text, i-1) && !inWord(text, i+len(part)) {
			return true
		}
		from = i + 1
	}
}

// knownLimits are the names that are published, have rows or have an override in force.
func knownLimits(ctx context.Context, db querier) ([]string, error) {
	return collect(ctx, db, pgx.RowTo[string], `
		WITH RECURSIVE used AS (
			(SELECT name FROM rate_limits ORDER BY name LIMIT 1)
			UNION ALL
			SELECT (SELECT r.name FROM rate_limits AS r WHERE r.name > u.name ORDER BY r.name LIMIT 1) FROM used AS u WHERE u.name IS NOT NULL
		)
		SELECT name FROM used WHERE name IS NOT NULL
		UNION SELECT name FROM rate_limit_definitions
		UNION SELECT name FROM rate_limit_overrides WHERE `+inForce+`
		ORDER BY 1`)
}

// checkKnown refuses the name of no limit, if programs publish theirs.
func checkKnown(ctx context.Context, db querier, name string) error {
	var known, others bool
	err := db.QueryRow(ctx, `
		SELECT EXISTS (SELECT FROM rate_limit_definitions WHERE name = $1) OR EXISTS (SELECT FROM rate_limits WHERE name = $1)
		       OR EXISTS (SELECT FROM rate_limit_overrides WHERE name = $1),
		       EXISTS (SELECT FROM rate_limit_definitions) OR EXISTS (SELECT FROM rate_limits)`, name).Scan(&known, &others)
	if err != nil || known {
		return err
	}
	if !others {
		return noSuchLimit(name, nil)
	}
	list, err := knownLimits(ctx, db)
	if err != nil {
		return err
	}
	return noSuchLimit(name, list)
}
