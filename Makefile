# A new machine needs Python >= 3.11 (PYTHON=python3.12 chooses one) and this folder: `make train` and `make test` do the rest.
PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMP := $(VENV)/installed
# One process more than cores: many tests wait, for a time limit or for a process that they have started.
export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PY := $(VENV)/bin/python

.PHONY: setup train test test-slow check bench docs wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python >= 3.11 is needed, got {sys.version.split()[0]}; choose another: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv $(VENV)
	@# pip 23 takes twice as long; --no-compile: Python compiles a module when it is first imported
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --no-compile --constraint requirements.lock --editable '.[dev]'
	@touch $@

train: $(STAMP) # make train ARGS="stage=sft precision=bf16"
	$(PY) runner/train.py $(ARGS)

test: $(STAMP) # the fast tests
	$(PY) -m pytest -m "not slow" -n auto --dist worksteal

test-slow: $(STAMP) # kills, two ranks, compiled layers, whole sweeps
	$(PY) -m pytest -m slow -n auto --dist worksteal

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m mypy

bench: $(STAMP)
	@for file in benchmarks/*.py; do echo "python $$file"; $(PY) "$$file" || exit 1; done

docs: $(STAMP) # write docs/reference/settings.md from the config dataclasses and conf/
	$(PY) scripts/settings_reference.py

wheel: $(STAMP)
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: # outputs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
