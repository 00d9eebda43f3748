package ops_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// TestOpenFollowsItsOwnPool: a program with two servers opens a Limiter for each, which follows its own, and OnError is told of both.
func TestOpenFollowsItsOwnPool(t *testing.T) {
	t.Parallel()
	var told atomic.Int64
	o := ratelimit.Options{
		Program: "shop", Limits: []ratelimit.Limit{harness.OpenedBucket}, OverridesEvery: soon,
		OnError: func(error) { told.Add(1) },
	}
	pools := []*pgxpool.Pool{harness.NewPool(t, 4), harness.NewPool(t, 4)}
	for i, pool := range pools {
		harness.MustExec(t, pool, fmt.Sprintf("SELECT ratelimit.block('opened', 'of %d', forever => true)", i))
	}
	limits := []*ratelimit.Limiter{harness.Open(t, pools[0], o), harness.Open(t, pools[1], o)}
	for i, l := range limits {
		for j := range pools {
			if _, err := l.Consume(t.Context(), pools[i], harness.OpenedBucket.Key(fmt.Sprintf("of %d", j))); harness.Denied(err) != (i == j) {
				t.Errorf("the block of pool %d, on pool %d: %v", j, i, err)
			}
		}
	}
	harness.MustExec(t, pools[1], "ALTER TABLE ratelimit.overrides RENAME TO away")
	harness.Eventually(t, "OnError is told of a poll that failed", func() bool { return told.Load() > 0 })
	harness.MustExec(t, pools[1], "ALTER TABLE ratelimit.away RENAME TO overrides")
}

func TestOpenStartsEverything(t *testing.T) {
	t.Parallel()
	for name, handle := range map[string]func(t *testing.T, url string, pool *pgxpool.Pool) ratelimit.DB{
		"pool": func(_ *testing.T, _ string, pool *pgxpool.Pool) ratelimit.DB { return pool },
		"sql": func(t *testing.T, url string, _ *pgxpool.Pool) ratelimit.DB {
			return ratelimit.SQL(harness.OpenSQL(t, "pgx", url, 4))
		},
		"lib/pq": func(t *testing.T, url string, _ *pgxpool.Pool) ratelimit.DB {
			return ratelimit.SQL(harness.OpenSQL(t, "postgres", url, 4))
		},
		"coalescer": func(_ *testing.T, _ string, pool *pgxpool.Pool) ratelimit.DB { return &ratelimit.Coalescer{Pool: pool} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := harness.NewMigrated(t)
			pool := harness.Connect(t, url, 6)
			harness.MustExec(t, pool, "INSERT INTO ratelimit.limits SELECT 'opened', 'idle ' || i, 0, 1, 100, now() - interval '2 hours' FROM generate_series(1, 1500) AS i")
			harness.MustExec(t, pool, "SELECT ratelimit.block('opened', 'eve', reason => 'before the start', forever => true)")
			o := harness.Opening(handle(t, url, pool))
			o.SweepEvery = 50 * time.Millisecond
			var observed atomic.Int64
			o.Observer = func(context.Context, ratelimit.Decision) { observed.Add(1) }
			limits := harness.Open(t, handle(t, url, pool), o)

			// The block holds for the first call.
			if _, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("eve")); !harness.Denied(err) {
				t.Errorf("a key that was blocked before: %v", err)
			}
			if got := harness.Scan[string](t, pool, "SELECT string_agg(name, ' ' ORDER BY name) FROM ratelimit.definitions WHERE program = 'shop' AND current"); got != "opened openedWindow" {
				t.Errorf("published: %s", got)
			}
			harness.MustExec(t, pool, "SELECT ratelimit.block('opened', 'bob', forever => true)")
			harness.Eventually(t, "a later block is followed", func() bool {
				_, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("bob"))
				return harness.Denied(err)
			})
			harness.Eventually(t, "idle rows are swept", func() bool {
				return harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.limits WHERE key LIKE 'idle%'") == 0
			})
			calls := observed.Load()
			harness.CloseLimiter(t, limits)
			var recorded int64
			for _, u := range usageOf(t, pool) {
				recorded += u.Granted + u.Denied
			}
			if recorded != calls {
				t.Errorf("%d calls, and %d are recorded", calls, recorded)
			}
		})
	}
}

