"""hccn_tool, npu-smi and docker of a lab host: small shell programs that print text rendered from state.

Formats: driver source and public captures (ascend-pd-facts 4.3). Not proven on hardware.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

STAT = (
    "mac_tx_mac_pause_num mac_rx_mac_pause_num mac_tx_pfc_pkt_num "
    + " ".join(f"mac_tx_pfc_pri{n}_pkt_num" for n in range(8)) + " mac_rx_pfc_pkt_num "
    + " ".join(f"mac_rx_pfc_pri{n}_pkt_num" for n in range(8))
    + " mac_tx_total_pkt_num mac_tx_total_oct_num mac_tx_bad_pkt_num mac_tx_bad_oct_num mac_rx_total_pkt_num"
    " mac_rx_total_oct_num mac_rx_bad_pkt_num mac_rx_bad_oct_num roce_rx_rc_pkt_num roce_rx_all_pkt_num roce_rx_err_pkt_num"
    " roce_tx_rc_pkt_num roce_tx_all_pkt_num roce_tx_err_pkt_num roce_cqe_num roce_rx_cnp_pkt_num roce_tx_cnp_pkt_num"
    " roce_unexpected_ack_num roce_out_of_order_num roce_verification_err_num roce_qp_status_err_num roce_new_pkt_rty_num"
    " roce_ecn_db_num nic_tx_all_pkg_num nic_tx_all_oct_num nic_rx_all_pkg_num nic_rx_all_oct_num"
).split()  # fmt: skip
EXTRA = ["cw_total_cnt", "cw_before_correct_cnt", "cw_correct_cnt", "cw_uncorrect_cnt", "cw_bad_cnt", "trans_total_bit", "cw_total_correct_bit", "rx_full_drop_cnt", "pcs_err_cnt", "rx_send_app_good_pkts", "rx_send_app_bad_pkts"]  # fmt: skip
BUSY = ("total", "rc_pkt", "all_pkt", "all_pkg", "all_oct", "cqe", "good_pkts", "total_bit")


@dataclass
class DeviceState:
    """What an NPU's network device would answer."""

    id: int
    ip: str
    link: str = "UP"
    net_health: str = "Success"
    netdetect: str | None = "10.20.0.1"
    tls_switch: int = 0
    link_up: int = 16
    link_down: int = 15
    counters: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def healthy(device: int, host: int) -> DeviceState:
        """Quiet counters that differ a little from device to device, as real siblings do."""
        noise = hashlib.sha256(f"{host}.{device}".encode()).digest()
        counters = {name: 0 for name in (*STAT, *EXTRA)}
        for index, name in enumerate(counters):
            if any(word in name for word in BUSY):
                counters[name] = 900_000_000 + noise[index % 32] * 60_000
        counters["roce_unexpected_ack_num"] = noise[1] % 4
        counters["cw_before_correct_cnt"] = counters["cw_correct_cnt"] = counters["cw_total_correct_bit"] = 1000 + noise[2]
        ups = 15 + noise[3] % 5
        return DeviceState(device, f"10.20.{host}.{device + 1}", link_up=ups, link_down=ups - 1, counters=counters)

    def answers(self) -> dict[str, str]:
        """Query to the text hccn_tool prints."""
        changes = "\n".join(
            f"[devid {self.id}]    Mon Jul 20 09:14:{59 - n:02d} 2026    LINK {'UP' if n % 2 == 0 else 'DOWN'}" for n in range(4)
        )
        stat = "packet statistics:\n" + "\n".join(f"{name}:{self.counters[name]}" for name in STAT)
        extra = "extra statistics info:\n" + "\n".join(f"{name} : {self.counters[name]}" for name in EXTRA)
        return {
            "link": f"link status: {self.link}",
            "net_health": f"net health status: {self.net_health}",
            "netdetect": f"netdetect address: {self.netdetect}" if self.netdetect else "netdetect address not set",
            "tls": f"dev_id:{self.id}, tls switch[{self.tls_switch}](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset), "
            "tls alarm time threshold[60]days",
            "ip": f"ipaddr:{self.ip}\nnetmask:255.255.0.0",
            "link_stat": f"[devid {self.id}]current time        : Mon Jul 20 09:15:02 2026\n"
            f"[devid {self.id}]link up count       : {self.link_up}\n[devid {self.id}]link down count     : {self.link_down}\n"
            f"[devid {self.id}]link change records :\n{changes}",
            "stat": stat,
            "stat_extra": extra + "\ncorrecting_bit_rate : 2.70e-10",
        }


