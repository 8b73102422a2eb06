"""What the PyTorch optimizers share: a job, whose steps all ranks take together."""

import contextlib
import ctypes
import dataclasses
import math
import operator
import os
import warnings
import weakref
from itertools import chain, zip_longest
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, Union, overload

import torch

from signpost import (
    InvalidArgumentError,
    Options,
    Rates,
    Session,
    SignpostError,
    StepReport,
    _abi,
    world,
)
from signpost.torch._clipping import Clipping, GlobalClipping, Preparation
from signpost.torch._device import session_of
from signpost.torch._overlap import Backward
from signpost.torch._tensors import (
    TrainedTensor,
    Zeros,
    after_step,
    trained_tensors,
    without_names,
)

Parameters = Union[
    Iterable[torch.Tensor], Iterable[Tuple[str, torch.Tensor]], Iterable[Dict[str, Any]]
]


# What else a param group may have when an optimizer is made: what schedulers and PyTorch put there.
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


class JobOptimizer(torch.optim.Optimizer):
    """An optimizer that is a job. Which one, and with which options, its classes say."""

    report: Optional[StepReport] = None  # of the last step
    # Of the last step, with max_grad_norm: sqrt(mean over ranks of ||gradient||^2) before clipping;
    # NaN if it was not finite.
    grad_norm: Optional[float] = None
    _clipping: Optional[Clipping] = None
    _session: Optional[Session] = None
    _overlap = False
    _backward: Optional[Backward] = None  # with overlap
    # How gradients travel: arguments of the class, by the library's options.
    _gradient_codecs = {"warm_up_codec": "warm_up_codec", "variance_codec": "variance_codec"}

    def __init__(
        self,
        job: Options,
        params: Parameters,
        lr: float,
        betas: Tuple[float, float],
        eps: float,
        weight_decay: float,
        resume: Optional[str],
        overlap: bool,
        max_grad_norm: Optional[float],
        **options: float,
    ) -> None:
        """`job` is the world's next, taken before anything can fail: ranks count alike, also one
        that cannot make what the others make."""
        self._names: Dict[torch.Tensor, str] = {}
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(without_names(params, self._names), defaults)
        self._options = options
        if max_grad_norm is not None and not _number(max_grad_norm) > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm!r}, wanted a positive number")
        if max_grad_norm is not None and overlap:
            raise ValueError(
                "max_grad_norm needs all gradients before any is sent: use it with overlap=False"
            )
        self._max_grad_norm = max_grad_norm
        self._overlap = overlap
        self._check_options_of_groups()
        self._check_groups()
        self._check_beta1()
        self._join(job, resume)

    @property
    def steps(self) -> int:
        """Steps that were taken, those before a resume included: the next one's number."""
        return self._joined().steps

    @property
    def is_synchronised(self) -> bool:
        """Whether all ranks have the same parameters: always, but between synchronisations of
        ZeroOneAdam. Only then they are worth validating, or saving as the model."""
        return self._joined().is_synchronised

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
                gradients that are there, or with new ones. What was unscaled or clipped is not so
                again; new gradients are, by the norm of the first try.
            SignpostError: the parameters may be partly stepped; resume from the newest checkpoint.
            RuntimeError: a parameter has moved in memory, or its gradient is elsewhere or of
                another shape; one that was frozen when the optimizer was made has a gradient, or
                one that was frozen later has none; param_groups have other parameters than when the
                optimizer was made; the program has changed one where that would be lost, which is
                with a node's worker, and between synchronisations (what is written through `.data`
                or NumPy is not seen, and lost there); with overlap, gradients or rates
                are not those of the backward pass any more.
            ValueError: a group's lr, weight decay, betas or eps are no numbers or out of range.
                Nothing was sent.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        session = self._joined()
        was_synchronised = session.is_synchronised
        try:
            self.report = report = self._take_step()
        except BaseException:
            del self.grad_scale
            raise
        if report.skipped_rounds > 0:
            what = "chunks were not stepped, on all ranks"
            if not (was_synchronised and session.is_synchronised):
                what = "blocks take no part in it, on this rank"
            warnings.warn(
                f"step {report.step}: the gradient of rank {report.skipped_by_rank} is "
                f"not finite; {report.skipped_rounds} {what}"
            )
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """With overlap, backward passes inside send nothing: their gradients accumulate, and the
        backward pass after it sends them. Without, it does nothing and is not needed."""
        if self._backward is None:
            yield
            return
        backward, was_paused = self._backward, self._backward.paused
        backward.paused = True
        try:
            yield
        finally:
            backward.paused = was_paused

    def checkpoint(self, directory: str) -> None:
        """Saves the whole job as it is now: parameters, and all ranks' and aggregators' errors.

        All ranks call it after the same step, with a directory that all of them see and that
        belongs to this optimizer. The newest two checkpoints in it are kept. `resume=directory`
        goes on from the newest, with the same bits as if the job had not ended.

        Raises:
            SignpostError: the checkpoints before stay, and training may go on, but after a
                DataLossError. ResourceExhaustedError: the disk is full, on this rank or another.
            RuntimeError: of the parameters, as from step().
        """
        session = self._joined()
        self._take_changes()
        session.checkpoint(os.path.abspath(directory))

    def state_dict(self) -> Dict[str, Any]:
        """The param groups and this rank's share of the job: values, moments, its error, and some
        of the aggregators' errors. 16 bytes for each parameter (OneBitLamb: 20, ZeroOneAdam between
        two synchronisations: 24), and 4 / n more with n ranks.

        Every rank saves its own, after the same step, and loads its own: the errors of other ranks
        are not in it. For one that rank 0 saves for all ranks there is checkpoint().

        Raises:
            SignpostError: an aggregator did not give its part; training may go on, but after a
                DataLossError.
            RuntimeError: of the parameters, as from step().
        """
        session = self._joined()
        self._take_changes()
        state = torch.frombuffer(session.save_state(), dtype=torch.uint8)
        return {**super().state_dict(), "signpost": state}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Goes on as after the step of state_dict(), with the same bits. Called by all ranks.

        The model's parameters get their values of then too. What has begun here since is left, once
        all ranks have loaded theirs; until then aggregators hold both.

        Raises:
            ValueError: it is no state of an optimizer of Signpost, or of another model; or a
                parameter that is trained is frozen now.
            FailedPreconditionError: it is another rank's (another node's, if there is a worker for
                each); or of another tensor or option, named.
            DataLossError: it is damaged.
            DeadlineExceededError: names the ranks that did not come, perhaps because theirs are
                wrong. After each of these nothing has changed; but the other ranks wait for this
                one, until join_timeout_s is over. Which file is to be loaded, all agree on before.
        """
        self._joined()
        job = world().next_job()  # before anything can fail, as in the constructor
        if "signpost" not in state_dict:
            raise ValueError("this is not the state_dict() of an optimizer of Signpost")
        for tensor in self._tensors:
            if not tensor.parameter.requires_grad:
                raise ValueError(
                    f"{tensor.name} has requires_grad=False, and is among what is trained; call "
                    "its requires_grad_() before load_state_dict()"
                )
        before = super().state_dict()
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        try:
            self._join(job, None, state_dict["signpost"])
        except BaseException:
            super().load_state_dict(before)
            raise

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Only at construction: what a job trains is settled when its ranks join."""
        if self._session is not None:
            raise RuntimeError(
                "an optimizer of Signpost cannot get more parameters; make a new one with all"
            )
        super().add_param_group(param_group)

    def parameters_crc32c(self) -> int:
        """A checksum over all values that are trained: equal on all ranks after every step, if
        `is_synchronised`. RuntimeErrors of the parameters as from step()."""
        session = self._joined()
        self._take_changes()
        return session.parameters_crc32c()

    def leave(self) -> None:
        """Ends this rank's part in the job. It is done anyway when the process ends."""
        if self._backward is not None:
            self._backward.remove_hooks()
            self._backward = None
        _leave_both(self._session, self._clipping)

    def _join(
        self, options: Options, resume: Optional[str], state: Optional[torch.Tensor] = None
    ) -> None:
        tensors = trained_tensors(self.param_groups, self._names)
        if not tensors:
            raise ValueError("no parameter requires a gradient; there is nothing to train")
        for name, value in self._options.items():
            _set(options, name, value)
        if resume is not None:
            options.resume = os.path.abspath(resume).encode()
        if state is not None:
            if state.numel() == 0:
                raise ValueError("the saved state is empty")
            options.state = state = state.to("cpu").contiguous()  # lives as long as the options
            options.resume_state = state.data_ptr()
            options.resume_state_bytes = state.numel()
        resumes = resume is not None or state is not None
        clipping: Optional[Clipping] = None
        with contextlib.ExitStack() as undo:
            if resume is None:
                clipping = self._new_clipping(options)
                undo.callback(_leave_quietly, clipping)
            parameters = [tensor.as_session_parameter() for tensor in tensors]
            session = session_of(tensors[0].gpu, options, parameters)
            undo.callback(_leave_quietly, session)
            # It has changed parameters, so otherwise it joins last. But ranks that have found another
            # checkpoint are refused by then, and when they have been started again, those that wait
            # for them must wait for that same join.
            if resume is not None:
                clipping = self._new_clipping(options)
            undo.pop_all()
        options.state = None  # large, and loaded
        old_session, old_clipping, old_backward = self._session, self._clipping, self._backward
        self._session, self._clipping, self._tensors = session, clipping, tensors
        self._preparation = Preparation()
        self._shown_steps: Optional[int] = None  # of those taken, which parameters have
        self._zeros = Zeros(tensors[0].values.device)
        self._in_groups = [list(group["params"]) for group in self.param_groups]
        self._frozen = [p for p in chain(*self._in_groups) if not p.requires_grad]
        if old_backward is not None:
            old_backward.remove_hooks()
        if self._overlap:
            self._backward = Backward(session, tensors, weakref.WeakMethod(self._rates))
        try:
            _leave_both(old_session, old_clipping)
        except SignpostError as error:
            warnings.warn(f"the job that was there before could not be left: {error}")
        if world().world_size > 1 or resumes or session.returned:
            self._show_step()
        self._shown_steps = session.steps
        if not resumes and not session.returned:
            return
        if session.resume_warnings:
            warnings.warn(session.resume_warnings)
        for group in self.param_groups:
            # What learning-rate schedulers ask for when they do not begin at step 0.
            group.setdefault("initial_lr", group["lr"])

    def _new_clipping(self, options: Options) -> Optional[Clipping]:
        if self._max_grad_norm is None:
            return None
        return GlobalClipping(options, self._max_grad_norm)

    def _clipping_of_step(self) -> Optional[Clipping]:
        """That of the step that is to be taken."""
        return self._clipping

    def _joined(self) -> Session:
        if self._session is None:
            raise RuntimeError("this optimizer is a copy, without a job; make a new one")
        return self._session

    def _why_changes_are_lost(self) -> Optional[str]:
        """Of parameters, by the program, since the last step; None: they are not."""
        if world().node is not None:
            return (
                "The node's worker has the values, and the change would be lost: change "
                "parameters, or load a model, before the optimizer is made"
            )
        if not self.is_synchronised:
            return (
                "It was between two synchronisations, of which the next would undo it: change "
                "parameters after a step with is_synchronised, and load a model before its optimizer"
            )
        return None

    @torch.no_grad()
    def _take_step(self) -> StepReport:
        """All that can fail on this rank alone does before anything is exchanged."""
        rates = self._rates()
        self._check_parameters()
        self._take_changes()
        scale = self._scale()
        for tensor in self._tensors:
            _check_gradient(tensor, scale)
        self._clipping = self._clipping_of_step()
        own: List[Optional[torch.Tensor]] = []  # those that are unscaled and clipped
        if scale is not None or self._clipping is not None:
            own = [tensor.own_gradient() for tensor in self._tensors]
            self._preparation.prepare(own, scale, self._clipping)
            self.grad_norm = self._preparation.norm
        norms = self._preparation.report
        try:
            report = self._exchange(rates)
            return report if norms is None else _with_times_of(norms, report)
        except InvalidArgumentError:
            self._preparation.step_was_refused(own)
            raise
        finally:
            if self._shown_steps != self._joined().steps:  # also when Ctrl-C came behind it
                self._show_step()

    @torch.no_grad()
    def _show_step(self) -> None:
        """What is done here once all ranks have taken it."""
        self._preparation = Preparation()
        after_step(self._tensors)
        self._shown_steps = self._joined().steps

    def _exchange(self, rates: List[Rates]) -> StepReport:
        if self._backward is not None and self._backward.has_begun:
            self._backward.check(rates)
            return self._backward.finish(self._zeros_for)
        gradients = [self._gradient(tensor) for tensor in self._tensors]
        return self._joined().step([gradient.data_ptr() for gradient in gradients], rates)

    @torch.no_grad()
    def _take_changes(self) -> None:
        """Of the parameters, by the program, since the last step. Errors as before_step()'s."""
        if self._shown_steps != self._joined().steps:  # Ctrl-C came before that was done
            self._show_step()
        why_lost = self._why_changes_are_lost()
        for tensor in self._tensors:
            tensor.before_step(why_lost)

    def _scale(self) -> Optional[torch.Tensor]:
        """The loss's scale, or None if gradients need not be divided by it: without a GradScaler, and
        when the GradScaler has divided them itself."""
        scale: Optional[torch.Tensor] = getattr(self, "grad_scale", None)
        if scale is not None and self._backward is not None and self._backward.has_begun:
            raise RuntimeError(
                "gradients were sent during the backward pass as the GradScaler has scaled them; "
                "make the optimizer with overlap=False"
            )
        return scale

    def _gradient(self, tensor: TrainedTensor) -> torch.Tensor:
        gradient = tensor.gradient()
        return self._zeros_for(tensor) if gradient is None else gradient

    def _zeros_for(self, tensor: TrainedTensor) -> torch.Tensor:
        return self._zeros.at_least(tensor.values.numel())

    def _check_parameters(self) -> None:
        groups = [group["params"] for group in self.param_groups]
        for g, (now, before) in enumerate(zip_longest(groups, self._in_groups, fillvalue=())):
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                raise RuntimeError(
                    f"the parameters of group {g} are not those with which the optimizer was made, "
                    "and new ones would not be trained; make a new optimizer with all"
                )
        if any(parameter.grad is not None for parameter in self._frozen):
            raise RuntimeError(
                "a parameter that was frozen when the optimizer was made has a gradient; make a "
                "new optimizer to train it"
            )
        for tensor in self._tensors:
            if tensor.parameter.requires_grad or tensor.parameter.grad is not None:
                continue
            raise RuntimeError(
                f"{tensor.name} was frozen after the optimizer was made, and its momentum would go "
                "on to move it; make a new optimizer without it"
            )

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
        """As the library does in each step, but before others wait, and with the arguments' names."""
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


def _leave_both(session: Optional[Session], clipping: Optional[Clipping]) -> None:
    try:
        if session is not None:
            session.leave()
    finally:
        if clipping is not None:
            clipping.leave()


def _check_gradient(tensor: TrainedTensor, scale: Optional[torch.Tensor]) -> None:
    tensor.check_gradient()
    gradient = tensor.parameter.grad
    if scale is not None and gradient is not None and gradient.dtype == torch.float16:
        raise ValueError(
            f"the gradient of {tensor.name} is float16 and would underflow when the loss's scale "
            "is divided out; keep parameters in float32, under autocast"
        )


def _number(value: Any) -> float:
    """NaN, which is in no range, of what is none; such as text, which 1e-3 is in YAML."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _two_numbers(values: Any) -> Tuple[float, float]:
    """Likewise, where there are not two."""
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
