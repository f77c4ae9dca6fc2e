# `make demo` and `make test` are all that a fresh clone needs; each installs what it lacks into .venv.
PYTHON ?= python3
BIN := .venv/bin
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test check fmt chaos soak bench bench-growth clean

demo: .venv/.demo
	$(BIN)/ithaca demo

# Most tests wait more than they work, so several run side by side; those with a clock come first, by themselves.
JOBS ?= 3
test: .venv/.test
	$(BIN)/python -m pytest -m 'alone and not chaos and not soak'
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'not alone and not chaos and not soak'

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
