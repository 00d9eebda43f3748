package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// startURL connects to the server that the environment names.
func startURL(ctx context.Context) (*Server, error) {
	url := os.Getenv(envURL)
	if url == "" {
		return nil, errors.New(envURL + " is not set; set it to the URL of a server on which databases may be created and dropped")
	}
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", envURL, err)
	}
	// Check it now, not when the first test asks for a database.
	if _, err := withDatabase(url, "postgres"); err != nil {
		return nil, fmt.Errorf("%s: %w", envURL, err)
	}

	// Without the timeout, a server that drops packets would use up a test's whole time.
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	version, _, err := probe(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("the server that %s names does not answer (unset the variable to start another server): %w", envURL, err)
	}
	addr := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	return &Server{
		url:     url,
		what:    fmt.Sprintf("PostgreSQL %s at %s, named by %s", version, addr, envURL),
		foreign: true,
	}, nil
}
