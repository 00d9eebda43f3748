// Anonymous-session limits visitors without an account: each session by a cookie that the server signs, new sessions by
// network, and all visitors together. So it does not help to delete the cookie, to forge one, or to use many addresses.
// Sessions and addresses are personal data, so the keys in the table are hashes of them.
//
//	go run ./examples/anonymous-session
package main

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

var (
	limits      *ratelimit.Limiter // of Open
	perSession  = ratelimit.TokenBucket("perSession", 5, time.Hour)
	newSessions = ratelimit.TokenBucket("newSessions", 3, time.Hour) // per network
	anonymous   = ratelimit.TokenBucket("anonymous", 25, time.Hour)  // all together

	secret = []byte(rand.Text()) // an application keeps its secret across restarts
)

// keyed returns a hash that needs the secret. A plain hash would not hide an address: there are too few of them.
func keyed(purpose, text string) string {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(purpose + "\x00" + text))
	return hex.EncodeToString(mac.Sum(nil))
}

// session returns the visitor's session, if the request has a valid cookie.
func session(r *http.Request) (id string, ok bool) {
	cookie, err := r.Cookie("session")
	if err != nil {
		return "", false
	}
	id, signature, _ := strings.Cut(cookie.Value, ".")
	return id, hmac.Equal([]byte(signature), []byte(keyed("sign", id)))
}

// network is the range from which one visitor can choose addresses: the /24 of an IPv4 address, the /64 of an IPv6 address.
var network = httplimit.ClientIP{IPv4Prefix: 24}.Key // behind a proxy, set TrustedProxies

func serve(pool *pgxpool.Pool, w http.ResponseWriter, r *http.Request) {
	id, known := session(r)
	requests := []ratelimit.Request{anonymous.Global()}
	if !known {
		id = rand.Text()
		requests = append(requests, newSessions.Key(keyed("network", network(r))))
	}
	_, err := limits.Consume(r.Context(), pool, append(requests, perSession.Key(keyed("session", id)))...)
	switch {
	case errors.Is(err, ratelimit.ErrDenied):
		http.Error(w, "try again later", http.StatusTooManyRequests)
	case err != nil:
		http.Error(w, "try again later", http.StatusServiceUnavailable)
	case !known:
		http.SetCookie(w, &http.Cookie{Name: "session", Value: id + "." + keyed("sign", id), Path: "/", HttpOnly: true, Secure: true})
	}
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "anonymous-session", Limits: []ratelimit.Limit{perSession, newSessions, anonymous}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	site := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serve(pool, w, r) })
	first := visit(site, "192.0.2.7:1", "")
	cookie, err := sentWith("/another/page", first)
	if err != nil {
		return err
	}
	_, signature, _ := strings.Cut(cookie, ".")
	fmt.Printf("a new visitor: %d, and gets a cookie\n", first.Code)

	for _, crowd := range []struct {
		who     string
		visits  int
		granted int64
		addr    func(i int) string
		cookie  string
	}{
		{"the visitor returns with the cookie", 7, 4, func(int) string { return "192.0.2.7:1" }, cookie},
		{"a visitor deletes the cookie each time", 20, 3, func(int) string { return "198.51.100.9:1" }, ""},
		{"a visitor copies a signature to another cookie, from a whole /24", 20, 0, func(i int) string { return fmt.Sprintf("198.51.100.%d:1", i) }, "session=x." + signature},
		{"a visitor has all addresses of a /64", 50, 3, func(i int) string { return fmt.Sprintf("[2001:db8::%x]:1", i) }, ""},
		{"a visitor has 100 networks", 100, 14, func(i int) string { return fmt.Sprintf("10.0.%d.1:1", i) }, ""},
	} {
		var granted atomic.Int64
		var wg sync.WaitGroup
		for i := range crowd.visits {
			wg.Go(func() {
				if visit(site, crowd.addr(i), crowd.cookie).Code == http.StatusOK {
					granted.Add(1)
				}
			})
		}
		wg.Wait()
		fmt.Printf("%s: %d of %d visits granted\n", crowd.who, granted.Load(), crowd.visits)
		if granted.Load() != crowd.granted {
			return fmt.Errorf("want %d", crowd.granted)
		}
	}

	return demo.PrintTable(ctx, pool, os.Stdout, `
		SELECT name, count(*) AS keys, bool_and(key ~ '^[0-9a-f]{64}$') AS "all are hashes"
		  FROM ratelimit.limits WHERE key <> '' GROUP BY name ORDER BY name`)
}

// sentWith returns the cookie that a browser sends with another page.
func sentWith(path string, first *httptest.ResponseRecorder) (string, error) {
	jar, err := cookiejar.New(nil)
	if err != nil {
		return "", err
	}
	jar.SetCookies(&url.URL{Scheme: "https", Host: "example.com", Path: "/a/page"}, first.Result().Cookies())
	kept := jar.Cookies(&url.URL{Scheme: "https", Host: "example.com", Path: path})
	if len(kept) != 1 {
		return "", fmt.Errorf("%d cookies are sent with %s, want 1", len(kept), path)
	}
	return kept[0].String(), nil
}

func visit(site http.Handler, addr, cookie string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = addr
	r.Header.Set("Cookie", cookie)
	w := httptest.NewRecorder()
	site.ServeHTTP(w, r)
	return w
}
