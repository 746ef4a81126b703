PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all lint docs coverage optimizers bench stall spike reproduce figures report clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m experiments.demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not exhaustive" -n 2

test-all: lint
	$(BIN)/python -m pytest -n 2

docs: $(READY)
	$(BIN)/python docs/build_site.py

coverage: $(READY)
	$(BIN)/python benchmarks/coverage_others.py
	$(BIN)/python benchmarks/coverage.py

optimizers: $(READY)
	$(BIN)/python benchmarks/optimizers.py

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/large.py

stall: $(READY)
	$(BIN)/python benchmarks/stall.py

DATA ?= data

spike: $(READY)
	$(BIN)/python benchmarks/spike.py --data $(DATA)

DEVICE ?= cuda

reproduce: $(READY)
	$(BIN)/python -m experiments --preset paper --device $(DEVICE) --data $(DATA) --download

figures: $(READY)
	$(BIN)/python -m experiments.figures

report: $(READY)
	$(BIN)/python -m experiments.report

clean:
	rm -rf $(VENV) build dist demo report site
