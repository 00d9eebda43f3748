package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// renewing is an extender of a test, and what was asked of it.
type renewing struct {
	answer func(args dbsqlc.ExtendParams) (dbsqlc.ExtendRow, error) // nil: all are extended
	takes  time.Duration                                            // an answer
	silent func(args dbsqlc.ExtendParams) bool                      // reports whether no answer comes; nil: all come
	began  time.Time

	mu     sync.Mutex
	sent   []time.Duration // since the begin of the test
	rows   []int           // of each statement
	within []time.Duration // for each answer
	closed bool
}

// seen is what was asked so far.
func (r *renewing) seen() (sent []time.Duration, rows []int) {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.sent), slices.Clone(r.rows)
}

// asked is how many statements were sent. An answer may call it.
func (r *renewing) asked() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sent)
}

func (r *renewing) open(context.Context, time.Duration) error { return nil }

func (r *renewing) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
}

func (r *renewing) extend(ctx context.Context, args dbsqlc.ExtendParams) (dbsqlc.ExtendRow, error) {
	until, _ := ctx.Deadline()
	r.mu.Lock()
	r.sent, r.rows, r.within = append(r.sent, time.Since(r.began)), append(r.rows, len(args.Names)), append(r.within, time.Until(until))
	r.mu.Unlock()
	answer := time.After(r.takes)
	if r.silent != nil && r.silent(args) {
		answer = nil
	}
	select {
	case <-answer:
	case <-ctx.Done():
		return dbsqlc.ExtendRow{}, ctx.Err()
	}
	if r.answer == nil {
		return dbsqlc.ExtendRow{}, nil
	}
	return r.answer(args)
}

// start starts a renewer of the test's.
func (r *renewing) start() *renewer {
	r.began = time.Now()
	all := &renewals{}
	of := all.start("pool", r)
	go of.run()
	return of
}

// hold begins a lease of so many rows.
func (r *renewing) hold(of *renewer, id string, rows int, ttl time.Duration) (e *lease, ctx context.Context) {
	of.of.mu.Lock()
	of.users++
	of.of.mu.Unlock()
	e = &lease{r: of, ready: make(chan struct{})}
	all := make([]leaseRow, rows)
	for i := range all {
		all[i] = leaseRow{name: fmt.Sprint("limit", i), key: "k", id: id, uuid: "u"}
	}
	return e, e.begin(context.Background(), all, time.Now(), ttl)
}

func minutes(n ...int) (all []time.Duration) {
	for _, m := range n {
		all = append(all, time.Duration(m)*time.Minute)
	}
	return all
}

// after sleeps, and lets everything happen until then.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// lostAt wants the work to have ended at an instant, by the hold.
func (r *renewing) lostAt(t *testing.T, ctx context.Context, at time.Duration, text string) { //nolint:revive // t comes first in a test
	t.Helper()
	<-ctx.Done()
	synctest.Wait()
	if got, cause := time.Since(r.began), context.Cause(ctx); got != at || !errors.Is(cause, ErrHoldLost) || !strings.Contains(cause.Error(), text) {
		t.Errorf("it ended after %v: %v, want %v: %s", got, cause, at, text)
	}
}

func TestAHoldIsExtendedEveryThirdOfItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &renewing{takes: time.Second}
		of := r.start()
		e, ctx := r.hold(of, "a", 2, 3*time.Minute)
		after(270 * time.Second)
		sent, rows := r.seen()
		if want := minutes(1, 2, 3, 4); !slices.Equal(sent, want) || ctx.Err() != nil || !slices.Equal(rows, []int{2, 2, 2, 2}) {
			t.Errorf("sent at %v, of %v rows, want %v; %v", sent, rows, want, ctx.Err())
		}
		e.end()
		synctest.Wait()
		of.of.mu.Lock()
		defer of.of.mu.Unlock()
		r.mu.Lock()
		defer r.mu.Unlock()
		if !r.closed || ctx.Err() == nil || len(of.of.by) != 0 {
			t.Error("it goes on when nobody uses it")
		}
	})
}

