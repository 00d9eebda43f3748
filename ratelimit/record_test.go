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
	write := func(values ...any) []byte {
		oids := []uint32{pgtype.BoolOID, pgtype.TimestamptzOID, pgtype.Float8OID, pgtype.TimestamptzOID}
		if len(values) == 5 {
			oids = []uint32{pgtype.BoolOID, pgtype.TimestamptzOID, pgtype.Int4ArrayOID, pgtype.Float8ArrayOID, pgtype.TimestamptzArrayOID}
		}
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
	instant := func() (algebra.Micros, time.Time) {
		at := algebra.Min + algebra.Micros(r.Int64N(int64(algebra.Max-algebra.Min)))
		return at, at.Time()
	}
	for range 1000 {
		at, atTime := instant()
		granted := r.IntN(2) == 0
		var rows []algebra.Row
		var values []float64
		var ts []time.Time
		var ord []int32
		for range 1 + r.IntN(4) {
			row := algebra.Row{Value: math.Float64frombits(r.Uint64())}
			if math.IsNaN(row.Value) {
				row.Value = math.Inf(-1)
			}
			var when time.Time
			row.TS, when = instant()
			rows, values, ts = append(rows, row), append(values, row.Value), append(ts, when)
			ord = append(ord, r.Int32())
		}

		record := write(granted, atTime, values[0], ts[0])
		if got, err := oneLimit(record, nil); err != nil || got != (consumeRow{granted, at, rows[0]}) {
			t.Fatalf("%x: %+v, %v; want %v, %v, %v", record, got, err, granted, at, rows[0])
		}
		several := write(granted, atTime, ord, values, ts)
		if got, err := anyLimits(several, nil); err != nil || !reflect.DeepEqual(got, applyRow{granted, at, ord, rows}) {
			t.Fatalf("%x: %+v, %v; want %v, %v, %v, %v", several, got, err, granted, at, ord, rows)
		}
		inOrder := write(granted, atTime, nil, values, ts)
		if got, err := anyLimits(inOrder, nil); err != nil || !reflect.DeepEqual(got, applyRow{granted, at, nil, rows}) {
			t.Fatalf("%x: %+v, %v; want %v, %v, %v", inOrder, got, err, granted, at, rows)
		}

		for _, whole := range [][]byte{record, several, inOrder} {
			read := func(b []byte) error {
				if &whole[0] == &record[0] {
					_, err := oneLimit(b, nil)
					return err
				}
				_, err := anyLimits(b, nil)
				return err
			}
			for n := range whole {
				if err := read(whole[:n]); !errors.Is(err, ErrUnknownOutcome) {
					t.Fatalf("%x: %v, want ErrUnknownOutcome", whole[:n], err)
				}
			}
			if err := read(append(slices.Clip(whole), 0)); !errors.Is(err, ErrUnknownOutcome) {
				t.Fatalf("%x and a byte more: %v, want ErrUnknownOutcome", whole, err)
			}
		}
	}
}

// A value that is NULL is not read as zero: that would be an empty limit, of long ago.
func TestANullInAnAnswerIsNotRead(t *testing.T) {
	t.Parallel()
	b := pgtype.NewCompositeBinaryBuilder(pgtype.NewMap(), nil)
	b.AppendValue(pgtype.BoolOID, true)
	b.AppendValue(pgtype.TimestamptzOID, time.Now())
	b.AppendValue(pgtype.Float8OID, nil)
	b.AppendValue(pgtype.TimestamptzOID, time.Now())
	record, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	if row, err := oneLimit(record, nil); !errors.Is(err, ErrUnknownOutcome) {
		t.Errorf("%+v, %v, want ErrUnknownOutcome", row, err)
	}
}

// What somebody wrote by hand.
func TestAnInfiniteInstantIsTheFirst(t *testing.T) {
	t.Parallel()
	for _, infinity := range []pgtype.InfinityModifier{pgtype.Infinity, pgtype.NegativeInfinity} {
		b := pgtype.NewCompositeBinaryBuilder(pgtype.NewMap(), nil)
		b.AppendValue(pgtype.BoolOID, false)
		b.AppendValue(pgtype.TimestamptzOID, time.Now())
		b.AppendValue(pgtype.Float8OID, 1.0)
		b.AppendValue(pgtype.TimestamptzOID, pgtype.Timestamptz{InfinityModifier: infinity, Valid: true})
		record, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		if row, err := oneLimit(record, nil); err != nil || row.row.TS != algebra.Min {
			t.Errorf("%v: %+v, %v", infinity, row, err)
		}
	}
}
