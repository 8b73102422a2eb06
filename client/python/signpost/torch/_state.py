"""An optimizer's state between two steps, under the names by which PyTorch's tools know it.

`optimizer.state[parameter]` and what state_dict() has of a parameter are dicts of fp32 tensors on the
CPU, of the parameter's shape:

    step        steps that were taken, a scalar
    exp_avg     the momentum
    exp_avg_sq  the variance; once it is frozen, that of the freeze, raised to its floor
    error       what compression has left out on this rank, to be sent later
    master      the fp32 values of a parameter that is bf16, fp16 or not contiguous

1-bit LAMB has a second variance, `fresh_exp_avg_sq`. 0/1 Adam has `anchor`, the values at the last
synchronisation, and of this rank alone `local_value`, `local_exp_avg` and `local_sum`. In state_dict()
the names of what this rank alone has end with `_of_rank_<rank>`, so that a file may have those of all
ranks; there is also `aggregator_error_of_rank_<rank>`, those elements of the aggregators' errors that
this rank saves.
"""

import json
import operator
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from signpost import FailedPreconditionError, World, _state
from signpost._state import Numbers, SavedState, make_state
from signpost.torch._shards import Shards, shard_of
from signpost.torch._tensors import TrainedTensor

# In the first of a state_dict's param groups: the state's description, which all ranks have alike.
DESCRIPTION = "signpost"
# At its end, and not the library's: into how many shards parameters are sharded.
_SHARDS = re.compile(r',"shards":(\d+)}$')

_FIELDS = {
    "exp_avg": _state.EXP_AVG,
    "exp_avg_sq": _state.EXP_AVG_SQ,
    "error": _state.ERROR,
    "fresh_exp_avg_sq": _state.FRESH_EXP_AVG_SQ,
    "anchor": _state.ANCHOR,
    "local_value": _state.VALUE,
    "local_exp_avg": _state.EXP_AVG,
    "local_sum": _state.LOCAL_SUM,
    "master": _state.VALUE,
    "aggregator_error": _state.AGGREGATOR_ERROR,
}
_OWN = ("error", "local_value", "local_exp_avg", "local_sum", "aggregator_error")

Entry = Dict[str, torch.Tensor]  # of one parameter, by name


@dataclass(frozen=True)
class State:
    """The state of one rank after a step."""

    description: str  # JSON
    # By parameter, in the order of the job that was saved; of DTensors this process's shard.
    entries: Dict[torch.Tensor, Entry]
    # This rank's share: one-dimensional, or of the parameter's shape (state_of()).
    aggregator_errors: Dict[torch.Tensor, torch.Tensor]

    @cached_property
    def _described(self) -> Dict[str, Any]:
        described: Dict[str, Any] = json.loads(self.description)
        return described

    @property
    def steps(self) -> int:
        return int(self._described.get("step", 0))

    @property
    def is_frozen(self) -> bool:
        """Tells whether the variance has been frozen, or will be in the next step."""
        freeze_step = int(self._described.get("schedule", {}).get("freezeStep", 0))
        return 0 < freeze_step <= self.steps

    @property
    def is_synchronised(self) -> bool:
        return int(self._described.get("schedule", {}).get("localSteps", 0)) == 0

    @property
    def workers(self) -> int:
        """The number of workers of the job that saved the state."""
        return int(self._described.get("worldSize", 1))


def state_of(
    saved: SavedState, tensors: Sequence[TrainedTensor], names: Sequence[str], places_errors: bool
) -> State:
    """Returns what a rank has saved of these tensors, with copies of the fields of these names.

    Args:
        places_errors: let aggregators' errors have the shape of their parameter, with zeros where other
            ranks save them, instead of being one-dimensional and short. Jobs of another number of ranks
            can then use them.
    """
    state = State(saved.description(), {}, {})
    step = float(state.steps)
    for index, tensor in enumerate(tensors):
        entry = {"step": torch.tensor(step, dtype=torch.float32)}
        for name in [*names, "master"] if tensor.has_master else names:
            entry[name] = _read(saved, index, _FIELDS[name]).view(tensor.values.shape)
        state.entries[tensor.parameter] = entry
        if places_errors:
            placed = _read(saved, index, _state.PLACED_AGGREGATOR_ERROR)
            state.aggregator_errors[tensor.parameter] = placed.view(tensor.values.shape)
            continue
        share = _read(saved, index, _state.AGGREGATOR_ERROR)
        if share.numel() > 0:
            state.aggregator_errors[tensor.parameter] = share
    return state


def _read(saved: SavedState, index: int, field: int) -> torch.Tensor:
    numbers = torch.empty(saved.elements(index, field), dtype=torch.float32, device="cpu")
    saved.write(index, field, Numbers(numbers.data_ptr(), numbers.numel()))
    return numbers


