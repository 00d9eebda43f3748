package integration_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// What an upgrade relies on, migrate first and then deploy:
//
//   - A newer schema serves older libraries: no function changes its arguments, its columns or what it answers. One that has to
//     gets a new name. TestOlderLibrariesWorkOnTheNewestSchema
//   - A newer library on an older schema fails closed, with an error that says what is missing, in what is new to it, and works
//     in the rest. TestTheLibraryOnOlderSchemas
//   - Migrating disturbs nobody. TestMigrationsUnderTraffic

// uses is every way in which the library uses the schema, and the migration that brought what it needs.
var uses = []struct {
	name      string
	migration int64
	try       func(ctx context.Context, pool *pgxpool.Pool) error
}{
	{"check", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Check(ctx, pool, plain.Key("a"), wide.Key("a"))
		return err
	}},
	{"consume", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, plain.Key("a"))
		return err
	}},
	{"consume sharded", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, wide.Key("a"))
		return err
	}},
	{"consume several", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, plain.Key("a"), plain.Key("b"))
		return err
	}},
	{"consume several, some sharded", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, plain.Key("a"), wide.Key("b"))
		return err
	}},
	{"charge", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Charge(ctx, pool, plain.Key("a"))
		return err
	}},
	{"refund", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Refund(ctx, pool, noon, plain.Key("a"))
		return err
	}},
	{"reset", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		return new(ratelimit.Limiter).Reset(ctx, pool, plain.Key("a"))
	}},
	{"InTx", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		var limiter ratelimit.Limiter
		return limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limiter.Consume(ctx, tx, plain.Key("a"))
			return err
		})
	}},
	{"Coalescer", 3, func(ctx context.Context, pool *pgxpool.Pool) error {
		return coalesce(ctx, &ratelimit.Coalescer{Pool: pool}, func(ctx context.Context, db ratelimit.DB) error {
			_, err := new(ratelimit.Limiter).Consume(ctx, db, plain.Key(rand.Text())) // for one key, migration 2 can be enough
			return err
		})
	}},
	{"SendTx", 2, func(ctx context.Context, pool *pgxpool.Pool) error {
		return sendTx(ctx, pool, plain.Key("a"))
	}},
	{"SendTx, denied", 4, func(ctx context.Context, pool *pgxpool.Pool) error {
		var err error
		for err == nil { // until it is denied
			err = sendTx(ctx, pool, plain.Key("b").Count(plain.Capacity()))
		}
		if denied(err) {
			return nil
		}
		return err
	}},
	{"InTx, Hot", 5, func(ctx context.Context, pool *pgxpool.Pool) error {
		return new(ratelimit.Limiter).InTx(ctx, pool, func(context.Context, pgx.Tx) error { return nil }, ratelimit.Hot(plain.Key("a")))
	}},
	{"Sweep", 7, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Sweep(ctx, pool, plain, wide)
		return err
	}},
}

func sendTx(ctx context.Context, pool *pgxpool.Pool, request ratelimit.Request) error {
	var limiter ratelimit.Limiter
	batch := &pgx.Batch{}
	if _, err := limiter.QueueConsume(ctx, batch, request); err != nil {
		return err
	}
	return limiter.SendTx(ctx, pool, batch)
}

var (
	plain = ratelimit.TokenBucket("plain", 1000, time.Second)
	wide  = ratelimit.FixedWindow("wide", 1000, time.Second, ratelimit.Shards(2))
)

func TestTheLibraryOnOlderSchemas(t *testing.T) {
	t.Parallel()
	newest := int64(len(newGoose(t, openSQL(t, "pgx", newSchema(t), 2), migrations.FS, migrations.VersionTable).ListSources()))
	for version := range newest + 1 {
		t.Run(fmt.Sprint("version ", version), func(t *testing.T) {
			t.Parallel()
			if version < 5 && defaultMode(t) == pgx.QueryExecModeCacheStatement {
				needsSession(t, "since it closes the connection when what could not be prepared is prepared again (pgbouncer/pgbouncer#1118)")
			}
			url := newSchema(t)
			if version > 0 {
				provider := newGoose(t, openSQL(t, "pgx", url, 4), migrations.FS, migrations.VersionTable)
				if _, err := provider.UpTo(t.Context(), version); err != nil {
					t.Fatal(err)
				}
			}
			pool := connect(t, url, 4)
			for _, use := range uses {
				err := use.try(t.Context(), pool)
				if version >= use.migration {
					if err != nil {
						t.Errorf("%s needs migration %d, and on %d: %v", use.name, use.migration, version, err)
					}
					continue
				}
				// It fails closed, and says what to look for. (That it is the views that are missing is another SQLSTATE.)
				if state := sqlState(err); state != "42883" && state != "42P01" {
					t.Errorf("%s needs migration %d, and on %d: %v", use.name, use.migration, version, err)
				} else if !strings.Contains(err.Error(), "has the schema of package migrations been migrated") {
					t.Errorf("%s on %d does not say what is missing: %v", use.name, version, err)
				}
			}
		})
	}
}

