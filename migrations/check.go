package migrations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/inschema"
)

// ErrBehind is matched by the error of [Check] for a schema that is older than this library needs, or is not there.
var ErrBehind = errors.New("the schema is behind the library")

// Schema is which schema a database has.
type Schema struct {
	Version int    // the number of the newest migration that was run. 0: it has none, or is from before v0.1.0
	Hash    string // of its functions, as they are now, without the schema's name
}

// Differs says in what the schema differs from the one that belongs to this library, or is empty. Only functions are compared,
// and only of the same [Version]. Somebody may have edited one, or the schema is of another build of that version. (A
// newer schema serves older libraries, and is not compared.)
func (s Schema) Differs() string {
	if s.Version != Version || s.Hash == Hash {
		return ""
	}
	return fmt.Sprintf("it has version %d as this library, but other functions (hash %.12s, not %.12s): one was edited, or it is of another build. "+
		"`txlimit migrate status` compares; docs/operations.md#which-schema-is-this says how to put it right", s.Version, s.Hash, Hash)
}

// Check says which schema the database has, and returns an error that matches [ErrBehind] if it is older than this library
// needs: [Version]. A newer one is none: it serves older libraries. To see whether functions differ, call [Schema.Differs].
//
// It also returns an error if the database or the session has another encoding than UTF8. There, the same key would be stored as one
// text by this library, and as another by programs that convert.
//
// db is a pool, a connection or a transaction of pgx, or ratelimit.SQL of a handle of database/sql. schema is as for [In]. Check only reads, and works
// on a standby. It needs any word of ratelimit.grant: without one, the error is 42501 and does not match ErrBehind. ratelimit.Open calls it. In a transaction, a schema that is not there is a SQL error (42883 or
// 3F000), after which the transaction is aborted.
func Check(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, schema string) (Schema, error) {
	sql, err := inschema.SQL("SELECT s.version, s.hash, current_setting('server_encoding'), current_setting('client_encoding') FROM ratelimit.schema() AS s", schema)
	if err != nil {
		return Schema{}, err
	}
	var s Schema
	var server, client string
	read := func() error {
		return db.QueryRow(ctx, sql).Scan(&s.Version, &s.Hash, &server, &client)
	}
	err = read()
	if err == nil && s.Differs() != "" { // while a migration commits, its version may come with the functions of before
		err = read()
	}
	if state := (interface{ SQLState() string })(nil); errors.As(err, &state) && (state.SQLState() == "42883" || state.SQLState() == "3F000") {
		return Schema{}, fmt.Errorf("%w: is it the right database and schema, and was that not renamed? Otherwise migrate first "+
			"(`txlimit migrate`, or goose with package migrations): %w", ErrBehind, err)
	}
	if err != nil {
		return Schema{}, err
	}
	if server != "UTF8" || client != "UTF8" {
		return s, fmt.Errorf("the database has the encoding %s, and the session has client_encoding %s: both must be UTF8, or a key with letters beyond ASCII is stored as "+
			"another text than psql stores; see docs/databases.md#encoding", server, client)
	}
	if s.Version < Version {
		return s, fmt.Errorf("%w: it has version %d, and the library needs %d: migrate first (`txlimit migrate`, or goose with package migrations), then deploy",
			ErrBehind, s.Version, Version)
	}
	return s, nil
}
