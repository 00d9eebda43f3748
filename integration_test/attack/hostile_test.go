package attack_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// stillUsable wants the handle, perhaps a transaction, to work.
func stillUsable(w harness.World) {
	w.Helper()
	var one int
	if err := w.DB.QueryRow(w.Context(), "SELECT 1").Scan(&one); err != nil {
		w.Fatalf("the handle was poisoned: %v", err)
	}
	w.Grant(ratelimit.TokenBucket("valid", 1e6, time.Minute).Key("ann"))
}

func TestHostileRequestsAreRefusedAndPoisonNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		ten := ratelimit.TokenBucket("ten", 10, time.Minute)
		bucket := func(name string, rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.TokenBucket(name, rate, period, options...).Key("ann")
		}
		window := func(name string, rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.FixedWindow(name, rate, period, options...).Key("ann")
		}
		nan, inf, long := math.NaN(), math.Inf(1), strings.Repeat("x", 10_000)
		hostile := map[string]ratelimit.Request{
			"no key":                      ten.Key(),
			"empty key":                   ten.Key(""),
			"empty first part":            ten.Key("", "a"),
			"empty last part":             ten.Key("a", ""),
			"NUL in a key":                ten.Key("a\x00b"),
			"NUL as a key":                ten.Key("\x00"),
			"invalid UTF-8 in a key":      ten.Key("a\xff"),
			"half a rune in a key":        ten.Key("\xe2\x82"),
			"a rune split over two parts": ten.Key("\xe2\x82", "\xac"),
			"a surrogate in a key":        ten.Key("\xed\xa0\x80"),
			"an overlong encoding":        ten.Key("\xc0\x80"),
			"a rune beyond unicode":       ten.Key("\xf4\x90\x80\x80"),
			"a key of 10 kB":              ten.Key(long),
			"a key one byte too long":     ten.Key(strings.Repeat("x", harness.MaxKeyLen+1)),
			"parts too long together":     ten.Key(strings.Repeat("x", harness.MaxKeyLen/2), strings.Repeat("x", harness.MaxKeyLen/2)),
			"escapes that make it long":   ten.Key("a", strings.Repeat("|", harness.MaxKeyLen/2)),

			"empty name":              bucket("", 10, time.Minute),
			"NUL in a name":           bucket("a\x00", 10, time.Minute),
			"invalid UTF-8 in a name": window("\xff\xfe", 10, time.Minute),
			"a name of 10 kB":         window(long, 10, time.Minute),
			"zero Limit":              ratelimit.Limit{}.Key("ann"),
			"zero Limit, global":      ratelimit.Limit{}.Global(),
			"zero Request":            {},
			"zero Request, count":     ratelimit.Request{}.Count(3),

			"rate 0, capacity 1": bucket("l", 0, time.Minute, ratelimit.Capacity(1)),
			"rate 0, reserved 1": window("l", 0, time.Minute, ratelimit.MaxReserved(1)),
			"rate -1":            bucket("l", -1, time.Minute),
			"rate NaN":           bucket("l", nan, time.Minute),
			"rate Inf":           bucket("l", inf, time.Minute),
			"rate -Inf":          window("l", -inf, time.Minute),
			"rate 1e300":         window("l", 1e300, time.Minute),
			"rate 1e16":          window("l", 1e16, time.Minute),
			"period 0":           bucket("l", 1, 0),
			"period -1s":         bucket("l", 1, -time.Second),
			"period 1ns":         bucket("l", 1, time.Nanosecond),
			"a bare period":      bucket("l", 1, 60_000),
			"period 99.999ms":    window("l", 1, 99_999*time.Microsecond),
			"period 0.1s + 1ns":  window("l", 1, 100*time.Millisecond+1),
			"period MinInt64":    window("l", 1, math.MinInt64),
			"capacity -1":        bucket("l", 1, time.Minute, ratelimit.Capacity(-1)),
			"capacity NaN":       bucket("l", 1, time.Minute, ratelimit.Capacity(nan)),
			"capacity Inf":       window("l", 1, time.Minute, ratelimit.Capacity(inf)),
			"maxReserved -1":     bucket("l", 1, time.Minute, ratelimit.MaxReserved(-1)),
			"maxReserved NaN":    bucket("l", 1, time.Minute, ratelimit.MaxReserved(nan)),
			"maxReserved Inf":    bucket("l", 1, time.Minute, ratelimit.MaxReserved(inf)),
			"shards -1":          bucket("l", 1, time.Minute, ratelimit.Shards(-1)),
			"shards 1001":        bucket("l", 1, time.Minute, ratelimit.Shards(harness.MaxShards+1)),
			"start of a bucket":  bucket("l", 1, time.Minute, ratelimit.Start(harness.Noon)),
			"start in year 0":    window("l", 1, time.Minute, ratelimit.Start(time.Date(0, 12, 31, 23, 59, 59, 0, time.UTC))),
			"start in 1 BC, UTC": window("l", 1, time.Minute, ratelimit.Start(time.Date(1, 1, 1, 0, 0, 0, 0, time.FixedZone("", 3600)))),
			"start in 10000":     window("l", 1, time.Minute, ratelimit.Start(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC))),
			"start at the end":   window("l", 1, time.Minute, ratelimit.Start(time.Unix(math.MaxInt64/2, 0))),

			"count -1":    ten.Key("ann").Count(-1),
			"count NaN":   ten.Key("ann").Count(nan),
			"count Inf":   ten.Key("ann").Count(inf),
			"count -Inf":  ten.Key("ann").Count(-inf),
			"count 1e300": ten.Key("ann").Count(1e300),
		}
		tooMuch := map[string]ratelimit.Request{
			"count 1e15":          ten.Key("ann").Count(1e15),
			"count just above":    ten.Key("ann").Count(10 + 1e-7),
			"count of capacity 0": bucket("l", 1, time.Minute, ratelimit.Capacity(0)),
			"count of a sharded":  harness.Sharded("l", 5).Key("ann").Count(11),
		}
		tooMuchReserved := map[string]ratelimit.Request{
			"more than all":  bucket("l", 1, time.Minute, ratelimit.MaxReserved(1)).Count(2.1),
			"maxReserved 0":  harness.Sharded("l", 5, ratelimit.MaxReserved(0)).Key("ann").Count(11),
			"capacity 0":     bucket("l", 1, time.Minute, ratelimit.Capacity(0), ratelimit.MaxReserved(1)).Count(1.1),
			"a window's all": window("l", 1, time.Minute, ratelimit.MaxReserved(1)).Count(2.1),
		}
		verbs := map[string]func(...ratelimit.Request) error{
			"consume": func(r ...ratelimit.Request) error {
				_, err := w.Limiter.Consume(w.Context(), w.DB, r...)
				return err
			},
			"reserve": func(r ...ratelimit.Request) error {
				_, err := w.Limiter.Reserve(w.Context(), w.DB, r...)
				return err
			},
			"take": func(r ...ratelimit.Request) error {
				_, _, err := w.Limiter.Take(w.Context(), w.DB, 3, r...)
				return err
			},
			"check": func(r ...ratelimit.Request) error {
				_, err := w.Limiter.Check(w.Context(), w.DB, r...)
				return err
			},
			"balance": func(r ...ratelimit.Request) error {
				_, err := w.Limiter.Balance(w.Context(), w.DB, r...)
				return err
			},
			"charge": func(r ...ratelimit.Request) error {
				_, err := w.Limiter.Charge(w.Context(), w.DB, r...)
				return err
			},
			"refund": func(r ...ratelimit.Request) error {
				_, err := w.Limiter.Refund(w.Context(), w.DB, harness.ReceiptOf(harness.Noon, r...), r...)
				return err
			},
			"reset": func(r ...ratelimit.Request) error { return w.Limiter.Reset(w.Context(), w.DB, r...) },
		}
		for verb, call := range verbs {
			if err := call(); !errors.Is(err, ratelimit.ErrInvalid) {
				w.Errorf("%s without a request: %v", verb, err)
			}
			for name, request := range hostile {
				for _, requests := range [][]ratelimit.Request{{request}, {ten.Key("bob"), request}} {
					if err := call(requests...); !errors.Is(err, ratelimit.ErrInvalid) || len(err.Error()) > 2*10_000 {
						w.Errorf("%s, %s: %v", verb, name, err)
					}
				}
			}
		}
		for name, request := range tooMuch {
			for _, verb := range []string{"consume", "check"} {
				if err := verbs[verb](ten.Key("bob"), request); !errors.Is(err, ratelimit.ErrExceedsCapacity) {
					w.Errorf("%s, %s: %v", verb, name, err)
				}
			}
		}
		for name, request := range tooMuchReserved {
			if err := verbs["reserve"](ten.Key("bob"), request); !errors.Is(err, ratelimit.ErrExceedsCapacity) {
				w.Errorf("reserve, %s: %v", name, err)
			}
		}
		if rows := w.Rows(); rows != "" {
			w.Errorf("something was written:\n%s", rows)
		}
		stillUsable(w)
	})
}

