package soak

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/ratelimit"
)

// subject is a limit of the soak.
type subject struct {
	ratelimit.Limit
	// Verbs that calls outside of transactions use beside those that take tokens. With these verbs, less is known: see
	// check_test.go.
	charged, refunded bool
	reset             bool // inside and outside
	strict            bool // it is only consumed and taken: it never owes anything
}

// subjects are the limits, by their numbers in the records.
var subjects = []subject{
	{Limit: ratelimit.TokenBucket("bucket", 1, time.Second, ratelimit.Capacity(4), ratelimit.MaxReserved(10)), refunded: true},
	{Limit: ratelimit.TokenBucket("sharded bucket", 0.5, time.Second, ratelimit.Capacity(4), ratelimit.MaxReserved(20), ratelimit.Shards(4)), refunded: true},
	{Limit: ratelimit.FixedWindow("window", 3, time.Second, ratelimit.MaxReserved(9)), refunded: true},
	{Limit: ratelimit.FixedWindow("sharded window", 4, 2*time.Second, ratelimit.Capacity(6), ratelimit.MaxReserved(20), ratelimit.Shards(3)), refunded: true},
	// This limit is never full again, so that refunds can be counted.
	{Limit: ratelimit.TokenBucket("plenty", 1e-6, time.Hour, ratelimit.Capacity(plentiful)), charged: true, refunded: true},
	{Limit: ratelimit.TokenBucket("forgotten", 3, time.Second, ratelimit.Capacity(10)), reset: true},
	{Limit: ratelimit.TokenBucket("strict", 2, time.Second, ratelimit.Capacity(6)), strict: true},
}

const plentiful = 1e7

// sweptSubjects are the limits that are swept: those without refunds outside of a transaction, since a swept row gets no
// refund.
func sweptSubjects() (swept []ratelimit.Limit) {
	for _, s := range subjects {
		if !s.refunded {
			swept = append(swept, s.Limit)
		}
	}
	return swept
}

// keys is the number of keys of each limit. The first two are hot.
const keys = 300

// singleFile is a key whose refunds rarely overlap: each is of a grant after the last refund. One goroutine makes them all.
const singleFile = 1

func keyName(i int) string { return fmt.Sprint("user-", i) }

// call is a recorded call of a verb.
type call struct {
	Verb     string
	Asks     []ask
	Most     float64           `json:",omitempty"` // of a take. Then each ask has what was taken or, if that is not known, 0
	N        int               // its place in its transaction
	Of       grantID           // of a refund: the grant
	Receipt  ratelimit.Receipt // of a refund: the grant's latest receipt
	Snapshot string            // of a refund or reset in a transaction: it does not see rows inserted later
	answer
}

// answer is the result of a call.
type answer struct {
	At      time.Time // of the decision; zero: not known when it was recorded
	Granted bool
	RetryAt time.Time         // of a grant
	Left    ratelimit.Receipt // what can still be refunded
	Balance []float64         `json:",omitempty"` // of each ask
}

// grantID identifies a granted call.
type grantID struct {
	Op int64
	N  int
}

type ask struct {
	Subject int
	Key     string
	Count   float64
}

func (c call) requests() []ratelimit.Request {
	var requests []ratelimit.Request
	for _, a := range c.Asks {
		request := subjects[a.Subject].Key(a.Key)
		if c.Verb != "take" && c.Verb != "balance" && c.Verb != "reset" { // which are about keys
			request = request.Count(a.Count)
		}
		requests = append(requests, request)
	}
	return requests
}

// takes reports whether a grant of the call has a receipt.
func (c call) takes() bool {
	return c.Verb == "consume" || c.Verb == "reserve" || c.Verb == "take"
}

// took is the call after n tokens of each ask were taken.
func (c call) took(n float64) call {
	c.Asks = slices.Clone(c.Asks)
	for i := range c.Asks {
		c.Asks[i].Count = n
	}
	return c
}

// receipt is the content of a Receipt.
type receipt struct {
	At, RunAt time.Time
	Taken     []taken
}

type taken struct {
	Limit, Key            string
	Count, Refunded, Held float64
	Rows, Shards          int
}

func read(text ratelimit.Receipt) (r receipt) {
	if text == "" {
		return r
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		panic(err)
	}
	return r
}

