"""Saving and loading in an engine."""

import contextlib
import dataclasses
import logging
import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import jax
import optax

from jaxpipe.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    RunState,
    decode_state,
    find_checkpoint,
    load_state,
    load_struct,
    reread,
)
from jaxpipe.config import TrainConfig
from jaxpipe.distributed import Heartbeat, gather_numbers, gather_texts, log, together
from jaxpipe.errors import CheckpointError
from jaxpipe.pipeline import Pipeline
from jaxpipe.state import TrainState

from ._hold import hold_signals
from ._preemption import PreemptionWatch
from ._source import MicrobatchSource
from ._turn import Turn, one_thread


class Checkpoints(ABC):
    """Base of `PipelineEngine` that writes and reads checkpoints.

    Args:
        config: Its section `checkpoint` counts, and all of it is stored.
    """

    global_steps: int
    global_samples: int
    optimizer: optax.GradientTransformation | None
    _source: MicrobatchSource
    _heartbeat: Heartbeat
    _state: TrainState | None
    _turn: Turn

    def __init__(self, config: TrainConfig) -> None:
        self._config, section = config, config.checkpoint
        self._writer = CheckpointWriter(section.keep_last, section.keep_every)
        self._preemption: tuple[PreemptionWatch, str, Callable[[], Mapping[str, Any]]] | None = None

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The functional form."""

    @property
    @abstractmethod
    def state(self) -> TrainState:
        """The present state."""

    @abstractmethod
    def _present(self) -> TrainState | None:
        """The state if there is one whose arrays are there."""

    @abstractmethod
    def _settle(self) -> None:
        """On simulated devices, let the program in flight end."""

    @abstractmethod
    def _build_for(self, batch: Any) -> Callable[[], None]:
        """Build the pipeline for a microbatch `(inputs, labels, side)` of another run, unless shapes are known.

        Args:
            batch: Shapes and dtypes; None: not known.

        Returns:
            What undoes it.
        """

    @abstractmethod
    def _restart(self) -> None:
        """Forget what belongs to the steps before."""

    @one_thread
    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},  # noqa: B006  # DeepSpeed's signature; never changed
        save_latest: bool = True,
    ) -> bool:
        """Write a checkpoint to `save_dir/tag`; all processes call.

        It holds parameters, the optimiser's state, the loss scale, what layers keep beside parameters, counters, the
        run's key, the learning rate's state, the place of the training iterator if it has `get_state` and `set_state`,
        the configuration and a table of layers, and opens at any number of stages and replicas. It is there whole or
        not at all, at every moment; a tag that is there is replaced at the end. With `checkpoint.async_save` the call
        returns as soon as training may go on; `wait_for_checkpoint`, or the end of the program, waits for the rest.

        Args:
            save_dir: A directory that all processes see. Only one run may save there at a time.
            tag: Name of the checkpoint, a folder; None: `global_step<N>`.
            client_state: A dictionary of numbers, strings, lists and dictionaries, which `load_checkpoint` returns.
            save_latest: Whether `load_checkpoint` without a tag may find it; the file `latest` then names it.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: `save_dir` is no path, the tag is no name or differs between processes, `client_state`
                holds something else, the directory cannot be written, or the last save in the background failed.
                Earlier checkpoints are as they were.
            PipelineError: No shapes are known yet.

        Reference:
            DeepSpeed's `save_checkpoint`, whose files are pickles.
        """
        check_path(save_dir, "save_dir")
        pipeline, state = self.pipeline, self.state
        self._settle()
        run = RunState(
            global_steps=self.global_steps,
            global_samples=self.global_samples,
            data_iterator={"is_own": self._source.is_own, "state": self._source.get_state()},
            client_state=client_state,
            config=_as_json(dataclasses.asdict(self._config)),
        )
        background = self._config.checkpoint.async_save
        self._writer.save(save_dir, pipeline, state, run, tag=tag, save_latest=save_latest, background=background)
        self._heartbeat.beat()
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is on disk; all processes call.

        A program that ends without it waits too, and where the checkpoint could not be written says so and exits with
        status 120.

        Raises:
            CheckpointError: It could not be written.
        """
        self._writer.wait()

    @one_thread
    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint, written with any number of stages and replicas, with or without ZeRO.

        Args:
            load_dir: What was given to `save_checkpoint`.
            tag: Name of the checkpoint; None: the last that was committed with `save_latest`.
            load_module_strict: Refuse layers that are not exactly the model's. Otherwise what fits is loaded and a
                warning names the rest, which keeps its values.
            load_optimizer_states: Load the optimiser's state and the loss scale; else they stay.
            load_lr_scheduler_states: Load the hyperparameters that the optimiser keeps, such as the learning rate, and
                the place in their schedule; else they stay.
            load_module_only: Load parameters and what layers keep beside them, and nothing else: no counters, no place
                in the data.

        Returns:
            `(path, client_state)`: the checkpoint's folder, and what `save_checkpoint` was given. `(None, {})` with a
            warning where the directory holds no checkpoint.

        Raises:
            CheckpointError: `load_dir` is no path, there is none with that tag, it is damaged, or its layers or the
                optimiser's state do not fit; the engine is as it was.
            DataError: The place in the data does not fit the iterator that is set; the engine is as it was.
            PipelineError: No shapes are known yet, and the checkpoint does not tell them.

        Reference:
            DeepSpeed's `load_checkpoint`, which returns `(None, None)` where there is none.
        """
        check_path(load_dir, "load_dir")
        self._writer.wait()
        given = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return reread(
            load_dir,
            lambda: self._load_checkpoint(load_dir, tag, *given),
            agreed=lambda changed: bool(gather_numbers([changed]).any()),
        )

    def _load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None,
        load_module_strict: bool,
        load_optimizer_states: bool,
        load_lr_scheduler_states: bool,
        load_module_only: bool,
    ) -> tuple[str | None, dict[str, Any]]:
        found = together(lambda: find_checkpoint(load_dir, tag))
        tags = gather_texts("" if found is None else f"{found.tag} {found.commit.sequence}")
        if len(set(tags)) > 1:
            named = ", ".join(f"process {i}: {each or 'none'}" for i, each in enumerate(tags))
            raise CheckpointError(
                f"all processes must find the same checkpoint in {fspath(load_dir)!r}, but got {named}. Give them one "
                "directory on a file system that all of them see."
            )
        if found is None:
            warnings.warn(
                f"load_checkpoint found no checkpoint in {fspath(load_dir)!r}; the engine is as it was.", stacklevel=6
            )
            return None, {}
        try:
            undo = self._build_for(load_struct(found.index.batch) if found.index.batch is not None else None)
        except Exception as error:  # whatever a model raises for shapes that are not its own
            layers = ", ".join(layer.name for layer in found.index.layers)
            raise CheckpointError(
                f"{found.path} must be of the model in use, but holds the layers {layers}, and for the batches they "
                f"were trained with the model's own failed: {error} Build the model from the same layers, or give "
                "initialize(example_batch=...) the shapes of its batches."
            ) from error
        self._settle()
        optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        lr_scheduler = load_lr_scheduler_states and not load_module_only
        needs_all = load_module_strict and optimizer and lr_scheduler
        put_back = self._source.remember()
        with contextlib.ExitStack() as held:

            def when_read() -> None:
                if not load_module_only:
                    self._source.set_state(**_place_in_data(found))
                held.enter_context(hold_signals())  # from here on the old state goes and the new one comes

            try:
                state = load_state(
                    found,
                    self.pipeline,
                    self._present() if needs_all else self.state,
                    strict=load_module_strict,
                    optimizer=optimizer,
                    lr_scheduler=lr_scheduler,
                    counters=not load_module_only,
                    when_read=when_read,
                )
            except BaseException:
                put_back()
                undo()
                raise
            self._state = state
            if not load_module_only:
                self.global_steps, self.global_samples = found.index.global_steps, found.index.global_samples
            self._restart()
        log(logging.INFO, "loaded %s, written after %d steps", found.path, found.index.global_steps)
        return str(found.path), dict(found.index.client_state)

    def save_on_preemption(
        self,
        save_dir: str | PathLike[str],
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        client_state: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """From now on, when the process is asked to end, finish the step, save, and exit.

        Schedulers send SIGTERM some time before they take a node away. The next `train_batch` that ends after it, or
        the `step` that updates, writes a checkpoint with the tag `global_step<N>`, waits until it is committed, and
        raises `SystemExit` with 128 plus the signal's number, so that `finally` clauses run. All processes call.

        Args:
            save_dir: As for `save_checkpoint`.
            signals: What to wait for.
            client_state: Called for the `client_state` of that checkpoint.

        Raises:
            CheckpointError: It is not called in the main thread, or `save_dir` is no path.
        """
        check_path(save_dir, "save_dir")
        self._preemption = (PreemptionWatch(signals), fspath(save_dir), client_state)

    def _end_if_preempted(self) -> None:
        if self._preemption is None:
            return
        watch, save_dir, client_state = self._preemption
        exit_code = watch.exit_code()
        if exit_code is None:
            return
        try:
            self.wait_for_checkpoint()
        except CheckpointError as error:
            log(logging.WARNING, "%s", error)
        self.save_checkpoint(save_dir, client_state=client_state())
        self.wait_for_checkpoint()
        log(logging.WARNING, "asked to end: saved after %d steps in %s", self.global_steps, save_dir)
        raise SystemExit(exit_code)


def check_path(path: Any, name: str) -> None:
    """Refuse what is no path of a folder.

    Raises:
        CheckpointError: It is empty, or neither a string nor a `pathlib.Path`.
    """
    if not isinstance(path, str | PathLike) or not fspath(path):
        raise CheckpointError(
            f"{name} must be the path of a directory, a string or a pathlib.Path, but got {name}={path!r}. Name one, "
            "such as 'checkpoints', or '.' for the working directory."
        )


def _place_in_data(found: Checkpoint) -> dict[str, Any]:
    """Where this process's data iterator stood, as arguments of `MicrobatchSource.set_state`."""
    held = found.index.data_iterators
    if len(held) == jax.process_count():
        return _checked_place(found, decode_state(held[jax.process_index()]))
    if any(each != held[0] for each in held):
        warnings.warn(
            f"{found.path} holds the places of {len(held)} data iterators, and there are {jax.process_count()} "
            "processes now: the data begin where the iterators stand.",
            stacklevel=3,
        )
        return {"state": None, "is_own": False}
    return _checked_place(found, decode_state(held[0]))


def _checked_place(found: Checkpoint, place: Any) -> dict[str, Any]:
    if place is None:  # written without an engine
        return {"state": None, "is_own": False}
    if not isinstance(place, dict) or place.keys() != {"state", "is_own"}:
        raise CheckpointError(
            f"{found.path} must hold the place of a data iterator as an engine writes it, but got {place!r:.100}. Load "
            "another tag, or load_module_only=True."
        )
    return place


def _as_json(value: Any) -> Any:
    """A configuration as JSON: classes by their names."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
