"""What `--hosts` names becomes a validated Deployment."""

from __future__ import annotations

from pathlib import Path

from pdgate.connectors import connector_of
from pdgate.inventory.loader import find_source, load_deployment
from pdgate.inventory.model import Deployment, InventoryError

SHIPPED_INVENTORIES = Path(__file__).resolve().parent.parent / "inventories"


def open_deployment(name: str) -> Deployment:
    """A path or a name found in ./inventories or the shipped ones; raises InventoryError."""
    source = find_source(name, [Path("inventories"), SHIPPED_INVENTORIES])
    deployment = load_deployment(source)
    for engine in deployment.engines:
        try:
            connector_of(engine.connector).port_group(engine)
        except KeyError as error:
            raise InventoryError(f"{source}: host '{engine.host}': key 'pd_connector': {error.args[0]}") from None
        except ValueError:
            raise InventoryError(
                f"{source}: host '{engine.host}': key 'pd_kv_port' is missing; it is the first port of the KV port group"
            ) from None
    return deployment
