package ops_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/observe"
)

// meter is OpenTelemetry's SDK with a reader that the tests query.
type meter struct {
	*testing.T
	*observe.Metrics
	reader *metric.ManualReader
}

func newMeter(t *testing.T) meter {
	t.Helper()
	reader := metric.NewManualReader()
	metrics, err := observe.NewMetrics(metric.NewMeterProvider(metric.WithReader(reader)))
	if err != nil {
		t.Fatal(err)
	}
	return meter{t, metrics, reader}
}

// points returns the values of a metric by its attributes: a counter's value, a histogram's count and, if asked for, sum.
func (m meter) points(name string) map[string]float64 {
	m.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(m.Context(), &all); err != nil {
		m.Fatal(err)
	}
	points := map[string]float64{}
	text := func(set attribute.Set) string { return set.Encoded(attribute.DefaultEncoder()) }
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			if metric.Name != name {
				continue
			}
			switch data := metric.Data.(type) {
			case metricdata.Sum[int64]:
				if !data.IsMonotonic {
					m.Errorf("%s is not monotonic", name)
				}
				for _, p := range data.DataPoints {
					points[text(p.Attributes)] = float64(p.Value)
				}
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					points[text(p.Attributes)] = float64(p.Count)
					points["sum "+text(p.Attributes)] = p.Sum
				}
			case metricdata.Histogram[int64]:
				for _, p := range data.DataPoints {
					points[text(p.Attributes)] = float64(p.Count)
					points["sum "+text(p.Attributes)] = float64(p.Sum)
				}
			}
		}
	}
	return points
}

func TestMetricsOfDecisions(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		m := newMeter(w.T)
		w.Limiter.Observer = m.Observe
		ctx := w.Context()
		perUser, perSite := ratelimit.TokenBucket("perUser", 10, time.Minute), ratelimit.FixedWindow("perSite", 100, time.Minute, ratelimit.Start(harness.Noon))
		user, site := perUser.Key("ann@example.org"), perSite.Global()

		w.Grant(user.Count(10), site)
		w.Deny(user)
		w.Deny(user, site)
		w.Reserve(user.Count(5)) // waits 30 s
		w.Check(user)
		w.Check(user.Count(0)) // in debt
		w.Balances(user)
		w.Refuse(ratelimit.ErrExceedsCapacity, user.Count(11))
		w.Refuse(ratelimit.ErrInvalid, perUser.Key(""))
		w.Refuse(ratelimit.ErrInvalid, ratelimit.TokenBucket("bad \xff name", 1, time.Minute).Key("ann"))
		_, err := w.Limiter.Charge(ctx, w.DB, user)
		w.Do(err)
		w.Refund(harness.ReceiptOf(harness.Noon, user), user)
		w.Do(w.Limiter.Reset(ctx, w.DB, user))
		if _, isTx := w.DB.(pgx.Tx); !isTx {
			elsewhere := pooledElsewhere(w)
			cancelled, cancel := context.WithCancel(ctx)
			cancel()
			_, err = w.Limiter.Consume(cancelled, elsewhere, user)
			if !errors.Is(err, context.Canceled) {
				w.Error(err)
			}
			late, cancel := context.WithDeadline(ctx, time.Now().Add(-time.Second))
			defer cancel()
			if _, err = w.Limiter.Consume(late, elsewhere, user); !errors.Is(err, context.DeadlineExceeded) {
				w.Error(err)
			}
		}

		want := map[string]float64{
			"ratelimit.limit=perUser,ratelimit.outcome=granted,ratelimit.verb=consume":          1,
			"ratelimit.limit=perUser,ratelimit.outcome=granted,ratelimit.verb=reserve":          1,
			"ratelimit.limit=perSite,ratelimit.outcome=granted,ratelimit.verb=consume":          1,
			"ratelimit.limit=perUser,ratelimit.outcome=denied,ratelimit.verb=consume":           2,
			"ratelimit.limit=perSite,ratelimit.outcome=withheld,ratelimit.verb=consume":         1,
			"ratelimit.limit=perUser,ratelimit.outcome=would_deny,ratelimit.verb=check":         2,
			"ratelimit.limit=perUser,ratelimit.outcome=granted,ratelimit.verb=balance":          1,
			"ratelimit.limit=perUser,ratelimit.outcome=exceeds_capacity,ratelimit.verb=consume": 1,
			"ratelimit.limit=perUser,ratelimit.outcome=invalid,ratelimit.verb=consume":          1,
			"ratelimit.limit=_OTHER,ratelimit.outcome=invalid,ratelimit.verb=consume":           1,
			"ratelimit.limit=perUser,ratelimit.outcome=granted,ratelimit.verb=charge":           1,
			"ratelimit.limit=perUser,ratelimit.outcome=granted,ratelimit.verb=refund":           1,
			"ratelimit.limit=perUser,ratelimit.outcome=granted,ratelimit.verb=reset":            1,
		}
		if _, isTx := w.DB.(pgx.Tx); !isTx {
			want["ratelimit.limit=perUser,ratelimit.outcome=canceled,ratelimit.verb=consume"] = 1
			want["error.type=deadline_exceeded,ratelimit.limit=perUser,ratelimit.outcome=error,ratelimit.verb=consume"] = 1
		}
		if got := m.points("ratelimit.decisions"); !maps.Equal(got, want) {
			w.Errorf("decisions\n%v, want\n%v", got, want)
		}
		if got := m.points("ratelimit.reservation.wait"); len(got) != 2 || got["ratelimit.limit=perUser"] != 1 || got["sum ratelimit.limit=perUser"] != 30 {
			w.Errorf("waits %v", got)
		}
		durations := m.points("ratelimit.call.duration")
		for attributes, n := range map[string]float64{
			"ratelimit.outcome=granted,ratelimit.verb=consume":                        1, // of two limits
			"ratelimit.outcome=denied,ratelimit.verb=consume":                         1,
			"ratelimit.limit=perUser,ratelimit.outcome=granted,ratelimit.verb=refund": 1,
		} {
			if durations[attributes] != n || durations["sum "+attributes] <= 0 {
				w.Errorf("durations %v, want %v of %s", durations, n, attributes)
			}
		}
		for _, name := range []string{"ratelimit.decisions", "ratelimit.call.duration", "ratelimit.reservation.wait"} {
			if text := fmt.Sprint(m.points(name)); strings.Contains(text, "example.org") || strings.Contains(text, "bad") {
				w.Errorf("%s tells too much: %s", name, text)
			}
		}
	})
}

