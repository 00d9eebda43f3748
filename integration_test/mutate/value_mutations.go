package main

// valueMutations are edits of what a caller holds: limits, requests, results, receipts, and their files.
var valueMutations = []mutation{
	{
		name: "calendar-units", file: "ratelimit/limit_definitions.go", what: "a day and a month may share a name",
		old: "		return *l == *definition\n", new: "		return l.numbers.Rate == definition.numbers.Rate\n",
		tests: "TestOneNameWithTwoDefinitions",
	}, {
		name: "demands-nan", file: "ratelimit/limit.go", what: "NaN is accepted as a number of tokens",
		old: "return tokens == 0 || tokens >= algebra.MinTokens && tokens <= algebra.MaxTokens", new: "return tokens == 0 || !(tokens < algebra.MinTokens || tokens > algebra.MaxTokens)",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "definitions-later", file: "ratelimit/limit_definitions.go", what: "one limit with two definitions, in two calls, is granted by both",
		old: "first != nil && !limit.definedAs(first)", new: "false",
		tests: "TestOneNameWithTwoDefinitions",
	}, {
		name: "definitions-race", file: "ratelimit/limit_definitions.go", what: "of two definitions at once, both are granted",
		old: "} else if !limit.definedAs(first) {", new: "} else if false {",
		tests: "TestADefinitionIsDecidedOnce",
	}, {
		name: "definitions-grid", file: "ratelimit/limit_definitions.go", what: "a limit with numbers of its own may be of another definition",
		old: "	return l.definition() == *definition\n", new: "	return true\n",
		tests: "TestOneNameWithTwoDefinitions",
	}, {
		name: "definitions-bounded", file: "ratelimit/limit_definitions.go", what: "limit names fill the memory",
		old: "len(all) > maxDefinitions; i--", new: "false; i--",
		tests: "TestSoManyDefinitionsAreRemembered",
	}, {
		name: "keys-collide", file: "internal/keytext/keytext.go", what: "a part of a key that contains a bar can make the key of another user",
		old: "escaped[i] = escape.Replace(part)", new: "escaped[i] = part",
		tests: "TestKeysOfSeveralParts",
	}, {
		name: "keys-one-part", file: "internal/keytext/keytext.go", what: "a key of one part is escaped, so SQL by hand, the tool and the page mean another row",
		old: "	if len(parts) == 1 {\n		return parts[0]\n	}\n", new: "",
		tests: "TestKeysOfSeveralParts|TestKeysAreStoredAsWritten",
	}, {
		name: "keys-by-part", file: "cmd/txlimit/database.go", what: "the tool joins parts without escaping them",
		old: "keytext.Join(a.parts...)", new: "strings.Join(a.parts, \"|\") + keytext.Join(\"\")",
		tests: "TestKeysAreStoredAsWritten",
	}, {
		name: "confined-count", file: "docs/security.md", what: "a role that only consumes may ask for 0 tokens, which costs nothing",
		old: "ratelimit.consume(name, key, count => CASE WHEN count > 0 THEN count END)", new: "ratelimit.consume(name, key, count => count)",
		tests: "TestARoleThatOnlyConsumes",
	}, {
		name: "confined-execute", file: "docs/security.md", what: "everybody may call the functions of the role that only consumes",
		old: "REVOKE EXECUTE ON FUNCTION limits.consume, limits.try, ", new: "REVOKE EXECUTE ON FUNCTION limits.consume, ",
		tests: "TestARoleThatOnlyConsumes",
	}, {
		name: "confined-path", file: "docs/security.md", what: "the functions of the role that only consumes take the caller's search_path",
		old: "LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$\n    SELECT remaining FROM ratelimit.consume(name, key", new: "LANGUAGE sql SECURITY DEFINER AS $$\n    SELECT remaining FROM ratelimit.consume(name, key",
		tests: "TestAHostileSearchPath",
	}, {
		name: "grants-all-functions", file: "migrations/engine/grants.sql", what: "a role that consumes may call what has the rights of its owner",
		old: "(NOT p.prosecdef OR work = 'operate')", new: "true",
		tests: "TestTheConsumerRoleIsConfined",
	}, {
		name: "grants-execute", file: "migrations/engine/grants.sql", what: "a role is granted tables, and no functions",
		old: "        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', f, role);\n", new: "        NULL;\n",
		tests: "TestTheDocumentedGrantsWithoutPublicExecute",
	}, {
		name: "collation-by-hand", file: "migrations/engine/ratelimit.sql", what: "SQL by hand compares keys by the collation of the caller's column",
		old: "ratelimit._by_hand('consume', name COLLATE \"C\", key COLLATE \"C\",", new: "ratelimit._by_hand('consume', name, key,",
		tests: "TestKeysOfEveryCollation",
	}, {
		name: "collation-restore", file: "migrations/engine/overrides.sql", what: "a block made from a column of another collation cannot be ended from it",
		old: "AND o.key = key COLLATE \"C\" AND", new: "AND o.key = key AND",
		tests: "TestKeysOfEveryCollation",
	}, {
		name: "keys-tenant-of-one-part", file: "docs/security.md", what: "a tenant has the keys of one part that begin with its name",
		old: "ON ratelimit.limits TO app_user\n    USING (cardinality(ratelimit.key_parts(key)) > 1", new: "ON ratelimit.limits TO app_user\n    USING (cardinality(ratelimit.key_parts(key)) > 0",
		tests: "TestTenantsOfAnyNameAreKeptApart",
	}, {
		name: "keys-tenant-by-prefix", file: "docs/security.md", what: "a tenant sees the keys of one whose name is its own and more",
		old: "(ratelimit.key_parts(key))[1] = nullif(current_setting('app.tenant', true), ''));\nALTER", new: "starts_with(key, nullif(current_setting('app.tenant', true), '') || '|'));\nALTER",
		tests: "TestTenantsOfAnyNameAreKeptApart",
	}, {
		name: "keys-tenant-holds", file: "docs/security.md", what: "a tenant sees the holds of all tenants",
		old: "ALTER TABLE ratelimit.holds ENABLE ROW LEVEL SECURITY;\n", new: "",
		tests: "TestUnderRowLevelSecurityATenantHasHisOwnLimits",
	}, {
		name: "keys-guard-of-one-part", file: "docs/distributed.md", what: "a guard takes a key of one part for one of a tenant",
		old: "IF cardinality(parts) < 2 THEN", new: "IF false THEN",
		tests: "TestAGuardFindsTheTenantOfAnyName",
	}, {
		name: "keys-empty", file: "ratelimit/request.go", what: "an empty user id is an ordinary key",
		old: "if part == \"\" && r.err == nil {", new: "if part == \"\" && len(parts) == 1 && r.err == nil {",
		tests: "TestKeysOfSeveralParts|TestHostileRequestsAreRefusedAndPoisonNothing",
	}, {
		name: "window-one-grid", file: "ratelimit/limit.go", what: "the windows of all keys begin together",
		old: "cmp.Or(key, l.name)", new: "cmp.Or(l.name)",
		tests: "TestAFixedWindowWithoutAStartHasAGridPerKey",
	}, {
		name: "window-grid-of-name", file: "ratelimit/limit.go", what: "one key has another grid under each name",
		old: "cmp.Or(key, l.name)", new: "cmp.Or(l.name + key)",
		tests: "TestAFixedWindowWithoutAStartHasAGridPerKey",
	}, {
		name: "window-grid-of-nothing", file: "ratelimit/limit.go", what: "all limits without keys begin together",
		old: "cmp.Or(key, l.name)", new: "cmp.Or(key)",
		tests: "TestAFixedWindowWithoutAStartHasAGridPerKey",
	}, {
		name: "check-rows-after", file: "ratelimit/result.go", what: "a check of a sharded limit is answered as if it had taken tokens",
		old: "a.rows[i], a.granted && c.does.writes != never", new: "a.rows[i], a.granted",
		tests: "TestCheckAnswersAndWritesNothing",
	}, {
		name: "result-remaining", file: "ratelimit/result.go", what: "of several limits, the result does not have the least that remains",
		old: "min(remaining, s.Remaining)", new: "s.Remaining",
		tests: "TestALimitNamedTwiceInOneCallCountsTwice",
	}, {
		name: "result-reset", file: "ratelimit/result.go", what: "of several limits, the result does not have the latest reset",
		old: "max(resetAt, reset)", new: "reset",
		tests: "TestSeveralLimitsAreAllOrNothing",
	}, {
		name: "record-rest", file: "ratelimit/call_record.go", what: "an answer with extra data is accepted",
		old: "return !r.failed && len(r.rest) == 0", new: "return !r.failed",
		tests: "TestAnswersAreReadAsPgtypeWritesThem",
	}, {
		name: "record-infinity", file: "ratelimit/call_record.go", what: "a row in the infinite future counts as one from long ago",
		old: "		return algebra.Max\n", new: "		return algebra.Min\n",
		tests: "TestInfiniteInstantsAreTheFirstAndTheLast",
	}, {
		name: "receipt-of-nothing", file: "ratelimit/receipt.go", what: "a denial has a receipt",
		old: "if s.took.rows == 0 && !s.took.rowless {", new: "if false {",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-merged", file: "ratelimit/receipt.go", what: "for several requests for one key, the receipt has only the first",
		old: "made.Taken[i].Count += s.Taken", new: "made.Taken[i].Count += 0",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-of-a-refund", file: "ratelimit/receipt.go", what: "a refund returns no receipt for the rest",
		old: "	if r.receipt != nil {\n		return r.receipt.text()\n	}\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-any-key", file: "ratelimit/receipt.go", what: "a receipt is accepted for another key",
		old: "r.index[limitKey{r.Taken[i].Limit, r.Taken[i].Key}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{limit, key}]", new: "r.index[limitKey{r.Taken[i].Limit, \"\"}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{limit, \"\"}]",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-any-limit", file: "ratelimit/receipt.go", what: "a receipt is accepted for another limit",
		old: "r.index[limitKey{r.Taken[i].Limit, r.Taken[i].Key}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{limit, key}]", new: "r.index[limitKey{\"\", r.Taken[i].Key}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{\"\", key}]",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-unknown-fields", file: "ratelimit/receipt.go", what: "unknown data of another version in a receipt is ignored",
		old: "	decoder.DisallowUnknownFields()\n", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-and-more", file: "ratelimit/receipt.go", what: "extra data after a receipt is ignored",
		old: "if _, more := decoder.Token(); !errors.Is(more, io.EOF) {", new: "if _, more := decoder.Token(); false && !errors.Is(more, io.EOF) {",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-version", file: "ratelimit/receipt.go", what: "a receipt of another version is accepted",
		old: "if r.Version != receiptVersion {", new: "if false {",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-instants", file: "ratelimit/receipt.go", what: "an instant that the database cannot store is sent, and aborts the transaction",
		old: "		if err != nil {\n			return err\n		}\n		*t = at.Time", new: "		if err == nil {\n			*t = at.Time\n		}",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-length", file: "ratelimit/receipt.go", what: "a receipt of any length is parsed",
		old: "len(text) > maxReceiptLen", new: "len(text) > maxReceiptLen<<10",
		tests: "TestLongReceipts",
	}, {
		name: "receipt-twice", file: "ratelimit/receipt.go", what: "a receipt may have a limit and key twice",
		old: "r.find(t.Limit, t.Key) != &r.Taken[i]", new: "i < 0",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-count", file: "ratelimit/receipt.go", what: "a receipt may have any count",
		old: "!countable(t.Count) || ", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-refunded-below-zero", file: "ratelimit/receipt.go", what: "a receipt may have a negative refunded count",
		old: "t.Refunded >= 0 && ", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-refunded-above-count", file: "ratelimit/receipt.go", what: "a receipt may have more refunded than taken",
		old: " && t.Refunded <= t.Count", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-held", file: "ratelimit/receipt.go", what: "sums with a receipt's numbers may overflow",
		old: "!(math.Abs(t.Held) <= maxHeld),", new: "!(math.Abs(t.Held) <= math.Inf(1)),",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-shards-none", file: "ratelimit/receipt.go", what: "a limit may have no shards",
		old: "t.Shards < 1 || ", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-shards-many", file: "ratelimit/receipt.go", what: "a limit may have any number of shards",
		old: " || t.Shards > maxShards", new: "",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-rows", file: "ratelimit/receipt.go", what: "a receipt may be of some shards, neither one nor all",
		old: "t.Rows != 1 && t.Rows != t.Shards && !(t.Rows == 0 && t.Held == 0):", new: "false:",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-exceeded", file: "ratelimit/receipt.go", what: "a refund may exceed the rest of the receipt",
		old: "if d.count > left+t.rounding() {", new: "if false {",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-rounding", file: "ratelimit/receipt.go", what: "the last part is refused if rounding makes the parts more than the whole",
		old: "if d.count > left+t.rounding() {", new: "if d.count > left {",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-rounding-mints", file: "ratelimit/receipt.go", what: "if rounding makes the parts more than the whole, the excess is given back",
		old: "		d.count = min(d.count, left)\n", new: "",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-rows-part", file: "ratelimit/receipt.go", what: "the part of one shard is the whole limit",
		old: "if t.Rows < t.Shards {", new: "if t.Rows > t.Shards {",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-debt-paid", file: "ratelimit/receipt.go", what: "a partial refund that paid a debt hides the debt from the next one",
		old: "Held += min(refunded[i], max(refunded[i]-left, 0))", new: "Held += 0 * left",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "refunded-nothing", file: "ratelimit/result.go", what: "a refund does not report the number of refunded tokens",
		old: "if refunded != nil {", new: "if false {",
		tests: "TestRefundToATokenBucketGivesBackWhatIsStillMissing",
	}, {
		name: "receipt-count-passed-on", file: "ratelimit/receipt.go", what: "the next partial refund gives back more than is missing",
		old: "		t.Held += d.count // as if d.count had not been taken\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-refunded-passed-on", file: "ratelimit/receipt.go", what: "a receipt can be used again and again",
		old: "		t.Refunded += d.count\n", new: "",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-used-up", file: "ratelimit/receipt.go", what: "a used-up receipt leaves a receipt of nothing",
		old: "t.Count-t.Refunded <= t.rounding()", new: "t.Count-t.Refunded < 0",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "receipt-unrounded", file: "ratelimit/receipt.go", what: "a rounding error is left as a receipt",
		old: "t.Count-t.Refunded <= t.rounding()", new: "t.Count-t.Refunded <= 0",
		tests: "TestAReceiptSaysWhatIsLeft",
	}, {
		name: "denial-forfeits", file: "ratelimit/result.go", what: "a request is reported OK although another one's wait denies it",
		old: "		if s.OK = !d.tooMuch && w.asked[i].Enough(w.lefts[i]); s.OK {\n", new: "		if s.OK {\n",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "denial-retry-alone", file: "ratelimit/result.go", what: "a request that alone would be granted has no wait, although another one's wait denies it",
		old: "at == now { // alone", new: "false { // alone",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "denial-retry", file: "ratelimit/result.go", what: "a denial reports when it would be granted if it forfeited nothing",
		old: "	w.retryAt = c.grantedAt(a, 0, len(c.demands))\n", new: "",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "wait-no-receipt", file: "ratelimit/verbs.go", what: "a Wait has no receipt",
		old: "func (r *rules) receipt() bool { return r.takes && r.deniable }", new: "func (r *rules) receipt() bool { return r.takes && r.deniable && !r.atMostFull }",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-retry", file: "ratelimit/result.go", what: "a Wait that can never be granted gets the advice to retry",
		old: "if !c.reserves() || a.granted", new: "if !c.forfeits() || a.granted",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "up-to-denied", file: "ratelimit/result.go", what: "a denial reports taken tokens",
		old: "case !a.granted || !c.does.takes && !c.does.deniable:", new: "case !c.does.takes && !c.does.deniable:",
		tests: "TestNothingIsWrittenOnDenial",
	}, {
		name: "up-to-refunded", file: "ratelimit/result.go", what: "a refund reports taken tokens",
		old: "case !a.granted || !c.does.takes && !c.does.deniable:", new: "case !a.granted:",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "up-to-error", file: "ratelimit/call.go", what: "the error of a denial does not say that the count is a maximum",
		old: "upTo: v == verbTake}", new: "upTo: false}",
		tests: "TestTakeTakesTheSameFromSeveralLimits",
	}, {
		name: "up-to-receipt", file: "ratelimit/receipt.go", what: "a receipt has the requested count, not the taken one",
		old: "Key: s.Key, Count: s.Taken,", new: "Key: s.Key, Count: s.Count,",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "plans-nothing-wanted", file: "ratelimit/call_policy.go", what: "0 tokens of a limit with a rate of 0 are denied",
		old: "!d.limit.grantsNothing() || d.count == 0:", new: "!d.limit.grantsNothing():",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-check", file: "ratelimit/verbs.go", what: "a check grants what a rate of 0 would deny",
		old: "verbCheck:   {deniable: true, op: \"check\"}", new: "verbCheck:   {op: \"check\"}",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-charge", file: "ratelimit/call_policy.go", what: "a rate of 0 denies a charge, which is always granted",
		old: "case !c.does.deniable || !d.limit", new: "case !d.limit",
		tests: "TestNothingIsSentForPlansWithoutRows",
	}, {
		name: "plans-asks-others", file: "ratelimit/call_policy.go", what: "the other limits are asked although one denies by policy",
		old: "if reason == \"\" && (len(c.demands) > 0 ||", new: "if (len(c.demands) > 0 ||",
		tests: "TestNothingIsSentForPlansWithoutRows",
	}, {
		name: "plans-clock", file: "ratelimit/call_policy.go", what: "without a statement, the instant is not the Clock's",
		old: "at: c.overrides.now(c.local)", new: "at: algebra.At(time.Now())",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-blames-others", file: "ratelimit/call_policy.go", what: "a denial by policy is reported for the other limits, too",
		old: "r.Requests[i].OK = true //", new: "r.Requests[i].OK = false //",
		tests: "TestARateOfZeroDeniesTheOthers",
	}, {
		name: "retry-after-sum", file: "ratelimit/result.go", what: "a caller that adds to the time until the year 9999 has a negative one",
		old: "min(r.RetryAt.Sub(r.At), neverAfter)", new: "r.RetryAt.Sub(r.At)",
		tests: "TestADebtThatTakesForEverIsAnswered",
	}, {
		name: "period-short", file: "ratelimit/limit_config.go", what: "a bare number is a period of microseconds",
		old: "fixed > 0 && fixed < minPeriod", new: "false",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "period-short-sql", file: "migrations/engine/validate.sql", what: "a period by hand is shorter than 100 ms",
		old: "period >= '100 milliseconds' AND", new: "period > '0' AND",
		tests: "TestByHandRefusesWhatIsWrong",
	}, {
		name: "plans-retry-at", file: "ratelimit/result.go", what: "a denial does not say when to retry",
		old: "r.RetryAt, r.RetryAfter = instant(at), neverAfter", new: "r.RetryAfter = neverAfter",
		tests: "TestRetryAtIsExact",
	}, {
		name: "plans-retry-after", file: "ratelimit/result.go", what: "a caller that waits as long as a denial by policy says asks again at once",
		old: "r.RetryAt, r.RetryAfter = instant(at), neverAfter", new: "r.RetryAt, r.RetryAfter = instant(at), 0*neverAfter",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "plans-remaining", file: "ratelimit/call_policy.go", what: "0 tokens remain of an unlimited limit",
		old: "r.Remaining = min(r.Remaining, left)", new: "r.Remaining = min(r.Remaining, left, 0)",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-reset-at", file: "ratelimit/call_policy.go", what: "an unlimited limit is never full",
		old: "if left > 0 && r.ResetAt.Before(r.At) {", new: "if false {",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-receipt", file: "ratelimit/call_policy.go", what: "the grant of an unlimited limit is not in the receipt",
		old: "s.took.rowless = c.does.receipt() && r.OK", new: "s.took.rowless = false",
		tests: "TestAReceiptOfAnotherDefinition",
	}, {
		name: "plans-receipt-denied", file: "ratelimit/call_policy.go", what: "a denial has a receipt",
		old: "s.took.rowless = c.does.receipt() && r.OK", new: "s.took.rowless = c.does.receipt()",
		tests: "TestARateOfZeroDeniesTheOthers",
	}, {
		name: "plans-receipt-check", file: "ratelimit/call_policy.go", what: "a check has a receipt",
		old: "s.took.rowless = c.does.receipt() && r.OK", new: "s.took.rowless = r.OK",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-infinite-rate", file: "ratelimit/call_policy.go", what: "an infinite rate, which is a mistake, is described as unlimited",
		old: "l.err == nil && l.numbers.Rate > algebra.MaxTokens", new: "l.numbers.Rate > algebra.MaxTokens",
		tests: "TestALimitWithoutRowsDescribesItself",
	}, {
		name: "plans-refund-noted", file: "ratelimit/receipt.go", what: "a refund without a row stays in the receipt",
		old: "r.find(d.limit.name, d.key).Refunded += d.count", new: "_ = d",
		tests: "TestAReceiptOfAnotherDefinition",
	}, {
		name: "plans-receipt-altered", file: "ratelimit/receipt.go", what: "a receipt without rows may have tokens left in them",
		old: "!(t.Rows == 0 && t.Held == 0)", new: "t.Rows != 0",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "plans-error", file: "ratelimit/errors.go", what: "the text of a denial by policy says to retry",
		old: "	case e.RetryAt.IsZero():", new: "	case false:",
		tests: "TestARateOfZeroDeniesByPolicy",
	}, {
		name: "option-elsewhere", file: "ratelimit/limit.go", what: "an option sets what it has no meaning for",
		old: "!slices.Contains(allowed, o.option().name):", new: "!slices.Contains(allowed, o.option().name) && false:",
		tests: "TestWith",
	}, {
		name: "option-of-retry", file: "ratelimit/tx.go", what: "Retry passes over the level of a transaction that it does not begin",
		old: "	case o.begins != \"\":", new: "	case false:",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "config-rate-missing", file: "ratelimit/limit_config.go", what: "a missing rate is 0",
		old: "\t\tmistake(\"rate is missing\")\n", new: "",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-rate-0-capacity", file: "ratelimit/limit_config.go", what: "a rate of 0 may have a capacity",
		old: "*optional.to != 0 && c.Rate != nil && *c.Rate == 0", new: "false",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-unlimited-numbers", file: "ratelimit/limit_config.go", what: "an unlimited limit may have numbers, which are ignored",
		old: "\t\tif set {\n", new: "\t\tif set && false {\n",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "anchor-canonical", file: "ratelimit/limit_config.go", what: "two texts of one anchor are two anchors",
		old: "l.calendar.Anchor = calendar.AnchorText(anchor)", new: "_ = anchor",
		tests: "TestPeriodsOfAConfig",
	}, {
		name: "config-fixed-calendar", file: "ratelimit/limit_config.go", what: "a fixed window of a month has a period of 0",
		old: "case unit != \"\" && !onCalendar:", new: "case false:",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-calendar-fixed", file: "ratelimit/limit_config.go", what: "a calendar window of 24 hours has no unit",
		old: "case err != nil && onCalendar, unit == \"\" && onCalendar:", new: "case err != nil && onCalendar:",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-unknown-field", file: "ratelimit/limit_config_json.go", what: "a misspelt field is ignored",
		old: "\t\t\tmistakes = append(mistakes, fmt.Sprintf(\"unknown field %q\", name))\n", new: "",
		tests: "TestAConfigNamesLimitAndField",
	}, {
		name: "config-field-twice", file: "ratelimit/limit_config_json.go", what: "of a duplicate field, the last one counts",
		old: "case seen[name]:", new: "case false:",
		tests: "TestAConfigNamesLimitAndField",
	},
}
