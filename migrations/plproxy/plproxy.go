// Package plproxy holds the SQL that makes migrated databases a PL/Proxy cluster: a proxy and its partitions. docs/plproxy.md says how to use it.
// Run it in the schema of the migrations, as several statements (the simple query protocol).
package plproxy

import _ "embed"

// Proxy makes a migrated database the proxy. It needs a superuser. Run it again after each later migration.
//
//go:embed proxy.sql
var Proxy string

// Partition makes a migrated database a partition, which refuses keys that are not its own.
//
//go:embed partition.sql
var Partition string
