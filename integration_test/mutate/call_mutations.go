package main

// callMutations are edits of the path of a call.
var callMutations = []mutation{
	{
		name: "move-direction", file: "ratelimit/move.go", what: "what is used of the limit whose name comes first is moved",
		old: "if ds[0].requests[0] != 0 {", new: "if false {",
		tests: "TestMove",
	}, {
		name: "move-max-reserved", file: "ratelimit/move.go", what: "a move leaves no debt that the limit may have",
		old: "floor = -to.maxOwed()", new: "floor = 0",
		tests: "TestMoveOfDebts",
	}, {
		name: "move-any-debt", file: "ratelimit/move.go", what: "a move leaves any debt to a limit without MaxReserved",
		old: "!math.IsInf(to.maxReserved, 1)", new: "!math.IsInf(to.maxReserved, 1) || true",
		tests: "TestMoveOfDebts",
	}, {
		name: "move-count", file: "ratelimit/move.go", what: "the second request of a move may have a count",
		old: "from.tokens != 1 || to.tokens != 1", new: "from.tokens != 1",
		tests: "TestMoveRefusesWhatDoesNotRefillTogether",
	}, {
		name: "move-kinds", file: "ratelimit/move.go", what: "a window may be moved to a bucket",
		old: "case !a.Window && !b.Window:", new: "case !a.Window || !b.Window:",
		tests: "TestMoveRefusesWhatDoesNotRefillTogether",
	}, {
		name: "move-period", file: "ratelimit/move.go", what: "windows of another period refill together",
		old: "a.Period == b.Period && ", new: "",
		tests: "TestMoveRefusesWhatDoesNotRefillTogether",
	}, {
		name: "move-start", file: "ratelimit/move.go", what: "windows that begin at other times refill together",
		old: " && a.Start == b.Start", new: "",
		tests: "TestMoveRefusesWhatDoesNotRefillTogether",
	}, {
		name: "move-calendar", file: "ratelimit/move.go", what: "windows of another zone refill together",
		old: "r.limit.calendar == other.limit.calendar && ", new: "",
		tests: "TestMoveRefusesWhatDoesNotRefillTogether",
	}, {
		name: "move-capacity-below-one", file: "ratelimit/verbs.go", what: "no move to a limit that holds less than one token",
		old: "verbMove:    {moves: true, writes: repeatable, ignoresCount: true,", new: "verbMove:    {moves: true, writes: repeatable,",
		tests: "TestMoveOfDebts",
	}, {
		name: "calendar-several", file: "ratelimit/call_statement.go", what: "a calendar window beside another limit is sent without its windows",
		old: "		c.windows, c.firsts, c.lasts,\n	)}\n}\n\n// noBound", new: "		nil, nil, nil,\n	)}\n}\n\n// noBound",
		tests: "TestACalendarWindowDoesWhatAFixedWindowDoes",
	}, {
		name: "calendar-coalesced", file: "ratelimit/coalescer_batch.go", what: "a Coalescer sends calendar windows without their windows",
		old: "		a.Windows = b.windows // otherwise NULL, which is faster\n", new: "",
		tests: "TestACoalescerDecidesCalendars",
	}, {
		name: "calendar-waits", file: "ratelimit/call_calendar.go", what: "a reservation's list of windows does not reach ahead",
		old: "if does.refunds || does.owes == upToMaxReserved {", new: "if does.refunds {",
		tests: "TestTwoLimitsWaitForACalendar",
	}, {
		name: "calendar-full-shards", file: "ratelimit/call_calendar.go", what: "the list of windows ends before an empty shard among full ones is refilled",
		old: "float64(max(len(rows), 1))", new: "1",
		tests: "TestACalendarGrantsAtItsRetryAtWhateverItsShardsHave",
	}, {
		name: "byhand-full-shards", file: "migrations/engine/ratelimit.sql", what: "the same in SQL",
		old: "            / q.rate * greatest(pg_catalog.cardinality(value), 1)::double precision)", new: "            / q.rate)",
		tests: "TestACalendarGrantsAtItsRetryAtWhateverItsShardsHave",
	}, {
		name: "calendar-debts", file: "ratelimit/call_calendar.go", what: "the list of windows of a verb that makes debts does not reach further back",
		old: "if old || does.owes != noTokens || does.refunds || does.moves || does.holds {", new: "if old || does.holds {",
		tests: "TestADebtOfACalendarIsRefilledByEachWindow",
	}, {
		name: "calendar-old-debts", file: "ratelimit/call_calendar.go", what: "a denial for an old debt is not asked again with a longer list of windows",
		old: "if a.granted || c.old || !c.does.deniable {", new: "if true {",
		tests: "TestAnOldDebtOfACalendarDeniesNobody",
	}, {
		name: "calendar-old-debts-batch", file: "ratelimit/call_statement.go", what: "a call in a batch lists windows for no old debt",
		old: "if orRaise { // a statement", new: "if false { // a statement",
		tests: "TestAnOldDebtOfACalendarDeniesNobody",
	}, {
		name: "limit-of-a-result", file: "ratelimit/request.go", what: "a request of a result's limit keeps the numbers of an override",
		old: "limit: l.program()", new: "limit: l",
		tests: "TestALimitOfAResultIsTheProgramsOwn",
	}, {
		name: "demands-order", file: "ratelimit/call_demand.go", what: "several limits are sent in another order than the lock order",
		old: "strings.Compare(a.limit.name, b.limit.name)", new: "strings.Compare(b.limit.name, a.limit.name)",
		tests: "TestDemandsAreInTheOrderOfLocks",
	}, {
		name: "demands-twice", file: "ratelimit/call_demand.go", what: "a limit that a call names twice counts once",
		old: "d.count += tokens", new: "d.count = tokens",
		tests: "TestRequestsForOneKeyAreGrantedAsOneAfterAnother",
	}, {
		name: "demands-rounding", file: "ratelimit/call_demand.go", what: "requests for the whole capacity together are refused because of rounding",
		old: "if capacity-d.count < d.lowest() {", new: "if capacity-d.count < d.floor {",
		tests: "TestMergedRequestsAreNotRefusedForARoundingError",
	}, {
		name: "demands-two-definitions", file: "ratelimit/call_demand.go", what: "one limit with two definitions in one call is granted by one of them",
		old: "if found && d.limit != r.limit {", new: "if false {",
		tests: "TestTwoDefinitionsOfOneLimitInOneCallAreAnError",
	}, {
		name: "demands-one", file: "ratelimit/call_statement.go", what: "a call for one limit is sent with its name and its key swapped",
		old: "return one, c.names[0], c.keys[0]", new: "return one, c.keys[0], c.names[0]",
		tests: "TestStatementsAreWhatSqlcSends",
	}, {
		name: "denial-no-error", file: "ratelimit/call.go", what: "a denial is no error",
		old: "	case c.does.deniable && !result.OK:", new: "	case false:",
		tests: "TestTokenBucketGrantsItsCapacityThenItsRate",
	}, {
		name: "commit-failed-answer", file: "ratelimit/call.go", what: "if COMMIT fails, the result before it is returned beside the error",
		old: "		return unanswered(c.verb, c.requests), explainCall(", new: "		return result, explainCall(",
		tests: "TestACommitThatFailsGrantsNothing",
	}, {
		name: "refund-any-time", file: "ratelimit/call.go", what: "an instant that the database cannot store is sent, and aborts the transaction",
		old: "if t.Year() < 1000 || t.Year() > 9999 {", new: "if t.Year() > 9999 {",
		tests: "TestClocksFarInThePastAndFuture|TestHostileRequestsAreRefusedAndPoisonNothing",
	}, {
		name: "check-no-error", file: "ratelimit/verbs.go", what: "a check that denies returns no error",
		old: "verbCheck:   {deniable: true, op: \"check\"}", new: "verbCheck:   {op: \"check\"}",
		tests: "TestCheckAnswersAndWritesNothing",
	}, {
		name: "record-order", file: "ratelimit/call_record.go", what: "the rows of several limits have each other's ts",
		old: "sinceY2K(ts[i])", new: "sinceY2K(ts[len(ts)-1-i])",
		tests: "TestAnswersAreReadAsPgtypeWritesThem",
	}, {
		name: "record-lengths", file: "ratelimit/call_record.go", what: "an answer with more instants than values is accepted",
		old: "ts == nil || len(ts) != len(values) {", new: "ts == nil || len(ts) < len(values) {",
		tests: "TestAnswersThatSayNothingAreNotRead",
	}, {
		name: "forfeits-several", file: "ratelimit/call.go", what: "limits that wait for each other are not sent as a call that forfeits",
		old: "(len(c.demands) > 1 || anyOf(", new: "(anyOf(",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "forfeits-window", file: "ratelimit/call.go", what: "a reservation of a fixed window is not sent as a call that forfeits",
		old: "(len(c.demands) > 1 || anyOf(c.demands, func(d *demand) bool { return d.limit.numbers.Window }))", new: "len(c.demands) > 1",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft",
	}, {
		name: "wait-in-tx", file: "ratelimit/wait.go", what: "a Wait sleeps in a transaction",
		old: "if handles.IsTx(db) || inTransaction(db)", new: "if handles.IsTx(nil) || inTransaction(db)",
		tests: "TestWaitIsRefusedInATransaction",
	}, {
		name: "wait-in-tx-by-hand", file: "ratelimit/wait.go", what: "a Wait sleeps in a transaction that was begun by hand",
		old: "if handles.IsTx(db) || inTransaction(db)", new: "if handles.IsTx(db)",
		tests: "TestWaitIsRefusedInATransaction",
	}, {
		name: "wait-beside-tx", file: "ratelimit/wait.go", what: "a Wait on the pool of a transaction gets the advice to use the transaction",
		old: " || errOutside(ctx, verbWait, db, requests) != nil {", new: " {",
		tests: "TestWaitIsRefusedInATransaction",
	}, {
		name: "wait-no-floor", file: "ratelimit/wait.go", what: "a Wait for a bucket's tokens lasts beyond the deadline",
		old: "d.floor = max(d.floor, floor)", new: "d.floor = max(d.floor, floor-1e9)",
		tests: "TestAWaitDuringAPause",
	}, {
		name: "wait-paused", file: "ratelimit/wait.go", what: "a Wait takes tokens that come long after its deadline, when a pause is over",
		old: "if err == nil && late(&result, most) {", new: "if false && late(&result, most) {",
		tests: "TestAWaitDuringAPause",
	}, {
		name: "wait-floor-alone", file: "ratelimit/wait.go", what: "a Wait with a deadline may reserve more than maxReserved",
		old: "d.floor = max(d.floor, floor)", new: "d.floor = floor",
		tests: "TestWaitKeepsTheLimitsBounds",
	}, {
		name: "wait-floor-of-first", file: "ratelimit/wait.go", what: "a deadline that is too early for a limit without capacity causes an SQL error",
		old: "if floor <= d.numbers.Capacity-d.count {", new: "if true {",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-floor-of-window", file: "ratelimit/wait.go", what: "up to the deadline, a window is expected to refill continuously",
		old: "!exact && (changes || !c.forfeits()) {", new: "!exact {",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-in-vain", file: "ratelimit/wait.go", what: "a Wait sleeps although the call took so long that the deadline comes first",
		old: "ok && time.Until(deadline) < granted.delay() {", new: "ok && time.Until(deadline) < 0 {",
		tests: "TestWaitDoesNotSleepBeyondTheDeadline",
	}, {
		name: "wait-deaf", file: "ratelimit/wait.go", what: "a Wait sleeps on after its context has ended",
		old: "		case <-ctx.Done():\n			return over(ctx)\n", new: "",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-no-cause", file: "ratelimit/wait.go", what: "a canceled Wait does not return the cause",
		old: "return over(ctx)", new: "return ctx.Err()",
		tests: "TestWaitTellsWhyItWasCanceled",
	}, {
		name: "wait-real-time", file: "ratelimit/wait.go", what: "a Wait sleeps by the process's clock, although the limiter has one",
		old: "			return runAt.Time().Sub(l.Clock())\n", new: "",
		tests: "TestWaitServesInOrderOfArrival",
	}, {
		name: "wait-no-sleep", file: "ratelimit/wait.go", what: "a Wait does not sleep",
		old: "for wait := granted.delay(); wait > 0;", new: "for wait := time.Duration(0); wait > 0;",
		tests: "TestTwentyWaitAtTwentyPerSecond|TestWaitServesInOrderOfArrival",
	}, {
		name: "wait-spins", file: "ratelimit/wait.go", what: "a Wait asks a clock without a pause that goes slower than time",
		old: "max(step, clockStep/10))\n", new: "runAt.Time().Sub(granted.At)-time.Since(began))\n",
		tests: "TestAClockThatStandsStillIsAskedEvery10ms",
	}, {
		name: "wait-asks", file: "ratelimit/wait.go", what: "a Wait of a day asks its clock every 10 ms",
		old: "max(clockStep, time.Since(began)/8)", new: "clockStep",
		tests: "TestInABubble",
	}, {
		name: "wait-kept", file: "ratelimit/wait.go", what: "a canceled Wait keeps its tokens",
		old: "kept := l.giveBack(ctx, db, result, requests, true); kept != nil", new: "kept := error(nil); kept != nil",
		tests: "TestFourWhoGiveUpCostTheNextOneNothing",
	}, {
		name: "wait-canceled-result", file: "ratelimit/wait.go", what: "a canceled Wait reports a grant",
		old: "			result, err = unanswered(verbWait, requests), explainCall(verbWait, requests, err)\n			result.At", new: "			err = explainCall(verbWait, requests, err)\n			result.At",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-unbounded", file: "ratelimit/wait.go", what: "without a deadline, a Wait may wait without end",
		old: "return max(longWait, l.numbers.Period)", new: "return time.Duration(1 << 62)",
		tests: "TestAQueueOfThoseWhoLeftIsBounded",
	}, {
		name: "wait-bound-of-minutes", file: "ratelimit/wait.go", what: "without a deadline, a Wait for a slow limit is denied",
		old: "return max(longWait, l.numbers.Period)", new: "return longWait",
		tests: "TestAQueueOfThoseWhoLeftIsBounded",
	}, {
		name: "wait-observed-as-granted", file: "ratelimit/usage/count.go", what: "the tokens of a Wait that was given up are not counted",
		old: "given.tokens = s.Taken; given", new: "given",
		tests: "TestUsageOfWaitsThatWereGivenUp",
	}, {
		name: "wait-canceled-refund", file: "ratelimit/wait.go", what: "tokens are refunded on the context that has ended",
		old: "context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)", new: "context.WithTimeout(ctx, rollbackTimeout)",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-refund-unbounded", file: "ratelimit/wait.go", what: "the refund of a Wait has no timeout",
		old: "context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)", new: "context.WithCancel(context.WithoutCancel(ctx))",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-refund-once", file: "ratelimit/wait.go", what: "tokens are lost if their refund cannot be serialized",
		old: "		return err\n	})\n}", new: "		return err\n	}, Attempts(1))\n}",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-above-capacity", file: "ratelimit/call_demand.go", what: "a Wait for more than the capacity waits",
		old: "if does.atMostFull && capacity > 0 && !d.limit.numbers.Holds(d.count) {", new: "if false {",
		tests: "TestWaitKeepsTheLimitsBounds",
	}, {
		name: "wait-without-capacity", file: "ratelimit/call_demand.go", what: "no call can wait for a limit that saves nothing up",
		old: "if does.atMostFull && capacity > 0 && !d.limit.numbers.Holds(d.count) {", new: "if does.atMostFull && !d.limit.numbers.Holds(d.count) {",
		tests: "TestWaitKeepsTheLimitsBounds",
	}, {
		name: "wait-denied", file: "ratelimit/verbs.go", what: "a Wait is denied if the tokens are not there yet",
		old: "op: \"consume\", owes: upToMaxReserved, atMostFull: true}", new: "op: \"consume\", atMostFull: true}",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-coalesced", file: "ratelimit/coalescer.go", what: "a call that no floor bounds waits in a Coalescer's queue",
		old: "sharded(c.demands) || c.reserves()", new: "sharded(c.demands) || c.forfeits()",
		tests: "TestAWaitThatNoFloorBoundsSkipsACoalescersQueue",
	}, {
		name: "up-to-plain", file: "ratelimit/call_statement.go", what: "UpTo takes one token",
		old: "!c.does.upTo && !c.tooMuch()", new: "!c.tooMuch()",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "up-to-coalesced", file: "ratelimit/coalescer.go", what: "a Coalescer decides UpTo together with other calls, as if it asked for one token",
		old: " || c.reserves() || c.does.upTo", new: " || c.reserves()",
		tests: "TestTakeOnACoalescerThatIsBusy",
	}, {
		name: "up-to-twice", file: "ratelimit/call_demand.go", what: "two requests of a call may take from one key, one of them with UpTo",
		old: "			if found {\n				return nil, fmt.Errorf(\"%w: limit %q: a Take has two", new: "			if false {\n				return nil, fmt.Errorf(\"%w: limit %q: a Take has two",
		tests: "TestTakeIsRefusedWhereItHasNoMeaning",
	}, {
		name: "up-to-none", file: "ratelimit/verbs.go", what: "UpTo may have a maximum of 0",
		old: "		case most < 1:", new: "		case false:",
		tests: "TestTakeIsRefusedWhereItHasNoMeaning",
	}, {
		name: "tx-commit-ignored", file: "ratelimit/tx.go", what: "an error of COMMIT is ignored",
		old: "	if err := tx.commit(ctx); err != nil {\n		return true, fmt.Errorf(\"ratelimit: commit: %w\", unknownUnless(err))\n	}", new: "	_ = tx.commit(ctx)",
		tests: "TestATransactionRunsAgain",
	}, {
		name: "tx-ended-as-text", file: "ratelimit/tx.go", what: "InTx reports a commit after a ROLLBACK as text",
		old: "conn.PgConn().TxStatus() == 'I' && !tx.ended {", new: "false {",
		tests: "TestInTxOfAFunctionThatRollsBackItself",
	}, {
		name: "tx-ambiguous-retried", file: "ratelimit/tx.go", what: "a COMMIT whose answer was lost is retried",
		old: "case err != nil && retryable(err):", new: "case err != nil && (retryable(err) || committing && sqlState(err) == \"\"):",
		tests: "TestInTxWhoseConnectionBrokeBeforeCommit|TestTransactionsInChaos",
	}, {
		name: "tx-deadlock", file: "ratelimit/errors.go", what: "a deadlock's victim is not retried",
		old: "(state == \"40001\" || state == \"40P01\")", new: "state == \"40001\"",
		tests: "TestADeadlockIsRetried",
	}, {
		name: "tx-denial-committed", file: "ratelimit/tx.go", what: "a transaction whose function failed is not rolled back",
		old: "_ = tx.rollback(rollbackCtx)", new: "_ = rollbackCtx",
		tests: "TestATransactionReturnsOtherErrorsAsTheyAre",
	}, {
		name: "tx-attempts", file: "ratelimit/tx.go", what: "there is one attempt too many",
		old: "if attempt == attempts {", new: "if attempt > attempts {",
		tests: "TestATransactionGivesUpAndSaysHowManyAttemptsItTook",
	}, {
		name: "tx-attempts-multiply", file: "ratelimit/errors.go", what: "a transaction that has used up its attempts is retried by the outer one",
		old: " && !errors.Is(err, ErrAttemptsExhausted)", new: "",
		tests: "TestNestedRetriesDoNotMultiply",
	}, {
		name: "outside-allowed", file: "ratelimit/tx_outside.go", what: "a verb on the pool inside its transaction takes tokens that a rollback does not return",
		old: "if open.pool == poolOf(db) && !open.ended.Load() {", new: "if false {",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "outside-innermost", file: "ratelimit/tx_outside.go", what: "only the innermost transaction's pool is refused",
		old: "for ; open != nil; open = open.around {", new: "if open != nil {",
		tests: "TestAllEnclosingPoolsCount",
	}, {
		name: "outside-for-ever", file: "ratelimit/tx_outside.go", what: "a kept context is refused after its transaction has ended",
		old: " && !open.ended.Load()", new: "",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "outside-check", file: "ratelimit/tx_outside.go", what: "a check on the pool inside its transaction is refused",
		old: "does.writes == never ||", new: "false ||",
		tests: "TestReadingOnThePoolInsideItsTransactionIsAllowed",
	}, {
		name: "outside-inherited", file: "ratelimit/tx_outside.go", what: "OutsideTx changes nothing",
		old: "(*openTx)(nil))", new: "ctx.Value(openTxKey{}))",
		tests: "TestOutsideTxOutlivesTheRollback",
	}, {
		name: "outside-begins", file: "ratelimit/tx.go", what: "a transaction on the pool begins inside a transaction of the pool",
		old: "if outside(ctx, db) {", new: "if false {",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "outside-sends", file: "ratelimit/tx_sendtx.go", what: "a SendTx on the pool inside a transaction of the pool is sent",
		old: "if outside(ctx, db) {", new: "if false {",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "outside-publishes", file: "ratelimit/publish.go", what: "a Publish on the pool inside a transaction of the pool is sent",
		old: "if outside(ctx, db) {", new: "if false {",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "outside-sweeps", file: "ratelimit/sweep.go", what: "a Sweep on the pool inside a transaction of the pool is sent",
		old: "if outside(ctx, db) {", new: "if false {",
		tests: "TestWritingOnThePoolInsideItsTransactionIsRefused",
	}, {
		name: "tx-level", file: "ratelimit/tx.go", what: "InTx is READ COMMITTED by default",
		old: "o := txOptions{isolation: pgx.Serializable,", new: "o := txOptions{isolation: pgx.ReadCommitted,",
		tests: "TestATransactionRunsAtItsLevel",
	}, {
		name: "tx-rollback-cancelled", file: "ratelimit/tx.go", what: "a rollback uses a context that has ended",
		old: "context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)", new: "context.WithTimeout(ctx, rollbackTimeout)",
		tests: "TestInTxKeepsTheConnectionWhenItsContextEnds",
	}, {
		name: "tx-commit-cancelled", file: "ratelimit/tx.go", what: "COMMIT is sent on a context that has ended",
		old: "	if ctx.Err() != nil { // no driver", new: "	if false { // no driver",
		tests: "TestATransactionEndsWithItsContext|TestHotEndsWithItsContext",
	}, {
		name: "late-not-with-begin", file: "ratelimit/tx_late.go", what: "BEGIN is a separate round trip, whatever the first statement",
		old: "	if t.tx != nil || t.canceled(ctx) {\n		return t.QueryRow(", new: "	if t.failed == nil {\n		return t.QueryRow(",
		tests: "TestTheFirstLimitIsSentWithBegin",
	}, {
		name: "late-hidden", file: "ratelimit/tx.go", what: "a function can hide that its transaction did not begin",
		old: "if tx.failed != nil && !errors.Is(err, tx.failed) {", new: "if false && !errors.Is(err, tx.failed) {",
		tests: "TestInTxWhoseTransactionDoesNotBegin",
	}, {
		name: "late-closed", file: "ratelimit/tx.go", what: "the outcome of a COMMIT on a closed connection is reported as unknown",
		old: "if err == nil && conn.IsClosed() && !tx.ended {", new: "if false {",
		tests: "TestInTxWhoseConnectionBrokeBeforeCommit",
	}, {
		name: "late-committed", file: "ratelimit/tx.go", what: "if fn commits and its connection breaks, the transaction is reported as not committed",
		old: "conn.IsClosed() && !tx.ended {", new: "conn.IsClosed() {",
		tests: "TestInTxWhoseConnectionBrokeBeforeCommit",
	}, {
		name: "late-outside", file: "ratelimit/tx_late.go", what: "a statement on the connection of a transaction that did not begin is committed by itself",
		old: "		_ = t.conn.Close(t.ctx)\n", new: "		_ = t.conn\n",
		tests: "TestInTxWhoseTransactionDoesNotBegin",
	}, {
		name: "late-kept", file: "ratelimit/tx_late.go", what: "a caller that keeps a transaction that did not begin closes a connection that another caller has",
		old: "!t.ended && ", new: "",
		tests: "TestATransactionThatIsKeptClosesNoConnection",
	}, {
		name: "late-lapsed", file: "ratelimit/tx_late.go", what: "a first statement that is not sent aborts the transaction",
		old: "		if t.canceled(ctx) {\n", new: "		if false {\n",
		tests: "TestAFirstStatementThatIsNotSent",
	}, {
		name: "late-after-rollback", file: "ratelimit/tx_late.go", what: "a transaction that was rolled back before it began can still begin",
		old: "		t.tx = pgx.FailedBatchResults(t.beginning(), pgx.ErrTxClosed).Tx()\n", new: "",
		tests: "TestInTxOfAFunctionThatRollsBackItself",
	}, {
		name: "late-answers-unread", file: "ratelimit/tx_late.go", what: "errors of BEGIN and of the lock of a turn are ignored if a query was sent with them",
		old: "		r.late.failed = err\n", new: "",
		tests: "TestHotPassesOnATimeoutOfTheDatabase|TestInTxWhoseTransactionDoesNotBegin",
	}, {
		name: "sql-commit-ignored", file: "ratelimit/sql.go", what: "on database/sql, an error of COMMIT is ignored",
		old: "				err := tx.Commit()\n", new: "				_ = tx.Commit()\n				var err error\n",
		tests: "TestATransactionRunsAgain",
	}, {
		name: "sql-rows-err", file: "ratelimit/sql.go", what: "on database/sql, an error after the row is ignored",
		old: "	if err := rows.Err(); err != nil {\n		return err\n	}\n", new: "",
		tests: "TestDatabaseSQLNoticesACommitThatFails",
	}, {
		name: "batch-commit-ignored", file: "ratelimit/tx_sendtx.go", what: "an error of a batch, or of its COMMIT, is ignored",
		old: "	err = results.Close()\n", new: "	_ = results.Close()\n",
		tests: "TestSendTxRunsAgainAndGivesUpAsInTxDoes",
	}, {
		name: "batch-anybodys-denial", file: "ratelimit/call_answer.go", what: "a PT429 from another source is taken for a denial",
		old: "	decoder.DisallowUnknownFields()\n", new: "",
		tests: "TestOnlyWhatTheRaisingFunctionWritesIsADenial",
	}, {
		name: "batch-requests-aliased", file: "ratelimit/tx_batch.go", what: "queued requests change with the caller's slice",
		old: "	requests = slices.Clone(requests)\n", new: "	_ = slices.Clone[[]Request]\n",
		tests: "TestABatchAnswersAsConsumeDoes",
	}, {
		name: "batch-not-rolled-back", file: "ratelimit/tx_sendtx.go", what: "the connection of a denied batch stays in a failed transaction",
		old: "		_ = tx.Rollback(rollbackCtx) // after", new: "		_ = rollbackCtx // after",
		tests: "TestADenialStopsABatchWhereverItStands|TestAFloodOfDenialsCausesNoReconnect",
	}, {
		name: "batch-reprepares", file: "ratelimit/tx_sendtx.go", what: "after each denial, the statements of a batch are prepared again",
		old: "		batch.QueuedQueries = nil\n", new: "",
		tests: "TestAFloodOfDenialsCausesNoReconnect|TestSendTxIsOneRoundTrip|TestConflictsAtTheFirstStatementPrepareNothing",
	}, {
		name: "hot-unfair", file: "ratelimit/tx_hot.go", what: "the last caller in the queue gets the next turn",
		old: "		close(l.waiting[0])\n		l.waiting = slices.Delete(l.waiting, 0, 1)", new: "		close(l.waiting[len(l.waiting)-1])\n		l.waiting = l.waiting[:len(l.waiting)-1]",
		tests: "TestTheQueueIsFirstInFirstOut",
	}, {
		name: "hot-cancelled-stays", file: "ratelimit/tx_hot.go", what: "a cancelled caller stays in the queue, and gets a turn that is never released",
		old: "		l.waiting = slices.Delete(l.waiting, i, i+1)\n", new: "",
		tests: "TestWhoIsCancelledLeavesTheQueueAndTheOthersMoveUp",
	}, {
		name: "hot-cancelled-at-its-turn", file: "ratelimit/tx_hot.go", what: "a caller that is cancelled when it gets its turn does not release it",
		old: "	q.leave(n) // the turn came at the same moment\n", new: "",
		tests: "TestQueuesNeverLetMoreThanTwoPassAndNeverGetStuck",
	}, {
		name: "hot-never-leaves", file: "ratelimit/tx.go", what: "a turn is not released at the end of the transaction",
		old: "		defer leave()\n", new: "		_ = leave\n",
		tests: "TestOverGrant|TestATransactionRollsBackOnPanicAndGoexit",
	}, {
		name: "hot-half-entered", file: "ratelimit/tx_hot.go", what: "a caller that stops waiting for a second limit keeps its turn on the first",
		old: "			leave()\n			return nil, nil, fmt.Errorf", new: "			return nil, nil, fmt.Errorf",
		tests: "TestWhoGivesUpWaitingForOneLimitKeepsNoTurnOnAnother",
	}, {
		name: "hot-lanes-leak", file: "ratelimit/tx_hot.go", what: "every key that was ever queued is remembered",
		old: "		delete(q.byStripe, n.stripe())\n", new: "",
		tests: "TestQueuesNeverLetMoreThanTwoPassAndNeverGetStuck|TestTheQueueIsFirstInFirstOut",
	}, {
		name: "hot-views-order", file: "ratelimit/tx_hot.go", what: "views are locked in the order of the limits, not in the common order",
		old: "	slices.Sort(numbers)\n", new: "",
		tests: "TestTheStripesStayTheSame|TestSeveralHotLimitsInAnyOrderNeverDeadlock",
	}, {
		name: "hot-queues-order", file: "ratelimit/tx_hot.go", what: "queues are entered in the order of the limits, not in the common order",
		old: "cmp.Compare(a.stripe(), b.stripe())", new: "cmp.Compare(a.name, b.name)",
		tests: "TestQueuesAreEnteredInTheOrderOfTheViews",
	}, {
		name: "hot-waits-for-itself", file: "ratelimit/tx_hot.go", what: "two limits that share a view take two places in one queue",
		old: "if i > 0 && n.stripe() == t[i-1].stripe() {", new: "if i > 0 && n == t[i-1] {",
		tests: "TestKeysThatMeetWaitInOneQueue",
	}, {
		name: "hot-weak-lock", file: "ratelimit/tx_hot.go", what: "the lock on the view excludes no transaction",
		old: "in share update exclusive mode", new: "in row exclusive mode",
		tests: "TestHotTransactionsDoNotConflict",
	}, {
		name: "hot-late-lock", file: "ratelimit/tx_late.go", what: "the views are locked after a snapshot was taken",
		old: "	batch.BeginTx(pgx.TxOptions{IsoLevel: t.isolation})\n", new: "	batch.BeginTx(pgx.TxOptions{IsoLevel: t.isolation})\n	batch.Queue(\"select 1\")\n",
		tests: "TestHotTransactionsDoNotConflict",
	}, {
		name: "hot-other-shard", file: "ratelimit/call_statement.go", what: "the shard with the turn is not the shard that is taken from",
		old: "	if shard, ok := hotShard(ctx, d.limit, d.key); ok {\n		return int32(shard), int32(shard)\n	}\n", new: "	_, _ = hotShard(ctx, d.limit, d.key)\n",
		tests: "TestAHotLimitsShardIsChosenWhenQueueing",
	}, {
		name: "hot-in-hot", file: "ratelimit/tx_hot.go", what: "a transaction may wait for itself",
		old: "if ctx.Value(turnKey{}) != nil {", new: "if ctx.Value(turnKey{}) == ctx {",
		tests: "TestHotInHotIsRefused",
	}, {
		name: "coalescer-embedded", file: "ratelimit/db.go", what: "a struct that embeds a Coalescer silently does not coalesce",
		old: "db.(interface{ coalescer() *Coalescer }); ok {", new: "db.(*Coalescer); ok {",
		tests: "TestAStructThatEmbedsACoalescerCoalesces",
	}, {
		name: "jitter-early", file: "ratelimit/jitter.go", what: "jitter makes the instant earlier",
		old: "at.Add(time.Duration(micros) * time.Microsecond)", new: "at.Add(-time.Duration(micros) * time.Microsecond)",
		tests: "TestJitterIsTheSameForTheSameKeyAndWithinTheSpan",
	}, {
		name: "memory-clock", file: "ratelimit/db.go", what: "a calendar's windows follow the process's clock, not that of the database in memory",
		old: "ok && !handles.IsNil(db) {", new: "ok && false {",
		tests: "TestCalendarsFollowTheClock",
	}, {
		name: "memory-pool", file: "ratelimit/tx_outside.go", what: "a call on the database in memory inside its transaction is not refused",
		old: "		inMemory\n		txBeginner\n	}:\n		return db\n", new: "		inMemory\n		txBeginner\n	}:\n		return nil\n",
		tests: "TestThePoolInsideATransactionIsRefused",
	}, {
		name: "sendtx-pooler", file: "ratelimit/tx_sendtx.go", what: "a batch whose pooler lost its server counts as not committed",
		old: "	if open {\n\t\treturn nil, unknown", new: "	if open && failed == nil {\n\t\treturn nil, unknown",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "sendtx-function", file: "ratelimit/tx_sendtx.go", what: "the error of a function decides whether COMMIT was reached",
		old: "	open := !notCommitted(err)", new: "	open := !notCommitted(errors.Join(failed, err))",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "sendtx-committed", file: "ratelimit/tx_sendtx.go", what: "a function's error after COMMIT looks as if a retry were safe",
		old: "		return committedError{beside{failed}}\n", new: "		return failed\n",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "batch-lost-answer", file: "ratelimit/tx_batch.go", what: "the lost answer of a batch outside a transaction looks as if a retry were safe",
		old: "replyTo(s.args, true)", new: "replyTo(s.args, false)",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "batch-in-tx", file: "ratelimit/call_wire.go", what: "in the caller's transaction, the outcome of a batch is unknown",
		old: " && conn.PgConn().TxStatus() == 'I'", new: "",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "answer-unread", file: "ratelimit/call_wire.go", what: "a committed call whose answer cannot be read looks as if a retry were safe",
		old: "	return a, r.unknownIfSent(err)\n", new: "	return a, err\n",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "retry-unknown", file: "ratelimit/errors.go", what: "an unknown outcome is retried if a conflict is joined to it",
		old: " && !errors.Is(err, ErrUnknownOutcome)\n}", new: " || false\n}",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "sql-function-commits", file: "ratelimit/errors.go", what: "on database/sql, a function that commits by itself looks as if nothing were committed",
		old: "	case errors.Is(err, pgx.ErrTxCommitRollback):\n", new: "	case errors.Is(err, pgx.ErrTxCommitRollback), strings.Contains(err.Error(), \"already been committed\"):\n",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "errors-unnamed", file: "ratelimit/errors.go", what: "the error of a call names no limit",
		old: "	if names := limitsOf(requests); names != \"\" {\n", new: "	if names := limitsOf(requests); names != \"\" && false {\n",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "wait-not-given-back", file: "ratelimit/wait.go", what: "a Wait that keeps its tokens looks as if a retry were safe",
		old: "err = unknown(fmt.Errorf(\"%w, and", new: "err = error(fmt.Errorf(\"%w, and",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "receipt-optional-lost", file: "ratelimit/receipt.go", what: "the receipt of the rest lacks a newer version's optional fields",
		old: "	*o = more\n", new: "	_ = more\n",
		tests: "TestAReceiptKeepsOptionalFields",
	}, {
		name: "receipt-optional-any", file: "ratelimit/receipt.go", what: "a receipt with any unknown field is accepted",
		old: "strings.HasPrefix(name, optionalPrefix)", new: "strings.HasPrefix(name, optionalPrefix) || name == \"more\"",
		tests: "TestAReceiptKeepsOptionalFields|TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "refund-all-of-the-count", file: "ratelimit/receipt.go", what: "a refund without requests asks for what is refunded already",
		old: "left := t.Count - t.Refunded; countable", new: "left := t.Count; countable",
		tests: "TestARefundWithoutRequestsIsOfAllThatIsLeft",
	}, {
		name: "refund-all-varying", file: "ratelimit/receipt.go", what: "a refund without requests takes the definition for a key's own numbers",
		old: "		case limit.doesVary():\n", new: "		case limit.doesVary() && limit.name == \"\":\n",
		tests: "TestARefundWithoutRequestsIsOfAllThatIsLeft",
	}, {
		name: "log-infinite", file: "ratelimit/result_text.go", what: "a result of an unlimited limit cannot be logged as JSON",
		old: "	if math.IsInf(n, 0) || math.IsNaN(n) {\n", new: "	if math.IsNaN(n) {\n",
		tests: "TestLogsHaveNoKeys",
	}, {
		name: "sendtx-foreign-refusal", file: "ratelimit/errors.go", what: "a batch that was committed matches the refusal of another call",
		old: "!slices.Contains(nothingDone, target) && errors.Is(e.error, target)", new: "errors.Is(e.error, target)",
		tests: "TestSendTxReturnsOtherErrorsAsTheyAre",
	}, {
		name: "sendtx-foreign-denial", file: "ratelimit/tx_sendtx.go", what: "a refused batch returns the denial of another call",
		old: "replyOf(q) != nil && errors.Is(failed, ErrDenied)", new: "errors.Is(failed, ErrDenied)",
		tests: "TestSendTxReturnsOtherErrorsAsTheyAre",
	}, {
		name: "sendtx-denial", file: "ratelimit/tx_sendtx.go", what: "a denial without a connection is reported as an error of BEGIN",
		old: "	case sqlState(err) != \"\" && sqlState(err) == sqlState(failed) ||", new: "	case tx.Conn() != nil && sqlState(err) != \"\" && sqlState(err) == sqlState(failed) || tx.Conn() != nil &&",
		tests: "TestBatches",
	}, {
		name: "plans-refund-from-row", file: "ratelimit/call.go", what: "the grant of an unlimited limit is refunded to the row of a later plan",
		old: "c.receipt.find(d.limit.name, d.key).Rows == 0", new: "false",
		tests: "TestAReceiptOfAnotherDefinition",
	}, {
		name: "plans-refund-covered", file: "ratelimit/call.go", what: "a refund may exceed the grant of an unlimited limit",
		old: "c.receipt.covers(c.rowless)", new: "c.receipt.covers(nil)",
		tests: "TestAReceiptOfAnotherDefinition",
	}, {
		name: "plans-exceeds", file: "ratelimit/call_demand.go", what: "a token of a rate of 0 exceeds the capacity instead of being denied",
		old: "|| d.limit.grantsNothing() {", new: "|| false {",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-batch", file: "ratelimit/tx_batch.go", what: "a denial by policy is queued",
		old: "if a := c.byPolicy(); a != nil {", new: "if a := c.byPolicy(); a != nil && a.granted {",
		tests: "TestPlansWithoutRowsInABatch",
	}, {
		name: "update-bucket-unconditionally", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a bucket does not check whether there is enough",
		old: "NULL) - $4::double precision >= $7::double precision", new: "NULL) - $4::double precision IS NOT NULL",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-bucket-shards", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a bucket takes from a shard",
		old: "r.key = $6::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards))", new: "r.key = $6::text AND r.shard = 0",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	}, {
		name: "update-bucket-ts-back", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a bucket moves ts back with the clock",
		old: "NULL) - $4::double precision,\n       ts = greatest(r.ts, statement_timestamp())", new: "NULL) - $4::double precision,\n       ts = statement_timestamp()",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-window-unconditionally", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a window does not check whether there is enough",
		old: "$2::timestamptz) - $5::double precision >= $8::double precision", new: "$2::timestamptz) - $5::double precision IS NOT NULL",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-window-shards", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a window takes from a shard",
		old: "r.key = $7::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE\n   AND ratelimit._available(r.value, r.ts, date_bin", new: "r.key = $7::text AND r.shard = 0\n   AND ratelimit._available(r.value, r.ts, date_bin",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	}, {
		name: "update-window-ts-back", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a window moves ts back with the clock",
		old: "$2::timestamptz) - $5::double precision,\n       ts = greatest(r.ts, statement_timestamp())", new: "$2::timestamptz) - $5::double precision,\n       ts = statement_timestamp()",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-calendar-unconditionally", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a calendar does not check whether there is enough",
		old: "$5::timestamptz[]) - $6::double precision >= $9::double precision", new: "$5::timestamptz[]) - $6::double precision IS NOT NULL",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-calendar-shards", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a calendar takes from a shard",
		old: "r.key = $8::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE\n   AND", new: "r.key = $8::text AND r.shard = 0\n   AND",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	}, {
		name: "update-calendar-ts-back", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a calendar moves ts back with the clock",
		old: "$5::timestamptz[]) - $6::double precision,\n       ts = greatest(r.ts, statement_timestamp())", new: "$5::timestamptz[]) - $6::double precision,\n       ts = statement_timestamp()",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-level", file: "internal/dbsqlc/ratelimit.sql.go", what: "above READ COMMITTED, the plain UPDATE takes",
		old: "$7::double precision\n   AND current_setting('transaction_isolation') = 'read committed'\n", new: "$7::double precision\n",
		tests: "TestTheUpdateReadsNothingAboveReadCommitted",
	}, {
		name: "update-scans", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE scans a small table, and goes on when it is large",
		old: "r.key = $6::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards))", new: "r.key = $6::text AND r.shard = 0 AND r.shards = 1",
		tests: "TestTheUpdateUsesTheIndexOfASmallTable",
	}, {
		name: "update-of-a-wrapper", file: "ratelimit/call_wire.go", what: "what a DB adds to the statement is lost",
		old: " && sql == r.function {", new: " {",
		tests: "TestAHintThatADBAddsIsSent",
	}, {
		name: "update-reserves", file: "ratelimit/call_update.go", what: "a reservation sends a plain UPDATE",
		old: "	case c.takesCounts() && c.does.owes != upToMaxReserved:", new: "	case c.takesCounts():",
		tests: "TestTwentyWaitAtTwentyPerSecond",
	}, {
		name: "update-by-a-clock", file: "ratelimit/call_update.go", what: "a call with a clock sends a plain UPDATE",
		old: " || c.now.Valid:", new: ":",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	}, {
		name: "update-expected", file: "ratelimit/call_update.go", what: "a call that will be denied sends a plain UPDATE",
		old: "	case deniedLately.expect(c.demands[0]):", new: "	case false:",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	}, {
		name: "update-in-a-transaction", file: "ratelimit/call_wire.go", what: "on a connection that is in a transaction, a plain UPDATE is sent",
		old: "r.update != nil && r.sent && ", new: "r.update != nil && ",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	}, {
		name: "update-in-vain", file: "ratelimit/call_update.go", what: "an UPDATE that takes nothing is tried by every call",
		old: "u.wait.Store(1<<(score/4) - 2)", new: "u.wait.Store(0)",
		tests: "TestAnUpdateIsNotTriedInVain|TestTheUpdateReadsNothingAboveReadCommitted",
	}, {
		name: "update-never-again", file: "ratelimit/call_update.go", what: "after some UPDATEs that took nothing, a connection sends none again",
		old: "u.wait.Add(-1)", new: "u.wait.Add(0)",
		tests: "TestAnUpdateIsNotTriedInVain",
	}, {
		name: "update-misses", file: "ratelimit/call_update.go", what: "UPDATEs that miss among many grants add up",
		old: "u.score.Store(max(u.score.Load()-1, 0))", new: "",
		tests: "TestAnUpdateIsNotTriedInVain",
	}, {
		name: "update-refused", file: "ratelimit/call_update.go", what: "where only the functions may be used, a call fails",
		old: "errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, \"42\") ||", new: "errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, \"none\") ||",
		tests: "TestWhereOnlyTheFunctionsMayBeUsed",
	}, {
		name: "update-refused-again", file: "ratelimit/call_update.go", what: "where only the functions may be used, each call is refused first",
		old: "The server logs the error.\n		u.wait.Store(1_000_000)", new: "The server logs the error.\n		u.wait.Store(0)",
		tests: "TestWhereOnlyTheFunctionsMayBeUsed",
	}, {
		name: "update-distributed", file: "ratelimit/call_update.go", what: "a plain statement is sent where the tables are distributed",
		old: "string(results[0].Rows[0][0]) != \"t\"", new: "false && len(results) == 0",
		tests: "TestNoPlainStatementIsSentWhereTheTablesAreDistributed",
	}, {
		name: "update-twice", file: "ratelimit/call_wire.go", what: "a denial sends its UPDATE twice",
		old: "return w.ask(ctx, s.update.instead(s))", new: "return w.ask(ctx, s)",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	},
}
