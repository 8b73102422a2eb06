"""The base class of the PyTorch optimizers: a job, whose steps all ranks take together."""

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import sys
import warnings
import weakref
from collections import defaultdict
from itertools import chain
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    DefaultDict,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Tuple,
    TypeVar,
    Union,
    overload,
)

import torch

from signpost import (
    InvalidArgumentError,
    Options,
    Rates,
    Session,
    SignpostError,
    StepReport,
    World,
    _abi,
    world,
)
from signpost._one_call import OneCall
from signpost.torch._clipping import Clipping, GlobalClipping, Preparation
from signpost.torch._device import session_of
from signpost.torch._misuse import (
    Fingerprints,
    check_parameters,
    check_values,
    check_world,
    check_wrappers,
)
from signpost.torch._node_exchange import NodeExchange
from signpost.torch._overlap import Backward
from signpost.torch._shards import check_sharding, shards_of
from signpost.torch._state import (
    DESCRIPTION,
    State,
    as_shown,
    from_state_dict,
    has_in_order,
    is_same,
    state_of,
    to_resume,
    to_state_dict,
    with_tensors,
)
from signpost.torch._tensors import TrainedTensor, Zeros, after_step, to_train, trained_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parameters = Union[
    Iterable[torch.Tensor], Iterable[Tuple[str, torch.Tensor]], Iterable[Dict[str, Any]]
]


# Other keys that a param group may have when an optimizer is made: schedulers and PyTorch put them there.
_OF_OTHERS = {
    "params",
    "name",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
    "decoupled_weight_decay",  # True in AdamW's groups, and weight decay here is decoupled
}


_SAVES_SHARDS = (
    "an optimizer with shards is saved and loaded with its model by torch.distributed.checkpoint "
    "(docs/sharding.md)"
)


@dataclasses.dataclass
class Member:
    """This process as a member of one job: from when it joins until it leaves."""

    session: Session
    clipping: Optional[Clipping]
    tensors: List[TrainedTensor]
    zeros: Zeros
    node: Optional[NodeExchange] = None  # where the processes of a machine share the optimizer
    backward: Optional[Backward] = None  # with overlap
    preparation: Preparation = dataclasses.field(default_factory=Preparation)
    shown_steps: Optional[int] = None  # of the steps that were taken, those that parameters have


@dataclasses.dataclass
class _Loading:
    """A call of load_state_dict()."""

    options: Options  # of the job
    state_dict: Dict[str, Any] = dataclasses.field(default_factory=dict)  # behind all hooks


@dataclasses.dataclass
class _Loaded:
    """A state that load_state_dict() has loaded. The next call that needs the other ranks joins with it."""

    options: Options  # of the job
    state: State


