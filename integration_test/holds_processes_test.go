package integration_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// duringWorker is the environment variable that makes this program a process that does one job, with the schema of its value, until its hold is
// lost. It says when it begins and ends.
const duringWorker = "TXLIMIT_TEST_DURING_WORKER"

const duringTTL = 6 * time.Second

// workDuring is that process.
func workDuring(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	pool, err := openPool(ctx, url, 2, 0)
	if err != nil {
		return err
	}
	defer pool.Close()
	var limits ratelimit.Limiter
	err = limits.During(ctx, pool, "job", duringTTL, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
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

// child starts that process.
func child(t *testing.T, url string) (cmd *exec.Cmd, lines *bufio.Scanner) {
	t.Helper()
	cmd = exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), duringWorker+"="+url), os.Stderr
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

// TestDuringOfAStoppedProcess: it goes on past its time, when another has the slot, and its work ends at once.
func TestDuringOfAStoppedProcess(t *testing.T) {
	t.Parallel()
	url := newMigrated(t)
	pool := connect(t, url, 2)
	cmd, says := child(t, url)
	reads(t, says, "begun")
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	slots := ratelimit.Slots("slots", 1).Key("acme")
	ends := scan[time.Time](t, pool, "SELECT until FROM rate_limit_holds WHERE id = 'job'")
	eventually(t, "the slot comes back", func() bool {
		held, err := new(ratelimit.Limiter).Hold(t.Context(), pool, "another job", time.Hour, slots)
		if err == nil && held.Expires.Add(-time.Hour).Before(ends) {
			t.Errorf("it was taken at %v, and was another's until %v", held.Expires.Add(-time.Hour), ends)
		}
		return err == nil
	})
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
	if got := lines(t, pool, "SELECT id, state FROM rate_limit_holds WHERE state = 'held'"); got != `("another job",held)` {
		t.Error(got)
	}
	slotsAreTheirHolds(t, pool)
}
