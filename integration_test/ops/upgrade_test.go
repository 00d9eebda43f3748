package ops_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
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
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/migrationgen"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// Upgrades rely on these rules. Operators migrate first and then deploy.
//
//   - A newer schema serves older libraries: no function changes its arguments, columns or answers. If one must, it gets a new name.
//     TestOlderLibrariesWorkOnTheNewestSchema
//   - A newer library on an older schema fails closed in its new functions, with an error that says what is missing. The rest works.
//     TestTheLibraryOnOlderSchemas
//   - Migrations do not disturb running calls. TestMigrationsUnderTraffic

// uses are all ways in which the library uses the schema, each with the migration that it needs.
var uses = []struct {
	name      string
	migration int64
	try       func(ctx context.Context, pool *pgxpool.Pool) error
}{
	{"check", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Check(ctx, pool, plain.Key("a"), wide.Key("a"))
		return err
	}},
	{"consume", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, plain.Key("a"))
		return err
	}},
	{"consume sharded", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, wide.Key("a"))
		return err
	}},
	{"consume several", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, plain.Key("a"), plain.Key("b"))
		return err
	}},
	{"consume several, some sharded", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, pool, plain.Key("a"), wide.Key("b"))
		return err
	}},
	{"charge", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Charge(ctx, pool, plain.Key("a"))
		return err
	}},
	{"refund", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := new(ratelimit.Limiter).Refund(ctx, pool, harness.ReceiptOf(harness.Noon, plain.Key("a")), plain.Key("a"))
		return err
	}},
	{"reset", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		return new(ratelimit.Limiter).Reset(ctx, pool, plain.Key("a"))
	}},
	{"InTx", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		var limiter ratelimit.Limiter
		return limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limiter.Consume(ctx, tx, plain.Key("a"))
			return err
		})
	}},
	{"Coalescer", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		return harness.Coalesce(ctx, &ratelimit.Coalescer{Pool: pool}, func(ctx context.Context, db ratelimit.DB) error {
			_, err := new(ratelimit.Limiter).Consume(ctx, db, plain.Key(rand.Text()))
			return err
		})
	}},
	{"SendTx", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		return sendTx(ctx, pool, plain.Key("a"))
	}},
	{"SendTx, denied", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		var err error
		for err == nil { // until a call is denied
			err = sendTx(ctx, pool, plain.Key("b").Count(plain.Capacity()))
		}
		if harness.Denied(err) {
			return nil
		}
		return err
	}},
	{"InTx, Hot", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
		return new(ratelimit.Limiter).InTx(ctx, pool, func(context.Context, pgx.Tx) error { return nil }, ratelimit.Hot(plain.Key("a")))
	}},
	{"Sweep", 1, func(ctx context.Context, pool *pgxpool.Pool) error {
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
	newest := int64(len(harness.NewGoose(t, harness.OpenSQL(t, "pgx", harness.NewDatabase(t), 2), migrated.Files(), migrations.VersionTable).ListSources()))
	for version := range newest + 1 {
		t.Run(fmt.Sprint("version ", version), func(t *testing.T) {
			t.Parallel()
			if version < 5 {
				harness.NeedsToPrepareAgain(t)
			}
			url := harness.NewDatabase(t)
			if version > 0 {
				provider := harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), migrated.Files(), migrations.VersionTable)
				if _, err := provider.UpTo(t.Context(), version); err != nil {
					t.Fatal(err)
				}
			}
			pool := harness.Connect(t, url, 4)
			for _, use := range uses {
				err := use.try(t.Context(), pool)
				if version >= use.migration {
					if err != nil {
						t.Errorf("%s needs migration %d, and on %d: %v", use.name, use.migration, version, err)
					}
					continue
				}
				// The call fails closed, and the error says what to look for. (A missing view has another SQLSTATE, and so has a missing schema.)
				if state := harness.SQLState(err); state != "42883" && state != "42P01" && state != "3F000" {
					t.Errorf("%s needs migration %d, and on %d: %v", use.name, use.migration, version, err)
				} else if !strings.Contains(err.Error(), "has the schema of package migrations been migrated") {
					t.Errorf("%s on %d does not say what is missing: %v", use.name, version, err)
				}
			}
		})
	}
}

