package ratelimit

import (
	"hash/maphash"
	"sync/atomic"
	"time"
)

// denied remembers some of the limits and keys that this process was denied lately, and until when they will be. Who is
// denied is likely to ask again soon, and a call that expects a denial reads before it writes, which is faster. It is a
// guess, on which no decision depends: other keys take its places, and concurrent writers may mix what they write.
var denied denials

type denials [256]denial

type denial struct{ hash, until atomic.Int64 } // until: nanoseconds since epoch

var (
	seed  = maphash.MakeSeed()
	epoch = time.Now()
)

// expect says whether a demand will probably be denied.
func (m *denials) expect(d demand) bool {
	place, hash := m.place(d)
	return place.hash.Load() == hash && place.until.Load() > int64(time.Since(epoch))
}

// remember says that a demand was denied, and would be for so long.
func (m *denials) remember(d demand, wait time.Duration) {
	place, hash := m.place(d)
	place.until.Store(int64(time.Since(epoch) + min(wait, time.Hour)))
	place.hash.Store(hash)
}

// place is where a demand is remembered, and as what.
func (m *denials) place(d demand) (place *denial, hash int64) {
	h := maphash.Comparable(seed, [2]string{d.limit.name, d.key})
	return &m[h%uint64(len(m))], int64(h)
}
