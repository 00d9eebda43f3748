package main

import (
	"context"
	"os/exec"
	"runtime/debug"
	"strings"

	"github.com/txlimit/txlimit/migrations"
)

// facts are read one by one: on a strange server, some fail, and their error is told. Those whose name begins with a
// question mark are left out if there is nothing to tell.
var facts = []fact{
	{"version", `SELECT version()`},
	{"settings", `SELECT string_agg(n || ' = ' || coalesce(current_setting(n, true), 'unknown'), ', ')
		FROM unnest(ARRAY['server_version', 'default_transaction_isolation', 'synchronous_commit', 'fsync', 'plan_cache_mode', 'lock_timeout', 'statement_timeout', 'TimeZone', 'citus.enable_schema_based_sharding']) AS n`},
	{"ratelimit.limits is", `SELECT CASE c.relkind WHEN 'r' THEN 'a plain table' WHEN 'p' THEN 'a partitioned table' WHEN 'f' THEN 'a foreign table' WHEN 'v' THEN 'a view' ELSE 'of kind ' || c.relkind::text END
		FROM pg_class AS c WHERE c.oid = to_regclass('ratelimit.limits')`},
	{"?partitions", `SELECT pg_get_partkeydef(to_regclass('ratelimit.limits')) || ', ' || count(*) || ' partitions' FROM pg_inherits WHERE inhparent = to_regclass('ratelimit.limits') HAVING count(*) > 0`},
	{"?Citus", `SELECT citus_version()`},
	{"?Citus' table", `SELECT 'partmethod ' || p.partmethod::text || ', colocation ' || p.colocationid || ', ' || (SELECT count(*) FROM pg_dist_shard AS s WHERE s.logicalrelid = p.logicalrelid) || ' shards' FROM pg_dist_partition AS p WHERE p.logicalrelid = to_regclass('ratelimit.limits')`},
	{"?Citus' nodes", `SELECT count(*) || ' primaries, ' || count(*) FILTER (WHERE shouldhaveshards) || ' with shards' FROM pg_dist_node WHERE noderole = 'primary'`},
	{"?Citus' functions", `SELECT string_agg(objid::regprocedure::text, ', ') FROM pg_catalog.pg_dist_object WHERE classid = 'pg_proc'::regclass AND distribution_argument_index IS NOT NULL`},
	{"extensions", `SELECT coalesce(string_agg(extname || ' ' || extversion, ', ' ORDER BY extname), 'none') FROM pg_extension`},
	{"functions", `SELECT string_agg(q.lanname || ' ' || q.n, ', ') FROM (SELECT l.lanname, count(*) AS n FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
		WHERE p.pronamespace = 'ratelimit'::regnamespace GROUP BY l.lanname ORDER BY l.lanname) AS q`},
	{"functions with forced plans", `SELECT coalesce(string_agg(DISTINCT p.proname::text, ', '), 'none') FROM pg_proc AS p
		WHERE p.pronamespace = 'ratelimit'::regnamespace AND p.proconfig::text LIKE '%plan_cache_mode%'`},
	{"?migration", `SELECT max(version_id)::text FROM ` + migrations.VersionTable + ` WHERE is_applied`},
	{"rights", `SELECT CASE WHEN rolsuper THEN 'superuser' ELSE 'no superuser' END FROM pg_roles WHERE rolname = current_user`},
}

// describe reads what the server is.
func (s *suite) describe(ctx context.Context) (described []fact) {
	for _, f := range facts {
		name, optional := strings.CutPrefix(f.Name, "?")
		var value *string
		if err := s.pool.QueryRow(ctx, f.Value).Scan(&value); err != nil {
			text := "cannot be read: " + errorText(err)
			value = &text
			if optional {
				continue
			}
		}
		if value == nil && !optional {
			none := "unknown"
			value = &none
		}
		if value != nil {
			described = append(described, fact{name, *value})
		}
	}
	return described
}

// commit is the library's commit.
func commit(ctx context.Context) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		var revision, modified string
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value
			case "vcs.modified":
				modified = s.Value
			}
		}
		if revision != "" {
			if modified == "true" {
				revision += ", changed"
			}
			return revision
		}
	}
	if text, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=40").Output(); err == nil { // go run notes no commit
		return strings.TrimSpace(string(text))
	}
	return "of an unknown commit"
}
