// Service is a whole service with limits, from its start to a clean shutdown: docs/start-and-stop.md. It needs a migrated
// database in DATABASE_URL, with the table of the page.
package main

import (
	"cmp"
	"context"
	"errors"
	"log"
	"math"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// All limits of the program.
var (
	requests    = ratelimit.TokenBucket("requests", 100, time.Minute, ratelimit.Capacity(20))
	sendMessage = ratelimit.TokenBucket("sendMessage", 10, time.Hour, ratelimit.Capacity(3))
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	signalled, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close() // last: it waits for connections that are in use
	// A signal ends the wait for the database, too.
	limits, err := ratelimit.Open(signalled, pool, ratelimit.Options{
		Program: "messages",
		Limits:  []ratelimit.Limit{requests, sendMessage},
		Usage:   &usage.Recorder{DB: pool},
	})
	if err != nil {
		return err
	}

	// Every request takes one token of its client, before the handler runs and before its body is read.
	middleware := httplimit.Middleware{Limiter: limits, DB: pool, Requests: httplimit.By(requests, httplimit.ClientIP{}.Key)}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /messages", send(pool, limits))
	server := &http.Server{
		Addr: cmp.Or(os.Getenv("LISTEN"), "127.0.0.1:8080"), Handler: middleware.Handler(http.MaxBytesHandler(mux, 64<<10)), ReadHeaderTimeout: 10 * time.Second,
	}
	failed := make(chan error, 1)
	go func() { failed <- server.ListenAndServe() }()
	log.Print("listening on ", server.Addr)
	select {
	case err = <-failed: // such as: the address is in use
	case <-signalled.Done():
		stop() // a second signal ends the program at once
		err = shutdown(ctx, server)
	}

	closing, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return errors.Join(err, limits.Close(closing)) // the last counts are written
}

// shutdown answers the requests that are under way, and takes no new ones.
func shutdown(ctx context.Context, server *http.Server) error {
	stopping, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := server.Shutdown(stopping)
	if err != nil {
		_ = server.Close() // a handler that goes on has a context that ends now
	}
	return err
}

// send stores a message, and takes a token of its sender in the same transaction: both are committed, or none.
func send(pool *pgxpool.Pool, limits *ratelimit.Limiter) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		sender, body := r.FormValue("sender"), r.FormValue("body")
		err := pgx.BeginFunc(r.Context(), pool, func(tx pgx.Tx) error {
			if _, err := limits.Consume(r.Context(), tx, sendMessage.Key(sender)); err != nil {
				return err
			}
			_, err := tx.Exec(r.Context(), "INSERT INTO messages (sender, body) VALUES ($1, $2)", sender, body)
			return err
		})
		denied, isDenied := errors.AsType[*ratelimit.DeniedError](err)
		switch {
		case err == nil:
			w.WriteHeader(http.StatusCreated)
		case isDenied && denied.RetryAt.IsZero(): // waiting does not help
			http.Error(w, "You may not send messages.", http.StatusForbidden)
		case isDenied:
			w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(denied.RetryAfter.Seconds()))))
			http.Error(w, "Too many messages.", http.StatusTooManyRequests)
		case errors.Is(err, ratelimit.ErrBadRequest): // such as an empty sender
			http.Error(w, "Say who sends it.", http.StatusBadRequest)
		default:
			log.Print(err)
			http.Error(w, "Try again later.", http.StatusServiceUnavailable)
		}
	}
}