@dataclasses.dataclass
class _Progress:
    """All that changes in an optimizer. Wrappers that pass attributes on, as Lightning's does, set
    none of their own that way."""

    member: Optional[Member] = None
    loaded: Optional[_Loaded] = None
    report: Optional[StepReport] = None
    grad_norm: Optional[float] = None
    seen: Optional[State] = None  # what was saved last
    seen_at: Tuple[int, int] = (0, 0)  # behind how many steps and changes of parameters
    loading: Optional[_Loading] = None
    are_wrappers_checked: bool = False
    is_over: bool = False  # a step has failed, or the job was left
    calls: OneCall = dataclasses.field(default_factory=lambda: OneCall("optimizer"))


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _one_call(method: _Method) -> _Method:
    """Makes a method refuse to run while another thread is in another one of these: RuntimeError."""

    @functools.wraps(method)
    def run(self: "JobOptimizer", *args: Any, **kwargs: Any) -> Any:
        with self._progress_of_original().calls.enter(method.__name__):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class JobOptimizer(torch.optim.Optimizer):
    """An optimizer that is a job. Which one, and with which options, its classes say.

    It has one call at a time: while step(), checkpoint(), state_dict(), load_state_dict(), leave() or
    `state` is under way, another thread's gets a RuntimeError that names both, and changes nothing.
    `steps`, `report` and the other numbers may be read at any time.
    """

    # How gradients travel: arguments of the class, by the library's options.
    _gradient_codecs = {"warm_up_codec": "warm_up_codec", "variance_codec": "variance_codec"}
    # Fields of `state`, beside step and master: _state.py.
    _state_fields: Tuple[str, ...] = ("exp_avg", "exp_avg_sq", "error")

    def __init__(
        self,
        job: Options,
        name: Optional[str],
        params: Parameters,
        lr: float,
        betas: Tuple[float, float],
        eps: float,
        weight_decay: float,
        resume: Union[str, "os.PathLike[str]", None],
        overlap: bool,
        max_grad_norm: Optional[float],
        replicate_mesh: Optional["DeviceMesh"] = None,
        shard_mesh: Optional["DeviceMesh"] = None,
        **options: float,
    ) -> None:
        """`job` is the world's next, taken before anything can fail: ranks count alike, also one
        that cannot make what the others make."""
        check_parameters(params)
        self._name = name
        self._progress = _Progress()
        self._overlap = overlap
        self._max_grad_norm = max_grad_norm
        self._options = options
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        if max_grad_norm is not None and not _number(max_grad_norm) > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm!r}, wanted a positive number")
        if max_grad_norm is not None and overlap:
            raise ValueError(
                "max_grad_norm needs all gradients before any is sent: use it with overlap=False"
            )
        self._check_options_of_groups()
        self._check_groups()
        self._check_beta1()
        check_world()
        trained = to_train(self.param_groups)
        self._shards = shards_of(trained, replicate_mesh, shard_mesh, overlap)
        if self._shards is not None:
            self._check_can_be_sharded(resume)
            self._shards.set_options(job)
        self.register_state_dict_post_hook(_complete_state_dict)
        self._join(job, None if resume is None else _directory("resume", resume))

    @property
    def report(self) -> Optional[StepReport]:
        """Says what the last step was and what it cost. None before the first step."""
        return self._progress_of_original().report

    @property
    def grad_norm(self) -> Optional[float]:
        """The last step's sqrt(mean over ranks of ||gradient||^2) before clipping, NaN if that was not
        finite. None without max_grad_norm, and before the first step."""
        return self._progress_of_original().grad_norm

    @property
    def max_grad_norm(self) -> Optional[float]:
        """The constructor's argument."""
        return self._max_grad_norm

    @property
    def state(self) -> "DefaultDict[torch.Tensor, Any]":
        """A dict for each parameter with `step`, `exp_avg`, `exp_avg_sq` and `error` after the last step:
        fp32 tensors on the CPU; of sharded parameters DTensors, on the device of the mesh. The tensors are copies, made at the first access after a
        step, and until the next one state_dict() returns the same: do not write into them, but call
        load_state_dict(). `state` is empty once a step has failed, or leave() was called.

        Raises:
            SignpostError: as from state_dict().
        """
        progress: Optional[_Progress] = getattr(self, "_progress", None)
        if progress is None or (progress.member is None and progress.loaded is None):
            state: DefaultDict[torch.Tensor, Any] = vars(self).get("_state", defaultdict(dict))
            return state
        if progress.is_over:
            return defaultdict(dict)
        with progress.calls.enter("state"):
            entries = self._current_state().entries
            return defaultdict(
                dict,
                {
                    parameter: as_shown(parameter, entry, self._shards)
                    for parameter, entry in entries.items()
                },
            )

    @state.setter
    def state(self, state: "DefaultDict[torch.Tensor, Any]") -> None:
        vars(self)["_state"] = state

    @property
    def steps(self) -> int:
        """Steps that were taken, those before a resume included: the next one's number."""
        loaded = self._progress_of_original().loaded
        return loaded.state.steps if loaded is not None else self._member().session.steps

    @property
    def is_synchronised(self) -> bool:
        """Whether all ranks have the same parameters: always, but between synchronisations of
        ZeroOneAdam. Only then they are worth validating, or saving as the model."""
        loaded = self._progress_of_original().loaded
        if loaded is not None:
            return loaded.state.is_synchronised
        return self._member().session.is_synchronised

    @property
    def sent_bits(self) -> float:
        """How many bits this rank has sent by parameter and step, on average since it joined."""
        return 0.0 if self.report is None else self.report.sent_bits

    # A GradScaler then leaves it to step() to divide gradients by the loss's scale, and to skip what
    # is not finite. By itself it would skip this rank's step, and the others would wait for it.
    _step_supports_amp_scaling = True

    @property
    def grad_scale(self) -> Optional[torch.Tensor]:
        """The loss's scale, which a GradScaler sets before step() and deletes after it. A GradScaler
        multiplies the scale that it finds here by its own, so step() deletes it when it fails.
        Deleting it twice is no error."""
        if "grad_scale" not in vars(self):
            raise AttributeError("grad_scale is only there during step()")
        scale: Optional[torch.Tensor] = vars(self)["grad_scale"]
        return scale

    @grad_scale.setter
    def grad_scale(self, scale: Optional[torch.Tensor]) -> None:
        vars(self)["grad_scale"] = scale

    @grad_scale.deleter
    def grad_scale(self) -> None:
        vars(self).pop("grad_scale", None)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_one_call
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        """Takes one step on the mean of all ranks' gradients. All ranks call it equally often.

        A parameter without a gradient counts as one with zeros: other ranks may have one.

        In a job with a round deadline a late rank may take several steps in one call. There count
        loops by `steps`, and compute learning rates from it: they must be equal on all ranks.

        Args:
            closure: computes gradients anew, once, and returns the loss.

        Returns:
            the closure's loss.

        Raises:
            InvalidArgumentError: the step can be tried again, while others may wait in it; with the
                gradients that are there, or with new ones. A second try does not unscale or clip the
                same gradients again. It clips new ones by the first try's norm.
            SignpostError: the parameters may be partly stepped; resume from the newest checkpoint.
            RuntimeError: a parameter has moved in memory, or its gradient is elsewhere or of
                another shape; one was added that cannot be trained any more
                (add_param_group()); the program has changed one where that would be lost, which is
                between synchronisations (what is written through `.data` or NumPy is not seen, and lost
                there); with overlap, gradients or rates
                are not those of the backward pass any more.
            ValueError: a group's lr, weight decay, betas or eps are no numbers or out of range, or
                all parameters are frozen. Nothing was sent.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        member = self._joined()
        was_synchronised = member.session.is_synchronised
        try:
            with self._explained():
                report = self._progress.report = self._take_step(member)
        except BaseException as error:
            del self.grad_scale
            if isinstance(error, SignpostError) and not isinstance(error, InvalidArgumentError):
                self._progress.is_over = True
            raise
        if report.skipped_rounds > 0:
            of_shard = "" if self._shards is None else f" of shard {self._shards.index}"
            what = "chunks were not stepped, on all ranks"
            if not (was_synchronised and member.session.is_synchronised):
                what = "blocks take no part in it, on this rank"
            warnings.warn(
                f"step {report.step}: the gradient of rank {report.skipped_by_rank}{of_shard} is "
                "not finite, or larger than what travels (1e15 in one bit, 1e18 in fp32); "
                f"{report.skipped_rounds} {what}"
            )
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps backward passes inside from sending, with overlap: their gradients accumulate, and the next
        backward pass sends the sum. Without overlap it has no effect and is not needed."""
        backward = self._member().backward
        if backward is None:
            yield
            return
        was_paused = backward.paused
        backward.paused = True
        try:
            yield
        finally:
            backward.paused = was_paused

    @_one_call
    def checkpoint(self, directory: Union[str, "os.PathLike[str]"]) -> None:
        """Saves the whole job as it is now: parameters, and all ranks' and aggregators' errors.

        All ranks call it after the same step, with a directory that all of them see and that
        belongs to this optimizer. The newest two checkpoints in it are kept. `resume=directory`
        goes on from the newest, with the same bits as if the job had not ended.

        Raises:
            ValueError: the directory's name is empty, or parameters are sharded.
            SignpostError: the checkpoints before stay, and training may go on, but after a
                DataLossError. ResourceExhaustedError: the disk is full, on this rank or another.
            RuntimeError: of the parameters, as from step().
        """
        path = _directory("directory", directory)
        if self._shards is not None:
            raise ValueError(f"checkpoint() saves whole tensors; {_SAVES_SHARDS}")
        member = self._joined()
        self._take_changes(member)
        member.session.checkpoint(path)

    @_one_call
    def state_dict(self) -> Dict[str, Any]:
        """Returns the param groups and what is in `state`, with the errors that this rank saves of the
        aggregators. It has 12 bytes for each fp32 parameter and 16 for each other one (OneBitLamb: 4 more,
        ZeroOneAdam: 16 more), and 4 / n more with n ranks.

        With what all ranks have saved after the same step, and the models' parameters, training goes on
        with the same bits: each rank saves its own, or torch.distributed.checkpoint saves all. From
        what one rank saves alone the others can go on too, with errors of zero.

        Raises:
            SignpostError: an aggregator did not give its part; training may go on, but after a
                DataLossError.
            RuntimeError: of the parameters, as from step().
        """
        state_dict: Dict[str, Any] = _of_pytorch("state_dict")(self)
        return state_dict

    @_one_call
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Goes on as after the step of state_dict(). All ranks call it.

        Nothing is exchanged. The next call that needs the other ranks, such as step(), joins a new job
        with what was loaded, which must then be of the same step on all ranks, and leaves the one before.
        A state that is the present one changes nothing.
        Parameters are not part of the state, as in torch.optim: the program loads its model, before or after.
        Between two synchronisations of ZeroOneAdam they are, as ranks have different ones. A warning names
        parameters that are trained and of which the state has nothing: they begin anew.

        Raises:
            ValueError: it is no state of an optimizer of Signpost, or of another model. Nothing has
                changed.
            FailedPreconditionError: it is of another number of ranks. Nothing has changed. step()
                raises it for what was saved with other options, or of another step than other ranks'.
        """
        progress = self._progress_of_original()
        job = self._next_job()  # before anything can fail, as in the constructor
        progress.loading = _Loading(job)
        progress.seen = None  # whose memory a tool may have loaded into
        # Behind the program's own hooks. What they return is what is loaded.
        hook = self.register_load_state_dict_pre_hook(_take_state)
        try:
            _of_pytorch("load_state_dict")(self, state_dict)
        finally:
            hook.remove()
            progress.loading = None

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Takes what load_state_dict() or a copy has made of its argument."""
        progress = getattr(self, "_progress", None)
        if progress is not None and progress.loading is not None:
            self._load(progress.loading, state["param_groups"])
            state = {**state, "state": defaultdict(dict)}
        super().__setstate__(state)

    def _load(self, loading: "_Loading", groups: List[Dict[str, Any]]) -> None:
        description = groups[0].pop(DESCRIPTION, None) if groups else None
        saved = chain.from_iterable(group["params"] for group in loading.state_dict["param_groups"])
        now = chain.from_iterable(group["params"] for group in self.param_groups)
        keys = dict(zip(now, saved))
        in_file = {p for p, key in keys.items() if loading.state_dict["state"].get(key)}
        tensors = {
            keys[t.parameter]: t
            for t in trained_tensors(self.param_groups, self._shards, also=in_file)
        }
        fields = self._state_fields
        state = from_state_dict(
            loading.state_dict,
            description,
            tensors,
            fields,
            self._world(),
            1 if self._shards is None else self._shards.count,
            bool(self._options["resume_with_other_world_size"]),
        )
        progress, member = self._progress_of_original(), self._member()
        if self._is_where(state):
            return
        if not state.is_synchronised:
            # The model that was saved may be another rank's.
            for tensor in tensors.values():
                entry = state.entries.get(tensor.parameter, {})
                if "local_value" in entry:
                    tensor.write(entry["local_value"])
            if member.node is not None:
                member.node.gather_parameters()
        if member.backward is not None:
            member.backward.remove_hooks()  # its job takes no more steps
        progress.loaded = _Loaded(loading.options, state)
        progress.is_over = False

    @_one_call
    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group of parameters, as torch.optim.Optimizer's does. All ranks call it after the same step.

        Their values are the same on all ranks, as from one seed. The next step() or checkpoint() joins
        a new job, which has all that the one before had: momentum, variance and errors of the other
        parameters stay. docs/pytorch.md says when new ones begin to move. It is the same for parameters
        whose requires_grad becomes True (thawing). Those of which it becomes False take part no more,
        and what the optimizer had of them is dropped.

        Raises:
            TypeError, ValueError: as from the constructor. Nothing has changed.
            RuntimeError: raised by the next step(), which sends nothing: they cannot be trained.
                ZeroOneAdam takes none; nor do others once the variance is frozen, unless it follows
                (variance_refresh_interval="auto").
        """
        _of_pytorch("add_param_group")(self, param_group)
        if self._progress_of_original().member is None:  # the constructor adds its own
            return
        try:
            self._check_options_of_groups()
            self._check_groups()
            self._check_beta1()
            check_sharding(to_train(self.param_groups), self._shards)
            trained_tensors(self.param_groups, self._shards)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as torch.optim.Optimizer's does."""
        _of_pytorch("zero_grad")(self, set_to_none)

    @_one_call
    def parameters_crc32c(self) -> int:
        """A checksum over all values that are trained, of this process's shard if there are shards: equal on
        all ranks after every step, if `is_synchronised`. RuntimeErrors of the parameters as from step().
        """
        member = self._joined()
        self._take_changes(member)
        return member.session.parameters_crc32c()

    @_one_call
    def leave(self) -> None:
        """Ends this rank's part in the job. It is done anyway when the process ends."""
        progress = self._progress_of_original()
        progress.loaded = None
        progress.is_over = True
        if progress.member is not None:
            _leave_both(progress.member)

    def _progress_of_original(self) -> _Progress:
        progress: Optional[_Progress] = getattr(self, "_progress", None)
        if progress is None:
            raise RuntimeError("this optimizer is a copy, without a job; make a new one")
        return progress

    def _member(self) -> Member:
        """Returns the job that was joined last, perhaps before a state was loaded."""
        member = self._progress_of_original().member
        assert member is not None
        return member

    def _joined(self) -> Member:
        """Returns the job that takes the next step. Joins it first if a state was loaded, or if other
        parameters are to be trained."""
        progress = self._progress_of_original()
        if progress.loaded is None and not progress.is_over and self._trains_others():
            progress.loaded = self._state_for_others()
        loaded = progress.loaded
        if loaded is not None:
            self._join(loaded.options, None, loaded.state)
        return self._member()

    def _trains_others(self) -> bool:
        """Returns whether other parameters are to be trained than when the job was joined."""
        tensors = self._member().tensors
        wanted = to_train(self.param_groups)
        return len(wanted) != len(tensors) or not all(
            parameter is tensor.parameter and g == tensor.group
            for (parameter, (g, _)), tensor in zip(wanted.items(), tensors)
        )

    def _state_for_others(self) -> "_Loaded":
        """Returns what to join with where other parameters are to be trained. What cannot be trained is
        refused here, before a job is taken: the present one can then go on without it."""
        member = self._member()
        if member.backward is not None and member.backward.has_begun:
            raise RuntimeError(
                "parameters were added, thawed or frozen while the backward pass was sending gradients; "
                "with overlap=True do that before backward()"
            )
        state = self._state_of_member()
        check_sharding(to_train(self.param_groups), self._shards)
        tensors = trained_tensors(self.param_groups, self._shards)
        self._check_others(state, tensors)
        return _Loaded(self._next_job(), state)

    def _check_others(self, state: State, tensors: List[TrainedTensor]) -> None:
        """Refuses tensors that cannot be trained from a state that has nothing of them."""
        if not state.is_synchronised and len(state.entries) != len(tensors):
            raise RuntimeError(
                "parameters were added, thawed or frozen between two synchronisations: do that after a "
                "step with is_synchronised"
            )
        new = [tensor.name for tensor in tensors if tensor.parameter not in state.entries]
        why = self._why_none_joins(state)
        if new and why is not None:
            raise RuntimeError(
                f"{new[0]} was added or thawed at step {state.steps}, and cannot be trained: {why}. Make a "
                'new optimizer, or use OneBitAdam with variance_refresh_interval="auto", its default'
            )

    def _why_none_joins(self, state: State) -> Optional[str]:
        """Returns why parameters that join at that state could not be trained, or None if they could."""
        if state.is_frozen and self._options.get("variance_refresh_interval") != _abi.AUTO:
            return "the variance was frozen before, so it would have none"
        return None

    def _with_tensors(self, state: State, tensors: List[TrainedTensor]) -> State:
        """Returns the state of a job that trains these."""
        epsilons = [float(group["eps"]) for group in self.param_groups]
        return with_tensors(
            state, tensors, self._state_fields, epsilons, self._world(), self._shards
        )

    def _current_state(self) -> State:
        """Returns the state of the parameters that are to be trained now."""
        loaded = self._progress_of_original().loaded
        state = self._state_of_member() if loaded is None else loaded.state
        if has_in_order(state, to_train(self.param_groups)):
            return state
        return self._with_tensors(state, trained_tensors(self.param_groups, self._shards))

    def _state_of_member(self) -> State:
        progress = self._progress_of_original()
        member = self._member()
        # accelerate moves the model to its device, and has this saved and loaded to follow it there.
        if not any(tensor.has_other_device for tensor in member.tensors):
            self._take_changes(member)
        seen_at = (member.session.steps, sum(tensor.times_taken for tensor in member.tensors))
        if progress.seen is None or progress.seen_at != seen_at:
            saved = member.session.save_state_in_parts()
            places_errors = self._shards is not None or bool(
                self._options["resume_with_other_world_size"]
            )
            progress.seen = state_of(saved, member.tensors, self._state_fields, places_errors)
            progress.seen_at = seen_at
        return progress.seen

    def _is_where(self, state: State) -> bool:
        """Returns whether the job is in that state already, so that it can go on as it is. accelerate
        saves and loads each optimizer when it begins."""
        is_there = self._is_in(state)
        if self._shards is not None:  # all go on, or all join anew
            is_there = self._shards.sum([is_there])[0] == self._shards.count
        return is_there

    def _is_in(self, state: State) -> bool:
        progress, member = self._progress_of_original(), self._member()
        if progress.loaded is not None or progress.is_over:
            return False
        if any(tensor.has_other_device for tensor in member.tensors):
            return False
        if member.backward is not None and member.backward.has_begun:
            return False
        try:
            return is_same(state, self._current_state())
        except SignpostError:  # an aggregator does not answer; the next step says so
            return False

    def _world(self) -> World:
        """Returns this process's rank among those that train the same tensors."""
        return world() if self._shards is None else self._shards.world

    def _explained(self) -> "contextlib.AbstractContextManager[None]":
        """Has errors of sums over shards raised as they were."""
        return contextlib.nullcontext() if self._shards is None else self._shards.explains()

    def _next_job(self) -> Options:
        """Returns options of the job that follows on those that this optimizer was in."""
        options = world().next_job(self._name)
        if self._shards is not None:
            self._shards.set_options(options)
        return options

    def _check_can_be_sharded(self, resume: object) -> None:
        if resume is not None:
            raise ValueError(f"resume is {resume!r}, but {_SAVES_SHARDS}")
        if self._options.get("as_deepspeed"):
            raise ValueError(
                'with compat="deepspeed" each tensor has one scale, so DTensors, of which each process '
                "has a shard, are not trained: make the optimizer without it"
            )

    def _join(self, options: Options, resume: Optional[str], state: Optional[State] = None) -> None:
        check_sharding(to_train(self.param_groups), self._shards)
        tensors = trained_tensors(self.param_groups, self._shards)
        if not tensors:
            raise ValueError("no parameter requires a gradient; there is nothing to train")
        if state is not None:
            self._check_others(state, tensors)
            state = self._with_tensors(state, tensors)
        for name, value in self._options.items():
            _set(options, name, value)
        if resume is not None:
            options.resume = resume.encode()
        saved = None
        if state is not None:
            saved = to_resume(state, tensors, self._world())
            options.resume_state, options.resume_state_bytes = saved.bytes
        resumes = resume is not None or state is not None
        ranks = self._world().world_size
        is_new = not resumes and ranks > 1
        fingerprints = Fingerprints(tensors) if is_new else None
        node: Optional[NodeExchange] = None
        if self._shards is not None and self._shards.has_whole_parameters:
            node = NodeExchange(tensors, self._shards)
            node.check_alike([self._options, self._max_grad_norm, self.defaults])
            if not resumes:
                node.begin_alike()
        # With several ranks the library checks the values that all get from rank 0.
        if not resumes and ranks == 1:
            check_values(tensors)
        clipping: Optional[Clipping] = None
        with contextlib.ExitStack() as undo:
            if resume is None:
                clipping = self._new_clipping(options)
                undo.callback(_leave_quietly, clipping)
            parameters = [tensor.as_session_parameter() for tensor in tensors]
            with self._explained():
                session = session_of(tensors[0].gpu, options, parameters)
            undo.callback(_leave_quietly, session)
            # It has changed parameters, so otherwise it joins last. But ranks that have found another
            # checkpoint are refused by then, and when they have been started again, those that wait
            # for them must wait for that same join.
            if resume is not None:
                clipping = self._new_clipping(options)
            if fingerprints is not None and not session.returned:
                fingerprints.check()
            undo.pop_all()
        del saved  # large, and loaded
        zeros = Zeros(tensors[0].values.device)
        member = Member(session, clipping, tensors, zeros, node)
        progress = self._progress_of_original()
        before, progress.member = progress.member, member
        progress.loaded = progress.seen = None
        progress.is_over = progress.are_wrappers_checked = False
        if before is not None and before.backward is not None:
            before.backward.remove_hooks()
        if self._overlap:
            member.backward = Backward(
                session, tensors, weakref.WeakMethod(self._rates_of_backward), node
            )
        try:
            if before is not None:
                _leave_both(before)
        except SignpostError as error:
            warnings.warn(f"the job that was there before could not be left: {error}")
        if ranks > 1 or resumes or session.returned:
            self._show_step(member)
        member.shown_steps = session.steps
        if session.resume_warnings:
            warnings.warn(session.resume_warnings)
        if resume is not None or session.returned:
            for group in self.param_groups:
                # Schedulers that begin at a later step ask for it. A state that is loaded has it if the
                # program that saved the state had a scheduler.
                group.setdefault("initial_lr", group["lr"])

    def _new_clipping(self, options: Options) -> Optional[Clipping]:
        if self._max_grad_norm is None:
            return None
        return GlobalClipping(options, self._max_grad_norm, self._shards)

    def _clipping_of_step(self, member: Member) -> Optional[Clipping]:
        """Returns that of the step that is to be taken."""
        return member.clipping

    def _why_changes_are_lost(self) -> Optional[str]:
        """Returns why a program's changes of parameters since the last step would be lost, or None if
        they would not."""
        if not self._member().session.is_synchronised:
            return (
                "It was between two synchronisations, of which the next would undo it: change "
                "parameters after a step with is_synchronised, and load a model before its optimizer"
            )
        return None

    @torch.no_grad()
    def _take_step(self, member: Member) -> StepReport:
        """All that can fail on this rank alone does before anything is exchanged."""
        rates = self._rates()
        if not self._progress.are_wrappers_checked:
            check_wrappers(member.tensors)
            self._progress.are_wrappers_checked = True
        self._take_changes(member)
        scale = self._scale(member)
        for tensor in member.tensors:
            _check_gradient(tensor, scale)
        if member.node is not None:
            self._check_beta1()  # the library would refuse it behind calls that the other processes wait for
            for tensor in member.tensors:
                tensor.whole_gradient()  # likewise
            if member.backward is None:
                member.node.reduce_gradients(scale)
            elif not member.backward.has_begun:
                member.backward.begin(rates)
            scale = None
        member.clipping = self._clipping_of_step(member)
        own: List[Optional[torch.Tensor]] = []  # those that are unscaled and clipped
        preparation = member.preparation
        if scale is not None or member.clipping is not None:
            own = [tensor.own_gradient() for tensor in member.tensors]
            preparation.prepare(own, scale, member.clipping)
            self._progress.grad_norm = preparation.norm
        norms = preparation.report
        try:
            report = _exchange(member, rates)
            return report if norms is None else _with_times_of(norms, report)
        except InvalidArgumentError:
            preparation.step_was_refused(own)
            raise
        finally:
            if member.shown_steps != member.session.steps:  # also when Ctrl-C came behind it
                self._show_step(member)

    @torch.no_grad()
    def _show_step(self, member: Member) -> None:
        """Gives parameters the values of a step that all ranks have taken."""
        member.preparation = Preparation()
        after_step(member.tensors, None if member.node is None else member.node.gather_parameters)
        member.shown_steps = member.session.steps

    @torch.no_grad()
    def _take_changes(self, member: Member) -> None:
        """Takes over the program's changes of parameters since the last step. Errors as before_step()'s."""
        if member.shown_steps != member.session.steps:  # Ctrl-C came before that was done
            self._show_step(member)
        why_lost = self._why_changes_are_lost()
        for tensor in member.tensors:
            tensor.before_step(why_lost)

    def _scale(self, member: Member) -> Optional[torch.Tensor]:
        """The loss's scale, or None if gradients need not be divided by it: without a GradScaler, and
        when the GradScaler has divided them itself."""
        scale: Optional[torch.Tensor] = getattr(self, "grad_scale", None)
        backward = member.backward
        if (
            scale is not None
            and backward is not None
            and (backward.has_begun or member.node is not None)
        ):
            raise RuntimeError(
                "gradients were sent during the backward pass as the GradScaler has scaled them; "
                "make the optimizer with overlap=False"
            )
        return scale

    def _rates_of_backward(self) -> Optional[List[Rates]]:
        """Returns None where step() has to join another job first."""
        return None if self._trains_others() else self._rates()

    def _rates(self) -> List[Rates]:
        self._check_groups()
        return [_rates(group) for group in self.param_groups]

    def _check_options_of_groups(self) -> None:
        """Refuses what nobody reads; but for False and None, which torch.optim's groups have."""
        for g, group in enumerate(self.param_groups):
            for name in sorted(group.keys() - self.defaults.keys() - _OF_OTHERS):
                if group[name] is not None and group[name] is not False:
                    raise ValueError(
                        f"group {g} has {name} {_shown(group[name])}, which nothing here reads; wanted "
                        f"{', '.join(self.defaults)}. What your own code reads there can be added "
                        "once the optimizer is made"
                    )

    def _check_groups(self) -> None:
        for g, group in enumerate(self.param_groups):
            for name in ("lr", "weight_decay"):
                if not 0 <= _number(group[name]) < math.inf:
                    raise ValueError(
                        f"group {g} has {name} {group[name]!r}, wanted a finite number, 0 or more"
                    )
            beta1, beta2 = _two_numbers(group["betas"])
            if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 < _number(group["eps"]) < 1):
                raise ValueError(
                    f"group {g} has betas {group['betas']!r} and eps {group['eps']!r}; wanted two "
                    "betas in [0, 1) and eps in (0, 1)"
                )

    def _check_beta1(self) -> None:
        """Checks beta1 as the library does in each step, but before others wait, and names the arguments."""
        codecs = {
            argument: _abi.CODEC_NAMES[int(self._options[option])]
            for option, argument in self._gradient_codecs.items()
        }
        losing = [f"{argument} {name!r}" for argument, name in codecs.items() if name != "fp32"]
        first = self.param_groups[0]["betas"][0]
        for g, group in enumerate(self.param_groups):
            if losing and group["betas"][0] != first:
                raise ValueError(
                    f"group {g} has betas[0] {group['betas'][0]}, and group 0 has {first}: with "
                    f"{' and '.join(losing)} it must be the same in all groups; it may differ "
                    f"with {' and '.join(codecs)} 'fp32'"
                )


