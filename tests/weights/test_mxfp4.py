"""Experts' weights in MXFP4."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpipe import PipelineModule
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import flatten_dict, join_path
from jaxpipe.models import LlamaConfig, llama, llama_names
from jaxpipe.weights import RenamedFiles, rename_back
from jaxpipe.weights._mxfp4 import Mxfp4Tensor

GPT_OSS: dict[str, Any] = {
    **{"model_type": "gpt_oss", "vocab_size": 16, "hidden_size": 64, "intermediate_size": 32},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
    **{"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def some_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weight `[E, in, out]`, number by number."""
    experts, features, groups, _ = blocks.shape
    found = np.zeros((experts, groups * 32, features))
    for e, out, group, byte in np.ndindex(blocks.shape):
        for half in range(2):
            bits = int(blocks[e, out, group, byte]) >> (4 * half) & 0xF
            number = MAGNITUDES[bits % 8] * (-1 if bits >= 8 else 1)
            at = e, 32 * group + 2 * byte + half, out
            found[at] = number * 2.0 ** (int(scales[e, out, group]) - 127)
    return found


def test_each_slice_is_that_of_the_whole_weight() -> None:
    blocks, scales = some_bytes(2, 3, 4, 16), some_bytes(2, 3, 4) % 255
    tensor, wanted = Mxfp4Tensor(blocks, scales), decoded(blocks, scales)
    assert tensor.shape == wanted.shape
    for cut in ((0, 128), (5, 70), (32, 64), (127, 128), (9, 9)):
        at = slice(1, 2), slice(*cut), slice(1, 3)
        found = tensor[at]
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found.astype(np.float64), wanted[at])


def test_the_largest_exponent_marks_what_is_no_number() -> None:
    blocks, scales = some_bytes(1, 1, 2, 16), np.array([[[255, 127]]], np.uint8)
    found = Mxfp4Tensor(blocks, scales)[slice(0, 1), slice(0, 64), slice(0, 1)]
    np.testing.assert_array_equal(
        np.isnan(found[0, :, 0].astype(np.float32)), [True] * 32 + [False] * 32
    )


def test_the_numbers_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = some_bytes(2, 6, 3, 16), 120 + some_bytes(2, 6, 3) % 16
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    whole = tuple(slice(0, size) for size in wanted.shape)
    found = Mxfp4Tensor(blocks, scales)[whole].astype(np.float32)
    np.testing.assert_array_equal(found, wanted.float().numpy())


def test_a_model_is_read_from_a_file_with_packed_experts(tmp_path: Path) -> None:
    """Blocks and scales may be in two files."""
    config = LlamaConfig.from_huggingface(GPT_OSS)
    module, names = PipelineModule(llama(config), num_stages=1), llama_names(config)
    like = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), like)
    theirs, other = rename_back(zeros, names), {}
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{part}"
        experts, size, features = theirs.pop(name).shape
        theirs[f"{name}_blocks"] = some_bytes(experts, features, size // 32, 16)
        other[f"{name}_scales"] = 120 + some_bytes(experts, features, size // 32) % 16
    files = {"a.safetensors": theirs, "b.safetensors": other}
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    leaves = {join_path(path): leaf for path, leaf in flatten_dict(like).items()}
    found = dict(RenamedFiles(tmp_path, names, leaves).leaves(list(leaves)))
    for part, ours in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        name = f"model.layers.0.mlp.experts.{part}"
        wanted = decoded(theirs[f"{name}_blocks"], other[f"{name}_scales"])
        for number, leaf in enumerate(ours):
            (key,) = [key for key in leaves if key.endswith(f"experts/{leaf}")]
            each = wanted[..., number :: len(ours)]
            np.testing.assert_array_equal(found[key].astype(np.float64), each)

    # Without its scales, a block is a tensor of integers.
    (tmp_path / "b.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(theirs, "a.safetensors")}))
    with pytest.raises(CheckpointError, match=r"missing: .*gate_up_proj.*left over: .*_blocks"):
        RenamedFiles(tmp_path, names, leaves)
