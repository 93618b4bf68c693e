#!/usr/bin/env bash
# Makes sure that the servers which the tests start are on this machine. The tests run private
# ones, on free ports and in temporary folders: only the programs are needed, no running service.
#
# What is missing is installed where that can be done unasked (root on Debian), else named.
set -euo pipefail

PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
POLICY=/usr/sbin/policy-rc.d

# on_path PROGRAM [PATTERN…]: is it on the PATH, or where a pattern of folders leads?
on_path() {
    local program="$1" folder
    shift
    command -v "$program" >/dev/null && return 0
    for folder in "$@"; do
        [ -x "$folder/$program" ] && return 0
    done
    return 1
}

has_redis() { on_path redis-server; }

has_rabbitmq() {
    on_path rabbitmq-server /usr/lib/rabbitmq/bin && on_path epmd /usr/lib/erlang/erts-*/bin
}

# Debian keeps one folder for each major version, outside the PATH.
has_postgresql() {
    on_path initdb /usr/lib/postgresql/*/bin && on_path postgres /usr/lib/postgresql/*/bin
}

missing_packages() {
    has_redis || echo redis-server
    has_rabbitmq || echo rabbitmq-server
    has_postgresql || echo postgresql
}

# A package's own service would take the standard ports for nothing. Debian asks this file first.
keep_services_down() {
    [ -e "$POLICY" ] && return 0
    printf '#!/bin/sh\nexit 101\n' >"$POLICY"
    chmod 755 "$POLICY"
    trap 'rm -f "$POLICY"' EXIT
}

install_on_debian() {
    export DEBIAN_FRONTEND=noninteractive
    keep_services_down
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "$@" >/dev/null
}

missing="$(missing_packages)"
[ -z "$missing" ] && exit 0
read -r -d '' -a packages <<<"$missing" || true

if [ -f /etc/debian_version ] && [ "$(id -u)" = 0 ]; then
    echo "Installing for the tests: ${packages[*]} ..."
    install_on_debian "${packages[@]}"
    missing="$(missing_packages)"
    [ -z "$missing" ] && exit 0
    printf 'Installed, and still not found:\n%s\n' "$missing" >&2
    exit 1
fi

cat >&2 <<MESSAGE
The tests start servers of their own, and these programs are missing: ${packages[*]}

  Debian, Ubuntu:  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages[*]}
  elsewhere:       install Redis, RabbitMQ and PostgreSQL, and put redis-server, rabbitmq-server,
                   epmd, initdb and postgres on the PATH

The services need not run: stop and disable them if you like.
Without any of them:  make test-unit
MESSAGE
exit 1
