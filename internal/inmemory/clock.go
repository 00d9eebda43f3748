package inmemory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// start is where the clock stands at first. It is always the same, so that the windows of a limit begin at the same instants
// in every run of a test.
var start = time.Date(2030, time.January, 1, 12, 0, 0, 0, time.UTC)

// sleeper is a SleepUntil that has not ended.
type sleeper struct {
	until algebra.Micros
	done  chan struct{}
}

// Now is the database's clock, to the microsecond, in UTC.
func (db *DB) Now() time.Time {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.now.Time()
}

// Advance moves the clock by d, which may be negative.
func (db *DB) Advance(d time.Duration) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.set(db.now.Time().Add(d))
}

// Set sets the clock. It panics if t is not between the years 1000 and 9999.
func (db *DB) Set(t time.Time) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.set(t)
}

// set sets the clock and wakes those whose time has come. db.mu is held.
func (db *DB) set(t time.Time) {
	if year := t.UTC().Year(); year < 1000 || year > 9999 {
		panic(fmt.Sprintf("ratelimittest: the clock cannot be set to %v, which is not between the years 1000 and 9999", t))
	}
	db.now = algebra.At(t)
	db.sleepers = slices.DeleteFunc(db.sleepers, func(s sleeper) bool {
		if s.until > db.now {
			return false
		}
		close(s.done)
		return true
	})
}

// SleepUntil waits until another goroutine has moved the clock to t, or until ctx ends, and returns the error of ctx.
func (db *DB) SleepUntil(ctx context.Context, t time.Time) error {
	db.mu.Lock()
	s := sleeper{algebra.At(t), make(chan struct{})}
	if s.until <= db.now {
		db.mu.Unlock()
		return ctx.Err()
	}
	db.sleepers = append(db.sleepers, s)
	db.mu.Unlock()
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	db.sleepers = slices.DeleteFunc(db.sleepers, func(other sleeper) bool { return other.done == s.done })
	return ctx.Err()
}
