package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// envExit makes the test binary the command that is run: it exits with the
// number in the table that the SQL file makes.
const envExit = "TXLIMIT_TEST_EXIT_WITH_TABLE"

func TestMain(m *testing.M) {
	if os.Getenv(envExit) == "" {
		os.Exit(m.Run())
	}
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, os.Getenv("TXLIMIT_DATABASE_URL"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var code int
	if err := conn.QueryRow(ctx, "SELECT code FROM exit_codes").Scan(&code); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(code)
}

func write(t *testing.T, sql string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "test.sql")
	if err := os.WriteFile(file, []byte(sql), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestCommandSeesTheFilesTableAndItsExitCodeIsReturned(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(envExit, "yes")
	file := write(t, "CREATE TABLE exit_codes (code int);\nINSERT INTO exit_codes VALUES (42);")
	code, err := run(false, file, []string{self})
	if code != 42 || err != nil {
		t.Errorf("run = %d, %v, want 42", code, err)
	}
}

func TestCommandKilledBySignal(t *testing.T) {
	code, err := run(false, "", []string{"sh", "-c", "kill -TERM $$"})
	if code != 128+15 || err != nil {
		t.Errorf("run = %d, %v, want 143", code, err)
	}
}

func TestOwnFailures(t *testing.T) {
	if _, err := run(false, "/nonexistent.sql", []string{"true"}); err == nil {
		t.Error("no error for a file that is not there")
	}
	if _, err := run(false, "", []string{"/nonexistent"}); err == nil {
		t.Error("no error for a command that is not there")
	}
	file := write(t, "SELECT 1;\n-- häßlich\nSELECT nonsense;\n")
	if _, err := run(false, file, []string{"true"}); err == nil || !strings.Contains(err.Error(), file+":3: ") {
		t.Errorf("the error does not name line 3 of the file: %v", err)
	}
}
