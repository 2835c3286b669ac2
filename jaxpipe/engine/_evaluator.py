"""Evaluation of a whole dataset in microbatches of one shape, whatever the number of samples."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.numbers import as_integer, as_number
from jaxpipe._util.typing import PyTree
from jaxpipe.core.executor import SampleTerms
from jaxpipe.core.pipeline import Pipeline, check_params_name
from jaxpipe.core.state import TrainState
from jaxpipe.data import Batch, MicrobatchStack, RepeatingLoader, host_array, split_entry
from jaxpipe.distributed import gather_numbers, log, run_on_all
from jaxpipe.errors import ConfigError, DataError, LayerError, PipelineError, shown
from jaxpipe.layers.losses import log_probs, next_token_logits, put_together

from ._outputs import split_samples
from ._source import Entry
from ._trainer import Trainer

Measure = Callable[[PyTree, PyTree], PyTree]

_NO_TOKEN = -1
"""Stands for the token of logits that are not numbers."""

_SAME = 0.02
"""Relative tolerance in bfloat16 between a microbatch's sum and the sum over its samples."""


@dataclass(frozen=True)
class _Group:
    """Microbatches for one run of a program."""

    # Leaves `[num_microbatches, samples, ...]`. Microbatches that are not full are padded with
    # copies of their last sample. Missing microbatches are copies of the last one.
    batch: Batch
    # Number of samples that count in each microbatch, from its first.
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """The parameters that a call evaluates; `name` is a suffix of the call's name, or empty."""

    name: str
    state: Callable[[], TrainState]