// A Wait is measured when it ends. One that was given up has not waited for its tokens.
func TestMetricsOfWaits(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	m := newMeter(t)
	ctx, cancel := context.WithCancel(t.Context())
	asked, now := 0, harness.Noon
	var asleep func()
	limiter := ratelimit.Limiter{Observer: m.Observe, Clock: func() time.Time {
		if asked++; asked == 2 { // by the call, and by its sleep
			asleep()
		}
		return now
	}}
	limit := ratelimit.TokenBucket("third party", 10, time.Minute, ratelimit.Capacity(1))
	for _, asleep = range []func(){func() {}, func() { now = now.Add(6 * time.Second) }, cancel} {
		asked = 0
		if _, err := limiter.Wait(ctx, pool, limit.Global()); err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	m.Observe(ctx, ratelimit.Decision{Verb: "consume", Ahead: true, Result: ratelimit.Result{OK: true, Requests: []ratelimit.Status{{Limit: limit, OK: true}}}})
	if got := m.points("ratelimit.reservation.wait"); got["ratelimit.limit=third party"] != 1 || got["sum ratelimit.limit=third party"] != 6 {
		t.Errorf("waits %v", got)
	}
	want := map[string]float64{
		"ratelimit.limit=third party,ratelimit.outcome=granted,ratelimit.verb=wait":                         2,
		"ratelimit.limit=third party,ratelimit.outcome=canceled,ratelimit.verb=wait":                        1,
		"ratelimit.limit=third party,ratelimit.outcome=granted,ratelimit.verb=refund":                       1,
		"ratelimit.ahead=true,ratelimit.limit=third party,ratelimit.outcome=granted,ratelimit.verb=consume": 1,
	}
	if got := m.points("ratelimit.decisions"); !maps.Equal(got, want) {
		t.Errorf("decisions %v, want %v", got, want)
	}
}

func TestMetricsOfRetries(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	m := newMeter(t)
	var failures []int
	limiter := ratelimit.Limiter{Observer: m.Observe, OnRetry: func(ctx context.Context, attempt int, failed error) {
		m.Retry(ctx, attempt, failed)
		failures = append(failures, attempt)
	}}
	limit := ratelimit.TokenBucket("hot", 1000, time.Hour)
	attempts := 0
	conflicts := func(ctx context.Context, tx pgx.Tx) error { // twice with another transaction that commits first
		var n int
		if err := tx.QueryRow(ctx, "SELECT count(*) FROM ratelimit.limits").Scan(&n); err != nil {
			return err
		}
		if attempts++; attempts < 3 {
			if _, err := new(ratelimit.Limiter).Consume(t.Context(), pool, limit.Key("ann")); err != nil {
				return err
			}
		}
		_, err := limiter.Consume(ctx, tx, limit.Key("ann"))
		return err
	}
	if _, err := new(ratelimit.Limiter).Consume(t.Context(), pool, limit.Key("ann")); err != nil {
		t.Fatal(err)
	}
	if err := limiter.InTx(t.Context(), pool, conflicts); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(failures, []int{1, 2}) {
		t.Errorf("told of %v", failures)
	}
	if got := m.points("ratelimit.tx.retries"); len(got) != 1 || got["error.type=40001"] != 2 {
		t.Errorf("retries %v", got)
	}
	if got := m.points("ratelimit.decisions"); got["ratelimit.limit=hot,ratelimit.outcome=conflict,ratelimit.verb=consume"] != 2 ||
		got["ratelimit.limit=hot,ratelimit.outcome=granted,ratelimit.verb=consume"] != 1 {
		t.Errorf("decisions %v", got)
	}

	// No attempt follows the last one.
	attempts, failures = 0, nil
	if err := limiter.InTx(t.Context(), pool, conflicts, ratelimit.Attempts(2)); !harness.GaveUpAfter(err, 2) || !slices.Equal(failures, []int{1}) {
		t.Errorf("%v, told of %v", err, failures)
	}

	// SendTx, too: one statement of the batch fails once with a serialization failure.
	failures = nil
	if _, err := pool.Exec(t.Context(), `CREATE SEQUENCE tries; CREATE FUNCTION fail_once() RETURNS void LANGUAGE plpgsql AS
		$$ BEGIN IF nextval('tries') = 1 THEN RAISE serialization_failure; END IF; END $$`); err != nil {
		t.Fatal(err)
	}
	batch := &pgx.Batch{}
	batch.Queue("SELECT fail_once()")
	if err := limiter.SendTx(t.Context(), pool, batch); err != nil || !slices.Equal(failures, []int{1}) {
		t.Errorf("%v, told of %v", err, failures)
	}
}

// A Coalescer's statement counts once, with the number of calls that it decided.
func TestMetricsOfBatches(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	m := newMeter(t)
	coalescer := &ratelimit.Coalescer{Pool: pool, OnBatch: m.Batch}
	defer harness.CloseCoalescer(t, coalescer)
	limit := ratelimit.TokenBucket("hot", 1000, 1000*time.Hour)
	wide := ratelimit.TokenBucket("wide", 1000, 1000*time.Hour, ratelimit.Shards(2))
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), coalescer, limit.Key("ann")); err != nil {
		t.Fatal(err)
	}
	if got := m.points("ratelimit.coalesced.batch.size"); got[""] != 1 || got["sum "] != 1 {
		t.Fatalf("a lone call: %v", got)
	}
	if _, err := limiter.Consume(t.Context(), coalescer, limit.Key("ann").Count(1001)); err == nil { // not sent
		t.Fatal("granted")
	}

	release := harness.HoldFlights(t, coalescer, pool) // two calls that are sent at once
	flight := harness.Enqueue(t, coalescer, nil, slices.Repeat([]ratelimit.Request{limit.Key("ann")}, 50)...)
	release()
	flight.Wg.Wait()
	for i := range 50 {
		if err := flight.Err(i); err != nil {
			t.Fatal(err)
		}
	}
	if got := m.points("ratelimit.coalesced.batch.size"); got[""] != 1+2+1 || got["sum "] != 1+2+50 {
		t.Fatalf("fifty that waited: %v", got)
	}
	for range 7 { // each with its own statement
		if _, err := limiter.Consume(t.Context(), coalescer, wide.Key("ann")); err != nil {
			t.Error(err)
		}
	}
	if got := m.points("ratelimit.coalesced.batch.size"); got[""] != 1+2+1+7 || got["sum "] != 1+2+50+7 {
		t.Fatalf("seven of a sharded limit: %v", got)
	}
}

