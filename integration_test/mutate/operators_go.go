package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strings"
)

var (
	goSwaps = map[token.Token][]string{
		token.EQL: {"!="}, token.NEQ: {"=="}, token.LSS: {"<="}, token.LEQ: {"<"}, token.GTR: {">="}, token.GEQ: {">"}, token.ADD: {"-"}, token.SUB: {"+"},
		token.MUL: {"/"}, token.QUO: {"*"}, token.LAND: {"||"}, token.LOR: {"&&"}, token.ADD_ASSIGN: {"-=", "="}, token.SUB_ASSIGN: {"+=", "="}, token.INC: {"--"}, token.DEC: {"++"},
	}
	goNames = map[string]string{"min": "max", "max": "min", "true": "false", "false": "true", "Ceil": "Floor", "Floor": "Ceil", "Round": "Floor"}
	goWraps = regexp.MustCompile(`^(?:min|max|math\.(?:Ceil|Floor|Round|Trunc|Abs|Max|Min)|slices\.Clone|maps\.Clone|context\.WithoutCancel|strings\.\w+|http\.CanonicalHeaderKey|append)$`)
	// A method whose result may be that on which it is called.
	goChains = regexp.MustCompile(`^(?:Add|Sub|UTC|In|Truncate|Round)$`)
)

// goEdits are the edits of a Go file, and the functions that they are in. What an edit leaves out still stands there, behind a constant, where Go would otherwise
// find a variable or an import that is not used.
func goEdits(file, text string) (spans []span, edits []edit, err error) {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	pos := func(p token.Pos) int { return fset.Position(p).Offset }
	of := func(n ast.Node) string { return text[pos(n.Pos()):pos(n.End())] }
	put := func(operator string, from, to token.Pos, instead string) {
		edits = append(edits, edit{operator, pos(from), pos(to), instead})
	}
	node := func(operator string, n ast.Node, instead string) { put(operator, n.Pos(), n.End(), instead) }
	condition := func(e ast.Expr) {
		node("true", e, "true || "+of(e))
		node("false", e, "false && ("+of(e)+")")
	}
	isTrue := func(e ast.Expr) {
		if b, ok := e.(*ast.BinaryExpr); ok && b.Op.Precedence() <= token.EQL.Precedence() {
			condition(e)
		}
	}
	drop := func(list []ast.Stmt, returns bool) {
		for _, s := range list {
			switch s := s.(type) {
			case *ast.AssignStmt:
				if s.Tok == token.DEFINE {
					continue
				}
			case *ast.DeclStmt, *ast.LabeledStmt, *ast.BlockStmt, *ast.SwitchStmt, *ast.SelectStmt, *ast.EmptyStmt, *ast.CaseClause, *ast.CommClause:
				continue
			case *ast.ReturnStmt:
				if returns || len(list) == 1 { // a function must return, or it is as a condition that is false
					continue
				}
			case *ast.IfStmt:
				if s.Init == nil && s.Else == nil {
					continue // a condition that is false
				}
			}
			node("drop", s, "if false { "+of(s)+" }")
		}
	}
	for _, d := range parsed.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				name = strings.Trim(of(d.Recv.List[0].Type), "*") + "." + name
			}
			spans = append(spans, span{name, pos(d.Pos()), pos(d.End())})
		case *ast.GenDecl:
			if s, ok := d.Specs[0].(*ast.ValueSpec); ok {
				spans = append(spans, span{s.Names[0].Name, pos(d.Pos()), pos(d.End())})
			}
		}
	}
	for _, at := range rawSQL.FindAllStringSubmatchIndex(text, -1) {
		edits = append(edits, shifted(sqlEdits(text[at[4]:at[5]]), at[4])...)
	}
	bodies := map[*ast.BlockStmt]bool{}
	ast.Inspect(parsed, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BinaryExpr:
			for _, other := range goSwaps[n.Op] {
				put("swap", n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), other)
			}
			switch n.Op {
			case token.LAND:
				node("drop-left", n.X, "(true || "+of(n.X)+")")
				node("drop-right", n.Y, "(true || "+of(n.Y)+")")
			case token.LOR:
				node("drop-left", n.X, "false && ("+of(n.X)+")")
				node("drop-right", n.Y, "false && ("+of(n.Y)+")")
			case token.ADD, token.MUL:
				node("drop-left", n, of(n.Y))
				node("drop-right", n, of(n.X))
			case token.SUB, token.QUO, token.REM:
				node("drop-right", n, of(n.X))
			}
		case *ast.UnaryExpr:
			if n.Op == token.NOT || n.Op == token.SUB {
				node("drop-sign", n, of(n.X))
			}
		case *ast.IfStmt:
			condition(n.Cond)
		case *ast.ForStmt:
			if n.Cond != nil {
				node("false", n.Cond, "false && ("+of(n.Cond)+")")
			}
		case *ast.SwitchStmt:
			for _, s := range n.Body.List {
				for _, e := range s.(*ast.CaseClause).List {
					if n.Tag == nil {
						condition(e)
					}
				}
			}
		case *ast.FuncDecl:
			if n.Body != nil {
				bodies[n.Body] = true
			}
		case *ast.FuncLit:
			bodies[n.Body] = true
		case *ast.BlockStmt:
			drop(n.List, bodies[n])
		case *ast.CaseClause:
			drop(n.Body, true)
			if len(n.List) > 1 {
				for i, e := range n.List {
					if i > 0 {
						put("drop-item", n.List[i-1].End(), e.End(), "")
					} else {
						put("drop-item", e.Pos(), n.List[1].Pos(), "")
					}
				}
			}
		case *ast.CommClause:
			drop(n.Body, true)
		case *ast.IncDecStmt:
			put("swap", n.TokPos, n.End(), goSwaps[n.Tok][0])
		case *ast.AssignStmt:
			for _, other := range goSwaps[n.Tok] {
				put("swap", n.TokPos, n.TokPos+2, other)
			}
			for _, e := range n.Rhs {
				isTrue(e)
			}
		case *ast.ReturnStmt:
			for i, e := range n.Results {
				isTrue(e)
				if i == len(n.Results)-1 && (of(e) == "err" || strings.Contains(of(e), "rror") || strings.HasPrefix(of(e), "Err")) {
					node("nil", e, "nil")
				}
			}
		case *ast.Ident:
			if other := goNames[n.Name]; other != "" {
				node("swap", n, other)
			}
		case *ast.BasicLit:
			if n.Kind == token.INT || n.Kind == token.FLOAT {
				node("number", n, map[bool]string{true: "1", false: "0"}[n.Value == "0"])
			}
		case *ast.CallExpr:
			if goWraps.MatchString(of(n.Fun)) {
				for i, a := range n.Args {
					if i == 0 || of(n.Fun) != "append" {
						node("unwrap", n, of(a))
					}
				}
			}
			if s, ok := n.Fun.(*ast.SelectorExpr); ok && goChains.MatchString(s.Sel.Name) {
				node("unwrap", n, of(s.X))
			}
		case *ast.CompositeLit:
			for i, e := range n.Elts {
				if pair, keyed := e.(*ast.KeyValueExpr); keyed {
					isTrue(pair.Value)
					end := e.End()
					if i+1 < len(n.Elts) {
						end = n.Elts[i+1].Pos()
					}
					put("drop-item", e.Pos(), end, "")
				}
			}
		}
		return true
	})
	return spans, edits, nil
}
