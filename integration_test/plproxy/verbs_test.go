package plproxy_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/migrations/plproxy"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

var noon = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// stopped is a limiter whose clock stands.
func stopped(now *time.Time) *ratelimit.Limiter {
	return &ratelimit.Limiter{Clock: func() time.Time { return *now }}
}

func state(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.Code
	}
	return ""
}

// balance reads a balance.
func balance(t testing.TB, l *ratelimit.Limiter, db ratelimit.DB, request ratelimit.Request) ratelimit.Balance {
	t.Helper()
	balances, err := l.Balance(t.Context(), db, request)
	if err != nil {
		t.Fatal(err)
	}
	return balances[0]
}

func scan(t testing.TB, db *pgxpool.Pool, sql string, args ...any) (n int) {
	t.Helper()
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// slotOf returns the slot of a key and the number of its server.
func slotOf(t testing.TB, db *pgxpool.Pool, key string) (slot, server int) {
	t.Helper()
	if err := db.QueryRow(t.Context(), "SELECT slot, server FROM rate_limit_slots WHERE slot = _plproxy_slot($1)", key).Scan(&slot, &server); err != nil {
		t.Fatal(err)
	}
	return slot, server
}

// TestEveryVerbAnswersAsOnOneServer makes the same calls, at the same instants, through the proxy and on a plain database.
func TestEveryVerbAnswersAsOnOneServer(t *testing.T) {
	proxy, plain := pool(t, shared.proxy.URL(), 4), pool(t, plainURL(shared.proxy), 4)
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 7, time.Minute, ratelimit.Capacity(11)),
		ratelimit.TokenBucket("third", 1.0/3, time.Second, ratelimit.MaxReserved(5)),
		ratelimit.FixedWindow("window", 5, time.Hour, ratelimit.MaxReserved(1)),
		ratelimit.CalendarWindow("month", 9, ratelimit.Month, ratelimit.Zone("Europe/Berlin")),
	}
	random := rand.New(rand.NewPCG(1, 2))
	now := noon
	receipts := map[string][2]ratelimit.Receipt{}
	l := stopped(&now)
	seen := map[string]int{}
	for range 1500 {
		now = now.Add(time.Duration(random.IntN(5_000_000)) * time.Microsecond)
		limit := limits[random.IntN(len(limits))]
		key := fmt.Sprint("key ", random.IntN(12))
		requests := []ratelimit.Request{limit.Key(key).Count(float64(1 + random.IntN(3)))}
		verb := []string{"Consume", "Consume", "Consume", "Check", "Charge", "Refund", "Reserve", "Take", "Balance", "Reset", "Several", "Move", "Pause", "Resume"}[random.IntN(14)]
		if verb == "Reset" && random.IntN(4) > 0 {
			continue
		}
		id := limit.Name() + key
		call := func(db ratelimit.DB, which int) (answer any, err error) {
			var result ratelimit.Result
			switch verb {
			case "Consume":
				result, err = l.Consume(t.Context(), db, requests...)
			case "Several":
				result, err = l.Consume(t.Context(), db, append(requests, limits[0].Key("{"+key+"}"), limits[2].Key("{"+key+"} and more"))[1:]...)
			case "Reserve":
				var reserved ratelimit.Reservation
				if reserved, err = l.Reserve(t.Context(), db, requests...); err == nil {
					r := receipts[id]
					r[which] = reserved.Receipt()
					receipts[id] = r
				}
				return reserved, err
			case "Take":
				var n int
				n, result, err = l.Take(t.Context(), db, 5, limit.Key(key))
				return []any{n, result}, err
			case "Balance":
				return l.Balance(t.Context(), db, requests...)
			case "Check":
				result, err = l.Check(t.Context(), db, requests...)
			case "Charge":
				result, err = l.Charge(t.Context(), db, requests...)
			case "Move": // to another plan, whose row may be on another server
				err = l.Move(t.Context(), db, limits[0].Key(key), limits[1].Key(key))
			case "Pause":
				err = l.Pause(t.Context(), db, now.Add(20*time.Second), limits[0].Key(key).Count(2))
			case "Resume":
				err = l.Resume(t.Context(), db, limits[0].Key(key))
			case "Reset":
				err = l.Reset(t.Context(), db, requests...)
			case "Refund":
				if receipts[id][which] == "" {
					return result, nil
				}
				result, err = l.Refund(t.Context(), db, receipts[id][which], limit.Key(key).Count(1))
			}
			if err == nil && verb == "Consume" {
				r := receipts[id]
				r[which] = result.Receipt()
				receipts[id] = r
			}
			return result, err
		}
		got, gotErr := call(proxy, 0)
		want, wantErr := call(plain, 1)
		if !reflect.DeepEqual(got, want) || fmt.Sprint(gotErr) != fmt.Sprint(wantErr) {
			t.Fatalf("%s of %v at %v:\nproxy %+v, %v\nplain %+v, %v", verb, requests, now, got, gotErr, want, wantErr)
		}
		seen[fmt.Sprint(verb, ", granted ", gotErr == nil)]++
	}
	t.Log(seen)
	for _, must := range []string{"Consume, granted true", "Consume, granted false", "Several, granted true", "Several, granted false", "Move, granted true", "Pause, granted true", "Resume, granted true", "Refund, granted true",
		"Reserve, granted false", "Take, granted true", "Take, granted false", "Balance, granted true"} {
		if seen[must] == 0 {
			t.Errorf("no call was like this: %s", must)
		}
	}
	var used int
	for _, p := range shared.partitions {
		var n int
		if err := pool(t, p.URL(), 1).QueryRow(t.Context(), "SELECT count(*) FROM rate_limits").Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			used++
		}
	}
	if used != 3 {
		t.Errorf("%d partitions have rows, want 3", used)
	}
}

