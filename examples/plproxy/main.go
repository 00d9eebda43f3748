// Plproxy spreads keys over three servers by PL/Proxy, and then over four. The proxy and the partitions are real servers, which the example starts
// and stops. It needs a PostgreSQL with PL/Proxy: on Debian 12, apt-get install postgresql-15-plproxy. docs/plproxy.md says more.
//
//	go run ./examples/plproxy
package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations/plproxy"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits      ratelimit.Limiter
	sendMessage = ratelimit.TokenBucket("sendMessage", 3, time.Hour)
	perTenant   = ratelimit.TokenBucket("perTenant", 100, time.Hour)
)

func story(ctx context.Context, start func() (partition string, err error), proxy *pgxpool.Pool) error {
	var partitions [3]string
	for i := range partitions {
		var err error
		if partitions[i], err = start(); err != nil {
			return err
		}
	}
	if _, err := proxy.Exec(ctx, "SELECT ratelimit_add_servers($1)", partitions); err != nil {
		return err
	}

	// The library takes the proxy for an ordinary database. Each user has 3 messages an hour, on one of the partitions.
	for i := range 6 {
		granted, err := send(ctx, proxy, fmt.Sprint("user-", i), 5)
		if err != nil {
			return err
		}
		fmt.Printf("user-%d: %d of 5 messages granted\n", i, granted)
	}
	if err := printServers(ctx, proxy); err != nil {
		return err
	}

	// Several limits are all or nothing if their keys are in one slot: only the part in braces is hashed.
	_, err := limits.Consume(ctx, proxy, sendMessage.Key("user-7"), perTenant.Key("tenant-3"))
	if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) {
		fmt.Printf("two keys: refused, SQLSTATE %s\n  %s\n", refused.Code, refused.Hint)
	}
	result, err := limits.Consume(ctx, proxy, sendMessage.Key("{tenant-3}user-7"), perTenant.Key("{tenant-3}"))
	if err != nil {
		return err
	}
	fmt.Printf("two keys with a common part: granted %v\n", result.OK)

	// A fourth partition takes over every fourth slot, with its rows. No user gets tokens by that.
	fourth, err := start()
	if err != nil {
		return err
	}
	if _, err := proxy.Exec(ctx, "SELECT ratelimit_add_servers($1)", []string{fourth}); err != nil {
		return err
	}
	var slots []int
	for slot := 0; slot < 256; slot += 4 {
		slots = append(slots, slot)
	}
	if _, err := proxy.Exec(ctx, "CALL ratelimit_move_slots($1, 3)", slots); err != nil {
		return err
	}
	if err := printServers(ctx, proxy); err != nil {
		return err
	}
	for i := range 6 {
		granted, err := send(ctx, proxy, fmt.Sprint("user-", i), 5)
		if err != nil {
			return err
		}
		fmt.Printf("user-%d: %d of 5 more messages granted\n", i, granted)
	}
	return nil
}

// send sends messages, and returns how many were granted.
func send(ctx context.Context, db ratelimit.DB, user string, messages int) (granted int, err error) {
	for range messages {
		switch _, err := limits.Consume(ctx, db, sendMessage.Key(user)); {
		case err == nil:
			granted++
		case !errors.Is(err, ratelimit.ErrDenied):
			return granted, err
		}
	}
	return granted, nil
}

// printServers prints who is on which partition.
func printServers(ctx context.Context, proxy *pgxpool.Pool) error {
	rows, err := proxy.Query(ctx, `
		SELECT format('partition %s: %s slots, %s', s.server, s.slots, coalesce(string_agg(k.key, ', ' ORDER BY k.key), 'no user'))
		  FROM (SELECT server, count(*) AS slots, array_agg(slot) AS these FROM rate_limit_slots GROUP BY server) AS s
		  LEFT JOIN ratelimit_keys('sendMessage', 3, '1 hour') AS k ON _plproxy_slot(k.key) = ANY (s.these)
		 GROUP BY s.server, s.slots ORDER BY s.server`)
	if err != nil {
		return err
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil {
		fmt.Println(strings.Join(lines, "\n"))
	}
	return err
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run starts the servers.
func run(ctx context.Context) (err error) {
	var servers []*postgres.Breakable
	defer func() {
		for _, s := range servers {
			err = errors.Join(err, s.Close())
		}
	}()
	start := func(file string) (*pgxpool.Pool, error) {
		s, err := postgres.NewBreakable(ctx, postgres.BreakableConfig{})
		if err != nil {
			return nil, err
		}
		servers = append(servers, s)
		if err := migrated.Up(ctx, s.URL()); err != nil {
			return nil, err
		}
		pool, err := pgxpool.New(ctx, s.URL())
		if err != nil {
			return nil, err
		}
		if _, err := pool.Exec(ctx, file, pgx.QueryExecModeSimpleProtocol); err != nil {
			pool.Close()
			return nil, err
		}
		return pool, nil
	}
	proxy, err := start(plproxy.Proxy)
	if err != nil && strings.Contains(err.Error(), "plproxy.control") {
		return fmt.Errorf("%w\nThis PostgreSQL has no PL/Proxy. Install it: apt-get install postgresql-15-plproxy. Then, if there are several versions, "+
			"set TXLIMIT_TEST_POSTGRES_BIN=/usr/lib/postgresql/15/bin", err)
	} else if err != nil {
		return err
	}
	defer proxy.Close()
	return story(ctx, func() (string, error) {
		partition, err := start(plproxy.Partition)
		if err != nil {
			return "", err
		}
		defer partition.Close()
		u, err := url.Parse(partition.Config().ConnString())
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("host=%s port=%s dbname=postgres user=postgres connect_timeout=2", u.Hostname(), u.Port()), nil
	}, proxy)
}
