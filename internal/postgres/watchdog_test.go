//go:build unix

package postgres

import (
	"bufio"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A server ends with the process that started it, however that process ends, and
// its directory is removed.
func TestServerEndsWithItsProcess(t *testing.T) {
	for _, row := range []struct {
		how string
		end func(pid int) error // nil: the child calls os.Exit
	}{
		{"os.Exit", nil},
		{"SIGKILL", func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) }},
		{"SIGKILL to its process group", func(pid int) error { return syscall.Kill(-pid, syscall.SIGKILL) }},
		{"Ctrl-C", func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) }},
	} {
		t.Run(row.how, func(t *testing.T) {
			t.Parallel()
			cmd := child(t, "serve", envLadder+"=binaries")
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(stdout).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			url := strings.TrimSpace(line)
			dir := clusterDir(t, url)
			if !exists(dir) {
				t.Fatalf("%s does not exist while the server runs", dir)
			}

			if row.end == nil {
				err = stdin.Close()
			} else {
				err = row.end(cmd.Process.Pid)
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err == nil {
				t.Error("the child ended well")
			}
			for deadline := time.Now().Add(5 * time.Minute); exists(dir) || serves(url); {
				if time.Now().After(deadline) {
					t.Fatalf("left behind: directory %v, server %v", exists(dir), serves(url))
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
}
