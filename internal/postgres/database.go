package postgres

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// NewDatabase creates a database with a random name, as a copy of the template unless that is "", and returns a connection
// string like [Server.URL] for it. drop drops the database, and ends its sessions. It may be called more than once.
func (s *Server) NewDatabase(ctx context.Context, template string) (url string, drop func() error, err error) {
	name := "txlimit_test_" + randomHex()
	if url, err = withDatabase(s.url, name); err != nil {
		return "", nil, fmt.Errorf("postgres: %w", err)
	}

	// The database is noted before it exists, so that Close never misses it.
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return "", nil, errors.New("postgres: NewDatabase called after Close")
	}
	if s.databases == nil {
		s.databases = make(map[string]struct{})
	}
	s.databases[name] = struct{}{}
	s.mu.Unlock()

	create := "CREATE DATABASE " + name
	if template != "" {
		config, err := pgx.ParseConfig(template)
		if err != nil {
			return "", nil, err
		}
		create += " TEMPLATE " + config.Database
	}
	if err := s.exec(ctx, create); err != nil {
		return "", nil, fmt.Errorf("postgres: create a database: %w", err)
	}
	drop = func() error {
		s.mu.Lock()
		_, there := s.databases[name]
		gone := !there || s.closed && !s.foreign
		s.mu.Unlock()
		if gone {
			return nil
		}
		if err := s.dropDatabase(name); err != nil {
			return err
		}
		s.mu.Lock()
		delete(s.databases, name)
		s.mu.Unlock()
		return nil
	}
	return url, drop, nil
}

// NewUser makes a user in a server that is [Server.Pooled]. The user's sessions
// start with the settings. The user exists as long as the server.
func (s *Server) NewUser(ctx context.Context, settings map[string]string) (name string, err error) {
	name = "txlimit_test_" + randomHex()
	if err := s.exec(ctx, newUser(name, settings)); err != nil {
		return "", fmt.Errorf("postgres: create a user: %w", err)
	}
	return name, nil
}

func newUser(name string, settings map[string]string) (sql string) {
	sql = "CREATE ROLE " + name + " LOGIN SUPERUSER"
	for setting, value := range settings {
		sql += fmt.Sprintf("; ALTER ROLE %s SET %s = '%s'", name, setting, strings.ReplaceAll(value, "'", "''"))
	}
	return sql
}

func randomHex() string {
	random := make([]byte, 8)
	rand.Read(random) // never fails
	return hex.EncodeToString(random)
}

// dropDatabase takes no context, since it cleans up even after the caller's context
// was cancelled.
func (s *Server) dropDatabase(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := s.exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("postgres: drop database %s: %w", name, err)
	}
	return nil
}

func (s *Server) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, cmp.Or(s.direct, s.url))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

// withDatabase returns conn, a URL or keyword=value pairs, with another database.
func withDatabase(conn, name string) (string, error) {
	if !strings.HasPrefix(conn, "postgres://") && !strings.HasPrefix(conn, "postgresql://") {
		return conn + " dbname=" + name, nil // if a keyword occurs twice, the later one counts
	}
	u, err := url.Parse(conn)
	if err != nil {
		return "", errors.New("not a URL that can be given a database") // err would show the password
	}
	u.Path = "/" + name
	query := u.Query()
	for _, parameter := range []string{"dbname", "database"} { // which counts more
		if query.Has(parameter) {
			query.Set(parameter, name)
		}
	}
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // libpq does not read + as a space; a literal + is %2B by now
	return u.String(), nil
}

// withUser returns a URL with another user, without a password.
func withUser(conn, name string) (string, error) {
	u, err := url.Parse(conn)
	if err != nil {
		return "", err
	}
	u.User = url.User(name)
	return u.String(), nil
}
