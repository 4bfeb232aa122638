#!/usr/bin/env bash
# ./examples/grpo/run.sh [--use_ray true ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.grpo --config examples/grpo/quickstart.yaml "$@"
