"""Saves, and stays until it reads a line; run as `python _save_and_stay.py DIRECTORY`."""

import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)

from _one_run import make_run  # noqa: E402


def main(directory: str) -> None:
    run = make_run()
    run.engine.save_checkpoint(directory)
    sys.stdout.write("saved\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
