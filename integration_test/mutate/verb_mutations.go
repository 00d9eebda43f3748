package main

// verbMutations are edits of what the verbs do, of balances, and of the reasons of a denial.
var verbMutations = []mutation{
	{
		name: "each-result-order", file: "ratelimit/each.go", what: "the results are in the order of locks",
		old: "conclude(place, &c, func(r *Result) { c.fill(r, &answers[i]) })", new: "conclude(place*0+i, &c, func(r *Result) { c.fill(r, &answers[i]) })",
		tests: "TestEachIsDecidedByItselfAndInOrder",
	}, {
		name: "each-outside", file: "ratelimit/verbs.go", what: "ConsumeEach on the pool inside a transaction of the pool is let through",
		old: "	if err == nil {\n		err = errOutside(ctx, v, db, requests)", new: "	if err == nil && v != verbEach {\n		err = errOutside(ctx, v, db, requests)",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "verb-consume-owes", file: "ratelimit/verbs.go", what: "a Consume takes tokens that are not there",
		old: "verbConsume: {takes: true, deniable: true, writes: onceOnly, op: decide.Consume}", new: "verbConsume: {takes: true, deniable: true, writes: onceOnly, op: decide.Consume, owes: upToMaxReserved}",
		tests: "TestAReservationIsNoPermission|TestMaxReservedUnsetZeroAndPositiveAreThreeThings",
	}, {
		name: "verb-take-all", file: "ratelimit/verbs.go", what: "a Take takes its most or nothing",
		old: "op: decide.Take, upTo: true}", new: "op: decide.Consume}",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "verb-balance-denied", file: "ratelimit/verbs.go", what: "a Balance of a plan that grants nothing is denied",
		old: "verbBalance: {op: decide.Check,", new: "verbBalance: {deniable: true, op: decide.Check,",
		tests: "TestBalanceOfPlansWithoutRows|TestBalanceUnderOverrides",
	}, {
		name: "reserve-at-once", file: "ratelimit/verbs.go", what: "the work of a reservation may run at once",
		old: "RetryAt: result.runAt.Time()", new: "RetryAt: result.At",
		tests: "TestAReservationsRetryAtIsWhenTheWorkMayRun",
	}, {
		name: "reserve-no-delay", file: "ratelimit/verbs.go", what: "a reservation has no delay",
		old: "Delay: result.delay(),", new: "Delay: 0 * result.delay(),",
		tests: "TestAReservationsRetryAtIsWhenTheWorkMayRun",
	}, {
		name: "take-says-the-most", file: "ratelimit/verbs.go", what: "a Take returns its most, not what it took",
		old: "n = int(result.Requests[0].Taken)", new: "n = most",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "balance-order", file: "ratelimit/balance.go", what: "balances are in the order of the locks",
		old: "all[request] = c.balance(&c.demands[i], a.rows[i], a.at)", new: "all[i+0*request] = c.balance(&c.demands[i], a.rows[i], a.at)",
		tests: "TestBalanceAnswersInTheOrderOfItsRequests",
	}, {
		name: "balance-used", file: "ratelimit/balance.go", what: "what is used is counted from 0, not from the capacity",
		old: "b.Used = d.numbers.Capacity - b.Remaining", new: "b.Used = -b.Remaining",
		tests: "TestBalanceSaysWhatIsThere",
	}, {
		name: "balance-unlimited-used", file: "ratelimit/balance.go", what: "nothing of an unlimited limit is used, although nobody knows",
		old: "b.Remaining, b.Used = math.Inf(1), math.NaN()", new: "b.Remaining, b.Used = math.Inf(1), 0",
		tests: "TestBalanceOfPlansWithoutRows",
	}, {
		name: "balance-next-blocked", file: "ratelimit/balance.go", what: "the next token of a blocked key is one more than those that a block withholds",
		old: "		} else {\n			more += max(", new: "		}\n		{\n			more += max(",
		tests: "TestBalanceUnderOverrides",
	}, {
		name: "balance-window-reset", file: "ratelimit/balance.go", what: "a window resets now",
		old: "b.ResetAt = d.reaching(rows, at).NextWindow(at).Time()", new: "b.ResetAt = at.Time()",
		tests: "TestBalanceSaysWhatIsThere",
	}, {
		name: "balance-calendar-ahead", file: "ratelimit/call_later.go", what: "the next token of a calendar in debt is looked for in the windows around now",
		old: "return more.reaching(rows, from).When(", new: "return more.numbers.When(",
		tests: "TestBalanceOfACustomersMonth",
	}, {
		name: "reason-quota", file: "ratelimit/call_decide.go", what: "a denial for want of tokens looks like a block",
		old: "cmp.Or(reason, result.known, ReasonQuota)", new: "cmp.Or(reason, result.known, ReasonBlock)",
		tests: "TestADenialTellsWhy",
	}, {
		name: "reason-plan", file: "ratelimit/call_policy.go", what: "a plan that grants nothing looks like a block",
		old: "			return ReasonPlan\n", new: "			return ReasonBlock\n",
		tests: "TestADenialTellsWhy",
	}, {
		name: "reason-block", file: "ratelimit/call_policy.go", what: "a block looks like a plan that grants nothing",
		old: "reason = ReasonBlock", new: "reason = ReasonPlan",
		tests: "TestADenialTellsWhy",
	}, {
		name: "reason-nothing-wanted", file: "ratelimit/call_policy.go", what: "0 tokens of a plan that grants nothing are the reason of a denial by a block",
		old: "d.limit.blocked || d.limit.empty() && d.count > 0", new: "d.limit.grantsNothing()",
		tests: "TestADenialTellsWhy",
	}, {
		name: "reason-block-of-nothing", file: "ratelimit/call_policy.go", what: "0 tokens of a blocked key are granted",
		old: "d.limit.blocked || d.limit.empty() && d.count > 0", new: "d.limit.grantsNothing() && d.count > 0",
		tests: "TestADenialTellsWhy",
	}, {
		name: "reason-block-of-nothing-sql", file: "migrations/engine/ratelimit.sql", what: "SQL grants 0 tokens of a blocked key",
		old: "(q.rate > '0' OR q.count > '0')", new: "q.count > '0'",
		tests: "TestByHandUnderOverrides",
	}, {
		name: "reason-blocked-plan", file: "ratelimit/call_policy.go", what: "a plan that grants nothing is denied by its key's block",
		old: "		case d.limit.empty() && d.count > 0:\n			return", new: "		case d.limit.empty() && !d.limit.blocked:\n			return",
		tests: "TestADenialTellsWhy",
	}, {
		name: "reason-text", file: "ratelimit/errors.go", what: "the text of a denial by a plan tells of the block that will end",
		old: "			case s.Limit.empty() && count > 0:", new: "			case s.Limit.empty() && !s.Limit.blocked:",
		tests: "TestADenialTellsWhy",
	}, {
		name: "reason-none", file: "ratelimit/call_decide.go", what: "a denial has no reason",
		old: "cmp.Or(reason, result.known, ReasonQuota),", new: "cmp.Or(reason),",
		tests: "TestADenialTellsWhyOnEveryWayIn",
	},
}
