//go:build !coalesce

package main

import (
	"context"
	"errors"
)

// Until the coalescer is merged, what needs it fails. Then this file goes, and the tag of contenders_coalesced.go.
var errNoCoalescer = errors.New("this build has no coalescer")

func openCoalesced(context.Context, *env, setting) (*opened, error) { return nil, errNoCoalescer }

func openCoalescedAsync(context.Context, *env, setting) (*opened, error) { return nil, errNoCoalescer }
