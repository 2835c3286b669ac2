"""The training state of a pipeline: its shapes, its initial values, and its trees on the host."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.mesh import off_mesh
from jaxpipe._util.typing import Path, PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.executor import DevicePrograms
from jaxpipe.core.state import (
    Catalog,
    Source,
    StageInit,
    Storage,
    TrainState,
    from_words,
    made_collections,
    made_params,
    make_catalog,
    opt_state_keys,
    place_everywhere,
    place_leaves,
    read_leaves,
    state_arrays,
    state_specs,
    with_arrays,
)
from jaxpipe.layers import (
    ModelTrace,
    PipelineModule,
    flatten_dict,
    join_path,
    unflatten_dict,
    without_adapters,
)
from jaxpipe.optim import LossScaler, average_of

from ._hyperparams import Hyperparams
from ._program import Compiled
from ._validate import (
    check_base,
    check_jit,
    check_opt_state,
    check_params,
    check_params_name,
)

_CHOICES: Mapping[str, Callable[[PyTree, PyTree], PyTree]] = {
    "ema": average_of,
    "base": without_adapters,
}
"""Functions of the trained parameters and the optimiser state that return other parameters."""


class StateIO:
    """Makes the `TrainState` of a pipeline, and converts it to and from trees on the host.

    `step` and the other programs map one state to the next; everything else that reads or makes a
    state is here. With several processes, all must make the same calls.

    Attributes:
        trains: Whether there is an optimiser.
        struct: Shapes, dtypes and shardings of a state.
    """

    def __init__(
        self,
        module: PipelineModule,
        trace: ModelTrace,
        mesh: Mesh,
        programs: DevicePrograms,
        config: TrainConfig,
        *,
        trains: bool,
    ) -> None:
        self._module = module
        self._trace = trace
        self._mesh = mesh
        self._programs = programs
        self._config = config
        self._params = programs.stage.params
        self._collections = programs.stage.collections
        self._sharding = programs.sharding
        self._updater = programs.updater
        self._scaler = LossScaler.from_config(config)
        self.trains = trains
        self.struct: TrainState = self._struct()
        self._choosing = functools.cache(self._compile_choice)  # not of the class: it holds `self`

    @functools.cached_property
    def catalog(self) -> Catalog:
        """The location of every leaf of a state in the arrays that `state_arrays` names."""
        return make_catalog(self._params, self._sharding, self._updater, self._collections)

    @property
    def specs(self) -> TrainState:
        """The sharding of a state over the manual axes."""
        return state_specs(self._sharding.row_spec, P("stage"))

    @property
    def opt_state_struct(self) -> PyTree:
        """Shapes and dtypes of the whole model's optimiser state, with PRNG keys as words."""
        # Not those of the updater, which has one stage's slice of a parameter that is split.
        struct = self._updater.whole_struct()
        leaves = [self.catalog[key] for key in opt_state_keys(struct)]
        found = [jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(struct), found)

    @off_mesh
    def init(self, key: jax.Array | None = None) -> TrainState:
        """See `Pipeline.init`."""
        check_jit()
        # Values are created as they are placed, one stage after another, so that host memory never
        # contains the whole model.
        made = StageInit(self._module, self._trace, self._key if key is None else key)
        return self._state(self._draw("params", made) | self._draw("collections", made))

    @off_mesh
    def init_from(self, tree: PyTree, collections: PyTree | None = None) -> TrainState:
        """Create an initial state from the model's parameter tree.

        Args:
            tree: Parameters as `PipelineModule.init` returns them.
            collections: Collections as `PipelineModule.init_collections` returns them. None: they
                are initialised from `base_seed`.

        Returns:
            The state.

        Raises:
            LayerError: A parameter is missing, unexpected, of the wrong shape, or not a
                floating-point array.
        """
        arrays = self._params_of(tree)
        if collections is None:
            made = StageInit(self._module, self._trace, self._key)
            return self._state(arrays | self._draw("collections", made))
        return self._state(arrays | self._place_tree("collections", collections))

    @off_mesh
    def init_scalars(self) -> dict[str, Any]:
        """Return the replicated fields of an initial state, equal on all devices."""
        number = np.zeros((), np.int32)
        loss_scale = () if self._scaler is None else self._scaler.init()
        fields = {
            "step": number,
            "loss_scale": loss_scale,
            "skipped_steps": number,
            "rng": self._key,
        }
        return place_everywhere(fields, self._mesh)

    @off_mesh
    def replace(
        self,
        state: TrainState,
        *,
        params: PyTree = None,
        collections: PyTree = None,
        opt_state: PyTree = None,
        step: int | None = None,
    ) -> TrainState:
        """Return a state with other values of some fields. What is None keeps its values.

        Args:
            state: The state.
            params: Parameters as `params_tree` returns them. An `ema` average restarts at them.
            collections: Collections as `collections_tree` returns them.
            opt_state: The optimiser's state as `opt_state_tree` returns it. Its leaves are matched
                by their paths, so tuples may have become dictionaries or lists.
            step: Number of batches trained so far, from which dropout keys are derived. The
                position in a schedule is a count in `opt_state`.

        Returns:
            A state that shares all other arrays.

        Raises:
            LayerError: Leaves are missing, unexpected, of the wrong shape, or of a dtype that would
                lose part of them, or a parameter is not a floating-point array.
        """
        if params is not None:
            state = self.restart_average(with_arrays(state, self._params_of(params)))
        if collections is not None:
            state = with_arrays(state, self._place_tree("collections", collections))
        if opt_state is not None:
            tree = check_opt_state(opt_state, self.opt_state_struct)
            leaves = dict(zip(opt_state_keys(tree), jax.tree.leaves(tree), strict=True))
            state = with_arrays(state, self._place("opt_state", leaves))
        if step is None:
            return state
        number = place_everywhere(np.asarray(step, np.int32), self._mesh)
        return dataclasses.replace(state, step=number)

    def with_params(self, state: TrainState, name: str) -> TrainState:
        """Return the state with other parameters of the same run, for evaluation.

        Nothing is donated.

        Args:
            state: The state.
            name: `"ema"` selects the average that the section `ema` keeps. `"base"` selects the
                parameters without the adapters of `jaxpipe.layers.lora`.

        Returns:
            A state that shares all other arrays.

        Raises:
            ConfigError: The state does not have these parameters.
        """
        check_params_name(name, self._config)
        if name == "base":
            check_base(self._trace.adapters, self._params.trained)
        return dataclasses.replace(state, params=self._choosing(name)(state))

    def restart_average(self, state: TrainState) -> TrainState:
        """Restart the average of the section `ema` at the state's parameters, if there is one."""
        if self._config.ema is None:
            return state
        return dataclasses.replace(state, opt_state=self._restarting(state))

    @off_mesh
    def params_tree(self, storage: Storage) -> PyTree:
        """See `Pipeline.params_tree`."""
        # Gradients lack frozen parameters, so the number of arrays distinguishes the two.
        has_all = len(jax.tree.leaves(storage)) == len(
            jax.tree.leaves(self._sharding.master.shards.struct())
        )
        return self._tree(
            "params", storage, self._params.struct if has_all else self._params.trained
        )

    @off_mesh
    def opt_state_tree(self, opt_state: PyTree) -> PyTree:
        """Convert `state.opt_state` to the optimiser's own state for the whole model.

        It has the structure of `optimizer.init` for the model's trained parameters, so that optax's
        functions can read it.

        Returns:
            The state, with numpy arrays as leaves. Random keys are JAX key arrays.
        """
        struct = self._updater.whole_struct()
        leaves = read_leaves(self.catalog, "opt_state", opt_state, opt_state_keys(struct))
        values = [
            from_words(like, words)
            for like, words in zip(jax.tree.leaves(struct), leaves.values(), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(struct), values)

    @off_mesh
    def collections_tree(self, storage: Storage) -> dict[str, PyTree]:
        """Convert `state.collections` to numpy arrays by layer name."""
        return self._tree("collections", storage, self._collections.struct)

    def hyperparams(self, schedules: Mapping[str, optax.Schedule]) -> Hyperparams:
        """Return an object that reads and sets hyperparameters in the optimiser state.

        Args:
            schedules: Schedules of the hyperparameters that follow one, by name.
        """
        return Hyperparams(
            self._mesh, self._sharding, self._updater, schedules, self._opt_shardings
        )

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self._module.base_seed)

    @property
    def _opt_shardings(self) -> PyTree:
        return jax.tree.map(lambda x: x.sharding, self.struct.opt_state)

    @functools.cached_property
    def _init_optimizer(self) -> Compiled[..., PyTree]:
        # On the devices: the optimiser state is never in host memory, which may be too small.
        rows = self._sharding.row_spec
        return self._compiled(
            "init_optimizer", self._programs.init_optimizer, rows, self._opt_shardings
        )

    @functools.cached_property
    def _restarting(self) -> Compiled[..., PyTree]:
        # Not donated, so that the state stays valid if this is interrupted.
        restart = self._programs.restart_average
        return self._compiled("restart_average", restart, self.specs, self._opt_shardings)

    def _compile_choice(self, name: str) -> Compiled[..., PyTree]:
        choose = functools.partial(self._programs.choose, _CHOICES[name])
        of_params = jax.tree.map(lambda x: x.sharding, self.struct.params)
        return self._compiled(f"choose_{name}", choose, self.specs, of_params)

    def _compiled(
        self, name: str, function: Callable[..., PyTree], specs: Any, shardings: PyTree
    ) -> Compiled[..., PyTree]:
        """Compile a function of one argument with these specs to rows of arrays."""
        rows = self._sharding.row_spec
        return Compiled(name, function, self._mesh, ((specs,), rows), out_shardings=shardings)

    def _struct(self) -> TrainState:
        master = self._sharding.master.shards
        collections = self._collections.layout
        rows = self._sharding.num_rows, self._sharding.row_spec
        # Collections are averaged over the replicas, which have equal copies.
        stages = self._module.num_stages, P("stage")
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        struct = TrainState(
            step=number,
            params=self._rows(master.struct(), master.spec(), *rows),
            opt_state=self._rows(self._updater.struct(), self._updater.spec(), *rows),
            collections=self._rows(collections.struct(), collections.spec(), *stages),
            loss_scale=() if self._scaler is None else jax.eval_shape(self._scaler.init),
            skipped_steps=number,
            rng=jax.eval_shape(lambda: jax.random.key(0)),
        )
        everywhere = NamedSharding(self._mesh, P())

        def placed(x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or everywhere)

        return jax.tree.map(placed, struct)

    def _rows(self, struct: PyTree, spec: PyTree, num_rows: int, rows: P) -> PyTree:
        """Return shapes, dtypes and shardings of global arrays, given those of a row."""

        def one(x: Any, of_row: P) -> Any:
            sharding = NamedSharding(self._mesh, P(*rows, *of_row))
            return jax.ShapeDtypeStruct((num_rows, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(one, struct, spec)

    def _state(self, arrays: Mapping[str, jax.Array]) -> TrainState:
        state = with_arrays(self.struct, arrays)
        opt_state = self._init_optimizer(state.params)
        return dataclasses.replace(state, opt_state=opt_state, **self.init_scalars())

    def _draw(self, field: str, made: StageInit) -> dict[str, jax.Array]:
        """Return the initial arrays of a field."""
        if field == "params":
            field_leaves = made_params(
                self._params, self._trace, self._sharding.master, self._sharding.row_spec
            )
        else:
            field_leaves = made_collections(self._collections, self._module)
        arrays = state_arrays(self.struct)
        structs = {name: like for name, like in arrays.items() if name.startswith(f"{field}/")}
        return made.draw(
            field_leaves,
            structs,
            lambda keys: self._place_some(keys, made.source),
            self._keys_of(field),
        )

    def _params_of(self, tree: PyTree) -> dict[str, jax.Array]:
        return self._place_tree("params", check_params(tree, flatten_dict(self._trace.tree())))

    def _place_tree(self, field: str, tree: PyTree) -> dict[str, jax.Array]:
        leaves = {join_path((field, *path)): leaf for path, leaf in flatten_dict(tree).items()}
        return self._place(field, leaves)

    def _place(self, field: str, leaves: Mapping[str, Any]) -> dict[str, jax.Array]:
        return self._place_some(
            self._keys_of(field), lambda keys: ((key, leaves[key]) for key in keys)
        )

    def _place_some(self, keys: Sequence[str], source: Source) -> dict[str, jax.Array]:
        return place_leaves(
            self.catalog, state_arrays(self.struct), keys, source, self._module.num_stages
        )

    def _keys_of(self, field: str) -> list[str]:
        return [key for key in self.catalog if key.startswith(f"{field}/")]

    def _tree(self, field: str, storage: Storage, paths: Iterable[Path]) -> dict[str, PyTree]:
        keys = {path: join_path((field, *path)) for path in paths}
        leaves = read_leaves(self.catalog, field, storage, keys.values())
        return unflatten_dict({path: leaves[key] for path, key in keys.items()})
