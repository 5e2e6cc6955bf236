# Everything runs from nothing but Python >= 3.11: the first target that needs .venv makes it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train test check bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[dev]'
	@touch $@

train: setup ## the default run, on the shipped sample
	$(BIN)/python runner/train.py $(WORDS)

test: setup ## all tests but those marked slow
	$(BIN)/python -m pytest -q -m "not slow"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks

clean: ## what can be made again; runs under outputs/ stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find runner models data tests -name __pycache__ -type d -exec rm -rf {} +
