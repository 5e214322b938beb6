# Two commands set everything up, each in .venv beside this file: `make demo` and `make test`.
PYTHON ?= python3
DEVICE ?= cpu
BIN := .venv/bin
BUILD := $(BIN)/mla-warmup build --model deepseek-v2-lite --layers 2 --batch-sizes 1,2,4,8 \
	--device $(DEVICE) --cache-dir demo-cache/cache --json

.PHONY: demo test test-gpu check clean

# The main job: warm a machine up twice from one cache, cold and then warm, and show both reports side by side.
demo: .venv/demo
	rm -rf demo-cache && mkdir demo-cache
	$(BUILD) > demo-cache/cold.json
	$(BUILD) > demo-cache/warm.json
	$(BIN)/mla-warmup report demo-cache/cold.json demo-cache/warm.json

test: .venv/dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu: .venv/dev
	$(BIN)/python -m pytest -m gpu

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv demo-cache .mypy_cache .pytest_cache .ruff_cache *.egg-info

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip --constraint constraints.txt

.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
