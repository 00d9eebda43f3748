package ratelimit

import (
	"encoding/binary"
	"errors"
	"testing"
)

// What the server has done is not known if its answer cannot be read, least of all that it was a grant.
func TestAnAnswerThatCannotBeReadIsUnknown(t *testing.T) {
	granted := []byte{0, 0, 0, 16, 0, 0, 0, 1, 1} // a boolean: type, length, value
	for name, answer := range map[string][]byte{
		"none":           nil,
		"other columns":  append(binary.BigEndian.AppendUint32(nil, 1), granted...),
		"ends too early": append(binary.BigEndian.AppendUint32(nil, 4), granted...),
		"another type":   append(append(binary.BigEndian.AppendUint32(nil, 4), granted...), 0, 0, 0, 16, 0, 0, 0, 1, 1),
	} {
		if row, err := oneLimit(answer, nil); !errors.Is(err, ErrUnknownOutcome) {
			t.Errorf("%s: error %v for one limit, want ErrUnknownOutcome; row %+v", name, err, row)
		}
		if row, err := anyLimits(answer, nil); !errors.Is(err, ErrUnknownOutcome) {
			t.Errorf("%s: error %v for any limits, want ErrUnknownOutcome; row %+v", name, err, row)
		}
	}
}
