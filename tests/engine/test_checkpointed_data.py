"""After loading, training sees the batches that it would have seen."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import grain.python as grain
import numpy as np
import pytest
from _covering import sweep
from _leaves import assert_same, leaves, scalars
from _refusals import assert_refused
from _small import FEATURES, MICROBATCH, build, build_alone, entries, entry, module
from _stateful import Own, Sampled, Streamed

from jaxpipe import LayerSpec, PipelineEngine, RepeatingLoader
from jaxpipe.data import BatchLoader
from jaxpipe.errors import CheckpointError, DataError

AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
ENTRIES = [entry(seed) for seed in range(7)]
rng = np.random.default_rng(3)
SAMPLES = [
    (x.astype(np.float32), y.astype(np.float32))
    for x, y in zip(rng.normal(size=(14, FEATURES)), rng.normal(size=(14, 1)), strict=True)
]


class Counting:
    """An iterator of a user's own, whose state is bytes."""

    def __init__(self) -> None:
        self.seed = 0

    def __iter__(self) -> "Counting":
        return self

    def __next__(self) -> Any:
        self.seed += 1
        return entry(self.seed)

    def get_state(self) -> bytes:
        return bytes([self.seed])

    def set_state(self, state: bytes) -> None:
        self.seed = int(state[0])


def dataset() -> grain.MapDataset:
    return grain.MapDataset.source(SAMPLES).shuffle(seed=5)


def data_loader() -> grain.DataLoader:
    sampler = grain.IndexSampler(
        len(SAMPLES), shard_options=grain.NoSharding(), shuffle=True, num_epochs=None, seed=4
    )
    return grain.DataLoader(
        data_source=SAMPLES,
        sampler=sampler,
        operations=[grain.Batch(MICROBATCH)],
        worker_count=0,
        read_options=AT_ONCE,
    )


def torchdata(**settings: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def collate(samples: list[Any]) -> Any:
        return tuple(map(np.stack, zip(*samples, strict=True)))

    return stateful.StatefulDataLoader(
        SAMPLES, batch_size=MICROBATCH, shuffle=True, collate_fn=collate, **settings
    )


def datasets() -> Any:
    rows = [{"x": x, "y": y} for x, y in SAMPLES]
    made = pytest.importorskip("datasets").Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
    return made.shuffle(seed=0, buffer_size=1).batch(MICROBATCH)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: ENTRIES,
    "batches": lambda: BatchLoader(SAMPLES, MICROBATCH, seed=1),
    "sampled": lambda: Sampled(ENTRIES),
    "streamed": lambda: Streamed(ENTRIES),
    "own": lambda: Own(ENTRIES),
    "torchdata": torchdata,
    "datasets": datasets,
    "grain": lambda: dataset().batch(MICROBATCH).to_iter_dataset(AT_ONCE),
}

ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: RepeatingLoader(ENTRIES),
    "batches": lambda: RepeatingLoader(BatchLoader(SAMPLES, MICROBATCH, seed=1)),
    "epoch": lambda: iter(BatchLoader(SAMPLES * 2, MICROBATCH, seed=1)),
    "own": Counting,
    "own-state-dict": lambda: Own(ENTRIES),
    "sampled": lambda: RepeatingLoader(Sampled(ENTRIES)),
    "grain": lambda: iter(dataset().repeat().batch(MICROBATCH).to_iter_dataset(AT_ONCE)),
    "grain-epochs": lambda: RepeatingLoader(dataset().batch(MICROBATCH).to_iter_dataset(AT_ONCE)),
    "grain-mix": lambda: iter(
        grain.IterDataset.mix(
            [dataset().repeat().batch(MICROBATCH).to_iter_dataset(AT_ONCE)] * 2, weights=[0.7, 0.3]
        )
    ),
    "grain-loader": lambda: iter(data_loader()),
}


def losses(engine: PipelineEngine, data_iter: Any = None, count: int = 3) -> list[float]:
    return [float(engine.train_batch(data_iter)) for _ in range(count)]


@pytest.fixture(scope="module")
def explicit() -> PipelineEngine:
    """An engine that is given an iterator at each batch."""
    engine = build_alone()
    engine.train_batch(entries())
    return engine