// line is a record in a process's file: the call, before a call outside of a transaction, and the outcome, after every
// operation. If the call was granted, the outcome has the call with its answer.
type line struct {
	Op      int64
	Handle  string
	Call    *call   `json:",omitempty"`
	Outcome outcome `json:",omitempty"`
}

type outcome string

const (
	committed outcome = "committed" // or, outside of a transaction, granted
	denied    outcome = "denied"
	abandoned outcome = "abandoned" // rolled back on purpose
	failed    outcome = "failed"    // certainly not committed
	unknown   outcome = "unknown"
)

// job is a worker's configuration.
type job struct {
	URL         string
	Seed        uint64
	Number      int
	Incarnation int
	Settle      time.Duration // when to measure its memory first
	File        string
	Holds       string // the file about holds
}

// report is a worker's report at its end.
type report struct {
	Calls       int64
	Slowest     time.Duration
	Heap        [2]uint64 // bytes, after Settle and at the end
	Goroutines  [2]int    // before and after
	Connections int
	Leaks       []string
}

func (r report) String() string {
	return fmt.Sprintf("%d operations, the slowest took %v; heap %d kB when settled, %d kB at the end; %d goroutines before, %d after",
		r.Calls, r.Slowest.Round(time.Millisecond), r.Heap[0]>>10, r.Heap[1]>>10, r.Goroutines[0], r.Goroutines[1])
}

// worker is one of the processes.
type worker struct {
	job
	limiter   ratelimit.Limiter
	pool      *pgxpool.Pool
	shared    *pgxpool.Pool // the coalescer's
	coalescer *ratelimit.Coalescer
	db        map[string]*sql.DB // by driver

	file    *os.File
	held    *os.File
	stop    atomic.Bool
	calls   atomic.Int64
	slowest atomic.Int64
}

func work(in io.Reader, out io.Writer) error {
	lines := bufio.NewReader(in)
	text, err := lines.ReadBytes('\n')
	if err != nil {
		return err
	}
	var r report
	r.Goroutines[0] = runtime.NumGoroutine()
	w := &worker{}
	if err := json.Unmarshal(text, &w.job); err != nil {
		return err
	}
	if err := w.open(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() { w.traffic(g) })
	}
	for g := range 3 {
		wg.Go(func() { w.holds(g, w.held) })
	}
	var settled atomic.Uint64
	timer := time.AfterFunc(w.Settle, func() { settled.Store(heap()) })
	if _, err := lines.ReadBytes('\n'); err != nil {
		return fmt.Errorf("the parent has ended: %w", err)
	}
	w.stop.Store(true)
	wg.Wait()
	if err := w.turnsAreFree(); err != nil {
		r.Leaks = append(r.Leaks, err.Error())
	}
	fmt.Fprintln(out, "stopped")
	if _, err := lines.ReadBytes('\n'); !errors.Is(err, io.EOF) {
		return fmt.Errorf("unexpected input from the parent: %w", err)
	}
	timer.Stop()
	w.close(&r)
	if r.Heap[0] = settled.Load(); r.Heap[0] == 0 { // it ended before Settle
		r.Heap[0] = r.Heap[1]
	}
	if r.Heap[1] > r.Heap[0]*3/2+4<<20 {
		r.Leaks = append(r.Leaks, fmt.Sprintf("memory: %d kB when settled, %d kB at the end", r.Heap[0]>>10, r.Heap[1]>>10))
	}
	return json.NewEncoder(out).Encode(r)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

func (w *worker) open() (err error) {
	// One write for each line, so that nothing is lost if the process is killed.
	if w.file, err = os.OpenFile(w.File, os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_EXCL, 0o600); err != nil {
		return err
	}
	if w.held, err = os.OpenFile(w.Holds, os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_EXCL, 0o600); err != nil {
		return err
	}
	ctx := context.Background()
	connect := func(handle string, conns int32) (*pgxpool.Pool, error) {
		config, err := pgxpool.ParseConfig(w.URL)
		if err != nil {
			return nil, err
		}
		config.MaxConns = conns
		config.ConnConfig.RuntimeParams["application_name"] = w.appName(handle)
		config.ConnConfig.RuntimeParams["statement_timeout"] = "400ms"
		return pgxpool.NewWithConfig(ctx, config)
	}
	if w.pool, err = connect("pool", 6); err != nil {
		return err
	}
	if w.shared, err = connect(coalesced, 3); err != nil {
		return err
	}
	w.coalescer = &ratelimit.Coalescer{Pool: w.shared}
	w.db = map[string]*sql.DB{}
	for _, driver := range []string{"pgx", "postgres"} {
		if w.db[driver], err = sql.Open(driver, with(w.URL, "application_name", w.appName(driver), "statement_timeout", "400", "lock_timeout", "300")); err != nil {
			return err
		}
		w.db[driver].SetMaxOpenConns(3)
	}
	return nil
}

