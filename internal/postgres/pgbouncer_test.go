package postgres

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestThroughPgBouncerSchemasAreSeparateAndNothingIsLeft(t *testing.T) {
	if _, _, err := findPgBouncer(); err != nil {
		t.Skip(err)
	}
	t.Setenv(envLadder, "binaries")
	t.Setenv(envPgBouncer, "exec")
	tmp := t.TempDir()
	if os.Geteuid() != 0 { // as root, the servers run as another user, which cannot write there
		t.Setenv("TMPDIR", tmp)
	}
	s := start(t)
	if !s.Pooled() || !strings.Contains(s.String(), "PgBouncer") {
		t.Errorf("%v is not used through PgBouncer", s)
	}
	var urls []string
	for range 2 {
		url, _, err := s.NewDatabase(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		urls = append(urls, url)
		query(t, url, "CREATE TABLE t (x int)", "SELECT 'ok'")
		config, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		if config.DefaultQueryExecMode != pgx.QueryExecModeExec {
			t.Errorf("the query mode is %s", config.DefaultQueryExecMode)
		}
	}
	user, err := s.NewUser(t.Context(), map[string]string{"DateStyle": "SQL, DMY", "lock_timeout": "7s"})
	if err != nil {
		t.Fatal(err)
	}
	other, err := withUser(urls[1], user)
	if err != nil {
		t.Fatal(err)
	}
	got := query(t, other, "SELECT concat_ws('|', current_setting('DateStyle'), current_setting('lock_timeout')) FROM t RIGHT JOIN (SELECT) AS one ON true")
	if want := "SQL, DMY|7s"; got != want {
		t.Errorf("sessions start with %s, want %s", got, want)
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if serves(s.url) || serves(s.direct) {
		t.Error("a server is left behind")
	}
	if left, err := filepath.Glob(filepath.Join(tmp, "txlimit-*")); err != nil || len(left) > 0 {
		t.Errorf("%v are left behind, %v", left, err)
	}
}

func TestPgBouncerThatCannotBe(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	t.Setenv(envPgBouncer, "sometimes")
	if s, err := Start(t.Context()); err == nil || !strings.Contains(err.Error(), `"sometimes"`) {
		t.Errorf("%v, %v", s, err)
	}

	t.Setenv(envPgBouncer, "")
	other := start(t)
	t.Setenv(envPgBouncer, "exec")
	t.Setenv(envLadder, "url")
	t.Setenv(envURL, other.URL())
	if s, err := Start(t.Context()); err == nil || !strings.Contains(err.Error(), "throwaway") {
		t.Errorf("%v, %v", s, err)
	}
}

func TestVersions(t *testing.T) {
	for _, row := range []struct {
		version string
		before  bool
	}{{"1.18.0", true}, {"1.20.1", true}, {"1.21.0", false}, {"1.24", false}, {"2.0.0", false}} {
		if got := before(row.version, 1, 21); got != row.before {
			t.Errorf("before(%s, 1, 21) = %v", row.version, got)
		}
	}
}
