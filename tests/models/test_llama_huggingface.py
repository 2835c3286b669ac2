"""The Llama decoder against `transformers` on random small configurations.

Needs torch and transformers.
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _written import written

from jaxpipe import PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.errors import LayerError
from jaxpipe.models import LlamaConfig, Rotary, RotaryScaling, llama, llama_names
from jaxpipe.topology import make_pipeline_mesh
from jaxpipe.weights import rename, rename_back

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.numpy").load_file

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
VOCAB, LENGTH, LAYERS = 64, 24, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
ORIGINAL = {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GEMMA: dict[str, Any] = {
    "query_pre_attn_scalar": 24,
    "head_dim": 16,
    "sliding_window": 5,
    "pad_token_id": 0,
}
GEMMA["final_logit_softcapping"] = 2.0
LOCAL: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
}
FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.5]}
LONG: dict[str, Any] = {
    "head_dim": 8,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.75, **FACTORS},
    "original_max_position_embeddings": 16,
}
CONTEXT = {"original_max_position_embeddings": 64}
UNLIMITED = {"layer_types": ["full_attention"] * 2}
GPT_OSS: dict[str, Any] = {
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_parameters": {**YARN, "truncate": False},
}
LLAMA4: dict[str, Any] = {
    "head_dim": 8,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 7,
    "floor_scale": 4,
    "rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
}
TEXT = ("Gemma3", "Llama4")
"""Families that also have a configuration with images."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen3": (
        "Qwen3",
        {"head_dim": 16, **WINDOWS, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ),
    "dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e5}},
    ),
    "yarn": ("Qwen2", {"rope_parameters": YARN}),
    "yarn_mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "yarn_zero": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}}),
    "yarn_betas": (
        "Llama",
        {"rope_parameters": {**YARN, "beta_fast": 4, "beta_slow": 2, "attention_factor": 1.3}},
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral_unlimited": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2_windows": ("Qwen2", WINDOWS),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "phi3": ("Phi3", {"sliding_window": 5, "pad_token_id": 0}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**MIXTURE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "num_hidden_layers": 3}),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_scaled": (
        "Gemma3",
        {**GEMMA, "rope_parameters": LOCAL, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gemma2_unlimited": ("Gemma2", {**GEMMA, **UNLIMITED}),
    "gemma3_unlimited": ("Gemma3", {**GEMMA, **UNLIMITED}),
    "gpt_oss_unlimited": ("GptOss", {**GPT_OSS, **UNLIMITED}),
    "llama4": ("Llama4", LLAMA4),
    "llama4_dense": (
        "Llama4",
        {**LLAMA4, "num_experts_per_tok": 2, "use_qk_norm": False, "moe_layers": [0]},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "smollm3_windows": (
        "SmolLM3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "pad_token_id": 0,
        },
    ),
    "phi3_long": ("Phi3", {**LONG, "max_position_embeddings": 32}),
    "phi3_short": ("Phi3", {**LONG, "max_position_embeddings": 128, **CONTEXT}),
}


def make(family: str, **changes: Any) -> tuple[Any, LlamaConfig]:
    """A model of theirs with random weights, norms and biases too.

    Also what its config.json says to us.
    """
    sizes = {**SIZES, **changes}
    kind = getattr(transformers, family + ("TextConfig" if family in TEXT else "Config"))
    config = kind(**sizes, attn_implementation="eager")
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    torch.manual_seed(0)
    factors = 0.0 if family.startswith("Gemma") else 1.0  # Gemma adds 1 itself
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, factors if parameter.ndim == 1 else 0.0, 0.2)
    return model, LlamaConfig.from_huggingface(json.loads(config.to_json_string()))


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {
        name: value.detach().numpy().copy()
        for name, value in model.named_parameters(remove_duplicate=False)
    }