// with adds settings to a connection string: a URL, or keywords and values.
func with(dsn string, settings ...string) string {
	u, err := url.Parse(dsn)
	isURL := err == nil && u.Scheme != ""
	query := url.Values{}
	if isURL {
		query = u.Query()
	}
	for pair := range slices.Chunk(settings, 2) {
		query.Set(pair[0], pair[1])
		dsn += fmt.Sprintf(" %s='%s'", pair[0], pair[1])
	}
	if isURL {
		u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // libpq does not read + as a space
		return u.String()
	}
	return dsn
}

// coalesced is the handle whose calls a Coalescer decides together.
const coalesced = "coalescer"

// turnsAreFree reports an error if a turn of a hot limit is still taken.
func (w *worker) turnsAreFree() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for i := range subjects {
		for k := range 2 {
			for range max(1, subjects[i].Config().Shards) {
				err := w.limiter.InTx(ctx, w.pool, func(context.Context, pgx.Tx) error { return nil }, ratelimit.Hot(subjects[i].Key(keyName(k))))
				if errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("a turn on %s: %w", subjects[i].Name(), err)
				}
			}
		}
	}
	return nil
}

// close closes everything and checks that nothing is left. Broken connections may take a moment.
func (w *worker) close(r *report) {
	soon := func(gone func() bool) bool {
		for deadline := time.Now().Add(10 * time.Second); !gone(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				return false
			}
		}
		return true
	}
	_ = w.coalescer.Close(context.Background())
	for name, pool := range map[string]*pgxpool.Pool{"pool": w.pool, coalesced: w.shared} {
		if !soon(func() bool { return pool.Stat().AcquiredConns() == 0 }) {
			r.Leaks = append(r.Leaks, fmt.Sprintf("%d connections of the %s are in use", pool.Stat().AcquiredConns(), name))
		}
		pool.Close()
	}
	for driver, db := range w.db {
		if !soon(func() bool { return db.Stats().InUse == 0 }) {
			r.Leaks = append(r.Leaks, fmt.Sprintf("%d connections of %s are in use", db.Stats().InUse, driver))
		}
		db.Close()
	}
	if !soon(func() bool { r.Goroutines[1] = runtime.NumGoroutine(); return r.Goroutines[1] <= r.Goroutines[0] }) {
		stacks := make([]byte, 1<<16)
		r.Leaks = append(r.Leaks, fmt.Sprintf("%d goroutines, %d before:\n%s", r.Goroutines[1], r.Goroutines[0], stacks[:runtime.Stack(stacks, true)]))
	}
	r.Calls, r.Slowest, r.Heap[1] = w.calls.Load(), time.Duration(w.slowest.Load()), heap()
	if r.Slowest > 30*time.Second {
		r.Leaks = append(r.Leaks, fmt.Sprintf("an operation took %v", r.Slowest))
	}
}

func (w *worker) note(l line) {
	text, err := json.Marshal(l)
	if err == nil {
		_, err = w.file.Write(append(text, '\n'))
	}
	if err != nil {
		panic(err)
	}
}

// appName is the application_name of the process's connections of a handle. Its file has the same numbers.
func (j job) appName(handle string) string {
	return appName(j.Seed, fmt.Sprintf("%s %d.%d", handle, j.Number, j.Incarnation))
}

// handles are the ways to reach the limiter, by name. Those before "transactions" are outside of one.
var handles = []string{"pool", coalesced, "sql.DB pgx", "sql.DB postgres", "by hand",
	"InTx read committed", "InTx repeatable read", "InTx serializable", "InTx hot", "pgx.Tx", "SendTx", "InSQLTx pgx", "InSQLTx postgres"}

const outside = 5 // the number of such handles

