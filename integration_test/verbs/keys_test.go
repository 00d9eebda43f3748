package verbs_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/internal/keytext"
	"github.com/txlimit/txlimit/ratelimit"
)

// writtenKeys are keys as login providers, mail, the web, file systems and people write them, and what looks like the store's own text.
var writtenKeys = []string{
	"auth0|507f1f77bcf86cd799439011", "google-oauth2|103547991597142817347", "samlp|Corp-SAML|ann@example.org", `CORP\ann`, `CORP\\ann`, `waad|CORP\ann`,
	"ann+news@example.org", `"ann|bob"@example.org`, "o'brien@example.org", "ann%bob@example.org", "!#$%&'*+/=?^_`{|}~-@example.org",
	"/api/v1/users/17", "/a//b/./..", `C:\Program Files\x`, `\\server\share\`, "https://example.org:8443/a?b=c&d=%7C%5C#e|f", "2001:db8::1%eth0", "203.0.113.7:443",
	"urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66", "Bearer a.b-c_d==", "arn:aws:iam::1:user/ann", "a,b;c", "a&b=c", "-rf", "--help", "$(x)", "`x`", "*", "?", "~", "#", "<b>", "{NULL}", "NULL", "null", "''",
	"|", "||", "|a", "a|", "a||b", "a|b", `\`, `\\`, `\|`, `\\|`, `\|\`, `a\`, `a\|b`, `a\\|b`, `a|b\`, `|\`, `a|\`, `a|\x`, "%", "_", "%%", "a_b", ":a", "$1", "@",
	" ", " a", "a ", "a b", "\t", "a\nb", "a\r\nb", "\x01", "\x1b[31m", "\x7f", "\u0085", "\u00a0", "\u2028", "\u202e", "\ufeff",
	"é", "e\u0301", "ß", "İ", "日本", "العربية", "👩‍👩‍👧", "🇪🇺", "\U0010ffff",
	strings.Repeat("|", harness.MaxKeyLen), strings.Repeat(`\`, harness.MaxKeyLen), strings.Repeat("é", harness.MaxKeyLen/2), strings.Repeat("a|", harness.MaxKeyLen/2-1) + "a",
}

// quoted is a text as one writes it by hand in SQL.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

func quotedList(texts []string) string {
	var list []string
	for _, text := range texts {
		list = append(list, quoted(text))
	}
	return strings.Join(list, ", ")
}

// byKey are the ways to a key: the program, SQL by hand, the tool and the page.
type byKey struct {
	*testing.T
	pool   *pgxpool.Pool
	limits ratelimit.Limiter
	page   harness.ConsolePage
	binary string
	url    string
}

func newByKey(t *testing.T) *byKey {
	url := harness.NewMigrated(t)
	binary, err := harness.BuiltTool()
	harness.Succeeds(t, err)
	w := &byKey{T: t, pool: harness.Connect(t, url, 4), binary: binary, url: url}
	follow.By(&w.limits, follow.Settings{DB: w.pool})
	w.page = harness.NewConsole(t, w.pool, "ann")
	return w
}

// sql runs a statement without parameters, and scans its row.
func (w *byKey) sql(statement string, into ...any) {
	w.Helper()
	if err := w.pool.QueryRow(w.Context(), statement).Scan(into...); err != nil {
		w.Fatalf("%s: %v", statement, err)
	}
}

// tool runs txlimit, and returns what it prints.
func (w *byKey) tool(args ...string) []byte {
	w.Helper()
	cmd := exec.CommandContext(w.Context(), w.binary, args...)
	cmd.Env = []string{"DATABASE_URL=" + w.url, "HOME=" + w.TempDir()}
	out, err := cmd.Output()
	if err != nil {
		exit, _ := errors.AsType[*exec.ExitError](err)
		if exit != nil {
			out = append(out, exit.Stderr...)
		}
		w.Fatalf("txlimit %q: %v: %s", args, err, out)
	}
	return out
}

// goes wants what Go's next call is answered: nothing, or the reason of a denial. Overrides are followed first.
func (w *byKey) goes(what string, r ratelimit.Request, want ratelimit.Reason) {
	w.Helper()
	harness.Succeeds(w, follow.Load(w.Context(), &w.limits))
	_, err := w.limits.Consume(w.Context(), w.pool, r)
	denial, is := errors.AsType[*ratelimit.DeniedError](err)
	if err != nil && !is {
		w.Fatal(err)
	}
	if got := (ratelimit.Reason)(""); is && denial.Reason != want || !is && want != got {
		w.Errorf("%s: Go was answered %v, want %q", what, err, want)
	}
}

func (w *byKey) full(what string, r ratelimit.Request, capacity float64) {
	w.Helper()
	balances, err := w.limits.Balance(w.Context(), w.pool, r)
	if err != nil || balances[0].Remaining != capacity {
		w.Errorf("%s: %+v, %v, want %v", what, balances, err, capacity)
	}
}

// TestKeysAreStoredAsWritten: the key that a person writes in SQL, in a terminal or in a browser is the program's.
func TestKeysAreStoredAsWritten(t *testing.T) {
	t.Parallel()
	w := newByKey(t)
	logins := ratelimit.TokenBucket("logins", 5, 100_000*time.Hour, ratelimit.Shards(1))
	window := ratelimit.FixedWindow("window", 5, 100_000*time.Hour)
	pairs := ratelimit.TokenBucket("pairs", 5, 100_000*time.Hour)
	seats := ratelimit.Slots("seats", 1)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), w.pool, "api", logins, window, pairs, seats))
	ways := map[string]struct{ block, unblock, reset func(limit, key string) }{
		"SQL": {
			func(limit, key string) {
				w.sql(fmt.Sprintf("SELECT ratelimit.block(%s, %s, forever => true)", quoted(limit), quoted(key)), new(int64))
			},
			func(limit, key string) {
				w.sql(fmt.Sprintf("SELECT ratelimit.unblock(%s, %s)", quoted(limit), quoted(key)), new(int64))
			},
			func(limit, key string) {
				w.sql(fmt.Sprintf("SELECT ratelimit.reset(%s, %s)", quoted(limit), quoted(key)), new(int64))
			},
		},
		"the tool": {
			func(limit, key string) { w.tool("block", "--forever", "--", limit, key) },
			func(limit, key string) { w.tool("unblock", "--", limit, key) },
			func(limit, key string) { w.tool("reset", "--yes", "--", limit, key) },
		},
		"the page": {
			func(limit, key string) {
				w.press(limit, key, url.Values{"action": {"block"}, "end": {"1h"}, "reason": {"abuse"}})
			},
			func(limit, key string) { w.press(limit, key, url.Values{"action": {"restore"}}) },
			func(limit, key string) { w.press(limit, key, url.Values{"action": {"reset"}}) },
		},
	}
	// steer blocks, unblocks and resets a request's key in every way. Each start of the tool takes a while: it does so only if asked.
	steer := func(limit, key string, r ratelimit.Request, tool bool) {
		t.Helper()
		for name, way := range ways {
			if name == "the tool" && !tool {
				continue
			}
			what := fmt.Sprintf("%q by %s", key, name)
			way.block(limit, key)
			w.goes(what+", blocked", r, ratelimit.ReasonBlock)
			way.unblock(limit, key)
			w.goes(what+", not blocked any more", r, "")
			way.reset(limit, key)
			w.full(what+", reset by "+name, r, 5)
		}
		if !tool {
			return
		}
		shown := struct {
			Key       *string  `json:"key"`
			Remaining *float64 `json:"remaining"`
		}{}
		w.goes("", r.Count(2), "")
		if err := json.Unmarshal(w.tool("show", "--json", "--", limit, key), &shown); err != nil || shown.Key == nil || *shown.Key != key || shown.Remaining == nil || *shown.Remaining > 3.1 {
			t.Errorf("the tool shows of %q: %+v, %v", key, shown, err)
		}
	}

	for i, key := range harness.SomeOf(t, 12, writtenKeys...) {
		// One row, whoever takes.
		r, lit := logins.Key(key), quoted(key)
		w.goes(fmt.Sprintf("%q", key), r.Count(3), "")
		var rows, listed int
		w.sql("SELECT count(*) FROM ratelimit.limits WHERE name = 'logins' AND key = "+lit, &rows)
		w.sql("SELECT count(*) FROM ratelimit.keys('logins', keys => ARRAY["+lit+"]) WHERE key = "+lit, &listed)
		if rows != 1 || listed != 1 || keytext.Join(key) != key {
			t.Errorf("%q has %d rows, and is listed %d times", key, rows, listed)
		}
		var granted bool
		if w.sql("SELECT granted FROM ratelimit.try('logins', "+lit+", count => 2)", &granted); !granted {
			t.Errorf("%q was denied in SQL", key)
		}
		w.goes(fmt.Sprintf("%q, used up in SQL", key), r, ratelimit.ReasonQuota)
		w.sql("SELECT ratelimit.reset('logins', "+lit+")", new(int64))
		steer("logins", key, r, *harness.Whole || i%4 == 0 && (!testing.Short() || i%16 == 0))

		// The windows of a key begin at its hash, in Go as in SQL.
		result, err := w.limits.Consume(t.Context(), w.pool, window.Key(key).Count(4))
		harness.Succeeds(t, err)
		var resetAt time.Time
		w.sql("SELECT reset_at FROM ratelimit.consume('window', "+lit+")", &resetAt)
		if w.sql("SELECT granted FROM ratelimit.try('window', "+lit+")", &granted); granted || !resetAt.Equal(result.ResetAt) {
			t.Errorf("the window of %q: granted %v, until %v in SQL and %v in Go", key, granted, resetAt, result.ResetAt)
		}
		w.page.Get(http.StatusOK, "key?name=window&key="+url.QueryEscape(key), "0 of 5 tokens")

		// One slot, whoever holds it.
		if _, err := w.limits.Hold(t.Context(), w.pool, "go", ratelimit.Forever, seats.Key(key)); err != nil {
			t.Errorf("%q: %v", key, err)
		}
		if _, err := w.pool.Exec(t.Context(), "SELECT ratelimit.hold('seats', "+lit+", 'sql', ttl => '1 day')"); harness.SQLState(err) != "PT429" {
			t.Errorf("%q: SQL holds what Go has: %v", key, err)
		}
		var id string
		w.sql("SELECT id FROM ratelimit.holds('seats', "+lit+")", &id)
		w.page.Get(http.StatusOK, "key?name=seats&key="+url.QueryEscape(key), "0 of 1 slots")
		switch released := false; {
		case i%4 == 1 && (!testing.Short() || i%16 == 1) || *harness.Whole:
			if out := string(w.tool("holds", "--json", "--", "seats", key)); !strings.Contains(out, `"holdId": "go"`) {
				t.Errorf("%q: the tool lists %s", key, out)
			}
			w.tool("release", "--yes", "--", "seats", key, "go")
		case i%2 == 0:
			if w.sql("SELECT ratelimit.release('seats', "+lit+", 'go')", &released); !released {
				t.Errorf("%q: SQL releases nothing", key)
			}
		default:
			if err := harness.Second(w.limits.Release(t.Context(), w.pool, "go", seats.Key(key))); err != nil {
				t.Errorf("%q: %v", key, err)
			}
		}
		var held int
		if w.sql("SELECT count(*) FROM ratelimit.holds WHERE name = 'seats'", &held); held != 0 || id != "go" {
			t.Errorf("%q: %d holds are left, and %q was listed", key, held, id)
		}
	}

	// Several parts: one function each in Go and SQL, a flag of the tool, and the stored text everywhere.
	for i, parts := range [][]string{
		{"eu", "user-17"}, {"a|b", "c"}, {"a", "b|c"}, {`CORP\ann`, "|"}, {`\`, `\`, `\|`}, {"é", "👩‍👩‍👧", " "}, {"--help", "-rf"}, {"o'brien", "a\nb"}, {strings.Repeat("|", 400), strings.Repeat(`\`, 111)},
	} {
		r, key := pairs.Key(parts...), keytext.Join(parts...)
		w.goes(fmt.Sprintf("%q", parts), r.Count(3), "")
		var stored string
		var back []string
		w.sql(fmt.Sprintf("SELECT key, ratelimit.key_parts(key) FROM ratelimit.limits WHERE name = 'pairs' AND key = ratelimit.key(%s)", quotedList(parts)), &stored, &back)
		if stored != key || !slices.Equal(back, parts) {
			t.Errorf("%q are stored as %q, and in Go as %q; SQL reads %q", parts, stored, key, back)
		}
		if i < 4 {
			steer("pairs", key, r, true)
		}
		args := []string{"pairs"}
		for _, part := range parts {
			args = append(args, "--part="+part)
		}
		w.tool(append([]string{"block", "--forever"}, args...)...)
		w.goes(fmt.Sprintf("%q, blocked by parts", parts), r, ratelimit.ReasonBlock)
		w.tool(append([]string{"unblock"}, args...)...)
		w.goes(fmt.Sprintf("%q, not blocked any more", parts), r, "")
		w.tool(append([]string{"reset", "--yes"}, args...)...)
		w.full(fmt.Sprintf("%q, reset by parts", parts), r, 5)
	}
}

// press sends a form of a key's page.
func (w *byKey) press(limit, key string, form url.Values) {
	w.Helper()
	w.page.Post(http.StatusOK, "key?name="+url.QueryEscape(limit)+"&key="+url.QueryEscape(key), form)
}

// hostileTenants choose names to reach the keys of others.
var hostileTenants = []string{
	"acme", "a", "b", "a|b", "a|", "|a", "|", "||", `a\`, `a\\`, `a\|b`, `a\\|b`, `\`, `\|`, "%", "_", "a%", "acme|ann", "acme|all", `acme\`, `acme\|ann`, "é", "e\u0301", "ACME", " acme", "acme ", "NULL", "{acme}", `"acme"`,
	"auth0|507f1f77bcf86cd799439011", strings.Repeat("|", 300),
}

// Whatever a tenant is called, it sees its own keys and no others'.
func TestTenantsOfAnyNameAreKeptApart(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 2)
	role := harness.CreateRole(t, owner)
	harness.GrantWork(t, owner, role, "consume")
	harness.MustExec(t, owner, harness.TenantPolicy(t, role))
	app := harness.AsRole(t, owner, role, 2)
	var limiter ratelimit.Limiter
	limit := harness.Slow("limit", 10)
	keysOf := func(tenant string) []ratelimit.Request {
		return []ratelimit.Request{limit.Key(tenant, "all"), limit.Key(tenant, "ann"), limit.Key(tenant, "b", "c"), limit.Key(tenant, "|"), limit.Key(tenant, `\`)}
	}
	for _, tenant := range hostileTenants {
		harness.AsTenant(t, app, tenant, func(tx pgx.Tx) {
			for _, r := range keysOf(tenant) {
				if _, err := limiter.Consume(t.Context(), tx, r); err != nil {
					t.Errorf("tenant %q: %v", tenant, err)
				}
			}
		})
		// What the owner writes with one part belongs to nobody, unless it reads as several: the page says to keep such limits elsewhere.
		if firstOf(t, owner, tenant) == "" {
			harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), owner, harness.Slow("whole", 10).Key(tenant))))
		}
	}
	before := harness.TableOf(t, owner)
	refused := func(tenant, what string, tx pgx.Tx, want string, do func(tx pgx.Tx) error) {
		t.Helper()
		inside, err := tx.Begin(t.Context())
		harness.Succeeds(t, err)
		if err := do(inside); harness.SQLState(err) != want || want == "" && err != nil {
			t.Errorf("tenant %q, %s: %v, want %q", tenant, what, err, want)
		}
		harness.Succeeds(t, inside.Rollback(t.Context()))
	}
	for _, tenant := range hostileTenants {
		harness.AsTenant(t, app, tenant, func(tx pgx.Tx) {
			rows, _ := tx.Query(t.Context(), "SELECT key FROM ratelimit.limits")
			seen, err := pgx.CollectRows(rows, pgx.RowTo[string])
			var own []string
			for _, parts := range [][]string{{tenant, "all"}, {tenant, "ann"}, {tenant, "b", "c"}, {tenant, "|"}, {tenant, `\`}} {
				own = append(own, keytext.Join(parts...))
			}
			if slices.Sort(own); err != nil || !slices.Equal(slices.Sorted(slices.Values(seen)), own) {
				t.Errorf("tenant %q sees %q, %v", tenant, seen, err)
			}
			refused(tenant, "a key of one part", tx, "42501", func(tx pgx.Tx) error {
				return harness.Second(limiter.Consume(t.Context(), tx, harness.Slow("whole", 10).Key(tenant)))
			})
			for _, other := range hostileTenants {
				if other == tenant {
					continue
				}
				refused(tenant, fmt.Sprintf("consumes of %q", other), tx, "42501", func(tx pgx.Tx) error {
					return harness.Second(limiter.Consume(t.Context(), tx, limit.Key(other, "ann")))
				})
				refused(tenant, fmt.Sprintf("resets %q", other), tx, "", func(tx pgx.Tx) error {
					return limiter.Reset(t.Context(), tx, append(keysOf(other), harness.Slow("whole", 10).Key(other))...)
				})
				if t.Failed() {
					return
				}
			}
			// By hand, all at once.
			refused(tenant, "deletes", tx, "", func(tx pgx.Tx) error {
				tag, err := tx.Exec(t.Context(), "DELETE FROM ratelimit.limits")
				if err == nil && tag.RowsAffected() != int64(len(own)) {
					err = fmt.Errorf("%d rows", tag.RowsAffected())
				}
				return err
			})
		})
	}
	if after := harness.TableOf(t, owner); after != before {
		t.Errorf("the tenants made of\n%s\nthis\n%s", before, after)
	}
}

// A guard finds the tenant of a key, whatever it is called, and refuses keys of one part.
func TestAGuardFindsTheTenantOfAnyName(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.MustExec(t, pool, harness.DocSQL(t, "docs/distributed.md", "CREATE TABLE tenants"))
	here := map[string]bool{}
	for i, tenant := range hostileTenants {
		here[tenant] = i%2 == 0
		harness.Succeeds(t, harness.Second(pool.Exec(t.Context(), "INSERT INTO tenants VALUES ($1, $2)", tenant, here[tenant])))
	}
	var limiter ratelimit.Limiter
	for _, tenant := range hostileTenants {
		want := map[bool]string{true: "", false: "RL004"}[here[tenant]]
		for _, rest := range [][]string{{"all"}, {"a", "b"}, {"|"}, {`\`}} {
			_, err := limiter.Consume(t.Context(), pool, harness.Slow("limit", 10).Key(append([]string{tenant}, rest...)...))
			if harness.SQLState(err) != want || want == "" && err != nil {
				t.Errorf("%q, %q: %v, want %q", tenant, rest, err, want)
			}
		}
		// A text that is a key of two parts is judged as one.
		if _, err := limiter.Consume(t.Context(), pool, harness.Slow("whole", 10).Key(tenant)); harness.SQLState(err) != "RL004" && (err != nil || !here[firstOf(t, pool, tenant)]) {
			t.Errorf("the key %q: %v", tenant, err)
		}
	}
	if _, err := limiter.Consume(t.Context(), pool, harness.Slow("site", 10).Global()); harness.SQLState(err) != "RL004" {
		t.Errorf("a limit without keys: %v", err)
	}
	// A move takes exactly the tenant's rows.
	for _, tenant := range hostileTenants {
		var n int
		err := pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.limits WHERE name = 'limit' AND (ratelimit.key_parts(key))[1] = $1", tenant).Scan(&n)
		if want := map[bool]int{true: 4}[here[tenant]]; err != nil || n != want {
			t.Errorf("%q has %d rows, %v, want %d", tenant, n, err, want)
		}
	}
}

// firstOf is the first part of a stored key of several, or empty.
func firstOf(t *testing.T, pool *pgxpool.Pool, key string) (first string) {
	t.Helper()
	err := pool.QueryRow(t.Context(), "SELECT CASE WHEN cardinality(p) > 1 THEN p[1] ELSE '' END FROM ratelimit.key_parts($1) AS p", key).Scan(&first)
	harness.Succeeds(t, err)
	return first
}

// SQL joins and splits as Go joins, for random parts and random texts.
func TestSQLJoinsKeysAsGoDoes(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	letters := []string{"|", "|", `\`, `\`, "a", "b", "é", "🚦", " ", "\n", "'", "%", "{", "}", ",", `"`}
	text := func(least int) string {
		var b strings.Builder
		for range least + r.IntN(5) {
			b.WriteString(letters[r.IntN(len(letters))])
		}
		return b.String()
	}
	split := 0
	for range 5000 {
		parts := []string{text(1)}
		for range r.IntN(4) {
			parts = append(parts, text(1))
		}
		var stored string
		var back, ofText []string
		other := text(0)
		err := pool.QueryRow(t.Context(), "SELECT k, ratelimit.key_parts(k), ratelimit.key_parts($2) FROM ratelimit.key(VARIADIC $1) AS k", parts, other).Scan(&stored, &back, &ofText)
		if err != nil || stored != keytext.Join(parts...) || len(parts) > 1 && !slices.Equal(back, parts) {
			t.Fatalf("seed %d: %q: stored as %q in SQL and %q in Go, which is %q, %v", seed, parts, stored, keytext.Join(parts...), back, err)
		}
		// Any text is what its parts are stored as; only the empty one has an empty part.
		for _, p := range []struct {
			key   string
			parts []string
		}{{stored, back}, {other, ofText}} {
			if keytext.Join(p.parts...) != p.key || p.key != "" && slices.Contains(p.parts, "") {
				t.Fatalf("seed %d: %q has the parts %q", seed, p.key, p.parts)
			}
		}
		if len(ofText) > 1 {
			split++
		}
	}
	if split < 100 {
		t.Errorf("seed %d: %d random texts had several parts: this tested too little", seed, split)
	}
	loose := "(provider = icu, locale = 'und', deterministic = false)"
	if harness.Scan[int](t, pool, "SELECT count(*)::integer FROM pg_collation WHERE collprovider = 'i'") == 0 { // a server without ICU has none of these
		loose = `FROM "POSIX"`
	}
	for statements, want := range map[string]string{
		"SELECT ratelimit.key('a', NULL)": "22023", "SELECT ratelimit.key('a', '')": "22023", "SELECT ratelimit.key('')": "22023", "SELECT ratelimit.key(NULL)": "22023",
		"SELECT ratelimit.key(VARIADIC '{}')": "22023", "SELECT ratelimit.key(VARIADIC NULL::text[])": "22023", "SELECT 1 / (ratelimit.key_parts(NULL) IS NULL)::integer": "",
		// Collations that Postgres does not match by, and two of them in one call.
		`CREATE COLLATION loose ` + loose + `;
		 CREATE TABLE people (tenant text COLLATE loose, name text COLLATE "POSIX"); INSERT INTO people VALUES ('a|b', 'C\d');
		 SELECT 1 / (ratelimit.key(tenant, name) COLLATE "C" = 'a\|b|C\\d' AND (ratelimit.key_parts(ratelimit.key(tenant, name)))[1] COLLATE "C" = 'a|b'
		   AND ratelimit.key_parts(tenant) = ARRAY['a', 'b'] AND ratelimit.key(tenant) COLLATE "C" = 'a|b')::integer FROM people`: "",
		`SET LOCAL standard_conforming_strings = off;
		 SELECT 1 / (ratelimit.key('a|b', 'C\\d') = 'a\\|b|C\\\\d' AND ratelimit.key_parts('a\\|b|C\\\\d') = ARRAY['a|b', 'C\\d'])::integer`: "",
		"CREATE TABLE found AS SELECT 'a|b'::text AS key; CREATE INDEX ON found ((ratelimit.key_parts(key)))": "",
	} {
		tx, err := pool.Begin(t.Context())
		harness.Succeeds(t, err)
		for statement := range strings.SplitSeq(statements, ";") { // one by one: a setting holds from the next one on
			if err == nil {
				_, err = tx.Conn().PgConn().Exec(t.Context(), statement).ReadAll()
			}
		}
		if harness.SQLState(err) != want || want == "" && err != nil {
			t.Errorf("%s: %v, want %q", statements, err, want)
		}
		harness.Succeeds(t, tx.Rollback(t.Context()))
	}
}
