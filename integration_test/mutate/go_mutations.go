package main

var goMutations = []mutation{
	// internal/algebra

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
	},

	{
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
		name: "calendar-several", file: "ratelimit/statement.go", what: "a calendar beside another limit is sent without its windows",
		old: "!sharded(c.demands) && !onCalendar(c.demands)", new: "!sharded(c.demands)",
		tests: "TestACalendarWindowDoesWhatAFixedWindowDoes",
	}, {
		name: "calendar-coalesced", file: "ratelimit/call.go", what: "a Coalescer sends calendars without their windows",
		old: "sharded(c.demands) || onCalendar(c.demands) ||", new: "sharded(c.demands) ||",
		tests: "TestACoalescerDecidesCalendars",
	}, {
		name: "calendar-waits", file: "ratelimit/demand.go", what: "a calendar beside a limit that reserves sends the windows of a call that does not wait",
		old: "d.limit.windows(algebra.At(at), waits)", new: "d.limit.windows(algebra.At(at), waits && d.reserve)",
		tests: "TestTwoLimitsWaitForACalendar",
	}, {
		name: "calendar-refund-unknown-go", file: "internal/algebra/promise.go", what: "the library counts windows that are not in the list as if none had begun",
		old: "now < (*l.Windows)[0] || l.Unknown(taken.RunAt)", new: "false",
		tests: "TestARefundByAClockThatIsYearsOffGivesNothingBack",
	}, {
		name: "calendar-units", file: "ratelimit/definitions.go", what: "a day and a month may share a name",
		old: "a.calendar.Unit == b.calendar.Unit", new: "true",
		tests: "TestPlansOfACalendarShareItsUnit",
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
	},

	// ratelimit: requests

	{
		name: "demands-order", file: "ratelimit/demand.go", what: "several limits are asked for in another order than that of the locks",
		old: "strings.Compare(a.limit.name, b.limit.name)", new: "strings.Compare(b.limit.name, a.limit.name)",
		tests: "TestDemandsAreInTheOrderOfLocks",
	}, {
		name: "demands-twice", file: "ratelimit/demand.go", what: "a limit that is named twice in one call counts once",
		old: "d.count += r.tokens", new: "d.count = r.tokens",
		tests: "TestRequestsForOneKeyAreGrantedAsOneAfterAnother",
	}, {
		name: "demands-nan", file: "ratelimit/limit.go", what: "NaN is a number of tokens",
		old: "return tokens == 0 || tokens >= algebra.MinTokens && tokens <= algebra.MaxTokens", new: "return tokens == 0 || !(tokens < algebra.MinTokens || tokens > algebra.MaxTokens)",
		tests: "TestDefinitions|TestDefectNaNAndZeroPeriodsAreGranted",
	}, {
		name: "demands-rounding", file: "ratelimit/demand.go", what: "requests that together are the whole capacity, but for rounding, are refused",
		old: "if d.need <= capacity {", new: "if d.need < 0 {",
		tests: "TestMergedRequestsAreNotRefusedForARoundingError",
	}, {
		name: "demands-two-definitions", file: "ratelimit/demand.go", what: "one limit with two definitions in one call is granted by one of them",
		old: "if d.limit != r.limit {", new: "if false {",
		tests: "TestTwoDefinitionsOfOneLimitInOneCallAreAnError",
	}, {
		name: "definitions-apart", file: "ratelimit/demand.go", what: "one limit with two definitions, for two keys of one call, is granted by both",
		old: "a.name == b.name && !sameRefill(a, b)", new: "false",
		tests: "TestOneNameWithTwoDefinitions|TestARefusedCallDefinesNothing",
	}, {
		name: "definitions-later", file: "ratelimit/definitions.go", what: "one limit with two definitions, in two calls, is granted by both",
		old: "first != nil && !sameRefill(first, limit)", new: "false",
		tests: "TestOneNameWithTwoDefinitions",
	}, {
		name: "definitions-race", file: "ratelimit/definitions.go", what: "of two definitions at once, both are granted",
		old: "case first != nil && !sameRefill(first, &limit):", new: "case false:",
		tests: "TestADefinitionIsDecidedOnce",
	}, {
		name: "definitions-grid", file: "ratelimit/definitions.go", what: "another start is not another definition",
		old: "a.numbers.Start == b.numbers.Start", new: "true",
		tests: "TestOneNameWithTwoDefinitions",
	}, {
		name: "definitions-bounded", file: "ratelimit/definitions.go", what: "names of limits fill the memory",
		old: "case first == nil && len(known) < maxDefinitions:", new: "case first == nil:",
		tests: "TestSoManyDefinitionsAreRemembered",
	}, {
		name: "definitions-http", file: "internal/outcome/outcome.go", what: "two definitions of one name are the client's fault",
		old: "errors.As(err, &own) || ", new: "false && errors.As(err, &own) || ",
		tests: "TestHTTPTheServersMistakesAre500AndNeverAGrant",
	}, {
		name: "keys-collide", file: "ratelimit/request.go", what: "parts of keys that contain a bar are another's key",
		old: "escaped[i] = escape.Replace(part)", new: "escaped[i] = part",
		tests: "TestKeysOfSeveralParts",
	}, {
		name: "keys-empty", file: "ratelimit/request.go", what: "an empty user id is a key like others",
		old: "if part == \"\" && r.err == nil {", new: "if part == \"\" && len(parts) == 1 && r.err == nil {",
		tests: "TestKeysOfSeveralParts|TestHostileRequestsAreRefusedAndPoisonNothing",
	},

	// ratelimit: the verbs

	{
		name: "denial-no-error", file: "ratelimit/call.go", what: "a denial is no error",
		old: "case (c.consumes() || c.verb == VerbCheck) && !result.OK:", new: "case c.verb == VerbCharge && !result.OK:",
		tests: "TestTokenBucketGrantsItsCapacityThenItsRate",
	}, {
		name: "commit-failed-answer", file: "ratelimit/call.go", what: "what was answered before a COMMIT that failed is the result beside its error",
		old: "		return unanswered(c.requests), explain(", new: "		return result, explain(",
		tests: "TestACommitThatFailsGrantsNothing",
	}, {
		name: "refund-any-time", file: "ratelimit/call.go", what: "an instant that the database cannot take is sent to it, and aborts the transaction",
		old: "if t.Year() < 1000 || t.Year() > 9999 {", new: "if t.Year() > 9999 {",
		tests: "TestClocksFarInThePastAndFuture|TestHostileRequestsAreRefusedAndPoisonNothing",
	}, {
		name: "window-one-grid", file: "ratelimit/limit.go", what: "the windows of all keys begin together",
		old: "		h.Write([]byte(key))\n", new: "",
		tests: "TestAFixedWindowWithoutAStartHasAGridPerKey",
	}, {
		name: "check-rows-after", file: "ratelimit/result.go", what: "a check of a sharded limit is answered as if it had taken",
		old: "d, rows, taken := &c.demands[i], a.rows[i], a.granted && c.verb != VerbCheck", new: "d, rows, taken := &c.demands[i], a.rows[i], a.granted",
		tests: "TestCheckAnswersLikeConsume",
	}, {
		name: "check-no-error", file: "ratelimit/call.go", what: "a check that says no returns no error",
		old: "(c.consumes() || c.verb == VerbCheck) && !result.OK", new: "c.consumes() && !result.OK",
		tests: "TestCheckAnswersAndWritesNothing",
	}, {
		name: "check-zero-denied", file: "ratelimit/demand.go", what: "a check of 0 is denied in debt",
		old: "case v == VerbCharge, v == VerbCheck && r.tokens == 0:", new: "case v == VerbCharge:",
		tests: "TestACheckOfZeroIsNeverDenied",
	}, {
		name: "check-observed", file: "ratelimit/observe/observe.go", what: "a check that says no is counted as a denial",
		old: `case errors.Is(d.Err, ratelimit.ErrDenied) && d.Verb == ratelimit.VerbCheck:`, new: "case false:",
		tests: "TestMetricsOfDecisions",
	}, {
		name: "result-remaining", file: "ratelimit/result.go", what: "of several limits, not the least that remains is told",
		old: "min(remaining, s.Remaining)", new: "s.Remaining",
		tests: "TestALimitNamedTwiceInOneCallCountsTwice",
	}, {
		name: "result-reset", file: "ratelimit/result.go", what: "of several limits, not the latest reset is told",
		old: "max(resetAt, reset)", new: "reset",
		tests: "TestSeveralLimitsAreAllOrNothing",
	}, {
		name: "record-rest", file: "ratelimit/record.go", what: "an answer is read though there is more in it",
		old: "return !r.failed && len(r.rest) == 0", new: "return !r.failed",
		tests: "TestAnswersAreReadAsPgtypeWritesThem",
	}, {
		name: "record-order", file: "ratelimit/answer.go", what: "the rows of several limits have each other's instants",
		old: "sinceY2K(ts[i])", new: "sinceY2K(ts[len(ts)-1-i])",
		tests: "TestAnswersAreReadAsPgtypeWritesThem",
	}, {
		name: "record-infinity", file: "ratelimit/record.go", what: "what is written in the infinite future counts as long ago",
		old: "		return algebra.Max\n", new: "		return algebra.Min\n",
		tests: "TestInfiniteInstantsAreTheFirstAndTheLast",
	}, {
		name: "record-lengths", file: "ratelimit/answer.go", what: "an answer with more instants than values is read",
		old: "ts == nil || len(ts) != len(values) {", new: "ts == nil || len(ts) < len(values) {",
		tests: "TestAnswersThatSayNothingAreNotRead",
	},

	// ratelimit: receipts and reservations

	{
		name: "receipt-of-nothing", file: "ratelimit/receipt.go", what: "a denial has a receipt",
		old: "if s.took.rows == 0 && !s.took.rowless {", new: "if false {",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-merged", file: "ratelimit/receipt.go", what: "of several requests for one key, the receipt has the first",
		old: "			t.Count += s.Taken\n", new: "",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-of-a-refund", file: "ratelimit/receipt.go", what: "a refund has no receipt for what is left",
		old: "	if r.receipt != nil {\n		return r.receipt.text()\n	}\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-any-key", file: "ratelimit/receipt.go", what: "a receipt serves for another key",
		old: "t.Limit == limit && t.Key == key", new: "t.Limit == limit",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-any-limit", file: "ratelimit/receipt.go", what: "a receipt serves for another limit",
		old: "t.Limit == limit && t.Key == key", new: "t.Key == key",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-unknown-fields", file: "ratelimit/receipt.go", what: "what another version wrote into a receipt is passed over",
		old: "	decoder.DisallowUnknownFields()\n", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-and-more", file: "ratelimit/receipt.go", what: "what follows a receipt is passed over",
		old: "if _, more := decoder.Token(); !errors.Is(more, io.EOF) {", new: "if _, more := decoder.Token(); false && !errors.Is(more, io.EOF) {",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-version", file: "ratelimit/receipt.go", what: "a receipt of another version is read",
		old: "if r.Version != receiptVersion {", new: "if false {",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-instants", file: "ratelimit/receipt.go", what: "an instant that the database cannot take is sent to it, and aborts the transaction",
		old: "		if err != nil {\n			return err\n		}\n		*t = at.Time", new: "		if err == nil {\n			*t = at.Time\n		}",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-twice", file: "ratelimit/receipt.go", what: "a limit and key may be in a receipt twice",
		old: "r.find(t.Limit, t.Key) != &r.Taken[i]", new: "i < 0",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-count", file: "ratelimit/receipt.go", what: "any count may be in a receipt",
		old: "!countable(t.Count) || ", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-refunded-below-zero", file: "ratelimit/receipt.go", what: "less than nothing may have been refunded",
		old: "t.Refunded >= 0 && ", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-refunded-above-count", file: "ratelimit/receipt.go", what: "more than was taken may have been refunded",
		old: " && t.Refunded <= t.Count", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-held", file: "ratelimit/receipt.go", what: "sums with what is in a receipt may overflow",
		old: "!(math.Abs(t.Held) <= maxHeld),", new: "!(math.Abs(t.Held) <= math.Inf(1)),",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-shards-none", file: "ratelimit/receipt.go", what: "a limit may have no shards",
		old: "t.Shards < 1 || ", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-shards-many", file: "ratelimit/receipt.go", what: "a limit may have any number of shards",
		old: " || t.Shards > maxShards", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-rows", file: "ratelimit/receipt.go", what: "some shards may have been taken from, neither one nor all",
		old: "t.Rows != 1 && t.Rows != t.Shards && !(t.Rows == 0 && t.Held == 0):", new: "false:",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-exceeded", file: "ratelimit/receipt.go", what: "more is refunded than is left in the receipt",
		old: "if d.count > left+t.rounding() {", new: "if false {",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-rounding", file: "ratelimit/receipt.go", what: "the last part is refused if the parts add up to more than the whole by rounding",
		old: "if d.count > left+t.rounding() {", new: "if d.count > left {",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-rounding-mints", file: "ratelimit/receipt.go", what: "what parts are more than the whole by rounding is given back",
		old: "		d.count = min(d.count, left)\n", new: "",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-rows-part", file: "ratelimit/receipt.go", what: "one shard's part is the whole limit",
		old: "if t.Rows < t.Shards {", new: "if t.Rows > t.Shards {",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-debt-paid", file: "ratelimit/receipt.go", what: "a part of a refund that paid a debt hides it from the next part",
		old: "				t.Held += min(back, max(-total, 0))\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "refunded-above-capacity", file: "ratelimit/receipt.go", what: "a refund says that more came back than filled the limit",
		old: "refunded[i] = min(back, numbers.Capacity-total)", new: "refunded[i] = back",
		tests: "TestAnAlteredReceiptMintsNothing",
	}, {
		name: "refunded-nothing", file: "ratelimit/result.go", what: "a refund does not say how many tokens came back",
		old: "if refunded != nil {", new: "if false {",
		tests: "TestRefundToATokenBucketGivesBackWhatIsStillMissing",
	}, {
		name: "receipt-count-passed-on", file: "ratelimit/receipt.go", what: "the next part of a refund is worth more than is missing",
		old: "		t.Held += d.count // as if d.count had not been taken\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-refunded-passed-on", file: "ratelimit/receipt.go", what: "a receipt is never used up",
		old: "		t.Refunded += d.count\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-used-up", file: "ratelimit/receipt.go", what: "what is left of a receipt that is used up is a receipt of nothing",
		old: "t.Count-t.Refunded <= t.rounding()", new: "t.Count-t.Refunded < 0",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-unrounded", file: "ratelimit/receipt.go", what: "what rounding leaves of a receipt is a receipt",
		old: "t.Count-t.Refunded <= t.rounding()", new: "t.Count-t.Refunded <= 0",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "refund-rows-before", file: "ratelimit/receipt.go", what: "a refund is answered with the rows as they were before",
		old: "				a.rows[i] = numbers.Take(rows, len(rows), -back, a.at)\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "forfeits-several", file: "ratelimit/demand.go", what: "limits that wait for one another are not asked for as those that forfeit",
		old: "(len(ds) > 1 || d.limit.numbers.Window)", new: "d.limit.numbers.Window",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "forfeits-window", file: "ratelimit/demand.go", what: "a reservation of a fixed window is not asked for as one that forfeits",
		old: "(len(ds) > 1 || d.limit.numbers.Window)", new: "len(ds) > 1",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft",
	}, {
		name: "check-forfeits", file: "ratelimit/result.go", what: "a check says when work would run that forfeits nothing",
		old: "	case w.asked != nil && a.granted:\n", new: "	case false:\n",
		tests: "TestModel",
	}, {
		name: "denial-forfeits", file: "ratelimit/result.go", what: "a request is said to be OK that another one's wait denies",
		old: "		if s.OK = w.asked[i].Enough(w.lefts[i]); s.OK {\n", new: "		if s.OK {\n",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "denial-retry-alone", file: "ratelimit/result.go", what: "a request that would be granted alone has no wait, though another one's wait denies it",
		old: "at == now { // alone", new: "false { // alone",
		tests: "TestModel|TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "denial-retry", file: "ratelimit/result.go", what: "a denial says when it would be granted if it forfeited nothing",
		old: "	if !a.granted {\n		w.retryAt = algebra.WhenReserved(w.asked, a.at, c.within)\n	}\n", new: "",
		tests: "TestModel",
	},

	// ratelimit: waiting

	{
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
		name: "wait-in-tx", file: "ratelimit/wait.go", what: "a Wait sleeps in a transaction",
		old: "if isTx(db) || inTransaction(db)", new: "if inTransaction(db)",
		tests: "TestWaitIsRefusedInATransaction",
	}, {
		name: "wait-in-tx-by-hand", file: "ratelimit/wait.go", what: "a Wait sleeps in a transaction that was begun by hand",
		old: "if isTx(db) || inTransaction(db)", new: "if isTx(db)",
		tests: "TestWaitIsRefusedInATransaction",
	}, {
		name: "wait-beside-tx", file: "ratelimit/wait.go", what: "a Wait on the pool of a transaction is told to use the transaction",
		old: " || errOutside(ctx, VerbWait, db) != nil {", new: " {",
		tests: "TestWaitIsRefusedInATransaction",
	}, {
		name: "wait-no-floor", file: "ratelimit/wait.go", what: "a bucket's tokens are waited for beyond the deadline",
		old: "d.floor = max(d.floor, floor)", new: "d.floor = max(d.floor, floor-1e9)",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-floor-alone", file: "ratelimit/wait.go", what: "a Wait with a deadline may reserve more than maxReserved",
		old: "d.floor = max(d.floor, floor)", new: "d.floor = floor",
		tests: "TestWaitKeepsTheLimitsBounds",
	}, {
		name: "wait-floor-of-first", file: "ratelimit/wait.go", what: "a deadline too early for a limit without capacity is an error of SQL",
		old: "if floor <= d.numbers.Capacity-d.count {", new: "if true {",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-floor-of-window", file: "ratelimit/wait.go", what: "a window is thought to refill continuously until the deadline",
		old: "if d := &c.demands[0]; !forfeits(c.demands) {", new: "if d := &c.demands[0]; true {",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-in-vain", file: "ratelimit/wait.go", what: "a Wait sleeps though the call took so long that the deadline comes first",
		old: "ok && time.Until(deadline) < granted.RetryAfter {", new: "ok && time.Until(deadline) < 0 {",
		tests: "TestWaitDoesNotSleepBeyondTheDeadline",
	}, {
		name: "wait-deaf", file: "ratelimit/wait.go", what: "a Wait sleeps on when its context has ended",
		old: "		case <-ctx.Done():\n			return over(ctx)\n", new: "",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-no-cause", file: "ratelimit/wait.go", what: "a canceled Wait does not tell the cause",
		old: "return over(ctx)", new: "return ctx.Err()",
		tests: "TestWaitTellsWhyItWasCanceled",
	}, {
		name: "wait-real-time", file: "ratelimit/wait.go", what: "a Wait sleeps by the process's clock though the limiter has one",
		old: "			wait = granted.RetryAt.Sub(l.Clock())\n", new: "",
		tests: "TestWaitServesInOrderOfArrival",
	}, {
		name: "wait-no-sleep", file: "ratelimit/wait.go", what: "a Wait does not sleep",
		old: "for wait := granted.RetryAfter; wait > 0; {", new: "for wait := time.Duration(0); wait > 0; {",
		tests: "TestTwentyWaitAtTwentyPerSecond|TestWaitServesInOrderOfArrival",
	}, {
		name: "wait-kept", file: "ratelimit/wait.go", what: "a canceled Wait keeps its tokens",
		old: "errors.Join(err, l.giveBack(ctx, db, result, requests))", new: "errors.Join(err, nil)",
		tests: "TestFourWhoGiveUpCostTheNextOneNothing",
	}, {
		name: "wait-canceled-result", file: "ratelimit/wait.go", what: "a canceled Wait says that it was granted",
		old: "return unanswered(requests), fmt.Errorf(\"ratelimit: wait", new: "return result, fmt.Errorf(\"ratelimit: wait",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-canceled-refund", file: "ratelimit/wait.go", what: "tokens are given back on the context that has ended",
		old: "context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)", new: "context.WithTimeout(ctx, rollbackTimeout)",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-refund-unbounded", file: "ratelimit/wait.go", what: "giving back has no time-out",
		old: "context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)", new: "context.WithCancel(context.WithoutCancel(ctx))",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-refund-once", file: "ratelimit/wait.go", what: "tokens are lost if their refund cannot be serialized",
		old: "		return err\n	})\n}", new: "		return err\n	}, Attempts(1))\n}",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-above-capacity", file: "ratelimit/demand.go", what: "a Wait for more than the capacity waits",
		old: "if v == VerbWait && d.count > capacity && capacity > 0 {", new: "if false {",
		tests: "TestWaitKeepsTheLimitsBounds",
	}, {
		name: "wait-without-capacity", file: "ratelimit/demand.go", what: "nobody can wait for a limit that saves nothing",
		old: "if v == VerbWait && d.count > capacity && capacity > 0 {", new: "if v == VerbWait && d.count > capacity {",
		tests: "TestWaitKeepsTheLimitsBounds",
	}, {
		name: "wait-forfeits-nothing", file: "ratelimit/demand.go", what: "a Wait for a window is no reservation, and forfeits nothing",
		old: "d.reserve = d.reserve || v == VerbWait || r.reserve", new: "d.reserve = d.reserve || r.reserve",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-denied", file: "ratelimit/demand.go", what: "a Wait is denied if the tokens are not there",
		old: "case r.reserve, v == VerbWait:", new: "case r.reserve:",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-no-receipt", file: "ratelimit/result.go", what: "a Wait has no receipt",
		old: "if taken && c.consumes() {", new: "if taken && c.verb == VerbConsume {",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-coalesced", file: "ratelimit/call.go", what: "a Coalescer forgets how long a call may wait",
		old: "onCalendar(c.demands) || c.reserves()", new: "onCalendar(c.demands) || forfeits(c.demands)",
		tests: "TestWaitBoundsItsWaitInACoalescersQueue",
	}, {
		name: "wait-retry", file: "ratelimit/result.go", what: "a Wait that can never be granted is told to retry",
		old: "if !c.reserves() || a.granted", new: "if !forfeits(c.demands) || a.granted",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-unmeasured", file: "ratelimit/observe/metrics.go", what: "the metrics leave out how long a Wait takes",
		old: "(d.Verb == ratelimit.VerbConsume || d.Verb == ratelimit.VerbWait)", new: "d.Verb == ratelimit.VerbConsume",
		tests: "TestMetricsOfWaits",
	},

	// ratelimit: what is there

	{
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
		name: "up-to-plain", file: "ratelimit/statement.go", what: "UpTo takes one token",
		old: "case c.reserves(), takesUpTo(c.demands):", new: "case c.reserves():",
		tests: "TestUpToTakesTheWholeTokensThatAreThere",
	}, {
		name: "up-to-coalesced", file: "ratelimit/call.go", what: "a Coalescer decides UpTo together with other calls, as if it asked for one token",
		old: " || c.reserves() || takesUpTo(c.demands)", new: " || c.reserves()",
		tests: "TestUpToOnACoalescerThatIsBusy",
	}, {
		name: "up-to-checks-the-last", file: "ratelimit/result.go", what: "a check of several limits says what the last one has",
		old: "			n = min(n, d.numbers.Whole(", new: "			n = min(math.Inf(1), d.numbers.Whole(",
		tests: "TestUpToTakesTheSameFromSeveralLimits",
	}, {
		name: "up-to-denied", file: "ratelimit/result.go", what: "a denial says that tokens were taken",
		old: "case !a.granted || refunded != nil:", new: "case refunded != nil:",
		tests: "TestUpToTakesTheSameFromSeveralLimits",
	}, {
		name: "up-to-refunded", file: "ratelimit/result.go", what: "a refund says that tokens were taken",
		old: "case !a.granted || refunded != nil:", new: "case !a.granted:",
		tests: "TestUpToTakesTheWholeTokensThatAreThere",
	}, {
		name: "up-to-error", file: "ratelimit/result.go", what: "the error of a denial does not say that it was asked for up to so many",
		old: "s.Limit, s.Key, s.Count, s.upTo = of.Limit, of.Key, of.Count, of.upTo", new: "s.Limit, s.Key, s.Count = of.Limit, of.Key, of.Count",
		tests: "TestUpToTakesTheSameFromSeveralLimits",
	}, {
		name: "up-to-receipt", file: "ratelimit/receipt.go", what: "a receipt has what was asked for, not what was taken",
		old: "Key: s.Key, Count: s.Taken,", new: "Key: s.Key, Count: s.Count,",
		tests: "TestUpToTakesTheWholeTokensThatAreThere",
	}, {
		name: "up-to-verbs", file: "ratelimit/demand.go", what: "a charge may have UpTo",
		old: "	case v != VerbConsume && v != VerbCheck:", new: "	case false:",
		tests: "TestUpToIsRefusedWhereItHasNoMeaning",
	}, {
		name: "up-to-twice", file: "ratelimit/demand.go", what: "two requests of a call may take from one key, one of them with UpTo",
		old: "	case again:", new: "	case false:",
		tests: "TestUpToIsRefusedWhereItHasNoMeaning",
	}, {
		name: "up-to-and-one", file: "ratelimit/demand.go", what: "a plain request after one with UpTo is passed over",
		old: "(r.upTo || d.most > 0)", new: "r.upTo",
		tests: "TestUpToIsRefusedWhereItHasNoMeaning",
	}, {
		name: "up-to-none", file: "ratelimit/demand.go", what: "UpTo may be up to no token",
		old: "	case r.tokens < 1:", new: "	case false:",
		tests: "TestUpToIsRefusedWhereItHasNoMeaning",
	}, {
		name: "up-to-reserve", file: "ratelimit/demand.go", what: "a call with UpTo may reserve",
		old: "if takesUpTo(ds) && slices.ContainsFunc(", new: "if false && slices.ContainsFunc(",
		tests: "TestUpToIsRefusedWhereItHasNoMeaning",
	}, {
		name: "up-to-reset", file: "ratelimit/demand.go", what: "Reset and Hot refuse a request with UpTo",
		old: "if v != VerbReset && (r.upTo", new: "if (r.upTo",
		tests: "TestUpToTakesTheWholeTokensThatAreThere",
	}, {
		name: "up-to-then-count", file: "ratelimit/request.go", what: "a Count after UpTo is the most",
		old: "r.tokens, r.upTo = tokens, false", new: "r.tokens = tokens",
		tests: "TestUpToIsRefusedWhereItHasNoMeaning",
	},

	// ratelimit: transactions

	{
		name: "tx-commit-ignored", file: "ratelimit/tx.go", what: "an error of COMMIT is ignored",
		old: "	if err := tx.commit(ctx); err != nil {\n		return true, fmt.Errorf(\"ratelimit: commit: %w\", unknownUnless(err))\n	}", new: "	_ = tx.commit(ctx)",
		tests: "TestInTxRetriesA40001OfCommit",
	}, {
		name: "tx-ambiguous-retried", file: "ratelimit/tx.go", what: "a COMMIT whose answer was lost is run again",
		old: "case err != nil && retryable(err):", new: "case err != nil && (retryable(err) || committing && sqlState(err) == \"\"):",
		tests: "TestInTxReturnsOtherErrorsAsTheyAre",
	}, {
		name: "tx-deadlock", file: "ratelimit/tx.go", what: "a deadlock's victim is not run again",
		old: "(state == \"40001\" || state == \"40P01\")", new: "state == \"40001\"",
		tests: "TestInTxRetriesADeadlock",
	}, {
		name: "tx-denial-committed", file: "ratelimit/tx.go", what: "a transaction whose function failed is not rolled back",
		old: "_ = tx.rollback(rollbackCtx)", new: "_ = rollbackCtx",
		tests: "TestInTxReturnsOtherErrorsAsTheyAre",
	}, {
		name: "tx-attempts", file: "ratelimit/tx.go", what: "one attempt too many",
		old: "if attempt == attempts {", new: "if attempt > attempts {",
		tests: "TestInTxGivesUpAndSaysHowManyAttemptsItTook",
	}, {
		name: "tx-attempts-multiply", file: "ratelimit/tx.go", what: "what was tried as often as it may is tried again by what is around it",
		old: " && !errors.Is(err, ErrAttemptsExhausted)", new: "",
		tests: "TestNestedRetriesDoNotMultiply",
	}, {
		name: "outside-allowed", file: "ratelimit/outside.go", what: "a verb on the pool inside its transaction takes tokens that a rollback does not give back",
		old: "if open.pool == pool && !open.ended.Load() {", new: "if false {",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "outside-innermost", file: "ratelimit/outside.go", what: "only the innermost transaction's pool is refused",
		old: "for ; open != nil; open = open.around {", new: "if open != nil {",
		tests: "TestAllEnclosingPoolsCount",
	}, {
		name: "outside-for-ever", file: "ratelimit/outside.go", what: "a context that was kept is refused when its transaction has ended",
		old: " && !open.ended.Load()", new: "",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "outside-check", file: "ratelimit/outside.go", what: "a check on the pool inside its transaction is refused",
		old: "if pool == nil || v == VerbCheck {", new: "if pool == nil {",
		tests: "TestACheckOnThePoolInsideItsTransactionIsAllowed",
	}, {
		name: "outside-inherited", file: "ratelimit/outside.go", what: "OutsideTx changes nothing",
		old: "(*openTx)(nil))", new: "ctx.Value(openTxKey{}))",
		tests: "TestOutsideTxOutlivesTheRollback",
	}, {
		name: "tx-level", file: "ratelimit/tx.go", what: "InTx is READ COMMITTED by default",
		old: "o := txOptions{isolation: pgx.Serializable,", new: "o := txOptions{isolation: pgx.ReadCommitted,",
		tests: "TestInTxWorksOnAPoolAndAConnectionAtEveryLevel|TestInTxRetriesA40001OfCommit",
	}, {
		name: "tx-rollback-cancelled", file: "ratelimit/tx.go", what: "a rollback under a context that is over",
		old: "context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)", new: "context.WithTimeout(ctx, rollbackTimeout)",
		tests: "TestInTxEndsWithItsContext",
	}, {
		name: "tx-commit-cancelled", file: "ratelimit/tx.go", what: "COMMIT is tried under a context that is over",
		old: "	if ctx.Err() != nil { // no driver", new: "	if false { // no driver",
		tests: "TestInTxEndsWithItsContext|TestInSQLTxEndsWithItsContext",
	}, {
		name: "late-not-with-begin", file: "ratelimit/late.go", what: "BEGIN is a round trip of its own, whatever comes first",
		old: "	if t.tx != nil || t.lapsed(ctx) {\n		return t.QueryRow(", new: "	if t.failed == nil {\n		return t.QueryRow(",
		tests: "TestTheFirstLimitIsSentWithBegin",
	}, {
		name: "late-hidden", file: "ratelimit/tx.go", what: "a function can hide that its transaction did not begin",
		old: "if tx.failed != nil && !errors.Is(err, tx.failed) {", new: "if false && !errors.Is(err, tx.failed) {",
		tests: "TestInTxWhoseTransactionDoesNotBegin",
	}, {
		name: "late-closed", file: "ratelimit/tx.go", what: "whether COMMIT was sent on a closed connection is said to be unknown",
		old: "if err == nil && conn.IsClosed() && !tx.ended {", new: "if false {",
		tests: "TestInTxWhoseConnectionBrokeBeforeCommit",
	}, {
		name: "late-committed", file: "ratelimit/tx.go", what: "what fn has committed is said to be known not to be, if the connection broke then",
		old: " && !tx.ended {", new: " {",
		tests: "TestInTxWhoseConnectionBrokeBeforeCommit",
	}, {
		name: "late-outside", file: "ratelimit/late.go", what: "what is sent on the connection of a transaction that did not begin is committed by itself",
		old: "		_ = t.conn.Close(t.ctx)\n", new: "		_ = t.conn\n",
		tests: "TestInTxWhoseTransactionDoesNotBegin",
	}, {
		name: "late-kept", file: "ratelimit/late.go", what: "who keeps a transaction that did not begin closes a connection that is another's by now",
		old: "!t.ended && ", new: "",
		tests: "TestATransactionThatIsKeptClosesNoConnection",
	}, {
		name: "late-lapsed", file: "ratelimit/late.go", what: "a first statement that is not sent takes the transaction with it",
		old: "		if t.lapsed(ctx) {\n", new: "		if false {\n",
		tests: "TestAFirstStatementThatIsNotSent",
	}, {
		name: "late-after-rollback", file: "ratelimit/late.go", what: "a transaction that was rolled back before it began can begin all the same",
		old: "		t.tx = pgx.FailedBatchResults(t.beginning(), pgx.ErrTxClosed).Tx()\n", new: "",
		tests: "TestInTxOfAFunctionThatRollsBackItself",
	}, {
		name: "late-answers-unread", file: "ratelimit/late.go", what: "whether BEGIN and the lock of a turn failed is not looked at when a query was sent with them",
		old: "		r.late.failed = err\n", new: "",
		tests: "TestHotPassesOnATimeoutOfTheDatabase|TestInTxWhoseTransactionDoesNotBegin",
	}, {
		name: "sql-commit-ignored", file: "ratelimit/sql.go", what: "an error of COMMIT is ignored on database/sql",
		old: "				err := tx.Commit()\n", new: "				_ = tx.Commit()\n				var err error\n",
		tests: "TestInSQLTxRunsAgain",
	}, {
		name: "sql-rows-err", file: "ratelimit/sql.go", what: "an error after the row is ignored on database/sql",
		old: "	if err := rows.Err(); err != nil {\n		return err\n	}\n", new: "",
		tests: "TestDatabaseSQLNoticesACommitThatFails",
	},

	// ratelimit: batches

	{
		name: "batch-commit-ignored", file: "ratelimit/sendtx.go", what: "an error of a batch, its COMMIT's among them, is ignored",
		old: "	err = results.Close()\n", new: "	_ = results.Close()\n",
		tests: "TestSendTxRunsAgainAndGivesUpAsInTxDoes",
	}, {
		name: "batch-anybodys-denial", file: "ratelimit/answer.go", what: "a PT429 that somebody else raised is taken for a denial",
		old: "	decoder.DisallowUnknownFields()\n", new: "",
		tests: "TestOnlyWhatTheRaisingFunctionWritesIsADenial",
	}, {
		name: "batch-requests-aliased", file: "ratelimit/batch.go", what: "what is queued changes with the caller's slice",
		old: "	requests = slices.Clone(requests)\n", new: "	_ = slices.Clone[[]Request]\n",
		tests: "TestABatchAnswersAsConsumeDoes",
	}, {
		name: "batch-not-rolled-back", file: "ratelimit/sendtx.go", what: "the connection of a denied batch is left in a failed transaction",
		old: "		_ = tx.Rollback(rollbackCtx) // after", new: "		_ = rollbackCtx // after",
		tests: "TestADenialStopsABatchWhereverItStands|TestAFloodOfDenialsCausesNoReconnect",
	}, {
		name: "batch-reprepares", file: "ratelimit/sendtx.go", what: "each denial of a batch has its statements prepared anew",
		old: "		batch.QueuedQueries = nil\n", new: "",
		tests: "TestAFloodOfDenialsCausesNoReconnect|TestSendTxIsOneRoundTrip|TestConflictsAtTheFirstStatementPrepareNothing",
	},

	// ratelimit: the queue of hot limits

	{
		name: "hot-unfair", file: "ratelimit/hot.go", what: "the last one to come has the next turn",
		old: "		close(l.waiting[0])\n		l.waiting = slices.Delete(l.waiting, 0, 1)", new: "		close(l.waiting[len(l.waiting)-1])\n		l.waiting = l.waiting[:len(l.waiting)-1]",
		tests: "TestTheQueueIsFirstInFirstOut",
	}, {
		name: "hot-cancelled-stays", file: "ratelimit/hot.go", what: "who is cancelled stays in the queue, and has a turn that nobody gives back",
		old: "		l.waiting = slices.Delete(l.waiting, i, i+1)\n", new: "",
		tests: "TestWhoIsCancelledLeavesTheQueueAndTheOthersMoveUp",
	}, {
		name: "hot-cancelled-at-its-turn", file: "ratelimit/hot.go", what: "who is cancelled at the moment of his turn does not give it back",
		old: "	q.leave(n) // the turn came at the same moment\n", new: "",
		tests: "TestQueuesNeverLetMoreThanTwoPassAndNeverGetStuck",
	}, {
		name: "hot-never-leaves", file: "ratelimit/tx.go", what: "a turn is not given back when the transaction has ended",
		old: "		defer leave()\n", new: "		_ = leave\n",
		tests: "TestHotLimitsAreExact|TestHotGivesItsTurnBackOnPanicAndGoexit",
	}, {
		name: "hot-half-entered", file: "ratelimit/hot.go", what: "who gives up waiting for a second limit keeps his turn on the first",
		old: "			leave()\n			return nil, nil, fmt.Errorf", new: "			return nil, nil, fmt.Errorf",
		tests: "TestWhoGivesUpWaitingForOneLimitKeepsNoTurnOnAnother",
	}, {
		name: "hot-lanes-leak", file: "ratelimit/hot.go", what: "every key that ever queued is remembered for ever",
		old: "		delete(q.byStripe, n.stripe())\n", new: "",
		tests: "TestQueuesNeverLetMoreThanTwoPassAndNeverGetStuck|TestTheQueueIsFirstInFirstOut",
	}, {
		name: "hot-views-order", file: "ratelimit/hot.go", what: "views are locked in the order of the limits, not everybody's",
		old: "	slices.Sort(numbers)\n", new: "",
		tests: "TestTheStripesStayTheSame|TestSeveralHotLimitsInAnyOrderNeverDeadlock",
	}, {
		name: "hot-queues-order", file: "ratelimit/hot.go", what: "queues are entered in the order of the limits, not everybody's",
		old: "cmp.Compare(a.stripe(), b.stripe())", new: "cmp.Compare(a.name, b.name)",
		tests: "TestQueuesAreEnteredInTheOrderOfTheViews",
	}, {
		name: "hot-waits-for-itself", file: "ratelimit/hot.go", what: "two limits that meet on a view take two places of one queue",
		old: "if i > 0 && n.stripe() == t[i-1].stripe() {", new: "if i > 0 && n == t[i-1] {",
		tests: "TestKeysThatMeetWaitInOneQueue",
	}, {
		name: "hot-weak-lock", file: "ratelimit/hot.go", what: "the lock on the view lets everybody in",
		old: "in share update exclusive mode", new: "in row exclusive mode",
		tests: "TestHotTransactionsDoNotConflict",
	}, {
		name: "hot-late-lock", file: "ratelimit/late.go", what: "the views are locked after a snapshot was taken",
		old: "	batch.BeginTx(pgx.TxOptions{IsoLevel: t.isolation})\n", new: "	batch.BeginTx(pgx.TxOptions{IsoLevel: t.isolation})\n	batch.Queue(\"select 1\")\n",
		tests: "TestHotTransactionsDoNotConflict",
	}, {
		name: "hot-other-shard", file: "ratelimit/statement.go", what: "the shard that was queued for is not the one that is taken from",
		old: "	if shard, ok := hotShard(ctx, d.limit, d.key); ok {\n		return int32(shard), int32(shard)\n	}\n", new: "	_, _ = hotShard(ctx, d.limit, d.key)\n",
		tests: "TestAHotLimitsShardIsChosenWhenQueueing",
	}, {
		name: "hot-in-hot", file: "ratelimit/hot.go", what: "a transaction may wait for itself",
		old: "if ctx.Value(turnKey{}) != nil {", new: "if ctx.Value(turnKey{}) == ctx {",
		tests: "TestHotInHotIsRefused",
	},

	// ratelimit: the coalescer

	{
		name: "coalescer-embedded", file: "ratelimit/db.go", what: "a struct that embeds a Coalescer silently does not coalesce",
		old: "db.(interface{ coalescer() *Coalescer }); ok {", new: "db.(*Coalescer); ok {",
		tests: "TestAStructThatEmbedsACoalescerCoalesces",
	}, {
		name: "coalescer-order", file: "ratelimit/coalescer.go", what: "the last to come is decided first",
		old: "	c.queue = append(c.queue, w)\n", new: "	c.queue = slices.Insert(c.queue, 0, w)\n",
		tests: "TestCoalescerIsExact|TestCoalescerDecidesWhatWaitsTogether",
	}, {
		name: "coalescer-cancelled-takes", file: "ratelimit/coalescer.go", what: "who has given up before he was sent consumes",
		old: "		c.queue = slices.DeleteFunc(c.queue, func(other *waiter) bool { return other == w })\n", new: "",
		tests: "TestCoalescerCancelledCallersHarmNobody",
	}, {
		name: "coalescer-one-cancels-all", file: "ratelimit/coalescer.go", what: "the first to give up ends the statement of all",
		old: "if f.waiting--; f.waiting == 0 {", new: "if f.waiting--; f.waiting >= 0 {",
		tests: "TestCoalescerCancelledCallersHarmNobody",
	}, {
		name: "coalescer-nobody-waits", file: "ratelimit/coalescer.go", what: "a statement that nobody waits for any more goes on",
		old: "			f.cancel()\n", new: "			_ = f.cancel\n",
		tests: "TestCoalescerGivesUpAStatementThatNobodyWaitsFor",
	}, {
		name: "coalescer-error-to-one", file: "ratelimit/coalescer.go", what: "an error reaches only the first of those who share the statement",
		old: "	for _, w := range b.waiters {\n		w.err = err\n", new: "	for i, w := range b.waiters {\n		if i == 0 {\n			w.err = err\n		}\n",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-error-grants", file: "ratelimit/coalescer.go", what: "what the database failed to decide is granted",
		old: "	err, direct, apart, flight := w.err, w.direct, w.apart, w.flight\n", new: "	err, direct, apart, flight := w.err, w.direct, w.apart, w.flight\n	if err != nil {\n		err, w.answer.granted = nil, true\n		w.answer.setRows(len(asked.demands), nil, []int32{})\n	}\n",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-close-at-once", file: "ratelimit/coalescer.go", what: "Close does not wait for those who have come",
		old: "	if c.flying == 0 {\n		c.mu.Unlock()\n", new: "	if c.flying >= 0 {\n		c.mu.Unlock()\n",
		tests: "TestCoalescerCloseDrains",
	}, {
		name: "coalescer-open-for-ever", file: "ratelimit/coalescer.go", what: "who comes after Close is let in",
		old: "	if c.closed {\n", new: "	if c.closed && c.Pool == nil {\n",
		tests: "TestCoalescerCloseDrains",
	}, {
		name: "coalescer-place-lost", file: "ratelimit/coalescer.go", what: "a call that went alone does not give its place to those that wait",
		old: "	if len(c.queue) > 0 {\n		go c.flush()\n		return\n	}\n	c.release()\n", new: "	c.release()\n",
		tests: "TestCoalescerShardedRows|TestCoalescerRefusesBadRequestsAlone|TestCoalescerCloseDrains",
	}, {
		name: "coalescer-clocks-mixed", file: "ratelimit/coalescer_queue.go", what: "calls whose clocks differ are decided at one of their instants",
		old: "(w.lone || w.now != leader.now)", new: "w.lone",
		tests: "TestCoalescerDecidesEachCallByItsOwnClock",
	}, {
		name: "coalescer-counts-mixed", file: "ratelimit/coalescer_batch.go", what: "calls that ask for different counts are decided as if all asked for the first one's",
		old: "(d.count != g.first.count || d.count != math.Trunc(d.count) ||", new: "(d.count != math.Trunc(d.count) ||",
		tests: "TestCoalescerIsExact",
	}, {
		name: "coalescer-fractions", file: "ratelimit/coalescer_batch.go", what: "so many times a fraction is subtracted at once, which rounds otherwise",
		old: "d.count != math.Trunc(d.count) || ", new: "",
		tests: "TestCoalescerIsExact|TestEveryQueryExecModeCoalesces",
	}, {
		name: "coalescer-sum-of-some", file: "ratelimit/coalescer_batch.go", what: "where there is enough for some of the calls, all are denied",
		old: "			continue // enough for some of the calls\n", new: "",
		tests: "TestCoalescerIsExact|TestCoalescerAsksForTheSum|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-sum-above-capacity", file: "ratelimit/coalescer_batch.go", what: "more is asked for in one sum than the capacity can hold",
		old: " || g.sum() > g.numbers.Capacity {", new: " {",
		tests: "TestCoalescerAsksForTheSum",
	}, {
		name: "coalescer-sum-again", file: "ratelimit/coalescer.go", what: "where there was enough for some the last time, the sum is asked for all the same",
		old: "	ask := sums && !c.skipSums.Load()\n", new: "	ask := sums\n",
		tests: "TestCoalescerAsksForTheSum",
	}, {
		name: "coalescer-sum-failed", file: "ratelimit/coalescer.go", what: "a sum of which it is not known whether it was consumed is asked for once more",
		old: "		case err != nil:\n			return err\n		default:\n			c.skip", new: "		case err != nil:\n		default:\n			c.skip",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-sum-conflicts", file: "ratelimit/coalescer.go", what: "a sum that could not be serialized is an error for all",
		old: "		case retryable(err) || sqlState(err) == stateIsolation: //", new: "		case sqlState(err) == stateIsolation: //",
		tests: "TestCoalescerOnASerializableDatabase",
	}, {
		name: "coalescer-keys-level", file: "ratelimit/coalescer.go", what: "that the database's level is another is an error for all who ask of several keys",
		old: "		case retryable(err) || sqlState(err) == stateIsolation: //", new: "		case retryable(err): //",
		tests: "TestCoalescerOnASerializableDatabase",
	}, {
		name: "coalescer-keys-of-windows", file: "ratelimit/coalescer_batch.go", what: "keys of a fixed window are decided as those of a token bucket",
		old: " && (len(b.groups) == 1 || !b.groups[0].numbers.Window)", new: "",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-keys-of-limits", file: "ratelimit/coalescer_batch.go", what: "keys of several limits are decided by the definition of the first",
		old: "	return len(b.limits) == 1 && (", new: "	return (",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-keys-undecided", file: "ratelimit/coalescer_batch.go", what: "keys that were not decided are taken for full ones",
		old: "	if len(answer.Ord) == len(b.groups) {\n", new: "	if len(answer.Ord) > 0 {\n",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-keys-counts", file: "ratelimit/coalescer_batch.go", what: "keys are asked for the counts of others",
		old: "b.groups[b.byOrd[i]].sum())", new: "b.groups[i].sum())",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-definitions-mixed", file: "ratelimit/coalescer_batch.go", what: "one limit of two versions is decided by the definition of the first call",
		old: " || d.limit != g.first.limit)", new: ")",
		tests: "TestCoalescerIsExact",
	}, {
		name: "coalescer-lock-order", file: "ratelimit/coalescer_batch.go", what: "keys are sent in another order than that of the locks",
		old: "return cmp.Or(strings.Compare(x.limit.name, y.limit.name), strings.Compare(x.key, y.key))", new: "return cmp.Or(strings.Compare(y.limit.name, x.limit.name), strings.Compare(y.key, x.key))",
		tests: "TestCoalescerLocksInTheOrderOfADirectCall",
	}, {
		name: "coalescer-async-commit", file: "ratelimit/coalescer.go", what: "an error of an asynchronous commit is ignored",
		old: "		err = closeErr // of the commit\n", new: "		_ = closeErr // of the commit\n",
		tests: "TestACommitThatFailsGrantsNothing",
	}, {
		name: "coalescer-no-pace", file: "ratelimit/coalescer_queue.go", what: "statements after the first are held to no pace",
		old: "	c.due = now.Add(c.Pace)\n", new: "	c.due = now\n",
		tests: "TestCoalescerPace",
	}, {
		name: "coalescer-pace-for-ever", file: "ratelimit/coalescer.go", what: "who comes too early has nobody to come for him",
		old: "		go c.flush()\n	}\n	w := waiters", new: "		c.flying--\n	}\n	w := waiters",
		tests: "TestCoalescerPace",
	}, {
		name: "coalescer-one-place", file: "ratelimit/coalescer_queue.go", what: "what could go in the second place waits for the first",
		old: "	if len(c.queue) > 0 && c.flying < maxInFlight {\n", new: "	if len(c.queue) > 0 && c.flying < 0 {\n",
		tests: "TestCoalescerPaceKeepsBothPlaces|TestACallThatLeavesHoldsNobodyUp",
	}, {
		name: "coalescer-locked-for-all", file: "ratelimit/coalescer.go", what: "one key that is locked fails all that share the statement",
		old: "		case timedOut(err) && b.shared() && ", new: "		case timedOut(err) && b.apart && ",
		tests: "TestALockedKeyFailsOnlyItsOwnCalls",
	}, {
		name: "coalescer-key-twice", file: "ratelimit/coalescer_queue.go", what: "calls for a key that is at the database go there as well, and wait for the row in the second place",
		old: "	return c.busy.has(ds) || apart", new: "	return apart",
		tests: "TestALockedKeyTakesOnePlace",
	}, {
		name: "coalescer-apart-twice", file: "ratelimit/coalescer_queue.go", what: "calls for keys that may be locked take both places",
		old: "	return c.busy.has(ds) || apart && c.apartFlying\n", new: "	return c.busy.has(ds)\n",
		tests: "TestLockedKeysLeaveOthersTheirThroughput",
	}, {
		name: "coalescer-blamed-forgotten", file: "ratelimit/coalescer_queue.go", what: "that a key is locked is found out again with each statement",
		old: "		c.blamed.add(ds)\n", new: "",
		tests: "TestLockedKeysLeaveOthersTheirThroughput|TestALockedKeyFailsOnlyItsOwnCalls",
	}, {
		name: "coalescer-blamed-for-ever", file: "ratelimit/coalescer_queue.go", what: "a key that was locked once shares no statement any more",
		old: "		c.blamed.remove(ds)\n", new: "",
		tests: "TestAKeyThatWasLockedSharesStatementsAgain",
	}, {
		name: "coalescer-apart-endless", file: "ratelimit/coalescer_queue.go", what: "where every key fails, each is tried",
		old: "			c.failures++\n", new: "",
		tests: "TestALockedTableIsFewStatements",
	}, {
		name: "coalescer-same-key-endless", file: "ratelimit/coalescer_queue.go", what: "calls for several limits, one of which is locked, fail one after another",
		old: "				return w.alone && slices.ContainsFunc", new: "				return false && slices.ContainsFunc",
		tests: "TestALockedKeyFailsOnlyItsOwnCalls",
	}, {
		name: "coalescer-team-blamed", file: "ratelimit/coalescer_queue.go", what: "calls that share a limit with one that fails are decided with it again",
		old: "	case leader.alone || w.alone:\n", new: "	case leader == nil:\n",
		tests: "TestALockedKeyFailsOnlyItsOwnCalls|TestALockedUserFailsNobodyElseOfHisTeam",
	}, {
		name: "coalescer-old-failures", file: "ratelimit/coalescer_queue.go", what: "a key that fails by itself again and again has others given up",
		old: "		if len(guilty) < len(ds) {\n			c.failures++\n", new: "		if len(ds) > 0 {\n			c.failures++\n",
		tests: "TestFailuresOfBeforeFailNobody",
	}, {
		name: "coalescer-left-holds", file: "ratelimit/coalescer.go", what: "whom a call has held up that left waits on",
		old: "		if len(w.ds) > 1 || w.again { // others", new: "		if len(w.ds) < 0 { // others",
		tests: "TestACallThatLeavesHoldsNobodyUp",
	}, {
		name: "coalescer-decided-busy", file: "ratelimit/coalescer.go", what: "keys that are decided wait for the second statement of the others",
		old: "	c.vacate(b)\n	c.occupy(b)\n", new: "",
		tests: "TestKeysThatAreDecidedDoNotWaitForTheOthers",
	}, {
		name: "coalescer-bad-text-for-all", file: "ratelimit/coalescer.go", what: "a key that the server cannot store is an error for all who share the statement",
		old: "(state[:2] == \"22\" || state[:2] == \"23\")", new: "state[:2] == \"23\"",
		tests: "TestCoalescerTextThatTheServerCannotStore",
	},

	// httplimit

	{
		name: "http-fails-open", file: "ratelimit/httplimit/httplimit.go", what: "requests pass while the database is down",
		old: "open = m.FailOpen && d.Status", new: "open = d.Status",
		tests: "TestHTTPWithoutTheDatabaseRequestsAreRefusedOrPassByChoice",
	}, {
		name: "http-unknown-passes", file: "internal/outcome/outcome.go", what: "an error that it does not know is a pass",
		old: "	default:\n		return http.StatusServiceUnavailable\n", new: "	default:\n		return 0\n",
		tests: "TestHTTPWithoutTheDatabaseRequestsAreRefusedOrPassByChoice",
	}, {
		name: "http-failure-refunded", file: "ratelimit/httplimit/settle.go", what: "failures are given back, too",
		old: "free = !m.failed(", new: "free = m.failed(recorder.status, r) || !m.failed(",
		tests: "TestHTTPWhatIsKnownOfAnAnswerDecidesWhetherItFailed",
	}, {
		name: "http-panic-refunded", file: "ratelimit/httplimit/settle.go", what: "a handler that panics has not failed",
		old: "	free := false\n", new: "	free := m.Failed != nil\n",
		tests: "TestHTTPWhatIsKnownOfAnAnswerDecidesWhetherItFailed",
	}, {
		name: "http-gave-up-refunded", file: "ratelimit/httplimit/settle.go", what: "a handler that gave up with its client has not failed",
		old: "r.Context().Err() != nil || m.Failed(http.StatusOK)", new: "m.Failed(http.StatusOK)",
		tests: "TestHTTPWhatIsKnownOfAnAnswerDecidesWhetherItFailed",
	}, {
		name: "http-refund-cancelled", file: "ratelimit/httplimit/settle.go", what: "who hangs up before the refund has paid for a success",
		old: "context.WithTimeout(context.WithoutCancel(r.Context()), m.timeout())", new: "context.WithTimeout(r.Context(), m.timeout())",
		tests: "TestHTTPWhatIsKnownOfAnAnswerDecidesWhetherItFailed|TestHTTPTheCostIsWhatTheHandlerSays",
	}, {
		name: "http-settle-for-ever", file: "ratelimit/httplimit/settle.go", what: "a charge waits for a locked row without end",
		old: "context.WithTimeout(context.WithoutCancel(r.Context()), m.timeout())", new: "context.WithTimeout(context.WithoutCancel(r.Context()), 1000*m.timeout())",
		tests: "TestHTTPACostIsNotWaitedForForEver",
	}, {
		name: "http-settle-panic", file: "ratelimit/httplimit/settle.go", what: "a handler that panics has cost what was estimated",
		old:   "		charge, refund := c.end(free)\n",
		new:   "		if p := recover(); p != nil {\n			panic(p)\n		}\n		charge, refund := c.end(free)\n",
		tests: "TestHTTPTheCostIsWhatTheHandlerSays",
	}, {
		name: "http-settle-silent", file: "ratelimit/httplimit/settle.go", what: "nobody hears of a cost that could not be settled",
		old: "	if d.Err != nil {\n		m.observe(r, d)\n	}\n", new: "",
		tests: "TestHTTPACostThatCannotBeSettledIsObservedAndTheEstimateStays|TestHTTPARefundThatFailsIsObservedAndTheTokensStayTaken",
	}, {
		name: "http-settle-denied", file: "ratelimit/httplimit/httplimit.go", what: "what was denied, and passes, is settled",
		old: "granted := limited && d.Status == 0", new: "granted := limited",
		tests: "TestHTTPACostThatMakesNoSenseIsAnErrorAndTheEstimateStays",
	}, {
		name: "http-settle-not-limited", file: "ratelimit/httplimit/httplimit.go", what: "a handler whose request is not limited must know that",
		old: "		case m.Settle:\n", new: "		case false:\n",
		tests: "TestHTTPACostThatMakesNoSenseIsAnErrorAndTheEstimateStays",
	}, {
		name: "http-cost-nan", file: "ratelimit/httplimit/settle.go", what: "NaN is a cost",
		old: "!(cost >= 0 && cost <= algebra.MaxTokens)", new: "cost < 0 || cost > algebra.MaxTokens",
		tests: "TestSetCost",
	}, {
		name: "http-cost-nothing-taken", file: "ratelimit/httplimit/settle.go", what: "a cost is an error where nothing was taken",
		old: "	if nothingTaken {\n", new: "	if false {\n",
		tests: "TestSetCost",
	}, {
		name: "http-cost-outer", file: "ratelimit/httplimit/settle.go", what: "a cost is for the innermost middleware only",
		old: "c = c.outer {", new: "c = nil {",
		tests: "TestSetCost",
	}, {
		name: "http-cost-too-late", file: "ratelimit/httplimit/settle.go", what: "a cost that comes too late is lost in silence",
		old: "	if c.returned {\n", new: "	if false {\n",
		tests: "TestSetCost",
	}, {
		name: "http-cost-other-limit", file: "ratelimit/httplimit/settle.go", what: "a cost for a limit that was not asked for is lost in silence",
		old: "return s.Limit.Name() == limit })", new: "return true })",
		tests: "TestSetCost",
	}, {
		name: "http-cost-of-up-to", file: "ratelimit/httplimit/settle.go", what: "of a request with UpTo, the estimate is what was asked for, not what was there",
		old: "s.Key}] += s.Taken", new: "s.Key}] += s.Count",
		tests: "TestTheCostOfWhatWasThereIsSettled",
	}, {
		name: "http-cost-two-requests", file: "ratelimit/httplimit/settle.go", what: "of two requests for one key, only the last is an estimate",
		old: "s.Key}] += s.Taken", new: "s.Key}] = s.Taken",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-twice", file: "ratelimit/httplimit/settle.go", what: "two requests for one key pay the difference twice",
		old: "		delete(taken, of)\n", new: "",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-unsaid", file: "ratelimit/httplimit/settle.go", what: "a limit of which nothing was said costs nothing",
		old: "case !first || !set:", new: "case !first || !set && free:",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-of-success", file: "ratelimit/httplimit/settle.go", what: "a success pays its cost, though only failures count",
		old: "		if free {\n", new: "		if free && !set {\n",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-tiny-charge", file: "ratelimit/httplimit/settle.go", what: "a difference that is less than any count is charged",
		old: "case more >= algebra.MinTokens:", new: "case more > 0:",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-tiny-refund", file: "ratelimit/httplimit/settle.go", what: "a difference that is less than any count is refunded",
		old: "case -more >= algebra.MinTokens:", new: "case -more > 0:",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-not-charged", file: "ratelimit/httplimit/settle.go", what: "a cost above the estimate is free",
		old: "charge = append(charge, c.requests[i].Count(more))", new: "_ = more",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-exposed-lost", file: "ratelimit/httplimit/fields.go", what: "what a CORS handler has listed is replaced",
		old: "			list = append(list, name)\n", new: "			list = append(list[min(len(list), len(exposed)):], name)\n",
		tests: "TestFieldsThatScriptsMayRead",
	}, {
		name: "http-exposed-twice", file: "ratelimit/httplimit/fields.go", what: "fields that are exposed already are listed again",
		old: "exposed = append(exposed, http.CanonicalHeaderKey(", new: "exposed = append(exposed, strings.ToUpper(",
		tests: "TestFieldsThatScriptsMayRead",
	}, {
		name: "http-exposed-legacy", file: "ratelimit/httplimit/fields.go", what: "the older fields are not exposed",
		old: "	names := []string{fieldPolicy, fieldLimit, fieldRetry}\n	if m.LegacyFields {", new: "	names := []string{fieldPolicy, fieldLimit, fieldRetry}\n	if false {",
		tests: "TestFieldsThatScriptsMayRead",
	}, {
		name: "http-exposed-unset", file: "ratelimit/httplimit/fields.go", what: "fields are exposed that are not there",
		old: "m.ExposeFields && len(policies) > 0", new: "m.ExposeFields",
		tests: "TestFieldsThatScriptsMayRead",
	}, {
		name: "http-exposed-unasked", file: "ratelimit/httplimit/fields.go", what: "fields are exposed without ExposeFields",
		old: "m.ExposeFields && len(policies) > 0", new: "len(policies) > 0",
		tests: "TestFieldsThatScriptsMayRead",
	}, {
		name: "http-rounded-down", file: "ratelimit/httplimit/fields.go", what: "Retry-After is rounded down, and so too early",
		old: "	if d%time.Second > 0 {\n		whole++\n	}\n", new: "",
		tests: "TestRetryAfterIsWholeSecondsRoundedUpAndAtLeastOne",
	}, {
		name: "http-at-least-one", file: "ratelimit/httplimit/fields.go", what: "Retry-After may be 0",
		old: "max(seconds(until.Sub(result.At)), 1)", new: "max(seconds(until.Sub(result.At)), 0)",
		tests: "TestRetryAfterIsWholeSecondsRoundedUpAndAtLeastOne",
	}, {
		name: "http-remaining-rounded-up", file: "ratelimit/httplimit/fields.go", what: "more is said to remain than does",
		old: "int64(math.Floor(", new: "int64(math.Ceil(",
		tests: "TestFields",
	}, {
		name: "http-forwarded-first", file: "ratelimit/httplimit/requests.go", what: "a client behind a proxy writes its own address",
		old: "i := len(entries) - c.TrustedProxies\n", new: "i := min(0, len(entries)-c.TrustedProxies)\n",
		tests: "TestClientIP",
	}, {
		name: "http-networks-any", file: "ratelimit/httplimit/requests.go", what: "everybody is a trusted proxy",
		old: "isIn(trusted, addr); i--", new: "trusted != nil; i--",
		tests: "TestClientIPOfTrustedNetworks|TestClientIPOfACDNsHeader",
	}, {
		name: "http-networks-garbage", file: "ratelimit/httplimit/requests.go", what: "what is no address is passed over",
		old: "		if !isAddress {\n			break\n", new: "		if !isAddress {\n			if i < 0 {\n				break\n			}\n			continue\n",
		tests: "TestClientIPOfTrustedNetworks",
	}, {
		name: "http-networks-number", file: "ratelimit/httplimit/requests.go", what: "a proxy that did not state an address is believed nevertheless",
		old: "			trusted = nil\n", new: "",
		tests: "TestClientIPOfACDNsHeader",
	}, {
		name: "http-networks-counted", file: "ratelimit/httplimit/requests.go", what: "the entries of the proxies that are counted are read again",
		old: "stated, true, entries[:i]", new: "stated, true, entries",
		tests: "TestClientIPOfTrustedNetworks",
	}, {
		name: "http-networks-embedded", file: "ratelimit/httplimit/requests.go", what: "who embeds a trusted proxy's address in its own is trusted",
		old: "return network.Contains(addr)", new: "return network.Contains(canonical(addr))",
		tests: "TestClientIPOfTrustedNetworks",
	}, {
		name: "http-client-header-twice", file: "ratelimit/httplimit/requests.go", what: "of two header fields, one is believed",
		old: "		if len(entries) > 1 {\n", new: "		if false {\n",
		tests: "TestClientIPOfACDNsHeader",
	}, {
		name: "http-client-header-missing", file: "ratelimit/httplimit/requests.go", what: "where a CDN's header is missing, what a client forwards is believed",
		old: "if c.ClientHeader != \"\" {", new: "if r.Header.Get(c.ClientHeader) != \"\" {",
		tests: "TestClientIPOfACDNsHeader",
	}, {
		name: "http-free-cost", file: "ratelimit/httplimit/requests.go", what: "a negative cost is what the client says",
		old: "cost != 0 && !(cost >= algebra.MinTokens)", new: "cost != 0 && !(math.Abs(cost) >= algebra.MinTokens)",
		tests: "TestCost",
	}, {
		name: "http-nothing-asked", file: "ratelimit/httplimit/httplimit.go", what: "a request for which nothing is asked is not limited",
		old:   "err = errors.New(\"httplimit: Requests returned no requests and no error; for a request that is not limited, return ErrNotLimited\")",
		new:   "err = ErrNotLimited",
		tests: "TestHTTPTheServersMistakesAre500AndNeverAGrant|TestWithoutAnObserverNoRequestsAreLogged",
	}, {
		name: "http-not-limited-wrapped", file: "ratelimit/httplimit/httplimit.go", what: "ErrNotLimited is an error if it is wrapped",
		old: "errors.Is(d.Err, ErrNotLimited)", new: "d.Err == ErrNotLimited",
		tests: "TestHTTPRequestsThatAreSaidNotToBeLimitedPassUnasked",
	}, {
		name: "http-policy-period", file: "ratelimit/httplimit/fields.go", what: "w is the period, whatever the capacity",
		old: "periods := limit.Capacity() / *c.Rate", new: "periods := 1.0",
		tests: "TestFields|TestThePolicyStatesTheLimitsRate",
	}, {
		name: "http-policy-below-rate", file: "ratelimit/httplimit/fields.go", what: "a fixed window is said to refill before its next window",
		old: "periods = max(periods, 1)", new: "periods = max(periods, 0)",
		tests: "TestFields|TestThePolicyStatesTheLimitsRate",
	}, {
		name: "http-policy-rounded-down", file: "ratelimit/httplimit/fields.go", what: "w is rounded down, and q per w above the rate",
		old: "math.Ceil(micros / 1e6)", new: "math.Floor(micros / 1e6)",
		tests: "TestFields|TestThePolicyStatesTheLimitsRate",
	}, {
		name: "http-policy-inexact", file: "ratelimit/httplimit/fields.go", what: "what rounding adds to a whole number of seconds makes w one more",
		old: "math.Round(periods *", new: "(periods *",
		tests: "TestFields",
	}, {
		name: "http-policy-under-a-second", file: "ratelimit/httplimit/fields.go", what: "a refill in less than a second is stated as one second",
		old: "micros >= 1e6 && seconds", new: "micros > 0 && seconds",
		tests: "TestFields|TestThePolicyStatesTheLimitsRate",
	}, {
		name: "http-policy-clamped", file: "ratelimit/httplimit/fields.go", what: "a w too long to be said is cut, and q per w above the rate",
		old: " && seconds <= maxInteger", new: "",
		tests: "TestFields|TestThePolicyStatesTheLimitsRate",
	}, {
		name: "http-address-embedded", file: "ratelimit/httplimit/requests.go", what: "clients behind NAT64 or a Teredo server are one, and a 6to4 site many",
		old: "	addr = canonical(addr)\n", new: "",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-6to4", file: "ratelimit/httplimit/requests.go", what: "a 6to4 site is told apart by what it chooses itself",
		old: "\"2002::/16\"), 2, 0}", new: "\"2002::/16\"), 12, 0}",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-teredo", file: "ratelimit/httplimit/requests.go", what: "a Teredo client is another IPv4 client",
		old: "\"2001::/32\"), 12, 0xff}", new: "\"2001::/32\"), 12, 0}",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-loopback", file: "ratelimit/httplimit/requests.go", what: "::1 is an IPv4 address",
		old: "if ip[0] == 0 {", new: "if ip[0] == 0xff {",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-local-nat64", file: "ratelimit/httplimit/requests.go", what: "clients behind a local NAT64 are one",
		old: "		bits = 128\n", new: "		bits = 64\n",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-prefixes", file: "ratelimit/httplimit/requests.go", what: "the prefix of IPv4 addresses is that of IPv6",
		old: "cmp.Or(max(c.IPv4Prefix, 0), 32)", new: "cmp.Or(max(c.IPv6Prefix, 0), 32)",
		tests: "TestClientIP",
	}, {
		name: "http-key-spaces", file: "ratelimit/httplimit/credential.go", what: "spaces around a credential make another key",
		old: "	value = strings.Trim(value, \" \\t\")\n", new: "",
		tests: "TestAPIKey|TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-scheme", file: "ratelimit/httplimit/credential.go", what: "the case of the scheme makes another key",
		old: "strings.ToLower(value[:end])", new: "value[:end]",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-no-scheme", file: "ratelimit/httplimit/credential.go", what: "keys without a scheme are one if only case tells them apart",
		old: "return value // a key without", new: "return strings.ToLower(value) // a key without",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-any-field", file: "ratelimit/httplimit/credential.go", what: "a field that has no schemes is read as if it had",
		old: "if field != \"Authorization\" && field != \"Proxy-Authorization\" {", new: "if field == \"\" {",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-proxy", file: "ratelimit/httplimit/credential.go", what: "Proxy-Authorization is compared as it is",
		old: " && field != \"Proxy-Authorization\" {", new: " {",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-base64", file: "ratelimit/httplimit/credential.go", what: "each spelling of the base64 of Basic makes a key",
		old: "	return base64.StdEncoding.EncodeToString(decoded)\n", new: "	_ = decoded\n	return s\n",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-padding", file: "ratelimit/httplimit/credential.go", what: "padding makes another key",
		old: "standardBase64.Replace(strings.TrimRight(s, \"=\"))", new: "standardBase64.Replace(s)",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-alphabet", file: "ratelimit/httplimit/credential.go", what: "the URL-safe alphabet makes another key",
		old: "standardBase64.Replace(strings.TrimRight(s, \"=\"))", new: "strings.TrimRight(s, \"=\")",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-digest", file: "ratelimit/httplimit/credential.go", what: "each request of Digest makes a key",
		old: "if scheme != \"digest\" ||", new: "if scheme != \"Digest\" ||",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-order", file: "ratelimit/httplimit/credential.go", what: "the order of parameters makes another key",
		old: "slices.Sort(list)", new: "slices.Sort(list[:0])",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-quotes", file: "ratelimit/httplimit/credential.go", what: "a parameter's value can look like another parameter",
		old: "name+\"=\"+quoted(value)", new: "name+\"=\"+value",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-lines", file: "ratelimit/httplimit/requests.go", what: "of two credentials, the first counts, and the application may take the other",
		old: "case c != value:", new: "case i < 0:",
		tests: "TestAPIKeyIsOneForOneCredential",
	},

	// rpclimit

	{
		name: "rpc-fails-open", file: "ratelimit/rpclimit/rpclimit.go", what: "calls pass while the database is down",
		old: "open = i.FailOpen && refusal", new: "open = refusal",
		tests: "TestRPCWithoutTheDatabaseCallsAreRefusedOrPassByChoice",
	}, {
		name: "rpc-stays-closed", file: "ratelimit/rpclimit/rpclimit.go", what: "FailOpen does nothing",
		old: "open = i.FailOpen && refusal", new: "open = false && refusal",
		tests: "TestRPCWithoutTheDatabaseCallsAreRefusedOrPassByChoice",
	}, {
		name: "rpc-observe-only", file: "ratelimit/rpclimit/rpclimit.go", what: "ObserveOnly refuses",
		old: "|| open || i.ObserveOnly", new: "|| open",
		tests: "TestRPCObserveOnlyLetsDeniedCallsPass",
	}, {
		name: "rpc-client-gone", file: "ratelimit/rpclimit/rpclimit.go", what: "a client that goes is a fault of the database",
		old: "if c := refusal.Code(); ctx.Err() != nil &&", new: "if c := refusal.Code(); false &&",
		tests: "TestRPCAClientThatGoesIsNoFaultOfTheDatabase|TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-client-late", file: "ratelimit/rpclimit/rpclimit.go", what: "a deadline of the client's is a fault of the database",
		old: "if c := refusal.Code(); ctx.Err() != nil &&", new: "if c := refusal.Code(); errors.Is(ctx.Err(), context.Canceled) &&",
		tests: "TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-client-gone-passes", file: "ratelimit/rpclimit/rpclimit.go", what: "with FailOpen, the call of a client that goes passes",
		old: "status.FromContextError(ctx.Err()), false", new: "status.FromContextError(ctx.Err()), open",
		tests: "TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-timeout", file: "ratelimit/rpclimit/rpclimit.go", what: "a decision takes as long as the client waits",
		old: "context.WithTimeout(ctx, i.timeout())", new: "context.WithCancel(ctx)",
		tests: "TestADecisionHasADeadline",
	}, {
		name: "rpc-conflict", file: "ratelimit/rpclimit/rpclimit.go", what: "a conflict is a fault of the database",
		old: "ratelimit.Retry(within, func(ctx context.Context) (err error) { // a conflict is not a failure of the database\n			d.Result, err = i.Limiter.Consume(ctx, i.DB, requests...)\n			return err\n		})", new: "func() (err error) {\n			d.Result, err = i.Limiter.Consume(within, i.DB, requests...)\n			return err\n		}()",
		tests: "TestRPCWhatCouldNotBeSerializedIsRunAgain",
	}, {
		name: "rpc-nothing-asked", file: "ratelimit/rpclimit/rpclimit.go", what: "a call for which nothing is asked is not limited",
		old: "err = errors.New(\"rpclimit: no requests and no error were returned; for a call that is not limited, return ErrNotLimited\")", new: "err = ErrNotLimited",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-not-limited-wrapped", file: "ratelimit/rpclimit/rpclimit.go", what: "ErrNotLimited is an error if it is wrapped",
		old: "errors.Is(err, ErrNotLimited)", new: "err == ErrNotLimited",
		tests: "TestRPCCallsThatAreNotLimitedPass",
	}, {
		name: "rpc-incomplete", file: "ratelimit/rpclimit/rpclimit.go", what: "an interceptor without a limiter panics",
		old: "i.Limiter == nil || ", new: "",
		tests: "TestRPCAnIncompleteInterceptorRefuses",
	}, {
		name: "rpc-log-late", file: "ratelimit/rpclimit/rpclimit.go", what: "nobody is told that clients do not wait for the database",
		old: "case d.Code == codes.DeadlineExceeded:", new: "case d.Code == codes.Unknown:",
		tests: "TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-log-key", file: "ratelimit/rpclimit/rpclimit.go", what: "nobody is told of keys that are not found",
		old: "case d.Code == codes.InvalidArgument &&", new: "case d.Code == codes.Unknown &&",
		tests: "TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-never-retry", file: "ratelimit/rpclimit/refusal.go", what: "what can never be granted is the client's mistake alone",
		old: "case errors.Is(err, ratelimit.ErrExceedsCapacity):\n		return status.New(codes.ResourceExhausted", new: "case errors.Is(err, ratelimit.ErrExceedsCapacity):\n		return status.New(codes.InvalidArgument",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-violations-granted", file: "ratelimit/rpclimit/refusal.go", what: "limits that would have granted are violated, too",
		old: "if s.OK || slices.", new: "if slices.",
		tests: "TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied",
	}, {
		name: "rpc-violations-twice", file: "ratelimit/rpclimit/refusal.go", what: "a limit is violated twice",
		old: "return v.QuotaId == name", new: "return false",
		tests: "TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied",
	}, {
		name: "rpc-leak", file: "ratelimit/rpclimit/refusal.go", what: "a violation tells the key",
		old: "QuotaId: name, QuotaValue", new: "Subject: s.Key, QuotaId: name, QuotaValue",
		tests: "TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied",
	}, {
		name: "rpc-leak-error", file: "ratelimit/rpclimit/refusal.go", what: "an error of the program's own goes to clients",
		old: "	default:\n		return internal\n	}\n}\n", new: "	default:\n		return status.New(codes.Internal, err.Error())\n	}\n}\n",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-connect-details", file: "ratelimit/rpclimit/refusal.go", what: "details of a Connect error are lost",
		old: "for _, d := range byConnect.Details() {", new: "for _, d := range byConnect.Details()[:0] {",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-401", file: "ratelimit/rpclimit/refusal.go", what: "a missing credential is an invalid argument",
		old: "byHTTP.Status == http.StatusUnauthorized", new: "false",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-403", file: "ratelimit/rpclimit/refusal.go", what: "forbidden is an invalid argument",
		old: "byHTTP.Status == http.StatusForbidden", new: "false",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-canonical", file: "ratelimit/rpclimit/grpc.go", what: "the metadata of gRPC is not found by its canonical names",
		old: "call.Header[http.CanonicalHeaderKey(name)]", new: "call.Header[name]",
		tests: "TestRPCRequestsKnowTheMethodThePeerAndTheMetadata",
	}, {
		name: "rpc-stream-open", file: "ratelimit/rpclimit/grpc.go", what: "a stream of gRPC opens unlimited",
		old: "	if refusal := i.decide(stream.Context(), i.Requests, call); refusal != nil {\n		return refusal.Err()\n	}\n", new: "",
		tests: "TestRPCAStreamIsLimitedWhenItOpens",
	}, {
		name: "rpc-message-again", file: "ratelimit/rpclimit/grpc.go", what: "after a refused message of gRPC the next is received",
		old: "if s.refused != nil {\n		return s.refused\n	}\n	if err := s.ServerStream", new: "if err := s.ServerStream",
		tests: "TestRPCEachMessageOfAStreamIsLimited",
	}, {
		name: "rpc-message-ignored", file: "ratelimit/rpclimit/grpc.go", what: "a refused message of gRPC is handed over",
		old: "		s.refused = refusal.Err()\n", new: "		_ = refusal\n",
		tests: "TestRPCEachMessageOfAStreamIsLimited",
	}, {
		name: "rpc-connect-stream-open", file: "ratelimit/rpclimit/connect.go", what: "a stream of Connect opens unlimited",
		old: "		if refusal := i.decide(ctx, i.Requests, call); refusal != nil {\n			return connectError(refusal)\n		}\n", new: "",
		tests: "TestRPCAStreamIsLimitedWhenItOpens",
	}, {
		name: "rpc-connect-message-again", file: "ratelimit/rpclimit/connect.go", what: "after a refused message of Connect the next is received",
		old: "if s.refused != nil {\n		return s.refused\n	}\n	if err := s.Streaming", new: "if err := s.Streaming",
		tests: "TestRPCEachMessageOfAStreamIsLimited",
	}, {
		name: "rpc-connect-client", file: "ratelimit/rpclimit/connect.go", what: "calls that a client of Connect makes are limited",
		old: "request.Spec().IsClient", new: "false",
		tests: "TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied",
	}, {
		name: "rpc-connect-denial", file: "ratelimit/rpclimit/connect.go", what: "a denial by Connect has no details",
		old: "range refusal.Proto().GetDetails()", new: "range refusal.Proto().GetDetails()[:0]",
		tests: "TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied",
	},

	{
		name: "jitter-early", file: "ratelimit/jitter.go", what: "jitter makes it earlier",
		old: "at.Add(time.Duration(micros) * time.Microsecond)", new: "at.Add(-time.Duration(micros) * time.Microsecond)",
		tests: "TestJitterIsTheSameForTheSameKeyAndWithinTheSpan",
	},

	// internal/inmemory and ratelimit/ratelimittest

	{
		name: "promise-check-of-zero", file: "internal/algebra/promise.go", what: "the library thinks that a check that reads a balance is denied because a reservation beside it waits for long",
		old: "l.Unknown(runAt) && d.Floor > math.Inf(-1)", new: "l.Unknown(runAt)",
		tests: "TestACheckOfZeroIsNotDeniedBesideAReservation",
	}, {
		name: "inmemory-merge", file: "internal/inmemory/inmemory.go", what: "in memory, the rows of shards are merged only if the call is granted",
		old: "!reserve && len(t[d.ID]) > 1", new: "!reserve && false",
		tests: "TestModel",
	}, {
		name: "inmemory-shard-floor", file: "internal/inmemory/inmemory.go", what: "in memory, a shard takes tokens that it does not have",
		old: "if d.Shards > 1 || reserve {", new: "if reserve {",
		tests: "TestModel",
	}, {
		name: "inmemory-reserve-floor", file: "internal/inmemory/inmemory.go", what: "in memory, a reservation owes tokens without forfeiting any",
		old: "if d.Shards > 1 || reserve {", new: "if d.Shards > 1 {",
		tests: "TestModel",
	}, {
		name: "inmemory-emptier-shard", file: "internal/inmemory/inmemory.go", what: "in memory, the emptier shard is taken from",
		old: "d.available(rows[b], now) > d.available(rows[a], now)", new: "d.available(rows[b], now) < d.available(rows[a], now)",
		tests: "TestModel",
	}, {
		name: "inmemory-equal-shards", file: "internal/inmemory/inmemory.go", what: "in memory, the later one of two equal shards is taken from",
		old: "d.available(rows[b], now) > d.available(rows[a], now)", new: "d.available(rows[b], now) >= d.available(rows[a], now)",
		tests: "TestModel",
	}, {
		name: "inmemory-fuller-shard", file: "internal/inmemory/inmemory.go", what: "in memory, the fuller shard is taken from at every level",
		old: "	case level == Higher:\n", new: "	case false:\n",
		tests: "TestInMemoryAnswersAsPostgresDoes",
	}, {
		name: "inmemory-all-or-nothing", file: "internal/inmemory/inmemory.go", what: "in memory, several limits are granted if the last one is",
		old: "a.Granted = a.Granted && d.Enough(", new: "a.Granted = d.Enough(",
		tests: "TestModel",
	}, {
		name: "inmemory-time-backwards", file: "internal/inmemory/inmemory.go", what: "in memory, a row forgets that the clock has stepped back",
		old: "row.TS = max(row.TS, now)", new: "row.TS = now",
		tests: "TestModel",
	}, {
		name: "inmemory-refund-shards", file: "internal/inmemory/inmemory.go", what: "in memory, a refund changes the number of shards",
		old: "		d.Shards = len(rows)\n", new: "",
		tests: "TestModel",
	}, {
		name: "inmemory-refund-all", file: "internal/inmemory/inmemory.go", what: "in memory, a refund gives back all that is asked for",
		old: "d.Limit.Take(rows, len(rows), -back, now)", new: "d.Limit.Take(rows, len(rows), -d.Count, now)",
		tests: "TestModel",
	}, {
		name: "memory-conflict", file: "ratelimit/ratelimittest/tx.go", what: "in memory, transactions overwrite what others have committed meanwhile",
		old: "if !slices.Equal(s.db.table[id], rows) {", new: "if false && !slices.Equal(s.db.table[id], rows) {",
		tests: "TestConflictsAreRetried",
	}, {
		name: "memory-aborted", file: "ratelimit/ratelimittest/tx.go", what: "in memory, a transaction goes on after an error",
		old: "	s.aborted = answer.err != nil\n", new: "",
		tests: "TestOtherSQLIsAnError",
	}, {
		name: "memory-aborted-commit", file: "ratelimit/ratelimittest/tx.go", what: "in memory, an aborted transaction commits",
		old: "	if s.aborted {\n		return pgx.ErrTxCommitRollback\n	}\n", new: "",
		tests: "TestOtherSQLIsAnError",
	}, {
		name: "memory-savepoint", file: "ratelimit/ratelimittest/tx.go", what: "in memory, a rollback to a savepoint forgets nothing",
		old: "t.session.table, t.aborted = t.table, false", new: "t.aborted = false",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-savepoint-base", file: "ratelimit/ratelimittest/tx.go", what: "in memory, a key first used after a savepoint has no rows after its rollback",
		old: "			if _, used := t.before[id]; !used {\n				t.table[id] = rows\n			}\n", new: "			_, _ = id, rows\n",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-savepoint-aborted", file: "ratelimit/ratelimittest/tx.go", what: "in memory, a transaction stays aborted after a rollback to a savepoint",
		old: "t.session.table, t.aborted = t.table, false", new: "t.session.table = t.table",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-delete", file: "ratelimit/ratelimittest/tx.go", what: "in memory, a reset is not committed",
		old: "			delete(s.db.table, id)\n", new: "			_ = id\n",
		tests: "TestEveryVerb",
	}, {
		name: "memory-batch-commit", file: "ratelimit/ratelimittest/batch.go", what: "in memory, a batch without BEGIN is not committed",
		old: "		r.commit = s.commit()\n", new: "		s.end()\n",
		tests: "TestBatches",
	}, {
		name: "memory-raise", file: "ratelimit/ratelimittest/statement.go", what: "in memory, a denial in a batch is no error",
		old: "case s.orRaise && !a.Granted:", new: "case false:",
		tests: "TestBatches",
	}, {
		name: "memory-calendar-clock", file: "ratelimit/ratelimittest/statement.go", what: "in memory, a calendar is decided by windows of another time",
		old: "l.Unknown(now) || now < (*l.Windows)[0]", new: "false",
		tests: "TestBatches",
	}, {
		name: "memory-clock", file: "ratelimit/call.go", what: "the windows of a calendar are made by the process's clock, not by that of the database in memory",
		old: "ok && l.Clock == nil && !isNil(db) {", new: "ok && false {",
		tests: "TestCalendarsFollowTheClock",
	}, {
		name: "memory-pool", file: "ratelimit/outside.go", what: "a call on the database in memory inside its transaction is not refused",
		old: "		inMemory\n		txBeginner\n	}:\n		return db\n", new: "		inMemory\n		txBeginner\n	}:\n		return nil\n",
		tests: "TestThePoolInsideATransactionIsRefused",
	}, {
		name: "memory-open", file: "ratelimit/ratelimittest/tx.go", what: "a transaction that is left open is not found",
		old: "		db.open++\n", new: "",
		tests: "TestTheEndOfATest",
	}, {
		name: "memory-sleep", file: "ratelimit/ratelimittest/clock.go", what: "the clock wakes nobody",
		old: "		close(s.done)\n		return true\n", new: "		return true\n",
		tests: "TestSleepEndsByTheClock",
	}, {
		name: "sendtx-denial", file: "ratelimit/sendtx.go", what: "a denial without a connection is the error of BEGIN",
		old: "	case sqlState(err) != \"\" && sqlState(err) == sqlState(failed) ||", new: "	case tx.Conn() != nil && sqlState(err) != \"\" && sqlState(err) == sqlState(failed) || tx.Conn() != nil &&",
		tests: "TestBatches",
	},

	// Plans: rates of 0, unlimited limits, and configuration files.

	{
		name: "plans-nothing-wanted", file: "ratelimit/rowless.go", what: "0 tokens of a limit with a rate of 0 are denied",
		old: "d.limit.numbers.Rate == 0 && d.count > 0", new: "d.limit.numbers.Rate == 0",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-check", file: "ratelimit/rowless.go", what: "a check grants what a rate of 0 would deny",
		old: "(c.consumes() || c.verb == VerbCheck)", new: "c.consumes()",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-charge", file: "ratelimit/rowless.go", what: "a rate of 0 denies a charge, which is always granted",
		old: "(c.consumes() || c.verb == VerbCheck)", new: "c.verb != VerbReset",
		tests: "TestNothingIsSentForPlansWithoutRows",
	}, {
		name: "plans-asks-others", file: "ratelimit/rowless.go", what: "the others are asked although one denies by policy",
		old: "if !denied && (len(c.demands) > 0 || c.rowless == nil) {", new: "if len(c.demands) > 0 || c.rowless == nil {",
		tests: "TestNothingIsSentForPlansWithoutRows",
	}, {
		name: "plans-clock", file: "ratelimit/rowless.go", what: "without a statement, the time is not that of the Clock",
		old: "\tif c.local.Valid {\n", new: "\tif false {\n",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-blames-others", file: "ratelimit/rowless.go", what: "a denial by policy is said to be that of the other limits, too",
		old: "r.Requests[i].OK = true //", new: "r.Requests[i].OK = false //",
		tests: "TestARateOfZeroDeniesTheOthers",
	}, {
		name: "plans-retry-at", file: "ratelimit/rowless.go", what: "a denial by policy says to retry at once",
		old: "r.RetryAt, r.RetryAfter = time.Time{}, math.MaxInt64", new: "r.RetryAfter = math.MaxInt64",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-retry-after", file: "ratelimit/rowless.go", what: "who waits for as long as a denial by policy says asks again at once",
		old: "r.RetryAt, r.RetryAfter = time.Time{}, math.MaxInt64", new: "r.RetryAt = time.Time{}",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-remaining", file: "ratelimit/rowless.go", what: "what remains of an unlimited limit is 0",
		old: "r.Remaining = min(r.Remaining, left)", new: "r.Remaining = min(r.Remaining, left, 0)",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-reset-at", file: "ratelimit/rowless.go", what: "an unlimited limit is never full",
		old: "if left > 0 && r.ResetAt.Before(r.At) {", new: "if false {",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-receipt", file: "ratelimit/rowless.go", what: "what an unlimited limit granted is not in the receipt",
		old: "s.took.rowless = c.consumes() && r.OK", new: "s.took.rowless = false",
		tests: "TestAReceiptOfAnotherPlan",
	}, {
		name: "plans-receipt-denied", file: "ratelimit/rowless.go", what: "a denial has a receipt",
		old: "s.took.rowless = c.consumes() && r.OK", new: "s.took.rowless = c.consumes()",
		tests: "TestARateOfZeroDeniesTheOthers",
	}, {
		name: "plans-receipt-check", file: "ratelimit/rowless.go", what: "a check has a receipt",
		old: "s.took.rowless = c.consumes() && r.OK", new: "s.took.rowless = r.OK",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-infinite-rate", file: "ratelimit/rowless.go", what: "an infinite rate, which is a mistake, describes itself as unlimited",
		old: "l.err == nil && l.numbers.Rate > algebra.MaxTokens", new: "l.numbers.Rate > algebra.MaxTokens",
		tests: "TestALimitWithoutRowsDescribesItself",
	}, {
		name: "plans-refund-from-row", file: "ratelimit/call.go", what: "what an unlimited limit granted is given back to the row of a later plan",
		old: "c.receipt.find(d.limit.name, d.key).Rows == 0", new: "false",
		tests: "TestAReceiptOfAnotherPlan",
	}, {
		name: "plans-refund-covered", file: "ratelimit/call.go", what: "more is refunded than an unlimited limit granted",
		old: "c.receipt.covers(c.rowless)", new: "c.receipt.covers(nil)",
		tests: "TestAReceiptOfAnotherPlan",
	}, {
		name: "plans-refund-noted", file: "ratelimit/receipt.go", what: "a refund without a row stays in the receipt",
		old: "r.find(d.limit.name, d.key).Refunded += d.count", new: "_ = d",
		tests: "TestAReceiptOfAnotherPlan",
	}, {
		name: "plans-receipt-altered", file: "ratelimit/receipt.go", what: "a receipt without rows may have tokens left in them",
		old: "!(t.Rows == 0 && t.Held == 0)", new: "t.Rows != 0",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "plans-exceeds", file: "ratelimit/demand.go", what: "a token of a rate of 0 is more than can be had, and no denial",
		old: "|| d.limit.numbers.Rate == 0 {", new: "|| false {",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-sweep", file: "ratelimit/sweep.go", what: "an unlimited plan is swept by its rate, which no row reaches",
		old: "		if limit.rowless() {\n			continue\n		}\n", new: "",
		tests: "TestASweepMindsEveryPlan",
	}, {
		name: "plans-sweep-capacity", file: "ratelimit/sweep.go", what: "the first plan's capacity is enough for a sweep",
		old: "max(numbers.Capacity, limit.numbers.Capacity)", new: "min(numbers.Capacity, limit.numbers.Capacity)",
		tests: "TestASweepMindsEveryPlan",
	}, {
		name: "plans-sweep-rate", file: "ratelimit/sweep.go", what: "a sweep refills by the fastest plan",
		old: "min(numbers.Rate, limit.numbers.Rate)", new: "max(numbers.Rate, limit.numbers.Rate)",
		tests: "TestASweepMindsEveryPlan",
	}, {
		name: "plans-sweep-kinds", file: "ratelimit/sweep.go", what: "limits of one name that refill differently are swept by the first",
		old: "if !sameRefill(&joined[i], &limit) {", new: "if false {",
		tests: "TestWhereASweepWorks",
	}, {
		name: "plans-batch", file: "ratelimit/batch.go", what: "a denial by policy is queued",
		old: "if a := c.byPolicy(); a != nil {", new: "if a := c.byPolicy(); a != nil && a.granted {",
		tests: "TestPlansWithoutRowsInABatch",
	}, {
		name: "plans-error", file: "ratelimit/errors.go", what: "the text of a denial by policy says to retry",
		old: "if e.RetryAt.IsZero() {", new: "if false {",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "config-rate-missing", file: "ratelimit/config.go", what: "a missing rate is 0",
		old: "\t\tmistake(\"rate is missing\")\n", new: "",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-rate-0-capacity", file: "ratelimit/config.go", what: "a rate of 0 may have a capacity",
		old: "*optional.to != 0 && c.Rate != nil && *c.Rate == 0", new: "false",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-unlimited-numbers", file: "ratelimit/config.go", what: "an unlimited limit may have numbers, which it ignores",
		old: "\t\tif set {\n", new: "\t\tif set && false {\n",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-fixed-calendar", file: "ratelimit/config.go", what: "a fixed window of a month has a period of 0",
		old: "case unit != \"\" && !onCalendar:", new: "case false:",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-calendar-fixed", file: "ratelimit/config.go", what: "a calendar window of 24 hours has no unit",
		old: "case err != nil && onCalendar, unit == \"\" && onCalendar:", new: "case err != nil && onCalendar:",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-unknown-field", file: "ratelimit/config_json.go", what: "a misspelt field is ignored",
		old: "\t\t\tmistakes = append(mistakes, fmt.Sprintf(\"unknown field %q\", name))\n", new: "",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-field-twice", file: "ratelimit/config_json.go", what: "of a field that is there twice, the last one counts",
		old: "case seen[name]:", new: "case false:",
		tests: "TestAConfigNamesLimitAndField",
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
	}, {
		name: "plans-up-to", file: "ratelimit/rowless.go", what: "an unlimited limit does not bound how many the others take",
		old: "ds[i].most = min(ds[i].most, leastUpTo(rowless))", new: "_ = i",
		tests: "TestUpToOfPlansWithoutRows",
	}, {
		name: "plans-up-to-taken", file: "ratelimit/rowless.go", what: "an unlimited limit says that it took more than the others",
		old: "if takesUpTo(c.demands) {", new: "if false {",
		tests: "TestUpToOfPlansWithoutRows",
	}, {
		name: "rpc-policy", file: "ratelimit/rpclimit/refusal.go", what: "a denial by policy says when to retry",
		old: "if denied.RetryAt.IsZero() {", new: "if false {",
		tests: "TestADenialByPolicyIsPermissionDenied",
	}, {
		name: "http-policy-status", file: "internal/outcome/outcome.go", what: "a denial by policy is a 429",
		old: "errors.Is(err, ratelimit.ErrDenied) && result.RetryAt.IsZero()", new: "errors.Is(err, ratelimit.ErrDenied) && false",
		tests: "TestHTTPPlans",
	}, {
		name: "http-policy-retry-after", file: "ratelimit/httplimit/refuse.go", what: "a denial by policy has a Retry-After",
		old: "if d.Status == http.StatusTooManyRequests {", new: "if !d.Result.At.IsZero() {",
		tests: "TestHTTPPlans",
	}, {
		name: "http-policy-problem", file: "ratelimit/httplimit/refuse.go", what: "a denial by policy is said to be an exceeded quota",
		old: "exceeded.RetryAt.IsZero()", new: "false",
		tests: "TestHTTPPlans",
	}, {
		name: "http-policy-unasked", file: "ratelimit/httplimit/fields.go", what: "limits that were not asked are said to have 0 left",
		old: "&& !(s.OK && s.RetryAt.IsZero())", new: "",
		tests: "TestFields",
	}, {
		name: "http-policy-reset", file: "ratelimit/httplimit/fields.go", what: "a denial by policy has a time to retry",
		old: "return s.RetryAt.Sub(result.At), !s.RetryAt.IsZero()", new: "return s.RetryAt.Sub(result.At), true",
		tests: "TestFields",
	}, {
		name: "http-unlimited-field", file: "ratelimit/httplimit/fields.go", what: "an unlimited limit has a policy",
		old: "s.Limit.Validate() != nil || math.IsInf(s.Limit.Capacity(), 1)", new: "s.Limit.Validate() != nil",
		tests: "TestFields",
	}, {
		name: "log-policy", file: "ratelimit/observe/log.go", what: "a denial by policy is logged with a time to retry that is centuries ago",
		old: "if !s.RetryAt.IsZero() {", new: "if true {",
		tests: "TestADenialByPolicyIsLoggedWithoutATimeToRetry",
	}, {
		name: "replay-unsorted", file: "ratelimit/replay/replay.go", what: "events may be out of order",
		old: "if r.count > 0 && e.Time.Before(r.to) {", new: "if false {",
		tests: "TestRunNamesTheEventThatIsWrong",
	}, {
		name: "replay-wait", file: "ratelimit/replay/replay.go", what: "the longest wait is the last one",
		old: "if wait > key.wait {", new: "if true {",
		tests: "TestTheLongestWait",
	}, {
		name: "replay-lack-forgiven", file: "ratelimit/replay/replay.go", what: "the suggestion counts as if the candidate's capacity could be saved up on top",
		old: "		numbers.Capacity = 0\n", new: "",
		tests: "TestTheSuggestionIsTheSmallestCapacity",
	}, {
		name: "replay-lookback", file: "ratelimit/replay/replay.go", what: "the suggestion takes months of long ago for the longest",
		old: "min(100**c.Rate, algebra.MaxTokens)", new: "min(1**c.Rate, algebra.MaxTokens)",
		tests: "TestTheSuggestionCountsAllMonths",
	}, {
		name: "replay-exceeds", file: "ratelimit/inmemory.go", what: "what is more than the capacity is forgotten by the suggestion",
		old: "return result, charge.demands[0].numbers, err", new: "return result, algebra.Limit{Period: 1 + charge.demands[0].numbers.Period}, err",
		tests: "TestTheSuggestionCountsAllMonths|TestTheSuggestionIsTheSmallestCapacity",
	}, {
		name: "replay-stored-key", file: "ratelimit/inmemory.go", what: "a replay escapes a stored key again, and so has another grid",
		old: "if r.key = key; checkText", new: "if r.key = joinKey([]string{key}); checkText",
		tests: "TestReplayPredictsARun",
	}, {
		name: "replay-share", file: "ratelimit/replay/report.go", what: "more keys are denied than the share",
		old: "math.Floor(share*n)", new: "math.Ceil(share*n)",
		tests: "TestNoCapacityIsSuggestedWhereNoneHelps",
	}, {
		name: "replay-whole", file: "ratelimit/replay/report.go", what: "the suggestion is rounded down to whole tokens",
		old: "math.Ceil(c.needs[", new: "math.Floor(c.needs[",
		tests: "TestTheSuggestionIsTheSmallestCapacity",
	}, {
		name: "replay-list", file: "ratelimit/replay/report.go", what: "the lists are in the order in which the keys came",
		old: "compare(item, list[at-1]) < 0", new: "false",
		tests: "TestListsAreBoundedAndSorted",
	}, {
		name: "replay-terminal", file: "ratelimit/replay/report.go", what: "a key can move the cursor of a terminal",
		old: "len(quoted) > len(s)+2 || s ==", new: "s ==",
		tests: "TestThePictureEscapesNamesAndKeys",
	}, {
		name: "replay-markup", file: "ratelimit/replay/picture.go", what: "a name or a key can be markup of the picture",
		old: "_ = xml.EscapeText(&b, []byte(printable(s, most)))", new: "_ = xml.EscapeText(&b, nil)\n	b.WriteString(printable(s, most))",
		tests: "TestThePictureEscapesNamesAndKeys",
	}, {
		name: "replay-spans", file: "ratelimit/replay/spans.go", what: "events are lost when spans are joined",
		old: "joined[n-1].Events += span.Events", new: "joined[n-1].Events = span.Events",
		tests: "TestSpansGrowWithTheTime",
	}, {
		name: "replay-ties", file: "ratelimit/replay/reorder.go", what: "events of one time change places",
		old: "a.nth < b.nth", new: "a.nth > b.nth",
		tests: "TestReorder",
	}, {
		name: "replay-huge-line", file: "ratelimit/replay/log.go", what: "the rest of a huge line is taken for lines",
		old: "			for errors.Is(err, bufio.ErrBufferFull) {\n", new: "			if errors.Is(err, bufio.ErrBufferFull) {\n",
		tests: "TestHugeLinesAreErrors",
	}, {
		name: "replay-empty-key", file: "ratelimit/replay/log.go", what: "lines without a key count together",
		old: `err == nil && e.Key == "" {`, new: `err == nil && e.Key == "\x00" {`,
		tests: "TestCSV|TestJSONLines",
	}, {
		name: "replay-null-key", file: "ratelimit/replay/query.go", what: "rows without a key count together",
		old: `columns > 1 && key.String == ""`, new: `columns > 3 && key.String == ""`,
		tests: "TestReplayReadsAQuery",
	}, {
		name: "replay-binary", file: "ratelimit/replay/query.go", what: "keys are read in binary form, of which pgx does not always have a text",
		old: "pgx.TextFormatCode}", new: "pgx.BinaryFormatCode}",
		tests: "TestReplayReadsAQuery",
	},
}
