# One door: `make` shows what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := tandem transfer router controller prefill_worker decode_worker tests tools bench
PROTOS := $(sort $(wildcard proto/tandem/v1/*.proto))

# Writes the generated code of all protos under the folder given as the argument.
protoc = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

.PHONY: help demo test chaos check proto clean

help:  ## show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes when packages must be downloaded)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tandem needs Python 3.11 or newer; set PYTHON=…")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## start a cluster, ask it about a long story, show where the time went, stop it
	@$(BIN)/python tools/demo.py

test: $(INSTALLED)  ## run every test, those that start a cluster too; not the minutes of chaos
	@command -v promtool >/dev/null || echo "no prometheus here (.ci/run installs it): queries of dashboards and alerts are not evaluated"
	@command -v aiperf >/dev/null || echo "no aiperf here (.ci/run installs it): no load generator but our own drives the cluster"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not chaos and not alone'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m alone

chaos: $(INSTALLED)  ## kill, freeze and leave a real cluster under load for some minutes
	@$(BIN)/python -m pytest -m chaos

check: $(INSTALLED)  ## lint, format, types, import rules, generated code is current
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/check_imports.py && echo "import rules hold"
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; $(call protoc,"$$new"); \
	for file in "$$new"/tandem/v1/*; do \
	  diff -q "$$file" "tandem/v1/$$(basename "$$file")" >/dev/null || { echo "tandem/v1/$$(basename "$$file") is not current: run make proto"; exit 1; }; \
	done; echo "generated code is current"

proto: $(INSTALLED)  ## regenerate tandem/v1 from proto/
	@$(call protoc,.)

clean:  ## remove the virtual environment and everything that tools left behind
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
