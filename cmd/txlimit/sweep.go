package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/ratelimit"
)

// sweptList is what `sweep` prints.
type sweptList struct {
	Swept []swept `json:"swept"`
}

type swept struct {
	Limit   string `json:"limit"`
	Deleted int64  `json:"deleted"` // rows
	Batches int    `json:"batches"` // of up to 1000 rows that were looked at
}

func (a *app) sweepCommand() *cobra.Command {
	var n numbers
	c := &cobra.Command{
		Use:   "sweep [LIMIT...]",
		Short: "Delete the rows of keys that have been full for an hour",
		Long: `Delete the rows of keys that have been full for an hour. A missing row means the same, so no decision changes. Without LIMIT it
sweeps all limits that programs have published.

It looks at 1000 rows in each READ COMMITTED transaction, skips locked rows, and pauses after each for three times as long as it took.
If it is stopped, deleted rows stay deleted. A key is full if it is by every definition of the limit that was published in the last 7 days, and
under every override. Slots count as full if none is in use. If definitions differ in kind, period or start, nothing is deleted, and a message says so. For a limit that no program has published, give the numbers. If the program
uses With for it, --varies is required: without it, rows of keys with larger numbers would be deleted, which fills these keys.

It also gives back what expired holds of all limits hold, and forgets holds that are over.`,
		Example: `  txlimit sweep
  txlimit sweep sendMessage uploads
  txlimit sweep oldLimit --rate 10 --period 1m --capacity 20
  txlimit sweep perCustomer --rate 10 --period 1m --varies 2d    # the program uses With`,
		Args: func(_ *cobra.Command, args []string) error {
			if slices.Contains(args, "") {
				return fmt.Errorf("the name of the limit is empty")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
			names, directive := a.completeLimits(cmd, nil, begin)
			return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args, name) }), directive
		},
	}
	n.flags(c)
	c.Flags().StringVar(&n.varies, "varies", "", "the longest `time` in which any numbers that the program gives a key by With fill a row, such as 2d; required if it uses With")
	_ = c.Flags().MarkHidden("zone") // a key that is full by the longest windows is full in every zone
	_ = c.Flags().MarkHidden("anchor")
	a.checked(c, checkLimits)
	return a.do(c, consume, func(ctx context.Context, args []string) error {
		return a.sweep(ctx, &n, args)
	})
}

