// Package console is a page for operators: which limits deny whom, since when, and what to do about it. It is an [http.Handler] to
// mount behind the application's own login:
//
//	page := &console.Handler{DB: pool, Who: staffOf}
//	mux.Handle("/admin/limits/", requireStaff(http.StripPrefix("/admin/limits", page)))
//
// The pages show
//
//   - all limits, those that deny most first, with the grants and denials of their last hours;
//   - one limit: its numbers and whose they are, a chart that follows within a second, the most denied keys, and overrides;
//   - one key of a limit: its balance and how it refills, the numbers in force for it, and the history of its overrides. If the key
//     may have numbers of its own (ratelimit.Varies), the page asks for them.
//
// People whom [Handler.Who] names can let a key go on, give it other numbers, block it, lift its limit, and end all that again.
// Everybody else only reads.
//
// The numbers come from the tables of the limiter: the definitions that programs publish (ratelimit.Open), the overrides, and what a
// recorder of package usage counts (Usage of ratelimit.Options). Without a recorder there are no charts and no denied keys. A recorder writes every ten
// seconds. For charts that follow faster, let it write more often.
//
// A page reads a bounded number of rows by index, however many keys there are. It reads in a READ ONLY transaction.
// docs/console.md has the grants for a role that only reads.
package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/pin"
	"github.com/txlimit/txlimit/internal/visible"
)

// DefaultTimeout is the default of [Handler.Timeout].
const DefaultTimeout = 10 * time.Second

// The page is for a few people, and its database is the application's: it takes at most connections of the pool at once. Who waits for one
// of them longer than patience is told to come back.
const (
	connections = 2
	patience    = 3 * time.Second
)

// Handler serves the page. DB is required. It is safe for concurrent use, and must neither be changed nor copied while it is in use.
//
// It authenticates nobody: mount it behind a login, and limit it to staff. It can be mounted under any path that ends with a slash, by
// [http.StripPrefix]. All its links are relative.
//
// It refuses what pages of other sites ask of it, unless somebody follows a link, and cannot be framed. Its Content-Security-Policy allows scripts and
// styles from the same origin only, none of them inline.
type Handler struct {
	// DB is a pool, such as *pgxpool.Pool. Required. A page takes one
	// connection, and all pages together at most two at once: more readers wait, and after three seconds are answered with 503.
	DB interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}

	// Schema is that of [ratelimit.Limiter]; "" is ratelimit. An invalid name is answered with 500.
	Schema string

	// Who names the person who sent a request. The name is written beside the overrides that the person makes. For a request of
	// nobody, it returns "": then the page only reads, and writes are answered with 403. nil: the page only reads.
	Who func(r *http.Request) string

	// Timeout bounds the queries of a page, and each statement of a write. 0 is [DefaultTimeout].
	Timeout time.Duration

	once sync.Once
	busy chan struct{} // has an element for each connection in use
}

// ServeHTTP serves the page.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "+
		"form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
	header.Set("X-Frame-Options", "DENY") // for browsers that do not know frame-ancestors
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "same-origin") // names and keys stay here
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")

	c := &visit{h: h, w: w, r: r}
	if fromAnotherSite(r) { // nothing of the application's is asked either
		c.fail(&refusal{status: http.StatusForbidden, title: "Another site sent this", text: "The browser says that a page of another site asked for this. Nothing was changed."})
		return
	}
	if h.Who != nil {
		c.who = h.Who(r)
	}
	if err := c.serve(); err != nil {
		c.fail(err)
	}
}

// visit is one request of a reader.
type visit struct {
	h   *Handler
	w   http.ResponseWriter
	r   *http.Request
	who string

	session string // the role that is logged in to the database, of a write
}

