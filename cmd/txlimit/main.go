// Command txlimit looks after the rate limits of an application: who is limited and why, other numbers for a while, blocks,
// locks, sweeps and migrations.
//
//	go install github.com/txlimit/txlimit/cmd/txlimit@latest
//	txlimit --help
//
// docs/tool.md has the commands at a glance.
package main

import (
	"context"
	"os"
	"os/signal"
	"os/user"
	"syscall"
	"time"

	"golang.org/x/term"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	a := &app{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		terminal:   term.IsTerminal(int(os.Stdin.Fd())),
		getenv:     os.Getenv,
		who:        osUser(),
		patience:   10 * time.Second,
		completing: 2 * time.Second,
	}
	code := a.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// osUser is the name of the user who runs the program, or empty.
func osUser() string {
	u, err := user.Current()
	if err != nil {
		return ""
	}
	return u.Username
}
