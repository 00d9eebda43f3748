package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// inMemory is the Invitations of unit tests.
type inMemory map[string]bool

func (m inMemory) Add(_ context.Context, _ pgx.Tx, _, to string) error {
	if m[to] {
		return ErrInvited
	}
	m[to] = true
	return nil
}

func TestTwoInvitationsADay(t *testing.T) {
	db := ratelimittest.New(t)
	service := &Service{DB: db, Invitations: inMemory{}}
	for _, to := range []string{"bob", "cid"} {
		if err := service.Invite(t.Context(), "ann", to); err != nil {
			t.Fatal(err)
		}
	}
	err := service.Invite(t.Context(), "ann", "dan")
	denial, denied := errors.AsType[*ratelimit.DeniedError](err)
	if !denied || denial.RetryAfter != 12*time.Hour {
		t.Fatalf("the third: %v, want a denial for 12 hours", err)
	}
	db.Advance(12 * time.Hour)
	if err := service.Invite(t.Context(), "ann", "dan"); err != nil {
		t.Errorf("12 hours later: %v", err)
	}
}

func TestAnInvitationThatIsNotStoredCostsNothing(t *testing.T) {
	service := &Service{DB: ratelimittest.New(t), Invitations: inMemory{"bob": true}}
	for range 5 {
		if err := service.Invite(t.Context(), "ann", "bob"); !errors.Is(err, ErrInvited) {
			t.Fatal(err)
		}
	}
	for _, to := range []string{"cid", "dan"} {
		if err := service.Invite(t.Context(), "ann", to); err != nil {
			t.Error(err)
		}
	}
}
