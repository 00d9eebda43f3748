package migrationgen

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

const migrations = "../../migrations"

func TestTheMigrationsAreUpToDate(t *testing.T) {
	if err := Check(migrations); err != nil {
		t.Error(err)
	}
}

// repo is a directory of migrations that a test edits.
type repo struct {
	*testing.T
	fstest.MapFS
}

// newRepo returns the migrations of the repository, with nothing released.
func newRepo(t *testing.T) repo {
	r := repo{t, fstest.MapFS{releasedFile: {}}}
	for _, file := range order {
		text, err := os.ReadFile(filepath.Join(migrations, engineDir, file))
		if err != nil {
			t.Fatal(err)
		}
		r.write(engineDir+"/"+file, string(text))
	}
	r.generate()
	return r
}

func (r repo) write(name, text string) { r.MapFS[name] = &fstest.MapFile{Data: []byte(text)} }

func (r repo) read(name string) string {
	if r.MapFS[name] == nil {
		r.Helper()
		r.Fatalf("there is no %s, but %v", name, slices.Sorted(maps.Keys(r.MapFS)))
	}
	return string(r.MapFS[name].Data)
}

// edit replaces a text that occurs once in a file of the engine.
func (r repo) edit(file, old, with string) {
	r.Helper()
	file = engineDir + "/" + file
	if n := strings.Count(r.read(file), old); n != 1 {
		r.Fatalf("%q is %d times in %s", old, n, file)
	}
	r.write(file, strings.Replace(r.read(file), old, with, 1))
}

func (r repo) generate() {
	r.Helper()
	files, err := Files(r)
	if err != nil {
		r.Fatal(err)
	}
	for name, text := range files {
		if text == "" {
			delete(r.MapFS, name)
		} else {
			r.write(name, text)
		}
	}
}

// wantError generates, and wants an error that contains all these words.
func (r repo) wantError(words ...string) string {
	r.Helper()
	_, err := Files(r)
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			r.Fatalf("%v, want %q", err, w)
		}
	}
	return err.Error()
}

func (r repo) release(name string) {
	r.Helper()
	r.write(releasedFile, string(r.MapFS[releasedFile].Data)+fmt.Sprintf("%x  %s\n", sha256.Sum256([]byte(r.read(name))), name))
}

var beginning = regexp.MustCompile(`(?m)^(CREATE|CREATE OR REPLACE|DROP|COMMENT ON) \w+ ratelimit\.\w+`)

// statements returns the beginnings of a migration's statements, in both directions.
func (r repo) statements(name string) (up, down []string) {
	r.Helper()
	parts := strings.Split(r.read(name), "-- +goose Down\n")
	for i, direction := range []*[]string{&up, &down} {
		_, sql, _ := strings.Cut(strings.Replace(parts[i], onlyUTF8, "", 1), engineBegin)
		sql, _, _ = strings.Cut(sql, engineEnd)
		*direction = append(*direction, beginning.FindAllString(sql, -1)...)
	}
	return up, down
}

func (r repo) want(name string, wantUp, wantDown []string) {
	r.Helper()
	up, down := r.statements(name)
	for _, direction := range []*[]string{&up, &down} { // each has a number of its own
		before := len(*direction)
		*direction = slices.DeleteFunc(*direction, func(begin string) bool { return begin == "CREATE OR REPLACE FUNCTION ratelimit.schema" })
		if len(*direction) != before-1 {
			r.Errorf("%s does not change its number", name)
		}
	}
	if !slices.Equal(up, wantUp) || !slices.Equal(down, wantDown) {
		r.Errorf("%s goes up by\n%q\nand down by\n%q\nwant\n%q\nand\n%q", name, up, down, wantUp, wantDown)
	}
}

const (
	first  = "00001_engine.sql"
	second = "00002_engine.sql"
	third  = "00003_engine.sql"
	body   = "-- Locks nothing. The UPDATE may have waited" // a line of ratelimit._consume
)

func TestBeforeTheFirstReleaseThereIsOneMigration(t *testing.T) {
	r := newRepo(t)
	before := r.read(first)
	up, down := r.statements(first)
	if len(up) < 60 || up[0] != "CREATE TABLE ratelimit.limits" || down[len(down)-1] != "DROP TABLE ratelimit.limits" || strings.Contains(before, "OR REPLACE") {
		t.Errorf("up by %q, down by %q", up, down)
	}
	r.edit("consume.sql", body, "-- "+body)
	r.edit("table.sql", "shard  smallint ", "shard  integer  ")
	r.generate()
	if r.read(first) == before || len(r.MapFS) != len(order)+2 {
		t.Errorf("no change, or another file: %v", slices.Sorted(maps.Keys(r.MapFS)))
	}
}

