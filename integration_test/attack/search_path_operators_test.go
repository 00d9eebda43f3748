package attack_test

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// everyFunctionSQL adds to a schema functions with the names of all of the limiter's, and of those of Postgres that take texts, for arguments
// that are all texts, and others for varchar: parameters without a type are taken as such before anything else (CVE-2018-1058).
const everyFunctionSQL = `
DO $$
DECLARE
    f record;
    t text;
BEGIN
    FOR f IN
        SELECT DISTINCT p.proname, n, p.proargnames[1:n] AS names
          FROM pg_proc AS p, generate_series(p.pronargs::int - p.pronargdefaults, p.pronargs::int) AS n
         WHERE p.pronamespace = 'ratelimit'::regnamespace AND p.prokind = 'f' AND n > 0
        UNION
        SELECT DISTINCT p.proname, p.pronargs::int, NULL::text[] FROM pg_proc AS p
         WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.pronargs BETWEEN 1 AND 3 AND 'text'::regtype = ANY (p.proargtypes)
           AND p.proname ~ '^[a-z_]+$'
    LOOP
        FOREACH t IN ARRAY '{text,varchar}'::text[] LOOP
            BEGIN
                EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS text LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); END''', f.proname,
                    (SELECT string_agg(coalesce(quote_ident(f.names[i]), '') || ' ' || t, ', ') FROM generate_series(1, f.n) AS i));
            EXCEPTION WHEN duplicate_function THEN
                NULL;
            END;
        END LOOP;
    END LOOP;
END $$;
`

