package console_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// Each write of the page is logged: what, on which key, by whom, as whom. Not parallel: the log is every test's.
func TestTheConsoleLogsItsWrites(t *testing.T) {
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1000 hours"}]`)
	session := harness.Scan[string](t, pool, "SELECT SESSION_USER")
	p := harness.NewConsole(t, pool, "ann")
	var logged bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewJSONHandler(&logged, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	const hostile = "a\u009b31m\u202e\x7f"
	for _, tt := range []struct {
		page, key string
		status    int
		form      url.Values
		want      map[string]any // nil: nothing is logged
	}{
		{"key", "acme", 200, url.Values{"action": {"block"}, "end": {"1h"}, "reason": {"r"}}, map[string]any{"action": "block", "done": "block"}},
		{"key", "acme", 200, url.Values{"action": {"unlimited"}, "end": {"1h"}, "reason": {"r"}}, map[string]any{"action": "unlimited", "done": "beside"}},
		{"key", "acme", 200, url.Values{"action": {"restore"}}, map[string]any{"action": "restore", "done": "restore"}},
		{"key", "acme", 200, url.Values{"action": {"reset"}}, map[string]any{"action": "reset", "done": "reset"}},
		{"key", hostile, 200, url.Values{"action": {"reset"}}, map[string]any{"action": "reset", "done": "reset", "key": `a\u009b31m\u202e\u007f`}},
		{"limit", "", 200, url.Values{"action": {"block"}, "end": {"1h"}, "reason": {"r"}, "sure": {"1"}}, map[string]any{"action": "block", "every_key": true, "done": "block"}},
		{"key", "acme", 400, url.Values{"action": {"add"}, "id": {"4711"}}, map[string]any{"action": "add", "error": "That is not possible: There is no such override."}},
		{"key", "acme", 400, url.Values{"action": {"numbers"}, "rate": {"x"}, "end": {"1h"}, "reason": {"r"}}, nil},
		{"key", "acme", 200, nil, nil},
	} {
		logged.Reset()
		path := tt.page + "?" + url.Values{"name": {"signUps"}, "key": {tt.key}}.Encode()
		if tt.form == nil {
			p.Get(tt.status, path)
		} else {
			p.Post(tt.status, path, tt.form)
		}
		if tt.want == nil {
			if logged.Len() > 0 {
				t.Errorf("%v: %s", tt.form, logged.String())
			}
			continue
		}
		want := map[string]any{"limit": "signUps", "key": tt.key, "every_key": false, "who": "ann", "session_user": session, "level": "INFO", "msg": "txlimit console: write"}
		maps.Copy(want, tt.want)
		got := map[string]any{}
		if err := json.Unmarshal(logged.Bytes(), &got); err != nil {
			t.Fatalf("%v: %v: %s", tt.form, err, logged.String())
		}
		if remote, _ := got["remote"].(string); !strings.HasPrefix(remote, "127.0.0.1:") {
			t.Errorf("%v: from %q", tt.form, remote)
		}
		delete(got, "remote")
		delete(got, "time")
		if !maps.Equal(got, want) {
			t.Errorf("%v: logged\n%v, want\n%v", tt.form, got, want)
		}
		if strings.ContainsAny(logged.String(), "\u009b\u202e\x7f") {
			t.Errorf("%q", logged.String())
		}
	}
}

// Texts that the columns do not take are refused before they are sent, and what is made under a block is shown as what it is.
func TestTheConsoleBoundsTextsAndKeepsBlocks(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1000 hours"}]`)
	session := harness.Scan[string](t, pool, "SELECT SESSION_USER")
	p := harness.NewConsole(t, pool, "ann")
	const acme = "key?name=signUps&key=acme"
	long := strings.Repeat("é", 2048)
	for action, more := range map[string]url.Values{"block": {}, "unlimited": {}, "numbers": {"rate": {"20"}}} {
		form := url.Values{"action": {action}, "end": {"1h"}, "reason": {long + "x"}}
		maps.Copy(form, more)
		p.Post(http.StatusBadRequest, acme, form, "Nothing was changed. The reason has 4097 bytes, more than 4096.")
		harness.NewConsole(t, pool, strings.Repeat("é", 128)).Post(http.StatusBadRequest, acme, form, "Your name, by which the page knows you, is not valid UTF-8 of at most 255 bytes")
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.overrides"); n != 0 {
		t.Errorf("%d overrides", n)
	}
	p.Post(http.StatusOK, acme, url.Values{"action": {"block"}, "end": {"1h"}, "reason": {long}}, "Blocked. Every program")
	for i, form := range []url.Values{
		{"action": {"unlimited"}, "end": {"2h"}, "reason": {"under it"}}, {"action": {"numbers"}, "end": {"2h"}, "reason": {"under it"}, "rate": {"20"}},
	} {
		p.Post(http.StatusOK, acme, form, "But a block is in force", "Balance Blocked", fmt.Sprintf("annas %s, ", session), "by ann (as "+session+")")
		if harness.Takes(t, pool, "signUps", "acme", 1) {
			t.Errorf("form %d lifts the block", i)
		}
	}
	p.Post(http.StatusOK, acme, url.Values{"action": {"restore"}, "effect": {"block"}}, "Restored", "of 20 tokens")
	// Every key: the list of limits says so.
	every := url.Values{"end": {"1h"}, "reason": {"r"}, "sure": {"1"}}
	for _, action := range []string{"block", "unlimited"} {
		every.Set("action", action)
		p.Post(http.StatusOK, "limit?name=signUps", every)
	}
	p.Get(http.StatusOK, "", "blocked4 overrides")
}
