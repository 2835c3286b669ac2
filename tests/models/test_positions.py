"""Chunks of packed texts."""

from itertools import product

import jax
import numpy as np
import pytest

from jaxpipe import PipelineModule
from jaxpipe.models import LayerPattern, LlamaConfig, llama
from jaxpipe.models._positions import chunks_of, positions_of


def test_tokens_share_a_chunk_if_they_do_in_their_text() -> None:
    for is_packed, size in product((False, True), (1, 2, 3, 7, 8)):
        length = 7
        ids = np.array([[5, 5, 5, 5, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1]]) if is_packed else None
        positions = np.broadcast_to(positions_of(length, ids), (2, length))
        found = chunks_of(positions, ids, size, 2)
        assert found.shape == (2, length), (size, is_packed)
        texts = np.zeros_like(positions) if ids is None else ids
        for b, i, j in np.ndindex(2, length, length):
            are_together = texts[b, i] == texts[b, j]
            are_together &= positions[b, i] // size == positions[b, j] // size
            assert (found[b, i] == found[b, j]) == are_together, (size, is_packed)


@pytest.mark.slow
def test_positions_of_the_caller_may_begin_in_the_middle_of_a_chunk() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(
        **sizes,
        num_attention_heads=2,
        pattern=LayerPattern(attention_chunk_size=4, layer_types=("chunked_attention",)),
        initializer_range=1.0,
    )
    module = PipelineModule(llama(config), num_stages=1)
    tokens = np.array([[1, 2, 3, 4]], np.int32)
    params = module.init(jax.random.key(0), tokens)
    side = {"positions": np.arange(2, 6)[None]}
    found = module.apply(params, tokens, side=side)[:, 2:]
    # The second chunk does not see the first.
    other = module.apply(params, np.array([[5, 6, 3, 4]], np.int32), side=side)[:, 2:]
    np.testing.assert_array_equal(found, other)
    assert not np.array_equal(module.apply(params, tokens)[:, 2:], found)
