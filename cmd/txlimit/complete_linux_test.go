package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// hostileWords are names and keys that do something in a shell, on a terminal or as a flag. Each begins so that it is the only one.
var hostileWords = []string{
	"$(touch x)", "`touch x`", "a$(touch x)b", "a`touch x`b", "c;touch x;", "d&touch x&", "e|touch x", "f\ntouch x\n", "g\rtouch x\r", "h>x", "i<x", "j{touch,x}",
	"k'$(touch x)", "l\"$(touch x)\"", "m$HOME", "n\\", "o #", "p*", "q?", "r[a-z]", "s!!", "t~", "u^x", "v(touch x)", "w\ttouch x", "x touch x", "y\u202etouch x",
	"z\x7ftouch x", "A\u009b31m", "B\u00a0touch", "C\u2028touch x", "Dé", "E\x1b[2J", "F\x03touch x\n", "G\x04", "H$'\\n'touch", "~root", "J,--yes", "=ls", "-rf", "--yes", "%1", "!x", "#x", "{a,b}",
}

// plainWords need no quotes.
var plainWords = []string{"user-17", "10.1.2.3", "team/7", "ann@example.com"}

// quotedWords are keys that an operator has quoted, since they were copied from a list: to complete what follows, or they themselves, must not run
// them.
var quotedWords = []string{"Q$(touch x)", "Q`touch x`", "Q;touch x;", "Q&touch x&", "Q|touch x", "Q>x", "-$(touch${IFS}x)=", "Q-$(>x)=b", "Q-`>x`=", "--json=$(>x)", "Q *"}