func (c *visit) serve() error {
	name, isAsset := strings.CutPrefix(c.r.URL.Path, "/assets/")
	switch c.r.Method {
	case http.MethodGet, http.MethodHead:
		if isAsset {
			return c.asset(name)
		}
	case http.MethodPost:
		if c.who == "" {
			return &refusal{status: http.StatusForbidden, title: "Read-only", text: "You can look at this page, but not change anything. Nothing was changed."}
		}
		if c.r.URL.Path != "/limit" && c.r.URL.Path != "/key" {
			return notAllowed(c.w, "GET, HEAD")
		}
		c.r.Body = http.MaxBytesReader(c.w, c.r.Body, 64<<10)
		if err := c.r.ParseForm(); err != nil {
			return &refusal{status: http.StatusBadRequest, title: "This form cannot be read", text: "It is incomplete or too large. Nothing was changed."}
		}
	default:
		return notAllowed(c.w, "GET, HEAD, POST")
	}
	query, err := url.ParseQuery(c.r.URL.RawQuery)
	if err != nil {
		return &refusal{status: http.StatusBadRequest, title: "This address is incomplete", text: "A name or a key in the address is not encoded as it should be."}
	}
	a := asked{name: query.Get("name"), key: query.Get("key"), search: query.Get("q"), span: query.Get("span"), page: query.Get("page"), done: query.Get("done"),
		given: givenNumbers{Rate: query.Get("rate"), Capacity: query.Get("capacity"), Zone: query.Get("zone"), Anchor: query.Get("anchor")}}
	if err := a.validate(); err != nil {
		return err
	}
	switch c.r.URL.Path {
	case "":
		// Mounted without its slash. The prefix is not known here, but its last part is enough for a relative link.
		target, _, _ := strings.Cut(c.r.RequestURI, "?")
		c.w.Header().Set("Location", path.Base(target)+"/")
		c.w.WriteHeader(http.StatusPermanentRedirect)
		return nil
	case "/":
		return c.limits(a)
	case "/limit":
		return c.limit(a)
	case "/key":
		return c.key(a)
	case "/usage.json":
		return c.usage(a)
	}
	return &refusal{status: http.StatusNotFound, title: "There is no such page",
		text: "The address is wrong, or the link that led here is old. If the first page ends here as well, the handler was mounted without its prefix stripped: mount it with http.StripPrefix."}
}

func notFound() error {
	return &refusal{status: http.StatusNotFound, title: "There is no such page", text: "The address is wrong, or the link that led here is old."}
}

// crossOrigin is never changed.
var crossOrigin = http.NewCrossOriginProtection()

// fromAnotherSite reports whether a page of another site sent a request, unless somebody follows a link there to look at a page.
func fromAnotherSite(r *http.Request) bool {
	asWrite := &http.Request{Method: http.MethodPost, URL: r.URL, Host: r.Host, Header: r.Header} // others are not checked
	looks := r.Method == http.MethodGet && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	return !looks && crossOrigin.Check(asWrite) != nil
}

func notAllowed(w http.ResponseWriter, allow string) error {
	w.Header().Set("Allow", allow)
	return &refusal{status: http.StatusMethodNotAllowed, title: "That cannot be done here", text: "This address has no such method."}
}

// read runs queries in one READ ONLY transaction, in which the planner has to take an index where there is one.
func (c *visit) read(queries func(ctx context.Context, tx pgx.Tx) error) error {
	return c.inTx(pgx.TxOptions{AccessMode: pgx.ReadOnly, IsoLevel: pgx.RepeatableRead}, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off; SET LOCAL TimeZone = 'UTC'"); err != nil {
			return err
		}
		return queries(ctx, tx)
	})
}

// writing runs statements in one transaction, whatever the defaults of the role are: only READ COMMITTED needs no retries.
func (c *visit) writing(statements func(ctx context.Context, tx pgx.Tx) error) error {
	return c.inTx(pgx.TxOptions{AccessMode: pgx.ReadWrite, IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, "SELECT SESSION_USER").Scan(&c.session); err != nil {
			return err
		}
		return statements(ctx, tx)
	})
}