// TestABatchAnswersAsOnOneServer compares the functions of the Coalescer, with random batches at one instant.
func TestABatchAnswersAsOnOneServer(t *testing.T) {
	proxy, plain := pool(t, shared.proxy.URL(), 1), pool(t, plainURL(shared.proxy), 1)
	random := rand.New(rand.NewPCG(3, 4))
	now := noon
	answers, errs := 0, 0
	for round := range 300 {
		now = now.Add(time.Duration(random.IntN(3_000_000)) * time.Microsecond)
		batch := randomBatch(random, now)
		got, gotErr := coalesce(t, proxy, batch)
		want, wantErr := coalesce(t, plain, batch)
		if state(gotErr) != state(wantErr) || !reflect.DeepEqual(got, want) {
			t.Fatalf("round %d, %+v:\nproxy %v, %v\nplain %v, %v", round, batch, got, gotErr, want, wantErr)
		}
		answers += len(got)
		if gotErr != nil {
			errs++
		}
	}
	if answers < 300 || errs > 0 {
		t.Errorf("%d answers, %d errors: too few to compare", answers, errs)
	}

	sums := 0
	for range 200 {
		now = now.Add(time.Duration(random.IntN(3_000_000)) * time.Microsecond)
		keys, counts := []string{"key"}, []float64{1}
		for i := range 10 {
			if random.IntN(2) == 0 {
				keys, counts = append(keys, fmt.Sprint("key ", i)), append(counts, float64(random.IntN(6)))
			}
		}
		got, want := sumsOf(t, proxy, keys, counts, now), sumsOf(t, plain, keys, counts, now)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%v %v:\nproxy %v\nplain %v", keys, counts, got, want)
		}
		sums += len(got)
	}
	if sums < 200 {
		t.Errorf("only %d answers to sums", sums)
	}
}

// batch is the arguments of _ratelimit_coalesce, in order.
type batch []any

func randomBatch(random *rand.Rand, now time.Time) batch {
	names, rates, periods, capacities := []string{"batch a", "batch b"}, []float64{7, 1}, []time.Duration{time.Minute, time.Second}, []float64{12, 3}
	var listed []time.Time // the windows of a calendar
	firsts, lasts := []int32{}, []int32{}
	type place struct {
		key string
		def int32
	}
	var all []place
	for def := range int32(2) {
		for i := range 10 {
			if random.IntN(3) == 0 {
				all = append(all, place{fmt.Sprintf("key %d", i), def + 1}, place{fmt.Sprintf("{key %d}x", i), def + 1})
			}
		}
	}
	slices.SortFunc(all, func(a, b place) int { return strings.Compare(fmt.Sprint(a.def, a.key), fmt.Sprint(b.def, b.key)) })
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	cut := random.IntN(len(all) + 1)
	for _, part := range [][]place{all[:cut], all[cut:]} {
		slices.SortFunc(part, func(a, b place) int { return strings.Compare(fmt.Sprint(a.def, a.key), fmt.Sprint(b.def, b.key)) })
	}
	keys, defs, starts := []string{}, []int32{}, []*time.Time{}
	repeats, counts, floors := []int32{}, []float64{}, []float64{}
	calls, asks, askDefs, askStarts, askCounts, askFloors := []int32{}, []int32{}, []int32{}, []*time.Time{}, []float64{}, []float64{}
	windows := random.IntN(3) > 0
	start := noon.Add(-time.Hour)
	if windows && random.IntN(2) == 0 {
		names[1], periods[1] = "batch c", 2*time.Second
		for i := range 5 {
			listed = append(listed, now.Truncate(time.Second).Add(time.Duration(i-2)*time.Second))
		}
		start, firsts, lasts = listed[0], []int32{0, 1}, []int32{0, 5}
	}
	for i, p := range all {
		keys, defs = append(keys, p.key), append(defs, p.def)
		if windows {
			starts = append(starts, []*time.Time{nil, &start}[p.def-1])
		}
		if i < cut {
			repeats, counts, floors = append(repeats, int32(1+random.IntN(4))), append(counts, float64(random.IntN(4))), append(floors, 0)
		}
	}
	call := int32(0)
	for i := cut; i < len(all); i++ {
		for range 1 + random.IntN(3) {
			call++
			also := []int{i}
			// Two keys of one slot, of which one is not mixed otherwise.
			if j := slices.IndexFunc(all, func(p place) bool { return p.def == all[i].def && "{"+p.key+"}x" == all[i].key }); j >= cut {
				also = append(also, j)
			}
			for _, k := range also {
				calls, asks, askDefs = append(calls, call), append(asks, int32(k+1)), append(askDefs, all[k].def)
				askStarts = append(askStarts, map[bool]*time.Time{true: &start}[windows && all[k].def == 2])
				askCounts, askFloors = append(askCounts, float64(random.IntN(4))+0.5), append(askFloors, -float64(random.IntN(3)))
			}
		}
	}
	return batch{names, rates, periods, capacities, keys, defs, starts, repeats, counts, floors, calls, asks, askDefs, askStarts, askCounts, askFloors, now, listed, firsts, lasts}
}

