# The same commands for people and for checks. `make demo` is the place to start.
# PYTHON=python3.12 make demo   chooses the interpreter; packages go into .venv and node_modules.

PYTHON ?= python3
BIN := .venv/bin
PACKAGE := .venv/.package
STAMP := .venv/.installed
CHECKS := .venv/.checks
EVERYTHING := .venv/.everything
EXPERIMENTS := two_sentences visibility future cities hooks port corpus steering lenses neurons syntax checkpoints dictionary paths
SCRIPTS := $(wildcard src/hiddenscope/*/static/*.js docs/site/static/*.js)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
# A network that fails for a moment is asked again, twice.
AGAIN := again() { "$$@" || { sleep 10; "$$@"; } || { sleep 60; "$$@"; }; }; again

# The tests of one room: its folders, and the files that begin with its name.
OF_ROOM = $(or $(shell find $(1) -name __pycache__ -prune -o \( -type d -name '$(ROOM)' -o -name 'test_$(ROOM)*.py' \) -print),$(error There are no tests of '$(ROOM)' in $(1)))

.PHONY: help setup setup-all demo browser test test-all test-part check scripts figures format conformance bench calibrate fuzz mutants laws chaos faults truth docs site dist smoke clean

help:            ## Say what can be made.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(CHECKS) ## Install in .venv what `make test` and `make check` need.

setup-all: $(EVERYTHING) ## Install in .venv what `make test-all`, the docs and the labs need as well.

$(PACKAGE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hiddenscope needs Python 3.11 or newer, and $(PYTHON) is not: name another, as in PYTHON=python3.12 make setup" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Installing hiddenscope with its workbench in .venv (torch and transformers are most of it): a few minutes, once.'
	@$(AGAIN) $(PIP) -e '.[app]'
	@touch $@

$(STAMP): $(PACKAGE)
	@echo 'Installing what the tests need (pytest, Playwright, PEFT and others) in .venv: a minute, once.'
	@$(AGAIN) $(PIP) -e '.[test]'
	@touch $@

$(CHECKS): $(STAMP)
	@echo 'Installing ruff and mypy in .venv.'
	@$(AGAIN) $(PIP) -e '.[check]'
	@touch $@

$(EVERYTHING): $(CHECKS)
	@echo 'Installing what the slow tests, the docs and the labs need (Ray, JupyterLab, Sphinx and others) in .venv: a few minutes, once.'
	@$(AGAIN) $(PIP) -e '.[dev]'
	@touch $@

demo: $(PACKAGE) ## Load the default model, and write a page that shows its states.
	@$(BIN)/hiddenscope demo
	@echo 'The commands are in .venv/bin; this puts them on your path:  . .venv/bin/activate'

# Chromium without a window takes half of the time, and the tests need no window.
browser:         ## Install the browser that the views are tested in, where that is possible.
	@command -v chromium-headless-shell >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo 'Installing Chromium for the tests of the views.'; \
	    $(AGAIN) sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null' || true; fi; \
	  command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	    echo 'There is no Chromium, and it cannot be installed here (that takes root and apt): the views are not tested in a browser.'; }

# One process a core: these tests compute, and wait for nobody.
test: $(STAMP) browser ## Run the fast tests (minutes). ROOM=drift make test   runs those of one room.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile $(if $(ROOM),$(call OF_ROOM,tests/unit tests/laws tests/golden tests/smoke))

# Four processes on two cores: some of these wait for others' processes most of their time.
test-all: $(EVERYTHING) browser ## Run every test there is (half an hour). ROOM=drift make test-all   runs those of one room.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadfile -m '' $(if $(ROOM),$(call OF_ROOM,tests),src tests)

test-part: $(EVERYTHING) browser ## Run a part of the slow tests. PART=2/6 make test-part   runs the second of six.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadfile -m '' --part $(or $(PART),1/6) tests

check: $(CHECKS) scripts ## Check format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

scripts: node_modules/.package-lock.json ## Check the format and the types of the pages' scripts.
	@node_modules/.bin/prettier --check --log-level warn $(SCRIPTS) docs/figures.mjs
	@node docs/figures.mjs --check $(SCRIPTS)
	node_modules/.bin/tsc --project tsconfig.json

node_modules/.package-lock.json: package.json package-lock.json
	@command -v npm >/dev/null || { echo 'The scripts are checked with prettier and TypeScript: install Node.js with npm.' >&2; exit 2; }
	@echo 'Installing prettier and TypeScript in node_modules.'
	@$(AGAIN) npm ci --silent --no-audit --no-fund
	@touch $@

figures: $(PACKAGE) node_modules/.package-lock.json ## Print how heavy and how dense the package is, as docs/architecture.md explains (minutes).
	@$(BIN)/python -m docs.figures --run

format: $(CHECKS) node_modules/.package-lock.json ## Format, and mend what lint can mend.
	@node_modules/.bin/prettier --write --log-level warn $(SCRIPTS) docs/figures.mjs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

conformance: $(STAMP) ## Prove the anatomy of every text model that transformers has. ANALYSES=1 JOBS=16 OUT=came.jsonl runs every analysis on them.
	$(BIN)/python tests/conformance/run.py $(if $(ANALYSES),--analyses) $(if $(JOBS),--jobs $(JOBS)) $(if $(OUT),--out $(OUT))

bench: $(EVERYTHING)  ## Measure speed and memory beside other libraries (an hour). QUICK=1 make bench   takes minutes.
	$(BIN)/python -m labs.bench $(if $(QUICK),--quick,--write --peers)

calibrate: $(EVERYTHING) ## Measure whether intervals and tests hold at the level that they state (hours; minutes with DEVICE=cuda).
	$(BIN)/python -m labs.calibrate $(if $(DEVICE),--device $(DEVICE)) $(if $(SEED),--seed-offset $(SEED))

fuzz: $(EVERYTHING)   ## Try hostile and damaged input at length. CASES=1000 make fuzz   tries fewer.
	$(BIN)/python -m labs.fuzz --cases $(or $(CASES),10000)
	$(BIN)/python -m labs.fuzz.requests --cases $(or $(CASES),5000)
	$(BIN)/python -m labs.fuzz.load
	HIDDENSCOPE_THOROUGH=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m '' $$(grep -rlE '(tests\.slices|testing\.untouched)' tests --include='test_*.py')

mutants: $(EVERYTHING) ## Plant small faults in the package, and count those that the tests find. SEED=7 make mutants   draws others.
	$(BIN)/python -m labs.mutants.entropy
	$(BIN)/python -m labs.mutants --seed $(or $(SEED),6) --count $(or $(COUNT),60) --write

chaos: $(EVERYTHING)  ## Inject faults into stores and jobs at length: flipped bits, crashes, kills, races, losses of power.
	$(BIN)/python -m labs.chaos

faults: $(EVERYTHING) ## Plant faults in models, let drift look for them, and write the table of docs/faults.md.
	$(BIN)/python -m labs.faults --write
	$(BIN)/python -m labs.faults.systematic --write

laws: $(EVERYTHING)   ## Hold every analysis to every check on every subject (an hour or two). PART=2/6 make laws   runs a part.
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.checks.whole --slow --jobs $(shell nproc) --part $(or $(PART),1/1)

truth: $(EVERYTHING)  ## Score the analyses on models whose inner workings are known, and write docs/truth.md (half an hour, of which training is cached).
	$(BIN)/python -m labs.truth --peers --write

docs: $(EVERYTHING)   ## Write the generated pages, outputs and pictures again, run the docs' examples, build the site. FULL=1 runs the experiments too (hours).
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.outputs
	$(BIN)/python -m docs.figures --write
	$(BIN)/python -m docs.pictures
	$(BIN)/python -m docs.example
	$(BIN)/python -m pytest tests/slow/docs/test_docs.py
	$(if $(FULL),$(foreach script,$(EXPERIMENTS),$(BIN)/python examples/$(script).py &&) true)
	$(BIN)/python -m docs.site

site: $(EVERYTHING)   ## Build the site in out/site, from the pages as they are.
	$(BIN)/python -m docs.site

dist: $(EVERYTHING)   ## Build the wheel and the sdist in dist, and look into them.
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m labs.release.contents dist

smoke: dist browser ## Install the wheel in an empty environment outside the checkout, and use it there.
	$(BIN)/python -m labs.release.smoke

clean:           ## Remove .venv and what tools left behind (never the models' cache).
	rm -rf .venv .venv-peers node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
