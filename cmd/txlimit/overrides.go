package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/keystate"
)

// overrideList is what `overrides` prints.
type overrideList struct {
	Overrides []override `json:"overrides"`
}

func (a *app) overridesCommand() *cobra.Command {
	var all bool
	var most int
	c := a.do(&cobra.Command{
		Use:   "overrides [LIMIT] [--all]",
		Short: "List the overrides and blocks in force, or all there were",
		Long: `List the overrides in force, the newest first: other numbers, blocks, and keys without a limit, with who decided, why, since when
and until when. --all lists those that were removed or have expired, and the keys that were reset, too: the history.

One for the key goes before one for every key. Of several in force for the same, a block wins, and else the newest.`,
		Example: `  txlimit overrides
  txlimit overrides sendMessage --all`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return onlyLimit(args)
		},
		ValidArgsFunction: a.completeLimits,
	}, look, func(ctx context.Context, args []string) error {
		if most < 0 {
			return usagef("--limit %d is below 0", most)
		}
		return a.answering(ctx, func(tx pgx.Tx) (func() error, error) {
			var name *string
			if len(args) > 0 {
				name = &args[0]
			}
			return a.overrides(ctx, tx, name, all, most)
		})
	})
	c.Flags().BoolVar(&all, "all", false, "list those that no longer hold, too")
	c.Flags().IntVarP(&most, "limit", "n", 100, "list at most so many; 0: all")
	a.checked(c, checkLimits)
	return c
}

func (a *app) overrides(ctx context.Context, tx pgx.Tx, name *string, all bool, most int) (answer func() error, err error) {
	at, err := now(ctx, tx)
	if err != nil {
		return nil, err
	}
	from := "ratelimit._in_force($1::text, NULL, clock_timestamp()) AS o"
	if all {
		from = "ratelimit.overrides AS o WHERE $1::text IS NULL"
		if name != nil {
			from = `ratelimit.overrides AS o WHERE o.name COLLATE "POSIX" = $1`
		}
	}
	list, err := keystate.History(ctx, tx, from+" ORDER BY o.made_at DESC, o.id DESC LIMIT nullif($2::bigint, 0)", name, most)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		if name != nil {
			if err := checkKnown(ctx, tx, *name); err != nil {
				return nil, err
			}
		}
		if all {
			return a.saysNothing(overrideList{[]override{}}, "There are no overrides, and there were none."), nil
		}
		return a.saysNothing(overrideList{[]override{}}, "No overrides are in force."), nil
	}
	return a.says(overrideList{list}, func(w io.Writer) {
		printOverrides(w, list, at)
		if most > 0 && len(list) == most {
			fmt.Fprintf(a.stderr, "These are the newest %d. --limit 0 lists all.\n", most)
		}
	}), nil
}

func printOverrides(w io.Writer, list []override, at time.Time) {
	t := newTable("ID", "LIMIT", "KEY", "EFFECT", "UNTIL", "BY", "SINCE", "REASON")
	for i := range list {
		o := &list[i]
		key, end, reason := everyKey, until(o.Until, at), "-"
		if o.Key != nil {
			if key = printable(*o.Key); *o.Key == everyKey {
				key = strconv.Quote(*o.Key)
			}
		}
		if o.Reason != "" {
			reason = short(o.Reason, 60)
		}
		effect := effectOf(o)
		if o.Added != nil {
			effect += ", added " + number(*o.Added)
		}
		if o.State == keystate.StateDone && o.Key == nil {
			key = "(no key)"
		}
		switch o.State {
		case keystate.StateDone:
			end = "-"
		case keystate.StateExpired:
			end = "expired"
			if o.Until != nil { // nil: -infinity
				end += " " + instant(*o.Until)
			}
		case keystate.StateRemoved:
			end = fmt.Sprintf("removed %s by %s", instant(*o.RemovedAt), by(short(text(o.RemovedBy), 30), text(o.RemovedBy), text(o.RemovedAs)))
		}
		t.row(fmt.Sprintf("#%d", o.ID), short(o.Limit, 40), key, effect, end, by(short(o.MadeBy, 30), o.MadeBy, o.MadeAs), instant(o.MadeAt), reason)
	}
	t.print(w)
}

// everyKey stands for the key of an override for every key.
const everyKey = "(every key)"

// by is who did something, as shown, and the role that was logged in if that is another name.
func by(shown, who, as string) string {
	if as == "" || as == who {
		return shown
	}
	return shown + " (as " + short(as, 30) + ")"
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// unblock is the command that ends the blocks of a key, or of every key.
func (a *app) unblock(limit string, key *string) string {
	words := []string{limit}
	if key != nil {
		words = append(words, *key)
	}
	return a.in("txlimit unblock ") + quoteAll(words)
}

const everyKeyHelp = `

Without KEY, it is for a limit without keys, or for every key that has no override of its own. Then the command asks first, unless
--yes is given.

Programs that start with ratelimit.Open follow within two seconds. Programs without do not.`

// decision is the flags of those commands that add an override.
type decision struct {
	end
	reason, who string
}

func (d *decision) flags(a *app, command *cobra.Command) {
	d.end.flags(command)
	d.whyFlags(a, command)
}

func (d *decision) whyFlags(a *app, command *cobra.Command) {
	command.Flags().StringVarP(&d.reason, "reason", "r", "", "why, for those who look later")
	whoFlag(a, command, &d.who)
	a.yesFlag(command)
}

// The bounds of the columns, in bytes.
const (
	maxReason = 4096
	maxWho    = 255
)

func (d *decision) check() error {
	if !utf8.ValidString(d.reason) || strings.Contains(d.reason, "\x00") {
		return usagef("--reason is not valid UTF-8 without NUL")
	}
	if len(d.reason) > maxReason {
		return usagef("--reason has %d bytes, more than %d", len(d.reason), maxReason)
	}
	return checkWho(d.who)
}

func checkWho(who string) error {
	if !utf8.ValidString(who) || strings.Contains(who, "\x00") {
		return usagef("--who is not valid UTF-8 without NUL")
	}
	if len(who) > maxWho {
		return usagef("--who has %d bytes, more than %d", len(who), maxWho)
	}
	return nil
}

func whoFlag(a *app, command *cobra.Command, who *string) {
	command.Flags().StringVar(who, "who", a.who, "who decides")
	command.Flags().Lookup("who").DefValue = ""
	command.Flags().Lookup("who").Usage += " (default: you, by your name on this machine)"
}

// decided is what the commands that add an override print.
type decided struct {
	Override override `json:"override"`
	AddedNow *float64 `json:"addedNow"`          // nil: nothing was to be added
	KeysWith *int64   `json:"keysWithOverrides"` // of one for every key: how many keys have one of their own, and keep it
}

// reach says whom an override of every key does not reach, and whom it does although the program knows better.
type reach struct {
	keysWith int64 // with an override of their own in force
	varies   bool  // the keys have numbers of the program's own
}

func reachOf(ctx context.Context, db querier, name, effect string) (r reach, err error) {
	err = db.QueryRow(ctx, "SELECT count(DISTINCT o.key) FROM ratelimit._in_force($1::text, NULL, clock_timestamp()) AS o", name).Scan(&r.keysWith)
	if err != nil || effect != effectNumbers {
		return r, err
	}
	list, err := definitions(ctx, db, &name)
	r.varies = varies(list) != ""
	return r, err
}

// text is empty, or sentences.
func (r reach) text() string {
	var parts []string
	if r.keysWith == 1 {
		parts = append(parts, "1 key has an override of its own, and keeps it.")
	} else if r.keysWith > 1 {
		parts = append(parts, count(r.keysWith)+" keys have overrides of their own, and keep them.")
	}
	if r.varies {
		parts = append(parts, "Keys to which the program gives numbers of their own get these, too.")
	}
	return strings.Join(parts, " ")
}

// confirmEvery asks whether every key is meant.
func (a *app) confirmEvery(ctx context.Context, question, name, effect string) error {
	var r reach
	err := a.reading(ctx, func(tx pgx.Tx) (err error) {
		if err = checkKnown(ctx, tx, name); err == nil {
			r, err = reachOf(ctx, tx, name, effect)
		}
		return err
	})
	if err != nil {
		return err
	}
	return a.confirm(ctx, "%s", strings.TrimSpace(r.text()+" "+question))
}

// decide adds an override by a function of the schema. call has the arguments between the key and the end.
// It says what it did, unless JSON is asked for.
func (a *app) decide(ctx context.Context, d *decision, name string, key *string, function, call string, args ...any) (*decided, error) {
	length, end, err := d.get()
	if err != nil {
		return nil, err
	}
	if err := d.check(); err != nil {
		return nil, err
	}
	if err := a.reading(ctx, func(tx pgx.Tx) error { return checkKnown(ctx, tx, name) }); err != nil {
		return nil, err
	}
	var o *override
	var before []override // in force for the same keys, which now waits until the new one ends
	hasRow := true
	var reached *reach
	var at time.Time
	err = a.inTx(ctx, func(tx pgx.Tx) error {
		all := append([]any{name, key, d.reason, optional(d.who), length, end}, args...)
		var id int64
		err := tx.QueryRow(ctx, "SELECT "+function+`($1::text, $2::text, `+call+`until => coalesce(clock_timestamp() + $5::interval, $6::timestamptz), reason => $3::text, who => $4::text, forever => $5::interval IS NULL AND $6::timestamptz IS NULL, every_key => $2 IS NULL)`, all...).Scan(&id)
		if err != nil {
			return err
		}
		list, err := keystate.History(ctx, tx, "ratelimit.overrides AS o WHERE o.id = $1", id)
		if err != nil {
			return err
		}
		if len(list) == 0 { // a trigger or a policy of the application's
			return fmt.Errorf("the override #%d cannot be read back, so it was not made", id)
		}
		o = &list[0]
		before, err = keystate.History(ctx, tx, "ratelimit._in_force($1::text, ARRAY[$2::text], clock_timestamp()) AS o WHERE o.key IS NOT DISTINCT FROM $2 AND o.id <> $3 LIMIT 1", name, key, id)
		if err != nil {
			return err
		}
		if key != nil {
			if err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT 1 FROM ratelimit.limits WHERE name = $1 AND key = $2)", name, key).Scan(&hasRow); err != nil {
				return err
			}
		} else if r, err := reachOf(ctx, tx, name, o.Effect); err != nil {
			return err
		} else {
			reached = &r
		}
		at, err = now(ctx, tx)
		return err
	})
	if err != nil {
		return nil, err
	}
	whom := "every key of " + printable(o.Limit)
	if o.Key != nil {
		whom = about(o.Limit, o.Key)
	}
	a.say("#%d: %s for %s, %s", o.ID, effectOf(o), whom, ending(o, at))
	for i := range before {
		if b := &before[i]; b.Effect == effectBlock && o.Effect != effectBlock {
			fmt.Fprintf(a.stderr, "#%d still blocks it, %s: #%d holds only afterwards. To end the block: %s\n", b.ID, ending(b, at), o.ID, a.unblock(o.Limit, o.Key))
		} else {
			a.say("in place of #%d: %s, %s", b.ID, effectOf(b), ending(b, at))
		}
	}
	if !hasRow {
		fmt.Fprintf(a.stderr, "%s has no row: is it spelled right? A key that was not used lately has none.\n", whom)
	}
	result := &decided{Override: *o}
	if reached != nil {
		result.KeysWith = &reached.keysWith
		if text := reached.text(); text != "" {
			a.say("%s", text)
		}
	}
	return result, nil
}

