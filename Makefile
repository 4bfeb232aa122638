PYTHON ?= .venv/bin/python

.PHONY: setup check test format

setup: ## a virtual environment with everything pinned
	python3 -m venv .venv
	.venv/bin/pip install -q -r requirements/dev.txt
	.venv/bin/pip install -q --no-deps --no-build-isolation -e .

check: ## formatting, lint and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test: ## the whole test suite
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -n 2 --dist loadfile tests

format: ## rewrites files
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
