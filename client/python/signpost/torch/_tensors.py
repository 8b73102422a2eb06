"""What a session trains in the place of a model's parameters."""

from collections import Counter
from typing import AbstractSet, Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from signpost import Parameter
from signpost.torch import _device
from signpost.torch._shards import Shards, is_dtensor

# And what the library calls gradients of that type.
_TRAINABLE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_SHARED = (
    "is in shared memory now, where torch.multiprocessing moves what is sent to another process: "
    "send a clone(), or call the model's share_memory() before the optimizer is made"
)


class TrainedTensor:
    """One parameter of the model, and the fp32 values that a session trains, where it is.

    The values of a parameter that is fp32 and contiguous are its own memory, for as long as it has
    that memory. Other parameters have a copy, which keeps full precision between steps; after each
    step the parameter gets the copy's values, rounded.

    With shards it is this process's shard. An empty shard has one number in its place, 0, so that the
    jobs of all shards have the same tensors.
    """

    def __init__(
        self, parameter: torch.Tensor, name: str, group: int, shards: Optional[Shards] = None
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.group = group
        self.shard_gradient: Optional[torch.Tensor] = None  # NodeExchange's
        self._shards = shards
        shard = self.shard
        self.gpu = _device.gpu_of(shard)
        # A GPU reads gradients of the parameter's type.
        self._gradient_dtype = torch.float32 if self.gpu is None else shard.dtype
        self.is_empty = shard.numel() == 0
        self.is_own_memory = shard.dtype == torch.float32 and shard.is_contiguous()
        self.has_master = not self.is_own_memory  # values that the parameter does not have
        self._dtype = shard.dtype
        if self.is_empty:
            self.values = torch.zeros(1, dtype=torch.float32, device=shard.device)
        elif self.is_own_memory:
            self.values = shard.detach()
        else:
            self.values = shard.detach().to(torch.float32).contiguous()
        self._nothing = self.values.view(-1)[:0]
        self._address = shard.data_ptr()
        self._version = self._version_now()
        self.times_taken = 0  # how often values were taken that the program has written

    @property
    def shard(self) -> torch.Tensor:
        """Returns this process's part of the parameter, in the parameter's present memory."""
        return self.parameter if self._shards is None else self._shards.shard_of(self.parameter)

    def from_state(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns what this process has of numbers of the parameter's shape, a DTensor or whole: in fp32 on
        the CPU, and of the values' shape."""
        if self._shards is not None:
            numbers = self._shards.shard_of_state(self.parameter, numbers)
        own = numbers.detach().to("cpu", torch.float32).contiguous()
        if self.is_empty and own.numel() == 0:
            return torch.zeros(1, dtype=torch.float32, device="cpu")
        return own

    def as_session_parameter(self) -> Parameter:
        """Returns it for a session, which keeps its values."""
        values, is_sharded = self.values, self._shards is not None and self._shards.count > 1
        return Parameter(
            self.name,
            tuple(values.shape),
            values.data_ptr(),
            (values, self._shards),
            self.group,
            _TRAINABLE[self._gradient_dtype],
            self.parameter.numel() if is_sharded else 0,
        )

    def gradient(self) -> Optional[torch.Tensor]:
        """Returns the gradient as a session wants it, or None if there is none.

        It is row-major, on the CPU fp32, on a GPU of the parameter's type. Errors as
        check_gradient()'s.
        """
        self.check_gradient()
        gradient = self._gradient()
        if gradient is None:
            return None
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense.to(self._gradient_dtype).contiguous()

    def check_gradient(self) -> None:
        """Refuses a gradient that cannot be stepped with.

        Raises:
            RuntimeError: it is elsewhere than the values, or of another shape.
        """
        gradient = self._gradient()
        if gradient is None:
            return
        if gradient.device != self.values.device:
            raise RuntimeError(
                f"the gradient of {self.name} is on {gradient.device}, and its parameter was on "
                f"{self.values.device} when the optimizer was made; move the model before"
            )
        if gradient.shape != self.values.shape:
            raise RuntimeError(
                f"the gradient of {self.name} is {list(gradient.shape)}, wanted "
                f"{list(self.values.shape)}"
            )

    def own_gradient(self) -> Optional[torch.Tensor]:
        """Returns the parameter's gradient, to be multiplied in place. One that PyTorch would not
        write to becomes a copy first."""
        gradient = self.parameter.grad
        if gradient is not None and (gradient.is_inference() or _is_expanded(gradient)):
            self.parameter.grad = gradient.clone()
        return self._gradient()

    def _gradient(self) -> Optional[torch.Tensor]:
        """Returns this process's shard of the gradient, or None if it has none."""
        if self.is_empty:
            return None
        if self._shards is None:
            return self.parameter.grad
        if self._shards.has_whole_parameters:
            return self.shard_gradient
        gradient = self.parameter.grad
        return None if gradient is None else self._shards.shard_of(gradient)

    def whole_gradient(self) -> Optional[torch.Tensor]:
        """Returns the gradient of a whole parameter, dense; None if there is none.

        Raises:
            RuntimeError: it is elsewhere than the parameter, or of another shape.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient.device != self.parameter.device or gradient.shape != self.parameter.shape:
            raise RuntimeError(
                f"the gradient of {self.name} is {list(gradient.shape)} on {gradient.device}, wanted "
                f"{list(self.parameter.shape)} on {self.parameter.device}"
            )
        return gradient.to_dense() if gradient.is_sparse else gradient

    def before_step(self, why_lost: Optional[str]) -> None:
        """Takes over what the program has done to the parameter since the last step.

        A parameter that the program has given other memory (`parameter.data = ...`, `model.to()`) is
        followed there: its values become a copy of what is there.

        Raises:
            RuntimeError: it has changed, with `why_lost`, which says why that would do nothing; or
                it has another shape, type or device now.
        """
        if self.is_empty:
            if why_lost is not None and self._version_now() != self._version:
                raise RuntimeError(f"{self.name} was changed since its last step. {why_lost}")
            return
        self._check_is_followed()
        if why_lost is not None and self._has_changed():
            raise RuntimeError(f"{self.name} was changed since its last step. {why_lost}")
        if not self.has_master:
            self.is_own_memory = not self._has_other_memory()
        if not self.is_own_memory:
            self._take_what_was_written()

    @property
    def has_other_device(self) -> bool:
        """Tells whether the program has moved the parameter to another device."""
        shard = self.shard
        return shard.device != self.values.device or _device.gpu_of(shard) != self.gpu

    def with_digits_of(self, master: torch.Tensor) -> torch.Tensor:
        """Returns `master` where the parameter is what that rounds to. Elsewhere the program has loaded
        another model, and the parameter counts."""
        if self.is_empty:
            return master
        now = self.shard.detach().to(master.device)
        return torch.where(master.to(now.dtype) == now, master, now.to(torch.float32))

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Gives the parameter values of its shard's shape, as a program does."""
        if not self.is_empty:
            self.shard.copy_(values)

    def show_values(self) -> None:
        """Gives the parameter its new values, and lets autograd know that they have changed."""
        if self.is_empty:
            return
        if self.is_own_memory:
            self._nothing.zero_()  # shares the parameter's version counter
        else:
            self.shard.copy_(self.values)

    def note_version(self) -> None:
        self._version = self._version_now()

    def _version_now(self) -> Tuple[int, int]:
        """Returns what changes when the program writes to the parameter: in place to a DTensor, or to
        this process's shard of it."""
        return self.parameter._version, self.shard._version

    def _has_changed(self) -> bool:
        """Returns whether the program has written to the parameter since the last step."""
        shard = self.shard
        if shard.data_ptr() == self._address:
            if self._version_now() == self._version:
                return False
            if self.is_own_memory:
                return True
        return not torch.equal(self.values.to(shard.dtype), shard)

    def _check_is_followed(self) -> None:
        parameter, values = self.shard, self.values
        if not self.has_master and values.data_ptr() != self._address:
            raise RuntimeError(f"{self.name} {_SHARED}")  # the storage has moved below
        if not self.has_master and self._has_other_memory() and _share_memory(parameter, values):
            raise RuntimeError(
                f"{self.name} is another view of the memory that it had when the optimizer was made; "
                "give it a clone(), or make a new optimizer"
            )
        now = (list(parameter.shape), parameter.dtype, parameter.device)
        then = (list(values.shape), self._dtype, values.device)
        if now != then:
            raise RuntimeError(
                f"{self.name} is {now[0]}, {now[1]}, on {now[2]}, and was {then[0]}, {then[1]}, on "
                f"{then[2]} when the optimizer was made; make a new optimizer"
            )

    def _has_other_memory(self) -> bool:
        shard = self.shard
        return not (shard.data_ptr() == self._address and shard.is_contiguous())

    def _take_what_was_written(self) -> None:
        """Takes the parameter's values where they are not the fp32 values, rounded. The others keep
        what rounding would lose, also where the same was written, as Embedding's max_norm does."""
        shard = self.shard
        rounded = self.values.to(shard.dtype)
        if self.gpu is None and torch.equal(rounded, shard):  # a GPU would be waited for
            return
        self.times_taken += 1
        written = shard.to(torch.float32)
        self.values.copy_(torch.where(rounded == shard, self.values, written))


def after_step(
    tensors: List[TrainedTensor], gather_parameters: Optional[Callable[[], None]]
) -> None:
    """Gives the parameters their new values: those of other processes' shards by gather_parameters."""
    for tensor in tensors:
        tensor.show_values()
    if gather_parameters is not None:
        gather_parameters()
    for tensor in tensors:  # behind all: slices of one tensor share a version counter
        tensor.note_version()


class Zeros:
    """Gradients for parameters that have none, in one piece of memory for all of them, of any type:
    zeros have the same bits, and fp32 is the longest type."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(0, dtype=torch.float32, device=device)

    def at_least(self, elements: int) -> torch.Tensor:
        if self._memory.numel() < elements:
            self._memory = self._memory.new_zeros(elements)
        return self._memory


def to_train(
    groups: Sequence[Dict[str, Any]], also: AbstractSet[torch.Tensor] = frozenset()
) -> Dict[torch.Tensor, Tuple[int, int]]:
    """Returns those of the parameters that a job trains, with group and place there: not the frozen ones,
    but for `also`, nor the empty ones, and a parameter that is there more than once, once."""
    places: Dict[torch.Tensor, Tuple[int, int]] = {}  # by identity, as tensors hash
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            if (parameter.requires_grad or parameter in also) and parameter.numel() > 0:
                places[parameter] = (g, i)
    return places


def trained_tensors(
    groups: Sequence[Dict[str, Any]],
    shards: Optional[Shards],
    also: AbstractSet[torch.Tensor] = frozenset(),
) -> List[TrainedTensor]:
    """Returns what a job trains in the place of to_train()'s parameters, in that order.

    A parameter has the name that its group's "param_names" gives it. Without one, or where others
    have the same name, as those of two models may, its place in the groups tells it apart.

    Raises:
        TypeError: names the parameter that cannot be trained, and why; or two that are not in the
            same place.
        ValueError: names one whose elements share memory, or two that do.
    """
    names: Dict[torch.Tensor, str] = {}
    for group in groups:
        names.update(zip(group["params"], map(str, group.get("param_names", ()))))
    places = to_train(groups, also)
    times = Counter(names[parameter] for parameter in places if parameter in names)
    tensors = []
    for parameter, (g, i) in places.items():
        place = f"parameter {i} of group {g}"
        name = names.get(parameter, place)
        if times[name] > 1:
            name = f"{name}, {place}"
        _check_is_whole(parameter, name)
        _check_trainable(parameter if shards is None else shards.shard_of(parameter), name)
        tensors.append(TrainedTensor(parameter, name, g, shards))
    _check_are_together(tensors)
    _check_are_apart(tensors)
    return tensors


def _check_is_whole(parameter: torch.Tensor, name: str) -> None:
    """Refuses a parameter of which each rank has another shard."""
    if not (hasattr(parameter, "_is_flat_param") or hasattr(parameter, "_fsdp_flattened")):
        return
    raise TypeError(
        f"{name} {list(parameter.shape)} is a shard of FullyShardedDataParallel's flat parameter, of which "
        "nothing says which elements it has: shard the model by fully_shard() (docs/sharding.md), or "
        "train it whole"
    )


def _check_are_together(tensors: List[TrainedTensor]) -> None:
    for tensor in tensors:
        if tensor.gpu != tensors[0].gpu:
            raise TypeError(
                f"{tensors[0].name} is on {_place(tensors[0].gpu)} and {tensor.name} on "
                f"{_place(tensor.gpu)}; Signpost trains parameters that are all on the CPU or all "
                "on one GPU: model.cpu(), or model.cuda(), before the optimizer is made"
            )


def _check_are_apart(tensors: List[TrainedTensor]) -> None:
    """By the memory of the model: a session may have copies."""
    memory = {t: t.shard if is_dtensor(t.parameter) else t.parameter for t in tensors}
    in_order = sorted(
        (tensor for tensor in tensors if memory[tensor].numel() > 0),
        key=lambda tensor: memory[tensor].data_ptr(),
    )
    before: List[TrainedTensor] = []  # those that reach behind where this one begins
    for tensor in in_order:
        begin = memory[tensor].data_ptr()
        before = [other for other in before if _end(memory[other]) > begin]
        for other in before:
            if _share_memory(memory[other], memory[tensor]):
                raise ValueError(
                    f"{other.name} and {tensor.name} are two Parameters with the same memory, "
                    "which would be trained twice; to tie weights share the Parameter itself, as "
                    "in `output.weight = embedding.weight`"
                )
        before.append(tensor)


def _end(tensor: torch.Tensor) -> int:
    """The address behind its last element's."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any byte is of both; of columns of one matrix none is."""
    if a.is_contiguous() and b.is_contiguous():  # without gaps, as most are
        return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)
    begin = min(a.data_ptr(), b.data_ptr())
    is_taken = torch.zeros(max(_end(a), _end(b)) - begin, dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        return is_taken.as_strided((*tensor.shape, size), (*strides, 1), tensor.data_ptr() - begin)

    bytes_of(a).fill_(True)
    return bool(bytes_of(b).any())


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one in memory, as expand() makes them."""
    if tensor.layout != torch.strided:
        return False
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride()))


def _place(gpu: Optional[int]) -> str:
    return "the CPU" if gpu is None else f"cuda:{gpu}"


def _check_trainable(parameter: torch.Tensor, name: str) -> None:
    if _device.gpu_of(parameter) is None and parameter.device.type != "cpu":
        raise TypeError(
            f"{name} {list(parameter.shape)} is on {parameter.device}; Signpost trains tensors on "
            "the CPU or on a CUDA GPU: model.cpu(), or model.cuda(), before the optimizer is made"
        )
    if parameter.dtype not in _TRAINABLE or parameter.layout != torch.strided:
        raise TypeError(
            f"{name} {list(parameter.shape)} is {parameter.dtype}, {parameter.layout}; wanted a "
            "dense one of float32, bfloat16 or float16"
        )
    if _is_expanded(parameter):
        raise ValueError(
            f"{name} {list(parameter.shape)} is expanded: several of its elements are one in "
            "memory. Make its Parameter of a clone(), or train what it was expanded from"
        )
