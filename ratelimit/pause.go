package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// maxPause is how long a pause may be: an epoch that was read as seconds, or seconds read as an epoch, are longer.
const maxPause = 31 * 24 * time.Hour

// Pause empties token buckets, and refills nothing for a time, such as a provider's Retry-After. It returns the end, by
// the database's clock. In a transaction, the pause holds once that is committed, and all keys are locked until then.
//
// At most Count tokens are left, none by default; Pause never adds one. Of two pauses, the later end and the lower
// balance hold. With a time of 0 or less, or for a rate of 0, nothing is sent, and until is zero.
//
// A reservation from before keeps its instant. A [Limiter.Refund], and a hold that ends, repay only what is owed.
// [Limiter.Resume] ends a pause, and so does [Limiter.Reset]. docs/scheduling.md has more.
//
// [ErrInvalid], before anything is sent, are a limit that is no token bucket, two requests for one key, and a time of
// more than 31 days or, above 0, under a millisecond. Above READ COMMITTED, another transaction's change of a key is
// 40001. Outside a transaction, after an error, the limits may be paused: call it again.
func (l *Limiter) Pause(ctx context.Context, db DB, lasts time.Duration, requests ...Request) (until time.Time, err error) {
	result, err := l.do(ctx, db, verbPause, about{lasts: lasts}, requests)
	return result.pausedUntil, err
}

// Resume ends pauses: token buckets that are paused are refilled from now on, by the clock of the call. A limit that is
// not paused stays as it is. A Count other than 1 is [ErrInvalid]. Transactions and errors are as for [Limiter.Pause].
// A [Limiter.Wait] that sleeps does not notice.
//
// Above READ COMMITTED, a pause that was committed after the snapshot is 40001, unless it inserted the key's row: then
// it stays.
func (l *Limiter) Resume(ctx context.Context, db DB, requests ...Request) error {
	_, err := l.do(ctx, db, verbResume, about{}, requests)
	return err
}

// validatePause validates how long a Pause lasts. There is nothing to do for one that is over.
func (c *call) validatePause(lasts time.Duration) error {
	switch {
	case lasts > maxPause || lasts < -maxPause:
		return invalidCall(c.asked, fmt.Sprintf("a pause of %v is longer than 31 days", lasts))
	case lasts > 0 && lasts < time.Millisecond:
		return invalidCall(c.asked, fmt.Sprintf("a pause of %v is less than 1ms (a bare number in Go is nanoseconds: write 60*time.Second)", lasts))
	}
	if c.lasts = lasts.Truncate(time.Microsecond); c.lasts <= 0 {
		c.rowless, c.demands = append(c.rowless, c.demands...), nil
	}
	return nil
}

// pause is the statement of a Pause.
func (c *call) pause(now *time.Time) statement {
	m := columnsOf(c.demands)
	return statement{sql: dbsqlc.Pause, demands: len(c.demands), read: readPause, args: arguments(
		m.names, m.keys,
		m.rates, m.periods, m.capacities, shardsOf(c.demands),
		m.counts, now, c.lasts,
	)}
}

// readPause reads until when all limits are paused.
func readPause(reply pgx.Row, _ int) (*answer, error) {
	var until time.Time
	if err := reply.Scan(&until); err != nil {
		return nil, err
	}
	return &answer{granted: true, until: algebra.At(until)}, nil
}

// resume is the statement of a Resume.
func (c *call) resume(now *time.Time) statement {
	m := columnsOf(c.demands)
	return statement{sql: dbsqlc.Resume, demands: len(c.demands), read: readUnused[int32], args: arguments(m.names, m.keys, now)}
}
