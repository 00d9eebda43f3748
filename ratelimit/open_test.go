package ratelimit

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// sweepable is a database whose tables are swept in batches.
type sweepable struct {
	turns   []string         // what ratelimit._sweep_turn says, by attempt; then mine
	batches map[string]int   // of each limit; 0 is 1
	fails   map[string]error // instead of a batch

	tries int
	swept []string // the limit of each batch
	at    []time.Time
}

func (s *sweepable) inTx(ctx context.Context, fn func(ctx context.Context, tx DB) error) error {
	return fn(ctx, s)
}

func (s *sweepable) step(ctx context.Context, _, _ string, fn func(ctx context.Context, tx DB) error) error {
	return fn(ctx, s)
}

func (s *sweepable) QueryRow(_ context.Context, sql string, args ...any) pgx.Row {
	return sqlRow(func(dest []any) error {
		switch sql {
		case dbsqlc.SweepTurn:
			state := "mine"
			if s.tries < len(s.turns) {
				state = s.turns[s.tries]
			}
			s.tries++
			dest[0].(*pgtype.Text).String = state
		case dbsqlc.Sweep:
			name, _ := args[1].(string)
			s.swept, s.at = append(s.swept, name), append(s.at, time.Now())
			if err := s.fails[name]; err != nil {
				return err
			}
			s.batches[name]--
			*dest[1].(*pgtype.Text) = pgtype.Text{String: "next", Valid: s.batches[name] > 0}
		case dbsqlc.SweepHolds: // there are none
		default:
			return errors.ErrUnsupported
		}
		return nil
	})
}

// sweeping sweeps three limits in the background for 30 minutes.
func sweeping(t *testing.T, db *sweepable) (told []string) {
	t.Helper()
	o := Options{SweepEvery: time.Hour, OnError: func(err error) { told = append(told, err.Error()) }}
	for _, name := range []string{"a", "b", "c"} {
		o.Limits = append(o.Limits, TokenBucket(name, 1, time.Hour))
	}
	if db.batches == nil {
		db.batches = map[string]int{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 65*time.Minute) // the first comes within an hour, the next 52 minutes later
	defer cancel()
	new(Limiter).keepSweeping(ctx, db.inTx, &o)
	return told
}

func TestAProcessSaysEveryMinuteThatItUsesItsLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &published{others: []string{"'a': x", "'a': x", "'b': y"}, fails: 7}
		var told []error
		o := Options{Program: "web", Limits: []Limit{TokenBucket("a", 1, time.Hour)}, OnError: func(err error) { told = append(told, err) }}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		o.keepPublished(ctx, db, &Limiter{})
		if db.beats < 17 || db.beats > 23 { // an eighth more or less than a minute
			t.Errorf("%d times in 20 minutes", db.beats)
		}
		if len(told) != 3 || !notCurrent(told[0]) || !notCurrent(told[1]) || notCurrent(told[2]) {
			t.Errorf("told %q: want each change once, and the failure", told)
		}
	})
}

// published answers heartbeats: the first ones with the others, then with the last of them.
type published struct {
	others []string
	fails  int // the heartbeat that does
	beats  int
}

func (p *published) QueryRow(_ context.Context, sql string, args ...any) pgx.Row {
	return sqlRow(func(dest []any) error {
		p.beats++
		switch beat, is := args[3].(pgtype.Bool); {
		case sql != dbsqlc.Publish || !is || !beat.Bool:
			return errors.ErrUnsupported
		case p.beats == p.fails:
			return errors.New("EOF")
		}
		dest[0].(*pgtype.Bool).Bool = true
		*dest[1].(*[]string) = p.others[min(p.beats, len(p.others))-1:][:1]
		return nil
	})
}

func TestASweepThatHasBegunGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &sweepable{turns: []string{"mine", "locked", "locked", "locked", "locked", "locked", "mine", "locked"}, batches: map[string]int{"a": 2}}
		if told := sweeping(t, db); told != nil {
			t.Errorf("told %q", told)
		}
		if want := []string{"a", "a", "b", "c"}; !slices.Equal(db.swept[:min(4, len(db.swept))], want) {
			t.Fatalf("swept %q, want %q first", db.swept, want)
		}
		if took := db.at[3].Sub(db.at[0]); took < 6*otherSweepPause || took > time.Minute {
			t.Errorf("it took %v", took)
		}
	})
}

func TestASweepThatHasNotBegunGivesWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, state := range []string{"other", "locked"} {
			db := &sweepable{turns: slices.Repeat([]string{state}, 1000)}
			if told := sweeping(t, db); told != nil || db.swept != nil {
				t.Errorf("%s: told %q, swept %q", state, told, db.swept)
			}
			if db.tries < 4 || db.tries > 2*4 {
				t.Errorf("%s: %d tries in an hour", state, db.tries)
			}
		}
	})
}

func TestALimitThatCannotBeSweptStopsNoOther(t *testing.T) {
	t.Parallel()
	stuck := stateError{"canceling statement due to statement timeout", "57014"}
	for name, row := range map[string]struct {
		fails       map[string]error
		swept, told []string
	}{
		"one":             {map[string]error{"a": stuck}, []string{"a", "b", "c"}, []string{`ratelimit: sweep: limit "a": ` + stuck.Error()}},
		"two":             {map[string]error{"a": stuck, "c": stuck}, []string{"a", "b", "c"}, []string{`ratelimit: sweep: limit "a": ` + stuck.Error(), `ratelimit: sweep: limit "c": ` + stuck.Error()}},
		"the server died": {map[string]error{"a": errors.New("EOF")}, []string{"a"}, []string{`ratelimit: sweep: limit "a": EOF`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := &sweepable{fails: row.fails}
				told := sweeping(t, db)
				if n := len(row.swept); len(db.swept) < n || !slices.Equal(db.swept[:n], row.swept) || len(db.swept)%n != 0 {
					t.Errorf("swept %q, want %q", db.swept, row.swept)
				}
				if n := len(row.told); len(told) < n || !slices.Equal(told[:n], row.told) {
					t.Errorf("told %q, want %q", told, row.told)
				}
			})
		})
		db := &sweepable{fails: row.fails, batches: map[string]int{}}
		_, errs := new(Limiter).sweepAll(t.Context(), db.step, []Limit{TokenBucket("a", 1, time.Hour), TokenBucket("b", 1, time.Hour), TokenBucket("c", 1, time.Hour)})
		if len(errs) != len(row.told) || !slices.Equal(db.swept, row.swept) {
			t.Errorf("%s: swept %q, %v", name, db.swept, errs)
		}
	}
}

func notCurrent(err error) bool { return strings.Contains(err.Error(), "other numbers are published") }
