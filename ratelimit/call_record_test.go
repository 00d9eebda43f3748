package ratelimit

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

var (
	oneOIDs     = []uint32{pgtype.BoolOID, pgtype.TimestamptzOID, pgtype.Float8OID, pgtype.TimestamptzOID}
	severalOIDs = []uint32{pgtype.BoolOID, pgtype.TimestamptzOID, pgtype.Int4ArrayOID, pgtype.Float8ArrayOID, pgtype.TimestamptzArrayOID, pgtype.Float8OID}
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

// A record written by pgtype is read unchanged. A record that was cut or extended is not read at all.
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
	reads := func(want *answer, record []byte, read func(reply pgx.Row, demands int) (*answer, error)) {
		t.Helper()
		demands := len(want.rows)
		if got, err := read(bytesRow(record), demands); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%x: %+v, %v; want %+v", record, got, err, want)
		}
		for n := range record {
			if got, err := read(bytesRow(record[:n]), demands); !errors.Is(err, errRecord) {
				t.Fatalf("%x: %+v, %v, want errRecord", record[:n], got, err)
			}
		}
		if got, err := read(append(slices.Clip(bytesRow(record)), 0), demands); !errors.Is(err, errRecord) {
			t.Fatalf("%x and a byte more: %+v, %v, want errRecord", record, got, err)
		}
	}
	for range 1000 {
		granted, at := r.IntN(2) == 0, instant()
		rows, values, ts := []algebra.Row{}, []float64{}, []time.Time{}
		for range r.IntN(4) {
			row := algebra.Row{Value: math.Float64frombits(r.Uint64()), TS: instant()}
			if math.IsNaN(row.Value) { // NaN is not equal to itself
				row.Value = math.Inf(-1)
			}
			rows, values, ts = append(rows, row), append(values, row.Value), append(ts, row.TS.Time())
		}
		want := &answer{granted: granted, at: at, rows: make([][]algebra.Row, len(rows))}
		for i, row := range rows {
			want.rows[i] = []algebra.Row{row}
		}
		reads(want, written(t, severalOIDs, granted, at.Time(), nil, values, ts, nil), readSeveral)
		if len(rows) > 0 {
			one := &answer{granted: granted, at: at}
			one.setRow(rows[0])
			reads(one, written(t, oneOIDs, granted, at.Time(), values[0], ts[0]), readOne)
		}
		want.rows, want.taken = make([][]algebra.Row, 1+r.IntN(4)), float64(1+r.IntN(100))
		ord := []int32{}
		for _, row := range rows {
			place := r.IntN(len(want.rows))
			ord, want.rows[place] = append(ord, int32(place+1)), append(want.rows[place], row)
		}
		reads(want, written(t, severalOIDs, granted, at.Time(), ord, values, ts, want.taken), readSeveral)
	}
}

// A NULL would be read as an empty limit of long ago, and missing rows as a full limit.
func TestAnswersThatSayNothingAreNotRead(t *testing.T) {
	t.Parallel()
	now, null := time.Now(), pgtype.Timestamptz{}
	for name, values := range map[string][]any{
		"no value":               {true, now, nil, now},
		"no instant":             {true, now, 1.0, null},
		"no values":              {true, now, nil, nil, []time.Time{}, nil},
		"no instants":            {true, now, nil, []float64{}, nil, nil},
		"a value is NULL":        {true, now, nil, []*float64{nil}, []time.Time{now}, nil},
		"an instant is NULL":     {true, now, nil, []float64{1}, []pgtype.Timestamptz{null}, nil},
		"more values":            {true, now, nil, []float64{1, 2}, []time.Time{now}, nil},
		"more instants":          {true, now, nil, []float64{1}, []time.Time{now, now}, nil},
		"fewer places than rows": {true, now, []int32{1}, []float64{1, 2}, []time.Time{now, now}, nil},
		"a place of nobody's":    {true, now, []int32{2}, []float64{1}, []time.Time{now}, nil},
		"no place":               {true, now, []int32{0}, []float64{1}, []time.Time{now}, nil},
		"rows without places":    {true, now, nil, []float64{1, 2}, []time.Time{now, now}, nil},
		"two dimensions":         {true, now, nil, [][]float64{{1}}, [][]time.Time{{now}}, nil},
	} {
		if len(values) == 4 {
			if a, err := readOne(bytesRow(written(t, oneOIDs, values...)), 1); !errors.Is(err, errRecord) {
				t.Errorf("%s: %+v, %v, want errRecord", name, a, err)
			}
		} else if a, err := readSeveral(bytesRow(written(t, severalOIDs, values...)), 1); !errors.Is(err, errRecord) {
			t.Errorf("%s: %+v, %v, want errRecord", name, a, err)
		}
	}
}

// Infinite instants are only written by hand. Refills count from -infinity on, and never reach +infinity.
func TestInfiniteInstantsAreTheFirstAndTheLast(t *testing.T) {
	t.Parallel()
	for infinity, want := range map[pgtype.InfinityModifier]algebra.Micros{pgtype.Infinity: algebra.Max, pgtype.NegativeInfinity: algebra.Min} {
		record := written(t, oneOIDs, false, time.Now(), 1.0, pgtype.Timestamptz{InfinityModifier: infinity, Valid: true})
		if a, err := readOne(bytesRow(record), 1); err != nil || a.row[0].TS != want {
			t.Errorf("%v: %+v, %v, want %v", infinity, a, err, want)
		}
	}
}
