package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/ratelimit/console"
)

const defaultListen = "127.0.0.1:8484"

// served is what `console` prints.
type served struct {
	URL string `json:"url"` // with the token
	Who string `json:"who"` // empty: read-only
}

type consoleFlags struct {
	listen, who string
	hosts       []string
	write       bool
	noToken     bool
}

func (a *app) consoleCommand() *cobra.Command {
	var f consoleFlags
	c := &cobra.Command{
		Use:   "console [--write] [--listen ADDRESS]",
		Short: "Serve the page for operators on this machine",
		Long: `Serve the page for operators (package ratelimit/console) until Ctrl-C: all limits, charts, the most denied keys, balances, overrides
and their history. Without --write, it only reads.

The page has no login. It listens on a loopback address, and lets in the browser in which the printed address is opened: the token in
it is good for once, and becomes a cookie. Press Enter for another address. It answers only to the hosts 127.0.0.1, localhost and
[::1] with its port, so that no page of the web can reach it by a name of its own (DNS rebinding), and refuses what other sites ask of it.

From another machine, use a tunnel such as ssh -L 8484:127.0.0.1:8484, or a proxy with a login: --allow-host says by which name browsers know it,
and --no-token lets in all whom the proxy lets in. An address that is not loopback needs --allow-host, too. Applications can mount the page
behind a login of their own: docs/console.md.`,
		Example: `  txlimit console
  txlimit console --write --who ann
  txlimit console --listen 127.0.0.1:9000
  txlimit console --listen 10.1.2.3:8484 --allow-host limits.example.com --no-token   # behind a proxy with a login`,
		Args: noArgs,
	}
	c.Flags().StringVar(&f.listen, "listen", defaultListen, "the `address` to listen on; port 0 is any free one")
	c.Flags().BoolVar(&f.write, "write", false, "offer to change limits: override, block, reset and so on")
	c.Flags().StringArrayVar(&f.hosts, "allow-host", nil, "a `host` that the page answers to besides, such as limits.example.com or localhost:9000; may be repeated")
	c.Flags().BoolVar(&f.noToken, "no-token", false, "with --allow-host: let in everybody who can reach the page, since a proxy with a login is in front of it")
	whoFlag(a, c, &f.who)
	return a.do(c, look, func(ctx context.Context, _ []string) error { return a.console(ctx, &f) })
}

func (a *app) console(ctx context.Context, f *consoleFlags) error {
	if err := checkListen(f); err != nil {
		return err
	}
	// The errors of a page are for those who look at it. Better to know at once that the tables are not there, or may not be read.
	if f.write {
		a.work = operate
	}
	role := ""
	err := a.reading(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT FROM ratelimit.limits, ratelimit.definitions, ratelimit.overrides, ratelimit.usage, ratelimit.denials LIMIT 0"); err != nil {
			return err
		}
		return tx.QueryRow(ctx, "SELECT current_user").Scan(&role)
	})
	if err != nil {
		return err
	}
	pool, err := a.pool(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", f.listen)
	if err != nil {
		return fmt.Errorf("%w: choose another address with --listen, such as 127.0.0.1:0 for any free port", err)
	}
	// What a browser shows, and what it sends as Host.
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		return err
	}
	page := &console.Handler{DB: pool, Schema: a.schema}
	address := "http://" + listener.Addr().String() + "/"
	handler, entrance := http.Handler(page), newDoor(address, port)
	result := served{URL: address}
	if !f.noToken {
		handler, result.URL = entrance.before(page), entrance.address()
	}
	what := "shows the limits, and changes nothing (see --write)"
	if f.write {
		if result.Who = f.who; result.Who == "" {
			result.Who = role
		}
		page.Who = func(*http.Request) string { return result.Who }
		what = "shows the limits, and changes them as " + printable(result.Who)
	}
	err = a.emit(result, func(w io.Writer) { fmt.Fprintf(w, "%s %s\nCtrl-C ends it.\n", result.URL, what) })
	if err != nil {
		return err
	}
	if a.terminal && !f.noToken {
		go a.offer(ctx, entrance)
	}
	server := &http.Server{
		Handler:           onlyHosts(hosts(listener.Addr().String(), port, f.hosts), address, handler),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	// What is under way may end: an override, and the addition two seconds later.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if err := server.Shutdown(ctx); err != nil {
		return errors.Join(err, server.Close())
	}
	return nil
}

// pool connects as the other commands do.
func (a *app) pool(ctx context.Context) (*pgxpool.Pool, error) {
	one, err := a.config()
	if err != nil {
		return nil, err
	}
	config, err := pgxpool.ParseConfig("")
	if err != nil {
		return nil, err
	}
	// The page's queries need the types of their parameters. Each of its transactions stays on one server, behind a pooler, too.
	one.DefaultQueryExecMode = pgx.QueryExecModeDescribeExec
	config.ConnConfig, config.MaxConns = one, 2 // as many as the page takes at once
	return pgxpool.NewWithConfig(ctx, config)
}

// checkListen refuses addresses that other machines can reach, unless the hosts are named.
func checkListen(f *consoleFlags) error {
	host, _, err := net.SplitHostPort(f.listen)
	if err != nil {
		return usagef("--listen %q is not an address with a port, such as %s", f.listen, defaultListen)
	}
	for _, h := range f.hosts {
		if h == "" || strings.ContainsAny(h, "/*@ ") {
			return usagef("--allow-host %q is not a host, such as limits.example.com or localhost:9000", h)
		}
	}
	if f.noToken && len(f.hosts) == 0 {
		return usagef("--no-token is for a proxy with a login in front of the page: pass --allow-host with the name that browsers use")
	}
	address, err := netip.ParseAddr(host)
	if host == "localhost" || err == nil && address.IsLoopback() || len(f.hosts) > 0 {
		return nil
	}
	return usagef("--listen %s can be reached from other machines, and the page has no login. Listen on %s, and use a tunnel (ssh -L) from other machines. "+
		"If a proxy with a login is in front of it, pass --allow-host with the name that browsers use", printable(f.listen), defaultListen)
}

// hosts are the values of the Host field that are answered.
func hosts(address, port string, more []string) (allowed []string) {
	for _, name := range []string{"127.0.0.1", "localhost", "[::1]"} {
		more = append(slices.Clip(more), name+":"+port)
		if port == "80" {
			more = append(more, name)
		}
	}
	if a, err := netip.ParseAddrPort(address); err == nil && !a.Addr().IsUnspecified() {
		more = append(more, address)
	}
	for _, name := range more {
		allowed = append(allowed, strings.ToLower(name))
		if _, _, err := net.SplitHostPort(name); err != nil {
			allowed = append(allowed, strings.ToLower(name)+":"+port)
		}
	}
	return allowed
}

// onlyHosts refuses requests for other hosts: a page of the web whose name leads to this machine (DNS rebinding) would be of the same origin.
func onlyHosts(allowed []string, address string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(allowed, strings.ToLower(r.Host)) {
			http.Error(w, "txlimit console does not answer to this host. Open "+address+", or start it with --allow-host and the host and port of the address that you opened.", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
