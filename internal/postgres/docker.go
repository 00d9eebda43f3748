package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// startDocker runs cmd/container, which ends with its standard input.
func startDocker(ctx context.Context) (*Server, error) {
	cmd := exec.Command("go", "run", "github.com/txlimit/txlimit/internal/postgres/cmd/container")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop := func() error {
		err := errors.Join(stdin.Close(), cmd.Wait())
		if said := strings.TrimSuffix(strings.TrimSpace(stderr.String()), "\nexit status 1"); err != nil && said != "" {
			return errors.New(said)
		}
		return err
	}
	starting := context.AfterFunc(ctx, func() { _ = stdin.Close() })
	defer starting()
	var url, image string
	if _, err := fmt.Fscanln(stdout, &url, &image); err != nil {
		return nil, cmp.Or(stop(), err)
	}
	version, _, err := probe(ctx, url)
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return &Server{url: url, what: fmt.Sprintf("PostgreSQL %s, Docker container of %s", version, image), stop: stop}, nil
}