def with_tensors(
    state: State,
    tensors: Sequence[TrainedTensor],
    names: Sequence[str],
    epsilons: Sequence[float],
    world: World,
    shards: Optional[Shards],
) -> State:
    """Returns the state of a job that trains these tensors.

    Those that are not in `state` begin anew, as if the next step were the job's first. What
    aggregators had left out goes into the ranks' errors: the new job's aggregators have none.

    Args:
        names: of the fields that the optimizer has.
        epsilons: of the param groups.
    """
    description = json.loads(state.description)
    was_frozen_with = description.get("frozenEpsilons")
    if was_frozen_with:
        # The job makes variances of inverse denominators with its groups' epsilons.
        schedule = description.get("schedule", {})
        frozen = schedule.get("epsilons", [])
        schedule["epsilons"] = [*frozen, *epsilons[len(frozen) :]]
        description["frozenEpsilons"] = [schedule["epsilons"][t.group] for t in tensors]
    if has_in_order(state, [tensor.parameter for tensor in tensors]):
        if description.get("frozenEpsilons") == was_frozen_with:
            return state
        return State(json.dumps(description), state.entries, state.aggregator_errors)
    _describe_tensors(description, state, tensors)
    errors = _whole_errors(state, world, shards)
    others = State(json.dumps(description), {}, {})
    for tensor in tensors:
        entry = state.entries.get(tensor.parameter)
        if entry is None:
            entry = _new_entry(tensor, names, state.steps)
        elif tensor.parameter in errors:
            entry = {**entry, "error": errors[tensor.parameter]}
        others.entries[tensor.parameter] = entry
    return others


def has_in_order(state: State, parameters: Collection[torch.Tensor]) -> bool:
    """Returns whether the state is that of these parameters."""
    return len(parameters) == len(state.entries) and all(
        map(operator.is_, parameters, state.entries)
    )


def _new_entry(tensor: TrainedTensor, names: Sequence[str], steps: int) -> Entry:
    values = tensor.values.detach().to("cpu", torch.float32)
    entry = {"step": torch.tensor(float(steps), dtype=torch.float32)}
    for name in [*names, "master"] if tensor.has_master else names:
        is_value = _FIELDS[name] in (_state.VALUE, _state.ANCHOR)
        entry[name] = values.clone() if is_value else torch.zeros_like(values)
    return entry


def _describe_tensors(
    description: Dict[str, Any], state: State, tensors: Sequence[TrainedTensor]
) -> None:
    """Gives the description what it has of each tensor: TensorScale in proto/aggregator.proto."""
    indices = {parameter: index for index, parameter in enumerate(state.entries)}
    scales = {int(scale.get("tensor", 0)): scale for scale in description.get("scales", [])}
    old: Dict[str, Any] = {"ratio": 1.0, "factor": 1.0}
    new = {**old, "firstStep": str(state.steps)}
    by_tensor = []
    for index, tensor in enumerate(tensors):
        was = indices.get(tensor.parameter)
        scale = new if was is None else scales.get(was, old)
        by_tensor.append({**scale, "tensor": index})
    if scales or any(tensor.parameter not in indices for tensor in tensors):
        description["scales"] = by_tensor


def _whole_errors(
    state: State, world: World, shards: Optional[Shards]
) -> Dict[torch.Tensor, torch.Tensor]:
    """Returns errors that have those of the aggregators in them, where there are any."""
    if not state.aggregator_errors:
        return {}
    tensors = [
        TrainedTensor(parameter, f"tensor {index}", 0, shards)
        for index, parameter in enumerate(state.entries)
    ]
    saved = to_resume(state, tensors, world)
    return {
        tensor.parameter: _read(saved, index, _state.WHOLE_ERROR).view(tensor.values.shape)
        for index, tensor in enumerate(tensors)
    }


def is_same(a: State, b: State) -> bool:
    """Returns whether both have the same bits."""
    if a.description != b.description or a.entries.keys() != b.entries.keys():
        return False
    if a.aggregator_errors.keys() != b.aggregator_errors.keys():
        return False
    pairs = [(a.aggregator_errors[p], b.aggregator_errors[p]) for p in a.aggregator_errors]
    for parameter, entry in a.entries.items():
        pairs += [(value, b.entries[parameter][name]) for name, value in entry.items()]
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in pairs)


