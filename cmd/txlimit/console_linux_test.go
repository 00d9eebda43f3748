package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// page is a console that runs in a process of its own.
type page struct {
	t      *testing.T
	cmd    *exec.Cmd
	url    string
	who    string
	errOut bytes.Buffer
}

// console starts a console on a free port.
func (w *world) console(args ...string) *page {
	w.t.Helper()
	p := &page{t: w.t}
	p.cmd = w.program([]string{"DATABASE_URL=" + w.url}, append([]string{"console", "--schema", w.schema, "--listen", "127.0.0.1:0", "--json"}, args...)...)
	p.cmd.Stderr = &p.errOut
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = p.cmd.Process.Kill() }) // of a test that has failed
	var v served
	if err := json.NewDecoder(bufio.NewReader(out)).Decode(&v); err != nil {
		_ = p.cmd.Wait()
		w.t.Fatalf("%v: %s", err, &p.errOut)
	}
	p.url, p.who = v.URL, v.Who
	return p
}

// ask sends a request, with this Host if it is not empty. It follows no redirect.
func (p *page) ask(host, path string, form url.Values) (status int, body string) {
	p.t.Helper()
	method, content := http.MethodGet, ""
	if form != nil {
		method, content = http.MethodPost, form.Encode()
	}
	r, err := http.NewRequestWithContext(p.t.Context(), method, p.url+path, strings.NewReader(content))
	if err != nil {
		p.t.Fatal(err)
	}
	r.Host = host
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	answer, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		p.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

// end interrupts the program, and wants it to end well.
func (p *page) end() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		p.t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil || p.errOut.Len() > 0 {
		p.t.Errorf("after Ctrl-C: %v: %s", err, &p.errOut)
	}
}

var block = url.Values{"action": {"block"}, "end": {"1h"}, "reason": {"spam"}}

func TestTheConsoleReads(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("signUps", 5, time.Hour))
	w.sql("SELECT ratelimit('signUps', 'acme', count => 5)")
	p := w.console()
	if p.who != "" {
		t.Errorf("it changes limits as %q", p.who)
	}
	_, port, err := net.SplitHostPort(strings.TrimSuffix(strings.TrimPrefix(p.url, "http://"), "/"))
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"", "localhost:" + port, "LocalHost:" + port, "127.0.0.1:" + port, "[::1]:" + port} {
		if status, body := p.ask(host, "", nil); status != http.StatusOK || !strings.Contains(body, "signUps") {
			t.Errorf("asked for %q: %d %s", host, status, body)
		}
	}
	for _, host := range []string{"attacker.example", "attacker.example:" + port, "localhost", "localhost:1", "127.0.0.1", "127.0.0.1.nip.io:" + port, "localhost.:" + port, "0.0.0.0:" + port, "[::]:" + port} {
		for _, path := range []string{"", "key?name=signUps&key=acme", "assets/console.js", "usage.json?name=signUps"} {
			if status, body := p.ask(host, path, nil); status != http.StatusMisdirectedRequest || strings.Contains(body, "signUps") {
				t.Errorf("asked for %q: %d %s", host, status, body)
			}
		}
	}
	if status, body := p.ask("", "key?name=signUps&key=acme", nil); status != http.StatusOK || !strings.Contains(body, "Denied now") {
		t.Errorf("the page of a key: %d %s", status, body)
	}
	if status, body := p.ask("", "key?name=signUps&key=acme", block); status != http.StatusForbidden || !strings.Contains(body, "Read-only") {
		t.Errorf("a write: %d %s", status, body)
	}
	w.run("overrides", "--all").wants(t, exitNothing)
	p.end()
}

func TestTheConsoleWrites(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("signUps", 5, time.Hour))
	w.sql("SELECT ratelimit('signUps', 'acme', count => 5)")
	p := w.console("--write", "--who", "bea", "--allow-host", "Limits.example.com", "--allow-host", "localhost:9000")
	if p.who != "bea" {
		t.Errorf("it changes limits as %q", p.who)
	}
	const key = "key?name=signUps&key=acme"
	if status, _ := p.ask("attacker.example", key, block); status != http.StatusMisdirectedRequest {
		t.Errorf("a write for another host: %d", status)
	}
	w.run("overrides", "--all").wants(t, exitNothing)
	for _, host := range []string{"limits.example.com", "localhost:9000"} {
		if status, _ := p.ask(host, key, nil); status != http.StatusOK {
			t.Errorf("asked for %q: %d", host, status)
		}
	}
	if status, body := p.ask("", key, block); status != http.StatusSeeOther {
		t.Fatalf("a block: %d %s", status, body)
	}
	w.run("show", "signUps", "acme").wants(t, exitOK, "block, for this key, by bea", "reason: spam")
	w.run("unblock", "signUps", "acme").wants(t, exitOK)

	// Ctrl-C waits for what is under way.
	type answer struct {
		status int
		body   string
	}
	answered := make(chan answer)
	go func() {
		status, body := p.ask("", key, url.Values{"action": {"numbers"}, "rate": {"12"}, "end": {"1h"}, "reason": {"a launch"}, "add": {"1"}})
		answered <- answer{status, body}
	}()
	for n := 0; n == 0; time.Sleep(10 * time.Millisecond) {
		if err := w.conn.QueryRow(t.Context(), "SELECT count(*) FROM rate_limit_overrides WHERE effect = 'numbers'").Scan(&n); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if got := <-answered; got.status != http.StatusSeeOther {
		t.Errorf("an override while it ends: %d %s", got.status, got.body)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("after Ctrl-C: %v: %s", err, &p.errOut)
	}
	w.run("show", "signUps", "acme").wants(t, exitOK, "balance +7", "rate 12, added 7 .* bea .* a launch")
}

func TestConsolesThatCannotBe(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("signUps", 5, time.Hour))
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--listen", "0.0.0.0:0"}, exitUsage, "can be reached from other machines, and the page has no login"},
		{[]string{"--listen", ":0", "--write"}, exitUsage, "can be reached from other machines"},
		{[]string{"--listen", "[::]:0"}, exitUsage, "can be reached from other machines"},
		{[]string{"--listen", "db.example.com:0"}, exitUsage, "can be reached from other machines"},
		{[]string{"--listen", "127.0.0.1"}, exitUsage, "is not an address with a port, such as 127.0.0.1:8484"},
		{[]string{"--allow-host", "http://limits.example.com"}, exitUsage, "is not a host, such as limits.example.com"},
		{[]string{"--allow-host", "*"}, exitUsage, "is not a host"},
		{[]string{"signUps"}, exitUsage, "takes no arguments"},
		{[]string{"--listen", taken.Addr().String()}, exitError, "address already in use: choose another address with --listen"},
	} {
		w.run(append([]string{"console"}, test.args...)...).wants(t, test.code, test.want)
	}
	w.sql("CREATE ROLE " + w.schema + "_role; GRANT USAGE ON SCHEMA " + w.schema + " TO " + w.schema + "_role")
	w.as(w.schema+"_role", "console", "--listen", "127.0.0.1:0").wants(t, exitError, "GRANT SELECT ON rate_limit_usage TO")
	w.sql("DROP OWNED BY " + w.schema + "_role; DROP ROLE " + w.schema + "_role")
	w.sql("DROP TABLE rate_limit_usage, rate_limit_denials CASCADE")
	w.run("console", "--listen", "127.0.0.1:0").wants(t, exitError, "The schema is older than this program: run `txlimit migrate`")
}
