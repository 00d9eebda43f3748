package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// limitList is what `limits` prints.
type limitList struct {
	Limits     []limitSummary `json:"limits"`
	Unreadable bool           `json:"usageUnreadable"` // the role may not read what was counted
}

type limitSummary struct {
	Limit       string       `json:"limit"`
	Definitions []definition `json:"definitions"`
	Overrides   int64        `json:"overrideCount"` // in force
	Keys        int64        `json:"keyCount"`
	KeysExact   bool         `json:"keyCountExact"` // false: it is an estimate
	LastHour    *lastHour    `json:"lastHour"`      // nil: no recorder has counted
}

// lastHour is what the usage tables say.
type lastHour struct {
	Granted int64 `json:"granted"`
	Denied  int64 `json:"denied"`
	Failed  int64 `json:"failed"`
}

func (a *app) limitsCommand() *cobra.Command {
	var exact bool
	c := a.do(&cobra.Command{
		Use:   "limits [--count]",
		Short: "List all limits: numbers, overrides, keys, last hour",
		Long: `List all limits that a program has published, or that have rows or an override in force: those that denied most in the last hour
first, then by name.

PROGRAM and NUMBERS are the definition that counts for this command, the page and SQL: the newest that a program has published. Below are
those of other programs, with since when, and those that a program has replaced, with until when. They count for sweeps for another 7 days. KEYS are the keys with rows. From 1000 on it is the planner's
estimate, with a ~ before it. GRANTED 1H and DENIED 1H are the requests of the last hour, if programs have a usage.Recorder. FAILED
1H is there if any failed: the database failed, or they were invalid or above the capacity. Canceled calls do not count.`,
		Example: `  txlimit limits
  txlimit limits --json | jq -r '.limits[] | select(.lastHour.denied > 100) | .limit'`,
		Args: noArgs,
	}, look, func(ctx context.Context, _ []string) error {
		return a.answering(ctx, func(tx pgx.Tx) (func() error, error) { return a.limits(ctx, tx, exact) })
	})
	c.Flags().BoolVar(&exact, "count", false, "count all keys, which reads the whole table")
	return c
}

func (a *app) limits(ctx context.Context, tx pgx.Tx, exact bool) (answer func() error, err error) {
	names, err := knownLimits(ctx, tx)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return a.saysNothing(limitList{Limits: []limitSummary{}}, "There are no limits: no program has published any (ratelimit.Open, `txlimit publish`), and none has rows."), nil
	}
	list := make([]limitSummary, len(names))
	for i, name := range names {
		list[i] = limitSummary{Limit: name, Definitions: []definition{}}
	}
	defs, err := definitions(ctx, tx, nil)
	if err != nil {
		return nil, err
	}
	for _, d := range defs {
		if i, ok := slices.BinarySearch(names, d.Name); ok {
			list[i].Definitions = append(list[i].Definitions, d)
		}
	}
	type named struct {
		Name string
		N    int64
	}
	inForce, err := collect(ctx, tx, pgx.RowToStructByPos[named], "SELECT o.name, count(*) FROM ratelimit._in_force(NULL, NULL, clock_timestamp()) AS o GROUP BY o.name")
	if err != nil {
		return nil, err
	}
	for _, o := range inForce {
		if i, ok := slices.BinarySearch(names, o.Name); ok {
			list[i].Overrides = o.N
		}
	}
	if err := countKeys(ctx, tx, names, list, exact); err != nil {
		return nil, err
	}
	result := limitList{Limits: list}
	if err := a.addUsage(ctx, tx, names, &result); err != nil {
		return nil, err
	}
	slices.SortStableFunc(list, func(x, y limitSummary) int { return cmp.Compare(y.denied(), x.denied()) }) // then by name
	return a.says(result, func(w io.Writer) { printLimits(w, list) }), nil
}

// denied is what a limit denied in the last hour, or -1 if that is not known.
func (l *limitSummary) denied() int64 {
	if l.LastHour == nil {
		return -1
	}
	return l.LastHour.Denied
}

// bound is how many keys are counted.
const bound = 1000

// countKeys counts the keys of each limit, or has the planner estimate them.
func countKeys(ctx context.Context, tx pgx.Tx, names []string, list []limitSummary, exact bool) error {
	most := int64(bound)
	if exact {
		most = 1 << 62
	}
	type counted struct {
		Keys, Rows int64
		Shards     float64
	}
	found, err := collect(ctx, tx, pgx.RowToStructByPos[counted], `
		SELECT k.keys, k.rows, coalesce(k.shards, 1)::double precision
		  FROM unnest($1::text[]) WITH ORDINALITY AS n (name, i)
		 CROSS JOIN LATERAL (
			SELECT count(DISTINCT r.key) AS keys, count(*) AS rows, avg(r.shards) AS shards
			  FROM (SELECT r.key, r.shards FROM ratelimit.limits AS r WHERE r.name = n.name ORDER BY r.key LIMIT $2) AS r
		  ) AS k
		 ORDER BY n.i`, names, most)
	if err != nil {
		return err
	}
	for i, f := range found {
		list[i].Keys, list[i].KeysExact = f.Keys, f.Rows < most
		if list[i].KeysExact {
			continue
		}
		rows, err := estimate(ctx, tx, names[i])
		if err != nil {
			return err
		}
		list[i].Keys = max(f.Keys, int64(rows/max(f.Shards, 1)))
	}
	return nil
}

