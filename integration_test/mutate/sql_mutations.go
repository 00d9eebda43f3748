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
		name: "parts-bar", file: parts, what: "a part with a bar is joined like two parts",
		old: "replace(replace(part COLLATE \"C\", E'\\\\', E'\\\\\\\\'), '|', E'\\\\|')", new: "replace(part COLLATE \"C\", E'\\\\', E'\\\\\\\\')",
		tests: "TestSQLJoinsKeysAsGoDoes|TestKeysAreStoredAsWritten",
	}, {
		name: "parts-backslash", file: parts, what: "a part with a backslash at its end swallows the next one",
		old: "replace(replace(part COLLATE \"C\", E'\\\\', E'\\\\\\\\'), '|', E'\\\\|')", new: "replace(part COLLATE \"C\", '|', E'\\\\|')",
		tests: "TestSQLJoinsKeysAsGoDoes|TestKeysAreStoredAsWritten",
	}, {
		name: "parts-collation", file: parts, what: "a column with a nondeterministic collation cannot be a part",
		old: "replace(replace(part COLLATE \"C\", E'", new: "replace(replace(part, E'",
		tests: "TestSQLJoinsKeysAsGoDoes",
	}, {
		name: "parts-one", file: parts, what: "a key of one part is escaped in SQL, and not in Go",
		old: "RETURN CASE n WHEN 1 THEN part ELSE joined END;", new: "RETURN joined;",
		tests: "TestSQLJoinsKeysAsGoDoes",
	}, {
		name: "parts-null", file: parts, what: "a part that is NULL makes no key, and a block of it is one of every key",
		old: "IF coalesce(octet_length(part), 0) = 0 THEN", new: "IF octet_length(part) = 0 THEN",
		tests: "TestSQLJoinsKeysAsGoDoes",
	}, {
		name: "parts-of-anything", file: parts, what: "a text that several parts cannot make is split",
		old: " OR key COLLATE \"C\" !~ E'^(?:[^\\\\\\\\|]|\\\\\\\\[\\\\\\\\|])+(?:\\\\|(?:[^\\\\\\\\|]|\\\\\\\\[\\\\\\\\|])+)+$'", new: "",
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
	}, {
		name: "available-time-backwards", file: available, what: "time that runs backwards takes tokens from a bucket",
		old: "greatest(date_part('epoch', upto - ts), 0) * rate", new: "date_part('epoch', upto - ts) * rate",
		tests: "TestDefectAClockThatStepsBackTakesAWindowsTokens",
	}, {
		name: "available-windows-backwards", file: available, what: "time that runs backwards takes tokens from a window",
		old:   "greatest(round(date_part('epoch', upto - date_bin(period, ts, start)) / date_part('epoch', period)), 0) * rate",
		new:   "round(date_part('epoch', upto - date_bin(period, ts, start)) / date_part('epoch', period)) * rate",
		tests: "TestDefectAClockThatStepsBackTakesAWindowsTokens",
	}, {
		name: "available-windows-rounded-down", file: available, what: "a quotient of doubles is rounded down to too few windows",
		old: "greatest(round(date_part", new: "greatest(floor(date_part",
		tests: "TestAFixedWindowMissesNoWindowByRounding",
	}, {
		name: "available-windows-off-grid", file: available, what: "windows are counted from the row's ts, not on the grid",
		old: "upto - date_bin(period, ts, start))", new: "upto - ts)",
		tests: "TestChangingALimitTakesEffectAtTheNextCallAndNeverMints|TestModel",
	},

	// ratelimit._consume

	{
		name: "consume-last-token", file: consume, what: "the last token of a bucket is not granted (>= to >)",
		old: "start IS NULL THEN\n                UPDATE ratelimit.limits AS r\n" +
			"                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count,\n" +
			"                       ts = greatest(r.ts, at)\n" +
			"                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE\n" +
			"                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor",
		new: "start IS NULL THEN\n                UPDATE ratelimit.limits AS r\n" +
			"                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count,\n" +
			"                       ts = greatest(r.ts, at)\n" +
			"                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE\n" +
			"                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count > floor",
		tests: "TestWhatLeavesTheFloorIsGranted",
	}, {
		name: "consume-unconditionally", file: consume, what: "the UPDATE of a window does not check whether it has enough",
		old:   "AND ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor\n                RETURNING",
		new:   "RETURNING",
		tests: "TestAFixedWindowsGridGoesThroughItsStart|TestModel",
	}, {
		name: "consume-no-recheck", file: consume, what: "after a wait, the UPDATE does not check again whether the row has enough: it trusts a plain read",
		old: "AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor\n                RETURNING",
		new: "AND EXISTS (SELECT 1 FROM ratelimit.limits AS s WHERE s.name = name AND s.key = key AND s.shard = 0 AND s.shards = 1\n" +
			"                       AND ratelimit._available(s.value, s.ts, at, rate, period, capacity, NULL) - count >= floor)\n                RETURNING",
		tests: "TestTwoVersionsWithDifferentShardsAtOnceAreExact|TestOverGrant",
	}, {
		name: "consume-ts-back", file: consume, what: "a bucket's ts moves back with the clock",
		old: "period, capacity, NULL) - count,\n                       ts = greatest(r.ts, at)\n", new: "period, capacity, NULL) - count,\n                       ts = at\n",
		tests: "TestDefectAClockThatStepsBackTakesAWindowsTokens",
	}, {
		name: "consume-window-ts-back", file: consume, what: "a window's ts moves back with the clock",
		old: "period, capacity, start) - count,\n                       ts = greatest(r.ts, at)\n", new: "period, capacity, start) - count,\n                       ts = at\n",
		tests: "TestDefectAClockThatStepsBackTakesAWindowsTokens",
	}, {
		name: "consume-calendar-ts-back", file: consume, what: "the ts of a calendar window moves back with the clock",
		old: "period, capacity, start, windows) - count,\n                       ts = greatest(r.ts, at)\n", new: "period, capacity, start, windows) - count,\n                       ts = at\n",
		tests: "TestModel",
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
		name: "consume-nan", file: available, what: "NaN tokens are granted",
		old: "RETURN rate + capacity + count < '1e16'", new: "RETURN rate + capacity < '1e16'",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "consume-negative", file: available, what: "a negative count creates tokens",
		old: "least(rate, capacity, count) >= '0'", new: "least(rate, capacity) >= '0'",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "valid-null", file: available, what: "a rate of NULL fills a bucket",
		old: "RETURN rate + capacity + count < '1e16'", new: "RETURN greatest(rate, capacity, count) < '1e16'",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "valid-infinite", file: available, what: "NaN and Infinity are accepted as numbers",
		old: "RETURN rate + capacity + count < '1e16' AND", new: "RETURN rate + capacity + count IS NOT NULL AND",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "valid-period", file: available, what: "a period of NULL fills a bucket",
		old: " AND isfinite(period)", new: "",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "valid-now", file: available, what: "a first use at an infinite instant is stored",
		old: " AND isfinite(coalesce(now, 'epoch'));", new: ";",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "consume-trusts", file: consume, what: "invalid numbers pass the check",
		old: "    IF ratelimit._valid(rate, period, capacity, count, now) IS NOT TRUE THEN\n", new: "    IF false THEN\n",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "consume-first-floor", file: consume, what: "a first use that leaves less than the floor is granted",
		old: "ELSIF (capacity - count >= floor AND isfinite(", new: "ELSIF (isfinite(",
		tests: "TestNoGarbageIsGrantedOrStored|TestTheFunctionsRefuseWhatTheyCannotDecide",
	}, {
		name: "consume-first-start", file: consume, what: "a first use is granted in a window with an infinite start",
		old: "ELSIF (capacity - count >= floor AND isfinite(coalesce(start, 'epoch'))) IS", new: "ELSIF (capacity - count >= floor) IS",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "consume-seqscan", file: consume, what: "without enable_seqscan = off, a SERIALIZABLE caller of one key conflicts with the callers of all others",
		old: "LANGUAGE plpgsql SET enable_seqscan = off\nAS", new: "LANGUAGE plpgsql\nAS",
		tests: "TestDifferentKeysDoNotConflictInATinyTable",
	}, {
		name: "consume-first-is-free", file: consume, what: "the first use of a key costs nothing",
		old: "VALUES (name, key, 0, 1, capacity - count,", new: "VALUES (name, key, 0, 1, capacity,",
		tests: "TestTokenBucketGrantsItsCapacityThenItsRate",
	}, {
		name: "consume-first-conflict", file: consume, what: "of two concurrent first uses, one gets an SQL error",
		old: "\n            ON CONFLICT DO NOTHING\n            RETURNING r.value, r.ts INTO value, ts;", new: "\n            RETURNING r.value, r.ts INTO value, ts;",
		tests: "TestOverGrant",
	}, {
		name: "consume-first-lost-race", file: consume, what: "a caller that loses the race for a first use is granted anyway",
		old: "            IF FOUND THEN\n                RETURN ROW(true, at, value, ts)::ratelimit._decision;", new: "            IF true THEN\n                RETURN ROW(true, at, capacity - count, at);",
		tests: "TestOverGrant",
	}, {
		name: "consume-expecting-exact", file: consume, what: "a caller that expects a denial is denied the last token (>= to >)",
		old:   "denied := (ratelimit._available(value, ts, at, rate, period, capacity, NULL) - count >= floor) IS NOT TRUE;",
		new:   "denied := (ratelimit._available(value, ts, at, rate, period, capacity, NULL) - count > floor) IS NOT TRUE;",
		tests: "TestExpectingADenialDecidesTheSame",
	}, {
		name: "consume-expecting-for-ever", file: consume, what: "a caller that wrongly expects a denial never gets to the UPDATE",
		old: "        expect_denial := false;\n", new: "",
		tests: "TestExpectingADenialDecidesTheSame",
	}, {
		name: "consume-denies-sharded", file: consume, what: "rows that were sharded are not merged",
		old: "ELSIF EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key) THEN", new: "ELSIF false THEN",
		tests: "TestChangingTheNumberOfShardsNeitherMintsNorForgets",
	},

	// ratelimit._apply

	{
		name: "apply-reads-two", file: apply, what: "for several limits in SERIALIZABLE, the other shards are read, too, and conflict with transactions that take from them",
		old: "IF shard_a OPERATOR(pg_catalog.=) shard_b OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN", new: "IF shard_a OPERATOR(pg_catalog.=) shard_b THEN",
		tests: "TestAboveReadCommittedDifferentShardsDoNotConflict",
	}, {
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
		name: "coalesce-element-alone", file: coalesce, what: "a session of Citus crashes on an element of an array that stands alone in SET",
		old: "SET value = coalesce(held[k]), ts = coalesce(since[k])", new: "SET value = held[k], ts = since[k]",
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
		name: "poll-by-xid", file: overrides, what: "on several servers, overrides are followed by the numbers of one server's transactions",
		old: "AND NOT ratelimit._one_server() AND o.id > after", new: "AND false AND o.id > after",
		tests: "TestOverridesOfADistributedSchemaAreFollowedByTime",
	}, {
		name: "poll-twice", file: "ratelimit/overrides.go", what: "an override that is reported again wakes all who wait",
		old: "if !slices.ContainsFunc(t.of(c.limitKey), c.same) {", new: "{",
		tests: "TestOverridesComeAndGo",
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
		name: "apply-unlocked-rows", file: apply, what: "rows that another transaction inserted meanwhile are written without a lock",
		old: "IF NOT granted OR locked OPERATOR(pg_catalog.<>) rows THEN", new: "IF NOT granted THEN",
		tests: "TestTwoVersionsWithDifferentShardsAtOnceAreExact",
	}, {
		name: "apply-decides-once", file: apply, what: "a grant by a plain read stands although the locked rows have too little",
		old: "IF NOT granted OR locked OPERATOR(pg_catalog.<>) rows THEN", new: "IF locked OPERATOR(pg_catalog.<>) rows THEN",
		tests: "TestShardedLimitsAreExactForConcurrentCallers",
	}, {
		name: "apply-first-lost-race", file: apply, what: "a caller that loses the race for a first use is granted anyway",
		old:   "                    IF m <> shards[i] THEN\n                        RAISE SQLSTATE 'RL001';\n                    END IF;\n                END IF;\n            END LOOP;\n            RETURN ROW(",
		new:   "                END IF;\n            END LOOP;\n            RETURN ROW(",
		tests: "TestShardedLimitsAreExactForConcurrentCallers|TestFirstUsesDoNotDeadlock",
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
		name: "apply-shard-owes", file: apply, what: "a shard that was waited for may alone owe as much as all shards together",
		old: "CASE WHEN shards[p] = 1 AND NOT reserve THEN floors[p] ELSE 0 END AS floor,", new: "CASE WHEN NOT reserve THEN floors[p] ELSE 0 END AS floor,",
		tests: "TestAChargeThatWaitedForAShardIsSharedByAll",
	}, {
		name: "total-full-shards", file: balance, what: "full shards are added up to a little more or less than the capacity",
		old: "    RETURN CASE WHEN m = 0 OR lowest = capacity / m::double precision THEN capacity", new: "    RETURN CASE WHEN m = 0 THEN capacity",
		tests: "TestAFullShardedLimitHoldsItsCapacityHoweverItDivides",
	}, {
		name: "total-equal-shards", file: balance, what: "equal shares are added up one by one, and each sum is rounded the same way",
		old: "                WHEN lowest = highest THEN m::double precision * lowest\n", new: "",
		tests: "TestWhatEqualShardsOweIsNotRoundedAway",
	}, {
		name: "apply-ts-back", file: apply, what: "the ts of all shards move back with the clock",
		old: "shards[i]::double precision, ts = greatest(r.ts, at), promised", new: "shards[i]::double precision, ts = at, promised",
		tests: "TestDefectAClockThatStepsBackTakesAWindowsTokens|TestModel",
	}, {
		name: "apply-latest", file: apply, what: "a new number of shards moves the ts back with the clock",
		old: "latest[i] := (SELECT greatest(max(u.t), at) FROM pg_catalog.unnest(t) AS u (t));", new: "latest[i] := at;",
		tests: "TestModel",
	}, {
		name: "apply-reshard-mints", file: apply, what: "rows are read as if their number were the new number of shards",
		old: "totals[i] := ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], ", new: "totals[i] := ratelimit._total(v, t, at, rates[i] * rows[i] / shards[i], periods[i], capacities[i] * rows[i] / shards[i], ",
		tests: "TestChangingTheNumberOfShardsNeitherMintsNorForgets",
	}, {
		name: "apply-check-takes", file: apply, what: "a check takes tokens",
		old: "IF pass = 1 AND (op = 'check' OR NOT granted) THEN", new: "IF pass = 1 AND NOT granted THEN",
		tests: "TestCheckAnswersAndWritesNothing",
	}, {
		name: "apply-denial-locks", file: apply, what: "a denial of a sharded limit locks all its rows",
		old: "IF pass = 1 AND (op = 'check' OR NOT granted) THEN", new: "IF op = 'check' OR NOT granted AND pass = 2 THEN",
		tests: "TestNothingIsWrittenOnDenial",
	}, {
		name: "apply-named-twice", file: apply, what: "a limit and key that a call names twice count once",
		old: "pg_catalog.count(DISTINCT (names[p], keys[p])) FILTER", new: "pg_catalog.count(*) FILTER",
		tests: "TestTheFunctionsRefuseWhatTheyCannotDecide",
	}, {
		name: "apply-trusts", file: apply, what: "invalid numbers pass the check",
		old: "FILTER (WHERE ratelimit._valid(rates[p], periods[p], capacities[p], counts[p], now)\n                       AND floors", new: "FILTER (WHERE floors",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "apply-no-floor", file: apply, what: "a floor of NULL, which allows any balance, is granted",
		old: "                       AND floors[p] <= '0' AND isfinite(", new: "                       AND isfinite(",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "apply-one-row-trusts", file: apply, what: "invalid numbers pass the check where one row of each limit has enough",
		old: "             WHERE ratelimit._valid(rates[p], periods[p], capacities[p], counts[p], now) AND floors[p] <= '0';", new: "             ;",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "apply-one-row-no-floor", file: apply, what: "a floor of NULL is granted where one row of each limit has enough, since a shard leaves at least 0",
		old: "counts[p], now) AND floors[p] <= '0';", new: "counts[p], now);",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "apply-perhaps-reserves", file: apply, what: "a call whose reserve is NULL is granted",
		old: " AND reserve IS NOT NULL\n", new: "\n",
		tests: "TestTheFunctionsRefuseWhatTheyCannotDecide",
	},

	// ratelimit._apply and ratelimit.consume(): reservations

	{
		name: "reserve-forfeits-nothing", file: balance, what: "a reservation that waits forfeits nothing",
		old: "IF run_at > at AND capacity", new: "IF false AND capacity",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft",
	}, {
		name: "reserve-above-capacity", file: balance, what: "a reservation of more than the capacity forfeits tokens, although it has no promise",
		old: " AND capacity - count >= -ratelimit._tolerance(capacity, 0) THEN\n", new: " THEN\n",
		tests: "TestModel",
	}, {
		name: "reserve-others-wait", file: apply, what: "a token bucket that another limit makes wait forfeits nothing",
		old: "IF starts[i] IS NOT NULL OR run_at > owns[i] THEN", new: "IF starts[i] IS NOT NULL THEN",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "reserve-last-waits", file: apply, what: "the work waits only for the last limit",
		old: "run_at := greatest(run_at, owns[i]);", new: "run_at := owns[i];",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile|TestModel",
	}, {
		name: "calendar-unlisted", file: available, what: "a row older than the list of windows gets one refill more than is certain",
		old: "/ date_part('epoch', period)) - '1', 0)", new: "/ date_part('epoch', period)), 0)",
		tests: "TestAClientsClockMintsNoCalendarWindow",
	}, {
		name: "calendar-unlisted-ahead", file: available, what: "a row is refilled up to the list's first window, which a client whose clock is ahead puts into the future",
		old: "least(windows[1], upto) - ts", new: "windows[1] - ts",
		tests: "TestAClientsClockMintsNoCalendarWindow",
	}, {
		name: "calendar-number", file: calendarSQL, what: "a window is counted from midnight, although it begins later in the day",
		old: "((at AT TIME ZONE zone) - (anchor - date_trunc('day', anchor)))::date", new: "((at AT TIME ZONE zone) + (anchor - date_trunc('day', anchor)))::date",
		tests: "TestCalendarWindows",
	}, {
		name: "calendar-anchor-time", file: calendarSQL, what: "SQL by hand begins every window at midnight",
		old: "(anchor + period * n", new: "(date_trunc('day', anchor) + period * n",
		tests: "TestByHandCalendarWindowsAreThoseOfTheLibrary|TestCalendarWindows",
	}, {
		name: "keys-anchor", file: overrides, what: "SQL without numbers takes every window to begin at midnight",
		old: "f.zone, f.anchor,", new: "f.zone, f.anchor::date,",
		tests: "TestByHandWithoutNumbers",
	}, {
		name: "anchor-fraction-sql", file: "migrations/engine/validate.sql", what: "SQL by hand accepts an anchor with a fraction of a second",
		old: "WHEN anchor <> date_trunc('second', anchor)", new: "WHEN false",
		tests: "TestByHandRefusesWhatIsWrong",
	}, {
		name: "anchor-years-sql", file: "migrations/engine/validate.sql", what: "SQL by hand accepts an anchor of any year",
		old: "WHEN NOT anchor BETWEEN '0001-01-01' AND", new: "WHEN NOT anchor BETWEEN '-infinity' AND",
		tests: "TestByHandRefusesWhatIsWrong",
	}, {
		name: "calendar-denial", file: consume, what: "a denial of a calendar window is decided as by a fixed window as long as the longest month",
		old: "            ELSIF windows IS NOT NULL THEN\n                denied", new: "            ELSIF false THEN\n                denied",
		tests: "TestACalendarWindowBeginsByItsZoneAndAnchor",
	}, {
		name: "calendar-update", file: consume, what: "a calendar window is refilled as a fixed window as long as the longest month",
		old: "            ELSIF windows IS NOT NULL THEN\n                UPDATE", new: "            ELSIF false THEN\n                UPDATE",
		tests: "TestACalendarWindowBeginsByItsZoneAndAnchor",
	}, {
		name: "calendar-refund-unknown", file: refund, what: "a refund counts windows that are not in the list as not begun",
		old: "WHEN latest < windows[1] OR run_at > windows[pg_catalog.cardinality(windows)] THEN '-1'", new: "WHEN false THEN '-1'",
		tests: "TestARefundByAClockThatIsYearsOffGivesNothingBack",
	}, {
		name: "calendar-promises-ahead", file: apply, what: "a promise is made for a time whose windows are unknown",
		old: "(run_at > windows[lasts[i]]) IS NOT TRUE AND", new: "",
		tests: "TestTwoLimitsWaitForACalendar",
	}, {
		name: "wait-beyond-deadline", file: apply, what: "a Wait that ends after its deadline is granted",
		old: " AND (owns[i] > at + within) IS NOT TRUE AND lefts", new: " AND lefts",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "wait-first-too-late", file: apply, what: "a Wait whose tokens arrive exactly at its deadline is denied",
		old: "(owns[i] > at + within) IS NOT TRUE", new: "(owns[i] >= at + within) IS NOT TRUE",
		tests: "TestAWaitThatEndsAtTheDeadlineIsGranted",
	}, {
		name: "reserve-no-floor", file: apply, what: "forfeited tokens may take the balance below the floor",
		old: "                        granted := granted AND (run_at > windows[lasts[i]]) IS NOT TRUE AND (owns[i] > at + within) IS NOT TRUE AND lefts[i] >= floors[i];\n                    END LOOP;\n                ELSIF", new: "                    END LOOP;\n                ELSIF",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft|TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "reserve-latest", file: balance, what: "the refill that a limit would get counts from now, although its rows were refilled later",
		old: "refills := (SELECT coalesce(min(greatest(u.t, at)), at) FROM pg_catalog.unnest(ts) AS u (t));", new: "refills := at;",
		tests: "TestModel",
	}, {
		name: "reserve-runs-in-mid-window", file: balance, what: "the window in which the work runs counts as begun already",
		old: "ratelimit._upto(run_at, period, start, windows), rate, period, 'Infinity'", new: "run_at, rate, period, 'Infinity'",
		tests: "TestModel",
	}, {
		name: "reserve-by-one-row", file: apply, what: "a reservation of a window that waited for the row forfeits nothing",
		old: "CASE WHEN shards[p] = 1 AND NOT reserve THEN floors[p] ELSE 0 END AS floor,", new: "CASE WHEN shards[p] = 1 THEN floors[p] ELSE 0 END AS floor,",
		tests: "TestAReservationThatWaitedForItsRowForfeitsToo",
	}, {
		name: "left-forfeits-nothing", file: balance, what: "by hand, retry_at is that of a reservation that forfeits nothing",
		old: "IF reserve AND start IS NOT NULL THEN", new: "IF false THEN",
		tests: "TestByHandAnswersLikeTheLibrary",
	}, {
		name: "run-at-latest", file: balance, what: "work may run at a refill that does not come before the clock catches up",
		old: "ARRAY(SELECT greatest(u.t, at) FROM", new: "ARRAY(SELECT at FROM",
		tests: "TestModel",
	},

	// ratelimit._apply and ratelimit.consume(): what is there

	{
		name: "take-above-the-most", file: apply, what: "a call takes more than its count",
		old: "taken := least(taken, mosts[i], ratelimit._", new: "taken := least(taken, ratelimit._",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "take-parts", file: apply, what: "a call takes a fraction of a token",
		old: "ratelimit._whole(totals[i], floors[i])", new: "totals[i]",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "take-tolerance", file: apply, what: "a call leaves a token that only rounding makes too small",
		old: "ratelimit._whole(totals[i], floors[i])", new: "floor(totals[i])",
		tests: "TestTakeTakesATokenThatIsThereButForRounding|TestTakeFindsWholeTokensAfterFractions",
	}, {
		name: "take-the-last-limits", file: apply, what: "all of several limits give the tokens that the last one has",
		old: "taken := least(taken, mosts[i], ", new: "taken := least(mosts[i], ",
		tests: "TestTakeTakesTheSameFromSeveralLimits",
	}, {
		name: "take-one", file: apply, what: "the full number is reported as taken, but one token is",
		old: "lefts[i] := totals[i] - taken;", new: "",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "take-garbage", file: apply, what: "the maximum may be NaN or below zero",
		old: "'1' <= ALL (mosts) AND '1e15' >= ALL (mosts) AND ", new: "",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "byhand-take-all", file: ratelimit, what: "by hand, a take takes the whole number or nothing",
		old: "CASE WHEN verb = 'take' THEN 1 ELSE count END", new: "CASE WHEN verb = 'take' THEN most ELSE count END",
		tests: "TestByHandAnswersLikeTheLibrary",
	}, {
		name: "byhand-take-one", file: ratelimit, what: "by hand, a take takes one token",
		old: "CASE WHEN verb = 'take' THEN 'take' ELSE 'consume' END", new: "'consume'",
		tests: "TestByHandAnswersLikeTheLibrary",
	}, {
		name: "byhand-take-none", file: ratelimit, what: "by hand, a take may be of 0",
		old: "(most BETWEEN '1' AND '1e15') IS NOT TRUE", new: "(most BETWEEN '0' AND '1e15') IS NOT TRUE",
		tests: "TestByHandReserveAndTakeRefuseWhatIsWrong",
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
		name: "byhand-grant-retries", file: ratelimit, what: "a grant has a time to retry",
		old: "    IF NOT granted THEN\n        retry_at := ratelimit._retry_at(", new: "    IF true THEN\n        retry_at := ratelimit._retry_at(",
		tests: "TestAReservationInSQLIsNoPermission",
	}, {
		name: "byhand-reserve-waits-not", file: ratelimit, what: "by hand, a reservation of a window that has to wait forfeits nothing",
		old: "verb = 'reserve' AND q.start IS NOT NULL", new: "false",
		tests: "TestByHandReserveOfWindows|TestByHandAnswersLikeTheLibrary",
	}, {
		name: "byhand-tolerance", file: ratelimit, what: "by hand, a call is denied because of rounding",
		old: "    lowest double precision := q.floor - ratelimit._tolerance(q.capacity, q.floor);\n", new: "    lowest double precision := q.floor;\n",
		tests: "TestRoundingNeverDeniesByHand",
	}, {
		name: "byhand-reserve-unlimited", file: ratelimit, what: "a reservation of an unlimited limit has no time to run",
		old: "ratelimit._retry_at(verb, q, NULL, NULL, at) WHEN verb = 'reserve' THEN at END;", new: "ratelimit._retry_at(verb, q, NULL, NULL, at) END;",
		tests: "TestByHandReserveAndTakeWithoutNumbers",
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
		name: "move-first-lost-race", file: lock, what: "rows that another transaction has inserted meanwhile are read without a lock",
		old: "IF m <> shards[i] THEN", new: "IF false THEN",
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
		name: "move-ts", file: move, what: "tokens are refilled for a time in which they were used, if the clock has stepped back",
		old: "count(*), greatest(max(r.ts), latest), bool_and", new: "count(*), latest, bool_and",
		tests: "TestModel",
	}, {
		name: "move-reshard", file: move, what: "a move writes to the shards that are there, however many there are to be",
		old: "IF m = shards[2] AND alike THEN", new: "IF true THEN",
		tests: "TestModel",
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
		name: "refund-unlocked-rows", file: refund, what: "rows that another transaction inserted meanwhile are written without a lock",
		old: "IF m <> locked[i] THEN", new: "IF false THEN",
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
		name: "refund-no-number", file: refund, what: "NaN and NULL are accepted",
		old: "latest >= taken_at) IS NOT TRUE THEN", new: "latest >= taken_at) IS NULL AND false THEN",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-null", file: refund, what: "NULL is accepted",
		old: "latest >= taken_at) IS NOT TRUE THEN", new: "latest >= taken_at) IS FALSE THEN",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-nan", file: refund, what: "NaN is accepted",
		old: "+ abs(held) + part < 'Infinity'", new: "+ abs(held) + part > '-Infinity'",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-below-zero", file: refund, what: "a rate below zero is accepted",
		old: "least(count, rate, capacity, taken, part) >= '0'", new: "least(count, capacity, taken, part) >= '0'",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-of-no-period", file: refund, what: "a period below zero is accepted",
		old: "(period > '0' OR period = '0' AND windows IS NOT NULL AND NOT EXISTS (", new: "(true OR NOT EXISTS (",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-at-no-instant", file: refund, what: "an infinite instant is accepted",
		old: "AND isfinite(taken_at) AND isfinite(run_at) AND isfinite(at) AND", new: "AND taken_at IS NOT NULL AND run_at IS NOT NULL AND",
		tests: "TestTheRefundFunctionMintsNothing",
	}, {
		name: "refund-refilled", file: refund, what: "a bucket gets back tokens that were refilled since",
		old: "back := missing - date_part('epoch', latest - taken_at) * rate / date_part('epoch', period);", new: "back := missing;",
		tests: "TestRefundToATokenBucketGivesBackWhatIsStillMissing",
	}, {
		name: "refund-time-backwards", file: refund, what: "rows from before a consumption get its refund",
		old: " AND latest >= taken_at", new: "",
		tests: "TestRefundAfterTheClockSteppedBackNeverMints",
	}, {
		name: "refund-held", file: refund, what: "a bucket gets back tokens that it did not miss",
		old: "capacity * part - held;", new: "capacity * part;",
		tests: "TestRefundToATokenBucketGivesBackWhatIsStillMissing",
	}, {
		name: "refund-part", file: refund, what: "a shard gets back the tokens that the whole limit would miss",
		old: "capacity * part - held;", new: "capacity - held;",
		tests: "TestARefundIsDecidedInGoAsInSQL",
	}, {
		name: "refund-part-refilled", file: refund, what: "missing tokens of one shard are refilled at its rate alone, although the balance is spread over all",
		old: "latest - taken_at) * rate / ", new: "latest - taken_at) * (rate * part) / ",
		tests: "TestModel",
	}, {
		name: "refund-debt", file: refund, what: "a refund pays the debt of waiting work, and lets the next work run before it",
		old: "greatest(back - owed, '0')", new: "greatest(back, '0')",
		tests: "TestARefundBehindWaitingReservationsKeepsTheirInstants",
	}, {
		name: "refund-above-count", file: refund, what: "a bucket gets back everything that is missing",
		old: "back := least(greatest(back - owed, '0'), count);", new: "back := least(greatest(back - owed, '0'), capacity - total);",
		tests: "TestRefundToATokenBucketGivesBackWhatIsStillMissing",
	}, {
		name: "refund-above-capacity", file: refund, what: "a job of more than the capacity is refunded, although it has no promise",
		old: "WHEN capacity - taken < -ratelimit._tolerance(capacity, 0) OR wait", new: "WHEN wait",
		tests: "TestModel",
	}, {
		name: "refund-charges", file: refund, what: "the debt of a charge swallows what others give back",
		old: "waiting := coalesce(promised > at, false);", new: "waiting := true;",
		tests: "TestARefundIsDecidedInGoAsInSQL|TestHoldsInEveryOrder",
	}, {
		name: "promise-consume", file: consume, what: "a reservation of a bucket alone is taken for a charge",
		old: "IF value < '0' AND floor > '-Infinity' THEN", new: "IF false THEN",
		tests: "TestARefundBehindWaitingReservationsKeepsTheirInstants|TestModel",
	}, {
		name: "promise-apply", file: apply, what: "a reservation of a window is taken for a charge",
		old: "WHEN run_at > at THEN run_at END;", new: "END;",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft|TestModel",
	}, {
		name: "refund-late", file: refund, what: "a later window gets a refund",
		old: "0) OR wait < '0' THEN 0", new: "0) THEN 0",
		tests: "TestRefundToAFixedWindowBelongsToTheWindowInWhichTheWorkRuns",
	}, {
		name: "refund-behind-others", file: refund, what: "a window gets a refund although other work waits behind it",
		old: "            WHEN (wait > '0' OR waiting) AND total + wait * rate < owing THEN 0\n", new: "",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft",
	}, {
		name: "refund-not-the-last", file: refund, what: "a window gets a refund although its debt ends before",
		old: "            WHEN wait > '0' AND total + (wait - '1') * rate >= owing THEN 0\n", new: "",
		tests: "TestARefundIsDecidedInGoAsInSQL",
	}, {
		name: "refund-saved-up", file: refund, what: "a refund to a window that saves up makes its debt end before it",
		old: "            WHEN wait > '0' AND capacity > rate AND total + count + (wait - '1') * rate >= owing THEN 0\n", new: "",
		tests: "TestARefundToAWindowThatSavesUpMovesNoDebtToAnEarlierWindow",
	}, {
		name: "refund-saved-up-always", file: refund, what: "a window that saves nothing up is also refunded only if no debt moves",
		old: "WHEN wait > '0' AND capacity > rate AND total", new: "WHEN wait > '0' AND total",
		tests: "TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft",
	}, {
		name: "refund-tolerance", file: refund, what: "a window owes what was lost by rounding",
		old: "owing := ratelimit._even(total, rate, capacity);", new: "owing := 0;",
		tests: "TestWhatRoundingTakesIsNoDebt|TestRoundingNeverDenies",
	}, {
		name: "refund-windows-rounded-down", file: refund, what: "a quotient of doubles is rounded down to too few windows",
		old: "ELSE round(date_part", new: "ELSE floor(date_part",
		tests: "TestARefundCountsWholeWindows",
	}, {
		name: "refund-unclamped", file: refund, what: "a refund leaves more than the capacity in the row, which shows when the capacity is raised",
		old: "count := greatest(least(count, capacity - total), '0');", new: "count := greatest(count, '0');",
		tests: "TestModel",
	}, {
		name: "refund-ts-back", file: refund, what: "ts moves back with the clock",
		old: "ts = greatest(r.ts, at)\n", new: "ts = at\n",
		tests: "TestRefundAfterTheClockSteppedBackNeverMints|TestModel",
	},

	// ratelimit._consume_sharded

	{
		name: "sharded-owes", file: consumeSharded, what: "each shard may owe as much as all shards together",
		old: "AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count >= '0'", new: "AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count >= floor",
		tests: "TestReservationsAreSharedByAllShards",
	}, {
		name: "sharded-rate", file: consumeSharded, what: "each shard is refilled at the whole rate",
		old: "each := rate / shards::double precision;", new: "each := rate;",
		tests: "TestModel",
	}, {
		name: "sharded-other-number", file: consumeSharded, what: "a row with another number of shards is taken from",
		old:   "AND r.shard = pick AND r.shards = shards AND (r.lapses <= at) IS NOT TRUE\n               AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL)",
		new:   "AND r.shard = pick\n               AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL)",
		tests: "TestChangingTheNumberOfShardsNeitherMintsNorForgets|TestTwoVersionsWithDifferentShardsAtOnceAreExact",
	}, {
		name: "sharded-reads-two", file: consumeSharded, what: "in SERIALIZABLE, the other shard is read, too, and conflicts with transactions that take from it",
		old: "IF shard_a <> shard_b AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN", new: "IF shard_a <> shard_b THEN",
		tests: "TestAboveReadCommittedDifferentShardsDoNotConflict",
	}, {
		name: "sharded-trusts", file: consumeSharded, what: "invalid numbers pass the check",
		old: "    IF (ratelimit._valid(rate, period, capacity, count, now) AND floor <= '0') IS NOT TRUE THEN\n", new: "    IF (floor <= '0') IS NOT TRUE THEN\n",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "sharded-no-floor", file: consumeSharded, what: "a floor of NULL is granted, since one shard leaves at least 0",
		old: "count, now) AND floor <= '0') IS NOT TRUE", new: "count, now)) IS NOT TRUE",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "sharded-keeps-a-lost-lock", file: consumeSharded, what: "a locked shard that has too little stays locked while all are locked",
		old:   "        IF new_value IS NULL THEN\n            RAISE SQLSTATE 'RL001';\n        END IF;\n        RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts], NULL)::ratelimit._decisions;\n",
		new:   "        IF new_value IS NOT NULL THEN\n            RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts], NULL)::ratelimit._decisions;\n        END IF;\n",
		tests: "TestAShardThatIsFoundWantingIsNotHeld",
	},

	// ratelimit._consume_several

	{
		name: "several-keeps", file: consumeSeveral, what: "tokens taken before a lost race are not given back",
		old: "SET value = r.value + counts[taken]", new: "SET value = r.value",
		tests: "TestACallThatLosesARaceGivesBackWhatItTook",
	}, {
		name: "several-gives-back-too-much", file: consumeSeveral, what: "tokens that were not taken are given back, too",
		old: "FOR taken IN 1..p - 1 LOOP", new: "FOR taken IN 1..p LOOP",
		tests: "TestACallThatLosesARaceGivesBackWhatItTook",
	}, {
		name: "several-order", file: consumeSeveral, what: "limits are locked in the order of the arguments, whatever that is",
		old: "EXIT passes WHEN (FOUND AND (names[p - 1] COLLATE \"C\", keys[p - 1] COLLATE \"C\") < (name, key)) IS NOT TRUE;", new: "EXIT passes WHEN NOT FOUND;",
		tests: "TestWhoWaitsHoldsNothingThatComesLater",
	}, {
		name: "several-trusts", file: consumeSeveral, what: "invalid numbers pass the check",
		old: "            IF ratelimit._valid(rate, period, capacity, count, now) IS NOT TRUE THEN\n", new: "            IF false THEN\n",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "several-denial-writes", file: consumeSeveral, what: "a denial takes tokens and gives them back",
		old: "                EXIT passes WHEN new_value - count < floor;\n", new: "",
		tests: "TestNothingIsWrittenOnDenial",
	}, {
		name: "several-ts-back", file: consumeSeveral, what: "a bucket's ts moves back with the clock",
		old: "period, capacity, NULL) - count,\n                       ts = greatest(r.ts, at)\n", new: "period, capacity, NULL) - count,\n                       ts = at\n",
		tests: "TestModel",
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
	}, {
		name: "reset-no-trace", file: reset, what: "a reset with a reason or an author leaves no trace",
		old: "        IF deleted > 0 THEN\n            PERFORM ratelimit._note_reset", new: "        IF false THEN\n            PERFORM ratelimit._note_reset",
		tests: "TestAResetLeavesATrace",
	}, {
		name: "reset-trace-polled", file: "migrations/engine/overrides.sql", what: "programs read the trace of a reset as an override",
		old: "WHERE c.id > after AND c.effect NOT IN ('reset', 'release')", new: "WHERE c.id > after",
		tests: "TestAResetLeavesATrace",
	}, {
		name: "keys-broken-row", file: keysSQL, what: "a row of an infinite time ends the list of all keys",
		old: "s.effect = 'numbers' AND NOT coalesce(broken, false) THEN", new: "s.effect = 'numbers' THEN",
		tests: "TestARowWithAnInfiniteTime",
	},

	// ratelimit._consume_keys

	{
		name: "keys-plan", file: consumeKeys, what: "a plan may read rows before it has a key for them",
		old: "r.name = ANY (ARRAY[CASE WHEN i > 0 THEN name END])", new: "r.name = name",
		tests: "TestEveryStatementReadsLittle",
	}, {
		name: "keys-plan-shard", file: consumeKeys, what: "a plan may read rows by the shard before it has a key for them",
		old: "r.shard = 0 * i", new: "r.shard = 0",
		tests: "TestEveryStatementReadsLittle",
	}, {
		name: "keys-clock-read-once", file: consumeKeys, what: "the clock is not read again after the UPDATE has waited",
		old: "at := coalesce(now, clock_timestamp()); -- the UPDATE may have waited", new: "at := seen;",
		tests: "TestCoalescerReadsTheClockAfterWaiting",
	}, {
		name: "keys-any-level", file: consumeKeys, what: "keys are decided on a snapshot that misses committed rows",
		old: "    IF coalesced AND current_setting('transaction_isolation') <> 'read committed' THEN\n        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: coalesced calls need a READ COMMITTED transaction';\n    END IF;\n", new: "",
		tests: "TestCoalescedCallsAreDecidedInReadCommittedAlone",
	}, {
		name: "calendar-merged-short", file: "migrations/engine/consume.sql", what: "rows of several shards are merged by a list that does not reach back to them",
		old: "IF period = '0' AND EXISTS", new: "IF false AND EXISTS",
		tests: "TestAnOldDebtOfACalendarIsMergedWhole",
	}, {
		name: "each-any-level", file: consumeKeys, what: "ConsumeEach is refused above READ COMMITTED",
		old: "IF coalesced AND current_setting('transaction_isolation') <>", new: "IF current_setting('transaction_isolation') <>",
		tests: "TestEachUnderContention",
	}, {
		name: "each-floor", file: "migrations/engine/each.sql", what: "rounding denies one of several keys",
		old: "now, floors[g], false)", new: "now, 0, false)",
		tests: "TestEachForgivesRounding",
	}, {
		name: "each-undecided", file: "migrations/engine/each.sql", what: "keys that the UPDATE leaves undecided have no answer",
		old: "IF pg_catalog.cardinality(run.ord) <> m THEN", new: "IF false THEN",
		tests: "TestEachDecidesAnewWhatTheUpdateLeft",
	}, {
		name: "each-order", file: "migrations/engine/each.sql", what: "requests are decided in any order",
		old: "keys[first - 1] COLLATE \"C\") <= (names[g], keys[first]))", new: "keys[first - 1] COLLATE \"C\") <= (names[g], keys[first]) OR true)",
		tests: "TestEachIsInOrder",
	}, {
		name: "each-group-order", file: "migrations/engine/each.sql", what: "the keys of a group are locked in any order",
		old: "WHERE u.k IS NOT NULL ORDER BY k)))", new: "WHERE u.k IS NOT NULL ORDER BY k) OR true))",
		tests: "TestEachIsInOrder",
	}, {
		name: "each-one-capacity", file: "ratelimit/each.go", what: "a key with other numbers is decided by those of the key before",
		old: "		a.numbers == b.numbers && a.lowest()", new: "		a.numbers.Rate == b.numbers.Rate && a.lowest()",
		tests: "TestEachWithOtherNumbers",
	}, {
		name: "each-too-much-unasked", file: "ratelimit/each.go", what: "a count that an override forbids is granted",
		old: "conclude(place, &c, func(r *Result) { c.fill(r, &answers[i]) })", new: "c.demands[0].tooMuch = false\n\t\tconclude(place, &c, func(r *Result) { c.fill(r, &answers[i]) })",
		tests: "TestEachAgreesWithConsume",
	}, {
		name: "keys-last-token", file: consumeKeys, what: "the last token is not granted at once (>= to >)",
		old: "NULL) - counts[i] >= floor", new: "NULL) - counts[i] > floor",
		tests: "TestConsumeKeysDecidesEachKeyByItself",
	}, {
		name: "keys-saved", file: consumeKeys, what: "a row from a time of a larger capacity gives more than the present capacity",
		old: "least(r.value, capacity) >= counts[i]", new: "r.value >= counts[i]",
		tests: "TestConsumeKeysDecidesEachKeyByItself",
	}, {
		name: "keys-ts-back", file: consumeKeys, what: "ts moves back with the clock",
		old: "ts = greatest(r.ts, seen)", new: "ts = seen",
		tests: "TestConsumeKeysDecidesEachKeyByItself",
	}, {
		name: "keys-sharded", file: consumeKeys, what: "one shard of a limit that was sharded is used as the whole limit",
		old: "r.shard = 0 * i AND r.shards = 1 + 0 * i", new: "r.shard = 0 * i",
		tests: "TestCoalescerShardedRows",
	}, {
		name: "keys-sharded-denied", file: consumeKeys, what: "if one shard of a limit that was sharded has too little, all keys are denied",
		old: "AND r.shard = 0 AND r.shards = 1 OFFSET 0", new: "AND r.shard = 0 OFFSET 0",
		tests: "TestCoalescerShardedRows",
	}, {
		name: "keys-unchecked", file: consumeKeys, what: "invalid numbers are granted",
		old: "capacity, 0, now) AND '0' <= ALL (counts) AND '1e15' >= ALL (counts) AND floor <= '0') IS NOT TRUE", new: "capacity, 0, now)) IS NOT TRUE",
		tests: "TestConsumeKeysRefusesHostileArguments|TestNoGarbageIsGrantedOrStored",
	}, {
		name: "keys-trusts", file: consumeKeys, what: "invalid numbers pass the check",
		old: "    IF (ratelimit._valid(rate, period, capacity, 0, now) AND '0'", new: "    IF ('0'",
		tests: "TestNoGarbageIsGrantedOrStored",
	},

	// ratelimit._coalesce

	{
		name: "coalesce-no-compare", file: coalesce, what: "rows are written although they have changed since they were read",
		old: "AND r.value = s.value AND r.ts = s.ts AND s.n > '0'", new: "AND s.n > '0'",
		tests: "TestCoalescerDecidesAnewOnWhatItWaitedFor",
	}, {
		name: "coalesce-compares-value", file: coalesce, what: "only the values are compared, which may be equal at another time",
		old: "AND r.value = s.value AND r.ts = s.ts AND s.n > '0'", new: "AND r.value = s.value AND s.n > '0'",
		tests: "TestCoalescerDecidesAnewOnWhatItWaitedFor",
	}, {
		name: "coalesce-compares-ts", file: coalesce, what: "only the times are compared, which in a window may be equal",
		old: "AND r.value = s.value AND r.ts = s.ts AND s.n > '0'", new: "AND r.ts = s.ts AND s.n > '0'",
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
		name: "coalesce-rates", file: coalesce, what: "a rate of NaN fills a bucket",
		old: "AND '0' <= ALL (rates) AND '1e15' >= ALL (rates) AND", new: "AND",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "coalesce-counts", file: coalesce, what: "NaN tokens are granted",
		old: "        AND '0' <= ALL (counts) AND '1e15' >= ALL (counts) AND '0' >= ALL (floors)\n", new: "        AND '0' >= ALL (floors)\n",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "coalesce-floors", file: coalesce, what: "a floor of NULL, which allows any balance, is granted",
		old: "'1e15' >= ALL (counts) AND '0' >= ALL (floors)\n", new: "'1e15' >= ALL (counts)\n",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "coalesce-ask-counts", file: coalesce, what: "for keys with different requests, NaN tokens are granted",
		old: "        AND '0' <= ALL (ask_counts) AND '1e15' >= ALL (ask_counts) AND", new: "        AND",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "coalesce-periods", file: coalesce, what: "a period of NULL fills a bucket",
		old: " AND '0' <= ALL (periods) AND '106752 days' > ALL (periods)\n", new: "\n",
		tests: "TestNoGarbageIsGrantedOrStored",
	}, {
		name: "coalesce-any-level", file: coalesce, what: "batches are decided on a snapshot that misses committed rows",
		old: "    IF current_setting('transaction_isolation') <> 'read committed' THEN\n        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: coalesced calls need a READ COMMITTED transaction';\n    END IF;\n", new: "",
		tests: "TestCoalescedCallsAreDecidedInReadCommittedAlone",
	}, {
		name: "coalesce-last-token", file: coalesce, what: "the last token is not granted (< to <=)",
		old: "WHEN b.available - b.count < b.floor THEN 0", new: "WHEN b.available - b.count <= b.floor THEN 0",
		tests: "TestCoalescerIsExact",
	}, {
		name: "coalesce-ts-back", file: coalesce, what: "ts moves back with the clock",
		old: "ts = greatest(s.ts, at)", new: "ts = at",
		tests: "TestCoalescerIsExact",
	}, {
		name: "coalesce-not-all", file: coalesce, what: "a call for several limits is granted if the last limit grants",
		old: "granted := granted AND available[last] - ask_counts[last] >= ask_floors[last];", new: "granted := available[last] - ask_counts[last] >= ask_floors[last];",
		tests: "TestCoalescerIsExact",
	}, {
		name: "coalesce-sharded", file: coalesce, what: "one shard of a limit that was sharded is used as the whole limit",
		old: "        IF misfit THEN\n", new: "        IF false THEN\n",
		tests: "TestCoalescerShardedRows",
	}, {
		name: "coalesce-denial-writes", file: coalesce, what: "rows of denied calls are written",
		old: "AND r.ts = s.ts AND s.n > '0'", new: "AND r.ts = s.ts AND s.n >= '0'",
		tests: "TestCoalescerDenialsWriteNothing",
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
		name: "several-calendar", file: consumeSeveral, what: "a calendar window is refilled as a fixed window as long as the longest month",
		old: "                listed := windows[firsts[p]:lasts[p]];\n", new: "",
		tests: "TestACalendarWindowDoesWhatAFixedWindowDoes",
	}, {
		name: "several-calendar-passed-on", file: consumeSeveral, what: "where the first row is missing or has too little, a calendar window counts as a fixed window",
		old: "        windows, firsts, lasts);\n", new: "        NULL, NULL, NULL);\n",
		tests: "TestACalendarWindowDoesWhatAFixedWindowDoes",
	}, {
		name: "coalesce-calendar", file: coalesce, what: "a calendar window that calls ask for alone counts as a fixed window",
		old: "CASE WHEN firsts[defs[i]] > 0 THEN windows[firsts[defs[i]]:lasts[defs[i]]] END AS windows", new: "NULL::timestamptz[] AS windows",
		tests: "TestACoalescerDecidesCalendars",
	}, {
		name: "coalesce-calendar-upto", file: coalesce, what: "a calendar's refills count up to the start of a window of the longest month",
		old: "CASE WHEN starts[i] IS NULL OR firsts[defs[i]] > 0 THEN at", new: "CASE WHEN starts[i] IS NULL THEN at",
		tests: "TestACoalescerDecidesCalendars|TestCoalescerIsExact",
	}, {
		name: "coalesce-calendar-asks", file: coalesce, what: "a calendar window in a call for several limits counts as a fixed window",
		old: "                IF windows IS NOT NULL THEN\n", new: "                IF false THEN\n",
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
		name: "raise-one-answers", file: consume, what: "a denial of one limit is returned where it should stop the batch",
		old: "                IF or_raise THEN\n", new: "                IF false THEN\n",
		tests: "TestADenialStopsABatchWhereverItStands",
	}, {
		name: "raise-several-answers", file: apply, what: "a denial of several limits, or of a sharded one, is returned where it should stop the batch",
		old: "IF or_raise AND NOT granted THEN", new: "IF false THEN",
		tests: "TestADenialStopsABatchWhereverItStands",
	}, {
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
		name: "byhand-empty-key", file: "migrations/engine/validate.sql", what: "an empty key is the key of a global limit",
		old: "WHEN key IS NULL OR key = '' THEN", new: "WHEN key IS NULL THEN",
		tests: "TestByHandRefusesWhatIsWrong",
	}, {
		name: "byhand-raises-nothing", file: ratelimit, what: "ratelimit lets a denial pass",
		old: "IF NOT granted AND verb <> 'try' THEN", new: "IF NOT granted AND verb NOT IN ('try', 'consume') THEN",
		tests: "TestADenialInSQLThatNobodyLooksAt|TestByHandADenialIsAnError",
	}, {
		name: "byhand-try-raises", file: ratelimit, what: "ratelimit.try raises a denial",
		old: "IF NOT granted AND verb <> 'try' THEN", new: "IF NOT granted THEN",
		tests: "TestByHandDefaults",
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
		name: "all-policy", file: ratelimit, what: "ratelimit.consume_all takes tokens of the others although one key is blocked",
		old: "        policy := policy AND (q.effect IN ('unlimited', 'numbers') OR q.effect = 'block' AND q.count = '0');\n", new: "",
		tests: "TestRatelimitAllMindsOverrides",
	}, {
		name: "all-policy-takes", file: ratelimit, what: "ratelimit.consume_all locks rows before it denies by policy",
		old: "CASE WHEN policy THEN 'consume' ELSE 'check' END", new: "'consume'",
		tests: "TestADenialByPolicyLocksNothing",
	}, {
		name: "all-policy-only", file: ratelimit, what: "a denial by policy does not name the keys that are empty",
		old: "    IF pg_catalog.cardinality(names) > 0 THEN -- if it", new: "    IF policy AND pg_catalog.cardinality(names) > 0 THEN -- if it",
		tests: "TestRatelimitAllMindsOverrides",
	}, {
		name: "all-first-wait", file: ratelimit, what: "a denial of ratelimit.consume_all says when the first of the limits has enough",
		old: "IF waits IS NULL OR coalesce(said.retry_at, 'infinity') > waits THEN", new: "IF waits IS NULL THEN",
		tests: "TestRatelimitAllAnswersLikeConsume",
	}, {
		name: "all-names", file: ratelimit, what: "a denial of ratelimit.consume_all names limits that have enough",
		old: "IF coalesce(said.retry_at, 'infinity') > at AND", new: "IF",
		tests: "TestRatelimitAllAnswersLikeConsume",
	}, {
		name: "all-windows", file: ratelimit, what: "the second calendar of a list has the windows of the first",
		old: "coalesce(pg_catalog.cardinality(windows), 0) + 1 END", new: "1 END",
		tests: "TestRatelimitAllAnswersLikeConsume",
	}, {
		name: "all-null", file: ratelimit, what: "ratelimit.consume_all takes a null for a default",
		old: "     WHERE f.expected IS DISTINCT FROM f.type\n", new: "     WHERE f.expected IS DISTINCT FROM f.type AND (f.type <> 'null' OR f.expected IS NULL)\n",
		tests: "TestRatelimitAllRefusesWhatIsWrong",
	}, {
		name: "all-unknown", file: ratelimit, what: "ratelimit.consume_all ignores fields that it does not know",
		old: "     WHERE f.expected IS DISTINCT FROM f.type\n", new: "     WHERE f.expected <> f.type\n",
		tests: "TestRatelimitAllRefusesWhatIsWrong",
	}, {
		name: "all-shares-shards", file: ratelimit, what: "ratelimit.consume_all rounds a number of shards",
		old: "AND shards = trunc(shards)", new: "",
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
		name: "sweep-some-shards", file: sweep, what: "shards are deleted although others of their key are in use",
		old: "        HAVING count(*) = min(l.shards) AND count(*) = max(l.shards)\n", new: "",
		tests: "TestASweepLeavesWhatIsLocked|TestASweepOfLimitsThatChangeAndAreSharded",
	}, {
		name: "sweep-early", file: sweep, what: "rows are deleted as soon as they are full: a clock that steps back misses them",
		old: "coalesce(now, clock_timestamp()) - interval '1 hour'", new: "coalesce(now, clock_timestamp())",
		tests: "TestASweepDeletesWhatSaysNothing",
	}, {
		name: "sweep-not-full", file: sweep, what: "rows that are nearly full are deleted",
		old: "start) = capacity / shards::double precision)\n    AND", new: "start) >= '0.9' * capacity / shards::double precision)\n    AND",
		tests: "TestASweepDeletesWhatSaysNothing|TestASweepChangesNoDecision",
	}, {
		name: "sweep-future", file: sweep, what: "a full row whose ts lies ahead is deleted",
		old: "RETURN CASE WHEN isfinite(ts) AND ts <= ratelimit._upto(at, period, start) AND shards", new: "RETURN CASE WHEN isfinite(ts) AND shards",
		tests: "TestASweepDeletesWhatSaysNothing|TestASweepChangesNoDecision",
	}, {
		name: "sweep-any-level", file: sweep, what: "a sweep deletes on a snapshot older than its locks",
		old: "-- k\nBEGIN\n    IF current_setting('transaction_isolation') <> 'read committed' THEN", new: "-- k\nBEGIN\n    IF false THEN",
		tests: "TestTheSweepFunctionRefusesWhatIsWrong|TestWhereASweepWorks",
	}, {
		name: "byhand-policy", file: ratelimit, what: "a rate of 0 is sent to the engine",
		old: "IF wrong IS NULL AND effect = 'numbers' AND rate = '0' THEN", new: "IF false THEN",
		tests: "TestByHandARateOfZeroDeniesByPolicy",
	}, {
		name: "byhand-policy-nothing", file: ratelimit, what: "0 tokens of a rate of 0 are denied",
		old: "granted := q.effect = 'unlimited' OR q.count = '0';", new: "granted := q.effect = 'unlimited';",
		tests: "TestByHandARateOfZeroDeniesByPolicy",
	}, {
		name: "byhand-policy-capacity", file: "migrations/engine/validate.sql", what: "a rate of 0 may have a capacity",
		old: "rate = '0' AND (capacity > '0' OR max_reserved > '0')", new: "rate = '0' AND max_reserved > '0'",
		tests: "TestByHandRefusesWhatIsWrong",
	}, {
		name: "byhand-policy-hint", file: ratelimit, what: "the hint of a denial by policy is to retry in no seconds",
		old: "CASE WHEN retry_at IS NULL THEN", new: "CASE WHEN false THEN",
		tests: "TestByHandARateOfZeroDeniesByPolicy",
	}, {
		name: "tolerance-none", file: available, what: "a call is denied because of rounding",
		old: "RETURN least((capacity - lowest) * '1e-9', '1e-3');", new: "RETURN '0'::double precision;",
		tests: "TestTheToleranceIsOneNumber",
	}, {
		name: "tolerance-a-token", file: available, what: "SQL grants a whole token that is not there, of a large limit",
		old: "RETURN least((capacity - lowest) * '1e-9', '1e-3');", new: "RETURN (capacity - lowest) * '1e-9';",
		tests: "TestTheToleranceIsOneNumber",
	}, {
		name: "whole-rounded-up", file: available, what: "a whole number that only the rounding of a difference makes is taken",
		old: "- CASE WHEN total - floor(total - lowest) < lowest THEN '1'::double precision ELSE 0 END", new: "",
		tests: "TestSQLTakesNoWholeNumberThatRoundingMakes",
	}, {
		name: "shown-debt", file: available, what: "a debt that only rounding makes is shown",
		old: "WHEN total >= ratelimit._even(total, rate, capacity) THEN 0", new: "WHEN false THEN 0",
		tests: "TestTheToleranceIsOneNumber",
	}, {
		name: "shown-rest", file: available, what: "less than the smallest count is shown",
		old: "WHEN total >= '1e-15' THEN greatest", new: "WHEN total > '0' THEN greatest",
		tests: "TestTheToleranceIsOneNumber",
	}, {
		name: "repaid-rounding", file: balance, what: "work waits for another window because of rounding",
		old: "    ratelimit._even(ratelimit._total(value, ts, at, rate, period, capacity, start, windows), rate, capacity) END, false, windows);", new: "    '0' END, false, windows);",
		tests: "TestRoundingNeverDeniesByHand",
	}, {
		name: "keys-shown", file: keysSQL, what: "a listed key owes what was lost by rounding",
		old: "remaining := ratelimit._shown(total, s.rate, s.capacity);", new: "remaining := total;",
		tests: "TestRoundingNeverDeniesByHand",
	}, {
		name: "coalesce-rounding", file: coalesce, what: "the last of several calls in a statement is denied because of rounding",
		old: "ELSE least(b.repeats, floor((b.available - b.floor) / b.count)) END AS n", new: "ELSE least(b.repeats, floor(b.available / b.count)) END AS n",
		tests: "TestRoundingNeverDeniesInABatch",
	}, {
		name: "byhand-rest", file: ratelimit, what: "by hand, what rounding leaves of a difference is no valid count",
		old: "IF abs(count) < '1e-15' THEN", new: "IF false THEN",
		tests: "TestARestBelowTheSmallestCountIsNothingByHand",
	},
}