func (a *app) overrideCommand() *cobra.Command {
	var d decision
	var rate, capacity, maxReserved, capacityNow float64
	var add bool
	c := &cobra.Command{
		Use:   "override LIMIT [KEY] [--rate N] [--capacity N] [--max-reserved N] (--for 2h | --until WHEN | --forever) [--add]",
		Short: "Give a key, or every key, other numbers",
		Long: `Give a key of a limit other numbers, for a while or for good. A number without a flag stays as defined. A capacity that equals
the rate follows the new rate. The newest override replaces older ones as a whole while it is in force, but a block stays. txlimit restore ends it.

New numbers add no tokens to what a key has: a key that is denied now goes on when it is refilled, by the new rate. --add gives it
the difference to the largest capacity of late as well, once: of the time in which an empty limit fills up. It waits two seconds after
the override is committed, until all programs know of it. A key without a row is full, and gets nothing. Without KEY, only a limit
without keys gets something.

Keys with numbers of their own, which the program alone knows (Varies), get those of the override instead, and keep the others. Then
--add needs --capacity and, unless an override in force has it, --capacity-now: the largest capacity that the key has had lately.` + everyKeyHelp,
		Example: `  txlimit override signUps acme --rate 500 --for 2h --reason 'their conference' --add
  txlimit override sendMessage --rate 5 --capacity 5 --for 30m --reason 'the mail relay is slow' --yes`,
	}
	a.takesKey(c)
	f := c.Flags()
	f.Float64Var(&rate, "rate", 0, "tokens per period")
	f.Float64Var(&capacity, "capacity", 0, "the most tokens that can be saved up (default: as defined or, if that is the rate, the new rate)")
	f.Float64Var(&maxReserved, "max-reserved", 0, "the most tokens that may be owed by reservations")
	d.flags(a, c)
	f.BoolVar(&add, "add", false, "add the difference of the capacities to what the key has")
	f.Float64Var(&capacityNow, "capacity-now", 0, "with --add: the capacity that the key has had until now, if no override in force has it and the program alone knows it")
	given := func(flag string, n *float64) *float64 {
		if f.Changed(flag) {
			return n
		}
		return nil
	}
	return a.do(c, operate, func(ctx context.Context, args []string) error {
		name, key := args[0], keyOf(args)
		if !f.Changed("rate") && !f.Changed("capacity") && !f.Changed("max-reserved") {
			return usagef("say what changes: --rate, --capacity or --max-reserved")
		}
		if f.Changed("capacity-now") && !add {
			return usagef("--capacity-now is for --add")
		}
		if f.Changed("rate") && rate == 0 {
			return usagef("--rate 0 grants nothing: use `txlimit block`, which also says until when")
		}
		if add {
			if err := a.canAdd(ctx, name, key, given("capacity", &capacity), given("capacity-now", &capacityNow)); err != nil {
				return err
			}
		}
		if key == nil {
			if err := a.confirmEvery(ctx, fmt.Sprintf("Give every key of %s other numbers?", printable(name)), name, effectNumbers); err != nil {
				return err
			}
		}
		result, err := a.decide(ctx, &d, name, key, "ratelimit.override", "rate => $7::float8, capacity => $8::float8, max_reserved => $9::float8, ",
			given("rate", &rate), given("capacity", &capacity), given("max-reserved", &maxReserved))
		if err != nil {
			return err
		}
		if add {
			if result.AddedNow, result.Override.Added, err = a.add(ctx, result.Override.ID, given("capacity-now", &capacityNow)); err != nil {
				before := ""
				if f.Changed("capacity-now") {
					before = ", " + number(capacityNow)
				}
				return fmt.Errorf(a.in("#%d is in force, but nothing was added: %s. To try again: SELECT ratelimit.add(%[1]d%[3]s)"), result.Override.ID, a.explain(ctx, err), before)
			}
			keys := int64(0)
			if key == nil && *result.AddedNow == 0 {
				err := a.reading(ctx, func(tx pgx.Tx) (err error) { keys, err = keysOf(ctx, tx, name); return err })
				if err != nil {
					return fmt.Errorf("#%d is in force, and nothing was added: %w", result.Override.ID, err)
				}
			}
			if keys > 0 {
				fmt.Fprintf(a.stderr, "Nothing was added: --add without a KEY helps only a limit without keys. Name the key. %s\n", a.keysWith(name, keys))
			} else if *result.AddedNow == 0 {
				a.say("added nothing: it has no row, and so is full, its capacity is no larger than before (--capacity), or ended overrides have added as much already")
			} else {
				a.say("added %s to what it has", number(*result.AddedNow)+" tokens")
			}
		}
		if a.json {
			return a.emit(result, nil)
		}
		return nil
	})
}