// traffic is the work of one goroutine.
func (w *worker) traffic(goroutine int) {
	r := rand.New(rand.NewPCG(w.Seed, uint64(w.Number)<<32|uint64(w.Incarnation)<<16|uint64(goroutine)+1<<48))
	g := &source{Rand: r, refunds: w.Number == 0 && goroutine == 0, refunded: map[int]int64{}}
	for i := int64(0); !w.stop.Load(); i++ {
		op := int64(w.Number)<<60 | int64(w.Incarnation)<<44 | int64(goroutine)<<40 | i
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		if r.IntN(25) == 0 {
			ctx, cancel = context.WithTimeout(context.Background(), time.Duration(r.IntN(int(20*time.Millisecond))))
		}
		g.op = op
		handle := handles[r.IntN(len(handles))]
		begin := time.Now()
		if slices.Index(handles, handle) < outside {
			w.single(ctx, g, op, handle)
		} else {
			w.transaction(ctx, g, op, handle)
		}
		cancel()
		w.calls.Add(1)
		if took := int64(time.Since(begin)); took > w.slowest.Load() {
			w.slowest.Store(took)
		}
		time.Sleep(time.Duration(r.IntN(int(8 * time.Millisecond))))
	}
}

// source makes random calls.
type source struct {
	*rand.Rand
	op     int64
	grants []grant // grants that can still be refunded; each is used by one call at a time

	refunds  bool          // makes the refunds of singleFile
	refunded map[int]int64 // by subject: the operation of its last refund
}

type grant struct {
	grantID
	receipt ratelimit.Receipt
}

func (g *source) key() string {
	switch n := g.IntN(8); {
	case n < 2, g.refunds && n < 6:
		return keyName(singleFile)
	case n < 6:
		return keyName(0)
	}
	return keyName(g.IntN(keys))
}

// call makes a random call, in a transaction or not.
func (g *source) call(inTx bool) call {
	c := call{}
	switch n := g.IntN(20); {
	case n < 1:
		c.Verb = "check"
	case n < 2:
		c.Verb = "balance"
	case n < 4:
		c.Verb = "charge"
	case n < 5:
		c.Verb = "reset"
	case n < 10:
		if c, ok := g.refund(inTx); ok {
			return c
		}
		c.Verb = "consume"
	case n < 14:
		c.Verb = "reserve"
	case n < 16:
		c.Verb, c.Most = "take", float64(1+g.IntN(4))
	default:
		c.Verb = "consume"
	}
	for range []int{1, 1, 1, 2, 3}[g.IntN(5)] {
		i := g.IntN(len(subjects))
		s := subjects[i]
		switch {
		case c.Verb == "reserve" && s.strict:
			i = 0
		case c.Verb == "charge" && (s.strict || !inTx && !s.charged):
			i = 4
		case c.Verb == "reset" && !s.reset:
			i = 5
		}
		a := ask{Subject: i, Key: g.key(), Count: float64(1 + g.IntN(3))}
		if c.Verb == "take" {
			a.Count = 0
		}
		if !slices.ContainsFunc(c.Asks, func(b ask) bool { return a.Subject == b.Subject && a.Key == b.Key }) {
			c.Asks = append(c.Asks, a)
		}
	}
	return c
}

// refund makes a random refund of a grant: of all that is left, of some limits, or of a part; soon after the grant, or
// late.
func (g *source) refund(inTx bool) (call, bool) {
	if len(g.grants) == 0 {
		return call{}, false
	}
	i := len(g.grants) - 1
	switch g.IntN(3) {
	case 0:
		i = g.IntN(len(g.grants))
	case 1:
		i = max(0, slices.IndexFunc(g.grants, func(of grant) bool { r := read(of.receipt); return r.RunAt.After(r.At) }))
	}
	from := g.grants[i]
	back := call{Verb: "refund", Of: from.grantID, Receipt: from.receipt}
	for _, t := range read(from.receipt).Taken {
		subject := subjectNamed(t.Limit)
		single := t.Key == keyName(singleFile)
		switch s := subjects[subject]; {
		case s.strict, !inTx && !s.refunded, single && (!g.refunds || from.Op <= g.refunded[subject]), len(back.Asks) > 0 && g.IntN(3) == 0:
			continue
		case single:
			g.refunded[subject] = g.op
		}
		back.Asks = append(back.Asks, ask{Subject: subject, Key: t.Key, Count: (t.Count - t.Refunded) / []float64{1, 1, 2, 3}[g.IntN(4)]})
	}
	g.grants = slices.Delete(g.grants, i, i+1)
	return back, len(back.Asks) > 0
}

