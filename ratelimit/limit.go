package ratelimit

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/internal/visible"
)

// Bounds of limits and requests. Package algebra has the bounds of their numbers.
const (
	maxNameLen = 255  // bytes
	maxKeyLen  = 1024 // bytes, of all parts joined
	maxShards  = 100
	minPeriod  = 100 * time.Millisecond
)

// The kinds of limit: see [Config.Kind].
const (
	kindTokenBucket    = "token bucket"
	kindFixedWindow    = "fixed window"
	kindCalendarWindow = "calendar window"
	kindUnlimited      = "unlimited"
	kindSlots          = "slots"
)

// Limit is the definition of a rate limit. It is immutable, safe for concurrent use, and cheap to copy. A mistake is
// reported by [Limit.Validate] and by every call. Valid limits of the same name and numbers are equal (==). A name has
// one definition in a schema. A customer with numbers of its own uses [Limit.With].
//
// A change of numbers takes effect at the next call: saved-up tokens are cut to the new capacity, and nothing is added.
// While two versions are in use, they grant together, in any time span, at most the larger capacity, the refill at the
// larger rate, and the larger maxReserved; the refills add up if kind, period, start, zone or anchor differ.
type Limit struct {
	name        string
	numbers     algebra.Limit
	maxReserved float64 // +Inf: unset
	shards      int
	hasStart    bool
	start       time.Time
	calendar    calendar.Calendar // of a calendar window
	varies      time.Duration     // 0: no key has numbers of its own, unless it is slots
	slots       bool              // its capacity is how many there are; nothing is refilled
	slotsVary   bool
	defined     handle         // what With or an override made the limit from; zero: it is the definition
	overridden  bool           // an override did, with other numbers
	blocked     bool           // by an override
	until       algebra.Micros // the end of the block
	err         error          // the mistakes in the definition
}

// TokenBucket defines a limit that refills continuously, by rate tokens per period, up to its capacity. Over any time
// span, it grants at most capacity + span*rate/period tokens. With a rate of 0 it grants nothing: see [DeniedError]. A
// period is at least 100 ms.
func TokenBucket(name string, rate float64, period time.Duration, options ...Option) Limit {
	return define(Config{Kind: kindTokenBucket, Name: name, Rate: &rate, Period: calendar.PeriodText(period)}, options)
}

// FixedWindow defines a limit that refills by rate tokens at the start of each window, up to its capacity. A window is
// one period long, at least 100 ms. With the default capacity, it grants at most rate tokens in each window; with a
// rate of 0, nothing: see [DeniedError].
//
// Windows lie on a grid through [Start]. Without it, the grid's offset is a hash of the key alone, or of the name if
// the key is empty.
func FixedWindow(name string, rate float64, period time.Duration, options ...Option) Limit {
	return define(Config{Kind: kindFixedWindow, Name: name, Rate: &rate, Period: calendar.PeriodText(period)}, options)
}

// Unlimited defines a limit that grants everything, such as a plan without a bound. It has no rows, and nothing is sent
// for it: in a call for several limits, only the others are asked. Remaining is +Inf, and nothing is recorded. If
// nothing is sent for a call, [Result.At] is the time of [Limiter.Clock] or of this process.
func Unlimited(name string) Limit { return define(Config{Kind: kindUnlimited, Name: name}, nil) }

func define(c Config, options []Option) Limit {
	mistakes := c.set(options, optionsOf[c.Kind])
	l, _ := c.limit(mistakes) // the limit remembers the error
	return l
}

// Option sets an optional part of a limit's definition, or a number of [Limit.With] and [Limiter.Override]: [Rate],
// [Capacity], [MaxReserved], [Start], [Shards], [Zone], [Anchor] or [Varies]. Where an option means nothing, the
// limit is [ErrInvalid], as with a nil one, and with one that is given twice.
type Option interface{ option() option }

type option struct {
	name string
	set  func(c *Config)
}

func (o option) option() option { return o }

// optionsOf are the options of a definition, by kind.
var optionsOf = map[string][]string{
	kindTokenBucket:    {"Capacity", "MaxReserved", "Shards", "Varies"},
	kindFixedWindow:    {"Capacity", "MaxReserved", "Shards", "Varies", "Start"},
	kindCalendarWindow: {"Capacity", "MaxReserved", "Shards", "Varies", "Zone", "Anchor"},
	kindSlots:          {"Varies"},
}

