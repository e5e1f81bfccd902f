# Two commands do everything on a fresh machine:  make demo   and   make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# More threads than cores make torch and numpy slower, and one test process is all that two cores serve well.
export OMP_NUM_THREADS ?= $(shell nproc)

.PHONY: demo train test test-long install lint types check clean

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

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

check: test lint types test-long

clean:
	rm -rf $(VENV) runs build *.egg-info cdmpp/program/ast/*.so
