package ratelimit

import (
	"bytes"
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

// Receipt records the tokens that a Consume, Wait, Take, ConsumeEach, Once or Reserve took, for a later
// [Limiter.Refund]. It is text, to store with the work in the same transaction: if that rolls back, nothing was taken,
// and a refund by it would give back tokens of others. It is empty if nothing was taken. It counts once: after a
// refund, store the rest that its result has in its place.
//
// It is trusted, and names the schema, the limit and the key, so do not send it to clients. Even if it was altered, a
// refund gives back no more than the count asked for, and fills no limit above its capacity. Of a text above 1 MiB, or
// by a Limiter of another schema, a refund is [ErrInvalid].
type Receipt string

// receipt is the content of a Receipt.
//
// A later version of this package may write more. While it is deployed, this version reads its receipts. A field
// whose name begins with "x-" may be ignored, and is kept for the receipt of the rest. Any other unknown field is
// refused, since the refund may depend on it.
type receipt struct {
	Version int       `json:"v"`
	Schema  string    `json:"schema,omitempty"` // of the limiter; empty: the default
	At      time.Time `json:"at"`               // of the decision
	RunAt   time.Time `json:"runAt"`            // when the work was told to run
	Taken   []taken   `json:"taken"`
	more    optional
	index   map[limitKey]int // positions in Taken; see find
}

// taken is the tokens taken of one limit and key.
type taken struct {
	Limit    string  `json:"limit"`
	Key      string  `json:"key,omitempty"`
	Count    float64 `json:"count"`
	Refunded float64 `json:"refunded,omitempty"` // the part of Count in earlier refunds, whether it came back or not
	Held     float64 `json:"held"`               // the tokens left in the rows that decided, as if Refunded had not been taken
	Rows     int     `json:"rows"`               // the number of rows that decided: one or all; 0 if the limit had none
	Shards   int     `json:"shards"`             // the number of all shards
	more     optional
}

// optional are fields of a later version that this one may ignore.
type optional map[string]json.RawMessage

const optionalPrefix = "x-"

// UnmarshalJSON keeps optional fields, and refuses unknown ones.
func (r *receipt) UnmarshalJSON(text []byte) error {
	type known receipt
	return r.more.read(text, (*known)(r))
}

// MarshalJSON writes the optional fields too.
func (r receipt) MarshalJSON() ([]byte, error) {
	type known receipt
	return r.more.write(known(r))
}

// UnmarshalJSON keeps optional fields, and refuses unknown ones.
func (t *taken) UnmarshalJSON(text []byte) error {
	type known taken
	return t.more.read(text, (*known)(t))
}

// MarshalJSON writes the optional fields too.
func (t taken) MarshalJSON() ([]byte, error) {
	type known taken
	return t.more.write(known(t))
}

func (o *optional) read(text []byte, known any) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	var more optional
	for name, value := range fields {
		if strings.HasPrefix(name, optionalPrefix) {
			if more == nil {
				more = optional{}
			}
			more[name] = value
			delete(fields, name)
		}
	}
	text, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	err = decoder.Decode(known)
	*o = more
	return err
}

func (o optional) write(known any) ([]byte, error) {
	text, err := json.Marshal(known)
	if err != nil || o == nil {
		return text, err
	}
	more, err := json.Marshal(map[string]json.RawMessage(o))
	return append(append(text[:len(text)-1], ','), more[1:]...), err
}

const (
	receiptVersion = 1
	maxReceiptLen  = 1 << 20 // bytes: of thousands of limits and keys
	maxHeld        = 1e300   // so that no sum overflows
)

// Receipt is the text to store for a later [Limiter.Refund]. After a refund, it is the receipt for the rest. It is
// empty if nothing was taken (a denial or a check) and for a charge, which cannot be refunded. The JSON of a Result
// does not have it: store this text.
func (r Result) Receipt() Receipt {
	if r.receipt != nil {
		return r.receipt.text()
	}
	made := receipt{Version: receiptVersion, Schema: r.schema, At: r.At, RunAt: max(r.runAt, r.takenAt).Time()}
	if r.takenAt != 0 {
		made.At = r.takenAt.Time()
	}
	places := map[limitKey]int{}
	for _, s := range r.Requests {
		if s.took.rows == 0 && !s.took.rowless {
			continue
		}
		id := limitKey{s.Limit.name, s.Key}
		if i, ok := places[id]; ok {
			made.Taken[i].Count += s.Taken
			continue
		}
		places[id] = len(made.Taken)
		made.Taken = append(made.Taken, taken{
			Limit: s.Limit.name, Key: s.Key, Count: s.Taken,
			Held: s.took.held, Rows: s.took.rows, Shards: s.Limit.shards,
		})
	}
	return made.text()
}

// text is the stored form of a receipt.
func (r *receipt) text() Receipt {
	if len(r.Taken) == 0 {
		return ""
	}
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // never: all numbers are finite, and years have four digits
	}
	return Receipt(text)
}

// find is the entry of a limit and key, or nil.
func (r *receipt) find(limit, key string) *taken {
	if r.index == nil {
		r.index = make(map[limitKey]int, len(r.Taken))
		for i := range r.Taken {
			r.index[limitKey{r.Taken[i].Limit, r.Taken[i].Key}] = i
		}
	}
	if i, ok := r.index[limitKey{limit, key}]; ok {
		return &r.Taken[i]
	}
	return nil
}

