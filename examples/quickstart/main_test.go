package main

import "testing"

func TestTheStoryComesOutAsTold(t *testing.T) {
	if err := run(t.Context(), t.Output()); err != nil {
		t.Fatal(err)
	}
}
