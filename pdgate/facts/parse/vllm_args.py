"""The command line of `vllm serve`, and the kv-transfer-config inside it."""

from __future__ import annotations

import json
from typing import Any


def parse_serve_args(argv: list[str]) -> dict[str, str] | None:
    """Flags of a `vllm serve` (or `python -m vllm.entrypoints…`) command line, without dashes and with `_` for `-`.

    A flag without a value is "true"; the positional model is under `model`. None when the command line is another one.
    """
    start = _start(argv)
    if start is None:
        return None
    args: dict[str, str] = {}
    position = start
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            if "model" not in args and word:
                args["model"] = word
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not equals:
            following = argv[position] if position < len(argv) else "--"
            if following.startswith("--"):
                value = "true"
            else:
                value = following
                position += 1
        args[key] = value
    return args


def _start(argv: list[str]) -> int | None:
    for index, word in enumerate(argv):
        if word == "serve" and index > 0 and argv[index - 1].rpartition("/")[2] == "vllm":
            return index + 1
        if word.startswith("vllm.entrypoints") and argv[index - 1] == "-m":
            return index + 1
    return None


def kv_transfer_config(args: dict[str, str]) -> dict[str, Any]:
    """The kv-transfer-config as a dict, whether given as JSON or as dotted flags; raises ValueError for broken JSON."""
    config: dict[str, Any] = {}
    text = args.get("kv_transfer_config")
    if text:
        loaded = json.loads(text)
        if not isinstance(loaded, dict):
            raise ValueError(f"--kv-transfer-config is not an object: {text[:80]}")
        config = loaded
    for key, value in args.items():
        if key.startswith("kv_transfer_config."):
            config[key.partition(".")[2]] = value
    return config


def inner_connector(config: dict[str, Any]) -> dict[str, Any]:
    """The P2P connector inside a MultiConnector, else the config itself."""
    if config.get("kv_connector") in ("MultiConnector", "AscendMultiConnector"):
        for inner in config.get("kv_connector_extra_config", {}).get("connectors", []):
            if isinstance(inner, dict) and inner.get("kv_connector") != "AscendStoreConnector":
                return inner
    return config