// clone is a copy of the directory of migrations, as in a developer's clone.
type clone struct {
	*testing.T
	dir string
}

func newClone(t *testing.T) clone {
	t.Helper()
	c := clone{t, t.TempDir()}
	if err := os.CopyFS(c.dir, os.DirFS(harness.MigrationsDir())); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c clone) read(name string) string {
	c.Helper()
	text, err := os.ReadFile(filepath.Join(c.dir, name))
	if err != nil {
		c.Fatal(err)
	}
	return string(text)
}

func (c clone) write(name, text string) {
	c.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
		c.Fatal(err)
	}
}

// edit replaces a text that occurs once in a file.
func (c clone) edit(name, old, with string) {
	c.Helper()
	text := c.read(name)
	if n := strings.Count(text, old); n != 1 {
		c.Fatalf("%q is %d times in %s", old, n, name)
	}
	c.write(name, strings.Replace(text, old, with, 1))
}

// unreleased is a clone of the engine alone, with one migration that makes all of it.
func (c clone) unreleased() clone {
	c.Helper()
	whole := clone{c.T, c.TempDir()}
	harness.Succeeds(c, os.CopyFS(whole.dir, os.DirFS(c.dir)))
	for _, name := range whole.migrations() {
		harness.Succeeds(c, os.Remove(filepath.Join(whole.dir, name)))
	}
	whole.write("released.sha256", "")
	whole.generate()
	return whole
}

// generate does what make generate does.
func (c clone) generate() {
	c.Helper()
	if err := migrationgen.Write(c.dir); err != nil {
		c.Fatal(err)
	}
}

// migrations returns the names of the files for goose.
func (c clone) migrations() []string {
	c.Helper()
	names, err := fs.Glob(os.DirFS(c.dir), "0*.sql")
	if err != nil {
		c.Fatal(err)
	}
	return names
}

// release releases all migrations.
func (c clone) release() {
	c.Helper()
	const list = "released.sha256"
	for _, name := range c.migrations() {
		if text := c.read(list); !strings.Contains(text, name+"\n") {
			c.write(list, fmt.Sprintf("%s%x  %s\n", text, sha256.Sum256([]byte(c.read(name))), name))
		}
	}
}

// files returns all files, with their texts.
func (c clone) files() map[string]string {
	c.Helper()
	files := map[string]string{}
	err := fs.WalkDir(os.DirFS(c.dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files[name] = c.read(name)
		}
		return err
	})
	if err != nil {
		c.Fatal(err)
	}
	return files
}

// later makes a release of today's engine, and three more.
func (c clone) later() {
	c.Helper()
	c.release()
	for _, change := range []func(){
		c.oneLine,
		func() { // a changed body, and a new function
			c.edit("engine/consume.sql", "-- Locks nothing.", "-- Locks nothing, again.")
			c.write("engine/reset.sql", c.read("engine/reset.sql")+`
CREATE OR REPLACE FUNCTION ratelimit.rows(name text, OUT rows bigint)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    SELECT count(*) INTO rows FROM ratelimit.limits AS r WHERE r.name = name;
END
$body$;

COMMENT ON FUNCTION ratelimit.rows(text) IS 'How many rows a limit has; not how many keys.';
`)
		},
		func() { // a changed comment, and two changed bodies, one of them for the second time
			c.edit("engine/keys.sql", "The limited keys:", "The keys limited now:")
			c.edit("engine/reset.sql", "count(*) INTO rows", "count(r.key) INTO rows")
			c.edit("engine/apply.sql", "lost a hundred races", "lost one hundred races")
		},
	} {
		change()
		c.generate()
		c.release()
	}
}

// oneLine changes one line of ratelimit._apply.
func (c clone) oneLine() {
	c.Helper()
	c.edit("engine/apply.sql", "lost 100 races", "lost a hundred races")
}

// TestAOneLineChangeAfterARelease shows what a fix of one function takes: one line in the source, and a migration with this
// function and the schema's number alone.
func TestAOneLineChangeAfterARelease(t *testing.T) {
	t.Parallel()
	c := newClone(t)
	c.release()
	before, released := c.files(), len(c.migrations())
	c.oneLine()
	c.generate()
	after := c.files()

	names := c.migrations()
	if len(names) != released+1 {
		t.Fatalf("the migrations are %v", names)
	}
	migration := names[released]
	for name, text := range after {
		if changed := text != before[name]; changed != (name == migration || name == "engine/apply.sql") {
			t.Errorf("%s: changed %v", name, changed)
		}
	}
	was, is := strings.Split(before["engine/apply.sql"], "\n"), strings.Split(after["engine/apply.sql"], "\n")
	differ := 0
	for i := range was {
		if was[i] != is[i] {
			differ++
			t.Logf("the change:\n-%s\n+%s", was[i], is[i])
		}
	}
	if len(was) != len(is) || differ != 1 {
		t.Errorf("%d lines differ", differ)
	}
	t.Logf("%s:\n%s", migration, after[migration])
	up, down, _ := strings.Cut(after[migration], "-- +goose Down")
	for direction, other := range map[string]string{up: "lost 100 races", down: "lost a hundred races"} {
		if strings.Count(direction, "\nCREATE ") != 2 || !strings.Contains(direction, "ratelimit.schema(") || strings.Count(direction, "ratelimit._apply(") != 1 || strings.Contains(direction, other) {
			t.Errorf("one direction is\n%s", direction)
		}
	}

	url := harness.NewDatabase(t)
	pool := harness.Connect(t, url, 1)
	provider := harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), os.DirFS(c.dir), migrations.VersionTable)
	at := func(version int) string {
		t.Helper()
		goTo(t, provider, int64(version))
		return catalog(t, pool, "ratelimit")
	}
	old := at(released)
	want := strings.Replace(old, "lost 100 races", "lost a hundred races", 1)
	want = strings.Replace(want, fmt.Sprintf("version := '%d'", released), fmt.Sprintf("version := '%d'", released+1), 1)
	if at(released+1) != want || want == old {
		t.Error("the migration does not change ratelimit._apply and the number alone")
	}
	if at(released) != old {
		t.Error("Down does not restore the old function")
	}
}

// goTo migrates to a version, up or down.
func goTo(t *testing.T, provider *goose.Provider, version int64) {
	t.Helper()
	now, err := provider.GetDBVersion(t.Context())
	if err == nil && now < version {
		_, err = provider.UpTo(t.Context(), version)
	} else if err == nil {
		_, err = provider.DownTo(t.Context(), version)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestEveryUpgradePathLeadsToTheSame migrates from each version to each other, in a history that continues after today's
// with changes of all kinds. A version is the same whatever the path to it, and the newest one is what the engine makes in a new database.
func TestEveryUpgradePathLeadsToTheSame(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	c := newClone(t)
	c.later()
	// The table changes by a hand-written migration, as the generator asks for.
	c.edit("engine/table.sql", "    PRIMARY KEY", "    more   integer          NOT NULL DEFAULT 0,\n    PRIMARY KEY")
	c.edit("engine/consume.sql", "-- Locks nothing, again.", "-- Locks nothing, not even more.")
	err := migrationgen.Write(c.dir)
	if err == nil {
		t.Fatal("the generator has a migration for the table")
	}
	asked := err.Error()[strings.LastIndex(err.Error(), "\n")+1:]
	c.write(fmt.Sprintf("%05d_more.sql", len(c.migrations())+1), "-- +goose Up\n"+asked+"\n"+
		"ALTER TABLE ratelimit.limits ADD more integer NOT NULL DEFAULT 0;\n-- +goose Down\nALTER TABLE ratelimit.limits DROP more;\n")
	c.generate()

	open := func(t *testing.T) (*pgxpool.Pool, *goose.Provider) {
		url := harness.NewDatabase(t)
		return harness.Connect(t, url, 1), harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), os.DirFS(c.dir), migrations.VersionTable)
	}
	newest := len(c.migrations())
	catalogs := make([]string, newest+1)
	for version := range catalogs {
		pool, provider := open(t)
		goTo(t, provider, int64(version))
		catalogs[version] = catalog(t, pool, "ratelimit")
		if version > 0 && catalogs[version] == catalogs[version-1] {
			t.Errorf("migration %d changes nothing", version)
		}
		if version > 0 {
			harness.Works(t, pool)
		}
	}
	pool := harness.Connect(t, harness.NewDatabase(t), 1)
	harness.MustExec(t, pool, "CREATE SCHEMA ratelimit; "+harness.UpOf(t, os.DirFS(c.unreleased().dir)))
	if got := strings.Replace(catalog(t, pool, "ratelimit"), "version := '1'", fmt.Sprintf("version := '%d'", newest), 1); got != catalogs[newest] {
		t.Errorf("the engine makes %s", differences(got, catalogs[newest]))
	}
	harness.Works(t, pool)
	for from := range catalogs {
		t.Run(fmt.Sprint("from ", from), func(t *testing.T) {
			t.Parallel()
			pool, provider := open(t)
			for to := range catalogs {
				for _, version := range []int{from, to} {
					goTo(t, provider, int64(version))
					if got := catalog(t, pool, "ratelimit"); got != catalogs[version] {
						t.Fatalf("from %d to %d and at %d, there is %s", from, to, version, differences(got, catalogs[version]))
					}
				}
			}
		})
	}
}

