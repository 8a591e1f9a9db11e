# make demo        set up the environment, then index and evaluate the shipped collections
# make test        set up the environment, then run the default tests
# make test-fast   run the tests that need neither Ray nor training, in about three minutes
# make test-all    run all tests, including the long ones; some need a network and are skipped
# make lint        run ruff, mypy and the check of docs/style.md
# make docs        build the documentation as build/docs/index.html
# make models      retrain the shipped small models, in two to three hours
# make notebook    execute examples/quickstart.ipynb and store its outputs (needs PyPI)
# make audit       look up known vulnerabilities of the locked dependencies (needs PyPI)
# make wheel       build the packages, check them, and use the wheel in an empty environment
# make versions    run the tests of VERSION_TESTS with the lowest and the highest versions
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

.PHONY: demo test test-fast test-all models lint docs notebook audit wheel versions install clean

demo: $(VENV)/installed-demo
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

notebook: install
	$(PIP) "nbclient==0.10.*" "ipykernel==7.*"
	TQDM_DISABLE=1 PYTHONWARNINGS=ignore $(VENV)/bin/jupyter execute --inplace examples/quickstart.ipynb

audit: install
	$(PIP) "uv==0.13.*" "pip-audit==2.*"
	mkdir -p build
	$(VENV)/bin/uv export --frozen --all-extras --no-emit-project --quiet --output-file build/locked.txt
	$(VENV)/bin/pip-audit --strict --disable-pip --require-hashes --requirement build/locked.txt

UV = build/tools/bin/uv pip install --quiet --python

build/tools/installed:
	$(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip install --quiet "uv==0.13.*" "build==1.*" "twine>=6,<8" "auditwheel==6.*"
	touch $@

# The wheel is used without extras, then with the default text encoder.
wheel: build/tools/installed
	rm -rf build/dist build/wheel
	build/tools/bin/python -m build --outdir build/dist .
	build/tools/bin/twine check --strict build/dist/*
	build/tools/bin/auditwheel show build/dist/*.whl
	build/tools/bin/uv venv --quiet --python $(PYTHON) build/wheel
	$(UV) build/wheel $(TORCH)
	for extra in "" "[minilm]"; do \
		$(UV) build/wheel "$$(echo build/dist/*.whl)$$extra" || exit 1; \
		rm -rf build/smoke && mkdir build/smoke && cd build/smoke && ../wheel/bin/maxray --help && \
		../wheel/bin/python ../../tests/wheel_smoke.py . && cd ../.. || exit 1; \
	done

VERSION_TESTS ?= tests/test_extras.py tests/encoders tests/peers tests/index tests/search

# Ray gives up its processes after 15 seconds, in which they cannot also be compiled.
versions: build/tools/installed
	for resolution in lowest-direct highest; do \
		build/tools/bin/uv venv --quiet --clear --python $(PYTHON) build/$$resolution && \
		$(UV) build/$$resolution --compile-bytecode --resolution $$resolution \
			--editable ".[all,dev]" && \
		RAY_USAGE_STATS_ENABLED=0 build/$$resolution/bin/python -m pytest \
			-m "not heavy and not gpu and not hub" $(VERSION_TESTS) || exit 1; \
	done

install: $(VENV)/installed

NATIVE = $(wildcard pipeline/search/native/*.cpp pipeline/search/native/*.h)
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# torch is installed first, because its dependents would install a build of their own choice.
$(VENV)/torch:
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), "Python 3.11 or 3.12 is required; set it with make PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/installed-demo: $(VENV)/torch pyproject.toml $(NATIVE)
	$(PIP) --editable ".[demo]"
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml $(NATIVE)
	$(PIP) --editable ".[all,dev]"
	touch $(VENV)/installed-demo $@

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache
