"""Trains and saves at every step, and ends itself at a moment of saving.

Run as `python _train_and_save.py DIRECTORY`.

Whatever Python does to files is announced by audit events, before it is done. So a process can be
killed exactly there.
"""

import argparse
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)

from _one_run import Run, make_run  # noqa: E402

WIDTH, KEEP_LAST = 40_000, 2
MOMENTS = {
    "before-data": ("os.mkdir", r"{tag}/data-[1-9][^/]*$"),
    "arrays": ("os.mkdir", r"{tag}/data-[^/]+/arrays$"),  # and then, once some of them are there
    "before-commit": ("os.rename", r"{tag}/commit\.json\.partial$"),
    "before-latest": ("open", r"/latest\.partial$"),
    "removal": ("os.rmdir", r"^ocdbt\.process_0$"),  # inside a folder that is being removed
}
"""The event before which the process ends, and what it is about."""

WRITTEN = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")


def make(*, sharded: bool = False, **config: Any) -> Run:
    """A run on two stages; `sharded`: each of two devices, which also share out the weights."""
    settings = {"replicas": 2, "zero_optimization": {"stage": 3}} if sharded else {}
    return make_run(WIDTH, checkpoint={"keep_last": KEEP_LAST, **config}, **settings)


def saves(num_steps: int) -> list[tuple[str, int]]:
    """What is saved, in order: each step, and every second one as `best` too."""
    plan = [(f"global_step{step}", step) for step in range(1, num_steps + 1)]
    return [each for tag, step in plan for each in [(tag, step), ("best", step)][: 2 - step % 2]]


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Killer:
    """Kills this process at a moment, once it is armed."""

    def __init__(
        self, directory: Path, moment: str | None, tag: str, num_events: int | None
    ) -> None:
        self.armed = self._is_inside = False
        self._directory, self._moment, self._left = directory, moment, num_events
        event, pattern = MOMENTS[moment] if moment else ("", "")
        self._event, self._pattern = event, re.compile(pattern.format(tag=re.escape(tag)))
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed or self._is_inside or event not in WRITTEN:
            return
        self._is_inside = True
        path = str(args[0])
        if self._left is not None and (event != "open" or path.startswith(str(self._directory))):
            self._left -= 1
        if self._left == 0 or (event == self._event and self._pattern.search(path)):
            if self._moment == "arrays":
                threading.Thread(
                    target=_kill_while_arrays_grow, args=(Path(path),), daemon=True
                ).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        self._is_inside = False


def _kill_while_arrays_grow(arrays: Path) -> None:
    # Tensorstore writes them without an event of Python's.
    deadline = time.monotonic() + 20
    while (
        sum(path.stat().st_size for path in arrays.glob("**/d/*")) < 1 << 20
        and time.monotonic() < deadline
    ):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--moment", choices=MOMENTS)
    parser.add_argument("--save", nargs=2, default=("", "0"))
    parser.add_argument("--events", type=int)
    given = parser.parse_args()
    chosen = (given.save[0], int(given.save[1]))
    killer = Killer(given.directory, given.moment, chosen[0], given.events)
    run = make(sharded=given.sharded, async_save=given.background)
    for tag, step in saves(given.steps):
        if run.engine.global_steps < step:
            say("loss", *run.train(1))
        run.engine.wait_for_checkpoint()
        if (tag, step) != ("global_step1", 1):
            say("saved")
        killer.armed = given.events is not None or (tag, step) == chosen
        run.engine.save_checkpoint(given.directory, tag)
    run.engine.wait_for_checkpoint()
    say("saved")


if __name__ == "__main__":
    main()