def to_state_dict(
    state: State,
    state_dict: Dict[str, Any],
    ids: Mapping[torch.Tensor, Any],
    world: World,
    shards: Optional[Shards],
) -> None:
    """Completes what torch.optim.Optimizer.state_dict() has made of `state`.

    Args:
        ids: by which state_dict calls the parameters.
        shards: of the parameters, if they are sharded.
    """
    rank = world.rank
    for parameter, entry in state.entries.items():
        whole = dict(entry)
        if parameter in state.aggregator_errors:
            whole["aggregator_error"] = state.aggregator_errors[parameter]
        shown = as_shown(parameter, whole, shards)
        named = {_name_in_file(name, rank): value for name, value in shown.items()}
        state_dict["state"][ids[parameter]] = named
    description = state.description
    if shards is not None and shards.count > 1:
        description = f'{description[:-1]},"shards":{shards.count}}}'
    state_dict["param_groups"][0][DESCRIPTION] = description


def as_shown(parameter: torch.Tensor, entry: Entry, shards: Optional[Shards]) -> Entry:
    """Returns a parameter's entry as PyTorch's tools have it: with shards it has DTensors."""
    if shards is None:
        return dict(entry)
    shard = shards.shard_of(parameter)

    def whole(value: torch.Tensor) -> torch.Tensor:
        # An empty shard has one number in its place.
        return shards.with_shard(parameter, value[: len(shard)].view_as(shard))

    return {name: value if name == "step" else whole(value) for name, value in entry.items()}


def from_state_dict(
    state_dict: Mapping[str, Any],
    description: Any,
    tensors: Mapping[Any, TrainedTensor],
    names: Sequence[str],
    world: World,
    shards: int,
    allows_others: bool,
) -> State:
    """Returns what a state_dict() has of these tensors for this rank.

    What this rank alone has is zero where the file lacks it, as one does that rank 0 has saved for
    all: then compression has left something out that is never sent, and a warning says so. Another one
    names tensors of which the file has nothing, such as those that were frozen when it was saved.

    Args:
        tensors: by what state_dict calls their parameters, in its order; of all that could be trained.
        names: of the fields that the optimizer has.
        shards: into how many each parameter is sharded.
        allows_others: take what other numbers of ranks, or of shards, have saved. What the aggregators
            had left out then goes into the ranks' errors: with as many ranks their mean stays.

    Raises:
        ValueError: it is no state of an optimizer of Signpost, or names the parameter and field that
            is missing, of another shape or of another type.
        FailedPreconditionError: it is of another number of ranks, or of shards.
    """
    state, shards_before = _described(description)
    rank, workers = world.rank, world.world_size
    workers_before = state.workers
    is_of_others = (workers_before, shards_before) != (workers, shards)
    if is_of_others:
        if not allows_others:
            raise FailedPreconditionError(
                f"the saved state is that of {_ranks(workers_before, shards_before)}, and this job has "
                f"{_ranks(workers, shards)}: to go on from it all the same, make the optimizer with "
                "resume_with_other_world_size=True",
                code=9,
                exit_code=76,
            )
        if workers != workers_before and not state.is_synchronised:
            raise FailedPreconditionError(
                f"the saved state is that of {_ranks(workers_before, shards_before)} between two "
                f"synchronisations, when each rank had values of its own, and this job has "
                f"{_ranks(workers, shards)}: save after a step with is_synchronised",
                code=9,
                exit_code=76,
            )
        state = _of_workers(state, workers)
    new, lost = [], []  # names of parameters
    lost_shares = workers < workers_before
    for key, tensor in tensors.items():
        file: Mapping[str, Any] = state_dict["state"].get(key, {})
        if not file:
            if tensor.parameter.requires_grad:
                new.append(tensor.name)
            continue
        wanted = list(names) + (["master"] if tensor.has_master else [])
        entry: Entry = {"step": torch.tensor(float(state.steps), dtype=torch.float32)}
        for name in wanted:
            value = file.get(_name_in_file(name, rank))
            if value is not None:
                entry[name] = _numbers(value, name, tensor)
                continue
            entry[name] = _in_place_of(name, file, tensor, state.is_synchronised, rank)
            if name == "error" and _has_error_of_another(file):
                lost.append(tensor.name)
        state.entries[tensor.parameter] = entry
        share = file.get(_name_in_file("aggregator_error", rank))
        if share is None:
            continue
        if not is_of_others:
            state.aggregator_errors[tensor.parameter] = tensor.from_state(share)
        elif share.shape == tensor.parameter.shape:
            # Times the ranks whose mean is taken, since only this one has it.
            entry["error"] = entry["error"] + workers * tensor.from_state(share)
        else:
            lost_shares = True  # which elements it has of, only such a job could tell
    if not state.entries:
        raise ValueError(f"the state that is loaded has nothing of {new[0]}")
    if new:
        warnings.warn(
            f"the state that is loaded has nothing of {new[0]} and {len(new) - 1} other parameters that "
            "are trained: they begin anew",
            stacklevel=4,
        )
    if lost_shares:
        warnings.warn(
            f"the state that is loaded is that of {_ranks(workers_before, shards_before)}: a part of what "
            "compression has left out so far is never sent. A checkpoint() loses nothing",
            stacklevel=4,
        )
    if lost:
        warnings.warn(
            f"the state that is loaded has no error of rank {rank}, only of other ranks: what "
            f"compression has left out here so far, of {lost[0]} and {len(lost) - 1} other parameters, "
            "is never sent. Where each rank saves its own state nothing is lost",
            stacklevel=4,
        )
    return state


