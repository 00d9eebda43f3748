package main

// callMutations are edits of the path of a call.
var callMutations = []mutation{
	{
		name: "move-max-reserved", file: "ratelimit/move.go", what: "a move leaves no debt that the limit may have",
		old: "return -to.maxOwed()", new: "return 0",
		tests: "TestMoveOfDebts",
	}, {
		name: "calendar-several", file: "ratelimit/call_statement.go", what: "a calendar window beside another limit is sent without its windows",
		old: "		c.windows, c.firsts, c.lasts,\n	)}\n}\n\n// noBound", new: "		nil, nil, nil,\n	)}\n}\n\n// noBound",
		tests: "TestACalendarWindowDoesWhatAFixedWindowDoes",
	}, {
		name: "calendar-full-shards", file: "ratelimit/call_calendar.go", what: "the list of windows ends before an empty shard among full ones is refilled",
		old: "float64(max(len(rows), 1))", new: "1",
		tests: "TestACalendarGrantsAtItsRetryAtWhateverItsShardsHave",
	}, {
		name: "calendar-debts", file: "ratelimit/call_calendar.go", what: "the list of windows of a verb that makes debts does not reach further back",
		old: "if old || does.owes != noTokens || does.refunds || does.moves || does.holds {", new: "if old || does.holds {",
		tests: "TestADebtOfACalendarIsRefilledByEachWindow",
	}, {
		name: "limit-of-a-result", file: "ratelimit/request.go", what: "a request of a result's limit keeps the numbers of an override",
		old: "limit: l.program()", new: "limit: l",
		tests: "TestALimitOfAResultIsTheProgramsOwn",
	}, {
		name: "demands-order", file: "ratelimit/call_demand.go", what: "several limits are sent in another order than the lock order",
		old: "strings.Compare(a.limit.name, b.limit.name)", new: "strings.Compare(b.limit.name, a.limit.name)",
		tests: "TestDemandsAreInTheOrderOfLocks",
	}, {
		name: "demands-rounding", file: "ratelimit/call_demand.go", what: "requests for the whole capacity together are refused because of rounding",
		old: "if capacity-d.count < d.lowest() {", new: "if capacity-d.count < d.floor {",
		tests: "TestMergedRequestsAreNotRefusedForARoundingError",
	}, {
		name: "demands-one", file: "ratelimit/call_statement.go", what: "a call for one limit is sent with its name and its key swapped",
		old: "return one, c.names[0], c.keys[0]", new: "return one, c.keys[0], c.names[0]",
		tests: "TestStatementsAreWhatSqlcSends",
	}, {
		name: "commit-failed-answer", file: "ratelimit/call_decide.go", what: "if COMMIT fails, the result before it is returned beside the error",
		old: "		return unanswered(c.verb, c.requests), explainCall(", new: "		return result, explainCall(",
		tests: "TestACommitThatFailsGrantsNothing",
	}, {
		name: "record-order", file: "ratelimit/call_answer.go", what: "the rows of several limits have each other's ts",
		old: "sinceY2K(ts[i])", new: "sinceY2K(ts[len(ts)-1-i])",
		tests: "TestAnswersAreReadAsPgtypeWritesThem",
	}, {
		name: "record-lengths", file: "ratelimit/call_answer.go", what: "an answer with more instants than values is accepted",
		old: "ts == nil || len(ts) != len(values) {", new: "ts == nil || len(ts) < len(values) {",
		tests: "TestAnswersThatSayNothingAreNotRead",
	}, {
		name: "forfeits-window", file: "ratelimit/call.go", what: "a reservation of a fixed window is not sent as a call that forfeits",
		old: "(len(c.demands) > 1 || anyOf(c.demands, func(d *demand) bool { return d.limit.numbers.Window }))", new: "len(c.demands) > 1",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft",
	}, {
		name: "wait-in-tx", file: "ratelimit/wait.go", what: "a Wait sleeps in a transaction",
		old: "if handles.IsTx(db) || inTransaction(db)", new: "if handles.IsTx(nil) || inTransaction(db)",
		tests: "TestWaitIsRefusedInATransaction",
	}, {
		name: "wait-no-floor", file: "ratelimit/wait.go", what: "a Wait for a bucket's tokens lasts beyond the deadline",
		old: "d.floor = max(d.floor, floor)", new: "d.floor = max(d.floor, floor-1e9)",
		tests: "TestAWaitDuringAPause",
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
		name: "wait-observed-as-granted", file: "ratelimit/usage/count.go", what: "the tokens of a Wait that was given up are not counted",
		old: "given.tokens = s.Taken; given", new: "given",
		tests: "TestUsageOfWaitsThatWereGivenUp",
	}, {
		name: "wait-refund-unbounded", file: "ratelimit/wait.go", what: "the refund of a Wait has no timeout",
		old: "context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)", new: "context.WithCancel(context.WithoutCancel(ctx))",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-refund-once", file: "ratelimit/wait.go", what: "tokens are lost if their refund cannot be serialized",
		old: "		return err\n	})\n}", new: "		return err\n	}, Attempts(1))\n}",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "wait-coalesced", file: "ratelimit/coalescer.go", what: "a call that no floor bounds waits in a Coalescer's queue",
		old: "sharded(c.demands) || c.reserves()", new: "sharded(c.demands) || c.forfeits()",
		tests: "TestAWaitThatNoFloorBoundsSkipsACoalescersQueue",
	}, {
		name: "tx-ambiguous-retried", file: "ratelimit/tx.go", what: "a COMMIT whose answer was lost is retried",
		old: "case err != nil && retryable(err):", new: "case err != nil && (retryable(err) || committing && sqlState(err) == \"\"):",
		tests: "TestInTxWhoseConnectionBrokeBeforeCommit|TestTransactionsInChaos",
	}, {
		name: "tx-deadlock", file: "ratelimit/errors.go", what: "a deadlock's victim is not retried",
		old: "(state == \"40001\" || state == \"40P01\")", new: "state == \"40001\"",
		tests: "TestADeadlockIsRetried",
	}, {
		name: "tx-attempts", file: "ratelimit/tx.go", what: "there is one attempt too many",
		old: "if attempt == attempts {", new: "if attempt > attempts {",
		tests: "TestATransactionGivesUpAndSaysHowManyAttemptsItTook",
	}, {
		name: "outside-innermost", file: "ratelimit/tx_outside.go", what: "only the innermost transaction's pool is refused",
		old: "for ; open != nil; open = open.around {", new: "if open != nil {",
		tests: "TestAllEnclosingPoolsCount",
	}, {
		name: "outside-inherited", file: "ratelimit/tx_outside.go", what: "OutsideTx changes nothing",
		old: "(*openTx)(nil))", new: "ctx.Value(openTxKey{}))",
		tests: "TestOutsideTxOutlivesTheRollback",
	}, {
		name: "tx-level", file: "ratelimit/tx.go", what: "InTx is READ COMMITTED by default",
		old: "o := txOptions{isolation: pgx.Serializable,", new: "o := txOptions{isolation: pgx.ReadCommitted,",
		tests: "TestATransactionRunsAtItsLevel",
	}, {
		name: "late-not-with-begin", file: "ratelimit/tx_late.go", what: "BEGIN is a separate round trip, whatever the first statement",
		old: "	if t.tx != nil || t.canceled(ctx) {\n		return t.QueryRow(", new: "	if t.failed == nil {\n		return t.QueryRow(",
		tests: "TestTheFirstLimitIsSentWithBegin",
	}, {
		name: "sql-commit-ignored", file: "ratelimit/sql.go", what: "on database/sql, an error of COMMIT is ignored",
		old: "				err := tx.Commit()\n", new: "				_ = tx.Commit()\n				var err error\n",
		tests: "TestATransactionRunsAgain",
	}, {
		name: "batch-commit-ignored", file: "ratelimit/tx_sendtx.go", what: "an error of a batch, or of its COMMIT, is ignored",
		old: "	err = results.Close()\n", new: "	_ = results.Close()\n",
		tests: "TestSendTxRunsAgainAndGivesUpAsInTxDoes",
	}, {
		name: "hot-unfair", file: "ratelimit/tx_hot.go", what: "the last caller in the queue gets the next turn",
		old: "		close(l.waiting[0])\n		l.waiting = slices.Delete(l.waiting, 0, 1)", new: "		close(l.waiting[len(l.waiting)-1])\n		l.waiting = l.waiting[:len(l.waiting)-1]",
		tests: "TestTheQueueIsFirstInFirstOut",
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
		old: "	if !hot {\n", new: "	if !hot || true {\n",
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
		name: "answer-unread", file: "ratelimit/call_wire.go", what: "a committed call whose answer cannot be read looks as if a retry were safe",
		old: "	return a, r.unknownIfSent(err)\n", new: "	return a, err\n",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "sql-function-commits", file: "ratelimit/errors.go", what: "on database/sql, a function that commits by itself looks as if nothing were committed",
		old: "	case errors.Is(err, pgx.ErrTxCommitRollback):\n", new: "	case errors.Is(err, pgx.ErrTxCommitRollback), strings.Contains(err.Error(), \"already been committed\"):\n",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "wait-not-given-back", file: "ratelimit/wait.go", what: "a Wait that keeps its tokens looks as if a retry were safe",
		old: "err = unknown(fmt.Errorf(\"%w, and", new: "err = error(fmt.Errorf(\"%w, and",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "receipt-optional-any", file: "ratelimit/receipt.go", what: "a receipt with any unknown field is accepted",
		old: "strings.HasPrefix(name, optionalPrefix)", new: "strings.HasPrefix(name, optionalPrefix) || name == \"more\"",
		tests: "TestAReceiptKeepsOptionalFields|TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "refund-all-varying", file: "ratelimit/receipt.go", what: "a refund without requests takes the definition for a key's own numbers",
		old: "		case limit.doesVary():\n", new: "		case limit.doesVary() && limit.name == \"\":\n",
		tests: "TestARefundWithoutRequestsIsOfAllThatIsLeft",
	}, {
		name: "sendtx-denial", file: "ratelimit/tx_sendtx.go", what: "a denial without a connection is reported as an error of BEGIN",
		old: "	case sqlState(err) != \"\" && sqlState(err) == sqlState(failed) ||", new: "	case tx.Conn() != nil && sqlState(err) != \"\" && sqlState(err) == sqlState(failed) || tx.Conn() != nil &&",
		tests: "TestBatches",
	}, {
		name: "plans-refund-covered", file: "ratelimit/call_decide.go", what: "a refund may exceed the grant of an unlimited limit",
		old: "c.receipt.covers(c.rowless)", new: "c.receipt.covers(nil)",
		tests: "TestAReceiptOfAnotherDefinition",
	}, {
		name: "plans-batch", file: "ratelimit/tx_batch.go", what: "a denial by policy is queued",
		old: "if a := c.byPolicy(); a != nil {", new: "if a := c.byPolicy(); a != nil && a.granted {",
		tests: "TestPlansWithoutRowsInABatch",
	}, {
		name: "update-bucket-unconditionally", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a bucket does not check whether there is enough",
		old: "NULL) - $4::double precision >= $7::double precision", new: "NULL) - $4::double precision IS NOT NULL",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-window-unconditionally", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a window does not check whether there is enough",
		old: "$2::timestamptz) - $5::double precision >= $8::double precision", new: "$2::timestamptz) - $5::double precision IS NOT NULL",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-calendar-unconditionally", file: "internal/dbsqlc/ratelimit.sql.go", what: "the plain UPDATE of a calendar does not check whether there is enough",
		old: "$5::timestamptz[]) - $6::double precision >= $9::double precision", new: "$5::timestamptz[]) - $6::double precision IS NOT NULL",
		tests: "TestAnUpdateDecidesAsTheFunction",
	}, {
		name: "update-in-vain", file: "ratelimit/call_update.go", what: "an UPDATE that takes nothing is tried by every call",
		old: "u.wait.Store(1<<(score/4) - 2)", new: "u.wait.Store(0)",
		tests: "TestAnUpdateIsNotTriedInVain|TestTheUpdateReadsNothingAboveReadCommitted",
	}, {
		name: "update-never-again", file: "ratelimit/call_update.go", what: "after some UPDATEs that took nothing, a connection sends none again",
		old: "u.wait.Add(-1)", new: "u.wait.Add(0)",
		tests: "TestAnUpdateIsNotTriedInVain",
	}, {
		name: "update-refused", file: "ratelimit/call_update.go", what: "where only the functions may be used, a call fails",
		old: "errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, \"42\") ||", new: "errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, \"none\") ||",
		tests: "TestWhereOnlyTheFunctionsMayBeUsed",
	}, {
		name: "update-twice", file: "ratelimit/call_wire.go", what: "a denial sends its UPDATE twice",
		old: "return w.ask(ctx, s.update.instead(s))", new: "return w.ask(ctx, s)",
		tests: "TestAGrantOnAPoolIsOneUpdate",
	},
}