// A caller that leaves while its statement waits for a row causes no error, not even with lib/pq, which reports a canceled
// statement. A statement that exceeds its caller's deadline does.
func TestACallerThatGoesIsNoErrorWhateverTheDriver(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	watch := harness.Connect(t, url, 1)
	for _, driver := range harness.Drivers {
		m := newMeter(t)
		var out harness.Logged
		log := &observe.Log{Logger: slog.New(slog.NewJSONHandler(&out, nil)), Every: -1}
		limiter := ratelimit.Limiter{Observer: observe.Join(m.Observe, log.Observe)}
		request := ratelimit.TokenBucket("limit", 5, time.Hour).Key(driver)
		db := harness.OpenSQL(t, driver, url, 1)
		tx, err := harness.Connect(t, url, 1).Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		if _, err := new(ratelimit.Limiter).Consume(t.Context(), tx, request); err != nil {
			t.Fatal(err)
		}
		// The caller leaves once its statement waits: lib/pq asks the server only once to cancel, which has no effect
		// before the statement has begun.
		consume := func(reason error) {
			t.Helper()
			ctx := &ending{t.Context(), make(chan struct{}), reason}
			go func() {
				defer close(ctx.done)
				harness.WaitingFor(t, watch, tx)
			}()
			if _, err := limiter.Consume(ctx, ratelimit.SQL(db), request); err == nil {
				t.Errorf("%s: granted", driver)
			}
		}
		consume(context.Canceled)
		if records := out.Records(t); len(records) != 0 {
			t.Errorf("%s: %v", driver, records)
		}
		consume(context.DeadlineExceeded)
		if records := out.Records(t); len(records) != 1 || records[0]["level"] != "ERROR" {
			t.Errorf("%s: %v", driver, records)
		}
		got := m.points("ratelimit.decisions")
		if len(got) != 2 || got["ratelimit.limit=limit,ratelimit.outcome=canceled,ratelimit.verb=consume"] != 1 {
			t.Errorf("%s: %v", driver, got)
		}
	}
}