@pytest.fixture(scope="module")
def start(explicit: PipelineEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a place in the data: `entries` gives none."""
    path = tmp_path_factory.mktemp("start")
    explicit.save_checkpoint(path)
    return path


@pytest.fixture
def engine(explicit: PipelineEngine, start: Path) -> PipelineEngine:
    explicit.load_checkpoint(start)
    return explicit


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[PipelineEngine, Path, list[float]]:
    """An engine that reads its training data, and its checkpoint after two batches.

    Also the losses of the next.
    """
    engine, path = build_alone(training_data=SAMPLES), tmp_path_factory.mktemp("stored")
    losses(engine, count=2)
    engine.save_checkpoint(path)
    return engine, path, losses(engine)


def place(engine: PipelineEngine) -> Any:
    return engine._source.get_state()


@pytest.mark.parametrize("name", sweep(4, [*ITERATORS], rest=pytest.mark.slow))
def test_an_iterator_that_is_given_at_each_batch(
    name: str, engine: PipelineEngine, tmp_path: Path
) -> None:
    first = ITERATORS[name]()
    losses(engine, first)
    engine.save_checkpoint(tmp_path)
    wanted = losses(engine, first)
    for other in (ITERATORS[name](), first):
        engine.load_checkpoint(tmp_path)
        assert losses(engine, other) == wanted
    assert len(set(wanted)) == 3


def test_an_iterator_that_is_set(engine: PipelineEngine, tmp_path: Path) -> None:
    engine.set_dataiterator(RepeatingLoader(ENTRIES))
    losses(engine)
    engine.save_checkpoint(tmp_path)
    wanted = losses(engine)
    target = build_alone(example_batch=entry())
    first, second = RepeatingLoader(ENTRIES), RepeatingLoader(ENTRIES)
    target.load_checkpoint(tmp_path)
    target.set_dataiterator(first)
    assert first.get_state() == {"position": 6}
    target.load_checkpoint(tmp_path)
    target.set_dataiterator(second)
    assert second.get_state() == {"position": 0}
    engine.load_checkpoint(tmp_path)
    assert losses(engine, first) == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls torch so
@pytest.mark.parametrize("is_endless", sweep(1, [False, True]))
@pytest.mark.parametrize("name", sweep(3, [*LOADERS], rest=pytest.mark.slow))
def test_a_loader_that_is_set(
    name: str, is_endless: bool, engine: PipelineEngine, tmp_path: Path
) -> None:
    def give(target: PipelineEngine) -> None:
        loader = LOADERS[name]()
        if is_endless:
            target.set_dataiterator(RepeatingLoader(loader))
        else:
            target.set_dataloader(loader)

    give(engine)
    if name == "datasets":
        engine.set_batch_fn(lambda batch: tuple(np.array(batch[key], np.float32) for key in "xy"))
    losses(engine, None, 1)
    engine.save_checkpoint(tmp_path)
    count = 6 if is_endless else 2
    wanted = losses(engine, None, count)
    engine.load_checkpoint(tmp_path)  # into the iterator that was read on
    engine.save_checkpoint(tmp_path, "again")
    assert losses(engine, None, count) == wanted
    give(engine)
    engine.load_checkpoint(tmp_path, "again")  # into a fresh one
    assert losses(engine, None, count) == wanted
    assert len(set(wanted)) == count
    engine.set_batch_fn(None)


def test_training_data(stored: tuple[PipelineEngine, Path, list[float]]) -> None:
    engine, path, wanted = stored
    engine.load_checkpoint(path)
    assert losses(engine) == wanted
    assert place(engine)["iterator"].items() >= {"epoch": 1, "samples": 6}.items()
    fresh = build(module(stages=1), {"train_micro_batch_size_per_gpu": 4}, training_data=SAMPLES)
    fresh.load_checkpoint(path)
    assert place(fresh)["iterator"].items() >= {"epoch": 0, "samples": 8}.items()
    fresh.load_checkpoint(path, load_module_only=True)
    assert fresh.global_steps == 2


def test_loading_parameters_alone_leaves_the_data(
    stored: tuple[PipelineEngine, Path, list[float]],
) -> None:
    engine, path, _ = stored
    losses(engine, count=1)
    before = place(engine)
    engine.load_checkpoint(path, load_module_only=True)
    assert place(engine) == before


def test_mapped_entries(engine: PipelineEngine, tmp_path: Path) -> None:
    loader = RepeatingLoader(range(7))
    engine.set_batch_fn(entry)
    losses(engine, loader)
    engine.save_checkpoint(tmp_path)
    wanted = losses(engine, loader)
    engine.load_checkpoint(tmp_path)
    assert losses(engine, RepeatingLoader(range(7))) == wanted
    engine.set_batch_fn(None)


def test_evaluation_does_not_take_the_place(engine: PipelineEngine, tmp_path: Path) -> None:
    loader = RepeatingLoader(ENTRIES)
    losses(engine, loader)
    engine.eval_batch(RepeatingLoader(ENTRIES[1:]))
    engine.save_checkpoint(tmp_path)
    wanted = losses(engine, loader)
    engine.load_checkpoint(tmp_path)
    evaluated = RepeatingLoader(ENTRIES)
    engine.eval_batch(evaluated)
    assert evaluated.get_state() == {"position": 2}
    assert losses(engine, RepeatingLoader(ENTRIES)) == wanted


def test_an_iterator_without_a_place(engine: PipelineEngine, start: Path, tmp_path: Path) -> None:
    losses(engine, RepeatingLoader(ENTRIES))
    engine.save_checkpoint(tmp_path)
    match = (
        r"a list_iterator has no set_state or load_state_dict: training goes on from its "
        r"current position.*Give set"
    )
    engine.load_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match=match):
        engine.train_batch(entries(3))
    engine.train_batch(entries(4))
    assert place(engine) is None
    engine.save_checkpoint(tmp_path)
    loader = RepeatingLoader(ENTRIES)
    losses(engine, loader, 1)
    for path in (tmp_path, start):
        engine.load_checkpoint(path)
        losses(engine, loader, 1)
    assert loader.get_state() == {"position": 6}


class Torch:
    """As torch's `DataLoader`: a fresh iterator each time, and no place."""

    def __iter__(self) -> Iterator[Any]:
        return (each for each in ENTRIES)


WITHOUT: dict[str, tuple[str, Callable[[PipelineEngine], Any]]] = {
    "set": ("list_iterator", lambda engine: engine.set_dataiterator(iter(ENTRIES))),
    "loader": ("Torch", lambda engine: engine.set_dataloader(Torch())),
    "repeated": ("Torch", lambda engine: engine.set_dataiterator(RepeatingLoader(Torch()))),
    "given": ("generator", lambda engine: iter(Torch())),
}


@pytest.mark.parametrize("name", sweep(2, [*WITHOUT]))
def test_a_place_that_cannot_be_saved(name: str, explicit: PipelineEngine, tmp_path: Path) -> None:
    """One warning at the first save, and one at each load."""
    engine = build_alone(example_batch=entry())
    kind, give = WITHOUT[name]
    iterator = give(engine)
    engine.save_checkpoint(tmp_path)  # before a batch there is nothing to lose
    losses(engine, iterator, 2)
    why = (
        f"holds no place in the data, because a {kind} has neither get_state and set_state nor "
        "state_dict and load_"
    )
    with pytest.warns(
        UserWarning,
        match=rf"{why}.*where its iterator then begins\. .*StatefulDataLoader of torchdata",
    ) as met:
        engine.save_checkpoint(tmp_path)
    assert len(met) == 1
    assert met[0].filename == __file__
    engine.save_checkpoint(tmp_path)
    for target in (engine, build_alone(example_batch=entry())):
        with pytest.warns(
            UserWarning, match=rf"{why}.*goes on from the iterator's current position\. Give"
        ) as met:
            target.load_checkpoint(tmp_path)
        assert len(met) == 1
        target.load_checkpoint(tmp_path, load_module_only=True)


def test_iterators_that_are_made_for_each_batch_miss_no_place(
    engine: PipelineEngine, tmp_path: Path
) -> None:
    for _ in range(3):
        engine.train_batch(entries())
        engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loader",
    sweep(1, [lambda: RepeatingLoader(Sampled(ENTRIES)), lambda: Own(ENTRIES)]),
    ids=["loader", "own"],
)
def test_a_batch_that_was_interrupted_comes_again(loader: Any, tmp_path: Path) -> None:
    """In this process, and after a resume from a checkpoint that was saved then."""

    def interrupted(found: Any) -> Any:
        nonlocal count
        count -= 1
        if not count:
            raise KeyboardInterrupt
        return found

    count, engine, plain = 0, build(example_batch=entry()), build(example_batch=entry())
    wanted = losses(plain, loader())
    engine.set_dataiterator(loader())
    engine.set_batch_fn(interrupted)
    assert losses(engine, None, 1) == wanted[:1]
    count = 2
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch()
    engine.save_checkpoint(tmp_path)
    assert losses(engine, None, 2) == wanted[1:]
    other = build(example_batch=entry())
    other.set_dataiterator(loader())
    other.load_checkpoint(tmp_path)
    assert losses(other, None, 2) == wanted[1:]


