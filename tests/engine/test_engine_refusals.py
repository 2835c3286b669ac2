"""What is refused before anything compiles: by `initialize`, and by calls, which change nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _leaves import assert_same, leaves, scalars
from _refusals import assert_refused
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


def initialize(error: type[Exception], words: str, **arguments: Any) -> None:
    given = {"model": module(), "optimizer": SGD, "config": CONFIG, **arguments}
    assert_refused(error, words, jaxpipe.initialize, **given)


def test_arguments_of_initialize() -> None:
    refused = partial(initialize, ConfigError)
    refused("one configuration, but got none. Pass config=", config=None)
    refused("but got config and config_params. Pass config=", config_params=CONFIG)
    args = {"deepspeed_config": "x.json"}
    refused("config and args.deepspeed_config. Pass config=", args=args)
    words = "loss_fn must be None with a PipelineModule ... <function mean_sq ... Write P"
    refused(words, loss_fn=mean_square)
    refused("mpu must be None ... got mpu=3. ... PipelineModule(topology=...)", mpu=3)
    words = "optimizer must be an optax transformation, or ... got optimizer=0.0003. P"
    refused(words, optimizer=3e-4)
    words = "got optimizer=optax.MultiSteps, which ... set gradient"
    refused(words, optimizer=optax.MultiSteps(SGD, 2))
    refused("list of events, but got monitor=3. Pass", monitors=[3])
    words = "num_stages > 1 or ZeRO or num_chunks > 1 divides ... one whose result m"
    refused(words, **shown(optimizer=SCALED))
    model = module(loss_fn=lambda y, t: y[0])
    words = "loss_fn's result must be a floating-point sc"
    initialize(LayerError, words, **shown(model=model))


def test_configurations() -> None:
    refused = partial(initialize, ConfigError)
    refused("pipeline.stages=4 and num_stages=2. Change", **piped(stages=4))
    words = "train_batch_sise is not a known key. Did you mean train_batch_si"
    refused(words, **configured(train_batch_sise=8))
    words = "must be 0, 1, 2 or 3, ... stage=4. Use one of these"
    refused(words, **configured(zero_optimization={"stage": 4}))
    refused("7 != 2 x 2 x 1. Use train_batch_size=4", **configured(train_batch_size=7))
    words = "given train_batch_size or train_micro_batch ... Add one of the two keys"
    refused(words, config={})
    words = "num_chunks must be 1 for OneFOneB ... =2. Leave num_chunks out, or use"
    initialize(ScheduleError, words, **piped(num_chunks=2))
    words = "schedule='1f2b'. Did you mean '1f1b'"
    initialize(ScheduleError, words, **shown(**piped(schedule="1f2b")))
    words = "partition_method=[0, 2, 2]"
    initialize(PartitionError, words, **shown(**piped(partition=[0, 2, 2])))


def test_what_is_said_in_two_places() -> None:
    def refused(words: str, config: dict[str, Any], **settings: Any) -> None:
        words = f"{words}. Set it in one place"
        initialize(ConfigError, words, model=module(**settings), **config)

    words = "pipeline.partition='trunk' and partition_method='uniform'"
    refused(words, piped(partition="trunk"), partition_method="uniform")
    words = "checkpoint_interval=1 and activation_checkpoint_interval=2"
    refused(words, piped(activation_checkpoint_interval=1), activation_checkpoint_interval=2)
    words = "pipeline.seed_layers=False and seed_layers=True"
    refused(words, piped(seed_layers=False), seed_layers=True)
    words = "dtype of bf16.enabled=True='bfloat16' and compute_dtype='float16'"
    refused(words, configured(bf16={"enabled": True}), compute_dtype="float16")


def test_meshes_and_topologies() -> None:
    refused = partial(initialize, TopologyError)
    refused("16 places ... device_count()=8", model=module(data=8))
    words = "must divide the number of devices (8), but got num_stages=3. Use 2 or 4 stages"
    refused(words, model=PipelineModule(LAYERS, num_stages=3, loss_fn=mean_square))
    refused("mesh.shape=(stage=2). Add the axis 'data'", mesh=mesh_of(stage=2))
    refused("pipe=2, data=1), but got stage=4", **shown(mesh=mesh_of(stage=4, data=1)))
    unsplit = PipelineModule(LAYERS, topology=UNSPLIT, loss_fn=mean_square)
    words = "data axis must be as long as the axis 'data' ... data=1, pipe=2), but got data=2. Make"
    refused(words, model=unsplit, mesh=mesh_of(stage=2, data=2))
    words = "model axis ... (data=1, pipe=2), but got model=2. Make the mesh"
    refused(words, model=unsplit, mesh=mesh_of(stage=2, data=1, model=2))


def test_examples_and_data() -> None:
    refused = partial(initialize, DataError)
    refused("2 * 1 = 2 samples ... float32[3, 4]", example_batch=entry(samples=3))
    refused("must be a tuple (inputs, labels)", example_batch=entry()[:1])
    refused("len(dataset)=1 and batch_size=2. Add samples", training_data=ROWS[:1])


def test_parameters() -> None:
    """Though no shapes are known."""
    for kind, tree in (
        ("list", [np.ones(2)]),
        ("tuple_iterator", iter(())),
        ("ndarray", np.ones(2)),
    ):
        words = f"tree of dictionaries, but got a {kind}. Pass a tree as PipelineModule.init"
        initialize(LayerError, words, model_parameters=tree)
    for found, leaf in (
        ("a str", "text"),
        ("a list", [[1.0]]),
        ("a float", 1.0),
        ("a NoneType", None),
        ("int32[2, 2]", np.ones((2, 2), np.int32)),
        ("bool[2, 2]", np.ones((2, 2), bool)),
        (" ... of dtype object", np.ones((2, 2), object)),
        ("a masked array of float64[2]", np.ma.masked_array(np.ones(2), True)),
        ("PRNG keys, key<fry>[]", jax.random.key(0)),
        ("the shape float32[2] without values", jax.ShapeDtypeStruct((2,), jnp.float32)),
    ):
        words = f"every parameter must be ... got layers/0_Dense/kernel = {found}. Convert"
        tree = {"layers": {"0_Dense": {"kernel": leaf}}}
        initialize(LayerError, words, model_parameters=tree)


def test_optimizers_and_schedules() -> None:
    """By an engine and without one."""
    model, mesh = module(), jaxpipe.mesh_for(module())
    warmup = {"scheduler": WARMUP}

    def refused(words: str, optimizer: Any, schedule: Any = None, sections: Any = None) -> None:
        config, given = {**CONFIG, **(sections or {})}, {"lr_scheduler": schedule}
        initialize(ConfigError, words, optimizer=optimizer, config=config, **given)
        call = partial(jaxpipe.make_pipeline, model, optimizer, config, mesh, entry())
        assert_refused(ConfigError, words, call, **given)

    words = "got optimizer=Grad ... optimizer.type='Adam' ... Remove one of them"
    refused(words, SGD, None, {"optimizer": ADAM})
    words = "lr_scheduler=<f ... 'WarmupLR' in the ... Remove one of them"
    refused(words, optax.sgd, falling, warmup)
    refused("'WarmupLR' and optimizer=Grad ... constructor, such as", SGD, None, warmup)
    refused("got lr_scheduler=<f ... optimizer=Grad ... Pass the constructor", SGD, falling)
    words = "have an optimizer ... type='WarmupLR' and optimizer=None. Pass the con"
    refused(words, None, None, warmup)
    words = "have an optimizer ... falling ... optimizer=None ... or name one in the section"
    refused(words, None, falling)
    words = "got optimizer=<function sgd ... and no schedule. Call it, as in optax.adamw"
    refused(words, optax.sgd)
    words = "a function of learning_rate, ... =<function scale ... Pass for instance optax.adamw"
    refused(words, optax.scale, falling)
    words = "got lr_scheduler='cosine', which is not a function. Pass for example optax.cosine"
    refused(words, optax.sgd, "cosine")
    words = "<lambda> ... rates of shape=(3,). Pass for example"
    refused(words, optax.sgd, lambda count: np.ones(3))
    words = "WarmupLR'>, which fails with: ... Pass ... optim.WarmupLR("
    refused(words, optax.sgd, jaxpipe.optim.WarmupLR)
    refused("scheduler.params.warmup_max_lr must be a number ... Set", optax.sgd, None, warmup)


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    made = build_alone()
    made.train_batch(entries())
    return made


Refused = Callable[..., None]


@pytest.fixture
def refused(
    engine: PipelineEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Refused]:
    """Checks that a call is refused; in the end that none changed the engine or wrote a file."""
    monkeypatch.chdir(tmp_path)
    held, counted = leaves(engine), scalars(engine)
    yield assert_refused
    assert_same(leaves(engine), held)
    assert scalars(engine) == counted
    assert not list(tmp_path.iterdir())


def test_calls(engine: PipelineEngine, refused: Refused) -> None:
    for name in ("forward", "backward", "step", "__call__"):
        words = f"PipelineEngine.{name} must not be called ... Call train_batch"
        refused(PipelineError, words, getattr(engine, name), 1, x=2)
    sizes = [(5, "4 or 6"), *((size, "2") for size in (1, 0, -4, True, 8.0, "8"))]
    for size, nearest in sizes:
        words = f"= 2 * 1 = 2, but got train_batch_size={size!r}. Use ... example {nearest}."
        refused(ConfigError, words, engine.set_train_batch_size, size)
    for path in ("", None, 3):
        for call in ("save_checkpoint", "load_checkpoint", "save_on_preemption"):
            words = f"_dir must be the path of a dir ... _dir={path!r}. Name one, such"
            refused(CheckpointError, words, getattr(engine, call), path)
    for words, state in (
        ("client_state must be ... but got a NoneType. Pass", None),
        ("client_state must be ... but got a list. Pass", [1]),
        ("client_state['at'] must be ... but got a tuple. Write list(", {"at": (1, 2)}),
        ("keys of client_state must be strings, ... but got key=1. Write '1'", {1: 2}),
    ):
        refused(CheckpointError, words, engine.save_checkpoint, "nowhere", client_state=state)
    words = "micro_batch_size=4 instead of 2. Call set_tr"
    refused(PipelineError, words, engine.set_train_micro_batch_size, 4)
    refused(ConfigError, "but got monitor='print'. Pass", engine.add_monitor, "print")
    for call in (engine.set_dataiterator, engine.train_batch, engine.eval_batch):
        refused(DataError, "must be an iterator, but got a list. Pass iter", call, [entry()])


def test_batches_of_other_structures_and_dtypes(engine: PipelineEngine, refused: Refused) -> None:
    for words, change in (
        (
            "had float32[2, 4], but got int32[2, 4]. Only shapes",
            lambda x, y: (x.astype(int), y),
        ),
        (
            "labels must ... got int8[2, 1]. ... : convert it, or map",
            lambda x, y: (x, y.astype("i1")),
        ),
        ("inputs['x'] in place of inputs in this", lambda x, y: ({"x": x}, y)),
        ("an additional side['mask'] ... Give it the struc", lambda x, y: (x, y, {"mask": x})),
    ):
        batch = iter([change(*entry(seed)) for seed in range(2)])
        refused(DataError, words, engine.eval_batch, batch)


def test_predictions(engine: PipelineEngine, refused: Refused) -> None:
    x, _ = entry()
    for words, inputs in (
        ("at least one, but got inputs: 0. Add the dim", np.zeros((0, 4), np.float32)),
        ("number of samples ... got inputs: no dim. Add the dim", np.float32(1)),
        (
            "['a']: 2, inputs['b']: 3. Add the dim, or make",
            {"a": x, "b": np.zeros((3, 1))},
        ),
        ("got no arrays. Add the dim", {}),
        (
            "inputs must have the dtype ... float32[2, 4], but got int32",
            np.zeros((2, 4), np.int32),
        ),
        (
            "inputs = a masked array of float32[2, 4]. Fill it",
            np.ma.masked_array(x, x > 0),
        ),
    ):
        refused(DataError, words, engine.predict, inputs)
    refused(DataError, "got side = a ndarray in predict. Yield", engine.predict, x, side=x)


def test_one_process_with_two_stages_has_no_stage_of_its_own() -> None:
    for name in ("stage_id", "prev_stage", "next_stage"):
        words = "of stages [0, 1]. Use is_first_"
        assert_refused(PipelineError, words, getattr, build(), name)