// ended keeps what can still be refunded after a call. After a refund with an unknown outcome, that is not known.
func (g *source) ended(c call, op int64, told outcome) {
	next := grant{c.Of, c.Receipt}
	switch {
	case told == unknown:
		return
	case told == committed && c.takes():
		next = grant{grantID{op, c.N}, c.Left}
	case told == committed:
		next.receipt = c.Left
	}
	if next.receipt == "" {
		return
	}
	if g.grants = append(g.grants, next); len(g.grants) > 40 {
		i := g.IntN(len(g.grants))
		g.grants = slices.Delete(g.grants, i, i+1)
	}
}

func subjectNamed(name string) int {
	return slices.IndexFunc(subjects, func(s subject) bool { return s.Name() == name })
}

// do makes a call. A denial is no error.
func (w *worker) do(ctx context.Context, db ratelimit.DB, c *call) error {
	requests := c.requests()
	var result ratelimit.Result
	var err error
	switch c.Verb {
	case "consume":
		result, err = w.limiter.Consume(ctx, db, requests...)
	case "reserve":
		var reserved ratelimit.Reservation
		reserved, err = w.limiter.Reserve(ctx, db, requests...)
		c.answer = answer{At: reserved.At, Granted: err == nil, RetryAt: reserved.RetryAt, Left: reserved.Receipt()}
		return ignoreDenial(err)
	case "take":
		var n int
		if n, result, err = w.limiter.Take(ctx, db, int(c.Most), requests...); err == nil {
			*c = c.took(float64(n))
		}
	case "check":
		result, err = w.limiter.Check(ctx, db, requests...)
	case "balance":
		var balances []ratelimit.Balance
		balances, err = w.limiter.Balance(ctx, db, requests...)
		c.answer = answer{Granted: err == nil}
		for _, b := range balances {
			c.At, c.Balance = b.At, append(c.Balance, b.Remaining)
		}
		return err
	case "charge":
		result, err = w.limiter.Charge(ctx, db, requests...)
	case "refund":
		result, err = w.limiter.Refund(ctx, db, c.Receipt, requests...)
	case "reset":
		err = w.limiter.Reset(ctx, db, requests...)
		result.OK = err == nil
	}
	c.answer = answerOf(result)
	return ignoreDenial(err)
}

func ignoreDenial(err error) error {
	if errors.As(err, new(*ratelimit.DeniedError)) {
		return nil
	}
	return err
}

func answerOf(r ratelimit.Result) answer {
	a := answer{At: r.At, Granted: r.OK, Left: r.Receipt()}
	if r.OK {
		a.RetryAt = r.RetryAt
	}
	return a
}

// resetByHand resets with the SQL of docs/incidents.md.
func (w *worker) resetByHand(ctx context.Context, c *call) error {
	_, err := w.pool.Exec(ctx, `DELETE FROM ratelimit.limits WHERE name = $1 AND key = $2`, subjects[c.Asks[0].Subject].Name(), c.Asks[0].Key)
	c.Granted = err == nil
	return err
}

// period is the period of a limit without a calendar.
func period(c ratelimit.Config) time.Duration {
	fixed, _, err := calendar.ParsePeriod(c.Period)
	if err != nil {
		panic(err)
	}
	return fixed
}

