# Every target that needs Python packages creates .venv first, so a fresh clone needs only
# Python 3.10 to 3.13, make and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two workers fit the smallest machine we test on; each test process is kept single-threaded.
WORKERS ?= 2
MINUTES ?= 20
PYTEST_ARGS ?=
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo demo-dflash test test-slow test-gpu test-rocm test-aiter-source fuzz planted \
	lint types floors docs check clean

help:
	@echo "make demo         run the paged-generation example (installs into $(VENV))"
	@echo "make demo-dflash  run the speculative-decoding example, its drafter not causal"
	@echo "make test         the default test run (under 12 minutes on 2 cores)"
	@echo "make test-slow    tests that take longer (marker: slow)"
	@echo "make check        lint, types and floors"
	@echo "make docs         regenerate the generated pages under docs/"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[transformers,triton,dev]"
	touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/generate_paged.py

demo-dflash: $(STAMP)
	$(BIN)/python examples/dflash.py

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu and not rocm" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "slow and not gpu and not rocm" $(PYTEST_ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m "gpu" $(PYTEST_ARGS)

test-rocm: $(STAMP)
	$(BIN)/python -m pytest -m "rocm" $(PYTEST_ARGS)

test-aiter-source: $(STAMP)
	AITER_SRC="$(AITER_SRC)" $(BIN)/python -m pytest tests/aiter_source -rs $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

floors: $(STAMP)
	$(BIN)/lint-imports

check: lint types floors

docs: $(STAMP)
	$(BIN)/python -m fusion.tools.docs
	$(BIN)/python -m fusion.backends.aiter.doc docs/aiter.md

planted: $(STAMP)
	$(BIN)/python -m tests.planted

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --workers $(WORKERS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
