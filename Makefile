# make demo      train a block-sparse Transformer on ListOps, on a GPU if there is one
# make test      all checks that need no GPU: lint, types, tests, every kernel compiled ahead of time
# make lint      ruff and mypy
# make mutants   break a copy of the code, one line at a time; each time a test must fail. Many minutes, no GPU
# make docs      documentation and API reference, a site in out/site
# make test-gpu  tests that need a CUDA device (context parallelism: two or more), with the packages of $(PYTHON)
#
# PYTHON creates the environment and runs test-gpu; JOBS is the number of test processes.

PYTHON ?= python3
JOBS ?= 2
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check
# Triton versions for which kernels are compiled in addition to the pinned one; Triton exists on Linux only
TRITONS = 3.6.0 3.8.0 3.9.0
ifeq ($(shell uname -s),Linux)
OTHER_TRITONS = $(TRITONS:%=$(VENV)/triton-%)
endif

.PHONY: demo docs test test-gpu mutants lint clean

demo: $(VENV)/.demo
	$(BIN)/python -m benchmarks.lra.demo

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

# lint runs while the other Tritons are installed
test:
	$(MAKE) --no-print-directory --jobs=$(JOBS) lint $(OTHER_TRITONS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 900

test-gpu:
	$(PYTHON) -m pytest tests/test_zoo.py tests/test_zoo_masks.py tests/kernels/test_gpu.py \
		tests/kernels/test_gpu_fuzz.py tests/kernels/test_launch_tables.py tests/distributed/test_gpu.py

mutants: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.mutants --jobs $(JOBS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out dist .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# one stamp file per set of extras: the environment is reinstalled only when its requirements change
$(VENV)/.demo: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(INSTALL) --constraint .ci/constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.docs: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(INSTALL) --constraint .ci/constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/.test: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(INSTALL) --constraint .ci/constraints.txt --editable '.[lra,test]'
	touch $(VENV)/.demo $@

$(VENV)/triton-%: | $(BIN)/python
	$(INSTALL) --no-deps --upgrade --target $@.part triton==$*
	mv $@.part $@
