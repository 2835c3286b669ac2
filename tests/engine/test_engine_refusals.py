"""What is refused before anything compiles: by `initialize`, and by calls, which change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _leaves import assert_same, leaves, scalars
from _small import ADAM, build, build_alone, entries, entry, mean_square, module
from _small import SIZES as CONFIG

import jaxpipe
from jaxpipe import PipelineEngine, PipelineModule, ProcessTopology
from jaxpipe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayerError,
    PartitionError,
    PipelineError,
    ScheduleError,
    TopologyError,
)

SGD, SCALED = optax.sgd(0.1), optax.clip_by_global_norm(1.0)
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
DATA = [entry(seed, samples=1) for seed in range(4)]
ROWS = [(x[0], y[0]) for x, y in DATA]
LAYERS = [nn.Dense(3), nn.Dense(1), nn.Dense(1)]
UNSPLIT = ProcessTopology(["data", "pipe"], [1, 2])


def falling(count: Any) -> Any:
    return 0.5 / (1 + count)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    lengths = tuple(axes.values())
    return jax.make_mesh(lengths, tuple(axes), devices=jax.devices()[: int(np.prod(lengths))])


def configured(**sections: Any) -> dict[str, Any]:
    return {"config": {**CONFIG, **sections}}


def piped(**keys: Any) -> dict[str, Any]:
    return configured(pipeline=keys)


def shown(**keys: Any) -> dict[str, Any]:
    return {"example_batch": entry(), **keys}


ARGUMENTS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ConfigError, r"one configuration, but got none\. Pass config=", {"config": None}),
    (ConfigError, r"but got config and config_params\. Pass config=", {"config_params": CONFIG}),
    (
        ConfigError,
        r"config and args\.deepspeed_config\. Pass config=",
        {"args": {"deepspeed_config": "x.json"}},
    ),
    (
        ConfigError,
        r"loss_fn must be None with a PipelineModule.*<function mean_sq.*Write P",
        {"loss_fn": mean_square},
    ),
    (
        ConfigError,
        r"mpu must be None.*got mpu=3\. .*PipelineModule\(topology=\.\.\.\)",
        {"mpu": 3},
    ),
    (
        ConfigError,
        r"optimizer must be an optax transformation, or.*got optimizer=0\.0003\. P",
        {"optimizer": 3e-4},
    ),
    (
        ConfigError,
        r"got optimizer=optax\.MultiSteps, which .*set gradient",
        {"optimizer": optax.MultiSteps(SGD, 2)},
    ),
    (ConfigError, r"list of events, but got monitor=3\. Pass", {"monitors": [3]}),
    (ConfigError, r"pipeline\.stages=4 and num_stages=2\. Change", piped(stages=4)),
    (
        ConfigError,
        r"train_batch_sise is not a known key\. Did you mean train_batch_si",
        configured(train_batch_sise=8),
    ),
    (
        ConfigError,
        r"must be 0, 1, 2 or 3, .*stage=4\. Use one of these",
        configured(zero_optimization={"stage": 4}),
    ),
    (ConfigError, r"7 != 2 x 2 x 1\. Use train_batch_size=4", configured(train_batch_size=7)),
    (
        ConfigError,
        r"given train_batch_size or train_micro_batch.*Add one of the two keys",
        {"config": {}},
    ),
    (
        ScheduleError,
        r"num_chunks must be 1 for OneFOneB.*=2\. Leave num_chunks out, or use",
        piped(num_chunks=2),
    ),
    # Said in two places.
    (
        *(
            ConfigError,
            r"pipeline\.partition='trunk' and partition_method='uniform'\. Set it in one place",
        ),
        {"model": module(partition_method="uniform"), **piped(partition="trunk")},
    ),
    (
        *(
            ConfigError,
            r"checkpoint_interval=1 and activation_checkpoint_interval=2\. Set it in one place",
        ),
        {
            "model": module(activation_checkpoint_interval=2),
            **piped(activation_checkpoint_interval=1),
        },
    ),
    (
        *(ConfigError, r"pipeline\.seed_layers=False and seed_layers=True\. Set it in one place"),
        {"model": module(seed_layers=True), **piped(seed_layers=False)},
    ),
    (
        *(
            ConfigError,
            r"dtype of bf16\.enabled=True='bfloat16' and compute_dtype='float16'\. Set it in one "
            r"place",
        ),
        {"model": module(compute_dtype="float16"), **configured(bf16={"enabled": True})},
    ),
    # Meshes and topologies.
    (TopologyError, r"16 places .*device_count\(\)=8", {"model": module(data=8)}),
    (
        *(
            TopologyError,
            r"must divide the number of devices \(8\), but got num_stages=3\. Use 2 or 4 stages",
        ),
        {"model": PipelineModule(LAYERS, num_stages=3, loss_fn=mean_square)},
    ),
    (TopologyError, r"mesh\.shape=\(stage=2\)\. Add the axis 'data'", {"mesh": mesh_of(stage=2)}),
    (TopologyError, r"pipe=2, data=1\), but got stage=4", shown(mesh=mesh_of(stage=4, data=1))),
    (
        *(
            TopologyError,
            r"data axis must be as long as the axis 'data' .*\(data=1, pipe=2\), but got data=2\. "
            r"Make",
        ),
        {
            "model": PipelineModule(LAYERS, topology=UNSPLIT, loss_fn=mean_square),
            "mesh": mesh_of(stage=2, data=2),
        },
    ),
    (
        *(TopologyError, r"model axis .*\(data=1, pipe=2\), but got model=2\. Make the mesh"),
        {
            "model": PipelineModule(LAYERS, topology=UNSPLIT, loss_fn=mean_square),
            "mesh": mesh_of(stage=2, data=1, model=2),
        },
    ),
    # What an example of a batch, or data, show.
    (DataError, r"2 \* 1 = 2 samples.*float32\[3, 4\]", {"example_batch": entry(samples=3)}),
    (DataError, r"must be a tuple \(inputs, labels\)", {"example_batch": entry()[:1]}),
    (ScheduleError, r"schedule='1f2b'\. Did you mean '1f1b'", shown(**piped(schedule="1f2b"))),
    (
        ConfigError,
        r"num_stages > 1 or ZeRO or num_chunks > 1 divides .*one whose result m",
        shown(optimizer=SCALED),
    ),
    (
        LayerError,
        r"loss_fn's result must be a floating-point sc",
        shown(model=module(loss_fn=lambda y, t: y[0])),
    ),
    (PartitionError, r"partition_method=\[0, 2, 2\]", shown(**piped(partition=[0, 2, 2]))),
    (DataError, r"len\(dataset\)=1 and batch_size=2\. Add samples", {"training_data": ROWS[:1]}),
    # Parameters that are none, though no shapes are known.
    *(
        (
            *(
                LayerError,
                rf"must be a tree of dictionaries, but got a {kind}\. Pass a tree as "
                r"PipelineModule\.init",
            ),
            {"model_parameters": tree},
        )
        for kind, tree in (
            ("list", [np.ones(2)]),
            ("tuple_iterator", iter(())),
            ("ndarray", np.ones(2)),
        )
    ),
    *(
        (
            *(
                LayerError,
                rf"every parameter must be .*got layers/0_Dense/kernel = {found}\. Convert",
            ),
            {"model_parameters": {"layers": {"0_Dense": {"kernel": leaf}}}},
        )
        for found, leaf in (
            ("a str", "text"),
            ("a list", [[1.0]]),
            ("a float", 1.0),
            ("a NoneType", None),
            (r"int32\[2, 2\]", np.ones((2, 2), np.int32)),
            (r"bool\[2, 2\]", np.ones((2, 2), bool)),
            (".*of dtype object", np.ones((2, 2), object)),
            (r"a masked array of float64\[2\]", np.ma.masked_array(np.ones(2), True)),
            (r"PRNG keys, key<fry>\[\]", jax.random.key(0)),
            (r"the shape float32\[2\] without values", jax.ShapeDtypeStruct((2,), jnp.float32)),
        )
    ),
]


@pytest.mark.parametrize(
    ("error", "match", "arguments"), ARGUMENTS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_initialize(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    given = {"model": module(), "optimizer": SGD, "config": CONFIG, **arguments}
    with pytest.raises(error, match=match):
        jaxpipe.initialize(**given)


OPTIMIZERS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    (
        r"got optimizer=Grad.*optimizer\.type='Adam'.*Remove one of them",
        SGD,
        None,
        {"optimizer": ADAM},
    ),
    (
        r"lr_scheduler=<f.*'WarmupLR' in the.*Remove one of them",
        optax.sgd,
        falling,
        {"scheduler": WARMUP},
    ),
    (
        r"'WarmupLR' and optimizer=Grad.*constructor, such as",
        SGD,
        None,
        {"scheduler": WARMUP},
    ),
    (r"got lr_scheduler=<f.*optimizer=Grad.*Pass the constructor", SGD, falling, {}),
    (
        r"have an optimizer.*type='WarmupLR' and optimizer=None\. Pass the con",
        None,
        None,
        {"scheduler": WARMUP},
    ),
    (r"have an optimizer.*falling.*optimizer=None.*or name one in the section", None, falling, {}),
    (
        r"got optimizer=<function sgd.*and no schedule\. Call it, as in optax\.adamw",
        optax.sgd,
        None,
        {},
    ),
    (
        r"a function of learning_rate, .*=<function scale.*Pass for instance optax\.adamw",
        optax.scale,
        falling,
        {},
    ),
    (
        r"got lr_scheduler='cosine', which is not a function\. Pass for example optax\.cosine",
        optax.sgd,
        "cosine",
        {},
    ),
    (
        r"<lambda>.*rates of shape=\(3,\)\. Pass for example",
        optax.sgd,
        lambda count: np.ones(3),
        {},
    ),
    (
        r"WarmupLR'>, which fails with: .*Pass.*optim\.WarmupLR\(",
        optax.sgd,
        jaxpipe.optim.WarmupLR,
        {},
    ),
    (
        r"scheduler\.params\.warmup_max_lr must be a number.*Set",
        optax.sgd,
        None,
        {"scheduler": WARMUP},
    ),
]


@pytest.mark.parametrize(
    ("match", "optimizer", "schedule", "sections"),
    OPTIMIZERS,
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_optimizers_and_schedules(
    match: str, optimizer: Any, schedule: Any, sections: dict[str, Any]
) -> None:
    """By an engine and without one."""
    config, model = {**CONFIG, **sections}, module()
    with pytest.raises(ConfigError, match=match):
        jaxpipe.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    with pytest.raises(ConfigError, match=match):
        jaxpipe.make_pipeline(
            model, optimizer, config, jaxpipe.mesh_for(model), entry(), lr_scheduler=schedule
        )


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    made = build_alone()
    made.train_batch(entries())
    return made


def changed(change: Callable[[Any, Any], Any]) -> Callable[[PipelineEngine], Any]:
    return lambda engine: engine.eval_batch(iter([change(*entry(i)) for i in range(2)]))


def predicting(inputs: Any, **more: Any) -> Callable[[PipelineEngine], Any]:
    return lambda engine: engine.predict(inputs, **more)


X, Y = entry()
CALLS: list[tuple[type[Exception], str, Callable[[PipelineEngine], Any]]] = [
    *(
        (
            *(PipelineError, rf"PipelineEngine\.{name} must not be called.*Call train_batch"),
            lambda engine, name=name: getattr(engine, name)(1, x=2),
        )
        for name in ("forward", "backward", "step", "__call__")
    ),
    *(
        (
            *(
                ConfigError,
                rf"= 2 \* 1 = 2, but got train_batch_size={size!r}\. Use.*example {nearest}\.",
            ),
            lambda engine, size=size: engine.set_train_batch_size(size),
        )
        for size, nearest in (
            (5, "4 or 6"),
            (1, "2"),
            (0, "2"),
            (-4, "2"),
            (True, "2"),
            (8.0, "2"),
            ("8", "2"),
        )
    ),
    *(
        (
            *(
                CheckpointError,
                rf"_dir must be the path of a dir.*got \w+_dir={path!r}\. Name one, such",
            ),
            lambda engine, call=call, path=path: getattr(engine, call)(path),
        )
        for path in ("", None, 3)
        for call in ("save_checkpoint", "load_checkpoint", "save_on_preemption")
    ),
    *(
        (
            *(CheckpointError, r"client_state.* must be .*but got .*(Write|Pass|Give)"),
            lambda engine, state=state: engine.save_checkpoint("nowhere", client_state=state),
        )
        for state in (None, [1], {"at": (1, 2)}, {1: 2})
    ),
    (
        PipelineError,
        r"micro_batch_size=4 instead of 2\. Call set_tr",
        lambda e: e.set_train_micro_batch_size(4),
    ),
    (ConfigError, r"but got monitor='print'\. Pass", lambda e: e.add_monitor("print")),
    (
        DataError,
        r"must be an iterator, but got a list\. Pass iter",
        lambda e: e.set_dataiterator([entry()]),
    ),
    (
        DataError,
        r"must be an iterator, but got a list\. Pass iter",
        lambda e: e.train_batch([entry()]),
    ),
    (
        DataError,
        r"must be an iterator, but got a list\. Pass iter",
        lambda e: e.eval_batch([entry()]),
    ),
    # Batches of other structures and dtypes than the first.
    (
        DataError,
        r"had float32\[2, 4\], but got int32\[2, 4\]\. Only shapes",
        changed(lambda x, y: (x.astype(int), y)),
    ),
    (
        DataError,
        r"labels must .*got int8\[2, 1\]\. .*: convert it, or map",
        changed(lambda x, y: (x, y.astype("i1"))),
    ),
    (DataError, r"inputs\['x'\] in place of inputs in this", changed(lambda x, y: ({"x": x}, y))),
    (
        DataError,
        r"an additional side\['mask'\].*Give it the struc",
        changed(lambda x, y: (x, y, {"mask": x})),
    ),
    (
        DataError,
        r"at least one, but got inputs: 0\. Add the dim",
        predicting(np.zeros((0, 4), np.float32)),
    ),
    (DataError, r"number of samples.*got inputs: no dim\. Add the dim", predicting(np.float32(1))),
    (
        DataError,
        r"\['a'\]: 2, inputs\['b'\]: 3\. Add the dim, or make",
        predicting({"a": X, "b": np.zeros((3, 1))}),
    ),
    (DataError, r"got no arrays\. Add the dim", predicting({})),
    (
        DataError,
        r"inputs must have the dtype .*float32\[2, 4\], but got int32",
        predicting(np.zeros((2, 4), np.int32)),
    ),
    (
        DataError,
        r"inputs = a masked array of float32\[2, 4\]\. Fill it",
        predicting(np.ma.masked_array(X, X > 0)),
    ),
    (DataError, r"got side = a ndarray in predict\. Yield", predicting(X, side=X)),
]


@pytest.mark.parametrize(
    ("error", "match", "call"), CALLS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_calls(
    error: type[Exception],
    match: str,
    call: Any,
    engine: PipelineEngine,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    held, counted = leaves(engine), scalars(engine)
    with pytest.raises(error, match=match):
        call(engine)
    assert_same(leaves(engine), held)
    assert scalars(engine) == counted
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["stage_id", "prev_stage", "next_stage"])
def test_one_process_with_two_stages_has_no_stage_of_its_own(name: str) -> None:
    with pytest.raises(PipelineError, match=r"of stages \[0, 1\]\. Use is_first_"):
        getattr(build(), name)
