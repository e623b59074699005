# `make report` and `make test` work on a fresh clone: they make .venv on first use and skip that afterwards.
# Python 3.11 to 3.14, make and pip are enough. Another Python: make test PYTHON=python3.13

PYTHON ?= python3
PYTEST_ARGS ?=
# Processes that tests run in; a file's tests stay in one. One a core, as far as memory goes: each grows to 4 GB. Files go
# out in their order: pytest-xdist's own begins with those of many tests and ends with long files of one, for which the
# other processes wait.
PYTEST_WORKERS ?= $(shell $(PYTHON) -c "import os; \
	held = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'); print(max(1, min(os.cpu_count(), held // 5 // 10**9)))")
# Processes that mypy checks in: by two it takes 25 s where by one it takes 45 (versions before 2 know of no others).
MYPY_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# What is installed; remade when the requirements change.
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
# Bytecode is made of what is imported, when it is: of all files it takes half of the installation's time.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile -c constraints.txt
# It is kept even where the environment says otherwise: there every process that tests start would compile torch and
# transformers anew, 5 s of processor time.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help report test lint ruff types tests clean venv

help:
	@echo 'make report   measure this machine, run small Qwen3 steps, render reports/local/report.html'
	@echo 'make test     ruff, mypy and pytest (one: make test PYTEST_ARGS="-k gemm")'
	@echo 'make lint     ruff and mypy only'
	@echo 'make clean    remove .venv, build products and caches; reports/local stays'

report: $(RUN)
	$(BIN)/flopcast report --out reports/local --measure

# Types are checked while tests run, which leave a core idle now and then.
test: ruff
	@$(MAKE) --no-print-directory -j2 types tests

lint: ruff types

tests: $(DEV)
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=5 --durations-min=5 \
		$(PYTEST_ARGS)

ruff: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --output-format concise .

types: $(DEV)
	MYPY_NUM_WORKERS=$(MYPY_WORKERS) $(BIN)/mypy

$(RUN): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory venv
	$(INSTALL) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory venv
	$(INSTALL) -e '.[dev]'
	@touch $(RUN) $@

# A sound .venv is kept; one that is missing, half made or of an older Python is made anew.
SOUND := import sys, pip; sys.exit(sys.version_info < (3, 11))
venv:
	@if $(BIN)/python -c '$(SOUND)' 2>/dev/null; then exit 0; fi; \
	version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || { \
		echo "flopcast needs Python 3.11 to 3.14, and '$(PYTHON)' does not run." \
			"Name one that does: make PYTHON=python3.13 ..." >&2; exit 1; }; \
	case $$version in 3.11|3.12|3.13|3.14) ;; *) \
		echo "flopcast needs Python 3.11 to 3.14, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." \
			"Name another: make PYTHON=python3.13 ..." >&2; exit 1;; esac; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments: its venv or ensurepip module is missing." \
			"On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }; \
	echo "Making $(VENV) and installing into it, once; torch alone can be several GB."; \
	$(PYTHON) -m venv --clear $(VENV)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
