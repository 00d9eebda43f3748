// Package replay says which numbers would have denied whom. It decides events of the past, from a log or a query, by
// limits that are under consideration, exactly as a [ratelimit.Limiter] would have decided them:
//
//	events := replay.CSV(file, replay.Fields{Time: "created_at", Key: "user_id"})
//	report, err := replay.Run(events,
//		ratelimit.TokenBucket("sendMessage", 10, time.Hour),
//		ratelimit.TokenBucket("sendMessage", 10, time.Hour, ratelimit.Capacity(30)),
//	)
//	if err != nil {
//		return err
//	}
//	fmt.Print(report)
//
// A replay knows only what was asked for. Users who are denied try again, or stay away, and then ask differently.
package replay

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/ratelimit"
)

// Event is one call of the past that a limit would have decided.
type Event struct {
	Time time.Time

	// Key is the key as stored (see [ratelimit.Limit.Key]). For a limit without keys it is empty.
	Key string

	// Count is how many tokens were asked for.
	Count float64

	unit   string // what n counts: "line", "row"
	number int    // where the event was read, or 0
}

// place says where the event was read.
func (e *Event) place(nth int) string {
	if e.number > 0 {
		return fmt.Sprintf("%s %d", e.unit, e.number)
	}
	return fmt.Sprintf("event %d", nth)
}

// Run decides the events, in their order, by each of the candidates by itself. At first all limits are full. The candidates
// may have the same name. Shards are decided as one row: a sharded limit may grant a little less.
//
// Events must be in order of time. For a log that is not, see [Reorder]. Run stops at the first error that the events have,
// and at the first event that no call could be, such as one with an invalid key. These errors say where, and match
// [ratelimit.ErrInvalid]. To leave bad lines out instead, drop each [*MistakeError] from the sequence.
//
// The memory is bounded by the number of keys, not of events.
func Run(events iter.Seq2[Event, error], candidates ...ratelimit.Limit) (*Report, error) {
	if len(candidates) == 0 {
		return nil, fmt.Errorf("%w: a replay needs at least one limit", ratelimit.ErrInvalid)
	}
	r := &run{keys: map[string]int{}, spans: spans{candidates: len(candidates)}}
	for _, limit := range candidates {
		if err := limit.Validate(); err != nil {
			return nil, err
		}
		if limit.Config().Kind == "slots" {
			return nil, fmt.Errorf("%w: limit %q: slots cannot be replayed: an event does not say when its slot is free again", ratelimit.ErrInvalid, limit.Name())
		}
		r.tracks = append(r.tracks, newTrack(limit))
	}
	for event, err := range events {
		if err == nil {
			err = r.add(event)
		}
		if err != nil {
			return nil, err
		}
	}
	return r.report(), nil
}

// run is a replay under way.
type run struct {
	keys     map[string]int // numbers the keys
	names    []string       // by a key's number
	events   []int          // by a key's number
	count    int            // of events
	from, to time.Time
	tracks   []*track
	spans    spans
}

// track is one candidate's part of a run.
type track struct {
	limit   ratelimit.Limit // the candidate
	single  ratelimit.Limit // the candidate without shards
	suggest bool            // some capacity would be enough
	limiter ratelimit.Limiter
	now     time.Time
	db      *inmemory.DB
	beyond  *inmemory.DB // where calls above the capacity are charged
	granted int
	denied  int
	keys    []fate // by a key's number
}

// fate is what one key met.
type fate struct {
	denied   int
	wait     time.Duration // the longest
	waitedAt time.Time

	owed algebra.Row // what a limit with a capacity of 0 would owe if it had granted everything: see Candidate.Suggest
	need float64     // the most that it would have owed
}

