// Fleet has three servers. Each is an ordinary Postgres with the data and the limits of some tenants. A guard on each refuses the
// keys of the others, and a tenant moves to another server while it sends.
//
//	go run ./examples/fleet
package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	perTenant = ratelimit.TokenBucket("perTenant", 20, 24*time.Hour)
	perUser   = ratelimit.TokenBucket("perUser", 15, 24*time.Hour)
)

// What each server has, besides the limiter's table and functions. Every key has two parts, and the first one is the tenant.
const schema = `
	CREATE TABLE tenants (
		id   text COLLATE "C" PRIMARY KEY, -- as the limiter's keys: otherwise the guard could not use the index
		here boolean NOT NULL              -- false: it is moving away
	);

	CREATE TABLE messages (
		tenant text NOT NULL REFERENCES tenants,
		sender text NOT NULL
	);

	-- A transaction that takes tokens holds two locks of the tenant until it ends, for which a move waits. Later ones queue for the first
	-- behind the move. The second is an error in a REPEATABLE READ transaction that began before the move.
	CREATE FUNCTION tenant_is_here(key text) RETURNS boolean LANGUAGE plpgsql AS $$
	DECLARE
		parts  text[] := ratelimit.key_parts(key);
		tenant text   := parts[1];
	BEGIN
		IF cardinality(parts) < 2 THEN
			RETURN false; -- nobody's: the one part a|b would be a key of the tenant a
		END IF;
		PERFORM pg_advisory_xact_lock_shared(hashtextextended(tenant, 0));
		PERFORM FROM public.tenants WHERE id = tenant AND here FOR SHARE;
		RETURN FOUND;
	END $$;

	CREATE TRIGGER limits_guard AFTER INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW
		WHEN (NOT tenant_is_here(NEW.key)) EXECUTE FUNCTION ratelimit.refuse()`

// server is a Postgres, and the Limiter that follows the overrides there.
type server struct {
	*pgxpool.Pool
	limits *ratelimit.Limiter
}

func open(ctx context.Context, pool *pgxpool.Pool) (server, error) {
	if _, err := pool.Exec(ctx, schema); err != nil {
		return server{}, err
	}
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "fleet", Limits: []ratelimit.Limit{perTenant, perUser}})
	return server{pool, limits}, err
}

// fleet is the servers, and where each tenant is.
type fleet struct {
	servers []server
	mu      sync.RWMutex
	home    map[string]int
}

func (f *fleet) homeOf(tenant string) int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.home[tenant]
}

// send stores a message on the tenant's server, unless a limit denies it.
func (f *fleet) send(ctx context.Context, tenant, sender string) error {
	for {
		err := sendOn(ctx, f.servers[f.homeOf(tenant)], tenant, sender)
		if !refused(err) {
			return err
		}
		select { // the tenant is moving: look again where it is
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
	}
}

func sendOn(ctx context.Context, on server, tenant, sender string) error {
	return on.limits.InTx(ctx, on.Pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := on.limits.Consume(ctx, tx, perTenant.Key(tenant, "all"), perUser.Key(tenant, sender)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO messages (tenant, sender) VALUES ($1, $2)", tenant, sender)
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted))
}

// refused reports whether a server's guard refused the call. Nothing was taken or stored.
func refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "RL004"
}

// move moves a tenant from one server to another, with its messages and limits. If it fails, run it again with the same servers: until
// it is done, no server or one server serves the tenant, never two.
func (f *fleet) move(ctx context.Context, tenant string, from, to int) error {
	if home := f.homeOf(tenant); from == to || home != from && home != to { // an older move must not be repeated
		return fmt.Errorf("%s is on server %d, and cannot move from %d to %d", tenant, home, from, to)
	}

	// 1. The old server refuses the tenant. This waits for the transactions that its guard has let pass.
	var there bool
	err := pgx.BeginFunc(ctx, f.servers[from], func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", tenant); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, "UPDATE tenants SET here = false WHERE id = $1", tenant)
		there = tag.RowsAffected() > 0
		return err
	})
	if err != nil {
		return err
	}

	// 2. Copy everything in one transaction. The new server serves the tenant from its commit on.
	err = pgx.BeginFunc(ctx, f.servers[to], func(tx pgx.Tx) error {
		var copied bool
		err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM tenants WHERE id = $1 AND here)", tenant).Scan(&copied)
		if err != nil || copied { // by an earlier attempt
			return err
		}
		if !there {
			return fmt.Errorf("%s is not on server %d", tenant, from)
		}
		if err := forget(ctx, tx, tenant); err != nil { // what an earlier move has left
			return err
		}
		if _, err := tx.Exec(ctx, "INSERT INTO tenants VALUES ($1, true)", tenant); err != nil {
			return err
		}
		for _, c := range tables {
			if err := copyRows(ctx, tx, f.servers[from].Pool, c.name, "SELECT "+c.columns+" FROM "+c.name+" WHERE "+c.tenant+" = $1", tenant); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}

	// 3. Send the tenant's calls there. (Other processes must learn it as well, for example from a table.)
	f.mu.Lock()
	f.home[tenant] = to
	f.mu.Unlock()

	// 4. Delete what is left behind.
	return pgx.BeginFunc(ctx, f.servers[from], func(tx pgx.Tx) error { return forget(ctx, tx, tenant) })
}

