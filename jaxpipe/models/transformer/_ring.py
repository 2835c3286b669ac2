"""Ring attention: keys and values travel around a mesh axis along which positions are divided.

Each device computes, in blocks, what its queries see of the keys that it holds, and passes keys and
values on to the next device. After one round every query has met every key. The backward makes
another round, on which the gradients of keys and values travel with them.

With a causal mask, contiguous pieces of a text would give the first device little work and the last
one most. So each device works on a stripe instead: of P devices, device p has the positions p,
p + P, p + 2 P and so on. Then all devices compute the same pairs of blocks, about half of the
square.

Reference:
    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023); Brandon et al.,
    "Striped Attention" (2023).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.distributed.topology import SEQUENCE
from jaxpipe.programs.jaxpr import spec_axes

from ._blocked import Blocks, Operands, Pattern, Stripes, Visibility, named, operand_gradients
from ._sharding import Axes, dividing_axes, traced_platform


def ring_refusal(
    pattern: Pattern, q: jax.Array, k: jax.Array, visibility: Visibility
) -> str | None:
    """Return why a ring cannot compute this; None if it can."""
    size = _num_places()
    length = q.shape[1]
    # To make stripes, each device cuts its piece into one part for every device.
    parts = size**2 if _is_striped(pattern) else size
    found = {
        "there is a mask": visibility.mask is not None,
        "probabilities are dropped": pattern.dropout_rate > 0,
        f"there are {length} queries and {k.shape[1]} keys": length != k.shape[1],
        f"there are {length} positions, and a ring of {size} takes multiples of {parts}": length
        % parts
        != 0,
    }
    return next((why for why, holds in found.items() if holds), None)


def ring_attention(pattern: Pattern, given: Operands) -> jax.Array:
    """Compute attention `[B, T, N, Dv]`; T queries and T keys are divided over `sequence`."""
    samples, heads = dividing_axes(given.q.shape[0], given.k.shape[2])
    ring = _Ring(pattern, _num_places(), samples, heads, shifts=traced_platform() != "cpu")
    if not _is_striped(pattern):
        return _attend(ring, given)
    q, k, v, sinks, hides = given
    segments = hides.query_segments, hides.key_segments
    q, k, v, (of_queries, of_keys) = jax.tree.map(ring.stripe, (q, k, v, segments))
    hides = hides._replace(query_segments=of_queries, key_segments=of_keys)
    return ring.unstripe(_attend(ring, Operands(q, k, v, sinks, hides)))


class _Ring(NamedTuple):
    """Static settings of a ring.

    Attributes:
        size: Number of devices.
        samples: Mesh axis or axes that divide samples, or None.
        heads: Mesh axis that divides heads, or None.
        shifts: Whether devices pass values on with `ppermute`. Simulated devices exchange them
            among all: if only some stages run a layer, a `ppermute` in it would wait for the other
            stages (XLA's CPU backend, JAX 0.10).
    """

    pattern: Pattern
    size: int
    samples: Axes
    heads: str | None
    shifts: bool

    def stripe(self, x: jax.Array) -> jax.Array:
        """Move contiguous pieces `[B, T, ...]` to stripes: place p gets p, p + size and so on."""

        def run(x: jax.Array) -> jax.Array:
            x = x.reshape(x.shape[0], -1, self.size, *x.shape[2:])
            return jnp.squeeze(lax.all_to_all(x, SEQUENCE, 2, 1, tiled=True), 2)

        return self.mapped(run, (self.spec(x),), self.spec(x))(x)

    def unstripe(self, x: jax.Array) -> jax.Array:
        """Move stripes back to contiguous pieces."""

        def run(x: jax.Array) -> jax.Array:
            x = lax.all_to_all(jnp.expand_dims(x, 2), SEQUENCE, 1, 2, tiled=True)
            return x.reshape(x.shape[0], -1, *x.shape[3:])

        return self.mapped(run, (self.spec(x),), self.spec(x))(x)

    def spec(self, x: jax.Array) -> P:
        """Return the sharding of `[B, T, heads, D]`, of segments `[B, T]` or of lengths `[B]`."""
        return P(self.samples, SEQUENCE, self.heads) if x.ndim == 4 else P(self.samples, SEQUENCE)

    def mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Map a function over the devices of a stage's replica."""
        # All automatic axes are manual inside, because XLA cannot partition what is left.
        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(mesh.auto_axes),
            check_vma=False,
        )

    def passed(self, values: Any, place: jax.Array) -> Any:
        """Pass values on to the next device. `place` is this one's index."""
        if not self.shifts:
            return jax.tree.map(lambda x: self._passed_among_all(x, place), values)
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, SEQUENCE, pairs), values)

    def _passed_among_all(self, x: jax.Array, place: jax.Array) -> jax.Array:
        sent = jnp.zeros((self.size, *x.shape), x.dtype).at[(place + 1) % self.size].set(x)
        return lax.all_to_all(sent, SEQUENCE, 0, 0)[(place - 1) % self.size]

    def stripes(self, place: jax.Array, source: jax.Array, length: int) -> Stripes:
        """Return the positions of the queries of `place` and of the keys that `source` had."""
        if _is_striped(self.pattern):
            return Stripes(self.size, place, source)
        return Stripes(1, place * length, source * length)

    def round(
        self, turn: Callable[..., Any], state: Any, held: Any, place: jax.Array
    ) -> tuple[Any, Any]:
        """Call `turn(state, held, back)` with what the device `back` places before this one had.

        Starts with its own, and returns the state and the values that are held last.
        """

        def body(carry: tuple[Any, Any], back: jax.Array) -> tuple[tuple[Any, Any], None]:
            state, held = turn(*carry, back)
            return (state, self.passed(held, place)), None

        # The last turn is outside the loop, because nothing needs to be passed on after it.
        turns = jnp.arange(self.size - 1, dtype=jnp.int32)
        (state, held), _ = lax.scan(body, (state, held), turns)
        return turn(state, held, jnp.int32(self.size - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, given: Operands) -> jax.Array:
    """Compute attention of queries to keys that are divided in the same way."""
    return _forward(ring, given)[0]


def _forward(ring: _Ring, given: Operands) -> tuple[Any, Any]:
    def run(places: jax.Array, given: Operands) -> tuple[jax.Array, jax.Array]:
        q, k, v, sinks, hides = given

        def turn(sums: Any, held: Any, back: jax.Array) -> tuple[Any, Any]:
            k, v, of_keys = held
            return _blocks(ring, places[0], given, of_keys, back).add(sums, q, k, v), held

        of_keys = hides.key_segments
        own = _blocks(ring, places[0], given, of_keys, 0)
        sums, _ = ring.round(turn, own.start(v, sinks), (k, v, of_keys), places[0])
        return own.finish(sums, q.dtype)

    specs = (P(SEQUENCE), _specs(ring, given))
    mapped = ring.mapped(run, specs, (ring.spec(given.q), _log_sum_spec(ring)))
    out, log_sum = named(*mapped(_places(ring), given))
    return out, (given, out, log_sum)


def _backward(ring: _Ring, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    def run(
        places: jax.Array, given: Operands, out: jax.Array, log_sum: jax.Array, grad: jax.Array
    ) -> Any:
        q, k, v, sinks, hides = given
        of_keys = hides.key_segments
        own = _blocks(ring, places[0], given, of_keys, 0)
        rows = own.rows(out, log_sum, grad)

        def turn(dq: jax.Array, held: Any, back: jax.Array) -> tuple[Any, Any]:
            k, v, of_keys, dk, dv = held
            blocks = _blocks(ring, places[0], given, of_keys, back)
            grads = blocks.add_gradients((dq, dk, dv), q, k, v, grad, rows)
            return grads[0], (k, v, of_keys, *grads[1:])

        dq, dk, dv = own.zero_gradients(q, k, v)
        dq, held = ring.round(turn, dq, (k, v, of_keys, dk, dv), places[0])
        # After the last turn the gradients are one device away from their keys.
        dk, dv = ring.passed(held[3:], places[0])
        to_sinks = own.sink_gradient(sinks, rows)
        if to_sinks is not None:
            # Each device has the part from its own queries and samples, of its own heads.
            to_sinks = lax.psum(to_sinks, (SEQUENCE, *spec_axes(ring.samples)))
        return *own.gradients((dq, dk, dv), (q, k, v)), to_sinks

    given, out, log_sum = residuals
    specs = _specs(ring, given)
    others = (ring.spec(out), _log_sum_spec(ring), ring.spec(grad))
    mapped = ring.mapped(run, (P(SEQUENCE), specs, *others), specs[:4])
    found = mapped(_places(ring), given, out, log_sum, grad)
    return (operand_gradients(*found),)


_attend.defvjp(_forward, _backward)


def _blocks(ring: _Ring, place: jax.Array, given: Operands, of_keys: Any, back: Any) -> Blocks:
    """Return the blocks of the queries of `place` and of keys that come from `back` places away."""
    seen = given.visibility._replace(key_segments=of_keys)
    stripes = ring.stripes(place, (place - back) % ring.size, given.q.shape[1])
    return Blocks(ring.pattern, given.q, given.k, seen, stripes)


def _specs(ring: _Ring, given: Operands) -> Any:
    """Return the shardings of the arguments of `_attend`."""
    q, k, v, sinks, hides = given
    of_queries, of_keys = (
        None if x is None else ring.spec(x) for x in (hides.query_segments, hides.key_segments)
    )
    of_lengths = None if hides.lengths is None else P(ring.samples)
    of_sinks = None if sinks is None else P(ring.heads)
    # Shardings where arrays are: the same trees.
    seen: Any = Visibility(None, of_lengths, of_queries, of_keys)  # pyright: ignore[reportArgumentType]
    each: Any = ring.spec(q), ring.spec(k), ring.spec(v), of_sinks, seen
    return Operands(*each)


def _log_sum_spec(ring: _Ring) -> P:
    return P(ring.samples, ring.heads, None, SEQUENCE)


def _places(ring: _Ring) -> jax.Array:
    return jnp.arange(ring.size, dtype=jnp.int32)


def _num_places() -> int:
    return jax.sharding.get_abstract_mesh().shape[SEQUENCE]


def _is_striped(pattern: Pattern) -> bool:
    """Whether positions hide keys, so that contiguous pieces would have unequal work."""
    return pattern.causal or pattern.window is not None
