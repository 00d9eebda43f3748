package browser_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// The operator's night: they see which limit denies, find the key, raise it with a reason and an end, block it, and let it go on.
func TestAnOperatorFindsAKeyAndSteersIt(t *testing.T) {
	t.Parallel()
	pool := newWorld(t)
	p := open(t, pool, "ann", desktop)

	var denials int
	if err := pool.QueryRow(t.Context(), "SELECT sum(denied) FROM ratelimit.usage WHERE name = 'signUps'").Scan(&denials); err != nil || denials < 1000 || denials > 9999 {
		t.Fatal(denials, err)
	}
	p.see("")
	p.reads("tbody tr:first-child", "signUps", "100 per hour", fmt.Sprintf("%d,%03d", denials/1000, denials%1000))
	if bars := value[string](p, `document.querySelector("tbody tr:first-child .spark .denied").getAttribute("d")`); strings.Count(bars, "M") < 9 {
		t.Errorf("the small chart does not show 48 minutes of denials: %q", bars)
	}
	p.do(chromedp.SendKeys(chromedp.CSS("#q"), "sign"), chromedp.SendKeys(chromedp.CSS("#q"), kb.Enter))
	p.reads("table", "signUps")
	p.within(30*time.Second, "only what was searched for", func() bool { return value[int](p, `document.querySelectorAll("tbody tr").length`) == 1 })
	p.follow("signUps")

	p.reads("h1", "signUps")
	if p.drawn("#chart", "--accent") < 1000 || p.drawn("#chart", "--granted") < 100 {
		t.Errorf("the chart has %d pixels of denials and %d of grants", p.drawn("#chart", "--accent"), p.drawn("#chart", "--granted"))
	}
	p.reads("#denied tbody tr:nth-child(1)", "acme", "928")
	p.do(chromedp.SendKeys(chromedp.CSS("#q"), "203.0.113.9"), chromedp.SendKeys(chromedp.CSS("#q"), kb.Enter))
	p.reads("main", "Used, beginning with “203.0.113.9”", "203.0.113.91")
	p.follow("Clear")
	p.reads("#denied", "acme")
	drain(t, pool, signUps, "acme", 0) // on a loaded machine, half a minute may have refilled a token
	p.follow("acme")

	p.reads("#balance", "of 100 tokens", "Denied now")
	if p.drawn("#curve", "--ink") < 200 {
		t.Errorf("the curve of the balance has %d pixels", p.drawn("#curve", "--ink"))
	}
	p.unfold("Other numbers")
	p.fill("rate", "500")
	p.fill("end", "20m")
	p.fill("reason", "their conference, ticket 4711")
	p.do(chromedp.Click(chromedp.CSS(`details[open] input[name="add"]`)))
	p.picture("key-override-form")
	drain(t, pool, signUps, "acme", 0)
	p.press("Override")
	p.reads("main", "Overridden, and the difference of the capacities is added", "their conference, ticket 4711")
	p.reads("#balance", "of 500 tokens")
	p.picture("key-override")
	p.reads("#history tbody tr:first-child", "rate 500", "400 added", "ann", "in force")
	var seconds, added, left float64
	err := pool.QueryRow(t.Context(), `SELECT extract(epoch FROM o.until - o.made_at), o.added, (SELECT value FROM ratelimit.limits AS r WHERE r.name = 'signUps' AND r.key = 'acme')
		FROM ratelimit.overrides AS o WHERE o.name = 'signUps' AND o.key = 'acme' AND o.made_by = 'ann' AND o.reason = 'their conference, ticket 4711'`).Scan(&seconds, &added, &left)
	if err != nil || seconds < 1180 || seconds > 1200.5 || added != 400 || left < 400 || left > 401 {
		t.Errorf("the override ends after %v s, added %v, and left %v: %v", seconds, added, left, err)
	}

	// One that ends by itself, and the page says so by itself.
	p.unfold("Other numbers")
	p.fill("capacity", "900")
	p.fill("end", "6s")
	p.fill("reason", "for a moment")
	p.press("Override")
	p.reads("#history tbody tr:first-child", "capacity 900")
	p.within(30*time.Second, "the override has run out", func() bool {
		return strings.Contains(p.text("#history tbody tr:first-child"), "for a moment ann") && strings.Contains(p.text("#history tbody tr:first-child"), "ran out")
	})
	p.reads("#balance", "of 500 tokens") // under the override before

	p.unfold("Block")
	p.fill("end", "4h")
	p.fill("reason", "abuse after all")
	p.press("Block")
	p.reads("#balance", "Blocked", "4 h left")
	if grants(t, pool, "signUps", "acme") {
		t.Error("a blocked key was granted")
	}
	p.press("End it")
	p.reads("main", "Restored")
	p.reads("#balance", "of 100 tokens")
	p.reads("#history", "ended by ann")

	drain(t, pool, signUps, "acme", 0)
	p.reads("#balance", "Denied now") // the page follows by itself
	p.unfold("Let it go on")
	p.press("Let it go on")
	p.reads("#balance", "100 of 100 tokens")
	if !grants(t, pool, "signUps", "acme") {
		t.Error("the key did not go on")
	}

	p.unfold("No limit")
	p.fill("end", "never")
	p.fill("reason", "a load test")
	p.press("Lift the limit")
	p.reads("#balance", "Unlimited", "for good")

	p.see("limit?name=failedLogins")
	p.unfold("Block")
	p.fill("end", "10m")
	p.fill("reason", "an incident")
	p.do(chromedp.Click(chromedp.CSS(`details[open] input[name="sure"]`)))
	p.press("Block")
	p.reads("#lead", "blocked", "for every key")
	p.reads("#inforce", "every key", "an incident", "mallory@example.org", "password guessing")
	p.picture("limit-blocked")
	p.press("End what is in force for every key")
	p.reads("#lead", "5 per 15 minutes")
	p.quiet()
}

