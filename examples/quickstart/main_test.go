package main

import (
	"testing"

	"github.com/txlimit/txlimit/examples/internal/demo"
)

func TestTheStoryComesOutAsTold(t *testing.T) {
	pool, closePool, err := demo.Pool(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := closePool(); err != nil {
			t.Error(err)
		}
	})
	if err := start(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	defer demo.Close(t.Context(), limits)
	if err := run(t.Context(), pool, t.Output()); err != nil {
		t.Fatal(err)
	}
}
