// Package faults_test breaks things while limits are consumed on every kind of handle: it kills servers, cuts connections,
// fills disks and steps clocks. Then it counts: the acknowledged calls, the tokens missing from the limits' rows, and the
// business rows. `make faults` gives each fault more time than `go test`.
package faults_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
)

var (
	long     = flag.Bool("long", false, "let each fault last long enough to be sure, instead of about a second")
	seedFlag = flag.Uint64("seed", 0, "replay the random choices of a test with this seed (0: a new one)")
)

// lasting returns the duration of a fault: the short one, or the longer one with -long.
func lasting(short, longer time.Duration) time.Duration {
	if *long {
		return longer
	}
	return short
}

// server is for faults that do not harm it. The others use a server of their own (newServer).
var server *postgres.Server

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	flag.Parse()
	if url, until := os.Getenv(clientOf), os.Getenv(clientAhead); until != "" {
		return aheadClient(url, until)
	} else if url != "" {
		return client(url)
	}
	code := postgres.RunTests(m, &server)
	if err := closeTemplate(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// template is a migrated cluster that is not running. Copying it is faster than making a new one.
var template = sync.OnceValues(func() (*postgres.Breakable, error) {
	ctx := context.Background()
	b, err := postgres.NewBreakable(ctx, postgres.BreakableConfig{})
	if err == nil {
		closeTemplate = b.Close
		err = migrate(ctx, b.URL())
		b.Stop()
	}
	return b, err
})

// closeTemplate removes the template, if a test made it.
var closeTemplate = func() error { return nil }

// newServer makes a migrated server for the test.
func newServer(t *testing.T, config postgres.BreakableConfig) *postgres.Breakable {
	t.Helper()
	if config.InitDB == nil {
		var err error
		if config.CopyOf, err = template(); err != nil {
			t.Fatal(err)
		}
	}
	b, err := postgres.NewBreakable(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, err := b.Log()
			t.Logf("the server's log ends with:\n%s\n%v", text[max(0, len(text)-4<<10):], err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	if config.CopyOf == nil {
		if err := migrate(t.Context(), b.URL()); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// newDatabase makes a migrated database for the test, in the shared server.
func newDatabase(t *testing.T) (url string) {
	t.Helper()
	url = migrated.NewDatabase(t, server)
	if err := makeOrders(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	return url
}

// migrate makes the limiter's schema and the table of the business rows.
func migrate(ctx context.Context, url string) error {
	if err := migrated.Up(ctx, url); err != nil {
		return err
	}
	return makeOrders(ctx, url)
}

// makeOrders makes the table of the business rows.
func makeOrders(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, "CREATE TABLE orders (id text PRIMARY KEY, handle text NOT NULL)")
	return err
}

// connect makes a pool.
func connect(t *testing.T, url string, conns int, configure ...func(*pgx.ConnConfig)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = int32(conns)
	for _, f := range configure {
		f(config.ConnConfig)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// setting makes sessions start with a setting.
func setting(name, value string) func(*pgx.ConnConfig) {
	return func(c *pgx.ConnConfig) { c.RuntimeParams[name] = value }
}

// newRand makes a random source. If the test fails, it prints how to replay it.
func newRand(t *testing.T) *rand.Rand {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("replay: go test ./integration_test/faults -run '%s' -seed %d", t.Name(), seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

// patience is how long a test waits for what must happen: any machine is fast enough.
const patience = 5 * time.Minute

// eventually waits until done returns true.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%v and still not: %s", patience, what)
		}
	}
}
