package replay

import (
	"slices"
	"time"
)

// Span is a part of the time of a replay.
type Span struct {
	From, To time.Time // without To itself
	Events   int
	Denied   []int // events, by candidate
}

// spans counts events by time, in equal spans that become longer as more time is covered. There are at most maxSpans of them
// or, beyond 292 years, one for each of the years.
type spans struct {
	candidates int
	width      time.Duration
	list       []Span // in order; without those that have no events
}

const maxSpans = 240

// widths are the lengths of spans. Each divides the next one. Beyond the last, the length is doubled.
var widths = []time.Duration{
	time.Second, 5 * time.Second, 15 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute, time.Hour,
	4 * time.Hour, 12 * time.Hour, 24 * time.Hour, 7 * 24 * time.Hour, 28 * 24 * time.Hour,
}

// begin is the begin of the span that has t. time.Truncate counts from the year 1, a Monday.
func (s *spans) begin(t time.Time) time.Time { return t.UTC().Truncate(s.width) }

// add counts an event that is not before any other.
func (s *spans) add(t time.Time, denied []bool) {
	if s.list == nil {
		s.width = widths[0]
	}
	for len(s.list) > 0 && t.Sub(s.list[0].From)/s.width >= maxSpans {
		s.widen()
	}
	if begin := s.begin(t); len(s.list) == 0 || s.list[len(s.list)-1].From.Before(begin) {
		s.list = append(s.list, Span{From: begin, To: begin.Add(s.width), Denied: make([]int, s.candidates)})
	}
	last := &s.list[len(s.list)-1]
	last.Events++
	for i := range denied {
		if denied[i] {
			last.Denied[i]++
		}
	}
}

// widen joins spans into longer ones.
func (s *spans) widen() {
	if i := slices.Index(widths, s.width) + 1; i > 0 && i < len(widths) {
		s.width = widths[i]
	} else {
		s.width *= 2
	}
	joined := s.list[:0]
	for _, span := range s.list {
		begin := s.begin(span.From)
		if n := len(joined); n > 0 && joined[n-1].From.Equal(begin) {
			joined[n-1].Events += span.Events
			for i := range span.Denied {
				joined[n-1].Denied[i] += span.Denied[i]
			}
			continue
		}
		span.From, span.To = begin, begin.Add(s.width)
		joined = append(joined, span)
	}
	s.list = joined
}
