// Package inschema writes SQL for the schema of the limiter. All SQL of this repository says "ratelimit." before each of the limiter's names, also in
// bodies, comments and hints.
package inschema

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"sync"
	"unicode"
)

// Default is the schema that the SQL names.
const Default = "ratelimit"

var (
	ours   = regexp.MustCompile(`(^|[^\w."$])ratelimit\.([a-z_%'])`)
	others = regexp.MustCompile(`"[^"]+"\.`)
)

// maxLen leaves room in the names of channels, which have at most 63 bytes, too: "name".overrides.
const maxLen = 51

// Same reports whether two names are of one schema.
func Same(a, b string) bool { return cmp.Or(a, Default) == cmp.Or(b, Default) }

// Check refuses names that would need an escape in a text, in a body or in a format. Nothing of a name may be run.
func Check(schema string) error {
	switch strange := strings.IndexFunc(schema, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("_- ", r)
	}); {
	case schema == "" || len(schema) > maxLen:
		return fmt.Errorf("the schema's name has %d bytes, not 1 to %d", len(schema), maxLen)
	case strange >= 0:
		return fmt.Errorf("the schema's name %q may have only letters, digits, spaces, _ and -", schema)
	}
	return nil
}

// Text is a text in which the limiter's names are in a schema. "" is the default one.
func Text(text, schema string) (string, error) {
	if schema == "" || schema == Default {
		return text, nil
	}
	if err := Check(schema); err != nil {
		return "", err
	}
	return ours.ReplaceAllString(text, `${1}"`+schema+`".${2}`), nil
}

// SQL is Text for a statement that is sent often. It is made once.
func SQL(sql, schema string) (string, error) {
	if schema == "" || schema == Default {
		return sql, nil
	}
	key := [2]string{sql, schema}
	if made, ok := made.Load(key); ok {
		return made.(string), nil
	}
	text, err := Text(sql, schema)
	if err == nil {
		made.Store(key, text)
	}
	return text, err
}

var made sync.Map // by SQL and schema

// Back undoes SQL. No statement has other names in quotes.
func Back(sql string) string { return others.ReplaceAllString(sql, Default+".") }

// Up is the SQL of the migrations, without the schema itself and without what only goose reads.
func Up(files fs.FS) (sql string, err error) {
	names, err := fs.Glob(files, "0*.sql") // in their order
	for _, name := range names {
		text, failed := fs.ReadFile(files, name)
		err = cmp.Or(err, failed)
		_, up, _ := strings.Cut(string(text), "-- +goose Up\n")
		up, _, _ = strings.Cut(up, "-- +goose Down\n")
		for line := range strings.Lines(up) {
			if !strings.HasPrefix(line, "-- +goose ") {
				sql += line
			}
		}
	}
	return sql, err
}

type contextKey struct{}

// With is a context that tells parts of other packages the schema of the Limiter that they belong to.
func With(ctx context.Context, schema string) context.Context {
	return context.WithValue(ctx, contextKey{}, schema)
}

// From is the schema of a context, or else the given one.
func From(ctx context.Context, schema string) string {
	if of, ok := ctx.Value(contextKey{}).(string); ok {
		return of
	}
	return schema
}
