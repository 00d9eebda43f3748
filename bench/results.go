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

// all measures everything and writes RESULTS.md and the charts. A figure that misses its bound is not an error; the table shows it.
func all(ctx context.Context, e *env) error {
	begin := time.Now()
	dir := "bench"
	if _, err := os.Stat(dir); err != nil {
		dir = "." // the working directory is bench
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
	fmt.Fprintf(w, "Both sides of a ratio ran in turn, in slices, after a warm-up. A ratio is the median over the pairs of slices. If the host of a virtual machine gave 2 %% or more of the processors' time to other machines, the figure says so and is less reliable.\n\n")
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
	fmt.Fprintf(w, "\n## Contenders\n\n`go run ./bench contenders` prints these tables. Each call makes one decision. %d goroutines call: all on one hot key, or each on its own key. "+
		"The contenders ran in turn. Allocations, SQL statements and retries are per decision. Allocations are those of the client process. SQL statements include BEGIN and COMMIT. "+
		"Retries are transactions or attempts that ran again. Stolen is the share of the processors' time that the host of a virtual machine gave to other machines. "+
		"Over-grant shows the tokens granted and the most that were due, when %d goroutines call one key with a burst of %d and a rate of %d per second.\n",
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

// about describes the machine and the versions.
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

// processor is the name of the processor's model, if Linux has it.
func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, found := strings.Cut(line, ":"); found && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown processor"
}
