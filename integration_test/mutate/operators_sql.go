package main

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// sqlTok is a token of SQL. An operator looks at tokens and at brackets; it need not understand a statement. Keywords are in capitals.
type sqlTok struct {
	from, to int
	text     string
	binds    int // how closely it binds as an operator; 0: it ends an expression; operand: it is part of one
	mate     int // where the bracket, CASE or END is that belongs to this one, or -1
	in       int // where the innermost bracket or CASE around it is, or -1
}

const operand = 100

var (
	sqlToken = regexp.MustCompile(`--[^\n]*|E'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"[^"]*"|\$\w*\$|\$?\d[\w.]*|` +
		`IS\s+(?:NOT\s+)?DISTINCT\s+FROM|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|:=|<=|>=|<>|=>|::|\|\||\.\.|\S`)
	sqlBinds = func() map[string]int {
		binds := map[string]int{"OR": 1, "AND": 2, "NOT": 3, "IS": 4, "IS DISTINCT FROM": 4, "IS NOT DISTINCT FROM": 4, "+": 7, "-": 7, "*": 8, "/": 8, "%": 8}
		for op := range strings.FieldsSeq("= < > <= >= <> IN LIKE BETWEEN") {
			binds[op] = 5
		}
		for end := range strings.FieldsSeq("SELECT FROM WHERE GROUP ORDER HAVING LIMIT UNION ON USING SET VALUES RETURNING INTO THEN WHEN ELSE ELSIF IF CASE END LOOP WHILE RETURN " +
			"RAISE FOR FOREACH JOIN LEFT CROSS LATERAL DO EXIT CONTINUE PERFORM UPDATE INSERT DELETE AS BY FILTER OVER DEFAULT BEGIN DECLARE EXCEPTION EXECUTE WITH ASC DESC NULLS " +
			"OFFSET WINDOW REVERSE SLICE , ; := => ( [ ) ] ..") {
			binds[end] = 0
		}
		return binds
	}()
)

// sqlTokens returns the tokens of a text, without comments.
func sqlTokens(text string) []sqlTok {
	var tokens []sqlTok
	var open []int
	for _, at := range sqlToken.FindAllStringIndex(text, -1) {
		t := sqlTok{from: at[0], to: at[1], text: text[at[0]:at[1]], binds: operand, mate: -1, in: -1}
		if strings.HasPrefix(t.text, "--") {
			continue
		}
		if strings.HasPrefix(t.text, "IS") && strings.HasSuffix(t.text, "FROM") {
			t.text = strings.Join(strings.Fields(t.text), " ")
		}
		if b, ok := sqlBinds[t.text]; ok {
			t.binds = b
		}
		i := len(tokens)
		before := sqlTok{}
		if i > 0 {
			before = tokens[i-1]
		}
		switch {
		case strings.Contains("+-*", t.text) && before.binds < operand && before.mate < 0: // a sign, or count(*)
			t.binds = operand
		case t.text == "AND" && between(tokens):
			t.binds = operand
		}
		if len(open) > 0 {
			t.in = open[len(open)-1]
		}
		switch {
		case t.text == "(" || t.text == "[" || t.text == "CASE":
			open = append(open, i)
		case t.in >= 0 && (t.text == ")" || t.text == "]" || t.text == "END" && tokens[t.in].text == "CASE"):
			t.mate, open = t.in, open[:len(open)-1]
			tokens[t.mate].mate = i
		}
		tokens = append(tokens, t)
	}
	return tokens
}

// between returns whether the next AND is a BETWEEN's.
func between(tokens []sqlTok) bool {
	for i := len(tokens) - 1; i >= 0 && tokens[i].binds > 2 && tokens[i].text != "AND"; i-- {
		if tokens[i].text == "BETWEEN" {
			return true
		}
	}
	return false
}

