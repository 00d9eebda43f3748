package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/ratelimit"
)

// published is what `publish` prints.
type published struct {
	Program string             `json:"program"`
	Limits  []ratelimit.Config `json:"defined"`
	Checked bool               `json:"checked"` // only: nothing was written
}

func (a *app) publishCommand() *cobra.Command {
	var program string
	var check bool
	c := &cobra.Command{
		Use:   "publish FILE --program NAME [--check]",
		Short: "Write down the limits that a program defines",
		Long: `Write down all limits that a program defines, in place of those that it published before: for those who look, sweeps and SQL without
numbers. It decides nothing for the program. A program in Go does the same at its start (ratelimit.Open).

FILE is JSON, or - for the standard input: an array of limits as ratelimit.Config has them, or an object with "program" and "limits".
Each limit has a name of its own. --check says what is wrong in the file and writes nothing; it needs no
database.`,
		Example: `  txlimit publish limits.json --program api
  echo '[{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1m", "capacity": 20}]' | txlimit publish - --program api`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("publish takes one FILE, or - for the standard input")
			}
			return nil
		},
	}
	c.Flags().StringVar(&program, "program", "", "the `name` of the program, if the file does not have it")
	c.Flags().BoolVar(&check, "check", false, "only say what is wrong in the file")
	return a.do(c, consume, func(ctx context.Context, args []string) error {
		file, limits, err := a.readLimits(args[0])
		if err != nil {
			return err
		}
		if program == "" {
			program = file
		}
		if program == "" && !check {
			return usagef("the name of the program is missing: pass --program, or have it in the file")
		}
		result := published{Program: program, Limits: []ratelimit.Config{}, Checked: check}
		for _, limit := range limits {
			result.Limits = append(result.Limits, limit.Config())
		}
		did := "published"
		if check {
			did = "checked"
		} else {
			err := a.inTx(ctx, func(tx pgx.Tx) error {
				return (&ratelimit.Limiter{Schema: a.schema}).Publish(ctx, tx, program, limits...)
			})
			if err != nil {
				return err
			}
		}
		return a.emit(result, func(w io.Writer) {
			for _, limit := range limits {
				fmt.Fprintf(w, "%s: %s\n", printable(limit.Name()), describe(limit.Config()))
			}
			of := ""
			if program != "" {
				of = " of " + printable(program)
			}
			fmt.Fprintf(w, "%s %s%s\n", did, plural(int64(len(limits)), "limit"), of)
		})
	})
}

// withdrawn is what `withdraw` prints.
type withdrawn struct {
	Program string `json:"program"`
	Limits  int64  `json:"withdrawn"`
}

func (a *app) withdrawCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "withdraw PROGRAM",
		Short: "Withdraw what a program that is gone has published",
		Long: `Withdraw all lists of limits that a program has published: those who look and SQL without numbers no longer know its limits by
it. It decides nothing for the program, and deletes no rows of its limits. Sweeps mind the lists for another 7 days. A process that still runs
publishes its list again within two minutes.`,
		Example: `  txlimit withdraw api`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("withdraw takes the name of one program")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return a.complete(cmd, begin, func(ctx context.Context, tx pgx.Tx) ([]string, error) {
				return collect(ctx, tx, pgx.RowTo[string], "SELECT DISTINCT d.program FROM ratelimit.definitions AS d WHERE d.current ORDER BY 1")
			})
		},
	}
	return a.do(c, consume, func(ctx context.Context, args []string) error {
		w := withdrawn{Program: args[0]}
		err := a.inTx(ctx, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, "SELECT ratelimit.withdraw($1)", w.Program).Scan(&w.Limits)
		})
		switch {
		case err != nil:
			return err
		case w.Limits == 0:
			return a.nothing(w, "%s has published no limits, or they were withdrawn before.", printable(w.Program))
		}
		return a.emit(w, func(out io.Writer) {
			fmt.Fprintf(out, "withdrew %s of %s\n", plural(w.Limits, "limit"), printable(w.Program))
		})
	})
}

// open opens a file, or the standard input for -.
func (a *app) open(name string) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(a.stdin), nil
	}
	return os.Open(name)
}

// readLimits reads a file of limits. All mistakes are in one error.
func (a *app) readLimits(name string) (program string, limits []ratelimit.Limit, err error) {
	file, err := a.open(name)
	if err != nil {
		return "", nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(file)
	if err != nil {
		return "", nil, err
	}
	var content struct {
		Program string            `json:"program"`
		Limits  []json.RawMessage `json:"limits"`
	}
	to := any(&content)
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte("[")) {
		to = &content.Limits
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(to); err != nil {
		return "", nil, fmt.Errorf("%s is not an array of limits, nor an object with \"program\" and \"limits\": %w", printable(name), err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return "", nil, fmt.Errorf("%s has something after the limits", printable(name))
	}
	if len(content.Limits) == 0 {
		return "", nil, fmt.Errorf("%s has no limits", printable(name))
	}
	var mistakes []error
	for i, raw := range content.Limits {
		var c ratelimit.Config
		err := json.Unmarshal(raw, &c)
		var limit ratelimit.Limit
		if err == nil {
			limit, err = c.Limit()
		}
		if err == nil && slices.ContainsFunc(limits, func(l ratelimit.Limit) bool { return l.Name() == limit.Name() }) {
			err = fmt.Errorf("limit %q is there twice", c.Name)
		}
		if err != nil {
			mistakes = append(mistakes, fmt.Errorf("limit %d of the file: %s", i+1, oneLine(err.Error())))
			continue
		}
		limits = append(limits, limit)
	}
	return content.Program, limits, joined(mistakes)
}

// joined is several errors on one line.
func joined(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	err := errs[0]
	for _, e := range errs[1:] {
		err = fmt.Errorf("%w; %w", err, e)
	}
	return err
}
