package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
)

var server *postgres.Server

func TestMain(m *testing.M) {
	os.Exit(postgres.RunTests(m, &server))
}

// changed makes a migrated database, changes it, and returns its URL.
func changed(t *testing.T, changes ...string) string {
	t.Helper()
	url := migrated.NewDatabase(t, server)
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, change := range changes {
		if _, err := db.ExecContext(t.Context(), change); err != nil {
			t.Fatalf("%s: %v", change, err)
		}
	}
	return url
}

// broken changes a function of the engine: it runs a statement first.
func broken(function, statement string) string {
	return fmt.Sprintf(`DO $do$ BEGIN
		EXECUTE regexp_replace(pg_get_functiondef('%s'::regproc), E'\nBEGIN\n', E'\nBEGIN\n%s\n');
	END $do$`, function, strings.ReplaceAll(statement, "'", "''"))
}

// conformance runs the command on a server, and returns its report and its error.
func conformance(t *testing.T, c config) (report, error) {
	t.Helper()
	c.json, c.short = true, true
	if c.timeout == 0 {
		c.timeout = time.Minute
	}
	var out bytes.Buffer
	err := run(t.Context(), c, &out, io.Discard)
	if err != nil && !errors.Is(err, errWrong) {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v in %s", err, &out)
	}
	if (err != nil) != (r.Summary[wrong] > 0) {
		t.Errorf("the command's error is %v, and its summary %s", err, r.summary())
	}
	if r.Leftover != "" {
		t.Errorf("left behind: %s", r.Leftover)
	}
	return r, err
}

// Some cases on a plain server, of which nothing is left behind. make conformance runs all.
func TestAPlainServerConforms(t *testing.T) {
	t.Parallel()
	url := changed(t)
	r, _ := conformance(t, config{url: url, only: "Consume|later uses|one key"})
	for _, c := range r.Cases {
		if c.Verdict != works {
			t.Errorf("%s: %s: %s", c.Name, c.Verdict, c.Condition)
		}
	}
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	for _, table := range []string{"ratelimit.limits", "ratelimit.definitions", "ratelimit.overrides", "ratelimit.usage", "ratelimit.denials", "ratelimit.sweeps", defaultTable} {
		var rows int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&rows); err != nil || rows > 0 {
			t.Errorf("%d rows are left in %s: %v", rows, table, err)
		}
	}
}

// The statements that migrations/citus.sql chooses for row-based sharding, on a plain table: they decide the same. make conformance runs all cases.
func TestTheStatementsForADistributedTableConform(t *testing.T) {
	t.Parallel()
	change, err := os.ReadFile("../testdata/distributed.sql")
	if err != nil {
		t.Fatal(err)
	}
	r, _ := conformance(t, config{url: changed(t, string(change)), only: "Sweep|Several limits: later uses|[Ss]hard|Coalescer"})
	if len(r.Cases) < 5 {
		t.Errorf("%d cases", len(r.Cases))
	}
	for _, c := range r.Cases {
		if c.Verdict != works {
			t.Errorf("%s: %s: %s", c.Name, c.Verdict, c.Condition)
		}
	}
}

// TestAnApplicationsRoleSuffices: a role without any right but an application's. It can make no table for business rows.
func TestAnApplicationsRoleSuffices(t *testing.T) {
	t.Parallel()
	role := "conformance_" + strings.ToLower(rand.Text())
	url := changed(t, "CREATE ROLE "+role,
		"SELECT ratelimit.grant('"+role+"', 'consume'), ratelimit.grant('"+role+"', 'operate')",
		"GRANT DELETE ON ratelimit.overrides TO "+role) // to leave nothing behind; an operator ends overrides, and deletes none
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), url)
		if err == nil {
			_, err = conn.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)
			_ = conn.Close(context.Background())
		}
		if err != nil {
			t.Error(err)
		}
	})
	r, _ := conformance(t, config{url: strings.Replace(url, "?", "?options=-c%20role%3D"+role+"&", 1), only: "Consume: token|together|everything back|Hot$|Overrides|Publish|Usage|Sweep"})
	for _, c := range r.Cases {
		want := works
		if strings.Contains(c.Name, "business row") || strings.Contains(c.Name, "everything back") {
			want = conditional
		}
		if c.Verdict != want || want == conditional && !strings.Contains(c.Condition, "-table") {
			t.Errorf("%s: %s: %s; want %s", c.Name, c.Verdict, c.Condition, want)
		}
	}
	if i := slices.IndexFunc(r.Server, func(f fact) bool { return f.Name == "rights" }); i < 0 || r.Server[i].Value != "no superuser" {
		t.Errorf("the role is not that of an application: %v", r.Server)
	}
}

