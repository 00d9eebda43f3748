package replay

import (
	"container/heap"
	"iter"
	"time"
)

// Reorder sorts events that are out of order by less than within, as in the log of a web server, which writes the time at
// which a request began when the request has ended. Events of one time stay in their order. An event that comes later than that
// stays out of order, and [Run] reports it. The memory is bounded by the number of events in that time.
func Reorder(events iter.Seq2[Event, error], within time.Duration) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		var waiting byTime
		var newest time.Time
		within = max(within, 0)
		for event, err := range events {
			if err != nil {
				if !yield(event, err) {
					return
				}
				continue
			}
			if event.Time.Before(newest.Add(-within)) { // too late
				if !yield(event, nil) {
					return
				}
				continue
			}
			heap.Push(&waiting, arrival{event, waiting.arrived})
			waiting.arrived++
			if event.Time.After(newest) {
				newest = event.Time
			}
			for waiting.list[0].Time.Before(newest.Add(-within)) {
				if !yield(heap.Pop(&waiting).(arrival).Event, nil) {
					return
				}
			}
		}
		for waiting.Len() > 0 {
			if !yield(heap.Pop(&waiting).(arrival).Event, nil) {
				return
			}
		}
	}
}

// arrival is an event and its number.
type arrival struct {
	Event
	nth int
}

// byTime is a heap.
type byTime struct {
	list    []arrival
	arrived int
}

func (h *byTime) Len() int      { return len(h.list) }
func (h *byTime) Swap(i, j int) { h.list[i], h.list[j] = h.list[j], h.list[i] }
func (h *byTime) Push(x any)    { h.list = append(h.list, x.(arrival)) }

func (h *byTime) Less(i, j int) bool {
	a, b := h.list[i], h.list[j]
	return a.Time.Before(b.Time) || a.Time.Equal(b.Time) && a.nth < b.nth
}

func (h *byTime) Pop() any {
	last := h.list[len(h.list)-1]
	h.list = h.list[:len(h.list)-1]
	return last
}
