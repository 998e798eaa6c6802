"""From an Ansible inventory to one typed, validated Deployment."""

from pdgate.inventory.connection import Connection
from pdgate.inventory.loader import load_deployment
from pdgate.inventory.model import Deployment, Engine, Host, InventoryError, PortSlot, Proxy, Role
from pdgate.inventory.variables import Expect

__all__ = [
    "Connection", "Deployment", "Engine", "Expect", "Host", "InventoryError", "PortSlot", "Proxy", "Role",
    "load_deployment",
]  # fmt: skip
