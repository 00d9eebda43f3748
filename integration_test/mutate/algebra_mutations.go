package main

// algebraMutations are edits of the arithmetic: internal/algebra and internal/calendar.
var algebraMutations = []mutation{
	{
		name: "algebra-move-ts", file: "internal/algebra/algebra.go", what: "in the library, a move forgets that what it counts was used later",
		old: "left, latest(used, latest(rows, now)))", new: "left, latest(rows, now))",
		tests: "TestMove",
	}, {
		name: "algebra-unclamped", file: "internal/algebra/algebra.go", what: "a row may hold more than the capacity",
		old: "available < capacity {", new: "available < math.Inf(1) {",
		tests: "TestAvailable",
	}, {
		name: "algebra-windows-rounded-down", file: "internal/algebra/algebra.go", what: "a quotient of doubles is rounded down to too few windows",
		old: "math.RoundToEven(", new: "math.Floor(",
		tests: "TestAvailable",
	}, {
		name: "algebra-last-token", file: "internal/algebra/algebra.go", what: "the library expects that the last token is denied (>= to >)",
		old: "return l.Total(rows, now)-count >= l.Lowest(floor)", new: "return l.Total(rows, now)-count > floor",
		tests: "TestALimitWithoutRowsIsFull|TestASumThatRoundingMakesTooLittleIsEnough",
	}, {
		name: "algebra-full-shards", file: "internal/algebra/algebra.go", what: "the library adds up full shards to a little more or less than the capacity",
		old: "	case l.Capacity / n:\n", new: "	case math.NaN():\n",
		tests: "TestFullShardsHoldTheCapacity",
	}, {
		name: "algebra-equal-shards", file: "internal/algebra/algebra.go", what: "the library adds up equal shares one by one, and each sum is rounded the same way",
		old: "	case highest:\n", new: "	case math.NaN():\n",
		tests: "TestEqualSharesAreNotRoundedAway",
	}, {
		name: "algebra-retry-early", file: "internal/algebra/algebra.go", what: "RetryAt is a microsecond early",
		old: "	return last\n", new: "	return last - 1\n",
		tests: "TestWhenIsExact",
	}, {
		name: "algebra-retry-late", file: "internal/algebra/algebra.go", what: "RetryAt is a bare quotient, which is sometimes a little late",
		old: "			last = guess\n			guess -= min(step, last-before)", new: "			return guess",
		tests: "TestWhenIsExact",
	}, {
		name: "promise-latest", file: "internal/algebra/promise.go", what: "the refill that a limit would get counts from now, although its rows were refilled later",
		old: "l.refill(earliest(d.Rows, now), runAt, 1)", new: "l.refill(now, runAt, 1)",
		tests: "TestReserve",
	}, {
		name: "calendar-last-day", file: "internal/calendar/calendar.go", what: "in a month with 30 days, the 31st is the 1st of the next month",
		old: "min(day, last), hour", new: "min(day, last+31), hour",
		tests: "TestCalendarWindows|TestACalendarWindowBeginsByItsZoneAndAnchor",
	}, {
		name: "calendar-time-of-day", file: "internal/calendar/calendar.go", what: "a month begins at the anchor's minute, without its seconds",
		old: "min(day, last), hour, minute, second, 0", new: "min(day, last), hour, minute, 0*second, 0",
		tests: "TestStart|TestCalendarWindows",
	}, {
		name: "calendar-wall", file: "internal/calendar/calendar.go", what: "whether a change of the offset skips a local time is looked up at midnight",
		old: "time.Date(year, month, day, hour, minute, second, 0, loc)", new: "time.Date(year, month, day, 0*hour, 0*minute, 0*second, 0, loc)",
		tests: "TestStart|TestCalendarWindows",
	}, {
		name: "anchor-text", file: "internal/calendar/calendar.go", what: "an anchor's text loses its seconds",
		old: "second != 0 {", new: "second < 0 {",
		tests: "TestParseAnchor",
	}, {
		name: "promise-floor", file: "internal/algebra/promise.go", what: "forfeited tokens may take the balance below the floor",
		old: "granted = granted && d.Enough(left[i])", new: "granted = granted && d.Limit.Enough(d.Rows, d.Count, d.Floor, now)",
		tests: "TestReserve",
	}, {
		name: "promise-retry-early", file: "internal/algebra/promise.go", what: "a denied reservation gets the RetryAt of one that forfeits nothing",
		old: "if at := firstAfter(now, guess, enough); at < Max && !unknown(ds, at) {", new: "if at := guess; enough != nil && !unknown(ds, at) {",
		tests: "TestReserve",
	}, {
		name: "promise-listed", file: "internal/algebra/promise.go", what: "a list of windows that is longer than the call's tells of a denied reservation that it would be granted",
		old: "if d.unknown(now, runAt) ||", new: "if l.Unknown(runAt) ||",
		tests: "TestReserveListed",
	}, {
		name: "promise-listed-later", file: "internal/algebra/promise.go", what: "the lists of later calls reach no further than the first one's",
		old: "l.number(runAt-1)-l.number(now) >= d.Listed-1", new: "l.number(runAt-1) >= d.Listed",
		tests: "TestReserveListed",
	}, {
		name: "promise-part", file: "internal/algebra/promise.go", what: "a shard gets back the tokens that the whole limit would miss",
		old: "float64(l.Capacity*taken.Part)", new: "l.Capacity",
		tests: "TestRefund",
	}, {
		name: "promise-refund-tolerance", file: "internal/algebra/promise.go", what: "the shards of a window owe what was lost by rounding",
		old: "even := l.even(total)", new: "even := 0.0",
		tests: "TestRefund",
	}, {
		name: "promise-part-refilled", file: "internal/algebra/promise.go", what: "missing tokens of one shard are refilled at its rate alone, although the balance is spread over all",
		old: "seconds(elapsed)*l.Rate)", new: "seconds(elapsed)*l.Rate*taken.Part)",
		tests: "TestRefund",
	}, {
		name: "whole-above-the-most", file: "internal/algebra/algebra.go", what: "a check reports more than the count",
		old: "return min(most, l.whole(", new: "return min(math.Inf(1), l.whole(",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "whole-tolerance", file: "internal/algebra/algebra.go", what: "a check leaves out a token that only rounding makes too small",
		old: "l.whole(l.Total(rows, now), l.Lowest(0))", new: "l.whole(l.Total(rows, now), 0)",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "period-week", file: "internal/calendar/period.go", what: "a week has 6 days",
		old: "{\"w\", 7 * 24}", new: "{\"w\", 6 * 24}",
		tests: "TestParsePeriod",
	}, {
		name: "algebra-tolerance-a-token", file: "internal/algebra/algebra.go", what: "a whole token that is not there is granted, of a large limit",
		old: "toleranceTokens = 1e-3", new: "toleranceTokens = 1e3",
		tests: "TestWholeTokensAreExactAtEveryCapacity",
	}, {
		name: "algebra-repaid", file: "internal/algebra/algebra.go", what: "the library says that work waits for another window because of rounding",
		old: "		return l.When(rows, 0, l.even(l.Total(rows, now)), now)\n", new: "		return l.When(rows, 0, 0, now)\n",
		tests: "TestRoundingOwesNothing",
	}, {
		name: "algebra-holds", file: "internal/algebra/algebra.go", what: "a count of the capacity has no promise, since rounding made it more",
		old: "return l.Capacity-count >= l.Lowest(0)", new: "return l.Capacity >= count",
		tests: "TestACountAboveTheCapacityIsRefused",
	}, {
		name: "algebra-shown-rest", file: "internal/algebra/algebra.go", what: "less than the smallest count is shown",
		old: "case total >= MinTokens:", new: "case total > 0:",
		tests: "TestTheToleranceIsOneNumber",
	}, {
		name: "demand-lowest", file: "ratelimit/call_demand.go", what: "the library asks for more than rounding leaves",
		old: "return d.limit.numbers.Lowest(d.floor)", new: "return d.floor",
		tests: "TestRoundingNeverDenies",
	}, {
		name: "request-rest", file: "ratelimit/request.go", what: "what rounding leaves of a difference is no valid count",
		old: "math.Abs(tokens) < algebra.MinTokens", new: "math.Abs(tokens) < 0*algebra.MinTokens",
		tests: "TestARestBelowTheSmallestCountIsNothing",
	}, {
		name: "coalescer-tolerance", file: "ratelimit/coalescer_batch.go", what: "the library expects other decisions of a batch than the database",
		old: "b.numbers(g, d).Enough(g.rows, d.count, d.floor, g.at)", new: "(b.numbers(g, d).Total(g.rows, g.at)-d.count >= d.floor)",
		tests: "TestRoundingNeverDeniesInABatch",
	},
}
