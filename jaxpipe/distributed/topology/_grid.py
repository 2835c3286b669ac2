"""A rank's view of a topology, with the names of DeepSpeed's model-parallel units."""

from jaxpipe.errors import TopologyError

from ._process import ProcessTopology


class PipelineParallelGrid:
    """The position of one rank in a topology, and the groups it belongs to.

    The rank is an argument, because one JAX process usually addresses many devices and has no
    single rank of its own. Communication groups are not objects here: a group is the list of its
    ranks.

    Note DeepSpeed's terms. *Model parallel* refers to all ranks that together hold one copy of the
    model, that is, all axes except `data`. *Slice parallel* and *tensor model parallel* refer only
    to the `model` axis.

    Args:
        topology: A topology with axes `pipe` and `data`, and possibly more.
        rank: The rank.

    Attributes:
        global_rank: The rank.
        world_size: Number of ranks.
        pipe_parallel_size: Number of stages.
        data_parallel_size: Number of replicas.
        model_parallel_size: Length of the `model` axis, 1 without one.
        slice_parallel_size: The same as `model_parallel_size`.
        stage_id: The rank's stage, from 0 at the input.
        data_parallel_id: The rank's replica.
        is_first_stage: Whether the stage is the first. It is an attribute here, but a method of
            the engine.
        is_last_stage: Whether the stage is the last.
        pp_group: Ranks of the rank's pipeline, first stage first.
        dp_group: Ranks that hold the rank's stage in all replicas.
        slice_group: Ranks over which the rank's layers are split.
        pipe_groups: The `pp_group` of each pipeline.
        dp_groups: The `dp_group` of each stage.
        slice_groups: The `slice_group` of each stage of each replica.
        p2p_groups: For each rank, the pair of the rank itself and the rank of the next stage. The
            last stage is followed by the first.

    Raises:
        TopologyError: The topology has no axis `pipe` or `data`, or does not contain the rank.
    """

    def __init__(self, topology: ProcessTopology, rank: int = 0) -> None:
        missing = [axis for axis in ("pipe", "data") if not topology.get_dim(axis)]
        if missing:
            raise TopologyError(
                "A pipeline's topology must have the axes 'pipe' and 'data', but got "
                f"{topology.describe()}. Add {missing[0]!r}, of length 1 if it is not split."
            )
        coord = topology.get_coord(rank)
        self._topology = topology
        self.global_rank = int(rank)
        self.world_size = topology.world_size()
        self.pipe_parallel_size = topology.get_dim("pipe")
        self.data_parallel_size = topology.get_dim("data")
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        self.stage_id: int = coord.pipe
        self.data_parallel_id: int = coord.data
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.slice_groups = topology.get_axis_comm_lists("model") or [
            [r] for r in range(self.world_size)
        ]
        self.pp_group = self._group_of(self.pipe_groups)
        self.dp_group = self._group_of(self.dp_groups)
        self.slice_group = self._group_of(self.slice_groups)
        following = {
            group[i - 1]: group[i] for group in self.pipe_groups for i in range(len(group))
        }
        self.p2p_groups = [[r, following[r]] for r in range(self.world_size)]
        self._model_parallel_group = topology.get_axis_list("data", self.data_parallel_id)

    def _group_of(self, groups: list[list[int]]) -> list[int]:
        return next(group for group in groups if self.global_rank in group)

    def stage_to_global(self, stage_id: int, **coords: int) -> int:
        """The rank that holds a stage and otherwise has the coordinates of this rank.

        Args:
            stage_id: The stage.
            **coords: Indices on other axes that replace those of this rank.

        Returns:
            The rank.

        Raises:
            TopologyError: The stage, an axis or an index does not exist.
        """
        own = self._topology.get_coord(self.global_rank)._asdict()
        return self._topology.get_rank(**{**own, "pipe": stage_id, **coords})

    def topology(self) -> ProcessTopology:
        """The topology.

        Returns:
            The topology that was passed to the constructor.
        """
        return self._topology

    def get_global_rank(self) -> int:
        """The rank in the whole topology.

        Returns:
            `global_rank`.
        """
        return self.global_rank

    def get_stage_id(self) -> int:
        """The rank's stage.

        Returns:
            `stage_id`.
        """
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """The rank's replica.

        Returns:
            `data_parallel_id`.
        """
        return self.data_parallel_id

    def get_pipe_parallel_rank(self) -> int:
        """The rank's position in its pipeline.

        Returns:
            `stage_id`.
        """
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages.

        Returns:
            `pipe_parallel_size`.
        """
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> list[int]:
        """The ranks of the same pipeline.

        Returns:
            `pp_group`.
        """
        return self.pp_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """The rank's replica.

        Returns:
            `data_parallel_id`.
        """
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of replicas.

        Returns:
            `data_parallel_size`.
        """
        return self.data_parallel_size

    def get_data_parallel_group(self) -> list[int]:
        """The ranks that hold the same stage.

        Returns:
            `dp_group`.
        """
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """The rank's position among the ranks that together hold one copy of the model.

        Returns:
            The index in `get_model_parallel_group()`.
        """
        return self._model_parallel_group.index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that together hold one copy of the model.

        Returns:
            The number of ranks of one replica: the product of the lengths of all axes except
            `data`.
        """
        return len(self._model_parallel_group)

    def get_model_parallel_group(self) -> list[int]:
        """The ranks that together hold one copy of the model.

        Returns:
            The ranks of the same replica, in ascending order.
        """
        return self._model_parallel_group

    def get_slice_parallel_rank(self) -> int:
        """The rank's index on the `model` axis.

        Returns:
            The index, or 0 without that axis.
        """
        return self.slice_group.index(self.global_rank)

    def get_slice_parallel_world_size(self) -> int:
        """The length of the `model` axis.

        Returns:
            `slice_parallel_size`.
        """
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> list[int]:
        """The ranks over which the rank's layers are split.

        Returns:
            `slice_group`.
        """
        return self.slice_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
