package ratelimit

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestWith(t *testing.T) {
	const hour, day = time.Hour, 24 * time.Hour
	start := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	bucket := TokenBucket("api", 10, hour, MaxReserved(5), Shards(2), Varies(day))
	saving := TokenBucket("api", 10, hour, Capacity(50), Varies(day))
	month := CalendarWindow("api", 1000, Month, Zone("Europe/Berlin"), Anchor("2026-01-15"), MaxReserved(5), Varies(64*day))
	none := CalendarWindow("api", 0, Month, Varies(32*day))
	for name, row := range map[string]struct {
		limit Limit
		want  string // the limit, or an error
	}{
		"rate":                         {bucket.With(Rate(20)), "api: token bucket, 20 per 1h, capacity 20, at most 5 reserved, 2 shards, varies within 1d"},
		"capacity":                     {bucket.With(Capacity(200)), "api: token bucket, 10 per 1h, capacity 200, at most 5 reserved, 2 shards, varies within 1d"},
		"both":                         {bucket.With(Capacity(200), Rate(20)), "api: token bucket, 20 per 1h, capacity 200, at most 5 reserved, 2 shards, varies within 1d"},
		"a capacity of its own":        {saving.With(Rate(5)), "api: token bucket, 5 per 1h, capacity 50, varies within 1d"},
		"of a With":                    {bucket.With(Capacity(200)).With(Rate(20)), "api: token bucket, 20 per 1h, capacity 200, at most 5 reserved, 2 shards, varies within 1d"},
		"of a With, following":         {bucket.With(Rate(20)).With(Rate(7)), "api: token bucket, 7 per 1h, capacity 7, at most 5 reserved, 2 shards, varies within 1d"},
		"nothing":                      {bucket.With(), bucket.String()},
		"the same":                     {bucket.With(Rate(10)), bucket.String()},
		"back":                         {bucket.With(Rate(20)).With(Rate(10)), bucket.String()},
		"zone and anchor":              {month.With(Zone("Asia/Tokyo"), Anchor("2026-02-28")), "api: calendar window, 1000 per month in Asia/Tokyo from 2026-02-28, capacity 1000, at most 5 reserved, varies within 64d"},
		"anchor":                       {month.With(Anchor("2026-02-28")), "api: calendar window, 1000 per month in Europe/Berlin from 2026-02-28, capacity 1000, at most 5 reserved, varies within 64d"},
		"the default zone":             {month.With(Zone(""), Anchor("")), "api: calendar window, 1000 per month in UTC from 2001-01-01, capacity 1000, at most 5 reserved, varies within 64d"},
		"two windows":                  {month.With(Capacity(2000)), "api: calendar window, 1000 per month in Europe/Berlin from 2026-01-15, capacity 2000, at most 5 reserved, varies within 64d"},
		"rate 0":                       {saving.With(Rate(0)), "api: token bucket, 0 per 1h, capacity 0, varies within 1d"},
		"rate 0, bounded":              {month.With(Rate(0)), "api: calendar window, 0 per month in Europe/Berlin from 2026-01-15, capacity 0, varies within 64d"},
		"rate 0 and back":              {month.With(Rate(0)).With(Rate(1000)), month.String()},
		"of rate 0":                    {none.With(Rate(100)), "api: calendar window, 100 per month in UTC from 2001-01-01, capacity 100, varies within 32d"},
		"the exact time":               {bucket.With(Capacity(240)), "api: token bucket, 10 per 1h, capacity 240, at most 5 reserved, 2 shards, varies within 1d"},
		"too long":                     {bucket.With(Capacity(241)), "rate 10 and capacity 241 may need 24.1 hours to fill a row, but the limit varies within 1d"},
		"too long, of a With":          {bucket.With(Capacity(200)).With(Rate(1)), "rate 1 and capacity 200 may need 200 hours"},
		"too long, a window":           {FixedWindow("api", 10, hour, Start(start), Varies(3*hour)).With(Capacity(31)), "rate 10 and capacity 31 may need 4 hours"},
		"exact, a window":              {FixedWindow("api", 10, hour, Start(start), Varies(3*hour)).With(Capacity(30)), "api: fixed window, 10 per 1h, capacity 30, start 2026-07-01T00:00:00Z, varies within 3h"},
		"too long, a month":            {month.With(Capacity(2001)), "rate 1000 and capacity 2001 may need 2304 hours"},
		"too long, defined":            {CalendarWindow("api", 10, Month, Varies(31*day)), "rate 10 and capacity 10 may need 768 hours to fill a row, but the limit varies within 31d"},
		"capacity without rate":        {bucket.With(Rate(0), Capacity(3)), "capacity 3 with a rate of 0"},
		"a wrong rate":                 {bucket.With(Rate(-1)), "rate -1 is neither 0 nor between"},
		"a wrong zone":                 {month.With(Zone("Berlin")), "neither \"UTC\" nor a name with a slash"},
		"a zone of a bucket":           {bucket.With(Zone("Europe/Berlin")), "Zone is no option here: of kind \"token bucket\", they are Rate, Capacity"},
		"maxReserved":                  {bucket.With(MaxReserved(5)), "MaxReserved is no option here"},
		"shards":                       {bucket.With(Shards(2)), "Shards is no option here"},
		"no shards":                    {bucket.With(Shards(0)), "Shards is no option here"},
		"nil":                          {bucket.With(nil), "an option is nil"},
		"own capacity, twice":          {saving.With(Rate(50)).With(Rate(5)), "api: token bucket, 5 per 1h, capacity 50, varies within 1d"},
		"own capacity, and back":       {saving.With(Rate(0)).With(Rate(5)), "api: token bucket, 5 per 1h, capacity 50, varies within 1d"},
		"start":                        {bucket.With(Start(start)), "Start is no option here"},
		"varies":                       {bucket.With(Varies(day)), "Varies is no option here"},
		"the default zone of a bucket": {bucket.With(Zone("")), "Zone is no option here"},
		"a capacity, twice":            {bucket.With(Capacity(5), Capacity(6)), "Capacity is given twice"},
		"the rate of a definition":     {TokenBucket("api", 10, hour, Rate(20)), "Rate is no option here: of kind \"token bucket\", they are Capacity, MaxReserved, Shards, Varies"},
		"nil in a definition":          {FixedWindow("api", 10, hour, nil), "an option is nil"},
		"shards, twice":                {TokenBucket("api", 10, hour, Shards(2), Shards(0)), "Shards is given twice"},
		"the default start":            {TokenBucket("api", 10, hour, Start(time.Time{})), "Start is no option here"},
		"the number of slots, twice":   {Slots("api", 3, Capacity(5)), "Capacity is no option here: of kind \"slots\", they are Varies"},
		"a rate of slots":              {Slots("api", 3, Varies(0)).With(Rate(5)), "Rate is no option here: of kind \"slots\", they are Capacity"},
		"without Varies":               {TokenBucket("api", 10, hour).With(Rate(20)), "With needs Varies there"},
		"without Varies, nothing":      {TokenBucket("api", 10, hour).With(), "With needs Varies there"},
		"unlimited":                    {Unlimited("api").With(Rate(20)), "With needs Varies there"},
		"of a mistake":                 {TokenBucket("api", -1, hour, Varies(day)).With(Rate(20)), "rate -1 is neither 0 nor between"},
		"of a With with a mistake":     {bucket.With(Rate(-1)).With(Rate(20)), "rate -1 is neither 0 nor between"},
		"of nothing":                   {Limit{}.With(Rate(20)), "the zero Limit is not a limit"},
		"no duration":                  {define(Config{Kind: kindTokenBucket, Name: "api", Period: "1h", Varies: "1 month", Rate: new(1.0)}, nil), "varies \"1 month\" is not a duration"},
		"no time":                      {TokenBucket("api", 10, hour, Varies(0)), "varies \"0s\" is not a duration"},
		"negative":                     {TokenBucket("api", 10, hour, Varies(-day)), "is not a duration of whole microseconds"},
		"a part of a microsecond":      {TokenBucket("api", 10, hour, Varies(day+1)), "is not a duration of whole microseconds"},
	} {
		err := row.limit.Validate()
		got := row.limit.String()
		if !strings.HasPrefix(row.want, "api: ") {
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), row.want) {
				t.Errorf("%s: %v, want %q", name, err, row.want)
			}
			if request := row.limit.Key("ann"); !errors.Is(request.err, ErrInvalid) {
				t.Errorf("%s: a request: %v", name, request.err)
			}
			continue
		}
		if err != nil || got != row.want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, row.want)
		}
	}
}

