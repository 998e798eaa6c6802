"""Error lines that are known: what they mean and what to do. A line of level ERROR that is not here is reported as unknown.

`harmless` lines are seen on healthy deployments; `elsewhere` lines are judged by a check of their own, which is named.
Sources: ascend-pd-facts 5.4, 5.6, 6.1, 7; real-engines; docs/fidelity.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["error", "harmless", "elsewhere"]


@dataclass(frozen=True)
class Signature:
    """One known line: `pattern` is searched in the whole entry, traceback included."""

    name: str
    component: Literal["vLLM", "Mooncake", "HCCL", "HIXL", "NIXL", "proxy"]
    pattern: str
    meaning: str
    remedy: str = ""
    kind: Kind = "error"
    reference: str = ""

    def matches(self, text: str) -> bool:
        return re.search(self.pattern, text) is not None


SIGNATURES: tuple[Signature, ...] = (
    # HCCL and HIXL: the bottom of most chains
    Signature("hccl-prepare", "HCCL", r"HcclCommPrepare", "the NPUs' communicator could not be set up",
              "timeout (9): clocks, HCCL_INTRA_ROCE_ENABLE and the TLS switch must agree on both ends, links must be up; memory (3, 24): lower P's gpu-memory-utilization",
              reference="field report R2; HIXL FAQ"),
    Signature("npu-port", "HCCL", r"(?:EI0019|EI0020|specific port\[16666\] fail)", "the NPU's listen port 16666 is taken: two processes on one device",
              "one process per NPU, or HCCL_NPU_SOCKET_PORT_RANGE where HIXL is not used", reference="vllm-ascend#4725, #1955"),
    Signature("cqe", "HCCL", r"(?:EI0013|cqe error status)", "RoCE retransmissions were exhausted", "check links, PFC and optics of both devices",
              reference="vllm-ascend#7384"),
    Signature("port-down", "HCCL", r"EJ0002", "the NPU's network port is down", "check links.state and the cable", reference="vllm-ascend#1815"),
    Signature("hccl-socket", "HCCL", r"(?:wait socket establish timeout|EI0006)", "no HCCL socket to the peer in time",
              "check that the peer runs, its links, and that TLS switches agree"),
    Signature("stream-sync", "HIXL", r"(?:507046|Stream synchronize timeout|TransferSync)", "the transfer did not end in time",
              "ASCEND_TRANSFER_TIMEOUT must exceed HCCL_RDMA_TIMEOUT x HCCL_RDMA_RETRY_CNT (33 s by default)", reference="vllm-ascend#7846"),
    Signature("connect-timeout", "HIXL", r"(?:Connect timeout to:|DoConnect|connect timeout)", "D could not connect to P's NPU in time",
              "P's engine gone or overloaded, a link down, or ASCEND_CONNECT_TIMEOUT too short", reference="vllm-ascend#7401; field report R2"),
    Signature("connect-failed", "Mooncake", r"Failed to connect to (?:target|segment)", "D could not connect to P's transfer engine",
              "check hccn.conf inside the container, HCCL_INTRA_ROCE_ENABLE on one host, CANN versions", reference="vllm-ascend#5635, #4866"),
    Signature("slice-failed", "Mooncake", r"(?:Transfer slice failed|transfer failed and disconnect|Failed to disconnect|Sync batch data transfer timeout)",
              "a transfer was begun and not finished", "read the chain to its first line"),
    Signature("init-failed", "Mooncake", r"(?:Failed to initialize AdxlEngine|TransferEngine initialization failed|Find available port failed)",
              "the transfer engine could not start", "ports of the ADXL range are taken, or the device is held by another process"),
    # the connectors
    Signature("pull-failed", "Mooncake", r"(?:Mooncake transfer failed|Failed to transfer KV cache for request|pulling kv_caches for .* failed)",
              "D did not get the KV of a request", "wrong answers may follow where the connector does not report it: compare service.load.wrong",
              reference="vllm-ascend#17044"),
    Signature("reformat-failed", "Mooncake", r"Failed to reformat KV cache", "pulled KV could not be laid out", "P's and D's tp sizes and block sizes"),
    Signature("side-channel", "Mooncake", r"(?:(?:Send|Receive) failed after all retries|Failed to receive (?:data|ACK)|Unexpected error occurred in socket|Error handling KV cache transfer request)",
              "P's side channel did not answer", "check the owners of P's port group (ports.group.owned)", reference="field report R1"),
    Signature("side-channel-protocol", "Mooncake", r"(?:Invalid message format in KVCacheSendingThread|received unexpected message type|Connection listener encountered)",
              "somebody else speaks to P's side channel", "look for scanners and health probes on the KV ports"),
    Signature("bind", "Mooncake", r"(?:Address already in use|KV Cache sending/receiving thread failed to start)", "a port of the group is taken",
              "ports.group.owned names the owner", reference="field report R1"),
    Signature("forced-free", "Mooncake", r"Force freed (?:expired )?request|timed out after [\d.]+ seconds without being sent|Releasing expired KV blocks",
              "P gave KV up that nobody fetched", kind="elsewhere", reference="service.load.no-forced-frees"),
    Signature("late-done", "Mooncake", r"finish req not in reqs to process", "D reported a transfer that P had already given up",
              "raise the abort timeout above D's longest wait, or find why D was late", reference="vllm-ascend#6570"),
    Signature("metaserver", "Mooncake", r"(?:Failed to connect to metaserver|Access metaserver fail|Post metaserver failed)",
              "the layerwise hand-off did not reach the proxy", "check pd_proxy_port and the proxy's log"),
    Signature("nixl", "NIXL", r"NIXL transfer (?:setup )?failed|NIXL_ERR_\w+|nixlBackendError", "a NIXL transfer failed", "check the peer and UCX's transport"),
    # vLLM
    Signature("load-failure", "vLLM", r"Failing \d+ request\(s\) due to KV load failure", "requests failed because their KV did not come", "find the failed pull before it"),
    Signature("engine-dead", "vLLM", r"(?:EngineDeadError|EngineCore encountered a fatal error|Engine core proc .* died|Worker proc .* died|AsyncLLM output_handler failed)",
              "an engine process died", "its log's first traceback says why; look for engines.orphans afterwards"),
    Signature("assert-finished", "vLLM", r"assert req_id in self\.requests", "P died on a late or double release", reference="vllm-ascend#13628"),
    Signature("stream-sync-npu", "vLLM", r"AclrtSynchronizeStreamWithTimeout", "the NPU did not answer in time", reference="vllm-ascend#10013, #15892"),
    Signature("zmq", "vLLM", r"zmq\.error\.ZMQError", "a ZMQ socket failed", "see ports.group.owned where it says 'Address already in use'"),
    Signature("out-of-memory", "vLLM", r"(?:OutOfMemoryError|out of memory)", "memory ran out", "lower gpu-memory-utilization or max-num-seqs"),
    # proxies
    Signature("decoder-lost", "proxy", r"Error during streaming from decoder|Streaming to client interrupted after response started",
              "the decoder failed while it answered; clients got an empty or cut answer", reference="vllm-ascend#13140"),
    Signature("proxy-error", "proxy", r"Error occurred in disagg prefill proxy server|All \d+ attempts failed", "the proxy could not serve a request", "its traceback names the engine"),
    Signature("no-workers", "proxy", r"No available workers", "the router sees no healthy engine of a role", "compare service.health"),
    # seen on healthy deployments
    Signature("ulimit", "vLLM", r"Found ulimit of \d+ and failed to automatically increase|OSError: \[Errno 24\]", "few file descriptors allowed", kind="harmless"),
    Signature("local-segment", "Mooncake", r"Local segment descriptor not found", "printed by Mooncake over tcp before the first transfer", kind="harmless", reference="docs/fidelity.md"),
    Signature("client-gone", "proxy", r"Streaming from decoder .* was cancelled|Client disconnected", "a client went away", kind="harmless"),
)  # fmt: skip


def recognise(text: str) -> Signature | None:
    """The first signature that matches an entry."""
    return next((signature for signature in SIGNATURES if signature.matches(text)), None)
