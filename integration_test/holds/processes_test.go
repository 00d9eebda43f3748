package holds_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// duringWorker is the environment variable that makes this program a process that does jobs, with the database of its value. With duringJob, it does
// this one job, until its hold is lost, and says when it begins and ends.
const (
	duringWorker = "TXLIMIT_TEST_DURING_WORKER"
	duringJob    = "TXLIMIT_TEST_DURING_JOB"
)

const duringTTL = 6 * time.Second

// workersSlots are two slots of a customer, and three in all.
func workersSlots(customer int) []ratelimit.Request {
	return []ratelimit.Request{ratelimit.Slots("slots", 2).Key(fmt.Sprint(customer)), ratelimit.Slots("slots in all", 3).Global()}
}

// workDuring is that process.
func workDuring(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	pool, err := harness.OpenPool(ctx, url, 2, 0)
	if err != nil {
		return err
	}
	defer pool.Close()
	var limits ratelimit.Limiter
	if id := os.Getenv(duringJob); id != "" {
		err := limits.During(ctx, pool, id, duringTTL, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
			fmt.Println("begun")
			<-ctx.Done()
			fmt.Println("ended", strings.ReplaceAll(context.Cause(ctx).Error(), "\n", " "))
			return nil, context.Cause(ctx)
		}, ratelimit.Slots("slots", 1).Key("acme"))
		if !errors.Is(err, ratelimit.ErrHoldLost) {
			return fmt.Errorf("want ErrHoldLost: %w", err)
		}
		return nil
	}
	for {
		job := rand.IntN(30) // delivered again and again, to all at once
		err := limits.During(ctx, pool, fmt.Sprint("job ", job), duringTTL, func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
			begun := time.Now()
			_, err := pool.Exec(ctx, "INSERT INTO live VALUES ($1, $2, $3, $4, $5)", held.Token, job, job%3, os.Getpid(), begun)
			select {
			case <-time.After(time.Duration(rand.IntN(300)) * time.Millisecond):
			case <-ctx.Done():
			}
			if ended := time.Now(); err == nil {
				_, err = pool.Exec(context.WithoutCancel(ctx), "UPDATE live SET ended = $2 WHERE token = $1", held.Token, ended)
			}
			if rand.IntN(4) == 0 { // to be tried again
				err = errors.Join(err, errors.New("failed"))
			}
			return nil, err
		}, workersSlots(job%3)...)
		var denial *ratelimit.DeniedError
		switch {
		case errors.As(err, &denial):
			time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
		case err != nil && !strings.Contains(err.Error(), "failed") && !errors.Is(err, ratelimit.ErrHoldLost): // a busy machine may lose one
			return err
		}
	}
}

// child starts that process.
func child(t *testing.T, url string, env ...string) (cmd *exec.Cmd, lines *bufio.Scanner) {
	t.Helper()
	cmd = exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(append(os.Environ(), duringWorker+"="+url), env...), os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // unless it has ended
		_ = cmd.Wait()
	})
	return cmd, bufio.NewScanner(stdout)
}

// reads reads a line.
func reads(t *testing.T, lines *bufio.Scanner, want string) string {
	t.Helper()
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), want) {
		t.Fatalf("the process says %q, %v, want %q", lines.Text(), lines.Err(), want)
	}
	return lines.Text()
}

// takesOver takes the slot of a process that does nothing any more, once its time is over.
func takesOver(t *testing.T, pool *pgxpool.Pool, limits *ratelimit.Limiter) {
	t.Helper()
	slots := ratelimit.Slots("slots", 1).Key("acme")
	ends := harness.Scan[time.Time](t, pool, "SELECT until FROM ratelimit.holds WHERE id = 'job'")
	harness.Eventually(t, "the slot comes back", func() bool {
		held, err := limits.Hold(t.Context(), pool, "another job", time.Hour, slots)
		if err == nil && held.Until.Add(-time.Hour).Before(ends) {
			t.Errorf("it was taken at %v, and was another's until %v", held.Until.Add(-time.Hour), ends)
		}
		return err == nil
	})
}

// TestDuringOfAStoppedProcess: it goes on past its time, when another has the slot, and its work ends at once.
func TestDuringOfAStoppedProcess(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 2)
	cmd, says := child(t, url, duringJob+"=job")
	reads(t, says, "begun")
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	takesOver(t, pool, new(ratelimit.Limiter))
	began := time.Now()
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	text := reads(t, says, "ended ")
	if overlap := time.Since(began); overlap > duringTTL/3+10*time.Second || !strings.Contains(text, "the hold was lost") {
		t.Errorf("it ended after %v: %s", overlap, text)
	} else {
		t.Logf("two had the slot for %v, once the process went on", overlap)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if got := harness.Lines(t, pool, "SELECT id, state FROM ratelimit.holds WHERE state = 'held'"); got != `("another job",held)` {
		t.Error(got)
	}
	slotsAreTheirHolds(t, pool)
}

func TestDuringOfAKilledProcess(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 2)
	cmd, says := child(t, url, duringJob+"=job")
	reads(t, says, "begun")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	takesOver(t, pool, new(ratelimit.Limiter))
}

// TestDuringAtMostNLive: three processes work on the same jobs, and are killed at random. No job runs twice at once, and no more run than there are slots.
func TestDuringAtMostNLive(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 4)
	harness.MustExec(t, pool, "CREATE TABLE live (token text PRIMARY KEY, job int NOT NULL, customer int NOT NULL, pid int NOT NULL, begun timestamptz NOT NULL, ended timestamptz)")
	kills := 0
	for until := time.Now().Add(harness.Sized(40*time.Second, 2*time.Second)); time.Now().Before(until) || kills < 3; kills++ {
		var workers []*exec.Cmd
		for range 3 {
			cmd, _ := child(t, url)
			workers = append(workers, cmd)
		}
		time.Sleep(2*time.Second + rand.N(3*time.Second))
		for _, cmd := range workers {
			killed := time.Now()
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if _, err := pool.Exec(t.Context(), "UPDATE live SET ended = $2 WHERE pid = $1 AND ended IS NULL", cmd.Process.Pid, killed); err != nil {
				t.Fatal(err)
			}
		}
		harness.MustExec(t, pool, "DELETE FROM ratelimit.holds WHERE state = 'settled'") // a settled id is refused for a day
	}
	const most = "SELECT coalesce(max((SELECT count(*) FROM live AS b WHERE %s AND b.begun <= a.begun AND b.ended > a.begun)), 0)::int FROM live AS a"
	for same, n := range map[string]int{"b.job = a.job": 1, "b.customer = a.customer": 2, "true": 3} {
		if got := harness.Scan[int](t, pool, fmt.Sprintf(most, same)); got > n {
			t.Errorf("%d ran at once where %s, of at most %d", got, same, n)
		}
	}
	slotsAreTheirHolds(t, pool)
	var limits ratelimit.Limiter
	harness.Eventually(t, "all slots come back", func() bool {
		for _, r := range workersSlots(0) {
			held, err := limits.Hold(t.Context(), pool, "last", time.Minute, r.Count(2))
			if err != nil || harness.Second(limits.Release(t.Context(), pool, held.Token)) != nil {
				return false
			}
		}
		return true
	})
	t.Logf("%d jobs ran in %d times 3 processes", harness.Scan[int](t, pool, "SELECT count(*)::int FROM live"), kills)
}
