#!/usr/bin/env bash
# ./examples/kto/run.sh [--use_ray true ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.kto --config examples/kto/quickstart.yaml "$@"
