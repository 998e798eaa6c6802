"""`pdgate lab up|down|status|defects`: a lab for interactive use."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lab.control import LabUnavailable, forget, kept, remember, start
from lab.defects import load_all
from lab.defects.registry import DEFECTS

INVENTORY = Path(__file__).resolve().parent.parent / "inventories" / "lab.yaml"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("lab", help="keep an embedded lab for interactive use")
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="start a lab and leave it running; pytest --hosts=lab then uses it")
    up.add_argument("--lab-defect", action="append", default=[], metavar="NAME")
    actions.add_parser("down", help="stop it")
    actions.add_parser("status", help="say whether one runs, and how to reach it")
    defects = actions.add_parser("defects", help="list the defects the lab can have")
    defects.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    return {"up": _up, "down": _down, "status": _status, "defects": _defects}[args.action](args)


def _up(args: argparse.Namespace) -> int:
    lab = kept()
    if lab is not None:
        print(f"a lab is up already (pid {lab.pid}); 'pdgate lab down' stops it")
        return 1
    try:
        lab = start(INVENTORY, args.lab_defect, keep=True)
    except LabUnavailable as error:
        print(f"error: {error}")
        return 4
    remember(lab)
    print(f"lab up in {lab.seconds:.1f} s")
    return _status(args)


def _down(args: argparse.Namespace) -> int:
    lab = kept()
    forget()
    if lab is None:
        print("no lab is up")
        return 0
    lab.stop()
    print("lab down")
    return 0


def _status(args: argparse.Namespace) -> int:
    lab = kept()
    if lab is None:
        print("no lab is up; 'pdgate lab up' starts one")
        return 1
    inside = f"nsenter --net=/proc/{lab.pid}/ns/net"
    folder = Path(lab.inventory).parent
    print(f"hosts:     {', '.join(lab.hosts)}   defects: {', '.join(lab.defects) or 'none'}   keeper: pid {lab.pid}")
    print(f"inventory: {lab.inventory}")
    print("judge it:  pytest --hosts=lab")
    print(f"ask it:    {inside} curl -s http://10.77.0.11:1999/healthcheck")
    print(f"log in:    {inside} ssh -i {folder}/key -o UserKnownHostsFile={folder}/known_hosts root@10.77.0.11")
    return 0


def _defects(args: argparse.Namespace) -> int:
    load_all()
    entries = sorted(DEFECTS.values(), key=lambda defect: defect.name)
    if args.json:
        print(json.dumps([
            {"name": entry.name, "summary": entry.summary, "trips": sorted(entry.trips), "invalid": sorted(entry.invalid),
             "phase": entry.phase, "reference": entry.reference} for entry in entries
        ], indent=1))  # fmt: skip
        return 0
    for entry in entries:
        print(f"{entry.name}\n    {entry.summary}\n    trips: {', '.join(sorted(entry.trips | entry.invalid))}")
    return 0