// TestItSaysWhatIsWrong breaks the engine, and wants the command to notice.
func TestItSaysWhatIsWrong(t *testing.T) {
	const first = "Consume: token bucket"
	several := func(name string) string {
		return broken(name, `IF (SELECT count(DISTINCT k) FROM unnest(keys) AS k) > 1 THEN RAISE feature_not_supported USING MESSAGE = 'many keys'; END IF;`)
	}
	for name, test := range map[string]struct {
		changes []string
		only    string
		verdict verdict
		says    []string
		timeout time.Duration
	}{
		"grants too much": {
			[]string{`CREATE OR REPLACE FUNCTION ratelimit._available(value double precision, ts timestamptz, upto timestamptz,
				rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[] DEFAULT NULL)
				RETURNS double precision LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN capacity`},
			first + "|one key gives|one key keeps|one limit, partly", wrong, []string{"want"}, 0,
		},
		"refills too fast": {
			[]string{broken("ratelimit._consume", "rate := 3 * rate;")},
			"Consume: token bucket|one key keeps", wrong, []string{"want"}, 0,
		},
		"loses a token": {
			[]string{broken("ratelimit._consume", "count := count + 1e-4;")},
			first + "|one key gives", wrong, []string{"want"}, 0,
		},
		"refuses": {
			[]string{broken("ratelimit._consume", "RAISE feature_not_supported USING MESSAGE = 'not here', HINT = 'go there';")},
			first, refused, []string{"0A000", "not here", "go there"}, 0,
		},
		"refuses with a code of the library": {
			[]string{broken("ratelimit._consume", "RAISE SQLSTATE 'RL009' USING MESSAGE = 'not here';")},
			first, refused, []string{"RL009"}, 0,
		},
		"fails unclearly": {
			[]string{broken("ratelimit._consume", "RAISE internal_error USING MESSAGE = 'cache lookup failed';")},
			first, wrong, []string{"XX000", "cache lookup failed"}, 0,
		},
		"hangs": {
			[]string{broken("ratelimit._consume", "PERFORM pg_sleep(3600);")},
			"a denial raised by ratelimit", wrong, []string{"no answer in time"}, time.Second,
		},
		"not in SERIALIZABLE": {
			[]string{broken("ratelimit._consume", `IF current_setting('transaction_isolation') = 'serializable' THEN RAISE feature_not_supported USING MESSAGE = 'level'; END IF;`)},
			first, conditional, []string{"not in SERIALIZABLE", "0A000", "level"}, 0,
		},
		"one key a call": {
			[]string{several("ratelimit._consume_several"), several("ratelimit._apply")},
			"Several limits: later uses", conditional, []string{"only if all requests of a call have the same key", "many keys"}, 0,
		},
		"conflicts with nobody": {
			[]string{"CREATE SEQUENCE attempts", broken("ratelimit._consume", `IF nextval('attempts') % 31 = 0 THEN RAISE serialization_failure; END IF;`)},
			first, conditional, []string{"run again", "40001"}, 0,
		},
		"refuses now and then": {
			[]string{"CREATE SEQUENCE attempts", broken("ratelimit._consume", `IF nextval('attempts') % 50 = 0 THEN RAISE feature_not_supported USING MESSAGE = 'sometimes'; END IF;`)},
			"one key gives", conditional, []string{"worked when made again", "sometimes"}, 0,
		},
		"sweeps what is not idle": {
			[]string{`CREATE OR REPLACE FUNCTION ratelimit._idle(value double precision, ts timestamptz, shards smallint, at timestamptz,
				rate double precision, period interval, capacity double precision, start timestamptz, varies interval)
				RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN true`},
			"Sweep: idle|nothing is idle", wrong, []string{"rows deleted"}, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, _ := conformance(t, config{url: changed(t, test.changes...), only: test.only, timeout: test.timeout})
			if len(r.Cases) == 0 {
				t.Fatalf("no case is called %q", test.only)
			}
			for _, c := range r.Cases {
				if c.Verdict != test.verdict {
					t.Errorf("%s: %s: %s; want %s", c.Name, c.Verdict, c.Condition, test.verdict)
				}
				for _, text := range test.says {
					if !strings.Contains(c.Condition, text) {
						t.Errorf("%s: %q does not say %q", c.Name, c.Condition, text)
					}
				}
			}
		})
	}
}