func TestOpenRefusesWhatItIsGiven(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	conn := harness.Acquire(t, pool)
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	limit, other := ratelimit.TokenBucket("l", 1, time.Hour), ratelimit.TokenBucket("l", 2, time.Hour)
	list := []ratelimit.Limit{limit}
	before := harness.Scan[string](t, pool, "SELECT count(*)::text FROM ratelimit.definitions")
	for name, test := range map[string]struct {
		db      ratelimit.DB
		options ratelimit.Options
		want    string
	}{
		"no database":           {nil, ratelimit.Options{Program: "p", Limits: list}, "the DB is nil"},
		"a connection":          {conn, ratelimit.Options{Program: "p", Limits: list}, "is no pool"},
		"a transaction":         {tx, ratelimit.Options{Program: "p", Limits: list}, "is no pool"},
		"no program":            {pool, ratelimit.Options{Limits: list}, "Options.Program"},
		"no limits":             {pool, ratelimit.Options{Program: "p"}, "Options.Limits is empty"},
		"two of a name":         {pool, ratelimit.Options{Program: "p", Limits: []ratelimit.Limit{limit, other}}, "in the list twice"},
		"an invalid limit":      {pool, ratelimit.Options{Program: "p", Limits: []ratelimit.Limit{ratelimit.TokenBucket("l", -1, time.Hour)}}, "rate"},
		"overrides, and none":   {pool, ratelimit.Options{Program: "p", Limits: list, NoOverrides: true, OverridesEvery: soon}, "NoOverrides"},
		"a slow poll":           {pool, ratelimit.Options{Program: "p", Limits: list, OverridesEvery: time.Minute}, "OverridesEvery is 1m0s"},
		"backwards":             {pool, ratelimit.Options{Program: "p", Limits: list, SweepEvery: -1}, "SweepEvery"},
		"a recorder without DB": {pool, ratelimit.Options{Program: "p", Limits: list, Usage: &usage.Recorder{}}, "usage.Recorder is nil"},
	} {
		limits, err := ratelimit.Open(t.Context(), test.db, test.options)
		if limits != nil || !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, %v", name, limits, err)
		}
	}
	// What only the server refuses: usage that has no tables.
	elsewhere := &usage.Recorder{DB: harness.Connect(t, harness.NewDatabase(t), 1)}
	if _, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{Program: "p", Limits: list, Usage: elsewhere}); err == nil || !strings.HasPrefix(err.Error(), "ratelimit: usage: ") {
		t.Errorf("usage without tables: %v", err)
	}
	if after := harness.Scan[string](t, pool, "SELECT count(*)::text FROM ratelimit.definitions"); after != before {
		t.Errorf("%s definitions are published, and were %s", after, before)
	}
}

