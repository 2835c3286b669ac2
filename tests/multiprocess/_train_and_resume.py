"""Trains to a number of steps, saving at each, from the last checkpoint if there is one.

Run by the launcher.

`python _train_and_resume.py FOLDER STEPS [SELF_KILL]`: with the last, process 1 of the first
attempt kills itself at that microbatch.
"""

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _layouts import Layout

import jaxpipe
from jaxpipe.data import BatchLoader


class Slow:
    """A loader that takes its time, and ends its process at one of its batches."""

    def __init__(self, loader: Any, kill_at: int) -> None:
        self._loader, self._kill_at, self._step = loader, kill_at, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        time.sleep(0.05)
        self._step += 1
        if (
            self._step == self._kill_at
            and jax.process_index() == 1
            and os.environ.get("JAXPIPE_RESTART", "0") == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return next(self._loader)

    def get_state(self) -> Any:
        return self._loader.get_state()

    def set_state(self, state: Any) -> None:
        self._loader.set_state(state)


def main(folder: Path, num_steps: int, kill_at: int) -> None:
    jaxpipe.init_distributed()
    layout = Layout(2, 1, model="dropout")
    config = {"checkpoint": {"async_save": True, "keep_last": 2}}
    engine = layout.engine(config=config)
    rng = np.random.default_rng(0)
    samples = [tuple(rng.integers(0, 11, (2, 3), np.int32)) for _ in range(23)]
    loader = Slow(jaxpipe.RepeatingLoader(BatchLoader(samples, 2, seed=3)), kill_at)
    engine.set_dataiterator(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there is none at first
        engine.load_checkpoint(folder / "saved")
    (folder / f"pid{jax.process_index()}").write_text(str(os.getpid()))
    while engine.global_steps < num_steps:
        loss = float(engine.train_batch())
        if jax.process_index() == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{engine.global_steps} {loss!r}\n")
        engine.save_checkpoint(folder / "saved")
    engine.wait_for_checkpoint()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
