# make demo: set up, then judge the embedded lab.   make test: set up, then run the project's own tests.
SHELL := /bin/sh
PYTEST := .venv/bin/python -m pytest
export PATH := $(CURDIR)/.cache/bin:$(PATH):/usr/sbin:/sbin

.PHONY: setup demo test lint lock docs clean

setup:
	@sh setup/setup.sh

demo: setup
	@$(PYTEST) --hosts=lab

test: setup
	@$(PYTEST) tests -n 2 --dist loadgroup

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