func (a *app) sweep(ctx context.Context, n *numbers, names []string) error {
	var given *ratelimit.Config
	flags := n.given(slices.Concat(ofKey, ofLimit)...) || n.given("varies")
	if flags && len(names) != 1 {
		return usagef("--rate and --period are for one LIMIT")
	}
	err := a.reading(ctx, func(tx pgx.Tx) error {
		published, err := collect(ctx, tx, pgx.RowTo[string], "SELECT DISTINCT name FROM ratelimit.definitions WHERE "+counting+" ORDER BY 1")
		if err != nil {
			return err
		}
		if len(names) == 0 {
			names = published
			return nil
		}
		for _, name := range names {
			if !flags && slices.Contains(published, name) { // maybe no longer, but within the last 7 days
				continue
			}
			d, err := n.resolve(ctx, tx, name)
			if err != nil {
				return err
			}
			given = d.given
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return a.nothing(sweptList{[]swept{}}, "There is nothing to sweep: no program has published its limits. Name a LIMIT, with --rate and --period.")
	}
	list := make([]swept, 0, len(names))
	total := int64(0)
	for _, name := range names {
		s, err := a.sweepOne(ctx, name, given)
		if err == nil && s.Deleted == 0 {
			err = a.whyNothing(ctx, name, given)
		}
		if err == nil {
			err = a.countOwing(ctx, name, given)
		}
		list = append(list, s)
		total += s.Deleted
		if err != nil {
			return fmt.Errorf("%s: %w; %s were deleted before", printable(name), err, plural(total, "row"))
		}
	}
	if err := a.sweepHolds(ctx); err != nil {
		return fmt.Errorf("holds: %w; %s of limits were deleted before", err, plural(total, "row"))
	}
	return a.emit(sweptList{list}, func(w io.Writer) {
		t := newTable("LIMIT", ">DELETED", ">BATCHES")
		for _, s := range list {
			t.row(printable(s.Limit), count(s.Deleted), fmt.Sprint(s.Batches))
		}
		t.print(w)
	})
}

// sweepNumbers are the arguments rate, period, kind, capacity, start and varies of a sweep. nil: those that are published.
func sweepNumbers(c *ratelimit.Config) []any {
	if c == nil {
		return []any{nil, nil, "token bucket", nil, nil, nil}
	}
	if c.Kind == kindSlots {
		return []any{nil, nil, c.Kind, *c.Capacity, nil, nil}
	}
	var varies *pgtype.Interval
	if c.Varies != "" {
		longest := intervalOf(c.Varies)
		varies = &longest
	}
	return []any{*c.Rate, intervalOf(c.Period), c.Kind, *c.Capacity, c.Start, varies}
}

// whyNothing says why no row of a limit can be swept, if none can.
func (a *app) whyNothing(ctx context.Context, name string, c *ratelimit.Config) error {
	var nothing, varies, overridden bool
	err := a.reading(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
			SELECT coalesce(s.nothing, false) AND s.kind IS NOT NULL, s.varies IS NOT NULL,
			       EXISTS (SELECT 1 FROM ratelimit.overrides AS o WHERE o.name = $1 AND o.key IS NULL
			               AND coalesce(least(o.until, o.removed_at), 'infinity') > now() - interval '1 day')
			  FROM ratelimit._sweep_numbers($1::text, $2::float8, $3::interval, $4::text, $5::float8, $6::timestamptz, $7::interval) AS s`,
			append([]any{name}, sweepNumbers(c)...)...).Scan(&nothing, &varies, &overridden)
	})
	switch {
	case err != nil || !nothing: // or it has no rows
	case varies && overridden:
		fmt.Fprintf(a.stderr, "Nothing of %s can be swept: within a day, an override of all keys changed numbers that only the program knows\n", printable(name))
	default:
		fmt.Fprintf(a.stderr, a.in("Nothing of %s can be swept: its definitions of the last 7 days differ in kind, period or start. `txlimit limits` shows them\n"), printable(name))
	}
	return err
}

// countOwing says how many rows of a limit that varies stay although they are idle, since they owe tokens: when these are there
// again, the program alone knows.
func (a *app) countOwing(ctx context.Context, name string, c *ratelimit.Config) error {
	var owing int64
	err := a.reading(ctx, func(tx pgx.Tx) error {
		var varies *pgtype.Interval // by itself, since on Citus the function reads a table. Slots in use are no debt.
		err := tx.QueryRow(ctx, `
			SELECT CASE WHEN s.kind <> 'slots' THEN s.varies END
			  FROM ratelimit._sweep_numbers($1::text, $2::float8, $3::interval, $4::text, $5::float8, $6::timestamptz, $7::interval) AS s`,
			append([]any{name}, sweepNumbers(c)...)...).Scan(&varies)
		if err != nil || varies == nil {
			return err
		}
		return tx.QueryRow(ctx, "SELECT count(*) FROM ratelimit.limits WHERE name = $1 AND value < 0 AND ts < now() - $2::interval", name, varies).Scan(&owing)
	})
	if owing > 0 {
		fmt.Fprintf(a.stderr, a.in("Not swept of %s: %s in debt, until the next use. `txlimit keys %s` lists what is below 0\n"),
			printable(name), plural(owing, "idle row"), shellQuote(name))
	}
	return err
}

// sweepHolds gives back the expired holds of all limits, and forgets those that are over.
func (a *app) sweepHolds(ctx context.Context) error {
	after := []any{"", "", ""}
	for {
		began := time.Now()
		var next [3]*string
		err := a.inTx(ctx, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, "SELECT next_name, next_key, next_id FROM ratelimit._sweep_holds($1::text, $2::text, $3::text, NULL)", after...).Scan(&next[0], &next[1], &next[2])
		})
		if err != nil || next[0] == nil {
			return err
		}
		for i := range next {
			after[i] = *next[i]
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(3 * time.Since(began)):
		}
	}
}

func (a *app) sweepOne(ctx context.Context, name string, c *ratelimit.Config) (s swept, err error) {
	s.Limit = name
	args := append([]any{name, ""}, sweepNumbers(c)...)
	for {
		began := time.Now()
		var deleted int64
		var next *string
		err := a.inTx(ctx, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, `SELECT deleted, next FROM ratelimit.sweep($1::text, first => $2::text, rate => $3::float8, period => $4::interval, kind => $5::text,
				capacity => $6::float8, start => $7::timestamptz, varies => $8::interval)`, args...).Scan(&deleted, &next)
		})
		if err != nil {
			return s, err
		}
		s.Deleted, s.Batches = s.Deleted+deleted, s.Batches+1
		if next == nil {
			return s, nil
		}
		args[1] = *next
		select {
		case <-ctx.Done():
			return s, ctx.Err()
		case <-time.After(3 * time.Since(began)):
		}
	}
}
