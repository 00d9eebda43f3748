package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// childCommand is the argument with which this program calls itself for a figure of several processes.
const childCommand = "child"

// job is the order that a child reads from its standard input. The child answers when it is ready, begins at the next line, and
// answers with a count.
type job struct {
	URL        string
	Goroutines int
	Queue      bool
	For        time.Duration
}

type count struct{ Attempts, Commits int64 }

func child(ctx context.Context, in io.Reader, out io.Writer) error {
	lines := bufio.NewReader(in)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		return err
	}
	var j job
	if err := json.Unmarshal(line, &j); err != nil {
		return err
	}
	var e env
	defer func() { _ = e.close() }()
	conns := queueConns
	if !j.Queue {
		conns = j.Goroutines
	}
	pool, err := e.connect(ctx, j.URL, conns, nil)
	if err != nil {
		return err
	}
	h := newHot(pool, plenty(j.Goroutines).limit(1), j.Queue)
	s := &side{name: "child", goroutines: j.Goroutines, call: h.call}
	if _, err := s.run(ctx, slice); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	if _, err := lines.ReadBytes('\n'); err != nil {
		return err
	}
	before := count{h.attempts.Load(), h.commits.Load()}
	if _, err := s.run(ctx, j.For); err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(count{h.attempts.Load() - before.Attempts, h.commits.Load() - before.Commits})
}

// hotQueueWasted4Processes runs this program four times, each as if it were the only one.
func hotQueueWasted4Processes(ctx context.Context, e *env) (outcome, error) {
	const processes = 4
	d := e.moment(5 * time.Second)
	var values []float64
	var notes []string
	for _, queue := range []bool{true, false} {
		url, err := e.newDatabase(ctx)
		if err != nil {
			return outcome{}, err
		}
		j := job{URL: url, Goroutines: hotGoroutines, Queue: queue, For: d}
		if !queue {
			j.Goroutines = hotGoroutines / processes // so that both have as many connections in all
		}
		sum, err := spawn(ctx, processes, j)
		if err != nil {
			return outcome{}, err
		}
		wasted := float64(sum.Attempts)/float64(sum.Commits) - 1
		text := fmt.Sprintf("with the queue, %d goroutines in each process: ", j.Goroutines)
		if !queue {
			text = fmt.Sprintf("without, %d goroutines in each: ", j.Goroutines)
		}
		text += fmt.Sprintf("%.4f wasted per commit, %s commits/s", wasted, thousands(float64(sum.Commits)/d.Seconds()))
		fmt.Fprintln(e.out, " ", text)
		values, notes = append(values, wasted), append(notes, text)
	}
	return outcome{value: values[0], note: strings.Join(notes, "; ")}, nil
}

// spawn runs several children, which begin together, and sums up their counts.
func spawn(ctx context.Context, processes int, j job) (sum count, err error) {
	self, err := os.Executable()
	if err != nil {
		return sum, err
	}
	order, err := json.Marshal(j)
	if err != nil {
		return sum, err
	}
	type process struct {
		in  io.WriteCloser
		out *bufio.Reader
	}
	var children []process
	for range processes {
		cmd := exec.CommandContext(ctx, self, childCommand)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			return sum, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return sum, err
		}
		if err := cmd.Start(); err != nil {
			return sum, err
		}
		// A child ends when its input ends. So no child outlives a failure of the others.
		defer func() { err = errors.Join(err, in.Close(), cmd.Wait()) }()
		children = append(children, process{in, bufio.NewReader(out)})
	}
	for _, c := range children {
		if _, err := fmt.Fprintf(c.in, "%s\n", order); err != nil {
			return sum, err
		}
	}
	for _, c := range children {
		if _, err := c.out.ReadString('\n'); err != nil {
			return sum, fmt.Errorf("a child did not begin: %w", err)
		}
	}
	for _, c := range children {
		if _, err := fmt.Fprintln(c.in); err != nil {
			return sum, err
		}
	}
	for _, c := range children {
		var one count
		if err := json.NewDecoder(c.out).Decode(&one); err != nil {
			return sum, fmt.Errorf("a child did not answer: %w", err)
		}
		sum.Attempts += one.Attempts
		sum.Commits += one.Commits
	}
	return sum, nil
}
