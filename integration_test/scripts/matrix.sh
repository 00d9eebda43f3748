#!/usr/bin/env bash
# Runs the integration suite on every supported version of PostgreSQL, or on those in MATRIX ("14 18"). AREAS="verbs sql"
# are areas for tests.sh. Without it, all tests run.
set -euo pipefail
. "$(dirname "$0")/versions.sh"
cd "$(dirname "$0")/.."
run=$(scripts/tests.sh ${AREAS-})

failed=()
for version in ${MATRIX:-14 15 16 17 18}; do
	echo "== PostgreSQL $version"
	if ! bin=$(binaries "$version") ||
		! TXLIMIT_TEST_LADDER=binaries TXLIMIT_TEST_POSTGRES_BIN=$bin go test -vet=off -short -count=1 -timeout 5h -run "$run"; then
		failed+=("$version")
	fi
done
if ((${#failed[@]})); then
	echo "the suite failed on PostgreSQL ${failed[*]}" >&2
	exit 1
fi