def test_an_iterator_without_a_place_that_is_set(engine: PipelineEngine, tmp_path: Path) -> None:
    engine.set_dataiterator(RepeatingLoader(ENTRIES))
    losses(engine, None, 1)
    engine.save_checkpoint(tmp_path)
    target = build_alone(example_batch=entry())
    target.load_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match=r"a list_iterator has no set_state or load_state_dict"):
        target.set_dataiterator(entries())
    with pytest.warns(UserWarning, match=r"a list_iterator has no set_state or load_state_dict"):
        target.load_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def misfit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of another model, with a place in the data."""
    path = tmp_path_factory.mktemp("misfit")
    layers = [LayerSpec(nn.Dense, width) for width in (3, 1, 1)]
    other = build(module(*layers), example_batch=entry(), training_data=SAMPLES)
    other.save_checkpoint(path)
    return path


def test_a_place_waits_for_its_iterator(
    engine: PipelineEngine, misfit: Path, tmp_path: Path
) -> None:
    """Also through a load that is refused, and through saving again before any batch."""
    loader = RepeatingLoader(ENTRIES)
    losses(engine, loader)
    engine.save_checkpoint(tmp_path)
    wanted = losses(engine, loader)
    waiting = build_alone(example_batch=entry())
    waiting.load_checkpoint(tmp_path)
    assert_refused(CheckpointError, "unexpected: layers/2_Dense", waiting.load_checkpoint, misfit)
    waiting.save_checkpoint(tmp_path, "again")
    again = RepeatingLoader(ENTRIES)
    waiting.set_dataiterator(again)
    assert again.get_state() == {"position": 6}
    engine.load_checkpoint(tmp_path, "again")
    assert losses(engine, RepeatingLoader(ENTRIES)) == wanted


def test_an_iterator_given_beside_training_data(
    stored: tuple[PipelineEngine, Path, list[float]], tmp_path: Path
) -> None:
    """The place is that of the iterator that was trained with, and waits for the next such."""
    engine = stored[0]
    loader = Counting()
    losses(engine, loader)
    engine.save_checkpoint(tmp_path)
    wanted = losses(engine, loader)
    fresh = build_alone(training_data=SAMPLES)
    fresh.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert losses(engine, Counting()) == wanted


@pytest.fixture(scope="module")
def reading() -> PipelineEngine:
    engine = build_alone(training_data=SAMPLES)
    assert int(engine.state.step) == 0
    return engine


def test_the_place_of_another_kind_of_iterator(
    engine: PipelineEngine, reading: PipelineEngine, tmp_path: Path
) -> None:
    """The error comes before anything is changed."""
    engine.set_dataiterator(Counting())
    losses(engine, None, 2)
    engine.save_checkpoint(tmp_path)
    held, counted, at = leaves(reading), scalars(reading), place(reading)
    words = "the same kind, but got state=b' ... and loader=<BatchLoader>. Pass the loader that was"
    assert_refused(DataError, words, reading.load_checkpoint, tmp_path)
    assert_same(leaves(reading), held)
    assert (scalars(reading), place(reading)) == (counted, at)


def test_the_place_of_an_epoch_fits_its_loader(engine: PipelineEngine, tmp_path: Path) -> None:
    engine.set_dataiterator(iter(BatchLoader(SAMPLES, MICROBATCH, seed=1)))
    losses(engine, None, 1)
    engine.save_checkpoint(tmp_path)
    wanted = losses(engine, None, 2)
    engine.set_dataloader(BatchLoader(SAMPLES, MICROBATCH, seed=1))
    engine.load_checkpoint(tmp_path)
    assert losses(engine, None, 2) == wanted


@pytest.mark.parametrize("seed", [1234, 5])
def test_an_epoch_that_goes_on_in_another_order(
    seed: int, stored: tuple[PipelineEngine, Path, list[float]], tmp_path: Path
) -> None:
    """Named where the data are drawn by another `base_seed`, or are more."""
    data = SAMPLES if seed == 5 else SAMPLES * 2
    engine = build(module(base_seed=seed), training_data=data)
    match = (
        "with seed=5, .* with seed=1234:"
        if seed == 5
        else "with num_samples=28, .*8 samples .* with num_samples=14:"
    )
    with pytest.warns(UserWarning, match=match):
        engine.load_checkpoint(stored[1])


def test_a_place_between_batches_of_another_size(
    stored: tuple[PipelineEngine, Path, list[float]],
) -> None:
    path = stored[1]
    target = build(module(stages=1), {"train_micro_batch_size_per_gpu": 3}, training_data=SAMPLES)
    words = "got samples=8 and batch_size=3. Use a batch size that divides 8"
    assert_refused(DataError, words, target.load_checkpoint, path)
    assert target.global_steps == 0
    assert place(target)["iterator"].items() >= {"epoch": 0, "samples": 0}.items()
    target.load_checkpoint(path, load_module_only=True)
