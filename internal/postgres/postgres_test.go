package postgres

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// envChild makes the test binary a child process that runs the named mode
// instead of the tests.
const envChild = "TXLIMIT_TEST_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(envChild) {
	case "":
		_ = os.Unsetenv(envLadder) // a developer may have set it; each test chooses its rungs
		_ = os.Unsetenv(envPgBouncer)
		os.Exit(m.Run())
	case "serve": // prints the URL of a server, and ends when told how
		s, err := Start(context.Background())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(s.URL())
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(3) // without Close
	case "nothing": // prints why there is no server, on a machine without binaries
		installed = nil
		s, err := Start(context.Background())
		if err == nil {
			err = errors.Join(fmt.Errorf("started %v", s), s.Close())
		}
		fmt.Println(err)
		os.Exit(0)
	}
}

// child returns a command that runs this test binary in the given mode.
func child(t *testing.T, mode string, env ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(append(os.Environ(), envChild+"="+mode), env...)
	cmd.Stderr = os.Stderr
	return cmd
}

// start starts a server by the ladder, and closes it at the end of the test.
func start(t *testing.T) *Server {
	t.Helper()
	s, err := Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// query runs the statements in order and returns the single text value of the
// last one.
func query(t *testing.T, url string, statements ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	last := len(statements) - 1
	for _, sql := range statements[:last] {
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	var value string
	if err := conn.QueryRow(ctx, statements[last]).Scan(&value); err != nil {
		t.Fatalf("%s: %v", statements[last], err)
	}
	return value
}

// clusterDir returns the directory that a throwaway cluster must not leave behind.
func clusterDir(t *testing.T, url string) string {
	t.Helper()
	return filepath.Dir(query(t, url, "SHOW data_directory"))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}

func serves(url string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, _, err := probe(ctx, url)
	return err == nil
}

func TestStartServesAndCloseIsIdempotent(t *testing.T) {
	s := start(t)
	t.Log(s)
	if got := query(t, s.URL(), "SELECT 1::text"); got != "1" {
		t.Errorf("SELECT 1 yields %s", got)
	}
	if !strings.HasPrefix(s.String(), "PostgreSQL ") {
		t.Errorf("String() = %q does not start with the version", s)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := s.NewDatabase(t.Context(), ""); err == nil {
		t.Error("NewDatabase works after Close")
	}
}

func TestThrowawayClusterIsDurableAndLocalAndLeavesNothing(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	s := start(t)
	for setting, want := range map[string]string{
		"fsync":                   "on",
		"synchronous_commit":      "on",
		"full_page_writes":        "on",
		"max_connections":         "300",
		"server_encoding":         "UTF8",
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": "",
	} {
		if got := query(t, s.URL(), "SHOW "+setting); got != want {
			t.Errorf("%s is %q, want %q", setting, got, want)
		}
	}
	dir := clusterDir(t, s.URL())
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if exists(dir) {
		t.Errorf("%s is left behind", dir)
	}
	if serves(s.URL()) {
		t.Errorf("%s still serves", s.URL())
	}
}

func TestServersAtOnceAreSeparate(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	const n = 3
	var wg sync.WaitGroup
	servers, errs := make([]*Server, n), make([]error, n)
	for i := range n {
		wg.Go(func() { servers[i], errs[i] = Start(t.Context()) })
	}
	wg.Wait()
	dirs := make(map[string]bool)
	for i, s := range servers {
		if errs[i] != nil {
			t.Error(errs[i])
			continue
		}
		defer func() { _ = s.Close() }()
		dirs[clusterDir(t, s.URL())] = true
	}
	if len(dirs) != n {
		t.Errorf("%d servers are in %d directories", n, len(dirs))
	}
}

func TestTakenPortIsNoticed(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	other := start(t)
	port, err := strconv.Atoi(query(t, other.URL(), "SHOW port"))
	if err != nil {
		t.Fatal(err)
	}
	bin, err := findBinaries(installed)
	if err != nil {
		t.Fatal(err)
	}
	// A server answers on that port, but it is another one.
	s, err := startClusterOn(t.Context(), bin, port)
	if !errors.Is(err, errPortTaken) {
		t.Errorf("startClusterOn(taken port) = %v, %v, want errPortTaken", s, err)
	}
}

func TestCancelledStartLeavesNothing(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	tmp := t.TempDir()
	for dir := tmp; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o777); err != nil { // so that the server's user can use it
			t.Fatal(err)
		}
	}
	t.Setenv("TMPDIR", tmp)
	for _, after := range []time.Duration{0, 100 * time.Millisecond, 400 * time.Millisecond, 700 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		s, err := Start(ctx)
		cancel()
		if err == nil { // a fast machine
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		} else if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Start = %v, want the context's error", err)
		}
		if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
			t.Errorf("cancelled after %v: left behind: %v %v", after, left, err)
		}
	}
}

func TestStartWorksWhereTheServersUserCannotGo(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	closed := t.TempDir()
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", closed)
	t.Chdir(closed)
	s := start(t)
	dir := clusterDir(t, s.URL())
	if within := filepath.Dir(dir) == closed; within == (os.Geteuid() == 0) {
		t.Errorf("the cluster is in %s, with TMPDIR %s", dir, closed)
	}
}

// Developers often have PG* variables set on their machines.
func TestStartIgnoresPostgresVariables(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	for name, value := range map[string]string{
		"PGHOST": "example.invalid", "PGPORT": "1", "PGDATA": "/nonexistent", "PGUSER": "nobody",
		"PGDATABASE": "none", "PGSSLMODE": "require",
	} {
		t.Setenv(name, value)
	}
	if got := query(t, start(t).URL(), "SELECT 1::text"); got != "1" {
		t.Errorf("SELECT 1 yields %s", got)
	}
}

