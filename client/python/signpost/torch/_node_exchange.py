"""Whole parameters whose optimizer is shared out over the processes of a machine.

Each of L processes has the whole model, and steps 1/L of it: some rows of every parameter, its *shard*. Before a
step the processes reduce-scatter their gradients, so that each has the machine's mean for its shard; after
it they all-gather the parameters.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from signpost.torch._shards import Shards
from signpost.torch._tensors import TrainedTensor

if torch.distributed.is_available():
    # PyTorch 2.13 has renamed both functions.
    _reduce_scatter: Callable[..., Any] = getattr(
        torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor
    )
    _all_gather: Callable[..., Any] = getattr(
        torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
    )


# A bucket has an eighth of the model, so that a backward pass can send seven before it ends; but at least
# what is worth a call, and at most what DistributedDataParallel's buckets have.
_BUCKETS = 8
_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 2**20, 25 * 2**20


@dataclass
class _Bucket:
    """Tensors of one type that travel together: the shards one after the other, all as long as the longest."""

    indices: List[int]  # of the tensors among all
    tensors: List[TrainedTensor]
    of_all: torch.Tensor  # one-dimensional
    own: torch.Tensor  # this process's shard
    places: List[List[torch.Tensor]]  # by shard and tensor, views of of_all
    own_places: List[torch.Tensor]  # by tensor, views of own


class NodeExchange:
    """The collective calls of one optimizer and one job. All processes of the machine make them alike:
    bucket by bucket, in the order in which a backward pass is likely to have their gradients."""

    def __init__(self, tensors: Sequence[TrainedTensor], shards: Shards) -> None:
        self._shards = shards
        self._group = shards.mesh.get_group()
        self._buckets: List[_Bucket] = []
        sizes = [t.parameter.numel() * t.parameter.element_size() for t in tensors]
        most = min(max(sum(sizes) // _BUCKETS, _LEAST_BUCKET_BYTES), _MOST_BUCKET_BYTES)
        filling: Dict[torch.dtype, List[int]] = {}
        for index in reversed(range(len(tensors))):
            indices = filling.setdefault(tensors[index].parameter.dtype, [])
            if indices and sum(sizes[i] for i in indices) + sizes[index] > most:
                self._buckets.append(self._bucket_of(tensors, indices))
                filling[tensors[index].parameter.dtype] = indices = []
            indices.append(index)
        self._buckets += [self._bucket_of(tensors, indices) for indices in filling.values()]

    def check_alike(self, options: object) -> None:
        """Compares tensors and options with the machine's other processes, which nobody else does.

        Raises:
            ValueError: says what differs.
        """
        tensors = [tensor for bucket in self._buckets for tensor in bucket.tensors]
        own = [
            f"{t.name} {list(t.parameter.shape)}, {t.parameter.dtype}, in group {t.group}"
            for t in tensors
        ]
        own.append(f"options {options}")
        told: List[Any] = [None] * self._shards.count
        with self._shards.calls():
            torch.distributed.all_gather_object(told, own, group=self._group)
        for index, theirs in enumerate(told):
            for mine, other in zip(own, theirs):
                if mine != other:
                    raise ValueError(
                        f"process {index} of this machine has {other} where this one, {self._shards.index}, "
                        f"has {mine}: the processes of a machine make their optimizers alike"
                    )
            if len(own) != len(theirs):
                raise ValueError(
                    f"process {index} of this machine trains {len(theirs) - 1} parameters, and this one, "
                    f"{self._shards.index}, {len(own) - 1}"
                )

    @property
    def buckets(self) -> List[List[int]]:
        """The indices of the tensors of each bucket, in the order of the calls."""
        return [bucket.indices for bucket in self._buckets]

    def begin_alike(self) -> None:
        """Gives parameters the values that they have in the machine's first process."""
        first = torch.distributed.get_global_rank(self._group, 0)
        with self._shards.calls():
            for bucket in self._buckets:
                for tensor in bucket.tensors:
                    whole = tensor.parameter.detach().contiguous()
                    torch.distributed.broadcast(whole, first, group=self._group)
                    tensor.parameter.detach().copy_(whole)

    def reduce_gradients(self, scale: Optional[torch.Tensor]) -> None:
        """Gives each tensor the machine's mean gradient of its shard, of gradients divided by the loss's
        scale, which is each process's own."""
        for number in range(len(self._buckets)):
            self.reduce_bucket(number, scale)

    def reduce_bucket(self, number: int, scale: Optional[torch.Tensor] = None) -> None:
        """Does so for the tensors of one bucket. Call it for all buckets, in their order."""
        bucket = self._buckets[number]
        for position, tensor in enumerate(bucket.tensors):
            gradient = tensor.whole_gradient()
            for index, places in enumerate(bucket.places):
                if gradient is None:
                    places[position].zero_()
                else:
                    places[position].copy_(self._shards.rows_of(gradient, index))
        if scale is not None:
            bucket.of_all.div_(scale)
        # A sum in fp16 would overflow before its mean does.
        is_half = bucket.own.dtype == torch.float16
        if is_half:
            bucket.of_all.div_(self._shards.count)
        with self._shards.calls():
            _reduce_scatter(bucket.own, bucket.of_all, group=self._group)
        if not is_half:
            bucket.own.div_(self._shards.count)
        for tensor, place in zip(bucket.tensors, bucket.own_places):
            tensor.shard_gradient = place

    def gather_parameters(self) -> None:
        """Gives each parameter the other processes' shards."""
        for bucket in self._buckets:
            for tensor, place in zip(bucket.tensors, bucket.own_places):
                tensor.shard_gradient = None  # the memory gets parameters now
                place.copy_(tensor.shard)
            with self._shards.calls():
                _all_gather(bucket.of_all, bucket.own, group=self._group)
            for index, places in enumerate(bucket.places):
                if index == self._shards.index:
                    continue
                for place, tensor in zip(places, bucket.tensors):
                    self._shards.rows_of(tensor.parameter.detach(), index).copy_(place)

    def _bucket_of(self, of_all_buckets: Sequence[TrainedTensor], indices: List[int]) -> _Bucket:
        tensors = [of_all_buckets[index] for index in indices]
        shards = range(self._shards.count)
        shapes = [[self._shards.rows_of(t.parameter, i).shape for t in tensors] for i in shards]
        elements = max(sum(shape.numel() for shape in of_shard) for of_shard in shapes)
        like = tensors[0].parameter
        of_all = torch.zeros(len(shards) * elements, dtype=like.dtype, device=like.device)
        own = torch.zeros(elements, dtype=like.dtype, device=like.device)
        places = [_views(of_all[i * elements :], shapes[i]) for i in shards]
        own_places = _views(own, shapes[self._shards.index])
        return _Bucket(indices, tensors, of_all, own, places, own_places)


def _views(memory: torch.Tensor, shapes: Sequence[torch.Size]) -> List[torch.Tensor]:
    """Returns views of these shapes that lie in the memory one after the other."""
    views, first = [], 0
    for shape in shapes:
        views.append(memory[first : first + shape.numel()].view(shape))
        first += shape.numel()
    return views
