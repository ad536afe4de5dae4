# `make demo` and `make test` do all the set-up they need, and are quick the second time.

PYTHON ?= $(firstword $(shell for p in python3.11 python3.12 python3.10 python3; do $$p -c '' 2>/dev/null && echo $$p; done))
# Another Python: make test PYTHON=python3.10 VENV=.venv-3.10 CONSTRAINTS=/dev/null
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PREPARED := $(VENV)/.prepared
EXAMPLE := examples/hello_deepspeed

.PHONY: demo test test-all lint docs setup schema clean

# On a host with a single slot the example takes that one.
demo: $(PREPARED)
	slots=$$($(BIN)/python -c 'from trial_lib.device.host.this_host import this_host; print(min(2, len(this_host().slots)))'); \
	sed "s/slots_per_trial: .*/slots_per_trial: $$slots/" $(EXAMPLE)/deepspeed.yaml > $(VENV)/demo.yaml
	$(BIN)/zerotune adaptive $(VENV)/demo.yaml $(EXAMPLE) --max-trials 10

# Unit tests side by side; the others start ranks of their own, measure, and want the machine for themselves.
test: $(PREPARED)
	$(BIN)/python -m pytest -m "not long" -n 2 tests/unit
	$(BIN)/python -m pytest -m "not long" tests/integration tests/cuda tests/chaos

test-all: $(PREPARED)
	$(BIN)/python -m pytest -n 2 tests/unit
	$(BIN)/python -m pytest tests/integration tests/cuda tests/chaos

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

# docs/ as a site, in build/site.
docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

setup: $(PREPARED)

schema: $(INSTALLED)
	$(BIN)/python -m trial_lib.experiment.schema

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first: DeepSpeed's build looks for it, and a user's own build of it stays.
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q -c $(CONSTRAINTS) torch
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

# Prefect's database and DeepSpeed's ops, which take minutes the first time: ahead of anything with a deadline.
$(PREPARED): $(INSTALLED)
	$(BIN)/python -m flows.prepare
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info zerotune-studies zerotune-experiments mlflow.db mlartifacts
