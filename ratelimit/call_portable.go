package ratelimit

import (
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgtype"
)

// A query is sent in one of two forms. The native form is sqlc's, in pgx's binary format. The portable form, for
// database/sql and pgx's modes exec and simple_protocol, depends on no driver or session setting (DateStyle, TimeZone,
// extra_float_digits, bytea_output): text arguments, which the query casts, and a record in hex.

// portable is the portable form of a query that can stand in FROM.
func portable(sql string, args []any) (string, []any, error) {
	args, err := texts(args)
	return "SELECT encode(record_send(q), 'hex') FROM (" + sql + ") AS q", args, err
}

// types knows Postgres' formats. A Map must not be used by two goroutines at once.
var types = sync.Pool{New: func() any { return pgtype.NewMap() }}

// texts returns the arguments of a query as strings in Postgres' own format. NULL is nil.
func texts(args []any) ([]any, error) {
	m := types.Get().(*pgtype.Map)
	defer types.Put(m)
	all := make([]any, len(args))
	for i, arg := range args {
		text, err := m.Encode(0, pgtype.TextFormatCode, arg, []byte{}) // not nil, so that only NULL is nil
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
