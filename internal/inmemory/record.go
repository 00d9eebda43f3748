package inmemory

import (
	"encoding/binary"
	"math"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// The answers are in the form of Postgres' record_send: the number of columns, and each column's type, length and value.

// y2k is where Postgres' instants begin to count.
const y2k = algebra.Micros(946_684_800_000_000)

// decision is a ratelimit._decision.
func decision(granted bool, at algebra.Micros, r algebra.Row) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 64), 4)
	b = column(b, pgtype.BoolOID, boolean(granted))
	b = column(b, pgtype.TimestamptzOID, instant(at))
	b = column(b, pgtype.Float8OID, double(r.Value))
	return column(b, pgtype.TimestamptzOID, instant(r.TS))
}

// decisions is a ratelimit._decisions.
func decisions(a Answer, at algebra.Micros) []byte {
	b := binary.BigEndian.AppendUint32(nil, 6)
	b = column(b, pgtype.BoolOID, boolean(a.Granted))
	b = a.rows(column(b, pgtype.TimestamptzOID, instant(at)))
	return column(b, pgtype.Float8OID, double(a.Taken))
}

// settled is a ratelimit._settled.
func settled(a Answer, at algebra.Micros) []byte {
	var moved, waiting [][]byte
	for _, v := range a.Moved {
		moved = append(moved, double(v))
	}
	for _, i := range a.Waiting {
		waiting = append(waiting, binary.BigEndian.AppendUint32(nil, uint32(i)))
	}
	b := binary.BigEndian.AppendUint32(nil, 7)
	b = column(b, pgtype.TextOID, []byte("done"))
	b = a.rows(column(b, pgtype.TimestamptzOID, instant(at)))
	b = column(b, pgtype.Float8ArrayOID, array(pgtype.Float8OID, moved))
	return column(b, pgtype.Int4ArrayOID, array(pgtype.Int4OID, waiting))
}

// rows appends the columns ord, value and ts.
func (a Answer) rows(b []byte) []byte {
	var places, values, ts [][]byte
	for i, rows := range a.Rows {
		for _, r := range rows {
			places = append(places, binary.BigEndian.AppendUint32(nil, uint32(i+1)))
			values = append(values, double(r.Value))
			ts = append(ts, instant(r.TS))
		}
	}
	b = column(b, pgtype.Int4ArrayOID, array(pgtype.Int4OID, places))
	b = column(b, pgtype.Float8ArrayOID, array(pgtype.Float8OID, values))
	return column(b, pgtype.TimestamptzArrayOID, array(pgtype.TimestamptzOID, ts))
}

// each is a record of ratelimit._each.
func each(answers []Answer, at algebra.Micros) []byte {
	var places, granted, ats, values, ts [][]byte
	for i, a := range answers {
		rows := a.Rows[0]
		if len(rows) == 0 {
			rows = []algebra.Row{{TS: algebra.Min}}
		}
		for _, r := range rows {
			places = append(places, binary.BigEndian.AppendUint32(nil, uint32(i+1)))
			granted = append(granted, append([]byte{0, 0, 0}, boolean(a.Granted)...))
			ats = append(ats, instant(at))
			values = append(values, double(r.Value))
			ts = append(ts, instant(r.TS))
		}
	}
	b := binary.BigEndian.AppendUint32(nil, 5)
	b = column(b, pgtype.Int4ArrayOID, array(pgtype.Int4OID, places))
	b = column(b, pgtype.Int4ArrayOID, array(pgtype.Int4OID, granted))
	b = column(b, pgtype.TimestamptzArrayOID, array(pgtype.TimestamptzOID, ats))
	b = column(b, pgtype.Float8ArrayOID, array(pgtype.Float8OID, values))
	return column(b, pgtype.TimestamptzArrayOID, array(pgtype.TimestamptzOID, ts))
}

func column(b []byte, oid uint32, value []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, oid)
	return sized(b, value)
}

func sized(b, value []byte) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

func boolean(v bool) []byte {
	if v {
		return []byte{1}
	}
	return []byte{0}
}

func double(v float64) []byte { return binary.BigEndian.AppendUint64(nil, math.Float64bits(v)) }

func instant(at algebra.Micros) []byte {
	if at == algebra.Min { // -infinity
		return binary.BigEndian.AppendUint64(nil, 1<<63)
	}
	return binary.BigEndian.AppendUint64(nil, uint64(at-y2k))
}

// array has one dimension, or none if it is empty.
func array(element uint32, values [][]byte) []byte {
	dimensions := uint32(min(len(values), 1))
	b := binary.BigEndian.AppendUint32(nil, dimensions)
	b = binary.BigEndian.AppendUint32(b, 0) // no NULLs
	b = binary.BigEndian.AppendUint32(b, element)
	if dimensions > 0 {
		b = binary.BigEndian.AppendUint32(b, uint32(len(values)))
		b = binary.BigEndian.AppendUint32(b, 1) // the first index
	}
	for _, v := range values {
		b = sized(b, v)
	}
	return b
}
