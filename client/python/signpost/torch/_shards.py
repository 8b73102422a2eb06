"""Shards of a model's tensors within a machine, which Signpost trains across machines.

Each of a machine's L processes trains one of L shards of every parameter: its part of the DTensors that
`fully_shard()` makes, or some rows of each whole tensor. The processes that train the same shard, one on
each machine, are a job of their own, with fewer ranks than there are processes. What an optimizer
decides by whole tensors is summed over the L processes of a machine, by torch.distributed.
"""

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Optional, Sequence, Type

import torch

from signpost import Options, SignpostError, World, _abi, world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Returns whether processes have a shard each of the tensor. Does not import DTensor, which takes long."""
    return _is_dtensor(type(tensor))


@functools.lru_cache(maxsize=None)
def _is_dtensor(kind: Type[torch.Tensor]) -> bool:
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this process has of a DTensor, in its memory; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # so that it has no part in a backward pass
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


class Shards:
    """This process's place among those that train one model: `index` of `count` shards, of which it is
    rank `rank` of `replicas`."""

    def __init__(
        self,
        mesh: "DeviceMesh",
        index: int,
        count: int,
        rank: int,
        replicas: int,
        has_whole_parameters: bool,
    ) -> None:
        self.mesh = mesh
        self.has_whole_parameters = has_whole_parameters
        self.index = index
        self.count = count
        self.world: World = world().among(rank, replicas)
        self._device = torch.device(mesh.device_type)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._error: Optional[BaseException] = None  # of the library's last sum
        self._sum_for_library = _abi.Sum(self._sum_in_place)

    def set_options(self, options: Options) -> None:
        """Makes options of the whole model's job those of this shard's."""
        options.job += f"/shard-{self.index}-of-{self.count}".encode()
        options.rank, options.world_size = self.world.rank, self.world.world_size
        options.shards = self.count
        if self.count > 1:
            options.sum_over_shards = self._sum_for_library

    def shard_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this process's shard, in the tensor's memory."""
        return shard_of(tensor) if is_dtensor(tensor) else self.rows_of(tensor, self.index)

    def rows_of(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a shard of a whole tensor, in its memory: the rows that FSDP2 would give to it."""
        rows = -(-tensor.shape[0] // self.count)
        return tensor.detach()[index * rows : (index + 1) * rows]

    def with_shard(self, parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Returns a DTensor of the parameter's shape, of which this process has this shard."""
        from torch.distributed.tensor import DTensor

        whole: torch.Tensor = DTensor.from_local(
            shard,
            self.mesh,
            self._placements_of(parameter),
            run_check=False,
            shape=parameter.shape,
            stride=torch.empty(parameter.shape, device="meta").stride(),
        )
        return whole

    def shard_of_state(self, parameter: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns this process's shard of numbers of the parameter's shape: a DTensor, or one that is whole
        on all processes."""
        if not is_dtensor(numbers):
            from torch.distributed.tensor import distribute_tensor

            numbers = numbers.to(self.mesh.device_type)
            placements = self._placements_of(parameter)
            numbers = distribute_tensor(numbers, self.mesh, placements, src_data_rank=None)
        return shard_of(numbers)

    def _placements_of(self, parameter: Any) -> Any:
        if is_dtensor(parameter):
            return parameter.placements
        from torch.distributed.tensor import Shard

        return (Shard(0),)

    def sum(self, numbers: Sequence[float]) -> List[float]:
        """Adds numbers up over the shards, in their order: all replicas get the same bits.

        Raises:
            SignpostError: torch.distributed has failed, as it does when a process of the machine ends.
        """
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        of_all = [torch.empty_like(own) for _ in range(self.count)]
        with self.calls():
            torch.distributed.all_gather(of_all, own, group=self.mesh.get_group())
            total = of_all[0].cpu()
            for other in of_all[1:]:
                total += other.cpu()
        added: List[float] = total.tolist()
        return added

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Turns errors of torch.distributed inside into SignpostError, "start it again"."""
        try:
            yield
        except RuntimeError as error:
            raise SignpostError(
                f"a call over the {self.count} processes that share the model has failed, as it does when "
                f"one of them has ended: {error}",
                code=10,
                exit_code=75,
            ) from error

    @contextlib.contextmanager
    def explains(self) -> Iterator[None]:
        """Raises what has failed in the library's sums inside, instead of the library's own error."""
        self._error = None
        try:
            yield
        except SignpostError:
            if self._error is None:
                raise
            raise self._error from None

    def _sum_in_place(self, _: Any, numbers: Any, count: int) -> int:
        """The library's signpost_sum."""
        try:
            for index, total in enumerate(self.sum(numbers[:count])):
                numbers[index] = total
        except BaseException as error:
            self._error = error
            return 1
        return 0


def shards_of(
    parameters: Iterable[torch.Tensor],
    replicate_mesh: Optional["DeviceMesh"],
    shard_mesh: Optional["DeviceMesh"],
    overlap: bool,
) -> Optional[Shards]:
    """Returns this process's place; None if each process trains the whole model.

    All processes of torch.distributed call it.

    Args:
        shard_mesh: of whole parameters, the processes that share the optimizer. None: the parameters are
            DTensors, or each process has the optimizer of all.
        replicate_mesh: the mesh of the processes that have the same shard. None: they follow from the
            meshes of all processes.

    Raises:
        TypeError: names a parameter that is not sharded as the others are, or in a way that is not
            trained.
        ValueError: processes do not have as many shards each, or differ in `overlap`; or others have the
            same shard than replicate_mesh says; or all have another one, so that there is nothing to
            exchange.
    """
    parameters = list(parameters)
    sharded = [parameter for parameter in parameters if is_dtensor(parameter)]
    if shard_mesh is not None:
        check_rows(parameters, shard_mesh)
        if shard_mesh.ndim != 1:
            raise ValueError(
                f"shard_mesh has {shard_mesh.ndim} dimensions, wanted one: mesh['shard']"
            )
        mesh: Any = shard_mesh
    elif sharded:
        mesh = _mesh_of(sharded, len(parameters))
    elif replicate_mesh is not None:
        raise TypeError(
            "replicate_mesh is given, and no parameter is a DTensor: call fully_shard() before the "
            "optimizer is made, or give it a shard_mesh too"
        )
    else:
        return None
    groups = _groups_of(mesh, overlap)
    me = torch.distributed.get_rank()
    group = next(group for group in groups if me in group)
    index, count, replicas = group.index(me), len(group), len(groups)
    same = [other[index] for other in groups]
    if replicate_mesh is not None and replicate_mesh.mesh.flatten().tolist() != same:
        raise ValueError(
            f"replicate_mesh has ranks {replicate_mesh.mesh.flatten().tolist()}, and those that have the "
            f"same shard as rank {me} are {same}: take both from one mesh, as in "
            'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
        )
    if replicas == 1 and replicate_mesh is None and shard_mesh is None:
        raise ValueError(
            f"the model is sharded over all {count} processes, so there are no gradients to exchange: "
            "shard it within a machine, fully_shard(model, mesh=mesh['shard']) with mesh = "
            f"init_device_mesh({mesh.device_type!r}, (machines, processes_of_each), "
            'mesh_dim_names=("replicate", "shard")). If it is meant so, pass replicate_mesh'
        )
    if me == 0:
        print(
            f"signpost: {count * replicas} processes: {count} shards x {replicas} replicas",
            file=sys.stderr,
            flush=True,
        )
    return Shards(mesh, index, count, groups.index(group), replicas, shard_mesh is not None)


def check_rows(parameters: Iterable[torch.Tensor], mesh: Any) -> None:
    """Refuses parameters whose rows the processes of the mesh cannot share.

    Raises:
        TypeError: says why.
    """
    for parameter in parameters:
        if is_dtensor(parameter):
            raise TypeError(
                "shard_mesh is for whole parameters, and one is a DTensor: leave it out"
            )
        if parameter.device.type != mesh.device_type:
            raise TypeError(
                f"a parameter is on {parameter.device}, and shard_mesh is of {mesh.device_type}: move the "
                "model before the optimizer is made"
            )
        if parameter.dim() == 0:
            raise TypeError(
                "a parameter is a scalar, which has no rows to share out: make it of shape [1]"
            )


def check_sharding(parameters: Iterable[torch.Tensor], shards: Optional[Shards]) -> None:
    """Refuses parameters that are not sharded as those before.

    Raises:
        TypeError: says how they are.
    """
    parameters = list(parameters)
    sharded = [parameter for parameter in parameters if is_dtensor(parameter)]
    if not parameters:
        return
    if shards is not None and shards.has_whole_parameters:
        return check_rows(parameters, shards.mesh)
    if shards is None and sharded:
        raise TypeError(
            f"a parameter {list(sharded[0].shape)} is a DTensor, and the optimizer was made for whole "
            "ones: make a new one"
        )
    if shards is not None and _mesh_of(sharded, len(parameters)) != shards.mesh:
        raise TypeError(
            "parameters are sharded over another mesh than before: make a new optimizer"
        )


def _mesh_of(sharded: Sequence[Any], parameters: int) -> Any:
    """Returns the mesh over which all of them are sharded."""
    if len(sharded) < parameters:
        raise TypeError(
            f"{len(sharded)} parameters are DTensors and {parameters - len(sharded)} are whole, which "
            "the shards' processes would train apart: call fully_shard() on the model itself too, "
            "which shards what its modules have left"
        )
    first = sharded[0]
    for parameter in sharded:
        mesh, placements = parameter.device_mesh, parameter.placements
        if any(placement.is_replicate() for placement in placements) and mesh.ndim > 1:
            raise TypeError(
                f"a parameter {list(parameter.shape)} is {placements} on a mesh of {mesh.ndim} dimensions: "
                "fully_shard() then averages gradients over replicas itself, in full precision. Give it "
                "the dimension within a machine alone: fully_shard(model, mesh=mesh['shard'])"
            )
        if mesh.ndim != 1 or not placements[0].is_shard():
            raise TypeError(
                f"a parameter {list(parameter.shape)} is {placements} on a mesh of {mesh.ndim} dimensions; "
                "wanted one that is sharded over one dimension, as fully_shard() makes it"
            )
        if mesh != first.device_mesh:
            raise TypeError(
                f"a parameter {list(parameter.shape)} is sharded over ranks {mesh.mesh.tolist()}, and "
                f"another one over {first.device_mesh.mesh.tolist()}; wanted one mesh for all"
            )
    return first.device_mesh


def _groups_of(mesh: Any, overlap: bool) -> List[List[int]]:
    """Returns the ranks of each replica of the model, in the order of their shards."""
    if mesh.mesh.tolist() != sorted(mesh.mesh.tolist()):
        raise ValueError(f"a mesh has ranks {mesh.mesh.tolist()}, wanted ascending ones")
    told: List[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, (mesh.mesh.tolist(), overlap))
    of_all = [ranks for ranks, _ in told]
    if len({overlaps for _, overlaps in told}) > 1:
        # Sums over shards would come between other calls of torch.distributed on some processes.
        raise ValueError(
            "overlap is True on some processes only: with shards it is the same on all"
        )
    groups: Dict[int, List[int]] = {group[0]: group for group in of_all}
    by_first = [groups[first] for first in sorted(groups)]
    lengths = {len(group) for group in by_first}
    ranks = sorted(rank for group in by_first for rank in group)
    if len(lengths) > 1 or ranks != list(range(len(of_all))):
        raise ValueError(
            f"ranks are sharded in groups {by_first}; wanted groups of one size that have each of the "
            f"{len(of_all)} ranks once"
        )
    return by_first
