package ratelimit

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/inschema"
)

// A call that is a transaction of its own, for one limit without shards, begins with a plain statement. If that returns no row, it changed
// nothing, and the function decides. Above READ COMMITTED it reads nothing: on a small table it would scan, and conflict with all keys.
//
// That of a Consume is the first step of ratelimit._consume without the function, which costs about a tenth of it. Those about holds cost less than half of
// theirs: of a Hold and a Once whose id is not known and whose tokens are there, and of a Settle that used the tokens it holds.

// updater has the plain statement that a call begins with: a demand, or a call about a hold.
type updater interface {
	// update is the plain statement. Its answer is read as the function's.
	update() (sql string, args []any)
	// instead is the statement by the function, if the plain one changed nothing.
	instead(function statement) statement
	// note is the name of the notes about such statements on a connection.
	note() string
}

// updater has the plain statement that the call is worth, or is nil. A reservation is worth none: it mostly comes when nothing is left.
func (c *call) updater() updater {
	switch {
	case len(c.demands) != 1 || sharded(c.demands) || c.now.Valid:
		return nil
	case c.verb == verbSettle:
		if len(c.rowless) == 0 && c.hold.matches(&c.demands[0]) {
			return c
		}
	case deniedLately.expect(c.demands[0]):
		return nil
	case c.does.holds && c.does.deniable:
		if len(c.rowless) == 0 {
			return c
		}
	case c.takesCounts() && c.does.owes != upToMaxReserved:
		return &c.demands[0]
	}
	return nil
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

// instead expects a denial.
func (d *demand) instead(statement) statement { return consume(*d, nil, true, false) }

func (d *demand) note() string { return "txlimit: updates" }

// update is the plain statement of a call about a hold of one demand.
func (c *call) update() (sql string, args []any) {
	d, h := &c.demands[0], c.hold
	if c.verb == verbSettle {
		return dbsqlc.UpdateSettle, []any{d.limit.name, d.key, h.id, h.uuid, d.count}
	}
	state, unit, n := "held", "tokens", d.numbers
	if c.verb == verbOnce {
		state = "once"
	}
	if d.limit.slots {
		unit = "slots"
	}
	return dbsqlc.UpdateHold, []any{
		n.Period, nullable(start(n)), windows(n), n.Rate, n.Capacity, d.count, h.token128(), h.interval(), d.limit.name, d.key, d.lowest(),
		h.id, state, unit,
	}
}

func (c *call) instead(function statement) statement {
	function.update = nil
	return function
}

func (c *call) note() string { return "txlimit: updates of holds" }

// takenTwice is the SQLSTATE by which a plain statement undoes itself: see ratelimit._taken_twice.
const takenTwice = "RL001"

// updates notes on a connection how its plain UPDATEs went. One that takes nothing costs about four times what one that takes saves, so
// it counts four times as much. The higher the score, the more of the next calls begin with the function, up to a thousand. So a level
// above READ COMMITTED, a flood of new keys and a flood of denials cost hardly more than the function.
type updates struct{ score, wait atomic.Int32 }

// oneServer is true if no other server has any of the tables.
const oneServer = "SELECT ratelimit._one_server() AND NOT ratelimit._distributed()"

// updatesOf is the note of that name of a connection, or nil if a plain UPDATE is not worth it now. Where the tables are distributed, it never is:
// after Citus has refused that of a Hold, it sends no call of the session to the server that has the key.
func updatesOf(ctx context.Context, conn *pgx.Conn, note, schema string) (*updates, error) {
	notes := conn.PgConn().CustomData()
	u, known := notes[note+schema].(*updates)
	if !known {
		sql, _ := inschema.SQL(oneServer, schema) // it was valid for the function
		results, err := conn.PgConn().Exec(ctx, sql).ReadAll()
		if _, refused := errors.AsType[*pgconn.PgError](err); err != nil && (!refused || conn.IsClosed()) {
			return nil, err
		}
		u = new(updates)
		switch {
		case err != nil:
			u.wait.Store(1_000_000)
		case string(results[0].Rows[0][0]) != "t":
			u.wait.Store(math.MaxInt32)
		}
		notes[note+schema] = u
	}
	if u.wait.Load() > 0 {
		u.wait.Add(-1)
		return nil, nil
	}
	return u, nil
}

// missed notes the outcome of an UPDATE, and reports whether it took nothing, so that the function decides.
func (u *updates) missed(err error) bool {
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		u.score.Store(max(u.score.Load()-1, 0))
		return false
	case errors.Is(err, sql.ErrNoRows), sqlState(err) == takenTwice: // pgx's matches the first
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
