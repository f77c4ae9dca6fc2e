# `make demo` and `make test` are all that a fresh clone needs; each installs what it lacks into .venv.
PYTHON ?= python3
BIN := .venv/bin
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test check fmt chaos soak bench bench-growth clean

demo: .venv/.demo
	$(BIN)/ithaca demo

test: .venv/.test
	$(BIN)/python -m pytest

check: .venv/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: .venv/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: .venv/.test
	$(BIN)/python -m pytest -s -m chaos

soak: .venv/.test
	$(BIN)/python -m pytest -s -m soak

bench: .venv/.demo
	$(BIN)/python benchmarks/exchange.py

bench-growth: .venv/.bench
	$(BIN)/python benchmarks/exchange.py --growth docs

clean:
	rm -rf .venv

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/.%: $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	touch $@