def _shown(value: object) -> str:
    """In an error, where a tensor's numbers would hide the rest."""
    if isinstance(value, torch.Tensor):
        return f"of {type(value).__name__}{list(value.shape)}"
    return repr(value)


def _with_times_of(norms: StepReport, report: StepReport) -> StepReport:
    """A step's, with what the exchange of its norms took."""
    return dataclasses.replace(
        report,
        kernels_s=report.kernels_s + norms.kernels_s,
        wire_s=report.wire_s + norms.wire_s,
        wait_s=report.wait_s + norms.wait_s,
    )


def _leave_quietly(member: Union[Session, Clipping, None]) -> None:
    """While an error is raised that matters more."""
    if member is not None:
        with contextlib.suppress(SignpostError):
            member.leave()


def _leave_both(member: Member) -> None:
    if member.backward is not None:
        member.backward.remove_hooks()
        member.backward = None
    try:
        member.session.leave()
    finally:
        if member.clipping is not None:
            member.clipping.leave()


def _exchange(member: Member, rates: List[Rates]) -> StepReport:
    def zeros_for(tensor: TrainedTensor) -> torch.Tensor:
        return member.zeros.at_least(tensor.values.numel())

    if member.backward is not None and member.backward.has_begun:
        member.backward.check(rates)
        return member.backward.finish(zeros_for)
    gradients = []
    for tensor in member.tensors:
        gradient = tensor.gradient()
        gradients.append(zeros_for(tensor) if gradient is None else gradient)
    return member.session.step([gradient.data_ptr() for gradient in gradients], rates)


