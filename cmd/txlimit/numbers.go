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
	"github.com/txlimit/txlimit/internal/keystate"
	"github.com/txlimit/txlimit/ratelimit"
)

// definition is a row of ratelimit.definitions.
type definition struct {
	Program string `json:"program"`
	ratelimit.Config
	Counts      bool      `json:"counts"`      // for this command, the page and SQL: no current one was published later
	Current     bool      `json:"current"`     // it is in the program's list that counts
	InUse       bool      `json:"inUse"`       // a process has said within five minutes that it uses it
	PublishedAt time.Time `json:"publishedAt"` // of one that is not current: when it was replaced or, if later, last used
}

// definitions reads the definitions of a limit or, without a name, of all, by name: first those that count, which are alike.
func definitions(ctx context.Context, db querier, name *string) ([]definition, error) {
	return collect(ctx, db, func(row pgx.CollectableRow) (d definition, err error) {
		var period pgtype.Interval
		var shards *int
		var zone *string
		var anchor pgtype.Timestamp
		var varies pgtype.Interval
		err = row.Scan(&d.Program, &d.Name, &d.Kind, &d.Rate, &period, &d.Capacity, &d.MaxReserved, &d.Start, &shards, &zone, &anchor, &varies,
			&d.Current, &d.InUse, &d.PublishedAt, &d.Counts)
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
		if varies.Valid {
			d.Varies = periodOf(varies, "token bucket")
		}
		if d.Start != nil {
			*d.Start = d.Start.UTC()
		}
		if period.Valid {
			d.Period = periodOf(period, d.Kind)
		}
		return d, err
	}, `SELECT program, name, kind, rate, period, coalesce(capacity, CASE kind WHEN 'slots' THEN 0 ELSE rate END), max_reserved, CASE WHEN isfinite(start) THEN start END, shards, zone, anchor, varies, current, in_use, `+keystate.ShownTime("published_at")+`,
	           current AND definition = first_value(definition) OVER (PARTITION BY name ORDER BY current DESC, published_at DESC, program) AS counts
	      FROM (SELECT DISTINCT ON (d.name, d.program, d.definition) d.*, coalesce(d.alive_until > clock_timestamp(), false) AS in_use -- several lists of a program may have it
	              FROM ratelimit.definitions AS d WHERE (d.name = $1 OR $1 IS NULL) AND `+counting+`
	             ORDER BY d.name, d.program, d.definition, d.current DESC, in_use DESC, d.published_at DESC) AS d
	     ORDER BY name, counts DESC, current DESC, published_at DESC, program`, name)
}

// counting is what sweeps mind. Older rows say only since when a program has a list.
const counting = "(current OR published_at > clock_timestamp() - interval '7 days')"

// unitIntervals are the units of the calendar as intervals.
var unitIntervals = map[string]pgtype.Interval{
	"day": {Days: 1, Valid: true}, "week": {Days: 7, Valid: true},
	"month": {Months: 1, Valid: true}, "quarter": {Months: 3, Valid: true}, "year": {Months: 12, Valid: true},
}

