package ratelimit

import (
	"log/slog"
	"math"
	"slices"
	"strconv"
)

// How requests and answers are logged. Logs have no keys, since a key may be personal data.

// LogValue implements [slog.LogValuer]: the limit's name and the count, without the key.
func (r Request) LogValue() slog.Value {
	return slog.GroupValue(slog.String("limit", r.limit.logName()), tokens("count", r.tokens))
}

// LogValue implements [slog.LogValuer], without the key.
func (s Status) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.String("limit", s.Limit.logName()), tokens("count", s.Count), slog.Bool("ok", s.OK), tokens("remaining", s.Remaining),
	}
	if !s.RetryAt.IsZero() {
		attrs = append(attrs, slog.Time("retry_at", s.RetryAt))
	}
	return slog.GroupValue(attrs...)
}

// LogValue implements [slog.LogValuer]: the names of the limits and the result, without keys.
func (r Result) LogValue() slog.Value {
	attrs := []slog.Attr{limitsAttr(r.Requests), slog.Bool("ok", r.OK), tokens("remaining", r.Remaining)}
	if !r.RetryAt.IsZero() {
		attrs = append(attrs, slog.Duration("retry_after", r.RetryAfter))
	}
	return slog.GroupValue(attrs...)
}

// LogValue implements [slog.LogValuer]: the names of the limits and when the work may run, without keys.
func (r Reservation) LogValue() slog.Value {
	return slog.GroupValue(limitsAttr(r.Requests), slog.Time("retry_at", r.RetryAt), slog.Duration("delay", r.Delay), tokens("remaining", r.Remaining))
}

// LogValue implements [slog.LogValuer]: the names of the limits and when the hold ends, without keys and token.
func (h Held) LogValue() slog.Value {
	attrs := []slog.Attr{limitsAttr(h.Requests), tokens("remaining", h.Remaining)}
	if !h.Until.IsZero() {
		attrs = append(attrs, slog.Time("until", h.Until))
	}
	return slog.GroupValue(attrs...)
}

// LogValue implements [slog.LogValuer], without the key.
func (b Balance) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.String("limit", b.Limit.logName()), tokens("remaining", b.Remaining), tokens("used", b.Used), tokens("capacity", b.Capacity),
		slog.String("decides", b.Decides),
	}
	if !b.Until.IsZero() {
		attrs = append(attrs, slog.Time("until", b.Until))
	}
	return slog.GroupValue(attrs...)
}

// logName is the limit's name. That of an invalid limit may be of any length, and not even UTF-8.
func (l *Limit) logName() string {
	if l.Validate() != nil {
		return "(invalid)"
	}
	return l.name
}

// tokens is a number of tokens. slog's JSON cannot have an infinite number or NaN.
func tokens(name string, n float64) slog.Attr {
	if math.IsInf(n, 0) || math.IsNaN(n) {
		return slog.String(name, strconv.FormatFloat(n, 'g', -1, 64))
	}
	return slog.Float64(name, n)
}

func limitsAttr(requests []Status) slog.Attr {
	var names []string
	for i := range requests {
		if name := requests[i].Limit.logName(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return slog.Any("limits", names)
}
