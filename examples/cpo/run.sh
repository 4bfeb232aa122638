#!/usr/bin/env bash
# ./examples/cpo/run.sh [--use_ray true ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.cpo --config examples/cpo/quickstart.yaml "$@"
