# `make check` and `make test` set everything up by themselves; the rest builds on their virtual environment.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(if $(shell python$(v) -c 'print(1)' 2>/dev/null),python$(v))) python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2

.PHONY: check test lint format types figures docs bench faults fuzz clean notebooks lab dist smoke
.DELETE_ON_ERROR:

# The main job: every claim over every noise family, as a table and a picture. Exit code 1 says that a paper's claim is
# violated: that is a result, and no failure of this command.
check: $(VENV)/.core
	$(BIN)/theory-lab check --controls-ok --plot check.png || test $$? -eq 1

# Without a network the tests that need the model are skipped, and say so. Workers share the cores: one torch thread each,
# since threads that wait for each other spin.
test: $(VENV)/.test
	$(BIN)/theory-lab models fetch smollm2-135m || echo "offline? tests of smollm2-135m will be skipped"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/mypy

# Every figure and table that can be drawn here, with its numbers beside it, and their gallery; what is known is not
# computed again. One of them: theory-lab reproduce tda.figure-survivors
figures: $(VENV)/.test
	$(BIN)/theory-lab reproduce all

# The documentation as a site in site/; a warning or a dead link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The notebooks in JupyterLab. Saving one there writes its Markdown twin too.
lab: $(VENV)/.lab
	$(BIN)/jupyter lab notebooks

# Each .ipynb anew from its Markdown, without outputs: what is committed.
notebooks: $(VENV)/.test
	$(BIN)/python tools/notebooks.py

# Rates of the samplers as ratios within one run; see benchmarks/README.md.
bench: $(VENV)/.core
	$(BIN)/python benchmarks/sampling.py

# Runs disturbed in every way that a machine or a user might, resumed, and compared with undisturbed ones: about 230 faults,
# PROCESSES at a time.
PROCESSES ?= 1
faults: $(VENV)/.test
	$(BIN)/python tools/faults.py --processes $(PROCESSES) --out figures/reliability

# Everything that reads what strangers wrote, with INPUTS inputs in PROCESSES processes; see SECURITY.md.
INPUTS ?= 20000
fuzz: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py --inputs $(INPUTS) --processes $(PROCESSES)

# Wheel and source distribution in dist/, built twice and compared; then the wheel in bare environments.
dist: $(VENV)/.core
	$(PIP) build
	$(BIN)/python tools/build.py --twice

smoke: dist
	$(BIN)/python tools/smoke.py dist/*.whl --models

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[cli,plot,models,report]'
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) --editable '.[cli,plot,triton,models,corpus,hub,report,train,cluster]' $$($(BIN)/python tools/group.py test)
	$(PIP) --no-deps entmax
	touch $@

$(VENV)/.lab: $(VENV)/.core
	$(PIP) --editable '.[notebooks,triton]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) $$($(BIN)/python tools/group.py dev)
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) $$($(BIN)/python tools/group.py docs)
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