func TestAnOpenedLimiterTakesItsListAlone(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limits := harness.Open(t, pool, harness.Opening(pool))
	forgotten := ratelimit.TokenBucket("forgotten", 1, time.Hour)
	receipt := harness.ReceiptOf(time.Now(), forgotten.Key("ann"))
	for name, err := range map[string]error{
		"consume": harness.Second(limits.Consume(t.Context(), pool, forgotten.Key("ann"))),
		"several": harness.Second(limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann"), forgotten.Key("ann"))),
		"balance": harness.Second(limits.Balance(t.Context(), pool, forgotten.Key("ann"))),
		"refund":  harness.Second(limits.Refund(t.Context(), pool, receipt, forgotten.Key("ann"))),
		"pause":   harness.Second(limits.Pause(t.Context(), pool, time.Minute, forgotten.Key("bob"))),
		"resume":  limits.Resume(t.Context(), pool, forgotten.Key("bob")),
		"queue":   harness.Second(limits.QueueConsume(t.Context(), &pgx.Batch{}, forgotten.Key("ann"))),
		"another definition": harness.Second(limits.Consume(t.Context(), pool,
			ratelimit.TokenBucket("opened", 7, time.Hour).Key("ann"))),
	} {
		if !errors.Is(err, ratelimit.ErrInvalid) || name != "another definition" && !strings.Contains(err.Error(), `"forgotten" is not in Options.Limits`) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann"), harness.OpenedWindow.Key("ann")); err != nil {
		t.Error(err)
	}

	o := harness.Opening(pool)
	o.Limits, o.NoPublish, o.NoSweep = nil, true, true
	if _, err := harness.Open(t, pool, o).Consume(t.Context(), pool, forgotten.Key("ann")); err != nil {
		t.Errorf("without a list: %v", err)
	}
}

// TestOpenByTheApplicationsRole takes rights away, one part after another. Each error names its part, and what to grant or to switch off.
func TestOpenByTheApplicationsRole(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	owner := harness.NewPool(t, 2)
	role := harness.CreateRole(t, owner)
	app := harness.AsRole(t, owner, role, 6)
	o := harness.Opening(app)
	o.SweepEvery = time.Hour
	wants := func(what string, texts ...string) {
		t.Helper()
		limits, err := ratelimit.Open(t.Context(), app, o)
		if limits != nil || err == nil {
			t.Fatalf("opened, without %s", what)
		}
		for _, text := range texts {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("without %s: %v\nwant %q", what, err, text)
			}
		}
	}
	harness.MustExec(t, owner, "SELECT 1")
	if harness.DefaultMode(t) != pgx.QueryExecModeCacheStatement || !harness.Server.Pooled() {
		wants("USAGE", "ratelimit: schema: ", "permission denied for schema ratelimit", "ratelimit.grant(")
	}
	harness.MustExec(t, owner, harness.Named("GRANT USAGE ON SCHEMA ratelimit TO app_user", role)+"; "+harness.Execute(role))
	for _, part := range []struct {
		name, grant string
		texts       []string
		off         func()
	}{
		{"overrides", "GRANT SELECT ON ratelimit.overrides TO app_user", []string{"ratelimit: overrides: ", "SELECT on ratelimit.overrides", "Options.NoOverrides"}, func() { o.NoOverrides = true }},
		{"sweep", "GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.limits, ratelimit.holds TO app_user; GRANT SELECT, INSERT, UPDATE ON ratelimit.sweeps TO app_user; GRANT SELECT ON ratelimit.definitions TO app_user",
			[]string{"ratelimit: sweep: ", "SELECT on ratelimit.limits, INSERT on ratelimit.limits, UPDATE on ratelimit.limits, DELETE on ratelimit.limits, SELECT on ratelimit.holds, INSERT on ratelimit.holds, UPDATE on ratelimit.holds, DELETE on ratelimit.holds, SELECT on ratelimit.sweeps, INSERT on ratelimit.sweeps, UPDATE on ratelimit.sweeps, SELECT on ratelimit.definitions", "Options.NoSweep"}, func() { o.NoSweep = true }},
		{"usage", "GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.usage, ratelimit.denials TO app_user", []string{"usage: flush", "on ratelimit.usage and ratelimit.denials", "Options.Usage nil"}, func() { o.Usage = nil }},
		{"publish", "GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.definitions TO app_user", []string{"ratelimit: publish: ", "on ratelimit.definitions", "Options.NoPublish"}, func() { o.NoPublish = true }},
	} {
		wants(part.name, append(part.texts, "SQLSTATE 42501")...)
		before := o
		part.off() // the next part is the first to be refused, or none is
		limits, err := ratelimit.Open(t.Context(), app, o)
		if err == nil {
			harness.CloseLimiter(t, limits)
		} else if strings.Contains(err.Error(), part.texts[0]) {
			t.Errorf("with %s switched off: %v", part.name, err)
		}
		o = before
		harness.MustExec(t, owner, harness.Named(part.grant, role))
	}
	limits := harness.Open(t, app, o)
	if _, err := limits.Consume(t.Context(), app, harness.OpenedBucket.Key("ann")); err != nil {
		t.Error(err)
	}
	// A missing right to look for definitions is the sweep's, too.
	harness.MustExec(t, owner, harness.Named("REVOKE SELECT ON ratelimit.definitions FROM app_user", role))
	o.NoPublish = true
	wants("SELECT on the definitions", "ratelimit: sweep: ", "grant this role SELECT on ratelimit.definitions, or")
}

