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

	"github.com/txlimit/txlimit/internal/pin"
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
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "08P01" && a.schema != "" {
			return text + ". A pooler is in between: connect to the server itself, or give the role the search_path and leave out --schema"
		}
		return text + ". Say where the database is with --database, DATABASE_URL, or PGHOST and so on, as for psql"
	}
	if several, ok := errors.AsType[*pin.SeveralError](err); ok {
		return fmt.Sprintf("several schemas of the search_path have rate limits: pass --schema with the application's (%s). Nothing was run of any. "+
			"If one is not yours, somebody else may create objects in it: see docs/security.md#search_path", options(several.Schemas))
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return oneLine(err.Error())
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	text := oneLine(pgErr.Message)
	switch pgErr.Code {
	case "42883", "42P01", "3F000":
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

// place is a schema that has the limits.
type place struct {
	Name  string
	Usage bool // the role may use it
}

// other names the schemas to choose instead, five at most.
func other(places []place) string {
	if len(places) == 0 {
		return ""
	}
	names := make([]string, len(places))
	for i, p := range places {
		names[i] = p.Name
	}
	return ". Other schemas have it: " + options(names)
}

// options are the flags that choose the first five schemas.
func options(schemas []string) string {
	var flags []string
	for _, name := range schemas[:min(len(schemas), 5)] {
		flags = append(flags, "--schema "+shellQuote(name))
	}
	return strings.Join(flags, ", ")
}

// qualified is what Postgres says is not there: a schema, or what is in one.
var qualified = regexp.MustCompile(`^(?:schema "([^"]+)"|(?:relation|type|function) "?([^".( ]+)\.)`)

// notThere explains that a table or a function is not there.
func (a *app) notThere(ctx context.Context, text string) string {
	var here bool
	var path, role string
	err := a.conn.QueryRow(ctx, "SELECT pg_catalog.to_regclass('ratelimit.limits') IS NOT NULL, pg_catalog.array_to_string(pg_catalog.current_schemas(false), ', '), current_user").Scan(&here, &path, &role)
	if err != nil {
		return text
	}
	if here {
		if named := qualified.FindStringSubmatch(text); named != nil && !slices.Contains(strings.Split(path, ", "), cmp.Or(named[1], named[2])) {
			return text + ". The functions name the schema in which they were made: was it renamed? docs/operations.md#rename-or-move-the-schema says what to do"
		}
		return text + ". The schema is older than this program: run `txlimit migrate`"
	}
	var places []place
	err = a.reading(ctx, func(tx pgx.Tx) (err error) {
		places, err = collect(ctx, tx, pgx.RowToStructByPos[place], `
			SELECT n.nspname, has_schema_privilege(n.oid, 'USAGE') FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
			 WHERE c.relname = 'limits' AND c.relkind = 'r' AND has_schema_privilege(n.oid, 'USAGE') IS NOT NULL ORDER BY 1`) // NULL: it was dropped meanwhile
		return err
	})
	if err != nil {
		return text
	}
	wanted := cmp.Or(a.schema, path)
	for _, p := range places {
		if !p.Usage && (a.schema == "" && !slices.ContainsFunc(places, func(p place) bool { return p.Usage }) || p.Name == a.schema) {
			return fmt.Sprintf("the role %s may not use the schema %s, which has the limits: GRANT USAGE ON SCHEMA %s TO %s",
				printable(role), printable(p.Name), identifier(p.Name), identifier(role))
		}
	}
	if wanted == "" {
		return "no schema of the role's search_path exists: pass --schema" + other(places)
	}
	config := a.conn.Config()
	return fmt.Sprintf("there is no table ratelimit.limits in %s (database %s on %s, role %s). Is that the right database? If it is, run `txlimit migrate`%s",
		printable(wanted), printable(config.Database), printable(config.Host), printable(role), other(places))
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

// asOwner has a function run with the rights of its owner, for this role, as docs/overrides.md does: so that nobody need be granted to change
// the rows of the history.
const asOwner = `
	SELECT format('REVOKE EXECUTE ON FUNCTION %1$s FROM PUBLIC; GRANT EXECUTE ON FUNCTION %1$s TO %2$I; ALTER FUNCTION %1$s SECURITY DEFINER SET search_path = pg_catalog, pg_temp',
	       f.oid::regprocedure, current_user)
	  FROM pg_class AS c JOIN pg_proc AS f ON f.pronamespace = c.relnamespace
	 WHERE c.oid = to_regclass('ratelimit.limits') AND f.proname = $1::name AND NOT (f.prosecdef AND has_function_privilege(f.oid, 'EXECUTE'))`

// notGranted explains which privileges are missing.
func (a *app) notGranted(ctx context.Context, text string) string {
	var missing []string
	for _, need := range a.needs {
		privilege, relation, _ := strings.Cut(need, " ")
		var grant *string
		err := a.reading(ctx, func(tx pgx.Tx) error {
			if privilege == "EXECUTE" {
				return tx.QueryRow(ctx, asOwner, relation).Scan(&grant)
			}
			return tx.QueryRow(ctx, `
				SELECT format('GRANT %s ON %s TO %I', $1::text, c.oid::regclass, current_user)
				  FROM pg_class AS c WHERE c.oid = to_regclass($2::text) AND NOT CASE WHEN $1::text = 'DELETE' THEN has_table_privilege(c.oid, 'DELETE') ELSE has_any_column_privilege(c.oid, $1::text) END`, privilege, relation).Scan(&grant)
		})
		if err == nil && grant != nil {
			missing = append(missing, *grant)
		}
	}
	if len(missing) == 0 {
		return text + ". See docs/security.md for what to grant"
	}
	slices.Sort(missing)
	return fmt.Sprintf("%s. Have the owner of the tables run: %s", text, strings.Join(slices.Compact(missing), "; "))
}

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
	return strings.ReplaceAll(visible.Line(s), ratelimit.ErrInvalid.Error()+": ", "")
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
