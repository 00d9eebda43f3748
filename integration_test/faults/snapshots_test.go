package faults_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
)

// snapshots is a server on which something old keeps Postgres from removing the old versions of a hot key.
type snapshots struct {
	*testing.T
	pool  *pgxpool.Pool
	url   string
	tool  string
	limit ratelimit.Limit
}

func newSnapshots(t *testing.T) *snapshots {
	t.Helper()
	b := newServer(t, postgres.BreakableConfig{Settings: []string{"autovacuum=off", "synchronous_commit=off", "max_prepared_transactions=4", "full_page_writes=off", "wal_level=logical"}})
	return &snapshots{t, connect(t, b.URL(), 2), b.URL(), filepath.Join(t.TempDir(), "txlimit"), ratelimit.TokenBucket("hot", 1e9, time.Hour)}
}

func (s *snapshots) exec(db interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}, sql string,
) {
	s.Helper()
	if _, err := db.Exec(s.Context(), sql); err != nil {
		s.Fatalf("%s: %v", sql, err)
	}
}

// session is one of the test's own, in a database.
func (s *snapshots) session(database string) *pgx.Conn {
	s.Helper()
	conn, err := pgx.Connect(s.Context(), strings.Replace(s.url, "/postgres?", "/"+database+"?", 1))
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = conn.Close(context.WithoutCancel(s.Context())) }) // closed twice where the test closes it
	return conn
}

// grants consumes so many times, and returns the pages of the table.
func (s *snapshots) grants(calls int) (pages int) {
	s.Helper()
	var limits ratelimit.Limiter
	for range calls {
		if _, err := limits.Consume(s.Context(), s.pool, s.limit.Global()); err != nil {
			s.Fatal(err)
		}
	}
	if err := s.pool.QueryRow(s.Context(), "SELECT pg_relation_size('ratelimit.limits') / 8192").Scan(&pages); err != nil {
		s.Fatal(err)
	}
	return pages
}