def files_of(model: Any) -> dict[str, np.ndarray]:
    """Weights by the names that they have in files, which of experts are others than in memory."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def to_ours(model: Any, module: PipelineModule, config: LlamaConfig) -> Any:
    """Their weights as a tree of ours, from which theirs come back."""
    like = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)))
    names = llama_names(config)
    weights = weights_of(model) if config.experts is None else files_of(model)
    params = rename(weights, names, like)
    for name, value in rename_back(params, names).items():
        np.testing.assert_array_equal(value, weights[name])
    return params


@pytest.mark.parametrize("case", sweep(2, list(CASES)))
def test_logits(case: str) -> None:
    family, changes = CASES[case]
    model, config = make(family, **changes)
    module = PipelineModule(llama(config), num_stages=1)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)).logits.numpy()
    logits = jax.jit(module.apply)(to_ours(model, module, config), tokens)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sweep(
        8,
        [
            "qwen3",
            "biases",
            "llama3",
            "yarn",
            "qwen2_windows",
            "mistral",
            "mixtral",
            "phi3",
            "phi3_long",
            "qwen2_moe",
            "qwen3_moe",
            "gemma2",
            "gemma3_scaled",
            "smollm3_windows",
            "gpt_oss",
            "llama4_dense",
            "gemma2_unlimited",
            "gemma3_unlimited",
            "gpt_oss_unlimited",
        ],
    ),
)
def test_what_is_written_opens_in_transformers_as_it_was(case: str, tmp_path: Path) -> None:
    """Tied and untied, and experts: bit for bit, whatever the base was."""
    family, changes = CASES[case]
    model, config = make(family, **changes)
    params = to_ours(model, PipelineModule(llama(config), num_stages=1), config)
    out = written(
        llama(config),
        params,
        llama_names(config),
        {
            **config.to_huggingface(16),
            "pad_token_id": None,
            "tie_word_embeddings": not config.tie_word_embeddings,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "dtype": "bfloat16",
        },
        tmp_path,
    )
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager"
    ).eval()
    assert type(opened) is type(model)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(
            opened.state_dict()[name].numpy(), value.numpy(), err_msg=name
        )
    ids = torch.arange(LENGTH)[None] % VOCAB
    with torch.no_grad():
        np.testing.assert_array_equal(opened(ids).logits.numpy(), model(ids).logits.numpy())


IMAGES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2}
IMAGES |= {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1}
WHOLE: dict[str, dict[str, Any]] = {
    "Gemma3": {
        # Their whole model has no cap of logits.
        "text_config": {**GEMMA, "final_logit_softcapping": None},
        "vision_config": IMAGES,
        "mm_tokens_per_image": 4,
    },
    "Llama4": {
        "text_config": {**LLAMA4, "pad_token_id": 0},
        "vision_config": {
            **IMAGES,
            **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 16),
            "vision_output_dim": 16,
        },
    },
    "Qwen2_5_VL": {
        "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {
            **{"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
            **{"out_hidden_size": 32, "fullatt_block_indexes": [0]},
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", list(WHOLE))
def test_the_text_part_of_a_model_with_images_is_theirs(family: str, tmp_path: Path) -> None:
    """Read from what they write of the whole model."""
    changes = {**WHOLE[family], "text_config": {**SIZES, **WHOLE[family]["text_config"]}}
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    torch.manual_seed(0)
    theirs = kind(getattr(transformers, f"{family}Config")(**changes)).eval()
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    config = LlamaConfig.from_huggingface(tmp_path)
    module = PipelineModule(llama(config), num_stages=1)
    tokens = np.random.default_rng(0).integers(1, VOCAB, (2, LENGTH))
    like = jax.eval_shape(module.init, jax.random.key(0), tokens)
    params = rename(load_file(tmp_path / "model.safetensors"), llama_names(config), like)
    with torch.no_grad():
        # Llama 4's whole model fails without images (transformers 5.24).
        model = theirs.language_model if family == "Llama4" else theirs
        wanted = model(input_ids=torch.tensor(tokens)).logits.numpy()
    logits = jax.jit(module.apply)(params, tokens)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_packed_texts_are_as_each_alone() -> None:
    model, config = make("Qwen2", **WINDOWS)
    module = PipelineModule(llama(config), num_stages=1)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH))
    starts = (0, 7, 16, LENGTH)
    with torch.no_grad():
        wanted = [
            model(torch.tensor(tokens[:, a:b])).logits.numpy()
            for a, b in zip(starts, starts[1:], strict=False)
        ]
    ids = np.searchsorted(starts, np.arange(LENGTH), side="right")[None]
    positions = np.arange(LENGTH)[None] - np.asarray(starts)[ids - 1]
    side = {"segment_ids": ids, "positions": positions}
    logits = module.apply(to_ours(model, module, config), tokens, side=side)
    np.testing.assert_allclose(logits, np.concatenate(wanted, axis=1), rtol=1e-5, atol=1e-5)
    by_segments = module.apply(to_ours(model, module, config), tokens, side={"segment_ids": ids})
    np.testing.assert_array_equal(by_segments, logits)


def test_packed_texts_whose_length_together_would_stretch_angles_are_refused() -> None:
    scaling = RotaryScaling("dynamic", factor=2.0, original_max_position_embeddings=8)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(**sizes, num_attention_heads=2, rotary=Rotary(rope_scaling=scaling))
    module = PipelineModule(llama(config), num_stages=1)
    for length, is_stretched in ((8, False), (9, True)):
        ids = np.ones((1, length), np.int32)
        module.trace(ids)
        match = (
            "'dynamic'.*segment_ids for 9 positions and original_max_position_embeddings=8. Pack "
            "fewer texts"
        )
        with pytest.raises(LayerError, match=match) if is_stretched else contextlib.nullcontext():
            module.trace(ids, {"segment_ids": ids})


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


FOUR: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
STEPS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Phi3": {**LONG, "max_position_embeddings": 32},
    "Gemma2": GEMMA,
    "Gemma3": {**GEMMA, "rope_parameters": LOCAL, **FOUR},
    "SmolLM3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "GptOss": GPT_OSS,
    "Llama4": {**LLAMA4, "no_rope_layers": [1, 0] * 2, "interleave_moe_layer_step": 2},
}


@pytest.mark.parametrize("family", sweep(0, list(STEPS)))
def test_a_step_through_four_stages_of_two_replicas_is_theirs(family: str) -> None:
    model, config = make(family, **{**STEPS[family], "num_hidden_layers": 4})
    topology = PipeDataParallelTopology(4, 2)
    module = PipelineModule(llama(config), topology=topology, loss_fn=cross_entropy)
    tokens = np.random.default_rng(0).integers(1, VOCAB, (4, 4, LENGTH + 1)).astype(np.int32)
    inputs, labels = tokens[..., :-1], tokens[..., 1:]
    # Adam divides by what it is given, so that rounding of gradients near zero would count for much
    # with its usual eps.
    rate, decay, eps = 1e-3, 0.1, 1e-4
    adamw, mesh = optax.adamw(rate, weight_decay=decay, eps=eps), make_pipeline_mesh(topology)
    pipeline = Pipeline(module, adamw, mesh, (inputs[0], labels[0], {}), 4, make_settings())
    state, metrics = pipeline.step(
        pipeline.states.init_from(to_ours(model, module, config)), (inputs, labels, {})
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, eps=eps)
    logits = model(torch.tensor(inputs.reshape(16, LENGTH))).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), torch.tensor(labels.reshape(-1)).long()
    )
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-6)
    found, wanted = pipeline.params_tree(state.params), to_ours(model, module, config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)