// periodOf is an interval as Config.Period has it.
func periodOf(p pgtype.Interval, kind string) string {
	if kind == "calendar window" {
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
	limit, err := c.Limit()
	if err != nil {
		return fmt.Sprintf("%s, which this program cannot read: %s", printable(c.Kind), oneLine(err.Error()))
	}
	return strings.TrimPrefix(limit.String(), c.Name+": ")
}

// The effects of an override.
const (
	effectNumbers   = keystate.EffectNumbers
	effectBlock     = keystate.EffectBlock
	effectUnlimited = keystate.EffectUnlimited
	effectReset     = keystate.EffectReset
)

// override is a row of ratelimit.overrides.
type override = keystate.Override

// inForce reads the overrides in force for a key, or for a limit without keys: the one that decides first.
func inForce(ctx context.Context, db querier, name string, key *string, at time.Time) ([]override, error) {
	return keystate.InForce(ctx, db, &name, []string{keyText(key)}, at, 0)
}

// keyText is a key as it is stored.
func keyText(key *string) string {
	if key == nil {
		return ""
	}
	return *key
}

// effectOf is what an override does.
func effectOf(o *override) string {
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

// kindSlots is the kind of a limit of how many may be held at once.
const kindSlots = keystate.Slots

// grantsNothing reports whether a limit has a rate of 0, or no slots.
func grantsNothing(c ratelimit.Config) bool {
	if c.Kind == kindSlots {
		return *c.Capacity == 0
	}
	return c.Rate != nil && *c.Rate == 0
}

// numbers are the flags that give numbers: those of a limit that no program has published, or of a key that has numbers of its own.
type numbers struct {
	kind, period, start string
	zone, anchor        string
	varies              string // only sweep has a flag for it
	rate, capacity      float64
	command             *cobra.Command
}

func (n *numbers) flags(command *cobra.Command) {
	n.command = command
	f := command.Flags()
	f.Float64Var(&n.rate, "rate", 0, "tokens per period, of a key with numbers of its own, or of a limit that no program has published")
	f.Float64Var(&n.capacity, "capacity", 0, "its capacity in tokens (default: as defined or, if that is the rate, the rate)")
	f.StringVar(&n.zone, "zone", "", "the zone of a calendar window (default: as defined, or UTC)")
	f.StringVar(&n.anchor, "anchor", "", "the anchor of a calendar window, such as \"2026-01-31\" or \"2026-01-31 15:00\" (default: as defined, or 2001-01-01)")
	f.StringVar(&n.period, "period", "", "the period, such as 1m, 1h30m, 1d, \"1 month\", of a limit that no program has published")
	f.StringVar(&n.kind, "kind", "token bucket", "its kind: \"token bucket\", \"fixed window\", \"calendar window\"")
	f.StringVar(&n.start, "start", "", "the start of a fixed window, in RFC 3339")
	choices(command, "kind", "token bucket", "fixed window", "calendar window")
}

// given reports whether any of these flags was given.
func (n *numbers) given(flags ...string) bool {
	return slices.ContainsFunc(flags, n.command.Flags().Changed)
}

// ofKey are the flags that a key of a published limit may have numbers of its own for; ofLimit those of the limit alone.
var (
	ofKey   = []string{"rate", "capacity", "zone", "anchor"}
	ofLimit = []string{"period", "kind", "start"}
)

// over returns a definition with the numbers of the flags. A capacity that is the rate follows the rate.
func (n *numbers) over(c ratelimit.Config) (*ratelimit.Config, error) {
	changed := n.command.Flags().Changed
	if changed("rate") {
		if c.Capacity == nil || c.Rate != nil && *c.Capacity == *c.Rate {
			c.Capacity = &n.rate
		}
		if c.Rate = &n.rate; n.rate == 0 { // as With
			c.Capacity, c.MaxReserved = nil, nil
		}
	}
	if changed("capacity") {
		c.Capacity = &n.capacity
	}
	if changed("zone") {
		c.Zone = n.zone
	}
	if changed("anchor") {
		c.Anchor = n.anchor
	}
	limit, err := c.Limit()
	if err != nil {
		return nil, usageError{err}
	}
	c = limit.Config()
	return &c, nil
}

// unpublished is the definition that the flags give of a limit that no program has published, or nil.
func (n *numbers) unpublished(name string) (*ratelimit.Config, error) {
	if !n.given("rate") || !n.given("period") {
		if n.given(slices.Concat(ofKey, ofLimit)...) || n.given("varies") {
			return nil, usagef("no program has published the limit %s: its numbers need --rate and --period", printable(name))
		}
		return nil, nil
	}
	c := ratelimit.Config{Name: name, Kind: n.kind, Period: n.period, Varies: n.varies}
	if n.start != "" {
		start, err := time.Parse(time.RFC3339, n.start)
		if err != nil {
			return nil, usagef("--start %q is not an instant, such as 2026-01-31T00:00:00Z", n.start)
		}
		c.Start = &start
	}
	return n.over(c)
}

// programsNumbers is why a key's numbers are not known.
const programsNumbers = "the numbers of this key are the program's"

// defined is what is known of the numbers of a limit.
type defined struct {
	ratelimit.Config                   // the definition that counts, or what the flags give of a limit that no program has published
	programs         []string          // that publish it
	others           []definition      // of other programs, or of older versions
	given            *ratelimit.Config // by the flags; nil: nothing
}

// asked are the numbers that the flags give, as the database is asked with them.
func (d *defined) asked() *keystate.Given {
	c := d.given
	if c == nil {
		return nil
	}
	g := &keystate.Given{Kind: &c.Kind, Rate: c.Rate, Capacity: c.Capacity, Start: c.Start, Zone: optional(c.Zone), Anchor: optional(c.Anchor)}
	if c.Period != "" {
		period := intervalOf(c.Period)
		g.Period = &period
	}
	return g
}

// config are numbers in force as a Config.
func (d *defined) config(n *keystate.Numbers) ratelimit.Config {
	c := ratelimit.Config{Name: d.Name, Kind: n.Kind, Rate: n.Rate, Capacity: n.Capacity, MaxReserved: n.MaxReserved, Start: n.Start}
	if n.Period.Valid {
		c.Period = periodOf(n.Period, n.Kind)
	}
	if n.Shards != nil {
		c.Shards = int(*n.Shards)
	}
	if n.Zone != nil {
		c.Zone = *n.Zone
	}
	if n.Anchor != nil {
		c.Anchor = *n.Anchor
	}
	return c
}

// varies is the longest time in which a current program says that any key's numbers fill a row. It is "" if none says so.
func varies(list []definition) (longest string) {
	for _, d := range list {
		if d.Current && d.Varies != "" && (longest == "" || intervalOf(d.Varies).Microseconds > intervalOf(longest).Microseconds) { // 0 of slots
			longest = d.Varies
		}
	}
	return longest
}

// resolve returns what is known of a limit's numbers: the published definition that counts, and what the flags give.
func (n *numbers) resolve(ctx context.Context, db querier, name string) (d defined, err error) {
	all, err := definitions(ctx, db, &name)
	if err != nil {
		return d, err
	}
	i := slices.IndexFunc(all, func(d definition) bool { return d.Counts })
	if i >= 0 {
		d.Config = all[i].Config
		for _, other := range all {
			if other.Counts {
				d.programs = append(d.programs, other.Program)
			} else {
				d.others = append(d.others, other)
			}
		}
		d.Varies = varies(all)
		switch {
		case n.given(ofLimit...):
			return d, usagef("the kind, the period and the start of %s are those that %s has published: leave out --kind, --period and --start",
				printable(name), printable(d.programs[0]))
		case n.given("varies"):
			return d, usagef("whether keys of %s have numbers of their own is what %s has published: leave out --varies", printable(name), printable(d.programs[0]))
		case !n.given(ofKey...):
			return d, nil
		}
		d.given, err = n.over(d.Config)
		if err == nil {
			d.given.Varies = ""
		}
		return d, err
	}
	c, err := n.unpublished(name)
	switch {
	case err != nil:
		return d, err
	case c != nil:
		return defined{Config: *c, given: c}, nil
	}
	known, err := knownLimits(ctx, db)
	if err != nil {
		return d, err
	}
	if !slices.Contains(known, name) {
		return d, noSuchLimit(name, known)
	}
	return d, usagef("no program has published the numbers of the limit %s. Give them: --rate and --period, and --kind, --capacity and --start where they differ from the defaults", printable(name))
}

// how names the flags that give the numbers of a key.
func (d *defined) how() string {
	flags := "--rate and --capacity"
	if d.Kind == kindSlots {
		return "--capacity, how many slots it has"
	}
	if d.Kind == "calendar window" {
		flags = "--rate, --capacity, --zone and --anchor"
	}
	as := ""
	if d.Rate != nil {
		as = fmt.Sprintf(" (--rate %s: all as defined)", number(*d.Rate))
	}
	return flags + ", where they differ from the definition" + as
}

// knownLimits are the names that are published, have rows or have an override in force.
func knownLimits(ctx context.Context, db querier) ([]string, error) {
	stored, err := collect(ctx, db, pgx.RowTo[string], "SELECT n.name FROM ratelimit._stored_names(NULL::integer) AS n (name)")
	if err != nil {
		return nil, err
	}
	overridden, err := collect(ctx, db, pgx.RowTo[string], "SELECT DISTINCT o.name FROM ratelimit._in_force(NULL, NULL, clock_timestamp()) AS o")
	if err != nil {
		return nil, err
	}
	return collect(ctx, db, pgx.RowTo[string], `
		SELECT name COLLATE "C" FROM unnest($1::text[]) AS n (name)
		UNION SELECT name FROM ratelimit.definitions WHERE `+counting+`
		UNION SELECT name FROM unnest($2::text[]) AS n (name)
		ORDER BY 1`, stored, overridden)
}

// checkKnown refuses the name of no limit, if programs publish theirs.
func checkKnown(ctx context.Context, db querier, name string) error {
	var known, others bool
	err := db.QueryRow(ctx, `
		SELECT EXISTS (SELECT 1 FROM ratelimit.definitions WHERE name = $1 AND `+counting+`) OR EXISTS (SELECT 1 FROM ratelimit.limits WHERE name = $1)
		       OR EXISTS (SELECT 1 FROM ratelimit.overrides WHERE name = $1),
		       EXISTS (SELECT 1 FROM ratelimit.definitions WHERE `+counting+`) OR EXISTS (SELECT 1 FROM ratelimit.limits)`, name).Scan(&known, &others)
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
