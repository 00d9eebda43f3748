package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/ratelimit"
)

// keyList is what `keys` prints, and deniedKeyList what `keys --denied` does.
type (
	keyList struct {
		Keys []keyState `json:"keys"`
	}
	deniedKeyList struct {
		Keys []deniedKey `json:"deniedKeys"`
	}
)

// keyState is a key as `keys` prints it.
type keyState struct {
	Key       string     `json:"key"`
	Remaining *float64   `json:"remaining"`  // tokens, or free slots; nil: unlimited, or not known
	InUse     *float64   `json:"used"`       // of slots: those that are held, without those whose holds have expired; nil: it has tokens
	Denied    *bool      `json:"deniedNow"`  // one token or slot would be denied; nil: not known
	RetryAt   *time.Time `json:"retryAt"`    // nil: not denied, a block without an end, or not known
	Effect    string     `json:"effect"`     // numbers, block or unlimited
	Override  *int64     `json:"overrideId"` // the id of the override in force
	Unknown   *string    `json:"unknown"`    // why the numbers, and what follows from them, are not known; nil: they are
	Stored    *float64   `json:"stored"`     // if they are not: the tokens that were left at the last use
	LastUse   *time.Time `json:"lastUse"`    // if they are not
}

// blockedKey is a key under a block.
func blockedKey(key string, o *override) keyState {
	denied := true
	return keyState{Key: key, Remaining: new(float64), Denied: &denied, RetryAt: o.Until, Effect: o.Effect, Override: &o.ID}
}

// unlimitedKey is a key that is granted everything.
func unlimitedKey(key string, o *override) keyState {
	return keyState{Key: key, Denied: new(bool), Effect: o.Effect, Override: &o.ID}
}

// later works out RetryAt by what follows the override in force, if that ends before.
func (k *keyState) later(ctx context.Context, tx pgx.Tx, d *defined, chains chains, at time.Time) error {
	chain := chains.of(&k.Key)
	if len(chain) == 0 || k.Denied == nil || !*k.Denied || !slices.ContainsFunc(chain, func(o override) bool { return o.Until != nil && (k.RetryAt == nil || !o.Until.After(*k.RetryAt)) }) {
		return nil
	}
	m, err := d.moments(ctx, tx, &k.Key, chain, at)
	switch k.RetryAt = m.enough; {
	case k.Effect == effectBlock:
		k.RetryAt = m.allowed
	case d.Kind == kindSlots && m.enough != nil && m.enough.Equal(never): // no expiry frees one
		k.RetryAt = nil
	}
	return err
}

// left orders keys: those with the fewest tokens come first, now or at their last use.
func (k *keyState) left() float64 {
	switch {
	case k.Remaining != nil:
		return *k.Remaining
	case k.Stored != nil:
		return *k.Stored
	case k.Unknown != nil && k.InUse != nil:
		return -*k.InUse
	case k.Unknown != nil: // its row is broken
		return math.Inf(-1)
	}
	return math.Inf(1)
}

// deniedKey is a key as `keys --denied` prints it.
type deniedKey struct {
	Key        string    `json:"key"`
	Denied     int64     `json:"denied"`
	Asked      float64   `json:"asked"`
	LastDenied time.Time `json:"lastDenied"`
}

