#!/usr/bin/env bash
# ./examples/sft/run.sh MODEL [--use_ray true ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m trainers.sft --config examples/sft/gsm8k.yaml --model "$@"
