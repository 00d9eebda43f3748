package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/visible"
)

// complete returns those words of fn that begin so and need no quotes. It asks the database in silence, and not for long.
func (a *app) complete(cmd *cobra.Command, begin string, fn func(ctx context.Context, tx pgx.Tx) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.completing)
	defer cancel()
	var words []string
	err := a.reading(ctx, func(tx pgx.Tx) (err error) {
		words, err = fn(ctx, tx)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError | cobra.ShellCompDirectiveNoFileComp
	}
	var plain []cobra.Completion
	for _, word := range words {
		if strings.HasPrefix(word, begin) && visible.Word(word) { // a shell types it as it is, and would run what is in others
			plain = append(plain, word)
		}
	}
	return plain, cobra.ShellCompDirectiveNoFileComp
}

// completeLimits completes LIMIT.
func (a *app) completeLimits(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(cmd, begin, func(ctx context.Context, tx pgx.Tx) ([]string, error) { return knownLimits(ctx, tx) })
}

// completeLimitAndKey completes LIMIT KEY. It looks up at most 50 keys.
func (a *app) completeLimitAndKey(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return a.completeLimits(cmd, args, begin)
	case 1:
		if len(a.parts) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.complete(cmd, begin, func(ctx context.Context, tx pgx.Tx) ([]string, error) {
			return collect(ctx, tx, pgx.RowTo[string], `
				SELECT key FROM (SELECT key FROM ratelimit.limits WHERE name = $1 AND key >= $2 AND key <> '' AND shard = 0 ORDER BY key LIMIT 50) AS k
				 WHERE starts_with(key, $2)`, args[0], begin)
		})
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// completeHold completes LIMIT KEY ID, and LIMIT ID of a limit without keys. It looks up at most 50 ids.
func (a *app) completeHold(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 || len(args) > 2 || len(a.parts) > 0 {
		return a.completeLimitAndKey(cmd, args, begin)
	}
	ids, directive := a.complete(cmd, begin, func(ctx context.Context, tx pgx.Tx) ([]string, error) {
		return collect(ctx, tx, pgx.RowTo[string], `
			SELECT h.id FROM ratelimit.holds AS h WHERE h.name = $1 AND h.key = $2 AND h.state = 'held' AND NOT starts_with(h.id, '~'::text) AND starts_with(h.id, $3) ORDER BY h.id LIMIT 50`,
			args[0], strings.Join(args[1:], ""), begin)
	})
	if len(args) == 1 {
		keys, _ := a.completeLimitAndKey(cmd, args, begin)
		ids = append(keys, ids...)
	}
	return ids, directive
}

// The parts of cobra's scripts that run words of the command line, although they are quoted there: a key, say, that was copied from a list.
// fish has taken its quotes off, and zsh evaluates what looks like a flag, which need not begin the word.
var unquoted = map[string][2]string{
	"fish": {"set -l args (commandline -opc)", "set -l args (commandline -opc | string escape)"},
	"zsh":  {"=~ '-.*=' ]]", "=~ '^--?[A-Za-z-]+=' ]]"},
}

// completionCommand adds cobra's completion command, whose scripts run nothing that is quoted.
func (a *app) completionCommand(root *cobra.Command) {
	var script bytes.Buffer
	root.SetOut(&script)
	root.InitDefaultCompletionCmd() // which keeps the writer
	root.SetOut(a.stdout)
	completion, _, err := root.Find([]string{"completion"})
	if err != nil {
		panic(err) // never: it was just added
	}
	for _, shell := range completion.Commands() {
		generate := shell.RunE
		shell.RunE = func(cmd *cobra.Command, args []string) error {
			if err := generate(cmd, args); err != nil {
				return err
			}
			text := script.String()
			if mend, ok := unquoted[shell.Name()]; ok {
				if strings.Count(text, mend[0]) != 1 {
					return fmt.Errorf("the script for %s is not the one that this program knows to be safe", shell.Name())
				}
				text = strings.Replace(text, mend[0], mend[1], 1)
			}
			_, err := a.stdout.Write([]byte(text))
			return err
		}
	}
}

// choices completes the value of a flag.
func choices(command *cobra.Command, flag string, values ...string) {
	completeFlag(command, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

func completeFlag(command *cobra.Command, flag string, complete cobra.CompletionFunc) {
	if err := command.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err) // never: the command has the flag
	}
}
