package ratelimit

import (
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/txlimit/txlimit/internal/algebra"
)

func TestDefinitions(t *testing.T) {
	start := time.Date(2026, 7, 1, 14, 0, 0, 0, time.FixedZone("", 7200))
	limit := FixedWindow("signUps", 100, time.Hour, Capacity(0), MaxReserved(7), Start(start), Shards(3))
	c := limit.Config()
	if err := limit.Validate(); err != nil {
		t.Fatal(err)
	}
	if limit.Name() != "signUps" || limit.Capacity() != 0 || c.Kind != kindFixedWindow || *c.Rate != 100 || c.Period != "1h" ||
		*c.Capacity != 0 || *c.MaxReserved != 7 || !c.Start.Equal(start) || c.Shards != 3 {
		t.Errorf("%+v", c)
	}
	c = TokenBucket("messages", 10, time.Minute).Config()
	if c.Kind != kindTokenBucket || *c.Capacity != 10 || c.MaxReserved != nil || c.Start != nil || c.Shards != 1 {
		t.Errorf("defaults: %+v", c)
	}
	if limit := TokenBucket("messages", -1, time.Minute); limit.Name() != "messages" || !errors.Is(limit.Validate(), ErrInvalid) ||
		!strings.Contains(limit.Validate().Error(), `"messages"`) {
		t.Errorf("a wrong one says: %v", limit.Validate())
	}
	if err := (Limit{}).Validate(); !errors.Is(err, ErrInvalid) {
		t.Errorf("the zero limit: %v", err)
	}
}

func TestAnErrorNamesEveryMistakeOfADefinition(t *testing.T) {
	start := time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC)
	few, many := 1e-16, math.NaN()
	for _, row := range []struct {
		config Config
		want   []string
	}{
		{Config{Name: "messages", Kind: kindTokenBucket, Shards: 101}, []string{`limit "messages"`, "rate is missing", "period is missing", "101 shards"}},
		{Config{Name: "messages", Capacity: &few, MaxReserved: &many}, []string{`kind ""`, "rate is missing", "capacity 1e-16", "maxReserved NaN"}},
		{Config{Name: "a\x00b", Kind: kindTokenBucket, Rate: new(1.0), Start: &start}, []string{"NUL", "period is missing", "only a fixed window has a start", "start 0000"}},
		{Config{Name: "messages", Kind: kindFixedWindow, Start: new(time.Time)}, []string{"rate is missing", "start 0001-01-01 00:00:00 +0000 UTC is the zero time"}},
		{Config{Name: "messages", Kind: kindFixedWindow, Start: new(start.AddDate(2026, 0, 0).Add(1))}, []string{"rate is missing", "a fraction of a second", "write a constant one"}},
	} {
		_, err := row.config.Limit()
		if !errors.Is(err, ErrInvalid) || strings.Count(err.Error(), ";") < len(row.want)-2 {
			t.Errorf("%+v: %v", row.config, err)
			continue
		}
		for _, want := range row.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: %q does not name %s", row.config, err, want)
			}
		}
	}
}

func TestAConfigTellsUnsetFromZero(t *testing.T) {
	for _, row := range []struct {
		json            string
		capacity        float64
		maxReserved     float64
		hasStart        bool
		configHasReserv bool
	}{
		{`{"name":"l","kind":"token bucket","rate":10,"period":"1m"}`, 10, math.Inf(1), false, false},
		{`{"name":"l","kind":"token bucket","rate":10,"period":"1m","capacity":null,"maxReserved":null}`, 10, math.Inf(1), false, false},
		{`{"name":"l","kind":"token bucket","rate":10,"period":"1m","capacity":0,"maxReserved":0}`, 0, 0, false, true},
		{`{"name":"l","kind":"token bucket","rate":10,"period":"1m","capacity":20.5,"maxReserved":3}`, 20.5, 3, false, true},
		{`{"name":"l","kind":"fixed window","rate":0.5,"period":"36h","start":"2026-07-01T00:00:00+02:00","shards":4}`, 0.5, math.Inf(1), true, false},
	} {
		var c Config
		if err := json.Unmarshal([]byte(row.json), &c); err != nil {
			t.Fatal(err)
		}
		limit, err := c.Limit()
		if err != nil {
			t.Fatal(err)
		}
		if limit.Capacity() != row.capacity || limit.maxReserved != row.maxReserved || limit.hasStart != row.hasStart || (limit.Config().MaxReserved != nil) != row.configHasReserv {
			t.Errorf("%s: %+v", row.json, limit)
		}
		// And back.
		text, err := json.Marshal(limit.Config())
		if err != nil {
			t.Fatal(err)
		}
		var again Config
		if err := json.Unmarshal(text, &again); err != nil {
			t.Fatal(err)
		}
		same, err := again.Limit()
		if err != nil || same != limit {
			t.Errorf("%s became %s: %+v, want %+v, %v", row.json, text, same, limit, err)
		}
		if !reflect.DeepEqual(same.Config(), limit.Config()) {
			t.Errorf("%s: configs differ", row.json)
		}
	}
	if _, err := (Config{Name: "l", Rate: new(1.0), Period: "1s"}).Limit(); !errors.Is(err, ErrInvalid) {
		t.Errorf("without a kind: %v", err)
	}
}

