// Http is an API with limits for each user (by plan), each team and the whole site. Its logins are limited by failures only,
// by address before their form is read. Its clients print the responses.
//
//	go run ./examples/http
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

var (
	perUser = map[string]ratelimit.Limit{ // by plan
		"free": ratelimit.TokenBucket("free", 3, time.Minute),
		"pro":  ratelimit.TokenBucket("pro", 30, time.Minute),
	}
	perTeam = ratelimit.FixedWindow("perTeam", 12, time.Hour, ratelimit.Start(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))
	perSite = ratelimit.TokenBucket("perSite", 1000, time.Second)

	// Capacity is the number of logins that can run at once, and of guesses.
	failedLogins    = ratelimit.TokenBucket("failedLogins", 3, 15*time.Minute, ratelimit.Capacity(10)) // of an account and an address
	failedByAccount = ratelimit.TokenBucket("failedByAccount", 100, 24*time.Hour)
	failedByAddress = ratelimit.TokenBucket("failedByAddress", 100, time.Hour)
)

type user struct{ name, team, plan string }

// users are the users by API key.
var users = map[string]user{
	"key-of-ann": {"ann", "acme", "free"},
	"key-of-bob": {"bob", "acme", "pro"},
}

// apiRequests returns what a call of the API costs: the number of tokens that it states, from the user's plan, the team and
// the site.
func apiRequests(r *http.Request) ([]ratelimit.Request, error) {
	u, ok := users[r.Header.Get("X-API-Key")]
	if !ok {
		return nil, &httplimit.StatusError{Status: http.StatusUnauthorized, Detail: "Send your API key in X-API-Key."}
	}
	cost := max(1, httplimit.Cost(r.URL.Query().Get("n"), 1))
	return []ratelimit.Request{perUser[u.plan].Key(u.name).Count(cost), perTeam.Key(u.team).Count(cost), perSite.Global().Count(cost)}, nil
}

// clientAddress is the client's address. Behind a proxy, set TrustedProxies.
var clientAddress = httplimit.ClientIP{}.Key

// loginRequests returns one token for a login attempt at an account from an address, and one for the account, however it is spelled.
func loginRequests(r *http.Request) ([]ratelimit.Request, error) {
	if err := r.ParseForm(); err != nil { // it is too large, for example
		return nil, &httplimit.StatusError{Status: http.StatusBadRequest}
	}
	account := strings.ToLower(strings.TrimSpace(r.PostForm.Get("account")))
	return []ratelimit.Request{failedLogins.Key(account, clientAddress(r)), failedByAccount.Key(account)}, nil
}