// ending is a context that ends, for a reason, when done is closed.
type ending struct {
	context.Context
	done   chan struct{}
	reason error
}

func (c *ending) Done() <-chan struct{} { return c.done }

func (c *ending) Err() error {
	select {
	case <-c.done:
		return c.reason
	default:
		return nil
	}
}

func TestTheLogOfDecisions(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var out harness.Logged
		log := &observe.Log{Logger: slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))}
		m := newMeter(w.T)
		w.Limiter.Observer = observe.Join(m.Observe, log.Observe)
		limit, site := ratelimit.TokenBucket("perUser", 10, time.Minute), ratelimit.TokenBucket("perSite", 100, time.Minute)
		ann := limit.Key("ann@example.org")

		w.Grant(ann.Count(10), site.Global())
		w.Check(ann)
		w.Do(w.Limiter.Reset(w.Context(), w.DB, limit.Key("bob")))
		if got := out.Records(w.T); len(got) != 0 {
			w.Errorf("a grant is logged: %v", got)
		}
		w.Deny(ann, site.Global())
		got := out.Records(w.T)
		if len(got) != 1 || got[0]["level"] != "INFO" || got[0]["msg"] != "rate limit exceeded" || got[0]["limit"] != "perUser" || got[0]["count"] != 1.0 ||
			got[0]["remaining"] != 0.0 || got[0]["capacity"] != 10.0 || got[0]["retry_after"] != float64(6*time.Second) || len(got[0]) != 8 {
			w.Errorf("a denial: %v", got)
		}
		w.Refuse(ratelimit.ErrExceedsCapacity, ann.Count(11))
		w.Refuse(ratelimit.ErrInvalid, limit.Key(""))
		got = out.Records(w.T)
		if len(got) != 2 || got[0]["level"] != "WARN" || got[1]["level"] != "ERROR" || !strings.Contains(fmt.Sprint(got[1]["error"]), "part 1 of the key is empty") {
			w.Errorf("mistakes: %v", got)
		}
		if _, isTx := w.DB.(pgx.Tx); !isTx {
			elsewhere := harness.Connect(w.T, harness.NewDatabase(w.T), 1) // a schema without the functions
			_, err := w.Limiter.Consume(w.Context(), elsewhere, ann)
			got := out.Records(w.T)
			if err == nil || len(got) != 1 || got[0]["level"] != "ERROR" || got[0]["limit"] != "perUser" || got[0]["verb"] != "consume" || got[0]["error"] != err.Error() {
				w.Errorf("%v: %v", err, got)
			}
			cancelled, cancel := context.WithCancel(w.Context())
			cancel()
			if _, err := w.Limiter.Consume(cancelled, elsewhere, ann); err == nil || len(out.Records(w.T)) != 0 {
				w.Error("a caller that left is logged")
			}
		}
		if len(m.points("ratelimit.decisions")) < 5 {
			w.Error("the metrics were not told")
		}
	})
}

