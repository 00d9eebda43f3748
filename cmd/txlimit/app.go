package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/visible"
)

// The exit statuses.
const (
	exitOK      = 0
	exitError   = 1
	exitUsage   = 2
	exitNothing = 3
)

// app is one run of the program.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	terminal       bool // stdin is a terminal, on which a question can be asked
	getenv         func(string) string
	who            string        // the default of --who; empty: the role
	patience       time.Duration // how long to wait for a lock
	completing     time.Duration // how long a completion may take

	// Flags.
	database, schema string
	json, yes        bool
	parts            []string // of the key

	conn    *pgx.Conn
	work    string // what the command does, as ratelimit.grant calls it; empty: what only the owner of the schema may
	running bool   // the command line was understood
}

// usageError is a mistake in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errNothing says that there was nothing to show or to do. What there was to say about it is said already.
var errNothing = errors.New("nothing found")

// output escapes what a terminal does not show, and keeps the first error of a writer, since nobody looks at what fmt.Fprintf returns. It
// has no buffer, so that lines come in the order in which they are printed, between those on stderr.
type output struct {
	to  io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	_, err := o.to.Write([]byte(visible.Escape(string(p))))
	if err != nil {
		o.err = cmp.Or(o.err, err)
		return 0, err
	}
	return len(p), nil
}

// run runs a command line and returns the exit status.
func (a *app) run(ctx context.Context, args []string) int {
	out := &output{to: a.stdout}
	a.stdout, a.stderr = out, &output{to: a.stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	command, err := attached(root, args)
	if err == nil {
		command, err = root.ExecuteContextC(ctx)
	}
	if a.conn != nil {
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = a.conn.Close(ctx) // nothing depends on it
		}()
	}
	switch {
	case out.err != nil && (err == nil || errors.Is(err, errNothing) || errors.Is(err, out.err)):
		fmt.Fprintf(a.stderr, "txlimit: the command has run, but its output could not be written: %s\n", oneLine(out.err.Error()))
		return exitError
	case err == nil:
		return exitOK
	case errors.Is(err, errNothing):
		return exitNothing
	}
	_, usage := errors.AsType[usageError](err)
	usage = usage || !a.running
	fmt.Fprintf(a.stderr, "txlimit: %s\n", a.explain(ctx, err))
	if usage {
		fmt.Fprintf(a.stderr, "Run %q for how to use it.\n", command.CommandPath()+" --help")
		return exitUsage
	}
	return exitError
}

// attached refuses a value that is attached to a flag of one letter: with one dash, -rate=5 would be the reason "ate=5".
func attached(root *cobra.Command, args []string) (*cobra.Command, error) {
	command, _, err := root.Find(args)
	if err != nil {
		command = root
	}
	flag := func(arg string) *pflag.Flag {
		if name, long := strings.CutPrefix(arg, "--"); long {
			return command.Flag(name)
		}
		return cmp.Or(command.Flags().ShorthandLookup(arg[1:]), command.InheritedFlags().ShorthandLookup(arg[1:]))
	}
	for i := 0; i < len(args) && args[i] != "--"; i++ {
		arg := args[i]
		switch {
		case len(arg) < 2 || arg[0] != '-':
		case arg[1] == '-' || len(arg) == 2:
			if f := flag(arg); f != nil && f.NoOptDefVal == "" {
				i++ // the next one is its value
			}
		case arg[2] != '=':
			name, _, _ := strings.Cut(arg[1:], "=")
			if command.Flag(name) != nil {
				return command, fmt.Errorf("there is no flag -%s. Did you mean --%s?", name, name)
			}
			if flag(arg[:2]) != nil {
				return command, fmt.Errorf("a value is attached to %s. A flag of one letter stands apart: %s VALUE", arg[:2], arg[:2])
			}
		}
	}
	return command, nil
}

const rootLong = `txlimit looks after the rate limits that an application keeps in its own Postgres.

Where the database is: --database, or else the environment variable DATABASE_URL. Both take a URL, postgres://user@host/db,
or words as in "host=db user=app". What they leave out comes from the environment as with psql: PGHOST, PGPORT, PGUSER,
PGDATABASE, PGPASSWORD, PGSERVICE, PGPASSFILE, PGSSLMODE and so on. Through a pooler, all works but migrate.

The tables and functions are in the schema ratelimit, or in that of --schema.

LIMIT is the name of a limit. KEY is the key as the program has it, or as it is listed. A key of several parts is given by --part
eu --part user-17, or as it is stored: 'eu|user-17'. For a limit without keys, leave it out.

Times are in UTC. Names and keys with characters that a terminal does not show are printed in quotes, with escapes.`

const exitStatus = `Exit status:
  0  done
  1  an error; nothing was changed, unless the message says otherwise
  2  a mistake in the command line
  3  nothing found: nothing to list, or nothing there to change`

// usageTemplate is cobra's, with the exit status.
const usageTemplate = `Usage:
  {{.UseLine}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}{{$cmds := .Commands}}{{if eq (len .Groups) 0}}

Commands:{{range $cmds}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding }} {{.Short}}{{end}}{{end}}{{else}}{{range $group := .Groups}}

{{.Title}}{{range $cmds}}{{if (and (eq .GroupID $group.ID) .IsAvailableCommand)}}
  {{rpad .Name .NamePadding }} {{.Short}}{{end}}{{end}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsagesWrapped 100 | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableInheritedFlags}}

Flags of every command:
{{.InheritedFlags.FlagUsagesWrapped 100 | trimTrailingWhitespaces}}{{end}}

` + exitStatus + `
`