// found is what the query of docs/incidents.md and `txlimit locks` list of a holder, by its name or pid.
func (s *snapshots) found(holder, name string) (documented, listed bool) {
	s.Helper()
	page, err := os.ReadFile("../../docs/incidents.md")
	if err != nil {
		s.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Find the old transaction\n")
	query := regexp.MustCompile("(?s)```sql\n(.*?);\n```").FindStringSubmatch(section)
	if query == nil {
		s.Fatal("the section has no query")
	}
	err = s.pool.QueryRow(s.Context(), "SELECT EXISTS (SELECT FROM ("+query[1]+") AS q WHERE q.holder = $1 AND $2 IN (q.pid::text, q.name) AND q.behind > 0)", holder, name).Scan(&documented)
	if err != nil {
		s.Fatal(err)
	}
	cmd := exec.CommandContext(s.Context(), s.tool, "locks", "--json", "--old", "1ms")
	cmd.Env = append(os.Environ(), "DATABASE_URL="+s.url)
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 3 { // nothing to list
		err = nil
	}
	var report struct {
		Old []struct {
			PID                int
			Holder, HolderName string
		}
	}
	if err := errors.Join(err, json.Unmarshal(out, &report)); err != nil {
		s.Fatalf("%v: %s", err, out)
	}
	for _, o := range report.Old {
		listed = listed || o.Holder == holder && (o.HolderName == name || fmt.Sprint(o.PID) == name)
	}
	return documented, listed
}

// TestWhatHoldsBackCleanup makes each holder of the table in docs/incidents.md, and uses one key. If the holder keeps Postgres from removing old
// versions, the table grows. The query of the page and `txlimit locks` list those, and no others.
func TestWhatHoldsBackCleanup(t *testing.T) {
	t.Parallel()
	s := newSnapshots(t)
	build := exec.CommandContext(t.Context(), "go", "build", "-o", s.tool, ".")
	build.Dir = "../../cmd/txlimit"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s.exec(s.pool, "CREATE DATABASE other")
	s.exec(s.pool, "CREATE TABLE notes (n integer)")
	begun := func(database, sql string) func() (string, func()) {
		return func() (string, func()) {
			conn := s.session(database)
			if _, err := conn.Exec(t.Context(), sql); err != nil {
				t.Fatalf("%s: %v", sql, err)
			}
			return fmt.Sprint(conn.PgConn().PID()), func() { _ = conn.Close(t.Context()) }
		}
	}
	prepared := func(database string) func() (string, func()) {
		return func() (string, func()) {
			conn := s.session(database)
			if _, err := conn.Exec(t.Context(), "BEGIN; CREATE TEMP TABLE x ON COMMIT DROP AS SELECT 1; ROLLBACK; BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'it''s one'"); err != nil {
				t.Fatal(err)
			}
			return "it's one", func() {
				if _, err := conn.Exec(t.Context(), "ROLLBACK PREPARED 'it''s one'"); err != nil {
					t.Error(err)
				}
			}
		}
	}
	for _, test := range []struct {
		what, holder string
		holds        bool
		begin        func() (name string, end func())
	}{
		{"nothing", "session", false, func() (string, func()) { return "", func() {} }},
		{"REPEATABLE READ", "session", true, begun("postgres", "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM notes")},
		{"an open cursor", "session", true, begun("postgres", "BEGIN; DECLARE c CURSOR FOR SELECT n FROM notes")},
		{"READ COMMITTED that has only read", "session", false, begun("postgres", "BEGIN; SELECT 1 FROM notes")},
		{"READ COMMITTED that has written", "session", true, begun("postgres", "BEGIN; INSERT INTO notes VALUES (1)")},
		{"REPEATABLE READ in another database", "session", false, begun("other", "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM pg_class")},
		{"a writer in another database", "session", true, begun("other", "BEGIN; CREATE TABLE x (n integer)")},
		{"prepared", "prepared transaction", true, prepared("postgres")},
		{"prepared in another database", "prepared transaction", true, prepared("other")},
		{"a slot that nobody uses", "replication slot", true, func() (string, func()) {
			name, end := s.standby("a_slot")
			end()
			for used := true; used; time.Sleep(10 * time.Millisecond) {
				if err := s.pool.QueryRow(t.Context(), "SELECT active FROM pg_replication_slots").Scan(&used); err != nil {
					t.Fatal(err)
				}
			}
			return name, func() { s.exec(s.pool, "SELECT pg_drop_replication_slot('a_slot')") }
		}},
		{"a slot in use", "replication slot", true, func() (string, func()) {
			name, end := s.standby("used_slot")
			return name, func() {
				end()
				for dropped := false; !dropped; time.Sleep(10 * time.Millisecond) {
					_, err := s.pool.Exec(t.Context(), "SELECT pg_drop_replication_slot('used_slot')")
					dropped = err == nil
				}
			}
		}},
		{"a standby", "standby", true, func() (string, func()) { return s.standby("") }},
		{"a logical slot", "replication slot", false, func() (string, func()) {
			s.exec(s.pool, "SELECT pg_create_logical_replication_slot('l_slot', 'pgoutput')")
			return "l_slot", func() { s.exec(s.pool, "SELECT pg_drop_replication_slot('l_slot')") }
		}},
	} {
		s.exec(s.pool, "TRUNCATE ratelimit.limits")
		before := s.grants(10)
		name, end := test.begin()
		after := s.grants(2000)
		if test.holder == "standby" || test.what == "a slot in use" {
			s.ids(100_000)
		}
		documented, listed := s.found(test.holder, name)
		end()
		t.Logf("%-40s %d pages, then %d", test.what, before, after)
		if grows := after-before > 10; grows != test.holds || !grows && after-before > 2 {
			t.Errorf("%s: the table grows from %d to %d pages", test.what, before, after)
		}
		if documented != test.holds || listed != test.holds {
			t.Errorf("%s: the query finds it: %v; the tool: %v; want %v", test.what, documented, listed, test.holds)
		}
	}
}

// ids gives out so many transaction ids.
func (s *snapshots) ids(n int) {
	s.Helper()
	s.exec(s.pool, fmt.Sprintf(`DO $$ BEGIN
		CREATE TEMP TABLE ids (n integer) ON COMMIT DROP;
		FOR i IN 1..%d LOOP
			BEGIN INSERT INTO ids VALUES (i); EXCEPTION WHEN division_by_zero THEN NULL; END;
		END LOOP;
	END $$`, n))
}

// standby says as a standby does what its oldest snapshot is (hot_standby_feedback): to a slot, or, without one, to its own walsender.
func (s *snapshots) standby(slot string) (name string, end func()) {
	s.Helper()
	config, err := pgconn.ParseConfig(s.url)
	if err != nil {
		s.Fatal(err)
	}
	config.RuntimeParams["replication"] = "true"
	config.RuntimeParams["application_name"] = "a standby"
	conn, err := pgconn.ConnectConfig(s.Context(), config)
	if err != nil {
		s.Fatal(err)
	}
	start := "START_REPLICATION PHYSICAL 0/1000000"
	if name = "a standby"; slot != "" {
		name, start = slot, "START_REPLICATION SLOT "+slot+" PHYSICAL 0/1000000"
		if _, err := conn.Exec(s.Context(), "CREATE_REPLICATION_SLOT "+slot+" PHYSICAL RESERVE_WAL").ReadAll(); err != nil {
			s.Fatal(err)
		}
	}
	var at string
	var xmin uint32
	if err := s.pool.QueryRow(s.Context(), "SELECT pg_current_wal_flush_lsn()::text, pg_current_xact_id()::text::bigint").Scan(&at, &xmin); err != nil {
		s.Fatal(err)
	}
	conn.Frontend().Send(&pgproto3.Query{String: strings.Replace(start, "0/1000000", at, 1)})
	feedback := binary.BigEndian.AppendUint64([]byte{'h'}, uint64(time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)).Microseconds()))
	for _, n := range []uint32{xmin, 0, 0, 0} {
		feedback = binary.BigEndian.AppendUint32(feedback, n)
	}
	conn.Frontend().Send(&pgproto3.CopyData{Data: feedback})
	if err := conn.Frontend().Flush(); err != nil {
		s.Fatal(err)
	}
	ended := make(chan string, 1)
	go func() { // takes what is streamed
		for {
			message, err := conn.Frontend().Receive()
			if refused, ok := message.(*pgproto3.ErrorResponse); err != nil || ok {
				ended <- fmt.Sprint(err, refused)
				return
			}
		}
	}()
	for heard := false; !heard; time.Sleep(10 * time.Millisecond) {
		select {
		case why := <-ended:
			s.Fatalf("the replication has ended: %s", why)
		default:
		}
		err := s.pool.QueryRow(s.Context(), "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1 AND xmin IS NOT NULL) OR EXISTS (SELECT FROM pg_stat_replication WHERE backend_xmin IS NOT NULL)", slot).Scan(&heard)
		if err != nil {
			s.Fatal(err)
		}
	}
	return name, func() { _ = conn.Conn().Close() }
}