// set sets the options that are allowed, and returns what is wrong in the others.
func (c *Config) set(options []Option, allowed []string) (mistakes []string) {
	var given []string
	for _, o := range options {
		switch {
		case o == nil:
			mistakes = append(mistakes, "an option is nil")
		case !slices.Contains(allowed, o.option().name):
			mistakes = append(mistakes, fmt.Sprintf("%s is no option here: of kind %q, they are %s", o.option().name, c.Kind, strings.Join(allowed, ", ")))
		case slices.Contains(given, o.option().name):
			mistakes = append(mistakes, o.option().name+" is given twice")
		default:
			o.option().set(c)
			given = append(given, o.option().name)
		}
	}
	return mistakes
}

// Rate sets how many tokens are refilled in each period, for [Limit.With] and [Limiter.Override]. A definition has
// its rate as an argument.
func Rate(tokens float64) Option { return option{"Rate", func(c *Config) { c.Rate = &tokens }} }

// Capacity sets how many tokens can be saved up. The default is the rate; with a rate below 1, no whole token is ever
// granted then. With 0, nothing is saved up, and every request must reserve.
func Capacity(tokens float64) Option {
	return option{"Capacity", func(c *Config) { c.Capacity = &tokens }}
}

// MaxReserved bounds how many tokens reservations ([Limiter.Reserve], [Limiter.Wait]) may owe at any time. The
// default is no bound or, for a calendar window, the tokens of 100 windows, which is also the most. With 0, nothing
// can be reserved.
func MaxReserved(tokens float64) Option {
	return option{"MaxReserved", func(c *Config) { c.MaxReserved = &tokens }}
}

// Start puts a fixed window's grid through an instant: windows begin at t plus or minus whole periods. For the other
// kinds, Start is a mistake. All processes need the same t: with time.Now(), each has windows of its own, and each
// grants all. So a fraction of a second is [ErrInvalid], as is the zero time.
func Start(t time.Time) Option { return option{"Start", func(c *Config) { c.Start = &t }} }

// Shards spreads each key over n rows, so that transactions on one hot key need not wait for each other. Each row has
// 1/n of the rate, the capacity and the tokens. The default is 1, the most is 100. A request takes from one shard or,
// if that is short, from all. A sharded limit never grants more than an unsharded one, and sometimes a little less.
func Shards(n int) Option { return option{"Shards", func(c *Config) { c.Shards = n }} }

// Validate names every mistake in the definition, in an error that matches [ErrInvalid]. Without a mistake it returns
// nil.
func (l Limit) Validate() error {
	if l.err == nil && l.name == "" {
		return fmt.Errorf("%w: the zero Limit is not a limit: make one with TokenBucket, FixedWindow, CalendarWindow, Slots, Unlimited or Config.Limit", ErrInvalid)
	}
	return l.err
}

// String describes the limit for logs.
func (l Limit) String() string {
	c := l.Config()
	if c.Capacity == nil {
		return fmt.Sprintf("%s: %s", c.Name, cmp.Or(c.Kind, "not known"))
	}
	if l.blocked {
		return l.name + ": " + l.blockedText()
	}
	if l.slots {
		text := fmt.Sprintf("%s: %s %s", c.Name, visible.Number(*c.Capacity), c.Kind)
		if l.slotsVary {
			text += ", which vary"
		}
		return text
	}
	period := c.Period
	if c.Kind == kindCalendarWindow {
		period = fmt.Sprintf("%s in %s from %s", l.calendar.Unit, c.Zone, c.Anchor)
	}
	text := fmt.Sprintf("%s: %s, %s per %s, capacity %s%s", c.Name, c.Kind, visible.Number(*c.Rate), period, visible.Number(l.Capacity()), l.reservable())
	if c.Start != nil {
		text += fmt.Sprintf(", start %v", c.Start.Format(time.RFC3339))
	}
	if c.Shards > 1 {
		text += fmt.Sprintf(", %d shards", c.Shards)
	}
	if l.varies > 0 {
		text += ", varies within " + c.Varies
	}
	return text
}

