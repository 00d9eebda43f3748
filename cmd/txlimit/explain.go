package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/ratelimit"
)

// explain is an error as text that says what to do.
func (a *app) explain(ctx context.Context, err error) string {
	if cause := context.Cause(ctx); cause != nil {
		return "interrupted: " + oneLine(err.Error())
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		text := "cannot connect: " + oneLine(withoutTLS(err.Error()))
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "08P01" { // it takes no search_path
			return text + ". A pooler is in between: connect to the server itself"
		}
		return text + ". Say where the database is with --database, DATABASE_URL, or PGHOST and so on, as for psql"
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return oneLine(err.Error())
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	text := oneLine(pgErr.Message)
	switch pgErr.Code {
	case "42883", "42P01", "3F000", "42704":
		if pgErr.Code == "42704" && !strings.HasPrefix(text, "type ") {
			break
		}
		return a.notThere(ctx, text)
	case "42501":
		return a.notGranted(ctx, text)
	case "55P03":
		return text + ". Another transaction holds the row. `txlimit locks` shows which"
	case "25006", "0A000":
		if pgErr.Code == "0A000" && !strings.Contains(pgErr.Message, "recovery") {
			break
		}
		return text + ". This server is a replica, or the role is read-only: connect to the primary"
	}
	if pgErr.Hint != "" {
		text += ". " + oneLine(pgErr.Hint)
	}
	if pgErr.Code != "22023" {
		text += fmt.Sprintf(" (SQLSTATE %s)", pgErr.Code)
	}
	return text
}

// qualified is what Postgres says is not there: a schema, or what is in one.
var qualified = regexp.MustCompile(`^(?:schema "([^"]+)"|(?:relation|type|function) "?([^".(]+)\.)`)

// notThere explains that a table or a function is not there.
func (a *app) notThere(ctx context.Context, text string) string {
	var there bool
	var role string
	var have []string // the schemas that have limits
	err := a.reading(ctx, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_namespace AS n WHERE n.nspname = $1::text::name), current_user", a.schema).Scan(&there, &role)
		if err != nil {
			return err
		}
		have, err = collect(ctx, tx, pgx.RowTo[string], `
			SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
			 WHERE c.relname = 'limits' AND EXISTS (SELECT FROM pg_proc AS f WHERE f.pronamespace = n.oid AND f.proname = '_consume') ORDER BY 1`)
		return err
	})
	if err != nil {
		return text
	}
	if slices.Contains(have, a.schema) {
		if named := qualified.FindStringSubmatch(text); named != nil && cmp.Or(named[1], named[2]) != a.schema {
			return text + ". The functions name the schema in which they were made: was it renamed? docs/operations.md#rename-or-move-the-schema says what to do"
		}
		return text + a.in(". The schema is older than this program: run `txlimit migrate`")
	}
	what, others := "there is no schema", a.in(" If it is, run `txlimit migrate`")
	if there {
		what = "there are no rate limits in the schema"
	}
	if len(have) > 0 {
		for i := range have {
			have[i] = "--schema " + shellQuote(have[i])
		}
		others = " Other schemas have them: " + strings.Join(have[:min(len(have), 5)], ", ") + ". If one was renamed, do not migrate: docs/operations.md#rename-or-move-the-schema"
	}
	config := a.conn.Config()
	return fmt.Sprintf("%s %s (database %s, on host %s, role %s). Is that the right database?%s",
		what, printable(a.schema), printable(config.Database), printable(config.Host), printable(role), others)
}

// withoutTLS is a message without its lines that the server has no TLS, if others say what failed without it.
func withoutTLS(message string) string {
	lines := strings.Split(message, "\n")
	kept := slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return strings.HasSuffix(line, ": tls error: server refused TLS connection") })
	if len(kept) < 2 { // the first names the user and the database
		kept = lines
	}
	return strings.Join(kept, "\n")
}

// notGranted explains what to grant.
func (a *app) notGranted(ctx context.Context, text string) string {
	var role string
	err := a.reading(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, "SELECT current_user").Scan(&role) })
	switch {
	case err != nil:
		return text
	case a.work == "":
		return text + ". To migrate is for the owner of the schema or, while there is none, for a role with CREATE on the database"
	}
	return text + ". " + a.grant(role, a.work)
}

