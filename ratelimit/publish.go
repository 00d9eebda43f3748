package ratelimit

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/handles"
)

// Publish writes down the limits of a program for the tool, the page, SQL by hand and sweeps. In a transaction, others
// that publish wait until it ends. Pass all limits, at least one, each name once; program is its name, 1 to 255 bytes.
// A program that starts uses [Open].
//
// db is a pool, a connection, a READ COMMITTED transaction (above it: SQLSTATE RL003), or [SQL] of one. The role needs
// the word consume (ratelimit.grant). [ErrInvalid], before anything is sent, are also a limit made by [Limit.With], and
// the pool of a transaction inside its function ([OutsideTx]). It is SQLSTATE 22023, and nothing is written, if another
// program has the name with another kind, period or [Start], or, without [Varies], another [Zone] or [Anchor].
func (l *Limiter) Publish(ctx context.Context, db DB, program string, limits ...Limit) error {
	if outside(ctx, db) {
		return fmt.Errorf("%w: %s", ErrInvalid, outsideText("Publish", "pass tx instead of the pool"))
	}
	_, err := l.publish(ctx, db, program, pgtype.Bool{}, limits)
	return err
}

// publish publishes. heartbeat is that of the SQL function ratelimit._publish.
func (l *Limiter) publish(ctx context.Context, db DB, program string, heartbeat pgtype.Bool, limits []Limit) (row dbsqlc.PublishRow, err error) {
	if noDatabase(db) {
		return row, fmt.Errorf("%w: %s", ErrInvalid, noDatabaseText)
	}
	if err := checkText("program", program, maxNameLen); err != nil {
		return row, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if coalescer, ok := coalescerOf(db); ok {
		db = coalescer.Pool
	}
	if len(limits) == 0 {
		return row, fmt.Errorf("%w: publish: there are no limits: to withdraw those of program %q, use the SQL function ratelimit.withdraw, or `txlimit withdraw`", ErrInvalid, program)
	}
	if err := definitionsOnly(limits); err != nil {
		return row, err
	}
	definitions := make([]definition, 0, len(limits))
	for _, limit := range limits {
		definitions = append(definitions, limit.published())
	}
	text, err := json.Marshal(definitions)
	if err != nil {
		return row, err
	}
	send := func(db DB) (err error) {
		row, err = wire{db: db, schema: l.Schema}.queries().Publish(ctx, dbsqlc.PublishParams{Program: program, Definitions: string(text), Heartbeat: heartbeat})
		return err
	}
	switch {
	case isInMemory(db): // which has no such table
		row.Counts.Bool = true
	case handles.IsTx(db):
		err = send(db)
	default:
		err = retry(ctx, defaultAttempts, nil, func() (committing bool, err error) { return true, send(db) })
		if sqlState(err) == stateIsolation { // the database's default level is higher, and the lists have to be changed
			if inTx, no := l.readCommitted(db); no == nil {
				err = inTx(ctx, func(_ context.Context, tx DB) error { return send(tx) })
			}
		}
	}
	if err != nil {
		return row, explain("publish", err)
	}
	return row, nil
}

// definition is a limit in the form of the SQL function ratelimit.publish.
type definition struct {
	Name        string     `json:"name"`
	Kind        string     `json:"kind"`
	Rate        *float64   `json:"rate,omitempty"`
	Period      string     `json:"period,omitempty"`
	Capacity    *float64   `json:"capacity,omitempty"`
	MaxReserved *float64   `json:"max_reserved,omitempty"`
	Start       *time.Time `json:"start,omitempty"`
	Shards      int        `json:"shards,omitempty"`
	Zone        string     `json:"zone,omitempty"`
	Anchor      string     `json:"anchor,omitempty"`
	Varies      string     `json:"varies,omitempty"`
}

func (l Limit) published() definition {
	c := l.Config()
	d := definition{
		Name: c.Name, Kind: c.Kind, Rate: c.Rate, Capacity: c.Capacity, MaxReserved: c.MaxReserved, Start: c.Start, Shards: c.Shards,
		Zone: c.Zone, Anchor: c.Anchor,
	}
	switch {
	case l.unlimited(), l.slots:
	case l.onCalendar():
		d.Period = l.calendar.Interval()
	default:
		d.Period = intervalText(l.numbers.Period)
	}
	if l.doesVary() {
		d.Varies = intervalText(l.varies)
	}
	return d
}

// intervalText is a duration for Postgres, of days and a part of a day.
func intervalText(d time.Duration) string {
	days, rest := d/day, d%day
	switch {
	case days == 0:
		return clockText(rest)
	case rest == 0:
		return fmt.Sprintf("%d days", days)
	}
	return fmt.Sprintf("%d days %s", days, clockText(rest))
}

// clockText is a duration for Postgres, in hours: a day is 24 of them in every zone. Before PostgreSQL 15, its field
// of microseconds is too small for half an hour, and that of seconds for 68 years.
func clockText(d time.Duration) string {
	n := d.Microseconds()
	return fmt.Sprintf("%02d:%02d:%02d.%06d", n/3_600_000_000, n/60_000_000%60, n/1_000_000%60, n%1_000_000)
}
