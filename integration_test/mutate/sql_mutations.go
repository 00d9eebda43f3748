package main

const (
	apply          = "migrations/engine/apply.sql"
	available      = "migrations/engine/available.sql"
	balance        = "migrations/engine/balance.sql"
	calendarSQL    = "migrations/engine/calendar.sql"
	coalesce       = "migrations/engine/coalesce.sql"
	consume        = "migrations/engine/consume.sql"
	consumeKeys    = "migrations/engine/consume_keys.sql"
	consumeSeveral = "migrations/engine/consume_several.sql"
	consumeSharded = "migrations/engine/consume_sharded.sql"
	keysSQL        = "migrations/engine/keys.sql"
	definitions    = "migrations/engine/definitions.sql"
	move           = "migrations/engine/move.sql"
	lock           = "migrations/engine/lock.sql"
	overrides      = "migrations/engine/overrides.sql"
	parts          = "migrations/engine/parts.sql"
	grid           = "migrations/engine/grid.sql"
	guard          = "migrations/engine/guard.sql"
	raise          = "migrations/engine/raise.sql"
	ratelimit      = "migrations/engine/ratelimit.sql"
	refund         = "migrations/engine/refund.sql"
	reset          = "migrations/engine/reset.sql"
	sweep          = "migrations/engine/sweep.sql"
	turns          = "migrations/engine/turns.sql"
	wire           = "migrations/engine/wire.sql"
)

