package main

// algebraMutations are edits of the arithmetic: internal/algebra and internal/calendar.
var algebraMutations = []mutation{
	{
		name: "algebra-time-backwards", file: "internal/algebra/algebra.go", what: "time that runs backwards takes from a bucket",
		old: "max(seconds(to-from), 0)*rate", new: "seconds(to-from)*rate",
		tests: "TestAvailable",
	}, {
		name: "algebra-windows-backwards", file: "internal/algebra/algebra.go", what: "time that runs backwards takes a window's tokens",
		old: "float64(max(l.begun(from, to), 0) * rate)", new: "float64(l.begun(from, to) * rate)",
		tests: "TestAvailable",
	}, {
		name: "algebra-unclamped", file: "internal/algebra/algebra.go", what: "a row may hold more than the capacity",
		old: "available < capacity {", new: "available < math.Inf(1) {",
		tests: "TestAvailable",
	}, {
		name: "algebra-windows-rounded-down", file: "internal/algebra/algebra.go", what: "a quotient of doubles is rounded down to whole windows",
		old: "math.RoundToEven(", new: "math.Floor(",
		tests: "TestAvailable",
	}, {
		name: "algebra-last-token", file: "internal/algebra/algebra.go", what: "the library thinks that the last token is denied (>= to >)",
		old: "return l.Total(rows, now)-count >= floor", new: "return l.Total(rows, now)-count > floor",
		tests: "TestALimitWithoutRowsIsFull",
	}, {
		name: "algebra-no-slack", file: "internal/algebra/algebra.go", what: "the library thinks that rounded sums over shards are denied",
		old: "const Slack = 1e-9", new: "const Slack = 0",
		tests: "TestASumThatRoundingMakesTooLittleIsEnough",
	}, {
		name: "algebra-full-shards", file: "internal/algebra/algebra.go", what: "the library adds up full shards to a little less, or more, than the capacity",
		old: "	case l.Capacity / n:\n", new: "	case math.NaN():\n",
		tests: "TestFullShardsHoldTheCapacity",
	}, {
		name: "algebra-equal-shards", file: "internal/algebra/algebra.go", what: "the library adds up equal shares one by one, each sum rounded the same way",
		old: "	case highest:\n", new: "	case math.NaN():\n",
		tests: "TestEqualSharesAreNotRoundedAway",
	}, {
		name: "algebra-retry-early", file: "internal/algebra/algebra.go", what: "RetryAt is a microsecond early",
		old: "	return last\n", new: "	return last - 1\n",
		tests: "TestWhenIsExact",
	}, {
		name: "algebra-retry-late", file: "internal/algebra/algebra.go", what: "RetryAt is what a quotient says, which is a little late at times",
		old: "			last = guess\n			guess -= min(step, last-before)", new: "			return guess",
		tests: "TestWhenIsExact",
	}, {
		name: "promise-forfeits-nothing", file: "internal/algebra/promise.go", what: "a reservation that waits forfeits nothing",
		old: "if runAt > now && d.Count <= l.Capacity &&", new: "if false &&",
		tests: "TestReserve",
	}, {
		name: "promise-above-capacity", file: "internal/algebra/promise.go", what: "a reservation of more than the capacity forfeits, though no promise holds for it",
		old: "if runAt > now && d.Count <= l.Capacity &&", new: "if runAt > now &&",
		tests: "TestReserve",
	}, {
		name: "promise-others-wait", file: "internal/algebra/promise.go", what: "a token bucket that another limit makes wait forfeits nothing",
		old: "(l.Window || runAt > own[i])", new: "l.Window",
		tests: "TestReserve",
	}, {
		name: "promise-latest", file: "internal/algebra/promise.go", what: "what a limit would refill counts from now, though its rows were refilled later",
		old: "l.refill(earliest(d.Rows, now), runAt, 1)", new: "l.refill(now, runAt, 1)",
		tests: "TestReserve",
	}, {
		name: "calendar-midnight", file: "internal/calendar/calendar.go", what: "a midnight that comes twice is the earlier one",
		old: "algebra.Micros(max(x, y) * 1e6)", new: "algebra.Micros(min(x, y) * 1e6)",
		tests: "TestCalendarWindows|TestACalendarWindowBeginsAtMidnightInItsZone",
	}, {
		name: "calendar-last-day", file: "internal/calendar/calendar.go", what: "the 31st of a month with 30 days is the 1st of the next one",
		old: "min(day, last), loc)", new: "min(day, last+31), loc)",
		tests: "TestCalendarWindows|TestACalendarWindowBeginsAtMidnightInItsZone",
	}, {
		name: "calendar-refund-unknown-go", file: "internal/algebra/promise.go", what: "the library counts windows that are not in the list as if none had begun",
		old: "now < (*l.Windows)[0] || l.Unknown(taken.RunAt)", new: "false",
		tests: "TestARefundByAClockThatIsYearsOffGivesNothingBack",
	}, {
		name: "promise-floor", file: "internal/algebra/promise.go", what: "what is forfeited may be below the floor",
		old: "granted = granted && d.Enough(left[i])", new: "granted = granted && d.Limit.Enough(d.Rows, d.Shards, d.Count, d.Floor, now)",
		tests: "TestReserve",
	}, {
		name: "promise-retry-early", file: "internal/algebra/promise.go", what: "a reservation that is denied is told the instant at which it would do without what it forfeits",
		old: "	return firstAfter(now, guess, enough)\n", new: "	return guess\n",
		tests: "TestReserve",
	}, {
		name: "promise-refilled", file: "internal/algebra/promise.go", what: "a bucket gets back what was refilled since",
		old: "- taken.Held - refilled", new: "- taken.Held - 0*refilled",
		tests: "TestRefund",
	}, {
		name: "promise-held", file: "internal/algebra/promise.go", what: "a bucket gets back what it was not short of",
		old: "- taken.Held - refilled", new: "- refilled",
		tests: "TestRefund",
	}, {
		name: "promise-part", file: "internal/algebra/promise.go", what: "a shard gets back what the whole limit would be short of",
		old: "float64(l.Capacity*taken.Part)", new: "l.Capacity",
		tests: "TestRefund",
	}, {
		name: "promise-debt", file: "internal/algebra/promise.go", what: "a refund pays a debt that waits, and lets the next one run before it",
		old: "missing+min(total, 0)", new: "missing",
		tests: "TestRefund",
	}, {
		name: "promise-time-backwards", file: "internal/algebra/promise.go", what: "rows of before a consumption get it back",
		old: "if now < taken.At || total", new: "if total",
		tests: "TestRefund",
	}, {
		name: "promise-refund-latest", file: "internal/algebra/promise.go", what: "what was refilled counts to now, though the rows were refilled later",
		old: "	now = latest(rows, now)\n", new: "",
		tests: "TestRefund",
	}, {
		name: "promise-refund-above-capacity", file: "internal/algebra/promise.go", what: "a job of more than the capacity, for which no promise holds, is refunded",
		old: "case taken.Count > l.Capacity, wait", new: "case wait",
		tests: "TestRefund",
	}, {
		name: "promise-saved-up-always", file: "internal/algebra/promise.go", what: "a window that saves nothing up, too, is refunded only what moves no debt",
		old: "case wait > 0 && l.Capacity > l.Rate && ", new: "case wait > 0 && ",
		tests: "TestRefund",
	}, {
		name: "promise-refund-no-slack", file: "internal/algebra/promise.go", what: "windows of shards owe what rounding has made too little",
		old: "< -slack(len(rows))", new: "< 0",
		tests: "TestRefund",
	}, {
		name: "promise-part-refilled", file: "internal/algebra/promise.go", what: "what one shard lacks is made up for at its rate alone, though what is left is spread over all",
		old: "seconds(now-taken.At)*l.Rate)", new: "seconds(now-taken.At)*l.Rate*taken.Part)",
		tests: "TestRefund",
	}, {
		name: "promise-late", file: "internal/algebra/promise.go", what: "a later window takes a refund",
		old: "wait < 0, owes", new: "owes",
		tests: "TestRefund",
	}, {
		name: "promise-behind-others", file: "internal/algebra/promise.go", what: "a window takes a refund that somebody waits behind",
		old: " owes(total, wait), ", new: " ",
		tests: "TestRefund",
	}, {
		name: "promise-not-the-last", file: "internal/algebra/promise.go", what: "a window takes a refund though its debt ends before",
		old: ", wait > 0 && !owes(total, wait-1):", new: ":",
		tests: "TestRefund",
	}, {
		name: "promise-saved-up", file: "internal/algebra/promise.go", what: "a refund to a window that saves up lets its debt end before",
		old: "	case wait > 0 && l.Capacity > l.Rate && !owes(total+count, wait-1):\n		return 0\n", new: "",
		tests: "TestRefund",
	}, {
		name: "wait-too-long", file: "internal/algebra/promise.go", what: "the library thinks that work may wait beyond its deadline",
		old: " || own[i]-now > within {", new: " {",
		tests: "TestReserveWithin",
	}, {
		name: "wait-never-enough", file: "internal/algebra/promise.go", what: "a balance of -Inf is enough for a reservation without a bound",
		old: "return !math.IsInf(left, -1) && left >=", new: "return left >=",
		tests: "TestReserveWithin",
	}, {
		name: "wait-retry-guess", file: "internal/algebra/promise.go", what: "the time at which a wait becomes short enough is missed",
		old: "guess = max(guess, runAt-within)", new: "_ = runAt",
		tests: "TestReserveWithin",
	}, {
		name: "whole-above-the-most", file: "internal/algebra/algebra.go", what: "a check says more than was asked for",
		old: "return min(most, math.Floor(", new: "return min(math.Inf(1), math.Floor(",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "whole-parts", file: "internal/algebra/algebra.go", what: "a check says that a part of a token would be taken",
		old: "math.Floor(l.Total(rows, now)+slack(", new: "(l.Total(rows, now)+slack(",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "whole-no-slack", file: "internal/algebra/algebra.go", what: "a check leaves a token that only rounding makes too small",
		old: "math.Floor(l.Total(rows, now)+slack(max(len(rows), shards)))", new: "math.Floor(l.Total(rows, now))",
		tests: "TestWholeIsWhatIsThereUpToTheMost",
	}, {
		name: "promise-check-of-zero", file: "internal/algebra/promise.go", what: "the library thinks that a check that reads a balance is denied because a reservation beside it waits for long",
		old: "l.Unknown(runAt) && d.Floor > math.Inf(-1)", new: "l.Unknown(runAt)",
		tests: "TestACheckOfZeroIsNotDeniedBesideAReservation",
	}, {
		name: "period-overflow", file: "internal/calendar/period.go", what: "a period of too many days becomes a short one",
		old: "|| hours > (math.MaxInt64-fixed)/time.Duration(long.hours)", new: "",
		tests: "TestParsePeriod",
	}, {
		name: "period-overflow-sum", file: "internal/calendar/period.go", what: "a period that is too long by its hours becomes a short one",
		old: "|| short > math.MaxInt64-fixed", new: "",
		tests: "TestParsePeriod",
	}, {
		name: "period-sign", file: "internal/calendar/period.go", what: "hours can be taken off days",
		old: "rest != text && strings.ContainsAny(rest, \"+-\")", new: "false",
		tests: "TestParsePeriod",
	}, {
		name: "period-week", file: "internal/calendar/period.go", what: "a week has 6 days",
		old: "{\"w\", 7 * 24}", new: "{\"w\", 6 * 24}",
		tests: "TestParsePeriod",
	},
}
