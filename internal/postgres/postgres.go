// Package postgres finds or starts a PostgreSQL server for tests and examples.
//
// [Start] takes the first of these ways that is possible:
//
//  1. url: the server that TXLIMIT_TEST_DATABASE_URL names. This package never
//     stops it, and creates and drops only its own databases there.
//  2. binaries: a throwaway cluster of installed server binaries (PATH,
//     /usr/lib/postgresql/*/bin, Homebrew, or only the directory that
//     TXLIMIT_TEST_POSTGRES_BIN names).
//  3. docker: a container of the image TXLIMIT_TEST_IMAGE, or postgres:17-alpine.
//  4. download: a throwaway cluster of server binaries that embedded-postgres
//     downloads once. It is not possible for root.
//
// TXLIMIT_TEST_LADDER names one of the four ways and excludes the others. A
// variable with an empty value counts as unset.
//
// With TXLIMIT_TEST_PGBOUNCER, clients reach a throwaway cluster through a
// PgBouncer, which is started as well: see pgbouncer.go.
//
// A [Breakable] is a separate throwaway cluster that can be killed and started
// again.
//
// A throwaway cluster ends with the process that started it, however that process
// ends: see watchdog.go. So does a container, unless the reaper of testcontainers
// is disabled.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
)

const (
	envURL    = "TXLIMIT_TEST_DATABASE_URL"
	envBin    = "TXLIMIT_TEST_POSTGRES_BIN"
	envLadder = "TXLIMIT_TEST_LADDER"

	envPgBouncer = "TXLIMIT_TEST_PGBOUNCER"
)

// rung is one way to a server.
type rung struct {
	name string
	// env is the variable that asks for this rung. If it is set, a failure is
	// final: another server would be a surprise.
	env   string
	start func(context.Context) (*Server, error)
}

var ladder = []rung{
	{name: "url", env: envURL, start: startURL},
	{name: "binaries", env: envBin, start: startBinaries},
	{name: "docker", start: startDocker},
	{name: "download", start: startDownload},
}

// Server is a PostgreSQL server that [Start] found or started. Its methods may
// be called concurrently.
type Server struct {
	url     string
	what    string
	foreign bool         // not started here: it outlives Close, so Close drops the databases
	stop    func() error // nil if there is nothing to stop
	cluster string       // the cluster_name of a throwaway cluster
	direct  string       // the URL without PgBouncer, if url leads through one

	mu        sync.Mutex
	closed    bool
	closeErr  error
	databases map[string]struct{} // made by NewDatabase and not dropped yet
}

// Start finds or starts a server, as the package comment says. If no way is
// possible, the error says for each way why not, and what to do about it. The
// server lives until [Server.Close]; ctx bounds only the start.
func Start(ctx context.Context) (*Server, error) {
	s, err := climb(ctx, ladder, os.Getenv(envLadder))
	if mode := os.Getenv(envPgBouncer); err == nil && mode != "" {
		if err := s.putPgBouncer(ctx, mode); err != nil {
			return nil, errors.Join(fmt.Errorf("postgres: %w", err), s.Close())
		}
	}
	return s, err
}

// RunTests starts a server for the tests of a package, runs them, and returns the exit status. Without a Postgres the tests
// fail. They are not skipped.
func RunTests(m interface{ Run() int }, server **Server) (status int) {
	s, err := Start(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	*server = s
	fmt.Println("tests run on", s)
	status = m.Run()
	if err := s.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return status
}

func climb(ctx context.Context, rungs []rung, only string) (*Server, error) {
	if only != "" {
		var names []string
		for _, r := range rungs {
			if r.name == only {
				s, err := r.start(ctx)
				if err != nil {
					return nil, fmt.Errorf("postgres: %s=%s allows no other way: %w", envLadder, only, err)
				}
				return s, nil
			}
			names = append(names, r.name)
		}
		return nil, fmt.Errorf("postgres: %s is %q; it must be one of %s", envLadder, only, strings.Join(names, ", "))
	}

	var failed []error
	for _, r := range rungs {
		s, err := r.start(ctx)
		if err == nil {
			return s, nil
		}
		if ctx.Err() != nil || r.env != "" && os.Getenv(r.env) != "" {
			return nil, fmt.Errorf("postgres: %w", err)
		}
		failed = append(failed, fmt.Errorf("  %s: %w", r.name, err))
	}
	return nil, fmt.Errorf("postgres: there is no PostgreSQL; any of these would do:\n%w", errors.Join(failed...))
}

// URL returns the connection string of the server, for a user with the right to
// create databases. It is a URL, unless TXLIMIT_TEST_DATABASE_URL has the
// keyword=value form.
func (s *Server) URL() string { return s.url }

// Pooled reports whether clients reach the server through a PgBouncer in
// transaction mode. Then a statement's changes to its session are lost or appear
// in the sessions of other clients.
func (s *Server) Pooled() bool { return s.direct != "" }

// String returns one phrase that names the server and its origin.
func (s *Server) String() string { return s.what }

// Close stops and removes everything that [Start] started. In a server that
// existed before, it drops the remaining databases of this package. Further calls do
// nothing and return the same error.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return s.closeErr
	}
	s.closed = true
	if s.foreign {
		var errs []error
		for name := range s.databases {
			errs = append(errs, s.dropDatabase(name))
		}
		s.closeErr = errors.Join(errs...)
	}
	if s.stop != nil {
		s.closeErr = errors.Join(s.closeErr, s.stop())
	}
	return s.closeErr
}

// probe connects and returns the server's version ("15.18") and cluster_name.
func probe(ctx context.Context, url string) (version, cluster string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", "", err
	}
	defer conn.Close(ctx)
	err = conn.QueryRow(ctx, `
		SELECT split_part(current_setting('server_version'), ' ', 1),
		       coalesce(current_setting('cluster_name', true), '')`).Scan(&version, &cluster)
	return version, cluster, err
}
