package ratelimit

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Bounds of what a limit or a request may hold, beside those of its numbers in package algebra.
const (
	maxNameLen = 255  // bytes
	maxKeyLen  = 1024 // bytes, after several parts have been joined
	maxShards  = 100
)

// Kind is how a limit refills.
type Kind string

// The two kinds of limit.
const (
	KindTokenBucket Kind = "token bucket"
	KindFixedWindow Kind = "fixed window"
)

// Limit is the definition of a rate limit. It is immutable, safe for concurrent use, and cheap to copy. Its rows live under
// its name: give every limit of a schema its own. Plans of one limit may share a name if kind, period and start are the same.
//
// Changing the numbers of a limit takes effect at the next call; what is saved up is clamped to the new capacity, and nothing
// is added to what was left at the last use. While two versions of the numbers are in use, as during a deployment, they grant
// together in any time span at most the larger capacity, what the larger rate refills and the larger maxReserved, however they are sharded. But
// if the kind differs, or period or [Start] of a fixed window, each refills by its own clock, so that what both refill adds up
// until only one is in use.
type Limit struct {
	name        string
	numbers     algebra.Limit
	maxReserved float64 // +Inf: unset
	shards      int
	hasStart    bool
	start       time.Time
	err         error // what is wrong with the definition
}

// TokenBucket defines a limit that is refilled continuously, rate tokens per period, up to its capacity. Over any time
// span it grants at most capacity + span*rate/period.
//
// A definition that is wrong (see [New]) is reported by [Limit.Validate] and by every call that uses it.
func TokenBucket(name string, rate float64, period time.Duration, options ...Option) Limit {
	return define(KindTokenBucket, name, rate, period, options)
}

// FixedWindow defines a limit that is refilled by rate tokens at the start of each window of length period, up to its
// capacity. With the default capacity it grants at most rate tokens in each window.
//
// Windows lie on a grid through [Start]. Without one, the grid's offset is a hash of name and key, so that not everybody's
// windows begin together.
//
// A definition that is wrong (see [New]) is reported by [Limit.Validate] and by every call that uses it.
func FixedWindow(name string, rate float64, period time.Duration, options ...Option) Limit {
	return define(KindFixedWindow, name, rate, period, options)
}

func define(kind Kind, name string, rate float64, period time.Duration, options []Option) Limit {
	c := Config{Kind: kind, Name: name, Rate: rate, Period: Duration(period)}
	for _, option := range options {
		option(&c)
	}
	l, _ := New(c) // which the limit remembers
	return l
}

// Option sets what a limit may have besides its rate.
type Option func(*Config)

// Capacity sets the most tokens that can be saved up. The default is the rate. With 0 nothing is saved up, and every
// request must reserve.
func Capacity(tokens float64) Option { return func(c *Config) { c.Capacity = &tokens } }

// MaxReserved bounds what may be owed by reservations ([Request.Reserve]) at any time. By default there is no bound; with
// 0 nothing can be reserved.
func MaxReserved(tokens float64) Option { return func(c *Config) { c.MaxReserved = &tokens } }

// Start puts a fixed window's grid through an instant, past or future: windows begin at t plus or minus whole periods.
// It is an error for a token bucket.
func Start(t time.Time) Option { return func(c *Config) { c.Start = &t } }

// Shards spreads each key over n rows, each with an n-th of the rate, the capacity and the tokens, so that transactions on
// one hot key need not wait for each other. The default is 1.
//
// A request takes from one shard: in READ COMMITTED from the better of two picked at random (the power of two choices); above it
// from one picked at random, since one that is read and not taken from would conflict; with [Hot] from the one that was chosen
// when queueing. When that has not enough, all shards are locked, what they hold together is added up (to within 1e-9 tokens or,
// if that is more, the rounding of double precision, less than 1e-14 of the sum each time), and the remainder is spread evenly. A shard that
// is full is not refilled, so a sharded limit grants no more than an unsharded one, and at times a little less.
func Shards(n int) Option { return func(c *Config) { c.Shards = n } }

// Validate says what is wrong with the definition: an error that matches [ErrInvalid], or nil.
func (l Limit) Validate() error {
	if l.err == nil && l.name == "" {
		return fmt.Errorf("%w: the zero Limit is none; use TokenBucket, FixedWindow or New", ErrInvalid)
	}
	return l.err
}

// String describes the limit for logs.
func (l Limit) String() string {
	c := l.Config()
	text := fmt.Sprintf("%s: %s, %v per %v, capacity %v%s", c.Name, c.Kind, c.Rate, time.Duration(c.Period), l.Capacity(), l.reservable())
	if c.Start != nil {
		text += fmt.Sprintf(", start %v", c.Start.Format(time.RFC3339))
	}
	if c.Shards > 1 {
		text += fmt.Sprintf(", %d shards", c.Shards)
	}
	return text
}

// reservable says, for texts, what may be reserved, if there is a bound.
func (l Limit) reservable() string {
	if math.IsInf(l.maxReserved, 1) {
		return ""
	}
	return fmt.Sprintf(", at most %v reserved", l.maxReserved)
}

// Name is the name under which the limit's rows live.
func (l Limit) Name() string { return l.name }

// Capacity is the most tokens that can be saved up.
func (l Limit) Capacity() float64 { return l.numbers.Capacity }

// Config is the limit's definition as data, defaults filled in. MaxReserved and Start stay nil where they are unset.
func (l Limit) Config() Config {
	c := Config{
		Kind: KindTokenBucket, Name: l.name, Rate: l.numbers.Rate, Period: Duration(l.numbers.Period),
		Capacity: &l.numbers.Capacity, Shards: l.shards,
	}
	if l.numbers.Window {
		c.Kind = KindFixedWindow
	}
	if !math.IsInf(l.maxReserved, 1) {
		c.MaxReserved = &l.maxReserved
	}
	if l.hasStart {
		c.Start = &l.start
	}
	return c
}

// forKey is the limit's numbers for one key: without a start, each key has a grid of its own.
func (l Limit) forKey(key string) algebra.Limit {
	n := l.numbers
	if n.Window && !l.hasStart {
		h := sha256.New()
		h.Write([]byte(l.name))
		h.Write([]byte{0})
		h.Write([]byte(key))
		n.Start = l.gridStart(algebra.Micros(binary.BigEndian.Uint64(h.Sum(nil)) >> 1))
	}
	return n
}

// gridStart is the first instant, from the year 1 on, of the grid with that offset.
func (l Limit) gridStart(offset algebra.Micros) algebra.Micros {
	return algebra.Min + offset%algebra.Micros(l.numbers.Period.Microseconds())
}

// countable says whether tokens is a number of them. NaN is none.
func countable(tokens float64) bool {
	return tokens == 0 || tokens >= algebra.MinTokens && tokens <= algebra.MaxTokens
}

// checkText refuses what Postgres would: invalid UTF-8, NUL bytes, entries too long for an index. And what is empty. It does not
// quote the text: a key may be personal data, and errors are logged.
func checkText(what, s string, maxLen int) error {
	switch {
	case s == "":
		return fmt.Errorf("empty %s", what)
	case len(s) > maxLen:
		return fmt.Errorf("%s of %d bytes, at most %d are allowed", what, len(s), maxLen)
	case !utf8.ValidString(s):
		return fmt.Errorf("%s is not valid UTF-8", what)
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("%s has a NUL byte", what)
	}
	return nil
}
