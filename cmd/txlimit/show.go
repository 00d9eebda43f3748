package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/keystate"
	"github.com/txlimit/txlimit/ratelimit"
)

// keyDetails is what `show` prints.
type keyDetails struct {
	Limit      string            `json:"limit"`
	Key        *string           `json:"key"` // nil: the limit has no keys
	At         time.Time         `json:"at"`
	Definition ratelimit.Config  `json:"definition"` // the one that counts
	Programs   []string          `json:"programs"`   // that have published it; empty: the numbers were given
	Others     []definition      `json:"others"`     // definitions of this name by other programs or older versions
	Given      *ratelimit.Config `json:"given"`      // the numbers that were given; nil: none
	Override   *override         `json:"override"`   // the one in force
	Numbers    *ratelimit.Config `json:"numbers"`    // those in force; nil: not known
	Unknown    *string           `json:"unknown"`    // why the numbers, and what follows from them, are not known; nil: they are
	Remaining  *float64          `json:"remaining"`  // tokens, or free slots; nil: unlimited, or not known
	OwedUntil  *time.Time        `json:"owedUntil"`  // the balance is below zero until then
	FullAt     *time.Time        `json:"fullAt"`
	Denied     *bool             `json:"deniedNow"`    // one token or slot would be denied; nil: not known
	Reason     ratelimit.Reason  `json:"deniedReason"` // "": it would not be denied, or that is not known
	RetryAt    *time.Time        `json:"retryAt"`      // until when; nil: not denied, for good, or not known
	NotBefore  *time.Time        `json:"notBefore"`    // retryAt is not known, but not earlier: an override ends then, and what follows is the program's
	KnownUntil *time.Time        `json:"knownUntil"`   // the end of the override after which only the program knows the numbers
	Paused     *time.Time        `json:"pausedUntil"`  // nothing is refilled before; nil: it is not paused
	InUse      *float64          `json:"used"`         // of slots: those that are held, without those whose holds have expired; nil: it has tokens
	Stored     *float64          `json:"stored"`       // the tokens that were left at the last use; nil: the key has no row, or it has slots
	LastUse    *time.Time        `json:"lastUse"`
	Rows       int               `json:"rows"`     // of the key: 0 if it is full
	Keys       int64             `json:"keyCount"` // with rows, if no key was asked for; bound stands for more. If there are some and rows is 0, the balance is nobody's
	History    []override        `json:"history"`
	Denials    []deniedHour      `json:"denials"`         // of the last hours; nil: there are no usage tables
	Unreadable bool              `json:"usageUnreadable"` // the role may not read the denials

	how    string   // to give the numbers
	broken bool     // a row of the key is
	near   []string // keys with rows that begin with the one that has none
	beside *int64   // the id of the override whose numbers hold: of Override or, beside a block, an older one
	// unlimited: nothing is taken.
	unlimited bool
}

type deniedHour struct {
	Hour       time.Time `json:"hour"`
	Denied     int64     `json:"denied"`
	Asked      float64   `json:"asked"`
	LastDenied time.Time `json:"lastDenied"`
}

func (a *app) showCommand() *cobra.Command {
	var n numbers
	var since string
	c := a.do(&cobra.Command{
		Use:   "show LIMIT [KEY]",
		Short: "Show one key: balance, numbers in force, why denied",
		Long: `Show one key of a limit: its balance, the numbers in force and whose they are, why a call is denied now and until when, its
overrides, and its denials of the last hours, if programs have a usage.Recorder. Without KEY, it is for a limit without keys.

A limit may be defined so that its keys have numbers of their own, which the program alone knows (Varies). Then there is no balance until
you give them: --rate, --capacity, --zone and --anchor, where they differ from the definition. What is stored is shown without.

It locks and writes nothing, and reads the rows of this key alone. The answer is for one token: a call for more may be denied for
longer. If the recorder hashes keys, the denials are under the hash.`,
		Example: `  txlimit show sendMessage user-17
  txlimit show perRegion --part eu --part user-17    # a key of two parts
  txlimit show signUps                   # a limit without keys
  txlimit show apiCalls acme --rate 50000 --anchor 2026-01-31    # a key with numbers of its own`,
	}, look, func(ctx context.Context, args []string) error {
		back, err := duration("--since", since)
		if err != nil {
			return err
		}
		return a.answering(ctx, func(tx pgx.Tx) (func() error, error) { return a.show(ctx, tx, &n, args[0], keyOf(args), back) })
	})
	a.takesKey(c)
	c.Flags().StringVar(&since, "since", "24h", "how far to look back for denials; whole hours are read")
	n.flags(c)
	return c
}

