"""Triggers: they wait on the faulted host until a request is in a phase of its life, and the fault strikes in the same shell.

Each looks every few milliseconds at one thing the host itself knows: a line of the engine's log, a number of its /metrics, its TCP
connections, the bytes that moved on them. That the phase really was hit is proved afterwards (chaos/phases.py).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pdgate.serving.logs import FIND

WAIT_S = 20


@dataclass(frozen=True)
class Aim:
    """`watch` is sh that sets `hit` to what it saw, in one line, once the moment has come, at most WAIT_S from now; else it leaves it empty."""

    what: str  # in words: what is waited for
    watch: str
    tag: str

    def script(self) -> str:
        """sh that waits; the shot follows it, and `epilogue` after that."""
        return f"hit=; fifo=$PDGATE_GUARD/{self.tag}/aim; until_s=$(($(uptime_s) + {WAIT_S}))\nwaiting() {{ [ \"$(uptime_s)\" -lt $until_s ]; }}\n{self.watch}\n"

    def epilogue(self) -> str:
        """sh after the shot: what triggered it goes beside the guard, for the evidence."""
        return f"""
[ -z "${{tail:-}}" ] || kill $tail 2>/dev/null; rm -f "$fifo"
[ -n "$hit" ] || {{ echo {shlex.quote(f"not seen within {WAIT_S} s: {self.what}; no request came that far")}; exit 1; }}
echo "$hit" >$PDGATE_GUARD/{self.tag}/hit
"""


def log_line(log: str, text: str, tag: str, then: str = "") -> Aim:
    """Once a line with `text` is written to the log (vllm-ascend's `Delaying free`, `KV cache transfer for request`).

    The log is followed with tail -F, looking every 2 ms: on overlay file systems nothing wakes it. `then`: sh that goes on from there.
    """
    watch = f"""{FIND}
find_log {shlex.quote(log)} || {{ echo 'the log {log} cannot be read, so nothing can be aimed'; exit 1; }}
mkfifo "$fifo"
tail --version 2>/dev/null | grep -q GNU || {{ echo "the host's tail cannot follow in milliseconds (GNU coreutils needed): nothing can be aimed"; exit 1; }}
timeout {WAIT_S} tail -n0 -s 0.002 -F "$path" >"$fifo" 2>/dev/null & tail=$!
while read -r line; do case $line in *{text.replace(" ", chr(92) + " ")}*) hit=$line; break ;; esac; done <"$fifo"
[ -z "$hit" ] || {{ {then or ":"}
}}"""
    return Aim(f"a line with '{text}' in {log}", watch, tag)


def metric_above(url: str, name: str, tag: str, grows: bool = False) -> Aim:
    """Once the engine's /metrics say more than 0 for `name` (or, with `grows`, anything but what they said at first).

    One curl asks again and again over one connection (a fragment that counts makes one URL many, and is never sent): starting a process
    for each look would take longer than the moment may.
    """
    watch = f"""command -v curl >/dev/null || {{ echo 'no curl on the host: its metrics cannot be followed in milliseconds'; exit 1; }}
grep --version 2>/dev/null | grep -q GNU || {{ echo "the host's grep cannot follow in milliseconds (GNU grep needed): nothing can be aimed"; exit 1; }}
mkfifo "$fifo"
timeout {WAIT_S} curl -fsSN --fail-early -w '\n# looked\n' {shlex.quote(f"{url}/metrics#[1-999999]")} 2>/dev/null | grep --line-buffered -E '^({name}[ {{]|# looked)' >"$fifo" & tail=$!
base={"" if grows else "none"}; now=; looks=0
while read -r line; do case $line in
  '# looked') looks=$((looks + 1)); base=${{base:-$now}}
    case $base in none) case $now in *[1-9]*) hit="{name}$now"; break ;; esac ;; "$now") ;; *) hit="{name}$base ->$now"; break ;; esac; now= ;;
  *) now="$now ${{line##* }}" ;;
esac; done <"$fifo"
[ $looks -gt 0 ] || {{ echo '{url}/metrics does not answer on the host'; exit 1; }}"""
    return Aim(f"{name} above {'its value' if grows else '0'} at {url}/metrics", watch, tag)


def unread(ports: tuple[int, ...]) -> str:
    """sh behind a first moment: once bytes that nobody reads wait on one of these ports of the host (also where nobody accepts)."""
    some = "|".join(f"{port:04X}" for port in ports)
    return (
        "held=$hit; hit=; while waiting; do "
        f"line=$(grep -m1 -E ': [0-9A-F]+:({some}) [0-9A-F]+:[0-9A-F]+ 01 [0-9A-F]+:0*[1-9A-F]' /proc/net/tcp /proc/net/tcp6 2>/dev/null) && {{ hit=\"$held, then $line\"; break; }}; done"
    )


BYTES = """
command -v ss >/dev/null || {{ echo 'no ss (iproute2) on the host: bytes on its sockets cannot be followed'; exit 1; }}
moved() {{ # bytes that went over TCP between this host and the peers, but for HTTP, side channel and ssh
  ss -Htin state established '( {peers} )' {but} 2>/dev/null | awk '{{for (i = 1; i <= NF; i++) if ($i ~ /^bytes_(acked|received):/) {{split($i, a, ":"); s += a[2]}}}} END {{printf "%d", s}}'
}}
"""


def byte_counter(peers: tuple[str, ...], but: tuple[int, ...]) -> str:
    """sh that defines `moved`: bytes so far on the live connections to the peers, without those ports on either side."""
    ports = " ".join(f"and not sport = :{port} and not dport = :{port}" for port in sorted({22, *but}))
    return BYTES.format(peers=" or ".join(f"dst {peer}" for peer in peers), but=shlex.quote(f"( {ports.removeprefix('and ')} )"))


def bytes_moving(peers: tuple[str, ...], but: tuple[int, ...], least: int, tag: str) -> Aim:
    """Once `least` bytes have moved between the host and the peers beside HTTP and side channel: KV of a request is on its way."""
    watch = f"""{byte_counter(peers, but)}
base=$(moved); last=$base
while waiting; do
  now=$(moved); [ "$now" -lt "$last" ] && base=0  # connections have ended, and their bytes with them
  if [ $((now - base)) -ge {least} ]; then hit="bytes $((now - base))"; break; fi
  [ "$now" -lt "$base" ] && base=$now
  last=$now
done"""
    return Aim(f"{least} bytes on the way between this host and {', '.join(peers)}", watch, tag)
