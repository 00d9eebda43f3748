package console_test

import (
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit/console"
)

// The page is mounted behind the application's own login.
func Example() {
	var pool *pgxpool.Pool // with the search_path of the limiter's schema
	var mux http.ServeMux

	page := &console.Handler{
		DB:  pool,
		Who: func(r *http.Request) string { return r.Header.Get("X-Staff") }, // as requireStaff has set it
	}
	requireStaff := func(next http.Handler) http.Handler { return next } // the application's login
	mux.Handle("/admin/limits/", requireStaff(http.StripPrefix("/admin/limits", page)))
}