func TestAReleaseChangesNothing(t *testing.T) {
	r := newRepo(t)
	before := maps.Clone(r.MapFS)
	r.release(first)
	r.generate()
	delete(before, releasedFile)
	delete(r.MapFS, releasedFile)
	if !slices.Equal(slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(r.MapFS))) {
		t.Errorf("%v", slices.Sorted(maps.Keys(r.MapFS)))
	}
}

func TestAfterAReleaseAMigrationHoldsWhatHasChanged(t *testing.T) {
	r := newRepo(t)
	r.release(first)
	released := r.read(first)

	// A body is edited twice before the next release.
	r.edit("consume.sql", body, "-- Once. "+body)
	r.generate()
	r.edit("consume.sql", "-- Once. ", "-- Twice. ")
	r.generate()
	r.want(second, []string{"CREATE OR REPLACE FUNCTION ratelimit._consume"}, []string{"CREATE OR REPLACE FUNCTION ratelimit._consume"})
	if up, down, _ := strings.Cut(r.read(second), "+goose Down"); !strings.Contains(up, "-- Twice. "+body) || !strings.Contains(down, body) || strings.Contains(down, "Twice") {
		t.Errorf("the migration is\n%s", r.read(second))
	}
	if r.read(first) != released {
		t.Error("the released migration has changed")
	}

	// The change is undone: there is nothing to migrate.
	r.edit("consume.sql", "-- Twice. ", "")
	r.generate()
	if r.MapFS[second] != nil {
		t.Errorf("what is not needed is left:\n%s", r.read(second))
	}

	// After the next release, Down restores that release's text.
	r.edit("consume.sql", body, "-- Thrice. "+body)
	r.generate()
	r.release(second)
	r.generate()
	r.edit("consume.sql", "-- Thrice. ", "-- Another time. ")
	r.generate()
	if up, down, _ := strings.Cut(r.read(third), "+goose Down"); !strings.Contains(up, "-- Another time. "+body) || !strings.Contains(down, "-- Thrice. "+body) {
		t.Errorf("the migration is\n%s", r.read(third))
	}
}

func TestACommentOutsideAStatementNeedsNoMigration(t *testing.T) {
	r := newRepo(t)
	r.release(first)
	r.edit("table.sql", "A missing row is a full one.", "A row that is missing is a full one.")
	r.generate()
	if r.MapFS[second] != nil {
		t.Errorf("%s", r.read(second))
	}
}

func TestNewObjectsComeAndGo(t *testing.T) {
	r := newRepo(t)
	r.release(first)
	const two = "CREATE OR REPLACE FUNCTION ratelimit.two(a integer DEFAULT (1), b double precision[], OUT c text)\nLANGUAGE sql RETURN 'x; y';\n" +
		"COMMENT ON FUNCTION ratelimit.two(integer, double precision[]) IS 'both IS this; and that';\n"
	r.write(engineDir+"/reset.sql", r.read(engineDir+"/reset.sql")+"\n"+two)
	r.edit("keys.sql", "The limited keys:", "The keys limited now:") // a comment
	r.generate()
	r.want(second, []string{"CREATE FUNCTION ratelimit.two", "COMMENT ON FUNCTION ratelimit.two", "COMMENT ON FUNCTION ratelimit.keys"},
		[]string{"COMMENT ON FUNCTION ratelimit.keys", "DROP FUNCTION ratelimit.two"})
	if drop := "DROP FUNCTION ratelimit.two(a integer, b double precision[]);"; !strings.Contains(r.read(second), drop) {
		t.Errorf("no %s in\n%s", drop, r.read(second))
	}
	r.release(second)

	// Down restores a removed comment and removes a new one.
	at := strings.Index(r.read(engineDir+"/keys.sql"), "COMMENT ON FUNCTION")
	r.write(engineDir+"/keys.sql", r.read(engineDir + "/keys.sql")[:at])
	r.write(engineDir+"/reset.sql", r.read(engineDir+"/reset.sql")+"COMMENT ON FUNCTION ratelimit._reset(text[], text[]) IS 'new';\n")
	r.generate()
	r.want(third, []string{"COMMENT ON FUNCTION ratelimit._reset", "COMMENT ON FUNCTION ratelimit.keys"},
		[]string{"COMMENT ON FUNCTION ratelimit._reset", "COMMENT ON FUNCTION ratelimit.keys"})
	if n := strings.Count(r.read(third), " IS NULL;"); n != 2 {
		t.Errorf("%d comments go in\n%s", n, r.read(third))
	}
	r.release(third)
	r.generate()
	if r.MapFS["00004_engine.sql"] != nil {
		t.Errorf("it does not know that a comment was removed:\n%s", r.read("00004_engine.sql"))
	}
}

