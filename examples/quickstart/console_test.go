package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/examples/internal/demo"
)

func TestThePageShowsTheLimits(t *testing.T) {
	pool, closePool, err := demo.Pool(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := closePool(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	read, write := io.Pipe()
	served := make(chan error, 1)
	go func() {
		served <- serve(ctx, pool, write)
		_ = write.Close()
	}()
	lines := bufio.NewScanner(read)
	address := ""
	for address == "" && lines.Scan() {
		t.Log(lines.Text())
		_, address, _ = strings.Cut(lines.Text(), "The page for operators: ")
	}
	if address == "" {
		t.Fatal(<-served)
	}
	go func() { _, _ = io.Copy(io.Discard, read) }()
	get := func(host string) (int, string) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode, string(body)
	}
	if status, body := get(""); status != http.StatusOK || !strings.Contains(body, "sendMessage") || !strings.Contains(body, "quickstart") {
		t.Errorf("%d: %s", status, body)
	}
	if status, _ := get("attacker.example"); status != http.StatusMisdirectedRequest {
		t.Errorf("for another host: %d", status)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
