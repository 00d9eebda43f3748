package usage

import (
	"cmp"
	"slices"
	"strings"
)

// sketch counts the most frequent keys with maxKeys counters: Space-Saving. A key without a counter takes over the lowest
// one, and its count: so it may soon be found to be frequent, and keys that come once do not displace frequent ones.
type sketch struct {
	place map[string]int // of each key in the heap
	heap  []counter      // the lowest rank first
}

type counter struct {
	rank int64 // the estimate, which is too high by what was taken over
	denials
}

// denials are those of one key since it has its counter.
type denials struct {
	key   string
	n     int64
	asked float64 // tokens
	last  int64   // microseconds since 1970
}

func (d *denials) add(more denials) {
	d.n += more.n
	d.asked += more.asked
	d.last = max(d.last, more.last)
}

func (s *sketch) add(d denials) {
	i, known := s.place[d.key]
	switch {
	case known:
		s.heap[i].rank += d.n
		s.heap[i].add(d)
		s.down(i)
		return
	case len(s.heap) < maxKeys:
		d.key = strings.Clone(d.key) // it may be a part of a large text
		s.heap = append(s.heap, counter{d.n, d})
		i = len(s.heap) - 1
		s.place[d.key] = i
		s.up(i)
	default:
		d.key = strings.Clone(d.key)
		delete(s.place, s.heap[0].key)
		s.heap[0] = counter{s.heap[0].rank + d.n, d}
		s.place[d.key] = 0
		s.down(0)
	}
}

func (s *sketch) up(i int) {
	for i > 0 {
		above := (i - 1) / 2
		if s.heap[above].rank <= s.heap[i].rank {
			return
		}
		s.swap(i, above)
		i = above
	}
}

func (s *sketch) down(i int) {
	for {
		least := i
		for below := 2*i + 1; below <= 2*i+2 && below < len(s.heap); below++ {
			if s.heap[below].rank < s.heap[least].rank {
				least = below
			}
		}
		if least == i {
			return
		}
		s.swap(i, least)
		i = least
	}
}

func (s *sketch) swap(i, j int) {
	s.heap[i], s.heap[j] = s.heap[j], s.heap[i]
	s.place[s.heap[i].key], s.place[s.heap[j].key] = i, j
}

// worst are the most denied keys, maxWorst at most.
func (s *sketch) worst() []denials {
	all := make([]denials, len(s.heap))
	for i := range s.heap {
		all[i] = s.heap[i].denials
	}
	slices.SortFunc(all, func(a, b denials) int {
		return cmp.Or(cmp.Compare(b.n, a.n), cmp.Compare(b.last, a.last), cmp.Compare(a.key, b.key))
	})
	return all[:min(len(all), maxWorst)]
}
