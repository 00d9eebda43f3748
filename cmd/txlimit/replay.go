package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/replay"
)

// replayed is what `replay` prints.
type replayed struct {
	Events     int               `json:"events"`
	Keys       int               `json:"keyCount"`
	Skipped    int               `json:"skipped"` // lines or rows with mistakes
	From       *time.Time        `json:"from"`
	To         *time.Time        `json:"to"`
	Candidates []replayCandidate `json:"candidates"`
}

type replayCandidate struct {
	Limit      ratelimit.Config `json:"definition"`
	Granted    int              `json:"granted"`
	Denied     int              `json:"denied"`
	KeysDenied int              `json:"keysDenied"`
	MostDenied []replayKey      `json:"mostDenied"`
	Suggested  *suggestion      `json:"suggested"` // nil: no capacity helps
}

type replayKey struct {
	Key         string   `json:"key"`
	Events      int      `json:"events"`
	Denied      int      `json:"denied"`
	WaitSeconds *float64 `json:"waitSeconds"` // the longest; nil: never granted
}

// suggestion is the smallest capacities, at the candidate's rate, that would have denied so few.
type suggestion struct {
	DenyNobody     float64 `json:"denyNobody"`
	DenyOneIn1000  float64 `json:"denyOneIn1000"`
	DenyOneInAHund float64 `json:"denyOneIn100"`
}

type replayFlags struct {
	log, format, query    string
	fields                replay.Fields
	reorder               string
	skip                  bool
	candidates, published []string
	file, svg             string
}

func (a *app) replayCommand() *cobra.Command {
	var r replayFlags
	c := &cobra.Command{
		Use:   "replay (--log FILE | --query SQL) (--candidate NUMBERS | --limits FILE | --published LIMIT)...",
		Short: "Say which numbers would have denied whom",
		Long: `Decide the calls of the past, from a log or a query, by limits that you consider: how many would have been denied, of which keys, how
long they would have waited, and which capacity would have denied nobody.

A log is a file, or - for the standard input, in one of these formats:
  csv       comma-separated values; fields are names of columns, or numbers from 1 if there is no header
  json      an object on each line; fields are names of members; user.id is a member of a member
  combined  the log of a web server; fields are host, user, method, path, status, bytes, agent ...; its time is known

A query has one to three columns: the time, a timestamptz; the key; the count. It runs in a transaction that can only read. Sort its
rows by time.

NUMBERS are a rate and a period, then what differs from the defaults: '10/1h', '10/1h,capacity=3', '1000/1d,kind=fixed window',
'10000/1 month,zone=Europe/Berlin'. --limits is a file as for txlimit publish. --published takes the limit's numbers from the database.

The log must have all calls, the denied ones too. A replay knows nothing of refunds, reservations, or what callers would have done.`,
		Example: `  txlimit replay --log messages.csv --time created_at --key user_id --candidate 10/1h,capacity=3 --candidate 10/1h
  txlimit replay --log access.log --format combined --key host --reorder 1m --skip-mistakes --candidate 100/1m --svg report.svg
  txlimit replay --query "SELECT created_at, user_id FROM messages WHERE created_at > now() - interval '7 days' ORDER BY 1" --published sendMessage`,
		Args: noArgs,
	}
	f := c.Flags()
	f.StringVar(&r.log, "log", "", "the log `file`, or - for the standard input")
	f.StringVar(&r.format, "format", "", "csv, json or combined (default: by the file's name: .csv, .json, .jsonl, .ndjson, .log)")
	f.StringVar(&r.fields.Time, "time", "", "the `field` of the time")
	f.StringVar(&r.fields.Key, "key", "", "the `field` of the key (default: all events count together)")
	f.StringVar(&r.fields.Count, "count", "", "the `field` of the tokens asked for (default: one each)")
	f.StringVar(&r.fields.Layout, "layout", "", "how times are written: a layout of Go, or s, ms, us, ns (default RFC 3339, or as Postgres)")
	f.StringVar(&r.query, "query", "", "the `SQL` that selects the events")
	f.StringVar(&r.reorder, "reorder", "", "sort events that are out of order by at most this `long`, such as 1m")
	f.BoolVar(&r.skip, "skip-mistakes", false, "leave out lines and rows that have no event, and say how many")
	f.StringArrayVarP(&r.candidates, "candidate", "c", nil, "the `numbers` of a limit to consider; may be repeated")
	f.StringVar(&r.file, "limits", "", "a `file` of limits to consider, as for publish")
	f.StringArrayVar(&r.published, "published", nil, "a `limit` whose published numbers to consider; may be repeated")
	f.StringVar(&r.svg, "svg", "", "write a picture to this `file`, too")
	choices(c, "format", "csv", "json", "combined")
	completeFlag(c, "published", func(cmd *cobra.Command, _ []string, begin string) ([]string, cobra.ShellCompDirective) {
		return a.completeLimits(cmd, nil, begin)
	})
	c.MarkFlagsOneRequired("log", "query")
	c.MarkFlagsMutuallyExclusive("log", "query")
	c.MarkFlagsOneRequired("candidate", "limits", "published")
	return a.do(c, look, func(ctx context.Context, _ []string) error { return a.replay(ctx, &r) })
}