func (a *app) show(ctx context.Context, tx pgx.Tx, n *numbers, name string, key *string, since pgtype.Interval) (answer func() error, err error) {
	at, err := now(ctx, tx)
	if err != nil {
		return nil, err
	}
	k := keyDetails{Limit: name, Key: key, At: at, Programs: []string{}, Others: []definition{}}
	if k.History, err = keystate.KeyHistory(ctx, tx, name, key, 100); err != nil {
		return nil, err
	}
	// Not from the history, which may be longer than what was read.
	list, err := inForce(ctx, tx, name, key, at)
	if err != nil {
		return nil, err
	}
	if len(list) > 0 {
		k.Override = &list[0]
	}
	d, err := n.resolve(ctx, tx, name)
	if err != nil {
		return nil, err
	}
	k.Definition, k.Given, k.how = d.Config, d.given, d.how()
	k.Programs, k.Others = append(k.Programs, d.programs...), append(k.Others, d.others...)
	states, err := keystate.Of(ctx, tx, name, []string{keyText(key)}, at, d.asked())
	if err != nil {
		return nil, err
	}
	k.fill(&d, &states[0])
	if key == nil {
		if k.Keys, err = keysOf(ctx, tx, name); err != nil {
			return nil, err
		}
	}
	if key != nil && k.Rows == 0 {
		if k.near, err = keysFrom(ctx, tx, name, *key, nearKeys+1); err != nil {
			return nil, err
		}
	}
	has, err := a.hasUsage(ctx, tx, "ratelimit.denials", &k.Unreadable)
	if err != nil {
		return nil, err
	}
	if has {
		k.Denials, err = collect(ctx, tx, pgx.RowToStructByPos[deniedHour], `
			SELECT hour, denied, asked, `+keystate.ShownTime("last_denied")+` FROM ratelimit.denials
			 WHERE name = $1 AND key = coalesce($2, '') AND hour > clock_timestamp() - $3::interval - interval '1 hour' AND hour < clock_timestamp() + interval '1 day' ORDER BY hour DESC`, name, key, since)
		if err != nil {
			return nil, err
		}
	}
	for i := range k.Denials {
		k.Denials[i].Hour, k.Denials[i].LastDenied = k.Denials[i].Hour.UTC(), k.Denials[i].LastDenied.UTC()
	}
	return func() error {
		if err := a.emit(k, func(w io.Writer) { k.print(w, a) }); err != nil || len(k.near) == 0 {
			return err
		}
		names, more := k.near, ""
		if len(names) > nearKeys {
			names, more = names[:nearKeys], " and others"
		}
		for i := range names {
			names[i] = printable(names[i])
		}
		fmt.Fprintf(a.stderr, "Keys with rows begin with this text: %s%s.\n", strings.Join(names, ", "), more)
		return nil
	}, nil
}

// nearKeys is how many keys are named that begin with one that has no row.
const nearKeys = 5

// keysFrom finds the keys with rows that begin with a prefix and go on, each by one look-up in the primary key.
func keysFrom(ctx context.Context, db querier, name, prefix string, most int) ([]string, error) {
	return collect(ctx, db, pgx.RowTo[string], `
		SELECT f.key FROM ratelimit._stored_keys($1::text, $2::text || E'\x01', NULL::text, $3::integer) AS f (key) WHERE starts_with(f.key, $2)`, name, prefix, most)
}

// fill fills in how the key stands.
func (k *keyDetails) fill(d *defined, s *keystate.State) {
	k.Rows, k.LastUse, k.Paused, k.InUse, k.Stored, k.beside, k.KnownUntil = s.Rows, s.LastUse, s.PausedUntil, s.Used, s.Stored, s.Numbers.Override, s.KnownUntil
	if k.InUse != nil { // what is stored are no tokens
		k.Stored = nil
	}
	k.unlimited = s.Numbers.Effect == effectUnlimited
	k.broken = s.Broken && !k.unlimited
	var why string
	switch {
	case k.broken:
		why = brokenRow
	case !s.Known():
		why = programsNumbers
	}
	if k.Unknown = optional(why); s.Known() {
		c := d.config(&s.Numbers)
		k.Numbers = &c
	}
	blocked := s.Effect == effectBlock
	if s.Known() || blocked || k.broken {
		denied := s.Denied || k.broken
		k.Denied = &denied
	}
	if s.Denied && !k.broken || blocked {
		k.RetryAt, k.NotBefore, k.Reason = s.RetryAt, s.NotBefore, ratelimit.ReasonQuota
	}
	switch {
	case k.Numbers != nil && !k.unlimited && grantsNothing(*k.Numbers): // which lasts longer than a block, as in programs
		k.Reason, k.Remaining = ratelimit.ReasonPlan, s.Remaining
	case blocked:
		k.Reason = ratelimit.ReasonBlock
	}
	if k.unlimited || k.Reason == ratelimit.ReasonPlan {
		return
	}
	k.Remaining, k.OwedUntil, k.FullAt = s.Remaining, s.OwedUntil, s.FullAt
}

