#!/bin/sh
# Sets the project up below its own folder: .venv with the locked dependencies, toxiproxy-server in .cache/bin, and, as root
# on Debian or Ubuntu, the OS packages the lab needs. A second run finds everything done and says nothing.
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/sbin:/sbin"

say() { printf 'setup: %s\n' "$*"; }
trouble() { printf 'setup: MISSING: %s\n' "$*" >&2; }

# -- OS packages -------------------------------------------------------------------------------------------------------
packages=
need() { command -v "$1" >/dev/null 2>&1 || packages="$packages $2"; }
need sshd openssh-server
need ssh openssh-client
need ip iproute2
need nft nftables
need setpriv util-linux
[ -e /usr/share/zoneinfo/Asia/Shanghai ] || packages="$packages tzdata"
ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || packages="$packages faketime"
if [ -n "$packages" ]; then
  if [ "$(id -u)" != 0 ]; then
    trouble "OS packages for the lab; as root: apt-get install$packages"
  elif ! command -v apt-get >/dev/null 2>&1; then
    trouble "OS packages for the lab (Debian names):$packages; install them with this system's package manager"
  else
    say "installing OS packages:$packages"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages >/dev/null || trouble "apt-get could not install$packages"
  fi
fi

# -- Python ------------------------------------------------------------------------------------------------------------
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  trouble "Python 3.11 or newer (have: $("$python" --version 2>&1 || echo none)); install it, or set PYTHON=/path/to/python3.11"
  exit 1
fi
wanted=$(cat setup/requirements.lock pyproject.toml | cksum)
if [ "$(cat .venv/.pdgate-locked 2>/dev/null)" != "$wanted" ]; then
  say "making .venv with the locked dependencies"
  if [ ! -x .venv/bin/python ] && ! "$python" -m venv .venv 2>/dev/null; then
    rm -rf .venv
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
      apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    fi
    "$python" -m venv .venv || { trouble "the venv module of $python; as root: apt-get install python3-venv"; exit 1; }
  fi
  .venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r setup/requirements.lock
  .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . 2>/dev/null ||
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
  # Engines of the lab start from this tree: compile once instead of at every start.
  .venv/bin/python -m compileall -q .venv/lib lab pdgate >/dev/null 2>&1 || true
  printf '%s' "$wanted" > .venv/.pdgate-locked
fi

# -- toxiproxy-server --------------------------------------------------------------------------------------------------
sh setup/toxiproxy.sh || true
