package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/keystate"
)

// holdList is what `holds` prints.
type holdList struct {
	Limit string    `json:"limit"`
	Key   *string   `json:"key"` // nil: every key
	At    time.Time `json:"at"`
	Holds []hold    `json:"holds"`
	All   int64     `json:"holdCount"` // those that are not listed, too
}

type hold struct {
	Key     *string    `json:"key"` // nil: the limit has no keys
	ID      string     `json:"holdId"`
	Unit    string     `json:"unit"`
	Count   float64    `json:"count"`
	Since   time.Time  `json:"since"`
	Until   *time.Time `json:"until"` // nil: it has no end
	Expired bool       `json:"expired"`
}

func holdOf(h *keystate.Hold) hold {
	return hold{Key: optional(h.Key), ID: h.ID, Unit: h.Unit, Count: h.Count, Since: h.Since, Until: h.Until, Expired: h.Expired}
}

// has is what is held.
func (h *hold) has() string {
	switch {
	case h.Unit == "none":
		return "nothing"
	case h.Count == 1:
		return "1 " + strings.TrimSuffix(h.Unit, "s")
	}
	return number(h.Count) + " " + h.Unit
}

// ends is when it ends, or has.
func (h *hold) ends(at time.Time) string {
	switch {
	case h.Until == nil:
		return "no end"
	case h.Expired:
		return "expired " + span(at.Sub(*h.Until), time.Duration.Round) + " ago"
	}
	return until(h.Until, at)
}

func (a *app) holdsCommand() *cobra.Command {
	var most int
	c := a.do(&cobra.Command{
		Use:   "holds LIMIT [KEY]",
		Short: "List who holds slots or tokens",
		Long: `List who holds slots or tokens of a limit, the oldest first: of a key or, without KEY, of all keys. An ID is that of the work or the
thing, as the program has it.

An expired hold still has its slots or tokens, but counts as free: the next call that needs them, or a sweep, gives them back. Until
then its worker may still settle it. NOTHING is held if the key was unlimited then. txlimit release ends a hold.

It reads all holds of the key, or of the limit, and locks nothing.`,
		Example: `  txlimit holds renders acme
  txlimit holds renders --limit 0`,
	}, look, func(ctx context.Context, args []string) error {
		if most < 0 {
			return usagef("--limit %d is below 0", most)
		}
		return a.answering(ctx, func(tx pgx.Tx) (func() error, error) { return a.holds(ctx, tx, args[0], keyOf(args), most) })
	})
	a.takesKey(c)
	c.Flags().IntVarP(&most, "limit", "n", 20, "list at most so many; 0: all")
	return c
}

func (a *app) holds(ctx context.Context, tx pgx.Tx, name string, key *string, most int) (answer func() error, err error) {
	at, err := now(ctx, tx)
	if err != nil {
		return nil, err
	}
	l := holdList{Limit: name, Key: key, At: at, Holds: []hold{}}
	found, all, err := keystate.Holds(ctx, tx, name, key, nil, at, most)
	if err != nil {
		return nil, err
	}
	l.All = all
	for i := range found {
		l.Holds = append(l.Holds, holdOf(&found[i]))
	}
	if len(found) == 0 {
		if err := checkKnown(ctx, tx, name); err != nil {
			return nil, err
		}
		return a.saysNothing(l, "Nobody holds anything of %s.", about(name, key)), nil
	}
	return a.says(l, func(w io.Writer) {
		t := newTable("KEY", "ID", "HOLDS", "SINCE", "UNTIL")
		for i := range l.Holds {
			h := &l.Holds[i]
			shown := "(no key)"
			if h.Key != nil {
				shown = printable(*h.Key)
			}
			t.row(shown, printable(h.ID), h.has(), instant(h.Since), h.ends(at))
		}
		t.print(w)
		if int64(len(l.Holds)) < all {
			fmt.Fprintf(a.stderr, "These are the oldest %d of %s. --limit 0 lists all.\n", len(l.Holds), count(all))
		}
	}), nil
}

// released is what `release` prints.
type released struct {
	Limit    string  `json:"limit"`
	Key      *string `json:"key"`
	ID       string  `json:"holdId"`
	Released bool    `json:"released"`
}

// maxReleaseReason leaves room for the id, which is before the reason in the history.
const maxReleaseReason = 3800

