package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/inschema"
)

// inner marks the process that runs the tests on a Postgres. Its value is a directory that is removed afterwards.
const inner = "TXLIMIT_TOOL_TESTS"

// TestMain runs the tests below withpostgres, which finds or starts a Postgres. This module cannot require internal/postgres, since
// that is never released, and `go install` takes no replace.
func TestMain(m *testing.M) {
	if os.Getenv(inner) != "" {
		os.Exit(m.Run())
	}
	code, err := runBelow()
	if err != nil {
		fmt.Fprintln(os.Stderr, err) // no Postgres is a failure, never a skip
		code = 1
	}
	os.Exit(code)
}

func runBelow() (code int, err error) {
	dir, err := os.MkdirTemp("", "txlimit-tool-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	build := exec.Command("go", "build", "-o", dir, "./cmd/withpostgres")
	build.Dir = "../../internal/postgres"
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	tests := exec.Command(filepath.Join(dir, "withpostgres"), append([]string{"-migrated", "--", self}, os.Args[1:]...)...)
	tests.Env = append(os.Environ(), inner+"="+dir)
	tests.Stdout, tests.Stderr = os.Stdout, os.Stderr
	if err := tests.Run(); tests.ProcessState == nil {
		return 0, err
	}
	return tests.ProcessState.ExitCode(), nil
}

// world is a database of the test's own.
type world struct {
	t      *testing.T
	url    string
	name   string    // of the database
	schema string    // "": ratelimit
	conn   *pgx.Conn // the superuser's
	change func(a *app)
}

// server makes the databases. Its session is the only one in the database that is migrated: otherwise, that could not be copied.
var server struct {
	sync.Mutex
	conn *pgx.Conn
}

// newWorld makes a database without the limiter.
func newWorld(t *testing.T) *world {
	t.Helper()
	return newDatabase(t, "")
}

// newMigrated makes a database with the limiter.
func newMigrated(t *testing.T) *world {
	t.Helper()
	migrated, err := pgx.ParseConfig(os.Getenv("TXLIMIT_DATABASE_URL"))
	if err != nil {
		t.Fatal(err)
	}
	return newDatabase(t, " TEMPLATE "+migrated.Database)
}

func newDatabase(t *testing.T, template string) *world {
	t.Helper()
	t.Parallel()
	w := &world{t: t, name: "tool_" + strings.ToLower(rand.Text()[:12])}
	onServer := func(ctx context.Context, sql string) error {
		server.Lock()
		defer server.Unlock()
		if server.conn == nil {
			var err error
			if server.conn, err = pgx.Connect(ctx, os.Getenv("TXLIMIT_DATABASE_URL")); err != nil {
				return err
			}
		}
		_, err := server.conn.Exec(ctx, sql)
		return err
	}
	if err := onServer(t.Context(), "CREATE DATABASE "+w.name+template); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
		defer cancel()
		if err := onServer(ctx, "DROP DATABASE "+w.name+" WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(os.Getenv("TXLIMIT_DATABASE_URL"))
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + w.name
	w.url = u.String()
	w.conn = w.connect()
	return w
}

// connect opens a connection.
func (w *world) connect() *pgx.Conn {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.url)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close(context.WithoutCancel(w.t.Context())) })
	return conn
}

// in is SQL in the schema.
func (w *world) in(sql string) string {
	sql, err := inschema.Text(sql, w.schema)
	if err != nil {
		w.t.Fatal(err)
	}
	return sql
}

func (w *world) sql(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.conn.Exec(w.t.Context(), w.in(sql), args...); err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
}

// result is what a command did.
type result struct {
	args        []string
	code        int
	out, errOut string
}

func (r result) String() string {
	return fmt.Sprintf("txlimit %q: exit status %d\n%s\n%s", r.args, r.code, r.out, r.errOut)
}

// run runs a command.
func (w *world) run(args ...string) result {
	w.t.Helper()
	return w.runWith(w.t.Context(), "", args...)
}

// runWith runs a command. If there is an answer, the standard input is a terminal on which it is typed.
func (w *world) runWith(ctx context.Context, answer string, args ...string) result {
	var out, errOut bytes.Buffer
	a := &app{
		stdin: strings.NewReader(answer), stdout: &out, stderr: &errOut, terminal: answer != "",
		getenv: func(name string) string { return map[string]string{"DATABASE_URL": w.url}[name] },
		who:    "ann", patience: time.Minute, completing: time.Minute,
	}
	if w.change != nil {
		w.change(a)
	}
	code := a.run(ctx, w.args(args))
	return result{args, code, out.String(), errOut.String()}
}

// args are those of a command in the schema.
func (w *world) args(args []string) []string {
	all := []string{} // for nil, cobra takes those of the tests
	if w.schema != "" {
		all = append(all, "--schema", w.schema)
	}
	return append(all, args...)
}

// wants fails unless the command ends with this status, and its output matches.
func (r result) wants(t *testing.T, code int, patterns ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("want exit status %d: %s", code, r)
	}
	for _, pattern := range patterns {
		if !regexp.MustCompile(pattern).MatchString(r.out + r.errOut) {
			t.Errorf("no %q in what it prints: %s", pattern, r)
		}
	}
}