// server is the application. tried counts the checked passwords.
func server(limiter *ratelimit.Limiter, db ratelimit.DB, tried *atomic.Int64) http.Handler {
	api := httplimit.Middleware{Limiter: limiter, DB: db, Requests: apiRequests}
	wrong := func(status int) bool { return status == http.StatusUnauthorized } // other statuses are refunded
	addresses := httplimit.Middleware{Limiter: limiter, DB: db, Failed: wrong, Requests: httplimit.By(failedByAddress, clientAddress)}
	accounts := httplimit.Middleware{Limiter: limiter, DB: db, Failed: wrong, Requests: loginRequests}
	mux := http.NewServeMux()
	mux.Handle("GET /messages", api.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "hello")
	})))
	login := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tried.Add(1)
		if r.PostForm.Get("password") != "secret" {
			http.Error(w, "wrong password", http.StatusUnauthorized)
			return
		}
		fmt.Fprintln(w, "welcome")
	})
	mux.Handle("POST /login", addresses.Handler(http.MaxBytesHandler(accounts.Handler(login), 64<<10)))
	return mux
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	// The example has its own clock, so that a wait of a minute takes no time, and the numbers are always the same. An
	// application has no Clock: it uses the database's.
	var now atomic.Int64
	now.Store(time.Date(2026, 7, 1, 12, 30, 0, 0, time.UTC).Unix())
	limiter, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "http", Limits: []ratelimit.Limit{perUser["free"], perUser["pro"], perTeam, perSite, failedLogins, failedByAccount, failedByAddress},
		Usage: &usage.Recorder{DB: pool},
		Clock: func() time.Time { return time.Unix(now.Load(), 0) },
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limiter) // after the server and the Coalescer

	coalescer := &ratelimit.Coalescer{Pool: pool} // one for the process
	defer demo.Close(ctx, coalescer)
	var tried atomic.Int64
	s := httptest.NewServer(server(limiter, coalescer, &tried)) // a real server, on a free port
	defer s.Close()
	c := client{s.Client(), s.URL}

	fmt.Println("An API, and the responses to its clients")
	for _, call := range []struct {
		title, key, query string
		status            int
	}{
		{"Ann's plan is free: 3 a minute", "key-of-ann", "", 200},
		{"", "key-of-ann", "", 200},
		{"", "key-of-ann", "", 200},
		{"", "key-of-ann", "", 429},
		{"Ann has waited for Retry-After", "key-of-ann", "", 200},
		{"Bob's plan is pro, but the team has 12 an hour, and 4 of them are used", "key-of-bob", "?n=5.5", 200},
		{"", "key-of-bob", "?n=5.5", 429},
		{"An invalid cost counts as 1, and 1 is left", "key-of-bob", "?n=NaN", 200},
		{"More than the capacity, or an unknown key: waiting does not help", "key-of-ann", "?n=4", 400},
		{"", "key-of-eve", "", 401},
	} {
		if call.title != "" {
			fmt.Printf("\n%s\n", call.title)
		}
		wait, err := c.messages(ctx, call.key, call.query, call.status)
		if err != nil {
			return err
		}
		if call.key == "key-of-ann" {
			now.Add(wait)
		}
	}

	fmt.Println("\nLogins: only failures count. Ann logs in 20 times")
	for range 20 {
		status, err := c.login(ctx, "ann", "secret")
		if err != nil {
			return err
		}
		if status != http.StatusOK {
			return fmt.Errorf("ann's login: %d", status)
		}
	}
	fmt.Println("of 20 guesses at Bob's password, at the same time:")
	tried.Store(0)
	var wrong, refused atomic.Int64
	var guesses errgroup.Group
	for i := range 20 {
		guesses.Go(func() error {
			status, err := c.login(ctx, "bob", fmt.Sprint("guess", i))
			switch status {
			case http.StatusUnauthorized:
				wrong.Add(1)
			case http.StatusTooManyRequests:
				refused.Add(1)
			}
			return err
		})
	}
	if err := guesses.Wait(); err != nil {
		return err
	}
	fmt.Printf("   %d are tried and wrong, %d are refused\n", wrong.Load(), refused.Load())
	if wrong.Load() != 10 || refused.Load() != 10 || tried.Load() != 10 {
		return fmt.Errorf("%d passwords were tried", tried.Load())
	}
	status, err := c.login(ctx, strings.Repeat("a", 100_000), "guess")
	fmt.Printf("a form of 100 kB: %d\n", status)
	if err == nil && status != http.StatusBadRequest {
		err = errors.New("want 400")
	}
	return err
}

// client is a client of the API. It prints the responses.
type client struct {
	http *http.Client
	url  string
}

// messages asks for messages, wants a status, and returns the seconds in Retry-After.
func (c client) messages(ctx context.Context, key, query string, want int) (retryAfter int64, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+"/messages"+query, nil)
	if err != nil {
		return 0, err
	}
	r.Header.Set("X-API-Key", key)
	answer, err := c.http.Do(r)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	fmt.Printf("%s  GET /messages%s\n   %s\n", strings.TrimPrefix(key, "key-of-"), query, answer.Status)
	for _, name := range []string{"RateLimit-Policy", "RateLimit", "Retry-After"} {
		if value := answer.Header.Get(name); value != "" {
			fmt.Printf("   %s: %s\n", name, value)
		}
	}
	body, err := io.ReadAll(answer.Body)
	if answer.StatusCode >= 400 {
		fmt.Printf("   Content-Type: %s\n   %s", answer.Header.Get("Content-Type"), body)
	}
	if err == nil && answer.StatusCode != want {
		err = fmt.Errorf("want %d", want)
	}
	retryAfter, _ = strconv.ParseInt(answer.Header.Get("Retry-After"), 10, 64)
	return retryAfter, err
}

// login tries a password and returns the status.
func (c client) login(ctx context.Context, account, password string) (status int, err error) {
	form := url.Values{"account": {account}, "password": {password}}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/login", strings.NewReader(form.Encode()))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	answer, err := c.http.Do(r)
	if err != nil {
		return 0, err
	}
	answer.Body.Close()
	return answer.StatusCode, nil
}
