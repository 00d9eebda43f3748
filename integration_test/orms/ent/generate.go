// Package ent is a client that ent generated from package schema, with the methods of database/sql on its transactions.
package ent

//go:generate go run entgo.io/ent/cmd/ent@v0.14.5 generate --feature sql/execquery ./schema
