"""Registers the plugins; each lives in its own room."""

pytest_plugins = [
    "pdgate.plugin.options",
    "pdgate.plugin.fixtures",
    "pdgate.plugin.verdicts",
    "reports.plugin",
    # Last, so that its configure runs first: `--hosts=lab` becomes the inventory of the lab it has started.
    "lab.plugin",
]
