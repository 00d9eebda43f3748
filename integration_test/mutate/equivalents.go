package main

var equivalents = []equivalent{
	{consume, "`_ratelimit_consume` does not look at `expect_denial`", "it says what is read first, not what is decided (TestExpectingADenialDecidesTheSame); and so with `denied.expect` in statement.go"},
	{apply, "`FOR NO KEY UPDATE` for `FOR UPDATE`", "it is the lock that the UPDATEs take, and conflicts with itself and with a DELETE"},
	{consumeSharded, "another of the two shards is picked, or always the first", "only who waits for whom depends on it: bench measures that"},
	{consumeSeveral, "`_ratelimit_consume_several` goes on to `_ratelimit_apply` more often, as by `>` for `>=`", "that decides the same, and slower"},
	{"ratelimit/demand.go", "`left <= d.floor` for `left < d.floor`", "where they are equal, the floor is set to what it is"},
	{balance, "in `_ratelimit_left`, a refill counts from now, not from the rows' ts", "it is asked only after a denial, and before that ts nothing is refilled: the call stays denied"},
	{coalesce, "without `floor(b.available / b.count) * b.count > b.available`", "more than one of a key are whole counts (a contract of the arguments), whose multiples up to 1e15 are exact: no quotient of less is then rounded up to a whole number (2 million tried)"},
	{coalesce, "`r.ctid = s.tid` alone, without `r.value = s.value` or `r.ts = s.ts`", "on servers since November 2025, which look at it again after waiting; on 15.14 TestCoalescerDecidesAnewOnWhatItWaitedFor and TestCoalescerOverGrant notice"},
	{coalesce, "without the `SET enable_...` but seqscan, or without `MATERIALIZED` (the CTE is read more than once)", "plans, which bench measures"},
	{"ratelimit/coalescer.go", "`maxBatch`, and `flush` without `told.Wait`", "how many calls share a statement decides nothing: bench measures it"},
	{"ratelimit/coalescer_batch.go", "`consumeSum` remembers no denial", "a guess that makes the next one quicker: bench measures it"},
	{"ratelimit/coalescer.go", "`tooMany` is otherwise, for several keys", "which statement decides them: bench measures it (for one key, TestCoalescerAsksForTheSum counts)"},
	{"ratelimit/coalescer_batch.go", "`settle` returns no `errDisagree`", "the engine's check of itself: it takes a second defect to see it"},
	{"ratelimit/hot.go", "`places` lets one or three pass", "the lock in the database makes the others wait: bench measures it"},
	{"ratelimit/sendtx.go", "the result of COMMIT is not read", "`Close` reads it, and returns its error"},
	{"ratelimit/sql.go", "the error of `rows.Close` is dropped", "the rows have been read to their end, and `rows.Err` has said what came of that"},
	{"ratelimit/tx.go", "another pause between attempts", "any pause will do: bench measures it"},
}
