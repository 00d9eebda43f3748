#!/usr/bin/env bash
# Runs the limiter through PL/Proxy: a proxy and three partitions, all real servers, which the tests start and stop. THROUGHPUT=5s
# measures what a call costs instead. It installs nothing.
set -euo pipefail
cd "$(dirname "$0")/../plproxy"

: "${TXLIMIT_TEST_POSTGRES_BIN:=$(ls -d /usr/lib/postgresql/*/lib/plproxy.so 2>/dev/null | sed 's|lib/plproxy.so$|bin|' | sort -V | tail -n 1)}"
if [[ -z $TXLIMIT_TEST_POSTGRES_BIN ]]; then
	echo "no PostgreSQL here has PL/Proxy: apt-get install postgresql-15-plproxy (or that of another version), or set TXLIMIT_TEST_POSTGRES_BIN" >&2
	exit 1
fi
export TXLIMIT_TEST_POSTGRES_BIN TXLIMIT_PLPROXY=1
[[ ${THROUGHPUT-} ]] || go test -count=1 -v -run TestPLProxy ../../examples
go test -count=1 -v -timeout 20m . ${THROUGHPUT:+-run TestThroughput -throughput "$THROUGHPUT"}
