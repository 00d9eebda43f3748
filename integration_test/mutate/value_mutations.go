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
		name: "keys-collide", file: "internal/keytext/keytext.go", what: "a part of a key that contains a bar can make the key of another user",
		old: "escaped[i] = escape.Replace(part)", new: "escaped[i] = part",
		tests: "TestKeysOfSeveralParts",
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
		name: "record-infinity", file: "ratelimit/call_record.go", what: "a row in the infinite future counts as one from long ago",
		old: "		return algebra.Max\n", new: "		return algebra.Min\n",
		tests: "TestInfiniteInstantsAreTheFirstAndTheLast",
	}, {
		name: "receipt-merged", file: "ratelimit/receipt.go", what: "for several requests for one key, the receipt has only the first",
		old: "made.Taken[i].Count += s.Taken", new: "made.Taken[i].Count += 0",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-any-key", file: "ratelimit/receipt.go", what: "a receipt is accepted for another key",
		old: "r.index[limitKey{r.Taken[i].Limit, r.Taken[i].Key}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{limit, key}]", new: "r.index[limitKey{r.Taken[i].Limit, \"\"}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{limit, \"\"}]",
		tests: "TestAReceiptIsForWhatItNames",
	}, {
		name: "receipt-any-limit", file: "ratelimit/receipt.go", what: "a receipt is accepted for another limit",
		old: "r.index[limitKey{r.Taken[i].Limit, r.Taken[i].Key}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{limit, key}]", new: "r.index[limitKey{\"\", r.Taken[i].Key}] = i\n		}\n	}\n	if i, ok := r.index[limitKey{\"\", key}]",
		tests: "TestAReceiptIsForWhatItNames",
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
		name: "receipt-held", file: "ratelimit/receipt.go", what: "sums with a receipt's numbers may overflow",
		old: "!(math.Abs(t.Held) <= maxHeld),", new: "!(math.Abs(t.Held) <= math.Inf(1)),",
		tests: "TestReceiptsThatCannotBeAreRefused",
	}, {
		name: "receipt-rows-part", file: "ratelimit/receipt.go", what: "the part of one shard is the whole limit",
		old: "if t.Rows < t.Shards {", new: "if t.Rows > t.Shards {",
		tests: "TestAReceiptSaysWhatWasTaken",
	}, {
		name: "receipt-debt-paid", file: "ratelimit/receipt.go", what: "a partial refund that paid a debt hides the debt from the next one",
		old: "Held += min(refunded[i], max(refunded[i]-left, 0))", new: "Held += 0 * left",
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
		name: "denial-forfeits", file: "ratelimit/call_result.go", what: "a request is reported OK although another one's wait denies it",
		old: "		if s.OK = !d.tooMuch && w.asked[i].Enough(w.lefts[i]); s.OK {\n", new: "		if s.OK {\n",
		tests: "TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile",
	}, {
		name: "wait-no-receipt", file: "ratelimit/verbs.go", what: "a Wait has no receipt",
		old: "func (r *rules) receipt() bool { return r.takes && r.deniable }", new: "func (r *rules) receipt() bool { return r.takes && r.deniable && !r.atMostFull }",
		tests: "TestWaitSleepsUntilTheTokensAreThere",
	}, {
		name: "wait-retry", file: "ratelimit/call_result.go", what: "a Wait that can never be granted gets the advice to retry",
		old: "if !c.reserves() || a.granted", new: "if !c.forfeits() || a.granted",
		tests: "TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly",
	}, {
		name: "up-to-receipt", file: "ratelimit/receipt.go", what: "a receipt has the requested count, not the taken one",
		old: "Key: s.Key, Count: s.Taken,", new: "Key: s.Key, Count: s.Count,",
		tests: "TestTakeTakesTheWholeTokensThatAreThere",
	}, {
		name: "plans-clock", file: "ratelimit/call_policy.go", what: "without a statement, the instant is not the Clock's",
		old: "at: c.overrides.now(c.local)", new: "at: c.overrides.now(call{}.local)",
		tests: "TestAnUnlimitedLimitGrantsEverything",
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
		name: "plans-remaining", file: "ratelimit/call_result.go", what: "0 tokens remain of an unlimited limit",
		old: "r.Remaining = min(r.Remaining, left)", new: "r.Remaining = min(r.Remaining, left, 0)",
		tests: "TestAnUnlimitedLimitGrantsEverything",
	}, {
		name: "plans-receipt-altered", file: "ratelimit/receipt.go", what: "a receipt without rows may have tokens left in them",
		old: "!(t.Rows == 0 && t.Held == 0)", new: "t.Rows != 0",
		tests: "TestReceiptsThatCannotBeAreRefused",
	},
}