// TestTheWorkEndsBeforeAnotherCanTakeTheSlot: a tenth of the ttl before one ttl has gone since before the last extension was sent.
func TestTheWorkEndsBeforeAnotherCanTakeTheSlot(t *testing.T) {
	broken := errors.New("EOF")
	for name, row := range map[string]struct {
		answers []error // the last one stays
		takes   time.Duration
		ends    time.Duration
		text    string
	}{
		"no extension":             {[]error{broken}, 0, 9 * time.Minute, "in time: EOF"},
		"one extension":            {[]error{nil, broken}, 0, 10*time.Minute/3 + 9*time.Minute, "in time: EOF"},
		"an answer that was late":  {[]error{nil, broken}, 4 * time.Second, 10*time.Minute/3 + 9*time.Minute, "in time: EOF"},
		"answers that do not come": {[]error{nil}, time.Hour, 9 * time.Minute, "in time: context deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &renewing{takes: row.takes}
				r.answer = func(dbsqlc.ExtendParams) (dbsqlc.ExtendRow, error) {
					return dbsqlc.ExtendRow{}, row.answers[min(r.asked(), len(row.answers))-1]
				}
				e, ctx := r.hold(r.start(), "a", 1, 10*time.Minute)
				r.lostAt(t, ctx, row.ends, row.text)
				sent := r.asked()
				after(5 * time.Minute)
				if r.asked() == sent { // the work may take a while to end
					t.Error("it is not extended any more")
				}
				e.end()
			})
		})
	}
}

func TestAFailedExtensionIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &renewing{}
		r.answer = func(dbsqlc.ExtendParams) (dbsqlc.ExtendRow, error) {
			if r.asked() < 4 {
				return dbsqlc.ExtendRow{}, errors.New("EOF")
			}
			return dbsqlc.ExtendRow{}, nil
		}
		e, ctx := r.hold(r.start(), "a", 1, 12*time.Minute)
		after(16 * time.Minute)
		if sent, _ := r.seen(); !slices.Equal(sent, minutes(4, 5, 6, 7, 11, 15)) || ctx.Err() != nil {
			t.Errorf("sent at %v; %v", sent, ctx.Err())
		}
		e.end()
	})
}

// TestASilentConnectionKeepsNoOtherHoldWaiting: the extension of a long ttl is given up before the work of a short one must end.
func TestASilentConnectionKeepsNoOtherHoldWaiting(t *testing.T) {
	for _, ttl := range []time.Duration{10 * time.Second, time.Minute, time.Hour} {
		// Since when the short one is held: it begins, or is due, about when the connection falls silent.
		for _, since := range []time.Duration{-ttl/third + ttl/twelfth + 10*time.Millisecond, -time.Second, time.Second, extendWithin - time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				r := &renewing{takes: 100 * time.Millisecond}
				fails := true
				r.silent = func(args dbsqlc.ExtendParams) bool {
					if fails && slices.Contains(args.Ids, "long") {
						fails = false
						return true
					}
					return false
				}
				of := r.start()
				a, long := r.hold(of, "long", 1, 12*time.Hour)
				after(4*time.Hour + since)
				b, short := r.hold(of, "short", 1, ttl)
				after(6 * time.Hour)
				if fails || short.Err() != nil || long.Err() != nil {
					t.Errorf("a ttl of %v that began at %v: %v; %v", ttl, since, context.Cause(short), context.Cause(long))
				}
				b.end()
				a.end()
			})
		}
	}
}

// TestAnAnswerIsWaitedFor: for a third of the ttl, or 5 seconds.
func TestAnAnswerIsWaitedFor(t *testing.T) {
	for ttl, row := range map[time.Duration]struct{ takes, within time.Duration }{
		100 * time.Millisecond: {30 * time.Millisecond, 100 * time.Millisecond / 3},
		12 * time.Second:       {3 * time.Second, 4 * time.Second},
		time.Minute:            {3 * time.Second, 5 * time.Second},
		time.Hour:              {4 * time.Second, 5 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := &renewing{takes: row.takes}
			e, ctx := r.hold(r.start(), "a", 1, ttl)
			after(3*ttl - ttl/twelfth)
			if ctx.Err() != nil || len(r.within) != 8 || slices.Min(r.within) != row.within || slices.Max(r.within) != row.within {
				t.Errorf("a ttl of %v: answers were waited for %v; %v", ttl, r.within, context.Cause(ctx))
			}
			e.end()
		})
	}
}

// TestABusyRowIsTriedAlone: it keeps no other from being extended, and its hold ends in time.
func TestABusyRowIsTriedAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &renewing{}
		r.answer = func(args dbsqlc.ExtendParams) (row dbsqlc.ExtendRow, err error) {
			for i, id := range args.Ids {
				if id == "b" && args.Names[i] == "limit1" {
					row.Busy = append(row.Busy, int32(i+1))
				}
			}
			return row, nil
		}
		of := r.start()
		a, free := r.hold(of, "a", 1, 12*time.Minute)
		b, busy := r.hold(of, "b", 2, 12*time.Minute)
		r.lostAt(t, busy, 12*time.Minute*9/10, "in time")
		sent, rows := r.seen()
		if want := minutes(4, 5, 6, 7, 8, 9, 10); !slices.Equal(sent, want) || free.Err() != nil {
			t.Errorf("sent at %v, want %v; %v", sent, want, free.Err())
		}
		if want := []int{3, 2, 2, 3, 2, 2, 3}; !slices.Equal(rows, want) {
			t.Errorf("%v rows were sent, want %v", rows, want)
		}
		b.end()
		a.end()
	})
}

