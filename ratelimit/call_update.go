package ratelimit

import (
	"errors"
	"math"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// A call that is a transaction of its own, for one limit without shards, begins with a plain UPDATE: the first step of
// _ratelimit_consume without the function, which costs a tenth to a fifth of it. If that returns no row, it took nothing, and the
// function decides: it denies, inserts, or merges shards. Above READ COMMITTED the UPDATE reads nothing: on a small table it would scan,
// and conflict with all keys.

// mayUpdate is the demand of a call that is worth a plain UPDATE, or nil.
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

// updates notes on a connection how its plain UPDATEs went. After each one in a row that took nothing, twice as many calls begin with
// the function, up to a thousand. So a level above READ COMMITTED, a flood of new keys and a flood of denials cost hardly more than the
// function.
type updates struct{ misses, wait atomic.Int32 }

// updatesOf is the note of a connection, or nil if a plain UPDATE cannot be sent there, or is not worth it now.
func updatesOf(conn *pgx.Conn) *updates {
	if conn.PgConn().TxStatus() != 'I' {
		return nil
	}
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
		u.misses.Store(0)
		return false
	case errors.Is(err, pgx.ErrNoRows):
		misses := min(u.misses.Add(1), 10)
		u.misses.Store(misses)
		u.wait.Store(1<<misses - 2) // a single miss is nothing: among grants, a denial or a first use
		return true
	case errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, "42") || pgErr.Code == "0A000"):
		// The table is not here, is no table, or the role has no right to it: the functions alone are to be used.
		u.wait.Store(math.MaxInt32)
		return true
	}
	return false
}
