package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// The flood is an attacker with floodConnections connections that sends floodPerSecond requests per second. If answers are late, each
// connection sends its next request as soon as the last was answered. The flood must not starve the probes: the application's own
// statements, which come at a steady pace.
const (
	floodConnections = 256
	floodPerSecond   = 8_000
	floodPool        = 16                   // connections of the application's pool
	floodLimiterPool = 2                    // connections of the limiter's own pool
	floodPace        = 3 * time.Millisecond // the limiter's Pace: the least time from one statement to the next
	floodTimeout     = time.Second

	floodHeap = 64 << 20 // memory that the application holds; without it, the garbage collector would run every 100 ms

	probes     = 8
	probeEvery = 10 * time.Millisecond
	floodSlice = time.Second
	floodTurns = 6
)

// floods are the two floods, with the client address of their n-th request, which is its key.
var floods = []struct {
	name string
	from func(n uint32) netip.Addr
}{
	{"a new key each", func(n uint32) netip.Addr {
		return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
	}},
	{"one key, denied", func(uint32) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, 1}) }},
}

// floodP99 measures the latency of another query of the process: without a flood, with a flood through the application's pool, and with
// a flood through the documented settings. The value is the median of the turns, for the worse of the two floods.
func floodP99(ctx context.Context, e *env) (outcome, error) {
	var worst outcome
	slice, turns := e.moment(floodSlice), floodTurns
	if e.quick {
		turns = 1
	}
	held := make([]byte, floodHeap)
	defer runtime.KeepAlive(held)
	for _, f := range floods {
		url, err := e.newDatabase(ctx)
		if err != nil {
			return outcome{}, err
		}
		app, err := e.connect(ctx, url, floodPool, nil)
		if err != nil {
			return outcome{}, err
		}
		if err := e.recycle(ctx, app); err != nil {
			return outcome{}, err
		}
		own, err := e.connect(ctx, url, floodLimiterPool, nil)
		if err != nil {
			return outcome{}, err
		}
		coalescer := &ratelimit.Coalescer{Pool: own, AsyncCommit: true, Pace: floodPace}
		e.undos = append(e.undos, func() error { return coalescer.Close(context.Background()) })

		before, bare := &floodWay{name: "before"}, &floodWay{name: "flood, refused without a limiter", bare: true}
		settings := &floodWay{name: "flood, with the documented settings", db: coalescer}
		shared := &floodWay{name: "flood, through the application's pool", db: app}
		var sent atomic.Uint32
		from := func() netip.Addr { return f.from(sent.Add(1)) }
		// The last way takes no turns with the others: its thousands of commits leave work for the disk, which would slow the way
		// that comes next.
		for _, ways := range [][]*floodWay{{before, settings, bare}, {shared}} {
			for turn := range 1 + turns {
				for _, way := range ways {
					if err := way.run(ctx, app, from, slice, turn > 0); err != nil {
						return outcome{}, err
					}
				}
				slices.Reverse(ways)
			}
		}
		fmt.Fprintf(e.out, "  %s\n", f.name)
		for _, way := range []*floodWay{before, settings, bare, shared} {
			fmt.Fprintf(e.out, "    %-38s another query p50 %8s   p99 %8s   max %8s   %7s requests/s answered: %s\n", way.name,
				short(way.latencies.quantile(0.5)), short(way.latencies.quantile(0.99)), short(way.latencies.quantile(1-1e-9)),
				thousands(float64(way.answered())/(time.Duration(turns)*slice).Seconds()), way.statuses())
		}
		fmt.Fprintf(e.out, "    p99 / before, the median of %d turns: %.3g with the documented settings, %.3g without a limiter, "+
			"%.3g through the application's pool\n", turns, settings.over(before), bare.over(before), shared.over(before))
		if worst.note != "" {
			worst.note += "; "
		}
		worst.note += fmt.Sprintf("%s: p99 %s before, %s (%.3g) with the settings, %s (%.3g) through the application's pool, "+
			"%.3g if all requests are refused without a limiter", f.name,
			short(before.latencies.quantile(0.99)), short(settings.latencies.quantile(0.99)), settings.over(before),
			short(shared.latencies.quantile(0.99)), shared.over(before), bare.over(before))
		worst.value = max(worst.value, settings.over(before))
	}
	return worst, nil
}