// TestRightsSurviveAMigration: a migration brings a function, and one that was there calls it. Who may use the functions may use the new one, and
// nobody else.
func TestRightsSurviveAMigration(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	c := newClone(t)
	c.later()
	url := harness.NewDatabase(t)
	provider := harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), os.DirFS(c.dir), migrations.VersionTable)
	goTo(t, provider, 1)
	owner := harness.Connect(t, url, 2)
	app, looker, stranger := harness.CreateRole(t, owner), harness.CreateRole(t, owner), harness.CreateRole(t, owner)
	harness.GrantWork(t, owner, app, "consume")
	harness.GrantWork(t, owner, looker, "look")
	harness.MustExec(t, owner, "GRANT USAGE ON SCHEMA ratelimit TO "+stranger)
	goTo(t, provider, int64(len(c.migrations())))
	for _, role := range []string{app, looker} {
		harness.MustExec(t, harness.AsRole(t, owner, role, 1), "SELECT ratelimit.rows('l')")
	}
	harness.WantRefused(t, harness.AsRole(t, owner, stranger, 1), "SELECT ratelimit.rows('l')")
	wantWays(t, everyVerb(t, harness.AsRole(t, owner, app, 2)))
	goTo(t, provider, 1)
	wantWays(t, everyVerb(t, harness.AsRole(t, owner, app, 2)))
}

