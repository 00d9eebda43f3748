package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
)

const defaultImage = "postgres:17-alpine"

// startDocker runs a container. It does not use the postgres module of
// testcontainers, which turns fsync off: then commits would cost much less than in
// production.
func startDocker(ctx context.Context) (_ *Server, err error) {
	// The default logger writes a dozen lines to stderr, even without a problem.
	log.SetDefault(log.NewNoopLogger())
	if err := dockerReachable(ctx); err != nil {
		return nil, fmt.Errorf("no Docker is reachable; start it, or set DOCKER_HOST: %w", err)
	}

	image := cmp.Or(os.Getenv(envImage), defaultImage)
	defer func() {
		if err != nil {
			err = fmt.Errorf("a container of %s (choose another with %s) did not start: %w", image, envImage, err)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute) // the image may have to be pulled
	defer cancel()
	container, err := testcontainers.Run(ctx, image,
		testcontainers.WithEnv(map[string]string{
			"POSTGRES_USER":     "postgres",
			"POSTGRES_PASSWORD": "postgres",
			"POSTGRES_DB":       "postgres",
		}),
		testcontainers.WithExposedPorts("5432/tcp"),
		testcontainers.WithCmd("postgres", "-c", "max_connections=300"),
	)
	stop := func() error { return testcontainers.TerminateContainer(container) } // a nil container is fine
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	addr, err := container.PortEndpoint(ctx, "5432/tcp", "")
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	url := fmt.Sprintf("postgres://postgres:postgres@%s/postgres?sslmode=disable", addr)
	version, err := waitReady(ctx, url, "", func() error {
		state, err := container.State(ctx)
		if err == nil && !state.Running {
			err = fmt.Errorf("it ended at once, with status %d:\n%s", state.ExitCode, containerLog(ctx, container))
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return &Server{
		url:  url,
		what: fmt.Sprintf("PostgreSQL %s, Docker container of %s", version, image),
		stop: stop,
	}, nil
}

// dockerReachable checks for Docker and gives up after a few seconds. The check
// takes no context. If DOCKER_HOST drops packets, its goroutine stays behind.
func dockerReachable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 6*time.Second)
	defer cancel()
	result := make(chan error, 1)
	go func() {
		provider, err := testcontainers.NewDockerProvider()
		if err == nil {
			err = provider.Health(ctx)
		}
		result <- err
	}()
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func containerLog(ctx context.Context, c testcontainers.Container) string {
	r, err := c.Logs(ctx)
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	text, _ := io.ReadAll(io.LimitReader(r, 4<<10)) // the container may be gone: this is best effort
	return string(text)
}