// TestWhatAnOldSnapshotCosts prints what a grant costs after so many others, while a report holds its snapshot, for docs/evidence.md.
func TestWhatAnOldSnapshotCosts(t *testing.T) {
	t.Parallel()
	s := newSnapshots(t)
	// cost is the pages that a grant reads, and how long it takes.
	cost := func() (buffers int, took time.Duration) {
		var limits ratelimit.Limiter
		var spans []time.Duration
		for range 21 {
			began := time.Now()
			if _, err := limits.Consume(t.Context(), s.pool, s.limit.Global()); err != nil {
				t.Fatal(err)
			}
			spans = append(spans, time.Since(began))
		}
		slices.Sort(spans)
		for range 5 { // the first ones of a connection read catalogs, too
			rows, err := s.pool.Query(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON, TIMING OFF) SELECT ratelimit.consume('hot', global => true, rate => 1e9, period => '1 hour', capacity => 1e9)")
			if err != nil {
				t.Fatal(err)
			}
			plans, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[[]struct {
				Plan struct {
					Hit int `json:"Shared Hit Blocks"`
				}
			}])
			if err != nil {
				t.Fatal(err)
			}
			if hit := plans[0].Plan.Hit; buffers == 0 || hit < buffers {
				buffers = hit
			}
		}
		return buffers, spans[len(spans)/2]
	}
	s.grants(100)
	first, took := cost()
	t.Logf("without an old snapshot: %d pages read, %v", first, took)
	report := s.session("postgres")
	s.exec(report, "BEGIN ISOLATION LEVEL REPEATABLE READ")
	s.exec(report, "SELECT 1 FROM ratelimit.limits")
	var pages, last int
	for _, calls := range []int{1000, 3000, 10000} {
		pages = s.grants(calls)
		last, took = cost()
		t.Logf("after %d more grants: %d pages of the table, %d pages read by a call, %v", calls, pages, last, took)
	}
	if pages < 50 || last < pages {
		t.Errorf("a call reads %d pages of a table of %d: this is not what the docs say", last, pages)
	}
	s.exec(report, "COMMIT")
	s.grants(10)
	ended, took := cost()
	t.Logf("after the report: %d pages read, %v", ended, took)
	if ended > 3*first {
		t.Errorf("a call still reads %d pages, at first %d", ended, first)
	}
}
