package postgres

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"regexp"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// pgBouncerINI makes PgBouncer pool transactions, and pass the server connections
// among the clients as much as possible. It listens on this machine alone,
// connects to this machine alone, and trusts all users, like the throwaway cluster.
//
// A pool belongs to a database and so to a test (see NewDatabase). Some tests hold
// dozens of transactions open at once. The cluster has max_connections = 300.
const pgBouncerINI = `[databases]
* = host=127.0.0.1 port=%[1]d
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %[2]d
unix_socket_dir =
auth_type = trust
auth_user = postgres
auth_query = SELECT rolname, '' FROM pg_roles WHERE rolname = $1
pool_mode = transaction
server_round_robin = 1
server_idle_timeout = 1
default_pool_size = 100
max_db_connections = 250
max_client_conn = 1000
ignore_startup_parameters = extra_float_digits
log_connections = 0
log_disconnections = 0
stats_period = 3600
%[3]s`

// pgBouncerScript takes the program and its configuration.
const pgBouncerScript = `
signal=KILL # it has no data to lose, and no other signal stops every version at once
printf %s "$2" >"$dir/pgbouncer.ini"
"$1" "$dir/pgbouncer.ini" 3<&- &
`

// putPgBouncer puts a PgBouncer in transaction mode before the server. mode is the
// query mode of the clients, a value of pgx's default_query_exec_mode. PgBouncer
// keeps prepared statements only for cache_statement, which needs them.
func (s *Server) putPgBouncer(ctx context.Context, mode string) error {
	config, err := pgx.ParseConfig("default_query_exec_mode=" + mode)
	if err != nil {
		return fmt.Errorf("%s is %q, which is none of pgx's default_query_exec_modes", envPgBouncer, mode)
	}
	if s.cluster == "" {
		return fmt.Errorf("%s works with throwaway clusters, not with %s", envPgBouncer, s)
	}
	bin, version, err := findPgBouncer()
	if err != nil {
		return err
	}
	var more string
	switch prepared, newEnough := config.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement, !before(version, 1, 21); {
	case prepared && newEnough:
		more = "max_prepared_statements = 100"
	case prepared:
		return fmt.Errorf("%s is %s; prepared statements in transaction mode need 1.21: put a later one first in PATH", bin, version)
	case newEnough:
		more = "max_prepared_statements = 0" // the default has been 200 since 1.24
	}
	u, err := url.Parse(s.url)
	if err != nil {
		return err
	}
	behind, err := strconv.Atoi(u.Port())
	if err != nil {
		return err
	}

	front, err := onFreePort(func(port int) (*Server, error) {
		w, err := startWatchdog(pgBouncerScript, bin, fmt.Sprintf(pgBouncerINI, behind, port, more))
		if err != nil {
			return nil, err
		}
		return w.await(ctx, s.cluster,
			fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable&default_query_exec_mode=%s", port, mode))
	})
	if err != nil {
		return fmt.Errorf("%s did not start: %w", bin, err)
	}
	s.direct, s.url = s.url, front.url
	s.what += fmt.Sprintf(", through PgBouncer %s in the query mode %s", version, mode)
	stop := s.stop
	s.stop = func() error { return errors.Join(front.stop(), stop()) }
	return nil
}

var pgBouncerVersion = regexp.MustCompile(`PgBouncer ([0-9]+\.[0-9.]+)`)

// findPgBouncer looks for the program in PATH and in Debian's directory.
func findPgBouncer() (bin, version string, err error) {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} {
		if bin, err = exec.LookPath(name); err == nil {
			break
		}
	}
	if err != nil {
		return "", "", fmt.Errorf("no pgbouncer in PATH or /usr/sbin; install it (apt-get install pgbouncer, brew install pgbouncer): %w", err)
	}
	output, err := exec.Command(bin, "--version").Output()
	if err != nil {
		return "", "", fmt.Errorf("%s --version: %w", bin, err)
	}
	match := pgBouncerVersion.FindSubmatch(output)
	if match == nil {
		return "", "", fmt.Errorf("%s --version says %q", bin, output)
	}
	return bin, string(match[1]), nil
}

// before reports whether a version is before major.minor.
func before(version string, major, minor int) bool {
	var x, y int
	_, _ = fmt.Sscanf(version, "%d.%d", &x, &y) // pgBouncerVersion has matched
	return x < major || x == major && y < minor
}
