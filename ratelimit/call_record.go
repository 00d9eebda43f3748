package ratelimit

import (
	"errors"
	"math"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// record reads a decision as record_send writes it: the number of columns, and each column's type, length and value in
// Postgres' binary format. Unexpected data sets failed, and makes the values meaningless. (scanRecord reads any row by
// pgtype, but needs 5 allocations for one limit and 23 for three.)
type record struct {
	rest   []byte
	failed bool
}

// errRecord is for an answer that cannot be read.
var errRecord = errors.New("the database's answer cannot be read")

// ended reports whether everything was read, without failure.
func (r *record) ended() bool { return !r.failed && len(r.rest) == 0 }

func (r *record) bytes(n uint64) []byte {
	if r.failed || n > uint64(len(r.rest)) {
		r.failed = true
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

// uint reads a number of size bytes.
func (r *record) uint(size uint64) (v uint64) {
	for _, b := range r.bytes(size) {
		v = v<<8 | uint64(b)
	}
	return v
}

// expect fails unless the next number, of 4 bytes, is v.
func (r *record) expect(v uint64) {
	if r.uint(4) != v {
		r.failed = true
	}
}

// value reads a value of size bytes, after its length. The length of a NULL is -1.
func (r *record) value(size uint64) uint64 {
	r.expect(size)
	return r.uint(size)
}

func (r *record) column(oid, size uint64) uint64 {
	r.expect(oid)
	return r.value(size)
}

func (r *record) boolean() bool { return r.column(pgtype.BoolOID, 1) == 1 }

func (r *record) float() float64 { return math.Float64frombits(r.column(pgtype.Float8OID, 8)) }

// floatOrNull reads 0 for NULL.
func (r *record) floatOrNull() float64 {
	r.expect(pgtype.Float8OID)
	length := *r
	if r.uint(4) == math.MaxUint32 {
		return 0
	}
	*r = length
	return math.Float64frombits(r.value(8))
}

func (r *record) instant() algebra.Micros { return sinceY2K(r.column(pgtype.TimestamptzOID, 8)) }

// sinceY2K converts a timestamptz, which is in microseconds since 2000. An infinite one, which only a hand-written row can
// have, becomes the first or the last instant.
func sinceY2K(v uint64) algebra.Micros {
	switch v {
	case math.MaxInt64:
		return algebra.Max
	case 1 << 63:
		return algebra.Min
	}
	return algebra.Micros(v) + 946_684_800_000_000
}

// array reads an array of values of size bytes; nil for NULL.
func (r *record) array(oid, element, size uint64) []uint64 {
	r.expect(oid)
	length := r.uint(4)
	if length == math.MaxUint32 { // NULL
		return nil
	}
	a := record{rest: r.bytes(length)}
	dimensions := a.uint(4)
	a.uint(4) // the flag for NULLs, which value refuses
	a.expect(element)
	all := []uint64{}
	if dimensions == 1 {
		n := a.uint(4)
		a.uint(4) // the first index
		all = make([]uint64, 0, min(n, uint64(len(a.rest))/(4+size)))
		for ; n > 0 && !a.failed; n-- {
			all = append(all, a.value(size))
		}
	}
	r.failed = r.failed || !a.ended() // also for several dimensions
	return all
}

// text reads a text of the engine's own.
func (r *record) text() string {
	r.expect(pgtype.TextOID)
	return string(r.bytes(r.uint(4)))
}

// instantOrNull reads algebra.Forever for NULL.
func (r *record) instantOrNull() algebra.Micros {
	r.expect(pgtype.TimestamptzOID)
	return r.orForever()
}

// orForever reads the length and the value of an instant. NULL and infinity are algebra.Forever.
func (r *record) orForever() algebra.Micros {
	length := *r
	if r.uint(4) == math.MaxUint32 {
		return algebra.Forever
	}
	*r = length
	v := r.value(8)
	if v == math.MaxInt64 {
		return algebra.Forever
	}
	return sinceY2K(v)
}

// instants reads an array of n instants, some of them NULL; or a NULL for none.
func (r *record) instants(n int) (all []algebra.Micros) {
	r.expect(pgtype.TimestamptzArrayOID)
	length := r.uint(4)
	if length == math.MaxUint32 {
		r.failed = r.failed || n > 0
		return nil
	}
	a := record{rest: r.bytes(length), failed: r.failed}
	a.expect(1)
	a.uint(4) // the flag for NULLs
	a.expect(pgtype.TimestamptzOID)
	a.expect(uint64(n))
	a.uint(4) // the first index
	for range n {
		all = append(all, a.orForever())
	}
	r.failed = !a.ended()
	return all
}
