package main

// inMemoryMutations are edits of the database in memory.
var inMemoryMutations = []mutation{
	{
		name: "inmemory-move-rows", file: "internal/inmemory/inmemory.go", what: "in memory, a move does not make the rows of a full limit",
		old: "if len(t[d.ID]) == 0 {", new: "if false {",
		tests: "TestModel",
	}, {
		name: "inmemory-merge", file: "internal/inmemory/inmemory.go", what: "in memory, the rows of shards are merged only if the call is granted",
		old: "!reserve && len(t[d.ID]) > 1", new: "!reserve && false",
		tests: "TestModel",
	}, {
		name: "inmemory-shard-floor", file: "internal/inmemory/inmemory.go", what: "in memory, a shard takes tokens that it does not have",
		old: "if d.Shards > 1 || reserve {", new: "if reserve {",
		tests: "TestModel",
	}, {
		name: "inmemory-reserve-floor", file: "internal/inmemory/inmemory.go", what: "in memory, a reservation owes tokens without forfeiting any",
		old: "if d.Shards > 1 || reserve {", new: "if d.Shards > 1 {",
		tests: "TestModel",
	}, {
		name: "inmemory-emptier-shard", file: "internal/inmemory/inmemory.go", what: "in memory, the emptier shard is taken from",
		old: "d.available(rows[b], now) > d.available(rows[a], now)", new: "d.available(rows[b], now) < d.available(rows[a], now)",
		tests: "TestModel",
	}, {
		name: "inmemory-equal-shards", file: "internal/inmemory/inmemory.go", what: "in memory, the later one of two equal shards is taken from",
		old: "d.available(rows[b], now) > d.available(rows[a], now)", new: "d.available(rows[b], now) >= d.available(rows[a], now)",
		tests: "TestModel",
	}, {
		name: "inmemory-fuller-shard", file: "internal/inmemory/inmemory.go", what: "in memory, the fuller shard is taken from at every level",
		old: "	case level == Higher:\n", new: "	case false:\n",
		tests: "TestModel",
	}, {
		name: "inmemory-all-or-nothing", file: "internal/inmemory/inmemory.go", what: "in memory, several limits are granted if the last one is",
		old: "granted = granted && d.Enough(", new: "granted = d.Enough(",
		tests: "TestModel",
	}, {
		name: "inmemory-take-least", file: "internal/inmemory/inmemory.go", what: "in memory, a Take of several limits takes what the last one has",
		old: "a.Taken = min(a.Taken, d.Limit.Whole(", new: "a.Taken = min(most, d.Limit.Whole(",
		tests: "TestModel",
	}, {
		name: "inmemory-take-most", file: "internal/inmemory/inmemory.go", what: "in memory, a Take takes more than it asked for",
		old: "	a.Taken = most\n", new: "	a.Taken, most = 1e15, 1e15\n",
		tests: "TestModel",
	}, {
		name: "inmemory-time-backwards", file: "internal/inmemory/inmemory.go", what: "in memory, a row forgets that the clock has stepped back",
		old: "row.TS = max(row.TS, now)", new: "row.TS = now",
		tests: "TestModel",
	}, {
		name: "inmemory-refund-shards", file: "internal/inmemory/inmemory.go", what: "in memory, a refund changes the number of shards",
		old: "if d.Shards = len(rows); d.Shards == 0 {", new: "if len(rows) == 0 {",
		tests: "TestModel",
	}, {
		name: "inmemory-refund-all", file: "internal/inmemory/inmemory.go", what: "in memory, a refund gives back the whole count",
		old: "d.Limit.Take(rows, d.Shards, -a.Moved[i], now)", new: "d.Limit.Take(rows, d.Shards, -d.Count, now)",
		tests: "TestModel",
	}, {
		name: "memory-conflict", file: "internal/inmemory/tx.go", what: "in memory, a transaction overwrites what others have committed meanwhile",
		old: "if !slices.Equal(s.db.table[id], rows) {", new: "if false && !slices.Equal(s.db.table[id], rows) {",
		tests: "TestConflictsAreRetried",
	}, {
		name: "memory-aborted", file: "internal/inmemory/tx.go", what: "in memory, a transaction goes on after an error",
		old: "	s.aborted = answer.err != nil\n", new: "",
		tests: "TestOtherSQLIsAnError",
	}, {
		name: "memory-aborted-commit", file: "internal/inmemory/tx.go", what: "in memory, an aborted transaction commits",
		old: "	if s.aborted {\n		return pgx.ErrTxCommitRollback\n	}\n", new: "",
		tests: "TestOtherSQLIsAnError",
	}, {
		name: "memory-savepoint", file: "internal/inmemory/tx.go", what: "in memory, a rollback to a savepoint undoes nothing",
		old: "t.session.table, t.session.changes, t.aborted = t.table, t.changes, false", new: "t.session.changes, t.aborted = t.changes, false",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-savepoint-base", file: "internal/inmemory/tx.go", what: "in memory, a key first used after a savepoint has no rows after its rollback",
		old: "			if _, used := t.before[id]; !used {\n				t.table[id] = rows\n			}\n", new: "			_, _ = id, rows\n",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-savepoint-aborted", file: "internal/inmemory/tx.go", what: "in memory, a transaction stays aborted after a rollback to a savepoint",
		old: "t.session.table, t.session.changes, t.aborted = t.table, t.changes, false", new: "t.session.table, t.session.changes = t.table, t.changes",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-delete", file: "internal/inmemory/tx.go", what: "in memory, a reset is not committed",
		old: "			delete(s.db.table, id)\n", new: "			_ = id\n",
		tests: "TestEveryVerb",
	}, {
		name: "memory-batch-commit", file: "internal/inmemory/batch.go", what: "in memory, a batch without BEGIN is not committed",
		old: "		r.commit = s.commit()\n", new: "		s.end()\n",
		tests: "TestBatches",
	}, {
		name: "memory-raise", file: "internal/inmemory/statement.go", what: "in memory, a denial in a batch is not an error",
		old: "case s.orRaise && !a.Granted:", new: "case false:",
		tests: "TestBatches",
	}, {
		name: "memory-calendar-clock", file: "internal/inmemory/statement.go", what: "in memory, a calendar window is decided by the windows of another time",
		old: "l.Unknown(now) || now < (*l.Windows)[0]", new: "false",
		tests: "TestBatches",
	}, {
		name: "memory-sweep-hour", file: "internal/inmemory/sweep.go", what: "in memory, a sweep deletes what has just become full",
		old: "s.at = now - algebra.Micros(time.Hour.Microseconds())", new: "s.at = now",
		tests: "TestSweep|TestASweepChangesNoDecision",
	}, {
		name: "memory-sweep-future", file: "internal/inmemory/sweep.go", what: "in memory, a sweep deletes a full row that is refilled from a later instant on",
		old: "case row.TS > l.UpTo(s.at):", new: "case false:",
		tests: "TestASweepChangesNoDecision",
	}, {
		name: "memory-sweep-grid", file: "internal/inmemory/sweep.go", what: "in memory, a sweep takes the windows of another key",
		old: "algebra.Grid(cmp.Or(key, s.name), ", new: "algebra.Grid(cmp.Or(s.name, key), ",
		tests: "TestASweepChangesNoDecision",
	}, {
		name: "memory-sweep-month", file: "internal/inmemory/sweep.go", what: "in memory, a sweep takes each month for the shortest",
		old: "s.limit.Period = c.Longest()", new: "s.limit.Period = c.Longest() - 4*24*time.Hour",
		tests: "TestSweep",
	}, {
		name: "memory-sweep-debt", file: "internal/inmemory/sweep.go", what: "in memory, a sweep forgets the debt of a key whose numbers it does not know",
		old: "row.Value <= -algebra.MinTokens || ", new: "",
		tests: "TestSweep",
	}, {
		name: "memory-override-savepoint", file: "internal/inmemory/tx.go", what: "in memory, a rollback to a savepoint keeps a block",
		old: "t.session.table, t.session.changes, t.aborted = t.table, t.changes, false", new: "t.session.table, t.aborted = t.table, false",
		tests: "TestOverridesAndBlocks",
	}, {
		name: "memory-override-commit", file: "internal/inmemory/tx.go", what: "in memory, an override is not committed",
		old: "	s.db.overrides = changed(s.db.overrides, s.changes)\n", new: "",
		tests: "TestOverridesAndBlocks",
	}, {
		name: "memory-unblock", file: "internal/inmemory/overrides.go", what: "in memory, Unblock ends other overrides, too",
		old: "(sql == dbsqlc.Restore || o.effect == \"block\")", new: "(sql == dbsqlc.Restore || o.effect != \"\")",
		tests: "TestOverridesAndBlocks",
	}, {
		name: "memory-sweep-override", file: "internal/inmemory/overrides.go", what: "in memory, a sweep deletes what is not full under an override",
		old: "max(sweep.limit.Capacity, capacity)", new: "sweep.limit.Capacity+0*capacity",
		tests: "TestASweepMindsOverrides",
	}, {
		name: "memory-sweep-day", file: "internal/inmemory/overrides.go", what: "in memory, a sweep forgets an override as soon as it has ended",
		old: "s.db.now-algebra.Micros((24*time.Hour).Microseconds())", new: "s.db.now",
		tests: "TestASweepMindsOverrides",
	}, {
		name: "memory-sweep-spared", file: "internal/inmemory/sweep.go", what: "in memory, a sweep deletes a key that varies and has an override",
		old: " || spared[id.Key]", new: " || false && spared[id.Key]",
		tests: "TestASweepMindsOverrides",
	}, {
		name: "memory-open", file: "internal/inmemory/tx.go", what: "a transaction that is left open is not found",
		old: "		db.open++\n", new: "",
		tests: "TestTheEndOfATest",
	}, {
		name: "memory-sleep", file: "internal/inmemory/clock.go", what: "the clock wakes no sleeper",
		old: "		close(s.done)\n		return true\n", new: "		return true\n",
		tests: "TestSleepEndsByTheClock",
	},
}
