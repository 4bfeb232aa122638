#!/usr/bin/env bash
# ./examples/sampling/run.sh [--use_ray true ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.sampling --config examples/sampling/quickstart.yaml "$@"
