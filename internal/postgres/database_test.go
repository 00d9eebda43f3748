package postgres

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestDatabasesAreSeparateAndDropped(t *testing.T) {
	s := start(t)
	template, _, err := s.NewDatabase(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	query(t, template, "CREATE TABLE copied (x) AS SELECT 'yes'::text", "SELECT 'ok'")
	var urls []string
	var drops []func() error
	for i := range 2 {
		url, drop, err := s.NewDatabase(t.Context(), template)
		if err != nil {
			t.Fatal(err)
		}
		urls, drops = append(urls, url), append(drops, drop)
		query(t, url, fmt.Sprintf("CREATE TABLE t (x) AS SELECT %d", i), "SELECT 'ok'")
	}
	for i, url := range urls {
		if got := query(t, url, "SELECT t.x || copied.x FROM t, copied"); got != fmt.Sprint(i, "yes") {
			t.Errorf("database %d holds %s", i, got)
		}
	}
	for range 2 { // the second time there is nothing to do
		if err := drops[0](); err != nil {
			t.Fatal(err)
		}
	}
	if got := query(t, urls[1], "SELECT x || (SELECT count(*) FROM pg_database WHERE datname LIKE 'txlimit%')::text FROM t"); got != "12" {
		t.Errorf("after drop, there is %s", got)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := drops[1](); err != nil {
		t.Errorf("drop after Close: %v", err)
	}
}

func TestTheDatabaseOfAnyConnectionString(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	s := start(t)
	config, err := pgx.ParseConfig(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	base := fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres", config.Port)
	pairs := fmt.Sprintf("host=127.0.0.1 port=%d user=postgres dbname='postgres'", config.Port)
	for _, row := range []struct{ conn, timeout, app string }{
		{base, "0", ""},
		{strings.TrimSuffix(base, "/postgres") + "?dbname=postgres", "0", ""},
		{base + "?application_name=a%2Bb%20c%26d", "0", "a+b c&d"},
		{base + "?options=-c%20statement_timeout%3D7s", "7s", ""},
		{strings.Replace(base, "postgres:", "postgresql:", 1), "0", ""},
		{pairs, "0", ""},
		{pairs + " options='-c statement_timeout=7s -c application_name=a\\\\\\ b'", "7s", "a b"},
	} {
		url, err := withDatabase(row.conn, "template1")
		if err != nil {
			t.Errorf("%s: %v", row.conn, err)
			continue
		}
		got := query(t, url, "SELECT concat_ws('|', current_database(), current_setting('statement_timeout'), current_setting('application_name'))")
		if want := "template1|" + row.timeout + "|" + row.app; got != want {
			t.Errorf("%s: has %s, want %s", url, got, want)
		}
	}
}
