// Package ratelimit keeps rate limits in the Postgres that the application already has, checked and consumed inside its
// own transaction. If the transaction rolls back, the tokens come back; if it commits, the limit and the business rows
// commit together.
//
// A [Limit] is a definition: a [TokenBucket] or a [FixedWindow], usually a package-level variable. A [Request] asks for
// some tokens of it, for a key: limit.Key(userID), limit.Key(team).Count(500).Reserve(), limit.Global(). A [Limiter],
// whose zero value is ready, decides requests on a [DB]: a pgx transaction, connection or pool, or a [Coalescer]; and by way
// of [SQL] on database/sql and in the transactions of GORM, sqlx, bun and ent.
//
// In the database, a limit and key is one row (name, key, value, ts), or one for each shard, a missing row is a full
// one, and a call is one statement. The schema is in package migrations.
//
// # Transactions
//
// Every verb is exact at every isolation level. In READ COMMITTED, callers of one key wait for each other's commit. In
// REPEATABLE READ and SERIALIZABLE one of them fails with SQLSTATE 40001 and must run its whole transaction again:
// [Limiter.InTx] does, [Limiter.InSQLTx] on database/sql, and [Retry] around an ORM's transactions. The row of a key stays
// locked from Consume to the end of the transaction, so it pays to consume late (with [Hot], first). Several limits that
// are asked for in one call are locked in one order and never deadlock; calls one after another in a transaction may, and then
// Postgres ends one of them with 40P01, which InTx runs again too.
//
// A denial is an error in Go and none in SQL: the transaction stays usable. A denial writes nothing. Its one trace in the
// database is that a call which had to wait for another transaction, and then found too little, holds the row's lock until
// its own transaction ends.
//
// What can be found wrong without asking the server is refused before anything is sent ([ErrInvalid],
// [ErrExceedsCapacity]), since a SQL error would abort the transaction. Any other error comes from the database or the
// connection, and grants nothing. In a transaction of the caller's, that is certain. Where the call is a transaction of its own,
// and at COMMIT, a connection that breaks before the answer leaves open whether tokens were consumed: the error then matches
// [ErrUnknownOutcome]. After any other error nothing was.
//
// # Contention
//
// One key can be committed as often as its row can. Where that is too seldom: [Hot] has transactions of [Limiter.InTx] wait
// their turn instead of conflicting, [Shards] spreads a key over several rows, a [Coalescer] decides many calls outside
// transactions by one commit, and [Limiter.SendTx] sends a short transaction in one round trip.
//
// # Time
//
// The clock is the database's clock_timestamp() unless [Limiter.Clock] is set. A clock that steps back neither mints nor
// takes tokens: the refill waits until it has caught up.
//
// # Reservations
//
// Request.Reserve takes tokens that are not there yet, and [Result].RetryAt says when the work may run. [Result.Receipt] is what to store
// with the work, for a later [Limiter.Refund]. No refund breaks a RetryAt that somebody else was told; docs/refunds.md says what is
// promised.
//
// # Storage
//
// The table has a row for each key that was ever used. [Limiter.Sweep] deletes those that have been full for an hour, while traffic
// runs. No decision changes.
package ratelimit
