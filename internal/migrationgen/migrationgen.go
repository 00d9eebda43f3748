// Package migrationgen makes the migrations of package migrations from the engine, which is in engine/*.sql as it is now.
//
// What it reads and writes is all in the directory of package migrations:
//
//   - engine/*.sql is the source: the statements that make the engine, in the order of the list below.
//   - schema.sql is generated: the whole engine.
//   - released.sha256 lists the migrations that are in a release. They never change again.
//   - NNNNN_engine.sql, after the last of those, is generated: what has changed since, in both directions.
//
// It cannot generate a change of a table, of a type or of a function's arguments: that may change rows, or what older libraries call.
// Then it fails, and says what a person has to write.
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

// order is the order of the files of the engine: each statement comes after those that it needs.
var order = []string{
	"table.sql", "available.sql", "decisions.sql", "consume.sql", "consume_sharded.sql", "consume_several.sql", "apply.sql", "refund.sql", "reset.sql",
	"consume_keys.sql", "coalesce.sql", "raise.sql", "turns.sql",
	"validate.sql", "grid.sql", "balance.sql", "ratelimit.sql", "keys.sql", "sweep.sql",
}

// Names in a directory of migrations.
const (
	engineDir    = "engine"
	schemaFile   = "schema.sql"
	releasedFile = "released.sha256"
	generatedBy  = "-- Code generated from engine/*.sql by `make generate`; DO NOT EDIT.\n"
)

// Files returns, by name, what is to be generated in a directory of migrations, as the rest of it is; "" is a file that has to go.
func Files(dir fs.FS) (map[string]string, error) {
	engine, err := readEngine(dir)
	if err != nil {
		return nil, err
	}
	h, err := readHistory(dir)
	if err != nil {
		return nil, err
	}
	up, down, err := h.changes(engine)
	if err != nil {
		return nil, err
	}
	files := map[string]string{}
	for _, name := range h.generated {
		files[name] = ""
	}
	if up != "" {
		files[fmt.Sprintf("%05d_engine.sql", h.next)] = generatedBy + "\n-- +goose Up\n-- +goose StatementBegin\n" + inSchema(up) +
			"-- +goose StatementEnd\n\n-- +goose Down\n-- +goose StatementBegin\n" + inSchema(down) + "-- +goose StatementEnd\n"
	}
	var all strings.Builder
	for _, s := range engine {
		all.WriteString(s.lead + s.created())
	}
	files[schemaFile] = generatedBy + "--\n-- For psql and other tools: psql -1 -v ON_ERROR_STOP=1 -f schema.sql\n\n" + inSchema(all.String())
	return files, nil
}

// inSchema is a statement that runs sql with the schema put in: that which is the first of the search_path then. So the bodies of the
// functions name it, and work whatever the search_path of their callers.
func inSchema(sql string) string {
	return "DO $migration$\nBEGIN\nEXECUTE pg_catalog.replace(" + sqlBegin + strings.TrimRight(sql, "\n") + sqlEnd +
		", '" + schemaMark + "', pg_catalog.format('%I.', current_schema));\nEND\n$migration$;\n"
}

// What inSchema puts around the SQL, and schemaMark for.
const (
	sqlBegin   = "$engine$\n"
	sqlEnd     = "\n$engine$"
	schemaMark = "/* TEMPLATE: schema */"
)

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
			s.file = file
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

// history is what the migrations before the one to be generated have made.
type history struct {
	next      int                  // the number of the one to be generated
	generated []string             // the files that were generated and not released
	made      map[string]statement // by key, as the released migrations have made it
	byHand    map[string]string    // by key, the mark of what a migration written by hand has made of it since; or gone
}

// In a migration written by hand, a line "-- engine: table rate_limits 0123456789abcdef" says that it leads to the statement in engine/
// that has this mark, and "-- engine: function f gone" that it drops the function.
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
		return nil, fmt.Errorf("%s is released (see %s), and is not there", name, releasedFile)
	}
	return h, nil
}

// readReleased reads the list of the released migrations, which is in the format of sha256sum.
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

// replay notes down what a generated migration has made.
func (h *history) replay(text string) error {
	_, up, _ := strings.Cut(text, sqlBegin)
	up, _, found := strings.Cut(up, sqlEnd)
	if !found {
		return fmt.Errorf("there is no SQL between %q and %q", sqlBegin, sqlEnd)
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

// changes is the SQL that leads from what was made before to the engine, and back.
func (h *history) changes(engine []statement) (up, down string, err error) {
	left := maps.Clone(h.made)
	created := map[string]bool{} // the objects that are new
	for _, s := range engine {
		old, wasMade := h.made[s.key()]
		delete(left, s.key())
		mark, wasByHand := h.byHand[s.key()]
		wasByHand = wasByHand && mark != gone
		switch {
		case !wasMade && !wasByHand && s.comments == "":
			created[s.object()] = true
			up += s.lead + s.created()
			down = s.dropped() + down
		case !wasMade && !wasByHand:
			up += s.lead + s.text + "\n"
			if !created[s.object()] { // or else it goes with the object
				down = s.uncomment() + down
			}
		case wasByHand && mark == s.mark() || wasMade && old.text == s.text:
			// It is as it was.
		case wasMade && old.replaceableBy(s):
			up += s.lead + s.text + "\n"
			down = old.text + "\n" + down
		default:
			return "", "", h.byHandError(s.file+": "+s.key()+" differs from what was released, which may change rows, or what older libraries call: no migration can be generated",
				"-- engine: "+s.key()+" "+s.mark())
		}
	}
	for _, key := range slices.Sorted(maps.Keys(left)) {
		old := left[key]
		if old.comments == "" {
			return "", "", h.byHandError(key+" was released, and older libraries may call it, but the engine has it no more: no migration can be generated",
				"-- engine: "+key+" "+gone)
		}
		up += "\n" + old.uncomment()
		down += "\n" + old.text + "\n"
	}
	return up, down, nil
}

func (h *history) byHandError(what, line string) error {
	return fmt.Errorf("%s.\nWrite one, migrations/%05d_WHAT.sql, in both directions, with this line in it, which says where it leads:\n%s", what, h.next, line)
}