func (c *visit) inTx(options pgx.TxOptions, statements func(ctx context.Context, tx pgx.Tx) error) error {
	timeout := c.h.Timeout
	if timeout == 0 {
		timeout = DefaultTimeout
	}
	ctx, cancel := context.WithTimeout(c.r.Context(), timeout)
	defer cancel()
	if options.AccessMode != pgx.ReadOnly { // a write is not given up because its reader has gone
		ctx, cancel = context.WithTimeout(context.WithoutCancel(c.r.Context()), timeout)
		defer cancel()
	}
	if c.h.DB == nil {
		return errors.New("console: Handler.DB is nil")
	}
	leave, err := c.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if _, err := inschema.Text("", c.h.Schema); err != nil {
		return &refusal{status: http.StatusInternalServerError, title: "Handler.Schema cannot be", text: sentence(err.Error())}
	}
	tx, err := c.h.DB.BeginTx(ctx, options)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "0A000" { // READ WRITE during recovery
		return isReplica()
	}
	if err != nil {
		return err
	}
	defer func() { // with a deadline of its own: a server that answers no more holds no place among connections
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		_ = tx.Rollback(ctx) // after a commit, there is nothing to roll back
	}()
	// The server ends a statement by itself, even if it hears no more of its client.
	if _, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL statement_timeout = %d", max(timeout.Milliseconds(), 1))); err != nil {
		return err
	}
	named, err := pin.To(ctx, tx, c.h.Schema)
	if err != nil {
		return err
	}
	if err := statements(ctx, named); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// enter waits until a connection may be taken. leave gives it back.
func (c *visit) enter(ctx context.Context) (leave func(), err error) {
	c.h.once.Do(func() { c.h.busy = make(chan struct{}, connections) })
	waiting := time.NewTimer(patience)
	defer waiting.Stop()
	select {
	case c.h.busy <- struct{}{}:
		return func() { <-c.h.busy }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-waiting.C:
		c.w.Header().Set("Retry-After", "5")
		return nil, &refusal{status: http.StatusServiceUnavailable, title: "Too many people look at this page", text: "Nothing was read or changed. Try again in a moment."}
	}
}

// show writes a page. Nothing is written before the template has run, so that an error is a page of its own.
func (c *visit) show(status int, name string, data any) error {
	var page bytes.Buffer
	if err := templates[name].ExecuteTemplate(&page, "layout", data); err != nil {
		return err
	}
	c.w.Header().Set("Content-Type", "text/html; charset=utf-8")
	c.w.WriteHeader(status)
	if c.r.Method != http.MethodHead {
		_, _ = page.WriteTo(c.w)
	}
	return nil
}

// log writes an error to the log, with nothing in it that a terminal obeys, whatever the logger.
func (c *visit) log(err error) {
	slog.ErrorContext(c.r.Context(), "txlimit console", "path", visible.Escape(c.r.URL.Path), "error", visible.Line(err.Error()))
}

// audit writes to the log what somebody has changed, or tried to, with nothing in it that a terminal obeys. Forms that did not reach
// the database are not written.
func (c *visit) audit(name, key string, f form, did string, err error) {
	if c.session == "" {
		return
	}
	attrs := []slog.Attr{
		slog.String("action", visible.Escape(f.Action)), slog.String("limit", visible.Escape(name)), slog.String("key", visible.Escape(key)), slog.Bool("every_key", key == ""),
		slog.String("who", visible.Escape(c.who)), slog.String("session_user", visible.Escape(c.session)), slog.String("remote", visible.Escape(c.r.RemoteAddr)),
	}
	if err != nil {
		attrs = append(attrs, slog.String("error", visible.Line(err.Error())))
	} else {
		attrs = append(attrs, slog.String("done", did))
	}
	slog.LogAttrs(c.r.Context(), slog.LevelInfo, "txlimit console: write", attrs...)
}

// fail answers with a page that says what went wrong.
func (c *visit) fail(err error) {
	refused := explain(err)
	if refused.status >= 500 && c.r.Context().Err() == nil {
		c.log(err)
	}
	if err := c.show(refused.status, "error", errorPage{layout: c.layout(refused.title), Status: refused.status, Text: refused.text}); err != nil {
		http.Error(c.w, refused.title, refused.status)
	}
}