// A denial of a program shows on the chart of an open page.
func TestADenialAppearsOnTheLiveChart(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	recorder := &usage.Recorder{DB: pool, Every: 500 * time.Millisecond}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error)
	go func() { done <- recorder.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
	limit := ratelimit.TokenBucket("signUps", 3, time.Hour)
	execute(t, pool, `SELECT ratelimit.publish('api', '[{"name": "signUps", "kind": "token bucket", "rate": 3, "period": "1 hour"}]')`)
	p := open(t, pool, "ann", desktop)
	p.see("limit?name=signUps")
	for range 3 {
		if _, err := limiter.Consume(t.Context(), pool, limit.Key("acme")); err != nil {
			t.Fatal(err)
		}
	}
	took := p.within(20*time.Second, "three grants on the chart", func() bool { return p.drawn("#chart", "--granted") > 50 })
	t.Logf("grants were drawn after %v", took)
	if n := p.drawn("#chart", "--accent"); n > 0 {
		t.Errorf("%d pixels of denials, before there was one", n)
	}
	if _, err := limiter.Consume(t.Context(), pool, limit.Key("acme")); !denied(err) {
		t.Fatal(err)
	}
	took = p.within(20*time.Second, "the denial on the chart", func() bool { return p.drawn("#chart", "--accent") > 50 })
	t.Logf("the denial was drawn after %v", took)
	p.reads("#sums", "Denied 1 Granted 3")
	p.reads("#denied", "acme 1")

	// The list follows as well, and the page says if it does not.
	p.see("")
	p.reads("#lead", "1 denied and 3 granted")
	if _, err := limiter.Consume(t.Context(), pool, limit.Key("acme")); !denied(err) {
		t.Fatal(err)
	}
	p.reads("#lead", "2 denied and 3 granted")
	p.quiet()
}

func TestAKeyBoardIsEnough(t *testing.T) {
	t.Parallel()
	pool := newWorld(t)
	p := open(t, pool, "ann", desktop)
	p.see("key?name=signUps&key=acme")
	press := func(key string) { p.do(chromedp.KeyEvent(key)) }
	focus := func() string {
		return value[string](p, `(document.activeElement.innerText || document.activeElement.name || document.activeElement.tagName).trim().split("\n")[0]`)
	}
	press(kb.Tab)
	if focus() != "To the content" || value[float64](p, `document.activeElement.getBoundingClientRect().top`) < 0 {
		t.Errorf("the first stop is %q", focus())
	}
	seen := ""
	for range 30 {
		press(kb.Tab)
		if outline := value[string](p, `getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth`); outline != "solid2px" {
			t.Errorf("the focus on %q is not seen: %s", focus(), outline)
		}
		if seen = focus(); seen == "Block" {
			break
		}
	}
	if seen != "Block" {
		t.Fatal("Block cannot be reached")
	}
	press(kb.Enter)
	press(kb.Tab)
	if focus() != "end" {
		t.Fatalf("after Block comes %q", focus())
	}
	p.do(chromedp.KeyEvent("a", chromedp.KeyModifiers(chromedp.ModifierCtrl)), chromedp.KeyEvent("30m"))
	press(kb.Tab)
	p.do(chromedp.KeyEvent("by keyboard"))
	p.picture("key-keyboard")
	value[bool](p, "window.before = true")
	press(kb.Enter)
	p.loaded("Block")
	p.reads("#balance", "Blocked", "30 min left")
	p.reads("#history", "by keyboard")
	p.quiet()
}

