package main

// replayMutations are edits of the replay.
var replayMutations = []mutation{
	{
		name: "replay-lookback", file: "ratelimit/replay/replay.go", what: "the suggestion counts long-past months as if each were the longest",
		old: "min(100**c.Rate, algebra.MaxTokens)", new: "min(1**c.Rate, algebra.MaxTokens)",
		tests: "TestTheSuggestionCountsAllMonths",
	}, {
		name: "replay-exceeds", file: "ratelimit/replay/replay.go", what: "the suggestion counts what is above the capacity by the numbers of another call",
		old: "wait, decided = never, t.beyond", new: "wait = never",
		tests: "TestTheSuggestionCountsAllMonths|TestTheSuggestionIsTheSmallestCapacity",
	}, {
		name: "replay-stored-key", file: "ratelimit/replay/replay.go", what: "a replay escapes a stored key again, so the key has another grid",
		old: "request = t.single.Key(e.Key)", new: "request = t.single.Key(strings.ReplaceAll(e.Key, \"|\", \"\\\\|\"))",
		tests: "TestReplayPredictsARun",
	}, {
		name: "replay-terminal", file: "ratelimit/replay/report.go", what: "a key can move the cursor of a terminal",
		old: "s = visible.Text(s)\n", new: "_ = visible.Text(s)\n",
		tests: "TestThePictureEscapesNamesAndKeys",
	}, {
		name: "replay-markup", file: "ratelimit/replay/picture.go", what: "a name or a key can be markup of the picture",
		old: "_ = xml.EscapeText(&b, []byte(printable(s, most)))", new: "_ = xml.EscapeText(&b, nil)\n	b.WriteString(printable(s, most))",
		tests: "TestThePictureEscapesNamesAndKeys",
	}, {
		name: "replay-ties", file: "ratelimit/replay/reorder.go", what: "events at the same time change places",
		old: "a.nth < b.nth", new: "a.nth > b.nth",
		tests: "TestReorder",
	}, {
		name: "replay-huge-line", file: "ratelimit/replay/log.go", what: "the rest of a huge line is parsed as lines",
		old: "			for errors.Is(err, bufio.ErrBufferFull) {\n", new: "			if errors.Is(err, bufio.ErrBufferFull) {\n",
		tests: "TestHugeLinesAreErrors",
	}, {
		name: "replay-empty-key", file: "ratelimit/replay/log.go", what: "lines without a key count together",
		old: `err == nil && e.Key == "" {`, new: `err == nil && e.Key == "\x00" {`,
		tests: "TestCSV|TestJSONLines",
	}, {
		name: "replay-long-key", file: "ratelimit/replay/replay.go", what: "a long key ends a replay whose mistakes are left out",
		old: "case len(e.Key) > longest:", new: "case len(e.Key) > 1e6*longest:",
		tests: "TestOneLineIsOneMistake",
	}, {
		name: "replay-null-key", file: "ratelimit/replay/query.go", what: "rows without a key count together",
		old: `columns > 1 && key.String == ""`, new: `columns > 3 && key.String == ""`,
		tests: "TestReplayReadsAQuery",
	}, {
		name: "replay-binary", file: "ratelimit/replay/query.go", what: "keys are read in binary form, from which pgx cannot always make text",
		old: "pgx.TextFormatCode}", new: "pgx.BinaryFormatCode}",
		tests: "TestReplayReadsAQuery",
	},
}