func TestANilDatabaseIsAnError(t *testing.T) {
	t.Parallel()
	var tx pgx.Tx
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("l", 1, time.Minute)
	for _, db := range []ratelimit.DB{nil, tx} {
		if _, err := limiter.Consume(t.Context(), db, limit.Key("ann")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%v", err)
		}
	}
	var pool interface {
		BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error)
	}
	defer func() {
		if r := recover(); r != nil {
			t.Errorf("InTx: panic: %v", r)
		}
	}()
	err := limiter.InTx(t.Context(), pool, func(context.Context, pgx.Tx) error { return nil })
	if !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("InTx: %v", err)
	}
}

func TestClocksFarInThePastAndFuture(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		window := ratelimit.FixedWindow("window", 10, time.Hour)
		start := ratelimit.FixedWindow("start", 10, time.Hour, ratelimit.Start(time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)))
		huge := ratelimit.FixedWindow("huge", 10, 292*365*24*time.Hour)
		for _, year := range []int{-5000, -1, 0, 1, 999, 10000, 10001, 300_000, 300_000_000} {
			w.Clock.At = time.Date(year, 6, 1, 12, 0, 0, 0, time.UTC)
			w.Refuse(ratelimit.ErrInvalid, bucket.Key("ann"))
			w.Refuse(ratelimit.ErrInvalid, window.Key("ann"), bucket.Key("ann"))
			w.Clock.At = harness.Noon
			if _, err := w.Limiter.Refund(w.Context(), w.DB, harness.ReceiptOf(time.Date(year, 6, 1, 12, 0, 0, 0, time.UTC), window.Key("ann")), window.Key("ann")); !errors.Is(err, ratelimit.ErrInvalid) {
				w.Errorf("refund of the year %d: %v", year, err)
			}
		}
		w.Clock.At = time.Time{}
		w.Refuse(ratelimit.ErrInvalid, bucket.Key("ann"))
		w.Clock.At = time.Unix(math.MaxInt64, 0)
		w.Refuse(ratelimit.ErrInvalid, bucket.Key("ann"))
		w.Clock.At = harness.Noon
		stillUsable(w)

		for i, now := range []time.Time{
			time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(1582, 10, 10, 12, 0, 0, 0, time.UTC), time.Date(1969, 12, 31, 23, 59, 59, 999_999_000, time.UTC),
			time.Date(2038, 1, 19, 3, 14, 8, 0, time.UTC), time.Date(9000, 2, 28, 23, 59, 59, 999_999_999, time.UTC),
		} {
			for _, limit := range []ratelimit.Limit{bucket, window, start, huge} {
				w.Clock.At = now
				key := limit.Key(fmt.Sprint("user", i))
				w.Grant(key.Count(10))
				result := w.Deny(key)
				if !result.RetryAt.After(now) || limit != huge && result.RetryAt.Sub(now) > time.Hour {
					w.Errorf("%v, %s: retry at %v", now, limit.Name(), result.RetryAt)
				}
				if result.RetryAt.Year() < 9999 {
					w.Clock.At = result.RetryAt
					w.Grant(key)
				}
			}
		}
		// At the clock's last instant, nothing overflows, and a denial is still a denial.
		w.Clock.At = time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
		for _, limit := range []ratelimit.Limit{bucket, window, start, huge} {
			w.Grant(limit.Key("last").Count(10))
			result := w.Deny(limit.Key("last"))
			if result.RetryAt.Year() != 9999 {
				w.Errorf("%s: retry at %v", limit.Name(), result.RetryAt)
			}
		}
		// The clock steps from its first instant to its last, and back.
		key := bucket.Key("traveller")
		w.Reserve(key.Count(10))
		w.Clock.At = time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC)
		w.Deny(key)
		w.Holds(key, 0)
		w.Clock.At = time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
		w.Holds(key, 0)
		stillUsable(w)
	})
}

