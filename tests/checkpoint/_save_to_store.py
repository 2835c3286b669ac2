"""Trains and saves to a `disk://` store at every step, and ends itself at a request.

Run as `python _save_to_store.py URL`.
"""

import argparse
import os
import signal

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)

from _disk_store import DiskStore  # noqa: E402
from _one_run import Run, make_run  # noqa: E402
from _train_and_save import KEEP_LAST, saves, say  # noqa: E402

STEPS = 4


def make(**config: object) -> Run:
    return make_run(checkpoint={"keep_last": KEEP_LAST, **config})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--request", type=int, default=-1)
    parser.add_argument("--after", action="store_true")
    parser.add_argument("--background", action="store_true")
    given = parser.parse_args()

    def end(number: int, name: str, path: str, is_done: bool) -> None:
        if number == given.request and is_done == given.after:
            os.kill(os.getpid(), signal.SIGKILL)

    run = make(async_save=given.background)
    with DiskStore.hooked(end):
        for tag, step in saves(STEPS):
            if run.engine.global_steps < step:
                say("loss", *run.train(1))
            run.engine.wait_for_checkpoint()
            if (tag, step) != ("global_step1", 1):
                say("saved")
            run.engine.save_checkpoint(given.url, tag)
        run.engine.wait_for_checkpoint()
        say("saved")
        say("requests", DiskStore.number)


if __name__ == "__main__":
    main()
