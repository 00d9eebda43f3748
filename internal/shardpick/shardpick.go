// Package shardpick chooses the shards that a call looks at first.
package shardpick

import (
	"context"
	"math/rand/v2"
)

// Func picks two of n shards, 0 to n-1, that differ if n > 1.
type Func func(n int) (a, b int)

type contextKey struct{}

// With returns a context in which f picks the shards. Tests use it to know the choice.
func With(ctx context.Context, f Func) context.Context {
	return context.WithValue(ctx, contextKey{}, f)
}

// Two picks two of n shards, as the context says or at random.
func Two(ctx context.Context, n int) (a, b int) {
	if n == 1 {
		return 0, 0
	}
	if f, ok := ctx.Value(contextKey{}).(Func); ok {
		return f(n)
	}
	a = rand.IntN(n)
	return a, (a + 1 + rand.IntN(n-1)) % n
}