// line is the line that the generator asks for.
func line(message string) string { return message[strings.LastIndex(message, "\n")+1:] + "\n" }

func TestAChangeOfTheTableIsWrittenByHand(t *testing.T) {
	r := newRepo(t)
	r.release(first)
	r.edit("table.sql", "    ts     timestamptz      NOT NULL,\n", "    ts     timestamptz      NOT NULL,\n    more   integer,\n")
	r.edit("consume.sql", body, "-- With more. "+body)
	message := r.wantError("engine/table.sql", "table limits", "migrations/00002_WHAT.sql", "-- engine: table limits ")
	if r.MapFS[second] != nil {
		t.Error("something was written all the same")
	}
	const byHand = "00002_more.sql"
	up := "-- +goose Up\nALTER TABLE ratelimit.limits ADD more integer;\n"
	r.write(byHand, up+line(message))
	r.wantError(byHand, "no Down part")
	r.write(byHand, up+line(message)+"-- +goose Down\nALTER TABLE ratelimit.limits DROP more;\n")
	r.generate()
	r.want(third, []string{"CREATE OR REPLACE FUNCTION ratelimit._consume"}, []string{"CREATE OR REPLACE FUNCTION ratelimit._consume"})
	if r.MapFS[second] != nil {
		t.Error("two migrations have one number")
	}

	// After another change before the release, the migration must be edited.
	r.edit("table.sql", "more   integer,", "more   bigint,")
	message = r.wantError("table limits", "migrations/00003_WHAT.sql")
	r.write(byHand, up+line(message)+"-- +goose Down\nALTER TABLE ratelimit.limits DROP more;\n")
	r.generate()
	r.release(byHand)
	r.release(third)
	r.generate()
	r.edit("table.sql", "more   bigint,", "")
	r.wantError("table limits", "migrations/00004_WHAT.sql")
}

func TestWhatOlderLibrariesCallIsNotTakenAway(t *testing.T) {
	for name, edit := range map[string]func(r repo){
		"a default changes": func(r repo) {
			r.edit("keys.sql", "start timestamptz DEFAULT NULL,\n    zone", "start timestamptz DEFAULT now(),\n    zone")
		},
		"an argument has come": func(r repo) {
			r.edit("keys.sql", "keys text[] DEFAULT NULL,\n    OUT used", "keys text[] DEFAULT NULL, more text DEFAULT '',\n    OUT used")
		},
		"a column has gone": func(r repo) {
			r.edit("keys.sql", "OUT retry_at timestamptz, OUT paused_until timestamptz\n", "OUT retry_at timestamptz\n")
		},
		"an argument changes name": func(r repo) {
			r.edit("keys.sql", "ratelimit.keys(\n    name text, rate double precision DEFAULT", "ratelimit.keys(\n    nom text, rate double precision DEFAULT")
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRepo(t)
			r.release(first)
			edit(r)
			r.wantError("engine/keys.sql", "function keys", "older libraries")
			r.write("00002_no_keys.sql", "-- +goose Up\nDROP FUNCTION ratelimit.keys;\n-- engine: function keys gone\n-- +goose Down\nSELECT 1;\n")
			r.generate()
			if up, _ := r.statements(third); !slices.Contains(up, "CREATE FUNCTION ratelimit.keys") || !strings.Contains(r.read(third), "added CONSTANT text[] := '{keys}'") {
				t.Error("the function is not made anew, with its grants")
			}
		})
	}
	r := newRepo(t)
	r.release(first)
	private, _, _ := strings.Cut(r.read(engineDir+"/keys.sql"), "CREATE OR REPLACE FUNCTION ratelimit.keys(")
	r.write(engineDir+"/keys.sql", private)
	message := r.wantError("function keys", "older libraries", "-- engine: function keys gone")
	r.write("00002_no_keys.sql", "-- +goose Up\nDROP FUNCTION ratelimit.keys;\n"+line(message)+"-- +goose Down\nSELECT 1;\n")
	r.generate()
	if up, _ := r.statements(first); !slices.Contains(up, "CREATE FUNCTION ratelimit.keys") {
		t.Error("the released migration has changed")
	}
	r.want(third, nil, nil) // nor the comment on the function that was dropped
}

