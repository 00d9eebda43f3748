package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/migrationgen"
	"github.com/txlimit/txlimit/internal/postgres"
)

// packages are the packages whose tests should notice.
var packages = []string{
	"internal/algebra", "internal/calendar", "internal/inmemory", "ratelimit", "ratelimit/httplimit", "ratelimit/rpclimit", "ratelimit/ratelimittest",
	"ratelimit/replay", "ratelimit/usage", "cmd/txlimit", "integration_test/conformance", "integration_test/attack", "integration_test/coalescer",
	"integration_test/console", "integration_test/holds", "integration_test/http", "integration_test/model", "integration_test/ops", "integration_test/rpc",
	"integration_test/sql", "integration_test/tx", "integration_test/verbs", "integration_test/world",
}

// Some mutations make a test hang. A test counts as hung after patience, plus a multiple of its time without a mutation. If
// that time is not known, it counts as hung after longPatience. All tests together may take allPatience.
const (
	patience     = 15 * time.Second
	longPatience = 2 * time.Minute
	allPatience  = 30 * time.Minute
	areaPatience = 10 * time.Minute // of an area's tests in a package
)

// lab is a place to try mutations: a copy of the repository, and a server.
type lab struct {
	dir    string
	server *postgres.Server
	homes  map[string][]string // by test: the packages with a test of this name
	world  time.Duration       // how long TestWorld plays; 0: as usual
	matrix bool                // all tests that notice, not the first one

	goFile   string                   // the Go file that has a mutation now, or empty
	compiled map[string]*compiled     // by package
	took     map[string]time.Duration // durations of passed tests
}

// newLab copies the files of the working tree that git tracks or would add.
func newLab(ctx context.Context, root string, server *postgres.Server) (l *lab, err error) {
	l = &lab{server: server, compiled: map[string]*compiled{}, took: map[string]time.Duration{}}
	if l.dir, err = os.MkdirTemp("", "txlimit-mutate-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			l.remove()
		}
	}()
	list := exec.CommandContext(ctx, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
	list.Dir = root
	files, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	for file := range strings.SplitSeq(strings.TrimSuffix(string(files), "\x00"), "\x00") {
		if err := l.copy(root, file); err != nil {
			return nil, err
		}
	}
	return l, l.index()
}

// topLevel returns the directory of the repository.
func topLevel(ctx context.Context) (string, error) {
	top, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return "", fmt.Errorf("git rev-parse: %w", err)
	}
	return strings.TrimSpace(string(top)), nil
}

func (l *lab) remove() { _ = os.RemoveAll(l.dir) }

// copy copies a file, unless it was deleted and git does not know that yet.
func (l *lab) copy(root, file string) error {
	text, err := os.ReadFile(filepath.Join(root, file))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(filepath.Join(l.dir, file)), 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.dir, file), text, 0o600)
}

var testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(\w+ \*testing\.[TF]`)

// index records which package has which test.
func (l *lab) index() error {
	l.homes = map[string][]string{}
	for _, pkg := range packages {
		tests, err := testsIn(filepath.Join(l.dir, pkg, "*_test.go"))
		if err != nil {
			return err
		}
		for _, test := range tests {
			l.homes[test] = append(l.homes[test], pkg)
		}
	}
	return nil
}

// testsIn returns the names of the tests in files.
func testsIn(pattern string) (names []string, err error) {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, match := range testFunction.FindAllSubmatch(text, -1) {
			names = append(names, string(match[1]))
		}
	}
	return names, nil
}

// applies returns an error if the mutation cannot be made, or a test that it names does not exist.
func (l *lab) applies(m mutation) error {
	if _, _, err := l.mutated(m); err != nil {
		return err
	}
	for test := range strings.SplitSeq(m.tests, "|") {
		if len(l.homes[test]) == 0 {
			return fmt.Errorf("%s: there is no test %q", m.name, test)
		}
	}
	return nil
}

// mutated returns the text of the mutation's file, before and after it.
func (l *lab) mutated(m mutation) (before, after string, err error) {
	text, err := os.ReadFile(filepath.Join(l.dir, m.file))
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", m.name, err)
	}
	before = string(text)
	if m.byOperator() {
		return before, before[:m.at] + m.new + before[m.at+len(m.old):], nil
	}
	found := strings.Count(before, m.old)
	if m.old == m.new || found != 1 {
		return "", "", fmt.Errorf("%s: the text to replace occurs %d times in %s", m.name, found, m.file)
	}
	return before, strings.Replace(before, m.old, m.new, 1), nil
}

// try makes a mutation and runs the tests that should notice it.
func (l *lab) try(ctx context.Context, m mutation) (failed *failure, err error) {
	before, after, err := l.mutated(m)
	if err != nil {
		return nil, err
	}
	for pkg := range l.named([]mutation{m, {tests: m.rest}}) {
		if _, err := l.unmutated(ctx, pkg); err != nil {
			return nil, err
		}
	}
	defer func() {
		l.goFile = ""
		err = errors.Join(err, l.write(m.file, before))
	}()
	if strings.HasSuffix(m.file, ".go") {
		l.goFile = m.file
	}
	if err := l.write(m.file, after); err != nil {
		return nil, err
	}
	failed, err = l.testNamed(ctx, []mutation{m}, l.patience(m))
	if m.rest == "" || err != nil || failed != nil && !l.matrix {
		return failed, err
	}
	more, err := l.testNamed(ctx, []mutation{{tests: m.rest}}, l.patience(m))
	if failed == nil || more == nil {
		return cmp.Or(failed, more), err
	}
	failed.tests = append(failed.tests, more.tests...)
	return failed, err
}

// patience returns how long the tests that a mutation names may take together.
func (l *lab) patience(m mutation) time.Duration {
	all := patience
	if m.byOperator() {
		return areaPatience
	}
	if l.world > 0 {
		return l.world + longPatience // it shrinks what has failed
	}
	for test := range strings.SplitSeq(m.tests, "|") {
		took, known := l.took[test]
		if !known {
			return longPatience
		}
		all += 4 * took
	}
	return all
}

// write changes a file. The migrations are generated from the engine, and read when the tests run.
func (l *lab) write(file, text string) error {
	if err := os.WriteFile(filepath.Join(l.dir, file), []byte(text), 0o600); err != nil {
		return err
	}
	return migrationgen.Write(filepath.Join(l.dir, "migrations"))
}

// named returns the tests that the mutations name, by package.
func (l *lab) named(mutations []mutation) map[string][]string {
	named := map[string][]string{}
	for _, m := range mutations {
		for test := range strings.SplitSeq(m.tests, "|") {
			for _, pkg := range l.homes[test] {
				if !slices.Contains(named[pkg], test) {
					named[pkg] = append(named[pkg], test)
				}
			}
		}
	}
	return named
}

// testNamed runs the tests that the mutations name, those on a database last.
func (l *lab) testNamed(ctx context.Context, mutations []mutation, patience time.Duration) (all *failure, err error) {
	named := l.named(mutations)
	pkgs := slices.Sorted(maps.Keys(named))
	slices.SortStableFunc(pkgs, func(a, b string) int {
		return strings.Count(a, "integration_test") - strings.Count(b, "integration_test")
	})
	for _, pkg := range pkgs {
		failed, err := l.test(ctx, pkg, "-test.run=^("+strings.Join(named[pkg], "|")+")$", patience)
		if all != nil && failed != nil {
			failed.tests = append(all.tests, failed.tests...)
		}
		if all = cmp.Or(failed, all); err != nil || all != nil && !l.matrix {
			return all, err
		}
	}
	return all, nil
}

// confirmed returns an error if a test fails without the mutation, too. A test is asked once: it has passed then.
func (l *lab) confirmed(ctx context.Context, failed *failure) error {
	tests := slices.DeleteFunc(append([]string{failed.test}, failed.tests...), func(test string) bool { _, passed := l.took[test]; return passed })
	again, err := l.testNamed(ctx, []mutation{{tests: strings.Join(tests, "|")}}, areaPatience)
	if again != nil {
		err = fmt.Errorf("%v fails without the mutation, too", again)
	}
	return err
}

// failure says how a mutation was noticed.
type failure struct {
	test  string
	tests []string // for the matrix: all of them
	how   string   // if it is not an ordinary failure
	out   string   // the tests' output
}

// hung is how a failure came about that took longer than the patience.
const hung = " (hung)"

func (f *failure) String() string { return f.test + f.how }

// test runs tests of a package until one fails, and kills the rest. They use the one server, so what they leave behind is
// removed with it.
func (l *lab) test(ctx context.Context, pkg, which string, patience time.Duration) (*failure, error) {
	ctx, cancel := context.WithTimeout(ctx, max(20*time.Minute, 2*patience))
	defer cancel()
	binary, err := l.binary(ctx, pkg)
	if err != nil {
		return nil, err
	}
	temporary := filepath.Join(l.dir, ".tmp") // what a test leaves there is removed with the lab
	if err := os.MkdirAll(temporary, 0o700); err != nil {
		return nil, err
	}
	args := []string{"-test.v", "-test.failfast=" + strconv.FormatBool(!l.matrix), "-test.parallel=4", "-test.short=" + strconv.FormatBool(patience == areaPatience), "-test.timeout=" + patience.String(), which}
	if l.world > 0 {
		args = append(args, "-worldtime="+l.world.String(), "-worldpairs=false") // a pair that has not met is nothing that the edit did
	}
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = filepath.Join(l.dir, pkg)
	cmd.Env = append(os.Environ(), "TXLIMIT_TEST_DATABASE_URL="+l.server.URL(), "TXLIMIT_TEST_MIGRATIONS="+filepath.Join(l.dir, "migrations"), "TMPDIR="+temporary)
	cmd.WaitDelay = 10 * time.Second
	read, write := io.Pipe()
	cmd.Stdout, cmd.Stderr = write, write
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		_ = write.Close()
	}()
	failed, out := l.firstFailure(read)
	cancel() // the other running tests
	_, _ = io.Copy(io.Discard, read)
	err = <-ended
	switch {
	case failed == nil && err == nil:
		return nil, nil
	case nonsense.Match(out):
		return nil, fmt.Errorf("this SQL cannot run: %s", nonsense.Find(out))
	case failed == nil:
		return nil, fmt.Errorf("%w:\n%s", err, out)
	}
	failed.out = string(out)
	return failed, nil
}

// nonsense matches SQLSTATEs of SQL that cannot run at all: syntax errors, unknown names, wrong types, and a function that does not return.
var nonsense = regexp.MustCompile(`.*SQLSTATE (42(601|703|804|702|803|846|883|P13|P18)|2F005).*`)

var (
	passLine    = regexp.MustCompile(`^\s*--- PASS: (\w+)[^ ]* \((.*)\)$`)
	failLine    = regexp.MustCompile(`^\s*--- FAIL: (\w+)`)
	runningLine = regexp.MustCompile(`^\s+(\w+)[^ ]* \([0-9hms.]+\)$`)
)

// firstFailure reads the tests' output up to the first failure, or for the matrix to the end, and returns the output before it.
func (l *lab) firstFailure(r io.Reader) (*failure, []byte) {
	var out bytes.Buffer
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	how, last := "", ""
	var all *failure
	for lines.Scan() {
		line := lines.Text()
		fmt.Fprintln(&out, line)
		switch {
		case passLine.MatchString(line):
			match := passLine.FindStringSubmatch(line)
			if took, err := time.ParseDuration(match[2]); err == nil {
				l.took[match[1]] = max(l.took[match[1]], took) // perhaps a subtest's
			}
		case failLine.MatchString(line):
			test := failLine.FindStringSubmatch(line)[1]
			all = cmp.Or(all, &failure{test: test, how: how})
			if !l.matrix {
				return all, out.Bytes()
			}
			if !slices.Contains(all.tests, test) {
				all.tests = append(all.tests, test)
			}
		case strings.HasPrefix(line, "=== "): // RUN, CONT: the name of the test
			last = strings.Fields(line)[len(strings.Fields(line))-1]
		case strings.HasPrefix(line, "panic: test timed out"):
			how = hung
		case how == hung && runningLine.MatchString(line):
			return &failure{test: runningLine.FindStringSubmatch(line)[1], how: how}, out.Bytes()
		case strings.HasPrefix(line, "panic: "), strings.HasPrefix(line, "fatal error: "):
			test, _, _ := strings.Cut(last, "/")
			return &failure{test: test, how: " (" + line + ")"}, out.Bytes()
		}
	}
	return all, out.Bytes()
}
