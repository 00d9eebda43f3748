#!/usr/bin/env bash
# Runs the integration suite through PgBouncer in transaction mode, with prepared statements and without, in each of pgx's
# query modes that work there, or in those in PGBOUNCER_MODES. AREAS="tx coalescer" are areas for tests.sh. Without it, all
# tests run. Each package ends with a list of the tests that cannot work there.
#
# PgBouncer has prepared statements since 1.21, and 1.18 crashes when queries are canceled under load
# (pgbouncer/pgbouncer#822). If the installed one is older than 1.21, debian.sh's is used.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/sbin
tests=$(integration_test/scripts/tests.sh ${AREAS-})

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # as root, it runs as another user

failed=()
for mode in ${PGBOUNCER_MODES:-cache_statement exec simple_protocol}; do
	echo "== $mode"
	path=$PATH
	if pgbouncer --version | grep -Eq 'PgBouncer 1\.(1?[0-9]|20)\.'; then
		tree=$(integration_test/scripts/debian.sh)
		ln -sf "$tree/bin/pgbouncer-outside" "$work/pgbouncer"
		path=$work:$PATH
	fi
	# shellcheck disable=SC2086
	PATH=$path TXLIMIT_TEST_LADDER=binaries TXLIMIT_TEST_PGBOUNCER=$mode go test -vet=off -short -count=1 -timeout 5h -run $tests || failed+=("$mode")
done
if ((${#failed[@]})); then
	echo "the suite failed through PgBouncer in the modes ${failed[*]}" >&2
	exit 1
fi
