package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/console"
)

// serve plays the stories, goes on sending messages, and serves the page for operators until ctx ends: what it says is sent to out.
func serve(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	if err := start(ctx, pool); err != nil {
		return err
	}
	defer demo.Close(ctx, limits) // after all that is running
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	if err := run(ctx, pool, out); err != nil {
		return err
	}
	for sender, pause := range map[string]time.Duration{"ann": 4 * time.Second, "bob": 2 * time.Second, "carol": time.Second} {
		running.Go(func() {
			for wait(ctx, pause) == nil {
				if _, err := send(ctx, pool, sender, "hello"); err != nil && !errors.Is(err, ratelimit.ErrDenied) && ctx.Err() == nil {
					fmt.Fprintln(out, err)
				}
			}
		})
	}

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	address := listener.Addr().String()
	page := &console.Handler{DB: pool, Who: func(*http.Request) string { return "operator" }} // nobody logs in to a demo
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host != address { // another site's name that leads here
			http.Error(w, "open http://"+address+"/", http.StatusMisdirectedRequest)
			return
		}
		page.ServeHTTP(w, r)
	})}
	fmt.Fprintf(out, `
The page for operators: http://%s/
Ann, Bob and Carol go on sending messages, some too many. Raise sendMessage for carol, and watch it.
Ctrl-C ends it and removes the database.
`, address)
	running.Go(func() {
		<-ctx.Done()
		_ = server.Close() // nothing depends on it
	})
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
