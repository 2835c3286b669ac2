"""Trains three steps, with whatever JAX runs it; run as `python _with_a_jax.py save|resume FOLDER`.

`save` writes a checkpoint before them, `resume` begins at it.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)

from _layouts import Layout, train  # noqa: E402

# In float32: programs of two versions round in other places, which 16 bits show.
LAYOUTS = [Layout(2, 2, zero=1, model="dropout"), Layout(4, 1, model="norm")]

if __name__ == "__main__":
    phase, root = sys.argv[1], Path(sys.argv[2])
    losses = []
    for layout in LAYOUTS:
        engine = layout.engine()
        if phase == "save":
            train(engine, layout, range(2))
            engine.save_checkpoint(root / str(layout))
        else:
            engine.load_checkpoint(root / str(layout))
        losses += map(float, train(engine, layout, range(2, 5)))
    sys.stdout.write(json.dumps([jax.__version__, losses]))
