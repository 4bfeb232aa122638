#!/usr/bin/env bash
# ./examples/grpo/run.sh [--use_ray true ...]: the quickstart
# CONFIG=second_try ./examples/grpo/run.sh: another file of this folder
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.grpo --config "examples/grpo/${CONFIG:-quickstart}.yaml" "$@"