// TestOpenWhereNothingCanBeWritten opens in sessions that are read-only, as a standby's are. faults has a real one.
func TestOpenWhereNothingCanBeWritten(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 1)
	if _, err := new(ratelimit.Limiter).Consume(t.Context(), owner, harness.OpenedBucket.Key("ann").Count(40)); err != nil {
		t.Fatal(err)
	}
	pool := harness.Reconfigured(t, owner, func(c *pgxpool.Config) {
		c.MaxConns = 4
		harness.StartWith(t, c.ConnConfig, map[string]string{"default_transaction_read_only": "on"})
	})
	openReadOnly(t, pool)
}

// openReadOnly switches off one part after another, until nothing is refused.
func openReadOnly(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	o := harness.Opening(pool)
	for _, part := range []struct {
		text, off string
		set       func()
	}{
		{"ratelimit: sweep: ", "set Options.NoSweep here", func() { o.NoSweep = true }},
		{"ratelimit: usage: flush", "leave Options.Usage nil here", func() { o.Usage = nil }},
		{"ratelimit: publish: ", "set Options.NoPublish here", func() { o.NoPublish = true }},
	} {
		_, err := ratelimit.Open(t.Context(), pool, o)
		if err == nil || harness.SQLState(err) != "25006" || !strings.Contains(err.Error(), part.text) || !strings.Contains(err.Error(), part.off) {
			t.Errorf("%v\nwant %q and %q", err, part.text, part.off)
		}
		part.set()
	}
	limits := harness.Open(t, pool, o)
	if left := harness.ReadBalance(t, limits, pool, harness.OpenedBucket.Key("ann")); left < 60 || left > 61 {
		t.Errorf("ann has %v left", left)
	}
	if _, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann")); harness.SQLState(err) != "25006" {
		t.Errorf("consume: %v", err)
	}
}

