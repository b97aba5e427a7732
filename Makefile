PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
DOCS := $(BIN)/properdocs --quiet build --strict -f mkdocs.yml -d out/docs
IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

# Ranks and commands are processes of their own: without cached bytecode each compiles everything.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo plan check test lint quick docs bench fuzz clean

help:
	@echo 'make setup   make the virtual environment in .venv'
	@echo 'make demo    train a tiny model on synthetic data, into runs/demo-1: about a minute'
	@echo 'make plan    plan a long-tailed sample of lengths, page in out/plan.html'
	@echo 'make check   lint, and the tests that need no ranks, without their slowest: for every save'
	@echo 'make test    make check, then the tests on ranks, of commands and of whole runs'
	@echo 'make lint    ruff, mypy, import layers, words and layout, and whether the docs can be built'
	@echo 'make docs    the pages of docs/ as a site, in out/docs/index.html'
	@echo 'make bench   planner against Megatron (downloads megatron-core), shift, loader'
	@echo 'make fuzz    long runs of the property and fault tests'
	@echo 'make clean   remove all that the other targets made, .venv included'

setup: $(VENV)/.ready

# A .venv that works is updated; one that is missing, broken or left unfinished is made anew.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) $(IS_NEW_ENOUGH) || { \
		echo 'Longshore needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@if [ -e $(VENV)/.unfinished ] || ! $(BIN)/python $(IS_NEW_ENOUGH) 2>/dev/null \
			|| ! $(PIP) --version >/dev/null 2>&1; then \
		echo 'making $(VENV)'; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.unfinished
	$(PIP) install --quiet -c constraints.txt setuptools
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@mv $(VENV)/.unfinished $@

$(VENV)/.bench: $(VENV)/.ready
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[bench]'
	@touch $@

demo: setup
	$(BIN)/longshore train

plan: setup
	@mkdir -p out
	$(BIN)/longshore plan --demo --html out/plan.html --json out/plan.json

# Side by side: mypy keeps one core busy for most of the time that the tests take.
check: setup
	@$(MAKE) --no-print-directory -j 2 lint quick

test: check
	$(PYTEST) --part rest

quick: setup
	$(PYTEST) --part quick

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.lint
	$(DOCS)

docs: setup
	$(BIN)/python docs/generate.py
	$(DOCS)
	@echo 'open out/docs/index.html in a browser'

bench: $(VENV)/.bench
	$(BIN)/python bench/planner.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/shift.py
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/checkpoint.py

fuzz: setup
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) -m 'fuzz or property or long'

clean:
	rm -rf $(VENV) build dist out src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
