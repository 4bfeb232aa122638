#!/usr/bin/env bash
# ./examples/gkd/run.sh [--key value ...]: the quickstart
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.gkd --config examples/gkd/quickstart.yaml "$@"