// TestMigrationsUnderTraffic migrates from the first version that works to the newest, back and up again, while the library is in
// use: no call fails, none of them waits for long, and no more is granted than is due.
func TestMigrationsUnderTraffic(t *testing.T) {
	t.Parallel()
	url := newSchema(t)
	provider := newGoose(t, openSQL(t, "pgx", url, 4), migrations.FS, migrations.VersionTable)
	const first = 2 // table and engine
	if _, err := provider.UpTo(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	pool := connect(t, url, 8)
	const rate, capacity = 10, 10
	limit := ratelimit.TokenBucket("traffic", rate, time.Second, ratelimit.Capacity(capacity))
	sharded := ratelimit.TokenBucket("sharded traffic", rate, time.Second, ratelimit.Capacity(capacity), ratelimit.Shards(2))
	var limiter ratelimit.Limiter
	var granted, calls atomic.Int64
	var stop atomic.Bool
	begin := time.Now()
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Go(func() {
			for !stop.Load() {
				calls.Add(1)
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
					var err error
					if g%2 == 0 {
						_, err = limiter.Consume(ctx, tx, limit.Key("k"))
					} else {
						_, err = limiter.Consume(ctx, tx, limit.Key("k"), sharded.Key("k"))
					}
					return err
				}, ratelimit.Isolation(levels[g%3]), ratelimit.Attempts(1000))
				switch {
				case err == nil:
					granted.Add(1)
				case denied(err):
					time.Sleep(time.Millisecond)
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	step := func(what string, migrate func() error) {
		before := calls.Load()
		if err := migrate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		for deadline := time.Now().Add(20 * time.Second); calls.Load() < before+10 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		if calls.Load() < before+10 {
			t.Errorf("%s: traffic stands still", what)
		}
	}
	newest := int64(len(provider.ListSources()))
	for range 2 {
		for version := int64(first) + 1; version <= newest; version++ {
			step(fmt.Sprint("up to ", version), func() error { _, err := provider.UpTo(t.Context(), version); return err })
		}
		for version := newest - 1; version >= first; version-- {
			step(fmt.Sprint("down to ", version), func() error { _, err := provider.DownTo(t.Context(), version); return err })
		}
	}
	step("up", func() error { _, err := provider.Up(t.Context()); return err })
	stop.Store(true)
	wg.Wait()
	bound := capacity + int64(time.Since(begin).Seconds()*rate)
	t.Logf("%d calls, %d granted of at most %d, %d migrations", calls.Load(), granted.Load(), bound, newest)
	if granted.Load() > bound {
		t.Errorf("%d were granted, %d are due", granted.Load(), bound)
	}
	if granted.Load() < capacity || calls.Load() < granted.Load()+10 {
		t.Errorf("%d calls, %d of them granted: the bound is not what stops them", calls.Load(), granted.Load())
	}
	for _, use := range uses {
		if err := use.try(t.Context(), pool); err != nil {
			t.Errorf("%s: %v", use.name, err)
		}
	}
}

// A record is what a released version of the library sends, and what it was answered: testdata/statements/VERSION.json.
type record struct {
	Statements []statement
	Calls      []recordedCall
}

// statement is one that the library prepares: with these types of arguments and columns, or its connections fail.
type statement struct {
	SQL       string
	Arguments []uint32
	Columns   []string // with their types
}

type recordedCall struct {
	Statement int
	Arguments []*string
	Answer    string // the row, in Postgres' binary format; or the error
}

var recordFlag = flag.String("record", "", "write the statements of the library as it is as those of this version, before it is released")

const records = "testdata/statements"

// TestOlderLibrariesWorkOnTheNewestSchema plays what each version sent on today's schema. The newest record has to be what today's
// library sends: if that was released, record it under a new name, and leave the old ones as they are.
func TestOlderLibrariesWorkOnTheNewestSchema(t *testing.T) {
	t.Parallel()
	today := recordToday(t)
	if *recordFlag != "" {
		text, err := json.MarshalIndent(today, "", " ")
		if err == nil {
			err = os.WriteFile(filepath.Join(records, *recordFlag+".json"), append(text, '\n'), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(records + "/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no records: %v", err)
	}
	slices.Sort(files)
	for i, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var old record
			if err := json.Unmarshal(text, &old); err != nil {
				t.Fatal(err)
			}
			play(t, old)
			if i == len(files)-1 && !slices.EqualFunc(old.Statements, today.Statements, func(a, b statement) bool { return a.SQL == b.SQL }) {
				t.Errorf("the library sends other statements by now: go test ./integration_test -run %s -record VERSION", t.Name())
			}
		})
	}
}

// play sends what was recorded and wants the same answers.
func play(t *testing.T, old record) {
	t.Helper()
	pool := connect(t, newMigrated(t), 1)
	for _, s := range old.Statements {
		got := describe(t, pool, s.SQL)
		if !slices.Equal(got.Arguments, s.Arguments) || !slices.Equal(got.Columns, s.Columns) {
			t.Errorf("%s\nhas arguments %v and columns %v,\nand had        %v and        %v", s.SQL, got.Arguments, got.Columns, s.Arguments, s.Columns)
		}
	}
	for i, c := range old.Calls {
		if got := send(t, pool, old.Statements[c.Statement].SQL, c.Arguments); got != c.Answer {
			t.Fatalf("call %d: %s\nis answered %s,\nand was      %s", i, old.Statements[c.Statement].SQL, got, c.Answer)
		}
	}
}

// describe has the database say what a statement takes and gives.
func describe(t *testing.T, pool *pgxpool.Pool, sql string) statement {
	t.Helper()
	s := statement{SQL: sql}
	description, err := acquireFor(t, pool, func(conn *pgx.Conn) (*pgconn.StatementDescription, error) {
		return conn.PgConn().Prepare(t.Context(), "", sql, nil)
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	s.Arguments = description.ParamOIDs
	for _, f := range description.Fields {
		s.Columns = append(s.Columns, fmt.Sprint(f.Name, " ", f.DataTypeOID))
	}
	return s
}

func acquireFor[T any](t *testing.T, pool *pgxpool.Pool, do func(conn *pgx.Conn) (T, error)) (result T, err error) {
	t.Helper()
	err = pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
		result, err = do(c.Conn())
		return err
	})
	return result, err
}

// send sends a statement with arguments as text.
func send(t *testing.T, pool *pgxpool.Pool, sql string, arguments []*string) (answer string) {
	t.Helper()
	var args []any
	for _, a := range arguments {
		args = append(args, a)
	}
	err := pool.QueryRow(t.Context(), "SELECT encode(record_send(q), 'hex') FROM ("+sql+") AS q", args...).Scan(&answer)
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr):
		return fmt.Sprintf("%s %s %s", pgErr.Code, pgErr.Message, pgErr.Detail)
	case err != nil:
		t.Fatalf("%s: %v", sql, err)
	}
	return answer
}

