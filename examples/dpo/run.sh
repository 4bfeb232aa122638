#!/usr/bin/env bash
# ./examples/dpo/run.sh [--use_ray true ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.dpo --config examples/dpo/quickstart.yaml "$@"
