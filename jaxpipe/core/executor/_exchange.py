"""Sends and receives: how activations and gradients reach the action that uses them."""

import jax

from jaxpipe.schedules import Sends, TransferBuffers, Transfers

from ._arrays import Packed, Ring
from ._buffers import make_ring, read_ring, select, write_ring_if
from ._packing import Packing


class Channel:
    """The exchange of one kind of value between stages, and between the chunks of one stage.

    A value that is computed in one tick and sent in the next is not buffered. With `sends_early` it
    is sent at the end of its own tick, so the exchange overlaps the tick's backward. On CPU an
    exchange blocks until the other stage takes part. Where idle actions are skipped, an exchange
    within a tick would make stages without a forward wait for those with one, so on CPU the value
    is sent at the beginning of the next tick. The same holds on GPU for schedules that send both
    ways and run forwards and backwards on different stages.

    `depth` is the number of slots of each buffer. `unbuffered` marks those that are not needed.
    """

    def __init__(
        self,
        form: Packing,
        num_stages: int,
        depth: TransferBuffers[int],
        unbuffered: TransferBuffers[bool],
        *,
        sends_early: bool,
    ) -> None:
        self._form = form
        self._num_stages = num_stages
        self._depth = depth
        self._keeps_received = depth.recv > 0 and not unbuffered.recv
        self._sends_at_once = unbuffered.send
        self._sends_early = sends_early and unbuffered.send

    def empty(self) -> TransferBuffers[Ring]:
        """Make the buffers before the first tick; those that are not needed are empty trees."""

        def ring(num_slots: int) -> Ring:
            return (
                self._form.constrain(make_ring(self._form.struct, num_slots), 1)
                if num_slots
                else ()
            )

        return TransferBuffers(
            recv=ring(self._depth.recv if self._keeps_received else 0),
            send=self._form.zeros() if self._sends_at_once else ring(self._depth.send),
            local=ring(self._depth.local),
        )

    def recv(
        self,
        buffers: TransferBuffers[Ring],
        sends: Sends,
        row: Transfers[jax.Array],
        stage: jax.Array,
    ) -> tuple[Packed, TransferBuffers[Ring]]:
        """Run the exchange of a tick. Returns the value for the tick's action, and the buffers."""
        # With early sends the exchange ran at the end of the previous tick, so `send` already holds
        # the value that arrived.
        arrived = buffers.send if self._sends_at_once else self._form.zeros()
        if sends and not self._sends_early:
            with jax.named_scope("send"):
                sent = buffers.send if self._sends_at_once else read_ring(buffers.send, row.send)
                arrived = exchange(sent, sends, stage, row.recv_from, self._num_stages)
        with jax.named_scope("receive"):
            if self._keeps_received:
                if sends:
                    # Written before the read: a value may be used in the tick in which it arrives.
                    buffers = buffers._replace(recv=write_ring_if(buffers.recv, arrived, row.recv))
                arrived = read_ring(buffers.recv, row.read)
            if self._depth.local:
                # Chunks of one stage exchange values through a local buffer, without a send.
                arrived = select(
                    row.local_read >= 0, read_ring(buffers.local, row.local_read), arrived
                )
            return self._form.constrain(arrived), buffers

    def send(
        self,
        buffers: TransferBuffers[Ring],
        next_sends: Sends,
        row: Transfers[jax.Array],
        stage: jax.Array,
        value: Packed,
    ) -> TransferBuffers[Ring]:
        """Pass on the output of a tick's action. `next_sends` are the sends after the tick."""
        with jax.named_scope("send"):
            value = self._form.constrain(value)
            if self._depth.local:
                buffers = buffers._replace(
                    local=write_ring_if(buffers.local, value, row.local_write)
                )
            if self._sends_early:
                value = exchange(value, next_sends, stage, row.next_recv_from, self._num_stages)
                # Without the barrier XLA moves the exchange into the next tick, right before its
                # use, where nothing overlaps it.
                value = jax.lax.optimization_barrier(value)
            if self._sends_at_once:
                return buffers._replace(send=value)
            if self._depth.send:
                return buffers._replace(send=write_ring_if(buffers.send, value, row.write))
            return buffers


def exchange(
    value: Packed, sends: Sends, stage: jax.Array, recv_from: jax.Array, num_stages: int
) -> Packed:
    """Send a value and return what stage `recv_from` sent; if it is -1, return any value."""
    arrived = None
    for hop, pairs in sends.items():
        # One ppermute per distance: in one tick a stage may send in one direction and receive from
        # the other.
        other = jax.tree.map(lambda x, pairs=pairs: jax.lax.ppermute(x, "stage", pairs), value)
        arrived = (
            other
            if arrived is None
            else select((recv_from + hop) % num_stages == stage, other, arrived)
        )
    # If no stage sends, any value of this structure will do.
    return value if arrived is None else arrived
