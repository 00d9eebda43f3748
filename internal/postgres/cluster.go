package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// errPortTaken is returned by watchdog.await.
var errPortTaken = errors.New("the port was taken by another process")

// clusterScript takes the directory of the programs and the port.
const clusterScript = `
# --no-sync is enough for these files, since only the first start reads them. The
# server itself syncs: fsync and the other settings for durable commits keep their
# defaults. "trust" is safe, since the server listens only on this machine.
"$1/initdb" -D "$dir/data" -U postgres --auth=trust --encoding=UTF8 --locale=C --no-sync 3<&- || exit

"$1/postgres" -D "$dir/data" -p "$2" \
	-c listen_addresses=127.0.0.1 -c unix_socket_directories= \
	-c max_connections=300 -c cluster_name="$name" 3<&- &
`

// startCluster runs a throwaway cluster with the server binaries in bin. Two rungs
// of the ladder use it; from names the rung.
func startCluster(ctx context.Context, bin, from string) (*Server, error) {
	s, err := onFreePort(func(port int) (*Server, error) { return startClusterOn(ctx, bin, port) })
	if err != nil {
		return nil, fmt.Errorf("%s did not start: %w", from, err)
	}
	s.what = fmt.Sprintf("PostgreSQL %s, %s", s.what, from)
	return s, nil
}

// onFreePort starts something on a free port.
func onFreePort(start func(port int) (*Server, error)) (*Server, error) {
	for attempt := 1; ; attempt++ {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		s, err := start(port)
		// Another process may take the port between freePort and the server's
		// start.
		if !errors.Is(err, errPortTaken) || attempt == 5 {
			return s, err
		}
	}
}

func startClusterOn(ctx context.Context, bin string, port int) (*Server, error) {
	w, err := startWatchdog(clusterScript, bin, strconv.Itoa(port))
	if err != nil {
		return nil, err
	}
	return w.await(ctx, w.name, fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port))
}

// await returns the Server at url when it accepts connections. The server is, or
// leads to, the cluster of that name. Its field what has only the version.
func (w *watchdog) await(ctx context.Context, cluster, url string) (*Server, error) {
	version, err := waitReady(ctx, url, cluster, func() error {
		select {
		case <-w.exited:
		default:
			return nil
		}
		log := w.tail()
		if strings.Contains(log, "Address already in use") {
			return errPortTaken
		}
		return fmt.Errorf("it ended at once:\n%s", log)
	})
	if err != nil {
		return nil, errors.Join(err, w.stop())
	}
	return &Server{url: url, what: version, cluster: cluster, stop: w.stop}, nil
}

// waitReady waits until the server at url accepts connections, and returns its
// version. It gives up when dead returns an error. cluster is the cluster_name
// that the server must have, or empty. If another process took the port, another
// server may answer there.
func waitReady(ctx context.Context, url, cluster string, dead func() error) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for {
		version, name, err := probe(ctx, url)
		if err == nil && (cluster == "" || name == cluster) {
			return version, nil
		}
		if err := dead(); err != nil {
			return "", err
		}
		select {
		case <-ctx.Done():
			return "", errors.Join(ctx.Err(), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
