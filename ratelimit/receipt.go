package ratelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Receipt says what [Limiter.Consume] took, for [Limiter.Refund]. [Result.Receipt] makes it. Store it with the work that was granted:
// it is text, and fits a text column of a jobs table and a string of JSON. It is empty if nothing was taken.
//
// A receipt is trusted, so it should not go to clients. However it is altered, a refund gives back no more than the count that is
// asked for, and fills no limit above its capacity. It names the limit and the key; nothing else in it is of use to a program.
type Receipt string

// receipt is what a Receipt says.
type receipt struct {
	Version int       `json:"v"`
	At      time.Time `json:"at"`    // of the decision
	RunAt   time.Time `json:"runAt"` // when the work was told to run
	Taken   []taken   `json:"taken"`
}

// taken is what was taken of one limit and key.
type taken struct {
	Limit    string  `json:"limit"`
	Key      string  `json:"key,omitempty"`
	Count    float64 `json:"count"`
	Refunded float64 `json:"refunded,omitempty"` // of Count, given back or not
	Held     float64 `json:"held"`               // what the rows that decided held afterwards, as if Refunded had not been taken
	Rows     int     `json:"rows"`               // how many they were: one or all
	Shards   int     `json:"shards"`             // of so many
}

const (
	receiptVersion = 1
	maxHeld        = 1e300 // no sum overflows
)

// Receipt is what to store for a later [Limiter.Refund]. That of a refund says what is left to be given back. It is empty if nothing
// was taken: by a denial, a check or a charge, which cannot be refunded. A Consume of 0 tokens has one, of which 0 can be refunded.
func (r Result) Receipt() Receipt {
	if r.receipt != nil {
		return r.receipt.text()
	}
	made := receipt{Version: receiptVersion, At: r.At, RunAt: r.RetryAt}
	for _, s := range r.Requests {
		if s.took.rows == 0 {
			continue
		}
		if t := made.find(s.Limit.name, s.Key); t != nil {
			t.Count += s.Count
			continue
		}
		made.Taken = append(made.Taken, taken{
			Limit: s.Limit.name, Key: s.Key, Count: s.Count,
			Held: s.took.held, Rows: s.took.rows, Shards: s.Limit.shards,
		})
	}
	return made.text()
}

// text is the receipt as it is stored.
func (r *receipt) text() Receipt {
	if len(r.Taken) == 0 {
		return ""
	}
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // finite numbers, and years of four digits
	}
	return Receipt(text)
}

// find is what was taken of a limit and key, or nil.
func (r *receipt) find(limit, key string) *taken {
	for i := range r.Taken {
		if t := &r.Taken[i]; t.Limit == limit && t.Key == key {
			return t
		}
	}
	return nil
}

// read reads a receipt that may have been altered.
func (text Receipt) read() (*receipt, error) {
	if text == "" {
		return nil, fmt.Errorf("%w: the receipt is empty: nothing was taken, or all is refunded already", ErrInvalid)
	}
	r := &receipt{}
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(r)
	if err == nil {
		if _, more := decoder.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something follows it")
		}
	}
	if err == nil {
		err = r.validate()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: the receipt cannot be read: %w", ErrInvalid, err)
	}
	return r, nil
}

func (r *receipt) validate() error {
	if r.Version != receiptVersion {
		return fmt.Errorf("version %d, not %d", r.Version, receiptVersion)
	}
	for _, t := range []*time.Time{&r.At, &r.RunAt} {
		at, err := timestamp("an instant", *t)
		if err != nil {
			return err
		}
		*t = at.Time
	}
	for i, t := range r.Taken {
		switch {
		case r.find(t.Limit, t.Key) != &r.Taken[i]:
			return fmt.Errorf("limit %q is in it twice for one key", t.Limit)
		case !countable(t.Count) || !(t.Refunded >= 0 && t.Refunded <= t.Count), !(math.Abs(t.Held) <= maxHeld),
			t.Shards < 1 || t.Shards > maxShards, t.Rows != 1 && t.Rows != t.Shards:
			return fmt.Errorf("limit %q: it was altered, its numbers contradict each other", t.Limit)
		}
	}
	return nil
}

// covers checks that the receipt has what the demands ask for, and trims what rounding has added.
func (r *receipt) covers(ds []demand) error {
	for i := range ds {
		d := &ds[i]
		t := r.find(d.limit.name, d.key)
		if t == nil {
			return fmt.Errorf("%w: limit %q: the receipt has nothing of it for this key, or no more", ErrInvalid, d.limit.name)
		}
		left := t.Count - t.Refunded
		if d.count > left+t.rounding() {
			return fmt.Errorf("%w: limit %q: %v to be refunded, the receipt has %v left", ErrInvalid, d.limit.name, d.count, left)
		}
		d.count = min(d.count, left)
	}
	return nil
}

// rounding is by how much parts may add up to more or less than the whole.
func (t *taken) rounding() float64 { return 1e-12 * t.Count }

// algebra is what the rule has to know.
func (r *receipt) algebra(t *taken) algebra.Taken {
	part := 1.0
	if t.Rows < t.Shards {
		part = 1 / float64(t.Shards)
	}
	return algebra.Taken{At: algebra.At(r.At), RunAt: algebra.At(r.RunAt), Count: t.Count, Held: t.Held, Part: part}
}

// refund notes that the demands have been refunded, and makes the rows of the answer what they are by now. It returns how many tokens
// came back to each.
func (r *receipt) refund(ds []demand, a *answer) []float64 {
	refunded := make([]float64, len(ds))
	for i, d := range ds {
		t := r.find(d.limit.name, d.key)
		numbers, rows := d.limit.forKey(d.key), a.rows[i]
		if len(rows) > 0 {
			if back := numbers.Refund(rows, r.algebra(t), d.count, a.at); back > 0 {
				// The refund pays a debt first. What another part of it finds paid is still owed to those who wait.
				total := numbers.Total(rows, a.at)
				t.Held += min(back, max(-total, 0))
				a.rows[i] = numbers.Take(rows, len(rows), -back, a.at)
				refunded[i] = min(back, numbers.Capacity-total)
			}
		}
		t.Held += d.count // as if so much less had been taken
		t.Refunded += d.count
	}
	r.Taken = slices.DeleteFunc(r.Taken, func(t taken) bool { return t.Count > 0 && t.Count-t.Refunded <= t.rounding() })
	return refunded
}