// Without JavaScript there are no large charts, and everything else.
func TestItWorksWithoutJavaScript(t *testing.T) {
	t.Parallel()
	pool := newWorld(t)
	p := open(t, pool, "ann", look{width: 1240, height: 900, noScript: true})
	p.see("")
	p.picture("limits-no-javascript")
	p.do(chromedp.Click(chromedp.CSS("tbody tr:first-child a")), chromedp.WaitVisible(chromedp.CSS("noscript p")))
	p.picture("limit-no-javascript")
	p.do(chromedp.Click(chromedp.CSS("#denied tbody tr:first-child a")), chromedp.WaitVisible(chromedp.CSS("#balance")))
	p.do(chromedp.Click(chromedp.Search(`//summary[normalize-space()="Block"]`)), chromedp.WaitVisible(chromedp.CSS("details[open] button")),
		chromedp.SendKeys(chromedp.CSS(`details[open] input[name="reason"]`), "no scripts"), chromedp.Click(chromedp.CSS("details[open] button")),
		chromedp.WaitVisible(chromedp.CSS("#balance .big.hot")), chromedp.WaitVisible(chromedp.CSS(".note.done")))
	p.picture("key-no-javascript")
	if grants(t, pool, "signUps", "acme") {
		t.Error("a blocked key was granted")
	}
}

// What an attacker writes is text, another site's form is refused, and a frame stays empty.
func TestAttacksInABrowser(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	evil := `</title></svg>"><script>window.broken = 1</script><img src=x onerror="window.broken = 2">`
	execute(t, pool, "SELECT ratelimit.publish($1, jsonb_build_array(jsonb_build_object('name', $1::text, 'kind', 'token bucket', 'rate', 10, 'period', '1 hour')))", evil)
	limiter := new(ratelimit.Limiter)
	if _, err := limiter.Consume(t.Context(), pool, ratelimit.TokenBucket(evil, 10, time.Hour).Key(evil)); err != nil {
		t.Fatal(err)
	}
	execute(t, pool, "INSERT INTO ratelimit.denials VALUES ($1, date_trunc('hour', now(), 'UTC'), $1, 1, 1, now())", evil)
	execute(t, pool, "INSERT INTO ratelimit.usage VALUES ($1, date_trunc('minute', now()), 1, 1, 0, 1, 0, 0)", evil)
	execute(t, pool, "SELECT ratelimit.override($1, $1, 20, reason => $1, who => $1, forever => true)", evil)
	p := open(t, pool, evil, desktop)
	q := "?" + url.Values{"name": {evil}, "key": {evil}, "q": {evil}}.Encode()
	for _, path := range []string{"", q, "limit" + q, "key" + q, "limit" + q + "&done=" + url.QueryEscape(evil)} {
		p.see(path)
		p.within(30*time.Second, "the script of the page has run", func() bool { return value[bool](p, `document.readyState === "complete"`) })
		if path != "" && !strings.Contains(p.text("main"), "<script>window.broken") {
			t.Errorf("%s: the name is not there as text: %s", path, p.text("main"))
		}
		if value[bool](p, `window.broken !== undefined || document.querySelector("main img, main script") !== null`) {
			t.Fatalf("%s: markup has become markup", path)
		}
		p.fits()
	}
	p.picture("key-markup")
	// A reader stays on the page while its parts are replaced, too.
	time.Sleep(2500 * time.Millisecond)
	if value[bool](p, `window.broken !== undefined || document.querySelector("main img, main script") !== null`) {
		t.Fatal("markup has become markup when the page followed")
	}
	p.quiet()

	p = open(t, pool, "ann", desktop)
	target := p.url + "key" + q
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `<iframe src="%s" width="600" height="300"></iframe><form method="post" action="%s"><input name="action" value="reset"><button>Win</button></form>`, target, target)
	}))
	defer other.Close()
	p.do(chromedp.Navigate(strings.Replace(other.URL, "127.0.0.1", "localhost", 1)), chromedp.WaitVisible(chromedp.CSS("button")))
	p.within(30*time.Second, "the browser refuses the frame", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return strings.Contains(strings.Join(p.problems, "\n"), "frame-ancestors")
	})
	p.do(chromedp.Click(chromedp.CSS("button")), chromedp.WaitVisible(chromedp.CSS(".error")))
	p.reads("main", "403", "Another site sent this", "Nothing was changed")
	var rows int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.limits").Scan(&rows); err != nil || rows != 1 {
		t.Errorf("%d rows, %v", rows, err)
	}
}

