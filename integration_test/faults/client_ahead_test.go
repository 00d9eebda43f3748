package faults_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// clientAhead is an environment variable of a client process that has a Coalescer with Ahead. It says what the client does: see aheadClient.
const (
	clientAhead = "TXLIMIT_FAULTS_CLIENT_AHEAD"
	untilKilled = "until it is killed"
	untilDenied = "until it is denied"

	ahead          = 50 * time.Millisecond
	aheadClients   = 4
	aheadCapacity  = 1000
	aheadPerSecond = 2000
)

var (
	aheadBucket = ratelimit.TokenBucket("ahead bucket", aheadPerSecond, time.Second, ratelimit.Capacity(aheadCapacity))
	aheadWindow = ratelimit.FixedWindow("ahead window", aheadPerSecond, time.Second, ratelimit.Start(time.Unix(0, 0)))
	aheadMonth  = ratelimit.CalendarWindow("ahead month", 1e9, ratelimit.Month, ratelimit.Zone("UTC"))
	aheadUsedUp = ratelimit.CalendarWindow("ahead used up", 200_000, ratelimit.Month, ratelimit.Zone("UTC"))
)

// aheadClient consumes in bursts until it is killed, or until the month is used up, and prints each grant.
func aheadClient(url, until string) int {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var limiter ratelimit.Limiter
	coalescer := &ratelimit.Coalescer{Pool: pool, Ahead: ahead}
	defer func() { _ = coalescer.Close(ctx) }() // what could not come back is counted as lost
	began := time.Now()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for last := began; until == untilKilled || time.Since(last) < 3*time.Second; {
				limit := aheadUsedUp
				requests := []ratelimit.Request{limit.Global()}
				if until == untilKilled {
					limit = []ratelimit.Limit{aheadBucket, aheadWindow}[rand.IntN(2)]
					requests = []ratelimit.Request{limit.Global(), aheadMonth.Global()}
				}
				for range 1 + rand.IntN(300) {
					result, err := limiter.Consume(ctx, coalescer, requests...)
					if errors.Is(err, ratelimit.ErrDenied) {
						break
					} else if err != nil {
						fmt.Fprintln(os.Stderr, err)
						return
					}
					last = time.Now()
					fmt.Printf("%d %q\n", result.At.UnixMicro(), limit.Name()) // one write for each line
				}
				time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond)
			}
		})
	}
	wg.Wait()
	return 0
}

// aheadGrants are the instants of the grants of each limit.
type aheadGrants struct {
	mu sync.Mutex
	at map[string][]int64
}

func (g *aheadGrants) sum() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, at := range g.at {
		n += len(at)
	}
	return n
}

// start starts a client, and hears of its grants.
func (g *aheadGrants) start(t *testing.T, wg *sync.WaitGroup, url, until string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), clientOf+"="+url, clientAhead+"="+until)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	wg.Go(func() {
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var at int64
			var name string
			if _, err := fmt.Sscanf(lines.Text(), "%d %q", &at, &name); err != nil {
				t.Errorf("%q: %v", lines.Text(), err)
			}
			g.mu.Lock()
			g.at[name] = append(g.at[name], at)
			g.mu.Unlock()
		}
		_ = cmd.Wait() // it may have been killed
	})
	return cmd
}

// TestClientsWithAheadAreKilled kills one of four processes each second. What they had ahead is lost, and nothing beyond the promise is granted.
func TestClientsWithAheadAreKilled(t *testing.T) {
	t.Parallel()
	url := newDatabase(t)
	g := &aheadGrants{at: map[string][]int64{}}
	var wg sync.WaitGroup
	var clients []*exec.Cmd
	for range aheadClients {
		clients = append(clients, g.start(t, &wg, url, untilKilled))
	}
	kills := 0
	for end := time.Now().Add(lasting(5*time.Second, 10*time.Minute)); ; kills++ {
		time.Sleep(time.Second)
		i := kills % aheadClients
		if err := clients[i].Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(end) && g.sum() >= 1000 {
			break
		}
		clients[i] = g.start(t, &wg, url, untilKilled)
	}
	for _, c := range clients {
		_ = c.Process.Kill()
	}
	wg.Wait()
	pool := connect(t, url, 2)
	slices.Sort(g.at[aheadBucket.Name()])
	slices.Sort(g.at[aheadWindow.Name()])
	most, left := 0.0, float64(aheadCapacity)
	for i, at := range g.at[aheadBucket.Name()] {
		if i > 0 {
			left = min(aheadCapacity, left+aheadPerSecond*float64(at-g.at[aheadBucket.Name()][i-1])/1e6)
		}
		left--
		most = max(most, -left)
	}
	if promise := aheadPerSecond * ahead.Seconds(); most > promise+1e-6 {
		t.Errorf("the bucket granted %v more than capacity + rate × T, and the promise is %v", most, promise)
	}
	// A call that waited for its row is dated when it began to, perhaps in the window before: so all windows from one on are counted.
	var now time.Time
	if err := pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now); err != nil {
		t.Fatal(err)
	}
	windows := g.at[aheadWindow.Name()]
	for i, at := range windows {
		if from := at / 1e6; int64(len(windows)-i) > aheadPerSecond*(now.Unix()-from+1) {
			t.Fatalf("%d were granted in the windows from %d to %d", len(windows)-i, from, now.Unix())
		}
	}
	balances, err := new(ratelimit.Limiter).Balance(t.Context(), pool, aheadMonth.Global())
	if err != nil {
		t.Fatal(err)
	}
	granted := len(g.at[aheadBucket.Name()]) + len(windows)
	lost := balances[0].Used - float64(granted)
	t.Logf("%d kills; %d granted of the bucket, %v beyond capacity + rate × T, of %v promised; %d of windows; %v of the month are lost, %.1f a kill, %.2f %% of what was granted",
		kills+aheadClients, len(g.at[aheadBucket.Name()]), most, aheadPerSecond*ahead.Seconds(), len(windows), lost, lost/float64(kills+aheadClients), 100*lost/float64(granted))
	if lost < 0 {
		t.Errorf("%d were granted, and of the month %v are gone", granted, balances[0].Used)
	}
}

// TestAMonthAheadIsUsedUp lets four processes use up a month's window. Hardly any of it is lost.
func TestAMonthAheadIsUsedUp(t *testing.T) {
	t.Parallel()
	url := newDatabase(t)
	g := &aheadGrants{at: map[string][]int64{}}
	var wg sync.WaitGroup
	for range aheadClients {
		g.start(t, &wg, url, untilDenied)
	}
	wg.Wait()
	balances, err := new(ratelimit.Limiter).Balance(t.Context(), connect(t, url, 1), aheadUsedUp.Global())
	if err != nil {
		t.Fatal(err)
	}
	granted := float64(len(g.at[aheadUsedUp.Name()]))
	lost := balances[0].Used - granted
	t.Logf("%v of %v were granted, %v are left, %v are lost: %.3f %%", granted, balances[0].Capacity, balances[0].Remaining, lost, 100*lost/balances[0].Capacity)
	if lost < 0 || lost > 0.005*balances[0].Capacity || balances[0].Remaining > 0.005*balances[0].Capacity {
		t.Errorf("%v are lost, and %v are left", lost, balances[0].Remaining)
	}
}
