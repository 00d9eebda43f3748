package browser_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// The pages of the raised limit must be shown meanwhile, on a loaded machine, too.
var raise = flag.Duration("raise", 40*time.Second, "for how long TestTheNightOfTheFlood raises the limit, at least 20s")

// What TestTheNightOfTheFlood tells its processes.
const (
	storyURL     = "TXLIMIT_STORY_URL"
	storyLog     = "TXLIMIT_STORY_LOG"
	storyProcess = "TXLIMIT_STORY_PROCESS"
)

// The limits of the flooded service.
var (
	nightly = ratelimit.TokenBucket("signUps", 20, time.Minute)
	mails   = ratelimit.TokenBucket("sendMail", 10_000, time.Minute)
)

// flooders sign up too often. So does acme, as often as four of them.
var flooders = []string{"203.0.113.24", "198.51.100.7", "203.0.113.91", "192.0.2.144", "203.0.113.3", "192.0.2.18", "198.51.100.66", "192.0.2.201"}

// entry is one line of the log of the processes: one call.
type entry struct {
	At       time.Time     `json:"at"` // by the database's clock
	Took     time.Duration `json:"took"`
	Key      string        `json:"key"`
	Granted  bool          `json:"granted"`
	Capacity float64       `json:"capacity"` // in force
	Process  int           `json:"process"`
}

// by is the latest instant of the decision: a call that waited for a row has the beginning of the wait as At.
func (e entry) by() time.Time { return e.At.Add(e.Took) }

