package console_test

import (
	"context"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit/console"
)

type staffKey struct{}

// requireStaff stands for the application's login: it lets staff pass, and says who it is.
func requireStaff(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, password, _ := r.BasicAuth()
		if name != "ann" || password != "a secret" {
			w.Header().Set("WWW-Authenticate", "Basic")
			http.Error(w, "Staff only", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), staffKey{}, name)))
	})
}

func staffOf(r *http.Request) string {
	name, _ := r.Context().Value(staffKey{}).(string)
	return name
}

// The page is mounted behind the application's own login.
func Example() {
	var pool *pgxpool.Pool
	mux := http.NewServeMux()

	page := &console.Handler{
		DB:  pool,
		Who: staffOf, // "": this request only reads
	}
	mux.Handle("/admin/limits/", requireStaff(http.StripPrefix("/admin/limits", page)))
}
