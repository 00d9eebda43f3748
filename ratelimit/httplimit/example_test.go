package httplimit_test

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

var (
	limits    ratelimit.Limiter
	coalescer *ratelimit.Coalescer
	mux       http.ServeMux

	plans = map[string]ratelimit.Limit{
		"free": ratelimit.TokenBucket("free", 60, time.Minute),
		"pro":  ratelimit.TokenBucket("pro", 6000, time.Minute),
	}
	perSite   = ratelimit.TokenBucket("perSite", 10_000, time.Second, ratelimit.Shards(4))
	llmTokens = ratelimit.TokenBucket("llmTokens", 100_000, time.Minute)
	inFlight  = ratelimit.Slots("inFlight", 4)

	failedLogins    = ratelimit.TokenBucket("failedLogins", 5, 15*time.Minute, ratelimit.Capacity(20))
	failedByAccount = ratelimit.TokenBucket("failedByAccount", 100, 24*time.Hour)
	failedByAddress = ratelimit.TokenBucket("failedByAddress", 100, time.Hour)

	render   func(w http.ResponseWriter, r *http.Request)
	askModel func(r *http.Request) (answer string, used float64)
)

// One limit depends on the user's plan, and one is for the whole site. A request takes from both or from none.
func ExampleMiddleware() {
	limit := httplimit.Middleware{
		Limiter: &limits,
		DB:      coalescer,
		Requests: func(r *http.Request) ([]ratelimit.Request, error) {
			if r.URL.Path == "/health" {
				return nil, httplimit.ErrNotLimited
			}
			user, plan, ok := r.BasicAuth() // the user that the application finds
			if !ok {
				return nil, &httplimit.StatusError{Status: http.StatusUnauthorized}
			}
			return []ratelimit.Request{plans[plan].Key(user), perSite.Global()}, nil
		},
	}
	_ = http.ListenAndServe(":8080", limit.Handler(&mux))
}

// This limits failed logins: strictly at an account from one address, loosely at an account from everywhere, and from one address
// at all accounts. The address comes first, before a byte of the form is read.
func ExampleMiddleware_failed() {
	clients := httplimit.ClientIP{TrustedProxies: 1}
	wrong := func(status int) bool { return status == http.StatusUnauthorized }
	addresses := httplimit.Middleware{
		Limiter: &limits, DB: coalescer, Failed: wrong,
		Requests: httplimit.By(failedByAddress, clients.Key),
	}
	accounts := httplimit.Middleware{
		Limiter: &limits, DB: coalescer, Failed: wrong,
		Requests: func(r *http.Request) ([]ratelimit.Request, error) {
			if err := r.ParseForm(); err != nil {
				return nil, &httplimit.StatusError{Status: http.StatusBadRequest}
			}
			account := strings.ToLower(strings.TrimSpace(r.PostForm.Get("account"))) // as the application compares them
			return []ratelimit.Request{failedLogins.Key(account, clients.Key(r)), failedByAccount.Key(account)}, nil
		},
	}
	login := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "wrong password", http.StatusUnauthorized)
	})
	mux.Handle("POST /login", addresses.Handler(http.MaxBytesHandler(accounts.Handler(login), 64<<10)))
}

// At most four requests of a customer run at once. Each takes a token of the customer's plan, too.
func ExampleMiddleware_slots() {
	renders := httplimit.Middleware{
		Limiter: &limits,
		DB:      coalescer,
		Requests: func(r *http.Request) ([]ratelimit.Request, error) {
			user, plan, _ := r.BasicAuth()
			return []ratelimit.Request{plans[plan].Key(user), inFlight.Key(user)}, nil
		},
	}
	mux.Handle("POST /render", renders.Handler(http.HandlerFunc(render)))
}

// The model says in its response how many tokens it has used. The estimate is corrected then.
func ExampleSetCost() {
	chats := httplimit.Middleware{
		Limiter: &limits,
		DB:      coalescer,
		Requests: func(r *http.Request) ([]ratelimit.Request, error) {
			team, _, _ := r.BasicAuth()
			return []ratelimit.Request{perSite.Global(), llmTokens.Key(team).Count(1000)}, nil // an estimate
		},
		Settle: true,
	}
	mux.Handle("POST /chat", chats.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, used := askModel(r)
		if err := httplimit.SetCost(r.Context(), llmTokens, used); err != nil {
			slog.ErrorContext(r.Context(), "the estimate stays", "error", err)
		}
		fmt.Fprintln(w, answer)
	})))
}

// A CDN connects from its own networks, and states the client's address in a header field.
func ExampleClientIP_cdn() {
	clients := httplimit.ClientIP{
		TrustedNetworks: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, // as the CDN publishes them
		ClientHeader:    "CF-Connecting-IP",
	}
	r, _ := http.NewRequest(http.MethodGet, "https://example.org/", nil)
	r.Header.Set("CF-Connecting-IP", "203.0.113.7")
	for _, r.RemoteAddr = range []string{"192.0.2.1:50000", "198.51.100.1:50000"} { // the CDN, and somebody else
		fmt.Println(clients.Key(r))
	}
	// Output:
	// 203.0.113.7
	// 198.51.100.1
}

func ExampleClientIP() {
	r, _ := http.NewRequest(http.MethodGet, "https://example.org/", nil)
	r.RemoteAddr = "10.0.0.1:50000"                                       // the proxy, which appended the last entry
	r.Header.Set("X-Forwarded-For", "127.0.0.1, 2001:db8:1:2:aaaa::beef") // and the client wrote the first
	fmt.Println(httplimit.ClientIP{TrustedProxies: 1}.Key(r))
	fmt.Println(httplimit.ClientIP{TrustedProxies: 1, IPv6Prefix: 48}.Key(r))
	fmt.Println(httplimit.ClientIP{}.Key(r))
	fmt.Println(httplimit.ClientIP{IPv4Prefix: 24}.Key(r))
	// Output:
	// 2001:db8:1:2::/64
	// 2001:db8:1::/48
	// 10.0.0.1
	// 10.0.0.0/24
}

func ExampleCost() {
	for _, text := range []string{"2.5", "", "-1", "NaN"} {
		fmt.Println(httplimit.Cost(text, 1))
	}
	// Output:
	// 2.5
	// 1
	// 1
	// 1
}
