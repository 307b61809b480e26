"""Which ranks share weights and which average gradients, in the words of Megatron's `mpu`, as DeepSpeed asks."""

from dataclasses import dataclass

from rlhf import distributed
from rlhf.distributed import Group, ProcessGroup


@dataclass(frozen=True)
class ModelParallelUnit:
    """Groups of consecutive ranks share a model's weights; ranks with the same share average their gradients."""

    tensor: Group
    data: ProcessGroup
    """The ranks with this one's share, one of each group."""

    @classmethod
    def of(cls, size: int) -> "ModelParallelUnit":
        """For groups of `size` ranks. Collective over all ranks."""
        return cls(distributed.group_of(size), distributed.group_across(size))

    def get_model_parallel_rank(self) -> int:
        """Which share is this rank's."""
        return self.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        """Number of shares."""
        return self.tensor.size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """The ranks that share the weights."""
        return self.tensor.handle

    def get_data_parallel_rank(self) -> int:
        """Which rows are this rank's."""
        return self.tensor.number

    def get_data_parallel_world_size(self) -> int:
        """Number of models."""
        return self.tensor.count

    def get_data_parallel_group(self) -> ProcessGroup:
        """The ranks that average gradients."""
        return self.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their numbers."""
        return list(range(self.tensor.rank, distributed.world_size(), self.tensor.size))
