package usage

import (
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// part is what a flush has taken from a limit.
type part struct {
	of      *limit
	minutes map[int64]counts
	hours   map[int64][]denials
}

// collect takes all counts.
func (r *Recorder) collect() (parts []part) {
	known := r.limits.Load()
	if known == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(*known)) {
		l := (*known)[name]
		for i := range l.cells {
			r.empty(l, &l.cells[i])
		}
		l.mu.Lock()
		p := part{of: l, minutes: l.minutes}
		hours := l.hours
		l.minutes, l.hours = nil, nil
		l.mu.Unlock()
		if len(p.minutes)+len(hours) == 0 {
			continue
		}
		p.hours = map[int64][]denials{}
		for hour, s := range hours {
			p.hours[hour] = s.worst()
		}
		parts = append(parts, p)
	}
	return parts
}

// empty moves a cell's counts to the limit's.
func (r *Recorder) empty(l *limit, of *cell) {
	of.mu.Lock()
	slots := of.slot
	for i := range of.slot {
		of.slot[i].counts = counts{}
	}
	of.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range slots {
		if slots[i].counts != (counts{}) {
			r.keep(l, slots[i].minute, slots[i].counts)
		}
	}
}

// putBack keeps what could not be written for the next flush.
func (r *Recorder) putBack(parts []part) {
	for _, p := range parts {
		p.of.mu.Lock()
		for minute, c := range p.minutes {
			r.keep(p.of, minute, c)
		}
		for hour, keys := range p.hours {
			s := p.of.sketch(hour)
			for _, d := range keys {
				s.add(d)
			}
		}
		p.of.mu.Unlock()
	}
}

// drop notes that parts are lost.
func (r *Recorder) drop(parts []part) {
	for _, p := range parts {
		for _, c := range p.minutes {
			r.dropped.Add(c.requests())
		}
	}
}

// statement is how many of the parts the next statement should write.
func statement(parts []part) (n int) {
	rows, keys := 0, 0
	for n < len(parts) && rows < maxRows && keys < maxKept {
		rows += len(parts[n].minutes)
		for _, list := range parts[n].hours {
			keys += len(list)
		}
		n++
	}
	return n
}

// params are the arguments of the statement for some parts.
func (r *Recorder) params(parts []part) (args dbsqlc.RecordUsageParams) {
	args.Keep = r.Keep
	if r.Keep == 0 {
		args.Keep = DefaultKeep
	}
	for _, p := range parts {
		for minute, c := range p.minutes {
			args.Names = append(args.Names, p.of.name)
			args.Minutes = append(args.Minutes, instant(time.Unix(60*minute, 0)))
			args.Granted = append(args.Granted, c.granted)
			args.Denied = append(args.Denied, c.denied)
			args.Failed = append(args.Failed, c.failed)
			args.Tokens = append(args.Tokens, c.tokens)
			args.Refunded = append(args.Refunded, c.refunded)
			args.Waited = append(args.Waited, c.waited)
		}
		for hour, list := range p.hours {
			for _, d := range r.hashed(list) {
				args.DenialNames = append(args.DenialNames, p.of.name)
				args.Hours = append(args.Hours, instant(time.Unix(3600*hour, 0)))
				args.Keys = append(args.Keys, d.key)
				args.Denials = append(args.Denials, d.n)
				args.Asked = append(args.Asked, d.asked)
				args.LastDenied = append(args.LastDenied, instant(time.UnixMicro(d.last)))
			}
		}
	}
	return args
}

// hashed is a list of keys with their hashes in place of them. Keys whose hashes are equal become one.
func (r *Recorder) hashed(list []denials) []denials {
	if r.HashKey == nil {
		return list
	}
	place := map[string]int{}
	var joined []denials
	for _, d := range list {
		if d.key != "" { // the limit has keys
			d.key = r.HashKey(d.key)
		}
		i, known := place[d.key]
		if !known {
			place[d.key] = len(joined)
			joined = append(joined, d)
			continue
		}
		joined[i].add(d)
	}
	return joined
}

func instant(t time.Time) pgtype.Timestamptz {
	return pgtype.Timestamptz{Time: t.UTC(), Valid: true}
}
