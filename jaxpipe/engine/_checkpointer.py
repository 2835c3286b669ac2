"""`Checkpointer`: saving and loading in an engine, and saving when the process is asked to end."""

import contextlib
import dataclasses
import logging
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from types import FrameType
from typing import Any, TypeVar

import jax

from jaxpipe._imports import raised
from jaxpipe._paths import any_path
from jaxpipe._stores import AnyPath, StorePath
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
    """Parts of a checkpoint to load; `Engine.load_checkpoint` has them as its arguments.

    Attributes:
        strict: Refuse layers that are not exactly the model's.
        optimizer: Load the optimiser's state and the loss scale.
        lr_scheduler: Load the hyperparameters that the optimiser keeps.
        module_only: Load parameters and collections, and nothing else.
    """

    strict: bool
    optimizer: bool
    lr_scheduler: bool
    module_only: bool


class Checkpointer:
    """Writes and reads the checkpoints of an engine.

    They hold the state and all of the configuration of `trainer`, and the state of the iterator of
    `source`. `when_loaded` is called as soon as another state is in place, to forget what belongs
    to the steps before.
    """

    def __init__(
        self, trainer: Trainer, source: MicrobatchSource, when_loaded: Callable[[], None]
    ) -> None:
        self._trainer, self._source, self._when_loaded = trainer, source, when_loaded
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
        """Write a checkpoint; see `Engine.save_checkpoint`. Returns its folder.

        Where it is the last one that there will be, what cannot be stored of the place in the data
        is left out.
        """
        folder = any_path(save_dir, "save_dir")
        trainer = self._trainer
        pipeline, state = trainer.pipeline, trainer.state
        trainer.block_until_ready()
        position, nowhere = self._source.position, {"is_own": False, "state": None}
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
        # Writing takes longer than a step; the launcher is not to take it for a stall.
        trainer.heartbeat.touch()
        return path

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises CheckpointError where it could not be written.
        """
        self._writer.wait()

    def load(
        self, load_dir: str | PathLike[str] | StorePath, tag: str | None, what: LoadOptions
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint; see `Engine.load_checkpoint`."""
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
        """Read parameters out of safetensors files; see `Engine.load_huggingface`."""
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
                f"{named}. Give them one directory on a file system that all of them see."
            )
        if found is None:
            warnings.warn(
                f"load_checkpoint found no checkpoint in {str(load_dir)!r}; the engine is as it "
                "was.",
                stacklevel=7,
            )
            return None, {}
        trainer = self._trainer
        try:
            undo = trainer.build_for(
                load_struct(found.index.batch) if found.index.batch is not None else None
            )
        except Exception as error:  # whatever a model raises for shapes that are not its own
            layers = ", ".join(layer.name for layer in found.index.layers)
            raise CheckpointError(
                f"{found.path} must be of the model in use, but holds the layers {layers}, and for "
                f"the batches they were trained with the model's own failed: {error} Build the "
                "model from the same layers, or give initialize(example_batch=...) the shapes of "
                "its batches."
            ) from error
        trainer.block_until_ready()
        # Without an optimiser there is a state to fill, but nothing that its numbers would be for.
        optimizer = what.optimizer and not what.module_only and trainer.optimizer is not None
        lr_scheduler = what.lr_scheduler and not what.module_only
        # Then nothing of the present state is used, and one that has not been made, or is lost,
        # need not be.
        needs_all = what.strict and optimizer and lr_scheduler and not found.index.excluded
        restore = self._source.snapshot()
        with contextlib.ExitStack() as exchange:

            def when_read() -> None:
                if not what.module_only:
                    self._source.set_state(**_data_position(found))
                # From here on the old state's arrays go and the new ones come; between them an
                # engine has neither.
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
                trainer.global_steps, trainer.global_samples = (
                    found.index.global_steps,
                    found.index.global_samples,
                )
            self._when_loaded()
        log(logging.INFO, "loaded %s, written after %d steps", found.path, found.index.global_steps)
        return str(found.path), dict(found.index.client_state)

    def save_on_preemption(
        self,
        save_dir: str | PathLike[str] | StorePath,
        signals: Sequence[signal.Signals],
        client_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Begin to watch for signals; see `Engine.save_on_preemption`."""
        # As seen from here: the program may be elsewhere when it ends.
        folder = any_path(save_dir, "save_dir").absolute()
        self._preemption = (_PreemptionWatch(signals), folder, client_state)

    def end_if_preempted(self) -> None:
        """After a step: save and exit if any process was asked to end."""
        if self._preemption is None:
            return
        watch, save_dir, client_state = self._preemption
        exit_code = watch.exit_code()
        if exit_code is None:
            return
        # Whatever fails beside the weights: this is the last chance to keep what was trained.
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
    """Catches signals that announce the end of this process; all processes look between steps.

    Must be made in the main thread, which alone may catch signals.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "save_on_preemption must be called in the main thread, which alone may catch "
                f"signals, but got thread={threading.current_thread().name!r}. Call it where the "
                "program begins."
            )
        self._received = 0
        for each in signals:
            signal.signal(each, self._note)

    def exit_code(self) -> int | None:
        """Exit status of a process that the signal ended, the same on all. All processes call.

        It is 128 plus the signal's number, whichever process got it; None: no signal came.
        """
        # `jax.experimental.multihost_utils.reached_preemption_sync_point` takes 0.03 ms where this
        # gather takes 4 ms (JAX 0.10.2, two processes that share two cores), but cannot replace it:
        # it is always False in one process without jax.distributed, knows SIGTERM alone and not
        # which signal came, is deaf as soon as Python has a handler of SIGTERM that was set after
        # jax.distributed.initialize, and lets one or two more steps pass.
        received = int(gather_numbers([self._received]).max())
        return 128 + received if received else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number


def _what_fits(give: Callable[[], T], otherwise: T) -> T:
    """What a function gives for the last checkpoint; if it fails, something else, and a warning."""
    try:
        return give()
    except Exception as error:  # noqa: BLE001  # of users' code too
        # Not by `log`, which writes in process 0 alone.
        logging.getLogger("jaxpipe").warning(
            "asked to end, and saving without this: %s", raised(error)
        )
        return otherwise


def _check_item(key: Any, value: Any) -> bool:
    check_json({key: value}, "client_state")
    return True


def _data_position(found: Checkpoint) -> dict[str, Any]:
    """State of this process's data iterator, as arguments of `MicrobatchSource.set_state`."""
    positions = found.index.data_iterators
    if len(positions) == jax.process_count():
        return _checked_position(found, decode_state(positions[jax.process_index()]))
    if any(each != positions[0] for each in positions):
        warnings.warn(
            f"{found.path} holds the places of {len(positions)} data iterators, and there are "
            f"{jax.process_count()} processes now: the data begin where the iterators stand.",
            stacklevel=3,
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
    """A configuration as JSON: classes by their names."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