// TestMigrationsUnderTraffic migrates from the first version to the newest of a history that continues after today's, back
// and up again, while the library is in use. No call fails or waits for long, no more is granted than is due, and no row is
// touched.
func TestMigrationsUnderTraffic(t *testing.T) {
	t.Parallel()
	c := newClone(t)
	c.later()
	url := harness.NewDatabase(t)
	provider := harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), os.DirFS(c.dir), migrations.VersionTable)
	const first = 1
	goTo(t, provider, first)
	pool := harness.Connect(t, url, 8)
	harness.Seed(t, pool)
	const untouched = `SELECT string_agg(concat_ws(' ', ctid, xmin, xmax, r), E'\n' ORDER BY name, key, shard) FROM ratelimit.limits AS r WHERE name NOT LIKE '%traffic'`
	var before string
	if err := pool.QueryRow(t.Context(), untouched).Scan(&before); err != nil || strings.Count(before, "\n") < 2 {
		t.Fatalf("the rows are %q, %v", before, err)
	}

	const rate, capacity = 10, 10
	limit := ratelimit.TokenBucket("traffic", rate, time.Second, ratelimit.Capacity(capacity))
	sharded := ratelimit.TokenBucket("sharded traffic", rate, time.Second, ratelimit.Capacity(capacity), ratelimit.Shards(2))
	var limiter ratelimit.Limiter
	var granted, calls atomic.Int64
	var stop atomic.Bool
	begin := time.Now()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
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
				}, ratelimit.Isolation(harness.Levels[g%3]), ratelimit.Attempts(1000))
				switch {
				case err == nil:
					granted.Add(1)
				case harness.Denied(err):
					time.Sleep(time.Millisecond)
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	step := func(version int64) {
		before := calls.Load()
		goTo(t, provider, version)
		for deadline := time.Now().Add(harness.Patience); calls.Load() < before+10 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		if calls.Load() < before+10 {
			t.Errorf("to version %d: traffic stands still", version)
		}
	}
	newest := int64(len(provider.ListSources()))
	if newest < first+3 {
		t.Errorf("there are %d migrations", newest)
	}
	for range 2 {
		for version := int64(first) + 1; version <= newest; version++ {
			step(version)
		}
		for version := newest - 1; version >= first; version-- {
			step(version)
		}
	}
	step(newest)
	for deadline := time.Now().Add(harness.Patience); calls.Load() < granted.Load()+10 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond) // until only the bound stops them
	}
	stop.Store(true)
	wg.Wait()
	bound := capacity + int64(time.Since(begin).Seconds()*rate)
	t.Logf("%d calls, %d granted of at most %d, %d migrations", calls.Load(), granted.Load(), bound, newest)
	if granted.Load() > bound {
		t.Errorf("%d were granted, %d are due", granted.Load(), bound)
	}
	if granted.Load() < capacity || calls.Load() < granted.Load()+10 {
		t.Errorf("%d calls, %d of them granted: they did not reach the bound", calls.Load(), granted.Load())
	}
	var after string
	if err := pool.QueryRow(t.Context(), untouched).Scan(&after); err != nil || after != before {
		t.Errorf("the rows were\n%s\nand are\n%s, %v", before, after, err)
	}
	for _, use := range uses {
		if err := use.try(t.Context(), pool); err != nil {
			t.Errorf("%s: %v", use.name, err)
		}
	}
}

// A record has the statements of a released version of the library, and the answers: testdata/statements/VERSION.json.
type record struct {
	Statements []statement
	Calls      []recordedCall
}

// statement is a statement that the library prepares. Its arguments and columns must keep these types, or connections fail.
type statement struct {
	SQL       string
	Arguments []uint32
	Columns   []string // with types
}

type recordedCall struct {
	Statement int
	Arguments []*string
	Answer    string // the row, in Postgres' binary format; or the error
}

var recordFlag = flag.String("record", "", "write the statements of the library as it is as those of this version, before it is released")

const records = "testdata/statements"

