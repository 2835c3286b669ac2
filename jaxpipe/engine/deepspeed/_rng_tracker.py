"""Named streams of JAX keys, modelled on DeepSpeed's tracker of CUDA random states."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxpipe._util.numbers import as_integer
from jaxpipe.errors import ConfigError, LayerError

DEFAULT_RNG = "default-rng"
MODEL_PARALLEL_RNG = "model-parallel-rng"
_MODEL_PARALLEL_OFFSET = 2718
_MAX_SEED = 2**31


class RNGState(NamedTuple):
    """The state of one stream, in plain numbers that can be stored with a checkpoint.

    Attributes:
        seed: The stream's seed. With `over_model`, model rank r uses `seed + r`.
        num_forks: Number of keys taken so far.
        over_model: Whether the stream differs between the ranks of the `model` axis.
    """

    seed: int
    num_forks: int = 0
    over_model: bool = False


class CudaRNGStatesTracker:
    """Named streams of random keys.

    JAX has no hidden random state that `fork` could swap, so `fork` yields the key to use. Outside
    compiled code, the stream has a counter, and each `fork` yields a new key. Inside a traced
    function, the counter would become a constant of the program. There the key is derived from the
    caller's own key, which changes from call to call:

        with tracker.fork(key=layer_key) as key:
            mask = jax.random.bernoulli(key, keep, x.shape)

    Reference:
        DeepSpeed's class of the same name, modelled on Megatron-LM's.
    """

    def __init__(self) -> None:
        self._states: dict[str, RNGState] = {}

    def reset(self) -> None:
        """Forget all streams."""
        self._states = {}

    def get_states(self) -> dict[str, RNGState]:
        """Return a copy of the streams by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, RNGState | list[Any]]) -> None:
        """Replace all streams.

        Args:
            states: Streams as `get_states` returns them. A stream may also be a list `[seed,
                num_forks, over_model]`, as read from JSON.

        Raises:
            ConfigError: `states` is not a mapping from names to stream states.
        """
        self._states = _checked_states(states)

    def add(self, name: str, seed: int, *, over_model: bool | None = None) -> None:
        """Start a stream.

        Args:
            name: Name of the stream.
            seed: Seed of the stream, which no other stream may have.
            over_model: Whether the stream differs between the ranks of the `model` axis, with the
                seed `seed + rank`. Default: True only for `"model-parallel-rng"`, where callers of
                DeepSpeed add the rank themselves.

        Raises:
            ConfigError: The name or the seed is already in use, or the seed is not an integer in
                `[0, 2**31)`.
        """
        _check_seed(seed)
        taken = {state.seed: other for other, state in self._states.items()}
        if name in self._states:
            raise ConfigError(
                f"name must be new to the tracker, but got name={name!r}, whose seed is "
                f"{self._states[name].seed}. Choose another name, or call reset() first."
            )
        if seed in taken:
            raise ConfigError(
                f"seed must be new to the tracker, but got seed={seed}, which stream "
                f"{taken[seed]!r} uses. Choose another seed: equal seeds produce equal streams."
            )
        self._states[name] = RNGState(
            seed, 0, name == MODEL_PARALLEL_RNG if over_model is None else over_model
        )

    @contextmanager
    def fork(
        self,
        name: str = MODEL_PARALLEL_RNG,
        *,
        key: jax.Array | None = None,
        model_rank: int | None = None,
    ) -> Generator[jax.Array]:
        """Take a key from a stream.

        Let s be the stream's seed, plus the model rank if the stream is `over_model`.

        - Without `key`, the result is `fold_in(jax.random.key(s), n)`, where n counts these calls
          since `add`, from 0. `get_states` and `set_states` save and restore the counter. This
          works only outside traced code.
        - With `key`, the result is `fold_in(key, s)`. The stream does not count: equal keys produce
          equal keys, so pass a different key for each use in a layer. This works anywhere, also
          under recompute. The result differs between steps, microbatches, layers and data replicas
          exactly if `key` does, and between model ranks if the stream is `over_model`.

        Args:
            name: Name of the stream.
            key: The caller's key; inside traced code, the layer's own key.
            model_rank: Index on the `model` axis. Default: the index of the device that runs the
                code, inside a `shard_map` over that axis; otherwise 0.

        Yields:
            The key.

        Raises:
            ConfigError: The stream does not exist.
            LayerError: `key` is not given in traced code.
        """
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise ConfigError(
                f"name must be a stream of the tracker, but got name={name!r}; its streams: "
                f"{known}. Call model_parallel_cuda_manual_seed(seed), or add(name, seed), first."
            )
        state = self._states[name]
        if key is not None:
            yield jax.random.fold_in(key, _seed_here(state, model_rank))
            return
        counted = jax.random.fold_in(jax.random.key(_seed_here(state, model_rank)), state.num_forks)
        if isinstance(counted, Tracer):
            raise LayerError(
                "fork must be given a key inside traced code, where a count would be the same in "
                f"every call of the program, but got key=None for stream {name!r}. Write "
                f"fork({name!r}, key=key) with a key passed to the function, such as the layer's "
                "make_rng('dropout')."
            )
        self._states[name] = state._replace(num_forks=state.num_forks + 1)
        yield counted


