// Package ratelimit keeps rate limits in the Postgres that an application already has. A limit is checked and consumed
// inside the application's own transaction. If the transaction rolls back, the tokens come back. If it commits, the tokens
// and the business rows commit together.
//
//	var (
//		limits      ratelimit.Limiter // the zero value is ready
//		sendMessage = ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20))
//	)
//
//	func send(ctx context.Context, tx pgx.Tx, userID, text string) error {
//		if _, err := limits.Consume(ctx, tx, sendMessage.Key(userID)); err != nil {
//			return err // denied: a *ratelimit.DeniedError, with RetryAt and RetryAfter
//		}
//		_, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", userID, text)
//		return err
//	}
//
// # Limits, requests and the limiter
//
//   - A [Limit] is a definition: a [TokenBucket], a [FixedWindow] or a [CalendarWindow]. It is usually a package-level variable.
//   - A [Request] asks for tokens of a limit, for a key: limit.Key(userID), limit.Key(team).Count(500)
//     or limit.Global().
//   - A [Limiter] decides requests. [Open] makes a program's, with overrides, usage and sweeps, and [Limiter.Close] ends it.
//     The zero value is ready, too, without these. Its verbs, such as Consume, Refund and Hold, are methods.
//   - A [DB] is where the limiter works: a pgx transaction, connection or pool, or a [Coalescer]. [SQL] makes a DB from a
//     handle of database/sql, such as the transactions of GORM, sqlx, bun and ent.
//
// The database has one row (name, key, value, ts) for each limit and key, or one for each shard. A missing row is a full
// limit. A call of a verb is one statement, or two. Package migrations has the schema, which must be installed first.
//
// # Denials and errors
//
// A denial is an error in Go, a [*DeniedError], so that code which ignores the result does not let a denied caller pass. It
// is not an error in SQL: the transaction stays usable, and nothing was written. A denied call that had to wait for another
// transaction still locks the row until its own transaction ends.
//
// Invalid calls, and calls that can never be granted, are refused before anything is sent ([ErrInvalid],
// [ErrExceedsCapacity]). A SQL error would abort the transaction.
//
// Any other error comes from the database, the connection or the context. Inside a transaction of the caller's, it means
// that nothing was granted. If the call is a transaction of its own, or at COMMIT, a broken connection leaves open whether
// tokens were consumed: the error then matches [ErrUnknownOutcome]. After any other error, nothing was consumed,
// except by [Limiter.During], whose function may have done its work.
//
// # Transactions
//
// Every verb is exact at every isolation level. In READ COMMITTED, callers that want the same key wait for each other's
// commit. In REPEATABLE READ and SERIALIZABLE, one of them fails with SQLSTATE 40001, and its whole transaction must run
// again. [Limiter.InTx] does that, [Limiter.InSQLTx] does it on database/sql, and [Limiter.Retry] does it around an ORM's
// transactions.
//
// A key's row stays locked from Consume to the end of the transaction, so consume late. With [Hot], consume first.
//
// Ask for several limits in one call: they are locked in one order and never deadlock. Separate calls in one transaction
// can deadlock with another transaction. Postgres then ends one of the two with SQLSTATE 40P01, and InTx runs it again.
//
// # Contention
//
// One key can be consumed as often as its row can be committed. If that is too slow for a key:
//
//   - [Hot] makes transactions of [Limiter.InTx] wait their turn instead of conflicting.
//   - [Shards] spreads a key over several rows.
//   - A [Coalescer] decides many calls outside transactions with one commit.
//   - [Limiter.SendTx] sends a short transaction in one round trip.
//
// # Reservations
//
// [Limiter.Reserve] takes tokens that are not there yet. [Reservation].RetryAt is when the work may run.
// [Reservation.Receipt] is the text to store with the work, for a later [Limiter.Refund]. [Limiter.Wait] reserves, and sleeps
// until then. No refund breaks a RetryAt that another caller was given. See docs/refunds.md in the repository for the exact promise.
//
// # Time
//
// The clock is the database's, unless [Limiter.Clock] is set. A clock that steps back neither adds nor
// takes tokens: the refill waits until the clock has caught up.
//
// # Storage
//
// The table has a row for each key that was ever used. [Limiter.Sweep] deletes the rows of keys that have been full for an
// hour, without changing a decision. It can run beside all other calls.
package ratelimit