func TestEnormousAndTinyNumbersNeverOverflow(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		const most = algebra.MaxTokens
		longest := time.Duration(math.MaxInt64).Truncate(time.Microsecond)
		smallest := math.SmallestNonzeroFloat64
		i := 0
		for _, rate := range []float64{smallest, 1e-15, most} {
			for _, period := range []time.Duration{100 * time.Millisecond, longest} {
				for _, shards := range []int{1, 3} {
					for _, kind := range []string{"token bucket", "fixed window"} {
						i++
						limit, err := ratelimit.Config{
							Name: fmt.Sprint("limit", i), Kind: kind, Rate: &rate, Period: period.String(), Shards: shards,
						}.Limit()
						if errors.Is(err, ratelimit.ErrInvalid) {
							continue
						}
						// A savepoint keeps one failure from hiding the others.
						tx := w.Begin()
						if err := extremes(w, tx, limit); err != nil {
							w.Errorf("%s, rate %v per %v, %d shards: %v", kind, rate, period, shards, err)
						}
						w.Do(tx.Rollback(w.Context()))
						w.Clock.At = harness.Noon
					}
				}
			}
		}
		stillUsable(w)
	})
}

// extremes uses every verb with extreme counts. A refusal is fine, an SQL error is not.
func extremes(w harness.World, db ratelimit.DB, limit ratelimit.Limit) error {
	key, ctx := limit.Key("ann"), w.Context()
	smallest := math.SmallestNonzeroFloat64
	for _, advance := range []time.Duration{0, 400 * time.Millisecond, 200 * 365 * 24 * time.Hour} {
		w.Clock.Advance(advance)
		for _, count := range []float64{smallest, limit.Capacity(), algebra.MaxTokens} {
			balances, err := w.Limiter.Balance(ctx, db, key)
			if err != nil {
				return fmt.Errorf("balance, %v after noon: %w", w.Clock.At.Sub(harness.Noon), err)
			}
			if b := balances[0]; math.IsNaN(b.Remaining) || math.IsInf(b.Remaining, 0) || b.Remaining > limit.Capacity()+1e-9 || math.IsNaN(b.Used) || b.NextAt.Year() > 9999 || b.ResetAt.Year() > 9999 {
				return fmt.Errorf("balance: %+v", b)
			}
			for verb, call := range map[string]func() (ratelimit.Result, error){
				"consume": func() (ratelimit.Result, error) { return w.Limiter.Consume(ctx, db, key.Count(count)) },
				"reserve": func() (ratelimit.Result, error) {
					answer, err := harness.Decide(ctx, w.Limiter, db, true, key.Count(count))
					if err == nil && (answer.Delay() < 0 || answer.RunAt.Year() > 9999) {
						return answer.Result, fmt.Errorf("it runs at %v", answer.RunAt)
					}
					return answer.Result, err
				},
				"take": func() (ratelimit.Result, error) {
					_, result, err := w.Limiter.Take(ctx, db, int(min(max(count, 1), algebra.MaxTokens)), key)
					return result, err
				},
				"check":  func() (ratelimit.Result, error) { return w.Limiter.Check(ctx, db, key.Count(count)) },
				"charge": func() (ratelimit.Result, error) { return w.Limiter.Charge(ctx, db, key.Count(count)) },
				"refund": func() (ratelimit.Result, error) {
					return w.Limiter.Refund(ctx, db, harness.ReceiptOf(w.Clock.At, key.Count(count)), key.Count(count))
				},
			} {
				result, err := call()
				if harness.SQLState(err) != "" {
					return fmt.Errorf("%s %v, %v after noon: %w", verb, count, w.Clock.At.Sub(harness.Noon), err)
				}
				if err != nil && !errors.Is(err, ratelimit.ErrInvalid) && !errors.Is(err, ratelimit.ErrExceedsCapacity) && !errors.As(err, new(*ratelimit.DeniedError)) {
					return fmt.Errorf("%s %v: %w", verb, count, err)
				}
				if err != nil {
					continue
				}
				s := result.Requests[0]
				if math.IsNaN(s.Remaining) || math.IsInf(s.Remaining, 0) || s.Remaining > limit.Capacity()+1e-9 || result.RetryAfter != 0 || !result.RetryAt.IsZero() {
					return fmt.Errorf("%s %v: %+v", verb, count, result)
				}
			}
		}
	}
	return nil
}

