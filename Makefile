# `make demo` and `make test` do all the set-up they need, and are quick the second time.

PYTHON ?= $(firstword $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do $$p -c '' 2>/dev/null && echo $$p; done))
# Another Python: make test PYTHON=python3.13 VENV=.venv-3.13 CONSTRAINTS=/dev/null
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# A test run starts hundreds of interpreters: none of them should compile again what another has compiled.
unexport PYTHONDONTWRITEBYTECODE
# In this order: each has what the one before it has, and more.
CHOSEN := $(VENV)/constraints.txt
RANKS := $(VENV)/.ranks
FETCHED := $(VENV)/.fetched-prefect $(VENV)/.fetched-others
PACKAGES := $(VENV)/.packages
INSTALLED := $(VENV)/.installed
PREPARED := $(VENV)/.prepared
DEMO_OPS := $(VENV)/.demo-ops
PIP := $(BIN)/pip -q
EXAMPLE := examples/hello_deepspeed
EXPERIMENT := $(EXAMPLE)/demo.yaml $(EXAMPLE)
# All that `python -m zerotune.flows.prepare EXPERIMENT CODE` imports.
EARLY := torch deepspeed pyyaml platformdirs nvidia-ml-py

# Slow files first, so that small ones fill the end.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder tests/integration tests/chaos tests/cuda tests/unit

# Each in an environment of its own, as the long tests of typed stages want them. A torch of processors goes with neither
# torchvision nor torchaudio, which LLaMA-Factory imports.
FRAMEWORKS := trl~=1.16 llamafactory~=0.9.5 ms-swift~=4.6 lightning[extra]~=2.6

.PHONY: demo demo-study test test-all lint docs setup schema clean frameworks

# DeepSpeed's ops are built while pip installs the rest; the study waits for them if they take longer.
demo:
	@$(MAKE) --no-print-directory -j 4 $(DEMO_OPS) demo-study

# On a host with a single slot the example takes that one.
demo-study: $(PACKAGES)
	slots=$$($(BIN)/python -c 'from zerotune.trial_lib.device.this_host import this_host; print(min(2, len(this_host().slots)))'); \
	sed "s/slots_per_trial: .*/slots_per_trial: $$slots/" $(EXAMPLE)/demo.yaml > $(VENV)/demo.yaml
	$(BIN)/zerotune adaptive $(VENV)/demo.yaml $(EXAMPLE) --max-trials 10

# Tests that no other test disturbs run side by side, a file at a time. Their trials lock the cores that they take
# (tests/beside_fixtures.py). The others measure seconds, or search for what is fastest, and want the machine for
# themselves: pytest.mark.alone.
test: $(PREPARED)
	$(BIN)/python -m pytest -m "not long and not alone" $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest -m "not long and alone" tests/integration tests/chaos tests/cuda

test-all: $(PREPARED)
	$(BIN)/python -m pytest -m "not alone" $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest -m alone tests/integration tests/chaos tests/cuda

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
	$(BIN)/python -m zerotune.trial_lib.inputs.config
	$(BIN)/python -m zerotune.api

# A torch that is in the environment already stays.
# pip takes a package for installed whose installation was killed: it has no INSTALLER yet.
$(CHOSEN): pyproject.toml constraints.txt
	@case "$$(realpath -m "$(VENV)")" in *" "*) echo "torch links no op of DeepSpeed in an environment whose path has a" \
	    "space: clone into another folder, or add VENV=FOLDER." >&2; exit 2;; esac
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	for package in $(VENV)/lib/python*/site-packages/*.dist-info; do test -e $$package/INSTALLER || rm -rf $$package; done
	{ $(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' 2>/dev/null \
	    || grep '^torch==' $(CONSTRAINTS); grep -v '^torch==' $(CONSTRAINTS); } > $@ || true

# Python compiles what the demo imports, which is a small part, when it imports it.
$(RANKS): $(CHOSEN)
	$(PIP) install -c $(CHOSEN) --no-compile $(EARLY)
	touch $@

# pip can fetch the rest meanwhile, but only one pip may install at a time. To find out the versions takes it longest: two
# do that side by side, each for about half of the packages. What is installed is not fetched again.
$(VENV)/.fetched-prefect: CHOOSE := grep '^prefect>'
$(VENV)/.fetched-others: CHOOSE := grep -v '^prefect>'
$(FETCHED): $(CHOSEN)
	sed -n '/^dependencies = /,/^]/s/^ *"\([^"]*\)".*/\1/p' pyproject.toml | $(CHOOSE) > $@.txt
	$(PIP) show mlflow >/dev/null 2>&1 || $(PIP) wheel -c $(CHOSEN) -w $(VENV)/wheels/$(@F) -r $@.txt
	touch $@

$(PACKAGES): $(RANKS) $(FETCHED)
	$(PIP) install -c $(CHOSEN) --no-compile --no-index --no-build-isolation $(FETCHED:$(VENV)/%=-f $(VENV)/wheels/%) -e . \
	    || $(PIP) install -c $(CHOSEN) --no-compile -e .
	rm -rf $(VENV)/wheels
	touch $@

$(INSTALLED): $(PACKAGES)
	$(PIP) install -c $(CHOSEN) --no-compile -e '.[dev]'
	# Some packages have files that are no Python.
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib zerotune flows tasks trial_lib >/dev/null || true
	touch $@

# What cannot be built, the study tells.
$(DEMO_OPS): $(RANKS)
	-$(BIN)/python -m zerotune.flows.prepare $(EXPERIMENT) && touch $@

# Prefect's database and DeepSpeed's ops, which take minutes the first time: ahead of anything with a deadline.
$(PREPARED): $(INSTALLED)
	$(BIN)/python -m zerotune.flows.prepare
	touch $@

frameworks:
	for package in $(FRAMEWORKS); do \
	    name=$${package%%[[~]*}; root=build/frameworks/$${name#ms-}; \
	    $(PYTHON) -m venv $$root && $$root/bin/pip -q install torch==2.13.0 deepspeed "$$package" \
	        && $$root/bin/pip -q uninstall -y torchvision torchaudio || exit 1; \
	done
	mkdir -p $$(echo build/frameworks/llamafactory/lib/python*/site-packages)/torchaudio
	touch $$(echo build/frameworks/llamafactory/lib/python*/site-packages)/torchaudio/__init__.py

clean:
	rm -rf $(VENV) build *.egg-info zerotune-studies zerotune-experiments mlflow.db mlartifacts
