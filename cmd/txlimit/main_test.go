package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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
	tests := exec.Command(filepath.Join(dir, "withpostgres"), append([]string{"--", self}, os.Args[1:]...)...)
	tests.Env = append(os.Environ(), inner+"="+dir)
	tests.Stdout, tests.Stderr = os.Stdout, os.Stderr
	if err := tests.Run(); tests.ProcessState == nil {
		return 0, err
	}
	return tests.ProcessState.ExitCode(), nil
}

// world is a schema of the test's own.
type world struct {
	t      *testing.T
	url    string
	schema string
	conn   *pgx.Conn // the superuser's, in the schema
	change func(a *app)
}

// newWorld makes an empty schema.
func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	w := &world{t: t, url: os.Getenv("TXLIMIT_DATABASE_URL"), schema: "tool_" + strings.ToLower(rand.Text()[:12])}
	w.conn = w.connect()
	w.sql("CREATE SCHEMA " + w.schema)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
		defer cancel()
		if _, err := w.conn.Exec(ctx, "DROP SCHEMA IF EXISTS "+w.schema+" CASCADE"); err != nil {
			t.Error(err)
		}
	})
	return w
}

// newMigrated makes a schema with the limiter.
func newMigrated(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	schema, err := os.ReadFile("../../migrations/schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	w.sql(string(schema))
	return w
}

// connect opens a connection to the schema.
func (w *world) connect() *pgx.Conn {
	w.t.Helper()
	config, err := pgx.ParseConfig(w.url)
	if err != nil {
		w.t.Fatal(err)
	}
	config.RuntimeParams["search_path"] = w.schema
	conn, err := pgx.ConnectConfig(w.t.Context(), config)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close(context.WithoutCancel(w.t.Context())) })
	return conn
}

func (w *world) sql(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.conn.Exec(w.t.Context(), sql, args...); err != nil {
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

// run runs a command in the schema.
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
		who:    "ann", settle: time.Millisecond, patience: time.Minute, completing: time.Minute,
	}
	if w.change != nil {
		w.change(a)
	}
	code := a.run(ctx, append([]string{"--schema", w.schema}, args...))
	return result{args, code, out.String(), errOut.String()}
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