// program is one of the four processes of the service. It returns its exit status.
func program() int {
	err := signUp()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func signUp() error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test closes it, or is no more
		stop()
	}()
	var process int
	if _, err := fmt.Sscan(os.Getenv(storyProcess), &process); err != nil {
		return err
	}
	file, err := os.OpenFile(os.Getenv(storyLog), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	config, err := pgxpool.ParseConfig(os.Getenv(storyURL))
	if err != nil {
		return err
	}
	config.MaxConns = 4
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()

	recorder := &usage.Recorder{DB: pool, Every: time.Second}
	var failed error
	var once sync.Once
	fail := func(err error) { once.Do(func() { failed = err; stop() }) }
	limits := follow.By(&ratelimit.Limiter{Observer: func(ctx context.Context, d ratelimit.Decision) {
		recorder.Observe(ctx, d)
		of := d.Result.Requests[0]
		if of.Limit.Name() != nightly.Name() {
			return
		}
		line, err := json.Marshal(entry{d.Result.At, d.Took, of.Key, d.Err == nil, of.Limit.Capacity(), process})
		if err == nil {
			_, err = file.Write(append(line, '\n')) // one write, so that lines of processes do not mix
		}
		if err != nil {
			fail(err)
		}
	}}, follow.Settings{DB: pool, Listen: process >= 2})
	if err := follow.Load(ctx, limits); err != nil {
		return err
	}
	if err := new(ratelimit.Limiter).Publish(ctx, pool, "web", nightly, mails); err != nil {
		return err
	}
	go follow.Run(ctx, limits)
	recording, ended := context.WithCancel(context.WithoutCancel(ctx))
	recorded := make(chan error, 1)
	go func() { recorded <- recorder.Run(recording) }()

	var callers sync.WaitGroup
	for range 2 {
		callers.Go(func() {
			r := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
			for ctx.Err() == nil {
				key := "acme"
				if n := r.IntN(len(flooders) + 4); n < len(flooders) {
					key = flooders[n]
				}
				if _, err := limits.Consume(context.WithoutCancel(ctx), pool, nightly.Key(key)); err == nil {
					_, err = limits.Consume(context.WithoutCancel(ctx), pool, mails.Global())
					if err != nil {
						fail(err)
					}
				} else if !denied(err) {
					fail(err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(time.Duration(100+r.IntN(200)) * time.Millisecond):
				}
			}
		})
	}
	callers.Wait()
	ended()
	return errors.Join(failed, <-recorded)
}

// night is what TestTheNightOfTheFlood has.
type night struct {
	*testing.T
	pool *pgxpool.Pool
	tool string // the path of txlimit
	log  string // the path of the processes' log
}

// TestTheNightOfTheFlood: sign-ups flood a service of four processes. The operator finds the limit on the page, raises it for one key for a
// while and adds the difference. The key goes on, with no token more than that. The override ends by itself. The page and the tool tell the
// history, and a replay of the service's log says what the raise would have done for everybody.
func TestTheNightOfTheFlood(t *testing.T) {
	t.Parallel()
	n := &night{T: t, pool: newPool(t), tool: filepath.Join(t.TempDir(), "txlimit"), log: filepath.Join(t.TempDir(), "sign-ups.jsonl")}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", n.tool, ".")
	build.Dir = "../../cmd/txlimit"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.WriteFile(n.log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	stop := n.startService()
	n.eventually("denials of all", time.Minute, func() bool { return len(n.deniedKeys()) == len(flooders)+1 })

	// The operator finds the limit and the key.
	p := open(t, n.pool, "nobody", desktop)
	entrance := n.startConsole()
	p.url, _, _ = strings.Cut(entrance, "?")
	p.do(chromedp.Navigate(entrance), chromedp.WaitVisible(chromedp.CSS("main")))
	p.reads("tbody tr:first-child", "signUps", "20 per minute", "web")
	p.picture("night-1-limits")
	p.follow("signUps")
	p.reads("h1", "signUps")
	p.within(30*time.Second, "denials on the chart", func() bool { return p.drawn("#chart", "--accent") > 50 && p.drawn("#chart", "--granted") > 5 })
	p.reads("#denied tbody tr:first-child", "acme")
	p.picture("night-2-limit")
	p.follow("acme")
	p.reads("#balance", "of 20 tokens", "Denied now")

	// The operator raises it.
	p.unfold("Other numbers")
	p.fill("rate", "120")
	p.fill("end", raise.String())
	p.fill("reason", "their conference, ticket 4711")
	p.do(chromedp.Click(chromedp.CSS(`details[open] input[name="add"]`)))
	p.picture("night-3-raise")
	p.press("Override")
	p.reads("main", "Overridden, and the difference of the capacities is added")
	var o struct {
		made, until, answered time.Time
		added                 float64
	}
	n.must(n.pool.QueryRow(t.Context(), "SELECT made_at, until, added, clock_timestamp() FROM ratelimit.overrides WHERE name = 'signUps' AND key = 'acme' AND made_by = 'ann'").
		Scan(&o.made, &o.until, &o.added, &o.answered))
	if o.added != 100 || !o.until.After(o.answered) {
		t.Fatalf("%+v", o)
	}
	p.reads("#history tbody tr:first-child", "rate 120", "100 added", "their conference, ticket 4711", "ann", "in force")
	p.reads("#balance", "of 120 tokens")
	p.picture("night-4-raised")

	// It ends by itself, in all processes and on the page.
	p.within(*raise+time.Minute, "the override has run out", func() bool { return strings.Contains(p.text("#history tbody tr:first-child"), "ran out") })
	n.eventually("denials by the old numbers in all processes", time.Minute, func() bool {
		return len(n.processes(func(e entry) bool { return e.Key == "acme" && !e.Granted && e.Capacity == 20 && e.At.After(o.until) })) == 4
	})
	p.reads("#balance", "of 20 tokens", "Denied now")
	p.picture("night-5-over")
	p.see("limit?name=signUps")
	p.reads("#history", "rate 120", "100 added", "acme", "ran out")
	p.picture("night-6-limit")
	p.quiet()
	stop()

	show := n.run("show", "signUps", "acme")
	t.Log("txlimit show signUps acme\n" + show)
	for _, want := range []string{"balance     ", " of 20\n", "rate 120, added 100", "expired ", "  ann (as ", "their conference, ticket 4711", "LAST DENIED"} {
		if !strings.Contains(show, want) {
			t.Errorf("txlimit show has no %q:\n%s", want, show)
		}
	}

	entries := n.entries()
	n.followed(entries, o.made, o.until)
	n.grantedNoMore(entries, o.made, o.until, o.answered, o.added)
	n.counted(entries)
	n.replayed(entries, o.made)
}

func (n *night) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

func (n *night) eventually(what string, d time.Duration, so func() bool) {
	n.Helper()
	for began := time.Now(); !so(); time.Sleep(100 * time.Millisecond) {
		if time.Since(began) > d {
			n.Fatalf("not within %v: %s", d, what)
		}
	}
}

// startService starts the four processes. stop ends them and wants them to end well.
func (n *night) startService() (stop func()) {
	n.Helper()
	var all []*exec.Cmd
	var inputs []io.Closer
	for i := range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), storyURL+"="+n.pool.Config().ConnString(), storyLog+"="+n.log, storyProcess+"="+fmt.Sprint(i))
		cmd.Stderr = os.Stderr
		input, err := cmd.StdinPipe()
		n.must(err)
		n.must(cmd.Start())
		all, inputs = append(all, cmd), append(inputs, input)
	}
	var once sync.Once
	stop = func() {
		once.Do(func() {
			for _, input := range inputs {
				_ = input.Close() // Wait says whether the process has ended before
			}
			for i, cmd := range all {
				if err := cmd.Wait(); err != nil {
					n.Errorf("process %d: %v", i, err)
				}
			}
		})
	}
	n.Cleanup(stop)
	return stop
}

