"""`pdgate checks`: what the suites check, from the same declarations the tests carry."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pkgutil

import chaos.experiments
import suites
from pdgate.plugin.check import REGISTRY, CheckInfo


def all_checks() -> dict[str, CheckInfo]:
    """Every check of the suites and the experiments by id."""
    rooms = [pkgutil.walk_packages(suites.__path__, "suites."), pkgutil.walk_packages(chaos.experiments.__path__, "chaos.experiments.")]
    for module in itertools.chain(*rooms):
        if module.name.rpartition(".")[2].startswith("test_"):
            importlib.import_module(module.name)
    return dict(sorted(REGISTRY.items()))


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("checks", help="list the checks of the suites")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_list_checks)


def _list_checks(args: argparse.Namespace) -> int:
    checks = all_checks()
    if args.json:
        fields = ("id", "title", "severity", "phase", "reference", "waivable")
        print(json.dumps([{field: getattr(info, field) for field in fields} for info in checks.values()], indent=1))
    else:
        for info in checks.values():
            print(f"{info.id:<42} {info.severity:<9} {info.phase:<7} {info.title}")
    return 0