func (a *app) keysCommand() *cobra.Command {
	var n numbers
	var all, denied bool
	var most int
	var since string
	c := a.do(&cobra.Command{
		Use:   "keys LIMIT [--all] [--limit N] [--denied [--since 3h]]",
		Short: "List who is limited, worst first",
		Long: `List the keys of a limit that would be denied one token now, those with the fewest tokens first. Under a block of every key, those
are all keys that have rows.

It reads all rows of the limit, without locking any. With a million keys that may take half a minute; a replica serves as well.
--denied reads no such rows: it lists the keys with the most denials, as programs with a usage.Recorder have counted them.

REMAINING is the balance in tokens: below 0, tokens are owed. Of slots, it says how many are FREE and IN USE. Each key has the numbers that are in force for it.

A limit may be defined so that its keys have numbers of their own, which the program alone knows (Varies). Then the keys are listed that had less
than one token left at their last use: they may be denied now. (A key to which the program gives a rate of 0 is, whatever it has.) With --rate, --capacity, --zone or --anchor, all keys are taken to have these numbers.`,
		Example: `  txlimit keys sendMessage
  txlimit keys apiCalls --all --limit 0
  txlimit keys logins --denied --since 3h
  txlimit keys oldLimit --rate 10 --period 1m    # which no program has published`,
		Args:              func(_ *cobra.Command, args []string) error { return onlyLimit(args) },
		ValidArgsFunction: a.completeLimits,
	}, lookNeeds, func(ctx context.Context, args []string) error {
		if most < 0 {
			return usagef("--limit %d is below 0", most)
		}
		if denied {
			return a.deniedKeys(ctx, args[0], since, most)
		}
		return a.reading(ctx, func(tx pgx.Tx) error { return a.keys(ctx, tx, &n, args[0], all, most) })
	})
	c.Flags().BoolVar(&all, "all", false, "list the keys that are not limited, too")
	c.Flags().IntVarP(&most, "limit", "n", 20, "list at most so many; 0: all")
	c.Flags().BoolVar(&denied, "denied", false, "list the most denied keys, from the usage tables")
	c.Flags().StringVar(&since, "since", "1h", "with --denied: how far to look back; whole hours are read")
	n.flags(c)
	c.MarkFlagsMutuallyExclusive("denied", "all")
	for _, flag := range slices.Concat(ofKey, ofLimit) {
		c.MarkFlagsMutuallyExclusive("denied", flag)
	}
	return c
}

func onlyLimit(args []string) error {
	if err := limitAndKey(args, nil); err != nil {
		return err
	}
	if len(args) > 1 {
		return fmt.Errorf("too many arguments: %q comes after LIMIT", args[1])
	}
	return nil
}

