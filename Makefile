# Two commands: `make train` sets up and trains the quickstart; `make test` sets up and passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup train test lint
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e ".[test]"
	touch $@

train: setup
	$(BIN)/tpshard train recipes/quickstart.yaml

lint: setup
	$(BIN)/ruff check .
	MYPYPATH=types $(BIN)/mypy -p tpshard

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"
	$(BIN)/python -m pytest -m slow tests/cli/test_packaging.py
