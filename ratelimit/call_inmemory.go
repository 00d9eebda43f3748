package ratelimit

import "github.com/txlimit/txlimit/internal/decide"

// A database in memory is asked by values: see package decide. It finds the reply, a decide.Asker, where pgx finds a
// QueryRewriter. So a handle or a batch between the two only has to pass the arguments on.

// Question is for a database in memory.
func (r *reply) Question() any {
	if c, ok := r.asks.(*call); ok {
		return c.question()
	}
	return r.asks
}

// Answered is for a database in memory.
func (r *reply) Answered(answer any) { r.answer = answer }

// question is the call for a database in memory.
func (c *call) question() decide.Question {
	q := decide.Question{Op: c.op(), Reserve: c.reserves(), Within: c.within, Lasts: c.lasts, Now: c.now, OrRaise: c.orRaise}
	for i := range c.demands {
		d := &c.demands[i]
		q.Demands = append(q.Demands, decide.Demand{
			ID: decide.ID{Name: d.limit.name, Key: d.key}, Limit: d.numbers, Shards: d.limit.shards, Count: d.count, Lowest: d.lowest(), Pick: d.picks,
		})
		q.Most = d.most
		if c.does.refunds {
			q.Taken = append(q.Taken, c.receipt.algebra(c.receipt.find(d.limit.name, d.key)))
		}
	}
	if c.does.moves {
		q.Demands[1].Lowest = c.lowestOfMove()
	}
	return q
}
