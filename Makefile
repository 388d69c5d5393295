# What is run by hand is what CI runs. Every target sets up first, on a fresh clone too.
# The Python to make the environment with can be chosen: make setup PYTHON=python3.12

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Many tests wait for processes, so three run on two cores. A failed test runs again, alone: see build/flaky.md.
PART = $(BIN)/python -m tests.part $@ --processes
# Newer than the files that it depends on: the environment is as they ask, and setup has nothing to do.
STAMP := $(VENV)/.setup-done

# Images of containers often forbid Python to store what it compiles. Each process that imports TensorFlow then compiles
# 2,300 modules again, and takes 5 s of a processor for the import instead of 2.
unexport PYTHONDONTWRITEBYTECODE

# `test` and `test-faults` leave out the groups of tests/changed.py that depend on nothing that has changed since the
# commit in tests/same_bits/base, and say so. ALL=1 leaves nothing out.
CHANGED := $(if $(ALL),,--changed)

# SCHEMAS=FOLDER compares the manifests of Kubernetes with the published definitions of JobSet and TrainJob there.
ifdef SCHEMAS
export DTRAIN_TEST_SCHEMAS := $(abspath $(SCHEMAS))
endif

.PHONY: setup demo test test-all test-contract test-faults test-engines test-soak test-stalled same-bits same-bits-record test-matrix test-upstream bench docs pictures conformance dist count check clean

setup: $(STAMP)

# Most of the 15,000 files of Python that are installed are never imported; each other one is compiled when it is.
$(STAMP): requirements-dev.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/dtrain train digits --strategy multi_worker --workers 2

test: setup
	$(PART) 3 $(CHANGED) tests -m "not long"

# All that CI may run, whatever has changed, and every training program under every strategy; a few hours.
test-all: setup
	rm -f build/flaky.md
	$(MAKE) check
	$(MAKE) test ALL=1
	$(MAKE) test-faults ALL=1
	$(MAKE) test-contract
	$(MAKE) test-matrix ESSENTIALS=1
	$(MAKE) same-bits

# Every training program under every strategy; `test-faults` runs each under one, another one in each commit.
test-contract: setup
	$(PART) 2 tests/contract --contract full

# The long tests: processes that are killed or stopped on purpose, the contract, and what else `test` leaves out.
test-faults: setup
	$(PART) 3 $(CHANGED) tests -m "long and not soak"

# All tests of Slurm, MPI, Ray, Kubernetes and SSH, the soak tests too. Most are on hosts that are network namespaces,
# which needs root; what is not installed is skipped. `test` and `test-faults` run them but for the soak tests.
test-engines: setup
	$(PART) 2 tests/multihost tests/multiprocess/test_environments.py tests/multiprocess/test_launchers.py \
		tests/multiprocess/test_mpi_launch.py tests/multiprocess/test_trials_on_ray.py tests/faults/test_mpi_faults.py \
		tests/unit/test_kubernetes_*.py tests/unit/test_mpi_environment.py tests/unit/test_ray_launch.py \
		tests/unit/test_slurm_steps.py

# `test-faults` for longer: more kills, more runs, other strategies under faults that it shows under one, all recipes.
test-soak: setup
	$(PART) 2 tests -m soak

# Tests that start processes, frozen at random (0.8 s and 1.5 s), or with 15% of a core for one process of each test; up
# to an hour a pass: make test-stalled SEEDS="6 7"
SEEDS ?= 1 2 3 4 5
test-stalled: setup
	failed=0; for seconds in 0.8 1.5; do for seed in $(SEEDS); do \
		$(BIN)/python -m tests.stalled freeze --seed $$seed --seconds $$seconds || failed=1; done; done; \
	$(BIN)/python -m tests.stalled throttle --seed $(firstword $(SEEDS)) || failed=1; exit $$failed

# This tree's numbers and those of another commit, to the last bit: make same-bits BASE=COMMIT; LONG=1 for all programs.
same-bits: setup
	$(BIN)/python -m tests.same_bits $(if $(BASE),--base $(BASE)) $(if $(LONG),--long)

# The numbers of the commit in tests/same_bits/base, for the processor and the versions here: what same-bits compares with.
same-bits-record: setup
	$(BIN)/python -m tests.same_bits --record

# What depends on the versions of TensorFlow and Keras, in each row of tests/rows: make test-matrix ROWS=tf218-k38
# Half an hour for each row; PROGRAMS=4 runs every fourth program of the contract. It writes the table of docs/installation.md.
# ESSENTIALS=1 runs what CI does of the oldest row, and writes nothing.
test-matrix: setup
	$(BIN)/python -m tests.rows $(if $(ROWS),--row $(ROWS)) $(if $(PROGRAMS),--programs $(PROGRAMS)) $(if $(ESSENTIALS),--essentials)

# Keras' own suites, as its wheel ships them, in the scope of a strategy; not in CI.
test-upstream: setup
	$(BIN)/python -m tests.upstream_suites

# dtrain beside its peers and the machine's limits, a quarter of an hour; nothing else should run.
bench: setup
	$(BIN)/python benchmarks/speed.py

# The guide as a site, in build/site. A link that leads nowhere fails; with --quiet it would not.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of README.md, in docs/images: a run through `kill -9`, and the speed plot from benchmarks/results.
pictures: setup
	$(BIN)/python benchmarks/pictures.py

# The table of docs/conformance.md: the corpus under stock and dtrain strategies; about half an hour.
conformance: setup
	$(BIN)/dtrain conformance --output docs

# A wheel and an sdist in dist/, checked, and installed in a fresh environment, where a model is trained.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	WHEEL=$$(echo dist/*.whl) $(BIN)/python -m pytest tests/multiprocess/test_wheel.py

# Lines of code and of documentation in src/dtrain, by folder.
count: setup
	$(BIN)/python -m tests.count

check: setup
	$(BIN)/ruff check src tests examples benchmarks docs setup.py
	$(BIN)/ruff format --check src tests examples benchmarks docs setup.py
	$(BIN)/mypy
	$(BIN)/python -m tests.wall_clock

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
