"""How much host memory does a process need to read its stages out of a model's safetensors files?

A random Llama of 3.4 GB in float32, a shard a block, is read by four processes, each a stage of
four blocks on one simulated device. Measured in each: the most anonymous memory (`RssAnon`: pages
of mapped files are the kernel's, and given back when others need them) during
`engine.load_huggingface`, above what there was before it, divided by the bytes of the largest
stage. The parameters that are replaced are in memory all the while; devices are the host here, so
that the new ones are counted too. Expected: 1.0 to 1.1 (all of a stage's leaves are read before the
old ones go, one tensor beside them); asked: at most 1.3. Absolute values on all devices and in all
files are summed, and the sums must be equal.

Run: python -m benchmarks.huggingface_load [--blocks 16]
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

STAGES, H, FFN, HEADS, VOCAB = 4, 2048, 5632, 16, 8192


def write_model(folder: Path, num_blocks: int) -> float:
    """Write random weights by Hugging Face's names, and the config.json; what they are in sum."""
    from jaxpipe.models import LlamaConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": H,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=num_blocks)
    (folder / "config.json").write_text(json.dumps(config.to_huggingface(128)))
    rng = np.random.default_rng(0)
    products = {f"self_attn.{name}_proj": (H, H) for name in "qkvo"}
    products |= {"mlp.gate_proj": (FFN, H), "mlp.up_proj": (FFN, H), "mlp.down_proj": (H, FFN)}
    shards: list[dict[str, tuple[int, ...]]] = [
        {
            **{f"model.layers.{i}.{name}.weight": shape for name, shape in products.items()},
            **{
                f"model.layers.{i}.{name}_layernorm.weight": (H,)
                for name in ("input", "post_attention")
            },
        }
        for i in range(num_blocks)
    ]
    shards.append(
        {
            "model.embed_tokens.weight": (VOCAB, H),
            "model.norm.weight": (H,),
            "lm_head.weight": (VOCAB, H),
        }
    )
    weight_map: dict[str, str] = {}
    total = 0.0
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        save_file(tensors, folder / file)
        total += sum(map(magnitude, tensors.values()))
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def magnitude(values: np.ndarray) -> float:
    """Sum of absolute values, to which padding adds nothing."""
    return float(np.abs(values).sum(dtype=np.float64))


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def member(folder: Path) -> None:
    """One process of the job: reads its stage, and tells what it took."""
    import jaxpipe
    from jaxpipe.models import LlamaConfig, llama, llama_names

    jaxpipe.init_distributed()
    config = LlamaConfig.from_huggingface(folder)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    module = jaxpipe.PipelineModule(
        llama(config), num_stages=STAGES, loss_fn=lambda outputs, labels: outputs.mean()
    )
    engine, *_ = jaxpipe.initialize(
        model=module,
        example_batch=(tokens, tokens),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1e-2}}},
    )

    def leaves() -> list[jax.Array]:
        return jax.block_until_ready(jax.tree.leaves(engine.state.params))

    share = sum(shard.data.nbytes for leaf in leaves() for shard in leaf.addressable_shards)
    before = most = anonymous_bytes()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.005):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    engine.load_huggingface(folder, llama_names(config))
    leaves()
    ended.set()
    watcher.join()
    after = anonymous_bytes()
    total = sum(
        magnitude(np.asarray(shard.data)) for leaf in leaves() for shard in leaf.addressable_shards
    )
    found = {"share": share, "before": before, "most": most, "after": after, "total": total}
    print("RESULT " + json.dumps(found), flush=True)


def run_job(folder: Path) -> list[dict[str, Any]]:
    """Start the processes and read what they print."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []
    for index in range(STAGES):
        told = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": STAGES,
            "JAX_PROCESS_ID": index,
            "JAX_NUM_CPU_DEVICES": 1,
            "JAX_PLATFORMS": "cpu",
        }
        env = {**os.environ, **{name: str(value) for name, value in told.items()}}
        command = [sys.executable, "-m", "benchmarks.huggingface_load", "--member", str(folder)]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process failed")
    lines = [
        next(line for line in text.splitlines() if line.startswith("RESULT ")) for text in outputs
    ]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def main() -> None:
    """Measure, and print a row a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument(
        "--member", type=Path, help="be one process of the job, that reads this folder"
    )
    arguments = parser.parse_args()
    if arguments.member is not None:
        member(arguments.member)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = write_model(folder, arguments.blocks)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        found = run_job(folder)
    np.testing.assert_allclose(sum(one["total"] for one in found), total, rtol=1e-9)
    largest = max(one["share"] for one in found)
    print(f"files {size / 1e9:.2f} GB, largest stage {largest / 1e9:.2f} GB")
    print(
        f"{'process':>7}{'stage GB':>10}{'before GB':>11}{'most GB':>9}{'after GB':>10}{'ratio':>7}"
    )
    for index, one in enumerate(found):
        ratio = (one["most"] - one["before"]) / largest
        told = [one[name] / 1e9 for name in ("share", "before", "most", "after")]
        print(f"{index:7}{told[0]:10.2f}{told[1]:11.2f}{told[2]:9.2f}{told[3]:10.2f}{ratio:7.2f}")


if __name__ == "__main__":
    main()