// A key with numbers of its own has a balance when somebody has given them, and keeps it while the page follows.
func TestAnOperatorGivesTheNumbersOfAKey(t *testing.T) {
	t.Parallel()
	pool := newWorld(t)
	p := open(t, pool, "ann", desktop)
	p.see("key?name=crawl&key=acme")
	p.reads("#balance", "Not known", "The numbers of this key are the program's. 0 tokens were left")
	p.do(chromedp.SendKeys(chromedp.CSS(`form[method=get] input[name="rate"]`), "50"), chromedp.SendKeys(chromedp.CSS(`form[method=get] input[name="rate"]`), kb.Enter))
	p.reads("#balance", "0 of 50 tokens", "Denied now", "By the numbers that were given")
	if p.drawn("#curve", "--ink") < 100 {
		t.Errorf("the curve of the balance has %d pixels", p.drawn("#curve", "--ink"))
	}
	p.unfold("Let it go on")
	p.press("Let it go on")
	p.reads("#balance", "50 of 50 tokens")
	p.quiet()
}

// hold makes a limit of slots, of which acme holds so many and four others, one of them expired.
func hold(t *testing.T, pool *pgxpool.Pool, many int) {
	t.Helper()
	execute(t, pool, `SELECT ratelimit.publish('renderer', '[{"name": "renders", "kind": "slots", "capacity": 100}]')`)
	execute(t, pool, `SELECT ratelimit.hold('renders', 'acme', 'project "Aurora"', 2, forever => true),
		ratelimit.hold('renders', 'acme', 'job 4711 of the worker on host-0123456789abcdef-0123456789abcdef', ttl => '90 seconds'), ratelimit.hold('renders', 'acme', 'job 17', ttl => '5 minutes')`)
	execute(t, pool, "SELECT ratelimit.hold('renders', 'acme', 'job ' || i, ttl => '1 hour') FROM generate_series(100, 99 + $1) AS i", many)
	execute(t, pool, "UPDATE ratelimit.holds SET taken_at = now() - interval '8 minutes', until = now() - interval '3 minutes' WHERE id = 'job 17'")
	execute(t, pool, "UPDATE ratelimit.holds SET taken_at = now() - interval '9 days' WHERE until = 'infinity'")
}

// An operator sees who holds what, while it changes, and releases what hangs. Of a limit without holds, nothing is shown.
func TestAnOperatorReleasesAHold(t *testing.T) {
	t.Parallel()
	pool := newWorld(t)
	hold(t, pool, 0)
	p := open(t, pool, "ann", desktop)
	p.see("key?name=signUps&key=acme")
	p.reads("h1", "acme")
	if shown := value[bool](p, `document.getElementById("holds").checkVisibility()`); shown {
		t.Error("a limit without holds shows some")
	}
	p.see("key?name=renders&key=acme")
	p.reads("#balance", "97 of 100 slots free")
	p.reads("#holds tbody tr:nth-child(1)", "project", "2 slots", "9 d ago", "no end")
	p.reads("#holds tbody tr:nth-child(2)", "job 17", "1 slot", "expired 3 min")
	p.reads("#holds tbody tr:nth-child(3)", "job 4711", "left")

	// It follows, but not while somebody is about to release.
	execute(t, pool, "SELECT ratelimit.hold('renders', 'acme', 'the next', ttl => '1 hour')")
	p.reads("#holds", "the next")
	p.do(chromedp.Click(chromedp.CSS("#holds tbody tr:nth-child(3) summary")))
	p.do(chromedp.SendKeys(chromedp.CSS(`details[open] input[name="reason"]`), "its worker hangs"))
	value[bool](p, "document.activeElement.blur() === undefined")
	execute(t, pool, "SELECT ratelimit.hold('renders', 'acme', 'one more', ttl => '1 hour')")
	p.reads("#balance", "95 of 100 slots free") // which follows meanwhile
	p.picture("key-release")
	p.press("Release")
	p.reads("main", "Released: what it held came back")
	p.reads("#history tbody tr:first-child", "release", "job 4711", "its worker hangs", "ann", "done")
	p.reads("#holds", "one more")
	p.reads("#balance", "96 of 100 slots free")
	if text := p.text("#holds"); strings.Contains(text, "4711") {
		t.Errorf("it is still held: %s", text)
	}
	execute(t, pool, "SELECT ratelimit.release('renders', 'acme', id, who => 'x') FROM ratelimit.holds('renders', 'acme')")
	p.within(30*time.Second, "no holds", func() bool { return !value[bool](p, `document.getElementById("holds").checkVisibility()`) })
	p.quiet()
}

