package ratelimit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/algebra"
)

func TestOnlyWhatTheRaisingFunctionWritesIsADenial(t *testing.T) {
	for _, row := range []struct {
		code, detail string
		ok           bool
	}{
		{"PT429", `{"at": 1, "ord": [1], "value": [0.1], "ts": [2]}`, true},
		{"PT429", `{"at": -62135596800000000, "ord": [2, 1], "value": [-1e15, 5e-324], "ts": [253402300799999999, 0]}`, true},
		{"PT429", `{"at": 0, "ord": [], "value": [], "ts": []}`, true}, // all full
		{"P0001", `{"at": 1, "ord": [1], "value": [0.1], "ts": [2]}`, false},
		{"PT429", ``, false},
		{"PT429", `null`, false},
		{"PT429", `{}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": [0.1], "ts": [2]}, and more`, false},
		{"PT429", `{"ord": [1], "value": [0.1], "ts": [2]}`, false},
		{"PT429", `{"at": 1.5, "ord": [1], "value": [0.1], "ts": [2]}`, false},
		{"PT429", `{"at": 1, "ord": [0], "value": [0.1], "ts": [2]}`, false},
		{"PT429", `{"at": 1, "ord": [3], "value": [0.1], "ts": [2]}`, false},
		{"PT429", `{"at": 1, "ord": null, "value": [0.1, 0.2], "ts": [2, 3]}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": [], "ts": []}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": [], "ts": [2]}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": [0.1], "ts": []}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": ["NaN"], "ts": [2]}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": [0.1], "ts": [2], "retry": 1}`, false},
	} {
		answer, ok := denialIn(fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: row.code, Detail: row.detail}), 2)
		if ok != row.ok || ok && (answer.granted || len(answer.rows) != 2) {
			t.Errorf("%s %s: %+v, %v", row.code, row.detail, answer, ok)
		}
	}
	want := answer{at: 1, rows: [][]algebra.Row{nil, {{Value: 0.1, TS: 2}}}}
	denial, ok := denialIn(&pgconn.PgError{Code: "PT429", Detail: `{"at": 1, "ord": [2], "value": [0.1], "ts": [2]}`}, 2)
	if !ok || !reflect.DeepEqual(denial, &want) {
		t.Errorf("%+v, %v", denial, ok)
	}
	if _, ok := denialIn(errors.New("no error of a server"), 1); ok {
		t.Error("an error of nobody's is a denial")
	}
}

// bytesRow is a row of one column.
type bytesRow []byte

func (b bytesRow) Scan(dest ...any) error {
	*dest[0].(*[]byte) = b
	return nil
}

// An answer that cannot be read is no grant. Outside a transaction, the outcome is then unknown: see wire.ask.
func TestAnAnswerThatCannotBeReadIsNoGrant(t *testing.T) {
	granted := []byte{0, 0, 0, 16, 0, 0, 0, 1, 1} // a boolean: type, length, value
	for name, answer := range map[string][]byte{
		"none":           nil,
		"other columns":  append(binary.BigEndian.AppendUint32(nil, 1), granted...),
		"ends too early": append(binary.BigEndian.AppendUint32(nil, 4), granted...),
		"another type":   append(append(binary.BigEndian.AppendUint32(nil, 4), granted...), 0, 0, 0, 16, 0, 0, 0, 1, 1),
	} {
		if a, err := readOne(bytesRow(answer), 1); !errors.Is(err, errRecord) {
			t.Errorf("%s: error %v for one limit, want errRecord; answer %+v", name, err, a)
		}
		if a, err := readSeveral(bytesRow(answer), 1); !errors.Is(err, errRecord) {
			t.Errorf("%s: error %v for any limits, want errRecord; answer %+v", name, err, a)
		}
	}
}
