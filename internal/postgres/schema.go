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

// NewSchema creates a schema with a random name and returns a connection string
// like [Server.URL] whose search_path is that schema alone. drop drops the schema
// with everything in it. It may be called more than once. It waits at most 5
// minutes for locks in the schema.
func (s *Server) NewSchema(ctx context.Context) (url string, drop func() error, err error) {
	name := "txlimit_test_" + randomHex()
	create := "CREATE SCHEMA " + name
	if s.Pooled() {
		// PgBouncer does not pass the search_path on, but a user has its own.
		url, err = withUser(s.url, name)
		create += "; " + newUser(name, map[string]string{"search_path": name})
	} else {
		url, err = withSearchPath(s.url, name)
	}
	if err != nil {
		return "", nil, fmt.Errorf("postgres: %w", err)
	}

	// The schema is noted before it exists, so that Close never misses it.
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return "", nil, errors.New("postgres: NewSchema called after Close")
	}
	if s.schemas == nil {
		s.schemas = make(map[string]struct{})
	}
	s.schemas[name] = struct{}{}
	s.mu.Unlock()

	if err := s.exec(ctx, create); err != nil {
		return "", nil, fmt.Errorf("postgres: create a schema: %w", err)
	}
	drop = func() error {
		s.mu.Lock()
		_, there := s.schemas[name]
		gone := !there || s.closed && !s.foreign
		s.mu.Unlock()
		if gone {
			return nil
		}
		if err := s.dropSchema(name); err != nil {
			return err
		}
		s.mu.Lock()
		delete(s.schemas, name)
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

// dropSchema takes no context, since it cleans up even after the caller's context
// was cancelled.
func (s *Server) dropSchema(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := s.exec(ctx, "DROP SCHEMA IF EXISTS "+name+" CASCADE"); err != nil {
		return fmt.Errorf("postgres: drop schema %s: %w", name, err)
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

// withUser returns a URL with another user, without a password.
func withUser(conn, name string) (string, error) {
	u, err := url.Parse(conn)
	if err != nil {
		return "", err
	}
	u.User = url.User(name)
	return u.String(), nil
}

// withSearchPath returns conn, a URL or keyword=value pairs, with the
// search_path set to schema.
//
// It sets "options", which psql and every driver understand. Only pgx and a few
// others know "search_path" as a parameter.
func withSearchPath(conn, schema string) (string, error) {
	config, err := pgx.ParseConfig(conn)
	if err != nil {
		return "", err
	}
	// Keep the options from conn or PGOPTIONS; the last -c wins.
	options := strings.TrimSpace(config.RuntimeParams["options"] + " -c search_path=" + schema)
	// The server applies search_path after options. If it is set, it must agree.
	_, asParam := config.RuntimeParams["search_path"]

	if strings.HasPrefix(conn, "postgres://") || strings.HasPrefix(conn, "postgresql://") {
		u, err := url.Parse(conn)
		if err != nil {
			return "", errors.New("not a URL that can be given a search_path") // err would show the password
		}
		query := u.Query()
		query.Set("options", options)
		if asParam {
			query.Set("search_path", schema)
		}
		// libpq does not read + as a space. A literal + is %2B by now.
		u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
		return u.String(), nil
	}

	// If a keyword occurs twice, the later one counts.
	conn += " options='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(options) + "'"
	if asParam {
		conn += " search_path=" + schema
	}
	return conn, nil
}
