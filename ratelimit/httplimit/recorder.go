package httplimit

import (
	"bufio"
	"io"
	"net"
	"net/http"
)

// statusRecorder records the status of an answer. It offers the methods that http.ResponseController and type assertions
// find on the ResponseWriter below.
type statusRecorder struct {
	http.ResponseWriter
	status int // 0: nothing was written
}

// Unwrap is for http.ResponseController.
func (s *statusRecorder) Unwrap() http.ResponseWriter { return s.ResponseWriter }

func (s *statusRecorder) note(status int) {
	if s.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) { // the others are informational: another status follows
		s.status = status
	}
}

// WriteHeader records the status.
func (s *statusRecorder) WriteHeader(status int) {
	s.ResponseWriter.WriteHeader(status) // panics for invalid numbers
	s.note(status)
}

// Write begins an answer of 200, if none has begun.
func (s *statusRecorder) Write(p []byte) (int, error) {
	s.note(http.StatusOK)
	return s.ResponseWriter.Write(p)
}

// ReadFrom implements io.ReaderFrom, with the method of the ResponseWriter below if it has one.
func (s *statusRecorder) ReadFrom(src io.Reader) (int64, error) {
	n, err := io.Copy(s.ResponseWriter, src)
	if n > 0 { // to read nothing begins no answer: its status is still open
		s.note(http.StatusOK)
	}
	return n, err
}

// FlushError is called by http.ResponseController.
func (s *statusRecorder) FlushError() error {
	err := http.NewResponseController(s.ResponseWriter).Flush()
	if err == nil {
		s.note(http.StatusOK)
	}
	return err
}

// Flush implements http.Flusher.
func (s *statusRecorder) Flush() { _ = s.FlushError() }

// Hijack implements http.Hijacker. It counts as status 101, since later traffic on the connection is not seen.
func (s *statusRecorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(s.ResponseWriter).Hijack()
	if err == nil {
		s.note(http.StatusSwitchingProtocols)
	}
	return conn, rw, err
}
