package main

// coalescerMutations are edits of the Coalescer.
var coalescerMutations = []mutation{
	{
		name: "coalescer-foreign", file: "ratelimit/coalescer_schedule.go", what: "a key of another server fails all calls of its batch",
		old: "len(state) != 5 || state == ", new: "len(state) != 5 || state == stateForeign || state == ",
		tests: "TestTheScheduleTellsTheErrorsOfSomeCallsFromThoseOfAll",
	}, {
		name: "coalescer-order", file: "ratelimit/coalescer_schedule.go", what: "the last call is decided first",
		old: "	s.queue = append(s.queue, w)\n", new: "	s.queue = slices.Insert(s.queue, 0, w)\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-cancelled-takes", file: "ratelimit/coalescer_schedule.go", what: "a caller that left before its call was sent consumes",
		old: "		s.queue = slices.DeleteFunc(s.queue, func(other *waiter) bool { return other == w })\n", new: "		_ = slices.Contains(s.queue, w)\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-one-cancels-all", file: "ratelimit/coalescer_schedule.go", what: "the first caller that leaves cancels the statement of all",
		old: "if f.waiting--; f.waiting == 0 {", new: "if f.waiting--; f.waiting >= 0 {",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-nobody-waits", file: "ratelimit/coalescer_schedule.go", what: "a statement goes on although all its callers have left",
		old: "			f.cancel()\n		}\n		return", new: "			_ = f.cancel\n		}\n		return",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-error-to-one", file: "ratelimit/coalescer.go", what: "an error reaches only the first call of a statement",
		old: "	for _, w := range b.waiters {\n		w.err = err\n", new: "	for i, w := range b.waiters {\n		if i == 0 {\n			w.err = err\n		}\n",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-error-grants", file: "ratelimit/coalescer.go", what: "a call that the database failed to decide is granted",
		old: "	err, direct, apart, flight := w.err, w.direct, w.apart, w.flight\n", new: "	err, direct, apart, flight := w.err, w.direct, w.apart, w.flight\n	if err != nil {\n		err, w.answer.granted = nil, true\n		w.answer.setRows(len(asked.demands), nil, []int32{})\n	}\n",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-close-at-once", file: "ratelimit/coalescer.go", what: "Close does not wait for the calls that have joined",
		old: "	c.calls.Wait()\n", new: "",
		tests: "TestCoalescerCloseDrains",
	}, {
		name: "coalescer-close-alone", file: "ratelimit/coalescer.go", what: "Close does not wait for calls that share no statement",
		old: "	c.calls.Add(1)\n	defer c.calls.Done()\n", new: "",
		tests: "TestCallsThatShareNoStatementGoToThePool",
	}, {
		name: "coalescer-calendar-lists", file: "ratelimit/coalescer_batch.go", what: "a call after midnight is decided by the windows of one before it, which differ for a deep debt",
		old: "of.windows == numbers.Windows && ", new: "",
		tests: "TestABatchHasTheWindowsOfEachCall",
	}, {
		name: "coalescer-calendar-group", file: "ratelimit/coalescer_batch.go", what: "the definition of a calendar's calls has no windows if the one before it has none",
		old: "		for len(a.Firsts) < len(b.defs) {\n			a.Firsts, a.Lasts = append(a.Firsts, 0), append(a.Lasts, 0)\n		}\n", new: "",
		tests: "TestACoalescerDecidesCalendars|TestABatchHasTheWindowsOfEachCall",
	}, {
		name: "coalescer-open-for-ever", file: "ratelimit/coalescer.go", what: "a call after Close is accepted",
		old: "	if c.closed {\n", new: "	if c.closed && c.Pool == nil {\n",
		tests: "TestCoalescerCloseDrains",
	}, {
		name: "coalescer-place-lost", file: "ratelimit/coalescer_schedule.go", what: "a call that went alone does not pass its place on",
		old: "	s.places--\n	s.fill()\n", new: "	s.places--\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-clocks-mixed", file: "ratelimit/coalescer_schedule.go", what: "calls with different clocks are decided at the instant of one of them",
		old: "(w.past == afterRefusal || w.clock != leader.clock)", new: "w.past == afterRefusal",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-counts-mixed", file: "ratelimit/coalescer_batch.go", what: "calls with different counts are decided by the count of the first",
		old: "(d.count != g.first.count || d.count != math.Trunc(d.count) ||", new: "(d.count != math.Trunc(d.count) ||",
		tests: "TestCoalescerIsExact",
	}, {
		name: "coalescer-fractions", file: "ratelimit/coalescer_batch.go", what: "several fractions are subtracted at once, which is rounded differently",
		old: "d.count != math.Trunc(d.count) || ", new: "",
		tests: "TestCoalescerIsExact|TestEveryQueryExecModeCoalesces",
	}, {
		name: "coalescer-sum-of-some", file: "ratelimit/coalescer_batch.go", what: "if there is enough for some of the calls only, all are denied",
		old: "			continue // enough for some of the calls\n", new: "",
		tests: "TestCoalescerIsExact|TestCoalescerAsksForTheSum|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-sum-above-capacity", file: "ratelimit/coalescer_batch.go", what: "one sum is larger than the capacity",
		old: " || g.sum() > g.numbers.Capacity {", new: " {",
		tests: "TestCoalescerAsksForTheSum",
	}, {
		name: "coalescer-sum-again", file: "ratelimit/coalescer.go", what: "the sum is sent although the last one was only partly granted",
		old: "	ask := sums && !c.skipSums.Load()\n", new: "	ask := sums\n",
		tests: "TestCoalescerAsksForTheSum",
	}, {
		name: "coalescer-sum-failed", file: "ratelimit/coalescer.go", what: "a sum with an unknown outcome is sent again",
		old: "		case err != nil:\n			return err\n		default:\n			c.skip", new: "		case err != nil:\n		default:\n			c.skip",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-sum-conflicts", file: "ratelimit/coalescer.go", what: "after a sum that conflicts, each of its calls is a statement",
		old: "		case retryable(err) || sqlState(err) == stateIsolation: //", new: "		case sqlState(err) == stateIsolation: //",
		tests: "TestCoalescerSendsASumThatConflictsAsABatch",
	}, {
		name: "coalescer-keys-level", file: "ratelimit/coalescer.go", what: "another default isolation level of the database is an error for all calls for several keys",
		old: "		case retryable(err) || sqlState(err) == stateIsolation: //", new: "		case retryable(err): //",
		tests: "TestCoalescerOnASerializableDatabase",
	}, {
		name: "coalescer-keys-of-windows", file: "ratelimit/coalescer_batch.go", what: "keys of a fixed window are decided as those of a token bucket",
		old: " && (len(b.groups) == 1 || !b.groups[0].numbers.Window)", new: "",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-keys-of-limits", file: "ratelimit/coalescer_batch.go", what: "keys of several limits are decided by the first one's definition",
		old: "	return len(b.defs) == 1 && (", new: "	return (",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-keys-undecided", file: "ratelimit/coalescer_batch.go", what: "undecided keys are taken for full ones",
		old: "	if len(answer.Ord) == len(b.groups) {\n", new: "	if len(answer.Ord) > 0 {\n",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-keys-counts", file: "ratelimit/coalescer_batch.go", what: "keys get the counts of other keys",
		old: "b.groups[b.byOrd[i]].sum())", new: "b.groups[i].sum())",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-definitions-mixed", file: "ratelimit/coalescer_batch.go", what: "two versions of one limit are decided by the definition of the first call",
		old: " || d.limit != g.first.limit)", new: ")",
		tests: "TestCoalescerIsExact",
	}, {
		name: "coalescer-lock-order", file: "ratelimit/coalescer_batch.go", what: "keys are sent in another order than the lock order",
		old: "return cmp.Or(strings.Compare(x.limit.name, y.limit.name), strings.Compare(x.key, y.key))", new: "return cmp.Or(strings.Compare(y.limit.name, x.limit.name), strings.Compare(y.key, x.key))",
		tests: "TestCoalescerLocksInTheOrderOfADirectCall",
	}, {
		name: "coalescer-async-commit", file: "ratelimit/coalescer.go", what: "an error of an asynchronous commit is ignored",
		old: "		err = closeErr // of the commit\n", new: "		_ = closeErr // of the commit\n",
		tests: "TestACommitThatFailsGrantsNothing",
	}, {
		name: "coalescer-no-pace", file: "ratelimit/coalescer_schedule.go", what: "later statements do not keep the pace",
		old: "	s.due = now.Add(pace)\n", new: "	s.due = now\n",
		tests: "TestTheScheduleKeepsThePace",
	}, {
		name: "coalescer-pace-for-ever", file: "ratelimit/coalescer_schedule.go", what: "a call before the pace allows it is never sent",
		old: "		s.start = true\n	}\n	w := waiters", new: "		s.places--\n	}\n	w := waiters",
		tests: "TestTheScheduleKeepsThePace",
	}, {
		name: "coalescer-one-place", file: "ratelimit/coalescer_schedule.go", what: "a call that could use the second place waits for the first",
		old: "	if len(s.queue) > 0 && s.places < maxPlaces {\n", new: "	if len(s.queue) > 0 && s.places == 0 {\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-locked-for-all", file: "ratelimit/coalescer_schedule.go", what: "one locked key fails all calls of the statement",
		old: "	case !timedOut(err) || !b.shared() ||", new: "	case !timedOut(err) || !b.apart ||",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-key-twice", file: "ratelimit/coalescer_schedule.go", what: "calls for a key that is at the database are sent, too, and wait for the row in the second place",
		old: "	return s.busy.has(ds) || apart", new: "	return apart",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-apart-twice", file: "ratelimit/coalescer_schedule.go", what: "calls for keys that may be locked take both places",
		old: "	return s.busy.has(ds) || apart && s.apartFlying\n", new: "	return s.busy.has(ds)\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-blamed-forgotten", file: "ratelimit/coalescer_schedule.go", what: "each statement finds out again that a key is locked",
		old: "		s.blamed.add(ds)\n", new: "",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-blamed-for-ever", file: "ratelimit/coalescer_schedule.go", what: "a key that was locked once never shares a statement again",
		old: "		s.blamed.remove(ds)\n", new: "",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-apart-endless", file: "ratelimit/coalescer_schedule.go", what: "if every key fails, each is tried alone",
		old: "			s.failures++\n", new: "",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-same-key-endless", file: "ratelimit/coalescer_schedule.go", what: "calls for several limits fail one after another if one of the limits is locked",
		old: "				return w.past == afterApart && anyOf", new: "				return false && anyOf",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-team-blamed", file: "ratelimit/coalescer_schedule.go", what: "calls that share a limit with a failing call are decided with it again",
		old: "	case leader.past == afterApart || w.past == afterApart:\n", new: "	case leader == nil:\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-old-failures", file: "ratelimit/coalescer_schedule.go", what: "a key that fails alone again and again makes others fail",
		old: "		if len(guilty) < len(ds) {\n			s.failures++\n", new: "		if len(ds) > 0 {\n			s.failures++\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-left-holds", file: "ratelimit/coalescer_schedule.go", what: "a call that waited behind a call that has left waits on",
		old: "		if len(w.ds) > 1 || w.past >= afterTimeout { // others", new: "		if len(w.ds) < 0 { // others",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-decided-busy", file: "ratelimit/coalescer_schedule.go", what: "decided keys wait for the second statement of the others",
		old: "		s.vacate(b)\n		s.occupy(b, others)\n", new: "",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-bad-text-for-all", file: "ratelimit/coalescer_schedule.go", what: "a key that the server cannot store is an error for all calls of the statement",
		old: "\"57\", \"58\", \"F0\", \"XX\"", new: "\"57\", \"58\", \"F0\", \"XX\", \"22\"",
		tests: "TestTheScheduleTellsTheErrorsOfSomeCallsFromThoseOfAll",
	}, {
		name: "coalescer-raised-for-all", file: "ratelimit/coalescer_schedule.go", what: "what a trigger raises for one key is an error for all calls of the statement",
		old: "case \"08\", \"25\",", new: "case \"P0\", \"08\", \"25\",",
		tests: "TestTheScheduleTellsTheErrorsOfSomeCallsFromThoseOfAll",
	}, {
		name: "coalescer-split-fill", file: "ratelimit/coalescer_schedule.go", what: "calls for decided keys wait for the end of another statement, although a place is free",
		old: "		s.occupy(b, others)\n		s.fill()\n", new: "		s.occupy(b, others)\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-left-not-started", file: "ratelimit/coalescer.go", what: "those behind a call that has left wait for the next event",
		old: "leave(w)\n		c.startAndUnlock()\n", new: "leave(w)\n		c.mu.Unlock()\n",
		tests: "TestACallThatLeavesHoldsNobodyUp",
	}, {
		name: "coalescer-not-started", file: "ratelimit/coalescer.go", what: "nothing makes use of a place that was taken for queued calls",
		old: "		c.calls.Go(c.flush)\n", new: "",
		tests: "TestCoalescerDecidesWhatWaitsTogether",
	}, {
		name: "coalescer-alone-apart", file: "ratelimit/coalescer.go", what: "a refused call gives the place of calls that are apart not back",
		old: "result, apart)", new: "result, apart && false)",
		tests: "TestAKeyThatTimedOutByItselfIsSentApart",
	}, {
		name: "coalescer-alone-ended", file: "ratelimit/coalescer.go", what: "nothing is learnt from the timeout of a call by itself",
		old: "ended = ctx.Err() != nil", new: "ended = true",
		tests: "TestAKeyThatTimedOutByItselfIsSentApart",
	}, {
		name: "coalescer-two-periods", file: "ratelimit/coalescer_batch.go", what: "a Charge has the period of a Consume in its statement",
		old: "of.period == numbers.Period && ", new: "",
		tests: "TestACoalescerCountsOldWindowsForAChargeAlone",
	}, {
		name: "coalescer-split-told", file: "ratelimit/coalescer_schedule.go", what: "the callers that a split statement tells include the others",
		old: "			if w.flight != nil {\n				w.flight.waiting--\n			}\n", new: "",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-kept-failures", file: "ratelimit/coalescer_schedule.go", what: "failures of earlier calls make later calls fail",
		old: "		s.failures = 0 // all earlier calls are decided\n", new: "		_ = 0 // all earlier calls are decided\n",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-guilty-late", file: "ratelimit/coalescer_schedule.go", what: "a key that times out for the first time counts as one that did before",
		old: "		guilty := s.blamedOf(ds)", new: "		s.blamed.add(ds)\n		guilty := s.blamedOf(ds)",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-held-for-ever", file: "ratelimit/coalescer_schedule.go", what: "calls wait behind a call that is no longer there",
		old: "	clear(s.claimed)\n	first", new: "	first",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-second-try", file: "ratelimit/coalescer_schedule.go", what: "a call that is decided again is overtaken",
		old: "	if len(w.ds) > 1 || w.past >= afterTimeout {\n		s.claimed", new: "	if len(w.ds) > 1 {\n		s.claimed",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-caller-blames", file: "ratelimit/coalescer_schedule.go", what: "a caller that gives up by itself blames its key",
		old: "	if err == nil || !ended {", new: "	if true {",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-canceled-blames", file: "ratelimit/coalescer_schedule.go", what: "a canceled statement blames its key",
		old: "!b.shared() && b.flight.ctx.Err() == nil {", new: "!b.shared() {",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-team-decided", file: "ratelimit/coalescer_schedule.go", what: "a key that was locked once stays blamed, although a statement with other keys has decided it",
		old: "	if err == nil || !b.shared() && ", new: "	if !b.shared() && ",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-team-untried", file: "ratelimit/coalescer_schedule.go", what: "calls for a locked key fail without a try apart with it",
		old: "				return w.past == afterApart && anyOf", new: "				return w.past >= afterTimeout && anyOf",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-no-error", file: "ratelimit/coalescer_schedule.go", what: "calls that fail without another try return no error",
		old: "w.flight, w.past, w.err = nil, past, err", new: "w.flight, w.past, w.err = nil, past, nil",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-canceled-by-server", file: "ratelimit/coalescer_schedule.go", what: "the end of a statement by the server's statement_timeout blames no key",
		old: "state == \"55P03\" || state == \"57014\" //", new: "state == \"55P03\" //",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-context-locks", file: "ratelimit/coalescer.go", what: "a Context of the caller's own that uses the Coalescer hangs all its calls",
		old: "landedAlone(asked.demands, apart, ended, err)", new: "landedAlone(asked.demands, apart, ended || ctx.Err() != nil, err)",
		tests: "TestACoalescerAsksNoContextUnderItsLock",
	}, {
		name: "coalescer-context-panics", file: "ratelimit/coalescer.go", what: "a Context whose Err panics keeps a place, which no call gets again",
		old: "	ended := false\n	defer func() { // also", new: "	ended := ctx.Err() != nil\n	defer func() { // also",
		tests: "TestACoalescerAsksNoContextUnderItsLock",
	}, {
		name: "coalescer-left-again", file: "ratelimit/coalescer_schedule.go", what: "a call whose caller has left is sent again",
		old: "func(w *waiter) bool { return w.left })\n	slices.Sort", new: "func(w *waiter) bool { return false })\n	slices.Sort",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-direct-leaves", file: "ratelimit/coalescer_schedule.go", what: "a call that may be sent by itself leaves, and takes its place along",
		old: "	case w.direct || f != nil", new: "	case f != nil",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-singles-last", file: "ratelimit/coalescer_schedule.go", what: "calls for several keys are tried again before those for one",
		old: "cmp.Compare(len(v.ds), len(w.ds))", new: "cmp.Compare(len(w.ds), len(v.ds))",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-unreachable", file: "ratelimit/coalescer_schedule.go", what: "without a connection, each call is tried again",
		old: "		s.failures = maxFailures\n", new: "",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-blamed-bound", file: "ratelimit/coalescer_schedule.go", what: "blamed keys are never forgotten",
		old: "			clear(s.blamed)\n", new: "",
		tests: "TestTheScheduleForgetsBlamedKeys",
	}, {
		name: "coalescer-batch-bound", file: "ratelimit/coalescer_schedule.go", what: "a statement has any number of calls",
		old: " || len(b.waiters) == maxBatch {", new: " {",
		tests: "TestTheScheduleBoundsAStatement",
	},
}
