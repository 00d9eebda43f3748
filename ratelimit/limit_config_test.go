package ratelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

// readConfig makes a limit of a line of a configuration file.
func readConfig(text string) (Limit, error) {
	limit := Unlimited("unread")
	if err := json.Unmarshal([]byte(text), &limit); err != nil {
		if limit != Unlimited("unread") {
			return limit, fmt.Errorf("after an error, it is changed: %v", limit)
		}
		return limit, err
	}
	return limit, nil
}

func TestPeriodsOfAConfig(t *testing.T) {
	start := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	for text, want := range map[string]Limit{
		`"kind":"token bucket","rate":10,"period":"100ms"`:                                        TokenBucket("l", 10, 100*time.Millisecond),
		`"kind":"token bucket","rate":10,"period":"1h30m","capacity":0`:                           TokenBucket("l", 10, 90*time.Minute, Capacity(0)),
		`"kind":"token bucket","rate":10,"period":"1d"`:                                           TokenBucket("l", 10, 24*time.Hour),
		`"kind":"fixed window","rate":10,"period":"1w","start":"2026-07-01T00:00:00Z"`:            FixedWindow("l", 10, 7*24*time.Hour, Start(start)),
		`"kind":"fixed window","rate":0,"period":"1d12h"`:                                         FixedWindow("l", 0, 36*time.Hour),
		`"kind":"calendar window","rate":10,"period":"1 month","anchor":"2026-01-31"`:             CalendarWindow("l", 10, Month, Anchor("2026-01-31")),
		`"kind":"calendar window","rate":10,"period":"1 day","anchor":"2026-01-31 15:00:00"`:      CalendarWindow("l", 10, Day, Anchor("2026-01-31 15:00")),
		`"kind":"calendar window","rate":10,"period":"1 day","zone":"Europe/Berlin"`:              CalendarWindow("l", 10, Day, Zone("Europe/Berlin")),
		`"kind":"calendar window","rate":0,"period":"1 year","maxReserved":0,"shards":2`:          CalendarWindow("l", 0, Year, MaxReserved(0), Shards(2)),
		`"kind":"token bucket","rate":10,"period":"90 minutes","max_reserved":3,"varies":"1 day"`: TokenBucket("l", 10, 90*time.Minute, MaxReserved(3), Varies(24*time.Hour)),
		`"kind":"fixed window","rate":10,"period":"1 week"`:                                       FixedWindow("l", 10, 7*24*time.Hour),
		`"kind":"calendar window","rate":10,"period":"7 days"`:                                    CalendarWindow("l", 10, Week),
		`"kind":"calendar window","rate":10,"period":"3 months"`:                                  CalendarWindow("l", 10, Quarter),
		`"kind":"unlimited"`:                        Unlimited("l"),
		`"kind":"slots","capacity":2,"varies":"0s"`: Slots("l", 2, Varies(0)),
	} {
		limit, err := readConfig(`{"name":"l",` + text + `}`)
		if err != nil || limit != want {
			t.Errorf("%s: %+v, %v, want %+v", text, limit, err, want)
			continue
		}
		roundTrip(t, limit)
	}
}