// reservable describes the bound on reservations, for texts. Without a bound it is empty.
func (l Limit) reservable() string {
	if math.IsInf(l.maxReserved, 1) {
		return ""
	}
	return ", at most " + visible.Number(l.maxReserved) + " reserved"
}

// Name is the name under which the limit's rows are stored.
func (l Limit) Name() string { return l.name }

// Capacity is how many tokens can be saved up: +Inf for an [Unlimited] limit, how many there are of [Slots], and NaN
// for a limit that the Limiter does not know ([Limiter.Settle]).
func (l Limit) Capacity() float64 { return l.numbers.Capacity }

// Config is the limit as data, with defaults filled in. MaxReserved and Start stay nil if they are unset. An
// [Unlimited] limit has only a name and a kind, and one of [Limit.With] the numbers of the key.
func (l Limit) Config() Config {
	if l.unlimited() {
		return Config{Kind: kindUnlimited, Name: l.name}
	}
	if l.unknown() {
		return Config{Name: l.name}
	}
	if l.slots {
		c := Config{Kind: kindSlots, Name: l.name, Capacity: &l.numbers.Capacity}
		if l.slotsVary {
			c.Varies = slotsVary
		}
		return c
	}
	c := Config{
		Kind: kindTokenBucket, Name: l.name, Rate: &l.numbers.Rate, Period: calendar.PeriodText(l.numbers.Period),
		Capacity: &l.numbers.Capacity, Shards: l.shards,
	}
	switch {
	case l.onCalendar():
		c.Kind, c.Period, c.Zone, c.Anchor = kindCalendarWindow, "1 "+l.calendar.Unit, l.calendar.Zone, l.calendar.Anchor
	case l.numbers.Window:
		c.Kind = kindFixedWindow
	}
	if !math.IsInf(l.maxReserved, 1) {
		c.MaxReserved = &l.maxReserved
	}
	if l.hasStart {
		c.Start = &l.start
	}
	if l.varies > 0 {
		c.Varies = calendar.PeriodText(l.varies)
	}
	return c
}

// forKey is the limit's numbers for one key. Without a start, each key has a grid of its own.
func (l Limit) forKey(key string) algebra.Limit {
	n := l.numbers
	if l.slots { // in the row, they are a debt
		n.Capacity = 0
	}
	if n.Window && !l.hasStart && !l.onCalendar() {
		n.Start = algebra.Grid(cmp.Or(key, l.name), n.Period)
	}
	return n
}

// countable reports whether tokens is a valid number of tokens. NaN is not.
func countable(tokens float64) bool {
	return tokens == 0 || tokens >= algebra.MinTokens && tokens <= algebra.MaxTokens
}

// checkText refuses empty text, and text that Postgres would refuse: invalid UTF-8, NUL bytes, and entries too long
// for an index. The error does not quote the text: a key may be personal data, and errors are logged.
func checkText(what, s string, maxLen int) error {
	switch {
	case s == "":
		return fmt.Errorf("the %s is empty", what)
	case len(s) > maxLen:
		return fmt.Errorf("the %s has %d bytes, and %d are allowed", what, len(s), maxLen)
	case !utf8.ValidString(s):
		return fmt.Errorf("the %s is not valid UTF-8", what)
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("the %s has a NUL byte", what)
	}
	return nil
}

func (l *Limit) unlimited() bool { return l.err == nil && l.numbers.Rate > algebra.MaxTokens }

// empty reports whether the limit grants nothing by definition: a rate of 0, or no slots.
func (l *Limit) empty() bool {
	if l.slots {
		return l.numbers.Capacity == 0
	}
	return l.numbers.Rate == 0
}

// grantsNothing reports whether the limit is empty or blocked.
func (l *Limit) grantsNothing() bool { return l.empty() || l.blocked }

// rowless reports whether the limit has no rows. It must be valid.
func (l *Limit) rowless() bool { return !l.slots && l.numbers.Rate == 0 || l.unlimited() }

// blockedText describes a block.
func (l Limit) blockedText() string {
	if l.until == algebra.Forever {
		return "blocked"
	}
	return "blocked until " + l.until.Time().Add(time.Second-1).Format(time.RFC3339) // rounded up
}
