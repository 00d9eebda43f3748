// Llm-proxy stands between teams and a language model. The model's response has the number of tokens used. The proxy takes
// an estimate before it passes a prompt on. Afterwards, the middleware charges or refunds the difference. Calls are limited
// before the prompt is read.
//
//	go run ./examples/llm-proxy
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// The limits of each team per minute.
var (
	llmCalls  = ratelimit.TokenBucket("llmCalls", 60, time.Minute)
	llmTokens = ratelimit.TokenBucket("llmTokens", 6_000, time.Minute)
)

type prompt struct {
	Text      string `json:"text"`
	MaxTokens int    `json:"max_tokens"` // of the answer
}

type completion struct {
	Text  string `json:"text"`
	Usage struct {
		TotalTokens float64 `json:"total_tokens"`
	} `json:"usage"`
}

// team is who sends a prompt. The application has authenticated it.
func team(r *http.Request) string { return r.Header.Get("X-Team") }

// estimate returns what a prompt takes: an estimate of its tokens: the text, by a rule of thumb, and the longest answer.
func estimate(r *http.Request) ([]ratelimit.Request, error) {
	body, err := io.ReadAll(r.Body)
	var p prompt
	if err == nil {
		err = json.Unmarshal(body, &p)
	}
	if err != nil || p.MaxTokens < 1 {
		return nil, &httplimit.StatusError{Status: http.StatusBadRequest, Detail: "Send a text and max_tokens."}
	}
	r.Body = io.NopCloser(bytes.NewReader(body)) // for the handler
	tokens := math.Ceil(float64(len(p.Text))/4) + float64(p.MaxTokens)
	return []ratelimit.Request{llmTokens.Key(team(r)).Count(tokens)}, nil
}

// proxy passes prompts on to the model at a URL, and sets the cost that the model reports.
func proxy(model string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		// If the client leaves, the model still goes on and must be paid. So wait for its answer.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), time.Minute)
		defer cancel()
		response, answer, err := post(ctx, model, "", r.Body)
		if err != nil { // the model may have used tokens: the estimate stays
			http.Error(w, "The model does not answer.", http.StatusBadGateway)
			return
		}
		var c completion // an error has no tokens
		if response.StatusCode == http.StatusOK {
			err = json.Unmarshal(answer, &c)
		}
		if err == nil {
			err = httplimit.SetCost(ctx, llmTokens, c.Usage.TotalTokens)
		}
		if err != nil {
			slog.ErrorContext(ctx, "the cost is unknown: the estimate stays", "error", err)
		}
		w.WriteHeader(response.StatusCode)
		_, _ = w.Write(answer) // the client may have left
	}
}

// post sends JSON for a team, and reads the response.
func post(ctx context.Context, url, team string, body io.Reader) (response *http.Response, answer []byte, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err != nil {
		return nil, nil, err
	}
	r.Header.Set("X-Team", team)
	if response, err = http.DefaultClient.Do(r); err != nil {
		return nil, nil, err
	}
	defer response.Body.Close()
	answer, err = io.ReadAll(response.Body)
	return response, answer, err
}

func main() { demo.Main(story) }

// usage has the tokens that the example's model uses for each prompt.
var usage = map[string]float64{"Say hello.": 12, "Think hard.": 2_500, "Prove it.": 5_600, "Write a poem.": 480}

func story(ctx context.Context, pool *pgxpool.Pool) error {
	working, goOn := make(chan struct{}), make(chan struct{})
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var p prompt
		if err := json.NewDecoder(r.Body).Decode(&p); err != nil || p.Text == "Fail." {
			http.Error(w, "The model has failed.", http.StatusInternalServerError)
			return
		}
		if p.Text == "Write a poem." {
			close(working)
			<-goOn
		}
		var c completion
		c.Text, c.Usage.TotalTokens = "...", usage[p.Text]
		_ = json.NewEncoder(w).Encode(c)
	}))
	defer model.Close()

	// The example has its own clock, so that its numbers are always the same.
	var now atomic.Int64
	now.Store(time.Date(2026, 7, 1, 12, 30, 0, 0, time.UTC).Unix())
	limiter, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "llm-proxy", Limits: []ratelimit.Limit{llmCalls, llmTokens},
		Clock: func() time.Time { return time.Unix(now.Load(), 0) },
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limiter)                // after the server and the Coalescer
	coalescer := &ratelimit.Coalescer{Pool: pool} // one for the process
	defer demo.Close(ctx, coalescer)
	calls := httplimit.Middleware{Limiter: limiter, DB: coalescer, Requests: httplimit.By(llmCalls, team)}
	tokens := httplimit.Middleware{Limiter: limiter, DB: coalescer, Requests: estimate, Settle: true}
	server := httptest.NewServer(calls.Handler(http.MaxBytesHandler(tokens.Handler(proxy(model.URL)), 1<<20)))
	defer server.Close()
	s := scene{limiter, pool, server.URL}

	for _, line := range []struct {
		title, text string
		maxTokens   int
		status      int
		left        float64
	}{
		{"The answer is shorter than estimated", "Say hello.", 1_000, 200, 5_988},
		{"The answer takes more tokens than estimated", "Think hard.", 1_000, 200, 3_488},
		{"An error of the model costs nothing", "Fail.", 1_000, 500, 3_488},
		{"A cost above the balance is charged, too", "Prove it.", 3_000, 200, -2_112},
		{"In debt, the next prompt is denied", "Say hello.", 1_000, 429, -2_112},
	} {
		fmt.Println(line.title)
		if err := s.ask(ctx, line.text, line.maxTokens, line.status); err != nil {
			return err
		}
		if err := s.holds(ctx, line.left); err != nil {
			return err
		}
	}

	now.Add(60)
	fmt.Println("A minute later, a client leaves before the model has answered")
	leaving, leave := context.WithCancel(ctx)
	defer leave()
	gone := make(chan error, 1)
	go func() { gone <- s.ask(leaving, "Write a poem.", 1_000, 0) }()
	select {
	case <-working:
	case err := <-gone:
		return err
	}
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		return fmt.Errorf("the client has left: %w", err)
	}
	close(goOn)
	return s.holds(ctx, 3_888-480)
}

// scene is a server, and a team, blue, that uses it.
type scene struct {
	limiter *ratelimit.Limiter
	pool    *pgxpool.Pool
	url     string
}

// ask sends a prompt and wants a status.
func (s scene) ask(ctx context.Context, text string, maxTokens, want int) error {
	body, err := json.Marshal(prompt{text, maxTokens})
	if err != nil {
		return err
	}
	fmt.Printf("   %s\n", body)
	response, answer, err := post(ctx, s.url, "blue", bytes.NewReader(body))
	if err != nil {
		return err
	}
	if wait := response.Header.Get("Retry-After"); wait != "" {
		fmt.Printf("   Retry-After: %s\n", wait)
	}
	fmt.Printf("   %d %s\n", response.StatusCode, bytes.TrimSpace(answer))
	if response.StatusCode != want {
		return fmt.Errorf("want %d", want)
	}
	return nil
}

// holds waits until the team has a number of tokens. If the client has left, they are settled a moment later.
func (s scene) holds(ctx context.Context, want float64) error {
	for {
		balances, err := s.limiter.Balance(ctx, s.pool, llmTokens.Key("blue"))
		if err == nil && balances[0].Remaining == want {
			fmt.Printf("   the team has %.0f tokens left\n", want)
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, fmt.Errorf("the balances are %v, want %v left", balances, want))
		case <-time.After(10 * time.Millisecond):
		}
	}
}
