//go:build unix

package postgres

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A script runs one server, from before the server's directory exists until after
// it is removed: begin, then the commands that prepare and start the server, then
// end. Its standard input is a pipe, and only this process has the write end. So
// the script reads end of file when this process closes the pipe or ends in any
// way, including SIGKILL. Closing and crashing are the same to it, and the server
// never runs unwatched.
const (
	begin = `
dir=$1 name=$2
shift 2
umask 077
signal=QUIT
exec 3<&0 </dev/null # only the watcher below reads the pipe
mkdir "$dir" || exit
trap 'rm -rf "$dir"' EXIT
`

	// SIGQUIT is PostgreSQL's immediate shutdown. It is repeated, since a shell
	// starts its background commands with SIGQUIT ignored: a signal is lost until
	// the server has a handler.
	end = `
server=$!
(
	while read -r _; do :; done
	while kill -$signal $server; do sleep 0.1 || sleep 1; done # fractions are not POSIX
) <&3 2>/dev/null &
watcher=$!

exec 3<&-
wait $server
kill $watcher 2>/dev/null
`
)

// watchdog is a running script.
type watchdog struct {
	name     string   // unique, and the cluster's cluster_name
	dir      string   // the server's directory
	lifeline *os.File // the write end of the script's standard input
	log      *os.File // the output of the script and the server
	exited   chan struct{}
}

// startWatchdog runs a script between begin and end. args are its $1, $2 and so
// on. It can read $dir and $name, and set the $signal that stops the server.
func startWatchdog(script string, args ...string) (*watchdog, error) {
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	base, err := tempDirFor(cred)
	if err != nil {
		return nil, err
	}
	name := "txlimit-postgres-" + randomHex()
	w := &watchdog{name: name, dir: filepath.Join(base, name), exited: make(chan struct{})}

	// A file without a name cannot be left behind. Unlike a pipe, it does not break
	// the script when this process ends.
	if w.log, err = os.CreateTemp("", name+"-log-"); err != nil {
		return nil, err
	}
	if err := os.Remove(w.log.Name()); err != nil {
		return nil, errors.Join(err, w.log.Close())
	}

	// Both ends close on exec, so no other child process holds the write end.
	stdin, lifeline, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, w.log.Close())
	}
	defer stdin.Close()
	w.lifeline = lifeline

	cmd := exec.Command("sh", append([]string{"-c", begin + script + end, "txlimit-postgres", w.dir, name}, args...)...)
	cmd.Dir = base // the other user may not be allowed to enter this process's directory
	cmd.Env = serverEnv(os.Environ())
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, w.log, w.log
	// In its own session, the script does not get Ctrl-C or a hangup of the terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: cred}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, lifeline.Close(), w.log.Close())
	}
	go func() {
		_ = cmd.Wait() // the log says more than the status
		close(w.exited)
	}()
	return w, nil
}

// stop stops the server and returns when its directory is gone.
func (w *watchdog) stop() error {
	defer w.log.Close()
	if err := w.lifeline.Close(); err != nil {
		return err
	}
	select {
	case <-w.exited:
	case <-time.After(5 * time.Minute):
		return fmt.Errorf("the server in %s does not stop", w.dir)
	}
	if _, err := os.Lstat(w.dir); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s is left behind:\n%s", w.dir, w.tail())
	}
	return nil
}

// tail returns the end of the log.
func (w *watchdog) tail() string {
	const most = 4 << 10
	size, err := w.log.Seek(0, io.SeekEnd)
	if err != nil {
		return err.Error()
	}
	text, err := io.ReadAll(io.NewSectionReader(w.log, max(0, size-most), most))
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text))
}

// serverEnv returns env without the variables that would change the server's
// behaviour or the language of its messages.
func serverEnv(env []string) []string {
	var kept []string
	for _, kv := range env {
		if !strings.HasPrefix(kv, "PG") && !strings.HasPrefix(kv, "LC_") {
			kept = append(kept, kv)
		}
	}
	return append(kept, "LC_ALL=C")
}

// unprivileged returns the user that runs the server: nil for the current user, or
// another user if the current one is root, which the server refuses.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody to run it as")
}

// tempDirFor returns the directory for temporary files, or /tmp if the user of cred
// cannot enter that directory and write there.
func tempDirFor(cred *syscall.Credential) (string, error) {
	var errs []error
	for _, dir := range []string{os.TempDir(), "/tmp"} {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return "", err
		}
		// Only a process of that user can find out: the modes of all parent
		// directories, groups and ACLs matter.
		cmd := exec.Command("sh", "-c", `test -d "$1" && test -w "$1" && test -x "$1"`, "sh", dir)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
		err = cmd.Run()
		if err == nil {
			return dir, nil
		}
		errs = append(errs, fmt.Errorf("%s is not writable for the server's user: %w", dir, err))
	}
	return "", errors.Join(errs...)
}
