# make demo: set up, judge the embedded lab, hurt it.   make test: set up, then run the project's own tests (test-all: all of them).
SHELL := /bin/sh
PYTEST := .venv/bin/python -m pytest
export PATH := $(CURDIR)/.cache/bin:$(PATH):/usr/sbin:/sbin

.PHONY: setup demo test test-all lint lock docs clean real-setup real real-smoke fidelity

setup:
	@sh setup/setup.sh

demo: setup
	@$(PYTEST) --hosts=lab
	@$(PYTEST) chaos --hosts=lab --chaos -m smoke

test: setup
	@$(PYTEST) tests -n 2 --dist loadgroup -m "not nightly"

# Everything, also what does not fit into twenty minutes: the other half of the self-check of chaos.
test-all: setup
	@$(PYTEST) tests -n 2 --dist loadgroup

# Real vLLM on CPU: about 7 GB in .cache/real, once.
real-setup: setup
	@sh real/setup.sh

real: real-setup
	@$(PYTEST) real -v

real-smoke: real-setup
	@$(PYTEST) real -m smoke -v

fidelity: real-setup
	@.venv/bin/python -m real.fidelity capture lab > .cache/lab.json
	@.venv/bin/python -m real.fidelity capture real > .cache/real.json
	@.venv/bin/python -m real.fidelity compare .cache/lab.json .cache/real.json > docs/fidelity.md

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/mypy

# Refresh the lock from pyproject.toml (needs uv: pip install uv).
lock:
	uv pip compile -q pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-header --no-annotate -o setup/requirements.lock

docs: setup
	@.venv/bin/pdgate inventory keys > inventories/README.md

clean:
	rm -rf .venv .cache reports/out
