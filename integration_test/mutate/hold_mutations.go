package main

const (
	holds      = "migrations/engine/holds.sql"
	byHand     = "migrations/engine/holds_by_hand.sql"
	holdGo     = "ratelimit/hold.go"
	plainHolds = "internal/dbsqlc/ratelimit.sql.go"
	during     = "ratelimit/during.go"
	renew      = "ratelimit/during_renew.go"
	slotsGo    = "ratelimit/limit_slots.go"
	whoHolds   = "internal/keystate/holds.go"
	holdsTool  = "cmd/txlimit/holds.go"
	holdsPage  = "ratelimit/console/actions.go"
)

var holdMutations = []mutation{
	// Many ids, and the recount
	{
		name: "hold-many-met", file: byHand, what: "an id that somebody holds, or whose work is done, is taken as if it was free",
		old: "            IF rec.state = 'held' OR rec.state = 'settled' AND rec.until > at THEN", new: "            IF false THEN",
		tests: "TestHoldMany",
	}, {
		name: "slots-above-many", file: byHand, what: "tokens in a row of slots are slots that many ids take",
		old: "(met);\n    SELECT least(r.value, '0') INTO v FROM", new: "(met);\n    SELECT r.value INTO v FROM",
		tests: "TestSlotsOfARowAboveZero",
	}, {
		name: "slots-above-many-again", file: byHand, what: "once expired holds were given back, tokens in a row of slots are slots",
		old: "0, NULL, NULL, NULL);\n        SELECT least(r.value, '0') INTO v FROM", new: "0, NULL, NULL, NULL);\n        SELECT r.value INTO v FROM",
		tests: "TestSlotsOfARowAboveZero",
	}, {
		name: "slots-above-many-kept", file: byHand, what: "tokens stay in the row of slots that many ids take",
		old: "SET value = least(r.value, '0') - n::double precision, ts", new: "SET value = r.value - n::double precision, ts",
		tests: "TestSlotsOfARowAboveZero",
	}, {
		name: "slots-above-denied", file: byHand, what: "a denial shows tokens in a row of slots as slots",
		old: "SELECT least(h.value[1], '0') - q.floor AS remaining,", new: "SELECT coalesce(h.value[1], '0') - q.floor AS remaining,",
		tests: "TestSlotsOfARowAboveZero",
	}, {
		name: "slots-above-free-at", file: holds, what: "a denial says that there are slots now, since its row has tokens",
		old: "coalesce((SELECT least(r.value, '0') FROM", new: "coalesce((SELECT r.value FROM",
		tests: "TestSlotsOfARowAboveZero",
	}, {
		name: "slots-above-used", file: "migrations/engine/keys.sql", what: "tokens in a row of slots are shown as slots",
		old: "least(coalesce(value[1], '0'), '0')", new: "coalesce(value[1], '0')",
		tests: "TestSlotsOfARowAboveZero",
	}, {
		name: "hold-many-repeated", file: byHand, what: "an id that is held without an end takes a second slot",
		old: "            CONTINUE WHEN rec.state = 'held' AND rec.until = 'infinity';\n", new: "",
		tests: "TestHoldMany",
	}, {
		name: "hold-many-expired", file: byHand, what: "slots of expired holds are not taken",
		old: "    IF pg_catalog.cardinality(met) > 0 OR v - n::double precision < q.floor THEN\n", new: "    IF pg_catalog.cardinality(met) > 0 THEN\n",
		tests: "TestHoldMany",
	}, {
		name: "hold-many-known", file: byHand, what: "ids that are known are not looked at while there are slots",
		old: "    IF pg_catalog.cardinality(met) > 0 OR v - n::double precision < q.floor THEN\n", new: "    IF v - n::double precision < q.floor THEN\n",
		tests: "TestHoldMany",
	}, {
		name: "hold-many-expired-once", file: byHand, what: "slots of 1000 expired holds are free, and no more, and a denial takes them back",
		old: "own, 0, '1 second', 0, NULL, NULL, NULL);", new: "own, 0, '1 second', 0, NULL, NULL, NULL, 1000);",
		tests: "TestHoldManyOfExpired",
	}, {
		name: "hold-many-unbounded", file: byHand, what: "more is taken than there is",
		old: "    IF v - n::double precision < q.floor THEN\n        IF n::", new: "    IF false THEN\n        IF n::",
		tests: "TestHoldMany|TestSlotsOfATable",
	}, {
		name: "hold-many-block", file: byHand, what: "a block does not deny many",
		old: "    IF q.effect = 'block' THEN\n        at := clock_timestamp();", new: "    IF false THEN\n        at := clock_timestamp();",
		tests: "TestHoldMany",
	}, {
		name: "release-many-snapshot", file: byHand, what: "holds that are newer than the snapshot are none",
		old: "       OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN -- there, holds", new: "       THEN -- there, holds",
		tests: "TestHoldManyAboveReadCommitted",
	}, {
		name: "release-many-ends", file: byHand, what: "a hold with an end is passed over in silence",
		old: "        IF rec.token IS NOT NULL OR rec.unit <> 'slots' THEN", new: "        IF false THEN",
		tests: "TestHoldMany|TestHoldManyRefuses",
	}, {
		name: "held-plan", file: "migrations/engine/holds.sql", what: "a hold is looked for among all that are held of its key",
		old: "(name, key, token, id)\n    WHERE", new: "(name, key)\n    WHERE",
		tests: "TestEveryStatementReadsLittle",
	}, {
		name: "recount-none", file: byHand, what: "a recount counts nothing",
		old: "SET value = '0'::double precision - used, ts", new: "SET value = r.value, ts",
		tests: "TestSlotsOfATable",
	}, {
		name: "hold-sweep-recounted", file: sweep, what: "a sweep ends a hold that a recount has counted meanwhile, and its slot stays in use",
		old: "            EXIT WHEN EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key);\n", new: "",
		tests: "TestASweepBesideARecount",
	}, {
		name: "release-recounted", file: holds, what: "a release ends a hold that a recount has counted meanwhile, and its slot stays in use",
		old: "IF states[i] = 'held' AND rec.unit = 'slots' AND m > 0 THEN", new: "IF false THEN",
		tests: "TestAReleaseBesideARecount",
	}, {
		name: "release-recounted-tokens", file: holds, what: "a release of tokens fails beside the first Consume of the key",
		old: "IF states[i] = 'held' AND rec.unit = 'slots' AND m > 0 THEN", new: "IF states[i] = 'held' AND m > 0 THEN",
		tests: "TestAReleaseBesideAConsume",
	}, {
		name: "recount-unwritten", file: byHand, what: "above READ COMMITTED, a release ends a hold that a recount has counted meanwhile, and its slot stays in use",
		old:   "        UPDATE ratelimit.holds AS h SET count = h.count\n         WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots'\n        RETURNING h.count\n",
		new:   "        SELECT h.count FROM ratelimit.holds AS h\n         WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots'\n",
		tests: "TestAReleaseBesideARecount",
	},
	// Who holds what: the tool and the page of a key
	{
		name: "holds-tool-key", file: whoHolds, what: "the holds of every key are listed as those of one",
		old: "\t\twhere += \" AND h.key = $4\"", new: "\t\twhere += \" AND h.key >= left($4, 0)\"",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-id", file: whoHolds, what: "a release asks about another hold",
		old: "\t\twhere += fmt.Sprint(\" AND h.id = $\", len(args))", new: "\t\twhere += fmt.Sprint(\" AND h.id >= left($\", len(args), \", 0)\")",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-ended", file: whoHolds, what: "a settled hold is listed",
		old: "WHERE h.name = $1 AND h.state = 'held' AND NOT starts_with(h.id, '~'::text)`+where", new: "WHERE h.name = $1`+where",
		tests: "TestAReleaseEndsWhatWasSeen",
	}, {
		name: "holds-tool-oldest", file: whoHolds, what: "the newest holds are listed",
		old: "ORDER BY h.taken_at, h.key, h.id LIMIT nullif", new: "ORDER BY h.taken_at DESC, h.key, h.id LIMIT nullif",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-most", file: whoHolds, what: "all holds are listed",
		old: "LIMIT nullif($3::bigint, 0)`", new: "LIMIT nullif($3::bigint * 0, 0)`",
		tests: "TestTheConsoleReleasesWhatWasSeen",
	}, {
		name: "release-not-seen", file: whoHolds, what: "a hold is released that came under the id after the one that was seen",
		old: "+` = $4`", new: "+` IS DISTINCT FROM $4::timestamptz + '1 day'`",
		tests: "TestAReleaseEndsWhatWasSeen|TestTheConsoleReleasesWhatWasSeen",
	}, {
		name: "holds-tool-none", file: holdsTool, what: "a hold of an unlimited key is said to hold tokens",
		old: "\tcase h.Unit == \"none\":", new: "\tcase h.Unit == \"\":",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-one", file: holdsTool, what: "one slot is slots",
		old: "\tcase h.Count == 1:", new: "\tcase h.Count == 0:",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-endless", file: holdsTool, what: "a hold without an end ends",
		old: "\t\treturn \"no end\"", new: "\t\treturn until(&at, at)",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-expired", file: holdsTool, what: "nobody sees that a hold has expired",
		old: "\tcase h.Expired:", new: "\tcase h.Expired && h.Until.IsZero():",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-negative", file: holdsTool, what: "a limit below 0 lists all",
		old: "\t\tif most < 0 {", new: "\t\tif most < -1000 {",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-unknown", file: holdsTool, what: "a mistyped limit has no holds",
		old: "\t\tif err := checkKnown(ctx, tx, name); err != nil {\n\t\t\treturn nil, err\n\t\t}\n\t\treturn a.saysNothing(l", new: "\t\treturn a.saysNothing(l",
		tests: "TestTranscripts",
	}, {
		name: "holds-tool-more", file: holdsTool, what: "nobody is told that there are more",
		old: "\t\tif int64(len(l.Holds)) < all {", new: "\t\tif int64(len(l.Holds)) > all {",
		tests: "TestTranscripts",
	}, {
		name: "release-tool-part", file: holdsTool, what: "a key by its parts is taken for the id",
		old: "\t\tif len(a.parts) > 0 {\n\t\t\targs", new: "\t\tif len(a.parts) > 1000 {\n\t\t\targs",
		tests: "TestTranscripts",
	}, {
		name: "release-tool-reason", file: holdsTool, what: "a reason that is too long is the server's error",
		old: "\t\tif len(d.reason) > maxReleaseReason {", new: "\t\tif len(d.reason) > 2*maxReleaseReason {",
		tests: "TestAReleaseEndsWhatWasSeen",
	}, {
		name: "release-tool-unasked", file: holdsTool, what: "a hold is released unasked",
		old: "\tif err := a.confirm(ctx, \"End the hold %s of %s (%s since %s)? Its holder loses it.\", printable(r.ID), about(r.Limit, r.Key), h.has(), instant(h.Since)); err != nil {\n\t\treturn err\n\t}\n", new: "",
		tests: "TestAReleaseEndsWhatWasSeen",
	}, {
		name: "release-tool-meanwhile", file: holdsTool, what: "a hold that has ended meanwhile is said to be released",
		old: "\tif !r.Released {", new: "\tif r.Released && r.ID == \"\" {",
		tests: "TestAReleaseEndsWhatWasSeen",
	}, {
		name: "release-tool-hint", file: holdsTool, what: "nobody is told that the id is missing, where the key is taken for it",
		old: "\tif h == nil {\n\t\tabout, hint := about(r.Limit, r.Key), \"\"\n\t\tif r.Key == nil {", new: "\tif h == nil {\n\t\tabout, hint := about(r.Limit, r.Key), \"\"\n\t\tif r.Limit == \"\" {",
		tests: "TestTranscripts",
	}, {
		name: "release-page-key", file: holdsPage, what: "the page of a limit releases holds",
		old: "\t\tif everyKey || err != nil || !valid(f.ID) {", new: "\t\tif err != nil || !valid(f.ID) {",
		tests: "TestTheConsoleReleasesWhatWasSeen",
	}, {
		name: "release-page-gone", file: holdsPage, what: "a hold that has ended is said to be released",
		old: "\t\t\treturn \"gone\", err", new: "\t\t\treturn \"released\", err",
		tests: "TestTheConsoleReleasesWhatWasSeen",
	},
	// ratelimit._hold, ratelimit._known and ratelimit._claim
	{
		name: "hold-look-first", file: holds, what: "a duplicate takes, and rolls back, and keeps others waiting",
		old: "    IF current_setting('transaction_isolation') <> 'serializable' THEN\n        at :=", new: "    IF false THEN\n        at :=",
		tests: "TestHoldsADuplicateTakesNothing",
	}, {
		name: "hold-denied-before-lock", file: "migrations/engine/apply.sql", what: "who waited for the lock is denied by what was there before",
		old:   "PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, windows[firsts[i]:lasts[i]]);",
		new:   "IF 0 = ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, windows[firsts[i]:lasts[i]]) THEN RETURN ROW(false, at, ord, value, ts, NULL)::ratelimit._decisions; END IF;",
		tests: "TestHoldsWhoWaitedAsksAgain",
	}, {
		name: "hold-denied-own", file: holds, what: "the holder of the last slot is denied for its own slot, as a stranger",
		old: "    ELSIF state IS NULL THEN -- denied", new: "    ELSIF false THEN -- denied",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-no-undo", file: holds, what: "what a duplicate took stays taken",
		old: "            IF state <> 'taken' THEN\n                RAISE SQLSTATE 'RL001';\n            END IF;\n", new: "",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-no-reclaim", file: "migrations/engine/apply.sql", what: "expired holds are not given back",
		old: "IF due AND EXISTS (", new: "IF false AND EXISTS (",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-no-mark", file: holds, what: "the rows do not say when a hold that has taken from them may expire",
		old: "until => CASE WHEN own_token IS NOT NULL", new: "until => CASE WHEN false",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "hold-plain-no-mark", file: plainHolds, what: "after the plain statement of a hold, the row does not say when it may expire",
		old: "lapses = least(r.lapses, CASE WHEN $7::uuid IS NOT NULL THEN clock_timestamp() + $8::interval END)", new: "lapses = r.lapses",
		tests: "TestAPlainHoldDecidesAsTheFunction",
	}, {
		name: "hold-mark-resharded", file: "migrations/engine/apply.sql", what: "a new number of shards forgets that a hold has taken from the rows",
		old: "least(min(r.lapses), until) INTO promised", new: "until INTO promised",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "dead-consume", file: "migrations/engine/consume.sql", what: "a Consume is denied what a dead worker held",
		old: "EXIT WHEN lapses <= at;", new: "",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "dead-reserve", file: "migrations/engine/consume.sql", what: "a Reserve waits for what a dead worker held",
		old: "r.shards = 1 AND (r.lapses <= at) IS NOT TRUE\n                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL)", new: "r.shards = 1\n                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL)",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "dead-more", file: "migrations/engine/apply.sql", what: "of many expired holds, only the oldest thousand count",
		old: "at, windows[firsts[i]:lasts[i]]);\n                        END IF;", new: "at, windows[firsts[i]:lasts[i]], 1000);\n                        END IF;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-debt", file: "migrations/engine/apply.sql", what: "a taking leaves a debt that holds would have paid",
		old: "r.shards = shards[p] AND (r.lapses <= at) IS NOT TRUE", new: "r.shards = shards[p]",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-move", file: "migrations/engine/move.sql", what: "a move takes what a dead worker held for used",
		old: "IF ratelimit._may('SELECT')", new: "IF false AND ratelimit._may('SELECT')",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-full", file: "migrations/engine/apply.sql", what: "who takes from a full bucket leaves an expired hold, which comes back afterwards",
		old: "due := ratelimit._ends();", new: "due := false;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-full-plain", file: plainHolds, what: "a plain statement takes beside an expired hold, which comes back afterwards",
		old: "(r.lapses <= statement_timestamp()) IS NOT TRUE\n   AND ratelimit._available(r.value, r.ts, statement_timestamp(), $1::double precision, $2::interval, $3::double precision, NULL)", new: "true\n   AND ratelimit._available(r.value, r.ts, statement_timestamp(), $1::double precision, $2::interval, $3::double precision, NULL)",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-next", file: holds, what: "a row that has ended its expired holds forgets the others",
		old: "lapses = next\n", new: "lapses = NULL\n",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-batch", file: "migrations/engine/coalesce.sql", what: "a batch takes beside an expired hold, which comes back afterwards",
		old: "s.shards <> 1 OR s.lapses AND s.n > '0'", new: "s.shards <> 1",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-batch-asks", file: "migrations/engine/coalesce.sql", what: "a batch of asks takes beside an expired hold, which comes back afterwards",
		old: "misfit := misfit OR granted;", new: "",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-several", file: "migrations/engine/consume_several.sql", what: "a call of several limits takes beside an expired hold, which comes back afterwards",
		old: "r.shards = 1 AND (r.lapses <= at) IS NOT TRUE;", new: "r.shards = 1;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-swept", file: "migrations/engine/sweep.sql", what: "a sweep deletes a row of which something is held, and nobody sees that expire",
		old: "keys := pg_catalog.array_remove(keys, k);", new: "NULL;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-paused", file: holds, what: "in a pause, expired holds end for nothing",
		old: "        CONTINUE WHEN x <= '0' AND", new: "        CONTINUE WHEN false AND",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-ahead", file: holds, what: "a row that was used since the clock was read counts as paused",
		old: "IF only_ids IS NULL AND latest > at", new: "IF false AND latest > at",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-pause-short", file: holds, what: "a pause counts as none in its last second",
		old: " AND latest <= clock_timestamp() THEN", new: " THEN",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "settle-unknown-windows", file: holds, what: "a window that is over gets back what it gave, beside a calendar",
		old: "firsts[i] := CASE WHEN q.windows IS NOT NULL THEN coalesce(pg_catalog.cardinality(windows), 0) + 1 END;", new: "firsts[i] := coalesce(pg_catalog.cardinality(windows), 0) + 1;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "settle-unknown-lifted", file: holds, what: "who does not know a limit is charged for what is unlimited",
		old: "lifted[i] := coalesce(d.effect = 'unlimited', false);", new: "",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "refund-missing", file: "migrations/engine/refund.sql", what: "a window gets back what its numbers of now never had",
		old: "count := CASE WHEN missing < count", new: "count := CASE WHEN false AND missing < count",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "refund-older-rows", file: "migrations/engine/refund.sql", what: "a shard that is older than a calendar's list gets nothing back",
		old: "rate / m, period, capacity / m, start, windows) < capacity / m", new: "rate / m, period, capacity / m, start, windows) < 'Infinity'",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-each", file: "migrations/engine/consume_keys.sql", what: "a ConsumeEach of many is denied what a dead worker held",
		old: " AND (r.lapses <= at) IS NOT TRUE;", new: ";",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "dead-coalesced-asks", file: "migrations/engine/coalesce.sql", what: "a coalesced call of several limits is denied what a dead worker held",
		old: "lapsing := pg_catalog.array_append(pg_catalog.array_remove(lapsing, k), k);", new: "NULL;",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "dead-coalesced", file: "migrations/engine/coalesce.sql", what: "a coalesced call is denied what a dead worker held",
		old: "FILTER (WHERE s.lapses)", new: "FILTER (WHERE false)",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "dead-keys", file: "migrations/engine/keys.sql", what: "lists count what a dead worker held as used",
		old: "        IF lapses <= at THEN\n", new: "        IF false THEN\n",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "dead-right", file: holds, what: "a denial fails for a role that may not give back",
		old: "RETURN current_setting('transaction_read_only') = 'off' AND ratelimit._may('UPDATE')", new: "RETURN true",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "hold-token-long", file: byHand, what: "a token of any length is read",
		old: "CASE WHEN octet_length(id) <= '1048576' THEN id END COLLATE", new: "id COLLATE",
		tests: "TestHoldByHandRefuses",
	}, {
		name: "hold-token-long-go", file: "ratelimit/hold_token.go", what: "a token of any length is read",
		old: " || len(token) > maxReceiptLen", new: "",
		tests: "TestLongTokens",
	}, {
		name: "hold-token-kept", file: holds, what: "an id that is taken anew keeps its old token",
		old: "unit = coalesce(units[i]), token = own_token,", new: "unit = coalesce(units[i]),",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-endless-some", file: holds, what: "an id that one of two limits has is a repetition of both",
		old: "        endless := endless AND coalesce(rec.state = 'held' AND rec.until = 'infinity', false);\n        CONTINUE WHEN rec.state IS NULL;", new: "        CONTINUE WHEN rec.state IS NULL;\n        endless := endless AND rec.until = 'infinity';",
		tests: "TestHoldsWithoutAnEnd",
	}, {
		name: "hold-settled-free", file: holds, what: "the id of settled work is free at once",
		old: "ELSIF rec.state IN ('settled', 'once') AND rec.until > at THEN", new: "ELSIF rec.state = 'once' THEN",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-settled-forever", file: holds, what: "the id of settled work is never free",
		old: "ELSIF rec.state IN ('settled', 'once') AND rec.until > at THEN", new: "ELSIF rec.state IN ('settled', 'once') THEN",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-none-counts", file: holds, what: "a hold of an unlimited limit holds tokens",
		old: "counts[i] := CASE WHEN units[i] = 'none' THEN 0 ELSE counts[i] END;", new: "counts[i] := counts[i];",
		tests: "TestHoldsOfUnlimited",
	},

	// ratelimit._reclaim
	{
		name: "claim-overwrites", file: holds, what: "an expired hold is overwritten by one that takes nothing, and never comes back",
		old: "THEN h.unit <> 'none' AND h.token IS NOT NULL ELSE", new: "THEN false ELSE",
		tests: "TestHoldsOfUnlimited",
	}, {
		name: "reclaim-waits", file: holds, what: "a denied call waits for a hold that somebody has locked",
		old: "           FOR UPDATE SKIP LOCKED);\n    SELECT f.value", new: "           FOR UPDATE);\n    SELECT f.value",
		tests: "TestHoldsReclaimPassesOverALockedHold",
	}, {
		name: "reclaim-in-a-row", file: holds, what: "of several expired holds, the first one alone comes back",
		old: "        IF x > '0' THEN\n            value :=", new: "        IF x > '0' AND ('0' < ANY (back)) IS NOT TRUE THEN\n            value :=",
		tests: "TestHoldsOnShards",
	}, {
		name: "reclaim-kept", file: holds, what: "a lapsed hold is taken to have kept what came back",
		old: "rest = h.count - rec.back, until = kept", new: "rest = h.count, until = kept",
		tests: "TestHoldsOfTokens",
	},

	// ratelimit._settle
	{
		name: "settle-no-token", file: holds, what: "everybody who knows the id can settle",
		old: "rec.token IS DISTINCT FROM own_token OR rec.state = 'once'", new: "rec.state = 'once'",
		tests: "TestHoldsRefuse",
	}, {
		name: "settle-probe", file: holds, what: "a hold without an end of an unlimited key is not waited for",
		old: "EXIT WHEN over OR ratelimit._bar(", new: "EXIT WHEN over OR own_token IS NULL OR ratelimit._bar(",
		tests: "TestAnEndWaitsForACommit",
	}, {
		name: "end-no-mark", file: holds, what: "an end leaves a hold that comes later to nobody",
		old: "            VALUES (names[i], keys[i], own, 'released', 'none', own_token, 0, clock_timestamp(), 0, 1, at)\n", new: "            SELECT names[i], keys[i], own, 'released', 'none', own_token, 0, clock_timestamp(), 0, 1, at WHERE false\n",
		tests: "TestAnEndWaitsForItsHold|TestHoldsSnapshotBeforeTheHold",
	}, {
		name: "end-mark-unseen", file: holds, what: "a hold passes over the mark of its own token",
		old: "        IF rec.state = 'released' AND coalesce(", new: "        IF false AND coalesce(",
		tests: "TestAnEndWaitsForItsHold",
	}, {
		name: "end-mark-bars", file: holds, what: "a mark bars other tokens, so the id is not free",
		old: "        IF rec.state = 'released' AND coalesce(rec.token = own_token, ", new: "        IF rec.state = 'released' AND coalesce(rec.token IS NOT NULL, ",
		tests: "TestAnEndWaitsForItsHold",
	}, {
		name: "end-mark-endless", file: holds, what: "the mark of an id without an end bars the next hold of it",
		old: "AND statement_timestamp() < rec.taken_at) THEN", new: ") THEN",
		tests: "TestAnEndWaitsForItsHold",
	}, {
		name: "end-mark-by-hand", file: byHand, what: "a hold by SQL that was released before it came is granted",
		old: "    ELSIF h.state = 'released' THEN", new: "    ELSIF false THEN",
		tests: "TestHoldsByHandRace",
	}, {
		name: "end-by-hand", file: byHand, what: "a release by SQL waits for no hold",
		old: "        EXIT WHEN ratelimit._bar(r.id, own,", new: "        EXIT WHEN true OR ratelimit._bar(r.id, own,",
		tests: "TestAnEndWaitsForItsHold|TestAnEndWaitsForACommit",
	}, {
		name: "settle-lapsed-slots", file: holds, what: "slots that are another's by now are settled",
		old: "            OR rec.state = 'lapsed' AND rec.unit = 'slots' AND NOT release THEN", new: "            THEN",
		tests: "TestHoldsOfSlots",
	}, {
		name: "settle-lapsed-window", file: holds, what: "late work is charged to a window that it did not run in",
		old: "CASE WHEN starts[i] IS NULL OR w IS NULL AND date_bin", new: "CASE WHEN true OR w IS NULL AND date_bin",
		tests: "TestHoldsLateInTheNextWindow",
	}, {
		name: "settle-lost-moves", file: holds, what: "of a lost hold, the other limits are settled",
		old: "    IF pg_catalog.cardinality(lost) > 0 THEN", new: "    IF pg_catalog.cardinality(lost) = n THEN",
		tests: "TestHoldsAreAllOrNothing",
	}, {
		name: "release-any", file: holds, what: "a Release deletes what is not its own",
		old: "        CONTINUE WHEN states[i] NOT IN ('held', 'lapsed'); -- nobody else's row is touched\n", new: "",
		tests: "TestHoldsOfSlots|TestHoldsWithoutAnEnd",
	}, {
		name: "release-again-locks", file: holds, what: "a Release after a Settle waits for the limit",
		old: "            over := over OR FOUND;\n", new: "            over := over OR FOUND AND rec.state <> 'settled';\n",
		tests: "TestHoldsAReleaseAfterASettleWaitsForNothing",
	},

	// Slots and Go
	{
		name: "slots-expired", file: "migrations/engine/apply.sql", what: "the balance does not count expired holds as free",
		old: "IF due OR op = 'check' THEN", new: "IF due AND op <> 'check' THEN",
		tests: "TestHoldsOfSlots",
	}, {
		name: "slots-sum", file: holds, what: "the earliest end alone makes room for all",
		old: "        free := free + coalesce(rec.count, '0');", new: "        free := 0;",
		tests: "TestHoldsRetryAt",
	}, {
		name: "hold-receipt", file: "ratelimit/verbs.go", what: "a hold has a receipt",
		old: "	verbHold:    {holds: true,", new: "	verbHold:    {takes: true, holds: true,",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-ttl", file: holdGo, what: "a ttl below zero is forever",
		old: "h.ttl == NoEnd && v == verbHold:", new: "h.ttl < 0 && v == verbHold:",
		tests: "TestHoldsRefuse",
	}, {
		name: "settle-counts", file: holdGo, what: "a Settle without Count settles one token",
		old: "		case !r.limit.slots:", new: "		case false:",
		tests: "TestHoldsRefuse",
	}, {
		name: "release-counts", file: holdGo, what: "a Release without Count charges one token",
		old: "			r.tokens = 0\n", new: "",
		tests: "TestHoldsReleaseOfWhatWasUsed",
	}, {
		name: "hold-calendar", file: "ratelimit/call_calendar.go", what: "nothing of a calendar comes back",
		old: "does.moves || does.holds {", new: "does.moves {",
		tests: "TestHoldsOfACalendarComeBack",
	}, {
		name: "slots-fraction", file: "ratelimit/call_demand.go", what: "half a slot is held",
		old: "d.count >= 1 && d.count == math.Trunc(d.count)", new: "d.count > math.Trunc(0.5)",
		tests: "TestHoldsRefuse",
	}, {
		name: "slots-other-verbs", file: "ratelimit/call_demand.go", what: "Consume takes slots that never come back",
		old: "		if r.limit.slots && !does.slots {", new: "		if false {",
		tests: "TestHoldsRefuse",
	},

	// ratelimit._extend
	{
		name: "extend-waits", file: holds, what: "a hold that somebody has locked keeps all others from being extended",
		old: "h.token = tokens[i] AND h.state = 'held' FOR UPDATE SKIP LOCKED;", new: "h.token = tokens[i] AND h.state = 'held' FOR UPDATE;",
		tests: "TestDuringExtensions|TestDuringIsExtendedBesideALongTransaction",
	}, {
		name: "extend-shortens", file: holds, what: "an extension makes a hold end earlier",
		old: "SET until = greatest(h.until, at + ttls[i])", new: "SET until = at + ttls[i]",
		tests: "TestDuringExtensions",
	}, {
		name: "extend-any-state", file: holds, what: "a hold that was given back lives again",
		old: "h.token = tokens[i] AND h.state = 'held' FOR UPDATE SKIP LOCKED;", new: "h.token = tokens[i] FOR UPDATE SKIP LOCKED;",
		tests: "TestDuringExtensions|TestDuringNoticesAClockThatSteps",
	}, {
		name: "extend-any-token", file: holds, what: "another's hold of the id is extended",
		old: "h.id = ids[i] AND h.token = tokens[i] AND h.state = 'held' FOR UPDATE", new: "h.id = ids[i] AND h.state = 'held' FOR UPDATE",
		tests: "TestDuringExtensions",
	}, {
		name: "extend-another-busy", file: holds, what: "a hold that is another's by now is taken to be locked",
		old: "         WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i] AND h.token = tokens[i];\n        IF was", new: "         WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i];\n        IF was",
		tests: "TestDuringExtensions",
	}, {
		name: "extend-busy-lost", file: holds, what: "a hold that somebody has locked is lost",
		old: "        IF was = 'held' THEN\n            busy :=", new: "        IF false THEN\n            busy :=",
		tests: "TestDuringExtensions|TestDuringIsExtendedBesideALongTransaction",
	}, {
		name: "extend-settled-lost", file: holds, what: "a hold that its work has settled is lost",
		old: "ELSIF was = 'settled' THEN\n            ended", new: "ELSIF false THEN\n            ended",
		tests: "TestDuringExtensions|TestDuringMaySettleInItsOwnTransaction",
	}, {
		name: "extend-level", file: holds, what: "an extension at SERIALIZABLE conflicts with whoever reads the hold",
		old: "    IF current_setting('transaction_isolation') <> 'read committed' THEN\n        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: an extension", new: "    IF false THEN\n        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: an extension",
		tests: "TestDuringExtensions|TestDuringExtendsWhatItHolds",
	}, {
		name: "extend-unchecked", file: holds, what: "arrays of different lengths leave holds out",
		old: "n = pg_catalog.cardinality(ids) AND n = pg_catalog.cardinality(tokens) AND n = pg_catalog.cardinality(ttls)\n        AND '100", new: "n = n\n        AND '100",
		tests: "TestDuringExtensions",
	},

	// Once
	{
		name: "once-held", file: holds, what: "what was taken once comes back when it is over",
		old: "kind  text := CASE WHEN own_token IS NULL AND until < 'infinity' THEN 'once' ELSE 'held' END;", new: "kind  text := 'held';",
		tests: "TestOnceCountsOnce|TestOnceAndHold",
	}, {
		name: "once-anew-held", file: holds, what: "an id that is counted anew is held",
		old: "               SET state = kind,", new: "               SET state = 'held',",
		tests: "TestOnceCountsOnce|TestOnceAndHold",
	}, {
		name: "once-denied-first", file: holds, what: "an event that was counted is denied when there are no tokens left",
		old:   "CASE WHEN k.endless AND ttl IS NULL OR once AND k.state IN ('held', 'settled') THEN 'repeated' ELSE k.state END, k.until INTO state, until\n          FROM ratelimit._known(own, own_token, names, keys, at) AS k;\n    END IF;\n    IF state",
		new:   "CASE WHEN k.endless AND ttl IS NULL THEN 'repeated' ELSE k.state END, k.until INTO state, until\n          FROM ratelimit._known(own, own_token, names, keys, at) AS k;\n    END IF;\n    IF state",
		tests: "TestOnceCountsOnce",
	}, {
		name: "once-looks", file: holds, what: "an event that was counted is denied as settled",
		old:   "CASE WHEN k.endless AND ttl IS NULL OR once AND k.state IN ('held', 'settled') THEN 'repeated' ELSE k.state END, k.until INTO state, until\n          FROM ratelimit._known(own, own_token, names, keys, at) AS k;\n        IF state",
		new:   "CASE WHEN k.endless AND ttl IS NULL THEN 'repeated' ELSE k.state END, k.until INTO state, until\n          FROM ratelimit._known(own, own_token, names, keys, at) AS k;\n        IF state",
		tests: "TestOnceCountsOnce",
	}, {
		name: "once-claims", file: holds, what: "at SERIALIZABLE, an event that was counted is denied as settled",
		old: "                      OR kind = 'once' AND k.state IN ('held', 'settled') THEN 'repeated'", new: "                      THEN 'repeated'",
		tests: "TestOnceCountsOnce",
	}, {
		name: "once-forever", file: holdGo, what: "an id is kept forever",
		old: "h.ttl == NoEnd && v == verbHold:", new: "h.ttl == NoEnd:",
		tests: "TestOnceRefuses",
	}, {
		name: "once-coalesced", file: "ratelimit/call.go", what: "a Coalescer counts an event each time",
		old: "ok && c.does.takes && !c.does.holds {", new: "ok && c.does.takes {",
		tests: "TestOnceOnACoalescer",
	}, {
		name: "once-in-memory", file: "ratelimit/call.go", what: "the database in memory is asked what it does not have",
		old: "	if isInMemory(db) && (c.does.holds || c.does.slots &&", new: "	if isInMemory(db) && c.does.slots && (c.does.holds ||",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "once-slots", file: "ratelimit/verbs.go", what: "Once takes slots that never come back",
		old: "	verbOnce:    {holds: true,", new: "	verbOnce:    {holds: true, slots: true,",
		tests: "TestOnceRefuses",
	}, {
		name: "once-receipt", file: "ratelimit/verbs.go", what: "what was taken once cannot be refunded",
		old: "	verbOnce:    {holds: true, takes: true,", new: "	verbOnce:    {holds: true,",
		tests: "TestOnceCountsOnce",
	},

	// During
	{
		name: "during-margin", file: renew, what: "the work ends when another can take the slot, and not before",
		old: "	return left - e.ttl/tenth\n", new: "	return left\n",
		tests: "TestTheWorkEndsBeforeAnotherCanTakeTheSlot",
	}, {
		name: "during-late-answer", file: renew, what: "an answer that is late makes the hold longer than it is",
		old: "			row.certain = sent.Add(e.ttl)\n", new: "			row.certain = now.Add(e.ttl)\n",
		tests: "TestTheWorkEndsBeforeAnotherCanTakeTheSlot",
	}, {
		name: "during-busy", file: renew, what: "a hold that was not extended is taken to be",
		old: "contains(answer.Busy, place) {", new: "false {",
		tests: "TestABusyRowIsTriedAlone",
	}, {
		name: "during-ended", file: renew, what: "a settled hold is extended on and on",
		old: "contains(answer.Ended, place) {", new: "false {",
		tests: "TestALostHoldEndsTheWorkAndASettledOneDoesNot",
	}, {
		name: "during-lost", file: renew, what: "work whose hold is lost goes on",
		old: "contains(answer.Lost, place) {", new: "false {",
		tests: "TestALostHoldEndsTheWorkAndASettledOneDoesNot|TestDuringNoticesAClockThatSteps",
	}, {
		name: "during-begins", file: renew, what: "work begins although its hold is over",
		old: "	if e.begun = e.next.After(now); e.begun {", new: "	if e.begun = true; e.begun {",
		tests: "TestAHoldThatWasLongInComingIsExtendedFirst",
	}, {
		name: "during-no-second-try", file: renew, what: "a failed extension is tried again after a third of the ttl",
		old: "		if e.failed, e.next = err, sent.Add(e.ttl/third); err != nil {", new: "		if e.failed, e.next = err, sent.Add(e.ttl/third); false {",
		tests: "TestAFailedExtensionIsTriedAgain",
	}, {
		name: "during-alone", file: renew, what: "each hold is extended by a statement of its own",
		old: "		if now.Before(e.next.Add(-e.ttl / twelfth)) {", new: "		if now.Before(e.next) {",
		tests: "TestHoldsThatAreSoonDueShareAStatement",
	}, {
		name: "during-many", file: renew, what: "one statement locks any number of holds",
		old: "	maxExtended = 1000 //", new: "	maxExtended = 1e6 //",
		tests: "TestHoldsThatAreSoonDueShareAStatement",
	}, {
		name: "during-goes-on", file: renew, what: "a goroutine is left when all work has ended",
		old: "		r.stop()\n", new: "",
		tests: "TestAHoldIsExtendedEveryThirdOfItsTTL|TestDuringAndClose",
	}, {
		name: "during-pool", file: renew, what: "holds are extended on the pool whose connections the work has",
		old: "		n.own, n.ended = pool, pool.Close\n", new: "		n.own, n.ended = db, pool.Close\n",
		tests: "TestDuringNeedsNoConnectionOfThePool",
	}, {
		name: "during-silent", file: renew, what: "while the extension of a long ttl has no answer, no other hold is extended",
		old: "min(shortest/third, extendWithin)", new: "shortest/third",
		tests: "TestASilentConnectionKeepsNoOtherHoldWaiting",
	}, {
		name: "during-silent-replaced", file: renew, what: "the next extension waits until a silent connection is closed",
		old: "	if err != nil && (ctx.Err() != nil || !survives(err)) {\n", new: "	if err != nil && !survives(err) && ctx.Err() == nil {\n",
		tests: "TestALineThatIsSilentIsReplaced",
	}, {
		name: "during-silent-driver", file: renew, what: "an extension waits for an answer as long as the driver does",
		old: "	case <-ctx.Done():\n		return dbsqlc.ExtendRow{}, ctx.Err()", new: "	case <-context.Background().Done():\n		return dbsqlc.ExtendRow{}, ctx.Err()",
		tests: "TestAnExtensionEndsInTimeOnAnyDriver",
	}, {
		name: "during-line-given-away", file: renew, what: "after a canceled extension, another caller of a full *sql.DB gets the connection that extends the holds",
		old: "ctx.Err() != nil || !survives(err)", new: "true",
		tests: "TestALineIsKeptWhileTheServerAnswers",
	}, {
		name: "during-line-broken", file: renew, what: "a connection whose session the server ends is asked again",
		old: " && state[:3] != \"57P\"", new: "",
		tests: "TestALineIsKeptWhileTheServerAnswers",
	}, {
		name: "during-waits", file: renew, what: "a call whose context has ended waits as long as another call for the connection",
		old: "	case <-ctx.Done(): // another call", new: "	case <-context.Background().Done(): // another call",
		tests: "TestACallThatWaitsForTheLineEndsWithItsContext",
	}, {
		name: "during-level", file: renew, what: "where SERIALIZABLE is the default, no hold is extended",
		old: "	if !n.begin && sqlState(err) == stateIsolation {", new: "	if false {",
		tests: "TestDuringExtendsWhatItHolds",
	}, {
		name: "during-panics", file: during, what: "work that panics keeps its slot until its time is over",
		old: "			_ = d.release(d.held)\n", new: "",
		tests: "TestDuringEnds",
	}, {
		name: "during-failed-settles", file: during, what: "the id of work that has failed is refused for a day",
		old: "		return joined(err, lost, wrong, d.release(all))", new: "		return joined(err, lost, wrong, d.settle(all))",
		tests: "TestDuringEnds",
	}, {
		name: "during-used", file: during, what: "what the work says that it has used is not heard",
		old: "			all[i].tokens += u.tokens\n", new: "			all[i].tokens = d.held[i].tokens\n",
		tests: "TestDuringEnds",
	}, {
		name: "during-used-adds", file: during, what: "what was used is added to what was held",
		old: "				first[i], all[i].tokens = true, 0\n", new: "				first[i] = true\n",
		tests: "TestDuringEnds",
	}, {
		name: "during-wrong", file: during, what: "nobody is told that what was used was not held",
		old: "	return joined(err, wrong)\n", new: "	return joined(err)\n",
		tests: "TestDuringEnds",
	}, {
		name: "during-ended-before", file: during, what: "work begins although its context has ended",
		old: "	if ctx.Err() != nil {\n		return joined(", new: "	if false {\n		return joined(",
		tests: "TestDuringRefuses",
	}, {
		name: "during-haste", file: during, what: "a Close in haste lets the work go on",
		old: "	if f := d.l.life; f != nil {", new: "	if f := d.l.life; false && f != nil {",
		tests: "TestDuringAndClose",
	}, {
		name: "during-lost-charges", file: during, what: "of a lost hold, nothing is charged",
		old: "		err = joined(err, d.release(all))\n", new: "",
		tests: "TestDuringNoticesAClockThatSteps",
	}, {
		name: "during-conflicts", file: during, what: "where SERIALIZABLE is the default, a conflict of the hold is the caller's",
		old: "	err = l.Retry(deciding, func(ctx context.Context) (err error) {", new: "	err = l.Retry(deciding, func(ctx context.Context) (err error) {\n		defer func() { err = unknownUnless(err) }()",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "during-unknown", file: during, what: "after an unknown outcome, a slot is taken until its time is over",
		old: "	default:\n		_ = d.release(zero(d.held))", new: "	default:\n		_ = d",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "during-unsent", file: during, what: "on a *sql.DB, a wrong id or a plan without slots is refused by the server alone",
		old: "	if result, err := l.refusedUnsent(ctx, db, id, ttl, requests); err != nil {", new: "	if result, err := unasked, error(nil); err != nil {",
		tests: "TestDuringNeedsNoServerToRefuse",
	}, {
		name: "during-unsent-observed", file: during, what: "nobody observes that a During was refused",
		old: "	l.observe(ctx, verbHold, time.Since(began), result, err)\n", new: "	_ = began\n",
		tests: "TestDuringNeedsNoServerToRefuse",
	}, {
		name: "during-any-handle", file: during, what: "work holds on a transaction, which keeps the limit locked",
		old: "if handles.IsOne(db) {\n		return nil, invalidCall(requests, fmt.Sprintf(\"During", new: "if handles.IsOne(nil) {\n		return nil, invalidCall(requests, fmt.Sprintf(\"During",
		tests: "TestDuringRefuses",
	}, {
		name: "during-sql-of-one", file: during, what: "on a *sql.DB of one connection, a hold waits for the connection that would extend it",
		old: "MaxOpenConnections == 1 {", new: "MaxOpenConnections == -1 {",
		tests: "TestDuringRefuses",
	}, {
		name: "during-endless", file: during, what: "a process that dies keeps its slot",
		old: "	case ttl == NoEnd:\n		return unasked, invalidCall", new: "	case ttl == 1:\n		return unasked, invalidCall",
		tests: "TestDuringRefuses",
	}, {
		name: "hold-in-turn", file: "ratelimit/hold_wait.go", what: "whoever waits is served by chance",
		old: "q.turns = append(q.turns, turn); len(q.turns) == 1 {", new: "q.turns = append(q.turns, turn); true {",
		tests: "TestHoldsAreWaitedForInTurn",
	}, {
		name: "hold-in-turn-vain", file: "ratelimit/hold_wait.go", what: "an id that is held is waited for",
		old: "|| denied.Reason != ReasonQuota {", new: "|| denied.Reason == \"\" {",
		tests: "TestWhatWaitingDoesNotMendComesAtOnce",
	}, {
		name: "hold-extend-lost", file: "ratelimit/hold.go", what: "a hold that is lost is extended",
		old: "case len(answer.Lost)+len(answer.Ended) > 0:", new: "case false:",
		tests: "TestAHoldIsExtendedByItsToken",
	},

	// What else knows them
	{
		name: "usage-known", file: "ratelimit/usage/count.go", what: "the second delivery of an id counts as a denial",
		old: "d.Result.Repeated || knownID(d.Err):", new: "d.Result.Repeated:",
		tests: "TestRepeatedDeliveriesAreNotCounted",
	}, {
		name: "usage-repeated", file: "ratelimit/usage/count.go", what: "the second delivery of an event counts as a grant",
		old: "d.Result.Repeated || knownID(d.Err):", new: "knownID(d.Err):",
		tests: "TestRepeatedDeliveriesAreNotCounted",
	}, {
		name: "hold-reset-stays", file: "migrations/engine/reset.sql", what: "what a reset forgot comes back",
		old: "AND l.state = 'held' ORDER BY l.id FOR UPDATE", new: "AND l.state = 'none' ORDER BY l.id FOR UPDATE",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "slots-reset", file: "migrations/engine/reset.sql", what: "a reset frees slots that are in use",
		old: "            IF h.unit = 'slots' THEN", new: "            IF false THEN",
		tests: "TestSlotsAreDefined",
	}, {
		name: "hold-sweep-none", file: "ratelimit/sweep.go", what: "no sweep gives back what expired holds hold",
		old: "if err := l.sweepHolds(ctx, run); err != nil && ", new: "if err := error(nil); err != nil && ",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "hold-sweep-full", file: sweep, what: "an expired hold of a key that is full, and has no row, stays for good",
		old: "    IF n = 0 THEN\n        m := 0;", new: "    IF false THEN\n        m := 0;",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "slots-swept-in-use", file: "migrations/engine/sweep.sql", what: "the row of slots in use is deleted",
		old: "        varies := '0';\n        RETURN;", new: "        RETURN;",
		tests: "TestSlotsAreDefined",
	}, {
		name: "slots-expired-in-use", file: "migrations/engine/keys.sql", what: "tool and page show an expired hold as in use",
		old: "ratelimit._lapsed(name, key, at, 0,", new: "ratelimit._lapsed(name, key, '-infinity', 0,",
		tests: "TestTheToolAndThePageShowSlots",
	}, {
		name: "slots-another-kind", file: "migrations/engine/definitions.sql", what: "two programs have slots and a bucket of one name",
		old: "AND (o.rate > '0' OR o.varies IS NOT NULL OR o.kind = 'slots')\n", new: "AND (o.rate > '0' OR o.varies IS NOT NULL)\n",
		tests: "TestSlotsAreDefined",
	}, {
		name: "slots-by-hand", file: "migrations/engine/ratelimit.sql", what: "ratelimit takes slots that never come back",
		old: "CASE WHEN verb NOT IN ('hold', 'settle') THEN 'it has slots", new: "CASE WHEN false THEN 'it has slots",
		tests: "TestSlotsAreDefined",
	}, {
		name: "slots-override-rate", file: "migrations/engine/overrides.sql", what: "an override of slots has a rate, which does nothing",
		old: "CASE WHEN coalesce(rate, max_reserved) IS NOT NULL THEN 'rate and", new: "CASE WHEN false THEN 'rate and",
		tests: "TestSlotsAreDefined|TestTheToolAndThePageShowSlots",
	},

	// By hand
	{
		name: "hold-by-hand-bytes", file: byHand, what: "the token of an id of two bytes a letter cannot be read",
		old: "octet_length(left(parts[3], n)) = parts", new: "length(left(parts[3], n)) = parts",
		tests: "TestHoldByHand",
	}, {
		name: "hold-by-hand-token", file: byHand, what: "Go cannot read the token of SQL, of an id of two bytes a letter",
		old: "octet_length(id), id,\n", new: "length(id), id,\n",
		tests: "TestHoldByHand",
	}, {
		name: "hold-by-hand-block", file: byHand, what: "a blocked key holds",
		old: "IF q.effect = 'block' AND q.count > '0' THEN", new: "IF false THEN",
		tests: "TestHoldByHandOfTokens",
	}, {
		name: "hold-by-hand-held", file: byHand, what: "a second delivery is granted",
		old: "IF h.state IN ('held', 'settled') THEN", new: "IF h.state = 'settled' THEN",
		tests: "TestHoldByHand",
	}, {
		name: "hold-by-hand-settled", file: byHand, what: "work that is done is granted again",
		old: "IF h.state IN ('held', 'settled') THEN", new: "IF h.state = 'held' THEN",
		tests: "TestHoldByHand",
	}, {
		name: "hold-by-hand-denied", file: byHand, what: "a denial is an answer that nobody looks at",
		old: "ELSIF h.state = 'denied' THEN", new: "ELSIF false THEN",
		tests: "TestHoldByHand|TestHoldByHandWithoutAnEnd",
	}, {
		name: "hold-by-hand-slots-retry", file: byHand, what: "nobody says when slots are free",
		old: "h.free_at[1] AS retry_at", new: "NULL::timestamptz AS retry_at",
		tests: "TestHoldByHand",
	}, {
		name: "hold-by-hand-both", file: byHand, what: "a hold with an end and without one has an end",
		old: "WHEN forever AND ttl IS NOT NULL THEN", new: "WHEN false THEN",
		tests: "TestHoldByHandRefuses",
	}, {
		name: "hold-by-hand-hint", file: byHand, what: "the error of a limit that is not published names arguments that ratelimit.hold does not have",
		old: "    PERFORM ratelimit._published(name, key);\n    q :=", new: "    q :=",
		tests: "TestHoldByHandRefuses",
	}, {
		name: "hold-by-hand-repeated", file: byHand, what: "a repeated hold shows a balance",
		old: "    IF repeated THEN\n        remaining := NULL;\n    ELSIF", new: "    IF",
		tests: "TestHoldByHandOfTokens",
	}, {
		name: "release-by-hand-id", file: byHand, what: "whoever knows the id of some work ends its hold",
		old: "IF own IS NULL AND rec.token IS NOT NULL AND rec.state = 'held' THEN", new: "IF false THEN",
		tests: "TestAnOperatorReleasesAHold",
	}, {
		name: "release-by-hand-ended", file: byHand, what: "a hold that has ended is an error, and a DELETE fails by its trigger",
		old: "IF own IS NULL AND rec.token IS NOT NULL AND rec.state = 'held' THEN", new: "IF own IS NULL AND rec.token IS NOT NULL THEN",
		tests: "TestHoldByHandThatHasEnded",
	}, {
		name: "release-by-hand-late", file: byHand, what: "whoever knows the id of work that is late keeps what it has used from being charged",
		old: "    IF NOT coalesce(rec.state IN ('held', 'lapsed') AND rec.token IS NOT DISTINCT FROM own, false) THEN\n", new: "    own := rec.token;\n    IF NOT coalesce(rec.state IN ('held', 'lapsed'), false) THEN\n",
		tests: "TestHoldByHandThatHasEnded",
	}, {
		name: "release-by-hand-forced-late", file: byHand, what: "an operator's release of work that is late keeps what it has used from being charged",
		old: "CASE WHEN forced AND rec.state = 'held' THEN", new: "CASE WHEN forced THEN",
		tests: "TestHoldByHandThatHasEnded",
	}, {
		name: "release-by-hand-stranger", file: byHand, what: "any token ends a hold",
		old: "own := coalesce(r.token, CASE WHEN forced AND rec.state = 'held' THEN rec.token END);", new: "own := rec.token;",
		tests: "TestHoldByHandAboveReadCommitted",
	}, {
		name: "release-by-hand-unlimited", file: holds, what: "a hold of an unlimited limit is never released",
		old: " AND d.rate > '0' THEN\n", new: " THEN\n",
		tests: "TestHoldByHandOfTokens",
	}, {
		name: "settle-unknown-published", file: holds, what: "tokens of a limit that a deployment has removed never come back",
		old: " AND d.rate > '0' THEN\n", new: " AND false THEN\n",
		tests: "TestADeployEndsJobsOfTheVersionBefore",
	}, {
		name: "release-by-hand-full", file: holds, what: "a release writes rows of a key that is full, which an operator may not",
		old: "            CONTINUE WHEN bare[i]; -- it is full\n", new: "",
		tests: "TestHoldByHandOfTokens",
	}, {
		name: "release-by-hand-slots", file: byHand, what: "slots that are not published any more are never released",
		old: "IF rec.unit <> 'slots' THEN", new: "IF true THEN",
		tests: "TestHoldByHandRefuses",
	}, {
		name: "release-by-hand-silent", file: byHand, what: "a release by an operator leaves no trace",
		old: "IF s.state = 'done' AND forced THEN", new: "IF false THEN",
		tests: "TestAnOperatorReleasesAHold",
	}, {
		name: "release-by-hand-noisy", file: byHand, what: "each release of an application is written down",
		old: "IF s.state = 'done' AND forced THEN", new: "IF s.state = 'done' THEN",
		tests: "TestHoldByHandWithoutAnEnd",
	}, {
		name: "release-by-hand-effect", file: byHand, what: "the history says that a key was reset whose hold was released",
		old: ", who, 'release');", new: ", who);",
		tests: "TestAnOperatorReleasesAHold",
	}, {
		name: "release-late", file: holds, what: "a release of what has ended says that it has ended it",
		old: " WHEN release AND 'held' <> ALL (states) THEN 'late'", new: "",
		tests: "TestHoldByHandThatHasEnded",
	}, {
		name: "release-by-id", file: "migrations/engine/holds.sql", what: "a release by the id of a hold with an end says that it is done",
		old: "IF states[i] = 'lost' AND (NOT release OR own_token IS NULL AND rec.token IS NOT NULL AND rec.state = 'held') THEN", new: "IF states[i] = 'lost' AND NOT release THEN",
		tests: "TestHoldsRefuse",
	}, {
		name: "release-lost-no-error", file: "ratelimit/call.go", what: "a release of what is not this token's is no error",
		old: "c.does.holds && !result.OK && (!c.does.deniable ||", new: "c.does.holds && !result.OK && (c.verb == verbSettle ||",
		tests: "TestHoldsRefuse",
	}, {
		name: "settle-unnamed", file: holdGo, what: "what a Settle does not name stays held",
		old: "			requests = append(requests, l.unnamed(t, c.verb == verbRelease))\n", new: "			_ = l.unnamed(t, c.verb == verbRelease)\n",
		tests: "TestHoldsAreAllOrNothing",
	}, {
		name: "release-unnamed", file: holdGo, what: "what a Release does not name was used",
		old: "		t.count = 0\n", new: "",
		tests: "TestHoldsAreAllOrNothing|TestHoldsOfTokens",
	}, {
		name: "release-by-hand-all", file: byHand, what: "a release by SQL ends one limit of a token, and leaves the others held",
		old: "    IF r.list <> '' THEN\n", new: "    IF false THEN\n",
		tests: "TestHoldByHand",
	}, {
		name: "refund-rest", file: "ratelimit/receipt.go", what: "a refund without a Count is of one token",
		old: "if r.tokens = t.Count - t.Refunded - asked[key]; !countable", new: "if !countable",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "settle-other-key", file: "ratelimit/hold.go", what: "a token ends nothing of another key, and says nothing",
		old: "r.limit.name == t.limit && r.key == t.key", new: "r.limit.name == t.limit",
		tests: "TestHoldsRefuse",
	}, {
		name: "hold-denied-forgotten", file: "ratelimit/call.go", what: "each Hold of a key that is denied takes two statements",
		old: "(c.does.takes || c.does.holds) && !a.granted", new: "c.does.takes && !a.granted",
		tests: "TestADeniedHoldIsRemembered",
	}, {
		name: "holds-by-hand-ended", file: byHand, what: "a settled hold is shown as one",
		old: "AND h.key = own AND h.state = 'held' AND NOT starts_with(h.id, '~'::text)\n     ORDER BY h.taken_at", new: "AND h.key = own\n     ORDER BY h.taken_at",
		tests: "TestHoldByHand",
	},

	// The plain statements
	{
		name: "hold-plain-unconditionally", file: plainHolds, what: "the plain statement of a hold does not check whether there is enough",
		old: "- $6::double precision >= $11::double precision\n       AND CASE", new: "- $6::double precision >= $11::double precision - 1e9\n       AND CASE",
		tests: "TestAPlainHoldDecidesAsTheFunction",
	},
	{
		name: "hold-plain-shards", file: plainHolds, what: "the plain statement of a hold takes from a shard",
		old: "r.key = $10::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE\n       AND", new: "r.key = $10::text AND r.shard = 0\n       AND",
		tests: "TestAHoldOnAPoolIsOneStatement",
	},
	{
		name: "hold-plain-scans", file: plainHolds, what: "the plain statement of a hold scans a small table, and goes on when it is large",
		old: "r.key = $10::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE\n       AND", new: "r.key = $10::text AND r.shard = 0 AND r.shards = 1\n       AND",
		tests: "TestAPlainHoldUsesTheIndexesOfSmallTables",
	},
	{
		name: "hold-plain-scans-holds", file: plainHolds, what: "the plain statement of a hold scans a small table of holds",
		old: "h.id = $12::text AND (h.part > '0' OR ratelimit._costly(h.part::smallint))", new: "h.id = $12::text",
		tests: "TestAPlainHoldUsesTheIndexesOfSmallTables",
	},
	{
		name: "hold-plain-ts-back", file: plainHolds, what: "the plain statement of a hold moves ts back with the clock",
		old: "           ts = greatest(r.ts, statement_timestamp())", new: "           ts = statement_timestamp()",
		tests: "TestAPlainHoldDecidesAsTheFunction",
	},
	{
		name: "hold-plain-level", file: plainHolds, what: "above READ COMMITTED, the plain statement of a hold takes",
		old: "CASE WHEN current_setting('transaction_isolation') = 'read committed' AND NOT", new: "CASE WHEN NOT",
		tests: "TestAPlainHoldReadsNothingAboveReadCommitted",
	},
	{
		name: "hold-plain-distributed", file: plainHolds, what: "where the table is distributed by key, the plain statement holds",
		old: " AND NOT ratelimit._distributed()\n", new: "\n",
		tests: "TestAPlainHoldIsRefusedWhereTheTableIsDistributed",
	},
	{
		name: "hold-plain-known", file: plainHolds, what: "a duplicate waits for the row of the limit, and takes before it is refused",
		old: "THEN NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h", new: "THEN EXISTS (SELECT 1) OR NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h",
		tests: "TestHoldsADuplicateTakesNothing",
	},
	{
		name: "hold-plain-no-undo", file: plainHolds, what: "what a duplicate took by the plain statement stays taken",
		old: "h.until IS NOT NULL OR ratelimit._taken_twice()", new: "true",
		tests: "TestAPlainHoldIsUndone|TestAJobThatIsDeliveredAtOnce",
	},
	{
		name: "hold-plain-undone", file: "ratelimit/call_update.go", what: "a duplicate whose plain statement was undone fails",
		old: ", sqlState(err) == takenTwice:", new: ":",
		tests: "TestAPlainHoldIsUndone",
	},
	{
		name: "hold-plain-waits", file: plainHolds, what: "what a hold waited is of the work's time",
		old: "coalesce(clock_timestamp() + $8", new: "coalesce(statement_timestamp() + $8",
		tests: "TestAPlainHoldLastsFromItsTaking",
	},
	{
		name: "hold-plain-rest", file: plainHolds, what: "the plain statement of a hold forgets what was left",
		old: "statement_timestamp(), t.value, 1,", new: "statement_timestamp(), 0, 1,",
		tests: "TestAPlainHoldDecidesAsTheFunction",
	},
	{
		name: "hold-plain-rowless", file: "ratelimit/call_update.go", what: "the plain statement of a hold forgets an unlimited limit",
		old: "\tcase c.does.holds && c.does.deniable:\n\t\tif len(c.rowless) == 0 {", new: "\tcase c.does.holds && c.does.deniable:\n\t\tif true {",
		tests: "TestAHoldOnAPoolIsOneStatement",
	},
	{
		name: "hold-plain-in-vain", file: "ratelimit/call_update.go", what: "denied holds keep other limits from sending UPDATEs",
		old: "return \"txlimit: updates of holds\"", new: "return \"txlimit: updates\"",
		tests: "TestAPlainHoldIsNotTriedInVain",
	},
	{
		name: "hold-plain-twice", file: "ratelimit/call_update.go", what: "a denied hold sends its plain statement twice",
		old: "\tfunction.update = nil\n", new: "",
		tests: "TestAHoldOnAPoolIsOneStatement",
	},
	{
		name: "once-plain-held", file: "ratelimit/call_update.go", what: "what was taken once by the plain statement comes back",
		old: "\t\tstate = \"once\"", new: "\t\tstate = \"held\"",
		tests: "TestAHoldOnAPoolIsOneStatement",
	},
	{
		name: "settle-plain-level", file: plainHolds, what: "above READ COMMITTED, the plain UPDATE of a settle settles",
		old: "_costly(r.shards))\n   AND current_setting('transaction_isolation') = 'read committed'\nRETURNING record_send(ROW('done'", new: "_costly(r.shards))\nRETURNING record_send(ROW('done'",
		tests: "TestAPlainHoldReadsNothingAboveReadCommitted",
	},
	{
		name: "settle-plain-state", file: plainHolds, what: "a second settle is not a repetition",
		old: "CASE WHEN h.state = 'held' AND h.unit", new: "CASE WHEN h.unit",
		tests: "TestAHoldOnAPoolIsOneStatement",
	},
	{
		name: "settle-plain-unit", file: plainHolds, what: "slots of that name before are settled without being freed",
		old: "AND h.unit = 'tokens' AND h.token", new: "AND h.token",
		tests: "TestAPlainSettleEndsWhatIsHeldAlone",
	},
	{
		name: "settle-plain-token", file: plainHolds, what: "the hold that another one has by now is settled",
		old: " AND h.token = $4::uuid THEN", new: " AND $4::uuid IS NOT NULL THEN",
		tests: "TestAPlainSettleEndsWhatIsHeldAlone",
	},
	{
		name: "settle-plain-count", file: plainHolds, what: "what the token does not say stays taken",
		old: "THEN h.count = $5::double precision ELSE", new: "THEN $5::double precision IS NOT NULL ELSE",
		tests: "TestAPlainSettleEndsWhatIsHeldAlone",
	},
	{
		name: "settle-plain-shards", file: plainHolds, what: "the plain UPDATE of a settle shows the balance of one shard",
		old: "r.key = $2::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards))", new: "r.key = $2::text AND r.shard = 0",
		tests: "TestAPlainSettleEndsWhatIsHeldAlone",
	},
	{
		name: "settle-plain-scans", file: plainHolds, what: "the plain UPDATE of a settle scans a small table",
		old: "r.key = $2::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards))", new: "r.key = $2::text AND r.shard = 0 AND r.shards = 1",
		tests: "TestAPlainHoldUsesTheIndexesOfSmallTables",
	},
	{
		name: "settle-plain-index", file: plainHolds, what: "the plain UPDATE of a settle walks over all live holds of its key",
		old: "   AND CASE WHEN h.state = 'held' AND", new: "   AND h.state = 'held' AND h.token IS NOT NULL AND CASE WHEN",
		tests: "TestAPlainHoldUsesTheIndexesOfSmallTables",
	},
	{
		name: "settle-plain-rowless", file: "ratelimit/call_update.go", what: "the plain UPDATE of a settle forgets an unlimited limit",
		old: "if len(c.rowless) == 0 && c.hold.matches(", new: "if c.hold.matches(",
		tests: "TestAHoldOnAPoolIsOneStatement",
	},
	{
		name: "settle-plain-slots", file: holdGo, what: "slots are settled by the plain statement for tokens, which finds none",
		old: "return !d.limit.slots && slices", new: "return slices",
		tests: "TestAHoldOnAPoolIsOneStatement",
	},
	{
		name: "hold-error-policy", file: "ratelimit/errors.go", what: "the text of a denial for want of a slot is that of a plan without slots",
		old: "	case e.RetryAt.IsZero() && e.Reason == ReasonQuota:", new: "	case false:",
		tests: "TestHoldsWithoutAnEnd",
	},
}