def _described(description: Any) -> Tuple[State, int]:
    """Returns a state without numbers, and into how many shards its parameters were sharded."""
    try:
        if "worldSize" in json.loads(description):
            sharded = _SHARDS.search(description)
            if sharded is None:
                return State(description, {}, {}), 1
            return State(description[: sharded.start()] + "}", {}, {}), int(sharded[1])
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"this is not the state_dict() of an optimizer of Signpost: '{DESCRIPTION}' of its first param "
        f"group is {str(description)[:40]!r}, wanted the state's description"
    )


def _in_place_of(
    name: str, file: Mapping[str, Any], tensor: TrainedTensor, is_synchronised: bool, rank: int
) -> torch.Tensor:
    """Returns what stands for a field that the file lacks."""
    if name not in _OWN:
        raise ValueError(f"the state that is loaded has no {name} of {tensor.name}")
    if name.startswith("local_") and not is_synchronised:
        raise ValueError(
            f"the state that is loaded has no {name} of {tensor.name} for rank {rank}, and was saved "
            "between two synchronisations, when each rank had values of its own: load what this rank "
            "has saved, or what was saved after a step with is_synchronised"
        )
    if name == "local_value":
        return tensor.values.detach().to("cpu", copy=True)
    if name == "local_exp_avg":
        return _numbers(file["exp_avg"], "exp_avg", tensor)
    return torch.zeros(tensor.values.shape, dtype=torch.float32, device="cpu")


def _has_error_of_another(file: Mapping[str, Any]) -> bool:
    return any(
        name.startswith("error_of_rank_") and bool(shard_of(value).any())
        for name, value in file.items()
    )


def _numbers(value: Any, name: str, tensor: TrainedTensor) -> torch.Tensor:
    """Returns a field of the file's, of this process's shard."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        raise ValueError(f"{name} of {tensor.name} is {type(value).__name__}, wanted fp32 numbers")
    if value.shape != tensor.parameter.shape:
        raise ValueError(
            f"{name} of {tensor.name} is {list(value.shape)} in the state that is loaded, wanted "
            f"{list(tensor.parameter.shape)}"
        )
    own = tensor.from_state(value)
    if own.shape != tensor.values.shape:
        raise ValueError(
            f"{name} of {tensor.name} has {list(own.shape)} on this process in the state that is loaded, "
            f"wanted {list(tensor.values.shape)}: it is sharded in another way"
        )
    return own


def _ranks(workers: int, shards: int) -> str:
    return f"{workers} ranks" if shards == 1 else f"{workers} ranks for each of {shards} shards"


def _of_workers(state: State, workers: int) -> State:
    description = json.loads(state.description)
    description["worldSize"] = workers
    return State(json.dumps(description), {}, {})


def _name_in_file(name: str, rank: int) -> str:
    return f"{name}_of_rank_{rank}" if name in _OWN else name


def to_resume(state: State, tensors: Sequence[TrainedTensor], world: World) -> SavedState:
    """Returns what the library resumes from. Errors as make_state()'s.

    Values are the parameters' own, but for `local_value` between two synchronisations of 0/1 Adam,
    and for `master`, which has the digits that a parameter has lost by rounding.
    """
    kept: List[torch.Tensor] = []  # until the state is made

    def numbers_of(value: torch.Tensor) -> Numbers:
        kept.append(value.detach().to("cpu", torch.float32).contiguous())
        return Numbers(kept[-1].data_ptr(), kept[-1].numel())

    fields: List[Dict[int, Numbers]] = []
    for tensor in tensors:
        entry = state.entries[tensor.parameter]
        values = tensor.values
        if "master" in entry:
            values = tensor.with_digits_of(entry["master"])
        own: Dict[int, Numbers] = {_state.VALUE: numbers_of(values)}
        for name, value in entry.items():
            if name in ("step", "master") or (name.startswith("local_") and state.is_synchronised):
                continue
            own[_FIELDS[name]] = numbers_of(value)
        share = state.aggregator_errors.get(tensor.parameter)
        if share is not None:
            own[_state.AGGREGATOR_ERROR] = numbers_of(share)
        fields.append(own)
    shapes = [(tensor.name, tuple(tensor.values.shape)) for tensor in tensors]
    return make_state(state.description, world.rank, world.world_size, shapes, fields)