func TestTheLogKeepsKeysToItself(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limit := ratelimit.TokenBucket("perUser", 1, time.Hour)
	logOf := func(key func(string) string) map[string]any {
		t.Helper()
		var out harness.Logged
		log := &observe.Log{Logger: slog.New(slog.NewJSONHandler(&out, nil)), Key: key}
		limiter := ratelimit.Limiter{Observer: log.Observe}
		for range 3 {
			_, err := limiter.Consume(t.Context(), pool, limit.Key("ann@example.org"))
			if err != nil && !harness.Denied(err) {
				t.Fatal(err)
			}
		}
		records := out.Records(t)
		if len(records) != 1 {
			t.Fatalf("%v", records)
		}
		return records[0]
	}
	if record := logOf(nil); strings.Contains(fmt.Sprint(record), "example.org") || record["key"] != nil {
		t.Errorf("by default: %v", record)
	}
	if record := logOf(observe.PlainKey); record["key"] != "ann@example.org" {
		t.Errorf("plain: %v", record)
	}
	hostile := logOf(func(string) string { return "a\x7f\u009b31m\u202e" })
	if record := hostile; record["key"] != `a\u007f\u009b31m\u202e` { // escaped before the logger, which leaves these as they are
		t.Errorf("hostile: %q", record["key"])
	}
	one, again, other := logOf(observe.HashKey([]byte("secret"))), logOf(observe.HashKey([]byte("secret"))), logOf(observe.HashKey([]byte("another")))
	if key, _ := one["key"].(string); len(key) != 16 || one["key"] != again["key"] || one["key"] == other["key"] || strings.Contains(fmt.Sprint(one), "example.org") {
		t.Errorf("hashed: %v, %v, %v", one, again, other)
	}
}

// A flood of denials causes few records. Together they count all denials, except those after the last record.
func TestAFloodOfDenialsDoesNotFloodTheLog(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var out harness.Logged
	const every = 500 * time.Millisecond
	log := &observe.Log{Logger: slog.New(slog.NewJSONHandler(&out, nil)), Every: every}
	limiter := ratelimit.Limiter{Observer: log.Observe}
	flooded, quiet := ratelimit.TokenBucket("flooded", 1, 1000*time.Hour), ratelimit.TokenBucket("quiet", 1, 1000*time.Hour)
	deny := func(request ratelimit.Request) {
		t.Helper()
		if _, err := limiter.Consume(t.Context(), pool, request); !harness.Denied(err) {
			t.Errorf("%v", err)
		}
	}
	for _, limit := range []ratelimit.Limit{flooded, quiet} {
		if _, err := limiter.Consume(t.Context(), pool, limit.Global()); err != nil {
			t.Fatal(err)
		}
	}
	begin := time.Now()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 250 {
				deny(flooded.Global())
			}
		})
	}
	wg.Wait()
	deny(quiet.Global()) // this one still gets a record
	time.Sleep(every)
	deny(flooded.Global())
	took := time.Since(begin)

	told, records := 0.0, 0
	for _, record := range out.Records(t) {
		if record["limit"] == "quiet" {
			told += 1000
			continue
		}
		records++
		told++
		if n, ok := record["suppressed"].(float64); ok {
			told += n
		}
	}
	t.Logf("%d records of 1001 denials in %v", records, took)
	if told != 1000+1001 || records < 2 || records > 1+int(took/every) {
		t.Errorf("%d records of %v denials in %v", records, told-1000, took)
	}
}

func TestADenialByPolicyIsLoggedWithoutATimeToRetry(t *testing.T) {
	t.Parallel()
	var out harness.Logged
	log := &observe.Log{Logger: slog.New(slog.NewJSONHandler(&out, nil))}
	limiter := &ratelimit.Limiter{Observer: log.Observe}
	if _, err := limiter.Consume(t.Context(), harness.Unasked{T: t}, ratelimit.TokenBucket("exports.free", 0, time.Hour).Key("ann"), ratelimit.TokenBucket("api", 1, time.Hour).Key("ann")); !harness.Denied(err) {
		t.Fatal(err)
	}
	got := out.Records(t)
	if len(got) != 1 || got[0]["limit"] != "exports.free" || got[0]["capacity"] != 0.0 || got[0]["retry_after"] != nil {
		t.Errorf("logged %v", got)
	}
}
