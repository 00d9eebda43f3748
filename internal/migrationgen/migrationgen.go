// Package migrationgen generates the migrations of package migrations from the engine, whose current source is engine/*.sql.
//
// All files that it reads and writes are in the directory of package migrations:
//
//   - engine/*.sql is the source: the statements that make the engine. The variable order has the order of the files.
//   - released.sha256 lists the released migrations. They never change again.
//   - NNNNN_engine.sql is generated and follows the last released migration. It has all changes since, in both directions.
//
// It generates no change of a table, of a type or of a function's arguments, since such a change may touch rows or break older
// libraries. In that case it fails, and the error says what a person has to write.
package migrationgen

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// order is the order of the engine's files. Each statement comes after the statements that it needs.
var order = []string{
	"table.sql", "available.sql", "distributed.sql", "decisions.sql", "consume.sql", "consume_sharded.sql", "consume_several.sql", "apply.sql", "refund.sql", "lock.sql", "move.sql",
	"consume_keys.sql", "each.sql", "wire.sql", "reset.sql", "coalesce.sql", "raise.sql", "turns.sql",
	"parts.sql", "calendar.sql", "validate.sql", "grid.sql", "balance.sql", "definitions.sql", "overrides.sql", "ratelimit.sql", "holds.sql", "holds_by_hand.sql", "pause.sql", "keys.sql", "sweep.sql",
	"usage.sql", "guard.sql", "grants.sql", "version.sql",
}

// The names in a directory of migrations.
const (
	engineDir    = "engine"
	releasedFile = "released.sha256"
	generatedBy  = "-- Code generated from engine/*.sql by `make generate`; DO NOT EDIT.\n"
)

// Files returns the files to generate in a directory of migrations, by name. An empty text means that the file has to be removed.
func Files(dir fs.FS) (map[string]string, error) {
	engine, err := readEngine(dir)
	if err != nil {
		return nil, err
	}
	h, err := readHistory(dir)
	if err != nil {
		return nil, err
	}
	// The number changes with every migration, and only then.
	source := engine
	engine = numbered(source, h.next-1)
	up, down, added, err := h.changes(engine)
	if err == nil && up != "" {
		engine = numbered(source, h.next)
		up, down, added, err = h.changes(engine)
	}
	if err != nil {
		return nil, err
	}
	files := map[string]string{}
	for _, name := range h.generated {
		files[name] = ""
	}
	if up != "" {
		up = engineBegin + strings.TrimLeft(up, "\n") + engineEnd
		relations := madeRelation.FindAllStringSubmatch(up, -1)
		if h.next == 1 {
			relations = append(relations, []string{"", "goose_version"}) // which goose has made before
			up = onlyUTF8 + up
		}
		files[fmt.Sprintf("%05d_engine.sql", h.next)] = generatedBy + "\n-- +goose Up\n" + up + granted(added, relations) + "\n-- +goose Down\n" + engineBegin + down + engineEnd
	}
	return files, nil
}

// numbered puts the version and the list of functions into the engine.
func numbered(engine []statement, version int) []statement {
	var functions []string
	for _, s := range engine {
		if s.kind == "FUNCTION" && s.comments == "" {
			functions = append(functions, s.name)
		}
	}
	slices.Sort(functions)
	fill := strings.NewReplacer(versionMark, fmt.Sprint(version), functionsMark, strings.Join(functions, ","))
	engine = slices.Clone(engine)
	for i := range engine {
		engine[i].text = fill.Replace(engine[i].text)
	}
	return engine
}

// The marks that numbered replaces.
const (
	versionMark   = "/* TEMPLATE: version */"
	functionsMark = "/* TEMPLATE: functions */"
)

// engineBegin and engineEnd are around the statements of the engine in a migration. Goose sends them together.
const (
	engineBegin = "-- +goose StatementBegin\n"
	engineEnd   = "-- +goose StatementEnd\n"
)

// onlyUTF8 refuses a database of another encoding. There, a program whose texts are UTF-8 and one whose texts are not write different bytes
// for one key, and so have a limit each. The driver does not convert: it leaves the client's encoding as the database has it.
const onlyUTF8 = `-- +goose StatementBegin
DO $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE feature_not_supported USING MESSAGE = pg_catalog.format('txlimit needs a database with the encoding UTF8, and this one has %s', current_setting('server_encoding')),
            HINT = 'CREATE DATABASE ... ENCODING ''UTF8'' TEMPLATE template0, and move the data there.';
    END IF;
END
$$;
-- +goose StatementEnd
`

var madeRelation = regexp.MustCompile(`CREATE (?:TABLE|VIEW) (?:IF NOT EXISTS )?ratelimit\.(\w+)`)

