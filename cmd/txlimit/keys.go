package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/keystate"
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
	Remaining *float64   `json:"remaining"`   // tokens, or free slots; nil: unlimited, or not known
	InUse     *float64   `json:"used"`        // of slots: those that are held, without those whose holds have expired; nil: it has tokens
	Denied    *bool      `json:"deniedNow"`   // one token or slot would be denied; nil: not known
	RetryAt   *time.Time `json:"retryAt"`     // nil: not denied, a block without an end, or not known
	NotBefore *time.Time `json:"notBefore"`   // retryAt is not known, but not earlier: an override ends then, and what follows is the program's
	Paused    *time.Time `json:"pausedUntil"` // nothing is refilled before; nil: it is not paused
	Effect    string     `json:"effect"`      // numbers, block or unlimited
	Override  *int64     `json:"overrideId"`  // the id of the override in force
	Unknown   *string    `json:"unknown"`     // why the numbers, and what follows from them, are not known; nil: they are
	Stored    *float64   `json:"stored"`      // if they are not: the tokens that were left at the last use
	LastUse   *time.Time `json:"lastUse"`     // if they are not

	noSlots bool // there are none: no release frees one
}

// stateOf is a key as `keys` prints it.
func stateOf(s *keystate.State) keyState {
	k := keyState{Key: s.Key, Remaining: s.Remaining, InUse: s.Used, RetryAt: s.RetryAt, NotBefore: s.NotBefore, Paused: s.PausedUntil, Effect: s.Effect, Override: s.Override}
	if k.Remaining != nil && math.IsInf(*k.Remaining, 1) {
		k.Remaining = nil
	}
	k.noSlots = s.Used != nil && s.Effect == effectNumbers && *s.Numbers.Capacity == 0
	why := ""
	switch s.Effect {
	case "varies":
		k.Effect, why = effectNumbers, programsNumbers
		if s.Used == nil {
			k.Stored, k.LastUse = s.Stored, s.LastUse
		}
	default:
		k.Denied = &s.Denied
		if s.Broken && s.Remaining == nil {
			why = brokenRow
		}
	}
	k.Unknown = optional(why)
	return k
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
	}, look, func(ctx context.Context, args []string) error {
		if most < 0 {
			return usagef("--limit %d is below 0", most)
		}
		if denied {
			return a.deniedKeys(ctx, args[0], since, most)
		}
		return a.answering(ctx, func(tx pgx.Tx) (func() error, error) { return a.keys(ctx, tx, &n, args[0], all, most) })
	})
	c.Flags().BoolVar(&all, "all", false, "list the keys that are not limited, too")
	c.Flags().IntVarP(&most, "limit", "n", 20, "list at most so many; 0: all")
	c.Flags().BoolVar(&denied, "denied", false, "list the most denied keys, from the usage tables")
	c.Flags().StringVar(&since, "since", "1h", "with --denied: how far to look back; whole hours are read")
	n.flags(c)
	a.checked(c, checkLimits)
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

func (a *app) keys(ctx context.Context, tx pgx.Tx, n *numbers, name string, all bool, most int) (answer func() error, err error) {
	at, err := now(ctx, tx)
	if err != nil {
		return nil, err
	}
	every, err := inForce(ctx, tx, name, nil, at)
	if err != nil {
		return nil, err
	}
	var everyKey *override
	if len(every) > 0 {
		everyKey = &every[0]
	}
	d, err := n.resolve(ctx, tx, name)
	if err != nil {
		return nil, err
	}
	if rows, err := estimate(ctx, tx, name); err == nil && rows > 1e6 && a.terminal {
		fmt.Fprintf(a.stderr, "reading about %s rows\n", count(int64(rows)))
	}
	var idle *pgtype.Interval // within which all keys fill up, unless by an override
	if d.Varies != "" {
		varies := intervalOf(d.Varies)
		idle = &varies
	}
	states, err := keystate.All(ctx, tx, name, at, d.asked(), !all, idle, most)
	if err != nil {
		return nil, err
	}
	var found []keyState
	for i := range states {
		found = append(found, stateOf(&states[i]))
	}
	nothing := func(format string, args ...any) (func() error, error) {
		return func() error {
			a.sayOfEvery(name, everyKey, at)
			return a.nothing(keyList{[]keyState{}}, format, args...)
		}, nil
	}
	if everyKey != nil && everyKey.Effect == effectBlock && len(found) == 0 {
		return nothing("Every key of %s is blocked. None has a row.", printable(name))
	}
	if len(found) == 0 {
		states, err := keystate.Of(ctx, tx, name, []string{""}, at, d.asked()) // by what is in force for every key
		if err != nil {
			return nil, err
		}
		c, known := d.config(&states[0].Numbers), states[0].Known()
		if known && (c.Kind == "unlimited" || grantsNothing(c)) {
			return nothing("%s has no rows: %s.", printable(name), describe(c))
		}
		what := "No key of %s is limited now."
		switch {
		case all:
			what = "No key of %s has a row: all are full."
		case !known:
			what = "No key of %s had less than one token left at its last use."
		}
		return nothing(what, printable(name))
	}
	return func() error {
		a.sayOfEvery(name, everyKey, at)
		return a.printKeys(name, &d, found, at, most)
	}, nil
}

