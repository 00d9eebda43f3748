package ratelimit

// A limit without rows needs no database: a rate of 0 grants nothing, and an unlimited limit grants everything. A blocked limit may have
// rows, but they do not decide. Nothing is sent for such demands, except by the verbs about holds: an id counts all the same.

// refusal is why the call is denied without asking. It is empty if it is not.
func (c *call) refusal() (reason Reason) {
	for i := range c.rowless {
		d := &c.rowless[i]
		switch {
		case !c.does.deniable || !d.limit.grantsNothing() || d.count == 0:
		case d.limit.empty():
			return ReasonPlan
		default:
			reason = ReasonBlock
		}
	}
	return reason
}

// byPolicy is the answer to a call that is decided without the database, or nil.
func (c *call) byPolicy() *answer {
	reason := c.refusal()
	if reason == "" && (len(c.demands) > 0 || c.rowless == nil || c.does.holds) {
		return nil
	}
	c.asides, c.demands = c.demands, nil // after a denial, they are not asked
	a := &answer{granted: reason == "", at: c.overrides.now(c.local)}
	if len(c.rowless) > 0 {
		a.taken = c.rowless[0].most // nothing bounds it
	}
	return a
}
