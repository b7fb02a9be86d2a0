# make train   make board   make test   make lint   make bench     ARGS="..." goes to the command
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_BOARD := $(VENV)/.installed-board

# a test a core, of one thread; the tests of a file stay together and share what it has built
SIDE_BY_SIDE := --numprocesses=logical --maxprocesses=4 --dist=loadfile
SHUFFLED = --random-order --random-order-seed=$(ORDER)

# another number, another order of the tests: make test ORDER=7
ORDER ?= 1

.PHONY: help train test lint bench board coverage audit docs gpu-check
.SILENT:

help:
	echo 'make train   install what is missing, train a small model that reads dates; ARGS="--train_file=my.parquet --memory_budget=6G"'
	echo 'make board   a page in the browser: plan, start, follow and compare runs, chat with the models; ARGS="--port=8300"'
	echo 'make test    run the tests; ARGS="tests/model -k loss"; ORDER=7 for another order'
	echo 'make gpu-check   does a GPU or this CPU compute what it should, as planned, how fast; ARGS="--device=mps"'
	echo 'make coverage   the tests, and the lines that none of them runs'
	echo 'make audit   known vulnerabilities in the packages used'
	echo 'make lint    ruff and mypy'
	echo 'make docs    the pages of docs/ as a site'
	echo 'make bench   speed and memory beside Hugging Face T5; ARGS="--help"'

train: $(INSTALLED)
	$(PY) train_low_mem.py $(if $(strip $(ARGS)),train $(ARGS),demo)

board: $(INSTALLED_BOARD)
	$(PY) train_low_mem.py board $(ARGS)

gpu-check: $(INSTALLED)
	$(PY) train_low_mem.py doctor --check $(ARGS)

test: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(SIDE_BY_SIDE) $(SHUFFLED) $(ARGS)

coverage: export COVERAGE_FILE = $(CURDIR)/data/cache/coverage/data
coverage: $(INSTALLED_DEV)
	mkdir -p data/cache/coverage
	$(PY) -m coverage erase
	OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest $(SIDE_BY_SIDE) $(SHUFFLED) $(ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

lint: $(INSTALLED_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet . || { echo 'run: $(PY) -m ruff format .'; exit 1; }
	$(PY) -m mypy

# known vulnerabilities in the packages of constraints.txt; asks pypi.org, and fails where that does not answer
audit: $(PY)
	test -x .audit-venv/bin/pip-audit || { $(PY) -m venv .audit-venv && .audit-venv/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1; }
	.audit-venv/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

bench: $(INSTALLED_DEV)
	$(PY) -m benchmarks.throughput $(ARGS)

# the pages of docs/ as a site, in data/cache/site
docs: $(INSTALLED_DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	echo data/cache/site/index.html

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; name one: make PYTHON=python3.11")'
	$(PYTHON) -c 'import platform, sys; sys.exit((platform.system(), platform.machine()) == ("Darwin", "x86_64") and "Intel Macs are not supported: torch wheels for them end at 2.2.2, and 2.9 is needed; a Mac with Apple silicon and an arm64 Python is")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'venv is missing; on Debian and Ubuntu: apt install python3-venv'; exit 1; }

# The stamps make pip run again only when the requirements have changed.
$(INSTALLED): requirements.txt constraints.txt | $(PY)
	echo 'installing requirements.txt into $(VENV): once, some minutes'
	$(PIP) --requirement requirements.txt
	touch $@

$(INSTALLED_BOARD): requirements-board.txt requirements.txt constraints.txt | $(PY)
	echo 'installing requirements-board.txt into $(VENV)'
	$(PIP) --requirement requirements-board.txt
	touch $(INSTALLED) $@

$(INSTALLED_DEV): requirements-dev.txt requirements-board.txt requirements.txt constraints.txt | $(PY)
	echo 'installing requirements-dev.txt into $(VENV)'
	$(PIP) --requirement requirements-dev.txt
	touch $(INSTALLED) $(INSTALLED_BOARD) $@