func TestAConfigNamesLimitAndField(t *testing.T) {
	for text, want := range map[string]string{
		`{"name":"api","kind":"token bucket","period":"1m"}`:                                             `limit "api": rate is missing`,
		`{"name":"api","kind":"token bucket","rate":null,"period":"1m"}`:                                 `limit "api": rate is missing`,
		`{"name":"api","kind":"token bucket","rate":1}`:                                                  `limit "api": period is missing`,
		`{"name":"api","kind":"calendar window","rate":1}`:                                               `limit "api": period is missing`,
		`{"name":"api","kind":"bucket","rate":1,"period":"1m"}`:                                          `limit "api": kind "bucket" is not one of ["token bucket" "fixed window" "calendar window" "slots" "unlimited"]`,
		`{"name":"api","rate":1,"period":"1m"}`:                                                          `limit "api": kind "" is not one of`,
		`{"kind":"token bucket","rate":1,"period":"1m"}`:                                                 `the name is empty`,
		`{"name":"api","kind":"token bucket","rate":-1,"period":"1m"}`:                                   `limit "api": rate -1 is neither 0 nor between 1e-15 and 1e+15`,
		`{"name":"api","kind":"token bucket","rate":1,"period":"soon"}`:                                  `limit "api": period "soon" is not a duration, such as "1h30m", "1d" or "1w"`,
		`{"name":"api","kind":"token bucket","rate":1,"period":"1 minutes ago"}`:                         `limit "api": period "1 minutes ago" is not a duration`,
		`{"name":"api","rate":1,"maxReserved":2,"max_reserved":2}`:                                       `limit "api": maxReserved is there twice`,
		`{"name":"api","kind":"token bucket","rate":1,"period":"0s"}`:                                    `limit "api": period 0s is not a positive whole number`,
		`{"name":"api","kind":"token bucket","rate":1,"period":"60us"}`:                                  `limit "api": period 60µs is less than 100ms (a bare number in Go is nanoseconds: write 60*time.Second; for 100 a second one by one: rate 100, period 1s, capacity 1)`,
		`{"name":"api","kind":"fixed window","rate":1,"period":"99999us"}`:                               `limit "api": period 99.999ms is less than 100ms`,
		`{"name":"api","kind":"fixed window","rate":1,"period":"1 month"}`:                               `limit "api": period "1 month" of a fixed window is not a duration, such as "1d" for 24 hours (for a month, the kind is "calendar window")`,
		`{"name":"api","kind":"calendar window","rate":1,"period":"1d"}`:                                 `limit "api": period "1d" of a calendar window is not one of ["1 day" "1 week" "1 month" "1 quarter" "1 year"] (for a fixed length of time, the kind is "fixed window")`,
		`{"name":"api","kind":"calendar window","rate":1,"period":"4 months"}`:                           `limit "api": period "4 months" of a calendar window is not one of`,
		`{"name":"api","kind":"token bucket","rate":1,"period":"1m","zone":"UTC"}`:                       `limit "api": only a calendar window has a zone`,
		`{"name":"api","kind":"token bucket","rate":0,"period":"1m","capacity":5}`:                       `limit "api": capacity 5 with a rate of 0`,
		`{"name":"api","kind":"token bucket","rate":0,"period":"1m","maxReserved":5}`:                    `limit "api": maxReserved 5 with a rate of 0`,
		`{"name":"api","kind":"unlimited","rate":5,"period":"1m"}`:                                       `limit "api": period is set, but kind "unlimited" has only a name; rate is set`,
		`{"name":"api","kind":"unlimited","shards":1}`:                                                   `limit "api": shards is set`,
		`{"name":"api","kind":"token bucket","rate":1,"period":"1m","capasity":2}`:                       `limit "api": unknown field "capasity"`,
		`{"unit":"month","Rate":1,"name":"api"}`:                                                         `limit "api": unknown field "unit"; unknown field "Rate"`,
		`{"name":"api","rate":1,"rate":2}`:                                                               `limit "api": rate is there twice`,
		`{"name":"api","rate":"1"}`:                                                                      `limit "api": rate is not a number`,
		`{"name":"api","rate":1e999}`:                                                                    `limit "api": rate is not a number`,
		`{"name":"api","period":60,"capacity":{},"maxReserved":true,"shards":1.5}`:                       `limit "api": period is not a string, such as "1m", "1d" or "1 month"; capacity is not a number; maxReserved is not a number; shards is not a whole number`,
		`{"name":"api","start":"2026-01-31","zone":1,"anchor":15,"kind":[]}`:                             `limit "api": start is not an instant, such as "2026-01-31T00:00:00Z"; zone is not a string; anchor is not a string, such as "2026-01-31" or "2026-01-31 15:00"; kind is not a string`,
		`{"name":7,"kind":"unlimited"}`:                                                                  `limit "": name is not a string`,
		`["api"]`:                                                                                        `a limit is a JSON object`,
		`{"name":"api","kind":"calendar window","rate":1,"period":"1 day","anchor":"15"}`:                `limit "api": anchor "15" is not a date`,
		`{"name":"api","kind":"calendar window","rate":1,"period":"1 day","anchor":"2026-01-31 15:00Z"}`: `limit "api": anchor "2026-01-31 15:00Z" is not a date`,
	} {
		if _, err := readConfig(text); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	// In a file with several, the error is of the one that is wrong.
	var file struct{ Plans map[string]Config }
	err := json.Unmarshal([]byte(`{"plans":{"free":{"name":"api","kind":"unlimited"},"pro":{"name":"exports","rate":"ten"}}}`), &file)
	if !errors.Is(err, ErrInvalid) || err.Error() != `ratelimit: invalid: limit "exports": rate is not a number` {
		t.Error(err)
	}
}

func TestALimitWithoutRowsDescribesItself(t *testing.T) {
	for want, limit := range map[string]Limit{
		"api: unlimited": Unlimited("api"),
		"api: token bucket, 0 per 1d, capacity 0":                        TokenBucket("api", 0, 24*time.Hour),
		"api: calendar window, 5 per month in UTC from 2001-01-01":       CalendarWindow("api", 5, Month),
		"api: fixed window, 5 per 1h30m, capacity 2, at most 1 reserved": FixedWindow("api", 5, 90*time.Minute, Capacity(2), MaxReserved(1)),
	} {
		if got := limit.String(); !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if c := Unlimited("api").Config(); c != (Config{Name: "api", Kind: kindUnlimited}) || !math.IsInf(Unlimited("api").Capacity(), 1) {
		t.Errorf("%+v", c)
	}
	// Infinity is a mistake, and not the same as unlimited.
	if limit := TokenBucket("api", math.Inf(1), time.Hour); !errors.Is(limit.Validate(), ErrInvalid) || limit.Config().Kind != kindTokenBucket {
		t.Errorf("%v, %v", limit.Validate(), limit)
	}
}

func TestAnOrdinaryCallAllocatesNothingForPlans(t *testing.T) {
	ds := []demand{{limit: TokenBucket("api", 1, time.Minute)}, {limit: FixedWindow("exports", 1, time.Minute)}}
	rowless := func(d *demand) bool { return d.limit.rowless() }
	if n := testing.AllocsPerRun(100, func() {
		if others, taken := withoutRows(ds, rowless); len(others) != 2 || taken != nil {
			t.Error(others, taken)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
