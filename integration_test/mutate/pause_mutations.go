package main

const (
	pause       = "migrations/engine/pause.sql"
	pauseGo     = "ratelimit/pause.go"
	refunds     = "migrations/engine/refund.sql"
	pauseTests  = "TestPause"
	pausesModel = "TestPause|TestModel"
)

var pauseMutations = []mutation{
	// ratelimit._pause
	{
		name: "pause-no-lock", file: pause, what: "a pause writes what it has read before the lock, and inserts no row",
		old: "    PERFORM ratelimit._lock(names, keys, capacities, shards, now);\n", new: "",
		tests: pauseTests,
	}, {
		name: "pause-order", file: pause, what: "limits out of order are locked as they come",
		old: "               AND (p = 1 OR (names[p - 1] COLLATE \"C\", keys[p - 1] COLLATE \"C\") < (names[p] COLLATE \"C\", keys[p] COLLATE \"C\"))", new: "",
		tests: "TestPauseBySQL",
	}, {
		name: "pause-raises", file: pause, what: "a pause adds tokens",
		old: "least(ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], NULL), mosts[i])", new: "mosts[i]",
		tests: pauseTests,
	}, {
		name: "pause-keeps", file: pause, what: "a pause leaves all tokens",
		old: "least(ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], NULL), mosts[i])", new: "ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], NULL)",
		tests: pauseTests,
	}, {
		name: "pause-sooner", file: pause, what: "a pause ends another one that is longer",
		old: "greatest(max(r.ts), at, until)", new: "greatest(at, until)",
		tests: pauseTests,
	}, {
		name: "pause-late", file: pause, what: "a pause that has passed refills for the time since",
		old: "greatest(max(r.ts), at, until)", new: "greatest(max(r.ts), until)",
		tests: "TestAPauseReadsTheClockAfterWaiting",
	}, {
		name: "pause-of-one-shard", file: pause, what: "each shard has the tokens of all",
		old: ", mosts[i]) / m::double precision;", new: ", mosts[i]);",
		tests: pauseTests,
	}, {
		name: "pause-far", file: pause, what: "the engine pauses for a year",
		old: "AND isfinite(until) AND until <= at + interval '32 days') IS NOT TRUE", new: "AND isfinite(until)) IS NOT TRUE",
		tests: "TestPauseBySQL",
	}, {
		name: "pause-clock-read-once", file: pause, what: "the clock of the balance is that of before a wait",
		old: "    at := coalesce(now, clock_timestamp()); -- locking may have waited\n    FOR i IN 1..n LOOP", new: "    FOR i IN 1..n LOOP",
		tests: "TestAPauseReadsTheClockAfterWaiting",
	},

	// ratelimit.pause
	{
		name: "pause-slots", file: pause, what: "with numbers, slots are paused, and are free afterwards",
		old: ".kind WHEN 'slots' THEN 'slots' ELSE kind END;", new: ".kind WHEN 'slots' THEN kind ELSE kind END;",
		tests: "TestPauseBySQL",
	}, {
		name: "pause-unpublished", file: pause, what: "whoever gives the numbers needs the right to see what programs have published",
		old: "        EXCEPTION WHEN insufficient_privilege THEN\n", new: "        EXCEPTION WHEN division_by_zero THEN\n",
		tests: "TestTheRoleThatMayPause",
	},

	// ratelimit._resume
	{
		name: "resume-always", file: pause, what: "resuming what is not paused forgets what was refilled",
		old: " AND t.ts > at;", new: ";",
		tests: "TestResume|TestModel",
	}, {
		name: "resume-forgets", file: pause, what: "a resume refills for the time of the pause",
		old: "SET ts = at WHERE", new: "SET ts = at - interval '1 hour' WHERE",
		tests: "TestResume|TestModel",
	},

	// By hand
	{
		name: "pause-hand-31-days", file: pause, what: "an epoch read as seconds bricks a key",
		old: "OR until > at + interval '31 days' OR", new: "OR",
		tests: "TestPauseBySQL",
	}, {
		name: "pause-hand-past", file: pause, what: "seconds read as an epoch pause nothing",
		old: " OR until < at - interval '31 days' THEN", new: " THEN",
		tests: "TestPauseBySQL",
	}, {
		name: "pause-hand-kind", file: pause, what: "a window is paused by the rule of buckets",
		old: "WHEN kind <> 'token bucket' THEN pg_catalog.format('only", new: "WHEN false THEN pg_catalog.format('only",
		tests: "TestPauseBySQL",
	}, {
		name: "pause-hand-blocked", file: pause, what: "a blocked key is not paused",
		old: "ratelimit._numbers(name COLLATE \"C\", key COLLATE \"C\", at, standing => true)", new: "ratelimit._numbers(name COLLATE \"C\", key COLLATE \"C\", at)",
		tests: "TestPauseBySQL",
	},

	// ratelimit.keys, the tool and the page
	{
		name: "pause-keys-second", file: keysSQL, what: "ratelimit.keys says that every key is paused that was used a moment later",
		old: "latest > at + interval '1 second' AND NOT broken;", new: "latest > at AND NOT broken;",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-broken", file: keysSQL, what: "a row of no program is shown as paused",
		old: "latest > at + interval '1 second' AND NOT broken;", new: "latest > at + interval '1 second';",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-shard", file: keysSQL, what: "a key is shown as paused until the first shard is refilled",
		old: "(SELECT max(u.t) FROM pg_catalog.unnest(ts) AS u (t));", new: "(SELECT min(u.t) FROM pg_catalog.unnest(ts) AS u (t));",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-blocked", file: keysSQL, what: "beside a block, nobody sees that a key is paused",
		old: "IF n.effect = 'block' AND (whole OR ahead) THEN", new: "IF n.effect = 'block' AND whole THEN",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-kind", file: keysSQL, what: "a window that was used later is shown as paused",
		old: "IF ahead AND beside.kind = 'token bucket' AND (", new: "IF ahead AND (",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-lifted", file: keysSQL, what: "a key without a limit is shown as paused",
		old: "AND (beside.effect = 'numbers' AND beside.rate > '0' OR beside.effect = 'varies') THEN", new: "AND beside.rate > '0' THEN",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-rate", file: keysSQL, what: "a key without a rate is shown as paused",
		old: "beside.effect = 'numbers' AND beside.rate > '0' OR beside.effect = 'varies'", new: "beside.effect IN ('numbers', 'varies')",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-varies", file: keysSQL, what: "a key whose numbers are the program's is never shown as paused",
		old: "AND beside.rate > '0' OR beside.effect = 'varies')", new: "AND beside.rate > '0')",
		tests: "TestKeysArePausedUntil",
	},

	// Refunds, ratelimit.add, sweeps
	{
		name: "pause-refund", file: refunds, what: "a refund fills a limit that is paused",
		old: "            count := least(count, owed);\n", new: "",
		tests: "TestWhatComesBackInAPause|TestHoldsInAPause|TestModel",
	}, {
		name: "pause-refund-until", file: refunds, what: "a reservation that is given up in a pause gives nothing back",
		old: "            latest := CASE WHEN at >= taken_at THEN at ELSE latest END;\n", new: "",
		tests: "TestWhatComesBackInAPause|TestModel",
	}, {
		name: "pause-refund-behind", file: refunds, what: "a refund by a clock that is behind counts time twice",
		old: "latest := CASE WHEN at >= taken_at THEN at ELSE latest END;", new: "latest := at;",
		tests: "TestWhatComesBackInAPause",
	}, {
		name: "pause-add", file: "migrations/engine/overrides.sql", what: "ratelimit.add fills a limit that is paused",
		old: "IF paused > clock_timestamp() + interval '1 second' THEN", new: "IF false THEN",
		tests: "TestAddInAPause",
	},

	// Go
	{
		name: "pause-kinds", file: "ratelimit/call_demand.go", what: "a window is paused",
		old: "does.pauses && (r.limit.numbers.Window || r.limit.unlimited())", new: "does.pauses && r.limit.unlimited()",
		tests: "TestPauseRefuses",
	}, {
		name: "pause-unlimited", file: "ratelimit/call_demand.go", what: "a pause of an unlimited limit does nothing, and says nothing",
		old: "does.pauses && (r.limit.numbers.Window || r.limit.unlimited())", new: "does.pauses && r.limit.numbers.Window",
		tests: "TestPauseRefuses",
	}, {
		name: "pause-one-left", file: "ratelimit/call_demand.go", what: "without a Count, a pause leaves one token",
		old: "does.ignoresCount || does.pauses && !r.counts {", new: "does.ignoresCount {",
		tests: "TestPause",
	}, {
		name: "pause-twice", file: "ratelimit/call_demand.go", what: "two requests for one key leave the sum of their counts",
		old: "if found && does.pauses && !does.ignoresCount {", new: "if false {",
		tests: "TestPauseRefuses",
	}, {
		name: "pause-go-far", file: pauseGo, what: "an epoch read as seconds reaches the server",
		old: "lasts > maxPause || lasts < -maxPause", new: "lasts < -maxPause",
		tests: "TestPauseRefuses",
	}, {
		name: "pause-go-past", file: pauseGo, what: "seconds read as an epoch pause nothing",
		old: "lasts > maxPause || lasts < -maxPause", new: "lasts > maxPause",
		tests: "TestPauseRefuses",
	}, {
		name: "pause-go-over", file: pauseGo, what: "a Retry-After of 0 empties the key",
		old: "c.lasts <= 0 {", new: "c.lasts < 0 {",
		tests: "TestPause",
	}, {
		name: "pause-hand-over", file: pause, what: "by hand, a pause that is over empties the key",
		old: "    IF until <= at THEN -- it is over\n        RETURN NULL;\n    END IF;\n", new: "",
		tests: "TestPauseBySQL",
	}, {
		name: "pause-shown", file: "internal/algebra/algebra.go", what: "a balance says that every key is paused that was used a moment later",
		old: "return until, until > now+1e6", new: "return until, until > now",
		tests: "TestPause",
	}, {
		name: "pause-shown-windows", file: "ratelimit/balance.go", what: "a window that was used later is shown as paused",
		old: "paused && !d.numbers.Window {", new: "paused {",
		tests: "TestOnlyBucketsAreShownAsPaused",
	}, {
		name: "pause-algebra-refund", file: "internal/algebra/promise.go", what: "the library says that more came back than did",
		old: "			count = min(count, owed)\n", new: "",
		tests: "TestWhatComesBackInAPause|TestRefund",
	}, {
		name: "pause-memory-first", file: "internal/inmemory/inmemory.go", what: "in memory, a key is paused only once it was used",
		old: "		t.fill(d, now)\n		d.Shards", new: "		d.Shards",
		tests: "TestPauseOnOtherHandles|TestModel",
	},
}