func TestOpenWithTheDatabaseDown(t *testing.T) {
	t.Parallel()
	pool, err := harness.OpenPool(t.Context(), "postgres://nobody@127.0.0.1:1/none?sslmode=disable&connect_timeout=5", 2, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	o := harness.Opening(pool)
	var db ratelimit.DB = pool
	for _, part := range []string{"schema", "overrides", "sweep", "usage", "publish"} {
		_, err := ratelimit.Open(t.Context(), db, o)
		if err == nil || !strings.HasPrefix(err.Error(), "ratelimit: "+part+": ") || !strings.Contains(err.Error(), "connect") {
			t.Errorf("%s: %v", part, err)
		}
		switch part {
		case "schema":
			db = harness.Checked{Pool: pool, Schema: harness.NewPool(t, 1), DB: pool}
		case "overrides":
			o.NoOverrides = true
		case "sweep":
			o.NoSweep = true
		case "usage":
			o.Usage = nil
		case "publish":
			o.NoPublish = true
		}
	}
	o.NoBackground = true
	harness.CloseLimiter(t, harness.Open(t, db, o)) // nothing else is asked
}

// TestOpenSaysWhatIsWrongWithTheConnection: no such error passes by itself, so it does not read as one that does.
func TestOpenSaysWhatIsWrongWithTheConnection(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	refused := func(code string) ratelimit.DB { return harness.Refusing{Code: code} }
	wrong := func(change func(c *pgxpool.Config)) ratelimit.DB { return harness.Reconfigured(t, pool, change) }
	rows := map[string]struct {
		db    ratelimit.DB
		state string
		wants string
	}{
		"no table":          {refused("42P01"), "42P01", "Otherwise migrate"},
		"no schema":         {refused("3F000"), "3F000", "migrat"},
		"no right":          {refused("42501"), "42501", "grant this role"},
		"no database":       {refused("3D000"), "3D000", "no such database"},
		"a wrong password":  {refused("28P01"), "28P01", "refused the login"},
		"not in pg_hba":     {refused("28000"), "28000", "refused the login"},
		"another's failure": {refused("57P03"), "57P03", "SQLSTATE 57P03)"},
	}
	if !harness.Server.Pooled() { // PgBouncer answers in its own way
		for name, change := range map[string]func(c *pgxpool.Config){
			"3D000": func(c *pgxpool.Config) { c.ConnConfig.Database = "no such database" },
			"28000": func(c *pgxpool.Config) { c.ConnConfig.User = "nobody_by_this_name" },
		} {
			row := rows[map[string]string{"3D000": "no database", "28000": "not in pg_hba"}[name]]
			row.db = wrong(change)
			if pool.Config().ConnConfig.Password != "" && name == "28000" { // then the server asks nobody's password
				row.state = "28P01"
			}
			rows["really "+name] = row
		}
	}
	for name, row := range rows {
		for _, db := range []ratelimit.DB{row.db, harness.Checked{Pool: pool, Schema: pool, DB: row.db}} {
			o := harness.Opening(row.db)
			o.NoSweep = true
			_, err := ratelimit.Open(t.Context(), db, o)
			if harness.SQLState(err) != row.state || !strings.Contains(err.Error(), row.wants) || strings.Count(err.Error(), "ratelimit: ") != 1 {
				t.Errorf("%s: %v", name, err)
			}
			if strings.Contains(err.Error(), "try again") {
				t.Errorf("%s: it says to try again: %v", name, err)
			}
		}
	}
}

// TestFiftyProcessesOpenAtOnce: each has a pool of its own. One at a time sweeps, and every row goes once.
func TestFiftyProcessesOpenAtOnce(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	url := harness.NewMigrated(t)
	admin := harness.Connect(t, url, 2)
	const rows = 5000
	harness.MustExec(t, admin, fmt.Sprintf("INSERT INTO ratelimit.limits SELECT 'opened', 'idle ' || i, 0, 1, 100, now() - interval '2 hours' FROM generate_series(1, %d) AS i", rows))
	// No two sweep at once: a trigger sees who deletes.
	harness.MustExec(t, admin, `CREATE TABLE sweeping (pid integer, at xid8);
		CREATE FUNCTION note_sweep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			INSERT INTO sweeping SELECT pg_backend_pid(), pg_current_xact_id();
			IF NOT EXISTS (SELECT FROM ratelimit.sweeps WHERE name = 'opened' AND xmin = pg_current_xact_id()::xid) THEN RAISE 'not its turn'; END IF;
			RETURN NULL; END $$;
		CREATE TABLE passes (name text, done_at timestamptz);
		CREATE FUNCTION note_pass() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO passes VALUES (NEW.name, NEW.done_at); RETURN NULL; END $$;
		CREATE TRIGGER note_pass AFTER UPDATE ON ratelimit.sweeps FOR EACH ROW WHEN (OLD.done_at <> NEW.done_at) EXECUTE FUNCTION note_pass();
		CREATE TRIGGER note_sweep AFTER DELETE ON ratelimit.limits FOR EACH STATEMENT EXECUTE FUNCTION note_sweep()`)
	const processes = 50
	var wg sync.WaitGroup
	for range processes {
		wg.Go(func() {
			pool, err := harness.OpenPool(t.Context(), url, 2, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer pool.Close()
			o := harness.Opening(pool)
			o.SweepEvery = 300 * time.Millisecond
			o.OnError = harness.NoError(t)
			limits, err := ratelimit.Open(t.Context(), pool, o)
			if err != nil {
				t.Error(err)
				return
			}
			defer harness.CloseLimiter(t, limits)
			if _, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key(rand.Text())); err != nil {
				t.Error(err)
			}
			harness.Eventually(t, "all is swept", func() bool {
				return harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.limits WHERE key LIKE 'idle%'") == 0
			})
		})
	}
	wg.Wait()
	if got := harness.Scan[int](t, admin, "SELECT count(*)::integer FROM ratelimit.definitions"); got != 2 {
		t.Errorf("%d definitions", got)
	}
	if got := harness.Scan[int](t, admin, "SELECT count(*)::integer FROM sweeping"); got == 0 {
		t.Error("nobody has swept")
	}
	if got := harness.Scan[int](t, admin, "SELECT count(*)::integer FROM passes AS a JOIN passes AS b ON a.name = b.name AND b.done_at > a.done_at AND b.done_at < a.done_at + interval '225 ms'"); got > 0 {
		t.Errorf("%d times, a limit was swept twice within 225 ms", got)
	}
	if got := usageOf(t, admin)["opened"].Granted; got != processes {
		t.Errorf("%d grants are recorded, of %d", got, processes)
	}
}

// TestASweepGivesWayToAnother: a session keeps the row of a limit locked, which is told. It needs the right to update it.
func TestASweepGivesWayToAnother(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	harness.MustExec(t, pool, "INSERT INTO ratelimit.limits SELECT 'opened', 'idle', 0, 1, 100, now() - interval '2 hours'")
	other, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback(context.WithoutCancel(t.Context())) }()
	harness.MustExec(t, pool, "INSERT INTO ratelimit.sweeps VALUES ('opened', '-infinity', '-infinity')")
	if _, err := other.Exec(t.Context(), "SELECT FROM ratelimit.sweeps WHERE name = 'opened' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	o := harness.Opening(pool)
	told := make(chan error, 1000)
	o.SweepEvery, o.OnError = 10*time.Millisecond, func(err error) { told <- err }
	harness.Open(t, pool, o)
	there := func() bool {
		return harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.limits WHERE key = 'idle'") == 1
	}
	for range 20 {
		time.Sleep(10 * time.Millisecond)
		if !there() {
			t.Fatal("swept beside another program")
		}
	}
	if err := <-told; !strings.HasPrefix(err.Error(), `ratelimit: sweep: limit "opened": nobody sweeps it: a session keeps its row of ratelimit.sweeps locked`) {
		t.Error(err)
	}
	if err := other.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "it sweeps", func() bool { return !there() })
}

