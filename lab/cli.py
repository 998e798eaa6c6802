"""`pdgate lab up|down|status|defects`: a lab for interactive use."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from lab.control import Lab, LabUnavailable, embedded, forget, kept, remember, start
from lab.defects import load_all
from lab.defects.registry import DEFECTS


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("lab", help="keep an embedded lab for interactive use")
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="start a lab and leave it running; pytest --hosts=lab then uses it")
    up.add_argument("--lab-defect", action="append", default=[], metavar="NAME", help="plant a defect (repeatable)")
    down = actions.add_parser("down", help="stop it")
    status = actions.add_parser("status", help="say whether one runs, and how to reach it")
    for action in (up, down, status):
        action.add_argument("name", nargs="?", default="lab", choices=sorted(embedded()), help="lab (default), or real engines: see README")
    inside = actions.add_parser("exec", help="run a command in the kept lab's network; {inventory} in it becomes the lab's inventory")
    inside.add_argument("--name", default="lab", choices=sorted(embedded()))
    inside.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    defects = actions.add_parser("defects", help="list the defects the lab can have")
    defects.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    return {"up": _up, "down": _down, "status": _status, "exec": _exec, "defects": _defects}[args.action](args)


def _up(args: argparse.Namespace) -> int:
    lab = kept(args.name)
    if lab is not None:
        print(f"{args.name} is up already (pid {lab.pid}); 'pdgate lab down {args.name}' stops it")
        return 1
    try:
        lab = start(args.name, args.lab_defect, keep=True)
    except LabUnavailable as error:
        print(f"error: {error}")
        return 4
    remember(args.name, lab)
    print(f"{args.name} up in {lab.seconds:.1f} s")
    return _status(args)


def _down(args: argparse.Namespace) -> int:
    lab = kept(args.name)
    forget(args.name)
    if lab is None:
        print(f"{args.name} is not up")
        return 0
    lab.stop()
    print(f"{args.name} down")
    return 0


def _status(args: argparse.Namespace) -> int:
    lab = kept(args.name)
    if lab is None:
        print(f"{args.name} is not up; 'pdgate lab up{'' if args.name == 'lab' else ' ' + args.name}' starts it")
        return 1
    _show(args.name, lab)
    return 0


def _exec(args: argparse.Namespace) -> int:
    lab = kept(args.name)
    command = [word.replace("{inventory}", lab.inventory if lab else "") for word in args.command if word != "--"]
    if lab is None or not command:
        print(f"{args.name} is not up; 'pdgate lab up {args.name}' starts it" if lab is None else "name a command: pdgate lab exec -- COMMAND")
        return 4
    lab.join()
    return subprocess.run(command).returncode


def _show(name: str, lab: Lab) -> None:
    inside = f"nsenter --net=/proc/{lab.pid}/ns/net"
    folder = Path(lab.inventory).parent
    print(f"hosts:     {', '.join(lab.hosts)}   defects: {', '.join(lab.defects) or 'none'}   keeper: pid {lab.pid}")
    print(f"inventory: {lab.inventory}")
    print(f"judge it:  pytest --hosts={name}   (from the clone)")
    print(f"ask it:    {inside} curl -s http://10.77.0.11:1999/v1/models")
    print(f"log in:    {inside} ssh -i {folder}/key -o UserKnownHostsFile={folder}/known_hosts root@10.77.0.11")


def _defects(args: argparse.Namespace) -> int:
    load_all()
    entries = sorted(DEFECTS.values(), key=lambda defect: defect.name)
    if args.json:
        print(json.dumps([
            {"name": entry.name, "summary": entry.summary, "trips": sorted(entry.trips), "invalid": sorted(entry.invalid),
             "phase": entry.phase, "reference": entry.reference, "run": list(entry.run)} for entry in entries
        ], indent=1))  # fmt: skip
        return 0
    for entry in entries:
        print(f"{entry.name}\n    {entry.summary}\n    trips: {', '.join(sorted(entry.trips | entry.invalid))}")
    return 0