// startConsole serves the page by the tool and returns its address.
func (n *night) startConsole() string {
	n.Helper()
	cmd := n.command("console", "--write", "--who", "ann", "--listen", "127.0.0.1:0")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	n.must(err)
	n.must(cmd.Start())
	n.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			n.Errorf("txlimit console: %v", err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	n.must(err)
	n.Log(line)
	address, _, _ := strings.Cut(line, " ")
	return address
}

func (n *night) command(args ...string) *exec.Cmd {
	cmd := exec.Command(n.tool, args...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+n.pool.Config().ConnString())
	return cmd
}

// run runs a command of the tool and returns what it prints.
func (n *night) run(args ...string) string {
	n.Helper()
	cmd := n.command(args...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		n.Fatalf("txlimit %q: %v: %s%s", args, err, out, &errOut)
	}
	return string(out)
}

// entries reads the log so far, in the order of the database's clock.
func (n *night) entries() (list []entry) {
	n.Helper()
	text, err := os.ReadFile(n.log)
	n.must(err)
	for line := range bytes.Lines(text) {
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			n.Fatalf("%v: %q", err, line)
		}
		list = append(list, e)
	}
	slices.SortStableFunc(list, func(a, b entry) int { return a.At.Compare(b.At) })
	return list
}

func (n *night) deniedKeys() map[string]bool {
	keys := map[string]bool{}
	for _, e := range n.entries() {
		if !e.Granted {
			keys[e.Key] = true
		}
	}
	return keys
}

// processes are those that have such an entry, with the first.
func (n *night) processes(such func(e entry) bool) map[int]entry {
	first := map[int]entry{}
	for _, e := range n.entries() {
		if _, ok := first[e.Process]; !ok && such(e) {
			first[e.Process] = e
		}
	}
	return first
}

// followed wants all processes to follow the override, and to leave it when it ends.
func (n *night) followed(entries []entry, made, until time.Time) {
	n.Helper()
	raised := n.processes(func(e entry) bool { return e.Key == "acme" && e.Capacity == 120 })
	granted := n.processes(func(e entry) bool { return e.Key == "acme" && e.Capacity == 120 && e.Granted })
	over := n.processes(func(e entry) bool { return e.Key == "acme" && e.Capacity == 20 && e.At.After(until) })
	for i := range 4 {
		n.Logf("process %d: the first call by the new numbers %v after the commit, the first one granted %v after it; the first by the old ones %v after the end", i,
			raised[i].At.Sub(made).Round(time.Millisecond), granted[i].At.Sub(made).Round(time.Millisecond), over[i].At.Sub(until).Round(time.Millisecond))
		if raised[i].At.IsZero() || granted[i].At.IsZero() || raised[i].At.Sub(made) > 15*time.Second { // on a loaded machine; on a quiet one it takes 2 s
			n.Errorf("process %d followed the override late: %+v", i, raised[i])
		}
	}
	for _, e := range entries {
		switch want := 20.0; {
		case e.Key == "acme" && e.At.After(made) && e.At.Before(until.Add(15*time.Second)): // old or new
		case e.Capacity != want:
			n.Errorf("a call by other numbers: %+v", e)
		}
	}
}

