"""Jobs of several processes on this machine, each with simulated devices of its own."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("_actions.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**others: Any) -> dict[str, str]:
    """That of a process which imports from the tests."""
    paths = [TESTS.parent, TESTS, SCRIPT.parent]
    settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu", **others}
    return {**os.environ, **{name: str(value) for name, value in settings.items()}}


@dataclass
class Job:
    """Processes that run `_actions.py`.

    Attributes:
        folder: What they write to.
        num_processes: How many there are.
        devices: Simulated devices of each.
    """

    folder: Path
    num_processes: int
    devices: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, actions: list[Any], layout: dict[str, Any], program: str = "", **env: Any
    ) -> "Job":
        """With a program, each runs that and not `_actions.py`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        for index in range(self.num_processes):
            names = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": self.num_processes,
                "JAX_PROCESS_ID": index,
                "JAX_NUM_CPU_DEVICES": self.devices,
            }
            told = json.dumps({"layout": layout, "actions": actions, "out": str(self.folder)})
            with (self.folder / f"log{index}").open("w") as log:
                command = (
                    [sys.executable, "-c", program] if program else [sys.executable, SCRIPT, told]
                )
                process = subprocess.Popen(
                    command, env=environment(**names, **env), stderr=log, stdout=log
                )
            self.processes.append(process)
        return self

    def finish(self, timeout_s: float = 240.0) -> list[list[Any]]:
        """What each process gave for each action."""
        try:
            codes = [process.wait(timeout_s) for process in self.processes]
        finally:
            self.kill()
        assert codes == [0] * self.num_processes, self.logs()
        return [
            json.loads((self.folder / f"out{i}.json").read_text())
            for i in range(self.num_processes)
        ]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def logs(self) -> str:
        return "\n".join(f"--- process {i}\n{self.log(i)}" for i in range(self.num_processes))

    def log(self, index: int) -> str:
        return (self.folder / f"log{index}").read_text()[-4000:]


def run_job(
    folder: Path,
    num_processes: int,
    devices: int,
    layout: dict[str, Any],
    actions: list[Any],
    **env: Any,
) -> list[list[Any]]:
    """Start a job and wait for what it gives."""
    return Job(folder, num_processes, devices).start(actions, layout, **env).finish()
