package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"github.com/txlimit/txlimit/ratelimit"
)

// binary builds the program once, in the directory that is removed after the tests.
var binary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.Getenv(inner), "txlimit")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// program is the program as it is installed, with an environment of its own.
func (w *world) program(env []string, args ...string) *exec.Cmd {
	w.t.Helper()
	path, err := binary()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(env, "PATH="+os.Getenv("PATH"), "HOME="+w.t.TempDir())
	return cmd
}

func TestTheProgramAsInstalled(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("sendMessage", 1, 100000*time.Hour, ratelimit.Capacity(20)))
	config, err := pgx.ParseConfig(w.url)
	if err != nil {
		t.Fatal(err)
	}
	libpq := []string{
		"PGHOST=" + config.Host, fmt.Sprintf("PGPORT=%d", config.Port), "PGUSER=" + config.User, "PGDATABASE=" + config.Database, "PGPASSWORD=" + config.Password,
		"PGSSLMODE=prefer",
	}
	for _, test := range []struct {
		env  []string
		args []string
		code int
	}{
		{[]string{"DATABASE_URL=" + w.url}, []string{"limits"}, exitOK},
		{libpq, []string{"limits"}, exitOK},
		{append(libpq, "DATABASE_URL=postgres://127.0.0.1:1/none"), []string{"limits"}, exitError},
		{append(libpq, "DATABASE_URL=postgres://127.0.0.1:1/none"), []string{"limits", "-d", w.url}, exitOK},
		{libpq, []string{"keys", "sendMessage"}, exitNothing},
		{libpq, []string{"keys", "sendMesage"}, exitError},
		{libpq, []string{"keys"}, exitUsage},
		{libpq, []string{"reset", "sendMessage", "user-17"}, exitUsage}, // its standard input is no terminal
		{libpq, []string{"help", "keys"}, exitOK},
	} {
		cmd := w.program(test.env, test.args...)
		if out, _ := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != test.code {
			t.Errorf("%q: exit status %d, want %d: %s", test.args, cmd.ProcessState.ExitCode(), test.code, out)
		}
	}

	// It waits until all programs know of the override.
	w.sql("SELECT ratelimit.consume('sendMessage', 'user-17', count => 20)")
	began := time.Now()
	out, err := w.program(libpq, "override", "sendMessage", "user-17", "--capacity", "30", "--add", "--forever").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "added 10 tokens") || time.Since(began) < 2*time.Second {
		t.Errorf("after %v: %v: %s", time.Since(began), err, out)
	}
}

func TestItAsksOnATerminal(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("sendMessage", 1, 100000*time.Hour, ratelimit.Capacity(20)))
	for _, test := range []struct {
		answer string
		code   int
		left   float64
	}{{"n\n", exitError, 0}, {"\n", exitError, 0}, {"y\n", exitOK, 20}} {
		w.sql("DELETE FROM ratelimit.limits")
		w.sql("SELECT ratelimit.consume('sendMessage', 'user-17', count => 20)")
		master, terminal := newTerminal(t)
		cmd := w.program([]string{"DATABASE_URL=" + w.url}, "reset", "sendMessage", "user-17")
		var out bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, &out, &out
		if _, err := io.WriteString(master, test.answer); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Run(); cmd.ProcessState == nil {
			t.Fatal(err)
		}
		if code := cmd.ProcessState.ExitCode(); code != test.code || !strings.Contains(out.String(), "Make sendMessage user-17 full again, forget its debts, and end work that holds its tokens? [y/N]") {
			t.Errorf("answer %q: exit status %d: %s", test.answer, code, &out)
		}
		if k := parse[keyDetails](t, w.run("show", "sendMessage", "user-17", "--json")); *k.Remaining < test.left || *k.Remaining > test.left+1 {
			t.Errorf("answer %q: %v remaining, want %v", test.answer, *k.Remaining, test.left)
		}
	}
}

// newTerminal makes a pseudo-terminal.
func newTerminal(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return master, terminal
}

func TestCtrlCEndsAQuestion(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("sendMessage", 1, 100000*time.Hour))
	w.sql("SELECT ratelimit.consume('sendMessage', 'user-17')")
	_, terminal := newTerminal(t)
	cmd := w.program([]string{"DATABASE_URL=" + w.url}, "reset", "sendMessage", "user-17")
	asked, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = terminal
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var text []byte
	for part := make([]byte, 1000); !bytes.Contains(text, []byte("[y/N]")); {
		n, err := asked.Read(part)
		if text = append(text, part[:n]...); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(asked)
	if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != exitError || !bytes.Contains(rest, []byte("interrupted")) {
		t.Errorf("%v: %s", cmd.ProcessState, rest)
	}
	if k := parse[keyDetails](t, w.run("show", "sendMessage", "user-17", "--json")); k.Rows != 1 {
		t.Errorf("%+v", k)
	}
}

func TestCtrlCEndsWhatWaits(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("sendMessage", 1, 100000*time.Hour))
	holder := w.connect()
	if _, err := holder.Exec(t.Context(), "BEGIN; SELECT ratelimit.consume('sendMessage', 'user-17')"); err != nil {
		t.Fatal(err)
	}
	// The row must be there to be waited for.
	if _, err := holder.Exec(t.Context(), "COMMIT; BEGIN; SELECT FROM ratelimit.limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	cmd := w.program([]string{"DATABASE_URL=" + w.url}, "reset", "sendMessage", "user-17", "--yes")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waits := func() (n int) {
		if err := w.conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", int32(holder.PgConn().PID())).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for waits() == 0 {
		time.Sleep(10 * time.Millisecond)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != exitError || !strings.Contains(out.String(), "interrupted") {
		t.Errorf("%v: %s", err, &out)
	}
}
