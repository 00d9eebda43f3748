package ratelimit

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/shardpick"
)

// asked is a database that records the queries of sqlc's code.
type asked struct {
	dbsqlc.DBTX
	sql  string
	args []any
}

func (a *asked) QueryRow(_ context.Context, sql string, args ...any) pgx.Row {
	a.sql, a.args = sql, args
	return a
}

func (a *asked) Scan(...any) error { return errors.New("asked") }

// The arguments of a statement have no names. sqlc's code, in which they have names, must send the same arguments.
func TestStatementsAreWhatSqlcSends(t *testing.T) {
	t.Parallel()
	ctx := shardpick.With(t.Context(), func(int) (int, int) { return 3, 1 })
	noon, morning := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC), time.Date(2026, 1, 2, 8, 0, 0, 0, time.UTC)
	limiter := Limiter{Clock: func() time.Time { return noon }}
	bucket := TokenBucket("bucket", 2, time.Second, Capacity(7), MaxReserved(5))
	window := FixedWindow("window", 3, time.Minute, Capacity(8), Start(morning.Add(time.Second)))
	shards := FixedWindow("z shards", 4, time.Hour, Capacity(9), Shards(6), Start(morning))
	slow := TokenBucket("slow", 4, time.Hour, Capacity(9), Shards(6))
	day := CalendarWindow("day", 5, Day)
	var days []pgtype.Timestamptz // 14 before the present one, one more for days that a zone skipped, two after it, and one more
	for d := -15; d <= 3; d++ {
		days = append(days, pgtype.Timestamptz{Time: time.Date(2026, 1, 2+d, 0, 0, 0, 0, time.UTC), Valid: true})
	}
	var longDays []pgtype.Timestamptz // also those in which a debt is refilled, 100 at most
	for d := -103; d <= 3; d++ {
		longDays = append(longDays, pgtype.Timestamptz{Time: time.Date(2026, 1, 2+d, 0, 0, 0, 0, time.UTC), Valid: true})
	}
	n := int32(len(longDays))
	begun := start(window.forKey("bob"))
	hour := start(shards.forKey("cid")).Time
	lowest := func(capacity, floor float64) float64 { return algebra.Limit{Capacity: capacity}.Lowest(floor) }
	bucketAndWindow := []Request{window.Key("bob").Count(6), bucket.Key("ann").Count(1.5)}
	all := []Request{shards.Key("cid"), bucketAndWindow[0], bucketAndWindow[1]}
	receipt := Receipt(`{"v":1,"at":"2026-01-02T08:00:00Z","runAt":"2026-01-02T12:00:00Z","taken":[` +
		`{"limit":"window","key":"bob","count":7,"held":1,"rows":1,"shards":1},{"limit":"bucket","key":"ann","count":3,"refunded":1,"held":-2,"rows":1,"shards":4}]}`)

	for name, tt := range map[string]struct {
		verb     verb
		requests []Request
		orRaise  bool
		sqlc     func(q *dbsqlc.Queries) error
	}{
		"one": {verbReserve, []Request{bucket.Key("ann").Count(1.5)}, true, func(q *dbsqlc.Queries) error {
			_, err := q.Consume(ctx, dbsqlc.ConsumeParams{
				Name: "bucket", Key: "ann", Rate: 2, Period: time.Second, Capacity: 7, Count: 1.5, Floor: lowest(7, -5), Now: &noon, OrRaise: true,
			})
			return err
		}},
		"one of a window": {verbConsume, []Request{window.Key("bob")}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Consume(ctx, dbsqlc.ConsumeParams{
				Name: "window", Key: "bob", Rate: 3, Period: time.Minute, Capacity: 8, Start: &begun.Time, Count: 1, Floor: lowest(8, 0), Now: &noon,
			})
			return err
		}},
		"one of a calendar": {verbConsume, []Request{day.Key("dan")}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Consume(ctx, dbsqlc.ConsumeParams{
				Name: "day", Key: "dan", Rate: 5, Period: 0, Capacity: 5, Start: &days[0].Time, Count: 1, Floor: lowest(5, 0), Now: &noon, Windows: days,
			})
			return err
		}},
		"a calendar beside a bucket": {verbConsume, []Request{day.Key("dan"), bucket.Key("ann")}, false, func(q *dbsqlc.Queries) error {
			_, err := q.ConsumeSeveral(ctx, dbsqlc.ConsumeSeveralParams{
				Names: []string{"bucket", "day"}, Keys: []string{"ann", "dan"},
				Rates: []float64{2, 5}, Periods: []time.Duration{time.Second, 0}, Capacities: []float64{7, 5},
				Starts: []pgtype.Timestamptz{{}, days[0]}, Counts: []float64{1, 1}, Floors: []float64{lowest(7, 0), lowest(5, 0)},
				Now: &noon, Windows: days, Firsts: []int32{0, 1}, Lasts: []int32{0, int32(len(days))},
			})
			return err
		}},
		"a calendar beside shards": {verbConsume, []Request{shards.Key("cid"), day.Key("dan")}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Apply(ctx, dbsqlc.ApplyParams{
				Op: "consume", Names: []string{"day", "z shards"}, Keys: []string{"dan", "cid"},
				Rates: []float64{5, 4}, Periods: []time.Duration{0, time.Hour}, Capacities: []float64{5, 9},
				Starts: []pgtype.Timestamptz{days[0], {Time: hour, Valid: true}}, Shards: []int32{1, 6}, Counts: []float64{1, 1}, Floors: []float64{lowest(5, 0), lowest(9, 0)},
				ShardA: []int32{0, 3}, ShardB: []int32{0, 1}, Now: &noon, Windows: days, Firsts: []int32{1, 0}, Lasts: []int32{int32(len(days)), 0},
			})
			return err
		}},
		"one with shards": {verbConsume, []Request{shards.Key("cid").Count(2)}, true, func(q *dbsqlc.Queries) error {
			_, err := q.ConsumeSharded(ctx, dbsqlc.ConsumeShardedParams{
				Name: "z shards", Key: "cid", Rate: 4, Period: time.Hour, Capacity: 9, Start: &hour, Shards: 6, Count: 2, Floor: lowest(9, 0),
				ShardA: 3, ShardB: 1, Now: &noon, OrRaise: true,
			})
			return err
		}},
		"several": {verbConsume, bucketAndWindow, true, func(q *dbsqlc.Queries) error {
			_, err := q.ConsumeSeveral(ctx, dbsqlc.ConsumeSeveralParams{
				Names: []string{"bucket", "window"}, Keys: []string{"ann", "bob"},
				Rates: []float64{2, 3}, Periods: []time.Duration{time.Second, time.Minute}, Capacities: []float64{7, 8},
				Starts: []pgtype.Timestamptz{{}, begun}, Counts: []float64{1.5, 6}, Floors: []float64{lowest(7, 0), lowest(8, 0)}, Now: &noon, OrRaise: true,
			})
			return err
		}},
		"several that reserve": {verbReserve, all, true, func(q *dbsqlc.Queries) error {
			_, err := q.Apply(ctx, dbsqlc.ApplyParams{
				Op: "consume", Names: []string{"bucket", "window", "z shards"}, Keys: []string{"ann", "bob", "cid"},
				Rates: []float64{2, 3, 4}, Periods: []time.Duration{time.Second, time.Minute, time.Hour}, Capacities: []float64{7, 8, 9},
				Starts: []pgtype.Timestamptz{{}, begun, {Time: hour, Valid: true}}, Shards: []int32{1, 1, 6},
				Counts: []float64{1.5, 6, 1}, Floors: []float64{lowest(7, -5), -1e300, -1e300}, ShardA: []int32{0, 0, 3}, ShardB: []int32{0, 0, 1},
				Reserve: true, Now: &noon, OrRaise: true,
			})
			return err
		}},
		"take": {verbTake, []Request{window.Key("bob").Count(9), shards.Key("cid").Count(9)}, true, func(q *dbsqlc.Queries) error {
			_, err := q.Apply(ctx, dbsqlc.ApplyParams{
				Op: "take", Names: []string{"window", "z shards"}, Keys: []string{"bob", "cid"},
				Rates: []float64{3, 4}, Periods: []time.Duration{time.Minute, time.Hour}, Capacities: []float64{8, 9},
				Starts: []pgtype.Timestamptz{begun, {Time: hour, Valid: true}}, Shards: []int32{1, 6},
				Counts: []float64{1, 1}, Floors: []float64{lowest(8, 0), lowest(9, 0)}, ShardA: []int32{0, 3}, ShardB: []int32{0, 1},
				Now: &noon, OrRaise: true, Mosts: []float64{9, 9},
			})
			return err
		}},
		"refund": {verbRefund, bucketAndWindow, false, func(q *dbsqlc.Queries) error {
			_, err := q.Refund(ctx, dbsqlc.RefundParams{
				Names: []string{"bucket", "window"}, Keys: []string{"ann", "bob"},
				Rates: []float64{2, 3}, Periods: []time.Duration{time.Second, time.Minute}, Capacities: []float64{7, 8},
				Starts: []pgtype.Timestamptz{{}, begun}, Counts: []float64{1.5, 6}, Taken: []float64{3, 7}, Held: []float64{-2, 1}, Parts: []float64{0.25, 1},
				TakenAt: pgtype.Timestamptz{Time: morning, Valid: true}, RunAt: pgtype.Timestamptz{Time: noon, Valid: true}, Now: &noon,
			})
			return err
		}},
		"one that reserves": {verbReserve, []Request{shards.Key("cid").Count(2)}, false, func(q *dbsqlc.Queries) error {
			_, err := q.ApplyOne(ctx, dbsqlc.ApplyOneParams{
				Op: "consume", Name: "z shards", Key: "cid", Rates: []float64{4}, Periods: []time.Duration{time.Hour}, Capacities: []float64{9},
				Starts: []pgtype.Timestamptz{{Time: hour, Valid: true}}, Shards: []int32{6}, Counts: []float64{2}, Floors: []float64{-1e300},
				ShardA: []int32{3}, ShardB: []int32{1}, Reserve: true, Now: &noon,
			})
			return err
		}},
		"refund of one": {verbRefund, bucketAndWindow[1:], false, func(q *dbsqlc.Queries) error {
			_, err := q.RefundOne(ctx, dbsqlc.RefundOneParams{
				Name: "bucket", Key: "ann", Rates: []float64{2}, Periods: []time.Duration{time.Second}, Capacities: []float64{7},
				Starts: []pgtype.Timestamptz{{}}, Counts: []float64{1.5}, Taken: []float64{3}, Held: []float64{-2}, Parts: []float64{0.25},
				TakenAt: pgtype.Timestamptz{Time: morning, Valid: true}, RunAt: pgtype.Timestamptz{Time: noon, Valid: true}, Now: &noon,
			})
			return err
		}},
		"move": {verbMove, []Request{shards.Key("cid"), FixedWindow("hours", 3, time.Hour, Capacity(8), MaxReserved(7), Shards(2), Start(morning)).Key("cid")}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Move(ctx, dbsqlc.MoveParams{
				Names: []string{"z shards", "hours"}, Keys: []string{"cid", "cid"},
				Rates: []float64{4, 3}, Periods: []time.Duration{time.Hour, time.Hour}, Capacities: []float64{9, 8},
				Starts: []pgtype.Timestamptz{{Time: hour, Valid: true}, {Time: hour, Valid: true}}, Shards: []int32{6, 2}, Floor: -7, Now: &noon,
			})
			return err
		}},
		"move of calendars": {verbMove, []Request{day.Key("dan"), CalendarWindow("days", 500, Day, MaxReserved(50_001)).Key("dan")}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Move(ctx, dbsqlc.MoveParams{
				Names: []string{"day", "days"}, Keys: []string{"dan", "dan"},
				Rates: []float64{5, 500}, Periods: []time.Duration{48 * time.Hour, 48 * time.Hour}, Capacities: []float64{5, 500},
				Starts: []pgtype.Timestamptz{longDays[0], longDays[0]}, Shards: []int32{1, 1}, Floor: -50_000, Now: &noon,
				Windows: slices.Concat(longDays, longDays), Firsts: []int32{1, n + 1}, Lasts: []int32{n, 2 * n},
			})
			return err
		}},
		"pause": {verbPause, []Request{slow.Key("cid").Count(5), bucketAndWindow[1]}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Pause(ctx, dbsqlc.PauseParams{
				Names: []string{"bucket", "slow"}, Keys: []string{"ann", "cid"},
				Rates: []float64{2, 4}, Periods: []time.Duration{time.Second, time.Hour}, Capacities: []float64{7, 9},
				Shards: []int32{1, 6}, Mosts: []float64{1.5, 5}, Now: &noon, Lasts: time.Hour,
			})
			return err
		}},
		"resume": {verbResume, []Request{slow.Key("cid"), bucketAndWindow[1].Count(1)}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Resume(ctx, dbsqlc.ResumeParams{Names: []string{"bucket", "slow"}, Keys: []string{"ann", "cid"}, Now: &noon})
			return err
		}},
		"reset": {verbReset, []Request{bucketAndWindow[0].Count(1), bucketAndWindow[1].Count(1)}, false, func(q *dbsqlc.Queries) error {
			_, err := q.Reset(ctx, dbsqlc.ResetParams{Names: []string{"bucket", "window"}, Keys: []string{"ann", "bob"}})
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := limiter.newCall(tt.verb, about{receipt: receipt, lasts: time.Hour}, tt.requests, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := c.statement(ctx, tt.orRaise)
			for i, arg := range got.args { // sqlc has no type for an array with NULLs
				if list, ok := arg.([]pgtype.Int4); ok {
					var places []int32
					for _, place := range list {
						places = append(places, place.Int32)
					}
					got.args[i] = places
				}
			}
			var want asked
			_ = tt.sqlc(dbsqlc.New(&want)) // "asked"
			if got.sql != want.sql || !reflect.DeepEqual(got.args[1:], want.args) {
				t.Errorf("got  %s%#v\nwant %s%#v", got.sql, got.args[1:], want.sql, want.args)
			}
			if got.demands != len(c.demands) || takes(got.sql) != verbs[tt.verb].takes {
				t.Errorf("about %d demands, want %d; a statement of Consume: %v", got.demands, len(c.demands), takes(got.sql))
			}
		})
	}
}

// takes reports whether a query can take tokens.
func takes(sql string) bool {
	return slices.Contains([]string{dbsqlc.Consume, dbsqlc.ConsumeSharded, dbsqlc.ConsumeSeveral, dbsqlc.Apply, dbsqlc.ApplyOne}, sql)
}
