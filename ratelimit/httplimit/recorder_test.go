package httplimit

import (
	"bufio"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// This runs on a real server, whose ResponseWriter flushes, hijacks and reads from files.
func TestTheRecorderSeesTheStatusAndHidesNothing(t *testing.T) {
	type handler = func(t *testing.T, w http.ResponseWriter, r *http.Request)
	for name, row := range map[string]struct {
		handle handler
		status int // recorded
		answer int // received by the client
		body   string
	}{
		"nothing":     {func(*testing.T, http.ResponseWriter, *http.Request) {}, 0, 200, ""},
		"WriteHeader": {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, 401, 401, ""},
		"Write":       {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }, 200, 200, "hello"},
		"Write of nil": {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(nil)
			w.WriteHeader(http.StatusUnauthorized)
		}, 200, 200, ""},
		"twice": {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusUnauthorized)
			w.WriteHeader(http.StatusOK)
		}, 401, 401, ""},
		"http.Error": {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusForbidden) }, 403, 403, "no\n"},
		"early hints": {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Link", "</style.css>; rel=preload; as=style")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusForbidden)
		}, 403, 403, ""},
		"Flusher": {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			w.WriteHeader(http.StatusUnauthorized)
		}, 200, 200, ""},
		"ReaderFrom": {func(t *testing.T, w http.ResponseWriter, _ *http.Request) {
			if n, err := w.(io.ReaderFrom).ReadFrom(strings.NewReader("hello")); n != 5 || err != nil {
				t.Errorf("ReadFrom: %d, %v", n, err)
			}
		}, 200, 200, "hello"},
		"ReaderFrom of nothing, and then a failure": {func(t *testing.T, w http.ResponseWriter, _ *http.Request) {
			if n, err := io.Copy(w, strings.NewReader("")); n != 0 || err != nil {
				t.Errorf("copied %d, %v", n, err)
			}
			w.WriteHeader(http.StatusUnauthorized)
		}, 401, 401, ""},
		"ResponseController": {func(t *testing.T, w http.ResponseWriter, _ *http.Request) {
			c := http.NewResponseController(w)
			if err := c.EnableFullDuplex(); err != nil { // by Unwrap
				t.Error(err)
			}
			w.WriteHeader(http.StatusNotFound)
			if err := c.Flush(); err != nil {
				t.Error(err)
			}
		}, 404, 404, ""},
		"Hijacker": {func(t *testing.T, w http.ResponseWriter, _ *http.Request) {
			conn, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = conn.Close() }()
			_, _ = rw.WriteString("HTTP/1.1 204 No Content\r\n\r\n")
			if err := rw.Flush(); err != nil {
				t.Error(err)
			}
		}, 101, 204, ""},
	} {
		t.Run(name, func(t *testing.T) {
			recorded := make(chan int, 1)
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				recorder := &statusRecorder{ResponseWriter: w}
				row.handle(t, recorder, r)
				recorded <- recorder.status
			}))
			server.Config.ErrorLog = log.New(io.Discard, "", 0) // no log of superfluous WriteHeader calls
			server.Start()
			defer server.Close()
			answer, err := server.Client().Get(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			if status := <-recorded; err != nil || status != row.status || answer.StatusCode != row.answer || string(body) != row.body {
				t.Errorf("recorded %d, the client has %d %q, %v; want %d, %d %q", status, answer.StatusCode, body, err, row.status, row.answer, row.body)
			}
		})
	}
}

// plain is a ResponseWriter without optional methods.
type plain struct{ http.ResponseWriter }

func TestWhatTheServerCannotDoIsNotDone(t *testing.T) {
	recorder := &statusRecorder{ResponseWriter: plain{httptest.NewRecorder()}}
	var conn net.Conn
	var rw *bufio.ReadWriter
	conn, rw, err := recorder.Hijack()
	if conn != nil || rw != nil || err == nil {
		t.Errorf("hijacked: %v", err)
	}
	recorder.Flush()
	if err := recorder.FlushError(); err == nil {
		t.Error("flushed")
	}
	if recorder.status != 0 {
		t.Errorf("status %d of what was not sent", recorder.status)
	}
}