func TestWhatIsReleasedIsNotRewritten(t *testing.T) {
	r := newRepo(t)
	r.release(first)
	r.write(first, r.read(first)+"\n")
	r.wantError(first, "has changed since it was released")
	delete(r.MapFS, first)
	r.wantError(first, "is not there")
	r.write(releasedFile, "abc "+first+"\n")
	r.wantError(releasedFile, "is not a line of sha256sum")
	delete(r.MapFS, releasedFile)
	r.wantError(releasedFile)
}

func TestNumbersHaveNoGaps(t *testing.T) {
	r := newRepo(t)
	r.write("00003_by_hand.sql", "-- +goose Up\nSELECT 1;\n-- +goose Down\nSELECT 1;\n")
	r.wantError("00003_by_hand.sql", "number is 00001")
}

func TestTheSourceIsRefusedWhereItIsNotUnderstood(t *testing.T) {
	for name, c := range map[string]struct {
		file, sql, want string
	}{
		"an unknown statement":       {"reset.sql", "INSERT INTO x VALUES (1);", "knows no such statement: INSERT INTO x"},
		"no schema":                  {"reset.sql", "CREATE VIEW v AS SELECT 1;", "knows no such statement: CREATE VIEW v"},
		"no end":                     {"reset.sql", "CREATE VIEW ratelimit.v AS SELECT 1", "has no end"},
		"no end of a quotation":      {"reset.sql", "CREATE FUNCTION ratelimit.f() AS $x$; ;", "$x$ has no end"},
		"a comment on nothing":       {"reset.sql", "-- The end.\n", "after the last statement there is a comment"},
		"the same twice":             {"reset.sql", "CREATE TABLE ratelimit.limits ();", "table limits is in engine/table.sql, too"},
		"an overloaded function":     {"reset.sql", "CREATE FUNCTION ratelimit.keys() RETURNS void AS '';", "function keys is in engine/"},
		"a file that has no place":   {"other.sql", "", "engine/other.sql is not in the order of the files"},
		"what a migration begins by": {"reset.sql", "COMMENT ON TABLE ratelimit.x IS $x$\n-- +goose StatementEnd\n$x$;", "knows no such statement: COMMENT ON"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRepo(t)
			file := engineDir + "/" + c.file
			text := ""
			if r.MapFS[file] != nil {
				text = r.read(file)
			}
			r.write(file, text+"\n"+c.sql)
			r.wantError(c.want)
		})
	}
	r := newRepo(t)
	delete(r.MapFS, engineDir+"/reset.sql")
	r.wantError("engine/reset.sql")
}

func TestSplit(t *testing.T) {
	const sql = `-- a; b
CREATE VIEW ratelimit.v AS SELECT ';' AS "a;b", 'it''s;' /* ; * ; */; -- c
-- d
CREATE OR REPLACE FUNCTION ratelimit.f() RETURNS text LANGUAGE sql AS $x$ SELECT ';' $y$ ; $x$;`
	statements, err := split(sql)
	if err != nil || len(statements) != 2 {
		t.Fatalf("%v, %v", statements, err)
	}
	for i, want := range []struct{ lead, key, end string }{
		{"\n-- a; b\n", "view v", "/* ; * ; */;"},
		{"\n -- c\n-- d\n", "function f", "$y$ ; $x$;"},
	} {
		if s := statements[i]; s.lead != want.lead || s.key() != want.key || !strings.HasSuffix(s.text, want.end) {
			t.Errorf("statement %d: %q, %q, %q", i, s.lead, s.key(), s.text)
		}
	}
}

func TestWriteAndCheck(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(migrations)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, releasedFile), nil, 0o600); err != nil { // as before a release
		t.Fatal(err)
	}
	if err := Check(dir); err != nil {
		t.Fatal(err)
	}
	h, err := readHistory(os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	stray := fmt.Sprintf("%05d_stray.sql", h.next+7) // as a merge may leave it
	if err := os.WriteFile(filepath.Join(dir, stray), []byte(generatedBy), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, first), []byte(generatedBy), 0o600); err != nil {
		t.Fatal(err)
	}
	err = Check(dir)
	if err == nil || !strings.Contains(err.Error(), first) || !strings.Contains(err.Error(), stray) {
		t.Fatalf("%v", err)
	}
	if err := Write(dir); err != nil {
		t.Fatal(err)
	}
	if err := Check(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, stray)); !os.IsNotExist(err) {
		t.Errorf("it still exists: %v", err)
	}
}
