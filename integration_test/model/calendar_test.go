package model_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestCalendarWindows compares the windows of Go and SQL in every zone that both have: all months, quarters and years from
// 1970 to 2100, with anchors that months clamp and anchors at random times of day, and the days around each change of a zone's
// offset, which begin at midnight, at random times and at times that the change skips or repeats. A zone whose changes differ
// in the two sides' zone files is counted and left out.
func TestCalendarWindows(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 2)
	from, until := time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)
	rows, err := pool.Query(t.Context(), `SELECT name FROM pg_timezone_names
		WHERE name = 'UTC' OR name LIKE '%/%' AND name NOT LIKE 'posix/%' AND name NOT LIKE 'right/%' ORDER BY name`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var zones []string
	for rows.Next() {
		var zone string
		if err := rows.Scan(&zone); err != nil {
			t.Fatal(err)
		}
		zones = append(zones, zone)
	}
	if rows.Err() != nil {
		t.Fatal(rows.Err())
	}

	var mu sync.Mutex
	same, other, unknown, instants := 0, 0, 0, 0
	var work sync.WaitGroup
	queue := make(chan string)
	for range 2 {
		work.Go(func() {
			for zone := range queue {
				loc, err := calendar.Location(zone)
				if err != nil {
					mu.Lock()
					unknown++
					mu.Unlock()
					continue
				}
				mu.Lock()
				own := rand.New(rand.NewPCG(r.Uint64(), 0))
				mu.Unlock()
				n, alike := compareZone(t, own, pool, loc, from, until)
				mu.Lock()
				instants += n
				if alike {
					same++
				} else {
					other++
				}
				mu.Unlock()
			}
		})
	}
	compared := harness.SomeOf(t, 40, zones...)
	for _, zone := range compared {
		queue <- zone
	}
	close(queue)
	work.Wait()
	t.Logf("%d zones alike, with %d instants compared; %d zones have other changes in Postgres' files; Go has no file for %d", same, instants, other, unknown)
	if same < len(compared)/2 {
		t.Errorf("only %d of %d zones were compared", same, len(compared))
	}
}

