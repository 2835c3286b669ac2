"""Trains some layouts.

Run as `python _resume.py first|second ROOT`, each in a process of its own.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from _layouts import BATCH, Layout, all_leaves  # noqa: E402
from _models import LENGTH, VOCAB  # noqa: E402

from jaxpipe import RepeatingLoader  # noqa: E402
from jaxpipe.data import BatchLoader  # noqa: E402

LAYOUTS = [
    Layout(1, 2, model="dropout"),
    Layout(2, 2, zero=1, model="dropout"),
    Layout(4, 1, precision="fp16"),
    Layout(4, 2, zero=1, precision="bf16", model="norm"),
]
"""Between them: dropout, collections, ZeRO-1, a loss scale that moves, both mixed precisions."""

HALF = 5


def main(phase: str, root: Path) -> None:
    for layout in LAYOUTS:
        rng = np.random.default_rng(0)
        samples = [
            tuple(rng.integers(0, VOCAB, (2, LENGTH), np.int32)) for _ in range(3 * BATCH + 1)
        ]
        loader = RepeatingLoader(BatchLoader(samples, 2 * layout.data, seed=1))
        folder = root / str(layout)
        engine = layout.engine()
        losses = []
        if phase == "first":
            losses = [float(engine.train_batch(loader)) for _ in range(HALF)]
            engine.save_checkpoint(folder, client_state={"note": str(layout)})
        else:
            _, client_state = engine.load_checkpoint(folder)
            assert client_state == {"note": str(layout)}
        losses += [float(engine.train_batch(loader)) for _ in range(HALF)]
        np.savez(folder / f"{phase}.npz", **all_leaves(engine))
        counts = [
            engine.global_steps,
            engine.global_samples,
            engine.skipped_steps,
            engine.loss_scale,
            engine.get_lr(),
        ]
        (folder / f"{phase}.json").write_text(
            json.dumps({"losses": losses[-HALF:], "counts": counts})
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
