"""A rank's saved state in parts: a description that is equal on all ranks, and fields of each tensor."""

import ctypes
import weakref
from typing import Mapping, NamedTuple, Sequence, Tuple

from signpost import _abi

# The library's fields of each tensor (SIGNPOST_FIELD_* in signpost.h), all in fp32.
VALUE, EXP_AVG, EXP_AVG_SQ, ERROR, AGGREGATOR_ERROR, FRESH_EXP_AVG_SQ, ANCHOR, LOCAL_SUM = range(8)
# Only read: the error for a job with other tensors, in which aggregators have none; and
# AGGREGATOR_ERROR at its places in the tensor, and zeros elsewhere.
WHOLE_ERROR, PLACED_AGGREGATOR_ERROR = 8, 9


class Numbers(NamedTuple):
    """fp32 numbers in memory of the host."""

    address: int
    elements: int


class SavedState:
    """A signpost_state, which is freed when this object is."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        weakref.finalize(self, _abi.library.signpost_free_state, handle)

    @property
    def bytes(self) -> Tuple[int, int]:
        """Returns address and number of its bytes, as long as this object is there."""
        size = ctypes.c_size_t()
        address = _abi.library.signpost_state_data(self._handle, ctypes.byref(size))
        return int(address), size.value

    def description(self) -> str:
        """Returns a line of JSON, equal on all ranks. Raises DataLossError as of other bytes."""
        text = ctypes.c_char_p()
        _abi.call("state_description", self._handle, ctypes.byref(text))
        assert text.value is not None
        return text.value.decode()

    def elements(self, tensor: int, field: int) -> int:
        """Returns how many numbers write() would write."""
        elements = ctypes.c_size_t()
        _abi.call("state_field", self._handle, tensor, field, None, ctypes.byref(elements))
        return elements.value

    def write(self, tensor: int, field: int, to: Numbers) -> None:
        """Writes a field of a tensor. Raises InvalidArgumentError if there is too little room."""
        elements = ctypes.c_size_t(to.elements)
        _abi.call("state_field", self._handle, tensor, field, to.address, ctypes.byref(elements))


def make_state(
    description: str,
    rank: int,
    world_size: int,
    tensors: Sequence[Tuple[str, Tuple[int, ...]]],
    fields: Sequence[Mapping[int, Numbers]],
) -> SavedState:
    """Makes the state that `rank` can resume from.

    Args:
        tensors: their names and shapes.
        fields: for each tensor those that are known; zeros stand for the others.

    Raises:
        InvalidArgumentError: the description is none, or names a tensor and its field that has
            another number of elements.
        FailedPreconditionError: the description is of another world size.
    """
    parameters = (_abi.Parameter * len(tensors))()
    numbers = (_abi.Numbers * (_abi.FIELDS * len(tensors)))()
    for index, (name, shape) in enumerate(tensors):
        sizes = (ctypes.c_uint64 * len(shape))(*shape)
        parameters[index] = _abi.Parameter(name.encode(), sizes, len(shape), None, 0, 0, 0)
        for field, (address, elements) in fields[index].items():
            numbers[index * _abi.FIELDS + field] = _abi.Numbers(address, elements)
    handle = ctypes.c_void_p()
    _abi.call(
        "state_make",
        description.encode(),
        rank,
        world_size,
        parameters,
        len(parameters),
        numbers,
        ctypes.byref(handle),
    )
    return SavedState(handle)
