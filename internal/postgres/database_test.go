package postgres

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestSchemasAreSeparateAndDropped(t *testing.T) {
	s := start(t)
	var urls []string
	var drops []func() error
	for i := range 2 {
		url, drop, err := s.NewSchema(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		urls, drops = append(urls, url), append(drops, drop)
		query(t, url, fmt.Sprintf("CREATE TABLE t (x) AS SELECT %d", i), "SELECT 'ok'")
	}
	for i, url := range urls {
		if got := query(t, url, "SELECT x::text FROM t"); got != fmt.Sprint(i) {
			t.Errorf("schema %d holds %s", i, got)
		}
		if got := query(t, url, "SHOW search_path"); got != query(t, url, "SELECT current_schema::text") {
			t.Errorf("search_path is %s, not one schema", got)
		}
	}
	for range 2 { // the second time there is nothing to do
		if err := drops[0](); err != nil {
			t.Fatal(err)
		}
	}
	if got := query(t, urls[0], "SELECT coalesce(to_regclass('t')::text, 'none')"); got != "none" {
		t.Errorf("after drop there is %s", got)
	}
	if got := query(t, urls[1], "SELECT x::text FROM t"); got != "1" {
		t.Errorf("dropping one schema left %s in the other", got)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := drops[1](); err != nil {
		t.Errorf("drop after Close: %v", err)
	}
}

func TestSearchPathIsAddedToAnyConnectionString(t *testing.T) {
	t.Setenv(envLadder, "binaries")
	config, err := pgx.ParseConfig(start(t).URL())
	if err != nil {
		t.Fatal(err)
	}
	base := fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres", config.Port)
	pairs := fmt.Sprintf("host=127.0.0.1 port=%d user=postgres dbname='postgres'", config.Port)
	for _, row := range []struct{ conn, timeout, app string }{
		{base, "0", ""},
		{base + "?sslmode=disable", "0", ""},
		{base + "?application_name=a%2Bb%20c%26d", "0", "a+b c&d"},
		{base + "?options=-c%20statement_timeout%3D7s", "7s", ""},
		{base + "?search_path=public&application_name=x", "0", "x"},
		{base + "?options=-csearch_path%3Dpublic", "0", ""},
		{strings.Replace(base, "postgres:", "postgresql:", 1), "0", ""},
		{pairs, "0", ""},
		{pairs + " application_name = 'it\\'s'", "0", "it's"},
		{pairs + " options='-c statement_timeout=7s -c application_name=a\\\\\\ b'", "7s", "a b"},
		{pairs + " search_path=public", "0", ""},
	} {
		url, err := withSearchPath(row.conn, "mine")
		if err != nil {
			t.Errorf("%s: %v", row.conn, err)
			continue
		}
		got := query(t, url, `SELECT concat_ws('|', current_setting('search_path'),
			current_setting('statement_timeout'), current_setting('application_name'))`)
		if want := "mine|" + row.timeout + "|" + row.app; got != want {
			t.Errorf("%s: has %s, want %s", url, got, want)
		}
	}
}
