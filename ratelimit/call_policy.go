package ratelimit

// A limit without rows needs no database: a rate of 0 grants no token, and an unlimited limit grants everything. A
// blocked limit may have rows, but they do not decide, and a count of 0 is denied, too. Nothing is sent for such
// demands, except by the verbs about holds: an id counts all the same.

// refusal is why the call is denied without asking. It is empty if it is not.
func (c *call) refusal() (reason Reason) {
	for i := range c.rowless {
		d := &c.rowless[i]
		switch {
		case !c.does.deniable || !d.refused():
		case d.limit.empty() && d.count > 0:
			return ReasonPlan
		default:
			reason = ReasonBlock
		}
	}
	return reason
}

// refused reports whether the limit denies the demand by itself.
func (d *demand) refused() bool { return d.limit.blocked || d.limit.empty() && d.count > 0 }

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
