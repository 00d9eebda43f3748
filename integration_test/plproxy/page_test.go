package plproxy_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
)

var shBlock = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")

// TestThePage runs the commands of docs/plproxy.md, in order, on new servers. Then it uses what they made, as the page's role.
func TestThePage(t *testing.T) {
	page, err := os.ReadFile("../../docs/plproxy.md")
	if err != nil {
		t.Fatal(err)
	}
	var servers []*postgres.Breakable
	env := append(os.Environ(), "PGUSER=postgres")
	for _, name := range []string{"PROXY", "A", "B", "C", "D"} {
		s, err := postgres.NewBreakable(t.Context(), postgres.BreakableConfig{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		servers = append(servers, s)
		// The page must do where the partitions ask for the password, and where functions are for nobody by default.
		if err := execSQL(t.Context(), s.URL(), `ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
			DO $$ BEGIN EXECUTE format('COPY (SELECT line FROM (VALUES (1, ''host all limits all scram-sha-256''), (2, ''local all all trust''), (3, ''host all all all trust'')) AS v (n, line) ORDER BY n) TO %L', current_setting('hba_file')); END $$;
			SELECT pg_reload_conf()`); err != nil {
			t.Fatal(err)
		}
		env = append(env, fmt.Sprintf("%s=%s", name, strings.Replace(connection(s), " user=postgres", "", 1)))
	}
	blocks := shBlock.FindAllSubmatch(page, -1)
	if len(blocks) < 6 {
		t.Fatalf("the page has %d blocks of commands", len(blocks))
	}
	url := strings.Replace(servers[0].URL(), "postgres@", "app@", 1)
	db := pool(t, url, 4)
	coalescer := &ratelimit.Coalescer{Pool: db}
	t.Cleanup(coalescer.Close)
	limiter := &ratelimit.Limiter{}
	limit := ratelimit.TokenBucket("page", 5, never)
	for i, block := range blocks {
		cmd := execCommand(t.Context(), env, string(block[1]))
		output, err := cmd.CombinedOutput()
		t.Logf("%s%s", block[1], output)
		if err != nil {
			t.Fatal(err)
		}
		if i < 3 {
			continue
		}
		errs := make(chan error)
		for i := range 30 { // the same keys again after each step, as the role app
			go func() {
				_, err := limiter.Consume(context.WithoutCancel(t.Context()), coalescer, limit.Key(fmt.Sprint(i)))
				errs <- err
			}()
		}
		for range 30 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	}
	confined(t, servers[0].URL(), url)
	for i := range 30 {
		if i == 0 {
			continue // to which tokens were added
		}
		want := 5.0 - float64(len(blocks)-3)
		if left := balance(t, limiter, db, limit.Key(fmt.Sprint(i))).Remaining; left < want || left > want+0.1 {
			t.Errorf("key %d: %v remain, want %v", i, left, want)
		}
	}
}

// confined checks what the role of the page can read and call: no password, and nothing that moves rows or connects elsewhere.
func confined(t *testing.T, proxy, app string) {
	t.Helper()
	db, admin := pool(t, app, 1), pool(t, proxy, 1)
	var readable string
	if err := db.QueryRow(t.Context(), `SELECT concat((SELECT array_agg(s::text) FROM pg_foreign_server AS s), (SELECT array_agg(m::text) FROM pg_user_mappings AS m),
		(SELECT array_agg(o::text) FROM information_schema.user_mapping_options AS o WHERE o.option_value IS NOT NULL))`).Scan(&readable); err != nil ||
		strings.Contains(readable, "secret") || !strings.Contains(readable, "dbname=postgres") {
		t.Errorf("the role app reads %s, %v", readable, err)
	}
	for _, statement := range []string{
		"TABLE pg_user_mapping", "TABLE rate_limit_servers", "TABLE rate_limit_moves", "SELECT _plproxy_add_once(1, 1, now(), 'page', '1', 1e15)",
		"SELECT _plproxy_slots_enter('host=127.0.0.1', true, '{1}', '{}', '{}', '{}', '{}', '{}', '{}')", "SELECT _plproxy_slots_leave('host=127.0.0.1', '{1}')",
		"SELECT * FROM _plproxy_slots_left('host=127.0.0.1', '{1}')", "SELECT _plproxy_slots_forget('host=127.0.0.1', '{1}')",
		"SELECT ratelimit_add_servers(ARRAY['host=127.0.0.1'])", "CALL ratelimit_move_slots('{1}', 0)", "SELECT ratelimit_restore('page', '1')", "SELECT ratelimit_add(1)",
		"CREATE FUNCTION pg_temp.any() RETURNS integer LANGUAGE plproxy AS $$ CLUSTER 'txlimit'; RUN ON ANY; SELECT 1; $$",
		"ALTER SERVER txlimit OPTIONS (SET p0 'host=127.0.0.1')", "ALTER USER MAPPING FOR PUBLIC SERVER txlimit OPTIONS (DROP password)",
	} {
		if _, err := db.Exec(t.Context(), statement); state(err) != "42501" {
			t.Errorf("%s: %v, want 42501", statement, err)
		}
	}
	// A mapping of its own would show it.
	if _, err := admin.Exec(t.Context(), "CREATE USER MAPPING FOR app SERVER txlimit OPTIONS (user 'limits', password 'secret')"); err != nil {
		t.Fatal(err)
	}
	if err := db.QueryRow(t.Context(), "SELECT array_agg(m::text)::text FROM pg_user_mappings AS m").Scan(&readable); err != nil || !strings.Contains(readable, "secret") {
		t.Errorf("the role app reads %s of its own mapping, %v", readable, err)
	}
	if _, err := admin.Exec(t.Context(), "DROP USER MAPPING FOR app SERVER txlimit"); err != nil {
		t.Fatal(err)
	}
	// The password is asked for, or else it would not matter that nobody can read it.
	if _, err := admin.Exec(t.Context(), "ALTER USER MAPPING FOR PUBLIC SERVER txlimit OPTIONS (SET password 'wrong')"); err != nil {
		t.Fatal(err)
	}
	_, err := pool(t, app, 1).Exec(t.Context(), "SELECT ratelimit('page', 'another', rate => 10, period => '1 minute')")
	if err == nil || !strings.Contains(err.Error(), "password authentication failed") || strings.Contains(err.Error(), "wrong") {
		t.Errorf("with a wrong password: %v", err)
	}
	if _, err := admin.Exec(t.Context(), "ALTER USER MAPPING FOR PUBLIC SERVER txlimit OPTIONS (SET password 'secret')"); err != nil {
		t.Fatal(err)
	}
	// ratelimit_add adds tokens on the partition, for its owner, and for an operator whose grants have it run with the owner's rights.
	var id int64
	if err := admin.QueryRow(t.Context(), "SELECT ratelimit_override('page', '0', rate => 9, capacity => 9)").Scan(&id); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Exec(t.Context(), `CREATE ROLE operator LOGIN; GRANT SELECT ON rate_limit_overrides TO operator; GRANT EXECUTE ON FUNCTION ratelimit_add TO operator;
		ALTER FUNCTION ratelimit_add SECURITY DEFINER SET search_path = pg_catalog, pg_temp`); err != nil {
		t.Fatal(err)
	}
	var added float64
	operator := pool(t, strings.Replace(app, "app@", "operator@", 1), 1)
	err = operator.QueryRow(t.Context(), "SELECT ratelimit_add($1, capacity => 5)", id).Scan(&added)
	for until := time.Now().Add(time.Minute); state(err) == "22023" && time.Now().Before(until); time.Sleep(100 * time.Millisecond) { // until all programs know the override
		err = operator.QueryRow(t.Context(), "SELECT ratelimit_add($1, capacity => 5)", id).Scan(&added)
	}
	if err != nil || added != 4 {
		t.Errorf("ratelimit_add: %v, %v", added, err)
	}
}

func execCommand(ctx context.Context, env []string, script string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "bash", "-euc", script)
	cmd.Dir, cmd.Env = "../..", env
	return cmd
}
