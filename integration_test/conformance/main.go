// Command conformance says what of the limiter works on a server: each verb, handle and isolation level, what several
// callers do to each other, and whether the numbers are exact. The server must speak Postgres and have been migrated.
//
//	go run ./integration_test/conformance -url URL        # a table in Markdown
//	go run ./integration_test/conformance -url URL -json  # the same as JSON, with every trial
//	go run ./integration_test/conformance -url URL -only 'sweep|Coalescer'
//
// It uses the schema ratelimit as it is, and needs no more rights than an application. Its limits have a
// random prefix, and their rows are deleted afterwards. A business table is used if it can be made, or if -table names one.
// Use a schema without limits of value: if the engine is wrong on this server, it may take or delete other rows too.
//
// -tool names the program txlimit, whose commands are run on the server, too. make conformance builds it.
//
// Each case is tried in several ways: on pools, in transactions of each level, with one key and with several. If it works
// in some ways and is refused in others, it works with a condition. The exit status is 1 if something is wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"time"
)

// config is what the flags say.
type config struct {
	url     string
	json    bool
	only    string
	table   string
	tool    string
	short   bool
	strict  bool
	except  string
	timeout time.Duration
}

// load is how much callers contend.
type load struct {
	goroutines int           // which contend, with as many connections
	time       time.Duration // for a limit that refills
	calls      int           // that race for the first uses of keys
}

func (c config) load() load {
	if c.short {
		return load{goroutines: 16, time: 300 * time.Millisecond, calls: 400}
	}
	return load{goroutines: 32, time: 3 * time.Second, calls: 4000}
}

var errWrong = errors.New("something is wrong or, with -strict, refused on this server: see the table")

func main() {
	var c config
	flag.StringVar(&c.url, "url", os.Getenv("DATABASE_URL"), "the database")
	flag.BoolVar(&c.json, "json", false, "print JSON")
	flag.StringVar(&c.only, "only", "", "run the cases whose names match this regular expression")
	flag.StringVar(&c.table, "table", "", "a table with a text column id, for business rows; without it, "+defaultTable+" is made")
	flag.StringVar(&c.tool, "tool", "", "the program txlimit, to run its commands on the server; without it, they are not tried")
	flag.BoolVar(&c.short, "short", false, "let 16 callers contend for a short time, instead of 32")
	flag.BoolVar(&c.strict, "strict", false, "fail if anything is refused, too: a server of one's own refuses nothing")
	flag.StringVar(&c.except, "except", "", "with -strict, cases whose names match this regular expression must be refused")
	flag.DurationVar(&c.timeout, "timeout", time.Minute, "after this, a trial hangs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, c, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		if errors.Is(err, errWrong) {
			os.Exit(1)
		}
		os.Exit(2)
	}
}

// run tries all cases and prints the report.
func run(ctx context.Context, c config, out, progress io.Writer) error {
	if c.url == "" || flag.NArg() > 0 {
		return errors.New("no server: set -url")
	}
	only, err := regexp.Compile(c.only)
	if err != nil {
		return err
	}
	s, err := open(ctx, c)
	if err != nil {
		return err
	}
	defer s.close()
	r := report{Server: s.describe(ctx), Commit: commit(ctx), Arguments: c.arguments()}
	began := time.Now()
	for _, tried := range allCases() {
		if !only.MatchString(tried.name) || tried.tool && c.tool == "" || tried.long && c.short {
			continue
		}
		result := s.try(ctx, tried)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.add(result)
		fmt.Fprintf(progress, "%6.1fs  %s: %s\n", time.Since(began).Seconds(), result.Name, result.Verdict)
	}
	if c.only == "" {
		var oneServer bool
		if err := s.pool.QueryRow(ctx, "SELECT ratelimit._one_server() AND NOT ratelimit._distributed()").Scan(&oneServer); err != nil {
			return err
		}
		r.add(s.sent.conclude(s.pool.Config().ConnConfig.DefaultQueryExecMode, oneServer))
	}
	r.Leftover = s.leftover
	if c.json {
		err = r.printJSON(out)
	} else {
		err = r.printMarkdown(out)
	}
	if err == nil && (r.Summary[wrong] > 0 || c.strict && !c.asRefused(r.Cases)) {
		err = errWrong
	}
	return err
}

// asRefused reports whether those cases are refused that must be, and no others.
func (c config) asRefused(cases []result) bool {
	must, err := regexp.Compile(c.except)
	return err == nil && !slices.ContainsFunc(cases, func(r result) bool { return (r.Verdict == refused) != (c.except != "" && must.MatchString(r.Name)) })
}

func (c config) arguments() string {
	text := fmt.Sprintf("-short=%t -timeout %v", c.short, c.timeout)
	if c.tool == "" {
		text += " (without -tool, which names the program txlimit)"
	}
	if c.only != "" {
		text += fmt.Sprintf(" -only %q", c.only)
	}
	return text
}
