"""The `pd_*` inventory variables: one model, from which validation, suggestions and the documentation are made."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Platform = Literal["ascend-a2", "ascend-a3", "ascend-950", "gpu", "cpu"]
ProxyKind = Literal["vllm-ascend", "vllm-ascend-layerwise", "vllm-router", "other"]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=4096)]


def expand_devices(value: Any) -> Any:
    """`"0-7"`, `"0,2,4-5"` or a list become a list of device ids."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    devices: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"'{part.strip()}' is not a device id or a range like 0-7")
        devices.extend(range(int(first), int(last or first) + 1))
    return devices


def texts(value: Any) -> Any:
    """YAML reads `480` and `0.23` as numbers; versions and environment values are text."""
    if not isinstance(value, dict):
        return value
    return {key: str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for key, item in value.items()}


Texts = Annotated[dict[str, str], BeforeValidator(texts)]


SLO_KEY = re.compile(r"(ttft|itl|e2e)_p(50|90|95|99)_ms|requests_per_s|tokens_per_s")


def slo_keys(value: Any) -> Any:
    """`ttft_p95_ms` and the like; raises ValueError with the possible names."""
    for key in value if isinstance(value, dict) else ():
        if not SLO_KEY.fullmatch(str(key)):
            raise ValueError(f"'{key}' is no objective; use ttft, itl or e2e with _p50_ms, _p90_ms, _p95_ms or _p99_ms, requests_per_s, tokens_per_s")
    return value


Loss = Literal["prefilling", "prefilled", "handshake", "transferring", "received", "decoding", "transfer-fails"]
Answer = Literal["answered", "failed"]


class Expect(BaseModel):
    """What the operator expects of this deployment (the keys of `pd_expect`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request_deadline_s: float = Field(60.0, gt=0, description="A request that has said nothing for this long hangs (seconds).")
    abort_recovery_s: float | None = Field(
        None, gt=0,
        description="KV usage is back at its baseline this long after a cancelled request (seconds). "
        "Default: the connector's abort timeout as the running P has it.",
    )  # fmt: skip
    clock_offset_ms: float = Field(
        500.0, gt=0, description="Largest clock offset between a host and the controller, uncertainty included (ms)."
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt the deployment is said to take (tokens). Default: /v1/models tells."
    )
    zone: str | None = Field(
        None, description="The time zone every host, container and log must be in, as an offset like `+0800`. "
        "Default: that of the first host."
    )  # fmt: skip
    tls_switch: int | None = Field(None, ge=0, le=1, description="The NPU TLS switch every device must show. Default: all must agree.")
    on_loss: dict[Loss, Answer] = Field(
        default_factory=dict,
        description="Chaos: what a request comes to whose engine (or transfer) is lost in a phase (`prefilling`, `prefilled`, `handshake`, `transferring`, "
        "`received`, `decoding`, `transfer-fails`): `answered` (retried, recomputed, taken over: the golden answer all the same) or `failed` (an error "
        "in time is enough; once the answer has begun, a broken connection, never a polite end). Default: `answered` where the running D has "
        "`kv_load_failure_policy: recompute` and a connector version that reports failed pulls, in the phases in which D can recompute; else `failed`.",
    )  # fmt: skip
    failover_s: float | None = Field(
        None, gt=0, description="Chaos: this long after an engine has fallen silent nobody is sent to it any more (seconds; field report R3: 10). Default: no promise."
    )  # fmt: skip
    slo: Annotated[dict[str, float], BeforeValidator(slo_keys)] = Field(
        default_factory=dict,
        description="Objectives under the load: `ttft_p95_ms`, `itl_p50_ms`, `e2e_p99_ms` … (p50, p90, p95, p99), at most; "
        "`requests_per_s`, `tokens_per_s`, at least. None declared: not run.",
    )


class Load(BaseModel):
    """The load of an acceptance run (the keys of `pd_load`); options of the command line come before it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(2.0, ge=0, description="Requests per second, Poisson arrivals. 0: no load; what stands on it is not run.")
    seconds: float = Field(20.0, ge=0, description="How long, after a ramp of a fifth of it. 0: no load.")
    burst: int = Field(0, ge=0, description="Requests sent at once at the end.")
    output_tokens: Count = Field(16, description="`max_tokens` of its requests.")
    stream_share: float = Field(0.5, ge=0, le=1, description="Share of streamed requests.")
    abort_share: float = Field(0.05, ge=0, le=1, description="Share of requests whose client leaves before the end.")
    max_concurrency: int = Field(8, ge=0, description="Requests at the same time the deployment is said to take; the sweep goes up to it.")
    idle_s: float = Field(10.0, ge=0, description="Silence before the connection storm: longer than the keep-alive of what stands in between.")
    restart_s: float = Field(300.0, gt=0, description="Chaos: how long an engine may take to serve again after a restart (seconds).")
    recovery_s: float = Field(
        15.0, gt=0, description="Chaos: how soon after a healing every request must be good again (seconds, beside restart_s)."
    )
    seed: int = Field(1, ge=0, description="The same seed, the same schedule.")


