"""Trains until it is asked to end; run as `python _train_until_asked.py DIRECTORY [background]`."""

import sys
import time
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 2)

from _one_run import make_run  # noqa: E402


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(directory: str, *mode: str) -> None:
    run = make_run(checkpoint={"async_save": mode == ("background",)})
    run.engine.save_on_preemption(directory)
    try:
        for step in range(1000):
            say("loss", *run.train(1))
            if mode and step % 3 == 2:
                run.engine.save_checkpoint(directory, "best")
            time.sleep(0.05)
    finally:
        say("reached", run.engine.global_steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
