# Each target sets up what it needs in .venv (docs: in .venv-docs); a second run skips the set-up.
PYTHON ?= python3
VENV := .venv
THREADS ?= 1
BIN := $(VENV)/bin
KEY := $(shell cat pyproject.toml constraints.txt Makefile | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(KEY)
# The full set-up serves the demo, too.
DEMO_READY := $(or $(wildcard $(READY)),$(VENV)/.demo-ready-$(KEY))
DOCS_READY := .venv-docs/.ready-$(KEY)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all figures operator retrain your_data lint types format clean

help:
	@echo "make demo       train, forget, restore on built-in data; writes runs/demo/report.html"
	@echo "make test       all tests but the slow ones (real data where FEDUP_DATA has it)"
	@echo "make test-all   all tests"
	@echo "make figures    the README's figures anew, from a run of the demo"
	@echo "make operator   docs/operator.md anew, by running its commands (needs MNIST)"
	@echo "make retrain    docs/retrain.md anew, in the same way"
	@echo "make your_data  docs/your_data.md anew, by running its commands"
	@echo "make docs       the documentation as a web site in site/"
	@echo "make lint types format setup clean"

setup: $(READY)

# The wheel is not installed: a test makes Flower's quickstart from its templates, so that none of it is copied here.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all,dev]"
	$(BIN)/python -m pip download --quiet --no-deps -d $(VENV)/quickstart flwr==1.23.0
	@rm -f $(VENV)/.ready-* $(VENV)/.demo-ready-*
	@touch $@

$(VENV)/.demo-ready-$(KEY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo]"
	@rm -f $(VENV)/.demo-ready-*
	@touch $@

demo: $(DEMO_READY)
	$(BIN)/fedup demo $(ARGS)

# The site is made from the source text: neither torch nor fedup is installed for it.
$(DOCS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	@rm -f .venv-docs/.ready-*
	@touch $@

.PHONY: docs
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "Open site/index.html, or with a search: python3 -m http.server --directory site"

test: $(READY)
	OMP_NUM_THREADS=$(THREADS) OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-all: $(READY)
	OMP_NUM_THREADS=$(THREADS) OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 $(ARGS)

figures: $(READY)
	$(BIN)/fedup demo --out runs/demo
	mkdir -p docs/figures
	cp runs/demo/figures/class-accuracy.svg runs/demo/figures/class-features.svg runs/demo/figures/sample-attack.svg docs/figures/

operator: $(READY)
	$(BIN)/python docs/transcript.py docs/operator.md

retrain: $(READY)
	$(BIN)/python docs/transcript.py docs/retrain.md

your_data: $(READY)
	$(BIN)/python docs/transcript.py docs/your_data.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-docs site runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
