# `make demo` and `make test` do all the set-up they need, and are quick the second time.

PYTHON ?= $(firstword $(shell for p in python3.11 python3.12 python3.10 python3; do $$p -c '' 2>/dev/null && echo $$p; done))
BIN := .venv/bin
INSTALLED := .venv/.installed
PREPARED := .venv/.prepared
EXAMPLE := examples/hello_deepspeed

.PHONY: demo test test-all lint setup schema clean

demo: $(PREPARED)
	$(BIN)/zerotune asha $(EXAMPLE)/deepspeed.yaml $(EXAMPLE) --max-trials 10

test: $(PREPARED)
	$(BIN)/python -m pytest -m "not long"

test-all: $(PREPARED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(PREPARED)

schema: $(INSTALLED)
	$(BIN)/python -m trial_lib.experiment.schema

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	# torch first: DeepSpeed's build looks for it, and a user's own build of it stays.
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# Prefect's database and DeepSpeed's ops, which take minutes the first time: ahead of anything with a deadline.
$(PREPARED): $(INSTALLED)
	$(BIN)/python -m flows.prepare
	touch $@

clean:
	rm -rf .venv build *.egg-info zerotune-studies mlflow.db mlartifacts