func TestCloseEndsEverything(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	limits, err := ratelimit.Open(t.Context(), pool, harness.Opening(pool))
	if err != nil {
		t.Fatal(err)
	}
	granted, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann"))
	if err != nil {
		t.Fatal(err)
	}

	// A call that waits for a row is under way: Close waits for it, and refuses others.
	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := holder.Exec(t.Context(), "SELECT FROM ratelimit.limits WHERE key = 'ann' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	waits := make(chan error, 1)
	go func() { waits <- harness.Second(limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann"))) }()
	harness.Waiting(t, pool, 1)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	closed := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
		defer cancel()
		closed <- limits.Close(ctx)
	}()
	harness.Eventually(t, "new calls are refused", func() bool {
		_, err := limits.Check(t.Context(), pool, harness.OpenedBucket.Key("bob"))
		return errors.Is(err, ratelimit.ErrClosed)
	})
	if err := limits.Close(short); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "have not ended") {
		t.Errorf("a second Close, with no time: %v", err)
	}
	cancel()
	for name, err := range map[string]error{
		"consume": harness.Second(limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("bob"))),
		"wait":    harness.Second(limits.Wait(t.Context(), pool, harness.OpenedBucket.Key("bob"))),
		"reserve": harness.Second(limits.Reserve(t.Context(), pool, harness.OpenedBucket.Key("bob"))),
		"balance": harness.Second(limits.Balance(t.Context(), pool, harness.OpenedBucket.Key("bob"))),
		"reset":   limits.Reset(t.Context(), pool, harness.OpenedBucket.Key("bob")),
		"move":    limits.Move(t.Context(), pool, harness.OpenedBucket.Key("bob"), harness.OpenedBucket.Key("cid")),
		"queue":   harness.Second(limits.QueueConsume(t.Context(), &pgx.Batch{}, harness.OpenedBucket.Key("bob"))),
		"in a transaction": limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			return harness.Second(limits.Consume(ctx, tx, harness.OpenedBucket.Key("bob")))
		}),
	} {
		if !errors.Is(err, ratelimit.ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	select {
	case err := <-closed:
		t.Fatalf("closed, with a call under way: %v", err)
	default:
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-waits; err != nil {
		t.Errorf("the call under way: %v", err)
	}
	if err := <-closed; err != nil {
		t.Errorf("close: %v", err)
	}
	if err := limits.Close(t.Context()); err != nil {
		t.Errorf("another Close: %v", err)
	}
	if result, err := limits.Refund(t.Context(), pool, granted.Receipt(), harness.OpenedBucket.Key("ann")); err != nil || result.Requests[0].Refunded == 0 {
		t.Errorf("refund: %v", err)
	}
	if _, err := limits.Charge(t.Context(), pool, harness.OpenedBucket.Key("cid").Count(130)); err != nil {
		t.Errorf("charge: %v", err)
	}
	if left := harness.ReadBalance(t, new(ratelimit.Limiter), pool, harness.OpenedBucket.Key("cid")); left > -29 {
		t.Errorf("%v left after a charge of 130 of 100", left)
	}
	if got := usageOf(t, pool)["opened"].Granted; got != 2 {
		t.Errorf("%d of 2 grants are recorded", got)
	}
	harness.Eventually(t, "every connection is free", func() bool { return pool.Stat().AcquiredConns() == 0 })
	if err := new(ratelimit.Limiter).Close(t.Context()); err != nil {
		t.Errorf("the zero Limiter: %v", err)
	}
}

func TestCloseHasItsTimeAndSaysWhatItLost(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limits, err := ratelimit.Open(t.Context(), pool, harness.Opening(pool))
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := limits.Close(ended); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "usage may be lost") {
		t.Errorf("with a context that has ended: %v", err)
	}
	harness.CloseLimiter(t, limits)

	// The background has ended, a call has not.
	o := harness.Opening(pool)
	o.Usage = nil
	o.Observer = func(context.Context, ratelimit.Decision) {
		for range 50 {
			if err := limits.Close(ended); !errors.Is(err, context.Canceled) {
				t.Errorf("beside a call: %v", err)
			}
			time.Sleep(time.Millisecond)
		}
	}
	if limits, err = ratelimit.Open(t.Context(), pool, o); err != nil {
		t.Fatal(err)
	}
	if _, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann")); err != nil {
		t.Fatal(err)
	}
	harness.CloseLimiter(t, limits)

	// The last flush fails.
	o = harness.Opening(pool)
	o.Usage = &usage.Recorder{DB: pool, OnError: func(error) {}}
	if limits, err = ratelimit.Open(t.Context(), pool, o); err != nil {
		t.Fatal(err)
	}
	if _, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann")); err != nil {
		t.Fatal(err)
	}
	harness.MustExec(t, pool, "ALTER TABLE ratelimit.usage RENAME TO away")
	if err := limits.Close(t.Context()); harness.SQLState(err) != "42P01" || !strings.Contains(err.Error(), "ratelimit: close: usage: flush") {
		t.Errorf("close: %v", err)
	}
	if err := limits.Close(t.Context()); err != nil {
		t.Errorf("a second Close: %v", err)
	}
	harness.MustExec(t, pool, "ALTER TABLE ratelimit.away RENAME TO usage")
}

