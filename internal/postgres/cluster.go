package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// errPortTaken is returned by startClusterOn.
var errPortTaken = errors.New("the port was taken by another process")

// startCluster runs a throwaway cluster with the server binaries in bin. The
// two ways that have binaries share it; from says which it is.
func startCluster(ctx context.Context, bin, from string) (*Server, error) {
	for attempt := 1; ; attempt++ {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		s, err := startClusterOn(ctx, bin, port)
		if err == nil {
			s.what = fmt.Sprintf("PostgreSQL %s, %s", s.what, from)
			return s, nil
		}
		// Between our finding the port free and the server's taking it, anybody
		// else may have.
		if !errors.Is(err, errPortTaken) || attempt == 5 {
			return nil, fmt.Errorf("%s did not start: %w", from, err)
		}
	}
}

// startClusterOn returns a Server whose what is the bare version.
func startClusterOn(ctx context.Context, bin string, port int) (*Server, error) {
	w, err := startWatchdog(bin, port)
	if err != nil {
		return nil, err
	}
	url := fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port)
	version, err := waitReady(ctx, url, w.name, func() error {
		select {
		case <-w.exited:
		default:
			return nil
		}
		log := w.tail()
		if strings.Contains(log, "could not bind") {
			return errPortTaken
		}
		return fmt.Errorf("it ended at once:\n%s", log)
	})
	if err != nil {
		return nil, errors.Join(err, w.stop())
	}
	return &Server{url: url, what: version, stop: w.stop}, nil
}

// waitReady waits until the server at url serves, and returns its version. It
// gives up when dead returns an error. cluster is the cluster_name that the
// server must have, or empty: on a port that we lost to somebody else, it may be
// his server that answers.
func waitReady(ctx context.Context, url, cluster string, dead func() error) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
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
