package rpclimit_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/rpclimit"
)

func TestAnInterceptorThatCannotWorkIsNotMounted(t *testing.T) {
	whole := rpclimit.Interceptor{Limiter: new(ratelimit.Limiter), DB: &down{},
		Requests: func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) { return nil, rpclimit.ErrNotLimited },
	}
	for want, breakIt := range map[string]func(i *rpclimit.Interceptor){
		"":                             func(i *rpclimit.Interceptor) { i.Timeout = time.Hour },
		"Limiter is nil":               func(i *rpclimit.Interceptor) { i.Limiter = nil },
		"DB is nil":                    func(i *rpclimit.Interceptor) { i.DB = nil },
		"cannot be mounted: DB is nil": func(i *rpclimit.Interceptor) { i.DB = (*pgxpool.Pool)(nil) },
		"a Coalescer, is nil":          func(i *rpclimit.Interceptor) { i.DB = new(ratelimit.Coalescer) },
		"Requests is nil":              func(i *rpclimit.Interceptor) { i.Requests = nil },
		"(*pgx.Conn)":                  func(i *rpclimit.Interceptor) { i.DB = new(pgx.Conn) },
		"(*pgxpool.Conn)":              func(i *rpclimit.Interceptor) { i.DB = new(pgxpool.Conn) },
		"transaction (*pgxpool.Tx)":    func(i *rpclimit.Interceptor) { i.DB = new(pgxpool.Tx) },
		"(*sql.Conn)":                  func(i *rpclimit.Interceptor) { i.DB = ratelimit.SQL(new(sql.Conn)) },
		"transaction (*sql.Tx)":        func(i *rpclimit.Interceptor) { i.DB = ratelimit.SQL(new(sql.Tx)) },
		"Hidden: ":                     func(i *rpclimit.Interceptor) { i.Hidden = []ratelimit.Limit{{}} },
		"Timeout is -1s":               func(i *rpclimit.Interceptor) { i.Timeout = -time.Second },
		"Timeout is 5ns":               func(i *rpclimit.Interceptor) { i.Timeout = 5 },
	} {
		i := whole
		breakIt(&i)
		for name, mount := range map[string]func(){
			"UnaryServer": func() { i.UnaryServer() }, "StreamServer": func() { i.StreamServer() },
			"WrapUnary": func() { i.WrapUnary(nil) }, "WrapStreamingHandler": func() { i.WrapStreamingHandler(nil) },
		} {
			text := panicOf(mount)
			if !strings.Contains(text, want) || (text == "") != (want == "") {
				t.Errorf("%s: %q, want %q", name, text, want)
			}
		}
	}
}

// panicOf returns the text of the panic of a function.
func panicOf(fn func()) (text string) {
	defer func() {
		if p := recover(); p != nil {
			text = fmt.Sprint(p)
		}
	}()
	fn()
	return ""
}
