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
	url    string // without the token
	door   string // with it
	cookie *http.Cookie
	who    string
	errOut bytes.Buffer
}

// console starts a console on a free port.
func (w *world) console(args ...string) *page {
	w.t.Helper()
	p := &page{t: w.t}
	p.cmd = w.program([]string{"DATABASE_URL=" + w.url}, w.args(append([]string{"console", "--listen", "127.0.0.1:0", "--json"}, args...))...)
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
	p.door, p.who = v.URL, v.Who
	p.url, _, _ = strings.Cut(p.door, "?")
	return p
}

// enter opens the address with the token, as a browser does.
func (p *page) enter() *page {
	p.t.Helper()
	_, token, _ := strings.Cut(p.door, "?")
	answer, body := p.answer(http.MethodGet, "", "?"+token, nil)
	cookies := answer.Cookies()
	if answer.StatusCode != http.StatusOK || len(cookies) != 1 || !strings.Contains(body, `http-equiv="refresh"`) {
		p.t.Fatalf("%s: %s, %v", p.door, answer.Status, cookies)
	}
	p.cookie = cookies[0]
	return p
}

// ask sends a request, with this Host if it is not empty. It follows no redirect.
func (p *page) ask(host, path string, form url.Values) (status int, body string) {
	p.t.Helper()
	method := http.MethodGet
	if form != nil {
		method = http.MethodPost
	}
	answer, body := p.answer(method, host, path, form)
	return answer.StatusCode, body
}

func (p *page) answer(method, host, path string, form url.Values, headers ...string) (answer *http.Response, body string) {
	p.t.Helper()
	content := form.Encode()
	r, err := http.NewRequestWithContext(p.t.Context(), method, p.url+path, strings.NewReader(content))
	if err != nil {
		p.t.Fatal(err)
	}
	r.Host = host
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	if p.cookie != nil {
		r.AddCookie(p.cookie)
	}
	answer, err = http.DefaultTransport.RoundTrip(r)
	if err != nil {
		p.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return answer, string(text)
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
	w.sql("SELECT ratelimit.consume('signUps', 'acme', count => 5)")
	p := w.console().enter()
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
	w.sql("SELECT ratelimit.consume('signUps', 'acme', count => 5)")
	p := w.console("--write", "--who", "bea", "--allow-host", "Limits.example.com", "--allow-host", "localhost:9000").enter()
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
		if err := w.conn.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.overrides WHERE effect = 'numbers'").Scan(&n); err != nil {
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
		{[]string{"--no-token"}, exitUsage, "for a proxy with a login .* pass --allow-host"},
		{[]string{"signUps"}, exitUsage, "takes no arguments"},
		{[]string{"--listen", taken.Addr().String()}, exitError, "address already in use: choose another address with --listen"},
	} {
		w.run(append([]string{"console"}, test.args...)...).wants(t, test.code, test.want)
	}
	role := w.newRole()
	w.sql("GRANT USAGE ON SCHEMA ratelimit TO " + role)
	for flag, work := range map[string]string{"--write": "operate", "--json": "look"} {
		w.as(role, "console", "--listen", "127.0.0.1:0", flag).wants(t, exitError, "SELECT ratelimit.grant\\('"+role+"', '"+work+"'\\)\n")
	}
	w.sql("DROP TABLE ratelimit.usage, ratelimit.denials CASCADE")
	w.run("console", "--listen", "127.0.0.1:0").wants(t, exitError, "The schema is older than this program: run `txlimit migrate`")
}