func TestURLIsUsedAndNothingOfOursIsLeftInIt(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	foreign := start(t)
	config, err := pgx.ParseConfig(foreign.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(envLadder, "")
	for _, conn := range []string{
		foreign.URL(),
		fmt.Sprintf("host=127.0.0.1 port=%d user=postgres dbname=postgres sslmode=disable", config.Port),
	} {
		t.Setenv(envURL, conn)
		s := start(t)
		if s.URL() != conn || !strings.Contains(s.String(), envURL) {
			t.Errorf("took %v at %s", s, s.URL())
		}
		for i := range 3 {
			url, drop, err := s.NewDatabase(t.Context(), "")
			if err != nil {
				t.Fatal(err)
			}
			if got := query(t, url, "CREATE TABLE t (x) AS SELECT 1", "SELECT count(*)::text FROM t"); got != "1" {
				t.Errorf("count = %s", got)
			}
			if i == 0 {
				if err := drop(); err != nil {
					t.Error(err)
				}
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		left := query(t, foreign.URL(), `
			SELECT coalesce(string_agg(datname, ' '), '') FROM pg_database WHERE datname NOT IN ('postgres', 'template0', 'template1')`)
		if left != "" {
			t.Errorf("left in the foreign server: %s", left)
		}
	}
}

func TestURLThatCannotBeUsedIsAnErrorAtOnce(t *testing.T) {
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{
		fmt.Sprintf("postgres://u:secret@127.0.0.1:%d/x", port),
		"postgres://u:secret@127.0.0.1:port/x",
		"u:secret",
	} {
		t.Setenv(envURL, url)
		s, err := Start(t.Context())
		if err == nil {
			_ = s.Close()
			t.Fatalf("%s: fell through to %v", url, s)
		}
		t.Log(err)
		if !strings.Contains(err.Error(), envURL) || strings.Contains(err.Error(), "docker") {
			t.Errorf("the error does not speak of %s alone: %v", envURL, err)
		}
		if strings.HasPrefix(url, "postgres:") && strings.Contains(err.Error(), "secret") {
			t.Errorf("the error shows the password: %v", err)
		}
	}
}

func TestNamedBinariesThatAreNoneAreAnErrorAtOnce(t *testing.T) {
	t.Setenv(envURL, "")
	t.Setenv(envBin, t.TempDir())
	s, err := Start(t.Context())
	if err == nil {
		_ = s.Close()
		t.Fatalf("fell through to %v", s)
	}
	if !strings.Contains(err.Error(), envBin) || strings.Contains(err.Error(), "docker") {
		t.Errorf("the error does not speak of %s alone: %v", envBin, err)
	}
}

func TestNewestInstalledVersionIsTaken(t *testing.T) {
	root := t.TempDir()
	for _, version := range []string{"9.6", "10", "17", "18"} {
		bin := filepath.Join(root, version, "bin")
		if err := os.MkdirAll(bin, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"initdb", "postgres"} {
			if version == "18" && name == "postgres" {
				continue // only its client is installed
			}
			if err := os.WriteFile(filepath.Join(bin, name), nil, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("PATH", t.TempDir())
	t.Setenv(envBin, "")
	got, err := findBinaries([]string{root + "/*/bin"})
	if want := filepath.Join(root, "17", "bin"); got != want || err != nil {
		t.Errorf("findBinaries = %s, %v, want %s", got, err, want)
	}
}

// without returns the environment of a machine on which only the rung url is possible.
func without(t *testing.T) []string {
	t.Helper()
	// This Docker accepts connections and never answers. If it refused them,
	// testcontainers would look for another Docker on this machine.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	empty := t.TempDir()
	for _, name := range []string{"go", "gcc"} {
		if tool, err := exec.LookPath(name); err == nil {
			if err := os.Symlink(tool, filepath.Join(empty, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	own, err := exec.Command("go", "env", "GOCACHE", "GOMODCACHE").Output() // which the new HOME would move
	if err != nil {
		t.Fatal(err)
	}
	caches := strings.Fields(string(own))
	return []string{
		envURL + "=", envBin + "=", envLadder + "=",
		"PATH=" + empty, "HOME=" + empty, "XDG_CACHE_HOME=" + empty, "GOCACHE=" + caches[0], "GOMODCACHE=" + caches[1],
		"DOCKER_HOST=tcp://" + silent.Addr().String(),
		"HTTPS_PROXY=http://127.0.0.1:1", // nothing listens there, so there is no download
	}
}

func TestWithoutAnyPostgresTheErrorNamesAllFourWays(t *testing.T) {
	t.Parallel()
	began := time.Now()
	out, err := child(t, "nothing", without(t)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("after %v:\n%s", time.Since(began).Round(time.Millisecond), out)
	for _, want := range []string{
		"\n  url: " + envURL + " is not set", "\n  binaries: no initdb and postgres", "apt-get install postgresql",
		"\n  docker: no Docker is reachable", "DOCKER_HOST", "\n  download: embedded-postgres c",
	} {
		if !bytes.Contains(out, []byte(want)) {
			t.Errorf("%q is missing", want)
		}
	}
}

func TestForcedRungFailsAlone(t *testing.T) {
	t.Parallel()
	rungs := map[string]string{
		"url":      envURL + " is not set",
		"binaries": "no initdb and postgres",
		"docker":   "no Docker is reachable",
		"download": "embedded-postgres c",
		"dcoker":   "must be one of url, binaries, docker, download",
	}
	for name, want := range rungs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := child(t, "nothing", append(without(t), envLadder+"="+name)...).Output()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s", out)
			if !bytes.Contains(out, []byte(want)) || !bytes.Contains(out, []byte(envLadder)) {
				t.Errorf("%q or %s is missing", want, envLadder)
			}
		})
	}
}
