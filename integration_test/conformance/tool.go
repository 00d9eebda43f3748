package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// toolCases are the commands of txlimit, as it was built, on the server's URL. Each is a line of its own.
func toolCases() []testCase {
	c := func(commands string, script func(t *trial)) testCase {
		return testCase{name: "Tool: " + commands, ways: []way{{name: "txlimit", on: onPool}}, tool: true, clear: absent, script: script}
	}
	return []testCase{
		c("limits", toolLimits),
		c("keys", toolKeys),
		c("keys --denied", toolDenied),
		c("show", toolShow),
		c("override, overrides, restore", toolOverride),
		{name: "Tool: override --add", ways: []way{{name: "txlimit", on: onPool}}, tool: true, long: true, clear: absent, script: toolAdd}, // waits for two seconds
		c("block, unblock", toolBlock),
		c("unlimited", toolUnlimited),
		c("reset", toolReset),
		c("sweep", toolSweep),
		c("publish", toolPublish),
		c("locks", toolLocks),
		c("migrate status", toolMigrate),
		c("replay", toolReplay),
	}
}

// toolError is what the tool says when it fails.
type toolError struct {
	arguments []string
	exit      int
	text      string
}

var stateInText = regexp.MustCompile(`\(SQLSTATE (\w{5})\)`)

func (e *toolError) Error() string {
	return fmt.Sprintf("txlimit %s: exit status %d: %s", strings.Join(e.arguments, " "), e.exit, e.text)
}

// SQLState is the code that the tool prints.
func (e *toolError) SQLState() string {
	if match := stateInText.FindStringSubmatch(e.text); match != nil {
		return match[1]
	}
	return ""
}

// txlimit runs a command with --json, and reads what it prints. A server's error ends the trial. It returns the exit status: 0, or 3 for nothing.
func (t *trial) txlimit(answer any, stdin string, arguments ...string) (exit int) {
	t.step = "txlimit " + arguments[0]
	command := exec.CommandContext(t.ctx, t.s.tool, append(arguments, "--json")...)
	command.Env = append(os.Environ(), "DATABASE_URL="+t.s.url)
	command.Stdin = strings.NewReader(stdin)
	var out, text bytes.Buffer
	command.Stdout, command.Stderr = &out, &text
	err := command.Run()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		t.failed(err)
	}
	if exit = command.ProcessState.ExitCode(); exit != 0 && exit != 3 {
		t.failed(&toolError{arguments, exit, strings.TrimSpace(text.String())})
	}
	if out.Len() > 0 {
		if err := json.Unmarshal(out.Bytes(), answer); err != nil {
			t.wrong("want JSON, came %q: %v", out.String(), err)
		}
	}
	return exit
}

// ran runs a command that has something to do.
func (t *trial) ran(answer any, arguments ...string) {
	exit := t.txlimit(answer, "", arguments...)
	t.want(exit == 0, "exit status 0, came %d", exit)
}

// publishedAndUsed publishes a bucket of 10 tokens, and takes 4 of a key.
func (t *trial) publishedAndUsed() (limit ratelimit.Limit, key string) {
	limit, key = t.still("bucket", 10), t.key(0)
	t.published(limit)
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.overrides WHERE name = '"+limit.Name()+"'")
	_, err := new(ratelimit.Limiter).Consume(t.ctx, t.s.pool, t.of(limit, key).Count(4))
	t.must("a use", err)
	return limit, key
}

// decides asks SQL by name, which follows overrides at once.
func (t *trial) decides(limit ratelimit.Limit, key string, count float64, want bool) {
	got := t.value("ratelimit.try", fmt.Sprintf("SELECT granted::text FROM ratelimit.try('%s', '%s', count => %v)", limit.Name(), key, count))
	t.want(got == fmt.Sprint(want), "granted %v of %v tokens, came %s", want, count, got)
}

func toolLimits(t *trial) {
	limit, _ := t.publishedAndUsed()
	var answer struct {
		Limits []struct {
			Limit    string
			KeyCount int
		}
	}
	for _, flags := range [][]string{{"limits"}, {"limits", "--count"}} {
		t.ran(&answer, flags...)
		found := 0
		for _, l := range answer.Limits {
			if l.Limit == limit.Name() {
				found = l.KeyCount
			}
		}
		t.want(found == 1, "one key of %s, came %d", limit.Name(), found)
	}
}

