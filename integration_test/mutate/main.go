// Command mutate breaks the engine on purpose, one edit at a time, and shows which test notices. An edit that no test
// notices shows code that no test protects. It works on a copy of the repository, with the present tests.
//
//	go run ./integration_test/mutate             # all of them
//	go run ./integration_test/mutate -only NAME  # edits whose names match the regular expression
//	go run ./integration_test/mutate -world 5m   # does TestWorld notice, within five minutes?
//
// The edits are in the files *_mutations.go. Each names the tests that should notice it. Each processor tries one edit at a
// time. If none of its tests notices an edit, it is printed as a survivor, and the exit status is 1. If an edit does not
// compile, or its SQL cannot run, that does not count as noticed: it is an error of the edit.
//
// equivalents.go has the edits that were left out.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/txlimit/txlimit/internal/postgres"
)

var allMutations = slices.Concat(sqlMutations, algebraMutations, valueMutations, callMutations, coalescerMutations,
	inMemoryMutations, httpMutations, rpcMutations, replayMutations, overrideMutations, usageMutations, verbMutations, openMutations, holdMutations, pauseMutations)

// mutation is one edit.
type mutation struct {
	name  string // for -only
	file  string
	what  string // what is broken
	old   string // the text to replace, which occurs once
	new   string
	tests string // the tests that should notice it, separated by bars
}

func main() {
	only := flag.String("only", "", "run the mutations whose name matches this regular expression")
	world := flag.Duration("world", 0, "run TestWorld for so long, in place of the tests that each mutation names")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	survivors, err := run(ctx, *only, *world)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
	}
	if err != nil || survivors > 0 {
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, world time.Duration) (survivors int, err error) {
	pattern, err := regexp.Compile(only)
	if err != nil {
		return 0, err
	}
	chosen := slices.DeleteFunc(slices.Clone(allMutations), func(m mutation) bool { return !pattern.MatchString(m.name) })
	if len(chosen) == 0 {
		return 0, fmt.Errorf("no mutation's name matches %q", only)
	}
	if world > 0 {
		for i := range chosen {
			chosen[i].tests = "TestWorld"
		}
	}
	labs := make([]*lab, min(runtime.NumCPU(), len(chosen)))
	for i := range labs {
		server, startErr := postgres.Start(ctx)
		if startErr != nil {
			return 0, startErr
		}
		defer func() { err = errors.Join(err, server.Close()) }()
		if labs[i], err = newLab(ctx, server); err != nil {
			return 0, err
		}
		defer labs[i].remove()
		labs[i].world = world
		fmt.Fprintln(os.Stderr, "on", server)
	}

	var problems []string
	for _, m := range chosen {
		if err := labs[0].applies(m); err != nil {
			problems = append(problems, err.Error())
		}
	}
	if problems != nil {
		return 0, fmt.Errorf("the table of mutations is out of date:\n%s", strings.Join(problems, "\n"))
	}
	if failed, err := labs[0].testNamed(ctx, chosen, max(allPatience, world+longPatience)); err != nil {
		return 0, err
	} else if failed != nil {
		return 0, fmt.Errorf("%v fails without a mutation, too:\n%s", failed, failed.out)
	}

	begin := time.Now()
	results := tryAll(ctx, labs, chosen)
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	broken := 0
	for i, m := range chosen {
		switch {
		case results[i].err != nil:
			broken++
		case results[i].failed == nil:
			survivors++
		}
		fmt.Printf("%s: %s, in %s: noticed by %s after %v\n", m.name, m.what, m.file, results[i], results[i].after)
	}
	fmt.Printf("\n%d mutations, %d survivors, in %v.\n", len(chosen), survivors, time.Since(begin).Round(time.Second))
	if broken > 0 {
		return survivors, fmt.Errorf("%d edits are wrong in themselves, or the machine is too busy", broken)
	}
	return survivors, nil
}

// result is the result of a mutation.
type result struct {
	failed *failure
	err    error // the edit cannot be applied or run
	after  time.Duration
}

func (r result) String() string {
	switch {
	case r.err != nil:
		return "NO TEST: THE EDIT IS WRONG"
	case r.failed == nil:
		return "NO TEST"
	}
	return r.failed.String()
}

// tryAll tries the mutations, one at a time in each lab, and returns their results.
func tryAll(ctx context.Context, labs []*lab, mutations []mutation) []result {
	results := make([]result, len(mutations))
	var next atomic.Int64
	var wg sync.WaitGroup
	for _, l := range labs {
		l.took = maps.Clone(labs[0].took)
	}
	for _, l := range labs {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(mutations) {
					return
				}
				begin := time.Now()
				failed, err := l.try(ctx, mutations[i])
				r := result{failed, err, time.Since(begin).Round(time.Second)}
				if err != nil && ctx.Err() == nil {
					fmt.Fprintf(os.Stderr, "%s: %v\n", mutations[i].name, err)
				}
				fmt.Fprintf(os.Stderr, "%-30s %-70s %v\n", mutations[i].name, r, r.after)
				results[i] = r
			}
		})
	}
	wg.Wait()
	return results
}
