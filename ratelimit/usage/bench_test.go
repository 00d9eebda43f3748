package usage

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// What Decision costs the caller: go test ./ratelimit/usage -run '^$' -bench Decision
func BenchmarkDecision(b *testing.B) {
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	many := make([]ratelimit.Decision, 1<<16)
	for i := range many {
		many[i] = deny(limit, fmt.Sprint("user-", i), noon)
	}
	for _, bench := range []struct {
		name string
		of   []ratelimit.Decision
	}{
		{"a grant", []ratelimit.Decision{grant(limit, "user-17", noon)}},
		{"a denial of one key", many[:1]},
		{"denials of 65536 keys in turns", many},
	} {
		r := &Recorder{}
		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()
			for i := range b.N {
				r.Observe(b.Context(), bench.of[i%len(bench.of)])
			}
		})
		b.Run(bench.name+", on all processors", func(b *testing.B) {
			b.ReportAllocs()
			var n atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				for i := int(n.Add(1)) * 1000; pb.Next(); i++ {
					r.Observe(b.Context(), bench.of[i%len(bench.of)])
				}
			})
		})
	}
}
