"""What a lab engine logs when a defect says so: shapes of Mooncake, HCCL and HIXL lines (ascend-pd-facts 5.4, field report R2)."""

from __future__ import annotations

from lab.engine.vlog import VLog, glog

TRANSPORT = "ascend_direct_transport.cpp"


def say(what: str, log: VLog) -> None:
    """`connect-storm`: three peers at once; `hccl-chain`: R2's chain, cause first; `mystery`: an error nobody knows."""
    if what == "connect-storm":
        for port in (20191, 20224, 20341):
            glog("E", f"{TRANSPORT}:1107", f"Connect timeout to: 10.77.0.11:{port}, errmsg: error_code[103901] timeout 10000ms")
    elif what == "hccl-chain":
        glog("E", "comm_channel.cc:201", "HcclCommPrepare failed, ret 0x9")
        glog("E", "channel_manager.cc:88", "CreateChannel failed, ret: 103901")
        glog("E", "channel_msg_handler.cc:412", "DoConnect failed, error_code[103901] timeout 10000ms")
        glog("E", f"{TRANSPORT}:1120", "Failed to connect to target: 10.77.0.11:20191, status: 103901")
    elif what == "mystery":
        log.error("flux_capacitor.py:88", "Flux underrun on lane 3: 1.21 GW short")
    else:
        raise ValueError(f"nothing to say about {what!r}")