func (a *app) replay(ctx context.Context, r *replayFlags) error {
	limits, err := a.replayLimits(ctx, r)
	if err != nil {
		return err
	}
	var report *replay.Report
	var skipped mistakes
	run := func(events iter.Seq2[replay.Event, error]) (err error) {
		if r.skip {
			events = skipped.leftOut(events)
		}
		if r.reorder != "" {
			within, err := time.ParseDuration(r.reorder)
			if err != nil || within <= 0 {
				return usagef("--reorder %q is not a duration, such as 1m", r.reorder)
			}
			events = replay.Reorder(events, within)
		}
		report, err = replay.Run(events, limits...)
		return err
	}
	if r.query != "" {
		err = a.within(ctx, pgx.TxOptions{AccessMode: pgx.ReadOnly}, "SET LOCAL timezone = 'UTC'", func(tx pgx.Tx) error {
			// The query is as in psql: with the role's search_path, and with its own names.
			if _, err := tx.Exec(ctx, "SET LOCAL search_path TO DEFAULT"); err != nil {
				return err
			}
			err := run(replay.Query(ctx, a.conn, r.query))
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok { // which is about the user's tables, not about ours
				return fmt.Errorf("--query: %s", strings.TrimSpace(pgErr.Message+". "+pgErr.Hint))
			}
			return err
		})
	} else {
		err = a.replayLog(r, run)
	}
	if err != nil {
		return namedError{err}
	}
	if r.svg != "" {
		if err := os.WriteFile(r.svg, []byte(report.SVG()), 0o644); err != nil {
			return err
		}
	}
	result := summary(report)
	result.Skipped = skipped.count
	if first := skipped.first; first != nil {
		fmt.Fprintf(a.stderr, "%s with mistakes left out. The first: %s\n", plural(int64(skipped.count), first.Unit), strings.TrimPrefix(oneLine(namedError{first}.Error()), "replay: "))
	}
	if report.Events == 0 {
		return a.nothing(result, "There are no events.")
	}
	return a.emit(result, func(w io.Writer) { fmt.Fprint(w, report) })
}

// namedError is an error whose text names flags instead of fields of package replay.
type namedError struct{ error }

func (e namedError) Unwrap() error { return e.error }

func (e namedError) Error() string {
	return strings.NewReplacer("set Fields.Layout", "see --layout", "or see Reorder", "or see --reorder").Replace(e.error.Error())
}

// replayLog runs fn on the events of the log.
func (a *app) replayLog(r *replayFlags, fn func(events iter.Seq2[replay.Event, error]) error) error {
	format := r.format
	if format == "" {
		for ending, f := range map[string]string{".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".log": "combined"} {
			if strings.HasSuffix(r.log, ending) {
				format = f
			}
		}
	}
	read := map[string]func(io.Reader, replay.Fields) iter.Seq2[replay.Event, error]{
		"csv": replay.CSV, "json": replay.JSONLines, "combined": replay.Combined,
	}[format]
	switch {
	case format == "":
		return usagef("the format of %s is not clear from its name: pass --format csv, json or combined", printable(r.log))
	case read == nil:
		return usagef("--format %q is not csv, json or combined", format)
	case format != "combined" && r.fields.Time == "":
		return usagef("--time is missing: the field that has the time of an event")
	}
	file, err := a.open(r.log)
	if err != nil {
		return err
	}
	defer file.Close()
	return fn(read(file, r.fields))
}

// mistakes are the lines or rows that were left out.
type mistakes struct {
	count int
	first *replay.MistakeError
}

// leftOut leaves out what has no event. Any other error is of the whole log: it stays.
func (m *mistakes) leftOut(events iter.Seq2[replay.Event, error]) iter.Seq2[replay.Event, error] {
	return func(yield func(replay.Event, error) bool) {
		for event, err := range events {
			if mistake, ok := errors.AsType[*replay.MistakeError](err); ok {
				if m.count++; m.first == nil {
					m.first = mistake
				}
			} else if !yield(event, err) {
				return
			}
		}
	}
}

