package faults_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/txlimit/txlimit/internal/postgres"
)

// TestTheDiskIsFull fills the disk of the write-ahead log. Postgres panics, and cannot recover until there is space again.
//
// As root, the log is on a small tmpfs that is filled to the last byte. Only root may mount one. For an ordinary user,
// RLIMIT_FSIZE keeps the server's processes from writing as much as one file of the log, so the next file cannot be made.
// The same write fails, with another errno.
func TestTheDiskIsFull(t *testing.T) {
	t.Parallel()
	var s *postgres.Breakable
	var fill, empty func()
	var complaint string
	config := postgres.BreakableConfig{Settings: []string{"wal_recycle=off", "max_wal_size=64MB"}}
	if disk, err := smallDisk(t); err == nil {
		complaint = "No space left on device"
		config.Settings = []string{"wal_recycle=off", "min_wal_size=2MB", "max_wal_size=4MB"}
		config.InitDB = []string{"-X", filepath.Join(disk, "wal"), "--wal-segsize=1"}
		s = newServer(t, config)
		ballast := filepath.Join(disk, "ballast")
		fill = func() {
			f, err := os.Create(ballast)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for err == nil {
				_, err = f.Write(make([]byte, 4096))
			}
			if !errors.Is(err, unix.ENOSPC) {
				t.Fatal(err)
			}
		}
		empty = func() {
			if err := os.Remove(ballast); err != nil {
				t.Fatal(err)
			}
		}
	} else {
		t.Logf("cannot mount a tmpfs (%v); instead, the server may write at most half a file of the log", err)
		complaint = "File too large"
		s = newServer(t, config)
		limit := func(bytes uint64) {
			for _, pid := range s.PIDs() {
				var limit unix.Rlimit
				err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, nil, &limit)
				if limit.Cur = min(bytes, limit.Max); err == nil {
					err = unix.Prlimit(pid, unix.RLIMIT_FSIZE, &limit, nil)
				}
				if err != nil && !errors.Is(err, unix.ESRCH) {
					t.Fatal(err)
				}
			}
		}
		fill = func() { limit(8 << 20) }
		empty = func() { limit(unix.RLIM_INFINITY) }
	}

	l := newLoad(t, s.URL(), loadConfig{})
	other := connect(t, s.URL(), 1)
	// Read the whole log: refused connections fill its end.
	panics := func() int {
		text, err := s.Log()
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text, complaint) {
			return 0
		}
		return strings.Count(text, "PANIC")
	}
	crashes := 0
	for range 1 + int(lasting(0, 4)) {
		l.flows(5)
		before := panics()
		fill()
		// Other sessions write as well, so that it does not take long.
		eventually(t, "the server has crashed", func() bool {
			_, err := other.Exec(t.Context(), "SELECT pg_logical_emit_message(false, 'faults', repeat('x', 200000))")
			return err != nil && panics() > before
		})
		crashes++
		time.Sleep(lasting(500*time.Millisecond, 3*time.Second))
		empty()
		select {
		case <-s.Exited(): // it could not recover
			if err := s.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
		default:
		}
		eventually(t, "the server has recovered", func() bool {
			select {
			case <-s.Exited():
				if err := s.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
			default:
			}
			return other.Ping(t.Context()) == nil
		})
	}
	l.flows(5)
	sum := l.settle()
	t.Logf("the disk was full %d times: PANIC, %s", crashes, complaint)
	if sum.nothing+sum.unknown == 0 {
		t.Error("no call has noticed")
	}
}

// smallDisk mounts a small tmpfs for the duration of the test. Only this goroutine, and processes that it starts, can see
// it.
func smallDisk(t *testing.T) (dir string, err error) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread and its mounts end with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return "", err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return "", err
	}
	if dir, err = os.MkdirTemp("", "txlimit-disk-"); err != nil { //nolint:usetesting // the server's user must be able to read it
		return "", err
	}
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH) // it may not be mounted
		_ = os.Remove(dir)
	})
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // see above
		return "", err
	}
	return dir, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=24m,mode=0777")
}
