package http_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// TestHTTPAsManyGuessesRunAtOnceAsLoginsCan tries the ways of docs/http.md to limit failures: how many good logins can run at once, how
// many guesses, and what comes after these.
func TestHTTPAsManyGuessesRunAtOnceAsLoginsCan(t *testing.T) {
	t.Parallel()
	logins := ratelimit.TokenBucket("logins", 20, time.Minute)
	strict := ratelimit.TokenBucket("failedLogins", 5, 15*time.Minute)
	wide := ratelimit.TokenBucket("failedLogins", 5, 15*time.Minute, ratelimit.Capacity(20))
	pool := harness.NewPool(t, 4)
	for name, row := range map[string]struct {
		requests  func(account string) []ratelimit.Request
		settle    bool
		atOnce    int    // logins, or guesses
		oneByOne  int    // guesses
		then      string // Retry-After, after as many guesses at once
		oneByOne2 string // Retry-After, after as many guesses one by one
	}{
		"strict": {func(account string) []ratelimit.Request { return []ratelimit.Request{strict.Key(account, "192.0.2.7")} }, false, 5, 5, "180", "180"},
		"wide":   {func(account string) []ratelimit.Request { return []ratelimit.Request{wide.Key(account, "192.0.2.7")} }, false, 20, 20, "180", "180"},
		"settle": {func(account string) []ratelimit.Request {
			return []ratelimit.Request{logins.Key(account, "192.0.2.7"), strict.Key(account, "192.0.2.7").Count(0)}
		}, true, 20, 6, "2700", "180"},
	} {
		s := harness.NewSiteOn(t, pool, func(r *http.Request) ([]ratelimit.Request, error) {
			return row.requests(name + r.URL.Query().Get("account")), nil
		})
		if name != "wide" { // that one is on the pool
			coalescer := &ratelimit.Coalescer{Pool: pool}
			t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
			s.Limit.DB = coalescer
		}
		var tried, running atomic.Int64
		all := make(chan struct{})
		s.Handle = func(w http.ResponseWriter, r *http.Request) {
			tried.Add(1)
			if n := running.Add(1); n == int64(row.atOnce) && r.URL.Query().Get("meet") != "" {
				close(all)
			}
			defer running.Add(-1)
			if r.URL.Query().Get("meet") != "" { // until all run at once
				select {
				case <-all:
				case <-time.After(harness.Patience): // fewer came
				}
			}
			if r.URL.Query().Get("password") != "right" {
				if row.settle {
					if err := httplimit.SetCost(r.Context(), strict, 1); err != nil {
						t.Error(err)
					}
				}
				w.WriteHeader(http.StatusUnauthorized)
			}
		}
		if s.Limit.Settle = row.settle; !row.settle {
			s.Limit.Failed = func(status int) bool { return status == http.StatusUnauthorized }
		}
		s.Serve()
		statuses := s.InParallel(row.atOnce, func(int) string { return "/?account=ann&password=right&meet=1" })
		select {
		case <-all:
		default:
			t.Errorf("%s: %d good logins never ran at once", name, row.atOnce)
		}
		if statuses[200] != row.atOnce {
			t.Errorf("%s: of %d good logins at once: %v", name, row.atOnce, statuses)
		}
		s.Clock.Advance(time.Minute)
		if statuses = s.InParallel(row.atOnce, func(int) string { return "/?account=ann&password=right" }); statuses[200] != row.atOnce {
			t.Errorf("%s: again: %v", name, statuses)
		}

		tried.Store(0)
		statuses = s.InParallel(60, func(i int) string { return fmt.Sprint("/?account=bob&password=", i) })
		if tried.Load() > int64(row.atOnce) || statuses[429] != 60-statuses[401] {
			t.Errorf("%s: of 60 guesses at once, %d were tried: %v", name, tried.Load(), statuses)
		}
		if got := s.Get("/?account=bob&password=right"); got.Status != 429 || tried.Load() == int64(row.atOnce) && retryAfterOf(got) != row.then {
			t.Errorf("%s: then %+v, want %s", name, got, row.then)
		}

		tried.Store(0)
		for i := range 30 {
			if got := s.Get(fmt.Sprint("/?account=eve&password=", i)); got.Status == 429 && i == row.oneByOne {
				if retryAfterOf(got) != row.oneByOne2 {
					t.Errorf("%s: one by one, then %+v", name, got)
				}
			}
		}
		if tried.Load() != int64(row.oneByOne) {
			t.Errorf("%s: %d guesses were tried one by one, want %d", name, tried.Load(), row.oneByOne)
		}
	}
}

func retryAfterOf(got harness.Answer) string { return got.Header.Get("Retry-After") }

// countingListener counts what a server reads from its connections.
type countingListener struct {
	net.Listener
	read *atomic.Int64
}

func (l countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	return countingConn{conn, l.read}, err
}

type countingConn struct {
	net.Conn
	read *atomic.Int64
}

func (c countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.read.Add(int64(n))
	return n, err
}

// TestHTTPTheBodyOfADeniedClientIsNotRead sends bodies of 300 MB to the login of docs/http.md: limited by address first, then by what its form
// says.
func TestHTTPTheBodyOfADeniedClientIsNotRead(t *testing.T) {
	t.Parallel()
	byAddress, byAccount := ratelimit.TokenBucket("failedByAddress", 3, time.Hour), ratelimit.TokenBucket("failedLogins", 100, time.Hour)
	s := harness.NewSite(t, httplimit.By(byAddress, httplimit.ClientIP{}.Key))
	wrong := func(status int) bool { return status == http.StatusUnauthorized }
	addresses, accounts := s.Limit, s.Limit
	addresses.Failed, accounts.Failed = wrong, wrong
	accounts.Requests = func(r *http.Request) ([]ratelimit.Request, error) {
		if err := r.ParseForm(); err != nil {
			return nil, &httplimit.StatusError{Status: http.StatusBadRequest}
		}
		return []ratelimit.Request{byAccount.Key(r.PostForm.Get("account"))}, nil
	}
	s.Handle = func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }
	handler := addresses.Handler(http.MaxBytesHandler(accounts.Handler(s), 64<<10))

	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		const bound = 1300 << 10 // 1 MiB, and headers and TLS
		var read *atomic.Int64   // by the connection of the last request
		send := func(contentType string, body io.Reader) (status int) {
			t.Helper()
			read = new(atomic.Int64)
			server := httptest.NewUnstartedServer(handler)
			server.Listener = countingListener{server.Listener, read}
			server.EnableHTTP2 = true
			if protocol == "HTTP/1.1" {
				server.Start()
			} else {
				server.StartTLS()
			}
			defer server.Close()
			response, err := server.Client().Post(server.URL, contentType, io.NopCloser(body)) // of no stated length
			if err != nil {
				return 0 // the server closed the connection before the client had read the answer
			}
			defer response.Body.Close()
			if response.Proto != protocol {
				t.Errorf("%s, want %s", response.Proto, protocol)
			}
			return response.StatusCode
		}
		const form = "application/x-www-form-urlencoded"
		large := func() io.Reader {
			return io.MultiReader(strings.NewReader("account=ann&x="), io.LimitReader(letters{}, 300e6))
		}

		// Not denied by its address: no more is read of it than MaxBytesHandler allows, and what the server discards.
		for _, contentType := range []string{form, "multipart/form-data; boundary=x"} {
			if status := send(contentType, large()); status != http.StatusBadRequest && status != 0 || read.Load() > bound+64<<10 || read.Load() == 0 {
				t.Errorf("%s, %s: %d, %d bytes were read", protocol, contentType, status, read.Load())
			}
		}
		if n := s.Called.Load(); n != 0 {
			t.Errorf("%s: the handler was called %d times", protocol, n)
		}
		for range 3 {
			if status := send(form, strings.NewReader("account=ann")); status != http.StatusUnauthorized {
				t.Fatalf("%s: %d", protocol, status)
			}
		}
		if status := send(form, large()); status != http.StatusTooManyRequests && status != 0 || read.Load() > bound || read.Load() == 0 {
			t.Errorf("%s: denied: %d, %d bytes were read", protocol, status, read.Load())
		}
		if n := s.Called.Swap(0); n != 3 {
			t.Errorf("%s: the handler was called %d times", protocol, n)
		}
		if err := s.Limit.Limiter.Reset(t.Context(), s.Pool, byAddress.Key("127.0.0.1")); err != nil {
			t.Fatal(err)
		}
	}
}

// letters is an endless text.
type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}