func (a *app) releaseCommand() *cobra.Command {
	var d decision
	c := &cobra.Command{
		Use:   "release LIMIT [KEY] ID",
		Short: "End a hold: free its slots or tokens",
		Long: `End a hold of a limit, by its id: its slots come back, its tokens by the rule of refunds, and the id is free. The holder loses it, as if it
had come late, but its work goes on: stop the work first, or two have one slot. The command asks first, unless --yes is given.

It waits at most 10 seconds for a transaction that holds a row. Without KEY it is for a limit without keys. Of tokens, a program must have
published their numbers. Who did it, when and why is in the history: txlimit overrides --all, and txlimit show.`,
		Example: `  txlimit release renders acme 'acme/job 17' --reason 'its worker hangs'
  txlimit release imports 'acme/job 17'    # a limit without keys
  txlimit release renders 'acme/job 17' --part eu --part acme`,
		Args:              func(_ *cobra.Command, args []string) error { return limitKeyAndID(args, a.parts) },
		ValidArgsFunction: a.completeHold,
	}
	a.partFlag(c)
	d.whyFlags(a, c)
	a.checked(c, func(args []string) error {
		last := len(args) - 1
		if err := checkLimitAndKey(args[0], keyOf(a.withParts(args[:last]))); err != nil {
			return err
		}
		return checkText("id", args[last], 255)
	})
	return a.do(c, operate, func(ctx context.Context, args []string) error {
		if len(a.parts) > 0 {
			args = []string{args[0], args[2], args[1]}
		}
		r := released{Limit: args[0], ID: args[len(args)-1]}
		if len(args) == 3 {
			r.Key = &args[1]
		}
		if err := d.check(); err != nil {
			return err
		}
		if len(d.reason) > maxReleaseReason {
			return usagef("--reason has %d bytes, more than %d", len(d.reason), maxReleaseReason)
		}
		return a.release(ctx, &d, r)
	})
}

func (a *app) release(ctx context.Context, d *decision, r released) error {
	var h *hold
	if err := a.reading(ctx, func(tx pgx.Tx) error {
		list, _, err := keystate.Holds(ctx, tx, r.Limit, new(keyText(r.Key)), &r.ID, time.Time{}, 1)
		if err != nil {
			return err
		}
		if len(list) > 0 {
			h = new(holdOf(&list[0]))
			return nil
		}
		return checkKnown(ctx, tx, r.Limit)
	}); err != nil {
		return err
	}
	if h == nil {
		about, hint := about(r.Limit, r.Key), ""
		if r.Key == nil {
			about, hint = about+" without a key", fmt.Sprintf(" If %s is the key, add the ID.", printable(r.ID))
		}
		return a.nothing(r, a.in("%s has no hold %s.%s Those there are: txlimit holds %s"), about, printable(r.ID), hint, shellQuote(r.Limit))
	}
	if err := a.confirm(ctx, "End the hold %s of %s (%s since %s)? Its holder loses it.", printable(r.ID), about(r.Limit, r.Key), h.has(), instant(h.Since)); err != nil {
		return err
	}
	err := a.inTx(ctx, func(tx pgx.Tx) (err error) {
		r.Released, err = keystate.Release(ctx, tx, r.Limit, keyText(r.Key), r.ID, h.Since, d.reason, optional(d.who))
		return err
	})
	if err != nil {
		return err
	}
	if !r.Released {
		return a.nothing(r, "The hold %s of %s has ended meanwhile.", printable(r.ID), about(r.Limit, r.Key))
	}
	return a.emit(r, func(w io.Writer) { fmt.Fprintf(w, "released %s of %s\n", printable(r.ID), about(r.Limit, r.Key)) })
}

// limitKeyAndID checks the arguments LIMIT [KEY] ID, and the parts that may stand for KEY.
func limitKeyAndID(args, parts []string) error {
	switch {
	case len(args) == 1:
		return fmt.Errorf("the id of the hold is missing: see txlimit holds %s", shellQuote(args[0]))
	case len(args) > 3:
		return fmt.Errorf("too many arguments: %q comes after LIMIT, KEY and ID (one with blanks needs quotes, and a key of several parts --part)", args[3])
	case len(args) > 1 && args[len(args)-1] == "":
		return fmt.Errorf("the id of the hold is empty")
	}
	return limitAndKey(args[:max(len(args)-1, 0)], parts)
}
