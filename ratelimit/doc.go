// Package ratelimit keeps rate limits in the Postgres that an application already has. A limit is checked and consumed
// inside the application's own transaction: both roll back, or both commit.
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
//   - A [Limit] is a definition: a [TokenBucket], a [FixedWindow], a [CalendarWindow] or [Slots].
//   - A [Request] asks for tokens of a limit, for a key: limit.Key(team).Count(500) or limit.Global().
//   - A [Limiter] decides requests. [Open] makes one with overrides, usage and sweeps. The zero value is ready, without
//     these.
//   - A [DB] is where it works: a pgx transaction, connection or pool, a [Coalescer], or by [SQL] a handle of
//     database/sql.
//
// The database has one row for each limit and key, or one for each shard. A missing row is a full limit.
// [Limiter.Sweep] deletes the rows of keys that have been full for an hour. Package migrations has the schema, which
// must be installed first. The clock is the database's.
//
// # Denials and errors
//
// A denial is an error in Go, a [*DeniedError], but not in SQL: the transaction stays usable, and nothing was written.
// A denied call that had to wait for another transaction still locks the row until its own transaction ends.
//
// Invalid calls, and calls that can never be granted, are refused before anything is sent. Any other error comes from
// the database, the connection or the context. Then nothing was granted, unless the error matches [ErrUnknownOutcome].
// The table at [ErrDenied] has the exceptions.
//
// # Transactions
//
// Every verb is exact at every isolation level. In READ COMMITTED, callers of one key wait for each other's commit.
// Above it, one of them fails with SQLSTATE 40001, and its whole transaction must run again: by [Limiter.InTx],
// [Limiter.InSQLTx] or, for an ORM, [Limiter.Retry].
//
// A key's row stays locked from Consume to the end of the transaction, so consume late. With [Hot], consume first. Ask
// for several limits in one call: they are locked in one order and never deadlock. Separate calls in one transaction
// can (40P01): InTx runs it again.
//
// If one row cannot be committed often enough, see [Hot], [Shards], [Coalescer] and [Limiter.SendTx]. For work that can
// wait, see [Limiter.Reserve] and [Limiter.Wait]; for work that may die, [Limiter.Hold].
package ratelimit