func (a *app) keys(ctx context.Context, tx pgx.Tx, n *numbers, name string, all bool, most int) error {
	list, err := overrides(ctx, tx, "name = $1 AND "+inForce+" ORDER BY effect = 'block', made_at, id", name)
	if err != nil {
		return err
	}
	var everyKey *override
	own := map[string]*override{}
	for i := range list { // a later one wins
		if o := &list[i]; !o.usable() {
			continue
		} else if o.Key == nil {
			everyKey = o
		} else {
			own[*o.Key] = o
		}
	}
	d, err := n.resolve(ctx, tx, name)
	if err != nil {
		return err
	}
	at, err := now(ctx, tx)
	if err != nil {
		return err
	}
	if rows, err := estimate(ctx, tx, name); err == nil && rows > 1e6 && a.terminal {
		fmt.Fprintf(a.stderr, "reading about %s rows\n", count(int64(rows)))
	}
	found, err := statesOf(ctx, tx, &d, everyKey, own, at, all, most)
	if err != nil {
		return err
	}
	reversed := slices.Clone(list)
	slices.Reverse(reversed)
	chains := chainsOf(reversed)
	for i := range found {
		if err := found[i].later(ctx, tx, &d, chains, at); err != nil {
			return err
		}
	}
	if everyKey != nil && everyKey.Effect != effectNumbers {
		fmt.Fprintf(a.stderr, "override #%d: %s for every key of %s without an override of its own, %s\n",
			everyKey.ID, everyKey.Effect, printable(name), ending(everyKey, at))
	}
	if everyKey != nil && everyKey.Effect == effectBlock && len(found) == 0 {
		return a.nothing(keyList{[]keyState{}}, "Every key of %s is blocked. None has a row.", printable(name))
	}
	c, unknown := d.of(everyKey)
	if len(found) == 0 && unknown == nil && (c.Kind == "unlimited" || grantsNothing(c)) {
		return a.nothing(keyList{[]keyState{}}, "%s has no rows: %s.", printable(name), describe(c))
	}
	if len(found) == 0 {
		what := "No key of %s is limited now."
		switch {
		case all:
			what = "No key of %s has a row: all are full."
		case unknown != nil:
			what = "No key of %s had less than one token left at its last use."
		}
		return a.nothing(keyList{[]keyState{}}, what, printable(name))
	}
	inSlots := d.Kind == kindSlots
	if inSlots {
		if err := addInUse(ctx, tx, name, found, at); err != nil {
			return err
		}
	}
	anyUnknown := slices.ContainsFunc(found, func(k keyState) bool { return k.Unknown != nil && *k.Unknown != brokenRow })
	for _, k := range found {
		if k.Unknown != nil && *k.Unknown == brokenRow {
			fmt.Fprintf(a.stderr, "%s: %s, by txlimit reset %s %s\n", printable(k.Key), brokenRow, shellQuote(name), shellQuote(k.Key))
		}
	}
	if anyUnknown && inSlots {
		fmt.Fprintf(a.stderr, "How many slots the keys of %s have is the program's, so it is not known who is denied now. To `txlimit show %s KEY`, give it: %s\n",
			printable(name), shellQuote(name), d.how())
	} else if anyUnknown {
		fmt.Fprintf(a.stderr, "The numbers of keys of %s are the program's, so it is not known who is denied now. STORED is what a key had left at its last use. To `txlimit show %s KEY`, give the key's numbers: %s\n",
			printable(name), shellQuote(name), d.how())
	} else if d.given != nil && d.Varies != "" {
		fmt.Fprintf(a.stderr, "As if every key had the numbers that were given: %s\n", describe(*d.given))
	}
	return a.emit(keyList{found}, func(w io.Writer) {
		titles := []string{"KEY", ">REMAINING", "DENIED UNTIL", "OVERRIDE"}
		if inSlots {
			titles = []string{"KEY", ">FREE", ">IN USE", "DENIED UNTIL", "OVERRIDE"}
		}
		if anyUnknown && !inSlots {
			titles = append(titles, ">STORED", "LAST USE")
		}
		t := newTable(titles...)
		for _, k := range found {
			remaining, denied, which := "unlimited", "-", "-"
			switch {
			case k.Remaining != nil:
				remaining = tokens(*k.Remaining)
			case k.Unknown != nil:
				remaining, denied = "not known", "not known"
			}
			if inSlots && k.Remaining != nil {
				remaining = number(max(*k.Remaining, 0))
			}
			if k.Denied != nil && *k.Denied && inSlots && k.RetryAt == nil && k.Effect == effectNumbers {
				denied = "one is released"
			} else if k.Denied != nil && *k.Denied && k.Remaining != nil {
				denied = until(k.RetryAt, at)
			} else if k.Denied != nil && *k.Denied {
				denied = "it is reset"
			}
			if k.Override != nil {
				which = fmt.Sprintf("#%d", *k.Override)
				if k.Effect != effectNumbers {
					which += " " + k.Effect
				}
			}
			cells := []string{printable(k.Key), remaining, denied, which}
			if inSlots {
				cells = []string{printable(k.Key), remaining, number(*k.InUse), denied, which}
			}
			if anyUnknown && !inSlots {
				stored, last := "-", "-"
				if k.Stored != nil {
					stored = tokens(*k.Stored)
				}
				if k.LastUse != nil {
					last = instant(*k.LastUse)
				}
				cells = append(cells, stored, last)
			}
			t.row(cells...)
		}
		t.print(w)
		if most > 0 && len(found) == most {
			fmt.Fprintf(a.stderr, "These are the first %d. --limit 0 lists all.\n", most)
		}
	})
}

