//go:build unix

package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/txlimit/txlimit/internal/postgres/procstat"
)

// Breakable is a throwaway cluster for tests that break a server. It can be
// killed and started again, on the same port with the same data. Like every
// throwaway cluster, it ends with the process that started it. It always uses
// server binaries of this machine, or downloaded ones. Its methods are not for
// concurrent use.
type Breakable struct {
	config BreakableConfig
	bin    string
	port   int
	keeper *watchdog
	server *exec.Cmd     // the postmaster, or nil if none runs
	log    *os.File      // the server's output since its last start
	exited chan struct{} // closed when the server has ended
}

// BreakableConfig configures a cluster. The zero value is a cluster like those of
// [Start].
type BreakableConfig struct {
	Settings []string   // of the server: name=value
	Env      []string   // of the server: name=value
	InitDB   []string   // further arguments of initdb
	CopyOf   *Breakable // a stopped cluster to copy instead of running initdb
	Standby  bool       // the copy is a standby; the settings have its primary_conninfo
}

// keeperScript makes the data directory and waits until it has to remove it. Go
// starts and ends the server; the script ends it if the Go process is gone. $2 is
// a directory to copy, or empty. The arguments after $3 are for initdb.
const keeperScript = `
stop_server() {
	tries=300
	while [ $((tries -= 1)) -gt 0 ] && pid=$(head -n 1 "$dir/data/postmaster.pid") && kill -QUIT "$pid"; do sleep 0.1; done 2>/dev/null
	rm -rf "$dir"
}
trap stop_server EXIT
signal=KILL
bin=$1 copy=$2 standby=$3
shift 3
if [ -n "$copy" ]; then
	cp -a "$copy" "$dir/data" || exit
else
	"$bin/initdb" -D "$dir/data" -U postgres --auth=trust --encoding=UTF8 --locale=C --no-sync "$@" 3<&- || exit
fi
[ -z "$standby" ] || : >"$dir/data/standby.signal"
: >"$dir/ready"
sleep 2147483647 3<&- &
`

// NewBreakable makes a cluster and starts its server.
func NewBreakable(ctx context.Context, config BreakableConfig) (*Breakable, error) {
	bin, err := findBinaries(installed)
	if err != nil {
		var downloadErr error
		if bin, downloadErr = downloadBinaries(); downloadErr != nil {
			return nil, errors.Join(err, downloadErr)
		}
	}
	b := &Breakable{config: config, bin: bin}
	var from, standby string
	if config.CopyOf != nil {
		from = filepath.Join(config.CopyOf.keeper.dir, "data")
	}
	if config.Standby {
		standby = "yes"
	}
	if b.keeper, err = startWatchdog(keeperScript, append([]string{bin, from, standby}, config.InitDB...)...); err != nil {
		return nil, err
	}
	for {
		if _, err := os.Stat(filepath.Join(b.keeper.dir, "ready")); err == nil {
			break
		}
		select {
		case <-b.keeper.exited:
			return nil, fmt.Errorf("no cluster could be made:\n%s", b.keeper.tail())
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), b.Close())
		case <-time.After(10 * time.Millisecond):
		}
	}
	for attempt := 1; ; attempt++ {
		if b.port, err = freePort(); err == nil {
			err = b.Start(ctx)
		}
		if err == nil {
			return b, nil
		}
		if !errors.Is(err, errPortTaken) || attempt == 5 {
			return nil, errors.Join(err, b.Close())
		}
	}
}

// URL returns the connection string of the server, for its superuser.
func (b *Breakable) URL() string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", b.port)
}

// Start starts the server and returns when it accepts connections.
func (b *Breakable) Start(ctx context.Context) error {
	for {
		err := b.start(ctx)
		// The server does not start while a process of a killed one remains.
		if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "pre-existing shared memory") {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (b *Breakable) start(ctx context.Context) error {
	cred, err := unprivileged()
	if err != nil {
		return err
	}
	b.server = exec.Command(filepath.Join(b.bin, "postgres"), "-D", filepath.Join(b.keeper.dir, "data"), "-p", strconv.Itoa(b.port),
		"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "max_connections=300", "-c", "cluster_name="+b.keeper.name)
	for _, setting := range b.config.Settings {
		b.server.Args = append(b.server.Args, "-c", setting)
	}
	b.server.Dir = "/"
	b.server.Env = append(serverEnv(os.Environ()), b.config.Env...)
	b.server.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: cred}
	if b.log != nil {
		b.log.Close()
	}
	if b.log, err = os.CreateTemp("", b.keeper.name+"-log-"); err != nil {
		return err
	}
	if err := os.Remove(b.log.Name()); err != nil {
		return err
	}
	b.server.Stdout, b.server.Stderr = b.log, b.log
	if err := b.server.Start(); err != nil {
		b.server = nil
		return err
	}
	exited := make(chan struct{})
	go func(server *exec.Cmd) {
		_ = server.Wait() // the log says more than the status
		close(exited)
	}(b.server)
	b.exited = exited
	_, err = waitReady(ctx, b.URL(), b.keeper.name, func() error {
		select {
		case <-exited:
		default:
			return nil
		}
		b.server = nil
		text := (&watchdog{log: b.log}).tail()
		if strings.Contains(text, "Address already in use") {
			return errPortTaken
		}
		return fmt.Errorf("it ended at once:\n%s", text)
	})
	return err
}

// Log returns the server's output since its last start.
func (b *Breakable) Log() (string, error) {
	size, err := b.log.Seek(0, io.SeekEnd)
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(io.NewSectionReader(b.log, 0, size))
	return string(text), err
}

// Exited is closed when the server has ended, for any reason.
func (b *Breakable) Exited() <-chan struct{} { return b.exited }

// PIDs returns the server's processes, the postmaster first. Without /proc, it
// returns the postmaster alone; the others end when they notice that it is gone.
func (b *Breakable) PIDs() []int {
	if b.server == nil {
		return nil
	}
	postmaster := b.server.Process.Pid
	return append([]int{postmaster}, procstat.Children(postmaster)...)
}

// Kill ends all processes of the server by SIGKILL: without a shutdown, a
// checkpoint or a message to the clients. Data that they have written to the
// kernel survives.
func (b *Breakable) Kill() {
	if b.server == nil {
		return
	}
	_ = b.server.Process.Signal(syscall.SIGSTOP)    // it must not start more processes
	for _, pid := range slices.Backward(b.PIDs()) { // the postmaster last; otherwise the others would end their connections
		_ = syscall.Kill(pid, syscall.SIGKILL) // the process may have ended by itself
	}
	<-b.exited
	b.server = nil
}

// Stop shuts the server down cleanly.
func (b *Breakable) Stop() {
	if b.server == nil {
		return
	}
	_ = b.server.Process.Signal(syscall.SIGINT) // the process may have ended by itself
	<-b.exited
	b.server = nil
}

// Close ends the server and removes everything.
func (b *Breakable) Close() error {
	b.Kill()
	if b.log != nil {
		defer b.log.Close()
	}
	return b.keeper.stop()
}