// grantedNoMore wants no token more than there were, and those that were added.
func (n *night) grantedNoMore(entries []entry, made, until, answered time.Time, added float64) {
	n.Helper()
	grants := map[string][]entry{}
	for _, e := range entries {
		if e.Granted {
			grants[e.Key] = append(grants[e.Key], e)
		}
	}
	// In any span of time: the larger capacity, and the larger rate. For all others, those that are defined.
	for key, list := range grants {
		capacity, perSecond := 20.0, 20.0/60
		if key == "acme" {
			capacity, perSecond = 120, 120.0/60
		}
		byEnd := slices.SortedFunc(slices.Values(list), func(a, b entry) int { return a.by().Compare(b.by()) })
		for _, first := range list {
			taken := 0.0
			for _, last := range byEnd {
				if last.At.Before(first.At) {
					continue
				}
				taken++
				if bound := capacity + last.by().Sub(first.At).Seconds()*perSecond; taken > bound+1e-6 {
					n.Fatalf("%s: %v tokens from %v to %v, more than %v", key, taken, first.At, last.by(), bound)
				}
			}
		}
	}
	// Since the override: what acme had after the grant before it, the difference, and the refill since that grant. A refill is worked out
	// when there is a grant, by the numbers that are then in force: at the larger rate.
	left, at := 20.0, time.Time{}
	refill := func(to time.Time) {
		if !at.IsZero() {
			left = min(20, left+to.Sub(at).Seconds()*20/60)
		}
		at = to
	}
	var since []entry
	for _, e := range grants["acme"] {
		if e.by().After(made) {
			since = append(since, e)
			continue
		}
		refill(e.At)
		left--
	}
	slices.SortFunc(since, func(a, b entry) int { return a.by().Compare(b.by()) })
	during, tightest := 0, added
	for i, e := range since {
		if e.by().After(until) {
			break
		}
		during++
		spare := left + added + e.by().Sub(at).Seconds()*2 - float64(i+1)
		if tightest = min(tightest, spare); spare < -1e-6 {
			n.Fatalf("acme: %d tokens from %v to %v, %v more than it had (%v), the difference (%v) and the refill", i+1, at, e.by(), -spare, left, added)
		}
	}
	n.Logf("acme had %.2f tokens, and was granted %d until the override ended %v later: at the tightest, %.2f tokens below the bound", left, during, until.Sub(made).Round(time.Second), tightest)

	// And no less: it was denied only after the difference was used up. A process that followed late may have cut it.
	for _, e := range entries {
		if e.Key == "acme" && e.Capacity == 20 && e.by().After(made.Add(2*time.Second)) && e.At.Before(until) {
			n.Logf("process %d followed later than two seconds after the commit: it is not checked that all was granted", e.Process)
			return
		}
	}
	for _, e := range entries {
		if e.Key != "acme" || e.Granted || e.At.Before(answered) || e.At.After(until) {
			continue
		}
		had := 0
		for _, g := range since {
			if g.At.Before(e.by()) {
				had++
			}
		}
		n.Logf("acme was denied again after %d tokens, %v after the override", had, e.At.Sub(made).Round(time.Millisecond))
		if float64(had) < added {
			n.Errorf("denied after %d tokens, although %v were added: %+v", had, added, e)
		}
		return
	}
	n.Log("acme was not denied while the override was in force")
}

// counted wants the counts in the database to be those of the log.
func (n *night) counted(entries []entry) {
	n.Helper()
	want := map[string][2]int64{}
	for _, e := range entries {
		for _, key := range []string{"", e.Key} {
			counts := want[key]
			if e.Granted {
				counts[0]++
			} else {
				counts[1]++
			}
			want[key] = counts
		}
	}
	var got [2]int64
	n.must(n.pool.QueryRow(n.Context(), "SELECT sum(granted)::bigint, sum(denied)::bigint FROM ratelimit.usage WHERE name = 'signUps'").Scan(&got[0], &got[1]))
	n.Logf("%d calls were granted and %d denied", got[0], got[1])
	if got != want[""] {
		n.Errorf("the database counted %v granted and denied, and the log has %v", got, want[""])
	}
	for _, key := range append([]string{"acme"}, flooders...) {
		var denials int64
		n.must(n.pool.QueryRow(n.Context(), "SELECT sum(denied)::bigint FROM ratelimit.denials WHERE name = 'signUps' AND key = $1", key).Scan(&denials))
		if denials != want[key][1] {
			n.Errorf("%s: the database counted %d denials, and the log has %d", key, denials, want[key][1])
		}
	}
}

