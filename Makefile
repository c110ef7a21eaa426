# make train    train a language model on the text of Python's standard library: two processes, ZeRO stage 3
# make test     the tests; PYTEST_ARGS="-k name" to choose
# make test-all the same with every pair of values of each matrix that `make test` takes a sample of, and what
#               tests/slow.txt names; MATRIX=full for all combinations
# make test-clients  scripts as people write them, on partita and without it; installs the libraries that they use
# make test-versions  the core's tests on the oldest and the newest torch and transformers that pyproject.toml admits
# make lint     style and types
# make docs     the documentation's site, into build/site
# make kernels  the C++ kernels into src/, for a checkout that is used without being installed; PYTHON for another Python
# make wheels   the source archive and the wheels of a release, into dist/; needs a container engine for the compiled ones
# make bench    every benchmark, in its quick form; BENCH=name for one
# make clean    remove what was built, .venv too
#
# Everything runs in .venv, made once, and brought up to date when pyproject.toml or the kernels' sources change, or when
# files of src/ come, go or move: an editable install knows where each module was.
# TORCH names the torch to install; another choice, once .venv exists, needs `make clean` first.

TORCH ?= torch==2.13.0
OLDEST ?= torch==2.11.0 transformers==5.23.0
NEWEST ?= torch==2.15.0 transformers<6
PYTEST_ARGS ?=
MATRIX ?=
PYTHON ?= .venv/bin/python
BENCH ?= $(filter-out _%,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py))) gpu.all

BIN := .venv/bin
INSTALLED := .venv/.installed-$(shell find src -name '*.py' | sort | cksum | cut -d ' ' -f 1)

export MATRIX

.PHONY: train test test-all test-clients test-versions lint docs wheels bench kernels clean

train: $(INSTALLED)
	$(BIN)/partita train examples/train_stdlib.yaml --processes 2 --overwrite

# On two cores: two work while ranks of the third wait for each other.
test: $(INSTALLED) .venv/triton
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal $(PYTEST_ARGS)

test-all: override PYTEST_ARGS += -m "not clients"
test-all: test

test-clients: $(INSTALLED) .venv/clients
	PYTHONPATH=.venv/clients $(BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

test-versions:
	.ci/versions build/versions/oldest "$(OLDEST)" $(PYTEST_ARGS)
	.ci/versions build/versions/newest "$(NEWEST)" $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict src

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheels: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m pip install --quiet build cibuildwheel
	$(BIN)/python -m build --sdist
	SKBUILD_WHEEL_CMAKE=0 $(BIN)/python -m build --wheel dist/*.tar.gz
	$(BIN)/python -m cibuildwheel --output-dir dist

bench: $(INSTALLED)
	@echo "benchmarks: $(or $(strip $(BENCH)),none)"
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	@set -e; for name in $(BENCH); do echo "== $$name --quick"; $(BIN)/python -m benchmarks.$$name --quick; done

kernels:
	cmake -S . -B build/kernels -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  -Dnanobind_DIR="$$($(PYTHON) -m nanobind --cmake_dir)"
	cmake --build build/kernels --parallel
	cmake --install build/kernels --prefix src

clean:
	rm -f src/partita/kernels/_native.*
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch comes first: were it drawn in by another package, it would come with gigabytes of libraries for a GPU.
.venv/.torch:
	@set -e; for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making .venv with $$($$python --version)"; $$python -m venv --clear .venv; break; \
	  fi; \
	done; test -x $(BIN)/python || { echo "partita needs Python 3.11 or newer: none was found on the path" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

# Triton's interpreter, for tests of the kernels. It is apart from the other packages: some of them behave as on a GPU
# where they find Triton.
.venv/triton: | .venv/.torch
	$(BIN)/python -m pip install --quiet --no-deps --target $@ "triton==3.6.0"

# Libraries of the client scripts. They are apart, too: tests must not depend on them.
.venv/clients: | .venv/.torch
	$(BIN)/python -m pip install --quiet --no-deps --target $@ \
	  diffusers torchdiffeq torch_geometric importlib_metadata zipp sentence-transformers scikit-learn scipy joblib \
	  threadpoolctl narwhals

$(INSTALLED): .venv/.torch pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@rm -f .venv/.installed-*
	@touch $@
