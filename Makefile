# make demo      train a block-sparse Transformer on ListOps, on whatever device there is
# make test      all checks that need no GPU: lint, types, tests, every kernel compiled ahead of time
# make mutants   single-line faults in a copy of the tree, each of which some test must see; many minutes, no GPU
# make docs      the reference of every public name, as pages in out/api
# make test-gpu  the zoo, every configuration of the launch tables and 5,000 random calls on a CUDA device, shared attention on two
#                or more, with the packages of the Python found there
#
# PYTHON is the interpreter that makes the environment, or runs test-gpu; JOBS is how many test processes run at once.

PYTHON ?= python3
JOBS ?= 2
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check
# Tritons beside the pinned one, with which kernels are compiled too, where Triton exists
TRITONS = 3.6.0 3.8.0 3.9.0
ifeq ($(shell uname -s),Linux)
OTHER_TRITONS = $(TRITONS:%=$(VENV)/triton-%)
endif

# what has public names
DOCUMENTED = blocksparse_flash $(patsubst %,blocksparse_flash.%,nn interop distributed huggingface) \
	masks masks.deepspeed '!masks\.(?!deepspeed)'

.PHONY: demo docs test test-gpu mutants lint clean

demo: $(VENV)/.demo
	$(BIN)/python -m benchmarks.lra.demo

docs: $(VENV)/.docs
	$(BIN)/python -m pdoc --template-directory docs/reference --output-directory out/api $(DOCUMENTED)

# types are checked while the other Tritons are installed
test:
	$(MAKE) --no-print-directory --jobs=$(JOBS) lint $(OTHER_TRITONS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 900

test-gpu:
	$(PYTHON) -m pytest $(wildcard tests/test_zoo*.py tests/test_gpu*.py) tests/kernels/test_launch_tables.py \
		tests/distributed/test_gpu.py

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

# a stamp a set of extras: an environment is installed again only when what it is made from has changed
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
