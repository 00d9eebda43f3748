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

// Pause empties token buckets, and refills nothing for a time. It is for what a program is told while it works, such as
// a provider's Retry-After: from the first 429 on, no worker of any process calls until it is over.
//
//	response, err := client.Do(request)
//	if err == nil && response.StatusCode == http.StatusTooManyRequests {
//		_, err = limits.Pause(ctx, pool, retryAfter(response), provider.Key(account))
//	}
//
// The time is counted by the clock that decides, the database's: so this process's clock need not be right. Of an
// instant that a provider names, take its Date off. until is when all of the limits are refilled, by that clock: later
// than asked for if one was paused for longer. With a time of 0 or less, as of a Retry-After that has passed, there is
// nothing to do: nothing is sent, and until is zero.
//
// At most Count tokens are left, none by default: Count(3) if the provider says that 3 calls remain. Pause never adds a token, and never
// ends a pause sooner: of two, the later end and the lower balance hold.
//
// Denials, RetryAt and waits are right meanwhile. A [Limiter.Reserve] gets an instant after it; one that was made
// before keeps its own, so look whether the work is still wanted then. A [Limiter.Refund], and a hold that is given
// back, repay only what is owed meanwhile. [Limiter.Resume] ends a pause; [Limiter.Reset] does, too, and makes the key
// full. [Balance] says until when a key is paused.
//
// Numbers that a [Limiter.Override] sets count. A block, or an override that lifts the limit, goes on to decide, and the
// pause is there when it ends. A limit whose rate is 0 grants nothing anyway: nothing is sent, and until is zero.
// [ErrInvalid], before anything is sent, are a limit that is no token bucket (for a quota beside it, use another limit),
// two requests for one key, and a time of more than 31 days, also below zero, or of less than a microsecond: it was read
// wrong.
//
// In a transaction, the pause holds once that is committed, and all keys are locked until then: commit soon, since the other workers wait.
// Above READ COMMITTED, another transaction's change of a key is 40001. On a [Coalescer], its pool is used. Outside a transaction, after an
// error, the limits may have been paused all the same: call it again.
func (l *Limiter) Pause(ctx context.Context, db DB, lasts time.Duration, requests ...Request) (until time.Time, err error) {
	result, err := l.do(ctx, db, verbPause, about{lasts: lasts}, requests)
	return result.pausedUntil, err
}

// Resume ends pauses: token buckets that are paused are refilled from now on, by the clock of the call. (A clock that is behind refills at
// once what others wait for.) What a [Limiter.Pause] emptied stays gone. A limit that is not paused stays as it is. Counts are ignored. A
// [Limiter.Wait] that sleeps until the end of the pause does not notice. [ErrInvalid] is a limit that is no token bucket.
//
// In REPEATABLE READ and SERIALIZABLE, a pause that was committed after the transaction's snapshot is 40001, unless it inserted the key's row:
// then it is not seen, and stays. For the rest, it is as Pause.
func (l *Limiter) Resume(ctx context.Context, db DB, requests ...Request) error {
	_, err := l.do(ctx, db, verbResume, about{}, requests)
	return err
}

// validatePause validates how long a Pause lasts. There is nothing to do for one that is over.
func (c *call) validatePause(lasts time.Duration) error {
	switch {
	case lasts > maxPause || lasts < -maxPause:
		return invalidCall(c.asked, fmt.Sprintf("a pause of %v is longer than 31 days", lasts))
	case lasts > 0 && lasts < time.Microsecond:
		return invalidCall(c.asked, fmt.Sprintf("a pause of %v is less than 1µs (a bare number in Go is nanoseconds: write 60*time.Second)", lasts))
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