// sides returns the tokens that an operator connects: from..i and i+1..to.
func sides(ts []sqlTok, i, binds int) (from, to int) {
	for from = i; from > 0; from-- {
		before := ts[from-1]
		if closes := before.text == ")" || before.text == "]" || before.text == "END"; closes && before.mate >= 0 {
			from = before.mate + 1
		} else if before.binds < binds || before.binds == 0 {
			break
		}
	}
	return from, ends(ts, i+1, binds)
}

// ends returns where an expression ends that begins at a token, and has operators that bind more closely.
func ends(ts []sqlTok, i, binds int) int {
	for ; i < len(ts); i++ {
		if opens := ts[i].text == "(" || ts[i].text == "[" || ts[i].text == "CASE"; opens && ts[i].mate >= 0 {
			i = ts[i].mate
		} else if ts[i].binds <= binds {
			return i
		}
	}
	return i
}

var (
	sqlSwaps = map[string][]string{
		"AND": {"OR"}, "OR": {"AND"}, "<": {"<="}, "<=": {"<"}, ">": {">="}, ">=": {">"}, "=": {"<>"}, "<>": {"="}, "+": {"-"}, "-": {"+"}, "*": {"/"}, "/": {"*"},
		"least": {"greatest"}, "greatest": {"least"}, "min": {"max"}, "max": {"min"}, "ceil": {"floor"}, "floor": {"ceil"}, "round": {"floor"}, "true": {"false"}, "false": {"true"},
		"IN": {"NOT IN"}, "EXISTS": {"NOT EXISTS"}, "DESC": {""}, "FOUND": {"true", "false"}, "IS DISTINCT FROM": {"IS NOT DISTINCT FROM"}, "IS NOT DISTINCT FROM": {"IS DISTINCT FROM"},
		"clock_timestamp": {"now", "statement_timestamp"}, "statement_timestamp": {"now", "clock_timestamp"}, "DISTINCT": {""},
	}
	sqlClauses = regexp.MustCompile(`^(?:FOR (?:NO KEY )?UPDATE(?: OF \w+)?(?: SKIP LOCKED)?|ON CONFLICT DO NOTHING|SKIP LOCKED)`)
	sqlWraps   = regexp.MustCompile(`^(?:coalesce|greatest|least|nullif|round|floor|ceil|abs|trunc|replace|left|regexp_replace|date_bin|ratelimit\._(?:whole|upto|shown))$`)
	sqlBlocks  = regexp.MustCompile(`^(?:IF|ELSIF|END|FOR|FOREACH|WHILE|LOOP|BEGIN|DECLARE|EXCEPTION|ELSE|WHEN|NULL|CASE|[;$].*)$`)
	sqlNumber  = regexp.MustCompile(`^'?-?[\d.]+(?:e\d+)?'?$`)
)

