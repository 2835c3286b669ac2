"""Saves until so many saves were not refused.

Run as `python _save_again_and_again.py DIRECTORY NAME TIMES [SECONDS]`.

Says `saved TAG` or `refused TAG ERROR` for each. Tags begin with the name.
"""

import sys
import time

import jax

jax.config.update("jax_num_cpu_devices", 2)

from _one_run import make_run  # noqa: E402

from jaxpipe.errors import CheckpointError  # noqa: E402


def main(directory: str, name: str, times: str, pause_s: str = "0.05") -> None:
    run = make_run(20_000, checkpoint={"keep_last": 1})
    i = num_saved = 0
    while num_saved < int(times):
        i += 1
        tag = f"{name}{i}" if name != "step" else f"global_step{i}"
        try:
            run.engine.save_checkpoint(directory, tag)
            words = f"saved {tag}"
            num_saved += 1
        except CheckpointError as error:
            words = f"refused {tag} {error}"
        sys.stdout.write(f"{words}\n")
        sys.stdout.flush()
        time.sleep(float(pause_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
