package main

const (
	holds   = "migrations/engine/holds.sql"
	holdGo  = "ratelimit/hold.go"
	slotsGo = "ratelimit/limit_slots.go"
)

var holdMutations = []mutation{
	// _ratelimit_hold, _ratelimit_known and _ratelimit_claim
	{
		name: "hold-look-first", file: holds, what: "a duplicate takes, and rolls back, and keeps others waiting",
		old: "        IF current_setting('transaction_isolation') <> 'serializable' THEN\n            at :=", new: "        IF false THEN\n            at :=",
		tests: "TestHoldsADuplicateTakesNothing",
	}, {
		name: "hold-denied-before-lock", file: holds, what: "who waited for the lock is denied by what was there before",
		old: "            due := NOT locked;", new: "            due := false;",
		tests: "TestHoldsWhoWaitedAsksAgain",
	}, {
		name: "hold-denied-own", file: holds, what: "the holder of the last slot is denied for its own slot, as a stranger",
		old: "        ELSIF state IS NULL THEN -- denied", new: "        ELSIF false THEN -- denied",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-no-undo", file: holds, what: "what a duplicate took stays taken",
		old: "                IF state <> 'taken' THEN\n                    RAISE SQLSTATE 'RL001';\n                END IF;\n", new: "",
		tests: "TestHoldsOfSlots|TestHoldsGiveBackOnce",
	}, {
		name: "hold-no-reclaim", file: holds, what: "expired holds are not given back",
		old: "h.state = 'held' AND h.token IS NOT NULL AND h.until <= at);\n        END LOOP;\n        IF due", new: "false);\n        END LOOP;\n        IF due",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-token-kept", file: holds, what: "an id that is taken anew keeps its old token",
		old: "unit = coalesce(units[i]), token = own_token,", new: "unit = coalesce(units[i]),",
		tests: "TestHoldsOfSlots|TestHoldsGiveBackOnce",
	}, {
		name: "hold-endless-some", file: holds, what: "an id that one of two limits has is a repetition of both",
		old: "        endless := endless AND coalesce(rec.state = 'held' AND rec.until = 'infinity', false);\n        CONTINUE WHEN rec.state IS NULL;", new: "        CONTINUE WHEN rec.state IS NULL;\n        endless := endless AND rec.until = 'infinity';",
		tests: "TestHoldsWithoutAnEnd",
	}, {
		name: "hold-settled-free", file: holds, what: "the id of settled work is free at once",
		old: "ELSIF rec.state IN ('settled', 'once') AND rec.until > at THEN", new: "ELSIF rec.state = 'once' THEN",
		tests: "TestHoldsOfSlots|TestHoldsGiveBackOnce",
	}, {
		name: "hold-settled-forever", file: holds, what: "the id of settled work is never free",
		old: "ELSIF rec.state IN ('settled', 'once') AND rec.until > at THEN", new: "ELSIF rec.state IN ('settled', 'once') THEN",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-none-counts", file: holds, what: "a hold of an unlimited limit holds tokens",
		old: "counts[i] := CASE WHEN units[i] = 'none' THEN 0 ELSE counts[i] END;", new: "counts[i] := counts[i];",
		tests: "TestHoldsOfUnlimited",
	},

	// _ratelimit_reclaim
	{
		name: "reclaim-waits", file: holds, what: "a denied call waits for a hold that somebody has locked",
		old: "             LIMIT 1000\n               FOR UPDATE SKIP LOCKED\n        LOOP\n            ended", new: "             LIMIT 1000\n               FOR UPDATE\n        LOOP\n            ended",
		tests: "TestHoldsReclaimPassesOverALockedHold",
	}, {
		name: "reclaim-in-a-row", file: holds, what: "of several expired holds, the first one alone comes back",
		old: "                freed := freed + back;\n                v := pg_catalog.array_fill((total + back) / m::double precision, ARRAY[m]);", new: "                freed := freed + back;\n                v := CASE WHEN freed = back THEN pg_catalog.array_fill((total + back) / m::double precision, ARRAY[m]) ELSE v END;",
		tests: "TestHoldsOnShards|TestHoldsGiveBackOnce",
	}, {
		name: "reclaim-kept", file: holds, what: "a lapsed hold is taken to have kept what came back",
		old: "count = rec.count - back, until = kept", new: "until = kept",
		tests: "TestHoldsOfTokens|TestHoldsGiveBackOnce",
	},

	// _ratelimit_settle
	{
		name: "settle-no-token", file: holds, what: "everybody who knows the id can settle",
		old: "rec.token IS DISTINCT FROM own_token OR rec.state = 'once'", new: "rec.state = 'once'",
		tests: "TestHoldsOfSlots|TestHoldsGiveBackOnce",
	}, {
		name: "settle-probe", file: holds, what: "a hold of nothing that is newer than the snapshot is lost",
		old: "        IF NOT there AND current_setting", new: "        IF false AND current_setting",
		tests: "TestHoldsSnapshotBeforeTheHold",
	}, {
		name: "settle-lapsed-slots", file: holds, what: "slots that are another's by now are settled",
		old: "            OR rec.state = 'lapsed' AND rec.unit = 'slots' AND NOT release THEN", new: "            THEN",
		tests: "TestHoldsOfSlots",
	}, {
		name: "settle-lapsed-window", file: holds, what: "late work is charged to a window that it did not run in",
		old: "            ELSIF (starts[i] IS NULL OR", new: "            ELSIF (true OR",
		tests: "TestHoldsLateInTheNextWindow",
	}, {
		name: "settle-lost-moves", file: holds, what: "of a lost hold, the other limits are settled",
		old: "    IF NOT release AND pg_catalog.cardinality(lost) > 0 THEN", new: "    IF NOT release AND pg_catalog.cardinality(lost) = n THEN",
		tests: "TestHoldsAreAllOrNothing",
	}, {
		name: "release-any", file: holds, what: "a Release deletes what is not its own",
		old: "        CONTINUE WHEN states[i] NOT IN ('held', 'lapsed'); -- nobody else's row is touched\n", new: "",
		tests: "TestHoldsOfSlots|TestHoldsGiveBackOnce|TestHoldsWithoutAnEnd",
	}, {
		name: "release-again-locks", file: holds, what: "a Release after a Settle waits for the limit",
		old: "    IF release AND own_token IS NOT NULL AND", new: "    IF false AND",
		tests: "TestHoldsAReleaseAfterASettleWaitsForNothing",
	},

	// Slots and Go
	{
		name: "slots-expired", file: holds, what: "the balance does not count expired holds as free",
		old: "            d.value[j] := d.value[j] + s.expired;\n", new: "",
		tests: "TestHoldsOfSlots",
	}, {
		name: "slots-sum", file: holds, what: "the earliest end alone makes room for all",
		old: "        free := free + rec.count;", new: "        free := 0;",
		tests: "TestHoldsRetryAt",
	}, {
		name: "hold-receipt", file: "ratelimit/verbs.go", what: "a hold has a receipt",
		old: "	verbHold:    {holds: true,", new: "	verbHold:    {takes: true, holds: true,",
		tests: "TestHoldsOfSlots",
	}, {
		name: "hold-ttl", file: holdGo, what: "a ttl below zero is forever",
		old: "if h.ttl != forever && (h.ttl < minTTL", new: "if h.ttl > forever && (h.ttl < minTTL",
		tests: "TestHoldsRefuse",
	}, {
		name: "settle-counts", file: holdGo, what: "a Settle without Count settles one token",
		old: "		case c.verb == verbSettle && !r.limit.slots:", new: "		case false:",
		tests: "TestHoldsRefuse",
	}, {
		name: "release-counts", file: holdGo, what: "a Release without Count charges one token",
		old: "			c.requests[i].tokens = 0\n", new: "",
		tests: "TestHoldsReleaseOfWhatWasUsed",
	}, {
		name: "hold-calendar", file: "ratelimit/limit_calendar.go", what: "nothing of a calendar comes back",
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

	// What else knows them
	{
		name: "hold-reset-stays", file: "migrations/engine/reset.sql", what: "what a reset forgot comes back",
		old: "AND l.state = 'held' ORDER BY l.id FOR UPDATE", new: "AND l.state = 'none' ORDER BY l.id FOR UPDATE",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "slots-reset", file: "migrations/engine/reset.sql", what: "a reset frees slots that are in use",
		old: "            IF h.unit = 'slots' THEN", new: "            IF false THEN",
		tests: "TestSlotsAreDefined",
	}, {
		name: "hold-sweep-none", file: "ratelimit/sweep.go", what: "no sweep gives back what expired holds hold",
		old: "	if err := l.sweepHolds(ctx, inTx); err != nil {", new: "	if err := error(nil); err != nil {",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "hold-sweep-full", file: "migrations/engine/holds.sql", what: "an expired hold of a key that is full, and has no row, stays for good",
		old: "    IF n = 0 THEN\n        m := 0;", new: "    IF false THEN\n        m := 0;",
		tests: "TestHoldsAreResetAndSwept",
	}, {
		name: "slots-swept-in-use", file: "migrations/engine/sweep.sql", what: "the row of slots in use is deleted",
		old: "        varies := '0';\n        RETURN;", new: "        RETURN;",
		tests: "TestSlotsAreDefined",
	}, {
		name: "slots-expired-in-use", file: "migrations/engine/keys.sql", what: "tool and page show an expired hold as in use",
		old: "    used := s.used - s.expired;", new: "    used := s.used;",
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
}
