# make demo      train a block-sparse Transformer on ListOps, on a GPU if there is one
# make demo-lm   train language models with dense and sparse attention on the same tokens; minutes on a CPU
# make test      tests on the CPU, and tuned kernels compiled for sm90 under the installed Triton
# make test-thorough   the rest of the sweeps of which make test runs a sample, and more configurations of these kernels
# make test-compilers  kernels compiled for the other Tritons, which it installs, and the other architectures
# make test-rest  the last two in one run, which takes less time; PART=0/2 and PART=1/2 run a half each
# make lint      ruff and mypy, the style and the types
# make mutants   break a copy of the code, one line at a time; each time a test must fail. Many minutes, no GPU
# make docs      documentation and API reference, a site in out/site
# make test-gpu  tests that need a CUDA device (context parallelism: two or more), with the packages of $(PYTHON)
# make clean     removes the environment, builds and caches; what was trained and generated stays in out
#
# PYTHON creates the environment and runs test-gpu; JOBS is the number of test processes; PART is for test-rest.

PYTHON ?= python3
JOBS ?= 2
PART ?= 0/1
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check
# versions for which test-compilers compiles kernels beside the pinned one; Triton exists on Linux only
TRITONS = 3.6.0 3.8.0 3.9.0
ifeq ($(shell uname -s),Linux)
OTHER_TRITONS = $(TRITONS:%=$(VENV)/triton-%)
endif

.PHONY: demo demo-lm docs test test-thorough test-compilers test-rest test-gpu mutants lint clean

demo: $(VENV)/.demo
	$(BIN)/python -m benchmarks.lra.first_result

demo-lm: $(VENV)/.demo out/lm/demo.bin
	$(BIN)/python -m benchmarks.lm figure demo --corpus out/lm/demo.bin

# made once: with other packages the corpus would be another one, and runs could not continue
out/lm/demo.bin: | $(VENV)/.demo
	$(BIN)/python -m benchmarks.lm corpus --max-bytes 5000000 --out $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "docs: open out/site/index.html"

# the limit finds tests that hang; no test comes near it, even on a machine with other work
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --timeout 3600

test: $(VENV)/.test
	@echo "tests: about 12,800 on $(JOBS) processes, 12 to 18 minutes on two cores"
	$(PYTEST) -m "not compilers and not thorough"

test-thorough: $(VENV)/.test
	@echo "thorough: about 1,600 tests on $(JOBS) processes"
	$(PYTEST) -m "thorough and not compilers"

test-compilers: $(VENV)/.test
	@echo "compilers: installs Triton $(TRITONS), then compiles about 1,100 kernels"
	$(MAKE) --no-print-directory --jobs=$(JOBS) $(OTHER_TRITONS)
	$(PYTEST) -m compilers tests/kernels/test_compile.py tests/runtime/test_launcher.py

test-rest: $(VENV)/.test
	@echo "rest: installs Triton $(TRITONS), then runs about 1,600 tests and compiles about 1,500 kernels: one to two hours"
	@echo "rest: part $(PART)"
	$(MAKE) --no-print-directory --jobs=$(JOBS) $(OTHER_TRITONS)
	$(PYTEST) -m "thorough or compilers" --part $(PART)

test-gpu:
	$(PYTHON) -m pytest tests/test_zoo.py tests/test_zoo_masks.py tests/kernels/test_gpu_*.py \
		tests/kernels/test_launch_tables.py tests/kernels/triton/test_merge_selected.py \
		tests/plan/test_packed_builder.py tests/plan/test_selected_builder.py \
		tests/distributed/test_gpu.py tests/diffusers/test_gpu.py tests/vllm_omni/test_gpu.py \
		tests/benchmarks/lra/test_gpu.py

mutants: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.mutants --jobs $(JOBS)

lint: $(VENV)/.test
	@echo "lint: ruff and mypy, about a minute"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out/site dist .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes last, so that an interrupted environment, or one without ensurepip, is made again
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# one stamp file per set of extras: the environment is reinstalled only when its requirements change
$(VENV)/.demo: pyproject.toml .ci/constraints.txt | $(BIN)/pip
	$(INSTALL) --constraint .ci/constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.docs: pyproject.toml .ci/constraints.txt | $(BIN)/pip
	$(INSTALL) --constraint .ci/constraints.txt --editable '.[docs]'
	touch $@

# pip would compile to bytecode on one core; folders that tests hardly import are left out
$(VENV)/.test: pyproject.toml .ci/constraints.txt | $(BIN)/pip
	$(INSTALL) --no-compile --constraint .ci/constraints.txt --editable '.[lra,test]'
	$(BIN)/python -m compileall -q -j $(JOBS) -x '/(models|testing|tests)/' $(VENV)/lib
	touch $(VENV)/.demo $@

$(VENV)/triton-%: | $(BIN)/pip
	$(INSTALL) --no-deps --upgrade --target $@.part triton==$*
	mv $@.part $@