// coalesce returns the last answer for each key.
func coalesce(t *testing.T, db *pgxpool.Pool, b batch) (answers []string, err error) {
	rows, err := db.Query(t.Context(), `
		SELECT DISTINCT ON (u.ord) concat_ws(' ', u.ord, u.value, u.ts, u.after, r.at)
		  FROM _ratelimit_coalesce($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20) AS r,
		       unnest(r.ord, r.value, r.ts, r.after) WITH ORDINALITY AS u (ord, value, ts, after, i)
		 WHERE u.ord IS NOT NULL
		 ORDER BY u.ord, u.i DESC`, b...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// sumsOf returns the answers of _ratelimit_consume_keys.
func sumsOf(t *testing.T, db *pgxpool.Pool, keys []string, counts []float64, now time.Time) []string {
	rows, err := db.Query(t.Context(), `
		SELECT concat_ws(' ', u.ord, u.i <= r.early, u.value, u.ts, r.at)
		  FROM _ratelimit_consume_keys('batch a', $1, 7, '1 minute', 12, $2, $3) AS r,
		       unnest(r.ord, r.value, r.ts) WITH ORDINALITY AS u (ord, value, ts, i)
		 WHERE u.ord IS NOT NULL
		 ORDER BY u.ord`, keys, counts, now)
	if err != nil {
		t.Fatal(err)
	}
	answers, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return answers
}

// TestTheCoalescerSpansPartitions floods a Coalescer, with calls for one limit, for several of one slot and, in the end, for several slots:
// then each statement that has such a call is refused, and its calls are sent one by one.
func TestTheCoalescerSpansPartitions(t *testing.T) {
	for _, spans := range []bool{false, true} {
		t.Run(fmt.Sprint("calls for several slots ", spans), func(t *testing.T) { floodCoalescer(t, spans) })
	}
}

func floodCoalescer(t *testing.T, spans bool) {
	db := pool(t, shared.proxy.URL(), 4)
	var calls, statements atomic.Int64
	c := &ratelimit.Coalescer{Pool: db, OnBatch: func(n int) { calls.Add(int64(n)); statements.Add(1) }}
	t.Cleanup(c.Close)
	l := &ratelimit.Limiter{}
	const capacity, keys, callers = 20, 30, 40
	hours := ratelimit.TokenBucket(fmt.Sprint("coalesced ", spans), capacity, 1000*time.Hour)
	other := ratelimit.FixedWindow("coalesced too", 1e6, 1000*time.Hour)
	var granted [keys]atomic.Int64
	var refused, spanning atomic.Int64
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for range keys * 2 {
				i := rand.IntN(keys)
				key := fmt.Sprint("coalesced ", i)
				requests := []ratelimit.Request{hours.Key(key)}
				switch n := rand.IntN(10); {
				case n == 0:
					requests = append(requests, other.Key(key))
				case n == 1 && spans:
					requests = append(requests, other.Key("{another}"+key))
					spanning.Add(1)
				}
				switch _, err := l.Consume(t.Context(), c, requests...); {
				case err == nil:
					granted[i].Add(1)
				case state(err) == "0A000":
					refused.Add(1)
				case !errors.Is(err, ratelimit.ErrDenied):
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	another, _ := slotOf(t, db, "another")
	for i := range granted {
		key := fmt.Sprint("coalesced ", i)
		if slot, _ := slotOf(t, db, key); slot == another {
			spanning.Add(-1 << 32) // then some calls span nothing
		}
		left := balance(t, l, db, hours.Key(key)).Remaining
		if got := granted[i].Load(); got != capacity || left > 0.1 {
			t.Errorf("%s: %d granted of %d, %v remain", key, got, capacity, left)
		}
	}
	if s := spanning.Load(); s >= 0 && refused.Load() != s {
		t.Errorf("%d calls refused, of %d for two slots", refused.Load(), s)
	}
	if !spans && calls.Load() < 2*statements.Load() {
		t.Errorf("%d calls in %d statements: no batches", calls.Load(), statements.Load())
	}
	t.Logf("%d calls in %d statements, %d refused", calls.Load(), statements.Load(), refused.Load())
}

func TestSeveralLimitsAreAllOrNothing(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 2)
	now := noon
	l := stopped(&now)
	small, large := ratelimit.TokenBucket("small", 1, time.Hour), ratelimit.TokenBucket("large", 100, time.Hour)
	for range 2 {
		_, _ = l.Consume(t.Context(), db, small.Key("{t}user"), large.Key("{t}"))
	}
	if left := balance(t, l, db, large.Key("{t}")).Remaining; left != 99 {
		t.Errorf("%v remain of 100, want 99: the second call was denied", left)
	}
	// Keys of different slots, one of each partition.
	var far []ratelimit.Request
	for i := 0; len(far) < 3; i++ {
		key := fmt.Sprint("far ", i)
		if _, server := slotOf(t, db, key); server == len(far) {
			far = append(far, large.Key(key))
		}
	}
	check := func(what string, err error) {
		t.Helper()
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "0A000" || !strings.Contains(pg.Hint, "braces") {
			t.Errorf("%s: %v, want 0A000 and what to do", what, err)
		}
	}
	_, err := l.Consume(t.Context(), db, far...)
	check("Consume", err)
	_, err = l.Reserve(t.Context(), db, far[:2]...)
	check("Reserve", err)
	_, _, err = l.Take(t.Context(), db, 5, far...)
	check("Take", err)
	_, err = l.Charge(t.Context(), db, far...)
	check("Charge", err)
	_, err = l.Check(t.Context(), db, far...)
	check("Check", err)
	_, err = l.Balance(t.Context(), db, far...)
	check("Balance", err)
	for _, request := range far {
		if left := balance(t, l, db, request).Remaining; left != 100 {
			t.Errorf("%v remain of 100 after a refused call", left)
		}
		if _, err := l.Consume(t.Context(), db, request); err != nil {
			t.Error(err)
		}
	}
	if err := l.Reset(t.Context(), db, far...); err != nil {
		t.Errorf("a reset of keys of several partitions: %v", err)
	}
	for _, request := range far {
		if left := balance(t, l, db, request).Remaining; left != 100 {
			t.Errorf("%v remain of 100 after the reset", left)
		}
	}
}

func TestTransactionsAreRefusedWhereTheyCanBeSeen(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 2)
	l := &ratelimit.Limiter{}
	limit := ratelimit.TokenBucket("in a transaction", 10, time.Hour)
	for _, test := range []struct {
		what  string
		level pgx.TxIsoLevel
		sql   string
	}{
		{"after a write", pgx.ReadCommitted, "SELECT pg_current_xact_id()"},
		{"REPEATABLE READ", pgx.RepeatableRead, "SELECT 1"},
		{"SERIALIZABLE", pgx.Serializable, "SELECT 1"},
	} {
		err := pgx.BeginTxFunc(t.Context(), db, pgx.TxOptions{IsoLevel: test.level}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), test.sql); err != nil {
				return err
			}
			_, err := l.Consume(t.Context(), tx, limit.Key("k"))
			return err
		})
		if state(err) != "0A000" || !strings.Contains(err.Error(), "does not join") {
			t.Errorf("%s: %v, want a refusal", test.what, err)
		}
	}
	if left := balance(t, l, db, limit.Key("k")).Remaining; left != 10 {
		t.Errorf("%v remain of 10: a refused call took tokens", left)
	}
	// What cannot be seen: a first statement. It is decided at once, and a rollback gives nothing back.
	boom := errors.New("boom")
	err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		if _, err := l.Consume(t.Context(), tx, limit.Key("k")); err != nil {
			return err
		}
		return boom
	})
	if left := balance(t, l, db, limit.Key("k")).Remaining; !errors.Is(err, boom) || left > 9.1 {
		t.Errorf("%v remain of 10, %v; docs/plproxy.md says 9", left, err)
	}
}

