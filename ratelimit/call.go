package ratelimit

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// call is one use of a verb, validated by newCall.
type call struct {
	verb      verb
	does      *rules
	schema    string
	asked     []Request // with the limits of the program
	requests  []Request // with the limits in force
	demands   []demand
	rowless   []demand           // that their limits decide by themselves: see call_policy.go
	asides    []demand           // that others deny already
	receipt   *receipt           // for a refund
	hold      *holding           // for a verb about holds
	lasts     time.Duration      // of a Pause
	lifted    []bool             // of a Settle, by demand: it is unlimited by an override. nil: none is
	now       pgtype.Timestamptz // NULL: the database's clock
	local     pgtype.Timestamptz // now, or the clock of a database in memory; NULL: the process's clock
	overrides *overrides
	inForce   []inForce      // by request; nil: no overrides
	old       bool           // the lists of windows reach back far
	orRaise   bool           // a denial is an error of the statement
	within    algebra.Micros // how long the work may wait, if the statement bounds it; algebra.Forever: no bound
	answered  *answer        // by a statement of its own
	patience  algebra.Micros // how long the work may wait, if a floor bounds it that overrides change later; algebra.Forever: no bound
}

// forfeits reports whether a grant may forfeit tokens while its work waits (see algebra.Reserve). Only two kinds can: a
// reservation of a window, and a reservation of several limits, which wait for each other.
func (c *call) forfeits() bool {
	return c.does.owes == upToMaxReserved && (len(c.demands) > 1 || anyOf(c.demands, func(d *demand) bool { return d.limit.numbers.Window }))
}

// reserves reports whether algebra.Reserve has the rule for the call.
func (c *call) reserves() bool { return c.forfeits() || c.within != algebra.Forever }

// tooMuch reports whether the numbers in force can never grant the call. What comes after an override can.
func (c *call) tooMuch() bool {
	return anyOf(c.demands, func(d *demand) bool { return d.tooMuch })
}
