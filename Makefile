# Eight words, the same locally and in continuous integration; each works alone on a fresh checkout.

PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.base
DEV := .venv/.dev
DOCS := .venv/.docs
PACKAGES := .venv/.packages
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
RUN := runs/demo

.DEFAULT_GOAL := help
.PHONY: help setup demo fix check test soak gpu docs

help:
	@echo 'make setup   make the virtual environment .venv with everything a developer needs'
	@echo 'make demo    train the tiny model on this machine, plot it and talk to it (minutes, no GPU)'
	@echo 'make fix     format and repair what tools can repair'
	@echo 'make check   formatting, lint, types, import rules, spelling'
	@echo 'make test    make check, then all quick tests'
	@echo 'make soak    the long runs'
	@echo 'make gpu     on a machine with a Hopper GPU: the tests that need it, then every figure beside its bar'
	@echo 'make docs    write the reference pages and build the site into site/'

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'triax needs Python 3.11 or newer; found '"`$(PYTHON) --version 2>&1`"'; name another with: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(BASE): pyproject.toml | .venv/bin/python
	@echo 'installing torch and a few packages, minutes on a slow line'
	$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml | .venv/bin/python
	$(PIP) -e '.[dev]'
	@touch $(BASE) $@

$(DOCS): pyproject.toml | $(BASE)
	$(PIP) -e '.[docs]'
	@touch $@

# the virtual machines, sandboxes and browser that tests drive; says what is missing where it may not install them
$(PACKAGES): tools/system-packages.sh | .venv/bin/python
	sh tools/system-packages.sh sandbox
	sh tools/system-packages.sh browser
	@touch $@

setup: $(DEV) $(PACKAGES)
	@echo 'ready: $(BIN)/triax --help'

demo: $(BASE)
	$(BIN)/triax train tiny train.baselines=true --run $(RUN) --resume
	@echo; echo 'it continues what you give it:'; echo
	@printf 'class Reader:\n    def __init__(self, ' | $(BIN)/triax sample $(RUN) - --max-tokens 100
	@echo; printf 'def read_lines(path):\n    """' | $(BIN)/triax sample $(RUN) - --max-tokens 100
	@if [ -t 0 ] && [ -t 1 ]; then $(BIN)/triax chat $(RUN); else echo 'talk to it: $(BIN)/triax chat $(RUN)'; fi

fix: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

check: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(BIN)/typos

test: check $(PACKAGES)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q

soak: $(DEV) $(PACKAGES)
	$(BIN)/python -m pytest -q -m "not soak and not gpu and not compiled" --hypothesis-profile=soak --timeout=7200
	$(BIN)/python -m pytest -q -o addopts="--import-mode=importlib --strict-markers" -m "soak or compiled" --timeout=7200

gpu: $(DEV)
	$(BIN)/python -m pytest -q -m gpu
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.train_step
	$(BIN)/python -m benchmarks.serve_h200

docs: $(DOCS)
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --clean --strict