// grant says how a role gets what its work needs.
func (a *app) grant(role, work string) string {
	return fmt.Sprintf(a.in("Have the owner of the schema run: SELECT ratelimit.grant(%s, '%s')"), literal(role), work)
}

// in is a text, or a format, whose SQL and commands are for the schema.
func (a *app) in(text string) string {
	text, _ = inschema.Text(text, a.schema) // do has checked the name
	if a.schema != inschema.Default {
		text = command.ReplaceAllString(text, "txlimit --schema "+shellQuote(a.schema)+" $1")
	}
	return text
}

var command = regexp.MustCompile(`\btxlimit ([a-z])`)

// noSuchLimit is the error for a name that no limit has.
func noSuchLimit(name string, known []string) error {
	if len(known) == 0 {
		return fmt.Errorf("there is no limit %s: no program has published its limits (ratelimit.Open, `txlimit publish`), and there are no rows of that name", printable(name))
	}
	text := fmt.Sprintf("there is no limit %s.", printable(name))
	if near := nearest(name, known); near != "" {
		text += fmt.Sprintf(" Did you mean %s?", printable(near))
	}
	listed := make([]string, 0, 21)
	for i, k := range known {
		if i == 20 {
			listed = append(listed, fmt.Sprintf("and %d more", len(known)-i))
			break
		}
		listed = append(listed, printable(k))
	}
	return fmt.Errorf("%s There are: %s", text, strings.Join(listed, ", "))
}

// nearest is the known name that is most like a name, or empty if none is much like it.
func nearest(name string, known []string) (best string) {
	most := len([]rune(name))/3 + 1
	for _, k := range known {
		if d := distance(strings.ToLower(name), strings.ToLower(k)); d <= most {
			best, most = k, d-1
		}
	}
	return best
}

// distance is the number of characters to insert, delete or replace that makes b of a (Levenshtein).
func distance(a, b string) int {
	s, t := []rune(a), []rune(b)
	row := make([]int, len(t)+1)
	for j := range row {
		row[j] = j
	}
	for i := range s {
		diagonal := row[0]
		row[0] = i + 1
		for j := range t {
			cost := diagonal
			if s[i] != t[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(t)]
}

// oneLine is a message of several lines on one, without what a terminal does not show.
func oneLine(s string) string {
	return strings.NewReplacer(ratelimit.ErrInvalid.Error()+": ", "", ratelimit.ErrBadRequest.Error()+": ", "").Replace(visible.Line(s))
}

// identifier is a name in SQL, in quotes only where it must be.
func identifier(name string) string {
	for i, r := range name {
		if !(r >= 'a' && r <= 'z' || r == '_' || i > 0 && r >= '0' && r <= '9') {
			if text, escaped := escapes(name); escaped {
				return `U&"` + strings.ReplaceAll(text, `"`, `""`) + `"`
			}
			return pgx.Identifier{name}.Sanitize()
		}
	}
	return name
}

// literal is a string of SQL, on one line: psql obeys a line that begins with a backslash, even one that is pasted.
func literal(s string) string {
	prefix := ""
	if text, escaped := escapes(s); escaped {
		prefix, s = "U&", text
	}
	return prefix + "'" + strings.ReplaceAll(s, "'", "''") + "'"
}

// escapes writes characters that are not shown, ends of lines and backslashes as SQL does after U&.
func escapes(s string) (text string, escaped bool) {
	if !strings.ContainsAny(s, "\n\t\\") && visible.Escape(s) == s {
		return s, false
	}
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\\':
			b.WriteString(`\\`)
		case r == '\n', r == '\t', visible.Escape(string(r)) != string(r):
			fmt.Fprintf(&b, `\+%06x`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String(), true
}

// shellQuote is a word for a shell.
func shellQuote(word string) string {
	if visible.Word(word) {
		return word
	}
	if !utf8.ValidString(word) || strings.ContainsFunc(word, func(r rune) bool { return !strconv.IsPrint(r) }) {
		quoted := strconv.Quote(word)
		return "$'" + strings.ReplaceAll(quoted[1:len(quoted)-1], "'", `\x27`) + "'" // bash and zsh; others see no end of the quotes in it
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