// sayOfEvery says that an override of every key decides, if it does.
func (a *app) sayOfEvery(name string, o *override, at time.Time) {
	if o != nil && o.Effect != effectNumbers {
		fmt.Fprintf(a.stderr, "override #%d: %s for every key of %s without an override of its own, %s\n", o.ID, o.Effect, printable(name), ending(o, at))
	}
}

// printKeys prints the keys that were found.
func (a *app) printKeys(name string, d *defined, found []keyState, at time.Time, most int) error {
	inSlots := d.Kind == kindSlots
	anyUnknown := slices.ContainsFunc(found, func(k keyState) bool { return k.Unknown != nil && *k.Unknown != brokenRow })
	for _, k := range found {
		if k.Unknown != nil && *k.Unknown == brokenRow {
			fmt.Fprintf(a.stderr, a.in("%s: %s, by txlimit reset %s %s\n"), printable(k.Key), brokenRow, shellQuote(name), shellQuote(k.Key))
		}
	}
	if anyUnknown && inSlots {
		fmt.Fprintf(a.stderr, a.in("How many slots the keys of %s have is the program's, so it is not known who is denied now. To `txlimit show %s KEY`, give it: %s\n"),
			printable(name), shellQuote(name), d.how())
	} else if anyUnknown {
		fmt.Fprintf(a.stderr, a.in("The numbers of keys of %s are the program's, so it is not known who is denied now. STORED is what a key had left at its last use. To `txlimit show %s KEY`, give the key's numbers: %s\n"),
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
			if k.Denied != nil && *k.Denied && inSlots && k.RetryAt == nil && k.Effect == effectNumbers && !k.noSlots {
				denied = "one is released"
			} else if k.Denied != nil && *k.Denied && k.Remaining != nil {
				denied = strings.TrimPrefix(lasts(k.RetryAt, k.NotBefore, at), "until ")
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

// brokenRow is why nothing is known of a key whose row was written by hand.
const brokenRow = "its row is broken (ts is infinite), and every call for it fails: reset it"

func (a *app) deniedKeys(ctx context.Context, name, since string, most int) error {
	back, err := duration("--since", since)
	if err != nil {
		return err
	}
	return a.answering(ctx, func(tx pgx.Tx) (func() error, error) {
		list, err := collect(ctx, tx, pgx.RowToStructByPos[deniedKey],
			"SELECT d.key, d.denied, d.asked, "+keystate.ShownTime("d.last_denied")+" FROM ratelimit.denials($1::text, clock_timestamp() - $2::interval) AS d LIMIT nullif($3::bigint, 0)", name, back, most)
		if err != nil {
			return nil, err
		}
		if len(list) == 0 {
			if err := checkKnown(ctx, tx, name); err != nil {
				return nil, err
			}
			return a.saysNothing(deniedKeyList{[]deniedKey{}}, "No denials of %s were counted. Programs count them with a usage.Recorder.", printable(name)), nil
		}
		for i := range list {
			list[i].LastDenied = list[i].LastDenied.UTC()
		}
		return a.says(deniedKeyList{list}, func(w io.Writer) {
			t := newTable("KEY", ">DENIED", ">TOKENS ASKED", "LAST DENIED")
			for _, k := range list {
				t.row(printable(k.Key), count(k.Denied), number(k.Asked), instant(k.LastDenied))
			}
			t.print(w)
		}), nil
	})
}
