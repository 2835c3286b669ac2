"""Layout of parameters, optimiser state and collections on the mesh, and transfers to the host."""

from ._catalog import Catalog, Leaf, Span, make_catalog, opt_state_keys, read_leaf, write_leaf
from ._host import (
    HostRows,
    Source,
    from_words,
    owned,
    place_everywhere,
    place_leaves,
    place_samples,
    read_leaves,
    state_arrays,
    with_arrays,
    words_of,
)
from ._init import StageInit
from ._layout import Layout, Storage, constrained, has_automatic_axes, select_arrays
from ._made import made_collections, made_params
from ._norm import clip_to, global_norm, layer_norms
from ._params import (
    ModelCollections,
    ModelParams,
    check_collections,
    grad_accum_struct,
    layout_of,
    mean_over_replicas,
)
from ._state import TrainState, state_specs
from ._switch import switch_stages, switch_table
from ._tied import broadcast_tied, sum_tied
from ._update import Updater
from ._vocab_layers import VocabLayers, find_vocab_layers, slice_struct
from ._zero import ZeroSharding, zero_sharding
