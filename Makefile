# make demo   environment, install, index and evaluate the shipped collection
# make test   environment, install, the tests        make test-all   the long ones too
# make models the small models anew, in two to three hours
# make lint   ruff, mypy                             make clean      outputs and environment

PYTHON ?= python3
VENV   ?= .venv
# Any torch from 2.11 will do; name a CUDA build here if you have a GPU:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"
TORCH  ?= torch==2.13.0
# Each test process starts a Ray cluster of its own and needs about 4 GB; 0: no further processes.
TEST_PROCESSES ?= 2
PYTEST  = $(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadfile
RUN     = RAY_USAGE_STATS_ENABLED=0 $(VENV)/bin/python

.PHONY: demo test test-all models lint install clean

demo: install
	$(RUN) -m jobs.demo

test: install
	$(PYTEST) -m "not heavy and not gpu and not hub"

test-all: install
	$(PYTEST)

models: install
	$(RUN) -m jobs.data.make_models

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(VENV)/installed

# torch first: anything that depends on it would pull in a build of its own choice.
NATIVE = $(wildcard pipeline/search/native/*.cpp pipeline/search/native/*.h)

$(VENV)/installed: pyproject.toml $(NATIVE)
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), "Python 3.11 or 3.12, please: make PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[all,dev]"
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache
