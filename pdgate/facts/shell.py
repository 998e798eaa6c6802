"""One POSIX shell on a host, fed on stdin: every remote call of pdgate goes through here and has a deadline."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass

from pdgate.facts.model import Interval
from pdgate.inventory.connection import Connection

PINGS = 5


class HostUnreachable(Exception):
    """The host gave no shell, or not in time; the message says what ssh, docker … answered."""


@dataclass(frozen=True)
class ShellResult:
    stdout: str
    stderr: str
    code: int


@dataclass(frozen=True)
class Shells:
    """How to open a shell on any host of a run: the ssh_config that was written for it, and the deadline."""

    ssh_config: str
    timeout_s: float = 30.0

    def run(self, connection: Connection, script: str, timeout_s: float | None = None) -> ShellResult:
        """Run `script`; raises HostUnreachable."""
        with _Shell(connection, self.ssh_config, timeout_s or self.timeout_s) as shell:
            return shell.finish(script)

    def run_timed(self, connection: Connection, script: str) -> tuple[ShellResult, Interval]:
        """Run `script` after reading the host's clock a few times over the same shell: (result, host minus ours).

        The clock is asked before the script is sent, so the round trip is that of a line, not of a login; the
        shortest round trip bounds the offset. Raises HostUnreachable.
        """
        with _Shell(connection, self.ssh_config, self.timeout_s) as shell:
            shell.ask("echo pdgate-ready", "pdgate-ready")
            best: Interval | None = None
            for _ in range(PINGS):
                before = time.time()
                answer = shell.ask("date +%s.%N", r"\d{9,}(\.\d+)?")
                after = time.time()
                whole, _dot, fraction = answer.partition(".")
                host = float(answer) if fraction else float(whole)
                resolution = 0.0 if fraction else 1.0  # busybox date knows no %N: the second may be almost over
                bound = Interval(low=host - after, high=host + resolution - before)
                if best is None or bound.radius < best.radius:
                    best = bound
            assert best is not None
            return shell.finish(script), best


class _Shell:
    """A running shell whose stdin we hold."""

    def __init__(self, connection: Connection, ssh_config: str, timeout_s: float) -> None:
        self._what = f"{connection.kind} {connection.name}"
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._buffers: dict[str, bytes] = {"out": b"", "err": b""}
        argv = connection.shell_argv(ssh_config)
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise HostUnreachable(f"{self._what}: cannot start '{argv[0]}': {error.strerror}") from None
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ, "out")
        self._selector.register(self._process.stderr, selectors.EVENT_READ, "err")

    def __enter__(self) -> _Shell:
        return self

    def __exit__(self, *exc: object) -> None:
        self._selector.close()
        if self._process.poll() is None:
            # Its own session, so that what ssh started (a ProxyCommand) goes too.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                stream.close()

    def ask(self, command: str, expect: str) -> str:
        """Send one command line and return the first line of output that matches `expect` whole."""
        self._send(command.encode() + b"\n")
        while True:
            lines = self._buffers["out"].split(b"\n")
            for number, line in enumerate(lines[:-1]):
                if re.fullmatch(expect, line.decode(errors="replace").strip()):
                    self._buffers["out"] = b"\n".join(lines[number + 1 :])
                    return line.decode().strip()
            if not self._pump():
                raise HostUnreachable(f"{self._what}: {self._last_words()}")

    def finish(self, script: str) -> ShellResult:
        self._send(script.encode() + b"\n")
        self._stdin.close()
        while self._pump():
            pass
        try:
            code = self._process.wait(timeout=max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._late() from None
        out, err = (self._buffers[key].decode(errors="replace") for key in ("out", "err"))
        if code == 255 and not out:  # ssh's own failure
            raise HostUnreachable(f"{self._what}: {self._last_words()}")
        return ShellResult(out, err, code)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin.fileno(), view) :]
            except BlockingIOError:
                if not self._pump(writing=True):
                    raise HostUnreachable(f"{self._what}: {self._last_words()}") from None
            except BrokenPipeError:
                while self._pump():
                    pass
                raise HostUnreachable(f"{self._what}: {self._last_words()}") from None

    def _pump(self, writing: bool = False) -> bool:
        """Read what is there; False when both streams have ended. Raises HostUnreachable past the deadline."""
        if not self._selector.get_map():
            return False
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        for key, _ in self._selector.select(min(left, 0.01 if writing else left)):
            chunk = os.read(key.fd, 65536)
            if chunk:
                self._buffers[key.data] += chunk
            else:
                self._selector.unregister(key.fileobj)
        return bool(self._selector.get_map())

    def _late(self) -> HostUnreachable:
        words = self._buffers["err"].decode(errors="replace").strip()
        return HostUnreachable(f"{self._what}: no answer within {self._timeout_s:g} s" + (f" ({words})" if words else ""))

    def _last_words(self) -> str:
        lines = self._buffers["err"].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the connection closed without a word"
