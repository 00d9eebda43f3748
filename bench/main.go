// Command bench measures this library beside Redis and beside other ways to limit rates in Postgres.
//
//	go run ./bench list          print the figures, one per line, each with its bound
//	go run ./bench FIGURE...     measure these figures; each ends with a line FIGURE VALUE
//	go run ./bench -quick all    run every figure for a moment, or those named: it shows that they work, and measures nothing
//	go run ./bench contenders    measure every contender
//	go run ./bench refunds       simulate the use of a limit whose estimates are refunded; needs no server
//	go run ./bench growth [PAGE] measure what a decision costs, and print the tables of bench/GROWTH.md; or write them into that page
//	go run ./bench all           measure everything, and write bench/RESULTS.md and bench/*.svg
//
// It starts a Postgres with fsync on, by internal/postgres, and a redis-server, which must be installed.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"text/tabwriter"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, args []string) (err error) {
	quick := len(args) > 0 && args[0] == "-quick"
	if quick {
		args = args[1:]
	}
	if quick && (len(args) == 0 || len(args) == 1 && args[0] == "all") {
		args = nil
		for _, f := range figures {
			args = append(args, f.name)
		}
	}
	if len(args) == 0 || args[0] == "list" {
		return list(out)
	}
	if args[0] == "refunds" {
		return printRefunds(out)
	}
	if args[0] == childCommand {
		return child(ctx, os.Stdin, out)
	}
	if args[0] == "growth" && len(args) <= 2 {
		return printGrowth(ctx, out, wholeGrowth, args[1:])
	}
	var asked []figure
	for _, name := range args {
		if len(args) == 1 && !quick && (name == "all" || name == "contenders") {
			break
		}
		f, ok := figureNamed(name)
		if !ok {
			return fmt.Errorf("there is no figure %q; `go run ./bench list` names them", name)
		}
		asked = append(asked, f)
	}

	e := &env{out: out, quick: quick}
	defer func() { err = errors.Join(err, e.close()) }()
	switch args[0] {
	case "all":
		return all(ctx, e)
	case "contenders":
		measured, err := measureContenders(ctx, e)
		if err == nil {
			writeContenders(out, measured)
		}
		return err
	}
	var errs []error
	for _, f := range asked {
		if ctx.Err() == nil {
			_, err := e.measure(ctx, f)
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, ctx.Err())...)
}

func list(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, f := range figures {
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.name, f.bounds(), f.what)
	}
	return w.Flush()
}

// measure runs one figure and prints its line.
func (e *env) measure(ctx context.Context, f figure) (outcome, error) {
	fmt.Fprintf(e.out, "%s: %s; must be %s\n", f.name, f.what, f.bounds())
	before := readCPUTime()
	result, err := f.run(ctx, e)
	if err = errors.Join(err, e.undo(ctx)); err != nil {
		return outcome{}, fmt.Errorf("%s: %w", f.name, err)
	}
	if stolen := before.until(readCPUTime()).share(); stolen >= 0.02 {
		disturbed := fmt.Sprintf("the host gave %.0f %% of the processors' time to other machines", 100*stolen)
		fmt.Fprintln(e.out, " ", disturbed)
		result.note += "; " + disturbed
	}
	fmt.Fprintf(e.out, "%s %.4g\n", f.name, result.value)
	return result, nil
}