// read reads a receipt that may have been altered.
func (text Receipt) read() (*receipt, error) {
	if text == "" {
		return nil, errors.New("the receipt is empty: nothing was taken, everything is refunded already, or it was lost: the JSON of a Result has none, so store Result.Receipt()")
	}
	if len(text) > maxReceiptLen {
		return nil, fmt.Errorf("the receipt cannot be read: it has %d bytes, more than %d", len(text), maxReceiptLen)
	}
	r := &receipt{}
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	err := decoder.Decode(r)
	if err == nil {
		if _, more := decoder.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("there is more text after it")
		}
	}
	if err == nil {
		err = r.validate()
	}
	if err != nil {
		return nil, fmt.Errorf("the receipt cannot be read: %w", err)
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
			return fmt.Errorf("limit %q is there twice with one key", t.Limit)
		case !countable(t.Count) || !(t.Refunded >= 0 && t.Refunded <= t.Count), !(math.Abs(t.Held) <= maxHeld),
			t.Shards < 1 || t.Shards > maxShards, t.Rows != 1 && t.Rows != t.Shards && !(t.Rows == 0 && t.Held == 0):
			return fmt.Errorf("limit %q: its numbers contradict each other, so it was altered", t.Limit)
		}
	}
	return nil
}

// refundRequests are the requests of a refund. One without a Count is for all that is left of its key.
func (l *Limiter) refundRequests(from *receipt, requests []Request) ([]Request, error) {
	if len(requests) == 0 {
		return l.refundable(from)
	}
	requests = slices.Clone(requests)
	asked := map[limitKey]float64{}
	for _, r := range requests {
		if r.counts {
			asked[limitKey{r.limit.name, r.key}] += r.tokens
		}
	}
	for i := range requests {
		r := &requests[i]
		if t := from.find(r.limit.name, r.key); t != nil && !r.counts {
			key := limitKey{r.limit.name, r.key}
			if r.tokens = t.Count - t.Refunded - asked[key]; !countable(r.tokens) {
				r.tokens = 0
			}
			asked[key] += r.tokens
		}
	}
	return requests, nil
}

// refundable are the requests for all that is left in a receipt, of limits that the Limiter knows.
func (l *Limiter) refundable(r *receipt) ([]Request, error) {
	var requests []Request
	for i := range r.Taken {
		t := &r.Taken[i]
		limit, known := l.definitions.of(t.Limit)
		switch {
		case !known:
			return nil, fmt.Errorf("%w: limit %q: this Limiter does not know its numbers, from the list of Open or an earlier call: refund with requests", ErrInvalid, t.Limit)
		case limit.doesVary():
			return nil, fmt.Errorf("%w: limit %q: its keys have numbers of their own: refund with requests", ErrInvalid, t.Limit)
		}
		if t.Key != "" {
			if err := checkText("key", t.Key, maxKeyLen); err != nil {
				return nil, fmt.Errorf("%w: limit %q: the receipt cannot be read: %w", ErrInvalid, t.Limit, err)
			}
		}
		if left := t.Count - t.Refunded; countable(left) {
			requests = append(requests, Request{limit: limit, key: t.Key, tokens: left})
		}
	}
	if requests == nil {
		return nil, fmt.Errorf("%w: the receipt has nothing left", ErrInvalid)
	}
	return requests, nil
}

// covers checks that the receipt has the tokens that the demands ask for, and trims a rounding excess.
func (r *receipt) covers(ds []demand) error {
	for i := range ds {
		d := &ds[i]
		t := r.find(d.limit.name, d.key)
		if t == nil {
			return fmt.Errorf("%w: limit %q: the receipt has no tokens for this key, or they are all refunded", ErrInvalid, d.limit.name)
		}
		left := t.Count - t.Refunded
		if d.count > left+t.rounding() {
			return fmt.Errorf("%w: limit %q: a refund of %v, but the receipt has %v left", ErrInvalid, d.limit.name, d.count, left)
		}
		d.count = min(d.count, left)
	}
	return nil
}

// rounding is how far the sum of the parts may differ from the whole.
func (t *taken) rounding() float64 { return 1e-12 * t.Count }

// algebra is the entry as the refund rule needs it.
func (r *receipt) algebra(t *taken) algebra.Taken {
	part := 1.0
	if t.Rows < t.Shards {
		part = 1 / float64(t.Shards)
	}
	return algebra.Taken{At: algebra.At(r.At), RunAt: algebra.At(r.RunAt), Count: t.Count, Held: t.Held, Part: part}
}

// refund notes that the demands have been refunded. It returns how many tokens came back for each demand. None come
// back for the demands without rows.
func (r *receipt) refund(ds, rowless []demand, a *answer) []float64 {
	refunded := a.held.moved
	for _, place := range a.held.lost {
		// While work waits, a refund pays what is owed to it first, so a later refund must not count those tokens as
		// still missing.
		i := place - 1
		left := ds[i].numbers.Total(a.rows[i], a.at)
		r.find(ds[i].limit.name, ds[i].key).Held += min(refunded[i], max(refunded[i]-left, 0))
	}
	for _, d := range ds {
		t := r.find(d.limit.name, d.key)
		t.Held += d.count // as if d.count had not been taken
		t.Refunded += d.count
	}
	for _, d := range rowless {
		r.find(d.limit.name, d.key).Refunded += d.count
	}
	r.index = nil
	r.Taken = slices.DeleteFunc(r.Taken, func(t taken) bool { return t.Count > 0 && t.Count-t.Refunded <= t.rounding() })
	return refunded
}
