"""GPT-2 and BERT against `transformers` on random small configurations.

Needs torch and transformers.
"""

import itertools
import json
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
from jaxpipe.models import BertConfig, GPT2Config, bert, bert_names, gpt2, gpt2_names
from jaxpipe.topology import make_pipeline_mesh
from jaxpipe.weights import rename, rename_back

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
VOCAB, LENGTH, H, N = 64, 12, 32, 4
GPT2 = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": H, "n_layer": 4, "n_head": N}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"vocab_size": VOCAB, "hidden_size": H, "num_hidden_layers": 4, "num_attention_heads": N}
BERT |= {"intermediate_size": 48, "max_position_embeddings": 16, "pad_token_id": None}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make(family: str, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    """A model of theirs with random weights, norms and biases too, and its config.json."""
    config = getattr(transformers, family.split(":")[0] + "Config")(
        **sizes, attn_implementation="eager"
    )
    model = getattr(transformers, family.replace(":", ""))(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model, json.loads(config.to_json_string())


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {
        name: value.detach().numpy().copy()
        for name, value in model.named_parameters(remove_duplicate=False)
    }


def to_ours(weights: Any, module: PipelineModule, names: Any) -> Any:
    """Their weights as a tree of ours, from which theirs come back."""
    like = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)))
    params = rename(weights, names, like)
    for name, value in rename_back(params, names).items():
        np.testing.assert_array_equal(value, weights[name])
    return params


def assert_near(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def tokens_of(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, VOCAB, shape).astype(np.int32)


@pytest.mark.parametrize("tied", sweep(1, [True, False]))
def test_logits_of_gpt2(*, tied: bool) -> None:
    model, values = make("GPT2:LMHeadModel", **GPT2, tie_word_embeddings=tied)
    config = GPT2Config.from_huggingface(values)
    module = PipelineModule(gpt2(config), num_stages=1)
    tokens = tokens_of(2, LENGTH)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)).logits.numpy()
        alone = model(torch.tensor(tokens[:, 5:])).logits.numpy()
    params = to_ours(weights_of(model), module, gpt2_names(config))
    assert_near(module.apply(params, tokens), wanted)
    # Packed: the second text is as alone, its positions begin at 0.
    ids = np.repeat((np.arange(LENGTH) >= 5)[None], 2, axis=0).astype(np.int32)
    assert_near(module.apply(params, tokens, side={"segment_ids": ids})[:, 5:], alone)


@pytest.mark.slow
def test_logits_of_bert() -> None:
    model, values = make("Bert:ForMaskedLM", **BERT, hidden_act="gelu")
    config = BertConfig.from_huggingface(values)
    module = PipelineModule(bert(config), num_stages=1)
    tokens = tokens_of(2, LENGTH)
    seen, types = np.arange(LENGTH) < np.array([[LENGTH], [7]]), tokens % 2
    with torch.no_grad():
        given = {"attention_mask": torch.tensor(seen).long(), "token_type_ids": torch.tensor(types)}
        wanted = model(torch.tensor(tokens), **given).logits.numpy()
        hidden = model.bert(torch.tensor(tokens), **given).last_hidden_state.numpy()
    params = to_ours(weights_of(model), module, bert_names(config))
    side = {"attention_mask": seen, "token_type_ids": types}
    assert_near(module.apply(params, tokens, side=side), wanted)
    bare = PipelineModule(bert(config, head=None), num_stages=1)
    params = to_ours(weights_of(model.bert), bare, bert_names(config, head=None))
    assert_near(bare.apply(params, tokens, side=side), hidden)


@pytest.mark.slow
def test_packed_texts_of_bert_are_as_each_alone() -> None:
    _, values = make("Bert:ForMaskedLM", **BERT, hidden_act="gelu")
    module = PipelineModule(bert(BertConfig.from_huggingface(values)), num_stages=1)
    tokens, starts = tokens_of(2, LENGTH), (0, 3, 8, LENGTH)
    ids = np.broadcast_to(
        np.searchsorted(starts, np.arange(LENGTH), side="right"), (2, LENGTH)
    ).astype(np.int32)
    params = module.init(jax.random.key(0), tokens)
    alone = [module.apply(params, tokens[:, a:b]) for a, b in itertools.pairwise(starts)]
    packed = module.apply(params, tokens, side={"segment_ids": ids})
    assert_near(packed, np.concatenate(alone, axis=1))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.slow
@pytest.mark.parametrize("family", sweep(1, ["GPT2:LMHeadModel", "Bert:ForMaskedLM"]))
def test_a_step_through_four_stages_of_two_replicas_is_theirs(family: str) -> None:
    model, values = make(family, **(GPT2 if "GPT2" in family else BERT))
    if "GPT2" in family:
        config = GPT2Config.from_huggingface(values)
        layers, names = gpt2(config), gpt2_names(config)
    else:
        other = BertConfig.from_huggingface(values)
        layers, names = bert(other), bert_names(other)
    topology = PipeDataParallelTopology(4, 2)
    module = PipelineModule(layers, topology=topology, loss_fn=cross_entropy)
    inputs, labels = tokens_of(2, 4, 4, LENGTH)
    # Adam divides by what it is given, so that rounding of gradients near zero would count for much
    # with its usual eps.
    rate, decay, eps = 1e-3, 0.1, 1e-4
    adamw, mesh = optax.adamw(rate, weight_decay=decay, eps=eps), make_pipeline_mesh(topology)
    pipeline = Pipeline(module, adamw, mesh, (inputs[0], labels[0], {}), 4, make_settings())
    start = to_ours(weights_of(model), module, names)
    state, metrics = pipeline.step(pipeline.states.init_from(start), (inputs, labels, {}))

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, eps=eps)
    logits = model(torch.tensor(inputs.reshape(16, LENGTH))).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), torch.tensor(labels.reshape(-1)).long()
    )
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-6)
    jax.tree.map(
        assert_near, pipeline.params_tree(state.params), to_ours(weights_of(model), module, names)
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT2:LMHeadModel", "Bert:ForMaskedLM", "Bert:Model"])
def test_what_is_written_opens_in_transformers_as_it_was(family: str, tmp_path: Path) -> None:
    model, values = make(family, **(GPT2 if "GPT2" in family else BERT))
    if "GPT2" in family:
        config = GPT2Config.from_huggingface(values)
        layers, names, told = gpt2(config), gpt2_names(config), config.to_huggingface()
    else:
        other, head = (
            BertConfig.from_huggingface(values),
            None if family == "Bert:Model" else "masked_lm",
        )
        layers, names, told = bert(other, head), bert_names(other, head), other.to_huggingface(head)
    params = to_ours(weights_of(model), PipelineModule(layers, num_stages=1), names)
    out = written(layers, params, names, told, tmp_path)
    opened = type(model).from_pretrained(out, attn_implementation="eager").eval()
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]
    for name, value in model.state_dict().items():
        if not name.startswith("pooler"):  # not among our layers
            np.testing.assert_array_equal(
                opened.state_dict()[name].numpy(), value.numpy(), err_msg=name
            )
