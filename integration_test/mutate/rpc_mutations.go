package main

// rpcMutations are edits of the interceptors for gRPC and Connect.
var rpcMutations = []mutation{
	{
		name: "rpc-client-late", file: "ratelimit/rpclimit/rpclimit.go", what: "a client's deadline counts as a failure of the database",
		old: "if c := refusal.Code(); ctx.Err() != nil &&", new: "if c := refusal.Code(); errors.Is(ctx.Err(), context.Canceled) &&",
		tests: "TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-client-gone-passes", file: "ratelimit/rpclimit/rpclimit.go", what: "with FailOpen, the call of a client that left passes",
		old: "status.FromContextError(ctx.Err()), false", new: "status.FromContextError(ctx.Err()), d.FailedOpen",
		tests: "TestRPCWithoutTheDatabaseCallsAreRefusedOrPassByChoice",
	}, {
		name: "outcome-overload", file: "internal/outcome/reach.go", what: "FailOpen passes what took too long",
		old: "return r.silentFor(patience)\n\t}\n}", new: "return true\n\t}\n}",
		tests: "TestFailOpenIsNotForOverload",
	}, {
		name: "outcome-patience", file: "internal/outcome/reach.go", what: "one probe without an answer opens",
		old: "patience     = 5 * time.Second", new: "patience     = 1 * time.Millisecond",
		tests: "TestHTTPWithoutTheDatabaseRequestsAreRefusedOrPassByChoice",
	}, {
		name: "outcome-answers", file: "internal/outcome/reach.go", what: "a server without a free connection counts as unreachable",
		old: `return e.SQLState() != "57P03", e.SQLState() == "57P03"`, new: `return e.SQLState() != "53300", e.SQLState() == "53300"`,
		tests: "TestFailOpenIsNotForOverload",
	}, {
		name: "outcome-timeout", file: "internal/outcome/outcome.go", what: "a decision takes as long as the client waits",
		old: "context.WithTimeout(ctx, timeout)", new: "context.WithTimeout(ctx, timeout+time.Hour)",
		tests: "TestADecisionHasADeadline",
	}, {
		name: "outcome-conflict", file: "internal/outcome/outcome.go", what: "a conflict counts as a failure of the database",
		old: "err = limiter.Retry(ctx, func(ctx context.Context) (err error) {\n		result, err = limiter.Consume(ctx, db, requests...)\n		return err\n	})", new: "result, err = limiter.Consume(ctx, db, requests...)",
		tests: "TestRPCWhatCouldNotBeSerializedIsRunAgain",
	}, {
		name: "rpc-nothing-asked", file: "ratelimit/rpclimit/rpclimit.go", what: "a call that asks for nothing is not limited",
		old: "err = fmt.Errorf(\"%w: rpclimit: no requests and no error were returned; for a call that is not limited, return ErrNotLimited\", ratelimit.ErrInvalid)", new: "err = ErrNotLimited",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-not-limited-wrapped", file: "ratelimit/rpclimit/rpclimit.go", what: "ErrNotLimited is an error if it is wrapped",
		old: "errors.Is(err, ErrNotLimited)", new: "err == ErrNotLimited",
		tests: "TestRPCCallsThatAreNotLimitedPass",
	}, {
		name: "http-incomplete", file: "ratelimit/httplimit/httplimit.go", what: "a middleware that cannot work is mounted",
		old: "	if wrong := m.wrong(next); wrong != \"\" {\n", new: "	if wrong := m.wrong(next); len(wrong) > 999 {\n",
		tests: "TestAMiddlewareThatCannotWorkIsNotMounted",
	}, {
		name: "outcome-no-pool", file: "internal/outcome/outcome.go", what: "a middleware on a Coalescer without a pool is mounted",
		old: "	case coalesces && coalescer.Pool == nil:\n", new: "	case coalesces && coalescer.Pool == nil && limiter == nil:\n",
		tests: "TestAMiddlewareThatCannotWorkIsNotMounted",
	}, {
		name: "http-by-error", file: "ratelimit/httplimit/requests.go", what: "By asks for a key that was not found",
		old: "			if of, err = key(r); err != nil {\n				return nil, err\n			}\n", new: "			of, err = key(r)\n			_ = err\n",
		tests: "TestByAsksForOneTokenOfOneKey",
	}, {
		name: "rpc-log-late", file: "ratelimit/rpclimit/rpclimit.go", what: "clients that do not wait for the database are not reported",
		old: "case d.Code == codes.DeadlineExceeded:", new: "case d.Code == codes.Unknown:",
		tests: "TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-log-key", file: "ratelimit/rpclimit/rpclimit.go", what: "missing keys are not reported",
		old: "case (d.Code == codes.InvalidArgument ||", new: "case (d.Code == codes.Unknown ||",
		tests: "TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged",
	}, {
		name: "rpc-never-retry", file: "ratelimit/rpclimit/refusal.go", what: "a request that can never be granted counts only as the client's mistake",
		old: "case errors.Is(err, ratelimit.ErrExceedsCapacity):\n		return status.New(codes.ResourceExhausted", new: "case errors.Is(err, ratelimit.ErrExceedsCapacity):\n		return status.New(codes.InvalidArgument",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-leak", file: "ratelimit/rpclimit/refusal.go", what: "a violation shows the key",
		old: "QuotaId: name, Description", new: "Subject: s.Key, QuotaId: name, Description",
		tests: "TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied",
	}, {
		name: "rpc-leak-error", file: "ratelimit/rpclimit/refusal.go", what: "an internal error of the program is sent to clients",
		old: "	default:\n		return internal\n	}\n}\n", new: "	default:\n		return status.New(codes.Internal, err.Error())\n	}\n}\n",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-connect-details", file: "ratelimit/rpclimit/refusal.go", what: "details of a Connect error are lost",
		old: "for _, d := range byConnect.Details() {", new: "for _, d := range byConnect.Details()[:0] {",
		tests: "TestRPCCallsThatCannotBeCountedAreRefused",
	}, {
		name: "rpc-stream-open", file: "ratelimit/rpclimit/grpc.go", what: "a denied stream ends without an error",
		old: "			return refusal.Err()\n", new: "			return nil\n",
		tests: "TestRPCAStreamIsLimitedWhenItOpens",
	}, {
		name: "rpc-connect-denial", file: "ratelimit/rpclimit/connect.go", what: "a denial over Connect has no details",
		old: "range refusal.Proto().GetDetails()", new: "range refusal.Proto().GetDetails()[:0]",
		tests: "TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied",
	},
}
