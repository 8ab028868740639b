#!/bin/sh
# Make .venv from uv.lock on a bare Linux machine: finds or fetches uv, finds or fetches Python 3.12, installs
# everything and compiles it once. Repeating it costs nothing until pyproject.toml or uv.lock change.
#
# The lock pins every file with its hash and names the public index only. --frozen takes it as it stands, so that a
# mirror in UV_DEFAULT_INDEX, UV_INDEX_URL or UV_INDEX is not mistaken for a change of the lock.
set -eu
cd "$(dirname "$0")/.."

# uv does not read pip's settings; a certificate authority that pip was given (a proxy's, say) is meant for both.
if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE="$PIP_CERT"; fi

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

# reasoning-gym (examples) needs pycosat, which exists as C source only. Everything else comes as wheels.
if command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1; then
    groups="--all-groups"
else
    groups="--group dev"
    [ -z "${CI:-}" ] || fail "no C compiler, which the group 'examples' needs (apt-get install gcc)"
fi

stamp=.venv/.installed
state="$(cat pyproject.toml uv.lock .python-version deploy/setup.sh | cksum) $groups"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && .venv/bin/python -c 'import segue' 2>/dev/null; then
    exit 0
fi

private_uv=.cache/uv/bin/uv
if uv --version >/dev/null 2>&1; then
    uv=uv
elif [ -x "$private_uv" ]; then
    uv="$private_uv"
else
    python=""
    for name in python3.12 python3 python; do
        if "$name" -m pip --version >/dev/null 2>&1; then python="$name"; break; fi
    done
    [ -n "$python" ] || fail "neither uv nor a Python with pip found; install one of them (apt-get install python3-pip," \
        "or https://docs.astral.sh/uv) and repeat"
    say "fetching uv from PyPI into .cache/uv"
    # --target works in every installation: system-managed, in a venv, or a user's own. PIP_USER contradicts it.
    PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 "$python" -m pip install --quiet --disable-pip-version-check \
        --target .cache/uv "uv>=0.9" || fail "pip could not install uv (see above); is the package index reachable?"
    uv="$private_uv"
fi

python="${UV_PYTHON:-3.12}"
"$uv" python find "$python" >/dev/null 2>&1 || "$uv" python install "$python" || fail \
    "no Python 3.12 here and none could be downloaded. Get one with your system (apt-get install python3.12" \
    "python3.12-dev), pyenv (pyenv install 3.12) or conda, or name its path in UV_PYTHON, and repeat"

say "installing into .venv (5.5 GB the first time)"
# shellcheck disable=SC2086  # $groups is one option or two words
"$uv" sync --frozen --compile-bytecode --python "$python" --extra engine --extra train $groups || fail \
    "uv could not install the locked packages (see above)"
echo "$state" > "$stamp"
[ "$groups" = "--all-groups" ] || say "without a C compiler: examples/smollm2_arithmetic is left out; install gcc" \
    "and repeat 'make setup' to have it"