var sqlMutations = []mutation{
	// ratelimit.key, ratelimit.key_parts

	{
		name: "parts-collation", file: parts, what: "a column with a nondeterministic collation cannot be a part",
		old: "replace(replace(part COLLATE \"C\", E'", new: "replace(replace(part, E'",
		tests: "TestSQLJoinsKeysAsGoDoes",
	}, {
		name: "parts-escaped", file: parts, what: "the parts of a key keep their backslashes",
		old: "regexp_replace(p.part[1] COLLATE \"C\", E'\\\\\\\\([\\\\\\\\|])', E'\\\\1', 'g')", new: "p.part[1]",
		tests: "TestSQLJoinsKeysAsGoDoes|TestTenantsOfAnyNameAreKeptApart",
	},

	// ratelimit._available

	{
		name: "available-unclamped", file: available, what: "a row may hold more than the capacity",
		old: "RETURN least(capacity, value + CASE", new: "RETURN (value + CASE",
		tests: "TestTheCapacityIsWhatAnIdleLimitSaves|TestShardsAreCombinedBeforeADenial",
	},

	// ratelimit._consume

	{
		name: "consume-no-recheck", file: consume, what: "after a wait, the UPDATE does not check again whether the row has enough: it trusts a plain read",
		old: "AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor\n                RETURNING",
		new: "AND EXISTS (SELECT 1 FROM ratelimit.limits AS s WHERE s.name = name AND s.key = key AND s.shard = 0 AND s.shards = 1\n" +
			"                       AND ratelimit._available(s.value, s.ts, at, rate, period, capacity, NULL) - count >= floor)\n                RETURNING",
		tests: "TestTwoVersionsWithDifferentShardsAtOnceAreExact|TestOverGrant",
	}, {
		name: "consume-now", file: consume, what: "the instant is the start of the transaction: now(), not clock_timestamp()",
		old:   "            at := coalesce(now, clock_timestamp());\n            IF start IS NULL THEN\n                UPDATE",
		new:   "            at := coalesce(now, now());\n            IF start IS NULL THEN\n                UPDATE",
		tests: "TestWithoutAClockTheDatabaseTellsTheTime",
	}, {
		name: "consume-clock-read-once", file: consume, what: "the clock is not read again after the UPDATE has waited",
		old:   "        at := coalesce(now, clock_timestamp());\n        IF one",
		new:   "        at := coalesce(at, now, clock_timestamp());\n        IF one",
		tests: "TestARowMadeAfterAWaitIsNotRefilledForTheWait",
	}, {
		name: "valid-null", file: available, what: "a rate of NULL fills a bucket",
		old: "RETURN rate + capacity + count < '1e16'", new: "RETURN greatest(rate, capacity, count) < '1e16'",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "valid-infinite", file: available, what: "NaN and Infinity are accepted as numbers",
		old: "RETURN rate + capacity + count < '1e16' AND", new: "RETURN rate + capacity + count IS NOT NULL AND",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "consume-seqscan", file: consume, what: "without enable_seqscan = off, a SERIALIZABLE caller of one key conflicts with the callers of all others",
		old: "LANGUAGE plpgsql SET enable_seqscan = off\nAS", new: "LANGUAGE plpgsql\nAS",
		tests: "TestDifferentKeysDoNotConflictInATinyTable",
	}, {
		name: "consume-first-lost-race", file: consume, what: "a caller that loses the race for a first use is granted anyway",
		old: "            IF FOUND THEN\n                RETURN ROW(true, at, value, ts)::ratelimit._decision;", new: "            IF true THEN\n                RETURN ROW(true, at, capacity - count, at);",
		tests: "TestOverGrant",
	},

	// ratelimit._apply

	{
		name: "apply-order", file: apply, what: "the single shards of several limits are locked in another order than the common one",
		old: "ORDER BY names[p] COLLATE \"C\", keys[p] COLLATE \"C\"\n                    LOOP", new: "ORDER BY names[p] COLLATE \"C\" DESC, keys[p] COLLATE \"C\" DESC\n                    LOOP",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	}, {
		name: "apply-count-of-insert", file: apply, what: "on Citus, rows that exist count as inserted, and so as locked",
		old: "ON CONFLICT DO NOTHING\n                                RETURNING r.shard\n                            LOOP\n                                m := m + 1;\n                            END LOOP;",
		new: "ON CONFLICT DO NOTHING\n                                RETURNING r.shard\n                            LOOP\n                                NULL;\n                            END LOOP;\n" +
			"INSERT INTO ratelimit.limits SELECT r.* FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] ON CONFLICT DO NOTHING; GET DIAGNOSTICS m = ROW_COUNT; m := shards[i];",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "move-found-of-insert", file: lock, what: "on Citus, rows that exist are found by an INSERT ... SELECT that inserts none",
		old: "                END LOOP;\n                IF m <> shards[i] THEN",
		new: "                END LOOP;\n                INSERT INTO ratelimit.limits SELECT r.* FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] ON CONFLICT DO NOTHING;\n" +
			"                IF NOT FOUND AND m <> shards[i] THEN",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "reset-system-column", file: reset, what: "rows are told apart by their transaction, which is another one on each server",
		old: "DELETE FROM ratelimit.limits AS t WHERE t.name = r.name", new: "DELETE FROM ratelimit.limits AS t WHERE t.xmin IS NOT NULL AND t.name = r.name",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "restore-volatile", file: overrides, what: "on Citus, no override can be ended: its time is volatile",
		old: "SET removed_at = at, removed_by", new: "SET removed_at = clock_timestamp(), removed_by",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "publish-interval", file: definitions, what: "on Citus, nothing can be published: to add an interval to an instant is not immutable",
		old: "alive_until = coalesce(alive, old.alive_until);", new: "alive_until = CASE WHEN heartbeat THEN at + interval '5 minutes' ELSE old.alive_until END;",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "keys-beside-table", file: keysSQL, what: "on Citus, a function that reads a table runs where another table is read, and is refused",
		old: "WHERE f.key IS NOT NULL AND NOT alone", new: "WHERE f.key IS NOT NULL AND NOT alone AND EXISTS (SELECT 1 FROM ratelimit.overrides AS x WHERE x.name = name)",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "consume-no-columns", file: consume, what: "on Citus, a subquery without columns is a syntax error",
		old: "ELSIF EXISTS (SELECT 1 FROM", new: "ELSIF EXISTS (SELECT FROM",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "capacity-reads-a-table", file: overrides, what: "on Citus, a function of SQL that reads a table by its arguments is refused",
		old: "RETURN coalesce(new_capacity, CASE WHEN capacity = rate THEN new_rate END, capacity);", new: "RETURN coalesce(new_capacity, CASE WHEN capacity = rate THEN new_rate END, capacity, (SELECT d.capacity FROM ratelimit.definitions AS d LIMIT 1));",
		tests: "TestTheEngineReadsAlikeOnEveryServer",
	}, {
		name: "apply-places-order", file: apply, what: "all rows of several limits are locked in another order than the common one",
		old: "SELECT pg_catalog.array_agg(p ORDER BY names[p] COLLATE \"C\", keys[p] COLLATE \"C\")", new: "SELECT pg_catalog.array_agg(p ORDER BY names[p] COLLATE \"C\" DESC, keys[p] COLLATE \"C\" DESC)",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	}, {
		name: "apply-keeps-a-lost-lock", file: apply, what: "a locked shard that has too little stays locked while all are locked",
		old:   "                        IF new_value IS NULL THEN\n                            RAISE SQLSTATE 'RL001';\n                        END IF;\n                        ord := pg_catalog.array_append(ord, rec.p);\n                        value := pg_catalog.array_append(value, new_value);\n                        ts := pg_catalog.array_append(ts, new_ts);\n                    END LOOP;\n                    RETURN ROW(true, at, ord, value, ts, NULL)::ratelimit._decisions;\n",
		new:   "                        EXIT WHEN new_value IS NULL AND ord = '{}';\n                        IF new_value IS NULL THEN\n                            RAISE SQLSTATE 'RL001';\n                        END IF;\n                        ord := pg_catalog.array_append(ord, rec.p);\n                        value := pg_catalog.array_append(value, new_value);\n                        ts := pg_catalog.array_append(ts, new_ts);\n                    END LOOP;\n                    IF ord <> '{}' THEN\n                        RETURN ROW(true, at, ord, value, ts, NULL)::ratelimit._decisions;\n                    END IF;\n",
		tests: "TestAShardThatIsFoundWantingIsNotHeld",
	}, {
		name: "apply-no-lock", file: apply, what: "all shards are added up without being locked",
		old: "ORDER BY r.shard FOR UPDATE;", new: "ORDER BY r.shard;",
		tests: "TestShardedLimitsAreExactForConcurrentCallers",
	}, {
		name: "apply-shards-order", file: apply, what: "shards are locked from the last to the first",
		old: "ORDER BY r.shard FOR UPDATE;", new: "ORDER BY r.shard DESC FOR UPDATE;",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	}, {
		name: "apply-clock-read-once", file: apply, what: "the clock is not read again after all rows are locked",
		old: "                    at := coalesce(now, clock_timestamp()); -- locking may have waited\n", new: "",
		tests: "TestARowMadeAfterAWaitIsNotRefilledForTheWait",
	}, {
		name: "apply-existing-counts", file: apply, what: "a row that another transaction has just inserted counts as inserted and locked, as Citus counts it",
		old:   "                                m := m + 1;\n                            END LOOP;\n                            IF m <> shards[i] THEN",
		new:   "                                m := m + 1;\n                            END LOOP;\n                            m := shards[i];\n                            IF m <> shards[i] THEN",
		tests: "TestContentionConforms",
	}, {
		name: "apply-tolerance", file: apply, what: "a sum over shards is denied because of its rounding",
		old: "                        granted := granted AND lefts[i] >= floors[i];\n                    END IF;", new: "                        granted := granted AND lefts[i] >= least(floors[i] + '1e-3', '0');\n                    END IF;",
		tests: "TestWhatShardsHoldIsNotDeniedForARoundingError",
	}, {
		name: "apply-latest", file: apply, what: "a new number of shards moves the ts back with the clock",
		old: "latest[i] := (SELECT greatest(max(u.t), at) FROM pg_catalog.unnest(t) AS u (t));", new: "latest[i] := at;",
		tests: "TestModel",
	}, {
		name: "apply-reshard-mints", file: apply, what: "rows are read as if their number were the new number of shards",
		old: "totals[i] := ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], ", new: "totals[i] := ratelimit._total(v, t, at, rates[i] * rows[i] / shards[i], periods[i], capacities[i] * rows[i] / shards[i], ",
		tests: "TestChangingTheNumberOfShardsNeitherMintsNorForgets",
	}, {
		name: "apply-denial-locks", file: apply, what: "a denial of a sharded limit locks all its rows",
		old: "IF pass = 1 AND (op = 'check' OR NOT granted) THEN", new: "IF op = 'check' OR NOT granted AND pass = 2 THEN",
		tests: "TestNothingIsWrittenOnDenial",
	}, {
		name: "apply-named-twice", file: apply, what: "a limit and key that a call names twice count once",
		old: "pg_catalog.count(DISTINCT (names[p], keys[p])) FILTER", new: "pg_catalog.count(*) FILTER",
		tests: "TestTheFunctionsRefuseWhatTheyCannotDecide",
	},

	// ratelimit._apply and ratelimit.consume(): reservations

	{
		name: "calendar-anchor-time", file: calendarSQL, what: "SQL by hand begins every window at midnight",
		old: "(anchor + period * n", new: "(date_trunc('day', anchor) + period * n",
		tests: "TestByHandCalendarWindowsAreThoseOfTheLibrary|TestCalendarWindows",
	}, {
		name: "keys-anchor", file: overrides, what: "SQL without numbers takes every window to begin at midnight",
		old: "f.zone, f.anchor,", new: "f.zone, f.anchor::date,",
		tests: "TestByHandWithoutNumbers",
	}, {
		name: "anchor-years-sql", file: "migrations/engine/validate.sql", what: "SQL by hand accepts an anchor of any year",
		old: "WHEN NOT anchor BETWEEN '0001-01-01' AND", new: "WHEN NOT anchor BETWEEN '-infinity' AND",
		tests: "TestByHandRefusesWhatIsWrong",
	}, {
		name: "reserve-latest", file: balance, what: "the refill that a limit would get counts from now, although its rows were refilled later",
		old: "refills := (SELECT coalesce(min(greatest(u.t, at)), at) FROM pg_catalog.unnest(ts) AS u (t));", new: "refills := at;",
		tests: "TestModel",
	},

	// ratelimit._apply and ratelimit.consume(): what is there

	{
		name: "take-tolerance", file: apply, what: "a call leaves a token that only rounding makes too small",
		old: "ratelimit._whole(totals[i], floors[i])", new: "floor(totals[i])",
		tests: "TestTakeTakesATokenThatIsThereButForRounding|TestTakeFindsWholeTokensAfterFractions",
	}, {
		name: "byhand-take-all", file: ratelimit, what: "by hand, a take takes the whole number or nothing",
		old: "CASE WHEN verb = 'take' THEN 1 ELSE count END", new: "CASE WHEN verb = 'take' THEN most ELSE count END",
		tests: "TestByHandAnswersLikeTheLibrary",
	}, {
		name: "byhand-take-null", file: ratelimit, what: "by hand, a take may be of NULL",
		old: "(most BETWEEN '1' AND '1e15') IS NOT TRUE", new: "(most BETWEEN '1' AND '1e15') IS FALSE",
		tests: "TestByHandReserveAndTakeRefuseWhatIsWrong",
	}, {
		name: "byhand-take-raises-nothing", file: ratelimit, what: "a denied ratelimit.take returns",
		old: "IF NOT granted AND verb <> 'try' THEN", new: "IF NOT granted AND verb NOT IN ('try', 'take') THEN",
		tests: "TestAReservationInSQLIsNoPermission",
	}, {
		name: "byhand-reserve-raises-nothing", file: ratelimit, what: "a denied ratelimit.reserve returns",
		old: "IF NOT granted AND verb <> 'try' THEN", new: "IF NOT granted AND verb NOT IN ('try', 'reserve') THEN",
		tests: "TestAReservationInSQLIsNoPermission",
	}, {
		name: "byhand-debt-of-windows", file: calendarSQL, what: "the windows of a long debt are not all refilled",
		old: "least(ceil(capacity / rate) + '101', 1000)", new: "least(ceil(capacity / rate) + '1', 1000)",
		tests: "TestByHandADebtOfManyCalendarWindowsIsRefilled",
	},

	// ratelimit._move

	{
		name: "move-order", file: move, what: "the two limits are locked in the order in which they are named",
		old: "pg_catalog.array_agg(p ORDER BY names[p] COLLATE \"C\", keys[p] COLLATE \"C\")", new: "pg_catalog.array_agg(p ORDER BY p)",
		tests: "TestMovesDoNotDeadlock",
	}, {
		name: "move-shards-order", file: lock, what: "shards are locked from the last to the first",
		old: "keys[first] ORDER BY r.shard FOR UPDATE;", new: "keys[first] ORDER BY r.shard DESC FOR UPDATE;",
		tests: "TestMovesDoNotDeadlock",
	}, {
		name: "move-no-lock", file: lock, what: "rows that are there are read without a lock",
		old: "keys[first] ORDER BY r.shard FOR UPDATE;", new: "keys[first] ORDER BY r.shard;",
		tests: "TestAMoveMissesNoUse",
	}, {
		name: "move-locks-to", file: move, what: "only the limit to move to is locked",
		old: "    PERFORM ratelimit._lock(ARRAY[names[places[1]], names[places[2]]]", new: "    places := '{2,2}';\n    PERFORM ratelimit._lock(ARRAY[names[places[1]], names[places[2]]]",
		tests: "TestAMoveMissesNoUse",
	}, {
		name: "move-clock-read-once", file: move, what: "the clock is not read again after a wait",
		old: "at := coalesce(now, clock_timestamp()); -- locking", new: "at := coalesce(now, statement_timestamp()); -- locking",
		tests: "TestAMoveReadsTheClockAfterWaiting",
	}, {
		name: "move-now", file: move, what: "the instant is the start of the transaction: now(), not clock_timestamp()",
		old: "at := coalesce(now, clock_timestamp()); -- locking", new: "at := coalesce(now, now()); -- locking",
		tests: "TestAMoveReadsTheClockAfterWaiting",
	}, {
		name: "move-mints", file: move, what: "a move gives tokens to a limit that has less",
		old: "balance := least(totals[2], greatest(floor,", new: "balance := (greatest(floor,",
		tests: "TestMove",
	}, {
		name: "move-floor", file: move, what: "a move leaves no debt that the limit may have",
		old: "greatest(floor, capacities[2]", new: "greatest(0, capacities[2]",
		tests: "TestMoveOfDebts",
	}, {
		name: "move-capacity", file: move, what: "the balance is moved, and not what is used",
		old: "capacities[2] - (capacities[1] - totals[1])", new: "totals[1]",
		tests: "TestMove",
	}, {
		name: "move-alike", file: move, what: "rows of another number of shards stay if there are as many",
		old: "IF m = shards[2] AND alike THEN", new: "IF m >= shards[2] THEN",
		tests: "TestModel",
	}, {
		name: "move-valid", file: move, what: "NaN, NULL and the same limit twice are accepted",
		old: "IF (m = 2 AND pg_catalog.cardinality(names) = 2 AND floor <= '0') IS NOT TRUE THEN", new: "IF m > 2 THEN",
		tests: "TestMoveRefusesHostileArguments",
	}, {
		name: "move-wire", file: wire, what: "a move over the wire is by the database's clock",
		old: "starts, shards, floor, now, windows, firsts, lasts);", new: "starts, shards, floor, NULL, windows, firsts, lasts);",
		tests: "TestModel",
	},

	// ratelimit._refund

	{
		name: "refund-one-held", file: wire, what: "a refund to one limit takes what was held for what was taken",
		old:   "ratelimit._refund(ARRAY[name], ARRAY[key], rates, periods, capacities, starts, counts, taken, held,",
		new:   "ratelimit._refund(ARRAY[name], ARRAY[key], rates, periods, capacities, starts, counts, held, taken,",
		tests: "TestWaitGivesBackOnAContextOfItsOwn",
	}, {
		name: "apply-one-most", file: wire, what: "UpTo of one limit takes all or nothing",
		old:   "    shard_a, shard_b, reserve, now, or_raise, windows, firsts, lasts, mosts, within));",
		new:   "    shard_a, shard_b, reserve, now, or_raise, windows, firsts, lasts, NULL, within));",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "refund-no-lock", file: refund, what: "a refund is computed from rows that are not locked",
		old: "ORDER BY r.shard FOR UPDATE;", new: "ORDER BY r.shard;",
		tests: "TestARefundWritesNoRowThatItHasNotLocked",
	}, {
		name: "refund-shards-order", file: refund, what: "shards are locked from the last to the first",
		old: "ORDER BY r.shard FOR UPDATE;", new: "ORDER BY r.shard DESC FOR UPDATE;",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	}, {
		name: "refund-now", file: refund, what: "the instant is the start of the transaction: now(), not clock_timestamp()",
		old: "at := coalesce(now, clock_timestamp());", new: "at := coalesce(now, now());",
		tests: "TestWithoutAClockTheDatabaseTellsTheTime",
	}, {
		name: "refund-latest", file: refund, what: "the window is that of a clock that stepped back to before the rows",
		old: "(SELECT greatest(max(u.t), at) FROM pg_catalog.unnest(ts) AS u (t));", new: "at;",
		tests: "TestRefundIntoAWindowThatTheRowHasSeenButTheClockNotYetGivesNothingBack",
	}, {
		name: "refund-null", file: refund, what: "NULL is accepted",
		old: "latest >= taken_at) IS NOT TRUE THEN", new: "latest >= taken_at) IS FALSE THEN",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-nan", file: refund, what: "NaN is accepted",
		old: "+ abs(held) + part < 'Infinity'", new: "+ abs(held) + part > '-Infinity'",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-at-no-instant", file: refund, what: "an infinite instant is accepted",
		old: "AND isfinite(taken_at) AND isfinite(run_at) AND isfinite(at) AND", new: "AND taken_at IS NOT NULL AND run_at IS NOT NULL AND",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-part-refilled", file: refund, what: "missing tokens of one shard are refilled at its rate alone, although the balance is spread over all",
		old: "latest - taken_at) * rate / ", new: "latest - taken_at) * (rate * part) / ",
		tests: "TestModel",
	}, {
		name: "refund-above-count", file: refund, what: "a bucket gets back everything that is missing",
		old: "back := least(greatest(back - owed, '0'), count);", new: "back := least(greatest(back - owed, '0'), capacity - total);",
		tests: "TestRefundToATokenBucketGivesBackWhatIsStillMissing",
	}, {
		name: "refund-tolerance", file: refund, what: "a window owes what was lost by rounding",
		old: "owing := ratelimit._even(total, rate, capacity);", new: "owing := 0;",
		tests: "TestWhatRoundingTakesIsNoDebt|TestRoundingNeverDenies",
	},

	// ratelimit._consume_sharded

	{
		name: "sharded-owes", file: consumeSharded, what: "each shard may owe as much as all shards together",
		old: "AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count >= '0'", new: "AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count >= floor",
		tests: "TestReservationsAreSharedByAllShards",
	}, {
		name: "sharded-other-number", file: consumeSharded, what: "a row with another number of shards is taken from",
		old:   "AND r.shard = pick AND r.shards = shards AND (r.lapses <= at) IS NOT TRUE\n               AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL)",
		new:   "AND r.shard = pick\n               AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL)",
		tests: "TestChangingTheNumberOfShardsNeitherMintsNorForgets|TestTwoVersionsWithDifferentShardsAtOnceAreExact",
	}, {
		name: "sharded-keeps-a-lost-lock", file: consumeSharded, what: "a locked shard that has too little stays locked while all are locked",
		old:   "        IF new_value IS NULL THEN\n            RAISE SQLSTATE 'RL001';\n        END IF;\n        RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts], NULL)::ratelimit._decisions;\n",
		new:   "        IF new_value IS NOT NULL THEN\n            RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts], NULL)::ratelimit._decisions;\n        END IF;\n",
		tests: "TestAShardThatIsFoundWantingIsNotHeld",
	},

	// ratelimit._consume_several

	{
		name: "several-order", file: consumeSeveral, what: "limits are locked in the order of the arguments, whatever that is",
		old: "EXIT passes WHEN (FOUND AND (names[p - 1] COLLATE \"C\", keys[p - 1] COLLATE \"C\") < (name, key)) IS NOT TRUE;", new: "EXIT passes WHEN NOT FOUND;",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	},

	// ratelimit._reset

	{
		name: "reset-shards-order", file: reset, what: "the shards of a limit are reset from the last to the first",
		old: "ORDER BY t.shard FOR UPDATE;", new: "ORDER BY t.shard DESC FOR UPDATE;",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	}, {
		name: "reset-order", file: reset, what: "limits are reset in another order than the common one",
		old: "ORDER BY 1, 2\n    LOOP\n        PERFORM", new: "ORDER BY 1 DESC, 2 DESC\n    LOOP\n        PERFORM",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	},

	// ratelimit._consume_keys

	{
		name: "keys-plan", file: consumeKeys, what: "a plan may read rows before it has a key for them",
		old: "r.name = ANY (ARRAY[CASE WHEN i > 0 THEN name END])", new: "r.name = name",
		tests: "TestEveryStatementReadsLittle",
	}, {
		name: "keys-clock-read-once", file: consumeKeys, what: "the clock is not read again after the UPDATE has waited",
		old: "at := coalesce(now, clock_timestamp()); -- the UPDATE may have waited", new: "at := seen;",
		tests: "TestCoalescerReadsTheClockAfterWaiting",
	}, {
		name: "each-floor", file: "migrations/engine/each.sql", what: "rounding denies one of several keys",
		old: "now, floors[g], false)", new: "now, 0, false)",
		tests: "TestEachForgivesRounding",
	}, {
		name: "each-one-capacity", file: "ratelimit/each.go", what: "a key with other numbers is decided by those of the key before",
		old: "		a.numbers == b.numbers && a.lowest()", new: "		a.numbers.Rate == b.numbers.Rate && a.lowest()",
		tests: "TestEachWithOtherNumbers",
	}, {
		name: "each-too-much-unasked", file: "ratelimit/each.go", what: "a count that an override forbids is granted",
		old: "conclude(place, &c, func(r *Result) { c.fill(r, &answers[i]) })", new: "c.demands[0].tooMuch = false\n\t\tconclude(place, &c, func(r *Result) { c.fill(r, &answers[i]) })",
		tests: "TestEachAgreesWithConsume",
	},

	// ratelimit._coalesce

	{
		name: "coalesce-no-compare", file: coalesce, what: "rows are written although they have changed since they were read",
		old: "AND r.value = s.value AND r.ts = s.ts AND s.n > '0'", new: "AND s.n > '0'",
		tests: "TestCoalescerDecidesAnewOnWhatItWaitedFor",
	}, {
		name: "coalesce-order", file: coalesce, what: "missing and mixed keys are locked in another order than the common one",
		old: "ORDER BY names[defs[i]] COLLATE \"C\", keys[i] COLLATE \"C\"\n                ON CONFLICT", new: "ORDER BY names[defs[i]] COLLATE \"C\" DESC, keys[i] COLLATE \"C\" DESC\n                ON CONFLICT",
		tests: "TestCoalescerDoesNotDeadlock",
	}, {
		name: "coalesce-no-lock", file: coalesce, what: "existing rows are not locked together with the missing ones",
		old: "ON CONFLICT (name, key, shard) DO UPDATE SET value = 0 WHERE false\n", new: "ON CONFLICT (name, key, shard) DO NOTHING\n",
		tests: "TestCoalescerDoesNotDeadlock",
	}, {
		name: "coalesce-clock-read-once", file: coalesce, what: "the clock is not read again after locking",
		old: "        at := coalesce(now, clock_timestamp()); -- locking may have waited\n", new: "",
		tests: "TestCoalescerReadsTheClockAfterWaiting",
	}, {
		name: "coalesce-waits-out-of-order", file: coalesce, what: "the second pass waits for rows that are not locked",
		old: "FOR NO KEY UPDATE SKIP LOCKED", new: "FOR NO KEY UPDATE",
		tests: "TestCoalescerDoesNotWaitForARowMadeAnew",
	}, {
		name: "coalesce-inserted", file: coalesce, what: "a row that was inserted for a call has the capacity of another call's plan",
		old: "(r.name, r.key) IN (SELECT n.name, n.key FROM unnest(new_names, new_keys) AS n (name, key)) AS inserted", new: "false AS inserted",
		tests: "TestCoalescerInsertsARowThatIsFullForEveryPlan",
	},

	// Calendar windows of several limits

	{
		name: "several-calendar-passed-on", file: consumeSeveral, what: "where the first row is missing or has too little, a calendar window counts as a fixed window",
		old: "        windows, firsts, lasts);\n", new: "        NULL, NULL, NULL);\n",
		tests: "TestACalendarWindowDoesWhatAFixedWindowDoes",
	}, {
		name: "coalesce-calendar", file: coalesce, what: "a calendar window that calls ask for alone counts as a fixed window",
		old: "CASE WHEN firsts[defs[i]] > 0 THEN windows[firsts[defs[i]]:lasts[defs[i]]] END AS windows", new: "NULL::timestamptz[] AS windows",
		tests: "TestACoalescerDecidesCalendars",
	}, {
		name: "coalesce-calendar-stale", file: coalesce, what: "a fixed window after a calendar's is refilled at the calendar's windows",
		old: "listed := CASE WHEN firsts[d] > 0 THEN windows[firsts[d]:lasts[d]] END;", new: "listed := coalesce(windows[nullif(firsts[d], 0):lasts[d]], listed);",
		tests: "TestACoalescerDecidesCalendars",
	},

	// ratelimit.refuse

	{
		name: "guard-state", file: guard, what: "a refusal has the SQLSTATE of a race that was lost, so the function decides again",
		old: "RAISE SQLSTATE 'RL004'", new: "RAISE SQLSTATE 'RL001'",
		tests: "TestAGuardRefusesForeignKeysInEveryVerb",
	}, {
		name: "guard-shows-key", file: guard, what: "the error of a refusal has the key",
		old: "belong to this server', NEW.name)", new: "belong to this server', NEW.key)",
		tests: "TestAGuardRefusesForeignKeysInEveryVerb",
	},

	// the rest

	{
		name: "raise-several-not-passed-on", file: consumeSeveral, what: "a denial of several limits is returned where it should stop the batch",
		old: "pg_catalog.array_fill(0, ARRAY[n]), false, now, or_raise,\n", new: "pg_catalog.array_fill(0, ARRAY[n]), false, now, false,\n",
		tests: "TestADenialStopsABatchWhereverItStands",
	}, {
		name: "raise-sharded-not-passed-on", file: consumeSharded, what: "a denial of a sharded limit is returned where it should stop the batch",
		old: "ARRAY[shard_a], ARRAY[shard_b], false, now, or_raise,", new: "ARRAY[shard_a], ARRAY[shard_b], false, now, false,",
		tests: "TestADenialStopsABatchWhereverItStands",
	}, {
		name: "raise-digits", file: raise, what: "doubles in the error of a denial are rounded by the session's setting",
		old: "set_config('extra_float_digits', '1', true)", new: "current_setting('extra_float_digits')",
		tests: "TestEveryQueryExecModeTakesBatches|TestABatchAnswersAsConsumeDoes",
	}, {
		name: "turns-too-few", file: turns, what: "one of the views is missing",
		old: "CREATE VIEW ratelimit.turn_31 AS SELECT NULL AS nothing;\n" +
			"COMMENT ON VIEW ratelimit.turn_31 IS 'txlimit: locked by transactions that queue for a hot limit';\n",
		new:   "",
		tests: "TestEveryTurnHasItsView",
	}, {
		name: "byhand-max-reserved", file: ratelimit, what: "without numbers, ratelimit may owe the max_reserved that is published",
		old: "IF wrong IS NULL AND verb = 'reserve' THEN", new: "IF wrong IS NULL AND (verb = 'reserve' OR max_reserved > '0') THEN",
		tests: "TestByHandWithoutNumbers",
	}, {
		name: "byhand-grid", file: grid, what: "the windows of a key differ from the library's",
		old: "CASE WHEN key = '' THEN name ELSE key END", new: "name || key",
		tests: "TestByHandWindowsAreThoseOfTheLibrary",
	}, {
		name: "byhand-retry-early", file: balance, what: "retry_at is a microsecond early",
		old: "CASE WHEN late < never THEN late ELSE", new: "CASE WHEN late < never THEN late - 1 ELSE",
		tests: "TestByHandInstantsAreExact|TestByHandAnswersLikeTheLibrary",
	}, {
		name: "byhand-raises-nothing", file: ratelimit, what: "ratelimit lets a denial pass",
		old: "IF NOT granted AND verb <> 'try' THEN", new: "IF NOT granted AND verb NOT IN ('try', 'consume') THEN",
		tests: "TestADenialInSQLThatNobodyLooksAt|TestByHandADenialIsAnError",
	}, {
		name: "byhand-wiring", file: ratelimit, what: "ratelimit.try passes no anchor on",
		old: "'try', name COLLATE \"C\", key COLLATE \"C\", rate, period, count, kind, capacity, start, shards, global, zone, anchor)", new: "'try', name COLLATE \"C\", key COLLATE \"C\", rate, period, count, kind, capacity, start, shards, global, zone)",
		tests: "TestThePublicFunctionsPassTheirArgumentsOn",
	}, {
		name: "byhand-plan-until", file: ratelimit, what: "a plan that grants nothing is for good, although another override follows",
		old: "        effect := 'block';\n", new: "        effect := 'block';\n        until := NULL;\n",
		tests: "TestAnOverrideThatEnds",
	}, {
		name: "keys-plan-until", file: overrides, what: "the same in the list of keys",
		old: "d.until := CASE WHEN o.until < ", new: "d.until := CASE WHEN d.rate > '0' AND o.until < ",
		tests: "TestAnOverrideThatEnds",
	}, {
		name: "all-twice", file: ratelimit, what: "ratelimit.consume_all leaves a key that is there twice to the engine, whose error does not say what is wrong",
		old: "HAVING count(*) > 1 ORDER BY 1", new: "HAVING count(*) > 9 ORDER BY 1",
		tests: "TestRatelimitAllRefusesWhatIsWrong",
	}, {
		name: "all-policy-only", file: ratelimit, what: "a denial by policy does not name the keys that are empty",
		old: "    IF pg_catalog.cardinality(names) > 0 THEN -- if it", new: "    IF policy AND pg_catalog.cardinality(names) > 0 THEN -- if it",
		tests: "TestRatelimitAllMindsOverrides",
	}, {
		name: "all-null", file: ratelimit, what: "ratelimit.consume_all takes a null for a default",
		old: "     WHERE f.expected IS DISTINCT FROM f.type\n", new: "     WHERE f.expected IS DISTINCT FROM f.type AND (f.type <> 'null' OR f.expected IS NULL)\n",
		tests: "TestRatelimitAllRefusesWhatIsWrong",
	}, {
		name: "all-unknown", file: ratelimit, what: "ratelimit.consume_all ignores fields that it does not know",
		old: "     WHERE f.expected IS DISTINCT FROM f.type\n", new: "     WHERE f.expected <> f.type\n",
		tests: "TestRatelimitAllRefusesWhatIsWrong",
	},

	// ratelimit.sweep

	{
		name: "sweep-no-lock", file: sweep, what: "rows are deleted without being locked and checked again",
		old: "               FOR UPDATE OF r SKIP LOCKED\n          ) AS l\n         GROUP BY", new: "          ) AS l\n         GROUP BY",
		tests: "TestASweepLeavesWhatIsLocked|TestSweepsAmongTraffic",
	}, {
		name: "sweep-waits", file: sweep, what: "a sweep waits for rows that others have locked",
		old: "FOR UPDATE OF r SKIP LOCKED\n          ) AS l\n         GROUP BY", new: "FOR UPDATE OF r\n          ) AS l\n         GROUP BY",
		tests: "TestASweepLeavesWhatIsLocked",
	}, {
		name: "sweep-calendar", file: sweep, what: "a calendar's row is deleted a day before it is full by every anchor",
		old: "ratelimit._longest(period);", new: "ratelimit._longest(period) - interval '24 hours';",
		tests: "TestASweepOfACalendarMindsEveryAnchor",
	}, {
		name: "sweep-not-full", file: sweep, what: "rows that are nearly full are deleted",
		old: "start) = capacity / shards::double precision)\n    AND", new: "start) >= '0.9' * capacity / shards::double precision)\n    AND",
		tests: "TestASweepDeletesWhatSaysNothing|TestASweepChangesNoDecision",
	}, {
		name: "tolerance-none", file: available, what: "a call is denied because of rounding",
		old: "RETURN least((capacity - lowest) * '1e-9', '1e-3');", new: "RETURN '0'::double precision;",
		tests: "TestTheToleranceIsOneNumber",
	}, {
		name: "shown-rest", file: available, what: "less than the smallest count is shown",
		old: "WHEN total >= '1e-15' THEN greatest", new: "WHEN total > '0' THEN greatest",
		tests: "TestTheToleranceIsOneNumber",
	}, {
		name: "repaid-rounding", file: balance, what: "work waits for another window because of rounding",
		old: "    ratelimit._even(ratelimit._total(value, ts, at, rate, period, capacity, start, windows), rate, capacity) END, false, windows);", new: "    '0' END, false, windows);",
		tests: "TestRoundingNeverDeniesByHand",
	},
}