// canAdd checks that the capacity of a new override is known, and that of the key until now, before anything is written. The override in
// force knows it, and may contradict the flag.
func (a *app) canAdd(ctx context.Context, name string, key *string, capacity, capacityNow *float64) error {
	return a.reading(ctx, func(tx pgx.Tx) error {
		list, err := definitions(ctx, tx, &name)
		if err != nil {
			return err
		}
		at, err := now(ctx, tx)
		if err != nil {
			return err
		}
		inForce, err := inForce(ctx, tx, name, key, at)
		if err != nil {
			return err
		}
		if len(list) > 0 && list[0].Counts && list[0].Kind == kindSlots {
			return usagef("%s has slots, and nothing is added to them: another --capacity counts at once. Leave out --add", printable(name))
		}
		varying := varies(list) != ""
		var known *float64
		var before *override
		if len(inForce) > 0 && inForce[0].Effect == effectNumbers && len(list) > 0 && list[0].Counts {
			states, err := keystate.Of(ctx, tx, name, []string{keyText(key)}, at, nil)
			if err != nil {
				return err
			}
			before, known = &inForce[0], states[0].Numbers.Capacity
		}
		switch {
		case known != nil && capacityNow != nil && *capacityNow < *known:
			return usagef("--capacity-now %s is below the capacity in force: override #%d has %s", number(*capacityNow), before.ID, number(*known))
		case varying && capacity == nil:
			return usagef("%s: --add needs --capacity%s", programsNumbers, map[bool]string{true: ", and --capacity-now, the capacity that the key has had until now"}[known == nil])
		case varying && capacityNow == nil && known == nil:
			return usagef("%s: --add needs --capacity-now, the capacity that the key has had until now", programsNumbers)
		}
		return nil
	})
}

