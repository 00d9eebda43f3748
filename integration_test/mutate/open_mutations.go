package main

// openMutations are edits of Open, Close and the schema's version.
var openMutations = []mutation{
	{
		name: "open-list", file: "ratelimit/limit_definitions.go", what: "an opened Limiter takes limits that are not in its list",
		old: "first == nil && d.listed", new: "false",
		tests: "TestAnOpenedLimiterTakesItsListAlone",
	}, {
		name: "open-loads", file: "ratelimit/open.go", what: "overrides are read by the background alone",
		old: "if err := l.Overrides.Load(ctx); err != nil {", new: "if err := error(nil); err != nil {",
		tests: "TestOpenStartsEverything|TestAProcessThatLivesASecond|TestOpenWithTheDatabaseDown",
	}, {
		name: "open-sweep-alone", file: "ratelimit/open.go", what: "a sweep goes on beside another program's",
		old: "err == nil && !alone", new: "err == nil && !alone && o.NoSweep",
		tests: "TestASweepGivesWayToAnother",
	}, {
		name: "open-sweep-read-only", file: "ratelimit/open.go", what: "a standby is noticed by the first sweep only",
		old: "		case may.ReadOnly:\n", new: "		case false:\n",
		tests: "TestOpenWhereNothingCanBeWritten",
	}, {
		name: "open-sweep-rights", file: "ratelimit/open.go", what: "a right that a sweep lacks is noticed by the first sweep only",
		old: "case may.Missing != \"\":", new: "case false:",
		tests: "TestOpenByTheApplicationsRole",
	}, {
		name: "open-publish-first", file: "ratelimit/open.go", what: "an Open that fails has published",
		old: "	if l.Overrides != nil {\n		if err := l.Overrides.Load", new: "	if !o.NoPublish {\n		_ = Publish(ctx, db, o.Program, o.Limits...)\n	}\n	if l.Overrides != nil {\n		if err := l.Overrides.Load",
		tests: "TestOpenRefusesWhatItIsGiven",
	}, {
		name: "open-observer", file: "ratelimit/open.go", what: "with an Observer, nothing is recorded",
		old: "Join(o.Observer, o.Usage.Decision)", new: "Join(o.Observer)",
		tests: "TestOpenStartsEverything",
	}, {
		name: "close-takes-calls", file: "ratelimit/close.go", what: "a closed Limiter takes calls",
		old: "f.calls.Add(1) < closing", new: "f.calls.Add(1) > 0",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-takes-queued", file: "ratelimit/tx_batch.go", what: "a closed Limiter takes calls of batches",
		old: "	if l.life.closed() {\n", new: "	if false {\n",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-refuses-refunds", file: "ratelimit/verbs.go", what: "a closed Limiter gives nothing back",
		old: "	if v != verbRefund { // which", new: "	if true { // which",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-waits-not", file: "ratelimit/close.go", what: "Close does not wait for calls under way",
		old: "			case <-f.idle:\n			case <-ctx.Done():\n			}\n", new: "			default:\n			}\n",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-forgets-calls", file: "ratelimit/close.go", what: "if the background has ended, a Close in haste forgets the calls under way",
		old: "[]chan struct{}{f.idle, f.ended}", new: "[]chan struct{}{f.ended}",
		tests: "TestCloseHasItsTimeAndSaysWhatItLost",
	}, {
		name: "open-recorder-late", file: "ratelimit/open.go", what: "a Recorder's fields are checked after the database was asked",
		old: "err := o.Usage.Validate(); err != nil", new: "err := error(nil); err != nil",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "close-no-flush", file: "ratelimit/open.go", what: "without a background, nothing is recorded",
		old: "			l.life.err = o.Usage.Flush(ctx)\n", new: "			_ = ctx\n",
		tests: "TestAProcessThatLivesASecond",
	}, {
		name: "fail-open-not-ready", file: "internal/outcome/outcome.go", what: "FailOpen passes what is not loaded or closed",
		old: "return !errors.Is(err, ratelimit.ErrNotLoaded) && !errors.Is(err, ratelimit.ErrClosed)", new: "return err != nil",
		tests: "TestFailOpenPassesNoLimiterThatIsNotReady",
	}, {
		name: "encoding-server", file: "migrations/check.go", what: "a database of another encoding is accepted",
		old: `server != "UTF8" || client != "UTF8"`, new: `client != "UTF8"`,
		tests: "TestOnlyUTF8",
	}, {
		name: "encoding-client", file: "migrations/check.go", what: "a session of another encoding is accepted",
		old: `server != "UTF8" || client != "UTF8"`, new: `server != "UTF8"`,
		tests: "TestOnlyUTF8",
	}, {
		name: "schema-older", file: "migrations/check.go", what: "an older schema serves",
		old: "if s.Version < Version {", new: "if s.Version < 0 {",
		tests: "TestTheSchemaHasAVersion",
	}, {
		name: "schema-same", file: "migrations/check.go", what: "a newer schema's functions are compared",
		old: "s.Version != Version || s.Hash == Hash", new: "s.Hash == Hash",
		tests: "TestTheSchemaHasAVersion",
	},
}