func (k *keyDetails) print(w io.Writer, a *app) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-12s%s\n", name, fmt.Sprintf(format, args...))
	}
	line("limit", "%s", printable(k.Limit))
	// The balance of no key says nothing about a limit with keys.
	keyless := k.Keys > 0 && k.Rows == 0
	switch {
	case keyless:
		line("key", "none was given: %s", a.keysWith(k.Limit, k.Keys))
	case k.Keys > 0:
		line("key", "none: the row without a key. But %s", a.keysWith(k.Limit, k.Keys))
	case k.Key == nil:
		line("key", "none: the limit as a whole")
	default:
		line("key", "%s", printable(*k.Key))
	}
	whose := "as given"
	if len(k.Programs) > 0 {
		programs := make([]string, len(k.Programs))
		for i, p := range k.Programs {
			programs[i] = printable(p)
		}
		whose = "of " + strings.Join(programs, ", ")
	}
	line("defined", "%s (%s)", describe(k.Definition), whose)
	for _, other := range k.Others {
		if other.Current || describe(other.Config) != describe(k.Definition) {
			line("", "%s, %s: %s", printable(other.Program), since(&other), describe(other.Config))
		}
	}
	if k.Given != nil && len(k.Programs) > 0 {
		line("given", "%s", describe(*k.Given))
	}
	if o := k.Override; o != nil {
		target := "this key"
		if o.Key == nil {
			target = "every key"
		}
		line("override", "#%d: %s, for %s, by %s, %s", o.ID, effectOf(o), target, by(printable(o.MadeBy), o.MadeBy, o.MadeAs), ending(o, k.At))
		if o.Reason != "" {
			line("", "reason: %s", printable(o.Reason))
		}
	}
	if k.beside != nil && !k.unlimited && k.Numbers != nil {
		by := ""
		if *k.beside != k.Override.ID {
			by = fmt.Sprintf(" (by override #%d)", *k.beside)
		}
		line("in force", "%s%s", describe(*k.Numbers), by)
	}
	inSlots := k.Definition.Kind == kindSlots
	switch {
	case keyless:
	case inSlots && k.unlimited:
		line("slots", "unlimited: %s in use", number(*k.InUse))
	case inSlots && k.Unknown != nil && !k.broken:
		line("slots", "%s in use; how many there are is not known: %s. Give it: %s", number(*k.InUse), *k.Unknown, k.how)
	case inSlots && !k.broken:
		line("slots", "%s of %s free, %s in use", number(max(*k.Remaining, 0)), number(*k.Numbers.Capacity), number(*k.InUse))
	case k.unlimited:
		line("balance", "unlimited: nothing is taken")
	case k.broken:
		line("balance", "not known: %s, by txlimit reset", *k.Unknown)
	case k.Unknown != nil:
		line("balance", "not known: %s. Give them: %s", *k.Unknown, k.how)
		if k.Stored != nil {
			line("stored", "%s tokens at the last use", tokens(*k.Stored))
		}
	case k.Numbers.Capacity == nil || *k.Numbers.Capacity == 0 && k.Reason == ratelimit.ReasonPlan:
		line("balance", "0")
	default:
		line("balance", "%s of %s", tokens(*k.Remaining), number(*k.Numbers.Capacity))
	}
	// What is not known of the time after an override, since the numbers that follow are the program's.
	notKnown := k.KnownUntil != nil && k.Remaining != nil && k.Reason != ratelimit.ReasonPlan && !inSlots && !k.unlimited
	notRepaid, notFull := notKnown && k.OwedUntil == nil && *k.Remaining < 0, notKnown && k.FullAt == nil && *k.Remaining < *k.Numbers.Capacity
	owes := k.OwedUntil != nil || notRepaid
	if owes && !inSlots {
		debt := strings.TrimPrefix(tokens(*k.Remaining), "-") + " tokens"
		if debt == "1 tokens" {
			debt = "1 token"
		}
		line("owes", "%s, %s", debt, lasts(k.OwedUntil, k.KnownUntil, k.At))
	}
	switch {
	case k.Reason == ratelimit.ReasonBlock:
		line("denied", "yes, blocked by override #%d, %s", k.Override.ID, ending(k.Override, k.At))
	case k.broken:
		line("denied", "yes, until it is reset: every call fails")
	case k.Reason == ratelimit.ReasonPlan && inSlots:
		line("denied", "yes, by policy%s: there are no slots", k.policyEnds())
	case k.Reason == ratelimit.ReasonPlan:
		line("denied", "yes, by policy%s: the rate is 0", k.policyEnds())
	case keyless:
	case k.Denied == nil && k.Rows == 0 && k.Definition.Rate != nil && *k.Definition.Rate == 0:
		line("denied", "yes as defined (the rate is 0), unless the key has a rate of its own")
	case k.Denied == nil && k.Rows == 0 && !inSlots:
		line("denied", "no, unless its rate is 0: a key without a row is full")
	case k.Denied == nil:
		line("denied", "not known: it depends on these numbers")
	case !*k.Denied && inSlots:
		line("denied", "no: a slot would be granted now")
	case !*k.Denied:
		line("denied", "no: one token would be granted now")
	case inSlots && k.RetryAt == nil:
		line("denied", "yes, until a slot is released: all are in use")
	case inSlots:
		line("denied", "yes, until %s at the latest, unless a hold is extended: all are in use", until(k.RetryAt, k.At))
	default:
		why := "less than one token is left"
		switch {
		case k.Paused != nil:
			why = "the key is paused"
		case k.LastUse != nil && k.LastUse.After(k.At):
			why = "the row's time is ahead: it was shut out by hand, or a clock leapt ahead"
		case owes:
			why = "tokens are owed, by reservations or charges"
		case *k.Numbers.Capacity < 1:
			why = "it is not full"
		}
		line("denied", "yes, %s: %s", lasts(k.RetryAt, k.NotBefore, k.At), why)
	}
	if k.FullAt != nil {
		line("full", "%s, if nothing is taken", until(k.FullAt, k.At))
	} else if notFull {
		line("full", "not before %s", until(k.KnownUntil, k.At))
	}
	if notRepaid || notFull || k.NotBefore != nil {
		line("later", "not known: an override ends then, and %s. Give them: %s", programsNumbers, k.how)
	}
	switch {
	case keyless:
	case k.Rows == 0:
		line("last grant", "none is known: the key has no row")
	case inSlots: // its row changes when a slot comes back, too
	case k.Paused != nil:
		line("paused", "until %s: nothing is refilled before (ratelimit.pause; or a clock leapt ahead)", until(k.Paused, k.At))
	case k.LastUse != nil:
		line("last grant", "%s", instant(*k.LastUse))
	}
	if len(k.Denials) > 0 {
		fmt.Fprintln(w)
		t := newTable("HOUR", ">DENIED", ">TOKENS ASKED", "LAST DENIED")
		for _, d := range k.Denials {
			t.row(d.Hour.Format("2006-01-02 15:04Z"), count(d.Denied), number(d.Asked), instant(d.LastDenied))
		}
		t.print(w)
	}
	if len(k.History) > 0 {
		fmt.Fprintln(w)
		printOverrides(w, k.History, k.At)
	}
}

// policyEnds is until when nothing is granted by policy, if that ends.
func (k *keyDetails) policyEnds() string {
	if k.RetryAt == nil && k.NotBefore == nil {
		return ""
	}
	return ", " + lasts(k.RetryAt, k.NotBefore, k.At)
}

// lasts says until when something lasts: t or, if that is not known, notBefore at least.
func lasts(t, notBefore *time.Time, at time.Time) string {
	if t == nil && notBefore != nil {
		return "at least until " + until(notBefore, at)
	}
	return "until " + until(t, at)
}

// since says since or until when a program has a definition, or that older processes still have it.
func since(d *definition) string {
	if d.Current {
		return "since " + instant(d.PublishedAt)
	}
	if d.InUse {
		return "of another version in use"
	}
	return "until " + instant(d.PublishedAt)
}

// ending is when an override ends.
func ending(o *override, at time.Time) string {
	if o.Until == nil {
		return "for good"
	}
	return "until " + until(o.Until, at)
}
