# make train and make test are all a new machine needs: Python >= 3.11 (PYTHON=python3.12 chooses one) and this folder.
PYTHON ?= python3
WORDS ?=
VENV := .venv
STAMP := $(VENV)/installed
PY := $(VENV)/bin/python

.PHONY: setup train test check bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python {sys.version.split()[0]} is too old\n$(PYTHON)\nname one that is at least 3.11: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	@touch $@

train: $(STAMP) # make train WORDS="stage=sft precision=bf16"
	$(PY) runner/train.py $(WORDS)

test: $(STAMP)
	$(PY) -m pytest -m "not slow"

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m mypy

bench: $(STAMP)
	@for file in benchmarks/*.py; do if [ -f "$$file" ]; then echo "python $$file"; $(PY) "$$file" || exit 1; fi; done

clean: # the runs in outputs/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
