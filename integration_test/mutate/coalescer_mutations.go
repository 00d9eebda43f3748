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
		name: "coalescer-error-to-one", file: "ratelimit/coalescer.go", what: "an error reaches only the first call of a statement",
		old: "	for _, w := range b.waiters {\n		w.err = err\n", new: "	for i, w := range b.waiters {\n		if i == 0 {\n			w.err = err\n		}\n",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-error-grants", file: "ratelimit/coalescer.go", what: "a call that the database failed to decide is granted",
		old: "	err, direct, apart, flight := w.err, w.direct, w.apart, w.flight\n", new: "	err, direct, apart, flight := w.err, w.direct, w.apart, w.flight\n	if err != nil {\n		err, w.answer.granted = nil, true\n		w.answer.setRows(len(asked.demands), nil, []int32{})\n	}\n",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-close-alone", file: "ratelimit/coalescer.go", what: "Close does not wait for calls that share no statement",
		old: "	c.calls.Add(1)\n	defer c.calls.Done()\n", new: "",
		tests: "TestCallsThatShareNoStatementGoToThePool",
	}, {
		name: "coalescer-open-for-ever", file: "ratelimit/coalescer.go", what: "a call after Close is accepted",
		old: "	if c.closed {\n", new: "	if c.closed && c.Pool == nil {\n",
		tests: "TestCoalescerCloseDrains",
	}, {
		name: "coalescer-clocks-mixed", file: "ratelimit/coalescer_schedule.go", what: "calls with different clocks are decided at the instant of one of them",
		old: "(w.past == afterRefusal || w.clock != leader.clock)", new: "w.past == afterRefusal",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "coalescer-sum-failed", file: "ratelimit/coalescer.go", what: "a sum with an unknown outcome is sent again",
		old: "		case err != nil:\n			return err\n		default:\n			c.skip", new: "		case err != nil:\n		default:\n			c.skip",
		tests: "TestCoalescerWhenTheDatabaseFails",
	}, {
		name: "coalescer-keys-undecided", file: "ratelimit/coalescer_batch.go", what: "undecided keys are taken for full ones",
		old: "	if len(answer.Ord) == len(b.groups) {\n", new: "	if len(answer.Ord) > 0 {\n",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-keys-counts", file: "ratelimit/coalescer_batch.go", what: "keys get the counts of other keys",
		old: "b.groups[b.byOrd[i]].sum())", new: "b.groups[i].sum())",
		tests: "TestCoalescerIsExact|TestCoalescerAsksSeveralKeysForTheirSums",
	}, {
		name: "coalescer-lock-order", file: "ratelimit/coalescer_batch.go", what: "keys are sent in another order than the lock order",
		old: "return cmp.Or(strings.Compare(x.limit.name, y.limit.name), strings.Compare(x.key, y.key))", new: "return cmp.Or(strings.Compare(y.limit.name, x.limit.name), strings.Compare(y.key, x.key))",
		tests: "TestCoalescerLocksInTheOrderOfADirectCall",
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
		name: "coalescer-left-not-started", file: "ratelimit/coalescer.go", what: "those behind a call that has left wait for the next event",
		old: "leave(w)\n		c.startAndUnlock()\n", new: "leave(w)\n		c.mu.Unlock()\n",
		tests: "TestACallThatLeavesHoldsNobodyUp",
	}, {
		name: "coalescer-alone-apart", file: "ratelimit/coalescer.go", what: "a refused call gives the place of calls that are apart not back",
		old: "result, apart)", new: "result, apart && false)",
		tests: "TestAKeyThatTimedOutByItselfIsSentApart",
	}, {
		name: "coalescer-guilty-late", file: "ratelimit/coalescer_schedule.go", what: "a key that times out for the first time counts as one that did before",
		old: "		guilty := s.blamedOf(ds)", new: "		s.blamed.add(ds)\n		guilty := s.blamedOf(ds)",
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
		name: "coalescer-singles-last", file: "ratelimit/coalescer_schedule.go", what: "calls for several keys are tried again before those for one",
		old: "cmp.Compare(len(v.ds), len(w.ds))", new: "cmp.Compare(len(w.ds), len(v.ds))",
		tests: "TestTheScheduleSendsWhatItShould",
	}, {
		name: "ahead-outlives-window", file: "ratelimit/coalescer_ahead.go", what: "tokens of a window that were taken ahead are used in the next one",
		old: "&& at < l.ends\n}", new: "&& l.ends > 0\n}",
		tests: "TestALotIsUsedInTime",
	}, {
		name: "ahead-suspended", file: "ratelimit/coalescer_ahead.go", what: "what was taken ahead is used after the machine was suspended",
		old: "max(t.mono-before.mono, wall)", new: "(t.mono - before.mono)",
		tests: "TestALotIsUsedInTime",
	}, {
		name: "ahead-gives-back-by-gap", file: "ratelimit/coalescer_ahead.go", what: "what comes back of a bucket counts the tokens that others have ahead as missing, too",
		old: "held := numbers.Capacity - l.left\n", new: "held := min(numbers.Capacity-l.left, l.row.Value-l.left)\n",
		tests: "TestNothingAheadBreaksThePromise",
	}, {
		name: "ahead-lands-when-void", file: "ratelimit/coalescer_ahead.go", what: "what a statement took ahead before a reset is used after it",
		old: "	if epoch == f.epoch {", new: "	if epoch <= f.epoch {",
		tests: "TestTheOldestLotIsUsed",
	}, {
		name: "ahead-takes-all", file: "ratelimit/coalescer_ahead.go", what: "a statement takes ahead what other processes need",
		old: "return max((share-1)*count, plenty-count)", new: "return plenty - count",
		tests: "TestAForecastWantsWhatWillBeAskedFor",
	}, {
		name: "ahead-takes-the-mean", file: "ratelimit/coalescer_ahead.go", what: "what is taken ahead is often not used, and a bucket loses it",
		old: "wanted.sum-spread*math.Sqrt(wanted.squares)", new: "wanted.sum",
		tests: "TestAForecastWantsWhatWillBeAskedFor|TestLittleOfItIsNotUsed",
	}, {
		name: "ahead-too-small", file: "ratelimit/coalescer_ahead.go", what: "less is taken ahead than any call asks for",
		old: "if extra*wanted.sum < wanted.squares {", new: "if false {",
		tests: "TestAForecastWantsWhatWillBeAskedFor",
	}, {
		name: "ahead-unseen", file: "ratelimit/coalescer_memory.go", what: "an observer is not told what memory decides",
		old: "	result.ahead = true\n", new: "",
		tests: "TestAhead",
	}, {
		name: "ahead-reset", file: "ratelimit/verbs.go", what: "after a reset, a Coalescer with Ahead goes on as before",
		old: "case c.does.answers == nothing: // what a Coalescer", new: "case false: // what a Coalescer",
		tests: "TestAhead",
	}, {
		name: "ahead-remaining", file: "ratelimit/coalescer_memory.go", what: "what was taken ahead counts as used by others in Remaining, and in a receipt",
		old: "		l.row.Value += d.count\n", new: "",
		tests: "TestAhead",
	}, {
		name: "ahead-as-of-latest", file: "ratelimit/coalescer_ahead.go", what: "what comes back of a bucket does not lose what was refilled until the latest lot beside it",
		old: "held += float64(at-l.at)", new: "held += 0 * float64(at-l.at)",
		tests: "TestLotsComeBackTogether",
	}, {
		name: "ahead-never-early", file: "ratelimit/coalescer_ahead.go", what: "more is taken ahead although what is there lasts",
		old: "|| early > 0 && there >=", new: "|| early < 0 && there >=",
		tests: "TestAForecastWantsWhatWillBeAskedFor",
	}, {
		name: "ahead-async", file: "ratelimit/coalescer_memory.go", what: "tokens come back that a crash of the server has given back",
		old: "	if c.AsyncCommit {\n		return fmt.Errorf(", new: "	if false {\n		return fmt.Errorf(",
		tests: "TestAhead",
	}, {
		name: "ahead-half-granted", file: "ratelimit/coalescer_memory.go", what: "a call that one limit has not enough ahead for uses what the others have",
		old: "				lots[i].take(-d.count)\n", new: "				lots[i].take(0 * d.count)\n",
		tests: "TestAhead",
	},
}
