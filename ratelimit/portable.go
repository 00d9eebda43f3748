package ratelimit

import (
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgtype"
)

// A query is sent in one of two forms. The native one is sqlc's, whose arguments and columns pgx sends in Postgres' binary
// format. Where that is not to be had, in pgx's query modes exec and simple_protocol and with database/sql, it is the portable
// one, which depends on no driver, and on no setting of the session (DateStyle, TimeZone, extra_float_digits, bytea_output):
// arguments go as Postgres' own text, to which the casts in the queries give their types, and the row comes back in the
// binary format, in hex, as the one column of the answer.

// portable is the portable form of a query, which has to be one that can stand in FROM.
func portable(sql string, args []any) (string, []any, error) {
	args, err := texts(args)
	return "SELECT encode(record_send(q), 'hex') FROM (" + sql + ") AS q", args, err
}

// types know Postgres' formats. One must not be used by two at once.
var types = sync.Pool{New: func() any { return pgtype.NewMap() }}

// texts is the arguments of a query as strings in Postgres' own format, or nil.
func texts(args []any) ([]any, error) {
	m := types.Get().(*pgtype.Map)
	defer types.Put(m)
	all := make([]any, len(args))
	for i, arg := range args {
		text, err := m.Encode(0, pgtype.TextFormatCode, arg, []byte{}) // not nil, which is NULL
		if err != nil {
			return nil, fmt.Errorf("argument %d: %w", i+1, err)
		}
		if text != nil {
			all[i] = string(text)
		}
	}
	return all, nil
}

// scanRecord reads a row in the binary format.
func scanRecord(record []byte, dest ...any) error {
	m := types.Get().(*pgtype.Map)
	defer types.Put(m)
	columns := pgtype.NewCompositeBinaryScanner(m, record)
	if n := columns.FieldCount(); n != len(dest) {
		return fmt.Errorf("%d columns for %d destinations", n, len(dest))
	}
	for _, d := range dest {
		if !columns.Next() {
			break
		}
		if err := m.Scan(columns.OID(), pgtype.BinaryFormatCode, columns.Bytes(), d); err != nil {
			return err
		}
	}
	return columns.Err()
}