// recorder notes what is sent on a *sql.DB.
type recorder struct {
	db   *sql.DB
	sent []sent
}

type sent struct {
	sql       string
	arguments []*string
}

func (r *recorder) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	r.note(query, args)
	return r.db.QueryContext(ctx, query, args...)
}

func (r *recorder) note(query string, args []any) {
	// The library has it in the form in which the row comes as one column: what counts is what is inside.
	query = strings.TrimSuffix(strings.TrimPrefix(query, "SELECT encode(record_send(q), 'hex') FROM ("), ") AS q")
	s := sent{sql: query}
	for _, arg := range args {
		if arg == nil {
			s.arguments = append(s.arguments, nil)
			continue
		}
		text := arg.(string)
		s.arguments = append(s.arguments, &text)
	}
	r.sent = append(r.sent, s)
}

// recordToday uses the library as it is in every way, at instants that are always the same.
func recordToday(t *testing.T) record {
	t.Helper()
	url := newMigrated(t)
	r := &recorder{db: openSQL(t, "pgx", url, 1)}
	db := ratelimit.SQL(r)
	limiter, clock := newLimiter()
	ctx := shardpick.With(t.Context(), func(int) (int, int) { return 0, 1 })

	bucket := ratelimit.TokenBucket("bucket", 3, time.Second, ratelimit.Capacity(5), ratelimit.MaxReserved(4))
	window := ratelimit.FixedWindow("window", 4, time.Minute, ratelimit.Start(noon))
	hashed := ratelimit.FixedWindow("hashed", 2.5, 7*time.Second, ratelimit.Capacity(6))
	sharded := ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3), ratelimit.MaxReserved(5))
	shardedWindow := ratelimit.FixedWindow("sharded window", 9, time.Hour, ratelimit.Shards(2))
	all := []ratelimit.Limit{bucket, window, hashed, sharded, shardedWindow}
	must := func(err error) {
		t.Helper()
		if err != nil && !denied(err) {
			t.Fatal(err)
		}
	}
	for round := range 6 {
		for i, limit := range all {
			request := limit.Key("ann").Count(float64(1 + (round+i)%3))
			_, err := limiter.Check(ctx, db, request)
			must(err)
			result, err := limiter.Consume(ctx, db, request)
			must(err)
			_, err = limiter.Consume(ctx, db, request, all[(i+1)%len(all)].Key("bob"))
			must(err)
			_, err = limiter.Charge(ctx, db, limit.Key("ann").Count(0.25))
			must(err)
			_, err = limiter.Refund(ctx, db, result.At, limit.Key("ann").Count(0.5))
			must(err)
			clock.Advance(311 * time.Millisecond)
		}
		_, err := limiter.Consume(ctx, db, bucket.Key("ann").Reserve(), sharded.Key("ann").Reserve())
		must(err)
		_, err = limiter.Consume(ctx, db, bucket.Key("ann"), window.Key("ann"), hashed.Key("ann"))
		must(err)
		if round == 3 {
			must(limiter.Reset(ctx, db, bucket.Key("ann"), sharded.Key("ann")))
		}
		recordRaising(ctx, t, r, limiter, bucket.Key("ann"))
		recordRaising(ctx, t, r, limiter, sharded.Key("cid").Count(3))
		recordRaising(ctx, t, r, limiter, bucket.Key("ann"), window.Key("dan"))
		recordRaising(ctx, t, r, limiter, bucket.Key("ann"), sharded.Key("cid"))
		recordCoalesced(ctx, t, r, clock.now)
		start, now := noon, clock.now.Add(time.Hour+time.Minute)
		_, err = dbsqlc.New(sqlcOn{db: ratelimit.SQL(r)}).Sweep(ctx, dbsqlc.SweepParams{ // which the library does in a transaction of its own
			Name: "window", Rate: 4, Period: time.Minute, Kind: string(ratelimit.KindFixedWindow), Capacity: 4,
			Start: &start, Now: &now,
		})
		must(err)
		clock.Advance(1700 * time.Millisecond)
	}

	// The same again, on a schema of its own, for the types and the answers: what went by a batch was only noted down above.
	var recorded record
	pool := connect(t, newMigrated(t), 1)
	for _, s := range r.sent {
		i := slices.IndexFunc(recorded.Statements, func(other statement) bool { return other.SQL == s.sql })
		if i < 0 {
			i = len(recorded.Statements)
			recorded.Statements = append(recorded.Statements, describe(t, pool, s.sql))
		}
		recorded.Calls = append(recorded.Calls, recordedCall{Statement: i, Arguments: s.arguments, Answer: send(t, pool, s.sql, s.arguments)})
	}
	return recorded
}

