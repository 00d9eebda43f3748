package main

import (
	"context"
	"errors"
	"io"
)

// childCommand is how this program calls itself for a figure of several processes.
const childCommand = "child"

func child(context.Context, io.Reader, io.Writer) error { return errors.New("not yet") }