// TestARefusalThatTakesTokensIsWrong: a clear error is no refusal if something was taken.
func TestARefusalThatTakesTokensIsWrong(t *testing.T) {
	url := changed(t)
	s, err := open(t.Context(), config{url: url, short: true, timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	c := testCase{name: "takes, then refuses", ways: poolWays()[:1], script: func(tr *trial) {
		ann := tr.of(tr.bucket("bucket"), "ann")
		if _, err := tr.limiter.Consume(tr.ctx, tr.db, ann); err != nil { // which the model does not know
			t.Error(err)
		}
		var nothing int
		tr.must("a call", tr.db.QueryRow(tr.ctx, "SELECT 1 FROM pg_sleep(0) WHERE ratelimit._refuse()").Scan(&nothing))
	}}
	if _, err := s.pool.Exec(t.Context(), `CREATE FUNCTION ratelimit._refuse() RETURNS boolean LANGUAGE plpgsql AS
		$$BEGIN RAISE feature_not_supported USING MESSAGE = 'not here'; END$$`); err != nil {
		t.Fatal(err)
	}
	r := s.try(t.Context(), c)
	if r.Verdict != wrong || !strings.Contains(r.Condition, "want a balance of 10") || !strings.Contains(r.Condition, "not here") {
		t.Errorf("%s: %s", r.Verdict, r.Condition)
	}
}

// TestAConditionNamesAChoice: what separates the trials that worked from those that were refused.
func TestAConditionNamesAChoice(t *testing.T) {
	all := everyWay()
	trials := func(keep func(w way) bool) (kept []tried) {
		for _, w := range only(all, keep) {
			kept = append(kept, tried{Way: w.name, way: w})
		}
		return kept
	}
	for want, works := range map[string]func(w way) bool{
		"only outside transactions":                 func(w way) bool { return !w.inTx() },
		"not in SERIALIZABLE":                       func(w way) bool { return w.level != pgx.Serializable },
		"not above READ COMMITTED":                  func(w way) bool { return w.level == "" || w.level == pgx.ReadCommitted },
		"only outside transactions, and only on pg": func(w way) bool { return !w.inTx() && !w.sql },
		"only in sql.DB; sql.Tx serializable":       func(w way) bool { return w.name == "sql.DB" || w.name == "sql.Tx serializable" },
	} {
		if got := separate(trials(works), trials(func(w way) bool { return !works(w) })); !strings.HasPrefix(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// TestTheReportIsComplete: the table for people has every case and every error text.
func TestTheReportIsComplete(t *testing.T) {
	url := changed(t, broken("ratelimit._consume", "RAISE feature_not_supported USING MESSAGE = 'not here | there', DETAIL = '"+strings.Repeat("x", 2*lineRunes)+"';"))
	var out, progress bytes.Buffer
	if err := run(t.Context(), config{url: url, only: "^Consume: token bucket$|^Check$", short: true, timeout: time.Minute}, &out, &progress); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		"- version: PostgreSQL", "- ratelimit.limits is: a plain table", "- migration: 1", "- txlimit: ", `not here \| there`, strings.Repeat("x", 2*lineRunes), "sql.Tx serializable",
		"2 cases: works 0, with a condition 0, refused 2, wrong 0",
	} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("the report lacks %q:\n%s", text, &out)
		}
	}
	if n := len(slices.Collect(strings.Lines(progress.String()))); n != 2 {
		t.Errorf("progress:\n%s", &progress)
	}
}

// TestContentionConforms has the cases in which a write without a lock shows.
func TestContentionConforms(t *testing.T) {
	t.Parallel()
	r, _ := conformance(t, config{url: changed(t), only: "Contention: (first uses of several|calls of every kind)"})
	if len(r.Cases) != 2 {
		t.Errorf("%d cases", len(r.Cases))
	}
	for _, c := range r.Cases {
		if c.Verdict != works {
			t.Errorf("%s: %s: %s", c.Name, c.Verdict, c.Condition)
		}
	}
}

// TestARowThatWasNotInsertedIsNoticed puts back what was wrong on Citus, whose INSERT ... SELECT ... ON CONFLICT DO NOTHING counts rows that
// existed: ratelimit._apply took them for inserted, and so for locked.
func TestARowThatWasNotInsertedIsNoticed(t *testing.T) {
	t.Parallel()
	url := changed(t, `DO $do$
		DECLARE
			body text := pg_get_functiondef('ratelimit._apply'::regproc);
			changed text := regexp_replace(body, '(RETURNING r.shard\s+LOOP\s+m := m \+ 1;\s+END LOOP;)', '\1 m := shards[i];');
		BEGIN
			IF changed = body THEN RAISE 'there is no such loop'; END IF;
			EXECUTE changed;
		END $do$`)
	for _, only := range []string{"Contention: first uses of several", "Contention: calls of every kind"} {
		noticed := false
		for began := time.Now(); !noticed && time.Since(began) < time.Minute; {
			r, _ := conformance(t, config{url: url, only: only})
			if c := r.Cases[0]; c.Verdict == wrong && strings.Contains(c.Condition, "granted") {
				t.Logf("%s: %s", c.Name, c.Condition)
				noticed = true
			}
		}
		if !noticed {
			t.Errorf("%s does not notice it", only)
		}
	}
}

// TestEveryStatementIsListed: the statements that are to be sent in each query mode are all that sqlc has generated.
func TestEveryStatementIsListed(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../internal/dbsqlc/*.sql.go")
	if err != nil || len(files) < 4 {
		t.Fatal(files, err)
	}
	var want []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile("(?m)^const (\\w+) = `-- name: (\\w+) :").FindAllStringSubmatch(string(text), -1) {
			want = append(want, match[2])
		}
	}
	var got []string
	for _, sql := range statements {
		got = append(got, statementName(sql))
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("listed %v, want %v", got, want)
	}
}