func TestALostHoldEndsTheWorkAndASettledOneDoesNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &renewing{}
		r.answer = func(args dbsqlc.ExtendParams) (row dbsqlc.ExtendRow, err error) {
			for i, id := range args.Ids {
				switch id {
				case "lost":
					row.Lost = append(row.Lost, int32(i+1))
				case "settled":
					row.Ended = append(row.Ended, int32(i+1))
				}
			}
			return row, nil
		}
		of := r.start()
		s, settled := r.hold(of, "settled", 2, 3*time.Minute)
		k, kept := r.hold(of, "kept", 1, 3*time.Minute)
		l, lost := r.hold(of, "lost", 1, 3*time.Minute)
		r.lostAt(t, lost, time.Minute, `"limit0"`)
		after(time.Hour)
		if settled.Err() != nil || kept.Err() != nil {
			t.Errorf("%v, %v", settled.Err(), kept.Err())
		}
		if _, rows := r.seen(); rows[0] != 4 || len(rows) < 60 || slices.Max(rows[1:]) != 1 {
			t.Errorf("%v rows were sent: what is over is not extended", rows)
		}
		for _, e := range []*lease{s, k, l} {
			e.end()
		}
	})
}

// TestHoldsThatAreSoonDueShareAStatement, of a thousand rows at most.
func TestHoldsThatAreSoonDueShareAStatement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &renewing{}
		of := r.start()
		a, _ := r.hold(of, "a", 600, 12*time.Minute)
		after(50 * time.Second)
		b, _ := r.hold(of, "b", 400, 12*time.Minute)
		after(50 * time.Second)
		c, _ := r.hold(of, "c", 1, 12*time.Minute)
		after(3 * time.Minute)
		if _, rows := r.seen(); !slices.Equal(rows, []int{1000}) {
			t.Errorf("%v rows were sent", rows)
		}
		d, _ := r.hold(of, "d", 3, 150*time.Second) // the wait for the others is cut short
		after(59 * time.Second)
		if sent, rows := r.seen(); !slices.Equal(rows, []int{1000, 4}) || sent[1] != 330*time.Second {
			t.Errorf("%v rows were sent, at %v", rows, sent)
		}
		for _, e := range []*lease{a, b, c, d} {
			e.end()
		}

		r = &renewing{}
		of = r.start()
		a, _ = r.hold(of, "a", 999, 12*time.Minute)
		b, _ = r.hold(of, "b", 999, 12*time.Minute)
		c, _ = r.hold(of, "c", 1500, 12*time.Minute)
		after(5 * time.Minute)
		_, rows := r.seen()
		slices.Sort(rows)
		if !slices.Equal(rows, []int{999, 999, 1500}) {
			t.Errorf("%v rows were sent", rows)
		}
		for _, e := range []*lease{a, b, c} {
			e.end()
		}
	})
}

// TestAHoldThatWasLongInComingIsExtendedFirst: it has waited for a row, and the work would end at once.
func TestAHoldThatWasLongInComingIsExtendedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, answer := range []string{"extended", "busy", "lost", "failed"} {
			r := &renewing{takes: time.Second}
			r.answer = func(dbsqlc.ExtendParams) (row dbsqlc.ExtendRow, err error) {
				switch {
				case answer == "busy" && r.asked() < 3:
					row.Busy = []int32{1}
				case answer == "lost":
					row.Lost = []int32{1}
				case answer == "failed":
					err = errors.New("EOF")
				}
				return row, err
			}
			of := r.start()
			of.users++
			e := &lease{r: of, ready: make(chan struct{})}
			ctx := e.begin(t.Context(), []leaseRow{{name: "limit"}}, time.Now().Add(-time.Hour), 12*time.Minute)
			select {
			case <-e.ready:
			case <-ctx.Done():
			}
			took, want := time.Since(r.began), map[string]time.Duration{
				"extended": time.Second, "busy": 2*time.Minute + 3*time.Second, "lost": time.Second, "failed": 12 * time.Minute * 9 / 10,
			}[answer]
			if took != want || (ctx.Err() != nil) != (answer == "lost" || answer == "failed") {
				t.Errorf("%s: after %v, want %v: %v", answer, took, want, context.Cause(ctx))
			}
			e.end()
		}
	})
}
