package examples_test

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/txlimit/txlimit/examples/internal/demo"
)

// TestTheService runs the program of docs/start-and-stop.md as the page tells to: it limits, follows a block, counts, and stops cleanly.
func TestTheService(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "service")
	if output, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-w", "-o", binary, "./service").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	pool, closePool, err := demo.Pool(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := closePool(); err != nil {
			t.Error(err)
		}
	})
	if _, err := pool.Exec(t.Context(), "CREATE TABLE messages (sender text NOT NULL, body text NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	service := exec.CommandContext(t.Context(), binary)
	service.Env = append(os.Environ(), "LISTEN="+address, "DATABASE_URL="+pool.Config().ConnString())
	service.Stderr = &stderr
	if err := service.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- service.Wait() }()

	post := func(sender string) (int, string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		form := url.Values{"sender": {sender}, "body": {"hello"}}
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/messages", strings.NewReader(form.Encode()))
		if err != nil {
			return 0, "", err
		}
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			return 0, "", err
		}
		return answer.StatusCode, answer.Header.Get("Retry-After"), answer.Body.Close()
	}
	for patience := time.Now().Add(5 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if connection, err := net.Dial("tcp", address); err == nil {
			if err := connection.Close(); err != nil {
				t.Fatal(err)
			}
			break
		}
		select {
		case err := <-ended:
			t.Fatalf("it ended: %v\n%s", err, &stderr)
		default:
		}
		if time.Now().After(patience) {
			t.Fatal("it does not listen")
		}
	}
	for i, want := range []int{201, 201, 201, 429} {
		if status, wait, err := post("ann"); err != nil || status != want || (wait != "") != (want == 429) {
			t.Errorf("message %d: %d, %q, %v, want %d", i, status, wait, err, want)
		}
	}
	if status, _, err := post(""); err != nil || status != http.StatusBadRequest {
		t.Errorf("without a sender: %d, %v", status, err)
	}
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.block('sendMessage', 'eve', forever => true)"); err != nil { // which it follows
		t.Fatal(err)
	}
	for patience := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
		status, _, err := post("eve")
		if err != nil || status != http.StatusCreated && status != http.StatusForbidden && status != http.StatusTooManyRequests || time.Now().After(patience) {
			t.Fatalf("eve, who is blocked: %d, %v", status, err)
		}
		if status == http.StatusForbidden {
			break
		}
	}

	if err := service.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("it ended with %v\n%s", err, &stderr)
		}
	case <-time.After(5 * time.Minute):
		t.Fatal("it does not end")
	}
	var got string
	err = pool.QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM messages WHERE sender = 'ann') || ' sent, ' || (SELECT string_agg(name, ', ' ORDER BY name) FROM ratelimit.definitions WHERE program = 'messages') || ' published, '
		       || (SELECT sum(denied) > 1 AND sum(granted) > 2 FROM ratelimit.usage WHERE name = 'sendMessage') || ' of the usage'`).Scan(&got)
	if want := "3 sent, requests, sendMessage published, true of the usage"; err != nil || got != want {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}
