package main

// overrideMutations are edits of overrides and definitions: in Go, and in the engine.
var overrideMutations = []mutation{
	{
		name: "curve-reach", file: "internal/keystate/keystate.go", what: "the curve of a calendar goes flat after a hundred windows",
		old: "q.capacity, q.start, l.windows)", new: "q.capacity, q.start, q.windows)",
		tests: "TestConsoleCurvesReachToWhereTheKeyIsFull",
	}, {
		name: "known-full", file: "migrations/engine/ratelimit.sql", what: "tool, page and SQL say that a key is full when an override ends, although its numbers are then the program's",
		old: "    WHILE q.effect <> 'varies' LOOP\n        full_at := CASE", new: "    LOOP\n        full_at := CASE",
		tests: "TestOverridesThatEndBeforeTheProgramsNumbers",
	}, {
		name: "look-snapshot", file: "cmd/txlimit/database.go", what: "an override that commits meanwhile is in a part of what show says",
		old: "IsoLevel: pgx.RepeatableRead", new: "IsoLevel: pgx.ReadCommitted",
		tests: "TestShowIsOfOneSnapshot",
	}, {
		name: "look-paged", file: "cmd/txlimit/database.go", what: "what waits for the reader of an answer keeps its snapshot",
		old: "		answer, err = fn(tx)\n		return err\n", new: "		if answer, err = fn(tx); err == nil {\n			err = answer()\n			answer = func() error { return nil }\n		}\n		return err\n",
		tests: "TestAnAnswerIsPrintedWithoutASnapshot",
	}, {
		name: "decree-options", file: "ratelimit/overrides_write.go", what: "Override passes over options that it cannot follow",
		old: "	if named.set(d.numbers, []string{\"Rate\", \"Capacity\", \"MaxReserved\"}) != nil {", new: "	if named.set(d.numbers, []string{\"Rate\", \"Capacity\", \"MaxReserved\"}); false {",
		tests: "TestWhatGoRefusesToOverrideIsNotSent",
	}, {
		name: "move-lifted", file: "ratelimit/call_overrides.go", what: "nothing is moved while an override lifts the limit",
		old: "does.liftable() && !doubtful", new: "(does.liftable() || does.moves) && !doubtful",
		tests: "TestMoveUnderOverrides",
	}, {
		name: "override-oldest", file: "ratelimit/overrides.go", what: "a newer override comes after an older one",
		old: "cmp.Compare(other.made, o.made), cmp.Compare(other.id, o.id)", new: "cmp.Compare(o.made, other.made), cmp.Compare(o.id, other.id)",
		tests: "TestWhichOverrideIsInForce|TestOverridesComeAndGo",
	}, {
		name: "steer-under-block", file: overrides, what: "what is made under a block lifts it in SQL",
		old: "ORDER BY o.effect = 'block' DESC, o.made_at DESC, o.id DESC;", new: "ORDER BY o.made_at DESC, o.id DESC;",
		tests: "TestABlockGoesBeforeWhatIsMadeUnderIt",
	}, {
		name: "steer-under-block-keys", file: keysSQL, what: "ratelimit.keys takes what was made under a block for what holds",
		old: "ORDER BY f.key, f.effect = 'block' DESC, ", new: "ORDER BY f.key, ",
		tests: "TestABlockGoesBeforeWhatIsMadeUnderIt",
	}, {
		name: "steer-made", file: overrides, what: "the highest id is the newest in SQL",
		old: "ORDER BY o.effect = 'block' DESC, o.made_at DESC, o.id DESC;", new: "ORDER BY o.effect = 'block' DESC, o.id DESC;",
		tests: "TestOverridesThatWereCopied",
	}, {
		name: "override-all-first", file: "ratelimit/call_overrides.go", what: "an override for all keys comes before the key's own",
		old: "search:\n	for _, list := range lists {\n", new: "search:\n	for _, list := range [][]override{lists[1], lists[0]} {\n",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "override-block-wait", file: "ratelimit/call_overrides.go", what: "a block lets Wait pass",
		old: "in.effect == block && (does.deniable ||", new: "in.effect == block && (does.deniable && !does.atMostFull ||",
		tests: "TestWhichOverrideIsInForce|TestADenialTellsWhyOnEveryWayIn",
	}, {
		name: "override-lapse-soon", file: "ratelimit/call_overrides.go", what: "raised numbers lapse when the table is read, too",
		old: "time.Duration(o.seen.Load()) > staleAfter", new: "time.Duration(o.seen.Load()) > 0",
		tests: "TestAnOverrideIsFollowed",
	}, {
		name: "override-count", file: "ratelimit/overrides.go", what: "a changed row is counted again",
		old: "			} else {\n				t.count.Add(1)\n			}\n", new: "			}\n			t.count.Add(1)\n",
		tests: "TestOverridesComeAndGo",
	}, {
		name: "override-pages", file: "ratelimit/overrides.go", what: "only the first page is read",
		old: "		if more = page.More.Bool; more {", new: "		if more = false; more {",
		tests: "TestManyOverrides",
	}, {
		name: "override-retry-at", file: "ratelimit/call_result.go", what: "a denial by a block does not say when the block ends",
		old: "r.setRetryAt(c.blockedUntil(a.at, c.asides, c.rowless))", new: "r.setRetryAt(algebra.Forever)",
		tests: "TestABlockHolds",
	}, {
		name: "override-after-plan", file: "ratelimit/call_result.go", what: "a plan that grants nothing is for good, although another override follows",
		old: "r.setRetryAt(c.blockedUntil(a.at, c.asides, c.rowless))", new: "r.setRetryAt(map[bool]algebra.Micros{true: algebra.Forever, false: c.blockedUntil(a.at, c.asides, c.rowless)}[c.refusal() == ReasonPlan])",
		tests: "TestAnOverrideThatEnds",
	}, {
		name: "steer-late", file: "migrations/engine/overrides.sql", what: "an override that commits late is missed",
		old: "NOT pg_visible_in_snapshot(o.changed_in, since)", new: "o.changed_in >= pg_snapshot_xmax(since)",
		tests: "TestAnOverrideThatCommitsLateIsNotMissed",
	}, {
		name: "steer-add-whole", file: "migrations/engine/overrides.sql", what: "the new capacity is that of the override before",
		old: "SELECT f.capacity INTO o.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), varying => true, under => o.id)", new: "SELECT f.capacity INTO o.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), o.id, varying => true)",
		tests: "TestWhatIsAddedAfterAnOlderOverride",
	}, {
		name: "steer-names", file: "migrations/engine/overrides.sql", what: "a refusal lists names by the alphabet",
		old: "SELECT 2 * count(*) FILTER (WHERE strpos(lower(d.name), p.pair) > 0)", new: "SELECT 0 * count(*)",
		tests: "TestAMistypedNameIsToldTheNearest",
	}, {
		name: "steer-typo", file: "migrations/engine/overrides.sql", what: "an override may name a limit that nobody has",
		old: "AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d\n                 WHERE d.current OR d.published_at > clock_timestamp() - interval '7 days');", new: "AND false;",
		tests: "TestSteeringRefusesWhatIsWrong",
	}, {
		name: "steer-sweep-slowest", file: "migrations/engine/sweep.sql", what: "a sweep without numbers does not mind the largest capacity of an override",
		old: "min(n.rate), max(n.capacity)", new: "min(n.rate), max(d.capacity)",
		tests: "TestASweepMindsOverrides",
	}, {
		name: "steer-sweep-old-plans", file: "migrations/engine/sweep.sql", what: "a sweep knows only the current definitions",
		old: "d.kind <> 'unlimited' AND (d.current OR d.published_at > clock_timestamp() - interval '7 days')", new: "d.current",
		tests: "TestASweepMindsAllDefinitionsAndOverrides|TestOneDefinitionPerName",
	}, {
		name: "steer-byhand-block", file: "migrations/engine/ratelimit.sql", what: "SQL without numbers knows no block",
		old: "            kind := 'token bucket';\n", new: "            kind := 'token bucket'; effect := CASE effect WHEN 'block' THEN 'numbers' ELSE effect END;\n",
		tests: "TestByHandUnderOverrides",
	}, {
		name: "steer-byhand-unlimited", file: "migrations/engine/ratelimit.sql", what: "SQL without numbers counts what is unlimited",
		old: "            kind := 'token bucket';\n", new: "            kind := 'token bucket'; effect := CASE effect WHEN 'unlimited' THEN 'numbers' ELSE effect END;\n",
		tests: "TestByHandUnderOverrides",
	}, {
		name: "steer-publish-anchor", file: "migrations/engine/definitions.sql", what: "a zone in a published anchor is ignored",
		old: "!~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}( ([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?)?$'", new: "!~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}'",
		tests: "TestSteeringRefusesWhatIsWrong",
	}, {
		name: "publish-unreadable", file: definitions, what: "a number that is too large is an error of Postgres that names no limit",
		old: "        EXCEPTION WHEN data_exception THEN -- a text", new: "        EXCEPTION WHEN data_corrupted THEN -- a text",
		tests: "TestPublishReadsFieldsAsRatelimitAllDoes",
	}, {
		name: "publish-start-offset", file: definitions, what: "a published start without an offset is another instant in each session",
		old: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$'", new: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)?$'",
		tests: "TestAStartInJSONIsOneInstant",
	}, {
		name: "all-start-offset", file: ratelimit, what: "a start without an offset is another instant in each session",
		old: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$'", new: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)?$'",
		tests: "TestAStartInJSONIsOneInstant",
	}, {
		name: "windows-weeks", file: calendarSQL, what: "weeks from other days are the same",
		old: "% date_part('day', period)::integer = 0", new: "% 1 = 0",
		tests: "TestAnchorsWithTheSameWindows",
	}, {
		name: "windows-quarters", file: calendarSQL, what: "quarters from other months are the same",
		old: "% (date_part('year', period) * '12' + date_part('month', period))::integer = 0", new: "% 1 = 0",
		tests: "TestAnchorsWithTheSameWindows",
	}, {
		name: "calendar-unit", file: calendarSQL, what: "a month less 93 days is a week",
		old: "RETURN CASE WHEN date_part('hour', period) = '0' AND", new: "RETURN CASE WHEN date_part('month', period) * '100' + date_part('day', period) = '7' THEN interval '192 hours' WHEN date_part('hour', period) = '0' AND",
		tests: "TestOnlyWhatGoReadsIsACalendar",
	}, {
		name: "steer-publish-replaces", file: "migrations/engine/definitions.sql", what: "what a program no longer publishes stays current",
		old: "(old.current <> coalesce(old.list = winner, false) OR hash IS NULL AND old.alive_until > at)", new: "NOT old.current AND old.list = winner",
		tests: "TestPublish|TestTheNewestVersionInUseCounts",
	}, {
		name: "publish-in-use", file: "migrations/engine/definitions.sql", what: "the newest list counts, though only an older one is in use",
		old: "coalesce(o.list = own COLLATE \"C\" OR max(o.alive_until) > clock_timestamp(), false) DESC, ", new: "",
		tests: "TestTheNewestVersionInUseCounts",
	}, {
		name: "publish-by-hand", file: "migrations/engine/definitions.sql", what: "a list that is published by hand is taken for one that a process uses",
		old: "definitions, NULL::boolean) AS p", new: "definitions, true) AS p",
		tests: "TestTheNewestVersionInUseCounts",
	}, {
		name: "publish-lock", file: "migrations/engine/definitions.sql", what: "a program that publishes blocks the heartbeats of others",
		old: "IN SHARE UPDATE EXCLUSIVE MODE", new: "IN SHARE ROW EXCLUSIVE MODE",
		tests: "TestAnUnchangedListTakesNoLock",
	}, {
		name: "publish-waits", file: "migrations/engine/definitions.sql", what: "a heartbeat waits for locked rows",
		old: "FOR UPDATE SKIP LOCKED", new: "FOR UPDATE",
		tests: "TestAnUnchangedListTakesNoLock",
	}, {
		name: "publish-rows-first", file: "migrations/engine/definitions.sql", what: "a heartbeat that changes what counts locks rows before the table",
		old: "        LOCK TABLE", new: "        PERFORM FROM ratelimit.definitions AS o WHERE o.program = program FOR UPDATE;\n        LOCK TABLE",
		tests: "TestAHeartbeatLocksNoRowBeforeTheTable",
	}, {
		name: "page-dates", file: "internal/pin/pin.go", what: "the page reads times as the session writes them",
		old: "pg_catalog.set_config('DateStyle', 'ISO', true)", new: "pg_catalog.current_setting('DateStyle')",
		tests: "TestNoNumberOfAPageDependsOnTheSession",
	}, {
		name: "page-digits", file: "internal/pin/pin.go", what: "the page shows numbers with as few digits as the session writes",
		old: "pg_catalog.set_config('extra_float_digits', '1', true)", new: "pg_catalog.current_setting('extra_float_digits')",
		tests: "TestNoNumberOfAPageDependsOnTheSession",
	}, {
		name: "override-early", file: "ratelimit/overrides.go", what: "the time that a poll takes counts as a difference of the clocks",
		old: "low: at.Sub(started.Add(answered))", new: "low: at.Sub(started.Add(sent))",
		tests: "TestASlowPollEndsNoBlockEarly",
	}, {
		name: "override-tell-locked", file: "ratelimit/overrides.go", what: "somebody is told of a wrong row while the lock is held",
		old: "	o.mu.Unlock()\n	release()", new: "	defer o.mu.Unlock()\n	release()",
		tests: "TestToBeToldMayLoad",
	}, {
		name: "add-before-deploy", file: overrides, what: "an old override without a capacity hides what the definition had before a deploy",
		old: "IF older.as_defined THEN", new: "IF older.id = 0 THEN",
		tests: "TestWhatIsAddedAfterAnOlderOverride",
	}, {
		name: "override-tell-connected", file: "ratelimit/overrides.go", what: "somebody is told of a wrong row while the poll has the only connection",
		old: "	o.mu.Unlock()\n	release()", new: "	o.mu.Unlock()\n	defer release()",
		tests: "TestToBeToldMayLoad",
	}, {
		name: "override-own-late", file: "ratelimit/overrides_write.go", what: "an own block holds once another connection is free",
		old: "l.overrides.followOn(ctx, on, release)", new: "release()\n\t\tl.overrides.follow(ctx)",
		tests: "TestAScriptWithOneConnection",
	}, {
		name: "override-far", file: "migrations/engine/overrides.sql", what: "an end in the far future stops the polls",
		old: "WHEN p.ends < '10000-01-01 00:00+00' THEN (extract", new: "WHEN isfinite(p.ends) THEN (extract",
		tests: "TestOverridesThatEndInTheFarFuture",
	}, {
		name: "later-too-much-alone", file: "ratelimit/call_later.go", what: "a call for too much until an override ends is a mistake if another key of it is blocked",
		old: "c.allowedAt(now, []demand{*d}) == algebra.Forever {", new: "c.allowedAt(now, c.demands, c.rowless) == algebra.Forever {",
		tests: "TestAWorldOfABlockBesideTooMuch",
	}, {
		name: "later-old", file: "ratelimit/call_later.go", what: "once an override ends, an old debt of a calendar is owed as if less had been refilled since",
		old: "		setNumbers(does, ds, pgtype.Timestamptz{Time: end.Time(), Valid: true}, true) // whatever is owed: see unsure\n", new: "",
		tests: "TestAWorldOfAnOldDebt",
	}, {
		name: "later-below-one", file: "migrations/engine/ratelimit.sql", what: "a key whose plan holds less than one token is told of one that the override before it would have given",
		old: "q.effect := CASE WHEN q.capacity - asked <", new: "q.effect := CASE WHEN false AND q.capacity - asked <",
		tests: "TestAWorldOfAPlanBelowOneToken",
	}, {
		name: "later-next-listed", file: "ratelimit/call_later.go", what: "the lists of others do not reach to the next window of a job above its capacity",
		old: "until = max(until, d.numbers.NextWindow(now))\n", new: "_ = until\n",
		tests: "TestAWorldOfAJobAboveItsCapacity",
	}, {
		name: "later-wakes-clock", file: "ratelimit/wait.go", what: "a change of overrides wakes no Wait of a Limiter with a Clock",
		old: "now, _ := l.now()", new: "now, _ := new(Limiter).now()",
		tests: "TestAWaitIsWokenByItsClock",
	}, {
		name: "later-ahead-sql", file: ratelimit, what: "the same in SQL",
		old: "max(u.t) - at) FROM", new: "max(u.t) - max(u.t)) FROM",
		tests: "TestACalendarRowWhoseTimeLiesAhead",
	}, {
		name: "keys-standing", file: keysSQL, what: "beside a block, tool and page show the numbers of the definition",
		old: "varying => true, standing => true, given => given));", new: "'0', varying => true, standing => true, given => given));",
		tests: "TestEverySourceSaysTheSame",
	}, {
		name: "steer-unusable", file: overrides, what: "an override whose numbers no program follows is in force in SQL",
		old: "RETURN effect IN ('numbers', 'block', 'unlimited') AND", new: "RETURN true OR",
		tests: "TestNoProgramFollowsAnOverrideThatIsNotValid",
	}, {
		name: "later-keys", file: ratelimit, what: "ratelimit.keys takes the numbers in force to hold for good",
		old: "q.until := n.until;", new: "q.until := NULL;",
		tests: "TestAnOverrideThatEnds",
	}, {
		name: "later-keys-own", file: ratelimit, what: "after a block, what is decided of every key counts for a key with an override of its own, too",
		old: "ratelimit._numbers(q.name, nullif(q.key, ''), q.until, varying => true", new: "ratelimit._numbers(q.name, NULL, q.until, varying => true",
		tests: "TestByHandKeysSaysWhatFollowsABlock",
	}, {
		name: "override-clock-late", file: "ratelimit/overrides.go", what: "a poll that waited puts off the end of what grants more",
		old: "high: at.Sub(started.Add(sent))", new: "high: at.Sub(started.Add(answered))",
		tests: "TestASlowPollBringsNoOverrideBack|TestWhatPollsSayOfTheClock",
	},
}