class HostVars(BaseModel):
    """Every `pd_` variable a host may carry, directly or through its groups."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    platform: Platform = Field("ascend-a2", description="What the host computes on.")
    connector: str = Field(
        "MooncakeConnectorV1", description="The `kv_connector` of the deployment; `pdgate connectors` lists those known."
    )
    versions: Texts = Field(
        default_factory=dict,
        description="Installed versions where the probe cannot see them: `vllm`, `vllm_ascend`, `mooncake`, `cann`.",
    )
    model: str | None = Field(None, description="The served model name, as /v1/models answers it.")
    kv_port: Port | None = Field(None, description="`kv_port` of the kv-transfer-config: the first port of the group.")
    tp: Count = Field(1, description="Tensor parallel size.")
    pp: Count = Field(1, description="Pipeline parallel size.")
    pcp: Count = Field(1, description="Prefill context parallel size.")
    dp_size: Count | None = Field(None, description="Global data parallel size. Default: `pd_dp_rank_start + pd_dp_local`.")
    dp_rank_start: int = Field(0, ge=0, description="Global DP rank of this host's first rank.")
    dp_local: Count = Field(1, description="DP ranks on this host.")
    dp_mode: Literal["external", "internal"] = Field(
        "external",
        description="`external`: every DP rank is a vLLM instance with an HTTP port of its own (`pd_http_port` + i). "
        "`internal`: one instance, one HTTP port, for all local ranks.",
    )
    dp_rpc_port: Port | None = Field(None, description="`--data-parallel-rpc-port` of the DP group.")
    http_port: Port | None = Field(None, description="HTTP port of the host's first engine.")
    api_scheme: Literal["http", "https"] = Field("http", description="Scheme of the engines' and the proxy's HTTP.")
    api_key_env: str | None = Field(None, description="Name of the environment variable, here on the controller, that holds the API key.")
    address: str | None = Field(
        None, description="The address the engine binds its port group on. Default: `ansible_host` where it is an IP."
    )
    launch: str | None = Field(None, description="Path of the launch script on the host.")
    restart: str | None = Field(
        None, description="Command on the host that starts one engine again after chaos killed it; `{rank}` is its first global DP rank."
    )
    kv_transport: Literal["tcp", "rdma"] | None = Field(
        None, description="What KV travels over between hosts; over `rdma` (RoCE, HCCS) host rules cannot hurt it. Default: rdma on Ascend, else tcp."
    )
    toxiproxy: str = Field("toxiproxy-server", description="toxiproxy-server on the host, for faults on TCP paths.")
    log: str | None = Field(None, description="Path of the engine's log on the host; `{rank}` is the global DP rank.")
    container: str | None = Field(None, description="Name of the container the engine runs in, if in one.")
    devices: Annotated[list[int], BeforeValidator(expand_devices)] | None = Field(
        None, description="Device ids of the host's engines in rank order: a list or `0-7`. Default: 0 .. dp_local*tp*pp*pcp-1."
    )
    rack: str | None = Field(None, description="Rack, for placement.")
    zone: str | None = Field(None, description="Availability zone, for placement.")
    machine: str | None = Field(
        None,
        description="Name of the physical machine where two inventory names share one (P and D on one host). "
        "Default: names with the same connection address are one machine.",
    )
    env: Texts = Field(
        default_factory=dict,
        description="Environment variables the engine is meant to have, overriding pdgate's documented defaults.",
    )
    proxy_port: Port | None = Field(None, description="Port of the proxy on a host of group `proxy`.")
    proxy_kind: ProxyKind = Field("vllm-ascend", description="Which proxy it is.")
    proxy_path: str | None = Field(
        None,
        description="For the embedded `real` deployments: path on this machine of the upstream vllm-ascend pull proxy, to run in front "
        "with `pd_proxy_kind: vllm-ascend` instead of vllm-router. pdgate ships none.",
    )
    proxy_restart: str | None = Field(None, description="Command on the proxy's host that starts the proxy again after chaos killed it.")
    proxy_log: str | None = Field(None, description="Path of the proxy's log on its host.")
    plog: str | None = Field(None, description="Folder of the Ascend plogs on the host (`~/ascend/log`), for the communicator count.")
    load: Load = Field(default_factory=lambda: Load.model_validate({}), description="The load of an acceptance run, see below.")
    expect: Expect = Field(default_factory=lambda: Expect.model_validate({}), description="Expectations, see below.")
    chaos: bool = Field(False, description="First half of the double consent to fault injection; the other is `--chaos`.")
