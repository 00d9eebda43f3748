package procstat

import (
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	p, err := parse("4711 (a (b) c) S 1 4711 4711 0 -1 4194560 3 0 0 0 250 50 100 25 20 0 1 0 12 1 1\n")
	if want := (Process{"a (b) c", 1, 3 * time.Second, 1250 * time.Millisecond}); err != nil || p != want {
		t.Errorf("read %+v, %v, want %+v", p, err, want)
	}
	for _, stat := range []string{"", "1 (a) S 1 2", "1 a) (S", "1 (a) S 1 1 1 0 1 1 1 1 1 1 x 1 1 1"} {
		if p, err := parse(stat); err == nil {
			t.Errorf("%q was read as %+v", stat, p)
		}
	}
}
