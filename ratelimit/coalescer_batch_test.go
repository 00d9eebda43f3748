package ratelimit

import (
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// TestABatchHasTheWindowsOfEachCall: a day begins between two calls of a batch, so they have different lists of windows. A key whose calls
// are decided one by one has the list of each call, and the others have the list of their first call.
func TestABatchHasTheWindowsOfEachCall(t *testing.T) {
	t.Parallel()
	bucket, day, month := TokenBucket("bucket", 1, time.Second), CalendarWindow("day", 5, Day), CalendarWindow("month", 5, Month)
	midnight := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	at := func(now time.Time, requests ...Request) *waiter {
		limiter := Limiter{Clock: func() time.Time { return now }}
		c, err := limiter.newCall(verbConsume, about{}, requests, nil)
		if err != nil {
			t.Fatal(err)
		}
		return &waiter{ds: c.demands}
	}
	b := batches.New().(*batch)
	for range 2 { // the second time in memory that was used before
		b.waiters = append(b.waiters[:0],
			at(midnight.Add(-1), bucket.Key("a"), day.Key("a")), at(midnight, bucket.Key("a"), day.Key("a"), month.Key("a")),
			at(midnight.Add(-1), day.Key("b")), at(midnight, day.Key("b")))
		b.group()
		listOf := func(def int32) []pgtype.Timestamptz {
			if int(def) > len(b.args.Firsts) || b.args.Firsts[def-1] == 0 {
				return nil
			}
			return b.args.Windows[b.args.Firsts[def-1]-1 : b.args.Lasts[def-1]]
		}
		ask := 0
		for _, w := range b.waiters[:2] {
			for i := range w.ds {
				if got, want := listOf(b.args.AskDefs[ask]), windows(w.ds[i].numbers); !reflect.DeepEqual(got, want) {
					t.Errorf("%s: the windows are %v, want %v", w.ds[i].limit.name, got, want)
				}
				ask++
			}
		}
		if ask != len(b.args.AskDefs) {
			t.Errorf("%d demands are decided one by one, want %d", len(b.args.AskDefs), ask)
		}
		if got, want := listOf(b.args.Defs[0]), windows(b.waiters[2].ds[0].numbers); b.args.Repeats[0] != 2 || !reflect.DeepEqual(got, want) {
			t.Errorf("%d calls for one key have the windows %v, want two and %v", b.args.Repeats[0], got, want)
		}
		if x, y := b.waiters[0].ds[1].numbers.Windows, b.waiters[1].ds[1].numbers.Windows; reflect.DeepEqual(x, y) {
			t.Error("no day began between the calls")
		}
		b.clear()
		b.waiters = append(b.waiters, at(midnight, bucket.Key("a")))
		b.group()
		if b.args.Windows != nil {
			t.Errorf("without calendars, the windows are %v", b.args.Windows)
		}
		b.clear()
	}
}

// TestABatchDecidesWhatIsAheadByItself: the database refuses a floor above zero where calls of a key are decided together.
func TestABatchDecidesWhatIsAheadByItself(t *testing.T) {
	t.Parallel()
	b := batches.New().(*batch)
	b.waiters = append(b.waiters, &waiter{ds: []demand{{limit: TokenBucket("limit", 1, time.Second), key: "a", count: 4, floor: 96}}})
	if b.group(); len(b.args.Floors) > 0 || len(b.args.AskFloors) != 1 {
		t.Errorf("floors %v and %v", b.args.Floors, b.args.AskFloors)
	}
}