func TestTheProxysTableIsRefused(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 1)
	for _, sql := range []string{
		"SELECT * FROM rate_limits",
		"SELECT count(*) FROM rate_limits WHERE name = 'x'",
		"INSERT INTO rate_limits VALUES ('x', 'y', 0, 1, 10, now())",
		"UPDATE rate_limits SET value = 1",
		"DELETE FROM rate_limits WHERE name = 'x'",
		"INSERT INTO rate_limits_unused VALUES ('x', 'y', 0, 1, 10, now())",
		"UPDATE rate_limits_unused SET value = 1 WHERE false",
	} {
		if _, err := db.Exec(t.Context(), sql); state(err) != "0A000" || !strings.Contains(err.Error(), "no rows in a proxy database") {
			t.Errorf("%s: %v, want a refusal", sql, err)
		}
	}
}

// TestHoldsAreRefused: before they take anything.
func TestHoldsAreRefused(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 1)
	l := &ratelimit.Limiter{}
	limit := ratelimit.TokenBucket("held", 10, time.Hour)
	for what, call := range map[string]func() error{
		"Hold": func() error {
			_, err := l.Hold(t.Context(), db, "job", time.Minute, limit.Key("k"))
			return err
		},
		"Settle": func() error {
			_, err := l.Settle(t.Context(), db, "job", limit.Key("k").Count(1))
			return err
		},
		"Release": func() error { return l.Release(t.Context(), db, "job", limit.Key("k")) },
	} {
		if err := call(); state(err) != "0A000" {
			t.Errorf("%s: %v, want 0A000", what, err)
		}
	}
	if left := balance(t, l, db, limit.Key("k")).Remaining; left != 10 {
		t.Errorf("%v are left of 10", left)
	}
}