// byHand takes tokens with the SQL functions. A denial by ratelimit.try is no error.
func byHand(ctx context.Context, db ratelimit.DB, c *call) error {
	a := c.Asks[0]
	config := subjects[a.Subject].Config()
	const numbers = "rate => $3, period => $4, kind => $5, capacity => $6, shards => $7"
	args := []any{config.Name, a.Key, config.Rate, period(config), config.Kind, *config.Capacity, config.Shards}
	c.answer = answer{}
	switch c.Verb {
	case "reserve":
		err := db.QueryRow(ctx, "SELECT at, retry_at FROM ratelimit.reserve($1, $2, "+numbers+", count => $8, max_reserved => $9)",
			append(args, a.Count, config.MaxReserved)...).Scan(&c.At, &c.RetryAt)
		c.Granted = err == nil
		return err
	case "take":
		var n float64
		err := db.QueryRow(ctx, "SELECT at, taken FROM ratelimit.take($1, $2, most => $8, "+numbers+")",
			append(args, int64(c.Most))...).Scan(&c.At, &n)
		if c.Granted = err == nil; c.Granted {
			*c = c.took(n)
		}
		return err
	default:
		var retryAt *time.Time
		err := db.QueryRow(ctx, "SELECT granted, at, retry_at FROM ratelimit.try($1, $2, "+numbers+", count => $8)",
			append(args, a.Count)...).Scan(&c.Granted, &c.At, &retryAt)
		if c.Granted && retryAt != nil {
			c.RetryAt = *retryAt
		}
		return err
	}
}

// deniedByHand is the SQLSTATE of a denial by ratelimit.reserve and ratelimit.take.
const deniedByHand = "PT429"

// single makes a call that is its own transaction.
func (w *worker) single(ctx context.Context, g *source, op int64, handle string) {
	c := g.call(false)
	var db ratelimit.DB = w.pool
	switch handle {
	case coalesced:
		db = w.coalescer
	case "sql.DB pgx":
		db = ratelimit.SQL(w.db["pgx"])
	case "sql.DB postgres":
		db = ratelimit.SQL(w.db["postgres"])
	case "by hand":
		if c.takes() || c.Verb == "reset" {
			c.Asks = c.Asks[:1]
		}
	}
	w.note(line{Op: op, Handle: handle, Call: &c})
	var err error
	switch {
	case handle == "by hand" && c.takes():
		err = byHand(ctx, db, &c)
	case handle == "by hand" && c.Verb == "reset":
		err = w.resetByHand(ctx, &c)
	default:
		err = w.do(ctx, db, &c)
	}
	told := committed
	switch {
	case slices.Contains([]string{"40001", "40P01", "55P03", "57014"}, sqlState(err)): // a committed statement never has these
		told = failed
	case sqlState(err) == deniedByHand:
		told = denied
	case err != nil:
		told = unknown
	case !c.Granted:
		told = denied
	}
	g.ended(c, op, told)
	after := line{Op: op, Handle: handle, Outcome: told}
	if told == committed {
		after.Call = &c
	}
	w.note(after)
}

var errAbandoned = errors.New("changed my mind")