// TestAPoolThatIsClosedFirst: Close says that it has lost the last counts. It is a row of the table in docs/start-and-stop.md, of which the
// tests above have the others.
func TestAPoolThatIsClosedFirst(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	own, err := pgxpool.NewWithConfig(t.Context(), pool.Config())
	if err != nil {
		t.Fatal(err)
	}
	var lost error
	o := harness.Opening(own)
	o.NoBackground = true // so that the last counts are still there
	o.Usage = &usage.Recorder{DB: own, OnError: func(err error) { lost = err }}
	limits, err := ratelimit.Open(t.Context(), own, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limits.Consume(t.Context(), own, harness.OpenedBucket.Key("ann")); err != nil {
		t.Fatal(err)
	}
	own.Close()
	if err := limits.Close(t.Context()); err == nil || !strings.Contains(err.Error(), "ratelimit: close: usage") || !strings.Contains(err.Error(), "closed pool") {
		t.Errorf("close: %v", err)
	}
	if lost == nil || !strings.Contains(lost.Error(), "closed pool") {
		t.Errorf("the Recorder was told %v", lost)
	}
}

// openWorker is the environment variable that makes this program a process that lives a second.
const openWorker = "TXLIMIT_TEST_OPEN_WORKER"

// workASecond is that process. Its first call is for a key that is blocked.
func workASecond(url string) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	pool, err := harness.OpenPool(ctx, url, 2, 0)
	if err != nil {
		return err
	}
	defer pool.Close()
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "cron", Limits: []ratelimit.Limit{harness.OpenedBucket}, Usage: &usage.Recorder{DB: pool}, NoBackground: true,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, limits.Close(ctx)) }()
	if _, err := limits.Consume(ctx, pool, harness.OpenedBucket.Key("eve")); !harness.Denied(err) {
		return fmt.Errorf("a blocked key: %w", err)
	}
	_, err = limits.Consume(ctx, pool, harness.OpenedBucket.Key("ann").Count(3))
	return err
}

