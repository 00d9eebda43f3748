package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"
)

// lockReport is what `locks` prints.
type lockReport struct {
	Sessions []session        `json:"sessions"` // that wait for limits, and those in their way
	Old      []oldTransaction `json:"old"`      // what has written or holds a snapshot, and stays open
}

// oldTransaction is what keeps the server from removing old row versions: each change of a row then leaves one that later calls have to step
// over. What has written can also stop SERIALIZABLE.
type oldTransaction struct {
	session
	Holder     string     `json:"holder"`     // session, prepared transaction, replication slot or standby
	HolderName string     `json:"holderName"` // the gid, the slot, or the standby's application_name
	Since      *time.Time `json:"since"`      // nil for slots and standbys
	QueryStart *time.Time `json:"queryStart"`
	Written    bool       `json:"hasWritten"`
	Snapshot   bool       `json:"holdsSnapshot"`
	Behind     int64      `json:"behind"` // transaction ids that were given out since
	active     bool       // of a slot: somebody uses it
}

// farBehind is from when on slots and standbys in use are listed: they are always a little behind.
const farBehind = 100_000

// session is a session of the server.
type session struct {
	PID         int32    `json:"pid"`
	Database    string   `json:"database"`
	User        string   `json:"user"`
	Application string   `json:"application"`
	Client      string   `json:"client"`
	State       string   `json:"sessionState"`
	Seconds     *float64 `json:"transactionSeconds"` // since its transaction began; nil: it has none, or may not be seen
	Query       string   `json:"query"`              // the one that runs, or the last
	BlockedBy   []int32  `json:"blockedBy"`
	WaitsFor    string   `json:"waitsFor"` // the limit and key, or the turn
	InTheWay    bool     `json:"inTheWay"` // others wait for it, and it waits for nobody
}

func (a *app) locksCommand() *cobra.Command {
	var old string
	c := a.do(&cobra.Command{
		Use:   "locks",
		Short: "List who waits for limits, and who is in the way",
		Long: `List the sessions that wait for a row of the limits, or for their turn at a hot one, and those in their way. A transaction that has
consumed holds the row until it ends. Most often the one in the way is "idle in transaction": its program forgot to commit, or does
something slow. The last line has the SQL that ends it; its tokens come back.

Then it lists what has been open for longer than --old, of all that keeps Postgres from removing old row versions: transactions that have
written, in any database of the server, and those here that hold a snapshot, such as a report in REPEATABLE READ. Each makes hot keys slower and
slower. Under load, one that has written can make Postgres refuse every SERIALIZABLE transaction. BEHIND is how many transaction ids were given out
since. Prepared transactions are listed as well. Replication slots and standbys (hot_standby_feedback) are if nobody uses the slot, or if
they are 100,000 transaction ids behind.

To see what sessions of other roles do, the role must be a member of pg_monitor; to end them, of pg_signal_backend. BLOCKED BY
"prepared" is a prepared transaction (pg_prepared_xacts).`,
		Example: `  txlimit locks
  txlimit locks --json | jq '.sessions[] | select(.inTheWay) | .pid'`,
		Args: noArgs,
	}, look, func(ctx context.Context, _ []string) error {
		length, err := duration("--old", old)
		if err != nil {
			return err
		}
		if err := a.connect(ctx); err != nil {
			return err
		}
		return a.locks(ctx, length)
	})
	c.Flags().StringVar(&old, "old", "1m", "list transactions that have written or hold a snapshot, and are older than this")
	return c
}

const sessionColumns = `a.pid, coalesce(a.datname, ''), coalesce(a.usename, ''), coalesce(a.application_name, ''), coalesce(host(a.client_addr), 'local'),
	coalesce(a.state, ''), extract(epoch FROM clock_timestamp() - a.xact_start)::double precision, coalesce(a.query, ''), pg_blocking_pids(a.pid), '', false`