// granted takes all functions from PUBLIC, those of a migration and its tables also from whom default privileges gave them, and gives them to the roles that may use the
// ones beside them. Otherwise a function that was replaced, and calls a new one, would fail until somebody grants that. Functions with the rights of
// their owner are for those who may restore.
func granted(functions []string, relations [][]string) string {
	if len(functions) == 0 {
		return ""
	}
	var tables []string
	for _, relation := range relations {
		tables = append(tables, relation[1])
	}
	return `
-- +goose StatementBegin
DO $$
DECLARE
    added CONSTANT text[] := '{` + strings.Join(functions, ",") + `}';
    said  text;
BEGIN
    FOR said IN
        SELECT pg_catalog.format('REVOKE EXECUTE ON FUNCTION %s FROM %s', p.oid::pg_catalog.regprocedure, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::pg_catalog.regrole::text END)
          FROM pg_catalog.pg_proc AS p CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) AS a
         WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_catalog.pg_class AS c WHERE c.oid = 'ratelimit.limits'::pg_catalog.regclass)
           AND (a.grantee = 0 OR p.proname::text = ANY (added) AND a.grantee <> p.proowner)
    LOOP
        EXECUTE said;
    END LOOP;
    FOR said IN
        SELECT pg_catalog.format('REVOKE ALL ON TABLE %s FROM %s', c.oid::pg_catalog.regclass, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::pg_catalog.regrole::text END)
          FROM pg_catalog.pg_class AS c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) AS a
         WHERE c.relnamespace = (SELECT l.relnamespace FROM pg_catalog.pg_class AS l WHERE l.oid = 'ratelimit.limits'::pg_catalog.regclass)
           AND c.relname::text = ANY ('{` + strings.Join(tables, ",") + `}') AND a.grantee <> c.relowner
    LOOP
        EXECUTE said;
    END LOOP;
    FOR said IN
        SELECT pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %s', p.oid::pg_catalog.regprocedure, a.grantee::pg_catalog.regrole)
          FROM pg_catalog.pg_proc AS p
          JOIN pg_catalog.pg_proc AS beside ON beside.oid = CASE WHEN p.prosecdef THEN 'ratelimit.restore(text, text, text, text, boolean, boolean)' ELSE 'ratelimit.schema()' END::pg_catalog.regprocedure
          CROSS JOIN LATERAL pg_catalog.aclexplode(beside.proacl) AS a
         WHERE p.pronamespace = beside.pronamespace AND p.proname::text = ANY (added) AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE said;
    END LOOP;
END
$$;
-- +goose StatementEnd
`
}

// inPLpgSQL is how the body of a function in PL/pgSQL begins. There, a name that is a variable and a column is the variable.
var inPLpgSQL = regexp.MustCompile(`(?s)^CREATE OR REPLACE FUNCTION [^$]*\nLANGUAGE plpgsql[^$]*\nAS \$body\$\n`)

// readEngine reads the statements of the engine.
func readEngine(dir fs.FS) (engine []statement, err error) {
	names, err := fs.Glob(dir, engineDir+"/*.sql")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if !slices.Contains(order, path.Base(name)) {
			return nil, fmt.Errorf("%s is not in the order of the files, which is a list in package migrationgen", name)
		}
	}
	seen := map[string]string{}
	for _, file := range order {
		file = engineDir + "/" + file
		text, err := fs.ReadFile(dir, file)
		if err != nil {
			return nil, err
		}
		statements, err := split(string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, s := range statements {
			s.file, s.text = file, inPLpgSQL.ReplaceAllString(s.text, "${0}#variable_conflict use_variable\n")
			if seen[s.key()] != "" {
				return nil, fmt.Errorf("%s: %s is in %s, too", file, s.key(), seen[s.key()])
			}
			seen[s.key()] = file
			engine = append(engine, s)
		}
	}
	engine[0].lead = strings.TrimLeft(engine[0].lead, "\n")
	return engine, nil
}

// history is the result of all migrations before the generated one.
type history struct {
	next      int                  // the number of the migration to generate
	generated []string             // the generated files that are not released
	made      map[string]statement // by key: the statements that the released migrations have run
	byHand    map[string]string    // by key: the mark of the statement that a later migration by hand leads to; or gone
}

// byHandLine is a line in a migration that was written by hand. "-- engine: table limits 0123456789abcdef" says that the migration
// leads to the statement in engine/ with this mark; "-- engine: function f gone" says that it drops the function.
var byHandLine = regexp.MustCompile(`(?m)^-- engine: (.+) ([0-9a-f]{16}|gone)$`)

const gone = "gone"

