# `make train` and `make test` do all the set-up that they need; run again, they do not repeat it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test bench clean

train: $(READY)  ## The text's experiment: LeNet on Fashion-MNIST, two devices.
	$(BIN)/lockstep train --devices 2 --batch-size 256 --lr 0.2 --epochs 10

test: $(READY)  ## Format, lint, types, import directions, all tests with coverage.
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest --cov --cov-report=term:skip-covered

bench: $(READY)  ## One device against two, interleaved; writes benchmarks/results/.
	$(BIN)/python benchmarks/devices.py

# The environment is made without pip inside and filled from outside: Debian's python3 has no ensurepip.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV) (once; about a minute, most of it PyTorch)"
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python install --quiet -c constraints.txt -e '.[torch,dev]'
	@touch $(READY)

clean:  ## Removes the environment and the caches, not the runs.
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
