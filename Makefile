# make demo: see it work. make test: prove it. Both set up their own .venv; a second run is fast.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/edgevlm demo

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.demo
	$(BIN)/edgevlm demo --json >/dev/null
	$(BIN)/edgevlm bench bundles/demo-int4 --image $(firstword $(wildcard builders/demo/pictures/*))

clean:
	rm -rf $(VENV) bundles build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(None if (3, 10) <= v <= (3, 12) else \
	  f"Python {v[0]}.{v[1]} is not supported; run make with PYTHON=python3.12 (3.10 to 3.12)")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# No torch here: building and running a bundle needs none.
$(VENV)/.demo: setup.py pyproject.toml $(VENV)/.made
	$(PIP) --editable '.[host,build]'
	@touch $@

# torch is only the oracle of the tests.
$(VENV)/.dev: setup.py pyproject.toml $(VENV)/.made
	$(PIP) --editable '.[dev]' '$(TORCH)'
	@touch $@ $(VENV)/.demo
