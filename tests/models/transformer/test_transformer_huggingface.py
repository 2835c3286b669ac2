"""The transformer layer against Hugging Face's BERT layer with the same weights.

Needs torch and transformers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
B, T, H, N = 2, 9, 32, 4


def bert_layer() -> Any:
    """A layer with random weights, biases and norms too.

    They come in the order of DeepSpeed's tests.
    """
    from transformers.models.bert.modeling_bert import BertLayer

    sizes = {"hidden_size": H, "num_attention_heads": N, "intermediate_size": 4 * H}
    config = transformers.BertConfig(**sizes, attn_implementation="eager", hidden_act="gelu")
    layer = BertLayer(config).eval()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    own, attended = layer.attention.self, layer.attention.output
    parts = [own.query, own.key, own.value, attended.dense, attended.LayerNorm]
    return layer, [*parts, layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm]


def numpy_of(value: Any) -> np.ndarray:
    return value.detach().numpy()


@pytest.mark.slow
def test_outputs_and_gradients_of_bert() -> None:
    theirs, parts = bert_layer()
    rng = np.random.default_rng(0)
    x, grad = rng.normal(size=(2, B, T, H)).astype(np.float32)
    seen = np.arange(T) < np.array([[T], [5]])
    given = torch.tensor(x, requires_grad=True)
    added = torch.tensor(np.where(seen, 0.0, -1e9).astype(np.float32))[:, None, None]
    wanted = theirs(given, attention_mask=added)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    wanted.backward(torch.tensor(grad))

    config = DeepSpeedTransformerConfig(
        hidden_size=H,
        heads=N,
        num_hidden_layers=1,
        pre_layer_norm=False,
        activation=functools.partial(jax.nn.gelu, approximate=False),
    )
    arrays = [[numpy_of(getattr(each, name)) for each in parts] for name in ("weight", "bias")]
    module = DeepSpeedTransformerLayer(config, *arrays)
    params = module.init(jax.random.key(0), jnp.asarray(x))
    found, pullback = jax.vjp(lambda p, x: module.apply(p, x, jnp.asarray(seen)), params, x)
    np.testing.assert_allclose(found, numpy_of(wanted), rtol=1e-5, atol=1e-5)

    grads, of_input = pullback(jnp.asarray(grad))
    np.testing.assert_allclose(of_input, numpy_of(given.grad), rtol=1e-4, atol=1e-4)
    # Their gradients go the way their weights went.
    their_grads = [
        [numpy_of(getattr(each, name).grad) for each in parts] for name in ("weight", "bias")
    ]
    wanted_grads = DeepSpeedTransformerLayer(config, *their_grads).init(
        jax.random.key(0), jnp.asarray(x)
    )
    for name, value in wanted_grads["params"].items():
        scale = max(float(jnp.abs(value.value).max()), 1e-3)
        error = float(jnp.abs(grads["params"][name].value - value.value).max()) / scale
        assert error <= 1e-4, (name, error)