func newTrack(limit ratelimit.Limit) *track {
	t := &track{limit: limit, single: limit, db: inmemory.New(), beyond: inmemory.New()}
	t.limiter.Clock = func() time.Time { return t.now }
	c := limit.Config()
	if c.Kind == "unlimited" || *c.Rate == 0 {
		return t
	}
	t.suggest = true
	c.Shards = 1
	if c.Kind == "calendar window" { // so many windows are looked back
		owed := min(100**c.Rate, algebra.MaxTokens)
		c.MaxReserved = &owed
	}
	t.single, _ = c.Limit() // what is changed is no mistake
	return t
}

// check refuses what no call can have, so that it is a mistake of its line and not the end of the replay.
func (e Event) check() error {
	const longest = 1024 // bytes of a key
	switch {
	case e.Time.UTC().Year() < 1000 || e.Time.UTC().Year() > 9999: // as of ratelimit.Limiter.Clock
		return errors.New("the time is not in the years 1000 to 9999")
	case len(e.Key) > longest:
		return fmt.Errorf("the key has %d bytes, and %d are allowed", len(e.Key), longest)
	case !utf8.ValidString(e.Key) || strings.IndexByte(e.Key, 0) >= 0:
		return errors.New("the key is not valid UTF-8, or has a NUL byte")
	case e.Count != 0 && !(e.Count >= 1e-15 && e.Count <= algebra.MaxTokens):
		return fmt.Errorf("the count %v is neither 0 nor between 1e-15 and 1e15", e.Count)
	}
	return nil
}

// add decides one event by all candidates.
func (r *run) add(e Event) error {
	place := func(err error) error { return fmt.Errorf("replay: %s: %w", e.place(r.count+1), err) }
	if r.count > 0 && e.Time.Before(r.to) {
		return place(fmt.Errorf("%w: its time, %s, is before %s, the time of the event before it: sort the events by time, or see Reorder",
			ratelimit.ErrInvalid, e.Time.UTC().Format(time.RFC3339Nano), r.to.UTC().Format(time.RFC3339Nano)))
	}
	e.Time = e.Time.UTC().Round(0) // without a monotonic reading
	key, found := r.keys[e.Key]
	if !found {
		key = len(r.names)
	} else {
		e.Key = r.names[key]
	}
	denied := make([]bool, len(r.tracks))
	for i, t := range r.tracks {
		if !found {
			t.keys = append(t.keys, fate{})
		}
		var err error
		if denied[i], err = t.add(e, &t.keys[key]); err != nil {
			return place(err)
		}
	}
	if !found {
		r.keys[e.Key] = key
		r.names, r.events = append(r.names, e.Key), append(r.events, 0)
	}
	if r.count == 0 {
		r.from = e.Time
	}
	r.to = e.Time
	r.events[key]++
	r.count++
	r.spans.add(e.Time, denied)
	return nil
}

// add decides one event by the candidate.
func (t *track) add(e Event, key *fate) (denied bool, err error) {
	ctx, request := context.Background(), t.single.Global()
	if e.Key != "" {
		request = t.single.Key(e.Key)
	}
	request = request.Count(e.Count)
	t.now = e.Time
	result, err := t.limiter.Consume(ctx, t.db, request)
	wait, decided := result.RetryAfter, t.db
	switch {
	case err == nil:
		t.granted++
	case errors.Is(err, ratelimit.ErrExceedsCapacity):
		wait, decided = never, t.beyond
		if _, err := t.limiter.Charge(ctx, t.beyond, request); err != nil { // for its numbers: the other call was not sent
			return false, err
		}
		fallthrough
	case errors.Is(err, ratelimit.ErrDenied):
		denied = true
		t.denied++
		key.denied++
		if wait > key.wait {
			key.wait, key.waitedAt = wait, e.Time
		}
	default:
		return false, err
	}
	if t.suggest {
		now, numbers := algebra.At(e.Time), decided.Numbers()
		numbers.Capacity = 0
		key.owed = algebra.Row{Value: numbers.Available(key.owed, 1, now) - e.Count, TS: now}
		key.need = max(key.need, -key.owed.Value)
	}
	return denied, nil
}
