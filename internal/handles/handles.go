// Package handles tells what a handle of a database is: a pool, or one connection or transaction.
package handles

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Of is the handle of database/sql inside ratelimit.SQL, or db itself.
func Of(db any) any {
	if wrapped, ok := db.(interface{ Handle() any }); ok {
		return wrapped.Handle()
	}
	return db
}

// Type is the type of a handle, as its caller knows it, for an error.
func Type(db any) string {
	if named, ok := db.(interface{ HandleType() string }); ok {
		return named.HandleType()
	}
	return fmt.Sprintf("%T", Of(db))
}

// IsNil reports whether a handle is nil, or an interface that holds a nil pointer.
func IsNil(db any) bool {
	v := reflect.ValueOf(db)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// IsTx reports whether a handle is a transaction: one that can be committed.
func IsTx(db any) bool {
	switch Of(db).(type) {
	case interface {
		Commit(ctx context.Context) error
	}, interface{ Commit() error }:
		return true
	}
	return false
}

// IsOne reports whether a handle is one connection or one transaction: no pool, which several goroutines may use. A wrapper type is not
// recognized.
func IsOne(db any) bool {
	switch Of(db).(type) {
	case *pgx.Conn, *pgxpool.Conn, *sql.Conn:
		return true
	}
	return IsTx(db)
}
