package ratelimit

import (
	"hash/maphash"
	"sync/atomic"
	"time"
)

// Instants of this process are durations since it started, by the clock that does not step.
var started = time.Now()

// hashSeed is of the hashes of limits and keys in this process.
var hashSeed = maphash.MakeSeed()

// deniedLately remembers some limits and keys that this process was denied lately, and until when. A denied caller often asks
// again soon, and a call that expects a denial reads before it writes, which is faster. No decision depends on this hint:
// keys overwrite each other, and concurrent writes may mix.
var deniedLately denials

// heldLately is for how long a denied Hold is remembered.
const heldLately = time.Second

type denials [256]denial

type denial struct{ hash, until atomic.Int64 } // until: nanoseconds since the process started

// expect reports whether a demand will probably be denied.
func (m *denials) expect(d demand) bool {
	place, hash := m.place(d)
	return place.hash.Load() == hash && place.until.Load() > int64(time.Since(started))
}

// remember notes that a demand was denied, and will be for that long.
func (m *denials) remember(d demand, wait time.Duration) {
	place, hash := m.place(d)
	place.until.Store(int64(time.Since(started) + min(wait, time.Hour)))
	place.hash.Store(hash)
}

// place is a demand's entry, and its hash.
func (m *denials) place(d demand) (place *denial, hash int64) {
	h := maphash.Comparable(hashSeed, [2]string{d.limit.name, d.key})
	return &m[h%uint64(len(m))], int64(h)
}
