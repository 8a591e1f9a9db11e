# make demo        set up the environment, then index and evaluate the shipped collections
# make test        set up the environment, then run the default tests
# make test-fast   run the tests that need neither Ray nor training, in about three minutes
# make test-all    run all tests, including the long ones
# make lint        run ruff, mypy and the check of docs/style.md
# make docs        build the documentation as build/docs/index.html
# make models      retrain the shipped small models, in two to three hours
# make audit       look up known vulnerabilities of the locked dependencies (needs PyPI)
# make clean       remove outputs and the environment

PYTHON ?= python3
VENV   ?= .venv
# Any torch from 2.11 on. Set a CUDA build if there is a GPU:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"
TORCH  ?= torch==2.13.0
# Each test process starts its own Ray cluster and needs about 4 GB; 0 runs the tests in one process.
TEST_PROCESSES ?= 2
PYTEST  = $(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder
RUN     = RAY_USAGE_STATS_ENABLED=0 $(VENV)/bin/python

.PHONY: demo test test-fast test-all models lint docs audit install clean

demo: install
	$(RUN) -m jobs.demo

test: install
	$(PYTEST) -m "not heavy and not gpu and not hub"

test-fast: install
	$(PYTEST) -m "not heavy and not gpu and not hub and not slow"

test-all: install
	$(PYTEST)

models: install
	$(RUN) -m examples.papers.data.make_models

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tests.style

docs: install
	$(RUN) -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs build/docs

audit: install
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "uv==0.13.*" "pip-audit==2.*"
	mkdir -p build
	$(VENV)/bin/uv export --frozen --all-extras --no-emit-project --quiet --output-file build/locked.txt
	$(VENV)/bin/pip-audit --strict --disable-pip --require-hashes --requirement build/locked.txt

install: $(VENV)/installed

# torch is installed first, because its dependents would install a build of their own choice.
NATIVE = $(wildcard pipeline/search/native/*.cpp pipeline/search/native/*.h)

$(VENV)/installed: pyproject.toml $(NATIVE)
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), "Python 3.11 or 3.12 is required; set it with make PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[all,dev]"
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache
