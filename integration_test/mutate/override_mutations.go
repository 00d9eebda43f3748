package main

// overrideMutations are edits of overrides and definitions: in Go, and in the engine.
var overrideMutations = []mutation{
	{
		name: "curve-reach", file: "internal/keystate/keystate.go", what: "the curve of a calendar goes flat after a hundred windows",
		old: "q.capacity, q.start, l.windows)", new: "q.capacity, q.start, q.windows)",
		tests: "TestConsoleCurvesReachToWhereTheKeyIsFull",
	}, {
		name: "no-slots-policy", file: "migrations/engine/ratelimit.sql", what: "in tool, page and SQL, slots that are overridden to 0 are taken",
		old: "        q.effect := CASE WHEN n.effect = 'numbers' AND n.capacity = '0' THEN 'block' WHEN n.effect IN", new: "        q.effect := CASE WHEN n.effect IN",
		tests: "TestOverridesToNoSlots",
	}, {
		name: "no-slots-in-use", file: keysSQL, what: "of slots that are overridden to 0, nobody sees how many are in use",
		old: "AND NOT (n.kind = 'slots' AND numbers.effect = 'numbers') THEN 0", new: "THEN 0",
		tests: "TestOverridesToNoSlots",
	}, {
		name: "no-slots-listed", file: keysSQL, what: "a key without a row whose slots are overridden to 0 is not listed",
		old: "CASE (k.n).kind WHEN 'slots' THEN (k.n).capacity ELSE (k.n).rate END = '0')", new: "(k.n).rate = '0')",
		tests: "TestOverridesToNoSlots",
	}, {
		name: "no-slots-ends", file: "cmd/txlimit/show.go", what: "show says that there are no slots as if that were for good",
		old: "	if k.RetryAt == nil && k.NotBefore == nil {", new: "	if true {",
		tests: "TestOverridesToNoSlots",
	}, {
		name: "no-slots-released", file: "cmd/txlimit/keys.go", what: "keys waits for the release of a slot where there are none",
		old: "k.Effect == effectNumbers && !k.noSlots {", new: "k.Effect == effectNumbers {",
		tests: "TestOverridesToNoSlots",
	}, {
		name: "known-full", file: "migrations/engine/ratelimit.sql", what: "tool, page and SQL say that a key is full when an override ends, although its numbers are then the program's",
		old: "    WHILE q.effect <> 'varies' LOOP\n        full_at := CASE", new: "    LOOP\n        full_at := CASE",
		tests: "TestOverridesThatEndBeforeTheProgramsNumbers",
	}, {
		name: "known-run", file: "migrations/engine/ratelimit.sql", what: "SQL says that work may run when an override ends, although the numbers are then the program's",
		old: "        ELSIF q.effect = 'varies' THEN\n            RAISE", new: "        ELSIF false THEN\n            RAISE",
		tests: "TestOverridesThatEndBeforeTheProgramsNumbers",
	}, {
		name: "known-retry", file: keysSQL, what: "tool, page and SQL say that a key is granted when an override ends, although its numbers are then the program's",
		old: "        IF retry_at >= not_before THEN", new: "        IF false THEN",
		tests: "TestOverridesThatEndBeforeTheProgramsNumbers",
	}, {
		name: "known-retry-at-end", file: keysSQL, what: "the end of an override counts as an instant that is known",
		old: "        IF retry_at >= not_before THEN", new: "        IF retry_at > not_before THEN",
		tests: "TestOverridesThatEndBeforeTheProgramsNumbers",
	}, {
		name: "known-retry-before", file: keysSQL, what: "what is before the end of an override is not known",
		old: "        IF retry_at >= not_before THEN", new: "        IF true THEN",
		tests: "TestOverridesThatEndBeforeTheProgramsNumbers",
	}, {
		name: "known-page", file: "ratelimit/console/queries.go", what: "the page says nothing of an override after which the numbers are the program's",
		old: "	if b.NotBefore != nil || b.Short() {", new: "	if false {",
		tests: "TestOverridesThatEndBeforeTheProgramsNumbers",
	}, {
		name: "known-page-full", file: "ratelimit/console/queries.go", what: "the page says Full of a key of which it does not know when it is full",
		old: "	return b.FullAt == nil && b.Used == nil", new: "	return false && b.FullAt == nil && b.Used == nil",
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
		name: "decree-not-followed", file: "ratelimit/overrides_write.go", what: "a program does not know at once what it has decided on a pool",
		old: "		l.overrides.follow(ctx)\n", new: "",
		tests: "TestABlockByGoHoldsAtOnce",
	}, {
		name: "decree-in-tx-not-followed", file: "ratelimit/tx_outside.go", what: "a program does not know at once what it has committed",
		old: "		open.follow.Store(changed)\n", new: "		_ = open\n",
		tests: "TestABlockByGoHoldsAtOnce",
	}, {
		name: "decree-late", file: "ratelimit/overrides_write.go", what: "an end in the past reaches the server",
		old: "algebra.At(at.Time) <= l.overrides.moment(clockOf(db)).high", new: "false",
		tests: "TestWhatGoRefusesToOverrideIsNotSent",
	}, {
		name: "decree-not-followed-at-all", file: "ratelimit/overrides_write.go", what: "a Limiter that follows no overrides makes some",
		old: "case l.overrides == nil:", new: "case false:",
		tests: "TestWhatGoRefusesToOverrideIsNotSent",
	}, {
		name: "decree-every-key", file: "ratelimit/overrides_write.go", what: "an override of all keys is for the empty key",
		old: "Valid: s != \"\"}", new: "Valid: true}",
		tests: "TestGoOverridesAsSQLDoes",
	}, {
		name: "decree-unblock-all", file: "ratelimit/overrides_write.go", what: "Unblock ends other overrides, too",
		old: "ends: true, effect: block}", new: "ends: true}",
		tests: "TestGoOverridesAsSQLDoes",
	}, {
		name: "decree-options", file: "ratelimit/overrides_write.go", what: "Override passes over options that it cannot follow",
		old: "	if named.set(d.numbers, []string{\"Rate\", \"Capacity\", \"MaxReserved\"}) != nil {", new: "	if named.set(d.numbers, []string{\"Rate\", \"Capacity\", \"MaxReserved\"}); false {",
		tests: "TestWhatGoRefusesToOverrideIsNotSent",
	}, {
		name: "move-lifted", file: "ratelimit/call_overrides.go", what: "nothing is moved while an override lifts the limit",
		old: "does.liftable() && !doubtful", new: "(does.liftable() || does.moves) && !doubtful",
		tests: "TestMoveUnderOverrides",
	}, {
		name: "override-false-alarms", file: "ratelimit/overrides.go", what: "whoever notifies has the overrides polled twenty times as often",
		old: "			believed--\n", new: "",
		tests: "TestNotificationsThatTellOfNothing",
	}, {
		name: "override-deaf", file: "ratelimit/overrides.go", what: "notifications are not believed again",
		old: "believed = min(believed+1, falseAlarms)", new: "_ = believed",
		tests: "TestNotificationsThatTellOfNothing",
	}, {
		name: "override-oldest", file: "ratelimit/overrides.go", what: "a newer override comes after an older one",
		old: "cmp.Compare(other.made, o.made), cmp.Compare(other.id, o.id)", new: "cmp.Compare(o.made, other.made), cmp.Compare(o.id, other.id)",
		tests: "TestWhichOverrideIsInForce|TestOverridesComeAndGo",
	}, {
		name: "override-under-block", file: "ratelimit/overrides.go", what: "what is made under a block lifts it",
		old: "if o.effect == block {", new: "if false {",
		tests: "TestWhichOverrideIsInForce|TestOverridesComeAndGo",
	}, {
		name: "override-made", file: "ratelimit/overrides.go", what: "the highest id is the newest",
		old: "made: algebra.Micros(page.Mades[i]), ", new: "",
		tests: "TestOverridesThatWereCopied",
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
		name: "steer-silent", file: "migrations/engine/overrides.sql", what: "SQL does not say that a block stays",
		old: "IF blocked IS NOT NULL THEN", new: "IF false THEN",
		tests: "TestABlockGoesBeforeWhatIsMadeUnderIt",
	}, {
		name: "override-all-first", file: "ratelimit/call_overrides.go", what: "an override for all keys comes before the key's own",
		old: "search:\n	for _, list := range lists {\n", new: "search:\n	for _, list := range [][]override{lists[1], lists[0]} {\n",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "override-for-ever", file: "ratelimit/call_overrides.go", what: "an override does not end",
		old: "			case in.until <= now.low:\n", new: "			case false:\n",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "block-plan", file: "ratelimit/call_overrides.go", what: "a plan of rate 0 is the reason of a denial, although other numbers hold beside the block",
		old: "if does.deniable && limit.numbers.Rate > 0 { // else", new: "if does.deniable { // else",
		tests: "TestADenialTellsWhy",
	}, {
		name: "override-block-wait", file: "ratelimit/call_overrides.go", what: "a block lets Wait pass",
		old: "in.effect == block && (does.deniable ||", new: "in.effect == block && (does.deniable && !does.atMostFull ||",
		tests: "TestWhichOverrideIsInForce|TestADenialTellsWhyOnEveryWayIn",
	}, {
		name: "override-unlimited-refund", file: "ratelimit/call_overrides.go", what: "tokens taken before are not given back to a key that is unlimited",
		old: "in.effect == noLimit && does.liftable() &&", new: "in.effect == noLimit &&",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "override-lapse-unlimited", file: "ratelimit/call_overrides.go", what: "without the table, unlimited keys stay so",
		old: "does.liftable() && !doubtful:", new: "does.liftable():",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "override-lapse-numbers", file: "ratelimit/call_overrides.go", what: "without the table, raised numbers stay",
		old: "	if doubtful {\n", new: "	if false {\n",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "override-lapse-soon", file: "ratelimit/call_overrides.go", what: "raised numbers lapse when the table is read, too",
		old: "time.Duration(o.seen.Load()) > staleAfter", new: "time.Duration(o.seen.Load()) > 0",
		tests: "TestAnOverrideIsFollowed",
	}, {
		name: "override-capacity", file: "ratelimit/call_overrides.go", what: "a capacity that is the rate does not follow a new rate",
		old: "} else if n.Capacity == n.Rate && !math.IsNaN(in.rate) {", new: "} else if false {",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "override-callers-own", file: "ratelimit/call_overrides.go", what: "the caller's requests are changed",
		old: "applied, in, now = slices.Clone(requests), make(", new: "applied, in, now = requests, make(",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "override-count", file: "ratelimit/overrides.go", what: "a changed row is counted again",
		old: "			} else {\n				t.count.Add(1)\n			}\n", new: "			}\n			t.count.Add(1)\n",
		tests: "TestOverridesComeAndGo",
	}, {
		name: "override-removed", file: "ratelimit/overrides.go", what: "a removed override stays",
		old: "				list = slices.Delete(list, at, at+1)\n", new: "				_ = at\n",
		tests: "TestOverridesComeAndGo|TestAnOverrideIsFollowed",
	}, {
		name: "override-pages", file: "ratelimit/overrides.go", what: "only the first page is read",
		old: "		if more = page.More.Bool; more {", new: "		if more = false; more {",
		tests: "TestManyOverrides",
	}, {
		name: "override-until-infinity", file: "ratelimit/overrides.go", what: "an override without an end has an end",
		old: "if page.Untils[i] == math.MaxInt64 {", new: "if false {",
		tests: "TestADenialTellsWhyOnEveryWayIn|TestAnOverrideIsFollowed",
	}, {
		name: "override-sweep", file: "migrations/engine/sweep.sql", what: "a sweep does not mind overrides",
		old: "o.name = name AND o.effect = 'numbers'", new: "false AND o.name = name AND o.effect = 'numbers'",
		tests: "TestASweepMindsAllDefinitionsAndOverrides|TestASweepMindsOverrides",
	}, {
		name: "override-retry-at", file: "ratelimit/call_policy.go", what: "a denial by a block does not say when the block ends",
		old: "r.setRetryAt(c.blockedUntil(a.at, c.asides, c.rowless))", new: "r.setRetryAt(algebra.Forever)",
		tests: "TestABlockHolds",
	}, {
		name: "override-after-plan", file: "ratelimit/call_policy.go", what: "a plan that grants nothing is for good, although another override follows",
		old: "r.setRetryAt(c.blockedUntil(a.at, c.asides, c.rowless))", new: "r.setRetryAt(map[bool]algebra.Micros{true: algebra.Forever, false: c.blockedUntil(a.at, c.asides, c.rowless)}[c.refusal() == ReasonPlan])",
		tests: "TestAnOverrideThatEnds",
	}, {
		name: "override-database-clock", file: "ratelimit/call_overrides.go", what: "an override ends by the time of the process, whatever Limiter.Clock says",
		old: "	if at.Valid {\n		return moment{algebra.At(at.Time), algebra.At(at.Time)}\n	}\n", new: "",
		tests: "TestWhichOverrideIsInForce",
	}, {
		name: "publish-period", file: "ratelimit/publish.go", what: "days are left out of a period",
		old: "	case days == 0:\n", new: "	case true:\n",
		tests: "TestAPeriodForPostgres",
	},
	{
		name: "steer-late", file: "migrations/engine/overrides.sql", what: "an override that commits late is missed",
		old: "NOT pg_visible_in_snapshot(o.changed_in, since)", new: "o.changed_in >= pg_snapshot_xmax(since)",
		tests: "TestAnOverrideThatCommitsLateIsNotMissed",
	}, {
		name: "steer-removed-late", file: "migrations/engine/overrides.sql", what: "a removal is not noted as a change",
		old: ", changed_in = xid\n", new: "\n",
		tests: "TestAnOverrideIsFollowed",
	}, {
		name: "steer-add-twice", file: "migrations/engine/overrides.sql", what: "the difference is added each time",
		old: "IF o.added IS NOT NULL THEN", new: "IF false THEN",
		tests: "TestWhatIsAddedToARaisedLimit",
	}, {
		name: "steer-add-before", file: "migrations/engine/overrides.sql", what: "the capacity that is passed counts against that of the override before",
		old: "WHEN was.override IS NOT NULL AND capacity <> was.capacity THEN", new: "WHEN false THEN",
		tests: "TestWhatIsAddedAfterAnOlderOverride",
	}, {
		name: "steer-add-known", file: "migrations/engine/overrides.sql", what: "what the override before has is not used",
		old: "was.capacity := CASE WHEN was.effect IN ('numbers', 'varies') THEN was.capacity END;", new: "was.capacity := CASE WHEN was.effect = 'numbers' THEN was.capacity END;",
		tests: "TestWhatIsAddedAfterAnOlderOverride",
	}, {
		name: "steer-add-whole", file: "migrations/engine/overrides.sql", what: "the new capacity is that of the override before",
		old: "SELECT f.capacity INTO o.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), varying => true, under => o.id)", new: "SELECT f.capacity INTO o.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), o.id, varying => true)",
		tests: "TestWhatIsAddedAfterAnOlderOverride",
	}, {
		name: "steer-names", file: "migrations/engine/overrides.sql", what: "a refusal lists names by the alphabet",
		old: "SELECT 2 * count(*) FILTER (WHERE strpos(lower(d.name), p.pair) > 0)", new: "SELECT 0 * count(*)",
		tests: "TestAMistypedNameIsToldTheNearest",
	}, {
		name: "steer-add-shards", file: "migrations/engine/overrides.sql", what: "each shard gets the whole difference",
		old: "SET value = r.value + more / r.shards::double precision\n", new: "SET value = r.value + more\n",
		tests: "TestWhatIsAddedToARaisedLimit",
	}, {
		name: "steer-restore-all", file: "migrations/engine/overrides.sql", what: "to unblock a key ends its other overrides, too",
		old: "AND (effect IS NULL OR o.effect = effect);", new: ";",
		tests: "TestAnOverrideIsFollowed",
	}, {
		name: "steer-typo", file: "migrations/engine/overrides.sql", what: "an override may name a limit that nobody has",
		old: "AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d\n                 WHERE d.current OR d.published_at > clock_timestamp() - interval '7 days');", new: "AND false;",
		tests: "TestSteeringRefusesWhatIsWrong",
	}, {
		name: "steer-past", file: "migrations/engine/overrides.sql", what: "an override may end before it begins",
		old: "WHEN until <= clock_timestamp() THEN", new: "WHEN false THEN",
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
		name: "steer-keys-own", file: keysSQL, what: "in the list of keys, what is decided of every key counts for those with an override of their own, too",
		old: "CASE WHEN o.key IS NOT NULL THEN ratelimit._under(d, o.of) ELSE every END AS n", new: "every AS n",
		tests: "TestByHandUnderOverrides",
	}, {
		name: "steer-publish-both", file: "migrations/engine/definitions.sql", what: "two programs may define one name by different clocks",
		old: "                IF FOUND THEN", new: "                IF false THEN",
		tests: "TestSteeringRefusesWhatIsWrong",
	}, {
		name: "steer-publish-anchor", file: "migrations/engine/definitions.sql", what: "a zone in a published anchor is ignored",
		old: "!~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}( ([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?)?$'", new: "!~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}'",
		tests: "TestSteeringRefusesWhatIsWrong",
	}, {
		name: "publish-types", file: definitions, what: "a number that is written as a string is published",
		old: "     WHERE f.expected <> f.type\n", new: "     WHERE false\n",
		tests: "TestPublishReadsFieldsAsRatelimitAllDoes",
	}, {
		name: "publish-unreadable", file: definitions, what: "a number that is too large is an error of Postgres that names no limit",
		old: "        EXCEPTION WHEN data_exception THEN -- a text", new: "        EXCEPTION WHEN data_corrupted THEN -- a text",
		tests: "TestPublishReadsFieldsAsRatelimitAllDoes",
	}, {
		name: "publish-half-shards", file: definitions, what: "a half shard is rounded",
		old: "shards BETWEEN '1' AND '100' AND shards = trunc(shards)", new: "shards BETWEEN '1' AND '100'",
		tests: "TestPublishReadsFieldsAsRatelimitAllDoes",
	}, {
		name: "publish-start", file: definitions, what: "a start may be another instant in each call of ratelimit.publish",
		old: "IF wrong IS NULL AND definition->>'start'::text !~", new: "IF false AND definition->>'start'::text !~",
		tests: "TestAStartInJSONIsOneInstant",
	}, {
		name: "publish-start-offset", file: definitions, what: "a published start without an offset is another instant in each session",
		old: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$'", new: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)?$'",
		tests: "TestAStartInJSONIsOneInstant",
	}, {
		name: "all-start", file: ratelimit, what: "a start may be another instant in each call of ratelimit.consume_all, which denies nothing then",
		old: "IF wrong IS NULL AND request->>'start'::text !~", new: "IF false AND request->>'start'::text !~",
		tests: "TestAStartInJSONIsOneInstant",
	}, {
		name: "all-start-offset", file: ratelimit, what: "a start without an offset is another instant in each session",
		old: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$'", new: "(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)?$'",
		tests: "TestAStartInJSONIsOneInstant",
	}, {
		name: "publish-zone", file: definitions, what: "two programs may define one calendar window in other zones",
		old: "(o.zone <> d.zone OR NOT ratelimit", new: "(NOT ratelimit",
		tests: "TestACalendarInUseIsRefused",
	}, {
		name: "publish-anchor", file: definitions, what: "two programs may define one calendar window from other anchors",
		old: "o.zone <> d.zone OR NOT ratelimit._same_windows(d.period, d.anchor, o.anchor)", new: "o.zone <> d.zone",
		tests: "TestACalendarInUseIsRefused",
	}, {
		name: "publish-zone-varies", file: definitions, what: "a program whose keys have zones of their own is refused",
		old: "OR d.varies IS NULL AND o.varies IS NULL AND (o.zone", new: "OR o.varies IS NULL AND (o.zone",
		tests: "TestACalendarInUseIsRefused",
	}, {
		name: "publish-zone-other-varies", file: definitions, what: "a program is refused beside one whose keys have zones of their own",
		old: "OR d.varies IS NULL AND o.varies IS NULL AND (o.zone", new: "OR d.varies IS NULL AND (o.zone",
		tests: "TestACalendarInUseIsRefused",
	}, {
		name: "windows-time-of-day", file: calendarSQL, what: "windows at other times of day are the same",
		old: "RETURN a::time = b::time AND CASE", new: "RETURN CASE",
		tests: "TestAnchorsWithTheSameWindows",
	}, {
		name: "windows-weeks", file: calendarSQL, what: "weeks from other days are the same",
		old: "% date_part('day', period)::integer = 0", new: "% 1 = 0",
		tests: "TestAnchorsWithTheSameWindows",
	}, {
		name: "windows-day-of-month", file: calendarSQL, what: "months from other days are the same",
		old: "ELSE date_part('day', a) = date_part('day', b)\n        AND ", new: "ELSE ",
		tests: "TestAnchorsWithTheSameWindows",
	}, {
		name: "windows-quarters", file: calendarSQL, what: "quarters from other months are the same",
		old: "% (date_part('year', period) * '12' + date_part('month', period))::integer = 0", new: "% 1 = 0",
		tests: "TestAnchorsWithTheSameWindows",
	}, {
		name: "publish-zone-case", file: definitions, what: "a zone that Go cannot load is published",
		old: "IF zone <> d.zone THEN", new: "IF false THEN",
		tests: "TestOnlyWhatGoReadsIsACalendar",
	}, {
		name: "publish-zone-unknown", file: definitions, what: "a zone that nobody knows is published",
		old: "ELSIF zone IS NULL AND heartbeat IS NULL THEN", new: "ELSIF false THEN",
		tests: "TestOnlyWhatGoReadsIsACalendar",
	}, {
		name: "publish-zone-of-go", file: definitions, what: "a program does not start where Postgres has older zone files",
		old: "ELSIF zone IS NULL AND heartbeat IS NULL THEN", new: "ELSIF zone IS NULL THEN",
		tests: "TestOnlyWhatGoReadsIsACalendar",
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
		name: "publish-first", file: "migrations/engine/definitions.sql", what: "an older version that starts again is the newest",
		old: "first := coalesce(first, at);", new: "first := at;",
		tests: "TestTheNewestVersionInUseCounts",
	}, {
		name: "publish-again", file: "migrations/engine/definitions.sql", what: "an operator cannot make an older list the newest",
		old: "first := CASE WHEN heartbeat IS NOT NULL THEN", new: "first := CASE WHEN true THEN",
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
		name: "publish-always", file: "migrations/engine/definitions.sql", what: "an unchanged list is published anew",
		old: "winner := CASE WHEN known THEN", new: "winner := CASE WHEN false THEN",
		tests: "TestAnUnchangedListTakesNoLock",
	}, {
		name: "publish-forgets", file: "migrations/engine/definitions.sql", what: "an older list in use is forgotten after 7 days",
		old: "OR NOT o.current AND o.published_at < hour", new: "",
		tests: "TestTheNewestVersionInUseCounts",
	}, {
		name: "publish-nothing", file: "migrations/engine/definitions.sql", what: "an empty list withdraws what was published",
		old: "IF definitions = '[]' THEN", new: "IF false THEN",
		tests: "TestSteeringRefusesWhatIsWrong",
	}, {
		name: "publish-nothing-go", file: "ratelimit/publish.go", what: "no limits withdraw what was published",
		old: "if len(limits) == 0 {", new: "if false {",
		tests: "TestPublish",
	}, {
		name: "withdraw-nobody", file: "migrations/engine/definitions.sql", what: "a mistyped name of a program is withdrawn",
		old: "HAVING count(*) > '0'", new: "HAVING true",
		tests: "TestSteeringRefusesWhatIsWrong",
	}, {
		name: "publish-conflict", file: "migrations/engine/definitions.sql", what: "a conflict with another program stops the heartbeats of a list in use",
		old: "IF NOT known AND (d.rate > '0'", new: "IF (d.rate > '0'",
		tests: "TestAConflictStopsNoHeartbeat",
	}, {
		name: "publish-conflict-in-use", file: "migrations/engine/definitions.sql", what: "a kind is not refused where only an older version defines it otherwise",
		old: "AND (o.current OR o.alive_until > at) AND", new: "AND o.current AND",
		tests: "TestAKindInUseIsRefused",
	}, {
		name: "publish-withdraws", file: "migrations/engine/definitions.sql", what: "a list that is withdrawn stays in use",
		old: "alive_until = CASE WHEN hash IS NOT NULL THEN old.alive_until END", new: "alive_until = old.alive_until",
		tests: "TestAKindInUseIsRefused",
	}, {
		name: "publish-age", file: "migrations/engine/definitions.sql", what: "a list that was not used for 7 days is new when it comes back",
		old: "AND (old.published_at < year OR EXISTS", new: "AND (true OR EXISTS",
		tests: "TestAListIsAsOldAsItWas",
	}, {
		name: "publish-any-level", file: "migrations/engine/definitions.sql", what: "lists are changed above READ COMMITTED, unseen by each other",
		old: "IF current_setting('transaction_isolation') <> 'read committed' THEN -- it would", new: "IF false THEN -- it would",
		tests: "TestPublishersSeeEachOther",
	}, {
		name: "publish-level", file: "ratelimit/publish.go", what: "nothing can be published where the default level is above READ COMMITTED",
		old: "if sqlState(err) == stateIsolation {", new: "if false {",
		tests: "TestPublishersSeeEachOther",
	}, {
		name: "publish-waited", file: "migrations/engine/definitions.sql", what: "a list is not in use if Open waited for its Publish",
		old: "alive_until = coalesce(alive, old.alive_until);", new: "alive_until = old.alive_until;",
		tests: "TestOpenWaitsForItsOwnPublish",
	}, {
		name: "publish-rows-first", file: "migrations/engine/definitions.sql", what: "a heartbeat that changes what counts locks rows before the table",
		old: "        LOCK TABLE", new: "        PERFORM FROM ratelimit.definitions AS o WHERE o.program = program FOR UPDATE;\n        LOCK TABLE",
		tests: "TestAHeartbeatLocksNoRowBeforeTheTable",
	}, {
		name: "publish-older-sql", file: overrides, what: "SQL of an older version that runs finds no numbers",
		old: "(f.current OR f.alive_until > clock_timestamp())", new: "f.current",
		tests: "TestTheNewestVersionInUseCounts",
	}, {
		name: "steer-older-slots", file: overrides, what: "an override gives a rate to slots that only an older version defines",
		old: "AND (d.current OR d.alive_until > clock_timestamp()));", new: "AND d.current);",
		tests: "TestAnOlderVersionsLimitIsOverriddenAsWhatItIs",
	}, {
		name: "steer-older-add", file: overrides, what: "ratelimit.add mints slots that only an older version defines",
		old: "AND (d.current OR d.alive_until > clock_timestamp()) AND d.kind = 'slots') THEN", new: "AND d.current AND d.kind = 'slots') THEN",
		tests: "TestAnOlderVersionsLimitIsOverriddenAsWhatItIs",
	}, {
		name: "steer-older-capacity", file: overrides, what: "ratelimit.add does not know the numbers that only an older version defines",
		old: "d.name = o.name AND (d.current OR d.alive_until > clock_timestamp())) THEN", new: "d.name = o.name AND d.current) THEN",
		tests: "TestAnOlderVersionsLimitIsOverriddenAsWhatItIs",
	}, {
		name: "steer-older-varies", file: overrides, what: "nobody is told that keys of an older version have numbers of their own",
		old: "AND (d.current OR d.alive_until > clock_timestamp()) AND d.varies IS NOT NULL", new: "AND d.current AND d.varies IS NOT NULL",
		tests: "TestAnOlderVersionsLimitIsOverriddenAsWhatItIs",
	}, {
		name: "page-own-numbers", file: overrides, what: "the page computes a key with numbers of its own by those of the definition",
		old: "ELSIF d.varies IS NOT NULL AND (o.rate IS NULL", new: "ELSIF false AND (o.rate IS NULL",
		tests: "TestTheConsoleAsksForTheNumbersOfAKey",
	}, {
		name: "page-dates", file: "internal/pin/pin.go", what: "the page reads times as the session writes them",
		old: "pg_catalog.set_config('DateStyle', 'ISO', true)", new: "pg_catalog.current_setting('DateStyle')",
		tests: "TestNoNumberOfAPageDependsOnTheSession",
	}, {
		name: "page-digits", file: "internal/pin/pin.go", what: "the page shows numbers with as few digits as the session writes",
		old: "pg_catalog.set_config('extra_float_digits', '1', true)", new: "pg_catalog.current_setting('extra_float_digits')",
		tests: "TestNoNumberOfAPageDependsOnTheSession",
	}, {
		name: "page-own-calendar", file: overrides, what: "an override says all numbers of a calendar window, zone and anchor included",
		old: "o.capacity IS NULL OR d.kind = 'calendar window') THEN", new: "o.capacity IS NULL) THEN",
		tests: "TestTheConsoleAsksForTheNumbersOfAKey",
	}, {
		name: "page-newest", file: overrides, what: "the page computes by the oldest definition of a name",
		old: "ORDER BY f.current DESC, f.published_at DESC", new: "ORDER BY f.current DESC, f.published_at",
		tests: "TestTheConsoleShowsLimitsAndKeys",
	}, {
		name: "override-one-call", file: "ratelimit/call_overrides.go", what: "two requests of a call for one key may have two limits",
		old: "before >= 0 { // one limit", new: "false { // one limit",
		tests: "TestOneLimitForACall",
	}, {
		name: "override-clone", file: "ratelimit/overrides.go", what: "a change changes what readers hold",
		old: "if list = slices.Clone(list); at >= 0 {", new: "if at >= 0 {",
		tests: "TestOverridesComeAndGo",
	}, {
		name: "override-sweep-ended", file: "migrations/engine/sweep.sql", what: "a sweep does not mind an override that has just ended",
		old: "since timestamptz := clock_timestamp() - interval '1 day';", new: "since timestamptz := clock_timestamp();",
		tests: "TestASweepMindsAllDefinitionsAndOverrides|TestASweepMindsOverrides",
	}, {
		name: "override-early", file: "ratelimit/overrides.go", what: "the time that a poll takes counts as a difference of the clocks",
		old: "low: at.Sub(started.Add(answered))", new: "low: at.Sub(started.Add(sent))",
		tests: "TestASlowPollEndsNoBlockEarly",
	}, {
		name: "override-tell-locked", file: "ratelimit/overrides.go", what: "somebody is told of a wrong row while the lock is held",
		old: "	o.mu.Unlock()\n	for _, w := range wrong {", new: "	defer o.mu.Unlock()\n	for _, w := range wrong {",
		tests: "TestToBeToldMayLoad",
	}, {
		name: "override-far", file: "migrations/engine/overrides.sql", what: "an end in the far future stops the polls",
		old: "WHEN p.ends < '10000-01-01 00:00+00' THEN (extract", new: "WHEN isfinite(p.ends) THEN (extract",
		tests: "TestOverridesThatEndInTheFarFuture",
	}, {
		name: "steer-sweep-two-kinds", file: "migrations/engine/sweep.sql", what: "a sweep mixes the clocks of old and new processes",
		old: "min(d.kind) <> max(d.kind) OR min(d.period) <> max(d.period)", new: "false",
		tests: "TestASweepMindsAllDefinitionsAndOverrides",
	}, {
		name: "steer-publish-old", file: "migrations/engine/definitions.sql", what: "what a program published long ago counts for no sweep once it publishes anew",
		old: "SET current = coalesce(old.list = winner, false), published_at = at,", new: "SET current = coalesce(old.list = winner, false),",
		tests: "TestTheNewestVersionInUseCounts",
	},
	{
		name: "later-ends", file: "ratelimit/call_overrides.go", what: "the numbers in force are taken to hold for good",
		old: "if until := list[i].until; until > now && until < algebra.Forever {", new: "if until := list[i].until; false && until > now {",
		tests: "TestAnOverrideThatEnds|TestTheWorkedExamplesOfOverridesThatEnd",
	}, {
		name: "later-too-much", file: "ratelimit/call.go", what: "what an override with an end never grants is an error",
		old: "err != nil && !c.allowedLater(err) {", new: "err != nil {",
		tests: "TestAnOverrideThatEnds|TestTheWorkedExamplesOfOverridesThatEnd",
	}, {
		name: "later-too-much-alone", file: "ratelimit/call_later.go", what: "a call for too much until an override ends is a mistake if another key of it is blocked",
		old: "return d.tooMuch && c.allowedAt(now, []demand{*d}) == algebra.Forever", new: "return d.tooMuch && c.allowedAt(now, c.demands, c.rowless) == algebra.Forever",
		tests: "TestAWorldOfABlockBesideTooMuch",
	}, {
		name: "later-checked", file: "ratelimit/call_statement.go", what: "a call for too much takes tokens",
		old: "		op = verbs[verbCheck].op\n", new: "",
		tests: "TestAWaitUnderAnOverrideThatEnds",
	}, {
		name: "later-together", file: "ratelimit/result.go", what: "several limits are granted when each was, though one has lost it since",
		old: "			retryAt = c.grantedAt(a, 0, len(c.demands))\n", new: "",
		tests: "TestTheWorkedExamplesOfOverridesThatEnd",
	}, {
		name: "later-repaid", file: "ratelimit/call_later.go", what: "reserved work counts on the faster rate before an override ends",
		old: "possible = append(possible, d.numbers.Take(least, shards, 0, until))", new: "_ = least",
		tests: "TestTheWorkedExamplesOfOverridesThatEnd",
	}, {
		name: "later-wait", file: "ratelimit/wait.go", what: "a Wait takes the numbers in force to hold until its deadline",
		old: "floor = -leastRefill(c.spans(standing, d), now, now+c.patience)", new: "_ = now",
		tests: "TestAWaitUnderAnOverrideThatEnds",
	}, {
		name: "later-wait-beyond", file: "ratelimit/call_later.go", what: "numbers count for a Wait that come into force after its deadline",
		old: "		case s.from >= to:\n			return least\n", new: "",
		tests: "TestAWaitThatEndsBeforeAnOverrideDoes",
	}, {
		name: "later-wait-segments", file: "ratelimit/call_later.go", what: "the RetryAt of a Wait is not the first",
		old: "until > from { // from then on", new: "false && until > from { // from then on",
		tests: "TestTheFirstWaitBesideAnOverrideThatEnds",
	}, {
		name: "later-windows", file: "ratelimit/call_calendar.go", what: "the windows of a calendar are not known where another limit's override ends late",
		old: "later <= now || !d.numbers.Unknown(later)", new: "true || later <= now",
		tests: "TestACalendarBesideAnOverrideThatEndsLate",
	}, {
		name: "later-old", file: "ratelimit/call_later.go", what: "once an override ends, an old debt of a calendar is owed as if less had been refilled since",
		old: "		setNumbers(does, ds, pgtype.Timestamptz{Time: end.Time(), Valid: true}, true) // whatever is owed: see unsure\n", new: "",
		tests: "TestAWorldOfAnOldDebt",
	}, {
		name: "later-below-one", file: "migrations/engine/ratelimit.sql", what: "a key whose plan holds less than one token is told of one that the override before it would have given",
		old: "q.effect := CASE WHEN q.capacity - asked <", new: "q.effect := CASE WHEN false AND q.capacity - asked <",
		tests: "TestAWorldOfAPlanBelowOneToken",
	}, {
		name: "later-next-window", file: "internal/algebra/promise.go", what: "the next window is not looked at, although a job above its capacity is granted just before it",
		old: "last > now && granted(last) {", new: "false {",
		tests: "TestReserveWithin",
	}, {
		name: "later-next-listed", file: "ratelimit/call_later.go", what: "the lists of others do not reach to the next window of a job above its capacity",
		old: "until = max(until, d.numbers.NextWindow(now))\n", new: "_ = until\n",
		tests: "TestAWorldOfAJobAboveItsCapacity",
	}, {
		name: "later-listed", file: "ratelimit/call_later.go", what: "a denial beyond a call's list of windows is until now",
		old: "if d.numbers.Windows != nil { // as many", new: "if false { // as many",
		tests: "TestAJobAfterTheListOfACalendar",
	}, {
		name: "later-listed-ahead", file: "ratelimit/call_later.go", what: "the list of a call after an override reaches as far as if it had been made before",
		old: "1 + min(d.numbers.Listed(a.at), d.limit.ahead(c.does)+1)", new: "1 + d.numbers.Listed(a.at)",
		tests: "TestAJobAfterTheListBesideAnOverride",
	}, {
		name: "later-wakes-clock", file: "ratelimit/wait.go", what: "a change of overrides wakes no Wait of a Limiter with a Clock",
		old: "now, _ := l.now()", new: "now, _ := new(Limiter).now()",
		tests: "TestAWaitIsWokenByItsClock",
	}, {
		name: "later-ahead", file: "ratelimit/call_calendar.go", what: "the tokens of a calendar's row whose time lies ahead are looked for in the windows around now",
		old: "	if latest > now {", new: "	if false {",
		tests: "TestACalendarRowWhoseTimeLiesAhead",
	}, {
		name: "later-ahead-sql", file: ratelimit, what: "the same in SQL",
		old: "max(u.t) - at) FROM", new: "max(u.t) - max(u.t)) FROM",
		tests: "TestACalendarRowWhoseTimeLiesAhead",
	}, {
		name: "keys-standing", file: keysSQL, what: "beside a block, tool and page show the numbers of the definition",
		old: "varying => true, standing => true, given => given);", new: "'0', varying => true, standing => true, given => given);",
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
		name: "later-keys-no-row", file: keysSQL, what: "ratelimit.keys says of a blocked key when the tokens are there, and a denied call when the block ends",
		old: "CASE WHEN q.effect <> 'block' THEN value END", new: "value",
		tests: "TestAnOverrideThatEnds",
	}, {
		name: "later-keys-own", file: ratelimit, what: "after a block, what is decided of every key counts for a key with an override of its own, too",
		old: "ratelimit._numbers(q.name, nullif(q.key, ''), q.until, varying => true", new: "ratelimit._numbers(q.name, NULL, q.until, varying => true",
		tests: "TestByHandKeysSaysWhatFollowsABlock",
	}, {
		name: "later-byhand", file: "migrations/engine/ratelimit.sql", what: "SQL by hand takes the numbers in force to hold for good",
		old: "        IF q.until IS NULL OR retry_at < q.until THEN\n            RETURN retry_at;", new: "        IF true THEN\n            RETURN retry_at;",
		tests: "TestAnOverrideThatEnds",
	}, {
		name: "later-all", file: "migrations/engine/ratelimit.sql", what: "ratelimit.consume_all is granted when each request was, though one has lost it since",
		old: "WHILE together AND waits < 'infinity' LOOP", new: "WHILE false LOOP",
		tests: "TestOverridesThatEndForSeveralLimits",
	}, {
		name: "override-clock-late", file: "ratelimit/overrides.go", what: "a poll that waited puts off the end of what grants more",
		old: "high: at.Sub(started.Add(sent))", new: "high: at.Sub(started.Add(answered))",
		tests: "TestASlowPollBringsNoOverrideBack|TestWhatPollsSayOfTheClock",
	}, {
		name: "override-clock-memory", file: "ratelimit/overrides.go", what: "only the last poll says what the database's clock is",
		old: "if low <= high { // otherwise", new: "if false { // otherwise",
		tests: "TestWhatPollsSayOfTheClock",
	}, {
		name: "override-wakes", file: "ratelimit/overrides.go", what: "a change of overrides wakes nobody",
		old: "			close(*waking)\n", new: "			_ = waking\n",
		tests: "TestAChangeWakesWaiters",
	}, {
		name: "steer-add-waits", file: "migrations/engine/overrides.sql", what: "tokens are added before programs know of the override",
		old: "PERFORM pg_sleep('2');", new: "PERFORM pg_sleep('0');",
		tests: "TestWhatIsAddedStays",
	}, {
		name: "steer-add-again", file: "migrations/engine/overrides.sql", what: "override, add and restore, again and again, add each time",
		old: "greatest(more - spent, '0')", new: "greatest(more, '0')",
		tests: "TestWhatIsAddedAgainAndAgain",
	},
}