// TestAWrongPartitionRefuses calls a partition without the proxy, for a key that is not its own.
func TestAWrongPartitionRefuses(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 1)
	l := &ratelimit.Limiter{}
	limit := ratelimit.TokenBucket("wrong", 10, time.Hour)
	_, server := slotOf(t, db, "k")
	for i, p := range shared.partitions {
		direct := pool(t, p.URL(), 2)
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			err := pgx.BeginTxFunc(t.Context(), direct, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				_, err := l.Consume(t.Context(), tx, limit.Key("k"))
				return err
			})
			if own := i == server; own && err != nil || !own && state(err) != "RL004" {
				t.Errorf("partition %d of %d, %s: %v", i, server, level, err)
			}
		}
	}
}

func TestErrorsKeepTheirSQLSTATE(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 1)
	ask := func(sql string, args ...any) error {
		_, err := db.Exec(t.Context(), sql, args...)
		return err
	}
	if err := ask("SELECT _ratelimit_consume('x', 'k', 'NaN', '1 second', 1, NULL, 1, 0)"); state(err) != "22023" {
		t.Errorf("%v, want 22023", err)
	}
	for range 2 {
		_ = ask("SELECT * FROM ratelimit_try('raised', 'k', rate => 1, period => '1 hour')")
	}
	if err := ask("SELECT * FROM ratelimit('raised', 'k', rate => 1, period => '1 hour')"); state(err) != "PT429" {
		t.Errorf("%v, want PT429", err)
	}
	for _, call := range []string{"ratelimit_reserve('reserved', 'k', count => 3, max_reserved => 1", "ratelimit_take('taken', 'k', most => 3"} {
		call += ", rate => 2, period => '1000 hours', kind => 'fixed window')"
		if err := ask("SELECT * FROM " + call); err != nil {
			t.Errorf("%s: %v", call, err)
		}
		if err := ask("SELECT * FROM " + call); state(err) != "PT429" {
			t.Errorf("%s again: %v, want PT429", call, err)
		}
	}
	all := func(first, second string) error {
		return ask(`SELECT ratelimit_all(jsonb_build_array(jsonb_build_object('name', 'all', 'key', $1::text, 'rate', 2, 'period', '1000 hours'),
			jsonb_build_object('name', 'all more', 'key', $2::text, 'rate', 1, 'period', '1000 hours', 'kind', 'fixed window')))`, first, second)
	}
	if err := all("{team}ann", "{team}bob"); err != nil {
		t.Errorf("ratelimit_all of one slot: %v", err)
	}
	if err := all("{team}ann", "{team}bob"); state(err) != "PT429" {
		t.Errorf("ratelimit_all again: %v, want PT429", err)
	}
	if left := scan(t, db, "SELECT round(remaining) FROM ratelimit_keys('all', 2, '1000 hours')"); left != 1 {
		t.Errorf("after a grant and a denial of two limits, the first has %v left, want 1", left)
	}
	if err := all("ann", "bob"); state(err) != "0A000" {
		t.Errorf("ratelimit_all of two slots: %v, want 0A000", err)
	}
	if err := ask("SELECT _ratelimit_consume('raised', 'k', 1, '1 hour', 1, NULL, 1, 0, or_raise => true)"); state(err) != "PT429" {
		t.Errorf("%v, want PT429", err)
	}
	// A serialization failure, from a trigger on every partition.
	for _, p := range shared.partitions {
		if err := execSQL(t.Context(), p.URL(), `
			CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE serialization_failure; END $$;
			CREATE TRIGGER fail BEFORE INSERT ON rate_limits FOR EACH ROW WHEN (NEW.name = 'failing') EXECUTE FUNCTION fail()`); err != nil {
			t.Fatal(err)
		}
	}
	limit := ratelimit.TokenBucket("failing", 1, time.Hour)
	if _, err := (&ratelimit.Limiter{}).Consume(t.Context(), db, limit.Key("k")); state(err) != "40001" || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("%v, want 40001", err)
	}
}

