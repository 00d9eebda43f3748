package demo

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PrintTable prints the result of a query, as psql would.
func PrintTable(ctx context.Context, pool *pgxpool.Pool, out io.Writer, query string) error {
	rows, err := pool.Query(ctx, query, pgx.QueryExecModeSimpleProtocol) // the results are text
	if err != nil {
		return err
	}
	defer rows.Close()
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(cells []string) { fmt.Fprintln(table, "   "+strings.Join(cells, "\t")) }

	var header []string
	for _, column := range rows.FieldDescriptions() {
		header = append(header, column.Name)
	}
	line(header)
	for rows.Next() {
		var cells []string
		for _, value := range rows.RawValues() {
			cells = append(cells, string(value))
		}
		line(cells)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return table.Flush()
}
