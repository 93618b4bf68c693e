# `make demo` and `make test` each work alone, in a fresh clone, with nothing but Python there.
# `make help` lists the rest.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
export PYTHON

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

# pytest-xdist processes: two more than a small machine has cores, because most of our tests wait.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest
# For one test: make test ARGS='-k name'
ARGS ?=
# What the model plays in a soak.
EXAMPLES ?= 20000
MODEL_SEED ?= $(shell date +%s)

# Links to the pages of the documentation, each where it stands in the repository; to files only, for
# hatchling walks through links to folders, and would take docs/ for seen.
PAGES := build/pages

SOURCES := $(wildcard celery_durable example_project benchmarks scripts tests)

# An empty HOME sends caches to the root folder; without one, programs ask the user database.
ifeq ($(strip $(HOME)),)
unexport HOME
endif

.PHONY: help
help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' Makefile | column -t -s '|'

.PHONY: demo
demo: $(RUNTIME) ## a task sleeps, everything is killed, and it goes on (needs no server)
	@$(BIN)/python -m example_project.demo

.PHONY: test
# pytest-celery parametrises its fixtures from sets: two pytest processes see one order only
# when they hash alike.
test: export PYTHONHASHSEED := 0
test: $(DEV) services ## all tests, on real servers that they start themselves
# Each process has its part, and who is done takes over from another: nobody waits at the end, and tests that
# share a worker stay together.
# A test that fails while another one runs beside it is tried once more with the machine to itself: these
# tests start, kill and freeze real servers and watch the time. What fails alone fails the run.
	$(PYTEST) -n $(WORKERS) --dist worksteal $(ARGS) || \
	  { [ $$? -eq 1 ] && echo "--- once more, alone: what has failed" && \
	    $(PYTEST) --last-failed --last-failed-no-failures none $(ARGS); }

.PHONY: test-unit
test-unit: $(DEV) ## the tests that need no server, no process and no time
	$(PYTEST) tests/unit $(ARGS)

.PHONY: check
check: $(DEV) ## lint, format, types, layers, sizes, documentation
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_size.py
	$(BIN)/python scripts/check_docs.py
	@$(MAKE) --no-print-directory docs

.PHONY: docs
# With --quiet, --strict would not see the warnings. The variable silences an advertisement of the theme's.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DEV) ## build the documentation in site/
	@rm -rf $(PAGES) && mkdir -p $(PAGES)/example_project
	@cp -rs "$(CURDIR)"/{*.md,LICENSE,docs} $(PAGES)
	@cp -rs "$(CURDIR)"/example_project/{README.md,shop.py} $(PAGES)/example_project
	$(BIN)/mkdocs build --strict 2>&1 | sed '/^INFO /d'

.PHONY: format
format: $(DEV) ## let ruff put the code in order
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.PHONY: bench
bench: $(DEV) services ## the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

.PHONY: bench-quick
bench-quick: $(DEV) services ## the benchmarks, a minute's worth
	$(BIN)/python -m benchmarks --quick $(ARGS)

.PHONY: soak
soak: $(DEV) services ## ten minutes of faults (ARGS='--seed 7'), then the model ten times as long
	$(BIN)/python -m tests.chaos $(ARGS)
	MODEL_EXAMPLES=$(EXAMPLES) MODEL_SEED=$(MODEL_SEED) $(PYTEST) -n 2 tests/model

.PHONY: services
services: ## find PostgreSQL, Redis and RabbitMQ, or install them
	@scripts/install_services.sh

.PHONY: venv
venv: $(DEV) ## the virtual environment for development, in .venv

$(RUNTIME): pyproject.toml scripts/create_venv.sh
	@scripts/create_venv.sh $(VENV)
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Adding the development tools to $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev]'
	@touch $@

.PHONY: clean
clean: ## remove what was built, installed and cached here
	rm -rf $(VENV) build dist site htmlcov .coverage .coverage.* .hypothesis .import_linter_cache \
	    .mypy_cache .pytest_cache .ruff_cache benchmarks/.environments
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
