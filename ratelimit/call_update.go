package ratelimit

import (
	"database/sql"
	"errors"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// A call that is a transaction of its own, for one limit without shards, begins with a plain UPDATE: the first step of
// _ratelimit_consume without the function, which costs about a tenth of it. If that returns no row, it took nothing, and the
// function decides: it denies, inserts, or merges shards. Above READ COMMITTED the UPDATE reads nothing: on a small table it would scan,
// and conflict with all keys.

// mayUpdate is the demand of a call that is worth a plain UPDATE, or nil. A reservation is not: it mostly comes when nothing is left.
func (c *call) mayUpdate() *demand {
	if !c.plain() || c.does.owes == upToMaxReserved || len(c.demands) != 1 || sharded(c.demands) || c.now.Valid || denied.expect(c.demands[0]) {
		return nil
	}
	return &c.demands[0]
}

// update is the plain UPDATE that takes a demand.
func (d *demand) update() (sql string, args []any) {
	switch n := d.numbers; {
	case n.Windows != nil:
		return dbsqlc.UpdateCalendar, []any{n.Rate, n.Period, n.Capacity, start(n), windows(n), d.count, d.limit.name, d.key, d.lowest()}
	case n.Window:
		return dbsqlc.UpdateWindow, []any{n.Period, start(n), n.Rate, n.Capacity, d.count, d.limit.name, d.key, d.lowest()}
	default:
		return dbsqlc.UpdateBucket, []any{n.Rate, n.Period, n.Capacity, d.count, d.limit.name, d.key, d.lowest()}
	}
}

// updates notes on a connection how its plain UPDATEs went. One that takes nothing costs about four times what one that takes saves, so
// it counts four times as much. The higher the score, the more of the next calls begin with the function, up to a thousand. So a level
// above READ COMMITTED, a flood of new keys and a flood of denials cost hardly more than the function.
type updates struct{ score, wait atomic.Int32 }

// updatesOf is the note of a connection, or nil if a plain UPDATE is not worth it now.
func updatesOf(conn *pgx.Conn) *updates {
	const key = "txlimit: updates"
	notes := conn.PgConn().CustomData()
	u, known := notes[key].(*updates)
	if !known {
		u = new(updates)
		notes[key] = u
	}
	if u.wait.Load() > 0 {
		u.wait.Add(-1)
		return nil
	}
	return u
}

// missed notes the outcome of an UPDATE, and reports whether it took nothing, so that the function decides.
func (u *updates) missed(err error) bool {
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		u.score.Store(max(u.score.Load()-1, 0))
		return false
	case errors.Is(err, sql.ErrNoRows): // pgx's matches it
		score := min(u.score.Load()+4, 40)
		u.score.Store(score)
		u.wait.Store(1<<(score/4) - 2) // none after the first
		return true
	case errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, "42") || pgErr.Code == "0A000"):
		// The table is not here, is no table, or the role has no right to it: the functions alone are to be used. The server logs the error.
		u.wait.Store(1_000_000)
		return true
	}
	return false
}
