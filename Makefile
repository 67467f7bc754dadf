# `make train` and `make test` do all the set-up that they need; run again, they do not repeat it.
# `make test BACKENDS=torch` or BACKENDS=jax,paddle tests only these.
PYTHON ?= python3
NOX := .venv/nox/bin/nox
BIN := .venv/torch/bin
READY := .venv/torch/installed
PEERS := .venv/torch/peers-installed
COMMA := ,

.PHONY: train test test-long test-all bench notebook mutate docs clean

train: $(READY)  ## The text's experiment: LeNet on Fashion-MNIST, two devices.
	$(BIN)/lockstep train --devices 2 --batch-size 256 --lr 0.2 --epochs 10

test: $(NOX)  ## Format, lint, types, import directions, tests with coverage; then each framework. About twenty minutes on two cores.
	$(NOX) $(if $(BACKENDS),-s $(subst $(COMMA), ,$(BACKENDS)))

test-long: $(READY)  ## What takes long: crash loops, damaged files, compilers, two hosts, the benchmark; kernels for GPUs, interpreted.
	$(NOX) -s kernels long

test-all: test test-long  ## Everything.

bench: $(PEERS)  ## Our step against DistributedDataParallel, Fabric, Accelerate and the text's; appends to benchmarks/results/.
	$(BIN)/lockstep bench --out benchmarks/results

notebook: $(READY)  ## Executes the notebook, and writes it as a page: runs/training_on_multiple_gpus.html.
	$(BIN)/jupyter nbconvert --to html --execute --output-dir runs notebooks/training_on_multiple_gpus.ipynb

mutate: $(READY)  ## Breaks the code in each way that docs/testing.md lists, and shows the test that goes red.
	$(BIN)/python tools/mutate.py

docs: $(READY)  ## Writes docs/api.md from the docstrings.
	$(BIN)/python tools/api_reference.py

$(PEERS): $(READY)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[bench]'
	@touch $(PEERS)

$(READY): pyproject.toml constraints.txt | $(NOX)
	$(NOX) -s torch --install-only

# nox makes one environment for each framework (noxfile.py), and itself lives in one that is made without pip inside and
# filled from outside: Debian's python3 has no ensurepip.
$(NOX):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --without-pip .venv/nox
	$(PYTHON) -m pip --disable-pip-version-check --python .venv/nox/bin/python install --quiet -c constraints.txt nox
	@test -x $(NOX) && touch $(NOX)

clean:  ## Removes the environments and the caches, not the runs.
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