HCCN_TOOL = """#!/bin/sh
# hccn_tool -i DEVICE -QUERY -g, and a link that can be set down and up again
dir=/var/lib/pdlab/hccn/$2; query=${3#-}
[ "$1" = -i ] && [ -d "$dir" ] || { echo "hccn_tool: invalid device $2"; exit 1; }
case "$3 $4 $5" in
  "-link -s down"|"-link -s up") echo "link status: $(echo $5 | tr a-z A-Z)" > "$dir/link"; exit 0 ;;
  "-cfg recovery ") exit 0 ;;
esac
case "$4" in -g) ;; *) echo "hccn_tool: only -g is answered here"; exit 1 ;; esac
[ -r "$dir/$query" ] || { echo "hccn_tool: unknown command $3"; exit 1; }
cat "$dir/$query"
"""

# The process table follows the workers that run: the device of a worker is its place in ASCEND_RT_VISIBLE_DEVICES.
NPU_SMI = """#!/bin/sh
[ "$1" = info ] || { echo "npu-smi: only info is answered here"; exit 1; }
cat /var/lib/pdlab/npu-smi.head
table=$(for dir in /proc/[0-9]*; do
  read -r title < "$dir/comm" 2>/dev/null || continue
  case "$title" in VLLM::Worker*) ;; *) continue ;; esac
  title=$(tr -d '\\000' < "$dir/cmdline")
  while read -r name seat; do [ "$name" = "$title" ] && echo "$seat ${dir#/proc/}"; done < /var/lib/pdlab/seats
done)
for device in $(cat /var/lib/pdlab/devices); do
  found=
  while read -r seat pid; do
    [ "$seat" = "$device" ] || continue
    printf '| %-7s %-17s | %-13s | %-24s | %-23s |\\n' "$device" 0 "$pid" "VLLM::Worker" 3512
    found=1
  done <<TABLE
$table
TABLE
  [ -n "$found" ] || printf '| No running processes found in NPU %-62s|\\n' "$device"
  echo '+===========================+===============+====================================================+'
done
"""

NPU_HEAD = """+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3                 Version: 24.1.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""


def npu_smi_head(devices: list[int]) -> str:
    rows = ""
    for device in devices:
        rows += f"| {device:<5} 910B3               | OK            | 92.1        44                0    / 0             |\n"
        rows += f"| 0                         | 0000:{0xC1 + device:02X}:00.0  | 0           0    / 0          3512 / 65536         |\n"
        rows += "+===========================+===============+====================================================+\n"
    return NPU_HEAD + rows + "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n" + \
        "+===========================+===============+====================================================+\n"  # fmt: skip


# `docker ps` and `docker inspect --format`, from a state file; the template's fields are filled in by name.
DOCKER = r"""#!/usr/bin/env python3
import json, re, sys
state = json.load(open("/var/lib/pdlab/docker.json"))
words = sys.argv[1:]
def field(entry, path):
    for part in path.split("."):
        entry = entry.get(part) if isinstance(entry, dict) else None
    return entry
def fill(template, entry):
    def one(found):
        value = field(entry, found[2])
        return json.dumps(value) if found[1] else str(value)
    return re.sub(r"\{\{(json )?\.([\w.]+)\}\}", one, template)
if words[:1] == ["ps"]:
    if "-q" in words:
        print("\n".join(entry["Id"][:12] for entry in state))
    else:
        template = words[words.index("--format") + 1] if "--format" in words else "{{.Names}}\t{{.Ports}}"
        print("\n".join(fill(template, entry) for entry in state))
elif words[:1] == ["inspect"]:
    template = words[words.index("--format") + 1]
    for name in words[3:]:
        entry = next((e for e in state if e["Id"].startswith(name) or e["Name"] == "/" + name), None)
        if entry is None:
            sys.exit("Error: No such object: " + name)
        print(fill(template, entry))
else:
    sys.exit("docker: only ps and inspect are answered here")
"""


def docker_entry(
    name: str, image: str, pid: int, network: str, published: dict[str, list[tuple[str, int]]], mounts: list[str]
) -> dict[str, object]:
    """A container as `docker inspect` has it, in the parts that are asked for."""
    ports = {inner: [{"HostIp": address, "HostPort": str(port)} for address, port in outer] for inner, outer in published.items()}
    words = ", ".join(f"{address}:{port}->{inner}" for inner, outer in published.items() for address, port in outer)
    return {
        "Id": hashlib.sha256(name.encode()).hexdigest(), "Name": f"/{name}", "Names": name, "Ports": words,
        "State": {"Pid": pid}, "HostConfig": {"NetworkMode": network}, "NetworkSettings": {"Ports": ports},
        "Mounts": [{"Type": "bind", "Destination": mount} for mount in mounts], "Config": {"Image": image},
    }  # fmt: skip


def docker_state(entries: list[dict[str, object]]) -> str:
    return json.dumps(entries, indent=1)
