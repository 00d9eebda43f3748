package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/keytext"
	"github.com/txlimit/txlimit/internal/pin"
)

// config is how to connect.
func (a *app) config() (*pgx.ConnConfig, error) {
	from, text := "--database", a.database
	if text == "" {
		from, text = "DATABASE_URL", a.getenv("DATABASE_URL")
	}
	config, err := pgx.ParseConfig(text)
	if err != nil {
		if text == "" {
			from = "the environment (PGHOST, PGPORT, PGSERVICE and so on)"
		}
		return nil, usagef("%s is not a way to a database: %s. Write postgres://user@host:5432/db, or words as in \"host=db user=app\". It is not shown, since it may have a password", from, unparsed(err))
	}
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = "txlimit"
	}
	// Arguments are UTF-8, whatever a role or a database has set.
	config.RuntimeParams["client_encoding"] = "UTF8"
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = 10 * time.Second
	}
	// Without prepared statements, which poolers may not know.
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	return config, nil
}

// unparsed is why a connection string cannot be parsed, without any of its text: pgx hides only the passwords that it recognizes.
func unparsed(err error) string {
	text := err.Error()
	i := strings.LastIndex(text, "`: ")
	if _, ok := errors.AsType[*pgconn.ParseConfigError](err); !ok || i < 0 {
		return "it is malformed"
	}
	why, _, _ := strings.Cut(text[i+len("`: "):], " (") // in parentheses is the cause, which may have some of it
	return why
}

// connect makes a.conn.
func (a *app) connect(ctx context.Context) error {
	if a.conn != nil {
		return nil
	}
	config, err := a.config()
	if err != nil {
		return err
	}
	a.conn, err = pgx.ConnectConfig(ctx, config)
	return err
}

// inTx runs fn in a transaction in which only Postgres' own names count and the limiter's, in its schema, and commits it. It gives up waiting
// for a lock when a.patience has passed.
func (a *app) inTx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	return a.within(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, fmt.Sprintf("SET LOCAL lock_timeout = %d", a.patience.Milliseconds()), fn)
}

// reading runs fn in a transaction that reads, along indexes where it can, with the same names. All that fn reads is
// of one snapshot: an answer must not mix what was there before a change with what is there after it.
// Nothing is compiled: a scan that cannot be avoided looks costly, and its compilation would take half a second.
func (a *app) reading(ctx context.Context, fn func(tx pgx.Tx) error) error {
	return a.within(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, "SET LOCAL enable_seqscan = off; SET LOCAL jit = off", fn)
}

// answering is reading, and prints the answer afterwards: a pager may wait for its reader for hours, and must not keep the snapshot, which
// would hold back vacuum.
func (a *app) answering(ctx context.Context, fn func(tx pgx.Tx) (answer func() error, err error)) error {
	var answer func() error
	err := a.reading(ctx, func(tx pgx.Tx) (err error) {
		answer, err = fn(tx)
		return err
	})
	if err != nil {
		return err
	}
	return answer()
}

func (a *app) within(ctx context.Context, options pgx.TxOptions, set string, fn func(tx pgx.Tx) error) error {
	if err := a.connect(ctx); err != nil {
		return err
	}
	return pgx.BeginTxFunc(ctx, a.conn, options, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, set); err != nil {
			return err
		}
		pinned, err := pin.To(ctx, tx, a.schema)
		if err != nil {
			return err
		}
		return fn(pinned)
	})
}

// now is the time of the database.
func now(ctx context.Context, db querier) (at time.Time, err error) {
	err = db.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at)
	return at.UTC(), err
}

// querier runs queries.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// collect reads all rows of a query.
func collect[T any](ctx context.Context, db querier, row pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, row)
}

// optional is NULL for an empty text.
func optional(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// takesKey gives a command the arguments LIMIT [KEY], and --part.
func (a *app) takesKey(c *cobra.Command) {
	c.Args = func(_ *cobra.Command, args []string) error { return limitAndKey(args, a.parts) }
	c.ValidArgsFunction = a.completeLimitAndKey
	a.partFlag(c)
	a.checked(c, func(args []string) error { return checkLimitAndKey(args[0], keyOf(a.withParts(args))) })
}

// checked has a command refuse texts that the server would not take, or that no program can have, before anything is asked: or it would say of a
// key of 1025 bytes that a call for it is granted.
func (a *app) checked(c *cobra.Command, check func(args []string) error) {
	c.PreRunE = func(_ *cobra.Command, args []string) error {
		err := check(args)
		a.running = err != nil // as if the server had refused it: the exit status is 1
		return err
	}
}

// checkLimits checks names of limits.
func checkLimits(names []string) error {
	for _, name := range names {
		if err := checkText("name of the limit", name, 255); err != nil {
			return err
		}
	}
	return nil
}

// checkLimitAndKey checks the name of a limit, and a key (nil: none).
func checkLimitAndKey(name string, key *string) error {
	if err := checkLimits([]string{name}); err != nil || key == nil {
		return err
	}
	return checkText("key", *key, 1024)
}

// checkText refuses what a program cannot have either, as ratelimit.Limit.Key does. The error does not quote the text: it may be long.
func checkText(what, s string, most int) error {
	switch {
	case len(s) > most:
		return fmt.Errorf("the %s has %d bytes, and %d are allowed", what, len(s), most)
	case !utf8.ValidString(s):
		return fmt.Errorf("the %s is not valid UTF-8", what)
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("the %s has a NUL byte", what)
	}
	return nil
}

// withParts is the arguments with the KEY of the parts.
func (a *app) withParts(args []string) []string {
	if len(a.parts) == 0 {
		return args
	}
	return append(slices.Clone(args), keytext.Join(a.parts...))
}

// partFlag adds --part.
func (a *app) partFlag(c *cobra.Command) {
	c.Flags().StringArrayVar(&a.parts, "part", nil, "a `part` of a key of several parts, instead of KEY: once for each, in their order")
}

// keyOf is the KEY of the arguments LIMIT [KEY].
func keyOf(args []string) *string {
	if len(args) < 2 {
		return nil
	}
	return &args[1]
}

// noArgs refuses arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes no arguments, and there is %q", cmd.CommandPath(), args[0])
	}
	return nil
}

// limitAndKey checks the arguments LIMIT [KEY], and the parts that may stand for KEY.
func limitAndKey(args, parts []string) error {
	switch {
	case len(args) == 0:
		return fmt.Errorf("the name of the limit is missing")
	case len(args) > 2:
		return fmt.Errorf("too many arguments: %q comes after LIMIT and KEY (a key with blanks needs quotes, and a key of several parts --part)", args[2])
	case args[0] == "":
		return fmt.Errorf("the name of the limit is empty")
	case len(args) == 2 && args[1] == "":
		return fmt.Errorf("the key is empty: for a limit without keys, and for all keys, leave KEY out")
	case len(args) == 2 && len(parts) > 0:
		return fmt.Errorf("there are KEY %q and --part: give one of them", args[1])
	case slices.Contains(parts, ""):
		return fmt.Errorf("--part is empty: no part of a key is")
	}
	return nil
}
