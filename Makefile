# Two commands do everything on a fresh machine:  make demo   and   make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# More threads than cores make torch and numpy slower, and one test process is all that two cores serve well.
export OMP_NUM_THREADS ?= $(shell nproc)

.PHONY: demo train test test-long machines install lint types docs check clean

# Without a C++ compiler all but reading programs works, which then says so.
$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard cdmpp/program/ast/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/python -m cdmpp demo

# Interrupted, it goes on from the last epoch.
train: install
	$(BIN)/python -m cdmpp train --config configs/cpu.yaml --out runs/cpu --resume

test: install
	$(BIN)/python -m pytest -m 'not check'

# Notebooks, what takes minutes, and properties with many examples.
test-long: install
	$(BIN)/python -m pytest -m 'check or hypothesis' --hypothesis-profile many

# The tests that ask what this machine is, told that it is each of five; `make machines ASKING=tests` for all tests.
ASKING ?= tests/device tests/dataset/test_devices.py tests/predictor/test_default.py
machines: install
	for machine in zen3-vm zen4-vm cascadelake-vm plain-v2-vm neoverse-n1; do \
	  CDMPP_TEST_MACHINE=$$machine $(BIN)/python -m pytest -q -m 'not check' $(ASKING) || exit 1; done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Benchmarks are checked for calls that no longer fit, not for the rest.
LOOSE := unused-ignore misc arg-type var-annotated union-attr assignment func-returns-value
types: install
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy $(addprefix --disable-error-code ,$(LOOSE)) benchmarks/*.py

docs: install
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

check: test lint types docs test-long
	$(MAKE) machines ASKING=tests

clean:
	rm -rf $(VENV) runs build *.egg-info cdmpp/program/ast/*.so
