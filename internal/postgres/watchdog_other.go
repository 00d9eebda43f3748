//go:build !unix

package postgres

import "errors"

// watchdog needs a shell and an inherited pipe. On systems other than Unix, use a
// URL or Docker.
type watchdog struct {
	name   string
	exited chan struct{}
}

func startWatchdog(string, ...string) (*watchdog, error) {
	return nil, errors.New("throwaway servers are for Unix only")
}

func (*watchdog) stop() error  { return nil }
func (*watchdog) tail() string { return "" }