// The page of somebody who only reads has no forms.
func TestAReaderHasNothingToPress(t *testing.T) {
	t.Parallel()
	pool := newWorld(t)
	p := open(t, pool, "", desktop)
	p.see("key?name=signUps&key=acme")
	p.reads("header", "read-only")
	if n := value[int](p, `document.querySelectorAll("form[method=post], main button").length`); n != 0 {
		t.Errorf("%d buttons", n)
	}
	p.picture("key-read-only")
	hold(t, pool, 0)
	p.see("key?name=renders&key=acme")
	p.reads("#holds", "job 17")
	if n := value[int](p, `document.querySelectorAll("form[method=post], main button, #holds details").length`); n != 0 {
		t.Errorf("%d buttons", n)
	}
	p.see("limit?name=signUps")
	if n := value[int](p, `document.querySelectorAll("form[method=post]").length`); n != 0 {
		t.Errorf("%d forms", n)
	}
	p.quiet()
}

// All pages, wide and narrow, light and dark. No page is wider than its window.
func TestPictures(t *testing.T) {
	t.Parallel()
	pool := newWorld(t)
	hold(t, pool, 60)
	for name, l := range map[string]look{"": desktop, "-dark": {width: 1240, height: 900, dark: true}, "-360": {width: 360, height: 780}, "-768": {width: 768, height: 1024}, "-360-dark": {width: 360, height: 780, dark: true}} {
		p := open(t, pool, "ann", l)
		for shot, path := range map[string]string{
			"limits": "", "limit": "limit?name=signUps", "limit-day": "limit?name=sendMessage&span=day", "limit-search": "limit?name=sendMessage&q=user-1", "key": "key?name=signUps&key=acme",
			"key-window": "key?name=exportReport&key=acme", "key-blocked": "key?name=failedLogins&key=" + url.QueryEscape("mallory@example.org"), "key-holds": "key?name=renders&key=acme", "key-own": "key?name=crawl&key=acme", "key-own-given": "key?name=crawl&key=acme&rate=50",
			"key-long": "key?name=llmTokens&key=" + url.QueryEscape("eu|tenant-"+strings.Repeat("0123456789abcdef", 12)), "error": "limit?name=nowhere", "none": "?q=nothing-like-this", "limit-overrides": "limit?name=llmTokens&span=week",
		} {
			p.see(path)
			if dark := value[string](p, `getComputedStyle(document.body).backgroundColor`); (dark == "rgb(20, 20, 19)") != l.dark {
				t.Errorf("%s%s: the background is %s", shot, name, dark)
			}
			p.fits()
			if shot == "key-holds" {
				p.do(chromedp.Click(chromedp.CSS("#holds tbody tr:nth-child(2) summary")))
				p.fits()
			}
			if l.width < 500 && shot == "key" {
				p.unfold("Other numbers")
				p.fits()
			}
			p.picture(shot + name)
		}
		p.problems = nil // the page that is not there
	}
}

// grants asks a limit for a token, as a program with overrides does.
func grants(t *testing.T, pool *pgxpool.Pool, name, key string) (ok bool) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), "SELECT granted FROM ratelimit.try($1, $2)", name, key).Scan(&ok); err != nil {
		t.Fatal(err)
	}
	return ok
}
