package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// all runs everything and writes RESULTS.md and the charts. A figure that misses its bound is no error: the table says so.
func all(ctx context.Context, e *env) error {
	begin := time.Now()
	dir := "bench"
	if _, err := os.Stat(dir); err != nil {
		dir = "." // we are in it
	}
	measured, err := measureContenders(ctx, e)
	if err != nil {
		return err
	}
	var missed []error
	results := make([]*outcome, len(figures))
	for i, f := range figures {
		result, err := e.measure(ctx, f)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			fmt.Fprintln(e.out, err)
			missed = append(missed, err)
		default:
			results[i] = &result
		}
	}
	if err := drawCharts(dir, measured); err != nil {
		return err
	}
	var b strings.Builder
	if err := e.writeResults(ctx, &b, results, measured, time.Since(begin)); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "RESULTS.md"), []byte(b.String()), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(e.out, "\n%s", b.String())
	return errors.Join(missed...)
}

func (e *env) writeResults(ctx context.Context, w io.Writer, results []*outcome, measured []measurement, took time.Duration) error {
	about, err := e.about(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "# Results\n\nWritten by `make bench` (%s, %v). %s\n\n", time.Now().UTC().Format("2006-01-02 15:04 MST"), took.Round(time.Second), about)
	fmt.Fprintf(w, "Both sides of a ratio ran in turn, in slices, after a warm-up; a ratio is the median of the pairs of slices. Where the host of a virtual machine gave a fiftieth or more of the processors' time to others, the figure says so, and is the less to be relied on.\n\n")
	fmt.Fprintf(w, "## Figures\n\n| figure | what | bound | value | pass | measured | command |\n|---|---|---|---|---|---|---|\n")
	for i, f := range figures {
		value, pass, note := "", "no", "not measured: it failed"
		if r := results[i]; r != nil {
			value, note = fmt.Sprintf("%.3g", r.value), r.note
			if f.passes(r.value) {
				pass = "yes"
			}
		}
		fmt.Fprintf(w, "| `%s` | %s | %s | %s | %s | %s | `go run ./bench %s` |\n", f.name, f.what, f.bounds(), value, pass, note, f.name)
	}
	writeContenders(w, measured)
	return nil
}

func writeContenders(w io.Writer, measured []measurement) {
	fmt.Fprintf(w, "\n## Contenders\n\nBy `go run ./bench contenders`. One decision a call, %d goroutines: all on one hot key, and each on a key of its own. "+
		"All of them ran in turn. Allocations are this process's; statements count BEGIN and COMMIT; retries are transactions or attempts that ran again. "+
		"Stolen is what the host of a virtual machine gave to others of the processors' time. "+
		"Over-grant: tokens granted, of those that were due at the most, when %d goroutines hammer one key with a burst of %d and %d per second.\n",
		tableGoroutines, grantGoroutines, grantBurst, grantRate)
	for i, m := range modes {
		fmt.Fprintf(w, "\n### %s\n\n![throughput over goroutines, %s](%s)\n\n", m.title, m.title, m.file)
		fmt.Fprintf(w, "| contender | what | decisions/s | p50 | p99 | allocations | SQL statements | retries | stolen | over-grant |\n|---|---|---|---|---|---|---|---|---|---|\n")
		for _, c := range measured {
			t := c.modes[i]
			at := t.at[tableGoroutines]
			statements, retries, over := fmt.Sprintf("%.3g", t.statements), fmt.Sprintf("%.3g", t.retries), c.grants.String()
			if c.redis {
				statements, retries = "none", "none"
			}
			if c.floor {
				over = "decides nothing"
			}
			fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %.0f | %s | %s | %.0f %% | %s |\n", c.name, c.what, thousands(at.perSecond()),
				short(at.latencies.quantile(0.5)), short(at.latencies.quantile(0.99)), float64(at.mallocs)/float64(at.latencies.n), statements, retries, 100*at.cpu.share(), over)
		}
	}
}

// about says what all this ran on.
func (e *env) about(ctx context.Context) (string, error) {
	conn, err := pgx.Connect(ctx, e.postgres.URL())
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	var version, fsync, sync string
	err = conn.QueryRow(ctx, `SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')`).Scan(&version, &fsync, &sync)
	if err != nil {
		return "", err
	}
	parts := []string{
		fmt.Sprintf("%s, %d cores, %s/%s, shared by client and server", processor(), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH),
		runtime.Version(),
		fmt.Sprintf("PostgreSQL %s with its default settings (fsync %s, synchronous_commit %s)", version, fsync, sync),
	}
	if e.redis != nil {
		parts = append(parts, fmt.Sprintf("Redis %s without persistence", e.redis.version))
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			if slices.Contains([]string{"github.com/jackc/pgx/v5", "github.com/redis/go-redis/v9", "github.com/redis/rueidis",
				"github.com/go-redis/redis_rate/v10", "github.com/throttled/throttled/v2"}, dep.Path) {
				parts = append(parts, strings.TrimPrefix(dep.Path, "github.com/")+" "+dep.Version)
			}
		}
	}
	return strings.Join(parts, "; ") + ".", nil
}

// processor is the model's name where Linux tells it.
func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, found := strings.Cut(line, ":"); found && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown processor"
}
