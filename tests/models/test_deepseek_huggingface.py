"""DeepSeek against `transformers` on random small configurations.

Needs torch and transformers.
"""

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
from jaxpipe.losses import cross_entropy
from jaxpipe.models import LlamaConfig, llama, llama_names
from jaxpipe.topology import make_pipeline_mesh
from jaxpipe.weights import rename, rename_back

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.numpy").load_file

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
VOCAB, LENGTH, LAYERS = 64, 24, 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 16,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("DeepseekV3", {**GROUPS, "rope_parameters": YARN}),
    "no_latent_of_queries": ("DeepseekV3", {**GROUPS, "q_lora_rank": None}),
    "no_groups": ("DeepseekV3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "halves": ("DeepseekV3", {**GROUPS, "rope_interleave": False, "attention_bias": True}),
    "tied": ("DeepseekV3", {**GROUPS, "tie_word_embeddings": True}),
    "all_dense": ("DeepseekV3", {**GROUPS, "first_k_dense_replace": LAYERS}),
    "v2": ("DeepseekV2", {"rope_parameters": YARN, "routed_scaling_factor": 1.5}),
    "v2_biases": ("DeepseekV2", {"q_lora_rank": None, "attention_bias": True}),
}


def make(case: str, **more: Any) -> tuple[Any, LlamaConfig]:
    """A model of theirs with random weights, also norms and biases, and its configuration here."""
    family, changes = CASES[case]
    config = getattr(transformers, family + "Config")(
        **{**SIZES, **changes, **more}, attn_implementation="eager"
    )
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    torch.manual_seed(0)
    randomise(model)
    return model, LlamaConfig.from_huggingface(json.loads(config.to_json_string()))


def randomise(model: Any) -> None:
    of_choice = [x for name, x in model.named_buffers() if "correction_bias" in name]
    with torch.no_grad():
        for value in (*model.parameters(), *of_choice):
            torch.nn.init.normal_(value, 1.0 if value.ndim == 1 else 0.0, 0.2)


def files_of(model: Any) -> dict[str, np.ndarray]:
    """Weights by the names that they have in files."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def like_of(module: PipelineModule) -> Any:
    return jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))


def to_ours(model: Any, module: PipelineModule, config: LlamaConfig) -> Any:
    """Their weights as a tree of ours, from which theirs come back."""
    names, weights = llama_names(config), files_of(model)
    params = rename(weights, names, like_of(module))
    again = rename_back(params, names)
    assert again.keys() == weights.keys()
    for name, value in again.items():
        np.testing.assert_array_equal(value, weights[name])
    return params


@pytest.mark.parametrize("case", sweep(1, ["v3", *(name for name in CASES if name != "v3")]))
def test_logits(case: str) -> None:
    model, config = make(case)
    module = PipelineModule(llama(config), num_stages=1)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)).logits.numpy()
    logits = jax.jit(module.apply)(to_ours(model, module, config), tokens)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(1, ["v3", "tied", "no_latent_of_queries", "v2"]))
def test_what_is_written_opens_in_transformers_as_it_was(case: str, tmp_path: Path) -> None:
    model, config = make(case)
    params = to_ours(model, PipelineModule(llama(config), num_stages=1), config)
    contents = {**config.to_huggingface(16), "pad_token_id": None}
    assert LlamaConfig.from_huggingface(contents) == config
    out = written(llama(config), params, llama_names(config), contents, tmp_path)
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


@pytest.mark.slow
def test_a_step_through_four_stages_of_two_replicas_is_theirs() -> None:
    model, config = make("v3")
    topology = PipeDataParallelTopology(4, 2)
    module = PipelineModule(llama(config), topology=topology, loss_fn=cross_entropy)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 4, LENGTH + 1)).astype(np.int32)
    inputs, labels = tokens[..., :-1], tokens[..., 1:]
    # Adam divides by what it is given, so that rounding of gradients near zero would count for much
    # with its usual eps.
    rate, decay, eps = 1e-3, 0.1, 1e-4
    adamw, mesh = optax.adamw(rate, weight_decay=decay, eps=eps), make_pipeline_mesh(topology)
    pipeline = Pipeline(module, adamw, mesh, (inputs[0], labels[0], {}), 4, make_settings())
    params = to_ours(model, module, config)
    state, metrics = pipeline.step(pipeline.states.init_from(params), (inputs, labels, {}))

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, eps=eps)
    logits = model(torch.tensor(inputs.reshape(16, LENGTH))).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), torch.tensor(labels.reshape(-1)).long()
    )
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-6)
    found = rename_back(pipeline.params_tree(state.params), llama_names(config))
    for name, wanted in files_of(model).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)


def with_extra_layer(model: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Their layer that predicts one more token, and its weights as DeepSeek's files name them."""
    extra = pytest.importorskip("transformers.modeling_layers").MtpModel(model, 1).eval()
    randomise(extra.layers)
    layer = f"model.layers.{LAYERS}."
    found: dict[str, Any] = {}
    for name, value in extra.layers[0].state_dict().items():
        key = layer + name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        module, _, part = key.rpartition(".")
        if not module.endswith("experts"):
            found[key] = value
            continue
        # In memory the experts have one tensor; in files each has its own.
        for number, one in enumerate(value):
            parts = (
                zip(("gate", "up"), one.chunk(2), strict=True)
                if part == "gate_up_proj"
                else [("down", one)]
            )
            found |= {f"{module}.{number}.{name}_proj.weight": own for name, own in parts}
    found = {key: value.numpy().copy() for key, value in found.items()}
    weights = files_of(model)
    # DeepSeek's files have copies of what the layer shares with the model.
    copies = {
        layer + "embed_tokens.weight": weights["model.embed_tokens.weight"],
        layer + "shared_head.head.weight": weights["lm_head.weight"],
    }
    return extra, {**found, **copies}


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(1, ["v3", "no_latent_of_queries"]))
def test_the_layer_for_one_more_token_is_theirs(case: str) -> None:
    model, config = make(case)
    extra, own = with_extra_layer(model)
    names, weights = llama_names(config), {**files_of(model), **own}
    # Without the layer, its weights are skipped.
    plain = PipelineModule(llama(config), num_stages=1)
    jax.tree.map(
        np.testing.assert_array_equal,
        rename(weights, names, like_of(plain)),
        to_ours(model, plain, config),
    )
    module = PipelineModule(llama(config, multi_token=True), num_stages=1)
    params = rename(weights, names, like_of(module))
    again = rename_back(params, names)
    copies = {name for name in own if name.endswith(("embed_tokens.weight", "head.head.weight"))}
    assert weights.keys() - again.keys() == copies
    for name, value in again.items():
        np.testing.assert_array_equal(value, weights[name])

    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH + 1))
    inputs = torch.tensor(tokens)
    with torch.no_grad():
        of_model = model(inputs[:, :-1], output_hidden_states=True)
        positions = torch.arange(LENGTH)[None].expand(2, -1)
        states = extra.forward_layer(
            0, of_model.hidden_states[-1], positions, None, input_ids=inputs[:, 1:]
        )
        wanted = model.lm_head(states).numpy()
    logits = jax.jit(module.apply)(params, tokens[:, :-1])
    np.testing.assert_allclose(logits[:, 0], of_model.logits.numpy(), rtol=1e-5, atol=1e-5)
    # The last position would need the token after the sequence.
    np.testing.assert_allclose(logits[:, 1, :-1], wanted[:, :-1], rtol=1e-5, atol=1e-5)
