package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"net/http"
	"strings"
	"sync"
)

// door lets those browsers in that have opened an address with a token, each of which is good for once. Other programs and users of this
// machine, and pages of the web, do not know it.
type door struct {
	page   string // the address of the page, without a token
	cookie string // its name
	pass   string // what it holds
	mu     sync.Mutex
	token  string // empty: it was used
}

// newDoor makes a door. Cookies know no ports, so the name says which console one is for.
func newDoor(page, port string) *door {
	return &door{page: page, cookie: "txlimit-" + port, pass: rand.Text()}
}

// address makes a token, in place of the one before, and returns the address to open.
func (d *door) address() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.token = rand.Text()
	return d.page + "?token=" + d.token
}

// takes reports whether a token is the one that is good. Then it is good no more.
func (d *door) takes(token string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.token == "" || subtle.ConstantTimeCompare([]byte(token), []byte(d.token)) == 0 {
		return false
	}
	d.token = ""
	return true
}

// opensFor reports whether a request has the cookie.
func (d *door) opensFor(r *http.Request) bool {
	for _, cookie := range r.CookiesNamed(d.cookie) {
		if subtle.ConstantTimeCompare([]byte(cookie.Value), []byte(d.pass)) == 1 {
			return true
		}
	}
	return false
}

// before is next for those who are let in.
func (d *door) before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A browser that only looks ahead uses no token up. One that is in already does.
		asks := r.Method == http.MethodGet && r.URL.Path == "/" && r.Header.Get("Sec-Purpose") == ""
		taken := asks && d.takes(r.URL.Query().Get("token"))
		if d.opensFor(r) {
			next.ServeHTTP(w, r)
			return
		}
		for field, value := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'", "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff",
			"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store",
			"Content-Type": "text/html; charset=utf-8",
		} {
			w.Header().Set(field, value)
		}
		if !taken {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, "<!doctype html><title>txlimit</title><p>Open the address that <code>txlimit console</code> has printed. It is good for once: press Enter in its terminal for another.")
			return
		}
		http.SetCookie(w, &http.Cookie{Name: d.cookie, Value: d.pass, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode})
		// No redirect: if the address was opened from another site, such as a chat, a browser would follow it without the cookie.
		fmt.Fprint(w, `<!doctype html><title>txlimit</title><meta http-equiv="refresh" content="0; url=/"><p><a href="/">To the limits</a>`)
	})
}

// offer prints another address for each line that is typed on the terminal.
func (a *app) offer(ctx context.Context, d *door) {
	lines := bufio.NewScanner(a.stdin)
	for lines.Scan() && ctx.Err() == nil {
		if strings.TrimSpace(lines.Text()) == "" {
			fmt.Fprintln(a.stderr, d.address())
		}
	}
}
