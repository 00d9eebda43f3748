package main

// inMemoryMutations are edits of the database in memory.
var inMemoryMutations = []mutation{
	{
		name: "inmemory-emptier-shard", file: "internal/inmemory/inmemory.go", what: "in memory, the emptier shard is taken from",
		old: "available(d, rows[b], now) > available(d, rows[a], now)", new: "available(d, rows[b], now) < available(d, rows[a], now)",
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
		name: "inmemory-refund-shards", file: "internal/inmemory/inmemory.go", what: "in memory, a refund changes the number of shards",
		old: "if d.Shards = len(rows); d.Shards == 0 {", new: "if len(rows) == 0 {",
		tests: "TestModel",
	}, {
		name: "inmemory-refund-all", file: "internal/inmemory/inmemory.go", what: "in memory, a refund gives back the whole count",
		old: "d.Limit.Take(rows, d.Shards, -a.Moved[i], now)", new: "d.Limit.Take(rows, d.Shards, -d.Count, now)",
		tests: "TestModel",
	}, {
		name: "memory-savepoint", file: "internal/inmemory/tx.go", what: "in memory, a rollback to a savepoint undoes nothing",
		old: "t.session.table, t.session.changes, t.aborted = t.table, t.changes, false", new: "t.session.changes, t.aborted = t.changes, false",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-savepoint-aborted", file: "internal/inmemory/tx.go", what: "in memory, a transaction stays aborted after a rollback to a savepoint",
		old: "t.session.table, t.session.changes, t.aborted = t.table, t.changes, false", new: "t.session.table, t.session.changes = t.table, t.changes",
		tests: "TestNestedTransactions",
	}, {
		name: "memory-batch-commit", file: "internal/inmemory/batch.go", what: "in memory, a batch without BEGIN is not committed",
		old: "		r.commit = s.commit()\n", new: "		s.end()\n",
		tests: "TestBatches",
	}, {
		name: "memory-sweep-grid", file: "internal/inmemory/sweep.go", what: "in memory, a sweep takes the windows of another key",
		old: "algebra.Grid(cmp.Or(key, s.name), ", new: "algebra.Grid(cmp.Or(s.name, key), ",
		tests: "TestASweepChangesNoDecision",
	}, {
		name: "memory-sweep-month", file: "internal/inmemory/sweep.go", what: "in memory, a sweep takes each month for the shortest",
		old: "s.limit.Period = c.Longest()", new: "s.limit.Period = c.Longest() - 4*24*time.Hour",
		tests: "TestSweep",
	}, {
		name: "memory-override-savepoint", file: "internal/inmemory/tx.go", what: "in memory, a rollback to a savepoint keeps a block",
		old: "t.session.table, t.session.changes, t.aborted = t.table, t.changes, false", new: "t.session.table, t.aborted = t.table, false",
		tests: "TestOverridesAndBlocks",
	}, {
		name: "memory-unblock", file: "internal/inmemory/statement.go", what: "in memory, Unblock ends other overrides, too",
		old: "q.Global, \"block\")", new: "q.Global, \"numbers\", \"block\")",
		tests: "TestOverridesAndBlocks",
	},
}
