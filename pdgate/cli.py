"""The `pdgate` command. Rooms above the library bring their subcommands through the entry points `pdgate.commands`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib.metadata import entry_points

from pdgate import __version__, ab
from pdgate.connectors import CONNECTORS
from pdgate.deployment import open_deployment
from pdgate.inventory.docs import inventory_readme
from pdgate.inventory.model import InventoryError
from pdgate.serving.load.run import worker_argv


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `pdgate … | head` is no error
    parser = argparse.ArgumentParser(
        prog="pdgate", description="The gate a prefill/decode deployment passes. Run it with: pytest --hosts=…"
    )
    parser.add_argument("--version", action="version", version=f"pdgate {__version__}")
    commands = parser.add_subparsers(dest="command")
    inventory = commands.add_parser("inventory", help="validate an inventory and show what pdgate understands")
    inventory.add_argument("source", help="file, directory, or a name in inventories/; 'keys' documents the pd_ keys")
    inventory.set_defaults(run=_inventory)
    connectors = commands.add_parser("connectors", help="list the connectors pdgate knows")
    connectors.set_defaults(run=_connectors)
    worker = commands.add_parser("load-worker", help="make load for a run elsewhere that waits with --load-remote-workers")
    worker.add_argument("master", metavar="HOST:PORT", help="its --load-master")
    worker.set_defaults(run=lambda args: os.execv(sys.executable, worker_argv(args.master)))
    ab.add_commands(commands)
    for entry in entry_points(group="pdgate.commands"):
        entry.load()(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    code: int = args.run(args)
    return code


def _inventory(args: argparse.Namespace) -> int:
    if args.source == "keys":
        print(inventory_readme())
        return 0
    try:
        deployment = open_deployment(args.source)
    except InventoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    for engine in deployment.engines:
        claims = CONNECTORS[engine.connector].port_group(engine)
        group = f"{claims[0].port}-{claims[-1].port}" if claims else "none bound"
        print(f"{engine.name:<12} {engine.role:<8} {deployment.url_of(engine) or '(no address)':<28} KV ports {group}")
    for proxy in deployment.proxies:
        print(f"{proxy.name:<12} {'proxy':<8} {deployment.url_of(proxy) or '(no address)':<28} {proxy.kind}")
    return 0


def _connectors(args: argparse.Namespace) -> int:
    for connector in CONNECTORS.values():
        print(f"{connector.name:<28} binds on {' and '.join(connector.binds)}; {connector.port_variable}; {', '.join(connector.sources)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