// The page and the tool run their statements as an operator, who may do more than an application: none of them may be taken over from
// another schema of the path, in front of the limiter's or behind.
func TestAHostileSearchPathOfPageAndTool(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.NeedsSession(t, "since it sets the search_path of connections")
	admin := harness.NewPool(t, 2)
	harness.Publish(t, admin, `[{"name": "signUps", "kind": "token bucket", "rate": 10, "period": "1000 hours"}, {"name": "window", "kind": "fixed window", "rate": 10, "period": "1000 hours"},
		{"name": "month", "kind": "calendar window", "rate": 10, "period": "1 month"}, {"name": "own", "kind": "token bucket", "rate": 10, "period": "1000 hours", "varies": "2000 hours"}, {"name": "seats", "kind": "slots", "capacity": 1000}]`)
	for _, name := range []string{"signUps", "window", "month"} {
		harness.MustExec(t, admin, "SELECT ratelimit.consume('"+name+"', 'acme', count => 10)")
		harness.RecordUsage(t, admin, name, 3, 4, "acme", "initech")
	}
	harness.MustExec(t, admin, "SELECT ratelimit.consume('unpublished', 'acme', rate => 10, period => '1000 hours')")
	harness.MustExec(t, admin, "SELECT ratelimit.consume('own', 'acme', rate => 10, period => '1000 hours')")
	for i := range 20 { // ended below
		harness.MustExec(t, admin, fmt.Sprintf("SELECT ratelimit.hold('seats', 'acme', 'job-%d', ttl => '1 day')", i))
	}
	harness.MustExec(t, admin, lookalikeSQL+everyFunctionSQL+operatorsSQL+functionsSQL)
	harness.MustExec(t, admin, "CREATE TABLE evil.goose_version (id integer, version_id bigint, is_applied boolean, tstamp timestamp)")

	tool := filepath.Join(t.TempDir(), "txlimit")
	if out, err := exec.Command("go", "build", "-C", "../../cmd/txlimit", "-o", tool, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	limits := filepath.Join(t.TempDir(), "limits.json")
	if err := os.WriteFile(limits, []byte(`{"program": "file", "limits": [{"name": "ofFile", "kind": "token bucket", "rate": 10, "period": "1000h"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	paths := harness.SomeOf(t, 1, "ratelimit, evil", "evil, ratelimit", "evil, ratelimit, pg_catalog", "evil, pg_catalog")
	for i, path := range paths {
		pool := harness.Reconfigured(t, admin, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = path })
		// If this fails, the attack is too weak, and what follows shows nothing.
		if _, err := pool.Exec(t.Context(), "SELECT block($1, $2, $3, $4, $5)", "signUps", "acme", nil, "", ""); harness.SQLState(err) != "EVIL1" {
			t.Errorf("search_path %s: %v, want EVIL1", path, err)
		}
		p := harness.NewConsole(t, pool, "ann")
		for _, page := range []string{"", "?q=sign", "?span=6h"} {
			p.Get(http.StatusOK, page, "signUps")
		}
		for _, name := range []string{"signUps", "window", "month", "own"} {
			p.Get(http.StatusOK, "limit?name="+name+"&q=a", "acme")
			p.Get(http.StatusOK, "limit?name="+name+"&span=month", name)
			p.Get(http.StatusOK, "key?name="+name+"&key=acme", name)
			p.Get(http.StatusOK, "key?name="+name, name)
			p.Get(http.StatusOK, "key?name=own&key=acme&rate=5&capacity=7", "7")
			p.Get(http.StatusOK, "usage.json?name="+name)
		}
		const acme = "key?name=signUps&key=acme"
		offered := p.Post(http.StatusOK, acme, url.Values{"action": {"numbers"}, "rate": {"30"}, "end": {"1h"}, "reason": {"r"}}, "Overridden")
		_, id, _ := strings.Cut(offered, `name="id" value="`)
		id, _, _ = strings.Cut(id, `"`)
		p.Post(http.StatusOK, acme, url.Values{"action": {"add"}, "id": {id}}, map[bool]string{true: "is added", false: "Nothing was added"}[i == 0]) // once: the key is reset below
		for _, action := range []string{"unlimited", "block"} {
			p.Post(http.StatusOK, acme, url.Values{"action": {action}, "end": {"1h"}, "reason": {"r"}}, "within two seconds")
		}
		p.Post(http.StatusOK, acme, url.Values{"action": {"restore"}}, "Restored")
		p.Post(http.StatusOK, acme, url.Values{"action": {"reset"}}, "It goes on")
		const seats = "key?name=seats&key=acme"
		held := p.Get(http.StatusOK, seats, "job-")
		_, since, _ := strings.Cut(held[strings.LastIndex(held, `name="since" value="`):], `value="`)
		since, _, _ = strings.Cut(since, `"`)
		_, job, _ := strings.Cut(held[strings.LastIndex(held, `name="id" value="`):], `value="`)
		job, _, _ = strings.Cut(job, `"`)
		p.Post(http.StatusOK, seats, url.Values{"action": {"release"}, "id": {job}, "since": {since}, "reason": {"it hangs"}}, "Released")

		for _, line := range []string{
			"limits", "keys signUps --all", "keys signUps --denied", "keys window --all", "keys month --all", "keys own --all", "show signUps acme", "show window acme", "show month acme",
			"show own acme", "show own acme --rate 10", "override signUps acme --rate 40 --for 1h --reason r --add", "overrides", "overrides --all", "block signUps acme --reason r --forever", "keys signUps --all",
			"unblock signUps acme", "unlimited signUps acme --for 1h", "show signUps acme", "restore signUps acme", "block signUps --yes --forever", "restore signUps --yes", "reset signUps acme --yes", "sweep", "sweep unpublished --rate 10 --period 1000h",
			"publish " + limits, "__complete keys s", "__complete show window a", "__complete release seats acme j",
			"holds seats", "holds seats acme", fmt.Sprintf("release seats acme job-%d --yes --reason r", i), "show seats acme", "keys seats --all", "locks", "replay --log " + os.DevNull + " --format csv --time t --published signUps", "migrate status",
		} {
			args := strings.Fields(line)
			cmd := exec.Command(tool, args...)
			cmd.Env = append(os.Environ(), "DATABASE_URL="+withPath(t, admin.Config().ConnString(), path))
			out, err := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != 0 && code != 3 || strings.Contains(string(out), "hijacked") {
				t.Errorf("search_path %s: txlimit %s: %v\n%s", path, line, err, out)
			}
			if line == "migrate status" && !strings.Contains(string(out), "1  00001_engine.sql  20") {
				t.Errorf("search_path %s: txlimit %s: %s", path, line, out)
			}
		}
	}
	var n int
	if err := admin.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.overrides WHERE effect <> 'reset'").Scan(&n); err != nil || n != len(paths)*9 {
		t.Errorf("%d overrides in the history, %v", n, err)
	}
}

// withPath is the URL of a database with another search_path.
func withPath(t *testing.T, address, path string) string {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set("options", "-c search_path="+strings.ReplaceAll(path, " ", ""))
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // which is all that pgx reads
	return u.String()
}
