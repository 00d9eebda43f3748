// Command mutate breaks the engine on purpose, one edit at a time, and shows which test notices. An edit that no test
// notices shows code that no test protects. It works on a copy of the repository, with the present tests.
//
//	go run ./integration_test/mutate                   # the edits that are typed by hand
//	go run ./integration_test/mutate -only NAME        # edits whose names match the regular expression
//	go run ./integration_test/mutate -world 5m         # does TestWorld notice, within five minutes?
//	go run ./integration_test/mutate -sample 20        # as many that operators make, of all files (or -only ...): prints a seed
//	go run ./integration_test/mutate -sample 20 -matrix # how many mutants each test notices
//
// Operators make most edits: they delete a statement or a condition, swap < and <=, put a constant (operators_sql.go, operators_go.go).
// areas.go has the tests that may notice. They print a score: survivors may be equivalent (equivalents.go), so they fail nothing.
//
// What no operator makes is in the files *_mutations.go. Each edit names the tests that should notice it. If none does, the exit
// status is 1. Each processor tries one edit at a time. If an edit does not compile, or its SQL cannot run, that does not count as
// noticed: a typed one is wrong, and an operator's is stillborn.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
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
	at    int    // where old is, if an operator made this
	rest  string // the tests that run if the others do not notice it
}

func (m mutation) byOperator() bool { return m.at > 0 }

type options struct {
	only   string
	world  time.Duration
	sample int
	seed   uint64
	matrix bool
}

func main() {
	var o options
	flag.StringVar(&o.only, "only", "", "run the mutations whose name matches this regular expression: typed ones, or else those of operators")
	flag.DurationVar(&o.world, "world", 0, "run TestWorld for so long, in place of the tests that each mutation names")
	flag.IntVar(&o.sample, "sample", 0, "run so many mutations that operators make")
	flag.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()), "of the sample")
	flag.BoolVar(&o.matrix, "matrix", false, "let all tests of an area run, and count what each notices")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	survivors, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
	}
	if err != nil || survivors > 0 {
		os.Exit(1)
	}
}

// choose returns what to run: typed mutations, or a sample of those that operators make, or all whose name matches.
func choose(root string, o options) ([]mutation, error) {
	pattern, err := regexp.Compile(o.only)
	if err != nil {
		return nil, err
	}
	other := func(m mutation) bool { return !pattern.MatchString(m.name) }
	chosen := slices.DeleteFunc(slices.Clone(allMutations), other)
	if o.sample > 0 || len(chosen) == 0 {
		if chosen, err = allMutants(root); err != nil {
			return nil, err
		}
		chosen = slices.DeleteFunc(chosen, other)
		if o.sample > 0 {
			rand.New(rand.NewPCG(o.seed, 0)).Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
			fmt.Printf("%d of %d mutants, -seed %d\n", min(o.sample, len(chosen)), len(chosen), o.seed)
			chosen = chosen[:min(o.sample, len(chosen))]
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no mutation's name matches %q", o.only)
	}
	for i, m := range chosen {
		if o.world > 0 {
			chosen[i].tests = "TestWorld"
		} else if m.byOperator() {
			if chosen[i].tests, chosen[i].rest, err = testsOf(root, m.file); err != nil {
				return nil, err
			}
		}
	}
	return chosen, nil
}

func run(ctx context.Context, o options) (failed int, err error) {
	root, err := topLevel(ctx)
	if err != nil {
		return 0, err
	}
	chosen, err := choose(root, o)
	if err != nil {
		return 0, err
	}
	labs := make([]*lab, min(runtime.NumCPU(), len(chosen)))
	for i := range labs {
		server, startErr := postgres.Start(ctx)
		if startErr != nil {
			return 0, startErr
		}
		defer func() { err = errors.Join(err, server.Close()) }()
		if labs[i], err = newLab(ctx, root, server); err != nil {
			return 0, err
		}
		defer labs[i].remove()
		labs[i].world, labs[i].matrix = o.world, o.matrix
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
	if !chosen[0].byOperator() || o.world > 0 { // an area's tests are tried when they fail: see confirmed
		if failed, err := labs[0].testNamed(ctx, chosen, max(allPatience, o.world+longPatience)); err != nil {
			return 0, err
		} else if failed != nil {
			return 0, fmt.Errorf("%v fails without a mutation, too:\n%s", failed, failed.out)
		}
	}

	begin := time.Now()
	results := tryAll(ctx, labs, chosen)
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	broken, score := report(chosen, results)
	fmt.Printf("\n%d mutations, %d survivors, in %v.\n", len(chosen), score.survived, time.Since(begin).Round(time.Second))
	switch {
	case chosen[0].byOperator():
		return 0, nil
	case broken > 0:
		err = fmt.Errorf("%d edits are wrong in themselves, or the machine is too busy", broken)
	}
	return score.survived, err
}

// score counts mutants.
type score struct{ killed, survived, stillborn int }

func (s score) String() string {
	return fmt.Sprintf("%3.0f %%  %d killed, %d survived, %d stillborn", 100*float64(s.killed)/float64(max(1, s.killed+s.survived)), s.killed, s.survived, s.stillborn)
}

// report prints the results, the score of each file, and what each test of a matrix noticed.
func report(chosen []mutation, results []result) (broken int, all score) {
	files, tests, alone := map[string]*score{}, map[string]int{}, map[string]int{}
	for i, m := range chosen {
		r := results[i]
		fmt.Printf("%s: %s, in %s: noticed by %s after %v\n", m.name, m.what, m.file, r, r.after)
		if files[m.file] == nil {
			files[m.file] = &score{}
		}
		for _, s := range []*score{files[m.file], &all} {
			switch {
			case r.err != nil:
				s.stillborn++
			case r.failed == nil:
				s.survived++
			default:
				s.killed++
			}
		}
		if r.failed != nil {
			for _, test := range r.failed.tests {
				tests[test]++
				if len(r.failed.tests) == 1 {
					alone[test]++
				}
			}
		}
	}
	fmt.Println("\nscore")
	for _, file := range slices.Sorted(maps.Keys(files)) {
		fmt.Printf("%-45s %v\n", file, files[file])
	}
	fmt.Printf("%-45s %v\n", "all", all)
	for _, test := range slices.SortedFunc(maps.Keys(tests), func(a, b string) int { return cmp.Or(tests[b]-tests[a], strings.Compare(a, b)) }) {
		fmt.Printf("%5d, %3d alone: %s\n", tests[test], alone[test], test)
	}
	return all.stillborn, all
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
		return "NO TEST: IT CANNOT RUN"
	case r.failed == nil:
		return "NO TEST"
	}
	return cmp.Or(strings.Join(r.failed.tests, " "), r.failed.String())
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
				if failed != nil && mutations[i].byOperator() {
					err = l.confirmed(ctx, failed)
				}
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
