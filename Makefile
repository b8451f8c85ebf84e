# Everything is done through this file: `make help` lists what there is.
# POSIX sh, Python 3.11 and make are enough; the rest is fetched into .venv from the hashed lock files.

.POSIX:
SHELL = /bin/sh

PYTHON = $$(command -v python3.11 || command -v python3)
BIN = .venv/bin
PROTOS = $$(find protos/turnfence -name '*.proto' | sort)
# The revision `make breaking` compares the contract with.
BASE = HEAD~1
PYTEST_ARGS =
# Words from the names of the mutants to try; empty: all of them.
MUTANTS =
# Which benchmarks to run: scripts groups steps bytes turns; empty: all of them.
BENCHMARKS =

.DEFAULT_GOAL := help
.PHONY: help .venv run dev test servers bench crash soak mutants lint format proto proto-check breaking lock wheel clean

help: ## this list
	@echo 'turnfence: make <target>'
	@echo
	@sed -n 's/^\([a-z.-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "  %-14s %s\n", $$1, $$2 }'
	@echo
	@echo 'Variables: PYTHON=<interpreter >= 3.11>  PYTEST_ARGS="-k fence -x"  BASE=<git revision for breaking>'
	@echo 'TURNFENCE_REQUIRE_SERVERS=1 makes a missing redis-server, mariadbd or node a failure, not a skip.'

# --- environments: one folder, filled in two steps; a stamp is newer than what it was made from -----------------

.venv: .venv/dev.stamp ## the environment for development: locked packages, hashes checked

.venv/run.stamp: requirements.lock pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "turnfence needs Python 3.11 or newer; call: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

.venv/dev.stamp: .venv/run.stamp requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

lock: .venv/dev.stamp ## resolve pyproject.toml anew into the two lock files
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-header --extra fast --output-file requirements.lock
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-header --extra fast --extra dev --constraints requirements.lock \
	    --output-file requirements-dev.lock

# --- running ----------------------------------------------------------------------------------------------------

run: .venv/run.stamp ## one diagnosis of this host on the embedded default: both services, nothing to install
	@$(BIN)/python -m harness_service run "Diagnose this host"

dev: .venv/run.stamp ## both services on the embedded default, until Ctrl-C
	@$(BIN)/python -m harness_service dev

# --- checking ---------------------------------------------------------------------------------------------------

test: .venv/dev.stamp servers lint ## lint, then every test; says what it had to skip
	PATH="$$PWD/$(BIN):$$PATH" sh .ci/lanes $(PYTEST_ARGS)

servers: ## get redis-server, mariadbd and the Node packages for the tests, where that is possible
	@sh .ci/servers

crash: .venv/dev.stamp servers ## kill -9 of every process at every write of a turn (minutes)
	PATH="$$PWD/$(BIN):$$PATH" TURNFENCE_CRASH=all $(BIN)/python -m pytest tests/crash $(PYTEST_ARGS)

soak: .venv/dev.stamp servers ## many more schedules of the model and examples on real stores (half an hour)
	PATH="$$PWD/$(BIN):$$PATH" TURNFENCE_SCHEDULES=200000 TURNFENCE_EXAMPLES=200 TURNFENCE_STEPS=30 \
	    TURNFENCE_TURNS=1000 TURNFENCE_CANCELS=10000 $(BIN)/python -m pytest tests/model tests/conformance \
	    tests/state/test_cost.py tests/state/test_cancelled.py $(PYTEST_ARGS)

bench: .venv/dev.stamp servers ## what the state path costs, against a floor of the same run (minutes)
	PATH="$$PWD/$(BIN):$$PATH" PYTHONPATH="$$PWD" $(BIN)/python -m tests.benchmarks.run $(BENCHMARKS)

mutants: .venv/dev.stamp ## take one safety property out at a time: each must be noticed by a test (minutes)
	PATH="$$PWD/$(BIN):$$PATH" PYTHONPATH="$$PWD" $(BIN)/python -m tests.mutants.run $(MUTANTS)

lint: .venv/dev.stamp proto-check ## style, types, architecture, contract, images
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint protos
	$(BIN)/buf format protos --diff --exit-code
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/shellcheck .ci/run .ci/servers .ci/lanes

format: .venv/dev.stamp ## mend what can be mended by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format protos --write

# --- the contract -----------------------------------------------------------------------------------------------

GENERATE = PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
    --python_out="$$out" --grpc_python_out="$$out" --mypy_out="quiet:$$out" --mypy_grpc_out="quiet:$$out" $(PROTOS)

proto: .venv/dev.stamp ## generate protos/gen from the .proto files
	rm -rf protos/gen/turnfence
	mkdir -p protos/gen
	out=protos/gen; $(GENERATE)

proto-check: .venv/dev.stamp ## the committed protos/gen is what the .proto files say
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(GENERATE) \
	    && diff -rq --exclude=__pycache__ "$$out/turnfence" protos/gen/turnfence \
	    || { echo 'protos/gen is not what the .proto files say: run make proto' >&2; exit 1; }

breaking: .venv/dev.stamp ## the contract only grew since BASE
	@if ! git cat-file -e "$(BASE):protos/buf.yaml" 2>/dev/null; then \
	    echo 'breaking: no revision $(BASE) with protos to compare with'; \
	else \
	    $(BIN)/buf breaking protos --against ".git#ref=$$(git rev-parse "$(BASE)"),subdir=protos" \
	    && echo 'breaking: the contract of $(BASE) still holds'; \
	fi

# --- the rest ---------------------------------------------------------------------------------------------------

wheel: .venv/dev.stamp ## dist/turnfence-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean: ## remove everything that was made, the embedded stores' data excepted
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis tests/node/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
