"""A rank's view of a topology, in the words of DeepSpeed's model-parallel units."""

from jaxpipe.errors import TopologyError

from ._process import ProcessTopology


class PipelineParallelGrid:
    """Who one rank is in a topology, and with whom it works.

    The rank is an argument: one process of JAX usually addresses many devices, so there is no "own"
    rank to ask for. Communication groups are no objects here; what DeepSpeed calls a group is the
    list of its ranks.

    Mind DeepSpeed's words: *model parallel* means all ranks that together hold one copy of the
    model, that is all axes but `data`; *slice parallel* and *tensor model parallel* mean the
    `model` axis alone.

    Args:
        topology: A topology with axes `pipe` and `data`, and possibly more.
        rank: The rank whose view this is.

    Attributes:
        global_rank: The rank.
        world_size: Number of ranks.
        pipe_parallel_size: Number of stages.
        data_parallel_size: Number of replicas.
        model_parallel_size: Length of the `model` axis, 1 without one.
        slice_parallel_size: The same.
        stage_id: The rank's stage, from 0 at the input.
        data_parallel_id: The rank's replica.
        is_first_stage: Whether the stage is the first; an attribute here, a method of the engine.
        is_last_stage: Whether the stage is the last.
        pp_group: Ranks of the rank's pipeline, first stage first.
        dp_group: Ranks that hold the rank's stage in all replicas.
        slice_group: Ranks over which the rank's layers are split.
        pipe_groups: `pp_group` of all pipelines.
        dp_groups: `dp_group` of all stages.
        slice_groups: `slice_group` of all stages and replicas.
        p2p_groups: For each rank, it and the rank of the next stage; the stage after the last is
            the first.

    Raises:
        TopologyError: The topology has no axis `pipe` or `data`, or the rank is not in it.
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
        """The rank that holds a stage, other coordinates being this rank's.

        Args:
            stage_id: The stage.
            **coords: Indices on other axes that shall differ from this rank's.

        Returns:
            The rank.

        Raises:
            TopologyError: There is no such stage, axis or index.
        """
        own = self._topology.get_coord(self.global_rank)._asdict()
        return self._topology.get_rank(**{**own, "pipe": stage_id, **coords})

    def topology(self) -> ProcessTopology:
        """The topology.

        Returns:
            What the constructor was given.
        """
        return self._topology

    def get_global_rank(self) -> int:
        """The rank among all.

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
        """The rank's place in its pipeline.

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
        """The rank's place among those that together hold one copy of the model.

        Returns:
            The index in `get_model_parallel_group()`.
        """
        return self._model_parallel_group.index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that together hold one copy of the model.

        Returns:
            The number of ranks of one replica: the product of the lengths of all axes but `data`.
        """
        return len(self._model_parallel_group)

    def get_model_parallel_group(self) -> list[int]:
        """The ranks that together hold one copy of the model.

        Returns:
            The ranks of the same replica, ascending.
        """
        return self._model_parallel_group

    def get_slice_parallel_rank(self) -> int:
        """The rank's place on the `model` axis.

        Returns:
            The index, 0 without that axis.
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
