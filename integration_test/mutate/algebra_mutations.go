package main

// algebraMutations are edits of the arithmetic: internal/algebra and internal/calendar.
var algebraMutations = []mutation{
	{
		name: "algebra-move-mints", file: "internal/algebra/algebra.go", what: "in the library, a move gives tokens to a limit that has less",
		old: "left := min(l.Total(rows, now), max(floor,", new: "left := (max(floor,",
		tests: "TestMove",
	}, {
		name: "algebra-move-ts", file: "internal/algebra/algebra.go", what: "in the library, a move forgets that what it counts was used later",
		old: "left, latest(used, latest(rows, now)))", new: "left, latest(rows, now))",
		tests: "TestMove",
	}, {
		name: "algebra-time-backwards", file: "internal/algebra/algebra.go", what: "time that runs backwards takes tokens from a bucket",
		old: "max(seconds(to-from), 0)*rate", new: "seconds(to-from)*rate",
		tests: "TestAvailable",
	}, {
		name: "algebra-windows-backwards", file: "internal/algebra/algebra.go", what: "time that runs backwards takes tokens from a window",
		old: "float64(max(l.begun(from, to), 0) * rate)", new: "float64(l.begun(from, to) * rate)",
		tests: "TestAvailable",
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
		name: "algebra-tolerance", file: "internal/algebra/algebra.go", what: "the library expects that sums are denied for their rounding",
		old: "toleranceShare  = 1e-9", new: "toleranceShare  = 0",
		tests: "TestASumThatRoundingMakesTooLittleIsEnough",
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
		name: "promise-forfeits-nothing", file: "internal/algebra/promise.go", what: "a reservation that waits forfeits nothing",
		old: "if runAt > now && l.Holds(d.Count) &&", new: "if false &&",
		tests: "TestReserve",
	}, {
		name: "promise-above-capacity", file: "internal/algebra/promise.go", what: "a reservation of more than the capacity forfeits tokens, although it has no promise",
		old: "if runAt > now && l.Holds(d.Count) &&", new: "if runAt > now &&",
		tests: "TestReserve",
	}, {
		name: "promise-others-wait", file: "internal/algebra/promise.go", what: "a token bucket that another limit makes wait forfeits nothing",
		old: "(l.Window || runAt > own[i])", new: "l.Window",
		tests: "TestReserve",
	}, {
		name: "promise-latest", file: "internal/algebra/promise.go", what: "the refill that a limit would get counts from now, although its rows were refilled later",
		old: "l.refill(earliest(d.Rows, now), runAt, 1)", new: "l.refill(now, runAt, 1)",
		tests: "TestReserve",
	}, {
		name: "calendar-twice", file: "internal/calendar/calendar.go", what: "of a local time that occurs twice, the earlier one counts",
		old: "algebra.Micros(max(x, y) * 1e6)", new: "algebra.Micros(min(x, y) * 1e6)",
		tests: "TestCalendarWindows|TestACalendarWindowBeginsByItsZoneAndAnchor",
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
		name: "anchor-fraction", file: "internal/calendar/calendar.go", what: "the library ignores a fraction of a second in an anchor",
		old: "err == nil && t.Format(layout) == text", new: "err == nil",
		tests: "TestParseAnchor",
	}, {
		name: "anchor-text", file: "internal/calendar/calendar.go", what: "an anchor's text loses its seconds",
		old: "second != 0 {", new: "second < 0 {",
		tests: "TestParseAnchor",
	}, {
		name: "calendar-refund-unknown-go", file: "internal/algebra/promise.go", what: "the library counts windows that are not in the list as not begun",
		old: "now < (*l.Windows)[0] || l.Unknown(taken.RunAt)", new: "false",
		tests: "TestARefundByAClockThatIsYearsOffGivesNothingBack",
	}, {
		name: "promise-floor", file: "internal/algebra/promise.go", what: "forfeited tokens may take the balance below the floor",
		old: "granted = granted && d.Enough(left[i])", new: "granted = granted && d.Limit.Enough(d.Rows, d.Count, d.Floor, now)",
		tests: "TestReserve",
	}, {
		name: "promise-retry-early", file: "internal/algebra/promise.go", what: "a denied reservation gets the RetryAt of one that forfeits nothing",
		old: "if at := firstAfter(now, guess, enough); !unknown(ds, at) {", new: "if at := guess; enough != nil && !unknown(ds, at) {",
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
		name: "promise-listed-last", file: "internal/algebra/promise.go", what: "work that runs as the last window of a list begins is denied",
		old: "l.number(runAt-1)-l.number(now) >= d.Listed-1", new: "l.number(runAt)-l.number(now) >= d.Listed-1",
		tests: "TestReserveListed",
	}, {
		name: "promise-refilled", file: "internal/algebra/promise.go", what: "a bucket gets back tokens that were refilled since",
		old: "max(missing-refilled-owed, 0)", new: "max(missing-0*refilled-owed, 0)",
		tests: "TestRefund",
	}, {
		name: "promise-held", file: "internal/algebra/promise.go", what: "a bucket gets back tokens that it did not miss",
		old: "float64(l.Capacity*taken.Part) - taken.Held", new: "float64(l.Capacity*taken.Part)",
		tests: "TestRefund",
	}, {
		name: "promise-part", file: "internal/algebra/promise.go", what: "a shard gets back the tokens that the whole limit would miss",
		old: "float64(l.Capacity*taken.Part)", new: "l.Capacity",
		tests: "TestRefund",
	}, {
		name: "promise-debt", file: "internal/algebra/promise.go", what: "a refund pays the debt of waiting work, and lets the next work run before it",
		old: "missing-refilled-owed", new: "missing-refilled",
		tests: "TestRefund",
	}, {
		name: "promise-time-backwards", file: "internal/algebra/promise.go", what: "rows from before a consumption get its refund",
		old: "	if now < taken.At {\n", new: "	if false {\n",
		tests: "TestRefund",
	}, {
		name: "promise-refund-latest", file: "internal/algebra/promise.go", what: "the refill counts up to now, although the rows were refilled later",
		old: "	now = latest(rows, now)\n", new: "",
		tests: "TestRefund",
	}, {
		name: "promise-refund-above-capacity", file: "internal/algebra/promise.go", what: "a job of more than the capacity is refunded, although it has no promise",
		old: "case !l.Holds(taken.Count), wait", new: "case wait",
		tests: "TestRefund",
	}, {
		name: "promise-saved-up-always", file: "internal/algebra/promise.go", what: "a window that saves nothing up is also refunded only if no debt moves",
		old: "case wait > 0 && l.Capacity > l.Rate && ", new: "case wait > 0 && ",
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
		name: "promise-charges", file: "internal/algebra/promise.go", what: "the debt of a charge swallows what others give back",
		old: "waiting := taken.Promised != 0 && taken.Promised > clock", new: "waiting := true",
		tests: "TestRefund|TestOrders",
	}, {
		name: "promise-forgotten", file: "internal/algebra/promise.go", what: "a reservation of a bucket is taken for a charge",
		old: "math.IsInf(lowest, -1) || left", new: "true || left",
		tests: "TestReservationsKeepPromises",
	}, {
		name: "promise-late", file: "internal/algebra/promise.go", what: "a later window gets a refund",
		old: "wait < 0, (wait", new: "(wait",
		tests: "TestRefund",
	}, {
		name: "promise-behind-others", file: "internal/algebra/promise.go", what: "a window gets a refund although other work waits behind it",
		old: " (wait > 0 || waiting) && owes(total, wait), ", new: " ",
		tests: "TestRefund",
	}, {
		name: "promise-not-the-last", file: "internal/algebra/promise.go", what: "a window gets a refund although its debt ends before",
		old: ", wait > 0 && !owes(total, wait-1):", new: ":",
		tests: "TestRefund",
	}, {
		name: "promise-saved-up", file: "internal/algebra/promise.go", what: "a refund to a window that saves up makes its debt end before it",
		old: "	case wait > 0 && l.Capacity > l.Rate && !owes(total+count, wait-1):\n		return 0\n", new: "",
		tests: "TestRefund",
	}, {
		name: "wait-too-long", file: "internal/algebra/promise.go", what: "the library expects that work may wait beyond its deadline",
		old: " || own[i]-now > within {", new: " {",
		tests: "TestReserveWithin",
	}, {
		name: "wait-never-enough", file: "internal/algebra/promise.go", what: "a balance of -Inf is enough for a reservation without a bound",
		old: "return !math.IsInf(left, -1) && left >=", new: "return left >=",
		tests: "TestReserveWithin",
	}, {
		name: "wait-retry-guess", file: "internal/algebra/promise.go", what: "the instant at which a wait becomes short enough is missed",
		old: "guess = max(guess, runAt-within)", new: "_ = runAt",
		tests: "TestReserveWithin",
	}, {
		name: "whole-above-the-most", file: "internal/algebra/algebra.go", what: "a check reports more than the count",
		old: "return min(most, l.whole(", new: "return min(math.Inf(1), l.whole(",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "whole-parts", file: "internal/algebra/algebra.go", what: "a check reports that a fraction of a token would be taken",
		old: "	n := math.Floor(total - lowest)\n", new: "	n := total - lowest\n",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "whole-tolerance", file: "internal/algebra/algebra.go", what: "a check leaves out a token that only rounding makes too small",
		old: "l.whole(l.Total(rows, now), l.Lowest(0))", new: "l.whole(l.Total(rows, now), 0)",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "period-overflow", file: "internal/calendar/period.go", what: "a period of too many days becomes a short period",
		old: "|| hours > (math.MaxInt64-fixed)/time.Duration(long.hours)", new: "",
		tests: "TestParsePeriod",
	}, {
		name: "period-overflow-sum", file: "internal/calendar/period.go", what: "a period of too many hours becomes a short period",
		old: "|| short > math.MaxInt64-fixed", new: "",
		tests: "TestParsePeriod",
	}, {
		name: "period-sign", file: "internal/calendar/period.go", what: "hours can be subtracted from days",
		old: "rest != text && strings.ContainsAny(rest, \"+-\")", new: "false",
		tests: "TestParsePeriod",
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
		name: "algebra-even-rate", file: "internal/algebra/algebra.go", what: "a debt that only rounding leaves of a limit without a capacity stays",
		old: "return -l.tolerance(min(total, 0) - l.Rate)", new: "return -l.tolerance(min(total, 0))",
		tests: "TestRoundingOwesNothing",
	}, {
		name: "algebra-holds", file: "internal/algebra/algebra.go", what: "a count of the capacity has no promise, since rounding made it more",
		old: "return l.Capacity-count >= l.Lowest(0)", new: "return l.Capacity >= count",
		tests: "TestACountAboveTheCapacityIsRefused",
	}, {
		name: "algebra-whole-rounded-up", file: "internal/algebra/algebra.go", what: "a whole number that only the rounding of a difference makes is taken",
		old: "	if total-n < lowest {", new: "	if false {",
		tests: "TestWholeLeavesNoLessThanTheLowest",
	}, {
		name: "algebra-shown", file: "internal/algebra/algebra.go", what: "a debt that only rounding makes is shown",
		old: "	case total >= l.even(total):\n		return 0\n", new: "",
		tests: "TestRoundingNeverDenies",
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
