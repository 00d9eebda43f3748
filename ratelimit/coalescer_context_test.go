package ratelimit

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// probe is a Context of the caller's own. Its Err tells whether the Coalescer's lock is free, and may panic.
type probe struct {
	context.Context
	coalescer    *Coalescer
	panics       bool
	free, locked int
}

func (p *probe) Err() error {
	if p.coalescer.mu.TryLock() {
		p.coalescer.mu.Unlock()
		p.free++
	} else {
		p.locked++
	}
	if p.panics {
		panic("a Context of the caller's own")
	}
	return p.Context.Err()
}

// A Context that uses the Coalescer would wait for itself, and one that panics would keep the lock or the place.
func TestACoalescerAsksNoContextUnderItsLock(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	pool.Close()
	asked, err := new(Limiter).newCall(verbConsume, about{}, []Request{TokenBucket("limit", 1, time.Second).Global()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, panics := range []bool{false, true} {
		coalescer := &Coalescer{Pool: pool}
		ctx := &probe{Context: t.Context(), coalescer: coalescer, panics: panics}
		func() {
			defer func() {
				if panicked := recover() != nil; panicked != panics {
					t.Errorf("the call panics: %t, want %t", panicked, panics)
				}
			}()
			if err := coalescer.join(ctx, &asked, &Result{}); err == nil {
				t.Error("a closed pool decides a call")
			}
		}()
		if ctx.free == 0 || ctx.locked > 0 {
			t.Errorf("Err was called %d times with the lock, and %d times without", ctx.locked, ctx.free)
		}
		if places := coalescer.schedule.places; places > 0 {
			t.Errorf("%d places are in use after the call", places)
		}
	}
}
