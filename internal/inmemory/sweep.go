package inmemory

import (
	"cmp"
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// sweeping is a statement that deletes idle rows. Nothing is published here, so the numbers are those of the caller.
type sweeping struct {
	name   string
	limit  algebra.Limit // without the start of a window
	start  func(key string, row Row) algebra.Micros
	varies algebra.Micros // within it, any numbers fill a row from 0; 0: they are those of limit
	at     algebra.Micros // since when a row must have been full
}

// readSweep ignores the key to begin with: here, a sweep is one batch.
func readSweep(p dbsqlc.SweepParams, now algebra.Micros) sweeping {
	s := sweeping{name: p.Name, limit: algebra.Limit{Rate: p.Rate, Period: p.Period, Capacity: p.Capacity}}
	s.varies = algebra.Micros(int64(p.Varies.Days)*24*time.Hour.Microseconds() + p.Varies.Microseconds)
	if p.Now != nil {
		now = algebra.At(*p.Now)
	}
	s.at = now - algebra.Micros(time.Hour.Microseconds())
	s.limit.Window = p.Kind == "fixed window" || p.Kind == "calendar window"
	s.start = func(key string, row Row) algebra.Micros {
		switch {
		case p.Unit.Valid: // each key may have a zone of its own
			return row.TS
		case p.Start != nil:
			return algebra.At(*p.Start)
		}
		return algebra.Grid(cmp.Or(key, s.name), s.limit.Period)
	}
	for _, u := range calendar.Units {
		c := calendar.Calendar{Unit: u}
		if months, days := c.Step(); p.Unit.Valid && months == int(p.Unit.Months) && days == int(p.Unit.Days) {
			s.limit.Period = c.Longest()
		}
	}
	return s
}

// idle reports whether no call can tell a key's rows from missing ones: they were full at an instant, and at every later one.
func (s sweeping) idle(key string, rows []Row) bool {
	n := len(rows)
	return n > 0 && !slices.ContainsFunc(rows, func(row Row) bool {
		l := s.limit
		if l.Window {
			l.Start = s.start(key, row)
		}
		switch {
		case row.TS > l.UpTo(s.at):
			return true
		case s.varies > 0:
			return row.Value <= -algebra.MinTokens || s.at-row.TS <= s.varies
		}
		return l.Available(row.Row, n, s.at) != l.Capacity/float64(n)
	})
}

// sweep deletes idle rows, and returns how many.
func (s *session) sweep(sweep sweeping) (deleted int) {
	spared, nothing := s.under(&sweep)
	if nothing {
		return 0
	}
	for _, table := range []Table{s.db.table, s.table} {
		for id := range table {
			if id.Name != sweep.name || spared[id.Key] {
				continue
			}
			s.touch(id)
			if rows := s.table[id]; sweep.idle(id.Key, rows) {
				deleted += len(rows)
				delete(s.table, id)
			}
		}
	}
	return deleted
}
