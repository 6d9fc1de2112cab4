# Everything a contributor runs. The first call makes .venv with the exact versions CI uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROMPTS ?=

.PHONY: help venv test test-all check clean

help:
	@echo "make test        what CI runs: lint, types, and the tests (under 12 minutes on two cores)"
	@echo "make test-all    the heavy checks as well"
	@echo "make check       lint and types only"

venv: $(STAMP)

$(STAMP): pyproject.toml ops/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint ops/constraints.txt --editable '.[broker,dev]'
	@touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -m "not heavy"

test-all: check
	FLOWSPEC_PROMPTS="$(PROMPTS)" $(BIN)/python -m pytest --timeout 3600

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
