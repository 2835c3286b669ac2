"""What a `PipelineModule` refuses: layers, settings, what layers do, and what is passed to them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused
from flax import nnx

from jaxpipe import PipeDataParallelTopology, ProcessTopology
from jaxpipe.errors import LayerError, PartitionError, PipelineError, TopologyError
from jaxpipe.layers import LayerSpec, ParamPaths, PipelineModule, TiedLayerSpec
from jaxpipe.partition import LayerCost, Profile

KEY, X = jax.random.key(0), np.ones((2, 3), np.float32)
DENSE, DENSE_SPEC = nn.Dense(3), LayerSpec(nn.Dense, 3)
LINEAR = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
OWN = {"a": {"w": 1, "b": 2}, "c": 3}


class NoCall(nn.Module):
    pass


class Reporting(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("losses", "each", x)
        return x


class Odd(nn.Module):
    """One parameter, of whatever name and value."""

    name_of: str
    value: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.param(self.name_of, lambda key: self.value)
        return x


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, noisy: bool) -> jax.Array:
        return x


class AlwaysNNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x, deterministic=False)


class AlwaysNorm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.BatchNorm(use_running_average=False)(x)


def one_stage(*layers: Any, **settings: Any) -> PipelineModule:
    return PipelineModule(layers, num_stages=1, **settings)


def four(num_stages: Any = 1, method: Any = "parameters", **settings: Any) -> PipelineModule:
    layers = [LayerSpec(nn.Dense, 3) for _ in range(4)]
    return PipelineModule(layers, num_stages, partition_method=method, **settings)


def loss(loss_fn: Any) -> Any:
    return four(loss_fn=loss_fn).loss(jnp.ones(3), jnp.ones(3))


def tied(attr: Any, kind: Any = nn.Dense) -> TiedLayerSpec:
    return TiedLayerSpec("k", kind, 3, tied_weight_attr=attr)


def trace(*layers: Any, **settings: Any) -> Any:
    return one_stage(*layers, **settings).trace(X)


Table = list[tuple[str, Callable[[], Any]]]
ITEMS: Table = [
    (words, partial(one_stage, jnp.tanh, item))
    for words, item in (
        (r"layer 1 .* class Dense\. Write LayerSpec\(Dense", nn.Dense),
        (r"layer 1 .* class Linear\. Write LayerSpec\(Linear", nnx.Linear),
        (r"layer 1 .* as LayerSpec\(Linear, ...\), but got a built NNX", LINEAR),
        ("layer 1 must be a Linen module.*3", 3),
        ("layer 1 must be a Linen module.*None", None),
        ("layer 1 must be a Linen module.*'tanh'", "tanh"),
        (r"layer 1 must be a Linen module.*\[<", [jnp.tanh]),
        ("layer 1 must not be a Pipe.*Put its layers into the list", one_stage(jnp.tanh)),
        ("layer 1 must not be a PipelineModule", LayerSpec(PipelineModule, [jnp.tanh], 1)),
        (
            "forward_fn must be given with a Linen, NNX or Equinox module, but layer 1",
            TiedLayerSpec("k", lambda: jnp.tanh, forward_fn=lambda m, x: x),
        ),
        (r"layer 1 must be built by Dense\(\), .* TypeError.*Correct", LayerSpec(nn.Dense)),
        (r"layer 1 must be built by Linear\(\), .* TypeError.*Correct", LayerSpec(nnx.Linear)),
        ("Linen layer must be unbound, .* a bound Dense. Put", nn.Dense(3).bind({"params": {}})),
        (r"method __call__\(self, inputs\), but got NoCall.*forward_fn", LayerSpec(NoCall)),
        *(
            (
                r"train_flag must name .* of layer 1_\w+, but got train_flag\('loud'\)\. Name",
                LayerSpec(*layer).train_flag("loud"),
            )
            for layer in ((nn.Dense, 8), (nnx.Linear, 8, 8), (lambda: jnp.tanh,))
        ),
    )
]
SPECS: Table = [
    (r"but got layers=\{1\}\. Write the model as a list", lambda: PipelineModule({1}, 1)),
    (r"at least one layer, but got layers=\[\]\. Give the model's layers", one_stage),
    (r"train_flag must .* the name .* name=''", lambda: DENSE_SPEC.train_flag("")),
    (r"train_flag must .* the name .*='not a name'", lambda: DENSE_SPEC.train_flag("not a name")),
    (r"given a class.*=Linear instance.*Write LayerSpec\(Class", lambda: LayerSpec(LINEAR)),
    ("=Dense instance.*only a Linen .* built one, without", lambda: LayerSpec(DENSE, 3)),
    (
        r"policy='dots_saveable'\. Use one of jax.checkpoint_policies",
        lambda: DENSE_SPEC.remat("dots_saveable"),  # pyright: ignore[reportArgumentType]
    ),
    *(
        (f"non-empty .* without '/'.*{key=}.*tied/<key>", partial(TiedLayerSpec, key, nn.Dense, 3))
        for key in ("", "a/b")
    ),
    *(
        ("must be a dotted path.*Leave it out to share all", partial(tied, attr))
        for attr in ("", [], ["kernel", ""])
    ),
    *(
        (
            rf"of layer 0_Dense, but got '{attr}'.*Name one of its parameters: a\.w, a\.b, c",
            partial(ParamPaths, one_stage(tied(["c", attr])).layers[0], OWN, {}),
        )
        for attr in ("weight", "a.x", "kernel.w")
    ),
    ("got 'w'. Name one of its parameters: none", lambda: trace(tied("w", nn.Dropout))),
]
THREE = [nn.Dense(3), nn.LayerNorm(), nn.Dense(2)]
SELECTIONS: Table = [
    (r"regular expressions, .* 'a\(': .* Escape", partial(one_stage, DENSE, trainable="a(")),
    (
        r"True or False as its leaves, but got int at layers/0_Dense\. Write True",
        partial(one_stage, DENSE, trainable={"layers": {"0_Dense": 1}}),
    ),
    *(
        (words, partial(trace, *THREE, trainable=trainable))
        for trainable, words in (
            ("kernle", r"'kernle', which matches none of 6\. The nearest are: layers/._"),
            (["kernel", "lora"], r"pattern 'lora', which matches none of 6\. The nearest are:"),
            ({"layers": {"0_Dens": True}}, r"0_Dens, .* none of 6\. The nearest .* layers/0_Dense"),
            ({"layers": {"0_Dense": True}}, r"1_LayerNorm/bias and 3 more\. A boolean may cover"),
            (
                lambda _: False,
                r"all 6 .* frozen\. Let it be true of some, such as layers/0_Dense/b",
            ),
            ({"layers": False}, "but got all 6 parameters frozen"),
            ([], "but got all 6 parameters frozen"),
        )
    ),
]
TRACED: Table = [
    (
        r"(?s)layer 1_lambda must accept the output of layer 0_Dense, but got "
        r"inputs=float32\[2, 4\] and failed with TypeError: .*[^.]\. Make the two layers agree",
        lambda: trace(nn.Dense(4), lambda x: x @ np.ones((3, 3), np.float32)),
    ),
    ("(?s)layer 0_Embed must accept the model's inputs, .*=float32", lambda: trace(nn.Embed(3, 3))),
    (
        r"(?s)layer 0_tanh must accept the model's inputs.*a: float32\[2, 3\]",
        lambda: one_stage(jnp.tanh, DENSE).apply(one_stage(jnp.tanh, DENSE).init(KEY, X), {"a": X}),
    ),
    *(
        (rf"parameter 'w\S*' of layer 0_Odd must be {words}", partial(trace, Odd("w", value)))
        for value, words in (
            (jnp.zeros(2, jnp.int32), r"floating point, but got int32\[2\].*constant"),
            ((jnp.zeros(2), jnp.zeros(2)), r"one array, but got a tuple\. Make a parameter"),
            ("abc", "one array, but got a str: 'abc'.*field"),
            (["abc"], "one array, but got a str.*field"),
            (object, "one array, but got a type.*field"),
        )
    ),
    *(
        (r"layer \d_lambda must return .* got None\. Add the return", partial(trace, *layers))
        for layers in ([lambda x: None], [nn.Dense(3), lambda x: None, nn.Dense(3)])
    ),
    *(
        (
            rf"not be named '{name}'.*side=\['{name}'\]\. Rename it",
            partial(one_stage(jnp.tanh).trace, X, {name: X}),
        )
        for name in ("train", "training", "deterministic", "rngs")
    ),
    (
        r"tied/k/bias must have one shape, but got float32\[3\] in layer 0_Dense and "
        r"float32\[5\] in layer 1_Dense\. Build both with equal sizes, or tie fewer",
        lambda: trace(TiedLayerSpec("k", nn.Dense, 3), TiedLayerSpec("k", nn.Dense, 5)),
    ),
    (r"layer Reporting .* scalars, .* each of shape \[2, 3\]\. Report", lambda: trace(Reporting())),
    (
        r"layer lambda must find its argument 'mask'.*side=\['other'\].*third entry",
        lambda: one_stage(lambda x, mask: x * mask).apply({}, X, side={"other": X}),
    ),
    (
        r"argument 'noisy' among.*third entry .*train_flag\('noisy'\)",
        lambda: one_stage(LayerSpec(Noisy)).init(KEY, X),
    ),
    *(
        (
            r"(?s)layer 1_\w+ must neither draw random numbers nor change its collections in "
            rf"evaluation, but got {got}.*deterministic=not train",
            partial(one_stage(jnp.tanh, layer).init, KEY, X),
        )
        for layer, got in (
            (nn.Dropout(0.5, deterministic=False), "InvalidRngError.*dropout"),
            (LayerSpec(nn.Dropout, 0.5, deterministic=False).remat(), "InvalidRngError.*dropout"),
            (LayerSpec(AlwaysNNX), "random numbers from its streams"),
            (LayerSpec(AlwaysNNX).remat(), "random numbers from its streams"),
            (AlwaysNorm(), "ModifyScopeVariableError"),
        )
    ),
]
REPLACE = four(2, checkpointable_layers=["Other", "Dense"]).replace
SETTINGS: Table = [
    *(
        (
            rf"{name} must be callable or None, but got {name}='mse'\. Pass the function",
            partial(four, **{name: "mse"}),
        )
        for name in ("loss_fn", "seed_fn", "activation_checkpoint_func")
    ),
    ("settings of a Pip.* got stages=3. Use num_stages, topology, ", partial(REPLACE, stages=3)),
    ("loss_fn must be callable or None, but got loss_fn=3", partial(REPLACE, loss_fn=3)),
    (
        r"must name a class .* got checkpointable_layers=\['Bense'\]\. Name .*: Dense",
        partial(REPLACE, checkpointable_layers=["Bense"]),
    ),
    *(
        (rf"{got}.* Return the mean over the microbatch", partial(loss, loss_fn))
        for loss_fn, got in (
            (lambda y, t: y, r"loss_fn's result .* float32\[3\]"),
            (lambda y, t: jnp.int32(3), r"loss_fn's result .* int32\[\]"),
            (lambda y, t: 3.0, "loss_fn's result .* 'float'"),
            (lambda y, t: (y.sum(), "2"), r"loss_fn's result .* float32\[\], 'str'"),
            (None, r"the last layer's output .* float32\[3\]"),
        )
    ),
]
STAGES: Table = [
    ("num_stages=None and topology=None. Give num_stages=", partial(four, None)),
    *((rf"integer >= 1, but got num_stages={n}\. Use 1", partial(four, n)) for n in (0, -1)),
    (
        "num_stages=3 and pipe=2. Leave num_stages out",
        lambda: four(3, topology=PipeDataParallelTopology(2, 1)),
    ),
    (
        r"'pipe' axis, but got axes=\['data'\]\. Use PipeDataParallelTopology",
        lambda: four(None, topology=ProcessTopology(["data"], [2])),
    ),
    ("num_stages", partial(REPLACE, num_stages=0)),
]
THREE_COSTS = Profile((LayerCost(1.0, 2.0),) * 3)
PARTS: Table = [
    *(
        (rf"integer >= 0, but got {n!r}\. Use 0", partial(call, **{name: n}))
        for n in (-1, 1.0, True, None)
        for call, name in (
            (four, "activation_checkpoint_interval"),
            (REPLACE, "activation_checkpoint_interval"),
            (four().set_checkpoint_interval, "interval"),
        )
    ),
    *(
        ("(?s)num_stages=5.*0_Dense.*3_Dense", partial(four, 5, method))
        for method in (
            *("parameters", "uniform", "trunk", "type:dense", [0, 1, 2, 3, 4, 5]),
            *("profile", "profile:flops"),
        )
    ),
    ("(?s)='parameter'.*Did you mean 'parameters'.*0_Dense", partial(four, 2, "parameter")),
    ("be 'profile' or 'profile:flops', but got .*='profile:x'", partial(four, 2, "profile:x")),
    ("(?s)'nothing'.*0_Dense", partial(REPLACE, partition_method="type:nothing")),
    *(
        (rf"in \[0, 4\), .* layer_idx={n}\. Layers count from 0", partial(four(4).stage_owner, n))
        for n in (-1, 4)
    ),
    *(
        (rf"partition_method='{method}' needs {words}", lambda method=method: four(2, method).parts)
        for method, words in (
            ("parameters", r"the model's shapes.*Call partition\(trace.*engine.module"),
            ("trunk", r"the model's shapes.*Call partition\(trace.*engine.module"),
            ("profile", "costs.* Ask engine.module"),
            ("best", "costs.* Ask engine.module"),
        )
    ),
    *(
        (words, partial(four(2, method).partition, four().trace(X), profile=costs))
        for method in ("profile", "best")
        for costs, words in (
            (None, "must be given the costs of the layers, but got profile=None"),
            (THREE_COSTS, r"one cost per layer \(4\), but got 3\. Measure this list"),
        )
    ),
    (
        r"num_stages \+ 1 = 3 boundaries.*partition_method=\[0, 1, 2, 3, 4\]",
        lambda: four(2, [0, 1, 2, 3, 4]).partition(four().trace(X), 2),
    ),
    (
        r"num_stages=2 and num_chunks=3\. Use fewer stages or chunks",
        lambda: four(2, "uniform").partition(four().trace(X), 6),
    ),
]


REPLACED: Table = [
    (
        rf"PipelineModule\.{name} must not be called.*{instead}",
        lambda name=name: getattr(four(), name)("dir", tag=1),
    )
    for name, instead in {
        "forward": "apply",
        "__call__": "apply",
        "parameters": r"init\(key, inputs\)",
        "named_parameters": r"init\(key, inputs\)",
        "state_dict": r"module_state_dict\(\)",
        "load_state_dict": r"load_module_state_dict\(tree\)",
        "allreduce_tied_weight_gradients": "train_batch",
        "get_tied_weights_and_groups": "under 'tied'",
        "mpu": r"topology\(\)",
        "ckpt_prefix": r"module_state_dict\(\)",
        "ckpt_layer_path": r"module_state_dict\(\)",
        "ckpt_layer_path_list": r"module_state_dict\(\)",
        "save_state_dict": r"module_state_dict\(\)",
        "load_state_dir": r"load_module_state_dict\(tree\)",
    }.items()
]
TABLES = {
    "items": (LayerError, ITEMS),
    "specs": (LayerError, SPECS),
    "selections": (LayerError, SELECTIONS),
    "traced": (LayerError, TRACED),
    "settings": (LayerError, SETTINGS),
    "stages": (TopologyError, STAGES),
    "parts": (PartitionError, PARTS),
    "replaced": (PipelineError, REPLACED),
}


@pytest.mark.parametrize(("error", "table"), TABLES.values(), ids=TABLES)
def test_refused(error: type[Exception], table: Table) -> None:
    check_refused(error, table)