_TRACKER: ContextVar[CudaRNGStatesTracker] = ContextVar("jaxpipe_rng_tracker")
"""The tracker that `get_cuda_rng_tracker` returns.

DeepSpeed's functions take no tracker as an argument, so it must be accessible from anywhere. A
context variable gives each thread its own tracker; a plain global would not.
"""


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this thread, which is empty at first."""
    tracker = _TRACKER.get(None)
    if tracker is None:
        tracker = CudaRNGStatesTracker()
        _TRACKER.set(tracker)
    return tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Reset the tracker and start its two streams.

    - `"default-rng"`, with seed `seed`, is the same on all ranks of the `model` axis, for dropout
      of replicated activations. DeepSpeed uses CUDA's own state for this stream.
    - `"model-parallel-rng"`, with seed `seed + 2718 + model rank`, differs between the ranks of the
      `model` axis, for dropout of sharded activations.

    Neither stream depends on the data replica. With `fork(name, key=key)`, the result depends on
    the replica if the key does, as do the keys that layers receive from the pipeline.

    Args:
        seed: The seed.

    Raises:
        ConfigError: `seed` is not an integer in `[0, 2**31 - 2718)`.
    """
    _check_seed(seed, _MAX_SEED - _MODEL_PARALLEL_OFFSET)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(DEFAULT_RNG, seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + _MODEL_PARALLEL_OFFSET, over_model=True)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Restart the stream `"model-parallel-rng"`, and keep the others.

    Args:
        seed: An integer. The stream's seed is `seed + 2718 + model rank`.

    Raises:
        ConfigError: `seed` is not an integer in `[0, 2**31 - 2718)`, or another stream uses the
            resulting seed.
    """
    _check_seed(seed, _MAX_SEED - _MODEL_PARALLEL_OFFSET)
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.set_states(
        {name: state for name, state in before.items() if name != MODEL_PARALLEL_RNG}
    )
    try:
        tracker.add(MODEL_PARALLEL_RNG, seed + _MODEL_PARALLEL_OFFSET, over_model=True)
    except ConfigError:
        tracker.set_states(before)
        raise


def _seed_here(state: RNGState, model_rank: int | None) -> jax.Array | int:
    if not state.over_model:
        return state.seed
    if model_rank is not None:
        return state.seed + model_rank
    try:
        rank = lax.axis_index("model")
    except NameError:
        return state.seed
    return jnp.uint32(state.seed) + rank.astype(jnp.uint32)


def _check_seed(seed: Any, limit: int = _MAX_SEED) -> None:
    if as_integer(seed, 0) is None or seed >= limit:
        raise ConfigError(
            f"seed must be an integer in [0, {limit}), but got seed={seed!r}. Pass a number, not a "
            "JAX key: a stream creates its own keys."
        )


def _checked_states(states: object) -> dict[str, RNGState]:
    if not isinstance(states, Mapping):
        raise ConfigError(
            f"states must be a mapping from stream names to states, but got states={states!r}. "
            "Pass the result of get_states()."
        )
    return {
        name: _checked_state(name, state)
        for name, state in cast("Mapping[str, object]", states).items()
    }


def _checked_state(name: str, state: object) -> RNGState:
    fields = list(cast("Sequence[Any]", state)) if isinstance(state, tuple | list) else []
    kinds = (int, int, bool)
    if len(fields) != len(kinds) or any(
        type(value) is not kind for value, kind in zip(fields, kinds, strict=True)
    ):
        raise ConfigError(
            f"the state of stream {name!r} must be an RNGState (seed, num_forks, over_model), but "
            f"got {state!r}. Pass the result of get_states()."
        )
    return RNGState(*fields)
