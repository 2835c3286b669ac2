"""Layout of parameters, optimiser state and collections on the mesh.

Also their way to the host and back.
"""

from ._catalog import Catalog as Catalog
from ._catalog import Leaf as Leaf
from ._catalog import Span as Span
from ._catalog import make_catalog as make_catalog
from ._catalog import opt_state_keys as opt_state_keys
from ._catalog import read_leaf as read_leaf
from ._catalog import write_leaf as write_leaf
from ._host import HostRows as HostRows
from ._host import Source as Source
from ._host import from_words as from_words
from ._host import owned as owned
from ._host import place_everywhere as place_everywhere
from ._host import place_leaves as place_leaves
from ._host import place_samples as place_samples
from ._host import read_leaves as read_leaves
from ._host import state_arrays as state_arrays
from ._host import with_arrays as with_arrays
from ._init import StageInit as StageInit
from ._layout import Layout as Layout
from ._layout import Storage as Storage
from ._layout import constrained as constrained
from ._layout import has_automatic_axes as has_automatic_axes
from ._layout import select_arrays as select_arrays
from ._made import made_collections as made_collections
from ._made import made_params as made_params
from ._norm import clip_to as clip_to
from ._norm import global_norm as global_norm
from ._norm import layer_norms as layer_norms
from ._params import ModelCollections as ModelCollections
from ._params import ModelParams as ModelParams
from ._params import check_collections as check_collections
from ._params import grad_accum_struct as grad_accum_struct
from ._params import mean_over_replicas as mean_over_replicas
from ._state import TrainState as TrainState
from ._state import state_specs as state_specs
from ._switch import switch_stages as switch_stages
from ._switch import switch_table as switch_table
from ._tied import broadcast_tied as broadcast_tied
from ._tied import sum_tied as sum_tied
from ._update import Updater as Updater
from ._vocab_layers import VocabLayers as VocabLayers
from ._vocab_layers import find_vocab_layers as find_vocab_layers
from ._vocab_layers import slice_struct as slice_struct
from ._zero import ZeroSharding as ZeroSharding
from ._zero import zero_sharding as zero_sharding
