package keystate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Hold is what an id holds of a key. The token that ends it is not read.
type Hold struct {
	Key     string // '': the limit has no keys
	ID      string
	Unit    string  // tokens or slots; none: the key was unlimited
	Count   float64 // 0 if the unit is none
	Since   time.Time
	Until   *time.Time // nil: it has no end
	Expired bool       // until has come: the next call that needs it, or a sweep, gives it back
}

// Holds reads who holds what of a limit, the oldest first: of one key (empty: of none) or, with nil, of all; of one id or, with nil, of all. It returns
// at most so many (0: all), and how many there are. It reads and sorts all of them.
func Holds(ctx context.Context, db Querier, name string, key, id *string, at time.Time, most int) (list []Hold, all int64, err error) {
	where, args := "", []any{name, at, most}
	if key != nil {
		args = append(args, *key)
		where += " AND h.key = $4"
	}
	if id != nil {
		args = append(args, *id)
		where += fmt.Sprint(" AND h.id = $", len(args))
	}
	list, err = collect(ctx, db, func(row pgx.CollectableRow) (h Hold, err error) {
		err = row.Scan(&h.Key, &h.ID, &h.Unit, &h.Count, &h.Since, &h.Until, &h.Expired, &all)
		h.Since = h.Since.UTC()
		if h.Until != nil {
			*h.Until = h.Until.UTC()
		}
		return h, err
	}, `SELECT h.key, h.id, h.unit, h.count, `+ShownTime("h.taken_at")+`,
		       CASE WHEN h.until < 'infinity' THEN `+ShownTime("h.until")+` END, h.until <= $2, count(*) OVER ()
		  FROM ratelimit.holds AS h WHERE h.name = $1 AND h.state = 'held' AND NOT starts_with(h.id, '~'::text)`+where+`
		 ORDER BY h.taken_at, h.key, h.id LIMIT nullif($3::bigint, 0)`, args...)
	return list, all, err
}

// Release ends the hold of an id, whoever has it, and leaves a trace: a row in the history of overrides. It ends only a hold that was
// taken at since: the one that somebody saw, and no later one of the same id. It reports whether there was one.
func Release(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, name, key, id string, since time.Time, reason string, who *string) (released bool, err error) {
	// By the token that it has now: an id may be held anew before its row is locked. Citus refuses to call the function over rows.
	var token string
	err = db.QueryRow(ctx, `
		SELECT coalesce('~' || replace(h.token::text, '-', '') || octet_length(h.id) || ':' || h.id, h.id)
		  FROM ratelimit.holds AS h WHERE h.name = $1 AND h.key = $2 AND h.id = $3 AND h.state = 'held'
		   AND `+ShownTime("h.taken_at")+` = $4`, name, key, id, since).Scan(&token)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err == nil {
		err = db.QueryRow(ctx, `SELECT ratelimit.release($1::text, nullif($2::text, ''), $3::text, global => $2::text = '',
			reason => $4::text, who => coalesce($5::text, SESSION_USER))`, name, key, token, reason, who).Scan(&released)
	}
	return released, err
}