func readHistory(dir fs.FS) (*history, error) {
	released, err := readReleased(dir)
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(dir, "0*.sql") // sorted
	if err != nil {
		return nil, err
	}
	h := &history{next: 1, made: map[string]statement{}, byHand: map[string]string{}}
	for _, name := range names {
		text, err := fs.ReadFile(dir, name)
		if err != nil {
			return nil, err
		}
		sum, isReleased := released[name]
		delete(released, name)
		if isReleased && sum != fmt.Sprintf("%x", sha256.Sum256(text)) {
			return nil, fmt.Errorf("%s has changed since it was released (see %s)", name, releasedFile)
		}
		isGenerated := strings.HasPrefix(string(text), generatedBy)
		if isGenerated && !isReleased {
			h.generated = append(h.generated, name)
			continue
		}
		if !strings.HasPrefix(name, fmt.Sprintf("%05d_", h.next)) {
			return nil, fmt.Errorf("%s: the next migration's number is %05d", name, h.next)
		}
		h.next++
		if isGenerated {
			err = h.replay(string(text))
		} else {
			err = h.replayByHand(string(text))
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	for name := range released {
		return nil, fmt.Errorf("%s is released (see %s), but is not there", name, releasedFile)
	}
	return h, nil
}

// readReleased reads the list of released migrations, in the format of sha256sum.
func readReleased(dir fs.FS) (sums map[string]string, err error) {
	text, err := fs.ReadFile(dir, releasedFile)
	if err != nil {
		return nil, err
	}
	sums = map[string]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		sum, name, found := strings.Cut(line, "  ")
		if !found {
			return nil, fmt.Errorf("%s: %q is not a line of sha256sum", releasedFile, line)
		}
		sums[name] = sum
	}
	return sums, nil
}

// replay notes the statements of a generated migration.
func (h *history) replay(text string) error {
	text = strings.TrimPrefix(text[strings.Index(text, engineBegin)+1:], onlyUTF8[1:])
	_, up, _ := strings.Cut(text, engineBegin[1:])
	up, _, found := strings.Cut(up, engineEnd)
	if !found {
		return fmt.Errorf("there is no SQL between %q and %q", engineBegin, engineEnd)
	}
	statements, err := split(up)
	if err != nil {
		return err
	}
	for _, s := range statements {
		delete(h.byHand, s.key())
		if s.isUncomment() {
			delete(h.made, s.key())
		} else {
			h.made[s.key()] = s
		}
	}
	return nil
}

func (h *history) replayByHand(text string) error {
	for _, line := range byHandLine.FindAllStringSubmatch(text, -1) {
		key, mark := line[1], line[2]
		h.byHand[key] = mark
		delete(h.made, key)
		if mark == gone {
			delete(h.made, commentOn+key)
		}
	}
	if !strings.Contains(text, "-- +goose Down") {
		return fmt.Errorf("it has no Down part")
	}
	return nil
}

// changes returns the SQL that leads from the released state to the engine, and back, and the functions that are new.
func (h *history) changes(engine []statement) (up, down string, functions []string, err error) {
	left := maps.Clone(h.made)
	created := map[string]bool{} // the new objects
	for _, s := range engine {
		old, wasMade := h.made[s.key()]
		delete(left, s.key())
		mark, wasByHand := h.byHand[s.key()]
		wasByHand = wasByHand && mark != gone
		switch {
		case !wasMade && !wasByHand && s.comments == "":
			created[s.object()] = true
			if s.kind == "FUNCTION" {
				functions = append(functions, s.name)
			}
			up += s.lead + s.created()
			down = s.dropped() + down
		case !wasMade && !wasByHand:
			up += s.lead + s.text + "\n"
			if !created[s.object()] { // otherwise it goes with the object
				down = s.uncomment() + down
			}
		case wasByHand && mark == s.mark() || wasMade && old.text == s.text:
			// It has not changed.
		case wasMade && old.replaceableBy(s):
			up += s.lead + s.text + "\n"
			down = old.text + "\n" + down
		default:
			return "", "", nil, h.byHandError(s.file+": "+s.key()+" differs from the released statement. The change may touch rows or break older libraries, so no migration can be generated",
				"-- engine: "+s.key()+" "+s.mark())
		}
	}
	for _, key := range slices.Sorted(maps.Keys(left)) {
		old := left[key]
		if old.comments == "" {
			return "", "", nil, h.byHandError(key+" was released and is no longer in the engine. But older libraries may call it, so no migration can be generated",
				"-- engine: "+key+" "+gone)
		}
		up += "\n" + old.uncomment()
		down += "\n" + old.text + "\n"
	}
	return up, down, functions, nil
}

func (h *history) byHandError(what, line string) error {
	return fmt.Errorf("%s.\nWrite migrations/%05d_WHAT.sql by hand, in both directions. It must have this line, which says where it leads:\n%s", what, h.next, line)
}
