package main

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/calendar"
)

// duration reads a duration, such as 90s, 2h30m or 7d, and returns it as an interval.
func duration(flag, text string) (interval pgtype.Interval, err error) {
	d, unit, err := calendar.ParsePeriod(text)
	if err != nil || unit != "" || d <= 0 {
		return interval, usagef("%s %q is not a duration, such as 90s, 2h30m or 7d", flag, text)
	}
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}, nil
}

// end is when an override ends, by --for, --until or --forever.
type end struct {
	length, until string
	forever       bool
}

func (e *end) flags(command *cobra.Command) {
	command.Flags().StringVar(&e.length, "for", "", "for how `long`: 90s, 2h30m, 7d")
	command.Flags().StringVar(&e.until, "until", "", "until `when`: \"2026-01-31 15:04\", in UTC, or RFC 3339")
	command.Flags().BoolVar(&e.forever, "forever", false, "without an end")
	command.MarkFlagsMutuallyExclusive("for", "until", "forever")
}

// get returns the first two as Postgres takes them. Without an end, both are nil.
func (e *end) get() (length *pgtype.Interval, until *time.Time, err error) {
	if e.length != "" {
		text, err := duration("--for", e.length)
		return &text, nil, err
	}
	switch {
	case e.until == "" && e.forever:
		return nil, nil, nil
	case e.until == "":
		return nil, nil, usagef("say when it ends: --for 2h, --until WHEN or --forever")
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02 15:04:05Z", "2006-01-02 15:04:05", "2006-01-02 15:04", time.DateOnly} {
		if t, err := time.Parse(layout, e.until); err == nil {
			return nil, &t, nil
		}
	}
	return nil, nil, usagef("--until %q is not an instant, such as \"2026-01-31 15:04\" (in UTC) or 2026-01-31T15:04:05+02:00", e.until)
}