func TestTheMostShardsWork(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		key := harness.Sharded("wide", harness.MaxShards).Key("ann")
		w.Grant(key.Count(9.5))
		w.Deny(key)
	})
}

func TestADebtThatTakesForEverIsAnswered(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("slow", 1, 24*time.Hour)
		for range 10 {
			w.Charge(limit.Key("ann").Count(1e15))
		}
		result := w.Deny(limit.Key("ann"))
		if result.RetryAt.Year() != 9999 || result.RetryAfter != math.MaxInt64/2 {
			w.Fatalf("%+v", result)
		}
		stillUsable(w)
	})
}

func TestTheLongestNamesAndKeysFitTheIndex(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		random := harness.NewRand(w.T)
		text := func(bytes int) string { // text that does not compress and is not ASCII
			var b strings.Builder
			for b.Len() < bytes {
				if r := rune(0x4e00 + random.IntN(0x5000)); b.Len()+3 <= bytes {
					b.WriteRune(r)
				} else {
					b.WriteByte('x')
				}
			}
			return b.String()
		}
		for range 5 {
			limit := ratelimit.TokenBucket(text(harness.MaxNameLen), 1, time.Minute)
			key := limit.Key(text(harness.MaxKeyLen))
			w.Grant(key)
			w.Deny(key)
		}
	})
}

