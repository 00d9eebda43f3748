#!/bin/sh
# The entrypoint of container.sh's image. Like that of PostgreSQL's official image, it uses POSTGRES_USER, POSTGRES_PASSWORD
# and POSTGRES_DB. The cluster is new each time.
set -eu
if [ "$(id -u)" = 0 ]; then
	exec setpriv --reuid=postgres --regid=postgres --init-groups "$0" "$@"
fi
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
PGDATA=$(mktemp -d)
export PGDATA
user=${POSTGRES_USER:-postgres}
password=$(mktemp)
printf '%s' "${POSTGRES_PASSWORD:?must be set}" >"$password"
initdb -U "$user" --pwfile="$password" --auth-local=trust --auth-host=scram-sha-256 --encoding=UTF8 --locale=C.UTF-8
rm "$password"
echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
if [ "${POSTGRES_DB:-$user}" != postgres ]; then
	pg_ctl -w start -o '-c listen_addresses='
	createdb -U "$user" "${POSTGRES_DB:-$user}"
	pg_ctl -w stop
fi
exec "$@" -c 'listen_addresses=*'
