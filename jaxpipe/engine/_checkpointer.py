"""`Checkpointer`: an engine's saves and loads, and the save when a process is asked to end."""

import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from types import FrameType
from typing import Any, TypeVar

import jax

from jaxpipe._util.imports import raised
from jaxpipe._util.paths import any_path
from jaxpipe._util.stores import AnyPath, StorePath
from jaxpipe._util.warn import warn
from jaxpipe.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    RunState,
    check_json,
    decode_state,
    find_checkpoint,
    load_huggingface,
    load_state,
    load_struct,
    reread,
)
from jaxpipe.config import without_secrets
from jaxpipe.distributed import gather_numbers, gather_texts, log, run_on_all
from jaxpipe.errors import CheckpointError
from jaxpipe.weights import Rename

from ._hold import hold_signals
from ._source import MicrobatchSource
from ._trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class LoadOptions:
    """Which parts of a checkpoint to load, as in the arguments of `Engine.load_checkpoint`."""

    strict: bool
    optimizer: bool
    lr_scheduler: bool
    module_only: bool


class Checkpointer:
    """Writes and reads the checkpoints of an engine."""

    def __init__(
        self, trainer: Trainer, source: MicrobatchSource, when_loaded: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._source = source
        # Called as soon as a new state is in place, to discard data about earlier steps.
        self._when_loaded = when_loaded
        self._section = trainer.config.checkpoint
        self._writer = CheckpointWriter(self._section.keep_last, self._section.keep_every)
        self._preemption: (
            tuple[_PreemptionWatch, AnyPath, Callable[[], Mapping[str, Any]]] | None
        ) = None

    def save(
        self,
        save_dir: str | PathLike[str] | StorePath,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        save_latest: bool,
        exclude_frozen: bool = False,
        is_last: bool = False,
    ) -> AnyPath:
        """Write a checkpoint and return its folder; see `Engine.save_checkpoint`."""
        folder = any_path(save_dir, "save_dir")
        trainer = self._trainer
        pipeline = trainer.pipeline
        state = trainer.state
        trainer.block_until_ready()
        position = self._source.position
        nowhere = {"is_own": False, "state": None}
        # The last save omits a position that cannot be stored, instead of failing.
        place = _what_fits(position, nowhere) if is_last else run_on_all(position)
        run = RunState(
            global_steps=trainer.global_steps,
            global_samples=trainer.global_samples,
            data_iterator=place,
            client_state=client_state,
            config=_as_json(dataclasses.asdict(without_secrets(trainer.config))),
        )
        background = self._section.async_save
        path = self._writer.save(
            folder,
            pipeline,
            state,
            run,
            tag=tag,
            save_latest=save_latest,
            background=background,
            exclude_frozen=exclude_frozen,
        )
        # Writing takes longer than a step, and the launcher must not mistake it for a stall.
        trainer.heartbeat.touch()
        return path

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise CheckpointError if writing failed."""
        self._writer.wait()

    def load(
        self, load_dir: str | PathLike[str] | StorePath, tag: str | None, what: LoadOptions
    ) -> tuple[str | None, dict[str, Any]]:
        """Resume from a checkpoint; see `Engine.load_checkpoint`."""
        folder = any_path(load_dir, "load_dir")
        self._writer.wait()
        return reread(
            folder,
            lambda: self._load(folder, tag, what),
            agreed=lambda changed: bool(gather_numbers([changed]).any()),
        )

    def load_huggingface(
        self, folder: str | PathLike[str] | StorePath, renames: Sequence[Rename]
    ) -> None:
        """Load parameters from safetensors files; see `Engine.load_huggingface`."""
        source = any_path(folder, "folder")
        self._writer.wait()
        trainer = self._trainer
        trainer.block_until_ready()
        with contextlib.ExitStack() as exchange:

            def when_read() -> None:
                exchange.enter_context(hold_signals())

            trainer.state = load_huggingface(
                source, renames, trainer.pipeline, trainer.state, when_read
            )
            self._when_loaded()
        log(logging.INFO, "loaded parameters from %s", source)

    def _load(
        self, load_dir: AnyPath, tag: str | None, what: LoadOptions
    ) -> tuple[str | None, dict[str, Any]]:
        found = _found_by_all(load_dir, tag)
        if found is None:
            warn(
                f"load_checkpoint found no checkpoint in {str(load_dir)!r}; the engine is "
                "unchanged.",
            )
            return None, {}
        trainer = self._trainer
        undo = self._build_for(found)
        trainer.block_until_ready()
        # Without an optimiser there is still a state to fill, but no use for optimiser state.
        optimizer = what.optimizer and not what.module_only and trainer.optimizer is not None
        lr_scheduler = what.lr_scheduler and not what.module_only
        # If everything is loaded, nothing of the present state is used. It then need not exist: it
        # may not have been made yet, or be lost.
        needs_all = what.strict and optimizer and lr_scheduler and not found.index.excluded
        restore = self._source.snapshot()
        with contextlib.ExitStack() as exchange:

            def when_read() -> None:
                if not what.module_only:
                    self._source.set_state(**_data_position(found))
                # From here on the new arrays replace the old ones, and in between the engine has no
                # complete state.
                exchange.enter_context(hold_signals())

            try:
                state = load_state(
                    found,
                    trainer.pipeline,
                    trainer.present() if needs_all else trainer.state,
                    strict=what.strict,
                    optimizer=optimizer,
                    lr_scheduler=lr_scheduler,
                    counters=not what.module_only,
                    when_read=when_read,
                )
            except BaseException:
                restore()
                undo()
                raise
            trainer.state = state
            if not what.module_only:
                trainer.global_steps = found.index.global_steps
                trainer.global_samples = found.index.global_samples
            self._when_loaded()
        log(logging.INFO, "loaded %s, written after %d steps", found.path, found.index.global_steps)
        return str(found.path), dict(found.index.client_state)

    def _build_for(self, found: Checkpoint) -> Callable[[], None]:
        """Build the pipeline for the batches of a checkpoint; returns what undoes it."""
        index = found.index
        try:
            return self._trainer.build_for(
                None if index.batch is None else load_struct(index.batch)
            )
        except Exception as error:  # a model may raise anything for shapes it does not support
            layers = ", ".join(layer.name for layer in index.layers)
            raise CheckpointError(
                f"{found.path} must be of the model in use, but holds the layers {layers}, and the "
                f"model's own layers failed for the batches of that checkpoint: {error} Build the "
                "model from the same layers, or pass the shapes of its batches to "
                "initialize(example_batch=...)."
            ) from error

    def save_on_preemption(
        self,
        save_dir: str | PathLike[str] | StorePath,
        signals: Sequence[signal.Signals],
        client_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Begin to watch for signals; see `Engine.save_on_preemption`."""
        # Resolved now, because the program may change its working directory before it ends.
        folder = any_path(save_dir, "save_dir").absolute()
        self._preemption = (_PreemptionWatch(signals), folder, client_state)

    def end_if_preempted(self) -> None:
        """Between two batches: save and exit if any process was asked to end."""
        if self._preemption is None:
            return
        watch, save_dir, client_state = self._preemption
        exit_code = watch.exit_code()
        if exit_code is None:
            return
        # Save the weights even if anything else fails: this is the last chance to keep them.
        _what_fits(self.wait, None)
        given = _what_fits(lambda: dict(client_state()), {})
        state = {
            key: value
            for key, value in given.items()
            if _what_fits(partial(_check_item, key, value), False)
        }
        self.save(save_dir, None, state, save_latest=True, is_last=True)
        self.wait()
        log(
            logging.WARNING,
            "asked to end: saved after %d steps in %s",
            self._trainer.global_steps,
            save_dir,
        )
        raise SystemExit(exit_code)


class _PreemptionWatch:
    """Catches signals that announce the end of this process. All check between two batches."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "save_on_preemption must be called in the main thread, the only one that may catch "
                f"signals, but got thread={threading.current_thread().name!r}. Call it at the "
                "start of the program."
            )
        self._received = 0
        for each in signals:
            signal.signal(each, self._note)

    def exit_code(self) -> int | None:
        """Return 128 plus the number of the signal that any process received. All must call it."""
        # `jax.experimental.multihost_utils.reached_preemption_sync_point` takes 0.03 ms and this
        # gather 4 ms (JAX 0.10.2, two processes that share two cores), but it cannot replace the
        # gather. It is always False in one process without jax.distributed. It handles only SIGTERM
        # and does not say which signal came. It misses the signal if Python's handler of SIGTERM
        # was set after jax.distributed.initialize. And one or two more steps run before it reacts.
        received = int(gather_numbers([self._received]).max())
        return 128 + received if received else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number


def _what_fits(give: Callable[[], T], otherwise: T) -> T:
    """Call `give` for the last checkpoint. If it fails, log a warning and return `otherwise`."""
    try:
        return give()
    except Exception as error:  # noqa: BLE001  # users' code may raise anything
        # Not `log`, which writes only in process 0.
        logging.getLogger("jaxpipe").warning(
            "asked to end, and saving without this: %s", raised(error)
        )
        return otherwise


def _check_item(key: Any, value: Any) -> bool:
    check_json({key: value}, "client_state")
    return True


def _found_by_all(load_dir: AnyPath, tag: str | None) -> Checkpoint | None:
    found = run_on_all(lambda: find_checkpoint(load_dir, tag))
    # A network file system may show a new checkpoint to some processes later than to others.
    tags = gather_texts(
        ""
        if found is None
        else f"{found.tag} {found.commit.sequence} (index {found.commit.index_sha256[:12]})"
    )
    if len(set(tags)) > 1:
        named = ", ".join(f"process {i}: {each or 'none'}" for i, each in enumerate(tags))
        raise CheckpointError(
            f"all processes must find the same checkpoint in {str(load_dir)!r}, but got "
            f"{named}. Use one directory on a file system that all processes can see."
        )
    return found


def _data_position(found: Checkpoint) -> dict[str, Any]:
    """Return the state of this process's data iterator as `MicrobatchSource.set_state` takes it."""
    positions = found.index.data_iterators
    if len(positions) == jax.process_count():
        return _checked_position(found, decode_state(positions[jax.process_index()]))
    if any(each != positions[0] for each in positions):
        warn(
            f"{found.path} holds the places of {len(positions)} data iterators, and there are "
            f"{jax.process_count()} processes now: the data continue from the current position of "
            "each iterator.",
        )
        return {"state": None, "is_own": False}
    return _checked_position(found, decode_state(positions[0]))


def _checked_position(found: Checkpoint, position: Any) -> dict[str, Any]:
    if position is None:  # written without an engine
        return {"state": None, "is_own": False}
    if not isinstance(position, dict) or position.keys() - {"why_none"} != {"state", "is_own"}:
        raise CheckpointError(
            f"{found.path} must hold the place of a data iterator as an engine writes it, but got "
            f"{position!r:.100}. Load another tag, or load_module_only=True."
        )
    return position


def _as_json(value: Any) -> Any:
    """Convert a configuration to JSON. Classes are replaced by their names."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