func TestOddTextRoundTripsAsData(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		odd := []string{
			"'; DROP TABLE ratelimit.limits; --", `'' OR 1=1`, `$1`, `$$`, `$body$`, `@extschema@`, `%s%d%n`, `\`, `\\`, `\x00`, `E'\n'`, `"quoted"`,
			"{a,b}", "{}", "NULL", "null", "(,)", `{"a":1}`, "a,b", " ", "  leading", "trailing ", "\t", "\n", "\r\n", "\x01", "\x7f",
			"é", "e\u0301", "É", "ı", "İ", "ß", "SS", "ẞ", "ǆ", "Å", "\u212b", // case folding and normalization would make some of them equal
			"\u200b", "\ufeff", "\ufffd", "\ufffe", "\uffff", "\u202e\u0041", "\u2028", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0010ffff", "\u0000a"[1:], "ﷺ", "漢字",
			"١٢٣", "🏳️‍🌈",
		}
		var requests []ratelimit.Request
		for _, text := range odd {
			requests = append(requests, ratelimit.TokenBucket("keys", 1, time.Minute).Key(text), ratelimit.TokenBucket(text, 1, time.Minute).Key(text))
		}
		random := harness.NewRand(w.T)
		random.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
		for _, request := range requests[:len(requests)/2] {
			w.Grant(request)
		}
		w.Grant(requests[len(requests)/2:]...)
		for _, request := range requests {
			w.Deny(request)
		}
		if result := w.Deny(requests...); len(harness.DeniedBy(result)) != len(requests) {
			w.Fatalf("%+v", result)
		}
		var names []byte
		w.Do(w.DB.QueryRow(w.Context(), "SELECT json_object_agg(name, true) FROM ratelimit.limits WHERE name <> 'keys'").Scan(&names))
		stored := map[string]bool{}
		w.Do(json.Unmarshal(names, &stored))
		for _, text := range odd {
			if !stored[text] {
				w.Errorf("%q is not stored as it is", text)
			}
		}
		if len(stored) != len(odd) {
			w.Errorf("%d names stored, want %d", len(stored), len(odd))
		}
		for _, request := range requests {
			w.Do(w.Limiter.Reset(w.Context(), w.DB, request))
		}
		if rows := w.Rows(); rows != "" {
			w.Errorf("rows after reset:\n%s", rows)
		}
	})
}

// The table has no CHECKs, so anything can be written into it by hand. Such a row grants no more than a full row.
func TestRowsWrittenByHandGrantNoMoreThanTheCapacity(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for i, value := range []string{"'NaN'", "'Infinity'", "1e300", "'-Infinity'", "-1e300"} {
			for shards, limit := range []ratelimit.Limit{1: ratelimit.TokenBucket("bucket", 3, time.Hour), 2: harness.Sharded("sharded", 2)} {
				if shards == 0 {
					continue
				}
				key := limit.Key(fmt.Sprint(i))
				for shard := range shards {
					_, err := w.DB.Exec(w.Context(), "INSERT INTO ratelimit.limits VALUES ($1, $2, $3, $4, "+value+", $5)", limit.Name(), fmt.Sprint(i), shard, shards, harness.Noon)
					w.Do(err)
				}
				granted := 0.0
				for range 2 * int(limit.Capacity()) {
					if _, err := w.Limiter.Consume(w.Context(), w.DB, key); err == nil {
						granted++
					} else if !harness.Denied(err) {
						w.Fatal(err)
					}
				}
				if want := limit.Capacity(); granted != want && (i < 3 || granted != 0) {
					w.Errorf("%s in a row of %s: %v granted, want %v", value, limit.Name(), granted, want)
				}
			}
		}
	})
}

// The functions trust their callers, but return an error where they cannot decide. (TestNoGarbageIsGrantedOrStored has
// values that are not numbers.)
func TestTheFunctionsRefuseWhatTheyCannotDecide(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		apply := func(op, names, keys, reserve string) string {
			return fmt.Sprintf(`SELECT ratelimit._apply(%s, %s, %s, '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}', %s)`,
				op, names, keys, reserve)
		}
		several := func(names, keys string) string {
			return fmt.Sprintf(`SELECT ratelimit._consume_several(%s, %s, '{10,10}', '{1 min,1 hour}', '{10,10}', '{NULL,NULL}', '{1,1}', '{0,0}')`, names, keys)
		}
		w.Grant(ratelimit.TokenBucket("a", 10, time.Minute).Key("b"))
		before := w.Rows()
		for _, sql := range []string{
			several("'{c,c}'", "'{d,d}'"),
			several("'{}'", "'{}'"),
			several("NULL", "'{b,b}'"),
			apply("'consume'", "'{c,c}'", "'{d,d}'", "false"),
			apply("'consume'", "'{c,c}'", "'{d,d}'", "true"),
			apply("'check'", "'{a,a}'", "'{b,b}'", "false"),
			apply("'consume'", "'{a,c}'", "'{b,d}'", "NULL"),
			apply("'consume'", "'{}'", "'{}'", "false"),
			apply("'consume'", "NULL", "'{b,d}'", "false"),
			apply("NULL", "'{a,c}'", "'{b,d}'", "false"),
			apply("'grant'", "'{a,c}'", "'{b,d}'", "false"),
			apply("'CONSUME'", "'{a,c}'", "'{b,d}'", "false"),
			apply("'refund'", "'{a,c}'", "'{b,d}'", "false"),
			// Rows with such shards could not be found again.
			`SELECT ratelimit._apply('consume', '{l}', '{k}', '{10}', '{1 min}', '{10}', '{NULL}', '{0}', '{1}', '{0}', '{0}', '{0}')`,
			`SELECT ratelimit._apply('consume', '{l}', '{k}', '{10}', '{1 min}', '{10}', '{NULL}', '{NULL}', '{1}', '{0}', '{0}', '{0}')`,
			// A first use for more than the capacity: there is no row that shows it.
			`SELECT ratelimit._consume('l', 'k', 10, '1 min', 10, NULL, 11, 0)`,
		} {
			w.SQLFails("22023", sql)
		}
		if after := w.Rows(); strings.Split(after, " (")[1] != strings.Split(before, " (")[1] {
			w.Errorf("rows:\n%s\nbecame\n%s", before, after)
		}
		stillUsable(w)
	})
}

// Whatever its arguments, a refund gives back no more than the count. If an argument is not a number, it gives back
// nothing.
func TestTheRefundFunctionMintsNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, limit := range []struct {
			ratelimit.Limit
			start, part string
		}{
			{ratelimit.TokenBucket("bucket", 10, time.Hour), "NULL", "1"},
			{harness.Sharded("sharded", 2), "NULL", "0.5"},
			{ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(harness.Noon)), "2026-07-01 12:00Z", "1"},
		} {
			ann := limit.Key("ann")
			w.Grant(ann.Count(10))
			left := w.Balance(ann)
			// refund returns what is left after such a refund.
			refund := func(changed, value string) (float64, error) {
				with := func(name, valid string) string {
					if name == changed {
						return value
					}
					return valid
				}
				array := func(name, kind, valid string) string { return "ARRAY[" + with(name, valid) + "]::" + kind + "[]" }
				capacity := strconv.FormatFloat(limit.Capacity(), 'g', -1, 64)
				tx := w.Begin()
				defer func() { w.Do(tx.Rollback(w.Context())) }()
				_, err := tx.Exec(w.Context(), "SELECT ratelimit._refund("+strings.Join([]string{
					array("name", "text", "'"+limit.Name()+"'"), array("key", "text", "'ann'"), array("rate", "float8", capacity),
					array("period", "interval", "'1 hour'"), array("capacity", "float8", capacity),
					array("start", "timestamptz", "NULLIF('"+limit.start+"', 'NULL')"), array("count", "float8", "1"), array("taken", "float8", "10"),
					array("held", "float8", "0"), array("part", "float8", limit.part),
					with("taken_at", "'2026-07-01 12:00Z'"), with("run_at", "'2026-07-01 12:00Z'"), with("now", "'2026-07-01 12:00Z'"),
				}, ", ")+")")
				if err != nil {
					return left, err
				}
				balances, err := w.Limiter.Balance(w.Context(), tx, ann)
				if err != nil {
					return left, err
				}
				return balances[0].Remaining, nil
			}

			if got, err := refund("", ""); err != nil || !harness.Near(got, left+1) {
				w.Errorf("%s: %v are left, %v, want one more than %v", limit.Name(), got, err, left)
			}
			for name, values := range map[string][]string{
				"name": {"NULL", "''", "'other'"}, "key": {"NULL", "''"},
				"rate": {"NULL", "'NaN'", "'Infinity'", "'-Infinity'", "-1"}, "period": {"NULL", "'0'", "'-1 hour'"},
				"capacity": {"NULL", "'NaN'", "'Infinity'", "'-Infinity'", "-1"}, "start": {"'infinity'", "'-infinity'"},
				"count": {"NULL", "'NaN'", "'Infinity'", "'-Infinity'", "-1", "0"}, "taken": {"NULL", "'NaN'", "'Infinity'", "'-Infinity'", "-1"},
				"held": {"NULL", "'NaN'", "'Infinity'", "'-Infinity'"}, "part": {"NULL", "'NaN'", "'Infinity'", "'-Infinity'", "-1"},
				"taken_at": {"NULL", "'infinity'", "'-infinity'"}, "run_at": {"NULL", "'infinity'", "'-infinity'"}, "now": {"'infinity'", "'-infinity'"},
			} {
				for _, value := range values {
					if got, err := refund(name, value); got != left || err != nil && harness.SQLState(err) == "" {
						w.Errorf("%s, %s %s: %v are left, %v, want %v", limit.Name(), name, value, got, err, left)
					}
				}
			}
			for name, values := range map[string][]string{
				"rate": {"0", "1e-300", "1e300"}, "period": {"'1 us'", "'100000 days'", "'1 month'"}, "capacity": {"0", "1e-300", "1e300"},
				"count": {"1e-300", "1e300"}, "taken": {"0", "1e300"}, "held": {"1e300", "-1e300"}, "part": {"0", "1e-300", "1e300"},
				"taken_at": {"'4000-01-01 BC'", "'9999-01-01'"}, "run_at": {"'4000-01-01 BC'", "'9999-01-01'"},
			} {
				for _, value := range values {
					most := left + 1
					if name == "count" {
						most = limit.Capacity()
					}
					if got, err := refund(name, value); !(got <= most+1e-9) || err != nil && harness.SQLState(err) == "" {
						w.Errorf("%s, %s %s: %v are left, %v, want at most %v", limit.Name(), name, value, got, err, most)
					}
				}
			}
		}
		stillUsable(w)
	})
}

// Random bytes as names and keys, and random bits as numbers. Each call is an error or a decision, and the transaction
// stays usable.
func TestRandomGarbagePoisonsNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		random := harness.NewRand(w.T)
		text := func() string {
			if random.IntN(4) > 0 {
				return harness.OneOf(random, "a", "b", "é|", `\`)
			}
			b := make([]byte, random.IntN(12))
			for i := range b {
				b[i] = byte(random.Uint32())
				if random.IntN(3) > 0 {
					b[i] &= 0x7f
				}
			}
			return string(b)
		}
		number := func() float64 {
			switch random.IntN(6) {
			case 0:
				return math.Float64frombits(random.Uint64())
			case 1, 2:
				return random.ExpFloat64() * math.Pow(10, float64(random.IntN(20)-5))
			default:
				return float64(random.IntN(5))
			}
		}
		instant := func() time.Time {
			return time.UnixMicro(random.Int64N(math.MaxInt64) >> random.IntN(30) * int64(1-2*random.IntN(2)))
		}
		outcomes := map[string]int{}
		for call := range 300 {
			var requests []ratelimit.Request
			var shown []string
			for range 1 + random.IntN(2) {
				c := ratelimit.Config{Name: text(), Kind: harness.OneOf(random, "fixed window", "token bucket"), Rate: new(number()),
					Period: (time.Duration(random.Int64()>>random.IntN(60)) / 1000 * 1000).String(), Shards: random.IntN(4)}
				if random.IntN(2) == 0 {
					capacity := number()
					c.Capacity = &capacity
				}
				if random.IntN(4) == 0 {
					start := instant()
					c.Start = &start
				}
				limit, err := c.Limit()
				if err != nil && random.IntN(10) > 0 {
					continue
				}
				request := limit.Key(text()).Count(number())
				requests = append(requests, request)
				shown = append(shown, fmt.Sprintf("%+v", request))
			}
			w.Clock.At = instant()
			if random.IntN(4) > 0 {
				w.Clock.At = harness.Noon.Add(time.Duration(random.Int64()))
			}
			limiter := &ratelimit.Limiter{Clock: w.Clock.Now} // it has seen no other definition of the names
			verb := harness.OneOf(random, limiter.Consume, limiter.Check, limiter.Charge, func(ctx context.Context, db ratelimit.DB, r ...ratelimit.Request) (ratelimit.Result, error) {
				return limiter.Refund(ctx, db, harness.ReceiptOf(w.Clock.At, r...), r...)
			}, func(ctx context.Context, db ratelimit.DB, r ...ratelimit.Request) (ratelimit.Result, error) {
				_, err := limiter.Reserve(ctx, db, r...)
				return ratelimit.Result{}, err
			}, func(ctx context.Context, db ratelimit.DB, r ...ratelimit.Request) (ratelimit.Result, error) {
				for i := range r {
					r[i] = r[i].Count(1)
				}
				_, result, err := limiter.Take(ctx, db, random.IntN(100), r...)
				return result, err
			}, func(ctx context.Context, db ratelimit.DB, r ...ratelimit.Request) (ratelimit.Result, error) {
				_, err := limiter.Balance(ctx, db, r...)
				return ratelimit.Result{}, err
			})
			_, err := verb(w.Context(), w.DB, requests...)
			switch {
			case err == nil:
				outcomes["granted"]++
			case errors.As(err, new(*ratelimit.DeniedError)):
				outcomes["denied"]++
			case errors.Is(err, ratelimit.ErrInvalid), errors.Is(err, ratelimit.ErrExceedsCapacity):
				outcomes["refused"]++
			default:
				w.Fatalf("call %d at %v: %v\n%s", call, w.Clock.At, err, strings.Join(shown, "\n"))
			}
		}
		if outcomes["granted"] < 10 || outcomes["refused"] < 10 {
			w.Errorf("%v: this tested too little", outcomes)
		}
		w.Clock.At = harness.Noon
		stillUsable(w)
	})
}
