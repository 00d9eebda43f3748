package httplimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/txlimit/txlimit/internal/outcome"
	"github.com/txlimit/txlimit/ratelimit"
)

// StatusError is returned by [Middleware.Requests], wrapped or not, to refuse a request with a chosen status.
type StatusError struct {
	Status int    // 400 to 599; any other is 500
	Detail string // for the client; it may be empty
}

// Error is the text for logs.
func (e *StatusError) Error() string {
	return fmt.Sprintf("httplimit: %d %s: %s", e.Status, http.StatusText(e.Status), e.Detail)
}

// statusOf is the status for an error of Middleware.Requests.
func statusOf(err error) int {
	var chosen *StatusError
	switch {
	case errors.As(err, &chosen) && chosen.Status >= 400 && chosen.Status <= 599:
		return chosen.Status
	case chosen == nil && errors.Is(err, ratelimit.ErrBadRequest):
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}

// problem is the body of a refusal (RFC 9457).
type problem struct {
	Type             string   `json:"type"`
	Title            string   `json:"title"`
	Status           int      `json:"status"`
	Detail           string   `json:"detail,omitempty"`
	ViolatedPolicies []string `json:"violated-policies,omitempty"`
}

// refuse answers a request that does not pass.
func (m Middleware) refuse(w http.ResponseWriter, r *http.Request, d Decision) {
	if denied := (*ratelimit.DeniedError)(nil); errors.As(d.Err, &denied) {
		result := d.Result
		if result.RetryAt, _ = outcome.RetryAt(denied); !result.RetryAt.IsZero() {
			result.RetryAfter = result.RetryAt.Sub(result.At)
			w.Header().Set(fieldRetry, m.retryAfter(r, result))
		}
	}
	if m.Refused != nil {
		m.Refused(w, r, d)
		return
	}
	body, err := json.Marshal(m.problemOf(d))
	if err != nil {
		panic(err) // never: only strings and numbers
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(d.Status)
	_, _ = w.Write(append(body, '\n')) // the client may be gone
}

// problemOf describes a refusal, without details of the database or the keys.
func (m Middleware) problemOf(d Decision) problem {
	p := problem{Type: "about:blank", Title: http.StatusText(d.Status), Status: d.Status}
	var exceeded *ratelimit.DeniedError
	var chosen *StatusError
	switch {
	case errors.As(d.Err, &exceeded):
		if p.Type, p.Title = quotaExceededType, quotaExceededTitle; d.Status == http.StatusForbidden {
			p.Type, p.Title, p.Detail = "about:blank", http.StatusText(d.Status), "The quota is 0, or the client is blocked."
		}
		for _, s := range exceeded.Requests {
			if name := wireName(s.Limit); !s.OK && !m.hides(s.Limit) && !slices.Contains(p.ViolatedPolicies, name) {
				p.ViolatedPolicies = append(p.ViolatedPolicies, name)
			}
		}
	case errors.As(d.Err, &chosen):
		p.Detail = chosen.Detail
	case errors.Is(d.Err, ratelimit.ErrExceedsCapacity):
		p.Detail = "The request asks for more than its quota can ever hold."
	case d.Status == http.StatusBadRequest:
		p.Detail = "The key or the count of the request is invalid."
	case d.Status == http.StatusServiceUnavailable:
		p.Detail = "The rate limit cannot be checked at the moment."
	}
	return p
}
