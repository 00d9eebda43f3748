package main

// usageMutations are edits of the recorder of usage.
var usageMutations = []mutation{
	{
		name: "usage-order", file: "migrations/engine/usage.sql", what: "the rows of keys are locked in any order",
		old: "     ORDER BY u.name COLLATE pg_catalog.\"C\", u.hour, u.key COLLATE pg_catalog.\"C\"\n", new: "",
		tests: "TestProcessesFlushAtOnce",
	}, {
		name: "usage-deletes-all", file: "migrations/engine/usage.sql", what: "one flush deletes all old rows",
		old: "         ORDER BY d.minute\n         LIMIT 1000 + 2 * coalesce(pg_catalog.cardinality(names), 0)\n", new: "",
		tests: "TestOldUsageGoesLittleByLittle",
	}, {
		name: "usage-deletes-early", file: "migrations/engine/usage.sql", what: "rows of keys go an hour early",
		old: "d.hour < hours_before", new: "d.hour < hours_before + interval '5 hours'",
		tests: "TestOldUsageGoesLittleByLittle",
	}, {
		name: "usage-delete-waits", file: "migrations/engine/usage.sql", what: "a flush waits for a row that it deletes",
		old: "cardinality(names), 0)\n           FOR UPDATE SKIP LOCKED", new: "cardinality(names), 0)\n           FOR UPDATE",
		tests: "TestOldUsageGoesLittleByLittle",
	}, {
		name: "usage-waits", file: "migrations/engine/usage.sql", what: "a flush waits for a locked row until its caller gives up, and its outcome is unknown",
		old: "SET lock_timeout = '2s'\n", new: "SET lock_timeout = '0'\n",
		tests: "TestALockedRowOfUsageLosesNothing",
	}, {
		name: "usage-since", file: "migrations/engine/usage.sql", what: "the minute of since is left out",
		old: "interval '1 hour') - interval '1 minute'", new: "interval '1 hour') - interval '0 minute'",
		tests: "TestUsageIsReadByIndex",
	}, {
		name: "usage-withheld", file: "ratelimit/usage/count.go", what: "a request that another one has denied counts as denied",
		old: "if s := &d.Result.Requests[i]; !s.OK {", new: "if s := &d.Result.Requests[i]; !d.Result.OK {",
		tests: "TestDecisionCountsWhatTheResultSays",
	}, {
		name: "usage-checks", file: "ratelimit/usage/count.go", what: "checks count as denials",
		old: `"hold", "once":`, new: `"hold", "once", "check":`,
		tests: "TestDecisionCountsWhatTheResultSays",
	}, {
		name: "usage-unbounded", file: "ratelimit/usage/count.go", what: "while the database is away, counts pile up",
		old: "if len(l.minutes) > maxMinutes {", new: "if len(l.minutes) > 100*maxMinutes {",
		tests: "TestWhatCannotBeWrittenIsKeptForAnHour",
	}, {
		name: "usage-overstates", file: "ratelimit/usage/sketch.go", what: "a key is stored with the count that it took over",
		old: "s.heap[0] = counter{s.heap[0].rank + d.n, d}", new: "d.n += s.heap[0].rank\n		s.heap[0] = counter{d.n, d}",
		tests: "TestASketchFindsFrequentKeysInAFlood",
	}, {
		name: "usage-drops", file: "ratelimit/usage/flush.go", what: "a flush that has failed for certain drops its counts",
		old: "	case notSaved(err):\n		r.putBack(parts)\n", new: "	case notSaved(err):\n		r.drop(parts)\n",
		tests: "TestUsageWaitsForTheDatabase",
	}, {
		name: "usage-twice", file: "ratelimit/usage/flush.go", what: "a flush whose outcome is unknown is written again",
		old: "	default:\n		r.drop(parts)\n", new: "	default:\n		r.putBack(parts)\n",
		tests: "TestAnUnknownFlushIsNotCountedTwice",
	}, {
		name: "usage-poison", file: "ratelimit/usage/flush.go", what: "a key that cannot be stored stops all flushes",
		old: "unstorable(err) && len(args.Keys) > 0", new: "unstorable(err) && len(args.Keys) > 1<<20",
		tests: "TestAKeyThatCannotBeStoredStopsNoFlush",
	}, {
		name: "usage-gives-up", file: "ratelimit/usage/usage.go", what: "a row that is locked for two seconds loses the last counts",
		old: `if last && sqlState(err) == "55P03" {`, new: `if !last && sqlState(err) == "55P03" {`,
		tests: "TestALockedRowAtTheEndLosesNothing",
	}, {
		name: "usage-hash", file: "ratelimit/usage/flush.go", what: "keys are stored in the clear",
		old: "d.key = r.HashKey(d.key)", new: "_ = r.HashKey(d.key)",
		tests: "TestHashesThatAreEqualBecomeOneKey",
	},
}
