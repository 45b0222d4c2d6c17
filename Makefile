# Everything happens in .venv and build/; nothing outside this folder is touched.
#
#   make demo TORCH='torch==2.12.0'    with another torch than the default
#   make demo PYTHON=/path/to/python   on the torch of that environment, which is left as it is
#   make demo PYTHON=python3.12 TORCH='torch==2.13.0'    on that Python, with a torch of its own
#
# Later calls without them keep to what .venv was made with.

PYTHON ?=
TORCH ?=

VENV := .venv
PY := $(VENV)/bin/python
HOST_PYTHON := $(or $(PYTHON),python3)
ENVIRONMENT := $(VENV)/mla_ops-environment.json
BUILT := build/.installed

# Folders too: theirs is the date that changes when a file goes away.
NOT_OF_THE_BUILD := $(addprefix build_tools/,environment.py sanitized.py summary.py hip_fat_check.py \
                      reference_pages.py drawings.py)
BUILD_INPUTS := setup.py pyproject.toml \
                $(filter-out $(NOT_OF_THE_BUILD),$(wildcard build_tools/*.py)) \
                $(shell find csrc -type d -o -name '*.cpp' -o -name '*.h' -o -name '*.hip')
CPP := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.hip')

# -P: the current folder stays off sys.path, so the installed package is what is tested.
PYTEST := $(PY) -P -m pytest
WORKERS ?= 2

RESULTS := benchmarks/results/cpu_bench.csv
BENCH := $(PY) -P -m mla_ops bench --device cpu

.DEFAULT_GOAL := help
.PHONY: help build demo test bench plots docs lint format pytest sanitize sanitize-short fuzz aiter-sweep qemu hip-check clean FORCE
.DELETE_ON_ERROR:

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@awk '/^#   make/ {sub(/^#   /, ""); print}' $(MAKEFILE_LIST)

build: $(BUILT)  ## environment and compiled module, as far as they are out of date

# Runs every time; make goes on to rebuild only where it changed the file.
$(ENVIRONMENT): FORCE
	@$(HOST_PYTHON) build_tools/environment.py $(VENV) \
	    $(if $(PYTHON),--python '$(PYTHON)') $(if $(TORCH),--torch '$(TORCH)')

# --no-deps: torch is there, and whatever it is, it stays.
$(BUILT): $(ENVIRONMENT) $(BUILD_INPUTS)
	@echo "compiling mla_ops (a few minutes the first time)"
	@mkdir -p $(@D) && touch $@.begun
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-build-isolation --no-deps \
	    --editable .
	@$(PY) -P build_tools/summary.py
	@mv $@.begun $@  # dated before the build: what is edited meanwhile is newer

demo: $(BUILT)  ## eight decode cases against the float64 oracle, and a model that writes
	$(PY) -P -m mla_ops demo

test: lint sanitize-short pytest  ## what CI runs

pytest: $(BUILT)
	$(PYTEST) -n $(WORKERS)

# The README's cases. MLA_OPS_ISA is read once a process.
bench: $(BUILT)  ## CPU decode against torch: benchmarks/results/cpu_bench.csv and tables
	$(BENCH) 4,32q1s1k,8k-bf16,fp8 4q1s8k-h128-bf16,fp8 --csv $(RESULTS)
	$(BENCH) 4,32q1s8k-bf16,fp8 --threads 1 --providers native --csv $(RESULTS) --append
	MLA_OPS_ISA=avx2 $(BENCH) 4q1s1k-bf16,fp8 --providers native --csv $(RESULTS) --append
	$(PY) -P benchmarks/extra_memory.py 32q1s8k

plots: $(BUILT)  ## the pictures of docs/gallery.md, from the CSVs
	for name in cpu_bench h200_peers; do \
	    $(PY) -P -m mla_ops bench --read benchmarks/results/$$name.csv \
	        --plots docs/pictures/$$name >/dev/null || exit 1; done

docs: $(BUILT)  ## the pages that are generated: docs/api.md, docs/backends.md; the drawings
	$(PY) -P build_tools/reference_pages.py
	$(PY) -P build_tools/drawings.py

lint: $(ENVIRONMENT)  ## ruff, clang-format, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP)
	$(PY) -m mypy

format: $(ENVIRONMENT)  ## let ruff and clang-format have it their way
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

sanitize: $(ENVIRONMENT)  ## the tests on a build with AddressSanitizer and UBSan
	$(PY) build_tools/sanitized.py -- -P -m pytest -n $(WORKERS) -m "not slow"

sanitize-short: $(ENVIRONMENT)
	$(PY) build_tools/sanitized.py -- -P tests/qemu_core.py

fuzz: $(BUILT)  ## 10,000 random calls
	$(PY) -P tests/fuzz.py --calls 10000

aiter-sweep: $(BUILT)  ## ten minutes of random decodes on aiter's code objects, in the executor
	$(PY) -P tests/aiter_backend/sweep.py

qemu: $(BUILT)  ## the core of the suite on an emulated Nehalem and Haswell
	build_tools/qemu_check.sh $(PY)

hip-check: $(ENVIRONMENT)  ## csrc/hip compiled as hipcc does, both passes, without ROCm (clang-22, triton)
	$(PY) build_tools/hip_fat_check.py --fetch

clean:  ## everything but the environment
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
	find mla_ops tests build_tools benchmarks -name __pycache__ -prune -exec rm -r {} + 2>/dev/null || true
	rm -f mla_ops/_C*.so
