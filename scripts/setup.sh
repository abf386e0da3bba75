#!/bin/sh
# Makes .venv with pinned packages, and sees to what Debian must provide. Usage: scripts/setup.sh run|dev
set -eu
kind="${1:-run}"
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

# Installs Debian packages, as root or through sudo, or says what a person must do.
need_packages() {
    if ! command -v apt-get >/dev/null 2>&1; then
        say "Missing: $*. This is no Debian system, so please install them by hand, then run make again."
        exit 1
    fi
    if [ "$(id -u)" = 0 ]; then as_root=""
    elif command -v sudo >/dev/null 2>&1 && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then as_root="sudo"
    else
        say "Missing Debian packages: $*"
        say "There is no root here to install them. Ask somebody who has it to run:  apt-get install -y $*"
        exit 1
    fi
    say "Installing Debian packages: $*"
    if ! { $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }; then
        say "apt-get could not install: $*. Run  apt-get install -y $*  by hand to see why, then run make again."
        exit 1
    fi
}

if [ "$(uname -s)" != Linux ]; then
    say "The local sandbox needs Linux (bubblewrap). Run Caisson in a Linux machine or container."
    exit 1
fi

python=""
for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] || continue
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    need_packages python3 python3-venv
    python=python3
fi

missing=""
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
[ -e /usr/bin/python3 ] || missing="$missing python3"
[ -e /usr/lib/"$(uname -m)"-linux-gnu/libseccomp.so.2 ] || ldconfig -p 2>/dev/null | grep -q libseccomp.so.2 || missing="$missing libseccomp2"
if [ "$kind" = dev ]; then
    # What tests ask for: clients and servers for the network policy, a second host, and an image with BusyBox only.
    command -v git >/dev/null 2>&1 || missing="$missing git"
    command -v curl >/dev/null 2>&1 || missing="$missing curl"
    command -v openssl >/dev/null 2>&1 || missing="$missing openssl"
    command -v busybox >/dev/null 2>&1 || missing="$missing busybox-static"
    command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
fi
# shellcheck disable=SC2086 # a list of package names
[ -z "$missing" ] || need_packages $missing

[ -x .venv/bin/python ] || "$python" -m venv .venv
stamp=".venv/.ready-$kind"
if [ ! -e "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    extra=""
    [ "$kind" = run ] || extra="[$kind]"
    say "Installing Python packages into .venv (a minute or two the first time)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$extra"
    touch "$stamp"
fi