// sqlEdits are the edits of a text of SQL whose every token may change.
func sqlEdits(text string) (edits []edit) {
	ts := sqlTokens(text)
	put := func(operator string, from, to int, instead string) {
		if from < to {
			edits = append(edits, edit{operator, ts[from].from, ts[to-1].to, instead})
		}
	}
	of := func(from, to int) string { return text[ts[from].from:ts[to-1].to] }
	declares := false
	for i, t := range ts {
		at := func(j int) string {
			if j < 0 || j >= len(ts) {
				return ""
			}
			return ts[j].text
		}
		if t.text == "DECLARE" || t.text == "BEGIN" {
			declares = t.text == "DECLARE"
		}
		isOperator := t.binds > 0 && t.binds < operand
		sign, noTest := strings.Contains("+-*", t.text) && !isOperator, assigns(ts, i) || at(i-1) == "NOT" || at(i-2) == "FOR"
		for _, other := range sqlSwaps[t.text] {
			if !sign && (t.text != "=" && t.text != "IN" || !noTest) {
				put("swap", i, i+1, other)
			}
		}
		switch from, to := sides(ts, i, t.binds); {
		case !isOperator || t.text == "IN" || t.text == "IS":
		case t.text == "AND" || t.text == "OR" || t.text == "+" || t.text == "*":
			put("drop-left", from, i+1, "")
			put("drop-right", i, to, "")
		case t.text == "-" || t.text == "/":
			put("drop-right", i, to, "")
		case t.binds == 5 && !assigns(ts, i):
			put("true", from, to, "true")
			put("false", from, to, "false")
		}
		inCase := at(t.in) == "CASE"
		switch t.text {
		case "IF", "ELSIF", "WHERE", "ON", "HAVING", "WHILE", "WHEN":
			if t.text == "ON" && at(i+1) == "CONFLICT" || t.text == "IF" && at(i-1) == "END" || t.text == "WHEN" && (inCase && at(t.in+1) != "WHEN" || !inCase && at(i-1) != "EXIT" && at(i-1) != "CONTINUE") {
				break
			}
			put("true", i+1, ends(ts, i+1, 0), "true")
			put("false", i+1, ends(ts, i+1, 0), "false")
		case "CASE":
			if t.mate < 0 {
				break
			}
			for j := i + 1; j < t.mate; j++ { // each of its results
				if ts[j].mate > j {
					j = ts[j].mate
				} else if ts[j].text == "THEN" || ts[j].text == "ELSE" {
					put("branch", i, t.mate+1, of(j+1, ends(ts, j+1, 0)))
				}
				if ts[j].text == "ELSE" && j < t.mate {
					put("drop-else", j, t.mate, "")
				}
			}
		case "IS":
			if at(i+1) == "NOT" {
				put("swap", i+1, i+2, "")
			} else {
				put("swap", i, i+1, "IS NOT")
			}
		case "NOT":
			if at(i-1) != "IS" {
				put("swap", i, i+1, "")
			}
		case ",":
			if of := at(t.in - 1); t.in > 0 && (of == "IN" || of == "least" || of == "greatest") || at(i+2) == "=" && assigns(ts, i+2) {
				put("drop-item", i, ends(ts, i+1, 0), "")
				from, _ := sides(ts, i, 1)
				put("drop-item", from, i+1, "")
			}
		case "(":
			if i > 0 && sqlWraps.MatchString(ts[i-1].text) && t.mate > 0 {
				for j := i + 1; j < t.mate; j = ends(ts, j, 0) + 1 {
					put("unwrap", i-1, t.mate+1, of(j, max(j+1, ends(ts, j, 0))))
				}
			}
		}
		if sqlNumber.MatchString(t.text) {
			quote := t.text[:strings.Count(t.text[:1], "'")]
			if n, _ := strconv.ParseFloat(strings.Trim(t.text, "'"), 64); n == 0 {
				put("number", i, i+1, quote+"1"+quote)
			} else {
				put("number", i, i+1, quote+"0"+quote)
			}
		}
		var words []string
		for j := i; j < min(i+6, len(ts)); j++ {
			words = append(words, ts[j].text)
		}
		if clause := sqlClauses.FindString(strings.Join(words, " ")); clause != "" {
			put("drop-clause", i, i+len(strings.Fields(clause)), "")
		}
		begins := i == 0 || at(i-1) == ";" || at(i-1) == "LOOP" || at(i-1) == "BEGIN" || (at(i-1) == "THEN" || at(i-1) == "ELSE") && !inCase
		if begins && !declares && !sqlBlocks.MatchString(t.text) && slices.ContainsFunc(ts[i:], func(t sqlTok) bool { return t.text == ";" }) {
			end := i
			for ts[end].text != ";" {
				end++
			}
			put("drop", i, end+1, "")
		}
	}
	return edits
}

// assigns returns whether = is that of UPDATE ... SET or of a RAISE's USING.
func assigns(ts []sqlTok, i int) bool {
	for i--; i >= 0; i-- {
		switch {
		case ts[i].mate >= 0 && ts[i].mate < i:
			i = ts[i].mate
		case ts[i].text == "SET" || ts[i].text == "USING" || ts[i].text == "DIAGNOSTICS":
			return true
		case ts[i].binds == 0 && ts[i].text != ",":
			return false
		}
	}
	return false
}
