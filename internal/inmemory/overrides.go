package inmemory

import (
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// override is a row of ratelimit.overrides. The empty key is every key.
type override struct {
	id int64
	ID
	effect                      string
	rate, capacity, maxReserved pgtype.Float8 // NULL is as defined
	made, ends                  algebra.Micros
}

// overrides are all that the transaction sees, in the order of their ids.
func (s *session) overrides() []override { return changed(s.db.overrides, s.changes) }

// changed are rows after changes. The rows are not changed in place.
func changed(rows, changes []override) []override {
	if len(changes) == 0 {
		return rows
	}
	rows = slices.Clone(rows)
	for _, c := range changes {
		i, found := slices.BinarySearchFunc(rows, c.id, func(o override, id int64) int { return int(o.id - id) })
		if found {
			rows[i] = c
		} else {
			rows = slices.Insert(rows, i, c)
		}
	}
	return rows
}

// restore ends overrides of these effects, and answers how many.
func (s *session) restore(id ID, global bool, effects ...string) (answer any, err error) {
	if global {
		err = s.checkKeyless(id)
	}
	if err != nil {
		return nil, err
	}
	ended := int32(0)
	for _, o := range s.overrides() {
		if o.ID == id && o.ends > s.db.now && slices.Contains(effects, o.effect) {
			o.ends = s.db.now
			s.changes = append(slices.Clip(s.changes), o)
			ended++
		}
	}
	return ended, nil
}

// make adds an override, and answers its id.
func (s *session) make(o override, global bool, until *time.Time, lasts pgtype.Interval) (answer any, err error) {
	if global {
		err = s.checkKeyless(o.ID)
	}
	if err != nil {
		return nil, err
	}
	s.db.lastID++
	o.id, o.made, o.ends = s.db.lastID, s.db.now, algebra.Forever
	switch {
	case until != nil:
		o.ends = algebra.At(*until)
	case lasts.Valid:
		o.ends = s.db.now + algebra.Micros(lasts.Microseconds)
	}
	s.changes = append(slices.Clip(s.changes), o)
	return o.id, nil
}

// page answers all overrides, also those that have ended, and those that are known: package ratelimit passes over the latter.
func (s *session) page() dbsqlc.OverridesRow {
	p := dbsqlc.OverridesRow{
		More: pgtype.Bool{Valid: true}, Snapshot: pgtype.Text{String: "1:1:", Valid: true},
		At: pgtype.Timestamptz{Time: s.db.now.Time(), Valid: true}, Server: pgtype.Timestamptz{Time: start, Valid: true},
	}
	number := func(n pgtype.Float8) float64 {
		if !n.Valid {
			return -1
		}
		return n.Float64
	}
	for _, o := range s.overrides() {
		ends := int64(o.ends)
		if o.ends == algebra.Forever {
			ends = math.MaxInt64
		}
		p.Ids, p.Names, p.Keys, p.Effects = append(p.Ids, o.id), append(p.Names, o.Name), append(p.Keys, o.Key), append(p.Effects, o.effect)
		p.Rates, p.Capacities, p.MaxReserveds = append(p.Rates, number(o.rate)), append(p.Capacities, number(o.capacity)), append(p.MaxReserveds, number(o.maxReserved))
		p.Untils, p.Mades = append(p.Untils, ends), append(p.Mades, int64(o.made))
	}
	return p
}

// under changes what a sweep takes for the numbers: as full as under each override that was in force within a day. It reports whether
// nothing can be swept. Of a limit that varies, spared are the keys with an override.
func (s *session) under(sweep *sweeping) (spared map[string]bool, nothing bool) {
	defined, since := sweep.limit, s.db.now-algebra.Micros((24*time.Hour).Microseconds())
	spared = map[string]bool{}
	for _, o := range s.overrides() {
		switch {
		case o.Name != sweep.name || o.ends <= since:
		case sweep.varies > 0:
			spared[o.Key], nothing = true, nothing || o.Key == ""
		case o.effect == "numbers":
			rate, capacity := defined.Rate, defined.Capacity
			if o.rate.Valid {
				rate = o.rate.Float64
			}
			if capacity == defined.Rate {
				capacity = rate
			}
			if o.capacity.Valid {
				capacity = o.capacity.Float64
			}
			sweep.limit.Rate, sweep.limit.Capacity = min(sweep.limit.Rate, rate), max(sweep.limit.Capacity, capacity)
		}
	}
	return spared, nothing
}