// replayed replays the log. For the limit as it is defined, it must grant what the service granted, but for acme since the override.
//
// A call that waited has the beginning of its wait as At. So in the replay a bucket may begin to refill earlier, by the wait of its first call.
func (n *night) replayed(entries []entry, made time.Time) {
	n.Helper()
	var longest time.Duration
	for _, e := range entries {
		longest = max(longest, e.Took)
	}
	earlier := int(math.Ceil(longest.Seconds() * 20 / 60)) // tokens
	same := func(a, b int) bool { return max(a-b, b-a) <= earlier }
	before := filepath.Join(n.TempDir(), "before.jsonl")
	var lines bytes.Buffer
	for _, e := range entries {
		if e.At.Before(made) {
			n.must(json.NewEncoder(&lines).Encode(e))
		}
	}
	n.must(os.WriteFile(before, lines.Bytes(), 0o600))
	if early, want := n.replay(before)["signUps"], granted(entries, made); !maps.EqualFunc(early, want, same) {
		n.Errorf("before the override, the service granted %v, and the replay %v", want, early)
	}
	all := n.replay(n.log, "--candidate", "120/1m,name=raised")
	got, defined, raised := granted(entries, time.Time{}), all["signUps"], all["raised"]
	for _, key := range flooders {
		if !same(defined[key], got[key]) {
			n.Errorf("%s: the service granted %d, and the replay %d", key, got[key], defined[key])
		}
	}
	if defined["acme"] > got["acme"]+earlier {
		n.Errorf("acme: the service granted %d, and the replay by the defined numbers %d", got["acme"], defined["acme"])
	}
	span := entries[len(entries)-1].At.Sub(entries[0].At).Seconds()
	for key := range got {
		if raised[key] < defined[key] || float64(raised[key]) > 120+2*span {
			n.Errorf("%s: by the raised numbers, the replay granted %d in %v s, and %d by those defined", key, raised[key], span, defined[key])
		}
	}
	sum := func(counts map[string]int) (sum int) {
		for _, count := range counts {
			sum += count
		}
		return sum
	}
	n.Logf("granted: %d as defined, %d with the raise for acme, %d if it had been for everybody", sum(defined), sum(got), sum(raised))
	if sum(raised) <= sum(defined) {
		n.Error("the raise would have granted nothing")
	}
}

// granted are the grants by key, until an instant if there is one.
func granted(entries []entry, until time.Time) map[string]int {
	counts := map[string]int{}
	for _, e := range entries {
		if e.Granted && (until.IsZero() || e.At.Before(until)) {
			counts[e.Key]++
		}
	}
	return counts
}

// replay has the tool replay a log by the published numbers, and by others. It returns the grants by the name of the limit and by key.
func (n *night) replay(log string, others ...string) map[string]map[string]int {
	n.Helper()
	picture := filepath.Join(n.TempDir(), "replay.svg")
	args := append([]string{"replay", "--log", log, "--time", "at", "--key", "key", "--reorder", "1m", "--published", "signUps", "--svg", picture}, others...)
	table := n.run(args...)
	n.Logf("txlimit %s\n%s", strings.Join(args, " "), table)
	var report struct {
		Candidates []struct {
			Definition struct{ Name string }
			Granted    int
			MostDenied []struct { // of ten keys at most, and there are fewer
				Key            string
				Events, Denied int
			}
		}
	}
	n.must(json.Unmarshal([]byte(n.run(append(args, "--json")...)), &report))
	asked := map[string]int{}
	for _, c := range report.Candidates {
		for _, key := range c.MostDenied {
			asked[key.Key] = key.Events
		}
	}
	grants := map[string]map[string]int{}
	for _, c := range report.Candidates {
		counts, sum := maps.Clone(asked), 0
		for _, key := range c.MostDenied {
			counts[key.Key] -= key.Denied
		}
		for _, count := range counts {
			sum += count
		}
		if sum != c.Granted {
			n.Errorf("the replay by %s says %d granted, and %d by key: %v", c.Definition.Name, c.Granted, sum, counts)
		}
		grants[c.Definition.Name] = counts
	}
	return grants
}