// sqlcOn is a DB for sqlc's code, which calls QueryRow alone.
type sqlcOn struct {
	dbsqlc.DBTX
	db ratelimit.DB
}

func (s sqlcOn) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return s.db.QueryRow(ctx, sql, args...)
}

// recordRaising notes down what would be sent in a batch.
func recordRaising(ctx context.Context, t *testing.T, r *recorder, limiter *ratelimit.Limiter, requests ...ratelimit.Request) {
	t.Helper()
	batch := &pgx.Batch{}
	if _, err := limiter.QueueConsume(ctx, batch, requests...); err != nil {
		t.Fatal(err)
	}
	for _, q := range batch.QueuedQueries {
		query, args, err := q.Arguments[0].(pgx.QueryRewriter).RewriteQuery(ctx, nil, q.SQL, q.Arguments[1:])
		if err != nil {
			t.Fatal(err)
		}
		r.note(query, args)
	}
}

// recordCoalesced notes down what a coalescer sends: two keys that are asked for alike, and one with different counts.
func recordCoalesced(ctx context.Context, t *testing.T, r *recorder, now time.Time) {
	t.Helper()
	grid := pgtype.Timestamptz{Time: noon.Add(-time.Hour), Valid: true}
	n := len(r.sent)
	_, _ = dbsqlc.New(sqlcOn{db: ratelimit.SQL(r)}).Coalesce(ctx, dbsqlc.CoalesceParams{ // its columns are nothing that database/sql can scan
		Names: []string{"coalesced", "coalesced window"}, Rates: []float64{2, 3}, Periods: []time.Duration{time.Second, time.Minute},
		Capacities: []float64{4, 3}, Keys: []string{"ann", "bob", "cid"}, Defs: []int32{1, 2, 1}, Starts: []pgtype.Timestamptz{{}, grid, {}},
		Repeats: []int32{3, 1}, Counts: []float64{1, 2}, Floors: []float64{0, -5},
		Calls: []int32{0, 1}, Asks: []int32{3, 3}, AskDefs: []int32{1, 1}, AskStarts: []pgtype.Timestamptz{{}, {}},
		AskCounts: []float64{1.5, 2}, AskFloors: []float64{0, 0}, Now: &now,
	})
	if len(r.sent) != n+1 {
		t.Fatal("the coalescer's statement was not sent")
	}
}