// statesOf reads the states of a limit's keys: those that have an override of their own by it, and the others by that of every key.
func statesOf(
	ctx context.Context, db querier, d *defined, everyKey *override, own map[string]*override, at time.Time, all bool, most int,
) ([]keyState, error) {
	var found []keyState
	// add reads the keys with some numbers, or what is stored of them if these are not known.
	add := func(o *override, only, without []string) error {
		var states []keyState
		var err error
		if c, unknown := d.of(o); c.Kind == kindSlots {
			states, err = slotKeys(ctx, db, &c, unknown, at, only, without, all, most)
		} else if unknown != nil {
			states, err = storedKeys(ctx, db, &c, o, unknown, at, only, without, all, most)
		} else {
			states, err = readKeys(ctx, db, c, at, only, without, all, most)
		}
		for _, s := range states {
			if s.Override = nil; only != nil {
				o = own[s.Key]
			}
			if o != nil {
				s.Override = &o.ID
			}
			found = append(found, s)
		}
		return err
	}
	keys := make([]string, 0, len(own))
	groups := map[string][]string{} // by their override's numbers
	for key, o := range own {
		keys = append(keys, key)
		switch {
		case o.Effect == effectNumbers:
			groups[o.text()] = append(groups[o.text()], key)
		case o.Effect == effectBlock:
			found = append(found, blockedKey(key, o))
		case all:
			found = append(found, unlimitedKey(key, o))
		}
	}
	switch {
	case everyKey != nil && everyKey.Effect == effectUnlimited && !all:
	case everyKey != nil && everyKey.Effect != effectNumbers:
		rows, err := keysWithRows(ctx, db, d.Name, keys, most)
		if err != nil {
			return nil, err
		}
		state := unlimitedKey
		if everyKey.Effect == effectBlock {
			state = blockedKey
		}
		for _, key := range rows {
			found = append(found, state(key, everyKey))
		}
	default:
		if err := add(everyKey, nil, keys); err != nil {
			return nil, err
		}
	}
	for _, group := range groups {
		if err := add(own[group[0]], group, []string{}); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(found, func(x, y keyState) int { return cmp.Or(cmp.Compare(x.left(), y.left()), cmp.Compare(x.Key, y.Key)) })
	if most > 0 {
		found = found[:min(len(found), most)]
	}
	return found, nil
}

// storedKeys reads what is stored of some keys, or of all without some, whose numbers are not known. Without all, it leaves out those that cannot
// be denied a token: those with a token left at the last use, and those that have filled up since by any numbers that a key may have.
func storedKeys(
	ctx context.Context, db querier, c *ratelimit.Config, o *override, unknown *string, at time.Time, only, without []string, all bool, most int,
) ([]keyState, error) {
	var idle *pgtype.Interval // within which all keys fill up, unless by an override
	if o == nil {
		varies := intervalOf(c.Varies)
		idle = &varies
	}
	return collect(ctx, db, func(row pgx.CollectableRow) (k keyState, err error) {
		var last pgtype.Timestamptz
		k.Effect, k.Unknown = effectNumbers, unknown
		err = row.Scan(&k.Key, &k.Stored, &last)
		if last.Valid && last.InfinityModifier == pgtype.Finite {
			t := last.Time.UTC()
			k.LastUse = &t
		}
		return k, err
	}, `SELECT r.key, sum(r.value) AS value, max(r.ts)
	      FROM rate_limits AS r
	     WHERE r.name = $1 AND ($2::text[] IS NULL OR r.key = ANY ($2)) AND r.key <> ALL ($3::text[])
	     GROUP BY r.key
	    HAVING $4 OR sum(r.value) < 1 AND NOT coalesce(min(r.value) > -1e-15 AND max(r.ts) < $5::timestamptz - $6::interval, false)
	     ORDER BY 2, 1 LIMIT nullif($7::bigint, 0)`, c.Name, only, without, all, at, idle, most)
}

// slotKeys reads the keys of slots that have none free or, with all, every key that has a row: those of only, or all without some. If it is
// unknown how many slots a key has, it reads those with slots in use.
func slotKeys(
	ctx context.Context, db querier, c *ratelimit.Config, unknown *string, at time.Time, only, without []string, all bool, most int,
) ([]keyState, error) {
	// Two statements: Citus runs no function that reads a table beside a table of a distributed schema.
	keys, err := collect(ctx, db, pgx.RowTo[string],
		"SELECT key FROM rate_limits WHERE name = $1 AND ($2::text[] IS NULL OR key = ANY ($2)) AND key <> ALL ($3::text[]) AND ($4 OR value < 0)", c.Name, only, without, all)
	if err != nil {
		return nil, err
	}
	number := c.Capacity
	if unknown != nil {
		number = nil
	}
	return collect(ctx, db, func(row pgx.CollectableRow) (k keyState, err error) {
		var used float64
		var retryAt pgtype.Timestamptz
		k.Effect, k.Unknown = effectNumbers, unknown
		if err = row.Scan(&k.Key, &used, &k.Remaining, &retryAt); err != nil {
			return k, err
		}
		if k.InUse = &used; unknown == nil {
			k.Denied = &retryAt.Valid
		}
		if retryAt.Valid && retryAt.InfinityModifier == pgtype.Finite {
			t := retryAt.Time.UTC()
			k.RetryAt = &t
		}
		return k, nil
	}, `SELECT k.key, f.used, f.free, f.retry_at
	      FROM unnest($2::text[]) AS k (key) CROSS JOIN LATERAL _ratelimit_free_slots($1::text, k.key, $3::float8, $4::timestamptz) AS f
	     WHERE $5 OR f.retry_at IS NOT NULL OR $3 IS NULL AND f.used > 0
	     ORDER BY f.free, f.used DESC, k.key LIMIT nullif($6::bigint, 0)`, c.Name, keys, number, at, all, most)
}

// addInUse adds how many slots keys have in use, as far as they have none yet.
func addInUse(ctx context.Context, db querier, name string, found []keyState, at time.Time) error {
	keys := make([]string, len(found))
	for i := range found {
		keys[i] = found[i].Key
	}
	used, err := collect(ctx, db, pgx.RowTo[float64], `
		SELECT f.used FROM unnest($2::text[]) WITH ORDINALITY AS k (key, i) CROSS JOIN LATERAL _ratelimit_free_slots($1::text, k.key, 0, $3::timestamptz) AS f ORDER BY k.i`, name, keys, at)
	for i := range used {
		found[i].InUse = &used[i]
	}
	return err
}

// keysWithRows are the keys of a limit that have rows, without some.
func keysWithRows(ctx context.Context, db querier, name string, without []string, most int) ([]string, error) {
	return collect(ctx, db, pgx.RowTo[string],
		"SELECT DISTINCT key FROM rate_limits WHERE name = $1 AND key <> ALL ($2::text[]) ORDER BY key LIMIT nullif($3::bigint, 0)", name, without, most)
}

// brokenRow is why nothing is known of a key whose row was written by hand.
const brokenRow = "its row is broken (ts is infinite), and every call for it fails: reset it"

// readKeys asks _ratelimit_keys, for some keys or for all without some.
func readKeys(ctx context.Context, db querier, c ratelimit.Config, at time.Time, only, without []string, all bool, most int) ([]keyState, error) {
	if c.Kind == "unlimited" || *c.Rate == 0 {
		return nil, nil // such a limit uses no rows
	}
	return collect(ctx, db, func(row pgx.CollectableRow) (k keyState, err error) {
		var retryAt pgtype.Timestamptz
		k.Effect = effectNumbers
		if err = row.Scan(&k.Key, &k.Remaining, &retryAt); err != nil {
			return k, err
		}
		if k.Denied = &retryAt.Valid; k.Remaining == nil {
			why := brokenRow
			k.Unknown = &why
		}
		if retryAt.Valid && retryAt.InfinityModifier == pgtype.Finite {
			t := retryAt.Time.UTC()
			k.RetryAt = &t
		}
		return k, err
	}, `SELECT k.key, k.remaining, k.retry_at
	      FROM _ratelimit_keys($1::text, $2::float8, $3::interval, $4::text, $5::float8, $6::timestamptz, $8::text, $9::text::timestamp, $10::text[], $7::timestamptz) AS k
	     WHERE ($11 OR k.retry_at IS NOT NULL) AND k.key <> ALL ($12::text[])
	     ORDER BY k.remaining NULLS FIRST, k.key LIMIT nullif($13::bigint, 0)`,
		c.Name, *c.Rate, intervalOf(c.Period), c.Kind, c.Capacity, c.Start, at, optional(c.Zone), optional(c.Anchor), only, all, without, most)
}

func (a *app) deniedKeys(ctx context.Context, name, since string, most int) error {
	back, err := duration("--since", since)
	if err != nil {
		return err
	}
	a.needs = append(lookNeeds, "SELECT rate_limit_denials")
	return a.reading(ctx, func(tx pgx.Tx) error {
		list, err := collect(ctx, tx, pgx.RowToStructByPos[deniedKey],
			"SELECT d.key, d.denied, d.asked, least(greatest(d.last_denied, '0001-01-01 00:00+00'), '9999-12-31 00:00+00') FROM ratelimit_denials($1::text, clock_timestamp() - $2::interval) AS d LIMIT nullif($3::bigint, 0)", name, back, most)
		if err != nil {
			return err
		}
		if len(list) == 0 {
			if err := checkKnown(ctx, tx, name); err != nil {
				return err
			}
			return a.nothing(deniedKeyList{[]deniedKey{}}, "No denials of %s were counted. Programs count them with a usage.Recorder.", printable(name))
		}
		for i := range list {
			list[i].LastDenied = list[i].LastDenied.UTC()
		}
		return a.emit(deniedKeyList{list}, func(w io.Writer) {
			t := newTable("KEY", ">DENIED", ">TOKENS ASKED", "LAST DENIED")
			for _, k := range list {
				t.row(printable(k.Key), count(k.Denied), number(k.Asked), instant(k.LastDenied))
			}
			t.print(w)
		})
	})
}