// estimate is how many rows the planner thinks that a limit has.
func estimate(ctx context.Context, tx pgx.Tx, name string) (rows float64, err error) {
	var text string
	// EXPLAIN takes no parameters that are sent apart.
	err = tx.QueryRow(ctx, "EXPLAIN (FORMAT JSON) SELECT FROM ratelimit.limits WHERE name = $1", pgx.QueryExecModeSimpleProtocol, name).Scan(&text)
	if err != nil {
		return 0, err
	}
	var plans []struct {
		Plan struct {
			Rows float64 `json:"Plan Rows"`
		}
	}
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		return 0, err
	}
	if len(plans) == 0 {
		return 0, errors.New("EXPLAIN returned no plan")
	}
	return plans[0].Plan.Rows, nil
}

// keysOf counts the keys of a limit that have rows, up to the bound.
func keysOf(ctx context.Context, db querier, name string) (n int64, err error) {
	err = db.QueryRow(ctx, "SELECT count(*) FROM (SELECT DISTINCT key FROM ratelimit.limits WHERE name = $1 AND key <> '' ORDER BY key LIMIT $2) AS k", name, bound).Scan(&n)
	return n, err
}

// keysWith says that a limit has keys, and where to look.
func (a *app) keysWith(name string, n int64) string {
	number := plural(n, "key")
	if n >= bound {
		number = count(n) + " or more keys"
	}
	return fmt.Sprintf(a.in("%s has %s with rows: see `txlimit keys %s`"), printable(name), number, shellQuote(name))
}

// hasUsage reports whether a usage table is there and may be read. If it is there and may not be read, it says so.
func (a *app) hasUsage(ctx context.Context, db querier, table string, unreadable *bool) (has bool, err error) {
	var role string
	err = db.QueryRow(ctx, "SELECT t IS NOT NULL AND may, t IS NOT NULL AND NOT may, current_user FROM to_regclass('"+table+"') AS t, has_table_privilege(t, 'SELECT') AS may").
		Scan(&has, unreadable, &role)
	if *unreadable {
		fmt.Fprintf(a.stderr, "The role may not read what was counted. %s\n", a.grant(role, look))
	}
	return has, err
}

// addUsage adds what was counted in the last hour.
func (a *app) addUsage(ctx context.Context, tx pgx.Tx, names []string, to *limitList) error {
	has, err := a.hasUsage(ctx, tx, "ratelimit.usage", &to.Unreadable)
	if err != nil || !has {
		return err
	}
	type used struct {
		Name string
		lastHour
	}
	rows, err := collect(ctx, tx, func(row pgx.CollectableRow) (u used, err error) {
		err = row.Scan(&u.Name, &u.Granted, &u.Denied, &u.Failed)
		return u, err
	}, "SELECT name, least(sum(granted), 9223372036854775807)::bigint, least(sum(denied), 9223372036854775807)::bigint, least(sum(failed), 9223372036854775807)::bigint FROM ratelimit.usage() GROUP BY name")
	for _, u := range rows {
		if i, ok := slices.BinarySearch(names, u.Name); ok {
			to.Limits[i].LastHour = &u.lastHour
		}
	}
	return err
}

func printLimits(w io.Writer, list []limitSummary) {
	titles := []string{"LIMIT", "PROGRAM", "NUMBERS", ">KEYS", ">OVERRIDES", ">GRANTED 1H", ">DENIED 1H"}
	anyFailed := slices.ContainsFunc(list, func(l limitSummary) bool { return l.LastHour != nil && l.LastHour.Failed > 0 })
	if anyFailed {
		titles = append(titles, ">FAILED 1H")
	}
	t := newTable(titles...)
	for _, l := range list {
		keys, granted, denied, failed := count(l.Keys), "-", "-", "-"
		if !l.KeysExact {
			keys = "~" + keys
		}
		if l.LastHour != nil {
			granted, denied, failed = count(l.LastHour.Granted), count(l.LastHour.Denied), count(l.LastHour.Failed)
		}
		cells := []string{short(l.Limit, 40), "-", "not published", keys, count(l.Overrides), granted, denied}
		if anyFailed {
			cells = append(cells, failed)
		}
		if len(l.Definitions) == 0 {
			t.row(cells...)
		}
		// The programs whose definition counts share a line, which is the first.
		programs := []string{}
		for i, d := range l.Definitions {
			if d.Counts {
				programs = append(programs, short(d.Program, 30))
			}
			if d.Counts && i+1 < len(l.Definitions) && l.Definitions[i+1].Counts {
				continue
			}
			cells[1], cells[2] = strings.Join(programs, ", "), describe(d.Config)
			if !d.Counts && !d.Current && cells[2] == describe(l.Definitions[0].Config) && l.Definitions[0].Counts {
				continue // which says nothing
			}
			if !d.Counts {
				cells[1], cells[2] = short(d.Program, 30), since(&d)+": "+cells[2]
			}
			t.row(cells...)
			cells = make([]string, len(titles))
		}
	}
	t.print(w)
}