class Evaluator:
    """Evaluates any number of samples with one program."""

    def __init__(self, trainer: Trainer, take: Callable[..., tuple[Pipeline, Batch]]) -> None:
        self._trainer = trainer
        # Makes all processes take the next batch, or none of them; see `Lockstep.take`.
        self._take = take

    def means(
        self, loader: Any, mapped: Callable[[Iterable[Any]], Iterator[Any]], params: str | None
    ) -> dict[str, Any]:
        """See `Engine.evaluate`. `mapped` converts entries to the form that a batch takes."""
        if isinstance(loader, RepeatingLoader):
            raise DataError(
                "evaluate must be given a loader that ends, but got a RepeatingLoader. Pass a list "
                "of (inputs, labels), or a loader that yields its entries once."
            )
        sums = _Sums()
        names = ()
        entries = mapped(loader)
        chosen = self.chosen(params)
        for group, pipeline, terms in self._evaluated(f"evaluate{chosen.name}", entries, chosen):
            names = pipeline.programs.objective.metric_names
            num_samples = self._size * pipeline.batches.num_replicas
            num_samples //= len(self._trainer.data_shard.replicas)
            shard = self._trainer.data_shard.index
            sums.add(terms, _counted(group.counts, shard, self._size, num_samples))
        if not sums.num_samples:
            raise DataError(
                "evaluate must be given at least one sample, but got a loader without any. An "
                "exhausted iterator does not start again: pass the loader."
            )
        loss, *metrics = sums.means()
        found: dict[str, Any] = {"loss": loss, "num_samples": sums.num_samples}
        return {**found, "metrics": dict(zip(names, metrics, strict=True))} if names else found

    def log_probs(
        self,
        inputs: PyTree,
        labels: PyTree,
        side: Mapping[str, PyTree] | None,
        num_segments: int | None,
        params: str | None,
    ) -> np.ndarray:
        """See `Engine.log_probs`."""
        if num_segments is not None and as_integer(num_segments, 1) is None:
            raise LayerError(
                "num_segments must be the number of answers in a sample, at least 1, but got "
                f"num_segments={num_segments!r}. Omit it if there is only one."
            )
        measure = _measure_log_probs(num_segments)
        chosen = self.chosen(params)
        call = f"log_probs{chosen.name}"
        return self._measured(call, (inputs, labels, side), measure, chosen)

    def generate(
        self, tokens: Any, lengths: Any, options: "Sampling", side: Any, params: str | None
    ) -> np.ndarray:
        """See `Engine.generate`."""
        prompts, lengths, num_new = _checked_prompts(tokens, lengths, options)
        num_positions = prompts.shape[1] + num_new
        split_samples(prompts, side, self._size, call="generate")  # checks the side inputs
        end = options.eos_token_id
        chosen = self.chosen(params)
        call = f"generate of {num_new} tokens{chosen.name}"
        shard = self._trainer.data_shard.index
        longest = int(gather_numbers([lengths.max() + num_new - 1]).max())
        # Only tokens of the text, because others may be outside the model's table and give NaN.
        texts = np.repeat(prompts[:, :1], max(longest + 1, num_positions), axis=1)
        is_given = np.arange(prompts.shape[1]) < lengths[:, None]
        texts[:, : prompts.shape[1]][is_given] = prompts[is_given]
        now = lengths.copy()
        is_open = np.ones(len(texts), bool)
        is_causal = self._is_causal(longest - int(lengths.min()) + 1)
        # All processes continue until every text of every process has ended.
        while (
            shortest := gather_numbers([now[is_open].min(initial=longest + 1)]).min()
        ) <= longest:
            width = longest if is_causal else int(shortest)
            rows = np.flatnonzero(is_open & (is_causal | (now == width)))
            # A process without such a text runs another one along.
            given = rows if rows.size else np.zeros(1, int)
            step = (now - lengths)[given]
            numbers = np.stack(np.broadcast_arrays(given, options.seed, shard, step), axis=1)
            temperature = np.full(len(given), options.temperature, np.float32)
            labels = np.minimum(now[given], width) - 1, numbers.astype(np.int32), temperature
            here = jax.tree.map(functools.partial(_cut, given, width, num_positions), side)
            entry = texts[given, :width], labels, here
            found = self._measured(call, entry, _next_token(width), chosen, is_text=True)
            found = found[: len(rows)]
            run_on_all(functools.partial(_check_tokens, found, rows, texts.dtype))
            texts[rows, now[rows]] = found
            now[rows] += 1
            is_open[rows] = (now - lengths)[rows] < num_new
            if end is not None:
                is_open[rows[found == end]] = False
        made = np.arange(num_new)
        new = texts[np.arange(len(texts))[:, None], lengths[:, None] + made]
        return np.where(made < (now - lengths)[:, None], new, new.dtype.type(end or 0))

    def _is_causal(self, num_lengths: int) -> bool:
        """Whether one program may run texts of all lengths; logs how many are needed otherwise."""
        others = [each.name for each in self._trainer.programs.module.layers if not each.is_causal]
        if others and num_lengths > 1:
            log(
                logging.INFO,
                "generate compiles a program for each of %d lengths of texts, because layer %s may "
                "depend on the length. If it does not, mark it with LayerSpec.causal().",
                num_lengths,
                others[0],
            )
        return not others

    def _measured(
        self,
        call: str,
        samples: Entry,
        measure: Measure,
        chosen: "Chosen",
        *,
        is_text: bool = False,
    ) -> np.ndarray:
        """Return the values of a function of outputs and labels for this process's samples."""
        inputs, labels, side = samples
        size = self._size
        first = self._trainer.data_shard.index * self._size
        batch, num_samples = split_samples(inputs, side, size, labels, call)
        count = jax.tree.leaves(batch)[0].shape[0]
        entries = (tuple(jax.tree.map(lambda x, m=m: x[m], batch)) for m in range(count))
        rows: list[np.ndarray] = []
        for _, _, values in self._evaluated(call, entries, chosen, measure, is_text=is_text):
            rows += [*np.asarray(jax.device_get(values))[:, first : first + size]]
        return np.concatenate(rows)[:num_samples]

    def chosen(self, params: str | None) -> "Chosen":
        """Check the name and return its parameters, made once per call at the first batch."""
        check_params_name(params, self._trainer.config)
        name = "" if params is None else f" of params={params!r}"
        return Chosen(name, functools.cache(lambda: self._trainer.state_with(params)))

    @property
    def _size(self) -> int:
        """Number of samples of a microbatch in this process."""
        trainer = self._trainer
        return trainer.sizes.train_micro_batch_size_per_gpu * len(trainer.data_shard.replicas)

    def _evaluated(
        self,
        call: str,
        entries: Iterable[Any],
        chosen: "Chosen",
        measure: Measure | None = None,
        *,
        is_text: bool = False,
    ) -> Iterator[tuple[_Group, Pipeline, Any]]:
        """Yield groups, each run by a program, with the values of `measure` or `SampleTerms`."""
        trainer = self._trainer
        count = self._trainer.sizes.gradient_accumulation_steps
        for group in _groups(entries, count, self._size):

            def read(group: _Group = group) -> tuple[Pipeline, Batch]:
                has_labels = measure is None
                found = trainer.programs.for_batch(
                    group.batch, count, has_labels=has_labels, is_text=is_text
                )
                return found, group.batch

            pipeline, batch = self._take(call, read)
            placed = pipeline.batches.place(batch, trainer.data_shard.replicas)
            programs = pipeline.programs
            program = programs.measured(measure or programs.objective.measure_samples)
            what = "evaluation of samples" if measure is None else call
            values = trainer.run(what, program, placed, chosen=chosen.state)
            # Before processes exchange numbers, because the exchange is a program too.
            trainer.block_until_ready()
            yield group, pipeline, values


