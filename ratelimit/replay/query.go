package replay

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/ratelimit"
)

// Query reads events from a query's rows, as they arrive. The columns are the time, a timestamptz; the key, of any type,
// taken as its text; and the count, a number. Without a third column every event asks for one token, and without a second one
// all events have the same, empty key. Sort the rows:
//
//	SELECT created_at, user_id FROM messages WHERE created_at > now() - interval '7 days' ORDER BY created_at
//
// db is a pool, a connection or a transaction, which is in use until the sequence ends. A row with a NULL or an empty key, say, is a
// [*MistakeError]. The sequence then goes on with the next row, unless it is left. Any other error ends it.
func Query(ctx context.Context, db interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}, sql string, args ...any) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		// As text, since pgx cannot read the binary form of every type, such as inet, as text.
		rows, err := db.Query(ctx, sql, append([]any{pgx.QueryResultFormats{pgx.TextFormatCode}}, args...)...)
		if err != nil {
			yield(Event{}, fmt.Errorf("replay: %w", err))
			return
		}
		defer rows.Close()
		columns := rows.FieldDescriptions()
		if len(columns) > 0 && (len(columns) > 3 || columns[0].DataTypeOID != pgtype.TimestamptzOID) {
			yield(Event{}, fmt.Errorf("%w: a replay's query has one to three columns: the time, a timestamptz; the key; the count", ratelimit.ErrInvalid))
			return
		}
		for n := 1; rows.Next(); n++ {
			event, err := scan(rows, len(columns))
			if event.unit, event.number = "row", n; err != nil {
				event, err = Event{}, mistake("row", n, err)
			}
			if !yield(event, err) {
				return
			}
		}
		if err := rows.Err(); err != nil {
			yield(Event{}, fmt.Errorf("replay: %w", err))
		}
	}
}

// scan makes an event of a row.
func scan(rows pgx.Rows, columns int) (e Event, err error) {
	var at pgtype.Timestamptz
	var key, count pgtype.Text
	if err := rows.Scan([]any{&at, &key, &count}[:columns]...); err != nil {
		return e, err
	}
	e = Event{Time: at.Time, Key: key.String, Count: 1}
	switch {
	case !at.Valid || at.InfinityModifier != pgtype.Finite:
		return e, errors.New("the time is NULL or infinite")
	case columns > 1 && key.String == "":
		return e, errors.New("the key is NULL or empty")
	case columns > 2:
		if e.Count, err = strconv.ParseFloat(count.String, 64); err != nil {
			return e, fmt.Errorf("the count is not a number: %.40q", count.String)
		}
	}
	return e, e.check()
}
