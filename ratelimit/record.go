package ratelimit

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// record reads a row as record_send writes it: a number of columns, and for each its type, its length and its value in Postgres'
// binary format. What is not as it was asked for is a failure, after which all is zero. (pgtype reads it, too, but in 5
// allocations for one limit and 23 for three, which was more than 1 % of a call on a busy machine.)
type record struct {
	rest   []byte
	failed bool
}

var errRecord = errors.New("ratelimit: the database's answer cannot be read")

// newRecord begins a row of so many columns.
func newRecord(row []byte, columns uint32) *record {
	r := &record{rest: row}
	r.expect(columns)
	return r
}

// end is whether all has been read, and nothing else was there.
func (r *record) end() error {
	if r.failed || len(r.rest) > 0 {
		return errRecord
	}
	return nil
}

func (r *record) bytes(n uint32) []byte {
	if r.failed || uint64(n) > uint64(len(r.rest)) {
		r.failed = true
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *record) uint32() uint32 {
	if b := r.bytes(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (r *record) expect(n uint32) {
	if r.uint32() != n {
		r.failed = true
	}
}

// null is the length of what is NULL.
const null = math.MaxUint32

// fixed is a value of so many bytes, up to 8.
func (r *record) fixed(size uint32) (v uint64) {
	r.expect(size)
	for _, b := range r.bytes(size) {
		v = v<<8 | uint64(b)
	}
	return v
}

func (r *record) boolean() bool {
	r.expect(pgtype.BoolOID)
	return r.fixed(1) == 1
}

func (r *record) float() float64 {
	r.expect(pgtype.Float8OID)
	return math.Float64frombits(r.fixed(8))
}

func (r *record) instant() algebra.Micros {
	r.expect(pgtype.TimestamptzOID)
	return sinceY2K(r.fixed(8))
}

// sinceY2K is a timestamptz: microseconds since 2000. An infinite one, which nobody but by hand can have written, is the first there is.
func sinceY2K(v uint64) algebra.Micros {
	if v == math.MaxInt64 || v == 1<<63 {
		return algebra.Min
	}
	return algebra.Micros(v) + 946_684_800_000_000
}

// array is an array of values of so many bytes; nil if it is NULL or empty.
func array[T any](r *record, oid, element, size uint32, decode func(uint64) T) []T {
	r.expect(oid)
	length := r.uint32()
	if length == null {
		return nil
	}
	a := record{rest: r.bytes(length), failed: r.failed}
	dimensions := a.uint32()
	a.bytes(4) // whether there are NULLs: fixed refuses them
	a.expect(element)
	var all []T
	if dimensions > 0 {
		n := a.uint32()
		a.bytes(4) // the first index
		all = make([]T, 0, min(n, uint32(len(a.rest))/(4+size)))
		for range n {
			if a.failed {
				break
			}
			all = append(all, decode(a.fixed(size)))
		}
	}
	r.failed = a.end() != nil || dimensions > 1
	return all
}
