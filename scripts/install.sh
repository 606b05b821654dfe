#!/bin/sh
# Usage: scripts/install.sh VENV [EXTRA]
# Makes the virtual environment VENV, if it is missing, and installs this package there in editable form with EXTRA,
# and with the CUDA build of JAX where there is an NVIDIA driver.
#
# May be interrupted at any point and run again. pip takes a half-copied package for an installed one, so an
# environment that this script made and did not finish is made afresh; one that somebody else made is only added to.
set -eu
venv=$1
here=$(dirname "$0")
made=$venv/.made-by-make
unfinished=$venv/.unfinished

if [ -e "$unfinished" ]; then
    echo "The last installation was interrupted; making $venv afresh"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    python=$("$here/find-python.sh")
    echo "Making $venv with $python"
    mkdir -p "$venv"
    touch "$unfinished"
    "$python" -m venv "$venv"
    touch "$made"
elif ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "$venv has no working Python 3.12 or newer; remove it (make clean) and try again" >&2
    exit 1
elif ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # uv makes environments without pip
    "$venv/bin/python" -m ensurepip --upgrade >/dev/null
fi

extras=$(printf '%s\n' ${2:-} $("$here/jax-extra.sh") | paste -sd, -)
echo "Installing jaxinfer${extras:+[$extras]} into $venv (the first time takes some minutes)"
if [ -e "$made" ]; then
    touch "$unfinished"
fi
trap 'exit 130' INT TERM
status=0
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}" || status=$?
rm -f "$unfinished" # pip has ended by itself: what failed was not begun, or was undone
exit $status
