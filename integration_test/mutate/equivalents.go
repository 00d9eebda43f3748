package main

var equivalents = []equivalent{
	{functions, "`ratelimit_consume` does not look at `expect_denial`", "it says what is read first, not what is decided (TestExpectingADenialDecidesTheSame); and so with `denied.expect` in limiter.go"},
	{functions, "`FOR NO KEY UPDATE` for `FOR UPDATE`", "it is the lock that the UPDATEs take, and conflicts with itself and with a DELETE"},
	{functions, "another of the two shards is picked, or always the first", "only who waits for whom depends on it: bench measures that"},
	{coalesce, "without the `SET enable_...` but seqscan, or without `MATERIALIZED` (the CTE is read more than once)", "plans, which bench measures"},
	{"ratelimit/coalescer.go", "`maxInFlight`, `maxBatch` and `sameKeys`", "how many calls share a statement decides nothing: bench measures it"},
	{"ratelimit/coalescer.go", "`settle` returns no `errDisagree`", "the engine's check of itself: it takes a second defect to see it"},
	{"ratelimit/hot.go", "`choose` does not sort the lanes", "`demands` has sorted them"},
	{"ratelimit/hot.go", "`places` lets one or three pass", "the lock in the database makes the others wait: bench measures it"},
	{"ratelimit/tx.go", "another pause between attempts", "any pause will do: bench measures it"},
}
