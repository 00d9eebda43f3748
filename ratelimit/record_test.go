package ratelimit

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

var (
	oneLimitOIDs  = []uint32{pgtype.BoolOID, pgtype.TimestamptzOID, pgtype.Float8OID, pgtype.TimestamptzOID}
	anyLimitsOIDs = []uint32{pgtype.BoolOID, pgtype.TimestamptzOID, pgtype.Int4ArrayOID, pgtype.Float8ArrayOID, pgtype.TimestamptzArrayOID}
)

// written is a record as pgtype writes it.
func written(t *testing.T, oids []uint32, values ...any) []byte {
	t.Helper()
	b := pgtype.NewCompositeBinaryBuilder(pgtype.NewMap(), nil)
	for i, v := range values {
		b.AppendValue(oids[i], v)
	}
	record, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return record
}

// What pgtype writes is read as it was; and if anything is cut off, or added, it is not read at all.
func TestAnswersAreReadAsPgtypeWritesThem(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	instant := func() algebra.Micros {
		return algebra.Min + algebra.Micros(r.Int64N(int64(algebra.Max-algebra.Min)))
	}
	reads := func(want any, record []byte, read func([]byte) (any, error)) {
		t.Helper()
		if got, err := read(record); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%x: %+v, %v; want %+v", record, got, err, want)
		}
		for n := range record {
			if got, err := read(record[:n]); !errors.Is(err, ErrUnknownOutcome) {
				t.Fatalf("%x: %+v, %v, want ErrUnknownOutcome", record[:n], got, err)
			}
		}
		if got, err := read(append(slices.Clip(record), 0)); !errors.Is(err, ErrUnknownOutcome) {
			t.Fatalf("%x and a byte more: %+v, %v, want ErrUnknownOutcome", record, got, err)
		}
	}
	one := func(b []byte) (any, error) { return oneLimit(b, nil) }
	several := func(b []byte) (any, error) { return anyLimits(b, nil) }
	for range 1000 {
		want := applyRow{granted: r.IntN(2) == 0, at: instant()}
		values, ts, ord := []float64{}, []time.Time{}, []int32{}
		for range r.IntN(4) {
			row := algebra.Row{Value: math.Float64frombits(r.Uint64()), TS: instant()}
			if math.IsNaN(row.Value) { // which is not itself
				row.Value = math.Inf(-1)
			}
			want.rows = append(want.rows, row)
			values, ts, ord = append(values, row.Value), append(ts, row.TS.Time()), append(ord, r.Int32())
		}
		reads(want, written(t, anyLimitsOIDs, want.granted, want.at.Time(), nil, values, ts), several)
		if len(values) > 0 {
			reads(consumeRow{want.granted, want.at, want.rows[0]}, written(t, oneLimitOIDs, want.granted, want.at.Time(), values[0], ts[0]), one)
			want.ord = ord
		}
		reads(want, written(t, anyLimitsOIDs, want.granted, want.at.Time(), ord, values, ts), several)
	}
}

// A NULL would be an empty limit, of long ago; no rows, a full one.
func TestAnswersThatSayNothingAreNotRead(t *testing.T) {
	t.Parallel()
	now, null := time.Now(), pgtype.Timestamptz{}
	for name, values := range map[string][]any{
		"no value":               {true, now, nil, now},
		"no instant":             {true, now, 1.0, null},
		"no values":              {true, now, nil, nil, []time.Time{}},
		"no instants":            {true, now, nil, []float64{}, nil},
		"a value is NULL":        {true, now, nil, []*float64{nil}, []time.Time{now}},
		"an instant is NULL":     {true, now, nil, []float64{1}, []pgtype.Timestamptz{null}},
		"more values":            {true, now, nil, []float64{1, 2}, []time.Time{now}},
		"more instants":          {true, now, nil, []float64{1}, []time.Time{now, now}},
		"fewer places than rows": {true, now, []int32{1}, []float64{1, 2}, []time.Time{now, now}},
		"two dimensions":         {true, now, nil, [][]float64{{1}}, [][]time.Time{{now}}},
	} {
		if len(values) == 4 {
			if row, err := oneLimit(written(t, oneLimitOIDs, values...), nil); !errors.Is(err, ErrUnknownOutcome) {
				t.Errorf("%s: %+v, %v, want ErrUnknownOutcome", name, row, err)
			}
		} else if row, err := anyLimits(written(t, anyLimitsOIDs, values...), nil); !errors.Is(err, ErrUnknownOutcome) {
			t.Errorf("%s: %+v, %v, want ErrUnknownOutcome", name, row, err)
		}
	}
}

// What somebody wrote by hand. Time goes from the one, and never reaches the other.
func TestInfiniteInstantsAreTheFirstAndTheLast(t *testing.T) {
	t.Parallel()
	for infinity, want := range map[pgtype.InfinityModifier]algebra.Micros{pgtype.Infinity: algebra.Max, pgtype.NegativeInfinity: algebra.Min} {
		record := written(t, oneLimitOIDs, false, time.Now(), 1.0, pgtype.Timestamptz{InfinityModifier: infinity, Valid: true})
		if row, err := oneLimit(record, nil); err != nil || row.row.TS != want {
			t.Errorf("%v: %+v, %v, want %v", infinity, row, err, want)
		}
	}
}