// TestSettingsOfASessionChangeNothing: PL/Proxy sends values as text.
func TestSettingsOfASessionChangeNothing(t *testing.T) {
	config, err := pgxpool.ParseConfig(shared.proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams = map[string]string{
		"datestyle": "SQL, DMY", "intervalstyle": "sql_standard", "extra_float_digits": "-15", "timezone": "Asia/Kolkata",
	}
	odd, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(odd.Close)
	now := noon.Add(123456 * time.Microsecond)
	l := stopped(&now)
	plain := pool(t, plainURL(shared.proxy), 1)
	limit := ratelimit.FixedWindow("odd settings", 1.0/3, 25*time.Hour+time.Microsecond, ratelimit.Capacity(1e15/3), ratelimit.Start(noon.Add(-time.Minute)))
	bucket := ratelimit.TokenBucket("odd bucket", 1.0/3, 25*time.Hour, ratelimit.Capacity(1e15/3))
	coalescer := &ratelimit.Coalescer{Pool: odd}
	t.Cleanup(coalescer.Close)
	for range 3 {
		got, err := l.Consume(t.Context(), odd, limit.Key("k").Count(1.0/7))
		want, wantErr := l.Consume(t.Context(), plain, limit.Key("k").Count(1.0/7))
		if err != nil || wantErr != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v, %v\nwant %+v, %v", got, err, want, wantErr)
		}
		reserved, err := l.Reserve(t.Context(), odd, bucket.Key("k").Count(1.0/7))
		wanted, wantErr := l.Reserve(t.Context(), plain, bucket.Key("k").Count(1.0/7))
		if err != nil || wantErr != nil || !reflect.DeepEqual(reserved, wanted) {
			t.Fatalf("%+v, %v\nwant %+v, %v", reserved, err, wanted, wantErr)
		}
		now = now.Add(31*24*time.Hour + time.Microsecond)
	}
}