// Equal numbers of one definition are equal limits, also if they were made apart.
func TestALimitWithNumbersOfItsOwnKeepsItsDefinition(t *testing.T) {
	pro := CalendarWindow("api", 1000, Month, Varies(32*24*time.Hour))
	own := pro.With(Rate(50), Zone("Asia/Tokyo"))
	switch again := pro.With(Zone("Asia/Tokyo")).With(Rate(50)); {
	case own != again:
		t.Errorf("%v and %v differ", own, again)
	case own == pro, own.definition() != pro:
		t.Errorf("the definition of %v is %v", own, own.definition())
	case pro.With() != pro, own.With(Rate(1000), Zone("")) != pro:
		t.Error("the definition's own numbers are not the definition")
	}
	at := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	for what, equal := range map[string]bool{
		"a start in another zone":        FixedWindow("api", 1, time.Hour, Start(at)) == FixedWindow("api", 1, time.Hour, Start(at.In(time.FixedZone("", 3600)))),
		"the defaults":                   TokenBucket("api", 1, time.Hour) == TokenBucket("api", 1, time.Hour, Capacity(1), Shards(1)),
		"an anchor with its time of day": CalendarWindow("api", 1, Month, Anchor("2026-01-31")) == CalendarWindow("api", 1, Month, Anchor("2026-01-31 00:00")),
		"a request":                      own.Key("eu", "ann").Count(2) == pro.With(Rate(50), Zone("Asia/Tokyo")).Key("eu", "ann").Count(2),
		"a Count is said":                own.Key("ann") != own.Key("ann").Count(1),
		"other numbers":                  own.Key("ann") != pro.Key("ann"),
	} {
		if !equal {
			t.Errorf("%s: == says otherwise", what)
		}
	}
	var l Limiter
	for _, requests := range [][]Request{
		{own.Key("ann")}, {pro.Key("ann")}, {pro.With(Rate(0)).Key("ann").Count(0)}, {pro.Key("bob"), own.Key("ann"), own.Key("ann")},
	} {
		if _, err := l.newCall(verbConsume, about{}, requests, nil); err != nil {
			t.Errorf("%v: %v", requests, err)
		}
	}
	if _, err := l.newCall(verbConsume, about{}, []Request{pro.Key("ann"), own.Key("ann")}, nil); !errors.Is(err, ErrInvalid) ||
		!strings.Contains(err.Error(), "one call asks for one key with two numbers") {
		t.Errorf("two numbers for one key: %v", err)
	}
	if err := definitionsOnly([]Limit{own}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "list its definition") {
		t.Errorf("in a list: %v", err)
	}
	if n := testing.AllocsPerRun(100, func() {
		if err := l.definitions.check([]Request{own.Key("ann")}); err != nil {
			t.Fatal(err)
		}
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

func TestVariesGoesThroughJSON(t *testing.T) {
	text := `{"name":"api","kind":"token bucket","rate":10,"period":"1m","capacity":20,"shards":1,"varies":"1d"}`
	var c Config
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		t.Fatal(err)
	}
	limit, err := c.Limit()
	if want := TokenBucket("api", 10, time.Minute, Capacity(20), Varies(24*time.Hour)); err != nil || limit != want {
		t.Errorf("%v, %v, want %v", limit, err, want)
	}
	if again, err := json.Marshal(limit.Config()); err != nil || string(again) != text {
		t.Errorf("%s, %v", again, err)
	}
	roundTrip(t, limit)
	if _, err := (Config{Kind: kindUnlimited, Name: "api", Varies: "1d"}).Limit(); !errors.Is(err, ErrInvalid) {
		t.Errorf("unlimited: %v", err)
	}
}

func BenchmarkWith(b *testing.B) {
	pro := CalendarWindow("api", 1000, Month, Varies(32*24*time.Hour))
	b.ReportAllocs()
	for b.Loop() {
		_ = pro.With(Rate(50), Zone("Asia/Tokyo"))
	}
}

func BenchmarkNewCall(b *testing.B) {
	var l Limiter
	requests := []Request{TokenBucket("api", 10, time.Minute).Key("ann")}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = l.newCall(verbConsume, about{}, requests, nil)
	}
}

func BenchmarkNewCallWith(b *testing.B) {
	var l Limiter
	pro := TokenBucket("api", 10, time.Minute, Varies(time.Hour))
	requests := []Request{pro.With(Rate(20)).Key("ann")}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = l.newCall(verbConsume, about{}, requests, nil)
	}
}