// compareZone compares one zone. It returns the number of compared instants, and whether both sides' changes are at the
// same times.
func compareZone(t *testing.T, r *rand.Rand, pool *pgxpool.Pool, loc *time.Location, from, until time.Time) (instants int, alike bool) {
	ctx := t.Context()
	zone := loc.String()
	// The changes in Go, and the offsets around them and at the start of each month. The first windows start up to a year
	// before from.
	var changes, probes []time.Time
	since := from.AddDate(-2, 0, 0)
	for at := since.In(loc); ; {
		_, next := at.ZoneBounds()
		if next.IsZero() || next.After(until) {
			break
		}
		if !next.After(at) { // Go says so for the last rules of some zones
			at = at.Add(24 * time.Hour)
			continue
		}
		changes = append(changes, next)
		probes = append(probes, next.Add(-time.Second), next)
		at = next.In(loc)
	}
	for at := since; at.Before(until); at = at.AddDate(0, 1, 0) {
		probes = append(probes, at)
	}
	offsets := make([]int64, len(probes))
	for i, probe := range probes {
		_, offset := probe.In(loc).Zone()
		offsets[i] = int64(offset)
	}
	var differ int
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM unnest($1::timestamptz[], $2::bigint[]) AS u (at, "offset")
		WHERE extract(epoch FROM (at AT TIME ZONE $3) - (at AT TIME ZONE 'UTC')) <> "offset"`, probes, offsets, zone).Scan(&differ); err != nil {
		t.Errorf("%s: %v", zone, err)
		return 0, false
	}
	if differ > 0 {
		return 0, false
	}
	for _, c := range []struct{ unit, anchor string }{
		{"month", "2001-01-01"}, {"month", "2000-01-31 " + randomTime(r)}, {"quarter", "2020-02-29 " + randomTime(r)}, {"year", "2024-02-29"}, {"year", harness.RandomAnchor(r)},
	} {
		cal := calendar.Calendar{Unit: c.unit, Zone: zone, Anchor: c.anchor}
		first, last := cal.Number(algebra.At(from)), cal.Number(algebra.At(until))
		instants += compareList(t, pool, cal, from, cal.Between(first, last))
	}
	// The days around each change, at their first instant and just before the next day's. The local times just before and after a change
	// are next to those that it skips or repeats.
	var at []time.Time
	var want []int64
	var anchors []string
	for _, change := range changes {
		wall := harness.OneOf(r, change.Add(-time.Second), change).In(loc).Add(time.Duration(r.IntN(3)-1) * time.Second)
		near := wall.Add(harness.OneOf(r, 0, time.Duration(r.IntN(7200)-3600)*time.Second))
		for _, timeOfDay := range []string{harness.OneOf(r, "00:00", randomTime(r)), near.Format(time.TimeOnly)} {
			days := calendar.Calendar{Unit: "day", Zone: zone, Anchor: "2001-01-01 " + timeOfDay}
			n := days.Number(algebra.At(change))
			begins := days.Between(n-1, n+2)
			for i, begin := range begins[:len(begins)-1] {
				at, want = append(at, begin.Time(), (begins[i+1]-1).Time()), append(want, int64(begin), int64(begin))
				anchors = append(anchors, days.Anchor, days.Anchor)
			}
		}
	}
	rows, err := pool.Query(ctx, `SELECT u.at, (SELECT max((extract(epoch FROM w) * 1000000)::bigint)
			FROM unnest(ratelimit._windows('1 day', $2, u.anchor, u.at, 0, 0)) AS w WHERE w <= u.at), want, anchor::text
		FROM unnest($1::timestamptz[], $3::bigint[], $4::text[]::timestamp[]) AS u (at, want, anchor)`, at, zone, want, anchors)
	if err != nil {
		t.Errorf("%s: %v", zone, err)
		return instants, true
	}
	defer rows.Close()
	for rows.Next() {
		var at time.Time
		var got *int64
		var want int64
		var anchor string
		if err := rows.Scan(&at, &got, &want, &anchor); err != nil {
			t.Errorf("%s: %v", zone, err)
		}
		switch {
		case got == nil:
			t.Errorf("%s from %s: SQL has no window of %v", zone, anchor, at)
		case *got != want:
			t.Errorf("%s from %s: in Go a day begins at %v, in SQL at %v", zone, anchor, algebra.Micros(want).Time(), algebra.Micros(*got).Time())
		}
		instants++
	}
	if rows.Err() != nil {
		t.Errorf("%s: %v", zone, rows.Err())
	}
	return instants, true
}

// randomTime is a time of day.
func randomTime(r *rand.Rand) string {
	return time.Time{}.Add(time.Duration(r.IntN(24*60*60)) * time.Second).Format(time.TimeOnly)
}

// compareList wants the same windows from SQL.
func compareList(t *testing.T, pool *pgxpool.Pool, c calendar.Calendar, at time.Time, want []algebra.Micros) int {
	var got []int64
	err := pool.QueryRow(t.Context(), `SELECT array_agg((extract(epoch FROM w) * 1000000)::bigint)
		FROM unnest(ratelimit._windows($1::text::interval, $2, $3::text::timestamp, $4, 3, $5)) AS w`, c.Interval(), c.Zone, c.Anchor, at, len(want)+1).Scan(&got)
	if err != nil {
		t.Errorf("%+v: %v", c, err)
		return 0
	}
	i := slices.Index(got, int64(want[0]))
	if i < 0 || len(got) < i+len(want) {
		t.Errorf("%+v around %v: SQL has not all windows from %v", c, at, want[0].Time())
		return 0
	}
	for j := range want {
		if got[i+j] != int64(want[j]) {
			t.Errorf("%+v: in Go a window begins at %v, in SQL at %v", c, want[j].Time(), algebra.Micros(got[i+j]).Time())
			return 0
		}
	}
	return len(want)
}

// TestAClientsClockMintsNoCalendarWindow: several programs share a limit, and some of their clocks are wrong, by up to
// years. The database's clock decides. So a program gets no grant that it would not get with a right clock. While a clock
// is wrong by less than a window, every decision is as with a right clock.
func TestAClientsClockMintsNoCalendarWindow(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	granted, denied, differed := 0, 0, 0
	for round := range harness.Sized(60, 8) {
		unit := harness.OneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Quarter, ratelimit.Year)
		zone := harness.OneOf(r, "UTC", "Europe/Berlin", "America/Sao_Paulo", "Pacific/Apia", "Asia/Kathmandu", "Australia/Lord_Howe")
		anchor := harness.RandomAnchor(r)
		capacity := harness.OneOf(r, 5.0, 3, 20)
		limit := ratelimit.CalendarWindow(fmt.Sprint("calls", round), 5, unit, ratelimit.Zone(zone), ratelimit.Anchor(anchor), ratelimit.Capacity(capacity))
		cal := calendar.Calendar{Unit: string(unit), Zone: zone, Anchor: anchor}
		all := cal.Between(cal.Number(algebra.At(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC))), cal.Number(algebra.At(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))+500)
		demand := inmemory.Demand{ // it has all windows from 2000 on
			ID: harness.RowsOf{Name: limit.Name(), Key: "k"}, Shards: 1,
			Limit: algebra.Limit{Rate: 5, Capacity: capacity, Window: true, Start: all[0], Period: cal.Longest(), Windows: &all},
		}
		model := inmemory.Table{}

		longest := cal.Longest()
		shortest := time.Duration(map[ratelimit.Unit]int{"day": 23, "week": 7*24 - 1, "month": 28*24 - 1, "quarter": 89*24 - 1, "year": 365*24 - 1}[unit]) * time.Hour
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(time.Duration(r.Int64N(int64(longest))))
		for range 120 {
			now = now.Add(time.Duration(harness.OneOf(r, 0, 0, r.Int64N(int64(longest)/8), r.Int64N(int64(longest)), r.Int64N(3*int64(longest)))))
			if r.IntN(4) == 0 { // just before or at the begin of a window
				now = all[slices.IndexFunc(all, func(m algebra.Micros) bool { return m > algebra.At(now) })].Time().Add(-time.Duration(r.IntN(2)) * time.Microsecond)
			}
			var off time.Duration
			small := r.IntN(2) == 0
			if small {
				off = time.Duration(r.Int64N(2*int64(shortest))) - shortest
			} else {
				off = time.Duration(r.Int64N(int64(6*longest))) - 3*longest + time.Duration((r.IntN(41)-20)*365*24)*time.Hour
			}
			count := harness.OneOf(r, 1.0, 2, min(5, capacity))
			got := consumeSkewed(t, pool, limit, count, now, now.Add(off))
			before := model[demand.ID]
			demand.Count = count
			want := model.Consume([]inmemory.Demand{demand}, false, algebra.Forever, inmemory.ReadCommitted, algebra.At(now)).Granted
			switch {
			case got && !want:
				t.Fatalf("round %d: %s, at %v with a clock %v off: granted, by the model denied, with %v", round, limit, now, off, before)
			case !got && want && small:
				t.Fatalf("round %d: %s, at %v with a clock only %v off, less than a window: denied", round, limit, now, off)
			case !got && want:
				differed++
				model[demand.ID] = before
			case got:
				granted++
			default:
				denied++
			}
			// Tokens that were lost by a wrong clock are lost in the model, too.
			var value float64
			var ts time.Time
			if got {
				if err := pool.QueryRow(t.Context(), "SELECT value, ts FROM ratelimit.limits WHERE name = $1", limit.Name()).Scan(&value, &ts); err != nil {
					t.Fatal(err)
				}
				row := &model[demand.ID][0]
				if value > row.Value {
					t.Fatalf("round %d: %s, at %v with a clock %v off: the row holds %v, the model %v", round, limit, now, off, value, row.Value)
				}
				row.Value, row.TS = value, algebra.At(ts)
			}
		}
	}
	t.Logf("%d granted and %d denied as by a right clock; %d denied by a clock that was wrong by more than a window", granted, denied, differed)
	if granted < 100 || denied < 100 || differed == 0 {
		t.Error("this tested too little")
	}
}

// consumeSkewed consumes at an instant of the database's clock, from a program whose clock shows another time. The library
// sends its clock's time and the windows around it. So the test sends the windows of one time with the instant of the
// other.
func consumeSkewed(t *testing.T, pool *pgxpool.Pool, limit ratelimit.Limit, count float64, now, clock time.Time) bool {
	t.Helper()
	limiter := &ratelimit.Limiter{Clock: func() time.Time { return clock }}
	_, err := limiter.Consume(t.Context(), harness.Skewed{DB: pool, Clock: clock, Now: now}, limit.Key("k").Count(count))
	if err != nil && !harness.Denied(err) {
		t.Fatal(err)
	}
	return err == nil
}