func TestAProcessThatLivesASecond(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 2)
	harness.MustExec(t, pool, "SELECT ratelimit.block('opened', 'eve', forever => true)")
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), openWorker+"="+url)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got := usageOf(t, pool)["opened"]; got.Granted != 1 || got.Denied != 1 || got.Tokens != 3 {
		t.Errorf("recorded: %+v", got)
	}
	if got := harness.Scan[string](t, pool, "SELECT string_agg(program || ' ' || name, ', ') FROM ratelimit.definitions"); got != "cron opened" {
		t.Errorf("published: %s", got)
	}
}

func TestOpenInMemory(t *testing.T) {
	t.Parallel()
	db := ratelimittest.New(t)
	limits := harness.Open(t, db, ratelimit.Options{Program: "shop", Limits: []ratelimit.Limit{harness.OpenedBucket}})
	if _, err := limits.Consume(t.Context(), db, harness.OpenedBucket.Key("ann")); err != nil {
		t.Error(err)
	}
}

// TestTheDocumentedGrantsAreEnoughToOpen, and to do everything in the background.
func TestTheDocumentedGrantsAreEnoughToOpen(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	owner := harness.NewPool(t, 2)
	role := harness.CreateRole(t, owner)
	harness.GrantWork(t, owner, role, "consume")
	harness.MustExec(t, owner, "INSERT INTO ratelimit.limits VALUES ('opened', 'idle', 0, 1, 100, now() - interval '2 hours')")
	app := harness.AsRole(t, owner, role, 6)
	o := harness.Opening(app)
	o.SweepEvery, o.OnError = 20*time.Millisecond, harness.NoError(t)
	limits := harness.Open(t, app, o)
	if _, err := limits.Consume(t.Context(), app, harness.OpenedBucket.Key("ann")); err != nil {
		t.Error(err)
	}
	harness.Eventually(t, "it sweeps", func() bool {
		return harness.Scan[int](t, owner, "SELECT count(*)::integer FROM ratelimit.limits WHERE key = 'idle'") == 0
	})
	harness.CloseLimiter(t, limits)
	if got := usageOf(t, owner)["opened"].Granted; got != 1 {
		t.Errorf("%d grants are recorded", got)
	}
}
