package main

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/ratelimit"
)

// moments are when a key has what, if nothing is taken: by the override in force, or by what follows once it has ended.
type moments struct {
	balance *float64 // now; nil: not known
	// Each is nil if it is never.
	owed    *time.Time // nothing is owed any more
	allowed *time.Time // no block and no rate of 0 denies it: the RetryAt of a block
	enough  *time.Time // one token is granted
	full    *time.Time
}

// chains are overrides in force by their keys, "" for every key. Each list has the one that decides first, and then what follows.
type chains map[string][]override

// chainsOf sorts a list of overrides, which has blocks first, and then the newest.
func chainsOf(list []override) chains {
	c := chains{}
	for _, o := range list {
		if key := ""; o.usable() {
			if o.Key != nil {
				key = *o.Key
			}
			c[key] = append(c[key], o)
		}
	}
	return c
}

// of are the overrides of a key.
func (c chains) of(key *string) []override {
	if key == nil || *key == "" {
		return c[""]
	}
	return slices.Concat(c[*key], c[""])
}

// moments computes them for a key whose overrides are a chain. Where only the program knows the numbers, it may be the instant at which
// they begin to decide.
func (d *defined) moments(ctx context.Context, tx pgx.Tx, key *string, chain []override, at time.Time) (m moments, err error) {
	for from := at; ; {
		chain = slices.DeleteFunc(slices.Clone(chain), func(o override) bool { return o.Until != nil && !o.Until.After(from) })
		var end *time.Time
		for i := range chain {
			if t := chain[i].Until; t != nil && (end == nil || t.Before(*end)) {
				end = t
			}
		}
		blocked := len(chain) > 0 && chain[0].Effect == effectBlock
		var beside *override
		if i := slices.IndexFunc(chain, func(o override) bool { return o.Effect != effectBlock }); i >= 0 {
			beside = &chain[i]
		}
		note := func(to **time.Time, t time.Time) {
			if t = t.UTC(); *to == nil && (end == nil || t.Before(*end)) {
				*to = &t
			}
		}
		owed, enough, full := from, from, from
		switch c, unknown := d.of(beside); {
		case unknown != nil, c.Kind == "unlimited", beside != nil && beside.Effect == effectUnlimited:
		case grantsNothing(c):
			blocked, owed, full = true, never, never
		default:
			var balance float64
			if balance, owed, enough, full, err = queryMoments(ctx, tx, d.Name, key, c, from); err != nil {
				return m, err
			}
			if from.Equal(at) {
				m.balance = &balance
			}
		}
		note(&m.owed, owed)
		note(&m.full, full)
		if !blocked {
			note(&m.allowed, from)
			note(&m.enough, enough)
		}
		if end == nil || m.owed != nil && m.enough != nil && m.full != nil {
			return m, nil
		}
		from = *end
	}
}

// slots are those of a key.
type slots struct {
	used, free float64            // a hold that has expired is free
	retryAt    pgtype.Timestamptz // when one is free at the latest, if none is
}

// enough is when a slot is free at the latest.
func (s *slots) enough(at time.Time) time.Time {
	switch {
	case !s.retryAt.Valid:
		return at
	case s.retryAt.InfinityModifier != pgtype.Finite:
		return never
	}
	return s.retryAt.Time
}

// querySlots reads the slots of a key, if there are so many.
func querySlots(ctx context.Context, tx pgx.Tx, name string, key *string, most float64, at time.Time) (s slots, err error) {
	err = tx.QueryRow(ctx, "SELECT f.used, f.free, f.retry_at FROM _ratelimit_free_slots($1::text, coalesce($2::text, ''), $3::float8, $4::timestamptz) AS f", name, key, most, at).
		Scan(&s.used, &s.free, &s.retryAt)
	return s, err
}

// never is where the arithmetic ends.
var never = time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)

func queryMoments(ctx context.Context, tx pgx.Tx, name string, key *string, c ratelimit.Config, at time.Time) (balance float64, owed, enough, full time.Time, err error) {
	if c.Kind == kindSlots {
		s, err := querySlots(ctx, tx, name, key, *c.Capacity, at)
		return s.free, at, s.enough(at), at, err
	}
	err = tx.QueryRow(ctx, balanceSQL, name, key, *c.Rate, intervalOf(c.Period), c.Kind, *c.Capacity, c.Start, at, optional(c.Zone), optional(c.Anchor)).
		Scan(&balance, &owed, &enough, &full)
	return balance, owed, enough, full, err
}
