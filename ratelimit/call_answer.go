package ratelimit

import (
	"encoding/json"
	"errors"
	"math"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/decide"
)

// answer is the database's decision about the demands of a call.
type answer struct {
	granted bool
	at      algebra.Micros
	rows    [][]algebra.Row // per demand; none: the limit is full
	taken   float64         // by each demand of a Take
	held    held            // of a verb about holds
	until   algebra.Micros  // of a Pause

	// Memory for the most common case: one demand with one row.
	single [1][]algebra.Row
	row    [1]algebra.Row
}

// setRow makes row the only row of the answer.
func (a *answer) setRow(row algebra.Row) {
	a.row[0] = row
	a.single[0] = a.row[:]
	a.rows = a.single[:]
}

// setRows assigns rows to their demands. ord has the number of each row's demand, from 1. If ord is nil, each demand has
// one row. It returns false if the rows do not fit the demands.
func (a *answer) setRows(demands int, rows []algebra.Row, ord []int32) bool {
	if ord == nil && len(rows) != demands || ord != nil && len(ord) != len(rows) {
		return false
	}
	a.rows = make([][]algebra.Row, demands)
	for i := range rows {
		if ord == nil {
			a.rows[i] = rows[i : i+1 : i+1]
			continue
		}
		if ord[i] < 1 || int(ord[i]) > demands {
			return false
		}
		of := &a.rows[ord[i]-1]
		*of = append(*of, rows[i])
	}
	return true
}

// rows reads the columns ord, value and ts, and assigns the rows to the demands. If ord is NULL, each demand has one row.
func (r *record) rows(a *answer, demands int) {
	places := r.array(pgtype.Int4ArrayOID, pgtype.Int4OID, 4)
	values := r.array(pgtype.Float8ArrayOID, pgtype.Float8OID, 8)
	ts := r.array(pgtype.TimestamptzArrayOID, pgtype.TimestamptzOID, 8)
	if r.failed || values == nil || ts == nil || len(ts) != len(values) {
		r.failed = true
		return
	}
	rows := make([]algebra.Row, len(values))
	for i := range values {
		rows[i] = algebra.Row{Value: math.Float64frombits(values[i]), TS: sinceY2K(ts[i])}
	}
	var ord []int32
	if places != nil {
		ord = make([]int32, len(places))
		for i, place := range places {
			ord[i] = int32(place)
		}
	}
	r.failed = !a.setRows(demands, rows, ord)
}

// answerOf is the answer of a database in memory.
func answerOf(a decide.Answer) *answer {
	return &answer{granted: a.Granted, at: a.At, rows: a.Rows, taken: a.Taken, until: a.Until, held: held{moved: a.Moved, lost: a.Waiting}}
}

// Each query answers with one value: the function's row, encoded by record_send. Separate columns would need the function
// in FROM, which costs the server 6 % more instructions for one limit.

// readOne reads a ratelimit._decision: the answer for one demand of a limit without shards.
func readOne(reply pgx.Row, _ int) (*answer, error) {
	var b []byte
	if err := reply.Scan(&b); err != nil {
		return nil, err
	}
	r := record{rest: b}
	r.expect(4)
	a := &answer{granted: r.boolean(), at: r.instant()}
	a.setRow(algebra.Row{Value: r.float(), TS: r.instant()})
	if !r.ended() {
		return nil, errRecord
	}
	return a, nil
}

// readSeveral reads a ratelimit._decisions: the answer for any demands.
func readSeveral(reply pgx.Row, demands int) (*answer, error) {
	var b []byte
	if err := reply.Scan(&b); err != nil {
		return nil, err
	}
	r := record{rest: b}
	r.expect(6)
	a := &answer{granted: r.boolean(), at: r.instant()}
	r.rows(a, demands)
	a.taken = r.floatOrNull()
	if !r.ended() {
		return nil, errRecord
	}
	return a, nil
}

// readUnused reads what the caller has not asked for: how many rows were deleted or paused, or a balance.
func readUnused[T int32 | float64](reply pgx.Row, _ int) (*answer, error) {
	var unused T
	if err := reply.Scan(&unused); err != nil {
		return nil, err
	}
	return &answer{granted: true}, nil
}

// denialState is the SQLSTATE of a denial in a batch.
const denialState = "PT429"

// denialIn reads the answer that ratelimit._raise puts into an error. Other SQL may raise PT429 too, so an error that
// ratelimit._raise would not write exactly like this is not taken for a denial.
func denialIn(err error, demands int) (a *answer, ok bool) {
	if err == nil { // avoids allocating pgErr
		return nil, false
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != denialState {
		return nil, false
	}
	var detail struct {
		At    *int64    `json:"at"`
		Ord   []int32   `json:"ord"`
		Value []float64 `json:"value"`
		Ts    []int64   `json:"ts"`
	}
	decoder := json.NewDecoder(strings.NewReader(pgErr.Detail))
	decoder.DisallowUnknownFields()
	if decoder.Decode(&detail) != nil || decoder.More() || detail.At == nil || detail.Ord == nil || len(detail.Ts) != len(detail.Value) {
		return nil, false
	}
	rows := make([]algebra.Row, len(detail.Value))
	for i := range rows {
		rows[i] = algebra.Row{Value: detail.Value[i], TS: algebra.Micros(detail.Ts[i])}
	}
	a = &answer{at: algebra.Micros(*detail.At)}
	if !a.setRows(demands, rows, detail.Ord) {
		return nil, false
	}
	return a, true
}