def _of_pytorch(name: str) -> Callable[..., Any]:
    """Returns that method of torch.optim.Optimizer, without what keeps PyTorch's compiler away from it: to
    do so, it imports the compiler, which takes 1.5 s in a program that compiles nothing."""
    method: Callable[..., Any] = getattr(torch.optim.Optimizer, name)
    return method if "torch._dynamo" in sys.modules else getattr(method, "__wrapped__", method)


def _complete_state_dict(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> None:
    """A hook behind state_dict(), before those of the program."""
    assert isinstance(optimizer, JobOptimizer)
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    by_parameter = dict(zip(parameters, ids))
    state = optimizer._current_state()
    to_state_dict(state, state_dict, by_parameter, optimizer._world(), optimizer._shards)


def _take_state(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """A hook before load_state_dict(), behind those of the program: torch.optim would cast all
    numbers to the type of their parameter."""
    assert isinstance(optimizer, JobOptimizer)
    loading = optimizer._progress_of_original().loading
    assert loading is not None
    loading.state_dict = state_dict
    return {**state_dict, "state": {}}


def _directory(name: str, directory: Union[str, bytes, "os.PathLike[str]"]) -> str:
    """Returns its absolute path. Raises ValueError for an empty one, which is the working directory to
    most functions, and as a rule a variable that is not set."""
    path = os.fsdecode(directory)
    if not path:
        raise ValueError(f"{name} is empty, wanted a directory")
    return os.path.abspath(path)


def _check_gradient(tensor: TrainedTensor, scale: Optional[torch.Tensor]) -> None:
    tensor.check_gradient()
    gradient = tensor.parameter.grad
    if scale is not None and gradient is not None and gradient.dtype == torch.float16:
        raise ValueError(
            f"the gradient of {tensor.name} is float16 and would underflow when the loss's scale "
            "is divided out; keep parameters in float32, under autocast"
        )


def _number(value: Any) -> float:
    """Converts a value to float; returns NaN, which is in no range, if it is no number, such as text."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _two_numbers(values: Any) -> Tuple[float, float]:
    """Converts two values; returns NaN for both if there are not two."""
    try:
        first, second = map(_number, values)
    except (TypeError, ValueError):
        return math.nan, math.nan
    return first, second


def _rates(group: Dict[str, Any]) -> Rates:
    beta1, beta2 = map(float, group["betas"])
    return Rates(
        float(group["lr"]), float(group["weight_decay"]), beta1, beta2, float(group["eps"])
    )


def _set(options: Options, name: str, value: object) -> None:
    """Sets one that is passed on to the library as it is.

    Raises:
        TypeError: it is of another type.
    """
    try:
        setattr(options, name, value)
    except TypeError:
        is_flag = (name, ctypes.c_uint8) in Options._fields_
        wanted = "True or False" if is_flag else "a number"
        raise TypeError(f"{name} is {value!r}, wanted {wanted}") from None
