r"""Fine-tune a Llama from Hugging Face through a pipeline of stages, whole or with LoRA adapters.

    python examples/finetune.py --out small
    python examples/finetune.py --model SmolLM2-135M --text book.txt --length 512 \
        --rate 3e-4 --out tuned

`--model` is a folder with config.json, safetensors files and tokenizer.json: any Llama, Mistral,
Qwen or SmolLM. Without `--model` the script makes a small model with random weights and trains a
tokenizer on the text. Without an accelerator the stages and replicas run on simulated CPU devices.
`transformers` can load the folder written to `--out`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jaxpipe
from jaxpipe.checkpoint import save_huggingface
from jaxpipe.layers import LORA_PARAMETERS, lora
from jaxpipe.models import LlamaConfig, llama, llama_names
from jaxpipe.weights import load_safetensors, rename, rename_back

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
TARGETS = ["query/kernel", "value/kernel", "gate/kernel", "up/kernel", "down/kernel"]
PROMPT = "The statement"


def settings() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="folder; default: a small model made on the spot"
    )
    parser.add_argument(
        "--text", type=Path, help="file to train on; default: the standard library's manual"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write, which must not exist"
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument(
        "--rank", type=int, help="of the adapters; 0 trains all; default: 8, or 0 without --model"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    args = parser.parse_args()
    if args.rank is None:
        args.rank = 8 if args.model else 0  # adapters on random weights learn little
    return args


def make_small(folder: Path, text: str) -> None:
    """Write a small model with random weights, and a byte-pair tokenizer trained on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SMALL["vocab_size"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(SMALL))
    config = LlamaConfig.from_huggingface(folder)
    module = jaxpipe.PipelineModule(llama(config), num_stages=1)
    params = module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    save_file(
        rename_back(params, llama_names(config)), folder / "model.safetensors", {"format": "pt"}
    )


def live(engine: jaxpipe.PipelineEngine, tokenizer: Any, count: int = 24) -> str:
    """Continue the prompt with the likeliest tokens, through the pipeline."""
    prompt = np.array([tokenizer.encode(PROMPT).ids], np.int32)
    found = engine.generate(prompt, count)
    return repr(tokenizer.decode([*prompt[0].tolist(), *found[0].tolist()]))


def complete(module: jaxpipe.PipelineModule, params: Any, tokenizer: Any, count: int = 24) -> str:
    """Continue the prompt with the likeliest tokens, on one device."""
    tokens = tokenizer.encode(PROMPT).ids
    padded = np.zeros((1, len(tokens) + count), np.int32)  # causal attention masks the padding
    padded[0, : len(tokens)] = tokens
    logits_of = jax.jit(lambda x: module.apply(params, x))
    for end in range(len(tokens), padded.shape[1]):
        padded[0, end] = np.argmax(logits_of(padded)[0, end - 1])
    return repr(tokenizer.decode(padded[0].tolist()))


def batches(ids: np.ndarray, rows: int, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield entries for `train_batch` without end.

    An entry holds windows from random positions of the text, and the token that follows each token.
    """
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(ids) - length - 1, rows)
        windows = np.stack([ids[start : start + length + 1] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Load the model, train it, save it, and load the saved files again."""
    args = settings()
    if args.out.exists():
        raise SystemExit(f"--out={args.out} exists; name a folder that does not.")
    # Takes effect only without an accelerator.
    jax.config.update("jax_num_cpu_devices", args.stages * args.replicas)
    text = args.text.read_text() if args.text else "\n\n".join(topics.topics.values())
    folder = args.model or args.out / "base"
    if args.model is None:
        make_small(folder, text)
    config, tokenizer = (
        LlamaConfig.from_huggingface(folder),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    ids = np.asarray(tokenizer.encode(text).ids, np.int32)

    layers, trainable = llama(config), None
    if args.rank:
        layers, trainable = lora(layers, args.rank, 2.0 * args.rank, TARGETS), LORA_PARAMETERS
    topology = jaxpipe.PipeDataParallelTopology(args.stages, args.replicas)
    module = jaxpipe.PipelineModule(
        layers, topology=topology, loss_fn=jaxpipe.losses.cross_entropy, trainable=trainable
    )
    tokens = jax.ShapeDtypeStruct((4 * args.replicas, args.length), jnp.int32)
    engine, *_ = jaxpipe.initialize(
        model=module,
        optimizer=optax.adamw(args.rate),
        example_batch=(tokens, tokens),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
        },
    )
    engine.load_huggingface(folder, llama_names(config))  # adapters keep their initial values
    print("before:", live(engine, tokenizer))
    data = batches(ids, 4 * args.replicas, args.length)
    for step in range(args.steps):
        loss = engine.train_batch(data)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {float(loss):.3f}")

    print("after:", live(engine, tokenizer))
    engine.save_checkpoint(args.out / "checkpoints")
    alpha = 2.0 * args.rank if args.rank else None
    save_huggingface(
        args.out / "checkpoints", args.out, llama_names(config), config=folder, lora_alpha=alpha
    )
    (args.out / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    print(f"wrote {args.out}")
    plain = jaxpipe.PipelineModule(llama(config), num_stages=1)
    like = plain.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    reopened = rename(load_safetensors(args.out), llama_names(args.out), like)
    print("reopened:", complete(plain, reopened, tokenizer))


if __name__ == "__main__":
    main()
