// Http-echo uses the middleware in echo, a framework with its own handlers and errors. It needs only the function limit.
//
//	go run ./examples/http-echo
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v4"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

var (
	perClient = ratelimit.TokenBucket("perClient", 8, time.Hour)
	failures  = ratelimit.TokenBucket("failures", 2, time.Hour)
)

// limit makes echo middleware from a Middleware. An echo handler returns an error, which echo answers after all middleware.
// A limit on failures needs the status before that, so limit answers the error itself.
func limit(m httplimit.Middleware) echo.MiddlewareFunc {
	wrapped := echo.WrapMiddleware(m.Handler)
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return wrapped(func(c echo.Context) error {
			if err := next(c); err != nil {
				c.Error(err)
			}
			return nil
		})
	}
}

func app(limiter *ratelimit.Limiter, db ratelimit.DB) *echo.Echo {
	e := echo.New()
	e.Use(limit(httplimit.Middleware{Limiter: limiter, DB: db, Requests: httplimit.By(perClient, httplimit.ClientIP{}.Key)}))
	// This route allows two guesses at coupons that do not exist, and any number of coupons that do.
	e.GET("/coupons/:code", coupon, limit(httplimit.Middleware{Limiter: limiter, DB: db,
		Requests: httplimit.By(failures, httplimit.ClientIP{}.Key),
		Failed:   func(status int) bool { return status == http.StatusNotFound },
	}))
	return e
}

func coupon(c echo.Context) error {
	if c.Param("code") != "SUMMER" {
		return echo.NewHTTPError(http.StatusNotFound, "no such coupon")
	}
	return c.String(http.StatusOK, "10 % off\n")
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	// The clock stands still, so that the numbers are always the same. An application has no Clock.
	noon := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	limiter, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "http-echo", Limits: []ratelimit.Limit{perClient, failures},
		Clock: func() time.Time { return noon },
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limiter) // after the server
	server := httptest.NewServer(app(limiter, pool))
	defer server.Close()

	for _, call := range []struct {
		code   string
		status int
	}{
		{"SUMMER", 200}, {"SUMMER", 200}, {"SUMMER", 200}, // no failures
		{"WINTER", 404}, {"AUTUMN", 404},
		{"SPRING", 429}, {"SUMMER", 429}, // too many guesses
		{"SUMMER", 429}, {"SUMMER", 429}, // then too many requests
	} {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/coupons/"+call.code, nil)
		if err != nil {
			return err
		}
		answer, err := server.Client().Do(r)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil {
			return err
		}
		fmt.Printf("%s: %s\n", call.code, answer.Status)
		for _, name := range []string{"RateLimit", "Retry-After"} { // each limit writes a line
			for _, value := range answer.Header.Values(name) {
				fmt.Printf("   %s: %s\n", name, value)
			}
		}
		if answer.StatusCode != call.status {
			return fmt.Errorf("%s: %s %s, want %d", call.code, answer.Status, body, call.status)
		}
	}
	return nil
}