def _groups(entries: Iterable[Any], num_microbatches: int, size: int) -> Iterator[_Group]:
    """Group entries of at most `size` samples by `num_microbatches`. All processes must iterate."""
    iterator = iter(entries)
    last = None
    while True:
        group = run_on_all(lambda: _next_group(iterator, num_microbatches, size))
        has_entries = gather_numbers([group is not None, last is not None])
        # Iteration ends when all processes have reached their end.
        if not has_entries[:, 0].any():
            return
        if not has_entries.any(axis=1).all():
            without = np.flatnonzero(~has_entries.any(axis=1)).tolist()
            raise DataError(
                "each process must have at least one sample to evaluate, but got none in processes "
                f"{without}. Distribute the samples over all processes, or evaluate in one process."
            )
        # A process whose entries have ended repeats its last group, and none of its samples count.
        if group is None:
            assert last is not None
            group = _Group(last.batch, (0,) * num_microbatches)
        last = group
        yield group


def _next_group(iterator: Iterator[Any], num_microbatches: int, size: int) -> _Group | None:
    stack = MicrobatchStack(num_microbatches)
    counts = list[int]()
    last = ()
    for entry in iterator:
        filled, count = _filled(entry, len(counts), size)
        if count:
            stack.add(filled)
            counts.append(count)
            last = filled
        if len(counts) == num_microbatches:
            break
    if not counts:
        return None
    missing = num_microbatches - len(counts)
    for _ in range(missing):
        stack.add(last)
    return _Group(stack.batch(), (*counts, *[0] * missing))


def _filled(entry: Any, number: int, size: int) -> tuple[tuple[Any, ...], int]:
    """Pad an entry to `size` samples, and return it with the number that it had."""
    parts = split_entry(entry, f"entry {number}")
    arrays = [
        jax.tree.map_with_path(
            lambda path, leaf, name=name: host_array(leaf, name + jax.tree_util.keystr(path)), tree
        )
        for name, tree in zip(Batch._fields, parts, strict=True)
    ]
    shapes = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(arrays)}
    count = next(iter(shapes), None)
    if len(shapes) != 1 or count is None or count > size:
        found = ", ".join(sorted("no dim" if each is None else str(each) for each in shapes))
        raise DataError(
            "every leaf of an entry must have the same number of samples as its first dim, at "
            f"most {size} in this process (train_micro_batch_size_per_gpu * replicas), but got "
            f"{found or 'no arrays'}. Let the loader yield batches of {size} samples; the last one "
            "may be smaller."
        )

    def fill(leaf: np.ndarray) -> np.ndarray:
        # Copies of a real sample, because zeros may make a model divide by 0 or index out of range.
        more = np.repeat(leaf[-1:], size - count, axis=0)
        return np.concatenate([leaf, more]) if len(more) else leaf

    if not count:
        return (), 0
    return tuple(jax.tree.map(fill, part) for part in arrays[: len(entry)]), count


