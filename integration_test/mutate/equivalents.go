package main

// These edits are left out. They change no decision, so no test could notice them, nor should one.
//
//   - consume.sql: ratelimit._consume does not look at expect_denial: it decides what is read first, not the answer
//     (TestExpectingADenialDecidesTheSame); the same holds for deniedLately.expect in call_statement.go
//   - apply.sql: FOR NO KEY UPDATE for FOR UPDATE: the UPDATEs take this lock; it conflicts with itself and with a DELETE
//   - consume_sharded.sql: another of the two shards is picked, or always the first: it changes only which transactions
//     wait: bench measures that
//   - consume_several.sql: ratelimit._consume_several goes on to ratelimit._apply more often, as by > for >=: the decision
//     is the same, but slower
//   - call_demand.go: left <= d.floor for left < d.floor: if they are equal, the floor gets the same value
//   - balance.sql: in ratelimit._kept for ratelimit._left, a refill counts from now, not from the rows' ts: it is called only after a denial,
//     and nothing is refilled before that ts: the call stays denied
//   - coalesce.sql: without floor(b.available / b.count) * b.count > b.available: if a key is repeated, its counts are whole
//     numbers (a contract of the arguments), and their multiples up to 1e15 are exact: no smaller quotient is rounded up to
//     a whole number (2 million tried)
//   - coalesce.sql: without the SET enable_... other than seqscan, or without MATERIALIZED (the CTE is read more than once):
//     only the plans change: bench measures that
//   - coalescer_schedule.go: another maxBatch; coalescer.go: flush without told.Wait: the number of calls in a statement
//     changes no decision: bench measures it
//   - coalescer_batch.go: consumeSum remembers no denial: it only makes the next call faster: bench measures it
//   - coalescer.go: tooMany uses another share, for several keys: it changes only which statement decides: bench measures it
//     (for one key, TestCoalescerAsksForTheSum counts)
//   - coalescer_batch.go: settle returns no errDisagree: a check of the engine itself: only a second defect would show it
//   - tx_hot.go: places lets one or three pass: the others wait for the lock in the database: bench measures it
//   - tx_sendtx.go: the result of COMMIT is not read: Close reads it, and returns its error
//   - sql.go: the error of rows.Close is dropped: the rows have been read to the end, and rows.Err has returned any error
//   - tx.go: another pause between attempts: any pause will do: bench measures it