// Two equal starts must make equal definitions, or a call with both would be an error.
func TestAStartIsTheInstantAlone(t *testing.T) {
	now := time.Now() // with a monotonic clock reading
	now = now.Add(-time.Duration(now.Nanosecond()))
	limit := FixedWindow("l", 1, time.Hour, Start(now))
	roundTrip(t, limit)
	if FixedWindow("l", 1, time.Hour, Start(now.In(time.FixedZone("", 3600)))) != limit {
		t.Error("a time zone makes another definition")
	}
}

func FuzzNew(f *testing.F) {
	f.Add("l", true, 10.0, int64(60e9), 10.0, true, 5.0, true, int64(0), false, 1)
	f.Add("", false, math.NaN(), int64(0), math.Inf(1), true, -1.0, true, int64(-1<<62), true, -1)
	f.Add("a\x00\xff", true, 1e15, int64(999), 1e16, true, 0.0, false, int64(253402300800), true, 1001)
	f.Add("tiny", true, math.SmallestNonzeroFloat64, int64(time.Second), 1.0, false, 0.0, false, int64(0), false, 3)
	f.Fuzz(func(t *testing.T, name string, bucket bool, rate float64, period int64, capacity float64, hasCapacity bool, reserved float64, hasReserved bool, start int64, hasStart bool, shards int) {
		c := Config{Name: name, Kind: kindFixedWindow, Rate: &rate, Period: time.Duration(period).String(), Shards: shards}
		if bucket {
			c.Kind = kindTokenBucket
		}
		if hasCapacity {
			c.Capacity = &capacity
		}
		if hasReserved {
			c.MaxReserved = &reserved
		}
		if hasStart {
			at := time.Unix(start, 0)
			c.Start = &at
		}
		limit, err := c.Limit()
		if err != nil {
			if !errors.Is(err, ErrInvalid) || !errors.Is(limit.Validate(), ErrInvalid) || !errors.Is(limit.Key("k").err, ErrInvalid) {
				t.Fatalf("%v, and the limit says %v", err, limit.Validate())
			}
			return
		}
		n := limit.numbers
		between := func(x, low, high float64) bool { return x >= low && x <= high }
		if !acceptable(limit.name, maxNameLen) || !between(n.Rate, 0, algebra.MaxTokens) || n.Rate == 0 && (n.Capacity != 0 || hasReserved && reserved != 0) || n.Period < minPeriod || n.Period%time.Microsecond != 0 ||
			!between(n.Capacity, 0, algebra.MaxTokens) || !between(limit.maxReserved, 0, algebra.MaxTokens) && hasReserved || limit.shards < 1 || limit.shards > maxShards {
			t.Fatalf("accepted: %+v", limit)
		}
		// Postgres raises 22003 if a product or a quotient underflows to zero, such as one shard's refill in a microsecond.
		if s := float64(limit.shards); n.Rate > 0 && n.Rate/s*1e-6/n.Period.Seconds() == 0 || n.Capacity > 0 && n.Capacity/s == 0 {
			t.Fatalf("accepted, but it underflows in the database: %+v", limit)
		}
		if n.Window {
			for _, key := range []string{"", "k"} {
				if first := limit.forKey(key).Start.Time(); first.Year() < 1 || first.Year() > 293 {
					t.Fatalf("the grid begins at %v", first)
				}
			}
		}
		roundTrip(t, limit)
	})
}

// roundTrip writes a limit's definition as JSON, reads it back, and expects the same limit.
func roundTrip(t *testing.T, limit Limit) {
	t.Helper()
	text, err := json.Marshal(limit.Config())
	if err != nil {
		t.Fatal(err)
	}
	var c Config
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	if same, err := c.Limit(); err != nil || same != limit {
		t.Fatalf("%s: %+v, want %+v, %v", text, same, limit, err)
	}
	var same Limit
	if text, err = json.Marshal(limit); err != nil || json.Unmarshal(text, &same) != nil || same != limit {
		t.Fatalf("%s: %+v, want %+v", text, same, limit)
	}
}

// acceptable reports whether Postgres accepts a text and an index entry has room for it.
func acceptable(s string, maxLen int) bool {
	return s != "" && len(s) <= maxLen && utf8.ValidString(s) && !strings.ContainsRune(s, 0)
}

func TestACalendarsDefinitionGoesThroughJSON(t *testing.T) {
	limit := CalendarWindow("calls", 10_000_000, Month, Zone("Europe/Berlin"), Anchor("2026-01-31 15:00"), Capacity(20_000_000), MaxReserved(5), Shards(2))
	text, err := json.Marshal(limit.Config())
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"name":"calls","kind":"calendar window","rate":10000000,"period":"1 month","capacity":20000000,"maxReserved":5,"shards":2,` +
		`"zone":"Europe/Berlin","anchor":"2026-01-31 15:00"}`
	if string(text) != want {
		t.Errorf("%s, want %s", text, want)
	}
	if got, want := limit.String(), "calls: calendar window, 10000000 per month in Europe/Berlin from 2026-01-31 15:00, capacity 20000000, at most 5 reserved, 2 shards"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	var c Config
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	if again, err := c.Limit(); err != nil || again != limit {
		t.Errorf("%v, %v, want %v", again, err, limit)
	}
}
