"""Saves in the background and ends without waiting.

Run as `python _save_and_end.py DIRECTORY HOW`.
"""

import atexit
import resource
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)

from _one_run import make_run  # noqa: E402


def main(directory: str, how: str) -> None:
    atexit.register(lambda: sys.stdout.write("at the end\n"))
    run = make_run(40_000, checkpoint={"async_save": True})
    if how == "fails":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    run.train(1)
    run.engine.save_checkpoint(directory)
    if how == "exits":
        sys.exit(3)
    if how == "raises":
        raise ValueError("mine")


if __name__ == "__main__":
    main(*sys.argv[1:])
