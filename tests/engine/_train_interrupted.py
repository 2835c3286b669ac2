"""Train while Ctrl-C comes at random moments, and print what became of the engine.

Usage: python _train_interrupted.py tries kind seed, where kind is "list", "loader" or
"unpipelined".
"""

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
jax.config.update("jax_num_cpu_devices", 2)

import flax.linen as nn  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from _small import MICROBATCHES, SIZES, build, entry, mean_square  # noqa: E402

import jaxpipe  # noqa: E402

ENTRIES = [entry(seed) for seed in range(2 * MICROBATCHES + 1)]
ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: itertools.cycle(ENTRIES),
    "loader": lambda: jaxpipe.RepeatingLoader(ENTRIES),
    "unpipelined": lambda: itertools.cycle(ENTRIES),
}


def make(kind: str) -> Any:
    if kind != "unpipelined":
        return build(example_batch=ENTRIES[0])
    config = {**SIZES, "train_micro_batch_size_per_gpu": 1}
    return jaxpipe.initialize(
        model=nn.Dense(1), optimizer=optax.adam(0.1), loss_fn=mean_square, config=config
    )[0]


def one_step(engine: Any, kind: str, iterator: Iterator[Any]) -> None:
    if kind != "unpipelined":
        engine.train_batch(iterator)
        return
    while True:  # whatever an interrupt left undone goes on
        if engine._batch.pending is None and not engine._batch.awaits_step:
            engine(*ENTRIES[engine.micro_steps % len(ENTRIES)])
        if engine._batch.pending is not None:
            engine.backward(engine._batch.pending[0])
        engine.step()
        if engine.micro_steps % MICROBATCHES == 0:
            return


def interrupt(armed: threading.Event, came: threading.Event, delays: Iterator[float]) -> None:
    for delay in delays:
        armed.wait()
        armed.clear()
        came.clear()
        time.sleep(delay)
        while (
            not came.is_set()
        ):  # Python drops what is raised in a callback of its garbage collector, which JAX has
            os.kill(os.getpid(), signal.SIGINT)
            came.wait(1.0)


def main(tries: int, kind: str, seed: int) -> None:
    engine, iterator = make(kind), ITERATORS[kind]()
    for _ in range(10):
        one_step(engine, kind, iterator)
    began = time.perf_counter()
    for _ in range(10):
        one_step(engine, kind, iterator)
    step_s = (time.perf_counter() - began) / 10
    draw, armed, came = random.Random(seed), threading.Event(), threading.Event()
    delays = (draw.uniform(0, 3 * step_s) for _ in range(tries))
    threading.Thread(target=interrupt, args=(armed, came, delays), daemon=True).start()
    found = {"tries": 0, "lost": 0, "counters off": 0, "data off": 0}
    for _ in range(tries):
        try:
            armed.set()
            while True:
                one_step(engine, kind, iterator)
        except KeyboardInterrupt:
            came.set()
            found["tries"] += 1
        try:
            found["counters off"] += engine.global_steps != int(engine.state.step)
            engine.module_state_dict()
        except RuntimeError:
            found["lost"] += 1
            engine, iterator = make(kind), ITERATORS[kind]()
            one_step(engine, kind, iterator)
    while engine.global_steps % 7:
        one_step(engine, kind, iterator)
    plain, iterator = make(kind), ITERATORS[kind]()
    for _ in range(engine.global_steps):
        one_step(plain, kind, iterator)
    same = jax.tree.map(np.array_equal, engine.module_state_dict(), plain.module_state_dict())
    found["data off"] = int(not all(jax.tree.leaves(same)))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