// TestOlderLibrariesWorkOnTheNewestSchema runs the statements of each version on today's schema. The newest record must
// have the statements of today's library. If that version was released, record today's under a new name, and keep the old
// records.
func TestOlderLibrariesWorkOnTheNewestSchema(t *testing.T) {
	t.Parallel()
	today := recordToday(t)
	if *recordFlag != "" {
		text, err := json.Marshal(today)
		harness.Succeeds(t, err)
		text = bytes.ReplaceAll(text, []byte("},{"), []byte("},\n{")) // a statement or a call a line
		harness.Succeeds(t, os.WriteFile(filepath.Join(records, *recordFlag+".json"), append(text, '\n'), 0o644))
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

// play runs the statements of a record and wants the same answers.
func play(t *testing.T, old record) {
	t.Helper()
	pool := harness.Connect(t, harness.NewMigrated(t), 1)
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

// describe returns a statement's argument types and columns, from the database.
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

// send sends a statement with its arguments as text.
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

// recorder records the statements on a *sql.DB.
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
	// The library sends a form that returns the row as one column. Record the inner statement.
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

// recordToday uses today's library in every way, always at the same instants.
func recordToday(t *testing.T) record {
	t.Helper()
	url := harness.NewMigrated(t)
	r := &recorder{db: harness.OpenSQL(t, "pgx", url, 1)}
	db := ratelimit.SQL(r)
	limiter, clock := harness.NewLimiter()
	ctx := shardpick.With(t.Context(), func(int) (int, int) { return 0, 1 })

	bucket := ratelimit.TokenBucket("bucket", 3, time.Second, ratelimit.Capacity(5), ratelimit.MaxReserved(4))
	window := ratelimit.FixedWindow("window", 4, time.Minute, ratelimit.Start(harness.Noon))
	hashed := ratelimit.FixedWindow("hashed", 2.5, 7*time.Second, ratelimit.Capacity(6))
	sharded := ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3), ratelimit.MaxReserved(5))
	shardedWindow := ratelimit.FixedWindow("sharded window", 9, time.Hour, ratelimit.Shards(2))
	all := []ratelimit.Limit{bucket, window, hashed, sharded, shardedWindow}
	must := func(err error) {
		t.Helper()
		if err != nil && !harness.Denied(err) {
			t.Fatal(err)
		}
	}
	receipts := make([]ratelimit.Receipt, len(all)) // of the last granted consumption
	for round := range 6 {
		for i, limit := range all {
			request := limit.Key("ann").Count(float64(1 + (round+i)%3))
			_, err := limiter.Check(ctx, db, request)
			must(err)
			result, err := limiter.Consume(ctx, db, request)
			must(err)
			if result.OK {
				receipts[i] = result.Receipt()
			}
			_, err = limiter.Consume(ctx, db, request, all[(i+1)%len(all)].Key("bob"))
			must(err)
			_, err = limiter.Charge(ctx, db, limit.Key("ann").Count(0.25))
			must(err)
			_, err = limiter.Refund(ctx, db, receipts[i], limit.Key("ann").Count(0.5))
			must(err)
			clock.Advance(311 * time.Millisecond)
		}
		both := []ratelimit.Request{bucket.Key("ann"), sharded.Key("ann")}
		reserved, err := limiter.Reserve(ctx, db, both...)
		must(err)
		if err == nil {
			_, err = limiter.Refund(ctx, db, reserved.Receipt(), both...)
			must(err)
		}
		_, err = limiter.Consume(ctx, db, bucket.Key("ann"), window.Key("ann"), hashed.Key("ann"))
		must(err)
		if round == 3 {
			must(limiter.Reset(ctx, db, bucket.Key("ann"), sharded.Key("ann")))
		}
		recordRaising(ctx, t, r, limiter, bucket.Key("ann"))
		recordRaising(ctx, t, r, limiter, sharded.Key("cid").Count(3))
		recordRaising(ctx, t, r, limiter, bucket.Key("ann"), window.Key("dan"))
		recordRaising(ctx, t, r, limiter, bucket.Key("ann"), sharded.Key("cid"))
		recordCoalesced(ctx, t, r, clock.At)
		start, now := harness.Noon, clock.At.Add(time.Hour+time.Minute)
		_, err = dbsqlc.New(sqlcOn{db: ratelimit.SQL(r)}).Sweep(ctx, dbsqlc.SweepParams{ // the library sends this in its own transaction
			Name: "window", Rate: 4, Period: time.Minute, Kind: "fixed window", Capacity: 4,
			Start: &start, Now: &now,
		})
		must(err)
		clock.Advance(1700 * time.Millisecond)
	}

	// The same statements again, on another schema, for the types and the answers. Those of a batch were only recorded
	// above.
	var recorded record
	pool := harness.Connect(t, harness.NewMigrated(t), 1)
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

// sqlcOn is a DB for sqlc's code, which calls only QueryRow.
type sqlcOn struct {
	dbsqlc.DBTX
	db ratelimit.DB
}

func (s sqlcOn) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return s.db.QueryRow(ctx, sql, args...)
}

// recordRaising records the statements of a batch.
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

// recordCoalesced records a coalescer's statements: for two keys with equal counts, and for one with different counts.
func recordCoalesced(ctx context.Context, t *testing.T, r *recorder, now time.Time) {
	t.Helper()
	grid := pgtype.Timestamptz{Time: harness.Noon.Add(-time.Hour), Valid: true}
	n := len(r.sent)
	_, _ = dbsqlc.New(sqlcOn{db: ratelimit.SQL(r)}).Coalesce(ctx, dbsqlc.CoalesceParams{ // database/sql cannot scan its columns
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
