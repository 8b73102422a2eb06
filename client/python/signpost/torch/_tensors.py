"""What a session trains in the place of a model's parameters."""

from collections import Counter
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch

from signpost import Parameter
from signpost.torch import _device

# And what the library calls gradients of that type.
_TRAINABLE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# How a parameter comes to be elsewhere.
_MOVED = "change parameters in place, as load_state_dict does, or make a new optimizer"
_SHARED = (
    "it is in shared memory, where torch.multiprocessing moves what is sent to another process: "
    "send a clone(), or call the model's share_memory() before the optimizer is made"
)


class TrainedTensor:
    """One parameter of the model, and the fp32 values that a session trains, where it is.

    If the parameter is fp32 and contiguous, these are its own memory. Otherwise they are a copy,
    which keeps full precision between steps; the parameter gets them, rounded, after each step.
    """

    def __init__(self, parameter: torch.Tensor, name: str, group: int) -> None:
        self.parameter = parameter
        self.name = name
        self.group = group
        self.gpu = _device.gpu_of(parameter)
        # A GPU reads them as they are.
        self._gradient_dtype = torch.float32 if self.gpu is None else parameter.dtype
        self.is_own_memory = parameter.dtype == torch.float32 and parameter.is_contiguous()
        if self.is_own_memory:
            self.values = parameter.detach()
        else:
            self.values = parameter.detach().to(torch.float32).contiguous()
        self._nothing = self.values.view(-1)[:0]
        self._address = parameter.data_ptr()
        self._version = parameter._version

    def as_session_parameter(self) -> Parameter:
        values = self.values
        return Parameter(
            self.name,
            tuple(values.shape),
            values.data_ptr(),
            values,
            self.group,
            _TRAINABLE[self._gradient_dtype],
        )

    def gradient(self) -> Optional[torch.Tensor]:
        """As a session wants it: row-major, on the CPU fp32, on a GPU of the parameter's type; None
        if there is none. Errors as check_gradient()'s."""
        self.check_gradient()
        gradient = self.parameter.grad
        if gradient is None:
            return None
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense.to(self._gradient_dtype).contiguous()

    def check_gradient(self) -> None:
        """Refuses one that cannot be stepped with.

        Raises:
            RuntimeError: it is elsewhere than the values, or of another shape.
        """
        gradient = self.parameter.grad
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
        """The parameter's, to be multiplied in place. One that PyTorch would not write to becomes a
        copy first."""
        gradient = self.parameter.grad
        if gradient is not None and (gradient.is_inference() or _is_expanded(gradient)):
            self.parameter.grad = gradient = gradient.clone()
        return gradient

    def before_step(self, why_lost: Optional[str]) -> None:
        """Takes notice of what the program has done to the parameter.

        Raises:
            RuntimeError: it has changed, with `why_lost`, which says why that would do nothing; or
                it has moved.
        """
        if why_lost is not None and self._has_changed():
            raise RuntimeError(f"{self.name} was changed since its last step. {why_lost}")
        if self._has_moved():
            raise RuntimeError(
                f"{self.name} is not where it was in memory when the optimizer was made; "
                + (_SHARED if self._storage_has_moved() else _MOVED)
            )
        if not self.is_own_memory:
            self._take_what_was_written()

    def show_values(self) -> None:
        """Gives the parameter its new values, and lets autograd know that they have changed."""
        if self.is_own_memory:
            self._nothing.zero_()  # shares the parameter's version counter
        else:
            self.parameter.copy_(self.values)

    def note_version(self) -> None:
        self._version = self.parameter._version

    def _has_changed(self) -> bool:
        """Since the last step; of a parameter in its own memory, whether it was written to."""
        if self.parameter._version == self._version:
            return False
        if self.is_own_memory or self.parameter.shape != self.values.shape:
            return True
        return not torch.equal(self.values.to(self.parameter.dtype), self.parameter)

    def _has_moved(self) -> bool:
        if self.parameter.shape != self.values.shape:
            return True
        if self.is_own_memory:
            is_there = self.parameter.data_ptr() == self._address
            return not (is_there and self.parameter.is_contiguous())
        return self.parameter.device != self.values.device  # where there it is does not matter

    def _storage_has_moved(self) -> bool:
        """Also below `values`."""
        return self.is_own_memory and self.values.data_ptr() != self._address

    def _take_what_was_written(self) -> None:
        """Of the parameter's values those that are not its fp32 values, rounded. The others keep
        what rounding would lose, also where the same was written, as Embedding's max_norm does."""
        rounded = self.values.to(self.parameter.dtype)
        if self.gpu is None and torch.equal(rounded, self.parameter):  # a GPU would be waited for
            return
        written = self.parameter.to(torch.float32)
        self.values.copy_(torch.where(rounded == self.parameter, self.values, written))


def after_step(tensors: List[TrainedTensor]) -> None:
    """Gives the parameters their new values."""
    for tensor in tensors:
        tensor.show_values()
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


def without_names(params: Any, names: Dict[torch.Tensor, str]) -> Any:
    """The same parameters, or groups, with each pair of a name and a tensor become the tensor. Adds
    the names to `names`. What is neither is left to the optimizer to refuse."""
    if isinstance(params, (torch.Tensor, set)):
        return params
    plain: List[Any] = []
    for entry in params:
        if isinstance(entry, dict) and "params" in entry:
            entry = {**entry, "params": without_names(entry["params"], names)}
        elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.Tensor):
            name, entry = entry
            names[entry] = str(name)
        plain.append(entry)
    return plain


def trained_tensors(
    groups: Iterable[Dict[str, List[torch.Tensor]]], names: Dict[torch.Tensor, str]
) -> List[TrainedTensor]:
    """Those of the parameters that a job trains: not the frozen and the empty ones, and a parameter
    that is there more than once, once. One that has none of the names is called by its place, and
    by both if others have the same name, as those of two models may.

    Raises:
        TypeError: names the parameter that cannot be trained, and why; or two that are not in the
            same place.
        ValueError: names one whose elements share memory, or two that do.
    """
    places: Dict[torch.Tensor, Tuple[int, int]] = {}  # by identity, as tensors hash
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.numel() > 0:
                places[parameter] = (g, i)
    times = Counter(names[parameter] for parameter in places if parameter in names)
    tensors = []
    for parameter, (g, i) in places.items():
        place = f"parameter {i} of group {g}"
        name = names.get(parameter, place)
        if times[name] > 1:
            name = f"{name}, {place}"
        _check_trainable(parameter, name)
        tensors.append(TrainedTensor(parameter, name, g))
    _check_are_together(tensors)
    _check_are_apart(tensors)
    return tensors


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
    in_order = sorted(tensors, key=lambda tensor: tensor.parameter.data_ptr())
    before: List[TrainedTensor] = []  # those that reach behind where this one begins
    for tensor in in_order:
        begin = tensor.parameter.data_ptr()
        before = [other for other in before if _end(other.parameter) > begin]
        for other in before:
            if _share_memory(other.parameter, tensor.parameter):
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
        return is_taken.as_strided(
            (*tensor.shape, size), (*strides, 1), tensor.data_ptr() - begin
        )

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
