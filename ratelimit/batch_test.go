package ratelimit

import (
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
		{"PT429", `{"at": 1, "ord": [1], "value": [], "ts": [2]}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": [0.1], "ts": []}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": ["NaN"], "ts": [2]}`, false},
		{"PT429", `{"at": 1, "ord": [1], "value": [0.1], "ts": [2], "retry": 1}`, false},
	} {
		answer, ok := denialIn(fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: row.code, Detail: row.detail}), 2)
		if ok != row.ok || answer.granted || len(answer.rows) > len(answer.ord) {
			t.Errorf("%s %s: %+v, %v", row.code, row.detail, answer, ok)
		}
	}
	answer, ok := denialIn(&pgconn.PgError{Code: "PT429", Detail: `{"at": 1, "ord": [2], "value": [0.1], "ts": [2]}`}, 2)
	if !ok || !reflect.DeepEqual(answer, applyRow{at: 1, ord: []int32{2}, rows: []algebra.Row{{Value: 0.1, TS: 2}}}) {
		t.Errorf("%+v, %v", answer, ok)
	}
	if _, ok := denialIn(errors.New("no error of a server"), 1); ok {
		t.Error("an error of nobody's is a denial")
	}
}
