package ratelimit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// TestAnUnknownOutcome classifies errors of COMMIT. integration_test/faults causes them on real servers.
func TestAnUnknownOutcome(t *testing.T) {
	state := func(code string) error { return fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: code}) }
	for _, test := range []struct {
		err     error
		unknown bool
	}{
		{nil, false},
		{io.ErrUnexpectedEOF, true},
		{driver.ErrBadConn, true},
		{context.DeadlineExceeded, true},
		{pgconn.ErrConnClosed, true}, // although pgx calls it safe to retry

		{state("40001"), false},
		{state("40P01"), false},
		{state("23505"), false}, // a deferred constraint
		{state("57014"), false},
		{state("PT429"), false},
		{state("40003"), true}, // statement_completion_unknown
		{state("08P01"), true}, // PgBouncer: server conn crashed?
		{state("57P01"), true},
		{state("57P02"), true},
		{state("53100"), true}, // PANIC: could not write to file
		{state("58030"), true},
		{state("XX000"), true},

		{&pgconn.ConnectError{}, false},
		{unsentError{context.DeadlineExceeded}, false},
		{pgx.ErrTxCommitRollback, false},
		{sql.ErrTxDone, true}, // the function ended the transaction, perhaps by a commit
	} {
		err := unknownUnless(test.err)
		if got := errors.Is(err, ErrUnknownOutcome); got != test.unknown || !errors.Is(err, test.err) {
			t.Errorf("%v: %v, unknown %v, want %v", test.err, err, got, test.unknown)
		}
	}
}

func TestGivingUpTellsTheReasonThatTheServerGave(t *testing.T) {
	for code, want := range map[string]string{
		"40001": "attempts ran out after 30: wrapped: ERROR: no (SQLSTATE 40001): Reason code: an old pivot",
		"40P01": "attempts ran out after 30: wrapped: ERROR: no (SQLSTATE 40P01)",
	} {
		err := &pgconn.PgError{Severity: "ERROR", Code: code, Message: "no", Detail: "Reason code: an old pivot"}
		got := exhausted(30, fmt.Errorf("wrapped: %w", err))
		if got.Error() != want || !errors.Is(got, ErrAttemptsExhausted) || !errors.Is(got, err) || sqlState(got) != code {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}