class _Sums:
    """Sums over the samples that count, accumulated over groups in float64."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._sums: Any = 0.0
        self._weight = 0.0
        self._fault = ""

    def add(self, terms: SampleTerms, counted: np.ndarray) -> None:
        """Add the values of a group; `counted` is bool `[num_microbatches, samples]`."""
        terms = jax.tree.map(np.asarray, jax.device_get(terms))
        by_replica = counted.reshape(*terms.weights.shape, -1)
        is_whole = np.asarray(by_replica.all(-1))
        is_part = np.asarray(by_replica.any(-1)) & ~is_whole
        # A fault of an earlier group counts too: the loss is one that samples do not add up to.
        self._fault = self._fault or _fault_of_samples(terms)
        of_microbatches: Any = terms.sums, terms.weights
        self._add(*(each[is_whole] for each in of_microbatches))
        if is_part.any():
            if self._fault:
                raise PipelineError(
                    "the loss of a microbatch, and its metrics, must be the mean of its samples' "
                    "losses, or their sum and the sum of their weights, where an entry is not "
                    f"full, but got {self._fault}. Drop the last entry, or make the number of "
                    "samples a multiple of the entry size."
                )
            chosen = (by_replica & is_part[..., None]).reshape(counted.shape)
            of_samples: Any = terms.sample_sums, terms.sample_weights
            self._add(*(each[chosen] for each in of_samples))
        self.num_samples += int(counted.sum())

    def _add(self, sums: np.ndarray, weights: np.ndarray) -> None:
        self._sums = self._sums + sums.sum(0, dtype=np.float64)
        self._weight += float(weights.sum(dtype=np.float64))

    def means(self) -> list[float]:
        """Return the loss, then the metrics. They are 0 if the total weight is 0."""
        return [float(x) / (self._weight or 1.0) for x in np.atleast_1d(self._sums)]


def _fault_of_samples(terms: SampleTerms) -> str:
    """Describe what is wrong with the samples' losses. Empty: they add up to the microbatches'."""
    if terms.sample_sums is None or terms.sample_weights is None:
        return "a loss that is not defined for a single sample"
    shape = (*terms.weights.shape, -1)
    of_samples = np.asarray(terms.sample_sums).reshape(*shape, terms.sums.shape[-1])
    weights = np.asarray(terms.sample_weights).reshape(shape)
    found = of_samples.sum(2)
    size = abs(of_samples).sum(2)
    is_same = (abs(found - terms.sums) <= _SAME * size) | np.isnan(terms.sums)
    is_same &= np.isclose(weights.sum(-1), terms.weights, rtol=_SAME)[..., None]
    if is_same.all():
        return ""
    at = tuple(np.argwhere(~is_same)[0])
    what = "a loss" if at[-1] == 0 else "a metric"
    return (
        f"{what} of {terms.sums[at]:.6g} / {terms.weights[at[:2]]:g} for a microbatch and "
        f"{found[at]:.6g} / {weights[at[:2]].sum():g} for its samples one by one: they depend on "
        "each other"
    )


@functools.cache
def _measure_log_probs(num_segments: int | None) -> Measure:
    def measure(outputs: Any, labels: Any) -> jax.Array:
        labels, segments = labels if isinstance(labels, tuple) else (labels, None)
        logits = next_token_logits(outputs, labels.ndim + 1)
        return log_probs(logits, labels, segments, num_segments)

    return measure


@dataclass(frozen=True)
class Sampling:
    """How new tokens are sampled; see the arguments of `Engine.generate`."""

    max_new_tokens: int
    temperature: float
    seed: int
    eos_token_id: int | None


@functools.cache
def _next_token(length: int) -> Measure:
    """Return a function that samples the token after one position of each text of `length`."""

    def measure(logits: Any, labels: Any) -> jax.Array:
        positions, numbers, temperature = labels
        logits = next_token_logits(logits, 3)
        if getattr(logits, "ndim", 0) != 3 or logits.shape[1] != length:
            raise LayerError(
                f"generate must be given a model that returns logits [samples, {length}, "
                f"vocab_size], one for each token, but got {shown(logits)}. Let the last layer "
                "keep all positions."
            )
        at = logits[jnp.arange(positions.shape[0]), positions]
        # Logits may be split over the stages; only those of one position are gathered.
        at = put_together(at).astype(jnp.float32)
        is_number = ~jnp.isnan(at).any(-1)
        keys = jax.vmap(_key_of)(numbers)
        drawn = jax.vmap(jax.random.categorical)(keys, at / jnp.maximum(temperature, 1e-6)[:, None])
        token = jnp.where(temperature > 0, drawn, at.argmax(-1))
        return jnp.where(is_number, token, _NO_TOKEN).astype(jnp.int32)

    return measure


def _key_of(numbers: jax.Array) -> jax.Array:
    sample, seed, shard, step = numbers
    key = jax.random.fold_in(jax.random.key(seed), shard)
    # By sample number, so that a text does not depend on the other samples in its microbatch.
    return jax.random.fold_in(jax.random.fold_in(key, sample), step)


def _cut(rows: np.ndarray, width: int, num_positions: int, leaf: Any) -> np.ndarray:
    """Return the side input of some texts, for their first positions if it has a dim for these."""
    leaf = np.asarray(leaf)[rows]
    if leaf.shape[1:2] != (num_positions,):
        return leaf
    # Another process may have longer texts.
    return leaf[:, np.minimum(np.arange(width), num_positions - 1)]


def _check_tokens(found: np.ndarray, rows: np.ndarray, dtype: Any) -> None:
    if (found == _NO_TOKEN).any():
        raise DataError(
            "a model must return numbers as logits to continue a text, but got NaN for sample "
            f"{rows[found == _NO_TOKEN][0]}. Check that the model has all tokens of the prompt, "
            "and that its training has not diverged."
        )
    if found.size and found.max() > np.iinfo(dtype).max:
        raise DataError(
            "prompts must have a dtype that can represent every token of the model, but got "
            f"tokens={dtype} and the new token {found.max()}. Convert them to int32."
        )


def _checked_prompts(
    tokens: Any, lengths: Any, options: Sampling
) -> tuple[np.ndarray, np.ndarray, int]:
    with contextlib.suppress(ValueError):  # rows of different lengths, reported below
        tokens = np.asarray(tokens) if isinstance(tokens, list | tuple) else tokens
    prompts = np.zeros(0) if isinstance(tokens, list | tuple) else host_array(tokens, "tokens")
    if prompts.ndim != 2 or prompts.dtype.kind not in "iu" or not prompts.size:
        raise DataError(
            "generate must be given prompts as integers [num_samples, length], but got tokens="
            f"{shown(tokens)}. Pad prompts of different lengths at the end, "
            "and pass lengths."
        )
    shape: Any = prompts.shape
    num_samples, length = shape
    given = np.full(num_samples, length) if lengths is None else host_array(lengths, "lengths")
    if given.shape != (num_samples,) or given.dtype.kind not in "iu" or given.min() < 1:
        raise DataError(
            f"lengths must be the number of tokens of each of {num_samples} prompts, at least 1, "
            f"but got {shown(lengths)}. Omit it if no prompt is padded."
        )
    if given.max() > length:
        raise DataError(
            f"lengths must be at most the length of the padded prompts, {length}, but got "
            f"{given.max()}. Count the tokens of each prompt without padding."
        )
    count = as_integer(options.max_new_tokens, 1)
    seed = as_integer(options.seed, 0)
    temperature = as_number(options.temperature)
    end = options.eos_token_id
    kind: Any = prompts.dtype
    largest = np.iinfo(kind).max
    if end is not None and (as_integer(end, 0) is None or end > largest):
        raise ConfigError(
            f"eos_token_id must be one token, an integer from 0 to {largest} as in the prompts' "
            f"dtype, but got {end!r}. Pass the tokenizer's eos_token_id, or None."
        )
    is_seed = seed is not None and seed < 1 << 31
    if count is None or not is_seed or temperature is None or temperature < 0:
        raise ConfigError(
            "generate must have max_new_tokens of at least 1, a temperature of at least 0 and a "
            f"seed from 0 to 2**31 - 1, but got max_new_tokens={options.max_new_tokens!r}, "
            f"temperature={options.temperature!r} and seed={options.seed!r}. Change the one that "
            "is out of range."
        )
    return prompts, given.astype(np.int32), count


def _counted(counts: Sequence[int], shard: int, size: int, num_samples: int) -> np.ndarray:
    """Return which samples count, bool `[num_microbatches, num_samples]`. All must call it."""
    # `counts` and `shard` belong to this process, and `size` is the microbatch size in one process.
    rows = gather_numbers([shard, *counts])
    counted = np.zeros((len(counts), num_samples), bool)
    for index, *of_process in rows.tolist():
        for number, count in enumerate(of_process):
            counted[number, index * size : index * size + count] = True
    return counted
