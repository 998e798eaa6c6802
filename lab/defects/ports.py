"""Field report R1 whole, and every other way a port group goes wrong."""

from __future__ import annotations

from typing import Any

from lab.defects.registry import defect
from lab.plan import ContainerPlan, LabPlan, ListenerPlan
from pdgate.connectors import connector_of

R1 = "field report R1"
# A request through P's first engine fails: what it was to prove cannot be judged.
NO_ANSWER = frozenset({"service.request.kv-moved", "service.request.generated", "service.cancel.baseline"})


def _group(role: str) -> Any:
    def pick(inventory: dict[str, Any]) -> dict[str, Any]:
        hosts: dict[str, Any] = inventory["all"]["children"][role]["hosts"]
        return hosts

    return pick


prefill, decode = _group("prefill"), _group("decode")


@defect("grafana-on-a-group-port", trips={"ports.group.owned"}, reference=R1)
def grafana_takes_a_port_in_the_middle_of_the_group(plan: LabPlan) -> None:
    """Grafana owns one port of P's group after the worker's side channel died; nc and curl succeed, P looks healthy."""
    host = plan.host_of("p0")
    host.misbehave("engine:7001", "side_channel_dies", 1)
    host.listeners.append(ListenerPlan("grafana", "0.0.0.0", 28003, after_engines=True))


@defect(
    "grafana-on-the-first-port",
    trips={"ports.group.owned", "service.request.golden"},
    invalid=NO_ANSWER,
    reference=R1,
)
def grafana_takes_the_first_port_of_the_group(plan: LabPlan) -> None:
    """Grafana owns the first port of P's group: D asks a web server for KV, and requests fail."""
    host = plan.host_of("p0")
    host.misbehave("engine:7000", "side_channel_dies", 0)
    host.listeners.append(ListenerPlan("grafana", "0.0.0.0", 28000, after_engines=True))


@defect("grafana-before-start", trips={"ports.group.free"}, phase="before", reference=R1)
def grafana_listens_before_the_engines_start(plan: LabPlan) -> None:
    """Grafana already listens on one port of the group when the engines are about to start."""
    plan.host_of("p0").listeners.append(ListenerPlan("grafana", "0.0.0.0", 28005))


@defect("engine-lost-its-port", trips={"ports.group.owned", "engines.running"}, reference="vllm-ascend#8938")
def an_engine_cannot_bind_and_dies(plan: LabPlan) -> None:
    """Grafana was there first: the worker of P's last rank cannot bind, and its engine dies at start."""
    last = [engine for engine in plan.deployment.engines if engine.role == "prefill"][-1]
    port = connector_of(last.connector).port_group(last)[-1].port
    plan.host_of(last.host).listeners.append(ListenerPlan("grafana", "0.0.0.0", port))
    plan.tolerate_down = True


@defect(
    "kv-port-in-reserved-range", trips={"ports.group.reserved"}, reference=R1, alone=True,
    edit=lambda inventory: prefill(inventory)["p0"].update(pd_kv_port=20100),
)  # fmt: skip
def the_group_lies_where_mooncake_draws_ports(plan: LabPlan) -> None:
    """P's kv_port lies inside the range from which AscendDirectTransport draws its listen ports."""


@defect(
    "kv-port-in-ephemeral-range", trips={"ports.group.ephemeral"}, alone=True,
    edit=lambda inventory: prefill(inventory)["p0"].update(pd_kv_port=36000),
)  # fmt: skip
def the_group_lies_in_the_ephemeral_range(plan: LabPlan) -> None:
    """P's group lies in ip_local_port_range and is not reserved: an outgoing connection may hold a port."""


@defect(
    "dp-rpc-port-in-group", trips={"ports.group.collision"},
    edit=lambda inventory: prefill(inventory)["p0"].update(pd_dp_rpc_port=28006),
)  # fmt: skip
def the_dp_rpc_port_lies_in_the_group(plan: LabPlan) -> None:
    """The DP-RPC port of the prefill group is one of the KV ports."""


@defect("container-publishes-a-group-port", trips={"ports.group.mapping"}, reference=R1)
def a_container_publishes_a_port_of_the_group(plan: LabPlan) -> None:
    """Another container maps a port of the group; nothing listens on the host, the kernel redirects."""
    plan.host_of("p0").other_containers.append(
        ContainerPlan("grafana", "grafana/grafana:12.1.0", "bridge", {"3000/tcp": [("0.0.0.0", 28004)]})
    )


@defect("group-on-loopback", trips={"ports.group.address"})
def a_group_listens_on_loopback(plan: LabPlan) -> None:
    """One P rank resolved its own address to 127.0.0.1 and binds its ports there."""
    plan.engine("p0/dp1").env["VLLM_HOST_IP"] = "127.0.0.1"


def _second_decode_instance(inventory: dict[str, Any]) -> None:
    first = decode(inventory)["d0"]
    first.update(pd_dp_local=3, pd_devices="0-5")
    decode(inventory)["d0b"] = {
        **first, "pd_dp_local": 1, "pd_devices": "6-7", "pd_kv_port": 28104, "pd_http_port": 7103, "pd_log": "/var/log/pd/b-dp{rank}.log",
    }  # fmt: skip


@defect("overlapping-groups", trips={"ports.group.overlap"}, alone=True, edit=_second_decode_instance)
def two_engines_of_one_machine_share_ports(plan: LabPlan) -> None:
    """A second decode instance on the same machine claims a port group that overlaps the first one's."""
