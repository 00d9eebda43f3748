package harness

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// NewConfined makes a migrated database whose schema belongs to a role that has only an owner's rights, and a role that only consumes, as
// docs/security.md makes it.
func NewConfined(t *testing.T, conns int) (admin, owner, confined *pgxpool.Pool) {
	t.Helper()
	admin, owner, ownerRole := NewOwned(t, 4)
	appRole := CreateRole(t, admin)
	Confine(t, admin, owner, ownerRole, appRole)
	return admin, owner, AsRole(t, admin, appRole, conns)
}

// NewOwned makes a database with a schema of a role, which migrates it. Its functions are for nobody by default.
func NewOwned(t *testing.T, conns int) (admin, owner *pgxpool.Pool, ownerRole string) {
	t.Helper()
	admin = Connect(t, NewDatabase(t), 2)
	ownerRole = CreateRole(t, admin)
	MustExec(t, admin, "CREATE SCHEMA ratelimit AUTHORIZATION "+ownerRole+"; ALTER DEFAULT PRIVILEGES FOR ROLE "+ownerRole+" REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
	owner = AsRole(t, admin, ownerRole, conns)
	MustExec(t, owner, UpOf(t, os.DirFS(MigrationsDir())))
	return admin, owner, ownerRole
}

// Confine runs the recipe of docs/security.md for a role that only consumes.
func Confine(t *testing.T, admin, owner *pgxpool.Pool, ownerRole, role string) {
	t.Helper()
	// A schema is made by who may, and the rest by the owner of the tables.
	create, rest, ok := strings.Cut(Named(DocSQL(t, "docs/security.md", "CREATE SCHEMA limits"), role), ";")
	if !ok || create != "CREATE SCHEMA limits" {
		t.Fatalf("the recipe begins with %q", create)
	}
	MustExec(t, admin, create+" AUTHORIZATION "+ownerRole)
	MustExec(t, owner, rest)
}

// Beats says that a process of a program uses a list, as Open does and then every minute.
func Beats(t *testing.T, pool *pgxpool.Pool, program, list string) (counts bool, others []string, err error) {
	t.Helper()
	err = pool.QueryRow(t.Context(), "SELECT counts, others FROM ratelimit._publish($1, $2, true)", program, list).Scan(&counts, &others)
	return counts, others, err
}

// MustBeat wants it to succeed.
func MustBeat(t *testing.T, pool *pgxpool.Pool, program, list string) (counts bool) {
	t.Helper()
	counts, _, err := Beats(t, pool, program, list)
	Succeeds(t, err)
	return counts
}

// Logged is the list of a Log's records.
type Logged struct {
	mu sync.Mutex
	bytes.Buffer
}

// Write keeps a line.
func (l *Logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(p)
}

// Records are the lines since the last call, which are JSON.
func (l *Logged) Records(t *testing.T) (records []map[string]any) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.String()) {
		var record map[string]any
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatal(err)
		}
		records = append(records, record)
	}
	l.Reset()
	return records
}

// The limits of a program that is opened.
var (
	OpenedBucket = ratelimit.TokenBucket("opened", 100, time.Hour)
	OpenedWindow = ratelimit.FixedWindow("openedWindow", 100, time.Hour)
)

// Opening is what a program would say, without background: a test of one part sets the others off.
func Opening(pool ratelimit.DB) ratelimit.Options {
	return ratelimit.Options{
		Program: "shop", Limits: []ratelimit.Limit{OpenedBucket, OpenedWindow}, Usage: &usage.Recorder{DB: pool},
		OnError: func(err error) { fmt.Fprintln(os.Stderr, "OnError:", err) },
	}
}

// Open opens, and closes at the end of the test.
func Open(t testing.TB, db ratelimit.DB, o ratelimit.Options) *ratelimit.Limiter {
	t.Helper()
	limits, err := ratelimit.Open(t.Context(), db, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { CloseLimiter(t, limits) })
	return limits
}

// CloseLimiter closes, without an error.
func CloseLimiter(t testing.TB, limits *ratelimit.Limiter) { t.Helper(); closes(t, limits) }

// CloseCoalescer closes, without an error.
func CloseCoalescer(t testing.TB, coalescer *ratelimit.Coalescer) { t.Helper(); closes(t, coalescer) }

func closes(t testing.TB, closer interface {
	Close(ctx context.Context) error
}) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience)
	defer cancel()
	if err := closer.Close(ctx); err != nil {
		t.Error(err)
	}
}

// Second is the error of a call with two results.
func Second[A any](_ A, err error) error { return err }

// Third is the error of a call with three results.
func Third[A, B any](_ A, _ B, err error) error { return err }

// ErrRollBack is what a test returns to roll back.
var ErrRollBack = errors.New("roll back")

