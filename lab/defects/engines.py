"""Engines that are not the declared ones, start in the wrong order, or have an environment nobody meant."""

from __future__ import annotations

import copy

from lab.defects.registry import defect
from lab.plan import LabPlan

R1, R2 = "field report R1", "field report R2"


@defect("engine-not-started", trips={"engines.running"})
def an_engine_is_missing(plan: LabPlan) -> None:
    """The last decode engine was never started."""
    plan.engine("d0/dp3").started = False


@defect("engine-outside-its-container", trips={"engines.running"})
def a_stray_engine_answers(plan: LabPlan) -> None:
    """One decode engine runs beside the container it is declared in."""
    plan.engine("d0/dp2").in_container = False


@defect("wrong-role", trips={"engines.as-declared"}, reference=R1)
def an_engine_has_another_role(plan: LabPlan) -> None:
    """One decode engine was started as kv_both."""
    plan.engine("d0/dp1").kv_config["kv_role"] = "kv_both"


@defect("decode-first", trips={"engines.start-order"}, reference=R1)
def decode_was_started_first(plan: LabPlan) -> None:
    """D was started while P was still loading."""
    plan.prefill_first = False
    host = plan.host_of("p0")
    for port in range(7000, 7004):
        host.settings.setdefault(f"engine:{port}", {})["startup_s"] = 6.0


@defect("r2-three-variables", trips={"environment.policy"}, reference=R2)
def three_variables_deviate(plan: LabPlan) -> None:
    """HCCL_BUFFSIZE=1024, HCCL_EXEC_TIMEOUT=204 and HCCL_CONNECT_TIMEOUT=1200 on a model whose template sets none of them."""
    plan.host_of("p0").env |= {"HCCL_BUFFSIZE": "1024", "HCCL_EXEC_TIMEOUT": "204", "HCCL_CONNECT_TIMEOUT": "1200"}


@defect("unknown-variables", trips={"environment.names"}, reference=R2)
def variables_nobody_reads(plan: LabPlan) -> None:
    """VLLM_RPC_TIMEOUT and VLLM_ASCEND_APPLY_DSV4_PATCH are set, and vLLM 0.23.0 reads neither."""
    plan.host_of("p0").env |= {"VLLM_RPC_TIMEOUT": "3600000", "VLLM_ASCEND_APPLY_DSV4_PATCH": "1"}


@defect("transfer-timeout-too-short", trips={"environment.timers"})
def the_transfer_timeout_is_below_the_rdma_retries(plan: LabPlan) -> None:
    """ASCEND_TRANSFER_TIMEOUT is 500 ms while RDMA alone retries for longer."""
    plan.host_of("d0").env["ASCEND_TRANSFER_TIMEOUT"] = "500"


def _kill_api_once_up(address: str, port: int, pause_s: int) -> list[str]:
    """Script lines behind an engine's command: wait until it serves, then kill that one process."""
    up = f"(exec 3<>/dev/tcp/{address}/{port}) 2>/dev/null"
    return ["api=$!", f"(until {up}; do sleep 0.2; done; sleep {pause_s}; kill -9 $api) &"]


@defect("orphaned-engine", trips={"engines.orphans"}, alone=True, reference="real-engines: kill -9 of the API server alone")
def an_engine_core_outlived_its_api_server(plan: LabPlan) -> None:
    """An undeclared engine was started on d0 and only its API server was killed: core and workers live on."""
    stray = copy.deepcopy(plan.engine("d0/dp3"))
    stray.args |= {"port": "7900", "data-parallel-rank": "9"}
    stray.kv_config["kv_port"] = "28200"
    stray.engine = stray.engine.model_copy(update={"log": "/var/log/pd/stray.log"})
    # Early in the script: it must have happened before anybody looks.
    plan.engine("d0/dp0").after += [stray.command(), *_kill_api_once_up("127.0.0.1", 7900, 0)]


@defect(
    "api-server-killed",
    trips={"engines.orphans", "engines.running", "ports.group.owned"},
    reference="real-engines: kill -9 of the API server alone",
)
def only_the_api_server_was_killed(plan: LabPlan) -> None:
    """Only the API server of P's last engine was killed: core and workers live on and hold its ports."""
    last = [engine for engine in plan.deployment.engines if engine.role == "prefill"][-1]
    entry = plan.engine(last.name)
    entry.after = _kill_api_once_up(str(last.address), int(last.http_port or 0), 1)
    plan.warm_up = False  # a request to the killed server is never answered: its children hold the connection open
    plan.tolerate_down = True
