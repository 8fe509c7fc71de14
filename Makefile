# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
# They make a virtual environment in .venv and install into it; nothing else on the machine is touched.

PYTHON ?= python3
# The build of torch to use; any from 2.4 on. For a CPU-only wheel elsewhere:
#   make demo PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint proto chaos bench clean

# numpy first and torch by its exact version: scikit-learn must not pull another torch in
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) '$(TORCH)' numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --editable '.[torch,dev]'
	touch $@

demo: $(VENV)/.installed  ## a daemon, two nodes, real training, a kill, a recovery
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed  ## everything that must hold
	$(BIN)/python -m pytest -n 3 tests/unit tests/sim tests/wire
	$(BIN)/python -m pytest tests/e2e tests/chaos  # one at a time: each starts several nodes

lint: $(VENV)/.installed  ## style, types, and which room may know which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml

proto:  ## make rendezvousd/v1 and rendezvousd/etcd from proto/ again
	proto/generate.sh

MINUTES ?= 60
SEED ?=

chaos: $(VENV)/.installed  ## a real job, broken in every way there is, for MINUTES (60), at random from SEED; needs root
	$(BIN)/python -m tests.chaos soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.installed  ## how fast, against torchrun and a bare echo, in the same run (some 20 minutes)
	$(BIN)/python -m tests.bench all

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis
