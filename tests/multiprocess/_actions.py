"""One process of a job: builds an engine and does what it is told.

Run as `python _actions.py JSON`.
"""

import errno
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("error")

import _disk_store  # noqa: E402, F401
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from _layouts import Layout, own_samples, text_lengths  # noqa: E402

import jaxpipe  # noqa: E402
from jaxpipe.checkpoint import (  # noqa: E402
    CheckpointWriter,
    Rename,
    RunState,
    _reports,
    _writer,
    export_safetensors,
    inspect_checkpoint,
    load_params,
    verify_checkpoint,
)
from jaxpipe.core.state import state_arrays, with_arrays  # noqa: E402
from jaxpipe.data import BatchLoader  # noqa: E402
from jaxpipe.distributed import failure_of  # noqa: E402
from jaxpipe.errors import CheckpointError, DataError  # noqa: E402
from jaxpipe.layers import flatten_dict  # noqa: E402


class Actions:
    """What a process can be told, by name."""

    def __init__(self, layout: Layout, out: Path) -> None:
        self.layout, self.out = layout, out
        self.engine = layout.engine(config={"checkpoint": {"async_save": True}})

    def entries(self, step: int) -> Iterator[Any]:
        """This process's part of the microbatches of a step."""
        held = self.engine.data_shard.replicas
        for inputs, labels in self.layout.entries(step):
            yield inputs[2 * held.start : 2 * held.stop], labels[2 * held.start : 2 * held.stop]

    def train(self, first: int, last: int) -> list[float]:
        return [float(self.engine.train_batch(self.entries(step))) for step in range(first, last)]

    def train_loader(self, count: int) -> list[float]:
        """From the engine's own loader, which a checkpoint puts back to its place."""
        if not hasattr(self, "loader"):
            rng = np.random.default_rng(5)
            samples = [tuple(rng.integers(0, 11, (2, 3), np.int32)) for _ in range(37)]
            shard = self.engine.data_shard
            size = 2 * len(shard.replicas)
            self.loader = jaxpipe.RepeatingLoader(BatchLoader(samples, size, seed=3, shard=shard))
        return [float(self.engine.train_batch(self.loader)) for _ in range(count)]

    def evaluate(self) -> list[float]:
        loss = self.engine.eval_batch(self.entries(50), reduce_output=None)
        outputs = self.engine.predict(next(self.layout.entries(51))[0])
        return [*np.asarray(loss).tolist(), float(np.asarray(outputs, np.float64).sum())]

    def evaluate_set(self, *counts: int) -> list[Any]:
        """Each shard has so many samples of its own.

        The loss, sums of log-probabilities, and new tokens after texts of different lengths.
        """
        shard, size = self.engine.data_shard, 2 * len(self.engine.data_shard.replicas)
        tokens, labels = own_samples(counts[shard.index], shard.index)
        entries = [
            (tokens[at : at + size], labels[at : at + size]) for at in range(0, len(tokens), size)
        ]
        found = self.engine.evaluate(entries)
        sums = self.engine.log_probs(tokens, labels)
        new = self.engine.generate(tokens, 2, lengths=text_lengths(len(tokens), shard.index))
        return [found["loss"], found["num_samples"], sums.tolist(), new.tolist()]

    def evaluate_set_broken(self) -> None:
        """The loader of process 1 fails after an entry."""

        def entries() -> Iterator[Any]:
            yield own_samples(2 * len(self.engine.data_shard.replicas), 0)
            if jax.process_index() == 1:
                raise DataError("the shard must be readable, but got none. Mount it.")

        self.engine.evaluate(entries())

    def save(self, path: str) -> bool:
        saved = self.engine.save_checkpoint(path, client_state={"by": jax.process_count()})
        self.engine.wait_for_checkpoint()
        return saved

    def save_often(self, path: str) -> list[float]:
        """In the background, while training, evaluation and the gathering of parameters go on."""
        losses = []
        for step in range(6):
            losses += self.train(step, step + 1)
            self.engine.save_checkpoint(path)
            self.evaluate()
            self.params()
        self.engine.wait_for_checkpoint()
        return losses

    def save_in_outage(self, path: str, background: bool) -> list[Any]:
        """The storage of process 1 takes nothing.

        What is told, and after how many seconds, and a save after it.
        """

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.EIO, "Input/output error", path)

        writer, began, told = CheckpointWriter(), time.monotonic(), ""
        what = path, self.engine.pipeline, self.engine.state, RunState(global_steps=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_reports, "_SILENT_S", 3.0)
            if jax.process_index() == 1:
                for owner, name in ((_writer, "write_arrays"), (Path, "write_text")):
                    patch.setattr(owner, name, fail)
            try:
                writer.save(*what, tag="failed", background=background)
                writer.wait()
            except CheckpointError as error:
                told = str(error)
        taken = time.monotonic() - began
        writer.save(*what, tag="after", background=background)
        writer.wait()
        return [told, taken]

    def save_apart(self, path: str) -> None:
        """Each process in a directory of its own."""
        self.engine.save_checkpoint(f"{path}{jax.process_index()}")

    def load(self, path: str) -> Any:
        found = self.engine.load_checkpoint(path)
        return [found[0], found[1], self.engine.global_steps]

    def load_named(self, folder: str) -> None:
        """Parameters out of files where they have our names."""
        paths = flatten_dict(self.engine.module_state_dict())
        ours = [(p[1].partition("_")[0], *p[2:]) if p[0] == "layers" else p for p in paths]
        names = [
            Rename(".".join(path), "/".join(own)) for path, own in zip(paths, ours, strict=True)
        ]
        self.engine.load_huggingface(folder, names)

    def load_named_apart(self, folder: str) -> None:
        """Each process out of a folder of its own."""
        self.load_named(f"{folder}{jax.process_index()}")

    def rows(self) -> dict[str, list[str]]:
        """Hashes of every copy of every block of a row that this process holds."""
        found: dict[str, list[str]] = {}
        for name, array in state_arrays(self.engine.state).items():
            for shard in array.addressable_shards:
                key = f"{name}{[(along.start or 0, along.stop) for along in shard.index]}"
                found.setdefault(key, []).append(
                    hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
                )
        return found

    def params(self) -> str:
        """Hash of all parameters."""
        leaves = jax.tree.leaves(self.engine.module_state_dict())
        return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()

    def error(self, name: str, *args: Any) -> list[str]:
        """The error that an action ends with."""
        try:
            getattr(self, name)(*args)
        except (jaxpipe.errors.JaxpipeError, StopIteration, ValueError) as error:
            return [type(error).__name__, failure_of(error).partition("\n")[2]]
        return ["none", ""]

    def train_uneven(self) -> None:
        """Process 1 has a batch less."""
        count = 2 - jax.process_index() % 2
        data = iter([entry for step in range(count) for entry in self.entries(step)])
        for _ in range(2):
            self.engine.train_batch(data)

    def train_misshapen(self) -> None:
        """Process 1 has longer sequences."""
        length = 3 + jax.process_index() % 2
        self.engine.train_batch(
            (np.resize(x, (len(x), length)), np.resize(y, (len(y), length)))
            for x, y in self.entries(0)
        )

    def train_failing(self) -> None:
        """The data of process 1 are not numbers."""
        bad = jax.process_index() == 1
        self.engine.train_batch((("text", y) if bad else (x, y)) for x, y in self.entries(0))

    def train_other_samples(self, step: int = 0) -> None:
        """Processes of one replica feed different samples."""
        self.engine.train_batch(((x + jax.process_index()) % 11, y) for x, y in self.entries(step))

    def train_or_evaluate(self) -> None:
        """Process 1 makes another call."""
        call = self.engine.eval_batch if jax.process_index() else self.engine.train_batch
        call(self.entries(0))

    def train_undecodable(self, kind: str) -> None:
        """The data of process 1 fail with an error.

        Its text cannot be encoded, or not even made.
        """

        class UnprintableError(ValueError):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        def entries() -> Iterator[Any]:
            if jax.process_index() == 1:
                raise UnprintableError if kind == "none" else ValueError(f"no file {kind}")
            yield from self.entries(0)

        self.engine.train_batch(entries())

    def predict_apart(self) -> None:
        """Each process gives other samples."""
        self.engine.predict(next(self.layout.entries(jax.process_index()))[0])

    def set_apart(self) -> None:
        """Each process sets another size of a batch."""
        self.engine.set_train_batch_size(8 * (1 + jax.process_index()))
        try:
            self.train(0, 1)
        finally:
            self.engine.set_train_batch_size(8)

    def load_apart(self) -> None:
        """Each process sets other parameters."""
        own = jax.tree.map(lambda x: x * (1 + jax.process_index()), self.engine.module_state_dict())
        self.engine.load_module_state_dict(own)

    def flip(self, process: int = 1) -> str:
        """A bit of the last replica's memory in a process changes.

        Returns the array in which it lies.
        """
        state = self.engine.state
        arrays = state_arrays(state)
        name = next(each for each in sorted(arrays) if each.startswith("params/stacked"))
        shards = [np.array(shard.data) for shard in arrays[name].addressable_shards]
        if jax.process_index() == process:
            shards[-1].reshape(-1).view(np.uint8)[3] ^= 1
        placed = [
            jax.device_put(value, shard.device)
            for value, shard in zip(shards, arrays[name].addressable_shards, strict=True)
        ]
        array = jax.make_array_from_single_device_arrays(
            arrays[name].shape, arrays[name].sharding, placed
        )
        self.engine._trainer.state = with_arrays(state, {name: array})
        return name

    def flip_here(self, path: str) -> None:
        """Save after that, where the process has both replicas."""
        self.train(1, 2)
        self.flip(0)
        self.save(path)

    def read_alone(self, path: str) -> list[Any]:
        """Process 0 alone does all that one process may do with a checkpoint."""
        if jax.process_index():
            return []
        tree = load_params(path)
        written = export_safetensors(path, f"{path}/out.safetensors")
        return [
            verify_checkpoint(path).tag,
            len(jax.tree.leaves(tree)),
            len(inspect_checkpoint(path)) > 0,
            len(written),
        ]

    def preempted(self, path: str) -> list[Any]:
        """Process 1 is asked to end."""
        self.engine.save_on_preemption(path)
        self.train(0, 1)
        if jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            self.train(1, 3)
        except SystemExit as error:
            return [error.code, self.engine.global_steps]
        return []

    def save_tags(self, path: str) -> None:
        self.engine.save_checkpoint(path, tag=f"mine{jax.process_index()}")


def main(told: dict[str, Any]) -> None:
    jaxpipe.init_distributed()
    actions = Actions(Layout(**told["layout"]), Path(told["out"]))
    results = [getattr(actions, name)(*args) for name, *args in told["actions"]]
    (actions.out / f"out{jax.process_index()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
