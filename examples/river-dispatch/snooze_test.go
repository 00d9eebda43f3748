package main

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/riverqueue/river/rivertype"

	"github.com/txlimit/txlimit/ratelimit"
)

// A job may be snoozed many times, and then be blocked for days, or until the year 9999: nothing overflows.
func TestSnoozesAreSpreadByAMinuteAtMost(t *testing.T) {
	for _, wait := range []time.Duration{0, time.Nanosecond, takes, time.Second, time.Hour, 24 * time.Hour, 1000 * 24 * time.Hour, math.MaxInt64} {
		for _, snoozes := range []int{0, 1, 10, 20, 1000} {
			now := time.Now()
			denied := &ratelimit.DeniedError{At: now, RetryAt: now.Add(wait), RetryAfter: wait, Reason: ratelimit.ReasonBlock}
			err := snooze(denied, fmt.Appendf(nil, `{"snoozes": %d}`, snoozes), true)
			snoozed, is := errors.AsType[*rivertype.JobSnoozeError](err)
			if !is || snoozed.Duration < min(wait, math.MaxInt64-most) || snoozed.Duration-most > wait {
				t.Errorf("%v after %d snoozes: %v", wait, snoozes, err)
			}
		}
	}
}