// floodWay is a way for a flood to reach the limiter, and its results.
type floodWay struct {
	name      string
	db        ratelimit.DB                           // nil: there is no flood, unless bare
	bare      bool                                   // the flood is refused without a limiter, which is the best possible result
	probe     func(ctx context.Context, i int) error // nil: an INSERT
	latencies histogram
	p99s      []float64         // of each turn, in seconds
	count     [600]atomic.Int64 // of answers, by status
}

// over returns the p99 of this way divided by the p99 of the other, as the median of the turns.
func (w *floodWay) over(other *floodWay) float64 {
	ratios := make([]float64, len(w.p99s))
	for turn := range ratios {
		ratios[turn] = w.p99s[turn] / other.p99s[turn]
	}
	return median(ratios)
}

func (w *floodWay) answered() (n int64) {
	for i := range w.count {
		n += w.count[i].Load()
	}
	return n
}

func (w *floodWay) statuses() (text string) {
	for status := range w.count {
		if n := w.count[status].Load(); n > 0 {
			text += fmt.Sprintf("%d × %s ", status, thousands(float64(n)))
		}
	}
	return text
}

// run lets the probes ask for a while, beside the flood.
func (w *floodWay) run(ctx context.Context, app *pgxpool.Pool, from func() netip.Addr, slice time.Duration, counts bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	flooding, stop := context.WithCancel(ctx)
	defer stop()
	var flood, asking sync.WaitGroup
	if w.db != nil || w.bare {
		w.flood(flooding, &flood, from, counts)
	}
	probe := w.probe
	if probe == nil {
		probe = func(ctx context.Context, _ int) error {
			_, err := app.Exec(ctx, insertOrderSQL, "somebody")
			return err
		}
	}
	var latencies [probes]histogram
	begin := time.Now()
	for i := range probes {
		asking.Go(func() {
			end := begin.Add(slice)
			for at := begin.Add(time.Duration(i) * probeEvery / probes); at.Before(end) && time.Now().Before(end); at = at.Add(probeEvery) {
				time.Sleep(time.Until(at))
				// The latency begins when the query was due: a query that starts late because the one before it was slow has waited,
				// too. Queries that were due but not started by the end do not count, which flatters slow ways.
				if err := probe(ctx, i); err != nil {
					cancel(fmt.Errorf("%s: %w", w.name, err))
					return
				}
				latencies[i].add(time.Since(at))
			}
		})
	}
	asking.Wait()
	stop()
	flood.Wait()
	if counts {
		var turn histogram
		for i := range latencies {
			turn.merge(&latencies[i])
		}
		w.latencies.merge(&turn)
		w.p99s = append(w.p99s, turn.quantile(0.99).Seconds())
	}
	return context.Cause(ctx)
}

// flood sends requests through the middleware until ctx ends.
func (w *floodWay) flood(ctx context.Context, wg *sync.WaitGroup, from func() netip.Addr, counts bool) {
	perClient := ratelimit.TokenBucket("perClient", 10, time.Hour)
	limit := httplimit.Middleware{Limiter: &limits, DB: w.db, Timeout: floodTimeout,
		Requests: func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perClient.Key(httplimit.ClientIP{}.Key(r))}, nil
		},
	}
	var handler http.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) })
	if !w.bare {
		handler = limit.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	}
	begin := time.Now()
	var tickets atomic.Int64
	for range floodConnections {
		wg.Go(func() {
			for ctx.Err() == nil {
				due := begin.Add(time.Duration(tickets.Add(1)) * (time.Second / floodPerSecond))
				time.Sleep(time.Until(due))
				response := discard{header: http.Header{}, status: http.StatusOK}
				handler.ServeHTTP(&response, (&http.Request{Method: http.MethodGet, RemoteAddr: from().String() + ":1024", Header: http.Header{}}).WithContext(ctx))
				if counts && ctx.Err() == nil {
					w.count[response.status].Add(1)
				}
			}
		})
	}
}

// discard keeps the status of an answer.
type discard struct {
	header http.Header
	status int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(status int)      { d.status = status }