func toolKeys(t *trial) {
	limit, key := t.publishedAndUsed()
	_, err := new(ratelimit.Limiter).Charge(t.ctx, t.s.pool, t.of(limit, key+"'").Count(12))
	t.must("a debt", err)
	type state struct {
		Key       string
		Remaining float64
		DeniedNow bool
	}
	var answer struct{ Keys []state }
	t.ran(&answer, "keys", limit.Name(), "--all")
	t.want(len(answer.Keys) == 2 && answer.Keys[0].Key == key+"'" && answer.Keys[0].DeniedNow && near(answer.Keys[0].Remaining, -2) &&
		answer.Keys[1].Key == key && !answer.Keys[1].DeniedNow && near(answer.Keys[1].Remaining, 6), "one denied key of two, came %v", answer.Keys)
}

func toolDenied(t *trial) {
	limit, key := t.publishedAndUsed()
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.usage WHERE name = '"+limit.Name()+"'", "DELETE FROM ratelimit.denials WHERE name = '"+limit.Name()+"'")
	recorder := &usage.Recorder{DB: t.s.pool, Keep: centuries}
	l := &ratelimit.Limiter{Observer: recorder.Observe}
	for range 3 {
		_, err := l.Consume(t.ctx, t.s.pool, limit.Key(key).Count(9))
		t.step = "a use"
		t.wantGrant(false, err)
	}
	t.must("Recorder.Flush", recorder.Flush(t.ctx))
	var answer struct {
		DeniedKeys []struct {
			Key    string
			Denied int
		}
	}
	t.ran(&answer, "keys", limit.Name(), "--denied")
	t.want(len(answer.DeniedKeys) == 1 && answer.DeniedKeys[0].Denied == 3, "a key with 3 denials, came %v", answer.DeniedKeys)
	var limits struct {
		Limits []struct {
			Limit    string
			LastHour *struct{ Denied int }
		}
	}
	t.ran(&limits, "limits")
	for _, l := range limits.Limits {
		if l.Limit == limit.Name() {
			t.want(l.LastHour != nil && l.LastHour.Denied == 3, "3 denials of the limit, came %v", l.LastHour)
			return
		}
	}
	t.wrong("want the limit %s, came %v", limit.Name(), limits)
}

// shown is what the tool shows of a key.
type shown struct {
	Remaining    *float64
	DeniedNow    bool
	DeniedReason string
	Rows         int
	Numbers      *ratelimit.Config
}

func (t *trial) shows(limit ratelimit.Limit, key string) (answer shown) {
	t.ran(&answer, "show", limit.Name(), key)
	return answer
}

func toolShow(t *trial) {
	limit, key := t.publishedAndUsed()
	answer := t.shows(limit, key)
	t.want(answer.Remaining != nil && near(*answer.Remaining, 6) && !answer.DeniedNow && answer.Rows == 1, "6 tokens in a row, came %+v", answer)
}

func toolOverride(t *trial) {
	limit, key := t.publishedAndUsed()
	var made struct {
		Override struct {
			ID       int64
			Capacity float64
		}
	}
	t.ran(&made, "override", limit.Name(), key, "--rate", "1", "--capacity", "1000", "--for", "1h", "--reason", "conformance")
	t.want(made.Override.Capacity == 1000, "a capacity of 1000, came %v", made.Override.Capacity)
	t.decides(limit, key, 7, false) // new numbers add no tokens
	t.decides(limit, key, 6, true)
	var list struct{ Overrides []struct{ ID int64 } }
	t.ran(&list, "overrides", limit.Name())
	t.want(len(list.Overrides) == 1 && list.Overrides[0].ID == made.Override.ID, "one override, came %v", list.Overrides)
	var ended struct{ Removed int }
	t.ran(&ended, "restore", limit.Name(), key)
	t.want(ended.Removed == 1, "one override ended, came %d", ended.Removed)
	exit := t.txlimit(&list, "", "overrides", limit.Name())
	t.want(exit == 3, "exit status 3, since nothing is in force; came %d", exit)
	t.ran(&list, "overrides", limit.Name(), "--all")
}

