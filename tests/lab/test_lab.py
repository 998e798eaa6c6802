"""The embedded lab: quick to boot, honest, harmless, and gone when its owner is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.control import Lab, start

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("lab")]
ROOT = Path(__file__).resolve().parent.parent.parent


def judge(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args], cwd=ROOT, capture_output=True, text=True, timeout=240
    )


def processes() -> dict[int, str]:
    """Pid and start time of every process of the machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()[19]
        except OSError:
            continue
    return found


def below(root: int) -> set[int]:
    """Descendants of a process."""
    parents = {}
    for pid in processes():
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def machine_traces() -> set[str]:
    """Links, mounts and files that a lab could leave on the machine."""
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    files = {str(path) for folder in ("/tmp", "/run", "/dev/shm") for path in Path(folder).glob("*") if "pytest" not in path.name}
    return links | mounts | files


def test_nothing_is_left_after_the_owner_is_killed() -> None:
    before = machine_traces()
    code = "from lab.control import start\nimport time\nstart('lab', [])\nprint('up', flush=True)\ntime.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout and owner.stdout.readline().strip() == "up"
    family = {pid: processes().get(pid) for pid in below(owner.pid)}
    assert len(family) > 30
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (alive := {pid for pid, ticks in processes().items() if family.get(pid) == ticks}):
        time.sleep(0.1)
    assert not alive
    assert machine_traces() <= before | {
        path for path in machine_traces() if "pdgate" not in path and "pdlab" not in path and "netns" not in path
    }


def test_a_lab_that_is_interrupted_while_it_boots_leaves_nothing() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom lab.control import start\nstart('lab', [], keep=True)"
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    started: set[int] = set()
    until = time.monotonic() + 20
    while len(started := started | below(run.pid)) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    assert run.wait(30) != 0 and len(started) >= 4
    until = time.monotonic() + 10
    while (left := started & processes().keys()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


@pytest.fixture(scope="module")
def lab() -> Lab:
    lab = start("lab", [])
    yield lab
    lab.stop()


def test_a_lab_boots_in_ten_seconds_and_fits_in_memory(lab: Lab) -> None:
    # A loaded machine is slower; the README's figure comes from benchmarks/lab.py.
    assert lab.seconds < 30
    total_kib = 0
    for pid in below(lab.pid):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total_kib += int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")))
    assert 50_000 < total_kib < 1_500_000


def test_the_kernel_knows_nothing_of_it_outside(lab: Lab) -> None:
    assert "pdlab0" not in {path.name for path in Path("/sys/class/net").iterdir()}
    assert Path(f"/proc/{lab.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def written(lab: Lab, host: str) -> dict[str, tuple[float, int]]:
    """Every file the host has written since it was booted: the upper layer of its root, /tmp, /dev/shm and /run."""
    found = {}
    init = next(pid for pid in below(lab.pid) if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:4] == [
        b"-m", b"lab.host", f"/run/pdlab/hosts/{host}/spec.json".encode()])  # fmt: skip
    for top in (lab.upper(host), *(Path(f"/proc/{init}/root{path}") for path in ("/tmp", "/dev/shm", "/run"))):
        for path in top.rglob("*"):
            # Engines log what they serve; nothing else may change. A tree below /tmp is seen there too, read-only: it is ours.
            ours = f"/root{ROOT}/" in str(path)
            if path.is_file() and not path.is_symlink() and not any(log in str(path) for log in ("/var/log/", "/ascend/log/")) and not ours:
                found[str(path)] = (path.stat().st_mtime, path.stat().st_size)
    return found


def test_an_acceptance_run_writes_nothing_on_a_host() -> None:
    """Traced from outside: every byte a lab host writes lies in its overlay's upper layer or one of its tmpfs."""
    code = (
        "import sys, pytest\nfrom pathlib import Path\nfrom lab.control import start\nfrom tests.lab.test_lab import written\n"
        "lab = start('lab', [])\nbefore = {h: written(lab, h) for h in lab.hosts}\nlab.join()\n"
        "code = pytest.main(['--hosts=' + lab.inventory, '--bundle=' + sys.argv[1], '-q', '-p', 'no:cacheprovider'])\n"
        "after = {h: written(lab, h) for h in lab.hosts}\n"
        "print('CODE', int(code)); print('CHANGED', sorted(set(after['p0'].items()) ^ set(before['p0'].items())) + "
        "sorted(set(after['d0'].items()) ^ set(before['d0'].items())))\nlab.stop()\n"
    )
    bundle = f"/tmp/pytest-written-{os.getpid()}"
    try:
        run = subprocess.run([sys.executable, "-c", code, bundle], cwd=ROOT, capture_output=True, text=True, timeout=240)
    finally:
        subprocess.run(["rm", "-rf", bundle], check=True)
    assert "CODE 0" in run.stdout, run.stdout + run.stderr
    assert "CHANGED []" in run.stdout, run.stdout


def test_secrets_never_leave_the_host(lab: Lab, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom lab.control import Lab\nfrom pdgate.deployment import open_deployment\n"
        "from pdgate.plugin.run import Run\nimport ctypes\n"
        f"fd = open('/proc/{lab.pid}/ns/net'); ctypes.CDLL(None).setns(fd.fileno(), 0x40000000)\n"
        f"run = Run(open_deployment('{lab.inventory}'), Path(sys.argv[1])); run.save(); run.collect()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    raw = "".join(path.read_text() for path in (tmp_path / "raw").iterdir())
    facts = "".join(path.read_text() for path in (tmp_path / "facts").iterdir())
    assert "VLLM_HOST_IP" in raw and "OPENAI_API_KEY=<redacted>" in raw
    assert "sk-lab-0123456789" not in raw + facts


def test_a_lab_without_root_says_what_is_missing() -> None:
    run = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", sys.executable, "-c", "from lab.requirements import missing; print(missing())"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if run.returncode != 0:
        pytest.skip(f"this tree cannot be read by another user: {run.stderr.strip().splitlines()[-1]}")
    assert "root: namespaces" in run.stdout
