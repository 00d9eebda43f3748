package ratelimit

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"
)

// TestDuringNeedsNoServerToRefuse: what Hold refuses without a server, During does too, on a *sql.DB, whose connection it takes first. The observer is told once.
func TestDuringNeedsNoServerToRefuse(t *testing.T) {
	down := &fakeDriver{}
	db := sql.OpenDB(down)
	t.Cleanup(func() { _ = db.Close() })
	slots := Slots("slots", 5)
	var seen []Decision
	limits := Limiter{Observer: func(_ context.Context, d Decision) { seen = append(seen, d) }}
	for name, row := range map[string]struct {
		id       string
		requests []Request
		is       error
		reason   Reason
	}{
		"an id":              {"~job\n", []Request{slots.Key("acme")}, ErrInvalid, ""},
		"a key":              {"job", []Request{slots.Key("")}, ErrInvalid, ""},
		"no request":         {"job", nil, ErrInvalid, ""},
		"another definition": {"job", []Request{slots.Key("acme"), Slots("slots", 6).Key("bob")}, ErrInvalid, ""},
		"a plan":             {"job", []Request{slots.Key("acme"), Slots("none", 0).Key("acme")}, ErrDenied, ReasonPlan},
		"too many":           {"job", []Request{slots.Key("acme").Count(6)}, ErrExceedsCapacity, ""},
	} {
		seen = nil
		during := limits.During(t.Context(), SQL(db), row.id, time.Minute, func(context.Context, Held) ([]Request, error) {
			t.Errorf("%s: it was called", name)
			return nil, nil
		}, row.requests...)
		_, hold := limits.Hold(t.Context(), SQL(db), row.id, time.Minute, row.requests...)
		if !errors.Is(during, row.is) || during.Error() != hold.Error() {
			t.Errorf("%s: %v, and a Hold is %v", name, during, hold)
		}
		if denial, _ := errors.AsType[*DeniedError](during); row.reason != "" && (denial == nil || denial.Reason != row.reason || denial.Requests[1].OK) {
			t.Errorf("%s: %+v", name, denial)
		}
		if len(seen) != 2 || seen[0].Verb != seen[1].Verb || seen[0].Err.Error() != seen[1].Err.Error() {
			t.Errorf("%s: the observer has seen %+v", name, seen)
		}
	}
	if asked := down.asked.Load(); asked != 0 {
		t.Errorf("the server was asked %d times", asked)
	}
	err := limits.During(t.Context(), SQL(db), "job", time.Minute, func(context.Context, Held) ([]Request, error) { return nil, nil }, slots.Key("acme"))
	if err == nil || errors.Is(err, ErrInvalid) || errors.Is(err, ErrDenied) || down.asked.Load() != 1 {
		t.Errorf("what is valid: %v, and the server was asked %d times", err, down.asked.Load())
	}
}
