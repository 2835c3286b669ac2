"""Named random streams over JAX keys, after DeepSpeed's tracker of CUDA's random states."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxpipe._numbers import as_integer
from jaxpipe.errors import ConfigError, LayerError

DEFAULT_RNG = "default-rng"
MODEL_PARALLEL_RNG = "model-parallel-rng"
_MODEL_PARALLEL_OFFSET = 2718
_MAX_SEED = 2**31


class RNGState(NamedTuple):
    """One stream: plain numbers, so that it can be written beside a checkpoint as it is.

    Attributes:
        seed: The stream's seed; on model rank r of a stream that is `over_model`, `seed + r`.
        num_forks: How many keys have been taken.
        over_model: Whether the stream is another one on each place of the `model` axis.
    """

    seed: int
    num_forks: int = 0
    over_model: bool = False


class CudaRNGStatesTracker:
    """Named streams of random keys.

    JAX has no hidden random state that `fork` could swap: it yields the key to use. Outside
    compiled code the stream counts, and each `fork` yields a new key. Inside a function that JAX
    traces, a count would be frozen into the program, so there the key comes from the caller's own
    one, which changes from call to call:

        with tracker.fork(key=layer_key) as key:
            mask = jax.random.bernoulli(key, keep, x.shape)

    Reference:
        DeepSpeed's class of the same name, after Megatron-LM's.
    """

    def __init__(self) -> None:
        self._states: dict[str, RNGState] = {}

    def reset(self) -> None:
        """Forget all streams."""
        self._states = {}

    def get_states(self) -> dict[str, RNGState]:
        """The streams by name; a copy."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, RNGState | list[Any]]) -> None:
        """Replace all streams.

        Args:
            states: As `get_states` returned it; a stream may also be a list `[seed, num_forks,
                over_model]`, as JSON gives it back.

        Raises:
            ConfigError: It is no mapping from names to such states.
        """
        self._states = _checked_states(states)

    def add(self, name: str, seed: int, *, over_model: bool | None = None) -> None:
        """Start a stream.

        Args:
            name: Its name.
            seed: Its seed, another one than any other stream's.
            over_model: Whether it is another stream on each place of the `model` axis, with the
                seed `seed + rank`; by default only `"model-parallel-rng"` is, to which DeepSpeed's
                callers add the rank themselves.

        Raises:
            ConfigError: The name or the seed is taken, or the seed is no integer in `[0, 2**31)`.
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
                f"{taken[seed]!r} has. Choose another seed: equal seeds give equal streams."
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

        With s = the stream's seed, plus the model rank if it is `over_model`:

        - without `key`: `fold_in(jax.random.key(s), n)` for the n-th such call since `add`, n from
          0. The stream counts, and `get_states`/`set_states` repeat it. Only outside traced code.
        - with `key`: `fold_in(key, s)`. The stream does not count: equal keys give equal keys, so
          give each use in a layer a key of its own. This works anywhere, and under recompute; it
          differs between steps, microbatches, layers and data replicas just where `key` does, and
          between model ranks where the stream is `over_model`.

        Args:
            name: The stream.
            key: The caller's key; a layer's own inside traced code.
            model_rank: Place on the `model` axis. Default: the place where the code runs, inside a
                `shard_map` over that axis; else 0.

        Yields:
            The key.

        Raises:
            ConfigError: There is no such stream.
            LayerError: No `key` is given in traced code.
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
                f"fork({name!r}, key=key) with a key that the function gets, such as the layer's "
                "make_rng('dropout')."
            )
        self._states[name] = state._replace(num_forks=state.num_forks + 1)
        yield counted


_TRACKER: ContextVar[CudaRNGStatesTracker] = ContextVar("jaxpipe_rng_tracker")
"""The tracker that `get_cuda_rng_tracker` returns.

DeepSpeed's calls name no tracker, so one has to be found from anywhere. A context variable keeps
those of different threads apart, which a plain global would not.
"""


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this thread; at first it is empty."""
    tracker = _TRACKER.get(None)
    if tracker is None:
        tracker = CudaRNGStatesTracker()
        _TRACKER.set(tracker)
    return tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Start the tracker's two streams anew.

    - `"default-rng"`, seed `seed`: the same on all places of the `model` axis, for dropout of what
      is replicated there. DeepSpeed keeps this one as CUDA's own state.
    - `"model-parallel-rng"`, seed `seed + 2718 + model rank`: another one on each place, for
      dropout of what is sharded there.

    Neither depends on the data replica by itself; with `fork(name, key=key)` both do if the key
    does, as the keys that layers get from the pipeline.

    Args:
        seed: An integer.

    Raises:
        ConfigError: It is no integer in `[0, 2**31 - 2718)`.
    """
    _check_seed(seed, _MAX_SEED - _MODEL_PARALLEL_OFFSET)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(DEFAULT_RNG, seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + _MODEL_PARALLEL_OFFSET, over_model=True)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Start the stream `"model-parallel-rng"` anew and leave the others.

    Args:
        seed: An integer; the stream's seed is `seed + 2718 + model rank`.

    Raises:
        ConfigError: It is no integer in `[0, 2**31 - 2718)`, or another stream has its seed.
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
            "JAX key: a stream makes its own keys."
        )


def _checked_states(states: object) -> dict[str, RNGState]:
    if not isinstance(states, Mapping):
        raise ConfigError(
            f"states must be a mapping from stream names to states, but got states={states!r}. "
            "Pass what get_states() returned."
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
            f"got {state!r}. Pass what get_states() returned."
        )
    return RNGState(*fields)
