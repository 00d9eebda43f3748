package main

// openMutations are edits of Open, Close and the schema's version.
var openMutations = []mutation{
	{
		name: "open-list", file: "ratelimit/limit_definitions.go", what: "an opened Limiter takes limits that are not in its list",
		old: "first == nil && d.listed", new: "false",
		tests: "TestAnOpenedLimiterTakesItsListAlone",
	}, {
		name: "open-loads", file: "ratelimit/open.go", what: "overrides are read by the background alone",
		old: "if err := l.overrides.load(ctx); err != nil {", new: "if err := error(nil); err != nil {",
		tests: "TestOpenStartsEverything|TestAProcessThatLivesASecond|TestOpenWithTheDatabaseDown",
	}, {
		name: "open-sweep-alone", file: "ratelimit/open.go", what: "a sweep goes on beside another program's",
		old: "\t\t\t\treturn errSweepLocked\n\t\t\tcase turn", new: "\t\t\t\treturn fn(ctx, tx)\n\t\t\tcase turn",
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
		old: "	if l.overrides != nil {\n		if err := l.overrides.load", new: "	if !o.NoPublish {\n		_ = l.Publish(ctx, db, o.Program, o.Limits...)\n	}\n	if l.overrides != nil {\n		if err := l.overrides.load",
		tests: "TestOpenRefusesWhatItIsGiven",
	}, {
		name: "open-observer", file: "ratelimit/open.go", what: "with an Observer, nothing is recorded",
		old: "		o.Usage.Observe(ctx, d)\n", new: "",
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
		old: "} else if !verbs[v].settles {", new: "} else {",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-waits-not", file: "ratelimit/close.go", what: "Close does not wait for calls under way",
		old: "	select {\n	case <-f.idle:\n	case <-ctx.Done():\n		f.early.Store(true)\n	}\n", new: "",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-forgets-calls", file: "ratelimit/close.go", what: "if the background has ended, a Close in haste forgets the calls under way",
		old: "			<-f.idle\n", new: "",
		tests: "TestCloseHasItsTimeAndSaysWhatItLost",
	}, {
		name: "open-recorder-late", file: "ratelimit/open.go", what: "a Recorder's fields are checked after the database was asked",
		old: "err := o.Usage.Validate(); err != nil", new: "err := error(nil); err != nil",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "close-no-flush", file: "ratelimit/open.go", what: "without a background, nothing is recorded",
		old: "		<-ctx.Done()\n	}\n", new: "		return nil\n	}\n",
		tests: "TestAProcessThatLivesASecond",
	}, {
		name: "close-in-haste", file: "ratelimit/open.go", what: "a Close in haste loses the counts of the calls that another one waits for",
		old: "	if f.early.Load() {", new: "	if false {",
		tests: "TestCloseEndsEverything",
	}, {
		name: "close-refuses-charges", file: "ratelimit/verbs.go", what: "a closed Limiter charges nothing",
		old: "verbCharge:  {takes: true, settles: true,", new: "verbCharge:  {takes: true,",
		tests: "TestCloseEndsEverything|TestHTTPTheCostIsSettledAfterClose",
	}, {
		name: "coalescer-refuses-charges", file: "ratelimit/coalescer.go", what: "a closed Coalescer charges nothing",
		old: "		if asked.does.settles {\n", new: "		if false {\n",
		tests: "TestHTTPTheCostIsSettledAfterClose",
	}, {
		name: "open-sweep-starves", file: "ratelimit/open.go", what: "a sweep that has begun gives way to another",
		old: "case step == sweepBegins:", new: "case true:",
		tests: "TestASweepThatHasBegunGoesOn",
	}, {
		name: "open-sweep-stuck", file: "ratelimit/sweep.go", what: "a limit that cannot be swept stops those after it",
		old: "if state := sqlState(err); ctx.Err() != nil || state == \"\" && !errors.Is(err, errSweepLocked) || state == \"42883\" || state == \"3F000\" {", new: "if true {",
		tests: "TestALimitThatCannotBeSweptStopsNoOther",
	}, {
		name: "open-sweep-each", file: "migrations/engine/sweep.sql", what: "each program sweeps, however lately another one has",
		old: "(rec.done_at BETWEEN now - since AND now) IS NOT TRUE AND ", new: "",
		tests: "TestFiftyProcessesOpenAtOnce",
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
		name: "fail-open-not-ready", file: "internal/outcome/reach.go", what: "FailOpen passes what is closed",
		old: "if errors.Is(err, ratelimit.ErrClosed) {", new: "if false {",
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