func (a *app) locks(ctx context.Context, old pgtype.Interval) error {
	var here, sees bool
	var role string
	err := a.reading(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, "SELECT 'ratelimit.limits'::regclass IS NOT NULL, pg_has_role('pg_read_all_stats', 'USAGE'), current_user").Scan(&here, &sees, &role)
	})
	if err != nil {
		return err
	}
	if !sees {
		fmt.Fprintf(a.stderr, "What sessions of other roles do is hidden, and old transactions are missing: GRANT pg_monitor TO %s\n", identifier(role))
	}
	// The sessions that hold or wait for a lock on one of our relations, and the row that they wait for or are next for.
	type lock struct {
		PID      int32
		Relation string
		Row      *string
	}
	locks, err := alone(ctx, a, pgx.RowToStructByPos[lock], `
		SELECT l.pid, c.relname::text, CASE WHEN l.locktype = 'tuple' THEN format('(%s,%s)', l.page, l.tuple) END
		  FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
		 WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		   AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'ratelimit.limits'::regclass)
		   AND (c.relname = 'limits' OR c.relname LIKE 'turn\___' AND NOT l.granted)
		   AND cardinality(pg_blocking_pids(l.pid)) > 0
		 ORDER BY 1, l.locktype = 'tuple'`)
	if err != nil {
		return err
	}
	waits := map[int32]string{}
	for _, l := range locks {
		switch {
		case l.Row != nil:
			waits[l.PID] = a.rowAt(ctx, *l.Row)
		case l.Relation != "limits":
			waits[l.PID] = "its turn (" + l.Relation + ")"
		case waits[l.PID] == "":
			waits[l.PID] = "a row"
		}
	}
	report := lockReport{Sessions: []session{}}
	// The waiting ones, then those in their way, and so on.
	seen := map[int32]bool{}
	next := make([]int32, 0, len(waits))
	for pid := range waits {
		next = append(next, pid)
	}
	for len(next) > 0 {
		for _, pid := range next {
			seen[pid] = true
		}
		found, err := alone(ctx, a, pgx.RowToStructByPos[session], "SELECT "+sessionColumns+" FROM pg_stat_activity AS a WHERE a.pid = ANY ($1::int[])", next)
		if err != nil {
			return err
		}
		next = nil
		for _, s := range found {
			s.WaitsFor = waits[s.PID]
			s.InTheWay = len(s.BlockedBy) == 0
			if s.InTheWay && s.WaitsFor != "" {
				continue // it has stopped waiting meanwhile
			}
			report.Sessions = append(report.Sessions, s)
			for _, pid := range s.BlockedBy {
				if pid != 0 && !seen[pid] && !slices.Contains(next, pid) {
					next = append(next, pid)
				}
			}
		}
	}
	slices.SortStableFunc(report.Sessions, func(x, y session) int {
		if x.InTheWay != y.InTheWay {
			if x.InTheWay {
				return -1
			}
			return 1
		}
		return int(x.PID - y.PID)
	})
	if report.Old, err = a.old(ctx, old); err != nil {
		return err
	}
	if len(report.Sessions)+len(report.Old) == 0 {
		return a.nothing(report, "Nobody waits for a limit, and no old transaction has written or holds a snapshot.")
	}
	return a.emit(report, report.print)
}

// old reads what has been open for longer than that. The first columns are those of a session.
//
// A session that has written counts in whatever database it is, since it is in the snapshots of all; one that only reads counts in its own. Vacuums
// hold nothing back, and workers of a parallel query no more than their leader.
func (a *app) old(ctx context.Context, than pgtype.Interval) ([]oldTransaction, error) {
	list, err := alone(ctx, a, func(row pgx.CollectableRow) (o oldTransaction, err error) {
		err = row.Scan(&o.PID, &o.Database, &o.User, &o.Application, &o.Client, &o.State, &o.Seconds, &o.Query, &o.BlockedBy, &o.WaitsFor, &o.InTheWay,
			&o.Holder, &o.HolderName, &o.Since, &o.QueryStart, &o.Written, &o.Snapshot, &o.Behind, &o.active)
		for _, t := range []*time.Time{o.Since, o.QueryStart} {
			if t != nil {
				*t = t.UTC()
			}
		}
		return o, err
	}, "SELECT "+sessionColumns+`, 'session', '', a.xact_start, a.query_start, a.backend_xid IS NOT NULL, a.backend_xmin IS NOT NULL,
		       greatest(age(a.backend_xid), age(a.backend_xmin))::bigint AS behind, true
		  FROM pg_stat_activity AS a
		 WHERE a.xact_start < clock_timestamp() - $1::interval AND a.pid <> pg_backend_pid() AND a.leader_pid IS NULL
		   AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL AND a.datname = current_database())
		   AND NOT EXISTS (SELECT 1 FROM pg_stat_progress_vacuum AS v WHERE v.pid = a.pid)
		UNION ALL
		SELECT 0, database, owner, '', '', '', extract(epoch FROM clock_timestamp() - prepared)::double precision, '', '{}', '', false,
		       'prepared transaction', gid, prepared, NULL, true, true, age(transaction), true
		  FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - $1::interval
		UNION ALL
		SELECT coalesce(active_pid, 0), coalesce(database, ''), '', '', '', CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL, '', '{}', '', false,
		       'replication slot', slot_name, NULL, NULL, false, true, age(xmin), active
		  FROM pg_replication_slots WHERE xmin IS NOT NULL AND (NOT active OR age(xmin) >= $2)
		UNION ALL
		SELECT pid, '', coalesce(usename, ''), coalesce(application_name, ''), coalesce(host(client_addr), 'local'), coalesce(state, ''), NULL, '', '{}', '', false,
		       'standby', coalesce(application_name, ''), NULL, NULL, false, true, age(backend_xmin), true
		  FROM pg_stat_replication WHERE age(backend_xmin) >= $2
		 ORDER BY behind DESC, 14 LIMIT 100`, than, farBehind)
	if err == nil && list == nil {
		list = []oldTransaction{}
	}
	return list, err
}

