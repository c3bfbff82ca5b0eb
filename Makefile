# The same commands for people and for checks. `make demo` is the place to start.
# PYTHON=python3.12 make demo   chooses the interpreter; everything is installed in .venv and nowhere else.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help setup demo test check format conformance bench docs clean

help:            ## Say what can be made.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP)  ## Install everything in .venv.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hiddenscope needs Python 3.11 or newer, and $(PYTHON) is not: name another, as in PYTHON=python3.12 make setup" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Installing everything in .venv: a few minutes, once.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)   ## Load the default model, prove its anatomy, show its states.
	@$(BIN)/hiddenscope demo
	@echo 'The commands are in .venv/bin; this puts them on your path:  . .venv/bin/activate'

test: $(STAMP)   ## Run the tests, the docstrings' examples and the docs' examples.
	$(BIN)/python -m pytest

check: $(STAMP)  ## Check format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## Format, and mend what lint can mend.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

conformance: $(STAMP) ## Prove the anatomy of every text model that transformers has.
	$(BIN)/python tests/conformance/run.py

bench: $(STAMP)  ## Measure speed and memory against the bare forward pass.
	$(BIN)/python -m bench

docs: $(STAMP)   ## Write docs/cli.md anew, and run every example in the docs.
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pytest tests/test_docs.py

clean:           ## Remove .venv and what tools left behind (never the models' cache).
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