func TestSweepKeysAndOverrides(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 4)
	now := noon
	l := stopped(&now)
	limit := ratelimit.TokenBucket("swept", 10, time.Minute)
	const n = 3600 // so that each partition has more than one batch
	if _, err := db.Exec(t.Context(), `SELECT count(*) FROM generate_series(1, $1) AS i, _ratelimit_consume('swept', 'k' || i, 10, '1 minute', 10, NULL, 1, 0, $2)`, n, now); err != nil {
		t.Fatal(err)
	}
	var used, mine int
	if err := db.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE remaining = 9) FROM _ratelimit_keys('swept', 10, '1 minute', 'token bucket', NULL, NULL, NULL, NULL, NULL, $1)`, now).Scan(&used, &mine); err != nil {
		t.Fatal(err)
	}
	if used != n || mine != n {
		t.Errorf("ratelimit_keys has %d keys, %d with 9 tokens, want %d", used, mine, n)
	}
	if deleted, err := l.Sweep(t.Context(), db, limit); err != nil || deleted != 0 {
		t.Errorf("%d rows swept, %v, want none: they are not full", deleted, err)
	}
	now = now.Add(2 * time.Hour)
	if _, err := l.Consume(t.Context(), db, limit.Key("k17")); err != nil {
		t.Fatal(err)
	}
	coalescer := &ratelimit.Coalescer{Pool: db}
	t.Cleanup(coalescer.Close)
	if deleted, err := l.Sweep(t.Context(), coalescer, limit); err != nil || deleted != n-1 {
		t.Errorf("%d rows swept, %v, want %d", deleted, err, n-1)
	}

	// By name: the largest capacity and the slowest rate of a definition and its overrides, as the engine looks them up.
	sweptToo := ratelimit.TokenBucket("swept by name", 10, time.Minute)
	for _, on := range []*pgxpool.Pool{db, pool(t, plainURL(shared.proxy), 1)} {
		if err := ratelimit.Publish(t.Context(), on, "sweeping", sweptToo); err != nil {
			t.Fatal(err)
		}
		if _, err := on.Exec(t.Context(), "SELECT ratelimit_override('swept by name', 'vip', capacity => 100)"); err != nil {
			t.Fatal(err)
		}
		old := time.Now().Add(-5 * time.Minute).Add(-time.Hour) // full by the definition, not by the override
		if _, err := on.Exec(t.Context(), `SELECT _ratelimit_consume('swept by name', 'k' || i, 10, '1 minute', 100, NULL, 60 + i, 0, $1) FROM generate_series(-30, 30) AS i`, old); err != nil {
			t.Fatal(err)
		}
	}
	want := scan(t, pool(t, plainURL(shared.proxy), 1), "SELECT deleted FROM ratelimit_sweep('swept by name')")
	if got := scan(t, db, "SELECT deleted FROM ratelimit_sweep('swept by name')"); got != want || got == 0 || got == 61 {
		t.Errorf("%d rows swept by name, %d on a plain server, of 61", got, want)
	}
	if _, err := db.Exec(t.Context(), "SELECT ratelimit_sweep('nobody published this')"); state(err) != "22023" {
		t.Errorf("a sweep of an unknown limit: %v, want 22023", err)
	}

	// Overrides, and definitions by name.
	overridden := &ratelimit.Limiter{Overrides: &ratelimit.Overrides{DB: db}}
	signUps := ratelimit.TokenBucket("sign-ups", 3, 1000*time.Hour)
	if err := ratelimit.Publish(t.Context(), db, "plproxy_test", signUps); err != nil {
		t.Fatal(err)
	}
	if err := overridden.Overrides.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := overridden.Consume(t.Context(), db, signUps.Key("acme")); err != nil {
			t.Fatal(err)
		}
	}
	var id int64
	if err := db.QueryRow(t.Context(), "SELECT ratelimit_override('sign-ups', 'acme', rate => 5)").Scan(&id); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it adds once
		var added float64
		if err := db.QueryRow(t.Context(), "SELECT ratelimit_add($1)", id).Scan(&added); err != nil || added != 2 {
			t.Errorf("%v tokens added, %v, want 2", added, err)
		}
	}
	// The proxy may fail after the partition has added. Then the note is missing here.
	if _, err := db.Exec(t.Context(), "UPDATE rate_limit_overrides SET added = NULL WHERE id = $1", id); err != nil {
		t.Fatal(err)
	}
	var again float64
	if err := db.QueryRow(t.Context(), "SELECT ratelimit_add($1)", id).Scan(&again); err != nil || again != 2 {
		t.Errorf("%v tokens added, %v, want 2 as before", again, err)
	}
	if err := overridden.Overrides.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	var remaining float64
	if err := db.QueryRow(t.Context(), "SELECT remaining FROM ratelimit_keys('sign-ups') WHERE key = 'acme'").Scan(&remaining); err != nil || remaining < 2 || remaining > 2.1 {
		t.Errorf("ratelimit_keys by name: %v remain, %v, want 2", remaining, err)
	}
	if err := db.QueryRow(t.Context(), "SELECT remaining FROM ratelimit('sign-ups', 'acme')").Scan(&remaining); err != nil || remaining < 1 || remaining > 1.1 {
		t.Errorf("ratelimit by name: %v remain, %v, want 1", remaining, err)
	}
	if _, err := db.Exec(t.Context(), "SELECT ratelimit_block('sign-ups', 'acme')"); err != nil {
		t.Fatal(err)
	}
	if err := overridden.Overrides.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := overridden.Consume(t.Context(), db, signUps.Key("acme")); !errors.Is(err, ratelimit.ErrDenied) {
		t.Errorf("%v, want a denial by the block", err)
	}
}

func TestTheMiddlewareIsUnchanged(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 2)
	coalescer := &ratelimit.Coalescer{Pool: db}
	t.Cleanup(coalescer.Close)
	for name, handle := range map[string]ratelimit.DB{"pool": db, "coalescer": coalescer} {
		now := noon
		m := httplimit.Middleware{Limiter: stopped(&now), DB: handle, Requests: func(*http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{ratelimit.TokenBucket("http "+name, 2, time.Minute).Key("ann")}, nil
		}}
		h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
		for i, want := range []int{204, 204, 429} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
			if w.Code != want || want == 429 && w.Header().Get("Retry-After") != "30" {
				t.Errorf("%s: call %d has status %d, Retry-After %q, want %d", name, i, w.Code, w.Header().Get("Retry-After"), want)
			}
		}
	}
}

func TestShardsAndWait(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 8)
	l := &ratelimit.Limiter{}
	sharded := ratelimit.TokenBucket("sharded", 100, 1000*time.Hour, ratelimit.Shards(5))
	var granted atomic.Int64
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 20 {
				switch _, err := l.Consume(t.Context(), db, sharded.Global()); {
				case err == nil:
					granted.Add(1)
				case !errors.Is(err, ratelimit.ErrDenied):
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if granted.Load() != 100 {
		t.Errorf("%d granted of 100 by 5 shards", granted.Load())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	fast := ratelimit.TokenBucket("waited for", 20, time.Second, ratelimit.Capacity(1))
	began := time.Now()
	for range 4 {
		if _, err := l.Wait(ctx, db, fast.Key("k")); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took < 100*time.Millisecond {
		t.Errorf("four waits for one token in 50 ms each took %v", took)
	}
}

// TestAMigrationOfTheProxyGrantsNothing puts back the engine's functions, as a migration does, and then runs proxy.sql again.
func TestAMigrationOfTheProxyGrantsNothing(t *testing.T) {
	db, plain := pool(t, shared.proxy.URL(), 1), pool(t, plainURL(shared.proxy), 1)
	l := &ratelimit.Limiter{}
	limit := ratelimit.TokenBucket("migrated", 3, time.Hour)
	coalescer := &ratelimit.Coalescer{Pool: db}
	t.Cleanup(coalescer.Close)
	if _, err := l.Consume(t.Context(), db, limit.Key("k")); err != nil {
		t.Fatal(err)
	}
	var functions string
	if err := plain.QueryRow(t.Context(), `
		SELECT string_agg(pg_get_functiondef(p.oid), ';')
		  FROM pg_proc AS p WHERE p.pronamespace = 'public'::regnamespace AND p.proname LIKE '%ratelimit%' AND p.prokind = 'f'`).Scan(&functions); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(t.Context(), functions, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	for name, handle := range map[string]ratelimit.DB{"pool": db, "coalescer": coalescer} {
		for what, call := range map[string]func() (ratelimit.Result, error){
			"Consume": func() (ratelimit.Result, error) { return l.Consume(t.Context(), handle, limit.Key("k")) },
			"several": func() (ratelimit.Result, error) {
				return l.Consume(t.Context(), handle, limit.Key("k"), limit.Key("j"))
			},
			"Check": func() (ratelimit.Result, error) { return l.Check(t.Context(), handle, limit.Key("k")) },
			"Balance": func() (ratelimit.Result, error) {
				_, err := l.Balance(t.Context(), handle, limit.Key("k"))
				return ratelimit.Result{}, err
			},
			"Take": func() (ratelimit.Result, error) {
				_, result, err := l.Take(t.Context(), handle, 2, limit.Key("k"))
				return result, err
			},
		} {
			if r, err := call(); r.OK || state(err) != "0A000" {
				t.Errorf("%s on the %s: %+v, %v, want a refusal", what, name, r, err)
			}
		}
	}
	for range 2 { // it can be run again
		if err := execSQL(t.Context(), shared.proxy.URL(), plproxy.Proxy); err != nil {
			t.Fatal(err)
		}
	}
	if r, err := l.Consume(t.Context(), db, limit.Key("k")); err != nil || r.Remaining < 1 || r.Remaining > 1.1 {
		t.Errorf("%+v, %v, want a grant that leaves 1", r, err)
	}
	var keys int
	if err := db.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit_keys('migrated', 3, '1 hour')").Scan(&keys); err != nil || keys != 1 {
		t.Errorf("%d keys, %v", keys, err)
	}
}

// TestTheProxyHasTheEnginesFunctions: each has the arguments, defaults and result of the engine. Only those that read rate_limits have another
// body.
func TestTheProxyHasTheEnginesFunctions(t *testing.T) {
	read := func(url string) (map[string][2]string, []string) {
		rows, err := pool(t, url, 1).Query(t.Context(), `
			SELECT format('%s(%s) %s', p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)), p.proname::text,
			       md5(pg_get_functiondef(p.oid)), p.prosrc ~ '(FROM|JOIN|UPDATE|INTO) "public"\.rate_limits\M'
			  FROM pg_proc AS p WHERE p.pronamespace = 'public'::regnamespace AND p.proname ~ '^_?ratelimit' AND p.prokind = 'f'`)
		if err != nil {
			t.Fatal(err)
		}
		functions := map[string][2]string{}
		var reading []string
		for rows.Next() {
			var signature, name, body string
			var reads bool
			if err := rows.Scan(&signature, &name, &body, &reads); err != nil {
				t.Fatal(err)
			}
			if functions[signature] = [2]string{name, body}; reads {
				reading = append(reading, name)
			}
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		return functions, reading
	}
	engine, reading := read(plainURL(shared.proxy))
	proxy, still := read(shared.proxy.URL())
	if len(engine) < 80 || len(reading) < 14 || len(still) != 6 { // those that migrations/plproxy has as refused
		t.Errorf("%d functions, of which these read the table: %v; on the proxy: %v", len(engine), reading, still)
	}
	for signature, f := range engine {
		other, found := proxy[signature]
		replaced := slices.Contains(reading, f[0]) && !slices.Contains(still, f[0]) || f[0] == "_ratelimit_hold" || f[0] == "_ratelimit_each" // which take by others: refused, and decided by the partition
		if !found || (other[1] != f[1]) != replaced {
			t.Errorf("%s: on the proxy: %v, with another body: %v, want %v", signature, found, other[1] != f[1], replaced)
		}
	}
	for signature, f := range proxy {
		if _, found := engine[signature]; !found && f[0] != "ratelimit_add_servers" {
			t.Errorf("only the proxy has %s", signature)
		}
	}
	// These call the engine with its arguments one by one: on one partition after the slot, on several after slots and parts.
	calling := scan(t, pool(t, shared.proxy.URL(), 1), `
		SELECT count(*) FROM pg_proc AS p JOIN pg_proc AS e ON e.pronamespace = p.pronamespace AND e.proname = replace(p.proname, '_plproxy', '_ratelimit')
		 WHERE p.proname IN ('_plproxy_consume_keys', '_plproxy_coalesce') AND p.pronargs = e.pronargs + CASE p.proargtypes[0] WHEN 'integer'::regtype THEN 1 ELSE 2 END`)
	if calling != 4 {
		t.Errorf("%d of 4 functions pass on all arguments of the engine", calling)
	}
}