// Scan runs a query of one row and one column.
func Scan[T any](t testing.TB, db ratelimit.DB, sql string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// LimitInForce returns the limit that a check uses.
func LimitInForce(t testing.TB, l *ratelimit.Limiter, db ratelimit.DB, request ratelimit.Request) string {
	t.Helper()
	result, err := l.Check(t.Context(), db, request.Count(0))
	if !errors.Is(err, ratelimit.ErrDenied) { // by a block, say
		Succeeds(t, err)
	}
	return result.Requests[0].Limit.String()
}

// MustExecIn runs a statement in a transaction.
func MustExecIn(t *testing.T, tx pgx.Tx, sql string) {
	t.Helper()
	Succeeds(t, Second(tx.Exec(t.Context(), sql)))
}

// AsRole makes a pool whose sessions have the rights of a role.
func AsRole(t *testing.T, pool *pgxpool.Pool, role string, conns int) *pgxpool.Pool {
	t.Helper()
	return Reconfigured(t, pool, func(c *pgxpool.Config) {
		c.MaxConns = int32(conns)
		StartWith(t, c.ConnConfig, map[string]string{"role": role})
	})
}

// CreateRole makes a role without any rights. The role and its objects are dropped at the end.
func CreateRole(t *testing.T, pool *pgxpool.Pool) (role string) {
	t.Helper()
	role = "txlimit_test_" + strings.ToLower(rand.Text())
	if _, err := pool.Exec(t.Context(), "CREATE ROLE "+role); err != nil {
		t.Fatalf("this test makes roles, so its user needs CREATEROLE: %v", err)
	}
	t.Cleanup(func() {
		// The connection's own context is over by then.
		db, err := sql.Open("pgx", pool.Config().ConnString())
		if err == nil {
			defer db.Close()
			_, err = db.Exec("DROP OWNED BY " + role + " CASCADE; DROP ROLE " + role)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if _, err := pool.Exec(t.Context(), "GRANT "+role+" TO CURRENT_USER"); err != nil { // no effect for a superuser
		t.Fatal(err)
	}
	return role
}

// NewRole makes a role with these privileges in the pool's schema, and a connection that uses the role.
func NewRole(t *testing.T, pool *pgxpool.Pool, usage bool, privileges ...string) *pgx.Conn {
	t.Helper()
	role := CreateRole(t, pool)
	if usage {
		MustExec(t, pool, "GRANT USAGE ON SCHEMA ratelimit TO "+role+"; "+Execute(role))
	}
	if len(privileges) > 0 {
		MustExec(t, pool, "GRANT "+strings.Join(privileges, ", ")+" ON ratelimit.limits, ratelimit.holds TO "+role+"; GRANT SELECT ON ratelimit.definitions, ratelimit.overrides TO "+role) // the last for Sweep
	}
	return Acquire(t, AsRole(t, pool, role, 1))
}

// Named puts a test's role into SQL that is documented for the role app_user.
func Named(sql, role string) string {
	return regexp.MustCompile(`\bapp_user\b`).ReplaceAllString(sql, role)
}

// Execute lets a role call what all roles of docs/security.md may call.
func Execute(role string) string {
	return "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ratelimit TO " + role + "; REVOKE EXECUTE ON FUNCTION ratelimit.grant, ratelimit.restore, ratelimit.add FROM " + role
}

// GrantWork gives a role what its work needs.
func GrantWork(t *testing.T, owner *pgxpool.Pool, role, work string) {
	t.Helper()
	if _, err := owner.Exec(t.Context(), "SELECT ratelimit.grant($1, $2)", role, work); err != nil {
		t.Fatal(err)
	}
}

// Seed makes rows for the limits that everyVerb uses.
func Seed(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	limiter, _ := NewLimiter()
	if _, err := limiter.Consume(t.Context(), pool, ratelimit.TokenBucket("bucket", 10, time.Minute).Key("seeded"),
		ratelimit.FixedWindow("window", 10, time.Minute).Key("seeded"), ratelimit.FixedWindow("window", 10, time.Minute).Key("reset"),
		ratelimit.TokenBucket("wide", 10, time.Minute, ratelimit.Shards(3)).Key("seeded"), ratelimit.TokenBucket("idle", 10, time.Minute).Key("seeded")); err != nil {
		t.Fatal(err)
	}
}

// WantRefused wants statements to fail because of missing rights.
func WantRefused(t *testing.T, pool *pgxpool.Pool, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		err := pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
			_, err := conn.Conn().PgConn().Exec(t.Context(), sql).ReadAll()
			return err
		})
		if SQLState(err) != "42501" {
			t.Errorf("%s: %v, want 42501", sql, err)
		}
	}
}

// Works wants the limiter to work.
func Works(t *testing.T, db ratelimit.DB) {
	t.Helper()
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("works", 2, time.Hour)
	wide := ratelimit.FixedWindow("wide", 2, time.Hour, ratelimit.Shards(2))
	if _, err := limiter.Consume(t.Context(), db, limit.Key("ann").Count(2)); err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), db, limit.Key("ann"), wide.Key("ann")); !errors.As(err, new(*ratelimit.DeniedError)) {
		t.Fatal(err)
	}
	if err := limiter.Reset(t.Context(), db, limit.Key("ann")); err != nil {
		t.Fatal(err)
	}
}

// Sweep sweeps, and wants no error.
func (w World) Sweep(limits ...ratelimit.Limit) int64 {
	w.Helper()
	deleted, err := w.Limiter.Sweep(w.Context(), w.DB, limits...)
	if err != nil {
		w.Fatalf("sweep: %v", err)
	}
	return deleted
}

// AsTenant runs a function in a tenant's transaction.
func AsTenant(t *testing.T, pool *pgxpool.Pool, tenant string, fn func(tx pgx.Tx)) {
	t.Helper()
	err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SELECT set_config('app.tenant', $1, true)", tenant); err != nil {
			return err
		}
		fn(tx)
		return nil
	})
	if err != nil {
		t.Errorf("tenant %q: %v", tenant, err)
	}
}

// TenantPolicy is the policy of docs/security.md.
func TenantPolicy(t *testing.T, role string) string {
	t.Helper()
	return Named(DocSQL(t, "docs/security.md", "CREATE POLICY"), role)
}

// NoError is for OnError, where there ought to be none.
func NoError(t testing.TB) func(error) {
	return func(err error) { t.Errorf("OnError: %v", err) }
}
