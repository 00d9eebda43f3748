package migrationgen

import (
	"crypto/sha256"
	"fmt"
	"regexp"
	"strings"
)

// statement is a statement of the engine. It makes an object or comments on one.
type statement struct {
	file     string
	lead     string // the comments before it
	text     string // with its semicolon
	kind     string // of the object, such as FUNCTION
	name     string
	comments string // commentOn if the statement is a comment, otherwise empty
}

const commentOn = "comment on "

// object returns the object that the statement makes or comments on. Names are not overloaded. A column belongs to its table.
func (s statement) object() string {
	if table, _, ok := strings.Cut(s.name, "."); ok {
		return "table " + table
	}
	return strings.ToLower(s.kind) + " " + s.name
}

// key identifies the statement.
func (s statement) key() string { return s.comments + strings.ToLower(s.kind) + " " + s.name }

// mark identifies the statement's text.
func (s statement) mark() string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s.text)))[:16] }

// created returns the text with CREATE instead of CREATE OR REPLACE. It fails if the object exists. Replacing an object of another role
// would leave it with its owner.
func (s statement) created() string {
	return strings.Replace(s.text, "CREATE OR REPLACE", "CREATE", 1) + "\n"
}

// replaceableBy reports whether the other statement can replace this one without a change for callers that know only this one.
func (s statement) replaceableBy(other statement) bool {
	return s.comments != "" || s.kind == "FUNCTION" && s.signature() == other.signature()
}

// signature is the part of CREATE FUNCTION that callers depend on: arguments, defaults and columns.
func (s statement) signature() string {
	head, _, _ := strings.Cut(s.text, "\nLANGUAGE ")
	return strings.Join(strings.Fields(head), " ")
}

// dropped returns the statement that drops the object.
func (s statement) dropped() string {
	name := schema + s.name
	if s.kind == "FUNCTION" {
		name += "(" + strings.Join(s.arguments(), ", ") + ")"
	}
	return "DROP " + s.kind + " " + name + ";\n"
}

// arguments returns the arguments that identify a function among functions of its name.
func (s statement) arguments() (arguments []string) {
	list := s.text[strings.Index(s.text, "(")+1:]
	depth, begin := 0, 0
	for i, c := range list {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		}
		if depth < 0 || depth == 0 && c == ',' {
			argument, _, _ := strings.Cut(list[begin:i], " DEFAULT ")
			if argument = strings.Join(strings.Fields(argument), " "); argument != "" && !strings.HasPrefix(argument, "OUT ") {
				arguments = append(arguments, argument)
			}
			begin = i + 1
		}
		if depth < 0 {
			break
		}
	}
	return arguments
}

// uncomment returns the statement that removes a comment.
func (s statement) uncomment() string {
	head, _, _ := strings.Cut(s.text, " IS ")
	return head + " IS NULL;\n"
}

func (s statement) isUncomment() bool { return s.comments != "" && s.text+"\n" == s.uncomment() }

// schema is before each name of the engine but that of an index, which is in the schema of its table.
const schema = "ratelimit."

// known matches the statements that the engine may have.
var known = regexp.MustCompile(`^(COMMENT ON|CREATE OR REPLACE|CREATE) (FUNCTION|TABLE|TYPE|VIEW|COLUMN|INDEX) (?:ratelimit\.(\w+(?:\.\w+)?)|(\w+) ON ratelimit\.)`)

// split splits SQL into statements.
func split(sql string) (statements []statement, err error) {
	for {
		begin := skipComments(sql)
		if begin == len(sql) {
			if strings.TrimSpace(sql) != "" {
				return nil, fmt.Errorf("after the last statement there is a comment")
			}
			return statements, nil
		}
		end, err := statementEnd(sql[begin:])
		if err != nil {
			return nil, err
		}
		s := statement{lead: "\n" + strings.TrimLeft(sql[:begin], "\n"), text: sql[begin : begin+end]}
		sql = sql[begin+end:]
		match := known.FindStringSubmatch(s.text)
		if match == nil || strings.Contains(s.text, "-- +goose") {
			first, _, _ := strings.Cut(s.text, "\n")
			return nil, fmt.Errorf("the generator knows no such statement: %s", first)
		}
		s.kind, s.name = match[2], match[3]+match[4]
		switch {
		case (s.kind == "INDEX") != (match[4] != ""):
			return nil, fmt.Errorf("the generator knows no such statement: %s", s.text)
		case match[1] == "COMMENT ON":
			s.comments = commentOn
		case s.kind == "FUNCTION":
			s.text = "CREATE OR REPLACE" + strings.TrimPrefix(s.text, match[1]) // also if the file has CREATE; see created
		}
		statements = append(statements, s)
	}
}

// skipComments returns the length of the white space and comments at the beginning of sql.
func skipComments(sql string) int {
	for i := 0; ; {
		rest := strings.TrimLeft(sql[i:], " \t\n")
		i = len(sql) - len(rest)
		if !strings.HasPrefix(rest, "--") {
			return i
		}
		if n := strings.Index(rest, "\n"); n >= 0 {
			i += n
		} else {
			return len(sql)
		}
	}
}

// token matches text whose semicolons do not end a statement, or a semicolon that does.
var token = regexp.MustCompile(`--.*|(?s:/\*.*?\*/)|'[^']*'|"[^"]*"|\$\w*\$|;`)

// statementEnd returns the length of the statement at the beginning of sql.
func statementEnd(sql string) (int, error) {
	for i := 0; ; {
		at := token.FindStringIndex(sql[i:])
		if at == nil {
			return 0, fmt.Errorf("a statement has no end: %.80s", sql)
		}
		found := sql[i+at[0] : i+at[1]]
		i += at[1]
		switch {
		case found == ";":
			return i, nil
		case strings.HasPrefix(found, "$"):
			n := strings.Index(sql[i:], found)
			if n < 0 {
				return 0, fmt.Errorf("%s has no end", found)
			}
			i += n + len(found)
		}
	}
}
