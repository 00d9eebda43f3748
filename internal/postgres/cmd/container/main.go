// Container runs PostgreSQL in a Docker container until its standard input ends. It prints the address of the server and the
// image, and, if it cannot, why. It is a program of its own, so that nothing else compiles and links testcontainers.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
)

func main() {
	signal.Ignore(os.Interrupt) // of the terminal: whoever started this closes its input
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run does not use the postgres module of testcontainers, which turns fsync off: then commits would cost much less than in
// production.
func run(ctx context.Context) (err error) {
	// The default logger writes a dozen lines to stderr, even without a problem.
	log.SetDefault(log.NewNoopLogger())
	if err := dockerReachable(ctx); err != nil {
		return fmt.Errorf("no Docker is reachable; start it, or set DOCKER_HOST: %w", err)
	}

	image := cmp.Or(os.Getenv("TXLIMIT_TEST_IMAGE"), "postgres:17-alpine")
	defer func() {
		if err != nil {
			err = fmt.Errorf("a container of %s (choose another with TXLIMIT_TEST_IMAGE) did not start: %w", image, err)
		}
	}()
	starting, cancel := context.WithTimeout(ctx, 5*time.Minute) // the image may have to be pulled
	defer cancel()
	container, err := testcontainers.Run(starting, image,
		testcontainers.WithEnv(map[string]string{
			"POSTGRES_USER":     "postgres",
			"POSTGRES_PASSWORD": "postgres",
			"POSTGRES_DB":       "postgres",
		}),
		testcontainers.WithExposedPorts("5432/tcp"),
		testcontainers.WithCmd("postgres", "-c", "max_connections=300"),
	)
	defer func() { err = errors.Join(err, testcontainers.TerminateContainer(container)) }() // a nil container is fine
	if err != nil {
		return err
	}
	addr, err := container.PortEndpoint(starting, "5432/tcp", "")
	if err != nil {
		return err
	}
	url := fmt.Sprintf("postgres://postgres:postgres@%s/postgres?sslmode=disable", addr)
	for {
		conn, err := pgx.Connect(starting, url)
		if err == nil {
			err = conn.Close(starting)
		}
		if err == nil {
			break
		}
		if state, err := container.State(starting); err != nil || !state.Running {
			return errors.Join(err, fmt.Errorf("it ended at once:\n%s", containerLog(starting, container)))
		}
		select {
		case <-starting.Done():
			return errors.Join(starting.Err(), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	fmt.Println(url, image)
	_, _ = io.Copy(io.Discard, os.Stdin) // until whoever started this closes it, or ends
	return nil
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