// alone reads all rows of a query in a transaction of its own: in a longer one, pg_stat_activity would not change.
func alone[T any](ctx context.Context, a *app, row pgx.RowToFunc[T], sql string, args ...any) (list []T, err error) {
	err = a.reading(ctx, func(tx pgx.Tx) (err error) {
		list, err = collect(ctx, tx, row, sql, args...)
		return err
	})
	return list, err
}

// rowAt is the limit and key of a row version. The one that sessions wait for is visible until the transaction in the way ends.
func (a *app) rowAt(ctx context.Context, ctid string) string {
	var name, key string
	err := a.reading(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, "SELECT name, key FROM ONLY ratelimit.limits WHERE ctid = $1::text::tid", ctid).Scan(&name, &key)
	})
	if err != nil {
		return "a row" // it is gone, or may not be read
	}
	if key == "" {
		return printable(name)
	}
	return about(name, &key)
}

func (r lockReport) print(w io.Writer) {
	var culprits []string
	if len(r.Sessions) > 0 {
		t := newTable("PID", "USER", "APPLICATION", "CLIENT", "STATE", "TRANSACTION", "BLOCKED BY", "WAITS FOR", "QUERY")
		for _, s := range r.Sessions {
			by, waits := "-", "-"
			if len(s.BlockedBy) > 0 {
				by = pids(s.BlockedBy)
			}
			if s.WaitsFor != "" {
				waits = s.WaitsFor
			}
			if s.InTheWay {
				by = "(in the way)"
				culprits = append(culprits, fmt.Sprintf("SELECT pg_terminate_backend(%d)", s.PID))
			}
			t.row(fmt.Sprint(s.PID), short(s.User, 20), short(s.Application, 20), printable(s.Client), printable(s.State), s.age(), by, waits, short(oneLine(s.Query), 60))
		}
		t.print(w)
		if culprits != nil {
			fmt.Fprintf(w, "\nTo end what is in the way, and give its tokens back: %s\n", strings.Join(culprits, "; "))
		} else {
			fmt.Fprintf(w, "\nWho is in the way cannot be seen: a prepared transaction (pg_prepared_xacts), or a deadlock that Postgres ends by itself within a second.\n")
		}
	}
	if len(r.Old) > 0 {
		if len(r.Sessions) > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, "Old, and in the way of removing old row versions, which makes hot keys slower:")
		t := newTable("HOLDER", "DATABASE", "USER", "APPLICATION", "STATE", "TRANSACTION", "HAS", ">BEHIND", "BLOCKED BY", "QUERY")
		for _, o := range r.Old {
			by := "-"
			if len(o.BlockedBy) > 0 {
				by = pids(o.BlockedBy)
			}
			t.row(o.holder(), short(cmp.Or(o.Database, "-"), 20), short(cmp.Or(o.User, "-"), 20), short(cmp.Or(o.Application, "-"), 20), printable(cmp.Or(o.State, "-")), o.age(), o.has(),
				count(o.Behind), by, short(cmp.Or(oneLine(o.Query), "-"), 60))
		}
		t.print(w)
		fmt.Fprintln(w)
		for _, o := range r.Old {
			fmt.Fprintln(w, o.end())
		}
	}
}

// holder names the transaction.
func (o *oldTransaction) holder() string {
	switch o.Holder {
	case "session":
		return fmt.Sprint(o.PID)
	case "prepared transaction":
		return "prepared " + printable(o.HolderName)
	case "replication slot":
		return "slot " + printable(o.HolderName)
	}
	return "standby " + printable(o.HolderName)
}

func (o *oldTransaction) has() string {
	switch {
	case o.Written && o.Snapshot && o.Holder == "session":
		return "written, snapshot"
	case o.Written:
		return "written"
	}
	return "snapshot"
}

// end says how to end it.
func (o *oldTransaction) end() string {
	switch {
	case o.Holder == "session":
		return fmt.Sprintf("To end %d: SELECT pg_terminate_backend(%[1]d)", o.PID)
	case o.Holder == "prepared transaction":
		return fmt.Sprintf("To end %s, in its database, if its coordinator has forgotten it: ROLLBACK PREPARED %s", o.holder(), literal(o.HolderName))
	case o.Holder == "replication slot" && !o.active:
		return fmt.Sprintf("To end %s, if its standby is gone for good: SELECT pg_drop_replication_slot(%s)", o.holder(), literal(o.HolderName))
	}
	return fmt.Sprintf("To let %s go on: end the old transaction on the standby, or set hot_standby_feedback = off there", o.holder())
}

// age is how long the transaction has been open.
func (s *session) age() string {
	if s.Seconds == nil {
		return "-"
	}
	return span(time.Duration(*s.Seconds*float64(time.Second)), time.Duration.Round)
}

func pids(list []int32) string {
	texts := make([]string, len(list))
	for i, pid := range list {
		if texts[i] = fmt.Sprint(pid); pid == 0 { // pg_blocking_pids says so
			texts[i] = "prepared"
		}
	}
	return strings.Join(texts, ", ")
}