// replayLimits are the limits to consider.
func (a *app) replayLimits(ctx context.Context, r *replayFlags) (limits []ratelimit.Limit, err error) {
	for _, text := range r.candidates {
		limit, err := parseCandidate(text)
		if err != nil {
			return nil, usagef("--candidate %q: %s", text, oneLine(err.Error()))
		}
		limits = append(limits, limit)
	}
	if r.file != "" {
		_, list, err := a.readLimits(r.file)
		if err != nil {
			return nil, err
		}
		limits = append(limits, list...)
	}
	if err := checkLimits(r.published); len(r.published) == 0 || err != nil {
		return limits, err
	}
	err = a.reading(ctx, func(tx pgx.Tx) error {
		for _, name := range r.published {
			defs, err := definitions(ctx, tx, &name)
			if err != nil {
				return err
			}
			i := slices.IndexFunc(defs, func(d definition) bool { return d.Counts })
			if i < 0 {
				list, err := collect(ctx, tx, pgx.RowTo[string], "SELECT DISTINCT name FROM ratelimit.definitions WHERE "+counting+" ORDER BY 1")
				if err != nil {
					return err
				}
				return noSuchLimit(name, list)
			}
			limit, err := defs[i].Limit()
			if err != nil {
				return err
			}
			if defs[i].Varies != "" {
				fmt.Fprintf(a.stderr, "The keys of %s may have numbers of their own. It is replayed as if all had those of the definition.\n", printable(name))
			}
			limits = append(limits, limit)
		}
		return nil
	})
	return limits, err
}

// parseCandidate reads a limit as a flag has it: 10/1h,capacity=3.
func parseCandidate(text string) (ratelimit.Limit, error) {
	first, options, _ := strings.Cut(text, ",")
	rate, period, ok := strings.Cut(first, "/")
	tokens, err := strconv.ParseFloat(strings.TrimSpace(rate), 64)
	if !ok || err != nil {
		return ratelimit.Limit{}, errors.New("begins with a rate and a period, such as 10/1h")
	}
	c := ratelimit.Config{Name: "candidate", Kind: "token bucket", Rate: &tokens, Period: strings.TrimSpace(period)}
	if strings.HasPrefix(c.Period, "1 ") {
		c.Kind = "calendar window"
	}
	for option := range strings.SplitSeq(options, ",") {
		if option == "" {
			continue
		}
		name, value, _ := strings.Cut(option, "=")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		switch name {
		case "kind":
			c.Kind = value
		case "name":
			c.Name = value
		case "zone":
			c.Zone = value
		case "anchor":
			c.Anchor = value
		case "capacity":
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return ratelimit.Limit{}, fmt.Errorf("capacity %q is not a number", value)
			}
			c.Capacity = &n
		case "start":
			t, err := time.Parse(time.RFC3339, value)
			if err != nil {
				return ratelimit.Limit{}, fmt.Errorf("start %q is not an instant, such as 2026-01-31T00:00:00Z", value)
			}
			c.Start = &t
		default:
			return ratelimit.Limit{}, fmt.Errorf("%q is not capacity, kind, start, zone, anchor or name", name)
		}
	}
	return c.Limit()
}

// summary is a report for JSON.
func summary(report *replay.Report) replayed {
	result := replayed{Events: report.Events, Keys: report.Keys, Candidates: []replayCandidate{}}
	if report.Events > 0 {
		result.From, result.To = &report.From, &report.To
	}
	for _, c := range report.Candidates {
		one := replayCandidate{Limit: c.Limit.Config(), Granted: c.Granted, Denied: c.Denied, KeysDenied: c.KeysDenied, MostDenied: []replayKey{}}
		for _, k := range c.MostDenied {
			key := replayKey{Key: k.Key, Events: k.Events, Denied: k.Denied}
			if seconds := k.Wait.Seconds(); k.Wait < math.MaxInt64/2 {
				key.WaitSeconds = &seconds
			}
			one.MostDenied = append(one.MostDenied, key)
		}
		if nobody, ok := c.Suggest(0); ok {
			thousand, _ := c.Suggest(0.001)
			hundred, _ := c.Suggest(0.01)
			one.Suggested = &suggestion{nobody, thousand, hundred}
		}
		result.Candidates = append(result.Candidates, one)
	}
	return result
}
