#!/bin/sh
# Prints the path of a Python 3.12 or newer with the venv module. PYTHON=... overrides the search.
set -u

suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    suits "$PYTHON" || { echo "PYTHON=$PYTHON is not a Python 3.12 or newer with venv" >&2; exit 1; }
    command -v "$PYTHON"
    exit 0
fi

# Versions with wheels of every dependency come first; the plain names may be anything, so each is tried.
for candidate in python3.13 python3.12 python3.14 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 \
    "${HOME}"/.local/share/uv/python/cpython-3.1[2-9]*/bin/python3 \
    /opt/homebrew/bin/python3 /usr/local/bin/python3; do
    if command -v "$candidate" >/dev/null 2>&1 && suits "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "jaxinfer needs Python 3.12 or newer with the venv module; none was found." >&2
echo "Install one (https://www.python.org/downloads/) or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
