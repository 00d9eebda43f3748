package attack_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/observe"
)

// injections are names and keys that an attacker would choose so that they are read as something else: SQL in quotes,
// comments and dollar quotes, placeholders, arrays, rows and JSON, LIKE patterns, formats, terminal escapes, header fields,
// and text that looks like other text.
var injections = []string{
	`'`, `''`, `"`, "`", `';`, `');--`, `'; DROP TABLE ratelimit.limits; --`, `'); DELETE FROM ratelimit.limits; --`, `' OR '1'='1`, `' OR 1=1 --`, `" OR ""="`,
	`'||(SELECT usename FROM pg_user LIMIT 1)||'`, `' UNION SELECT 'x','x',0,1,1e9,now() --`, `'/*`, `*/ OR 1=1 /*`, `--`, "-- \n; DROP TABLE canary", `#`, `;`,
	`\`, `\\`, `\'`, `\'; DROP TABLE canary; --`, `\\'; DROP TABLE canary; --`, `\"`, `E'\x27'`, `U&'\0027'`, `U&"\0027"`, `\047`, `\u0027`, "\\\n'",
	`$$`, `$body$`, `$ddl$; DROP TABLE canary; $ddl$`, `$1`, `$2`, `:name`, `@name`, `?`, `??`, `%s`, `%%`, `%n%d%I%L`, `%(x)s`, `{}`, `{NULL}`, `NULL`, `{a,"b"}`, `","`, `a","b`, `{"a":"\u0000"}`,
	`(,)`, `("a","b")`, `[1:2]={a,b}`, `_`, `%`, `@extschema@`, `|`, `a|b`, `a\|b`, "${jndi:ldap://x}", "{{7*7}}", "<script>alert(1)</script>", "=cmd|' /C calc'!A0",
	"\r\nX-Injected: yes", "\n", "\t", "\v", "\x01", "\x1b[2J", "\x7f", "\u0085", "\u2028", "\u00a0", " ", "ʼ", "＇", "’", "‘; DROP TABLE canary", "；", "аdmin", "admin\u202enimda", "\u2066x\u2069", "\ufeff", "e\u0301", "\u0130", "🙈",
	"\xc2\xa0'", strings.Repeat("'", 255), strings.Repeat(`\`, 127), strings.Repeat("$", 254),
}

// newVictim makes a schema with a table that injections attack. unharmed wants the table unchanged, and in ratelimit.limits only
// the rows of these limits.
func newVictim(t *testing.T) (pool *pgxpool.Pool, unharmed func(t *testing.T, want int)) {
	pool = harness.NewPool(t, 2)
	harness.MustExec(t, pool, "CREATE TABLE canary AS SELECT 'alive' AS state")
	return pool, func(t *testing.T, want int) {
		t.Helper()
		var state string
		if err := pool.QueryRow(t.Context(), "SELECT string_agg(state, ',') FROM canary").Scan(&state); err != nil || state != "alive" {
			t.Errorf("the canary is %q, %v", state, err)
		}
		rows, _ := pool.Query(t.Context(), "SELECT name, key, value, shard FROM ratelimit.limits ORDER BY name, key")
		seen := 0
		var name, key string
		var value float64
		var shard int
		_, err := pgx.ForEachRow(rows, []any{&name, &key, &value, &shard}, func() error {
			seen++
			if !slices.Contains(injections, name) || !strings.HasPrefix(key, "key of |") || value != 0 || shard != 0 {
				t.Errorf("a row of %q, %q, shard %d: %v", name, key, shard, value)
			}
			return nil
		})
		if err != nil || seen != want {
			t.Errorf("%d rows, want %d, %v", seen, want, err)
		}
	}
}

// injected asks for one token, with the text as name and key. In a fixed window, each key has its own grid.
func injected(text string) ratelimit.Request {
	return ratelimit.FixedWindow(text, 1, 100_000*time.Hour).Key("key of ", text)
}

// All ways in which a name or key reaches the server, with both meanings of backslashes in string literals.
func TestInjectionsAreNamesAndKeysAndNothingElse(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	type way struct {
		name string
		open func(t *testing.T, pool *pgxpool.Pool, settings map[string]string) (db ratelimit.DB)
	}
	var ways []way
	for _, mode := range harness.ExecModes {
		ways = append(ways, way{mode.String(), func(t *testing.T, pool *pgxpool.Pool, settings map[string]string) ratelimit.DB {
			harness.NeedsMode(t, mode)
			return harness.Reconfigured(t, pool, func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode
				harness.StartWith(t, c.ConnConfig, settings)
			})
		}})
	}
	ways = append(ways, way{"coalesced", func(t *testing.T, pool *pgxpool.Pool, settings map[string]string) ratelimit.DB {
		if harness.DefaultMode(t) == pgx.QueryExecModeSimpleProtocol && settings["standard_conforming_strings"] == "off" {
			harness.NeedsSession(t, "since pgx sends nothing by the simple protocol with standard_conforming_strings=off")
		}
		coalescer := &ratelimit.Coalescer{Pool: harness.Reconfigured(t, pool, func(c *pgxpool.Config) { harness.StartWith(t, c.ConnConfig, settings) })}
		t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
		return coalescer
	}})
	for _, driver := range harness.Drivers {
		ways = append(ways, way{"database/sql, " + driver, func(t *testing.T, pool *pgxpool.Pool, settings map[string]string) ratelimit.DB {
			harness.NeedsSession(t, "since settings are given in the URL")
			u, err := url.Parse(pool.Config().ConnString())
			if err != nil {
				t.Fatal(err)
			}
			query := u.Query()
			for name, value := range settings {
				query.Set("options", query.Get("options")+" -c "+name+"="+value)
			}
			u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // libpq does not read + as a space
			return ratelimit.SQL(harness.OpenSQL(t, driver, u.String(), 1))
		}})
	}
	for _, conforming := range []string{"on", "off"} {
		for _, way := range ways {
			t.Run(way.name+", standard_conforming_strings="+conforming, func(t *testing.T) {
				t.Parallel()
				pool, unharmed := newVictim(t)
				db := way.open(t, pool, map[string]string{"standard_conforming_strings": conforming})
				var setting string
				if err := db.QueryRow(t.Context(), "SHOW standard_conforming_strings").Scan(&setting); err == nil && setting != conforming {
					t.Fatalf("standard_conforming_strings is %s", setting)
				}
				var limiter ratelimit.Limiter
				if way.name == pgx.QueryExecModeSimpleProtocol.String() && conforming == "off" {
					// pgx writes literals for the other setting, so it refuses to send any.
					for _, text := range injections {
						result, err := limiter.Consume(t.Context(), db, injected(text))
						if err == nil || result.OK || harness.Denied(err) || errors.Is(err, ratelimit.ErrUnknownOutcome) || !strings.Contains(err.Error(), "choose another QueryExecMode") {
							t.Errorf("%q: %+v, %v", text, result, err)
						}
					}
					nothingIsSent(t, db.(*pgxpool.Pool))
					unharmed(t, 0)
					return
				}
				var all []ratelimit.Request
				for _, text := range injections {
					all = append(all, injected(text))
					if _, err := limiter.Consume(t.Context(), db, injected(text)); err != nil {
						t.Errorf("%q: %v, want a grant", text, err)
					}
					_, err := limiter.Consume(t.Context(), db, injected(text))
					var exceeded *ratelimit.DeniedError
					if !errors.As(err, &exceeded) || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "key of") {
						t.Errorf("%q: %v, want a denial that names the limit and not the key", text, err)
					}
				}
				unharmed(t, len(injections))
				// All in one call, as elements of arrays.
				result, err := limiter.Consume(t.Context(), db, all...)
				if !harness.Denied(err) {
					t.Fatalf("all in one call: %v", err)
				}
				for i, s := range result.Requests {
					if s.OK || s.Remaining != 0 {
						t.Errorf("%q, in one call with others: %+v", injections[i], s)
					}
				}
				if err := limiter.Reset(t.Context(), db, all...); err != nil {
					t.Error(err)
				}
				unharmed(t, 0)
				if _, err := limiter.Consume(t.Context(), db, all...); err != nil {
					t.Errorf("all in one call: %v", err)
				}
				unharmed(t, len(injections))
			})
		}
	}
}

// A denial by hand or in a batch is an SQL error. Its text has the name but not the key, and its DETAIL is valid JSON.
func TestInjectionsComeBackAsTheyAreInErrors(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for _, mode := range harness.ExecModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			harness.NeedsMode(t, mode)
			pool, unharmed := newVictim(t)
			pool = harness.Reconfigured(t, pool, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			var limiter ratelimit.Limiter
			const call = ` FROM %s($1, $2, rate => 1, period => '100000 hours', kind => 'fixed window')`
			for _, text := range injections {
				request := injected(text)
				result, err := limiter.Check(t.Context(), pool, request)
				if err != nil {
					t.Fatal(err)
				}
				key := result.Requests[0].Key
				for _, want := range []bool{true, false} {
					var ok bool
					if err := pool.QueryRow(t.Context(), "SELECT granted"+fmt.Sprintf(call, "ratelimit.try"), text, key).Scan(&ok); err != nil || ok != want {
						t.Errorf("%q by hand: %v, %v, want %v", text, ok, err, want)
					}
				}
				for _, function := range []string{"ratelimit.consume", "ratelimit.reserve", "ratelimit.take"} {
					call := fmt.Sprintf(call, function)
					switch function {
					case "ratelimit.reserve":
						call = strings.Replace(call, "$2,", "$2, max_reserved => 0,", 1)
					case "ratelimit.take":
						call = strings.Replace(call, "$2,", "$2, most => 1,", 1)
					}
					_, err = pool.Exec(t.Context(), "SELECT"+call, text, key)
					var pgErr *pgconn.PgError
					var detail struct {
						Name       string
						Remaining  float64
						RetryAfter float64 `json:"retry_after"`
					}
					if !errors.As(err, &pgErr) || pgErr.Code != "PT429" || pgErr.Message != "rate limit exceeded: "+text ||
						json.Unmarshal([]byte(pgErr.Detail), &detail) != nil || detail.Name != text || detail.Remaining != 0 || detail.RetryAfter <= 0 {
						t.Errorf("%q by hand, %s: %+v", text, function, err)
					}
					if pgErr != nil && strings.Contains(fmt.Sprintf("%+v", *pgErr), "key of") {
						t.Errorf("%q: the error tells the key: %+v", text, *pgErr)
					}
				}
				batch := new(pgx.Batch)
				if _, err := limiter.QueueConsume(t.Context(), batch, request, injected("other")); err != nil {
					t.Fatal(err)
				}
				var exceeded *ratelimit.DeniedError
				if err := limiter.SendTx(t.Context(), pool, batch); !errors.As(err, &exceeded) || harness.DeniedBy(harness.ResultIn(exceeded))[0].Limit.Name() != text {
					t.Errorf("%q in a batch: %v", text, err)
				}
				// The error for an invalid limit quotes its name.
				if _, err := pool.Exec(t.Context(), "SELECT FROM ratelimit.consume($1, $2, rate => -1, period => '1 hour')", text, key); harness.SQLState(err) != "22023" {
					t.Errorf("%q by hand, of a wrong limit: %v", text, err)
				}
			}
			unharmed(t, len(injections))
		})
	}
}

// A log record is one line, whatever its text, and can be parsed.
func TestInjectionsBreakNoLineOfTheLog(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	var asJSON, asText harness.Logged
	logs := []*observe.Log{
		{Logger: slog.New(slog.NewJSONHandler(&asJSON, nil)), Every: -1, Key: observe.PlainKey},
		{Logger: slog.New(slog.NewTextHandler(&asText, nil)), Every: -1, Key: observe.PlainKey},
	}
	limiter := ratelimit.Limiter{Observer: observe.Join(logs[0].Observe, logs[1].Observe)}
	for _, text := range injections {
		for range 2 {
			if _, err := limiter.Consume(t.Context(), pool, injected(text)); err != nil && !harness.Denied(err) {
				t.Fatal(err)
			}
		}
	}
	if n := strings.Count(asText.String(), "\n"); n != len(injections) || strings.ContainsAny(asText.String(), "\r\x1b\x01\u2028\u0085") {
		t.Errorf("%d lines of %d records:\n%q", n, len(injections), asText.String())
	}
	records := asJSON.Records(t)
	if len(records) != len(injections) {
		t.Fatalf("%d records", len(records))
	}
	for i, text := range injections {
		if key, _ := records[i]["key"].(string); records[i]["limit"] != text || !strings.HasPrefix(key, "key of |") {
			t.Errorf("%q is logged as %v", text, records[i])
		}
	}
}

// The header fields of a response, read from the socket. Whatever the limit's name, there are only the usual fields, and
// another library can parse the names.
func TestHTTPInjectionsStayInTheirFields(t *testing.T) {
	t.Parallel()
	names := append(slices.Clone(injections), strings.Repeat("é", 127), "\r\nSet-Cookie: a=b", "\r\n\r\n<html>", "a, b;q=1", `";q=1000;w=1, "b`)
	limitOf := func(i int) ratelimit.Limit { return ratelimit.TokenBucket(names[i], 1, time.Hour) }
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		var i int
		_, err := fmt.Sscan(r.URL.Query().Get("i"), &i)
		return []ratelimit.Request{limitOf(i).Key(names[i])}, err
	})
	s.Limit.LegacyFields = true
	s.Limit.PartitionSecret = []byte("secret")
	s.Serve()
	for i, name := range names {
		for _, status := range []int{200, 429} {
			head := raw(s, fmt.Sprintf("/?i=%d", i))
			lines := strings.Split(head, "\r\n")
			if !strings.HasPrefix(lines[0], fmt.Sprintf("HTTP/1.1 %d ", status)) {
				t.Fatalf("%q: %q", name, lines[0])
			}
			var fields []string
			header := http.Header{}
			for _, line := range lines[1:] {
				field, value, found := strings.Cut(line, ": ")
				if !found || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) {
					t.Errorf("%q: the line %q", name, line)
				}
				fields = append(fields, field)
				header.Add(field, value)
			}
			slices.Sort(fields)
			want := []string{"Content-Length", "Content-Type", "Date", "Ratelimit", "Ratelimit-Limit", "Ratelimit-Policy", "Ratelimit-Remaining", "Ratelimit-Reset",
				"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset"}
			if status == 429 {
				want = append(want[:3:3], append([]string{"Ratelimit", "Ratelimit-Limit", "Ratelimit-Policy", "Ratelimit-Remaining", "Ratelimit-Reset", "Retry-After"}, want[8:]...)...)
			}
			for j := range fields {
				fields[j] = http.CanonicalHeaderKey(fields[j])
			}
			if !slices.Equal(fields, want) {
				t.Errorf("%q: the fields are %q, want %q", name, fields, want)
			}
			for _, field := range []string{"RateLimit", "RateLimit-Policy"} {
				items := harness.List(t, header, field)
				if len(items) != 1 || unescaped(items[0].Name) != name {
					t.Errorf("%q: %s is %q", name, field, header.Values(field))
				}
			}
		}
	}
}

// unescaped undoes percent-encoding.
func unescaped(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		var c byte
		if s[i] == '%' && i+2 < len(s) {
			if _, err := fmt.Sscanf(s[i+1:i+3], "%02X", &c); err == nil {
				b.WriteByte(c)
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// raw returns the head of a response as sent, without the empty line at its end.
func raw(s *harness.Site, path string) (head string) {
	s.Helper()
	conn, err := new(net.Dialer).DialContext(s.Context(), "tcp", strings.TrimPrefix(s.URL, "http://"))
	if err != nil {
		s.Fatal(err)
	}
	defer context.AfterFunc(s.Context(), func() { _ = conn.Close() })() // this ends the read
	defer func() { _ = conn.Close() }()
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: site\r\n\r\n", path); err != nil {
		s.Fatal(err)
	}
	var b bytes.Buffer
	reader := bufio.NewReader(conn)
	for !bytes.HasSuffix(b.Bytes(), []byte("\r\n\r\n")) {
		line, err := reader.ReadBytes('\n')
		if err != nil {
			s.Fatalf("%q: %v", b.String(), err)
		}
		b.Write(line)
	}
	return strings.TrimSuffix(b.String(), "\r\n\r\n")
}

// nothingIsSent: pgx refuses to write literals, so nothing is consumed, and no call leaves that open.
func nothingIsSent(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var limiter ratelimit.Limiter
	request := ratelimit.TokenBucket("unsent", 10, time.Hour).Key("k")
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	batch := &pgx.Batch{}
	batch.Queue("SELECT 1")
	if _, err := limiter.QueueConsume(t.Context(), batch, request); err != nil {
		t.Fatal(err)
	}
	sharded := ratelimit.TokenBucket("unsent", 10, time.Hour, ratelimit.Shards(2)).Key("k")
	for way, err := range map[string]error{
		"pool":      func() error { _, err := limiter.Consume(t.Context(), pool, request); return err }(),
		"several":   func() error { _, err := (&ratelimit.Limiter{}).Charge(t.Context(), pool, sharded); return err }(),
		"Coalescer": func() error { _, err := limiter.Consume(t.Context(), coalescer, request); return err }(),
		"SendTx":    limiter.SendTx(t.Context(), pool, batch),
		"InTx": limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limiter.Consume(ctx, tx, request)
			return err
		}),
	} {
		if err == nil || errors.Is(err, ratelimit.ErrUnknownOutcome) {
			t.Errorf("%s: %v, want an error after which nothing is open", way, err)
		}
	}
	if err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, "SELECT 1"); return err }); errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("a transaction without arguments: %v", err)
	}
}
