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
		name: "slots-above-denied", file: byHand, what: "a denial shows tokens in a row of slots as slots",
		old: "SELECT least(h.value[1], '0') - q.floor AS remaining,", new: "SELECT coalesce(h.value[1], '0') - q.floor AS remaining,",
		tests: "TestSlotsOfARowAboveZero",
	}, {
		name: "hold-many-expired-once", file: byHand, what: "slots of 1000 expired holds are free, and no more, and a denial takes them back",
		old: "own, 0, '1 second', 0, NULL, NULL, NULL);", new: "own, 0, '1 second', 0, NULL, NULL, NULL, 1000);",
		tests: "TestHoldManyOfExpired",
	}, {
		name: "sweep-by-hand-all", file: "migrations/engine/sweep.sql", what: "a sweep by hand works through all holds with its rows locked",
		old: "IF h.deleted + h.ended > 0 THEN", new: "IF h.deleted + h.ended < 0 THEN",
		tests: "TestHoldByHandThatHasEnded",
	}, {
		name: "held-plan", file: "migrations/engine/holds.sql", what: "a hold is looked for among all that are held of its key",
		old: "(name, key, token, id)\n    WHERE", new: "(name, key)\n    WHERE",
		tests: "TestEveryStatementReadsLittle",
	}, {
		name: "recount-none", file: byHand, what: "a recount counts nothing",
		old: "SET value = '0'::double precision - used, ts", new: "SET value = r.value, ts",
		tests: "TestSlotsOfATable",
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
		name: "release-tool-meanwhile", file: holdsTool, what: "a hold that has ended meanwhile is said to be released",
		old: "\tif !r.Released {", new: "\tif r.Released && r.ID == \"\" {",
		tests: "TestAReleaseEndsWhatWasSeen",
	}, {
		name: "release-tool-hint", file: holdsTool, what: "nobody is told that the id is missing, where the key is taken for it",
		old: "\tif h == nil {\n\t\tabout, hint := about(r.Limit, r.Key), \"\"\n\t\tif r.Key == nil {", new: "\tif h == nil {\n\t\tabout, hint := about(r.Limit, r.Key), \"\"\n\t\tif r.Limit == \"\" {",
		tests: "TestTranscripts",
	}, {
		name: "release-page-gone", file: holdsPage, what: "a hold that has ended is said to be released",
		old: "\t\t\treturn \"gone\", err", new: "\t\t\treturn \"released\", err",
		tests: "TestTheConsoleReleasesWhatWasSeen",
	},

	// ratelimit._hold, ratelimit._known and ratelimit._claim
	{
		name: "hold-denied-before-lock", file: "migrations/engine/apply.sql", what: "who waited for the lock is denied by what was there before",
		old:   "PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, windows[firsts[i]:lasts[i]]);",
		new:   "IF 0 = ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, windows[firsts[i]:lasts[i]]) THEN RETURN ROW(false, at, ord, value, ts, NULL)::ratelimit._decisions; END IF;",
		tests: "TestHoldsWhoWaitedAsksAgain",
	}, {
		name: "dead-more", file: "migrations/engine/apply.sql", what: "of many expired holds, only the oldest thousand count",
		old: "at, windows[firsts[i]:lasts[i]]);\n                        END IF;", new: "at, windows[firsts[i]:lasts[i]], 1000);\n                        END IF;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-full", file: "migrations/engine/apply.sql", what: "who takes from a full bucket leaves an expired hold, which comes back afterwards",
		old: "due := ratelimit._ends();", new: "due := false;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-next", file: holds, what: "a row that has ended its expired holds forgets the others",
		old: "lapses = next\n", new: "lapses = NULL\n",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-swept", file: "migrations/engine/sweep.sql", what: "a sweep deletes a row of which something is held, and nobody sees that expire",
		old: "keys := pg_catalog.array_remove(keys, k);", new: "NULL;",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-pause-short", file: holds, what: "a pause counts as none in its last second",
		old: " AND latest <= clock_timestamp() THEN", new: " THEN",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "refund-older-rows", file: "migrations/engine/refund.sql", what: "a shard that is older than a calendar's list gets nothing back",
		old: "rate / m, period, capacity / m, start, windows) < capacity / m", new: "rate / m, period, capacity / m, start, windows) < 'Infinity'",
		tests: "TestADeadWorkersTokensAtTheEdges",
	}, {
		name: "dead-coalesced-asks", file: "migrations/engine/coalesce.sql", what: "a coalesced call of several limits is denied what a dead worker held",
		old: "lapsing := pg_catalog.array_append(pg_catalog.array_remove(lapsing, k), k);", new: "NULL;",
		tests: "TestWhatADeadWorkerHeldIsThere",
	}, {
		name: "hold-endless-some", file: holds, what: "an id that one of two limits has is a repetition of both",
		old: "        endless := endless AND coalesce(rec.state = 'held' AND rec.until = 'infinity', false);\n        CONTINUE WHEN rec.state IS NULL;", new: "        CONTINUE WHEN rec.state IS NULL;\n        endless := endless AND rec.until = 'infinity';",
		tests: "TestHoldsWithoutAnEnd",
	}, {
		name: "hold-settled-free", file: holds, what: "the id of settled work is free at once",
		old: "ELSIF rec.state IN ('settled', 'once') AND rec.until > at THEN", new: "ELSIF rec.state = 'once' THEN",
		tests: "TestHoldsOfSlots",
	},
	{
		name: "hold-late-forgotten", file: holds, what: "what a late worker has used is free, once its id is taken again",
		old: " WHEN 'lapsed' THEN h.unit = 'tokens' AND h.until > at ELSE", new: " ELSE",
		tests: "TestAnIDThatIsTakenFromALateWorker",
	}, {
		name: "hold-paused-alone", file: holds, what: "nobody waits for tokens whose hold has ended in a pause",
		old: "h.unit = 'tokens' AND greatest(h.until, r.ts) > at;", new: "h.unit = 'tokens' AND h.until > at;",
		tests: "TestWhatWaitingDoesNotMendComesAtOnce",
	},

	// ratelimit._reclaim
	{
		name: "reclaim-now", file: holds, what: "the longer nobody gives back an expired hold, the less comes",
		old: "last, greatest(rec.until, latest), rate, period,", new: "last, at, rate, period,",
		tests: "TestAnExpiredHoldComesBackAtItsEnd",
	}, {
		name: "settle-before", file: holds, what: "a Settle writes the row before what expired has come back",
		old: "        IF moves THEN -- after", new: "        IF false THEN -- after",
		tests: "TestAnExpiredHoldComesBackAtItsEnd",
	}, {
		name: "reclaim-waits", file: holds, what: "a denied call waits for a hold that somebody has locked",
		old: "           FOR UPDATE SKIP LOCKED);\n    SELECT f.value", new: "           FOR UPDATE);\n    SELECT f.value",
		tests: "TestHoldsReclaimPassesOverALockedHold",
	}, {
		name: "reclaim-in-a-row", file: holds, what: "of several expired holds, the first one alone comes back",
		old: "        IF x > '0' THEN\n            value :=", new: "        IF x > '0' AND ('0' < ANY (back)) IS NOT TRUE THEN\n            value :=",
		tests: "TestHoldsOnShards",
	},

	// ratelimit._settle
	{
		name: "settle-late-twice", file: holds, what: "a late worker settles the work that another delivery does",
		old: "NOT release AND (rec.id <> own OR rec.state = 'lapsed'", new: "NOT release AND (rec.state = 'lapsed'",
		tests: "TestAnIDThatIsTakenFromALateWorker",
	}, {
		name: "settle-says-less", file: holds, what: "a Settle does not say what other holds have given back",
		old: "            IF lapses <= at THEN -- the answer", new: "            IF false THEN -- the answer",
		tests: "TestASettleSaysWhatABalanceSays",
	}, {
		name: "settle-probe", file: holds, what: "a hold without an end of an unlimited key is not waited for",
		old: "EXIT WHEN over OR ratelimit._bar(", new: "EXIT WHEN over OR own_token IS NULL OR ratelimit._bar(",
		tests: "TestAnEndWaitsForACommit",
	}, {
		name: "end-no-mark", file: holds, what: "an end leaves a hold that comes later to nobody",
		old: "            VALUES (names[i], keys[i], own, 'released', 'none', own_token, 0, statement_timestamp(), 0, 1, at)\n", new: "            SELECT names[i], keys[i], own, 'released', 'none', own_token, 0, statement_timestamp(), 0, 1, at WHERE false\n",
		tests: "TestAnEndWaitsForItsHold|TestHoldsSnapshotBeforeTheHold",
	}, {
		name: "end-mark-bars", file: holds, what: "a mark bars other tokens, so the id is not free",
		old: "RETURN coalesce(token = own_token, ", new: "RETURN coalesce(token IS NOT NULL, ",
		tests: "TestAnEndWaitsForItsHold",
	}, {
		name: "end-mark-endless", file: holds, what: "the mark of an id without an end bars the next hold of it",
		old: " AND marked_at > statement_timestamp() AND", new: " AND",
		tests: "TestAnEndWaitsForItsHold",
	}, {
		name: "end-by-hand", file: byHand, what: "a release by SQL waits for no hold",
		old: "        EXIT WHEN ratelimit._bar(r.id, own,", new: "        EXIT WHEN true OR ratelimit._bar(r.id, own,",
		tests: "TestAnEndWaitsForItsHold|TestAnEndWaitsForACommit",
	}, {
		name: "settle-lapsed-window", file: holds, what: "late work is charged to a window that it did not run in",
		old: "CASE WHEN starts[i] IS NULL OR w IS NULL AND date_bin", new: "CASE WHEN true OR w IS NULL AND date_bin",
		tests: "TestHoldsLateInTheNextWindow",
	}, {
		name: "settle-lost-moves", file: holds, what: "of a lost hold, the other limits are settled",
		old: "    IF pg_catalog.cardinality(lost) > 0 THEN", new: "    IF pg_catalog.cardinality(lost) = n THEN",
		tests: "TestHoldsAreAllOrNothing",
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
		old: "h.ttl == Forever && v == verbHold:", new: "h.ttl < 0 && v == verbHold:",
		tests: "TestHoldsRefuse",
	}, {
		name: "slots-fraction", file: "ratelimit/call_demand.go", what: "half a slot is held",
		old: "d.count >= 1 && d.count == math.Trunc(d.count)", new: "d.count > math.Trunc(0.5)",
		tests: "TestHoldsRefuse",
	},

	// ratelimit._extend
	{
		name: "extend-waits", file: holds, what: "a hold that somebody has locked keeps all others from being extended",
		old: "h.token = tokens[i] AND h.state = 'held' FOR UPDATE SKIP LOCKED;", new: "h.token = tokens[i] AND h.state = 'held' FOR UPDATE;",
		tests: "TestDuringExtensions|TestDuringIsExtendedBesideALongTransaction",
	}, {
		name: "extend-unchecked", file: holds, what: "arrays of different lengths leave holds out",
		old: "n = pg_catalog.cardinality(ids) AND n = pg_catalog.cardinality(tokens) AND n = pg_catalog.cardinality(ttls)\n        AND '100", new: "n = n\n        AND '100",
		tests: "TestDuringExtensions",
	},

	// Once
	{
		name: "once-anew-held", file: holds, what: "an id that is counted anew is held",
		old: "               SET state = kind,", new: "               SET state = 'held',",
		tests: "TestOnceCountsOnce|TestOnceAndHold",
	}, {
		name: "once-in-memory", file: "ratelimit/call_decide.go", what: "the database in memory is asked what it does not have",
		old: "	if isInMemory(db) && (c.does.holds || c.does.slots &&", new: "	if isInMemory(db) && c.does.slots && (c.does.holds ||",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "once-slots", file: "ratelimit/verbs.go", what: "Once takes slots that never come back",
		old: "	verbOnce:    {holds: true,", new: "	verbOnce:    {holds: true, slots: true,",
		tests: "TestOnceRefuses",
	},

	// During
	{
		name: "during-late-answer", file: renew, what: "an answer that is late makes the hold longer than it is",
		old: "			row.certain = sent.Add(e.ttl)\n", new: "			row.certain = now.Add(e.ttl)\n",
		tests: "TestTheWorkEndsBeforeAnotherCanTakeTheSlot",
	}, {
		name: "during-begins", file: renew, what: "work begins although its hold is over",
		old: "	if e.begun = e.next.After(now); e.begun {", new: "	if e.begun = true; e.begun {",
		tests: "TestAHoldThatWasLongInComingIsExtendedFirst",
	}, {
		name: "during-many", file: renew, what: "one statement locks any number of holds",
		old: "	maxExtended = 1000 //", new: "	maxExtended = 1e6 //",
		tests: "TestHoldsThatAreSoonDueShareAStatement",
	}, {
		name: "during-pool", file: renew, what: "holds are extended on the pool whose connections the work has",
		old: "		n.own, n.ended = pool, pool.Close\n", new: "		n.own, n.ended = db, pool.Close\n",
		tests: "TestDuringNeedsNoConnectionOfThePool",
	}, {
		name: "during-silent-replaced", file: renew, what: "the next extension waits until a silent connection is closed",
		old: "	if err != nil && (ctx.Err() != nil || !survives(err)) {\n", new: "	if err != nil && !survives(err) && ctx.Err() == nil {\n",
		tests: "TestALineThatIsSilentIsReplaced",
	}, {
		name: "during-silent-driver", file: renew, what: "an extension waits for an answer as long as the driver does",
		old: "	case <-ctx.Done():\n		return dbsqlc.ExtendRow{}, ctx.Err()", new: "	case <-context.Background().Done():\n		return dbsqlc.ExtendRow{}, ctx.Err()",
		tests: "TestAnExtensionEndsInTimeOnAnyDriver",
	}, {
		name: "during-waits", file: renew, what: "a call whose context has ended waits as long as another call for the connection",
		old: "	case <-ctx.Done(): // another call", new: "	case <-context.Background().Done(): // another call",
		tests: "TestACallThatWaitsForTheLineEndsWithItsContext",
	}, {
		name: "during-failed-settles", file: during, what: "the id of work that has failed is refused for a day",
		old: "	return joined(err, lost, wrong, d.release(all))", new: "	return joined(err, lost, wrong, d.settle(all))",
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
		name: "during-conflicts", file: during, what: "where SERIALIZABLE is the default, a conflict of the hold is the caller's",
		old: "	err = l.Retry(deciding, func(ctx context.Context) (err error) {", new: "	err = l.Retry(deciding, func(ctx context.Context) (err error) {\n		defer func() { err = unknownUnless(err) }()",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "during-unsent", file: during, what: "on a *sql.DB, a wrong id or a plan without slots is refused by the server alone",
		old: "	if result, err := l.refusedUnsent(ctx, db, id, ttl, requests); err != nil {", new: "	if result, err := unasked, error(nil); err != nil {",
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
		old: "	case ttl == Forever:\n		return unasked, invalidCall", new: "	case ttl == 1:\n		return unasked, invalidCall",
		tests: "TestDuringRefuses",
	}, {
		name: "hold-in-turn-vain", file: "ratelimit/hold_wait.go", what: "an id that is held is waited for",
		old: "|| denied.Reason != ReasonQuota {", new: "|| denied.Reason == \"\" {",
		tests: "TestWhatWaitingDoesNotMendComesAtOnce",
	},

	// What else knows them
	{
		name: "hold-reset-stays", file: "migrations/engine/reset.sql", what: "what a reset forgot comes back",
		old: "AND l.state = 'held' ORDER BY l.id FOR UPDATE", new: "AND l.state = 'none' ORDER BY l.id FOR UPDATE",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "hold-sweep-none", file: "ratelimit/sweep.go", what: "no sweep gives back what expired holds hold",
		old: "if err := l.sweepHolds(ctx, run); err != nil && ", new: "if err := error(nil); err != nil && ",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "slots-expired-in-use", file: "migrations/engine/keys.sql", what: "tool and page show an expired hold as in use",
		old: "ratelimit._lapsed(name, key, at, 0,", new: "ratelimit._lapsed(name, key, '-infinity', 0,",
		tests: "TestTheToolAndThePageShowSlots",
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
		name: "hold-by-hand-slots-retry", file: byHand, what: "nobody says when slots are free",
		old: "nullif(ratelimit._retry_at('hold', q, h.value, h.ts, at), 'infinity') AS retry_at", new: "NULL::timestamptz AS retry_at",
		tests: "TestHoldByHand",
	}, {
		name: "release-by-hand-late", file: byHand, what: "whoever knows the id of work that is late keeps what it has used from being charged",
		old: "    IF NOT coalesce(rec.state IN ('held', 'lapsed') AND rec.token IS NOT DISTINCT FROM own, false) THEN\n", new: "    own := rec.token;\n    IF NOT coalesce(rec.state IN ('held', 'lapsed'), false) THEN\n",
		tests: "TestHoldByHandThatHasEnded",
	}, {
		name: "release-by-hand-stranger", file: byHand, what: "any token ends a hold",
		old: "own := coalesce(r.token, CASE WHEN forced AND rec.state = 'held' THEN rec.token END);", new: "own := rec.token;",
		tests: "TestHoldByHandAboveReadCommitted",
	}, {
		name: "release-by-hand-effect", file: byHand, what: "the history says that a key was reset whose hold was released",
		old: ", who, 'release');", new: ", who);",
		tests: "TestAnOperatorReleasesAHold",
	}, {
		name: "release-lost-no-error", file: "ratelimit/call_decide.go", what: "a release of what is not this token's is no error",
		old: "c.does.holds && !result.OK && (!c.does.deniable ||", new: "c.does.holds && !result.OK && (c.verb == verbSettle ||",
		tests: "TestHoldsRefuse",
	}, {
		name: "settle-unnamed", file: holdGo, what: "what a Settle does not name stays held",
		old: "			requests = append(requests, l.unnamed(t, c.verb == verbRelease))\n", new: "			_ = l.unnamed(t, c.verb == verbRelease)\n",
		tests: "TestHoldsAreAllOrNothing",
	}, {
		name: "refund-rest", file: "ratelimit/receipt.go", what: "a refund without a Count is of one token",
		old: "if r.tokens = t.Count - t.Refunded - asked[key]; !countable", new: "if !countable",
		tests: "TestAReceiptIsForWhatItNames",
	},

	// The plain statements
	{
		name: "hold-plain-unconditionally", file: plainHolds, what: "the plain statement of a hold does not check whether there is enough",
		old: "- $6::double precision >= $11::double precision\n       AND CASE", new: "- $6::double precision >= $11::double precision - 1e9\n       AND CASE",
		tests: "TestAPlainHoldDecidesAsTheFunction",
	}, {
		name: "hold-plain-scans", file: plainHolds, what: "the plain statement of a hold scans a small table, and goes on when it is large",
		old: "r.key = $10::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE\n       AND", new: "r.key = $10::text AND r.shard = 0 AND r.shards = 1\n       AND",
		tests: "TestAPlainHoldUsesTheIndexesOfSmallTables",
	}, {
		name: "hold-plain-known", file: plainHolds, what: "a duplicate waits for the row of the limit, and takes before it is refused",
		old: "THEN NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h", new: "THEN EXISTS (SELECT 1) OR NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h",
		tests: "TestHoldsADuplicateTakesNothing",
	}, {
		name: "hold-plain-rest", file: plainHolds, what: "the plain statement of a hold forgets what was left",
		old: "ELSE t.ts END, t.value, 1,", new: "ELSE t.ts END, 0, 1,",
		tests: "TestAPlainHoldDecidesAsTheFunction",
	}, {
		name: "hold-plain-late", file: plainHolds, what: "a plain hold that waited is of the window in which it began",
		old: "ELSE t.ts END, t.value, 1,", new: "ELSE statement_timestamp() END, t.value, 1,",
		tests: "TestWhatWaitedForItsRowComesBackToItsWindow",
	}, {
		name: "hold-late", file: "migrations/engine/holds.sql", what: "a hold that waited is of the window in which it began",
		old: "ELSE greatest(own_ts, d.at) END;", new: "ELSE d.at END;",
		tests: "TestWhatWaitedForItsRowComesBackToItsWindow",
	}, {
		name: "receipt-late", file: "ratelimit/call_result.go", what: "the receipt of a call that waited is of the window in which it began",
		old: "if row.TS > a.at {", new: "if false {",
		tests: "TestWhatWaitedForItsRowComesBackToItsWindow",
	}, {
		name: "hold-plain-in-vain", file: "ratelimit/call_update.go", what: "denied holds keep other limits from sending UPDATEs",
		old: "return \"txlimit: updates of holds\"", new: "return \"txlimit: updates\"",
		tests: "TestAPlainHoldIsNotTriedInVain",
	}, {
		name: "once-plain-held", file: "ratelimit/call_update.go", what: "what was taken once by the plain statement comes back",
		old: "\t\tstate = \"once\"", new: "\t\tstate = \"held\"",
		tests: "TestAHoldOnAPoolIsOneStatement",
	}, {
		name: "settle-plain-token", file: plainHolds, what: "the hold that another one has by now is settled",
		old: " AND h.token = $4::uuid THEN", new: " AND $4::uuid IS NOT NULL THEN",
		tests: "TestAPlainSettleEndsWhatIsHeldAlone",
	}, {
		name: "settle-plain-count", file: plainHolds, what: "what the token does not say stays taken",
		old: "THEN h.count = $5::double precision ELSE", new: "THEN $5::double precision IS NOT NULL ELSE",
		tests: "TestAPlainSettleEndsWhatIsHeldAlone",
	}, {
		name: "settle-plain-index", file: plainHolds, what: "the plain UPDATE of a settle walks over all live holds of its key",
		old: "   AND CASE WHEN h.state = 'held' AND", new: "   AND h.state = 'held' AND h.token IS NOT NULL AND CASE WHEN",
		tests: "TestAPlainHoldUsesTheIndexesOfSmallTables",
	},
}
