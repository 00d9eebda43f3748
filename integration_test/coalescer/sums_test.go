package coalescer_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// Equal calls for one key become one call of ratelimit._consume, unless only some of them can be granted.
func TestCoalescerAsksForTheSum(t *testing.T) {
	t.Parallel()
	pool, s := harness.Traced(t, harness.NewPool(t, 2), 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limit, small := harness.Slow("limit", 100), harness.Slow("small", 50)
	for i, batch := range []struct {
		request        ratelimit.Request
		calls, granted int
		sums, batches  int // the statements
	}{
		{limit.Key("k"), 60, 60, 1, 0},
		{limit.Key("k").Count(4), 20, 10, 1, 1}, // 40 are there
		{limit.Key("k").Count(4), 20, 0, 0, 1},  // there was enough for some
		{limit.Key("k"), 20, 0, 1, 0},
		{limit.Key("k").Count(0), 20, 20, 1, 0},
		{small.Key("k"), 50, 50, 1, 0},
		{small.Key("k"), 51, 0, 0, 1}, // more than it can hold
	} {
		requests := slices.Repeat([]ratelimit.Request{batch.request}, batch.calls)
		expectStatements(t, i, coalescer, pool, s, requests, 0, func(call int) bool { return call < batch.granted },
			map[string]int{"ratelimit._wire_consume(": batch.sums, "ratelimit._coalesce(": batch.batches})
	}
}

// Several keys of one token bucket are decided by their sums. Calls that this does not decide go to ratelimit._coalesce;
// the others get their answers at once.
func TestCoalescerAsksSeveralKeysForTheirSums(t *testing.T) {
	t.Parallel()
	pool, s := harness.Traced(t, harness.NewPool(t, 2), 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limit, other := harness.Slow("limit", 20), harness.Slow("other", 20)
	window := ratelimit.FixedWindow("window", 20, 1000*time.Hour)
	a, b, c := limit.Key("a"), limit.Key("b"), limit.Key("c")
	many := func(of ratelimit.Limit, keys int, parts ...string) (requests []ratelimit.Request) {
		for i := range keys {
			requests = append(requests, of.Key(append(parts, fmt.Sprint(i))...))
		}
		return requests
	}
	for i, batch := range []struct {
		requests []ratelimit.Request
		denied   []int
		sums     int
		batches  int
		reserved int // of the last calls
	}{
		{many(limit, 20), nil, 1, 1, 0},        // no rows yet
		{many(limit, 20, "new"), nil, 0, 1, 0}, // the last statement found no rows
		{many(limit, 20, "new too"), nil, 0, 1, 0},
		{many(limit, 20), nil, 0, 1, 0},
		{many(limit, 20), nil, 1, 0, 0},                                                                 // all rows exist
		{append(many(limit, 19), a), nil, 1, 1, 0},                                                      // all but one
		{append(many(limit, 19), b.Count(19), c.Count(20)), nil, 1, 1, 0},                               // all but two
		{append(many(limit, 19), c, b, a.Count(20)), []int{19, 21}, 1, 0, 0},                            // denials
		{append(many(limit, 12), a.Count(15), a.Count(15)), []int{13}, 0, 1, 0},                         // more than it can hold
		{append(many(limit, 12), a.Count(3), a.Count(3)), []int{13}, 1, 1, 0},                           // enough for one of them
		{append(many(limit, 12), limit.Key("1").Count(0.5)), nil, 0, 1, 0},                              // a fraction
		{append(many(limit, 12), other.Key("1")), nil, 0, 1, 0},                                         // two limits
		{append(many(limit, 12), limit.Key("12")), nil, 0, 1, 1},                                        // a reservation
		{[]ratelimit.Request{window.Key("a"), window.Key("b")}, nil, 0, 1, 0},                           // a fixed window
		{append(many(limit, 12), ratelimit.TokenBucket("limit", 7, time.Hour).Key("12")), nil, 0, 1, 0}, // two definitions
	} {
		expectStatements(t, i, coalescer, pool, s, batch.requests, batch.reserved, func(call int) bool { return !slices.Contains(batch.denied, call) },
			map[string]int{"ratelimit._consume_keys(": batch.sums, "ratelimit._coalesce(": batch.batches})
	}
}

// A sum that conflicts has decided nothing. One statement decides all its calls again, not one for each.
func TestCoalescerSendsASumThatConflictsAsABatch(t *testing.T) {
	t.Parallel()
	schema := harness.NewPool(t, 2)
	harness.MustExec(t, schema, `CREATE SEQUENCE written;
		CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('written') = 1 THEN RAISE SQLSTATE '40001'; END IF; RETURN NEW; END $$;
		CREATE TRIGGER conflict BEFORE INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW WHEN (NEW.name = 'limit') EXECUTE FUNCTION conflict()`)
	pool, s := harness.Traced(t, schema, 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	expectStatements(t, 0, coalescer, pool, s, slices.Repeat([]ratelimit.Request{harness.Slow("limit", 100).Key("k")}, 20), 0, func(int) bool { return true },
		map[string]int{"ratelimit._wire_consume(": 1, "ratelimit._coalesce(": 1})
}

// expectStatements lets calls arrive together. The last of them reserve. It compares which of them are granted, and the number of statements of each
// kind.
func expectStatements(t *testing.T, batch int, coalescer *ratelimit.Coalescer, pool *pgxpool.Pool, s *harness.Statements, requests []ratelimit.Request, reserved int,
	granted func(call int) bool, want map[string]int) {
	t.Helper()
	release := harness.HoldFlights(t, coalescer, pool)
	before := map[string]int{}
	for function := range want {
		before[function] = s.Count(function)
	}
	consumed := len(requests) - reserved
	f := harness.Enqueue(t, coalescer, nil, requests[:consumed]...)
	for _, request := range requests[consumed:] {
		f.Reserve(t.Context(), coalescer, request)
	}
	release()
	f.Wg.Wait()
	for call, err := range f.Errs {
		if want := granted(call); (err == nil) != want || err != nil && !harness.Denied(err) {
			t.Errorf("batch %d, call %d: %v, want granted %v", batch, call, err, want)
		}
	}
	for function, n := range want {
		if got := s.Count(function) - before[function]; got != n {
			t.Errorf("batch %d: %d calls of %s…), want %d", batch, got, function, n)
		}
	}
}

// ratelimit._consume_keys decides each key separately, to the last token. A clock that was set back does not make a row
// older.
func TestConsumeKeysDecidesEachKeyByItself(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	if _, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits VALUES ('limit', 'a', 0, 1, 2, '2026-07-01 12:00Z'), ('limit', 'b', 0, 1, 1, '2026-07-01 12:00Z'),
		('limit', 'd', 0, 2, 9, '2026-07-01 12:00Z'), ('limit', 'd', 1, 2, 9, '2026-07-01 12:00Z'), ('limit', 'e', 0, 1, 9, '2026-07-01 09:00Z'),
		('limit', 'f', 0, 1, 0, '2026-07-01 09:00Z'), ('limit', 'saved', 0, 1, 20, '2026-07-01 12:00Z')`); err != nil {
		t.Fatal(err)
	}
	var early int
	var ord []int32
	var value []float64
	var ts []time.Time
	err := pool.QueryRow(t.Context(), `SELECT early, ord, value, ts FROM ratelimit._consume_keys('limit', '{a,b,c,d,e,f}', 1, '1 hour', 10, '{2,2,2,2,2,2}',
		'2026-07-01 11:00Z')`).Scan(&early, &ord, &value, &ts)
	if err != nil {
		t.Fatal(err)
	}
	for i := range ts {
		ts[i] = ts[i].UTC()
	}
	eleven, noon := time.Date(2026, 7, 1, 11, 0, 0, 0, time.UTC), time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	if early != 3 || !slices.Equal(ord, []int32{1, 5, 6, 2}) || !slices.Equal(value, []float64{0, 8, 0, 1}) || !slices.Equal(ts, []time.Time{noon, eleven, eleven, noon}) {
		t.Errorf("%d of %v granted, leaving %v at %v", early, ord, value, ts)
	}
	// The capacity was larger before.
	err = pool.QueryRow(t.Context(), "SELECT early, ord FROM ratelimit._consume_keys('limit', '{saved}', 1, '1 hour', 10, '{11}', '2026-07-01 11:00Z')").Scan(&early, &ord)
	if err != nil || early != 0 || len(ord) != 1 {
		t.Errorf("%d of %v granted, %v, want one denial", early, ord, err)
	}
}

func TestConsumeKeysRefusesHostileArguments(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	if _, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits VALUES ('limit', 'k', 0, 1, 10, '2026-07-01 12:00Z')`); err != nil {
		t.Fatal(err)
	}
	numbers := []string{"NULL", "'NaN'", "-1", "'-Infinity'", "'Infinity'", "1e16", "1e300", "-1e-300"}
	valid := []string{"'limit'", "ARRAY['k']", "10", "'1 min'", "10", "ARRAY[1]::float8[]", "NULL"}
	for i, hostile := range [][]string{
		nil, nil, numbers, {"NULL"}, numbers, {"NULL"}, {"'infinity'", "'-infinity'"},
	} {
		if i == 5 {
			for _, number := range numbers {
				hostile = append(hostile, "ARRAY["+number+"]::float8[]")
			}
		}
		for _, value := range hostile {
			args := slices.Clone(valid)
			args[i] = value
			sql := "SELECT ratelimit._consume_keys(" + strings.Join(args, ", ") + ")"
			if _, err := pool.Exec(t.Context(), sql); harness.SQLState(err) != "22023" {
				t.Errorf("%s: %v, want SQLSTATE 22023", sql, err)
			}
		}
	}
	// Missing arguments decide nothing.
	for _, args := range []string{"NULL, 10, '1 min', 10, '{1}'", "'{NULL}', 10, '1 min', 10, '{1}'", "'{k}', 10, '1 min', 10, '{}'"} {
		var decided int
		if err := pool.QueryRow(t.Context(), "SELECT cardinality(ord) FROM ratelimit._consume_keys('limit', "+args+")").Scan(&decided); err != nil || decided != 0 {
			t.Errorf("%s: %d decided, %v", args, decided, err)
		}
	}
	var value float64
	if err := pool.QueryRow(t.Context(), `SELECT value FROM ratelimit.limits`).Scan(&value); err != nil || value != 10 {
		t.Errorf("%v are left, %v", value, err)
	}
}