// A shell inserts the word that is the only one, and then runs the line: what it inserts must not be more than a word. Nor may it run what is
// quoted, to find what to insert.
func TestCompletionNeedsNoQuoting(t *testing.T) {
	for _, shell := range []struct {
		name  string
		args  []string
		setup string
	}{
		{"bash", []string{"--norc", "--noprofile", "-i"}, `
_get_comp_words_by_ref() { # as bash-completion has it, which need not be installed
	words=("${COMP_WORDS[@]}") cword=$COMP_CWORD cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
}
source completion.sh
`},
		{"zsh", []string{"-f", "-i"}, `
autoload -Uz compinit && compinit -u -D
source completion.sh
compdef _txlimit txlimit
`},
		{"fish", []string{"--no-config", "-i", "-C", "function fish_prompt; printf 'ready> '; end"}, `
source completion.sh
`},
	} {
		t.Run(shell.name, func(t *testing.T) {
			if shell.name != "bash" && testing.Short() && rand.IntN(3) > 0 {
				t.Skip("not this time: ten seconds of processor time")
			}
			if _, err := exec.LookPath(shell.name); err != nil && shell.name != "bash" {
				t.Skip("there is no " + shell.name) // CI has it
			}
			w := newMigrated(t)
			for i, word := range slices.Concat(hostileWords, plainWords) {
				w.sql("SELECT ratelimit.consume($1, $2, rate => 1, period => '100000 hours')", fmt.Sprintf("limit%d", i), word)
				w.sql("SELECT ratelimit.consume($1, 'k', rate => 1, period => '100000 hours')", word)
				if !strings.ContainsFunc(word, unicode.IsControl) && !strings.HasPrefix(word, "~") {
					w.sql("INSERT INTO ratelimit.holds VALUES ($1, 'k', $2, 'held', 'slots', NULL, 1, now(), 0, 1, 'infinity')", fmt.Sprintf("limit%d", i), word)
				}
			}
			tool, err := binary()
			if err != nil {
				t.Fatal(err)
			}
			bin, dir := t.TempDir(), t.TempDir()
			write := func(path, text string, mode fs.FileMode) {
				if err := os.WriteFile(path, []byte(text), mode); err != nil {
					t.Fatal(err)
				}
			}
			// The shell runs what was typed and completed by this, which notes its arguments.
			write(filepath.Join(bin, "txlimit"), fmt.Sprintf(`#!/bin/sh
case $1 in __complete*) exec %[1]s "$@" ;; esac
printf '%%s\0' "$@" END >>%[2]s/args
`, shellQuote(tool), shellQuote(bin)), 0o755)
			write(filepath.Join(bin, "args"), "", 0o644)
			script, err := w.program(nil, "completion", shell.name).Output()
			if err != nil {
				t.Fatal(err)
			}
			write(filepath.Join(dir, "completion.sh"), string(script), 0o644)
			write(filepath.Join(dir, "setup.sh"), shell.setup, 0o644)

			var typed strings.Builder
			typed.WriteString("source ./setup.sh\n")
			for i, word := range slices.Concat(hostileWords, plainWords) {
				first := word[:1]
				fmt.Fprintf(&typed, "txlimit show limit%d \t END-KEY\n", i)
				if strings.ContainsAny(first, "$`~=-%!#{") { // what the operator types himself
					first = ""
				}
				fmt.Fprintf(&typed, "txlimit keys %s\t END-NAME\n", first)
				if i < len(hostileWords) && i%4 == 0 {
					fmt.Fprintf(&typed, "txlimit release limit%d k\t END-ID\n", i)
				}
			}
			for _, word := range quotedWords {
				quoted := "'" + word + "'"
				fmt.Fprintf(&typed, "txlimit show limit %s --js\t\n", quoted)
				fmt.Fprintf(&typed, "txlimit show limit %s\t\n", quoted)
				fmt.Fprintf(&typed, "txlimit show limit '%s\t'\n", word) // and the quote is open yet
			}
			typed.WriteString("exit\n")
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, shell.name, shell.args...)
			cmd.Dir = dir
			cmd.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + dir, "DATABASE_URL=" + w.url, "TERM=dumb", "HISTFILE=", "LC_ALL=C.UTF-8", "INPUTRC=/dev/null"}
			screen := onTerminal(t, cmd, typed.String())

			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if e.Name() != "completion.sh" && e.Name() != "setup.sh" && !strings.HasPrefix(e.Name(), ".") {
					t.Errorf("%s has made a file: %q", shell.name, e.Name())
				}
			}
			args, err := os.ReadFile(filepath.Join(bin, "args"))
			if err != nil {
				t.Fatal(err)
			}
			calls := strings.Split(strings.TrimSuffix(string(args), "\x00END\x00"), "\x00END\x00")
			for _, call := range calls {
				for word := range strings.SplitSeq(call, "\x00") {
					if slices.Contains(hostileWords, word) {
						t.Errorf("%s has inserted %q: %q", shell.name, word, call)
					}
				}
			}
			if !slices.Contains(calls, "show\x00limit\x00Q *\x00--json") {
				t.Errorf("%s has not completed what follows quotes:\n%q", shell.name, calls)
			}
			for i, word := range plainWords { // or nothing was completed at all
				want := []string{"show", fmt.Sprintf("limit%d", len(hostileWords)+i), word, "END-KEY"}
				if !slices.Contains(calls, strings.Join(want, "\x00")) {
					t.Errorf("%s has not completed %q:\n%q\n%s", shell.name, word, calls, screen)
				}
			}
		})
	}
}

// onTerminal runs a shell on a pseudo-terminal of its own, types a text line by line, and returns what is on the screen.
func onTerminal(t *testing.T, cmd *exec.Cmd, typed string) string {
	t.Helper()
	master, terminal := newTerminal(t)
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 1000, Col: 1000}); err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(cmd.Env, "PS1=ready> ")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = terminal.Close()
	lines := strings.SplitAfter(typed, "\n")
	var screen bytes.Buffer
	part := make([]byte, 4096)
	seen := 0
	for {
		n, err := master.Read(part)
		screen.Write(part[:n])
		// A line at a time, when the shell asks for it: what is typed before is lost while it sets up the terminal.
		for at := bytes.Index(screen.Bytes()[seen:], []byte("ready> ")); at >= 0 && len(lines) > 0; at = bytes.Index(screen.Bytes()[seen:], []byte("ready> ")) {
			seen += at + len("ready> ")
			if _, err := master.WriteString(lines[0]); err != nil {
				t.Fatal(err)
			}
			lines = lines[1:]
		}
		if err != nil { // EIO: the shell has ended
			break
		}
	}
	if err := cmd.Wait(); err != nil {
		if _, ok := errors.AsType[*exec.ExitError](err); !ok {
			t.Fatal(err)
		}
	}
	if len(lines) > 1 {
		t.Errorf("%d lines were not typed:\n%s", len(lines), screen.Bytes())
	}
	return screen.String()
}
