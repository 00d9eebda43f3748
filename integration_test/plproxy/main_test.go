// Package plproxy_test runs the limiter through a PL/Proxy cluster of real servers: a proxy database and its partitions. Only make plproxy runs
// it. That fails without the extension.
package plproxy_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations/plproxy"
)

// shared is the cluster of the tests that break nothing: three partitions.
var shared *cluster

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Getenv("TXLIMIT_PLPROXY") == "" {
		fmt.Println("the tests of PL/Proxy are run by make plproxy")
		return 0
	}
	var err error
	if shared, err = newCluster(context.Background(), 3); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	shared.close()
	return code
}

// cluster is a proxy and its partitions. The proxy's server also has a database with the migrations alone, to compare with.
type cluster struct {
	proxy      *postgres.Breakable
	partitions []*postgres.Breakable
}

// newCluster starts the servers, and sets them up as docs/plproxy.md says.
func newCluster(ctx context.Context, partitions int) (c *cluster, err error) {
	c = &cluster{}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if c.proxy, err = postgres.NewBreakable(ctx, postgres.BreakableConfig{}); err != nil {
		return nil, err
	}
	if err := execSQL(ctx, c.proxy.URL(), "CREATE DATABASE plain"); err != nil {
		return nil, err
	}
	if err := migrate(ctx, plainURL(c.proxy), ""); err != nil {
		return nil, err
	}
	if err := migrate(ctx, c.proxy.URL(), plproxy.Proxy); err != nil {
		if strings.Contains(err.Error(), "plproxy.control") {
			err = fmt.Errorf("%w\nThe server has no PL/Proxy: apt-get install postgresql-15-plproxy. To choose the server: TXLIMIT_TEST_POSTGRES_BIN=/usr/lib/postgresql/15/bin", err)
		}
		return nil, err
	}
	if err := c.add(ctx, partitions); err != nil {
		return nil, err
	}
	return c, nil
}

// add starts partitions and makes them known to the proxy. The first ones get all slots, later ones none.
func (c *cluster) add(ctx context.Context, n int) error {
	started := make([]*postgres.Breakable, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if started[i], errs[i] = postgres.NewBreakable(ctx, postgres.BreakableConfig{}); errs[i] == nil {
				errs[i] = migrate(ctx, started[i].URL(), plproxy.Partition)
			}
		})
	}
	wg.Wait()
	var connections []string
	for i, p := range started {
		if p != nil {
			c.partitions = append(c.partitions, p)
		}
		if errs[i] != nil {
			return errs[i]
		}
		connections = append(connections, connection(p))
	}
	return execSQL(ctx, c.proxy.URL(), "SELECT ratelimit_add_servers($1)", connections)
}

func (c *cluster) close() {
	for _, p := range append(c.partitions, c.proxy) {
		if p != nil {
			if err := p.Close(); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
	}
	c.partitions, c.proxy = nil, nil
}

// connection is how the proxy connects to a partition.
func connection(p *postgres.Breakable) string {
	u, err := url.Parse(p.URL())
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf("host=%s port=%s dbname=postgres user=postgres connect_timeout=2", u.Hostname(), u.Port())
}

// migrate runs the migrations and then one of PL/Proxy's files.
func migrate(ctx context.Context, url, file string) error {
	if err := migrated.Up(ctx, url); err != nil {
		return err
	}
	return execSQL(ctx, url, file)
}

// plainURL leads to the database to compare with.
func plainURL(server *postgres.Breakable) string {
	return strings.Replace(server.URL(), "/postgres?", "/plain?", 1)
}

// execSQL runs SQL on a connection of its own. Without arguments, it may be several statements.
func execSQL(ctx context.Context, url, sql string, args ...any) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	if len(args) == 0 {
		_, err = conn.PgConn().Exec(ctx, sql).ReadAll()
		return err
	}
	_, err = conn.Exec(ctx, sql, args...)
	return err
}

// pool opens a pool.
func pool(t testing.TB, url string, conns int) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = int32(conns)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}