// tables are those with rows of tenants, and how to find whose they are. Each server numbers its overrides.
var tables = []struct{ name, tenant, columns string }{
	{"messages", "tenant", "*"},
	{"ratelimit.limits", "(ratelimit.key_parts(key))[1]", "*"},
	{"ratelimit.holds", "(ratelimit.key_parts(key))[1]", "*"},
	{"ratelimit.overrides", "(ratelimit.key_parts(key))[1]", `name, key, effect, rate, capacity, max_reserved, until, reason,
		made_by, made_at, added, added_at, removed_by, removed_at, made_as, removed_as`},
}

// forget deletes a tenant from a server that has closed it.
func forget(ctx context.Context, tx pgx.Tx, tenant string) error {
	for _, c := range tables {
		if _, err := tx.Exec(ctx, "DELETE FROM "+c.name+" WHERE "+c.tenant+" = $1", tenant); err != nil {
			return err
		}
	}
	_, err := tx.Exec(ctx, "DELETE FROM tenants WHERE id = $1", tenant)
	return err
}

func copyRows(ctx context.Context, to pgx.Tx, from *pgxpool.Pool, table, query string, args ...any) error {
	rows, err := from.Query(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	var columns []string
	for _, column := range rows.FieldDescriptions() {
		columns = append(columns, column.Name)
	}
	_, err = to.CopyFrom(ctx, strings.Split(table, "."), columns, rows)
	return err
}

func main() { demo.Main(story) }

func story(ctx context.Context, first *pgxpool.Pool) (err error) {
	f := &fleet{home: map[string]int{"acme": 0, "globex": 1, "initech": 2}}
	pools := []*pgxpool.Pool{first}
	for len(pools) < 3 {
		pool, closePool, err := demo.Pool(ctx)
		if err != nil {
			return err
		}
		defer closePool() //nolint:errcheck // the story is over
		pools = append(pools, pool)
	}
	for _, pool := range pools {
		s, err := open(ctx, pool)
		if err != nil {
			return err
		}
		defer s.limits.Close(ctx) //nolint:errcheck // the story is over
		f.servers = append(f.servers, s)
	}
	for tenant, server := range f.home {
		if _, err := f.servers[server].Exec(ctx, "INSERT INTO tenants VALUES ($1, true)", tenant); err != nil {
			return err
		}
	}

	// Every tenant may send 20 messages, on its own server.
	for _, tenant := range []string{"acme", "initech"} {
		granted, err := f.sendMany(ctx, tenant, 40)
		if err != nil {
			return err
		}
		fmt.Printf("%s: %d of 40 messages sent, on server %d\n", tenant, granted, f.homeOf(tenant))
	}

	// A call that is sent to a wrong server is an error. Without the guard, it would find a full limit there.
	err = sendOn(ctx, f.servers[2], "acme", "ann")
	if !refused(err) {
		return fmt.Errorf("acme on server 2: %w, want it to be refused", err)
	}
	fmt.Println("acme on server 2:", err)

	// Globex, which has a blocked user, moves to server 2 while it sends.
	if _, err := f.servers[1].Exec(ctx, "SELECT ratelimit.block('perUser', ratelimit.key('globex', 'eve'), reason => 'spam', forever => true)"); err != nil {
		return err
	}
	before, err := f.sendMany(ctx, "globex", 12)
	if err != nil {
		return err
	}
	fmt.Printf("globex: %d of 12 messages sent, on server %d\n", before, f.homeOf("globex"))
	var during int64
	moving, movingCtx := errgroup.WithContext(ctx)
	moving.Go(func() (err error) {
		during, err = f.sendMany(movingCtx, "globex", 40)
		return err
	})
	moving.Go(func() error { return f.move(movingCtx, "globex", 1, 2) })
	if err := moving.Wait(); err != nil {
		return err
	}
	fmt.Printf("globex: %d of 40 messages sent during the move to server %d\n", during, f.homeOf("globex"))
	if before+during != 20 {
		return fmt.Errorf("globex has sent %d messages, want 20", before+during)
	}
	for i, server := range f.servers {
		var messages, rows, blocks int
		err := server.QueryRow(ctx, `SELECT (SELECT count(*) FROM messages WHERE tenant = 'globex'),
			(SELECT count(*) FROM ratelimit.limits WHERE starts_with(key, 'globex')),
			(SELECT count(*) FROM ratelimit.overrides WHERE starts_with(key, 'globex'))`).Scan(&messages, &rows, &blocks)
		if err != nil {
			return err
		}
		fmt.Printf("   server %d: %d messages of globex, %d rows of its limits, %d blocks\n", i, messages, rows, blocks)
	}
	for { // the Limiter of server 2 follows the block within two seconds
		denial, ok := errors.AsType[*ratelimit.DeniedError](sendOn(ctx, f.servers[2], "globex", "eve"))
		if ok && denial.Reason == ratelimit.ReasonBlock {
			break
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	fmt.Println("globex: eve is blocked on server 2")
	err = sendOn(ctx, f.servers[1], "globex", "ann")
	if !refused(err) {
		return fmt.Errorf("globex on server 1: %w, want it to be refused", err)
	}
	fmt.Println("globex on server 1:", err)
	return nil
}

// sendMany sends messages of two users by eight goroutines, and returns how many were granted.
func (f *fleet) sendMany(ctx context.Context, tenant string, messages int) (granted int64, err error) {
	var n atomic.Int64
	sending, ctx := errgroup.WithContext(ctx)
	sending.SetLimit(8)
	for i := range messages {
		sending.Go(func() error {
			err := f.send(ctx, tenant, []string{"ann", "bob"}[i%2])
			if err == nil {
				n.Add(1)
			} else if !errors.Is(err, ratelimit.ErrDenied) {
				return err
			}
			return nil
		})
	}
	err = sending.Wait()
	return n.Load(), err
}
