"""The processes of a contender, one per rank: started, asked over pipes, and ended in any case."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from lockstep.bench.contenders import ContenderRank
from lockstep.bench.workload import Workload
from lockstep.core.device import Device
from lockstep.core.errors import RunError

ANSWER_SECONDS = 600.0  # a contender that takes longer hangs, or has too much to do
HAS_EXITED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # ask without waiting, and without reaping
EXIT_SECONDS = 10.0


class ContenderFailed(RunError):
    """A contender failed; the others continue."""


class ContenderProcesses:
    """A running contender. `port` is that of the store where its ranks rendezvous, if it has several."""

    def __init__(self, name: str, workload: Workload, devices: list[Device], port: int | None) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[bytes]] = []  # their standard error
        self._answers: SimpleQueue[tuple[int, str]] = SimpleQueue()  # (rank, line); an empty line: it has ended
        try:
            for number in range(len(devices)):
                device = workload.devices[0] if port is None else f"{devices[number].kind}:{number}"
                rank = ContenderRank(number, len(devices), device, port or 0, f"{workload.model}/{name}")
                setup = {"name": name, "workload": asdict(workload), "rank": rank, "parent": os.getpid()}
                self._start(json.dumps(setup), {} if port is None else rendezvous_env(devices, number, port))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ContenderProcesses":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close(EXIT_SECONDS if error is None else 0.0)

    def _start(self, setup: str, env: dict[str, str]) -> None:
        self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the processes
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.bench.contenders", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors[-1],
            env={**os.environ, **env},
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent only; a process group, to kill its children too
        )
        self._processes.append(process)
        Thread(target=self._read, args=(len(self._processes) - 1, process.stdout), daemon=True).start()

    def _read(self, rank: int, answers: IO[str]) -> None:
        with answers:
            for line in answers:
                self._answers.put((rank, line))
        self._answers.put((rank, ""))

    def ask(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Sends a command to every process; their answers."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended: its answer says why
                print(json.dumps({"command": command, "arguments": arguments}), file=process.stdin, flush=True)
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < len(self._processes):
            try:
                rank, line = self._answers.get(timeout=1.0)
            except Empty:
                self._kill_orphans()
                if time.monotonic() > deadline:
                    raise ContenderFailed(f"no answer within {ANSWER_SECONDS:g} s; try fewer steps (--steps)") from None
                continue
            answers[rank] = json.loads(line) if line else {"problem": self._exit_reason(rank)}
            if "problem" in answers[rank]:
                raise ContenderFailed(answers[rank]["problem"])
        return [answers[rank] for rank in range(len(self._processes))]

    def _kill_orphans(self) -> None:
        """Kills the children of processes that have ended: they keep standard output open, so no end of it is read."""
        for process in [process for process in self._processes if os.waitid(os.P_PID, process.pid, HAS_EXITED)]:
            _kill_group(process)

    def _exit_reason(self, rank: int) -> str:
        ended = os.waitid(os.P_PID, self._processes[rank].pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "it was waited for"
        how = f"with exit status {ended.si_status}"
        if ended.si_code != os.CLD_EXITED:
            how = f"by signal {ended.si_status} ({signal.strsignal(ended.si_status)})"
        self._errors[rank].seek(0)
        lines = self._errors[rank].read().decode(errors="replace").strip().splitlines()
        return f"a process of it ended {how}" + (f": {lines[-1].strip()}" if lines else "")

    def close(self, grace_seconds: float = 0.0) -> None:
        """Closes standard input, on which the processes exit; then kills them and their children. May be called again.

        A process is not reaped before its process group is killed: afterwards its id may be another's.
        """
        deadline = time.monotonic() + grace_seconds
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in [process for process in self._processes if process.returncode is None]:
            while os.waitid(os.P_PID, process.pid, HAS_EXITED) is None and time.monotonic() < deadline:
                time.sleep(0.02)
            _kill_group(process)
            process.wait()
        for file in self._errors:
            file.close()


def _kill_group(process: "subprocess.Popen[str]") -> None:
    """Kills a process that was not reaped, with its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def rendezvous_env(devices: list[Device], rank: int, port: int) -> dict[str, str]:
    """The environment that libraries read: rank, world size, where to rendezvous; reachable from this machine only.

    A process sees the GPUs of all ranks, in their order, so that rank r uses cuda:r.
    """
    from lockstep.runtime.store import LOOPBACK, interface_of  # imports torch

    env = {"RANK": str(rank), "WORLD_SIZE": str(len(devices)), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    env |= {"LOCAL_RANK": env["RANK"], "LOCAL_WORLD_SIZE": env["WORLD_SIZE"]}
    env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface_of(LOOPBACK))
    if devices[0].kind == "cuda":
        names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        numbers = [device.number for device in devices]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[n] if n < len(names) else str(n) for n in numbers)
    return env
