"""Faults on a running lab: applied for certain, undone for certain, also when the controller is killed at any step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.guard import FOLDER
from chaos.injection import STEPS
from lab.control import Lab, start

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("chaos")]
ROOT = Path(__file__).resolve().parent.parent.parent
GUARD_S = 4


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    running = start("lab", [])
    yield running
    running.stop()


def in_lab(lab: Lab, code: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python inside the lab's network, with `lab`, `hand` and tests.lab.faulted at hand."""
    head = (
        f"import os, sys, time, tempfile\nfrom pathlib import Path\n{lab.joining}\n"
        "from tests.lab.faulted import *\nhand = hand_of(lab, Path(tempfile.mkdtemp()))\n"
    )
    return subprocess.run([sys.executable, "-c", head + code], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_every_fault_is_applied_proved_and_leaves_nothing(lab: Lab) -> None:
    done = in_lab(lab, """
for kind in KINDS:
    before = state_of(hand)
    fault = a_fault(kind, hand, "t1")
    steps = []
    with injected(fault, hand, "t1", "pdgate-test", 60, steps.append) as applied:
        assert applied.evidence and state_of(hand) != before, kind + ": no effect"
    assert steps == list(STEPS), (kind, steps)
    after = state_of(hand)
    assert after == before, (kind, before, after)
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


# Every kind of fault at once, killed at each of the nine steps: 90 points.
ALWAYS = ("arm", "verify-applied", "observe", "disarm")


@pytest.mark.parametrize("step", [pytest.param(step, marks=[] if step in ALWAYS else [pytest.mark.nightly]) for step in STEPS])
def test_controllers_killed_at_any_step_leave_nothing_once_the_guards_have_fired(lab: Lab, step: str) -> None:
    done = in_lab(lab, f"""
before = state_of(hand)
def die(now):
    if now == {step!r}:
        os.kill(os.getpid(), {signal.SIGKILL})
dying = {{}}
for kind in KINDS:  # a controller each, all at the same time
    faults = a_fault(kind, hand, "k-" + kind)
    dying[kind] = os.fork()
    if dying[kind] == 0:
        with injected(faults, hand, "k-" + kind, "pdgate-test", {GUARD_S}, die):
            pass
        os._exit(0)
for kind, pid in dying.items():
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -{signal.SIGKILL}, kind
if {step!r} == "arm":  # persisted and not armed: nothing was hurt yet, and --cleanup finds the notes
    assert all("k-" + kind in leftovers(hand) for kind in KINDS), leftovers(hand)
    clean_up(hand)
until = time.monotonic() + {GUARD_S} + 8
while (after := state_of(hand)) != before and time.monotonic() < until:
    time.sleep(0.5)
assert after == before, (before, after)
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_killed_process_is_restarted_by_the_guard_of_a_dead_controller(lab: Lab) -> None:
    done = in_lab(lab, f"""
hand.must("setsid sh -c 'exec sleep 7777' </dev/null >/dev/null 2>&1 &", "sleeper")
time.sleep(0.3)
pid = hand.must("for p in /proc/[0-9]*; do tr '\\\\0' ' ' <$p/cmdline | grep -q '^sleep 7777' && basename $p; done; true", "find").split()[0]
victims = tuple(victims_from(hand.must(IDENTIFY.format(pids=pid), "identify")))
fault = Kill("sleeper", "d0", "api", victims, "setsid sh -c 'exec sleep 8888' &", None)
def die(step):
    if step == "observe":
        os.kill(os.getpid(), {signal.SIGKILL})
with injected(fault, hand, "r1", "pdgate-test", 2, die):
    pass
""")  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr[-800:]
    time.sleep(4)
    seen = in_lab(lab, "print(hand.must(\"cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '\", 'ps'), leftovers(hand))").stdout
    assert "sleep 8888" in seen and "sleep 7777" not in seen and "r1" not in seen


def test_what_survives_a_reboot_is_undone_after_one(lab: Lab) -> None:
    done = in_lab(lab, f"""
fault = a_fault("leftovers", hand, "b1")
def die(step):
    if step == "observe":
        os.kill(os.getpid(), {signal.SIGKILL})
with injected(fault, hand, "b1", "pdgate-test", 600, die):
    pass
""")  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr[-800:]
    # The reboot: every process of the guard is gone, the boot id is another, the boot replay runs.
    code = f"""
assert "pdgate-guard" in hand.must("ls /etc/cron.d; true", "cron")
hand.must("read pid ticks <{FOLDER}/b1/timer; kill -9 $pid; echo another-boot >{FOLDER}/b1/boot", "reboot")
print(hand.must("sh -c \\"$(sed 's/.*root //' /etc/cron.d/pdgate-guard)\\"", "replay"))
print("left:", leftovers(hand), hand.run("ls /tmp/mooncake_chaos /etc/cron.d/pdgate-guard").code)
"""
    seen = in_lab(lab, code)
    assert seen.returncode == 0 and "left: [] 2" in seen.stdout, seen.stdout + seen.stderr[-800:]


def test_a_reused_pid_and_a_foreign_folder_are_left_alone(lab: Lab) -> None:
    done = in_lab(lab, """
from dataclasses import replace
fault = a_fault("stall", hand, "x1")
wrong = Stall(fault.target, fault.host, fault.part, tuple(replace(v, ticks="1") for v in fault.victims))
try:
    with injected(wrong, hand, "x1", "pdgate-test", 30):
        raise SystemExit("a process that was not meant was stopped")
except NotApplied as error:
    assert "not the one that was meant" in str(error), error
hand.must("mkdir -p /var/lib/pdgate/x2 && echo somebody else >/var/lib/pdgate/x2/owner", "foreign")
try:
    with injected(fault, hand, "x2", "pdgate-test", 30):
        raise SystemExit("foreign state was used")
except GuardFailed as error:
    assert "not pdgate's" in str(error), error
assert clean_up(hand) == [] and hand.run("cat /var/lib/pdgate/x2/owner").stdout == "somebody else\\n"
hand.must("rm -r /var/lib/pdgate", "tidy")
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_fault_without_effect_is_never_a_pass(lab: Lab) -> None:
    done = in_lab(lab, """
from dataclasses import dataclass
@dataclass(frozen=True)
class Blunt(Stall):
    def inject(self):
        return "true"  # the negative control: it says that it hurt, and did not
fault = a_fault("stall", hand, "n1")
try:
    with injected(Blunt(fault.target, fault.host, fault.part, fault.victims), hand, "n1", "pdgate-test", 30):
        raise SystemExit("observed a fault that was not there")
except NotApplied as error:
    assert "shows no effect" in str(error), error
assert leftovers(hand) == []
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_shot_that_comes_too_late_for_its_phase_proves_nothing(lab: Lab) -> None:
    done = in_lab(lab, """
stage = stage_of(lab, Path(tempfile.mkdtemp()))
p = stage.deployment.engine("p0/dp0")
def late(facts, tag):  # the negative control: by then D has the KV and decodes
    aim = log_line(p.log, phases.HELD, tag, "sleep 0.6")
    return Kill(p.name, p.host, "engine", stage.victims(p, "engine", facts), p.restart, p.http_port, aim)
found = hit(stage, "late", late, hurt_s=0.3)
try:
    phases.was_prefilled(stage, found)
    raise SystemExit("a phase that was missed was taken for hit")
except UnknownFact as error:
    assert "the phase was missed: d0/dp0 had the KV" in str(error), error
assert found.good_s is not None and not found.missing
unlock(stage)
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_fault_that_nobody_came_to_proves_nothing(lab: Lab) -> None:
    done = in_lab(lab, """
stage = stage_of(lab, Path(tempfile.mkdtemp()))
try:
    run(stage, "aside", lambda facts, tag: Partition("p0", ("10.77.0.21",), tag, 30, "in", (28999,)), hurt_s=1, after_s=3)
    raise SystemExit("a cut where nobody goes was taken for a fault")
except UnknownFact as error:
    assert "met nobody" in str(error), error
assert leftovers(stage.hand("p0")) == []
unlock(stage)
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_toxiproxy_takes_new_connections_only_and_says_how_many_end_with_it(lab: Lab) -> None:
    done = in_lab(lab, """
import socket, threading
echo = "import socketserver as s; s.ThreadingTCPServer.allow_reuse_address = True; s.ThreadingTCPServer(('10.77.0.21', 9123), type('E', (s.StreamRequestHandler,), {'handle': lambda self: [self.wfile.write(line) for line in self.rfile]})).serve_forever()"
hand.must(f'setsid python3 -c "{echo}" </dev/null >/dev/null 2>&1 & echo $! >/run/echo.pid; sleep 1', "echo server")
def connected():
    return socket.create_connection(("10.77.0.21", 9123), timeout=5)
def takes_s(connection):
    began = time.monotonic()
    connection.sendall(b"hello\\n")
    assert connection.recv(16) == b"hello\\n", "no echo"
    return time.monotonic() - began
old = connected()
takes_s(old)
with injected(Toxic("d0", "10.77.0.21", (9123,), "e1", "latency", {"latency": 400}), hand, "e1", "pdgate-test", 60) as applied:
    new = connected()
    assert takes_s(new) >= 0.4, "a new connection is not slowed"
    assert takes_s(old) < 0.3, "an old connection was touched"
assert applied.cut == 1, applied
assert new.recv(16) == b"" and takes_s(old) < 0.3 and takes_s(connected()) < 0.3
def keep_coming():  # a client that comes back
    try:
        old.sendall(b"hello\\n")
        seen.append(old.recv(16))
    except ConnectionError as error:
        seen.append(error)
    time.sleep(0.2)
    seen.append(connected())
    seen.append(takes_s(seen[1]))
seen = []
thread = threading.Thread(target=lambda: (time.sleep(1.0), keep_coming()))
thread.start()
with injected(Toxic("d0", "10.77.0.21", (9123,), "e2", "latency", {"latency": 400}, renew=True), hand, "e2", "pdgate-test", 60) as applied:
    thread.join()
    assert isinstance(seen[0], ConnectionError) and seen[2] < 0.3, ("the standing one is reset, and before the toxic comes its successor is not slowed", seen)
    assert applied.renewed >= 1 and takes_s(seen[1]) >= 0.4, (applied, "the successor is hurt")
assert applied.cut == 1, applied
hand.must("kill $(cat /run/echo.pid); rm /run/echo.pid", "echo server")
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_two_runs_cannot_meet_and_the_lock_of_a_dead_run_is_nobodys(lab: Lab) -> None:
    done = in_lab(lab, """
def held(what, *words):
    try:
        what()
    except Held as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("not refused")
first, second = this_run("first"), this_run("second")
dead, elsewhere = replace(first, run="dead", pid=2**22 + 1), replace(first, run="elsewhere", place="0")
take(hand, first)
held(lambda: take(hand, second), "first (pid", "is alive")
held(lambda: refuse_the_living(hand, True), "is alive", "nothing was undone")
take(hand, first)
drop(hand, first)
take(hand, dead)
refuse_the_living(hand, False)
take(hand, second)
assert holder(hand)[0] == second
drop(hand, second)
take(hand, elsewhere)
held(lambda: take(hand, second), "cannot be looked at from here", "--break-lock")
held(lambda: refuse_the_living(hand, False), "--break-lock")
refuse_the_living(hand, True)
hand.must("lock_break", "lock")
hand.must("lock_take old 0; sleep 1.1", "past its time")
take(hand, second)
drop(hand, second)
assert hand.run("ls /run/pdgate-chaos.lock").code != 0
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_fault_that_somebody_else_undoes_proves_nothing(lab: Lab) -> None:
    done = in_lab(lab, """
for undo in ("guard_fire u1 cleanup", "guard_replay all cleanup"):
    try:
        with injected(a_fault("stall", hand, "u1"), hand, "u1", "pdgate-test", 60):
            hand.must(undo, "undo")
    except NotApplied as error:
        assert "undone by somebody else" in str(error), error
    else:
        raise AssertionError("it passed")
assert leftovers(hand) == []
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]


def test_an_experiment_that_is_interrupted_undoes_what_it_did_and_says_so(lab: Lab, tmp_path: Path) -> None:
    done = in_lab(lab, f"""
import signal, subprocess
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us in the background had it ignored, and so would the run
words = ["chaos", "--chaos", "--hosts=" + lab.inventory, "-k", "recovery.decode-stalled", "--bundle={tmp_path}/b", "-q", "-p", "no:cacheprovider"]
run = subprocess.Popen([sys.executable, "-m", "pytest", *words], cwd={str(ROOT)!r}, stdout=subprocess.PIPE, text=True)
stopped = "grep -l '^State:.T' /proc/[0-9]*/status 2>/dev/null"
until = time.monotonic() + 60
while not hand.run(stopped).stdout and time.monotonic() < until:
    time.sleep(0.2)
try:  # while it is alive, cleanup keeps its hands off
    refuse_the_living(hand, True)
except Held as error:
    assert "is alive" in str(error)
else:
    raise AssertionError("cleanup would have undone a fault of a run that is alive")
run.send_signal(signal.SIGINT)
time.sleep(0.3)
run.send_signal(signal.SIGINT)  # people press it twice; what is being undone is undone all the same
said = run.communicate(timeout=60)[0]
assert run.returncode == 2, (run.returncode, said)
assert not hand.run(stopped).stdout and leftovers(hand) == []
""")  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    [check] = [one for one in json.loads((tmp_path / "b" / "verdict.json").read_text())["checks"] if one["id"] == "recovery.decode-stalled"]
    assert check["verdict"] == "invalid" and "interrupted: SIGSTOP engine of d0" in check["reason"] and "undone" in check["reason"]


def test_cleanup_undoes_what_a_killed_run_left_and_says_what(lab: Lab) -> None:
    assert in_lab(lab, f"""
def die(step):
    if step == "observe":
        os.kill(os.getpid(), {signal.SIGKILL})
with injected(a_fault("partition", hand, "c1"), hand, "c1", "pdgate-test", 600, die):
    pass
""").returncode == -signal.SIGKILL  # fmt: skip
    run = in_lab(lab, f"""
import pytest
os.chdir({str(ROOT)!r})
sys.exit(pytest.main(["chaos", "--cleanup", "--hosts=" + lab.inventory, "-q", "-p", "no:cacheprovider"]))
""")  # fmt: skip
    assert run.returncode == 0 and "d0: undone: c1: pdgate-test" in run.stdout, run.stdout + run.stderr[-500:]
    assert in_lab(lab, "assert leftovers(hand) == []; print(hand.must('nft list tables', 'nft'))").stdout.strip() == ""