// Another user of the machine, another program and a page of the web know the port, and not the token.
func TestTheConsoleLetsInWhoHasTheToken(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("signUps", 5, time.Hour))
	p := w.console("--write")
	_, token, found := strings.Cut(p.door, "?token=")
	if !found || len(token) < 26 {
		t.Fatalf("the address is %s", p.door)
	}
	refused := func(what string) {
		t.Helper()
		for _, path := range []string{"", "limit?name=signUps", "key?name=signUps&key=acme", "usage.json?name=signUps", "assets/console.js", "?token=", "?token=" + token[1:], "?token=" + strings.ToLower(token)} {
			if status, body := p.ask("", path, nil); status != http.StatusUnauthorized || strings.Contains(body, "signUps") {
				t.Errorf("%s: %q: %d %s", what, path, status, body)
			}
		}
		if status, _ := p.ask("", "key?name=signUps&key=acme", block); status != http.StatusUnauthorized {
			t.Errorf("%s: a write: %d", what, status)
		}
	}
	refused("without a cookie")
	for _, value := range []string{"", "x", token} {
		_, port, _ := net.SplitHostPort(strings.Trim(strings.TrimPrefix(p.url, "http://"), "/"))
		p.cookie = &http.Cookie{Name: "txlimit-" + port, Value: value}
		refused("with the cookie " + value)
	}
	p.cookie = nil
	// What looks ahead, and another path or method, use nothing up.
	for _, test := range [][]string{{http.MethodHead, "?token=" + token}, {http.MethodPost, "?token=" + token}, {http.MethodGet, "limit?token=" + token}, {http.MethodGet, "?token=" + token, "Sec-Purpose", "prefetch"}} {
		if answer, _ := p.answer(test[0], "", test[1], nil, test[2:]...); answer.StatusCode != http.StatusUnauthorized || len(answer.Cookies()) > 0 {
			t.Errorf("%q: %s", test, answer.Status)
		}
	}
	if status, _ := p.ask("attacker.example", "?token="+token, nil); status != http.StatusMisdirectedRequest {
		t.Errorf("by another host: %d", status)
	}
	p.enter()
	if c := p.cookie; !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != "/" || c.Domain != "" || c.MaxAge != 0 || strings.Contains(c.Value, token) {
		t.Errorf("the cookie is %v", c)
	}
	if status, body := p.ask("", "", nil); status != http.StatusOK || !strings.Contains(body, "signUps") || strings.Contains(body, p.cookie.Value) {
		t.Errorf("with the cookie: %d", status)
	}
	if status, _ := p.ask("", "?token="+token, nil); status != http.StatusOK {
		t.Errorf("the address again, with the cookie: %d", status)
	}
	mine := p.cookie
	p.cookie = nil
	if answer, _ := p.answer(http.MethodGet, "", "?token="+token, nil); answer.StatusCode != http.StatusUnauthorized || len(answer.Cookies()) > 0 {
		t.Errorf("the token again: %s", answer.Status)
	}
	// The cookie helps no other site.
	p.cookie = mine
	if answer, _ := p.answer(http.MethodGet, "", "usage.json?name=signUps", nil, "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Dest", "image"); answer.StatusCode != http.StatusForbidden {
		t.Errorf("from another site: %s", answer.Status)
	}
	p.end()

	open := w.console("--allow-host", "limits.example.com", "--no-token")
	if status, _ := open.ask("limits.example.com", "", nil); status != http.StatusOK || strings.Contains(open.door, "token") {
		t.Errorf("%s without a token: %d", open.door, status)
	}
	open.end()
}

func TestEnterPrintsAnotherAddress(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("signUps", 5, time.Hour))
	master, terminal := newTerminal(t)
	cmd := w.program([]string{"DATABASE_URL=" + w.url}, "console", "--listen", "127.0.0.1:0")
	errOut, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = terminal
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	first, err := bufio.NewReader(out).ReadString(' ')
	if err != nil {
		t.Fatal(err)
	}
	if _, err := master.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(errOut)
	second, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	p := &page{t: t, door: strings.TrimSpace(second)}
	p.url, _, _ = strings.Cut(p.door, "?")
	if old := strings.TrimSpace(first); !strings.HasPrefix(old, p.url+"?token=") || old == p.door {
		t.Fatalf("%q, then %q", first, second)
	} else if status, _ := p.ask("", strings.TrimPrefix(old, p.url), nil); status != http.StatusUnauthorized {
		t.Errorf("the address before: %d", status)
	}
	p.enter()
	// A browser that is in already uses a token up, too.
	if _, err := master.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	third, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	path := strings.TrimPrefix(strings.TrimSpace(third), p.url)
	if status, _ := p.ask("", path, nil); status != http.StatusOK {
		t.Errorf("%s with the cookie: %d", path, status)
	}
	p.cookie = nil
	if answer, _ := p.answer(http.MethodGet, "", path, nil); answer.StatusCode != http.StatusUnauthorized || len(answer.Cookies()) > 0 {
		t.Errorf("%s again, without the cookie: %s", path, answer.Status)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
