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

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/console"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// serve plays the stories, goes on sending messages, and serves the page for operators until ctx ends: what it says is sent to out.
func serve(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	// What a program does so that operators can see its limits and change them: docs/console.md.
	overrides := &ratelimit.Overrides{DB: pool}
	if err := overrides.Load(ctx); err != nil {
		return err
	}
	recorder := &usage.Recorder{DB: pool, Every: time.Second}
	limits = ratelimit.Limiter{Overrides: overrides, Observer: recorder.Decision}
	if err := ratelimit.Publish(ctx, pool, "quickstart", signUps, sendMessage, exports, passwordResets, mailQuota, llmTokens); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = overrides.Run(ctx) }) // until ctx ends
	running.Go(func() { _ = recorder.Run(ctx) })

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
