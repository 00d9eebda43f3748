package main

// openMutations are edits of Open, Close and the schema's version.
var openMutations = []mutation{
	{
		name: "open-loads", file: "ratelimit/open.go", what: "overrides are read by the background alone",
		old: "if err := l.overrides.load(ctx); err != nil {", new: "if err := error(nil); err != nil {",
		tests: "TestOpenStartsEverything|TestAProcessThatLivesASecond|TestOpenWithTheDatabaseDown",
	}, {
		name: "open-sweep-alone", file: "ratelimit/open.go", what: "a sweep goes on beside another program's",
		old: "\t\t\t\treturn errSweepLocked\n\t\t\tcase turn", new: "\t\t\t\treturn fn(ctx, tx)\n\t\t\tcase turn",
		tests: "TestASweepGivesWayToAnother",
	}, {
		name: "open-publish-first", file: "ratelimit/open.go", what: "an Open that fails has published",
		old: "	if l.overrides != nil {\n		if err := l.overrides.load", new: "	if !o.NoPublish {\n		_ = l.Publish(ctx, db, o.Program, o.Limits...)\n	}\n	if l.overrides != nil {\n		if err := l.overrides.load",
		tests: "TestOpenRefusesWhatItIsGiven",
	}, {
		name: "close-takes-calls", file: "ratelimit/close.go", what: "a closed Limiter takes calls",
		old: "f.calls.Add(1) < closing", new: "f.calls.Add(1) > 0",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-waits-not", file: "ratelimit/close.go", what: "Close does not wait for calls under way",
		old: "	select {\n	case <-f.idle:\n	case <-ctx.Done():\n		f.early.Store(true)\n	}\n", new: "",
		tests: "TestCloseEndsEverything",
	}, {
		name: "open-recorder-late", file: "ratelimit/open.go", what: "a Recorder's fields are checked after the database was asked",
		old: "err := o.Usage.Validate(); err != nil", new: "err := error(nil); err != nil",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "close-no-flush", file: "ratelimit/open.go", what: "without a background, nothing is recorded",
		old: "		<-ctx.Done()\n	}\n", new: "		return nil\n	}\n",
		tests: "TestAProcessThatLivesASecond",
	}, {
		name: "open-sweep-stuck", file: "ratelimit/sweep.go", what: "a limit that cannot be swept stops those after it",
		old: "if state := sqlState(err); ctx.Err() != nil || state == \"\" && !errors.Is(err, errSweepLocked) || state == \"42883\" || state == \"3F000\" {", new: "if true {",
		tests: "TestALimitThatCannotBeSweptStopsNoOther",
	}, {
		name: "open-sweep-history", file: "migrations/engine/sweep.sql", what: "the history of overrides grows for good",
		old: "< year AND f.added IS NULL", new: "< '-infinity' AND f.added IS NULL",
		tests: "TestASweepMindsOverrides",
	}, {
		name: "open-heartbeat", file: "ratelimit/open.go", what: "a process does not say that it uses its limits",
		old: "Bool: !o.NoBackground,", new: "Bool: false,",
		tests: "TestTheNewestVersionInUseCounts|TestAProcessSaysEveryMinuteThatItUsesItsLimits",
	}, {
		name: "open-tells-once", file: "ratelimit/open.go", what: "what differs is told every minute",
		old: "text != o.told {", new: "text != \"\" {",
		tests: "TestAProcessSaysEveryMinuteThatItUsesItsLimits",
	}, {
		name: "schema-older", file: "migrations/check.go", what: "an older schema serves",
		old: "if s.Version < Version {", new: "if s.Version < 0 {",
		tests: "TestTheSchemaHasAVersion",
	},
}