// add adds the difference of the capacities: ratelimit.add waits until all programs know of the override. recorded is what its row says,
// although there may be no key to give it to.
func (a *app) add(ctx context.Context, id int64, before *float64) (added, recorded *float64, err error) {
	err = a.inTx(ctx, func(tx pgx.Tx) error {
		var row bool
		err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM ratelimit.limits AS r JOIN ratelimit.overrides AS o ON o.name = r.name AND coalesce(o.key, '') = r.key
			WHERE o.id = $1)`, id).Scan(&row)
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, "SELECT ratelimit.add($1::bigint, $2::float8)", id, before).Scan(&recorded)
		if added = recorded; !row {
			added = new(float64)
		}
		return err
	})
	return added, recorded, err
}

func (a *app) blockCommand() *cobra.Command {
	return a.decisionCommand("block", "ratelimit.block", "Block", &cobra.Command{
		Short: "Deny a key, or every key, everything",
		Long: `Deny a key of a limit everything, for a while or for good. Denials say when the block ends. Refunds, resets and tokens that were
reserved before change nothing, and charges are still recorded. txlimit unblock ends it.` + everyKeyHelp,
		Example: `  txlimit block logins user-17 --for 1h --reason 'password guessing'
  txlimit block signUps --until '2026-01-31 06:00' --reason 'spam wave' --yes`,
	})
}

func (a *app) unlimitedCommand() *cobra.Command {
	return a.decisionCommand("unlimited", "ratelimit.unlimited", "Take the limit from", &cobra.Command{
		Short: "Grant a key, or every key, everything",
		Long: `Grant a key of a limit everything, for a while or for good. Nothing is taken meanwhile, and nothing is written. txlimit restore
ends it.` + everyKeyHelp,
		Example: `  txlimit unlimited apiCalls load-test --for 30m`,
	})
}

func (a *app) decisionCommand(name, function, question string, c *cobra.Command) *cobra.Command {
	var d decision
	c.Use = name + " LIMIT [KEY] (--for 2h | --until WHEN | --forever) [--reason TEXT]"
	a.takesKey(c)
	d.flags(a, c)
	return a.do(c, operate, func(ctx context.Context, args []string) error {
		key := keyOf(args)
		if key == nil {
			if err := a.confirmEvery(ctx, fmt.Sprintf("%s every key of %s?", question, printable(args[0])), args[0], ""); err != nil {
				return err
			}
		}
		o, err := a.decide(ctx, &d, args[0], key, function, "")
		if err != nil {
			return err
		}
		if a.json {
			return a.emit(o, nil)
		}
		return nil
	})
}

// removed is what `restore` and `unblock` print.
type removed struct {
	Limit   string  `json:"limit"`
	Key     *string `json:"key"`
	Removed int64   `json:"removed"`
}

func (a *app) restoreCommand() *cobra.Command {
	var effect string
	c := a.removalCommand("restore", &effect, &cobra.Command{
		Use:   "restore LIMIT [KEY]",
		Short: "End the overrides of a key, or those of every key",
		Long: `End the overrides in force for a key of a limit: other numbers, blocks, no limit. Without KEY, end those that are for every
key. Overrides of single keys stay. Then the command asks first, unless --yes is given.`,
		Example: `  txlimit restore signUps acme
  txlimit restore logins user-17 --effect block`,
	})
	c.Flags().StringVar(&effect, "effect", "", "end only those with this `effect`: numbers, block or unlimited")
	choices(c, "effect", effectNumbers, effectBlock, effectUnlimited)
	a.yesFlag(c)
	return c
}

func (a *app) unblockCommand() *cobra.Command {
	effect := effectBlock
	return a.removalCommand("unblock", &effect, &cobra.Command{
		Use:   "unblock LIMIT [KEY]",
		Short: "End the blocks of a key, or that of every key",
		Long: `End the blocks in force for a key of a limit. Without KEY, end the block of every key; blocks of single keys stay. Other overrides
stay.`,
		Example: `  txlimit unblock logins user-17`,
	})
}

func (a *app) removalCommand(name string, effect *string, c *cobra.Command) *cobra.Command {
	var who string
	whoFlag(a, c, &who)
	a.takesKey(c)
	return a.do(c, operate, func(ctx context.Context, args []string) error {
		switch *effect {
		case "", effectNumbers, effectBlock, effectUnlimited:
		default:
			return usagef("--effect %q is not numbers, block or unlimited", *effect)
		}
		if err := checkWho(who); err != nil {
			return err
		}
		result := removed{Limit: args[0], Key: keyOf(args)}
		if err := a.reading(ctx, func(tx pgx.Tx) error { return checkKnown(ctx, tx, args[0]) }); err != nil {
			return err
		}
		if name == "restore" && result.Key == nil {
			if err := a.confirm(ctx, "End the overrides for every key of %s?", printable(args[0])); err != nil {
				return err
			}
		}
		err := a.inTx(ctx, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, "SELECT ratelimit.restore($1::text, $2::text, $3::text, $4::text, every_key => $2 IS NULL)", result.Limit, result.Key, optional(*effect), optional(who)).Scan(&result.Removed)
		})
		if err != nil {
			return err
		}
		whom := "every key of " + printable(result.Limit)
		if result.Key != nil {
			whom = about(result.Limit, result.Key)
		}
		if result.Removed == 0 {
			text := fmt.Sprintf("Nothing to %s: no such override is in force for %s.", name, whom)
			if result.Key != nil {
				text += fmt.Sprintf(" Those for every key: txlimit %s %s", name, shellQuote(result.Limit))
			}
			return a.nothing(result, "%s", text)
		}
		return a.emit(result, func(w io.Writer) { fmt.Fprintf(w, "ended %s for %s\n", plural(result.Removed, "override"), whom) })
	})
}

// resetDone is what `reset` prints.
type resetDone struct {
	Limit   string  `json:"limit"`
	Key     *string `json:"key"`
	Deleted int64   `json:"deleted"` // rows
	Blocked bool    `json:"blocked"` // a block is in force all the same
}

func (a *app) resetCommand() *cobra.Command {
	var d decision
	c := &cobra.Command{
		Use:   "reset LIMIT [KEY]",
		Short: "Make a key full again: let it go on",
		Long: `Make a key of a limit full again, by deleting its rows. Its debts are forgotten, and running work that holds its tokens is ended. The
command asks first, unless --yes is given.

It waits at most 10 seconds for a transaction that holds a row. A block stays: see txlimit unblock. Without KEY it is for a limit
without keys. Who did it, when and why is in the history: txlimit overrides --all, and txlimit show.`,
		Example: `  txlimit reset sendMessage user-17 --reason 'their retry loop is mended'
  txlimit reset signUps --yes    # a limit without keys`,
	}
	a.takesKey(c)
	d.whyFlags(a, c)
	return a.do(c, operate, func(ctx context.Context, args []string) error {
		if err := d.check(); err != nil {
			return err
		}
		result := resetDone{Limit: args[0], Key: keyOf(args)}
		var key string
		if result.Key != nil {
			key = *result.Key
		}
		if err := a.reading(ctx, func(tx pgx.Tx) error { return checkKnown(ctx, tx, args[0]) }); err != nil {
			return err
		}
		if err := a.confirm(ctx, "Make %s full again, forget its debts, and end work that holds its tokens?", about(result.Limit, result.Key)); err != nil {
			return err
		}
		err := a.inTx(ctx, func(tx pgx.Tx) error {
			err := tx.QueryRow(ctx, "SELECT deleted FROM ratelimit._reset(ARRAY[$1::text], ARRAY[$2::text])", result.Limit, key).Scan(&result.Deleted)
			if err == nil && result.Deleted > 0 {
				_, err = tx.Exec(ctx, "SELECT ratelimit._note_reset($1::text, $2::text, $3::text, $4::text)", result.Limit, key, d.reason, optional(d.who))
			}
			if err != nil {
				return err
			}
			at, err := now(ctx, tx)
			if err != nil {
				return err
			}
			applied, err := inForce(ctx, tx, result.Limit, result.Key, at)
			result.Blocked = len(applied) > 0 && applied[0].Effect == effectBlock
			return err
		})
		if err != nil {
			return err
		}
		if result.Blocked {
			fmt.Fprintf(a.stderr, a.in("It is blocked all the same: see `txlimit overrides`, and %s\n"), a.unblock(result.Limit, result.Key))
		}
		if result.Deleted == 0 {
			text := fmt.Sprintf("%s has no row: it was full already.", about(result.Limit, result.Key))
			if result.Key == nil {
				text += " If the limit has keys, say which."
			}
			return a.nothing(result, "%s", text)
		}
		return a.emit(result, func(w io.Writer) { fmt.Fprintf(w, "%s is full again\n", about(result.Limit, result.Key)) })
	})
}

// quoteAll is words for a shell.
func quoteAll(words []string) string {
	quoted := make([]string, len(words))
	for i, word := range words {
		quoted[i] = shellQuote(word)
	}
	return strings.Join(quoted, " ")
}