func toolAdd(t *trial) {
	limit, key := t.publishedAndUsed()
	var made struct{ AddedNow *float64 }
	t.ran(&made, "override", limit.Name(), key, "--capacity", "50", "--add")
	t.want(made.AddedNow != nil && near(*made.AddedNow, 40), "40 tokens added, came %v", made.AddedNow)
	t.decides(limit, key, 46, true)
	t.decides(limit, key, 1, false)
}

func toolBlock(t *trial) {
	limit, key := t.publishedAndUsed()
	t.ran(new(struct{}), "block", limit.Name(), key, "--for", "1d", "--reason", "conformance")
	t.decides(limit, key, 1, false)
	var ended struct{ Removed int }
	t.ran(&ended, "unblock", limit.Name(), key)
	t.want(ended.Removed == 1, "one block ended, came %d", ended.Removed)
	t.decides(limit, key, 6, true)
}

func toolUnlimited(t *trial) {
	limit, key := t.publishedAndUsed()
	t.ran(new(struct{}), "unlimited", limit.Name(), key, "--forever")
	t.decides(limit, key, 1e6, true)
}

func toolReset(t *trial) {
	limit, key := t.publishedAndUsed()
	var answer struct{ Deleted int }
	t.ran(&answer, "reset", limit.Name(), key, "--yes")
	t.want(answer.Deleted == 1, "one row deleted, came %d", answer.Deleted)
	t.decides(limit, key, 10, true)
}

func toolSweep(t *trial) {
	limit := t.bucket("bucket")
	t.published(limit)
	for i := range 6 {
		l := usedEarlier()
		if i%2 == 0 {
			l = new(ratelimit.Limiter)
		}
		_, err := l.Consume(t.ctx, t.s.pool, t.of(limit, fmt.Sprintf("%s-%d", t.key(0), i)))
		t.must("a use", err)
	}
	var answer struct{ Swept []struct{ Deleted int } }
	t.ran(&answer, "sweep", limit.Name())
	t.want(len(answer.Swept) == 1 && answer.Swept[0].Deleted == 3, "3 rows deleted, came %v", answer.Swept)
}

func toolPublish(t *trial) {
	t.unmodelled = true
	limit, program := t.bucket("bucket", ratelimit.Capacity(20)), t.name("program")
	t.cleanups = append(t.cleanups, "DELETE FROM ratelimit.definitions WHERE program = '"+program+"'")
	list, err := json.Marshal([]ratelimit.Config{limit.Config()})
	t.must("the list", err)
	var answer struct{ Defined []ratelimit.Config }
	exit := t.txlimit(&answer, string(list), "publish", "-", "--program", program)
	t.want(exit == 0 && len(answer.Defined) == 1, "one limit published, came %v", answer.Defined)
	t.of(limit, t.key(0))
	t.decides(limit, t.key(0), 20, true)
	t.decides(limit, t.key(0), 1, false)
}

func toolLocks(t *trial) {
	t.unmodelled = true
	exit := t.txlimit(new(struct{}), "", "locks")
	t.want(exit == 0 || exit == 3, "exit status 0 or 3, came %d", exit)
}

func toolMigrate(t *trial) {
	t.unmodelled = true
	var answer struct{ SchemaVersion int }
	t.txlimit(&answer, "", "migrate", "status")
	t.want(answer.SchemaVersion > 0, "a version, came %d", answer.SchemaVersion)
}

func toolReplay(t *trial) {
	limit, _ := t.publishedAndUsed()
	var answer struct {
		Events     int
		Candidates []struct{ Granted, Denied int }
	}
	t.ran(&answer, "replay", "--query", "SELECT timestamptz '2026-07-01Z' + n * interval '1 second', 'ann' FROM generate_series(1, 12) AS n ORDER BY 1", "--published", limit.Name())
	t.want(answer.Events == 12 && len(answer.Candidates) == 1 && answer.Candidates[0].Granted == 10 && answer.Candidates[0].Denied == 2,
		"10 of 12 events granted, came %+v", answer)
}
