package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// TestTheDocs plays the sessions of docs/tool.md: the blocks marked console, one after the other. Times, durations and process ids may
// differ. With -update, what the commands print is written anew.
func TestTheDocs(t *testing.T) {
	const file = "../../docs/tool.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	midnight := ratelimit.Start(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	w := newPublished(t,
		ratelimit.FixedWindow("signUps", 100, 24*time.Hour, midnight),
		ratelimit.FixedWindow("sendMessage", 50, 24*time.Hour, midnight),
		ratelimit.TokenBucket("logins", 5, time.Hour),
		ratelimit.CalendarWindow("apiCalls", 1000, "month", ratelimit.Varies(32*24*time.Hour)),
	)
	if time.Now().UTC().Truncate(24*time.Hour) != time.Now().UTC().Add(2*time.Minute).Truncate(24*time.Hour) {
		time.Sleep(2 * time.Minute) // the windows must not end meanwhile
	}
	w.sql("SELECT ratelimit.consume('signUps', global => true, count => 100)")
	w.sql("SELECT ratelimit.consume('sendMessage', k, count => n) FROM (VALUES ('acme', 50), ('mallory', 50), ('bob', 49.25), ('carol', 3)) AS v (k, n)")
	w.sql("SELECT ratelimit.consume('apiCalls', 'acme', rate => 5000, period => '1 month', kind => 'calendar window', anchor => '2026-01-20', count => 5000)")
	w.sql(`INSERT INTO ratelimit.usage VALUES ('signUps', date_trunc('minute', now()), 100, 4711, 0, 100, 0, 0), ('sendMessage', date_trunc('minute', now()), 152, 95, 0, 152, 0, 0),
		('logins', date_trunc('minute', now()), 38, 2, 0, 38, 0, 0)`)
	w.sql(`INSERT INTO ratelimit.denials SELECT 'sendMessage', date_trunc('hour', now(), 'UTC'), 'acme', 31, 31, now()`)
	w.hang()

	var b strings.Builder
	inSession := false
	for line := range strings.Lines(string(text)) {
		switch {
		case strings.HasPrefix(line, "```"):
			inSession = line == "```console\n"
			b.WriteString(line)
		case !inSession:
			b.WriteString(line)
		case strings.HasPrefix(line, "$ "):
			words := w.words(strings.TrimSpace(line[2:]))
			b.WriteString(line + w.terminal(words[1:]))
		}
	}
	got := b.String()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want, got := likeDocs(string(text)), likeDocs(got); got != want {
		t.Errorf("%s differs (go test -run TheDocs -update writes it anew):\n%s", file, diff(want, got))
	}
}

// terminal is what a command prints on a terminal.
func (w *world) terminal(args []string) string {
	var out bytes.Buffer
	a := &app{
		stdin: strings.NewReader(""), stdout: &out, stderr: &out, terminal: true,
		getenv: func(string) string { return w.url }, who: "ann", patience: 10 * time.Second,
	}
	a.run(w.t.Context(), args)
	return out.String()
}

// hang makes two sessions wait for a third.
func (w *world) hang() {
	const consume = "SELECT ratelimit.consume('logins', 'dave')"
	w.sql(consume)
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	for i, sql := range []string{"BEGIN; " + consume + "; SELECT 'something slow'", consume, consume} {
		conn, sql := w.connect(), w.in(sql)
		if _, err := conn.Exec(w.t.Context(), "SET application_name = web"); err != nil {
			w.t.Fatal(err)
		}
		if i == 0 {
			if _, err := conn.Exec(w.t.Context(), sql); err != nil {
				w.t.Fatal(err)
			}
			continue
		}
		go func() {
			_, _ = conn.Exec(ctx, sql) // is cancelled
			ended <- struct{}{}
		}()
		for waits := 0; waits == 0; time.Sleep(5 * time.Millisecond) { // one comes after the other
			err := w.conn.QueryRow(w.t.Context(), "SELECT cardinality(pg_blocking_pids($1))", int32(conn.PgConn().PID())).Scan(&waits)
			if err != nil {
				w.t.Fatal(err)
			}
		}
	}
	w.t.Cleanup(func() {
		cancel()
		<-ended
		<-ended
	})
}

// likeDocs makes alike what differs between the docs and a run of them.
func likeDocs(text string) string {
	for _, a := range []struct{ pattern, with string }{
		{`\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?Z`, "<time>"},
		{`\(as [^()]+\)`, "(as <role>)"},
		{`\b(\d+(\.\d+)?(ms|s)|\d+m\d\ds|\d+h\d\dm|\d+d\d\dh)\b`, "<span>"},
	} {
		text = regexp.MustCompile(a.pattern).ReplaceAllString(text, a.with)
	}
	pids := map[string]string{}
	inLocks := false
	var b strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "$ ") {
			inLocks = line == "$ txlimit locks\n"
		}
		if inLocks {
			line = regexp.MustCompile(` \S+ +web +\S+ `).ReplaceAllString(line, " <user> web <client> ")
			line = regexp.MustCompile(`\b\d{2,}\b`).ReplaceAllStringFunc(line, func(pid string) string {
				if pids[pid] == "" {
					pids[pid] = fmt.Sprintf("<pid %d>", len(pids)+1)
				}
				return pids[pid]
			})
		}
		b.WriteString(regexp.MustCompile(` {2,}`).ReplaceAllString(line, "  "))
	}
	return b.String()
}
