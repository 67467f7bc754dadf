"""A contender's processes, seen from the one that measures: started, asked, and ended whatever happens."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import IO, Any

from lockstep.bench.work import Work
from lockstep.core.device import Device
from lockstep.core.errors import RunError

ANSWER_SECONDS = 600.0  # a contender that takes longer hangs, or has too much to do
END_SECONDS = 10.0


class ContenderFailed(RunError):
    """A contender could not do what it was asked; the others can go on."""


class Running:
    """A contender under way, with a process for each of its ranks."""

    def __init__(self, name: str, work: Work, devices: list[Device], port: int, interface: str) -> None:
        self.name, self._processes = name, list[subprocess.Popen[bytes]]()
        self._errors: list[IO[bytes]] = []
        self._heard: list[bytes] = []  # of each process: the part of an answer that has come so far
        try:
            for rank in range(len(devices)):
                self._start(work, devices, rank, port, interface)
        except BaseException:
            self.close()
            raise

    def _start(self, work: Work, devices: list[Device], rank: int, port: int, interface: str) -> None:
        is_parallel = bool(port)
        environment = {**os.environ}
        device = work.devices[0]
        if is_parallel:
            environment |= meeting_place(devices, rank, port, interface)
            device = f"{devices[rank].kind}:{rank}"
        order = {
            "name": self.name,
            "work": asdict(work),
            "place": [rank, len(devices), device, port, f"{work.model}/{self.name}"],
            "parent": os.getpid(),
        }
        self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the processes
        self._heard.append(b"")
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "lockstep.bench.contenders", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[-1],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which ends all of them; and what they start
            )
        )

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """What each process answers."""
        line = json.dumps({"do": do, "with": arguments}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None, "it is a pipe"
            with contextlib.suppress(BrokenPipeError):  # it has ended, and the answer says so
                process.stdin.write(line)
                process.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of each process."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None, "it is a pipe"
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(found) < len(self._processes):
                ready = waiting.select(deadline - time.monotonic())
                if not ready:
                    raise ContenderFailed(f"no answer within {ANSWER_SECONDS:g} s; try fewer steps (--steps)")
                for key, _ in ready:
                    rank = key.data
                    self._heard[rank] += (octets := os.read(key.fd, 1 << 16))
                    line, end, rest = self._heard[rank].partition(b"\n")
                    if end:
                        self._heard[rank] = rest
                        found[rank] = json.loads(line)
                        waiting.unregister(key.fileobj)
                        if "problem" in found[rank]:
                            raise ContenderFailed(found[rank]["problem"])
                    elif not octets:
                        raise ContenderFailed(self._last_words(rank))
        return [found[rank] for rank in range(len(self._processes))]

    def _last_words(self, rank: int) -> str:
        ended = os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "it was waited for"
        how = f"with exit status {ended.si_status}"
        if ended.si_code != os.CLD_EXITED:
            how = f"by signal {ended.si_status} ({signal.strsignal(ended.si_status)})"
        self._errors[rank].seek(0)
        lines = self._errors[rank].read().decode(errors="replace").strip().splitlines()
        return f"a process of it ended {how}" + (f": {lines[-1].strip()}" if lines else "")

    def close(self) -> None:
        """Lets the processes end, and ends those that do not, with all that they have started. Twice does no harm."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and any(map(_is_running, self._processes)):
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Ends the processes at once, with all that they have started."""
        for process in self._processes:
            if process.returncode is None:  # else its number may be another's by now
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for file in self._errors:
            file.close()


def meeting_place(devices: list[Device], rank: int, port: int, interface: str) -> dict[str, str]:
    """What libraries read from the environment: who this process is, and that it is to be reached from here only.

    A process with GPUs sees those of all ranks, in their order, so that the rank's number is the GPU's.
    """
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_WORLD_SIZE": str(len(devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    if devices[0].kind == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else []
        numbers = [device.number for device in devices]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(names[n] if n < len(names) else str(n) for n in numbers)
    return found


def _is_running(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it runs; one that does not is not forgotten yet, so that what it left behind can be ended."""
    if process.returncode is not None:
        return False
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
