"""One file per subject; importing a file registers its defects."""

import importlib
import pkgutil


def load_all() -> None:
    for module in pkgutil.iter_modules(__path__, "lab.defects."):
        importlib.import_module(module.name)
