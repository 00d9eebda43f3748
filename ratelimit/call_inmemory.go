package ratelimit

import (
	"errors"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
)

// Package replay decides its events by this function, so that there is one rule for calls, and no second one.
func init() { inmemory.Consume = (*Limiter).consumeInMemory }

// consumeInMemory is Consume for one key, as stored, on a table in memory. The limiter has a Clock, and the limit has no
// shards. The limit's numbers for the key at that time are there too, unless it has no rows, or the call is invalid.
func (l *Limiter) consumeInMemory(t inmemory.Table, limit Limit, key string, count float64) (Result, algebra.Limit, error) {
	r := limit.Global()
	if key != "" {
		r = limit.Key(key)
	}
	r = r.Count(count)
	c, err := l.newCall(verbConsume, "", []Request{r}, nil)
	result, a := unanswered(verbConsume, c.requests), c.byPolicy()
	switch {
	case errors.Is(err, ErrExceedsCapacity):
		charge, _ := l.newCall(verbCharge, "", []Request{r}, nil) // which may
		return result, charge.demands[0].numbers, err
	case err != nil:
		return result, algebra.Limit{}, err
	case a == nil:
		c.lookBack()
	default:
		result.fill(&c, a)
		result, err = c.conclude(result, nil)
		return result, algebra.Limit{}, err
	}
	d, at := &c.demands[0], algebra.At(c.now.Time)
	decided := t.Consume([]inmemory.Demand{{
		ID: inmemory.ID{Name: limit.name, Key: key}, Limit: d.numbers, Shards: 1, Count: d.count, Lowest: d.lowest(),
	}}, false, c.within, inmemory.Higher, at)
	result.fill(&c, &answer{granted: decided.Granted, at: at, rows: decided.Rows})
	result, err = c.conclude(result, nil)
	return result, d.numbers, err
}
