#!/bin/sh
# Measures the library beside hand-written Ray actors, ms-swift's RayHelper and verl's worker groups, in an environment
# of its own (.venv-peers, made on the first run):   sh benchmarks/peers.sh [--quick] [--sizes] [--json FILE]
set -eu
cd "$(dirname "$0")/.."
venv=.venv-peers
wanted=benchmarks/peers-requirements.txt

if ! cmp -s "$wanted" "$venv/installed.txt"; then
    test -d "$venv" || "${PYTHON:-python3.11}" -m venv "$venv"
    # torch with what its build asks for; the rest as listed: the peers' own limits exclude each other
    "$venv/bin/python" -m pip install -q "$(grep '^torch==' "$wanted")"
    "$venv/bin/python" -m pip install -q --no-deps -r "$wanted"
    "$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
    cp "$wanted" "$venv/installed.txt"
fi
export OMP_NUM_THREADS=1 # workers share the cores
export PYTHONPATH=.
# as a script, not with -m: see benchmarks/peers/ms_swift.py; -P: the script's folder is no place to import from
exec "$venv/bin/python" -P -W ignore benchmarks/peers/__main__.py "$@"
