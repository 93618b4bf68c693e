#!/usr/bin/env bash
# Creates a virtual environment with this project in it, anew each time.
#
#   scripts/create_venv.sh DIRECTORY [EXTRAS]
#
# PYTHON names the interpreter (default: python3, which must be 3.10 or newer).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="$1"
extras="${2:-}"
python="${PYTHON:-python3}"

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    fail "Python is missing: there is no '$python' here. Install Python 3.10 or newer," \
        "or name one: make PYTHON=/path/to/python3 ..."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$python' is $("$python" --version 2>&1), and Python 3.10 or newer is needed." \
        "Name another: make PYTHON=/path/to/python3 ..."

has_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

# Debian splits venv's other half off into a package of its own.
if ! has_venv && [ -f /etc/debian_version ] && [ "$(id -u)" = 0 ]; then
    echo "Installing python3-venv ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
fi
has_venv ||
    fail "'$python' cannot create a virtual environment: its modules venv and ensurepip are missing." \
        "On Debian and Ubuntu:  sudo apt-get install python3-venv" \
        "Elsewhere, name a complete Python:  make PYTHON=/path/to/python3 ..."

echo "Creating $venv (celery-durable${extras:+ with $extras}) ..."
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
    --editable ".${extras:+[$extras]}"
