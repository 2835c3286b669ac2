"""The processes of one node."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ._layout import Layout, ProcessSlot
from ._members import Command
from ._program import Program
from ._variables import (
    COORDINATOR,
    COORDINATOR_BIND,
    HEARTBEAT_FILE,
    LOCAL_DEVICES,
    MODULE_LOADING,
    NUM_CPU_DEVICES,
    NUM_PROCESSES,
    PLATFORMS,
    PROCESS_ID,
    RESTART,
    inherited,
    variable,
)


@dataclass(frozen=True)
class NodeJob:
    """The processes of one node, each running `program`."""

    layout: Layout
    # The index of the node in `layout`.
    node_rank: int
    program: Program
    python: str
    # Additional variables of each process.
    exports: Mapping[str, str]
    # Number of simulated devices of each process; None for real devices.
    cpu_devices: int | None = None
    # If False, each process sees all devices.
    binds_devices: bool = True
    # No other node: the coordinator accepts connections only from this machine.
    is_alone: bool = False

    def commands(
        self, coordinator: str, attempt: int, heartbeat_dir: Path | None
    ) -> tuple[Command, ...]:
        """The commands of this node's processes; `coordinator` is `host:port`, `attempt` from 0."""
        return tuple(
            self._command(slot, coordinator, attempt, heartbeat_dir)
            for slot in self._process_slots()
        )

    def shell_lines(self, coordinator: str) -> tuple[str, ...]:
        """The commands for a shell, one line per process, with the variables of this node."""
        return tuple(
            shlex.join(
                [
                    "env",
                    *(f"{k}={v}" for k, v in self._variables(slot, coordinator, 0).items()),
                    *self._words(),
                ]
            )
            for slot in self._process_slots()
        )

    def _process_slots(self) -> tuple[ProcessSlot, ...]:
        return self.layout.process_slots(self.node_rank)

    def _words(self) -> tuple[str, ...]:
        return self.program.words(self.python)

    def _command(
        self, slot: ProcessSlot, coordinator: str, attempt: int, heartbeat_dir: Path | None
    ) -> Command:
        variables = self._variables(slot, coordinator, attempt)
        heartbeat = None
        if heartbeat_dir is not None:
            heartbeat = heartbeat_dir / str(slot.process_id)
            heartbeat.touch()
            os.utime(heartbeat, (0, 0))  # so that even an early first step changes the time
            variables[HEARTBEAT_FILE] = str(heartbeat)
        return Command(
            name=f"process {slot.process_id}",
            words=self._words(),
            environment={**inherited(), **variables},
            label=str(slot.process_id),
            heartbeat=heartbeat,
        )

    def _variables(self, slot: ProcessSlot, coordinator: str, attempt: int) -> dict[str, str]:
        variables = {
            **({} if self.cpu_devices else {MODULE_LOADING: variable(MODULE_LOADING) or "EAGER"}),
            **self.exports,
            COORDINATOR: coordinator,
            NUM_PROCESSES: str(self.layout.num_processes),
            PROCESS_ID: str(slot.process_id),
            RESTART: str(attempt),
        }
        if self.is_alone:
            variables[COORDINATOR_BIND] = coordinator
        if self.cpu_devices is not None:
            variables |= {PLATFORMS: "cpu", NUM_CPU_DEVICES: str(self.cpu_devices)}
        elif self.binds_devices:
            variables[LOCAL_DEVICES] = ",".join(map(str, slot.devices))
        return variables