// wrap breaks the lines of a text's paragraphs at 88 characters. Lines that begin with a blank stay.
func wrap(text string) string {
	var b strings.Builder
	width := 0
	for i, line := range strings.Split(text, "\n") {
		if line == "" || line[0] == ' ' {
			if width > 0 || i > 0 {
				b.WriteByte('\n')
			}
			b.WriteString(line)
			width = 0
			if line != "" {
				width = 1000 // the next line begins anew
			}
			continue
		}
		for word := range strings.FieldsSeq(line) {
			switch {
			case width == 0 && b.Len() > 0, width > 0 && width+1+len(word) > 88:
				b.WriteByte('\n')
				width = 0
			case width > 0:
				b.WriteByte(' ')
				width++
			}
			b.WriteString(word)
			width += len(word)
		}
	}
	return b.String()
}

func init() { cobra.EnableCommandSorting = false }

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "txlimit COMMAND",
		Short:         "Look after the rate limits in a Postgres",
		Long:          rootLong,
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usagef("a command is missing: %s", names(cmd))
		},
	}
	root.SetUsageTemplate(usageTemplate)
	root.SetVersionTemplate("txlimit {{.Version}}\n")
	root.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		if near := nearest(args[0], strings.Split(names(cmd), ", ")); near != "" {
			return fmt.Errorf("there is no command %q. Did you mean %s?", args[0], near)
		}
		return fmt.Errorf("there is no command %q. There are: %s", args[0], names(cmd))
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok && invalid.GetFlag().Value.Type() == "float64" {
			return fmt.Errorf("--%s %q is not a number, such as 50000 or 0.5", invalid.GetFlag().Name, invalid.GetValue())
		}
		return err
	})
	flags := root.PersistentFlags()
	flags.StringVarP(&a.database, "database", "d", "", "where the database is, a `URL` or words (default $DATABASE_URL, then PGHOST and so on)")
	flags.StringVar(&a.schema, "schema", inschema.Default, "the `schema` of the limits")
	flags.BoolVar(&a.json, "json", false, "print JSON")
	root.AddGroup(
		&cobra.Group{ID: "look", Title: "Look:"}, &cobra.Group{ID: "steer", Title: "Change:"},
		&cobra.Group{ID: "run", Title: "Run:"}, &cobra.Group{ID: "plan", Title: "Plan:"},
	)
	for _, group := range []struct {
		id       string
		commands []*cobra.Command
	}{
		{"look", []*cobra.Command{a.limitsCommand(), a.keysCommand(), a.showCommand(), a.holdsCommand(), a.overridesCommand(), a.locksCommand(), a.consoleCommand()}},
		{"steer", []*cobra.Command{
			a.resetCommand(), a.overrideCommand(), a.blockCommand(), a.unblockCommand(), a.unlimitedCommand(), a.restoreCommand(), a.releaseCommand(),
		}},
		{"run", []*cobra.Command{a.migrateCommand(), a.publishCommand(), a.withdrawCommand(), a.sweepCommand()}},
		{"plan", []*cobra.Command{a.replayCommand()}},
	} {
		for _, command := range group.commands {
			command.GroupID = group.id
			root.AddCommand(command)
		}
	}
	for _, command := range append(root.Commands(), root) {
		command.Flags().SortFlags = false
		command.Long = wrap(command.Long)
		command.DisableFlagsInUseLine = true
		for _, sub := range command.Commands() {
			if command != root {
				sub.Long = wrap(sub.Long)
			}
		}
	}
	a.completionCommand(root)
	return root
}

// names are the commands below a command.
func names(cmd *cobra.Command) string {
	var list []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			list = append(list, sub.Name())
		}
	}
	return strings.Join(list, ", ")
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

// What commands do, as ratelimit.grant calls it.
const (
	look    = "look"
	consume = "consume"
	operate = "operate"
)

// do makes run what the command does.
func (a *app) do(command *cobra.Command, work string, run func(ctx context.Context, args []string) error) *cobra.Command {
	command.DisableFlagsInUseLine = true
	command.RunE = func(cmd *cobra.Command, args []string) error {
		if err := inschema.Check(a.schema); err != nil {
			return usagef("--schema: %w", err)
		}
		a.running, a.work = true, work
		return run(cmd.Context(), a.withParts(args))
	}
	return command
}

// yesFlag adds --yes.
func (a *app) yesFlag(command *cobra.Command) {
	command.Flags().BoolVarP(&a.yes, "yes", "y", false, "do not ask")
}

// confirm asks on the terminal, unless --yes was given.
func (a *app) confirm(ctx context.Context, format string, args ...any) error {
	question := fmt.Sprintf(format, args...)
	if a.yes {
		return nil
	}
	if !a.terminal {
		return usagef("%s Nobody can be asked, since there is no terminal: pass --yes", question)
	}
	fmt.Fprintf(a.stderr, "%s [y/N] ", question)
	typed := make(chan string, 1)
	go func() {
		answer, err := bufio.NewReader(a.stdin).ReadString('\n')
		if err != nil { // without an end of the line, it is no answer
			answer = ""
		}
		typed <- answer
	}()
	select {
	case <-ctx.Done():
		fmt.Fprintln(a.stderr)
		return ctx.Err()
	case answer := <-typed:
		if answer = strings.ToLower(strings.TrimSpace(answer)); answer == "y" || answer == "yes" {
			return nil
		}
		return errors.New("nothing was changed")
	}
}
