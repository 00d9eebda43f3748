package harness

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// ByHand is an answer of a SQL function, or of the library. Instants that it does not give are zero.
type ByHand struct {
	Ok                    bool
	Remaining, RetryAfter float64
	Taken                 float64
	RetryAt, ResetAt, At  time.Time
}

// AskedByHand is a request of a verb: consume, reserve or take.
type AskedByHand struct {
	Ask
	Verb string
}

// AskGo asks the library.
func AskGo(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB, a AskedByHand) (r ByHand, err error) {
	var result ratelimit.Result
	switch a.Verb {
	case "take":
		_, result, err = limiter.Take(ctx, db, int(a.Count), a.Plain())
	case "reserve":
		var reserved ratelimit.Reservation
		reserved, err = limiter.Reserve(ctx, db, a.Request())
		result = ratelimit.Result{OK: err == nil, At: reserved.At, RetryAt: reserved.RetryAt, RetryAfter: reserved.Delay, Requests: reserved.Requests}
	default:
		result, err = limiter.Consume(ctx, db, a.Request())
	}
	if exceeded, ok := errors.AsType[*ratelimit.DeniedError](err); ok {
		result, err = ResultIn(exceeded), nil
	}
	if err != nil {
		return ByHand{}, err
	}
	s := result.Requests[0]
	return ByHand{result.OK, s.Remaining, result.RetryAfter.Seconds(), s.Taken, result.RetryAt, s.ResetAt, result.At}, nil
}

// Must runs a statement.
func (w World) Must(sql string, args ...any) {
	w.Helper()
	if _, err := w.DB.Exec(w.Context(), sql, args...); err != nil {
		w.Fatalf("%s: %v", sql, err)
	}
}

// DocBlocks returns the SQL blocks of a page of the docs, as printed. The page is a path from the root of the repository.
func DocBlocks(t *testing.T, page string) (blocks []string) {
	t.Helper()
	text, err := os.ReadFile("../../" + page)
	Succeeds(t, err)
	for _, match := range regexp.MustCompile("(?s)\n```sql\n(.*?)\n```\n").FindAllStringSubmatch(string(text), -1) {
		blocks = append(blocks, match[1])
	}
	return blocks
}

// DocSQL returns the only block of a page that contains these words.
func DocSQL(t *testing.T, page, words string) (block string) {
	t.Helper()
	for _, b := range DocBlocks(t, page) {
		if strings.Contains(b, words) {
			if block != "" {
				t.Fatalf("two blocks of %s have %q in them", page, words)
			}
			block = b
		}
	}
	if block == "" {
		t.Fatalf("no block of %s has %q in it", page, words)
	}
	return block
}

// Lines runs a query and returns its rows as text, a line each.
func Lines(t *testing.T, pool *pgxpool.Pool, sql string) string {
	t.Helper()
	return strings.TrimSuffix(Scan[string](t, pool, "SELECT coalesce(string_agg(q::text || E'\\n', ''), '') FROM ("+sql+") AS q"), "\n")
}
