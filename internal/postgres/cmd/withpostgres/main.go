// Withpostgres runs a command that needs a PostgreSQL.
//
//	go run ./internal/postgres/cmd/withpostgres [-migrated] [-f file.sql] -- command args...
//
// It finds or starts a server, as package postgres describes. It makes a database,
// migrates it or runs the SQL file in it, and runs the command with TXLIMIT_DATABASE_URL set to a
// connection string for it. When the command ends, it
// removes everything that it made and exits with the command's exit code. (go run
// itself turns every exit code but 0 into 1.)
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
)

func main() {
	up := flag.Bool("migrated", false, "run the limiter's migrations in the new database")
	file := flag.String("f", "", "SQL `file` to run in the new database before the command")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: withpostgres [-migrated] [-f file.sql] -- command args...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	code, err := run(*up, *file, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "withpostgres:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// run returns the exit code of the command. An error is a failure of this program.
func run(up bool, file string, command []string) (code int, err error) {
	// Until the command runs, a signal ends the preparations. After that, SIGTERM is
	// passed on to the command. The terminal sends Ctrl-C to both processes, and
	// this one only has to outlive the command.
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	defer signal.Stop(terminate)

	var sql []byte
	if file != "" {
		if sql, err = os.ReadFile(file); err != nil {
			return 0, err
		}
	}
	server, err := postgres.Start(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	fmt.Fprintln(os.Stderr, "withpostgres:", server)
	url, _, err := server.NewDatabase(ctx, "") // Close drops it
	if err != nil {
		return 0, err
	}
	if up {
		if err := migrated.Up(ctx, url); err != nil {
			return 0, err
		}
	}
	if err := runSQL(ctx, url, file, string(sql)); err != nil {
		return 0, err
	}

	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "TXLIMIT_DATABASE_URL="+url)
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		for {
			select {
			case s := <-terminate:
				_ = cmd.Process.Signal(s) // it may have ended just now
			case <-ended:
				return
			}
		}
	}()
	err = cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return 128 + int(status.Signal()), nil // as shells do
		}
		return exit.ExitCode(), nil
	}
	return 0, err
}

// runSQL runs the statements of a file.
func runSQL(ctx context.Context, url, file, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	// The simple protocol takes many statements at once.
	if _, err := conn.PgConn().Exec(ctx, sql).ReadAll(); err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.Position > 0 {
			// Position counts characters, from 1.
			before := []rune(sql)[:min(int(pgErr.Position)-1, len([]rune(sql)))]
			return fmt.Errorf("%s:%d: %w", file, 1+strings.Count(string(before), "\n"), err)
		}
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}
