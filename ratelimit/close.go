package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// life is what [Open] has started, until [Limiter.Close] ends it. A Limiter that Open did not make has none: all methods
// work on nil.
type life struct {
	calls      atomic.Int64  // under way, plus closing
	idle       chan struct{} // closed when there are none, and none may begin
	becameIdle sync.Once

	fields fields // of the Limiter

	over       context.Context    // of the background, and of what runs in a During
	end        context.CancelFunc // ends it
	background sync.WaitGroup
	err        error // of the last flush

	once  sync.Once     // the first Close
	ended chan struct{} // closed when the background and all calls have ended
	told  atomic.Bool   // err was returned
	early atomic.Bool   // a Close in haste ended the background before the calls
}

func newLife() *life { return &life{idle: make(chan struct{}), ended: make(chan struct{})} }

// closing is added to life.calls by Close. There are never so many calls.
const closing = 1 << 62

// enter reports whether a call may begin. If so, leave ends it.
func (f *life) enter() bool {
	if f == nil || f.calls.Add(1) < closing {
		return true
	}
	f.leave()
	return false
}

func (f *life) leave() {
	if f != nil && f.calls.Add(-1) == closing {
		f.becameIdle.Do(func() { close(f.idle) })
	}
}

func (f *life) closed() bool { return f != nil && f.calls.Load() >= closing }

// Close ends what [Open] has started. Call it after the last caller and the Close of each [Coalescer], and close the
// pool last.
//
//   - New calls return [ErrClosed], also in a transaction that began before, but [Limiter.Charge], [Limiter.Refund],
//     [Limiter.Settle] and [Limiter.Release].
//   - It waits for the calls that are under way. If ctx ends before, the contexts of [Limiter.During]'s functions end.
//   - The background ends. The last flush of the usage is written, which takes 5 seconds at most.
//
// ctx must have time left, or the error says that counts may be lost. On a Limiter that Open did not make, Close does
// nothing.
func (l *Limiter) Close(ctx context.Context) error {
	f := l.life
	if f == nil {
		return nil
	}
	f.once.Do(func() {
		f.calls.Add(closing + 1)
		f.leave()
		go func() {
			f.background.Wait() // not before end
			<-f.idle
			close(f.ended)
		}()
	})
	select {
	case <-f.idle:
	case <-ctx.Done():
		f.early.Store(true)
	}
	f.end()
	select {
	case <-f.ended:
	default:
		select {
		case <-f.ended:
		case <-ctx.Done():
			return fmt.Errorf("ratelimit: close: %w: calls or background work have not ended, and the last counts of usage may be lost", over(ctx))
		}
	}
	if f.err != nil && !f.told.Swap(true) {
		return fmt.Errorf("ratelimit: close: %w", inner{f.err})
	}
	return nil
}
