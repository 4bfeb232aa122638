#!/usr/bin/env bash
# ./examples/reward/run.sh [--use_ray true ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.reward --config examples/reward/quickstart.yaml "$@"
