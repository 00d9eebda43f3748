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
		name: "resume-forgets", file: pause, what: "a resume refills for the time of the pause",
		old: "SET ts = at WHERE", new: "SET ts = at - interval '1 hour' WHERE",
		tests: "TestResume|TestModel",
	},

	// By hand
	{
		name: "pause-hand-blocked", file: pause, what: "a blocked key is not paused",
		old: "ratelimit._numbers(name COLLATE \"C\", key COLLATE \"C\", at, standing => true)", new: "ratelimit._numbers(name COLLATE \"C\", key COLLATE \"C\", at)",
		tests: "TestPauseBySQL",
	},

	// ratelimit.keys, the tool and the page
	{
		name: "pause-keys-lifted", file: keysSQL, what: "a key without a limit is shown as paused",
		old: "AND (numbers.effect = 'numbers' AND numbers.rate > '0' OR numbers.effect = 'varies') THEN", new: "AND numbers.rate > '0' THEN",
		tests: "TestKeysArePausedUntil",
	}, {
		name: "pause-keys-rate", file: keysSQL, what: "a key without a rate is shown as paused",
		old: "numbers.effect = 'numbers' AND numbers.rate > '0' OR numbers.effect = 'varies'", new: "numbers.effect IN ('numbers', 'varies')",
		tests: "TestKeysArePausedUntil",
	},

	// Refunds, ratelimit.add, sweeps
	{
		name: "pause-add", file: "migrations/engine/overrides.sql", what: "ratelimit.add fills a limit that is paused",
		old: "IF paused > clock_timestamp() + interval '1 second' THEN", new: "IF false THEN",
		tests: "TestAddInAPause",
	},
}
