// Package schema is what ent generates its client from.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/dialect/entsql"
	"entgo.io/ent/schema"
	"entgo.io/ent/schema/field"
)

// Message is a business row.
type Message struct{ ent.Schema }

// Annotations name the table.
func (Message) Annotations() []schema.Annotation {
	return []schema.Annotation{entsql.Annotation{Table: "messages"}}
}

// Fields are the columns besides id.
func (Message) Fields() []ent.Field { return []ent.Field{field.String("body")} }
