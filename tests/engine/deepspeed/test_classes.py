import copy
import pickle
from typing import Any

import pytest
from _refusals import assert_refused

from jaxpipe.config import FP16Section, PipelineConfig, TrainConfig, load_config
from jaxpipe.deepspeed import BatchConfig, Config, FP16Config, TrainingConfig
from jaxpipe.errors import ConfigError


class LogConfig(Config):
    verbose: bool = False
    every = 10

    @property
    def twice(self) -> int:
        return 2 * self.every


class ScriptConfig(TrainingConfig):
    name = "run"
    gradient_clipping: float | None = None
    pipeline: Any = None
    log = LogConfig()


class ScaledConfig(FP16Config):
    loss_scale = 128


def test_fields_are_attributes_and_items() -> None:
    for config in (
        Config(verbose=True),
        Config.from_dict({"verbose": True}),
        LogConfig(verbose=True),
    ):
        assert config.verbose is True
        assert config["verbose"] is True
    assert dict(Config(a=1, b=2)) == Config(a=1, b=2) == {"a": 1, "b": 2}
    assert LogConfig(every=3).twice == 6
    assert repr(LogConfig(every=3)) == "LogConfig(verbose=False, every=3)"
    assert len(Config()) == 0


def test_subclasses_declare_fields_with_defaults() -> None:
    assert LogConfig() == {"verbose": False, "every": 10}
    config = ScriptConfig(log={"every": 1}, batch={"train_batch_size": 8})
    assert list(config) == ["batch", "fp16", "name", "gradient_clipping", "pipeline", "log"]
    assert config.log == LogConfig(every=1)
    assert config.batch["train_batch_size"] == 8
    assert ScriptConfig().log.every == 10
    assert ScriptConfig(log=None).log == LogConfig()


def test_the_names_of_the_manual() -> None:
    assert dict(FP16Config()) == {"enabled": None, "clip": None}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [BatchConfig()[size] for size in sizes] == [None] * 3
    assert TrainingConfig() == {"batch": BatchConfig(), "fp16": FP16Config()}


def test_resolve_completes_the_configuration_itself() -> None:
    sizes = BatchConfig(train_batch_size=64, train_micro_batch_size_per_gpu=4, data_parallel_size=2)
    config = TrainingConfig(batch=sizes)
    assert config.resolve() is config
    assert config.batch is sizes
    assert sizes.gradient_accumulation_steps == 8
    assert config.fp16 == {"enabled": False, "clip": 0.0}
    assert config.resolve() == config
    assert ScriptConfig(batch=config.batch).resolve().name == "run"


def test_validity_completes_too() -> None:
    config = BatchConfig(train_batch_size=64, gradient_accumulation_steps=4)
    assert config.is_valid()
    assert config.train_micro_batch_size_per_gpu == 16


def test_what_is_completed_is_no_default_of_the_class() -> None:
    config = ScriptConfig(batch={"train_batch_size": 8}).resolve()
    assert config.fp16.enabled is False
    assert ScriptConfig().fp16.enabled is None
    assert FP16Config().enabled is None


def test_a_subclass_completes_its_own_fields() -> None:
    class RunConfig(Config):
        steps: int | None = None
        every: int | None = None
        log = LogConfig()

        def resolve(self) -> "RunConfig":
            return self._complete(every=self.every or self.steps // 10)

    config = RunConfig(steps=100)
    config.resolve()
    assert config.every == 10


def test_all_that_does_not_fit_is_said_at_once() -> None:
    config = TrainingConfig(
        batch={"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, fp16={"clip": -1}
    )
    with pytest.raises(
        ConfigError,
        match=r"changed in 2 places:\n  - .*7 = 2 x \? x 1. Use .*\n  - fp16.clip must be",
    ):
        config.resolve()
    with pytest.raises(ConfigError) as error:
        load_config(
            ScriptConfig(
                batch={"train_batch_size": 0}, fp16={"clip": "x", "enabled": 1}, pipeline={"x": 1}
            )
        )
    assert error.value.paths == ("fp16.clip", "train_batch_size", "pipeline.x", "fp16.enabled")


def test_validity_is_a_bool() -> None:
    for config, valid in (
        (Config(), True),
        (BatchConfig(train_batch_size=8), True),
        (BatchConfig(), False),
        (BatchConfig(train_batch_size="8"), False),
        (BatchConfig(train_batch_size=7, train_micro_batch_size_per_gpu=2), False),
        (BatchConfig(train_batch_size=7, data_parallel_size=2), False),
        (FP16Config(), True),
        (FP16Config(enabled=1), False),
        (FP16Config(clip=-1.0), False),
        (TrainingConfig(), False),
        (TrainingConfig(batch=BatchConfig(train_batch_size=8)), True),
        (TrainingConfig(batch={"train_batch_size": 8}, fp16={"clip": "x"}), False),
    ):
        assert config.is_valid() is valid, config


def test_copies_and_pickles() -> None:
    config = ScriptConfig(batch={"train_batch_size": 8}, log={"every": 2})
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_engine_reads_it() -> None:
    config = TrainingConfig(
        batch={"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
        fp16={"enabled": True, "clip": 1},
    )
    expected = TrainConfig(64, 4, None, gradient_clipping=1.0, fp16=FP16Section(enabled=True))
    assert load_config(config) == config.to_train_config() == expected
    assert load_config(TrainingConfig()) == TrainConfig()


def test_fields_of_a_subclass_that_are_keys() -> None:
    config = ScriptConfig(
        gradient_clipping=2, pipeline={"stages": 2}, fp16=ScaledConfig(enabled=True)
    )
    expected = TrainConfig(
        gradient_clipping=2.0,
        pipeline=PipelineConfig(2),
        fp16=FP16Section(enabled=True, loss_scale=128),
    )
    assert load_config(config) == expected


def test_fields_that_are_not_there() -> None:
    unknown = "is not a field of BatchConfig. Did you mean train_batch_size?"
    config, name = LogConfig(), "must not be the name of a field of"
    for words, make in (
        (f"^train_batchsize {unknown}", lambda: BatchConfig(train_batchsize=1)),
        (f"^batch.train_batchsize {unknown}", lambda: TrainingConfig(batch={"train_batchsize": 1})),
        (
            "^zzz is not a field of FP16Config. Use one of enabled, clip.",
            lambda: FP16Config(zzz=1),
        ),
        (
            "^batch must be a dictionary or a BatchConfig, but got batch=3. Use BatchC",
            lambda: TrainingConfig(batch=3),
        ),
        (
            "^batch must be a dictionary or a BatchConfig, but got batch=FP16",
            lambda: TrainingConfig(batch=FP16Config()),
        ),
        (f"^keys {name} Config, but got keys=1: ... Choose another", lambda: Config(keys=1)),
        (f"^_a {name} Config, but got _a=1", lambda: Config(_a=1)),
        (f"^items {name} Bad, but got items=3", lambda: type("Bad", (Config,), {"items": 3})()),
    ):
        assert_refused(ConfigError, words, make)
    for words, call in (
        ("^evry is not a field of LogConfig. Did you mean every?", lambda: config.evry),
        ("^a is not a field of Config. Use one of no fields", lambda: Config().a),
        (
            "LogConfig must not change, but got every=3. Make a new one",
            lambda: setattr(config, "every", 3),
        ),
        (
            "LogConfig must not change, but got del every. Make a new one",
            lambda: delattr(config, "every"),
        ),
    ):
        assert_refused(AttributeError, words, call)
    assert_refused(KeyError, "evry", lambda: config["evry"])
    assert config.every == 10


def test_values_that_are_refused() -> None:
    sizes = BatchConfig(train_batch_size=7, train_micro_batch_size_per_gpu=2)
    words = "must hold, but got 7 = 2 x ? x 1. Use a train_batch_size that is a mult"
    assert_refused(ConfigError, words, sizes.resolve)
    enabled = "^fp16.enabled must be true or false, but got fp16.enabled="
    assert_refused(ConfigError, enabled + "1. Use true", FP16Config(enabled=1).resolve)
    clip = "^fp16.clip must be a finite number of at least 0, but got fp16.clip="
    assert_refused(ConfigError, clip + "-1", FP16Config(clip=-1).resolve)
    clipped = ScriptConfig(gradient_clipping=1.0, fp16={"clip": 2.0})
    given = "^gradient_clipping must be given once, but got gradient_clipping=1.0 and fp16.clip=2.0"
    unknown = "^pipeline.stagess is not a known key. Did you mean pipeline.stages"
    for words, config in (
        (given + ". Keep one", clipped),
        (clip + "'x'", TrainingConfig(fp16={"clip": "x"})),
        (enabled + "'yes'", TrainingConfig(fp16={"enabled": "yes"})),
        (
            "^train_batch_size must be an integer of at least 1, but got",
            TrainingConfig(batch={"train_batch_size": 0}),
        ),
        (unknown, ScriptConfig(pipeline={"stagess": 2})),
    ):
        assert_refused(ConfigError, words, load_config, config)