// transaction makes some calls in a transaction and records them in it.
func (w *worker) transaction(ctx context.Context, g *source, op int64, handle string) {
	calls := []call{g.call(true)}
	for g.IntN(4) == 0 {
		calls = append(calls, g.call(true))
	}
	if g.IntN(10) > 0 { // otherwise the calls may deadlock
		slices.SortFunc(calls, func(a, b call) int { return a.Asks[0].Subject - b.Asks[0].Subject })
	}
	if g.IntN(3) == 0 { // it reads what the last call has left, which the check can compare
		read := call{Verb: "balance"}
		for _, a := range calls[len(calls)-1].Asks {
			read.Asks = append(read.Asks, ask{Subject: a.Subject, Key: a.Key, Count: 1})
		}
		calls = append(calls, read)
	}
	for i := range calls {
		calls[i].N = i
	}
	abandon, undo, hand, hold := g.IntN(10) == 0, g.IntN(8) == 0, g.IntN(4) == 0, time.Duration(g.IntN(4))*time.Millisecond
	level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[g.IntN(3)]
	done := false // the function has returned, and COMMIT follows

	on := func(ctx context.Context, db ratelimit.DB, exec func(ctx context.Context, sql string, args ...any) error) error {
		done = false
		for i := range calls {
			c := calls[i]
			var err error
			if c.Verb == "refund" || c.Verb == "reset" {
				if err := db.QueryRow(ctx, "SELECT pg_current_snapshot()::text").Scan(&c.Snapshot); err != nil {
					return err
				}
			}
			if hand && c.takes() && len(c.Asks) == 1 {
				err = byHand(ctx, db, &c)
			} else {
				err = w.do(ctx, db, &c)
			}
			if err != nil {
				return err
			}
			calls[i].answer = c.answer
			calls[i].Asks = c.Asks
			if err := exec(ctx, "INSERT INTO soak_calls (op, call) VALUES ($1, $2)", op, text(c)); err != nil {
				return err
			}
		}
		time.Sleep(hold)
		if abandon {
			return errAbandoned
		}
		done = true
		return nil
	}
	onPgx := func(ctx context.Context, tx pgx.Tx) error {
		if undo { // a rollback to a savepoint gives back the tokens consumed since
			if err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
				c := calls[0]
				if err := w.do(ctx, savepoint, &c); err != nil {
					return err
				}
				return errAbandoned
			}); !errors.Is(err, errAbandoned) {
				return err
			}
		}
		return on(ctx, tx, func(ctx context.Context, sql string, args ...any) error {
			_, err := tx.Exec(ctx, sql, args...)
			return err
		})
	}
	onSQL := func(ctx context.Context, tx *sql.Tx) error {
		hand = false // it scans as pgx does
		return on(ctx, ratelimit.SQL(tx), func(ctx context.Context, sql string, args ...any) error {
			_, err := tx.ExecContext(ctx, sql, args...)
			return err
		})
	}

	var err error
	switch handle {
	case "InTx read committed":
		err = w.limiter.InTx(ctx, w.pool, onPgx, ratelimit.Isolation(pgx.ReadCommitted))
	case "InTx repeatable read":
		err = w.limiter.InTx(ctx, w.pool, onPgx, ratelimit.Isolation(pgx.RepeatableRead))
	case "InTx serializable":
		err = w.limiter.InTx(ctx, w.pool, onPgx)
	case "InTx hot":
		err = w.limiter.InTx(ctx, w.pool, onPgx, ratelimit.Isolation(level), ratelimit.Hot(calls[0].requests()...))
	case "pgx.Tx":
		err = new(ratelimit.Limiter).Retry(ctx, func(ctx context.Context) error {
			return pgx.BeginTxFunc(ctx, w.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return onPgx(ctx, tx) })
		})
	case "SendTx":
		calls = slices.DeleteFunc(calls, func(c call) bool {
			if c.Verb != "consume" {
				g.ended(c, op, abandoned)
			}
			return c.Verb != "consume"
		})
		if len(calls) == 0 {
			return
		}
		err = w.send(ctx, op, calls, level)
		done = sqlState(err) == "" || sqlState(err)[:2] == "57"
	case "InSQLTx pgx":
		err = w.limiter.InSQLTx(ctx, w.db["pgx"], onSQL, ratelimit.Isolation(level))
	case "InSQLTx postgres":
		err = w.limiter.InSQLTx(ctx, w.db["postgres"], onSQL, ratelimit.Isolation(level))
	}
	told := failed
	switch {
	case err == nil:
		told = committed
	case errors.As(err, new(*ratelimit.DeniedError)), sqlState(err) == deniedByHand:
		told = denied
	case errors.Is(err, errAbandoned):
		told = abandoned
	case done && sqlState(err) != "40001" && sqlState(err) != "40P01":
		told = unknown
	}
	for _, c := range calls {
		g.ended(c, op, told)
	}
	w.note(line{Op: op, Handle: handle, Outcome: told})
}

// send makes the calls in one round trip. They are recorded in it, before their answers are known.
func (w *worker) send(ctx context.Context, op int64, calls []call, level pgx.TxIsoLevel) error {
	batch := &pgx.Batch{}
	results := make([]*ratelimit.Result, len(calls))
	for i, c := range calls {
		var err error
		if results[i], err = w.limiter.QueueConsume(ctx, batch, c.requests()...); err != nil {
			return err
		}
		c.Granted = true
		batch.Queue("INSERT INTO soak_calls (op, call) VALUES ($1, $2)", op, text(c))
	}
	err := w.limiter.SendTx(ctx, w.pool, batch, ratelimit.Isolation(level))
	for i, result := range results {
		calls[i].answer = answerOf(*result)
	}
	return err
}

func text(c call) string {
	b, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func sqlState(err error) string {
	var sqlErr interface{ SQLState() string }
	if errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

// lowest returns the lowest balance that a verb may leave.
func (s subject) lowest(verb string) float64 {
	switch c := s.Config(); {
	case verb == "charge", verb == "reserve" && c.MaxReserved == nil:
		return math.Inf(-1)
	case verb == "reserve":
		return -*c.MaxReserved
	}
	return 0
}
