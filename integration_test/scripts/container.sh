#!/usr/bin/env bash
# Runs the integration suite on a PostgreSQL in a container, which testcontainers-go starts. AREAS="verbs sql" are areas for
# tests.sh. Without it, all tests run.
#
# If Docker is running, the image is TXLIMIT_TEST_IMAGE, or postgres:17-alpine. Otherwise, root can run this with dockerd
# and debootstrap installed: it starts a Docker, and makes an image from Debian's packages, so nothing is pulled. It stops
# what it started.
set -euo pipefail
cd "$(dirname "$0")/../.."
tests=$(integration_test/scripts/tests.sh ${AREAS-})

if ! docker version >/dev/null 2>&1; then
	if [ "$(id -u)" != 0 ] || ! command -v dockerd >/dev/null || ! command -v docker >/dev/null; then
		echo "no Docker is running; start it, or set DOCKER_HOST, or be root with dockerd and debootstrap installed" >&2
		exit 1
	fi
	tree=$(integration_test/scripts/debian.sh)

	work=$(mktemp -d)
	bridge=$([ -e /sys/class/net/docker0 ] && echo there || true)
	# No firewall rules: docker-proxy publishes the ports.
	dockerd --host="unix://$work/docker.sock" --data-root="$work/data" --exec-root="$work/exec" --pidfile="$work/dockerd.pid" \
		--iptables=false >"$work/log" 2>&1 &
	dockerd=$!
	stop() {
		kill "$dockerd" 2>/dev/null && wait "$dockerd" || true
		rm -rf "$work"
		[ -n "$bridge" ] || ip link delete docker0 2>/dev/null || true # a bridge that it leaves behind
	}
	trap stop EXIT
	export DOCKER_HOST=unix://$work/docker.sock
	for ((i = 0; i < 60; i++)); do
		docker version >/dev/null 2>&1 && break
		kill -0 "$dockerd" 2>/dev/null || break
		sleep 1
	done
	docker version >/dev/null 2>&1 || { echo "dockerd does not serve:" >&2; tail -n 20 "$work/log" >&2; exit 1; }

	export TXLIMIT_TEST_IMAGE=txlimit-test-postgres:17
	install -m 755 integration_test/scripts/entrypoint.sh "$tree/entrypoint"
	tar -C "$tree" --exclude=./proc/* --exclude=./sys/* -c . |
		docker import -c 'ENTRYPOINT ["/entrypoint"]' -c 'CMD ["postgres"]' -c 'EXPOSE 5432' - "$TXLIMIT_TEST_IMAGE" >/dev/null
	# The reaper's image would have to be pulled. All containers end with this Docker.
	export TESTCONTAINERS_RYUK_DISABLED=true
	export TESTCONTAINERS_HOST_OVERRIDE=127.0.0.1
fi

# shellcheck disable=SC2086
TXLIMIT_TEST_LADDER=docker go test -vet=off -short -count=1 -timeout 5h -run $tests
