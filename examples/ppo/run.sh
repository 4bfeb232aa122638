#!/usr/bin/env bash
# ./examples/ppo/run.sh [--seed 1 ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.ppo --config examples/ppo/quickstart.yaml "$@"
