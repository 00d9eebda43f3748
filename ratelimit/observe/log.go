package observe

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/ratelimit"
)

// DefaultEvery is the default of [Log].Every.
const DefaultEvery = 10 * time.Second

// Log writes refused and failed calls to a slog.Logger. The zero value is ready, and safe for concurrent use. After its
// first use, it must not be copied, nor its fields changed.
//
//	Info   a consumption was denied (limit, count, remaining, capacity, and retry_after unless waiting does not help)
//	Warn   a count can never be granted (limit, verb, error, took)
//	Error  a limit or request is invalid, or the database failed (limit, verb, error, took)
//
// Not logged are grants, checks that would be denied, transactions that have to run again (InTx does that), and calls that
// their caller canceled.
//
// A flood of denials, or a database that is down, does not flood the log. For each limit and kind of outcome, one record is
// written at once, and then none for the time Every. The next record after that says how many were left out (suppressed).
// Left-out records that no other follows are not reported. For exact numbers, use [Metrics].
type Log struct {
	Logger *slog.Logger  // nil: slog.Default()
	Every  time.Duration // least time between two records about the same; 0: DefaultEvery; negative: no bound

	// Key converts a request's key for the log. nil: no key is logged, since keys are personal data. [HashKey] logs a hash,
	// which is the same for the same key and does not reveal it. [PlainKey] logs the key as it is.
	Key func(key string) string

	mu   sync.Mutex
	kept map[subject]*pace
}

// subject groups records: a record suppresses later ones about the same subject.
type subject struct{ outcome, limit string }

// pace is when a subject was last logged, and how many records were left out since.
type pace struct {
	last       time.Time
	suppressed int
}

// PlainKey is for [Log].Key: it logs keys as they are.
func PlainKey(key string) string { return key }

// HashKey is for [Log].Key: it logs 16 hexadecimal digits of a keyed hash (HMAC-SHA-256). Without the secret, nobody can
// test which key a hash belongs to.
func HashKey(secret []byte) func(key string) string {
	return func(key string) string {
		h := hmac.New(sha256.New, secret)
		h.Write([]byte(key))
		return hex.EncodeToString(h.Sum(nil)[:8])
	}
}

// Observe is for [ratelimit.Limiter.Observer].
func (l *Log) Observe(ctx context.Context, d ratelimit.Decision) {
	switch of := outcome(ctx, d); of {
	case denied:
		if exceeded, ok := errors.AsType[*ratelimit.DeniedError](d.Err); ok {
			for _, s := range exceeded.Requests {
				if s.OK {
					continue
				}
				attrs := []slog.Attr{slog.Float64("count", s.Count), slog.Float64("remaining", s.Remaining), slog.Float64("capacity", s.Limit.Capacity())}
				if !s.RetryAt.IsZero() {
					attrs = append(attrs, slog.Duration("retry_after", s.RetryAt.Sub(exceeded.At)))
				}
				l.write(ctx, slog.LevelInfo, "rate limit exceeded", subject{of, limitName(s.Limit)}, []ratelimit.Status{s}, attrs...)
			}
		}
	case exceedsCapacity:
		l.failure(ctx, slog.LevelWarn, "rate limit can never grant the request", of, d)
	case invalid, failed:
		l.failure(ctx, slog.LevelError, "rate limit decision failed", of, d)
	}
}

func (l *Log) failure(ctx context.Context, level slog.Level, message, of string, d ratelimit.Decision) {
	var names []string
	for _, s := range d.Result.Requests {
		if name := limitName(s.Limit); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	l.write(ctx, level, message, subject{of, strings.Join(names, ", ")}, d.Result.Requests,
		slog.String("verb", d.Verb), slog.Any("error", visible.Error(d.Err)), slog.Duration("took", d.Took))
}

// write writes a record, unless one about the same subject was written just now.
func (l *Log) write(ctx context.Context, level slog.Level, message string, about subject, requests []ratelimit.Status, attrs ...slog.Attr) {
	logger := l.Logger
	if logger == nil {
		logger = slog.Default()
	}
	if !logger.Enabled(ctx, level) {
		return
	}
	suppressed, due := l.due(about)
	if !due {
		return
	}
	attrs = append([]slog.Attr{slog.String("limit", about.limit)}, attrs...)
	if l.Key != nil {
		var keys []string
		for _, s := range requests {
			keys = append(keys, l.Key(s.Key))
		}
		attrs = append(attrs, slog.String("key", visible.Escape(strings.Join(keys, ", "))))
	}
	if suppressed > 0 {
		attrs = append(attrs, slog.Int("suppressed", suppressed))
	}
	logger.LogAttrs(ctx, level, message, attrs...)
}

// due reports whether it is time for a record, and how many were left out before it.
func (l *Log) due(about subject) (suppressed int, due bool) {
	every := l.Every
	if every == 0 {
		every = DefaultEvery
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.kept[about]
	if p == nil {
		if l.kept == nil {
			l.kept = map[subject]*pace{}
		}
		p = &pace{}
		l.kept[about] = p
	}
	now := time.Now()
	if !p.last.IsZero() && now.Sub(p.last) < every {
		p.suppressed++
		return 0, false
	}
	suppressed, p.suppressed, p.last = p.suppressed, 0, now
	return suppressed, true
}
