# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
# They make a virtual environment in .venv and install into it; nothing else on the machine is touched.

PYTHON ?= python3
# The build of torch to use. Another one, from 2.4 on: make test TORCH=torch==2.9.1 CONSTRAINTS= . A CPU-only wheel elsewhere:
#   make demo PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
CONSTRAINTS ?= --constraint constraints.txt
PIP_FLAGS ?=
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-signals-ignored lint proto bench fence sim chaos clean

# torch first, by its exact version: nothing must pull another one in
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) $(CONSTRAINTS) '$(TORCH)' numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) $(CONSTRAINTS) --editable '.[torch,dev]'
	touch $@

demo: $(VENV)/.installed  ## a daemon, two nodes, real training, a kill, a recovery
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed  ## everything that must hold
	$(BIN)/python -m pytest -n 3 tests/unit tests/sim tests/wire
	$(BIN)/python -m pytest -n 3 --dist loadgroup tests/e2e
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/chaos

# Some hours. Of the simulations ten times as many histories as in `make test`, and more; of failover the whole matrix.
test-all: $(VENV)/.installed test-signals-ignored  ## everything, the slow and the rare parts too; needs root for chaos
	SEEDS=20000 HUNT=5000 SCHEDULES=200000 $(BIN)/python -m pytest -n 3 --timeout=7200 tests/unit tests/sim tests/wire
	FAILOVER=all $(BIN)/python -m pytest -n 3 --dist loadgroup tests/e2e
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/chaos
	$(MAKE) chaos MINUTES=10

# What differs for the tests under nohup, in a shell's background job, and under runners that do the same.
test-signals-ignored: $(VENV)/.installed  ## a quick part of the tests, started with SIGINT, SIGQUIT and SIGHUP ignored
	trap '' INT QUIT HUP; $(BIN)/python -m pytest -n 3 --dist loadgroup tests/unit/test_signal_state.py \
	  tests/wire/test_daemon.py tests/e2e/test_signals.py \
	  tests/e2e/test_zygote_fidelity.py -k 'not test_zygote_fidelity or interrupts_itself or hangs'

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

fence: $(VENV)/.installed  ## 200,000 schedules of --on-daemon-loss=stop, in which no two workers may meet (15 minutes)
	SCHEDULES=200000 $(BIN)/python -m pytest -s --timeout=0 tests/sim/test_fence.py -k beside

# SEEDS=20000: so many new ones; SEED=7: this one, with its history; FIRST=7: where to begin
sim: $(VENV)/.installed  ## whole clusters in simulated time, as many as you like
	$(BIN)/python -m tests.sim.world $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),2000) $(if $(FIRST),--first $(FIRST)))

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis
