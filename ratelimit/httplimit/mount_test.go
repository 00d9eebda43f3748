package httplimit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// panics returns the text of the panic of a function.
func panics(fn func()) (text string) {
	defer func() {
		if p := recover(); p != nil {
			text = fmt.Sprint(p)
		}
	}()
	fn()
	return ""
}

type noDB struct{}

func (noDB) QueryRow(context.Context, string, ...any) pgx.Row { return nil }

func TestAMiddlewareThatCannotWorkIsNotMounted(t *testing.T) {
	next := http.NotFoundHandler()
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	whole := httplimit.Middleware{Limiter: new(ratelimit.Limiter), DB: noDB{}, Requests: httplimit.By(limit, httplimit.ClientIP{}.Key)}
	for want, breakIt := range map[string]func(m *httplimit.Middleware){
		"":                             func(m *httplimit.Middleware) { m.Timeout, m.Jitter = time.Hour, 0.5 },
		"Limiter is nil":               func(m *httplimit.Middleware) { m.Limiter = nil },
		"DB is nil":                    func(m *httplimit.Middleware) { m.DB = nil },
		"cannot be mounted: DB is nil": func(m *httplimit.Middleware) { m.DB = (*pgxpool.Pool)(nil) },
		"a Coalescer, is nil":          func(m *httplimit.Middleware) { m.DB = new(ratelimit.Coalescer) },
		"Requests is nil":              func(m *httplimit.Middleware) { m.Requests = nil },
		"(*pgx.Conn)":                  func(m *httplimit.Middleware) { m.DB = new(pgx.Conn) },
		"(*pgxpool.Conn)":              func(m *httplimit.Middleware) { m.DB = new(pgxpool.Conn) },
		"transaction (*pgxpool.Tx)":    func(m *httplimit.Middleware) { m.DB = new(pgxpool.Tx) },
		"(*sql.Conn)":                  func(m *httplimit.Middleware) { m.DB = ratelimit.SQL(new(sql.Conn)) },
		"transaction (*sql.Tx)":        func(m *httplimit.Middleware) { m.DB = ratelimit.SQL(new(sql.Tx)) },
		"Timeout is -1s":               func(m *httplimit.Middleware) { m.Timeout = -time.Second },
		"Timeout is 5ns":               func(m *httplimit.Middleware) { m.Timeout = 5 },
		"Jitter is 0.6":                func(m *httplimit.Middleware) { m.Jitter = 0.6 },
		"Hidden: ":                     func(m *httplimit.Middleware) { m.Hidden = []ratelimit.Limit{limit, {}} },
		"Jitter is NaN":                func(m *httplimit.Middleware) { m.Jitter = math.NaN() },
	} {
		m := whole
		breakIt(&m)
		text := panics(func() { m.Handler(next) })
		if !strings.Contains(text, want) || (text == "") != (want == "") {
			t.Errorf("%q, want %q", text, want)
		}
	}
	if text := panics(func() { whole.Handler(nil) }); !strings.Contains(text, "the handler is nil") {
		t.Errorf("%q", text)
	}
}

func TestByAsksForOneTokenOfOneKey(t *testing.T) {
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	mine := errors.New("mine")
	for name, row := range map[string]struct {
		requests func(r *http.Request) ([]ratelimit.Request, error)
		key      string
		err      error
	}{
		"an address": {httplimit.By(limit, httplimit.ClientIP{}.Key), "203.0.113.7", nil},
		"a user":     {httplimit.By(limit, func(*http.Request) (string, error) { return "ann", nil }), "ann", nil},
		"no user":    {httplimit.By(limit, func(*http.Request) (string, error) { return "ann", mine }), "", mine},
	} {
		got, err := row.requests(from("203.0.113.7:4711"))
		if !errors.Is(err, row.err) || row.err == nil && (len(got) != 1 || got[0] != limit.Key(row.key)) || row.err != nil && got != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	var none func(*http.Request) string
	for want, made := range map[string]func(){
		`limit "limit" is nil`: func() { httplimit.By(limit, none) },
		"rate -1":              func() { httplimit.By(ratelimit.TokenBucket("limit", -1, time.Hour), httplimit.ClientIP{}.Key) },
		"the zero Limit":       func() { httplimit.By(ratelimit.Limit{}, httplimit.ClientIP{}.Key) },
	} {
		if text := panics(made); !strings.Contains(text, want) {
			t.Errorf("%q, want %q", text, want)
		}
	}
}
