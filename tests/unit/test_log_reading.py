"""Log lines of every shape become entries; chains are read to their cause, storms told, codes translated, nothing dropped."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from pdgate.connectors.catalogue import SIGNATURES, recognise
from pdgate.connectors.codes import translate
from pdgate.facts.model import Clock, Interval
from pdgate.facts.parse.logline import parse_log
from pdgate.facts.shell import Shells
from pdgate.inventory.connection import Connection
from pdgate.rules import logs
from pdgate.rules.logs import chains, known_errors, moment, no_storm, storms, told, unknown_errors
from pdgate.serving.logs import LogMark, LogRead, Logs, mark, since
from tests.build import facts

DAY = datetime.date(2026, 1, 2)
PULL = "E0102 10:00:00.{us:06d} 77 ascend_direct_transport.cpp:1107] Connect timeout to: 10.0.0.1:{port}, errmsg: error_code[103901] timeout 10000ms"
CHAIN = [
    "E0102 10:00:00.000100 77 comm_channel.cc:201] HcclCommPrepare failed, ret 0x9",
    "E0102 10:00:00.000200 77 channel_manager.cc:88] CreateChannel failed, ret: 103901",
    "(Worker_DP0_TP1 pid=9) ERROR 01-02 10:00:00 [mooncake_connector.py:960] Mooncake transfer failed for request. remote_request_id=cmpl-"
    "270f82b6-18dc-4f09-b7f0-90fe6a8f0001-0-aa, ret=-1.",
]


FORCED = "(Worker pid=9) ERROR 01-02 10:00:04 [m.py:1] Force freed expired request: cmpl-1. Reason: x"


def window(*lines: str, **unknown: str) -> Logs:
    return Logs({"d0": list(lines)}, unknown, DAY)


@pytest.mark.parametrize(
    "line, shape, level, at, process",
    [
        ("(APIServer pid=1) (Worker_DP0_TP1 pid=9) ERROR 12-31 23:59:59 [a.py:7] boom", "vllm", "ERROR", "2025-12-31T23:59:59", "Worker_DP0_TP1"),
        ("INFO:     Application startup complete.", "uvicorn", "INFO", None, ""),
        ("E0102 03:04:05.678901 2548307 t.cpp:820] Failed", "glog", "ERROR", "2026-01-02T03:04:05.678901", ""),
        ("E20251231 03:04:05.678901 2548307 t.cpp:820] Failed", "glog", "ERROR", "2025-12-31T03:04:05.678901", ""),
        ("[ERROR] HCCL(38011,python):2025-12-31-12:47:33.021.978 [s.cc:601] [87033]no", "plog", "ERROR", "2025-12-31T12:47:33.021978", "HCCL"),
        ("2026-01-02 10:00:00,123 WARNING [proxy] slow", "python", "WARNING", "2026-01-02T10:00:00.123", ""),
        ("2026-01-02 10:00:00  INFO router: started", "python", "INFO", "2026-01-02T10:00:00", ""),
    ],
)
def test_every_shape_is_read_and_a_missing_year_is_the_nearest(line: str, shape: str, level: str, at: str | None, process: str) -> None:
    [entry] = parse_log("d0", [line], DAY)
    assert (entry.shape, entry.level, entry.process) == (shape, level, process)
    wanted = datetime.datetime.fromisoformat(at).replace(tzinfo=datetime.UTC).timestamp() if at else None
    assert entry.at == (pytest.approx(wanted, abs=1e-6) if wanted else None)


def test_a_traceback_is_one_error_also_when_nobody_gave_it_a_level() -> None:
    lines = ["INFO:     fine", "Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no such thing"]
    [entry] = parse_log("proxy", lines, DAY)
    assert entry.is_error and entry.said == "ValueError: no such thing"
    repeated = [f"(EngineCore pid=3) ERROR 01-02 10:00:00 [core.py:1] {text}" for text in lines[1:]]
    assert len(parse_log("d0", repeated, DAY)) == 1


def test_a_chain_is_told_by_its_first_cause_with_its_codes_and_request() -> None:
    [found] = known_errors("d0", window(*CHAIN))
    assert "1 x hccl-prepare (HCCL): HcclCommPrepare failed, ret 0x9" in found.seen
    assert "HCCL 0x9: timeout" in found.seen and "HIXL 103901: timeout" in found.seen and "270f82b6" in found.seen
    assert len(chains(parse_log("d0", CHAIN, DAY))) == 1


def test_a_storm_is_several_peers_within_20_ms_and_not_one_peer_often() -> None:
    burst = [PULL.format(us=us, port=port) for us, port in ((100, 20191), (9000, 20224), (19000, 20341))]
    [found] = no_storm("d0", window(*burst))
    assert "3 peers" in found.seen and "103901: timeout" in found.seen
    assert not list(known_errors("d0", window(*burst)))  # told once, by the storm
    same_peer = [PULL.format(us=us, port=20191) for us in (100, 200, 300)]
    apart = [PULL.format(us=us, port=port) for us, port in ((0, 20191), (30000, 20224), (60000, 20341))]
    assert not storms(parse_log("d0", same_peer, DAY)) and not storms(parse_log("d0", apart, DAY))


def test_an_unknown_error_is_reported_and_a_harmless_one_is_not() -> None:
    mystery = "(EngineCore pid=3) ERROR 01-02 10:00:0{} [flux.py:1] underrun on lane 4"
    [found] = unknown_errors("d0", window(mystery.format(1), FORCED, mystery.format(4)))
    assert found.seen.startswith("2 x underrun on lane")
    harmless = "(APIServer pid=3) ERROR 01-02 10:00:00 [u.py:1] Found ulimit of 1024 and failed to automatically increase"
    assert not list(unknown_errors("d0", window(harmless))) and not list(known_errors("d0", window(harmless)))


def test_a_log_with_a_gap_is_unknown_and_not_clean() -> None:
    with pytest.raises(logs.UnknownFact, match="was truncated"):
        list(logs.of_all_units(known_errors, window("INFO:     fine", d0="d0: /x was truncated")))


def test_codes_are_translated_where_they_stand_and_other_numbers_are_left_alone() -> None:
    assert translate("HcclCommPrepare ret 0x9 … error_code[103901]") == ["HCCL 0x9: timeout", "HIXL 103901: timeout"]
    assert translate("call trace: hcclRet -> 19") == ["HCCL 19: network call failed"]
    assert translate("rtStreamSynchronizeWithTimeout: ErrCode=507046") == ["ACL runtime 507046: stream synchronisation timed out"]
    assert translate("served 103 requests, pid 2548307, HTTP 200") == []


def test_names_of_signatures_are_unique_and_each_is_reachable() -> None:
    assert len({signature.name for signature in SIGNATURES}) == len(SIGNATURES)
    assert recognise("Mooncake transfer failed for request. remote_request_id=x, ret=-1. ").name == "pull-failed"  # type: ignore[union-attr]
    assert recognise("all is well") is None


def test_a_log_time_becomes_an_interval_in_our_clock() -> None:
    clock = Clock(offset_s=Interval(low=8.9, high=9.1), utc_offset="+0800", localtime="Asia/Shanghai")
    [entry] = parse_log("d0", [CHAIN[2]], DAY)
    seen = moment(entry, facts(clock=clock))
    truth = datetime.datetime(2026, 1, 2, 2, 0, 0, tzinfo=datetime.UTC).timestamp() - 9  # 10:00 at +8 h is 02:00 UTC; the host is 9 s ahead
    assert seen is not None and seen.low <= truth <= seen.high and seen.radius < 0.7


@pytest.mark.parametrize("line", ["2026-01-02 02:00:00 ERROR vllm_router_rs::routers: failed", "2026-01-02T02:00:00Z ERROR router: failed"])
def test_a_router_writes_utc_whatever_the_zone_of_its_host(line: str) -> None:
    clock = Clock(offset_s=Interval(low=-0.1, high=0.1), utc_offset="+0800", localtime="Asia/Shanghai")
    [entry] = parse_log("proxy p", [line], DAY)
    seen = moment(entry, facts(clock=clock))
    assert seen is not None and seen.low <= datetime.datetime(2026, 1, 2, 2, 0, 0, tzinfo=datetime.UTC).timestamp() <= seen.high


def test_errors_of_hosts_eight_hours_apart_are_told_in_the_order_in_which_they_began() -> None:
    ahead = facts(clock=Clock(offset_s=Interval(low=28799.9, high=28800.1), utc_offset="+0000", localtime="UTC"))
    right = facts(clock=Clock(offset_s=Interval(low=-0.1, high=0.1), utc_offset="+0000", localtime="UTC"))
    line = "(Worker pid=7) ERROR 01-02 {} [mooncake_connector.py:725] Failed to transfer KV cache for request r"
    logs = Logs({"d0": [line.format("18:00:03")], "p0": [line.format("10:00:05")], "proxy p": ["Traceback (most recent call last):"]}, {}, DAY)
    seen = told(logs, {"d0": ahead, "p0": right, "proxy p": right})
    assert [one.unit for one in seen] == ["d0", "p0", "proxy p"]
    assert seen[0].at is not None and seen[1].at is not None and 1.0 < seen[1].at[0] - seen[0].at[0] < 3.0
    assert seen[2].at is None and "no time" in seen[2].doubt


# -- reading by offset, across rotation and truncation ---------------------------------------------------------------------

HERE = Connection(kind="local", name="here")


def reads(path: Path, start: LogMark) -> LogRead:
    found = since(Shells("/dev/null"), HERE, [start])[str(path)]
    assert isinstance(found, LogRead)
    return found


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, LogMark]:
    path = tmp_path / "engine.log"
    path.write_text("old 1\nold 2\n")
    start = mark(Shells("/dev/null"), HERE, [str(path)])[str(path)]
    assert isinstance(start, LogMark)
    return path, start


def append(path: Path, text: str) -> None:
    with path.open("a") as out:
        out.write(text)


def test_only_new_lines_are_read_and_reading_goes_on_from_there(log: tuple[Path, LogMark]) -> None:
    path, start = log
    append(path, "new 1\r\nnew\rnew 2\n")
    first = reads(path, start)
    assert (first.lines, first.gap) == (["new 1", "new", "new 2"], "")
    append(path, "new 3\n")
    assert first.end is not None and reads(path, first.end).lines == ["new 3"]
    assert reads(path, start).lines[-1] == "new 3"


def test_a_rotated_log_is_read_to_its_end_and_the_new_one_from_its_start(log: tuple[Path, LogMark]) -> None:
    path, start = log
    append(path, "before\n")
    path.rename(path.with_suffix(".log.1"))
    path.write_text("after\n")
    read = reads(path, start)
    assert (read.lines, read.gap) == (["before", "after"], "")


def test_a_log_replaced_without_a_trace_or_truncated_is_read_with_the_gap_named(log: tuple[Path, LogMark]) -> None:
    path, start = log
    fresh = path.with_name("fresh")
    fresh.write_text("replaced\n")
    fresh.replace(path)
    read = reads(path, start)
    assert read.lines == ["replaced"] and "was replaced" in read.gap
    again = mark(Shells("/dev/null"), HERE, [str(path)])[str(path)]
    assert isinstance(again, LogMark)
    path.write_text("truncated, and grown longer than before\n")  # the same inode: only what stands before the mark tells
    read = reads(path, again)
    assert read.lines == ["truncated, and grown longer than before"] and "was truncated" in read.gap
