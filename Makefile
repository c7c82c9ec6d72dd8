# Everything is one word: `make demo` shows it, `make check` proves it. Both make .venv when missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
JOBS   ?= 2
ARGS   ?=

# Many tests start a fresh interpreter: compiled modules are kept, or each compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo check check-all check-gpu-aot check-browser docs fmt lint test test-all test-core coverage bench \
  prove soak torture clean

help:
	@echo "make demo       train a small GPT over a mesh of 8 virtual devices (ARGS='--steps 50')"
	@echo "make check      format, lint, types, import contracts, the tests that are not long"
	@echo "make check-all  the same with the site and the long tests: what CI runs"
	@echo "make check-gpu-aot  compiles steps for 1 and 8 H100 and H200, which need not be there (480 MB)"
	@echo "make check-browser  the page of a report in headless Chromium (installs Debian's, as root)"
	@echo "make docs       site/: these pages, with search and a reference of every public name"
	@echo "make test-core  the tests that need no jax"
	@echo "make bench      measure against plain JAX (and PyTorch where installed)"
	@echo "make prove      logical programs on many placements: the same bits (ARGS=--small)"
	@echo "make soak       long runs: steps that nobody reads, many shapes (half an hour; ARGS=queued)"
	@echo "make torture    kills 500 saves of a checkpoint and reads what is left (needs strace; ARGS=elastic)"
	@echo "make fmt        format and fix what can be fixed"
	@echo "make clean      remove caches and build outputs; .venv and runs/ stay"

# One environment for all of it, brought up to date when pyproject.toml changes. The demo needs a
# third of what the checks do.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "Tessera needs Python 3.11 to 3.13; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

$(DEMO): pyproject.toml | $(BIN)/python
	$(INSTALL) '.[demo]'
	@touch $@

$(READY): pyproject.toml | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $(DEMO) $@

demo: $(DEMO)
	$(BIN)/python examples/train_gpt.py $(ARGS)

check: lint test

check-all: lint docs test-all

# Every link and anchor holds, or there is no site.
docs: $(READY)
	$(BIN)/python docs/site/build.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file= --ignore-missing-imports --follow-imports=silent --cache-dir=.mypy_cache/bench bench/*.py bench/soak/[!_]*.py
	$(BIN)/lint-imports --no-cache

# The core tier runs first and with jax hidden, so it proves that it needs none. A worker that has
# nothing left takes tests from the other: neither waits for a long one.
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
CORE   = TESSERA_TEST_HIDE_JAX=1 $(PYTEST) tests/core
REST   = $(PYTEST) tests src --ignore=tests/core --ignore=tests/gpu_aot

test: $(READY)
	$(CORE)
	$(REST)

test-all: $(READY)
	$(CORE) --long
	$(REST) --long

# The compiler for GPUs: two wheels of the version of jax, in a folder of their own. In $(VENV) jax
# would look for a GPU at each start. The extra "gpu-aot" of pyproject.toml has the same two for an
# environment where that is wanted: they need nothing of NVIDIA's unless their own extra asks for it.
GPU_AOT = .venv-gpu

$(GPU_AOT)/.ready: pyproject.toml | $(READY)
	rm -rf $(GPU_AOT)
	v=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("jax"))') && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(GPU_AOT) \
	  jax-cuda12-pjrt==$$v jax-cuda12-plugin==$$v
	@touch $@

check-gpu-aot: $(GPU_AOT)/.ready
	JAX_PLATFORMS=cpu PYTHONPATH=$(GPU_AOT):$(PYTHONPATH) $(BIN)/python -m pytest -q tests/gpu_aot

# The first browser of tests/browser/devtools.py that is there, or Debian's.
check-browser: $(READY)
	@for b in chromium-headless-shell chromium chromium-browser google-chrome; do \
	  command -v $$b >/dev/null && exit 0; done; \
	apt-get update -qq && apt-get install -y -qq chromium-headless-shell fonts-dejavu-core
	$(BIN)/python -m pytest -q tests/browser

coverage: $(READY)
	$(CORE) --long --cov --cov-report=
	$(REST) --long --cov --cov-append --cov-report=
	$(BIN)/coverage report --fail-under=95

test-core: $(READY)
	$(CORE)

bench: $(READY)
	$(BIN)/python bench/run.py $(ARGS)

prove: $(READY)
	$(BIN)/python bench/prove.py $(ARGS)

soak: $(READY)
	$(BIN)/python bench/soak $(ARGS)

torture: $(READY)
	$(BIN)/python -m tests.procs.torture $(ARGS)

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f .coverage .coverage.*
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
