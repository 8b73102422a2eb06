"""Adam, 1-bit Adam, 1-bit LAMB and 0/1 Adam as PyTorch optimizers."""

import operator
import os
from typing import TYPE_CHECKING, Dict, Literal, Optional, Tuple, Union

from signpost import Codec, Options, _abi, world
from signpost._codec import codec_options
from signpost.torch._clipping import Clipping, GlobalClipping, OwnClipping
from signpost.torch._job_optimizer import JobOptimizer, Member, Parameters
from signpost.torch._state import State

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _count(name: str, value: int, least: int, most: int = 2**63 - 1) -> int:
    """The option as the library takes it.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        wanted = "a whole number"
        if isinstance(value, float) and 0 < value < 1 and "freeze_step" in name:
            wanted += f" of steps, such as int({value} * total_steps)"
        raise TypeError(f"{name} is {value!r}, wanted {wanted}") from None
    if number < least:
        raise ValueError(f"{name} is {number}, wanted at least {least}")
    if number > most:
        raise ValueError(f"{name} is {number}, wanted at most {most}")
    return number


def _count_or_auto(name: str, value: Union[int, str], least: int) -> int:
    """Returns the option as the library takes it. Errors as those of _count()."""
    if not isinstance(value, str):
        return _count(name, value, least)
    if value != "auto":
        raise ValueError(f'{name} is {value!r}, wanted a number or "auto"')
    return _abi.AUTO


def _freeze_step(freeze_step: Union[int, Literal["auto"]]) -> int:
    return _count_or_auto("freeze_step", freeze_step, least=1)


def _variance_options(
    interval: Union[int, Literal["auto"], None],
    warm_up_codec: Union[str, Codec, None],
    variance_codec: Union[str, Codec, None],
    bias_correction: bool,
    compat: Optional[str],
) -> Tuple[int, Dict[str, Union[str, Codec]]]:
    """Returns variance_refresh_interval as the library takes it, and both codecs.

    What is None depends on the others: the variance follows if it can, and gradients travel in int8.
    """
    if interval is None:
        interval = "auto" if bias_correction and compat is None else 0
    small = "int8" if compat is None else "fp32"
    if warm_up_codec is None:
        warm_up_codec = small
    if variance_codec is None:
        # Without refreshes nothing travels in it.
        variance_codec = "fp32" if interval == 0 else small
    codecs = {"warm_up_codec": warm_up_codec, "variance_codec": variance_codec}
    return _count_or_auto("variance_refresh_interval", interval, least=0), codecs


def _compat(compat: Optional[str], **of_choice: Optional[float]) -> Dict[str, float]:
    """The options as the library takes them; of those that are None it has defaults.

    Raises:
        ValueError: there is no such `compat`, or it leaves no choice in an option that is given.
    """
    given = {name: value for name, value in of_choice.items() if value is not None}
    if compat is None:
        return given
    if compat != "deepspeed":
        raise ValueError(f'compat is {compat!r}, wanted "deepspeed" or None')
    if given:
        raise ValueError(f'with compat="deepspeed" there is no choice of {" and ".join(given)}')
    return {"as_deepspeed": 1}


class Adam(JobOptimizer):
    """Adam on the mean of all ranks' gradients, which travel in fp32, or in another codec.

    As torch.optim.AdamW, step by step: weight decay is decoupled (arXiv:1711.05101), not L2.
    """

    _gradient_codecs = {"warm_up_codec": "codec"}

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        codec: Union[str, Codec] = "fp32",
        max_grad_norm: Optional[float] = None,
        resume: Union[str, "os.PathLike[str]", None] = None,
        resume_with_other_world_size: bool = False,
        overlap: bool = False,
        replicate_mesh: Optional["DeviceMesh"] = None,
        shard_mesh: Optional["DeviceMesh"] = None,
        name: Optional[str] = None,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        fused: Optional[bool] = None,
    ) -> None:
        """Joins the job; blocks until all ranks have. Parameters get the values that rank 0's have.

        Args:
            params: tensors, pairs of a name and a tensor as model.named_parameters() has, by which
                errors then call them, or param groups of either. Groups may differ in what follows,
                and may change it between steps, alike on all ranks. Names are equal on all ranks,
                and in what was saved.
            lr: learning rate.
            betas, eps: of the moments' averages and the denominator, as in torch.optim.Adam.
            weight_decay: x -= lr * weight_decay * x.
            bias_correction: of the moments, for their beginning at zero, as in torch.optim.Adam.
            codec: how gradients travel, both ways: "fp32", "bf16", "fp16", "int8", "int4" or
                "onebit", or a signpost.Codec. What all but fp32 lose is in errors, for later steps,
                and betas[0] must then be the same in all groups.
            max_grad_norm: multiply all ranks' gradients, in place, by the same
                min(1, max_grad_norm / (grad_norm + 1e-6)), where grad_norm is
                sqrt(mean over ranks of ||gradient||^2), over all parameters. That is at least the
                norm of the mean gradient, so it bounds it; for a single rank it is
                clip_grad_norm_. One number is exchanged for it in each step. Where grad_norm is
                not finite, or above 7e13, nothing is clipped.
            resume: directory of checkpoints to go on from: parameters and optimizer get what the
                newest whole one has.
            resume_with_other_world_size: allow one of another number of ranks, each of which then
                takes the mean of all ranks' errors. load_state_dict() then allows another number of
                ranks or shards, too, each of which takes the error of the rank of its number.
            overlap: send gradients during the backward pass, as they become ready; step() waits
                for the rest. The same bits. Learning rates are then set before backward(),
                gradients stay as they are until step(), and all backward passes of a step but the
                last are inside no_sync(). Ranks may differ in it, unless parameters are sharded.
            shard_mesh: for a model that every process has whole: the processes of this machine. They
                average their gradients by torch.distributed, and each keeps and steps its part of
                every parameter, the rows that fully_shard() would give it (docs/sharding.md).
                Parameters begin with the values of the machine's first process.
            replicate_mesh: with shard_mesh, or where parameters are DTensors, which fully_shard() makes:
                the processes, one on each machine, that step the same part. None: they follow from
                the meshes of all processes. `rank` and `ranks` here mean these processes; norms are
                of the whole gradient.
            name: of the optimizer, where a program has several: the same on all ranks, and no other
                optimizer's. None: all ranks make their optimizers in the same order.
            foreach, capturable, fused: for callers of torch.optim.AdamW, and without effect: each
                step is one call of the library.

        Raises:
            FailedPreconditionError: names the tensor or option in which this rank differs from the
                others.
            InvalidArgumentError: names a parameter of rank 0 that is not finite, or says why the GPU
                cannot be used.
            DeadlineExceededError: names the ranks that did not come.
            NotFoundError, DataLossError: there is no checkpoint, or none that is whole.
            TypeError: names a parameter that is not fp32, bf16 or fp16, or neither on the CPU nor
                on a CUDA GPU; or two that are not on the same.
            UnavailableError, ResourceExhaustedError: the GPU has failed, or has too little
                memory free: 12 bytes for each parameter, and some.
        """
        job = world().next_job(name)
        codecs = codec_options(codec=codec)
        super().__init__(
            job,
            name,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            resume,
            overlap,
            max_grad_norm,
            replicate_mesh,
            shard_mesh,
            bias_correction=bias_correction,
            warm_up_codec=codecs.pop("codec"),  # whose end never comes
            **codecs,
            resume_with_other_world_size=resume_with_other_world_size,
        )


class OneBitAdam(JobOptimizer):
    """1-bit Adam (arXiv:2102.02888): Adam until the variance is frozen, then one bit per parameter
    each way.

    From the freeze on the momentum's signs travel. What they leave out is kept as error, on ranks
    and aggregators, and added to the next step's. The frozen variance follows the gradients: it is
    brought up to date ever more rarely, and at once where it no longer fits them. With
    bias_correction no update after the freeze is larger than 10 learning rates, weight decay
    apart. `OneBitAdam(params, lr)` alone is meant to be right.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        freeze_step: Union[int, Literal["auto"]] = "auto",
        variance_refresh_interval: Union[int, Literal["auto"], None] = None,
        variance_floor: Optional[float] = None,
        gamma: Optional[float] = None,
        codec: Union[str, Codec] = "onebit",
        warm_up_codec: Union[str, Codec, None] = None,
        variance_codec: Union[str, Codec, None] = None,
        max_grad_norm: Optional[float] = None,
        resume: Union[str, "os.PathLike[str]", None] = None,
        resume_with_other_world_size: bool = False,
        overlap: bool = False,
        replicate_mesh: Optional["DeviceMesh"] = None,
        shard_mesh: Optional["DeviceMesh"] = None,
        name: Optional[str] = None,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        fused: Optional[bool] = None,
        compat: Optional[Literal["deepspeed"]] = None,
    ) -> None:
        """As Adam, with:

        Args:
            freeze_step: number of dense steps before, at least 1. "auto": at least 64 (for a beta2
                below 0.97: 2 / (1 - beta2)), and until no learning rate has risen for
                1 / (1 - beta1) steps and the variance fits the gradients of the last 32: their mean
                square is between 1/16 and 3/2 of it. Where the variance follows, a number is the
                first step at which that is looked at, every 32 steps.
            variance_refresh_interval: after the freeze gradients travel in every so many steps
                instead of the momentum, and bring the variance up to date; at least 2. "auto", or
                None: the variance follows (docs/algorithms.md). It is refreshed in four steps after
                each quarter of the steps so far, in eight where a tensor's momentum is too large
                for its variance, and in 64 from a tensor's first gradient on, each time behind a
                step that sends the momentum in variance_codec. 0: never. None is 0 without
                bias_correction, or with compat.
            variance_floor: where the variance is frozen or brought up to date, it is raised to this
                fraction of its tensor's mean. None: 0.01.
            gamma: a block's scale is gamma times its root mean square; in (0, 1.6). None: 1.35.
            codec: how the momentum travels from the freeze step on, both ways: "onebit", "int4",
                "int8", "bf16", "fp16" or "fp32", or a signpost.Codec.
            warm_up_codec: how gradients travel before; likewise. None: "int8", with compat "fp32".
                Unless both it and variance_codec are "fp32", betas[0] must be the same in all
                groups.
            variance_codec: how gradients travel that refresh the variance; likewise. They are apart
                from the errors, which take what they lose. None: "int8" where there are any, with
                compat "fp32".
            compat: "deepspeed": as DeepSpeed's optimizer of that name, to compare with. Each tensor
                has one scale, its root mean square; there is neither bias correction nor a
                variance_floor; the first step counts, changes nothing, and its gradients are lost;
                freeze_step is at least 2. What is not followed is in docs/algorithms.md: one worker
                compresses too, what is not finite is left out, and checkpoints keep all errors.
                For comparison, not for speed: a tensor is compressed by one thread.

        Raises:
            ValueError: gamma or variance_floor is given with compat.
        """
        interval, codecs = _variance_options(
            variance_refresh_interval, warm_up_codec, variance_codec, bias_correction, compat
        )
        job = world().next_job(name)
        super().__init__(
            job,
            name,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            resume,
            overlap,
            max_grad_norm,
            replicate_mesh,
            shard_mesh,
            bias_correction=bias_correction,
            freeze_step=_freeze_step(freeze_step),
            variance_refresh_interval=interval,
            **_compat(compat, variance_floor=variance_floor, gamma=gamma),
            **codec_options(codec=codec, **codecs),
            resume_with_other_world_size=resume_with_other_world_size,
        )


class OneBitLamb(JobOptimizer):
    """1-bit LAMB (arXiv:2104.06069), for large batches: LAMB (arXiv:1904.00962) until
    `freeze_step`, then one bit per parameter each way. It trains no DTensors.

    In LAMB each tensor's learning rate is multiplied by its trust ratio, ||x|| / ||update||. At the
    freeze step the moving average of these ratios is frozen with the variance, and from then on
    multiplied by a factor that makes up for how old the variance is. Parameters move once the whole
    step's answers are there: nothing of it overlaps the exchange.
    """

    _state_fields = (*JobOptimizer._state_fields, "fresh_exp_avg_sq")

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        freeze_step: Union[int, Literal["auto"]],
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        variance_refresh_interval: Union[int, Literal["auto"], None] = None,
        variance_floor: Optional[float] = None,
        gamma: Optional[float] = None,
        codec: Union[str, Codec] = "onebit",
        warm_up_codec: Union[str, Codec, None] = None,
        variance_codec: Union[str, Codec, None] = None,
        max_grad_norm: Optional[float] = None,
        resume: Union[str, "os.PathLike[str]", None] = None,
        resume_with_other_world_size: bool = False,
        overlap: bool = False,
        name: Optional[str] = None,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        fused: Optional[bool] = None,
        compat: Optional[Literal["deepspeed"]] = None,
    ) -> None:
        """As OneBitAdam, with:

        Args:
            params: on a GPU each takes 16 bytes there.
            freeze_step: as OneBitAdam's, but about 30% of all steps: with 15% a small transformer
                ended 6% behind LAMB (docs/convergence-onebit_lamb.md).
            lr: before it is multiplied by a tensor's trust ratio.
            weight_decay: update += weight_decay * x, of which the trust ratio takes account.
            min_coeff, max_coeff: a trust ratio is clipped to these. It is 1 where a norm is zero.
            coeff_beta: of the moving average. 1 / (1 - coeff_beta) should be below freeze_step.
            factor_min, factor_max: the factor of one-bit steps is clipped to these.
            factor_threshold: the factor changes by at most this fraction from step to step.
            variance_refresh_interval: as OneBitAdam's; the factor then begins at 1 again, and the mean
                of trust ratios that was frozen stays.
            compat: as OneBitAdam's; the mean of trust ratios that is frozen is not corrected for
                its start either. Each tensor has its own scale, where DeepSpeed has one for all.
        """
        interval, codecs = _variance_options(
            variance_refresh_interval, warm_up_codec, variance_codec, bias_correction, compat
        )
        job = world().next_job(name)
        super().__init__(
            job,
            name,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            resume,
            overlap,
            max_grad_norm,
            bias_correction=bias_correction,
            lamb=1,
            freeze_step=_freeze_step(freeze_step),
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            coeff_beta=coeff_beta,
            factor_max=factor_max,
            factor_min=factor_min,
            factor_threshold=factor_threshold,
            variance_refresh_interval=interval,
            **_compat(compat, variance_floor=variance_floor, gamma=gamma),
            **codec_options(codec=codec, **codecs),
            resume_with_other_world_size=resume_with_other_world_size,
        )


class ZeroOneAdam(JobOptimizer):
    """0/1 Adam (arXiv:2202.06009): fewer than one bit per parameter and step, and fewer rounds.

    Before `var_freeze_step` steps that update the variance are in `variance_codec`, ever fewer of
    them; in the others gradients travel in one bit. From it on ranks take steps of their own, and
    synchronise in one bit after ever more of them.

    Between two synchronisations ranks have different parameters: validate the model, or save it,
    after a step with `is_synchronised` True. checkpoint() and state_dict() may come after any step,
    and what follows has the same bits.
    """

    _gradient_codecs = {"codec": "codec", "variance_codec": "variance_codec"}
    _state_fields = (
        *JobOptimizer._state_fields,
        "anchor",
        "local_value",
        "local_exp_avg",
        "local_sum",
    )

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: Optional[int] = None,
        local_step_clipper: int = 16,
        variance_floor: Optional[float] = None,
        gamma: Optional[float] = None,
        codec: Union[str, Codec] = "onebit",
        variance_codec: Union[str, Codec, None] = None,
        max_grad_norm: Optional[float] = None,
        resume: Union[str, "os.PathLike[str]", None] = None,
        resume_with_other_world_size: bool = False,
        overlap: bool = False,
        replicate_mesh: Optional["DeviceMesh"] = None,
        shard_mesh: Optional["DeviceMesh"] = None,
        name: Optional[str] = None,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        fused: Optional[bool] = None,
        compat: Optional[Literal["deepspeed"]] = None,
    ) -> None:
        """As Adam, with:

        Args:
            params: on a GPU each takes 20 bytes there.
            betas: betas[0] must be the same in all groups, unless both codecs are "fp32".
            var_freeze_step: number of steps before the variance is frozen and local steps begin, at
                least 1. Best behind the learning rate's highest point: about a fifth of all steps.
            var_update_scaler: the variance is updated in every step for so many updates, then in
                every second for as many, in every fourth, and so on. In runs of 1000 to 1500 steps
                128 was as good as Adam, and 16 ended 2.4% behind on a small BERT
                (docs/convergence-zero_one_adam.md).
            local_step_scaler: from var_freeze_step on ranks synchronise in every step for so many
                steps, then in every second for as many, in every fourth, and so on. None or 0: as many
                as var_freeze_step. More, where the loss suffers.
            local_step_clipper: the most steps from one synchronisation to the next.
            variance_floor: variances count as at least this fraction of their tensor's mean, once
                gradients have travelled in one bit, and when they are frozen. None: 0.01.
            gamma: a block's scale is gamma times its root mean square; in (0, 1.6). None: 1.35.
            codec: how the momentum travels at synchronisations, and gradients before that update no
                variance, both ways: "onebit", "int4", "int8", "bf16", "fp16" or "fp32", or a
                signpost.Codec.
            variance_codec: how gradients travel that update the variance; likewise. They are apart
                from the errors, which take what they lose. None: "int8", with compat "fp32".
            max_grad_norm: before var_freeze_step as Adam's. From it on nothing is exchanged for it:
                each rank's gradients are multiplied by that factor with its own gradient's norm as
                grad_norm, also in steps that synchronise. In a job with a round deadline it is so
                from the beginning.
            overlap: as Adam's; local steps send nothing, during the backward pass or after it.
            compat: as OneBitAdam's, and with DeepSpeed's schedule: the variance is updated, and
                ranks synchronise, in steps whose number (from 1) is a multiple of the interval, and
                the first stage has a step more than var_freeze_step. Each update of the variance
                has a weight of 1 - betas[1], whatever the interval, and errors are dropped at the
                freeze. Weight decay is in no momentum, as without.
        """
        job = world().next_job(name)
        scaler = 0  # the library's None: as many as var_freeze_step
        if local_step_scaler is not None:
            scaler = _count("local_step_scaler", local_step_scaler, least=0)
        own = _compat(compat, variance_floor=variance_floor, gamma=gamma)
        if variance_codec is None:
            variance_codec = "int8" if compat is None else "fp32"
        self._freeze_step = _count("var_freeze_step", var_freeze_step, least=1)
        if compat is not None:
            self._freeze_step += 1  # the first stage's steps, of which DeepSpeed has one more
        super().__init__(
            job,
            name,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            resume,
            overlap,
            max_grad_norm,
            replicate_mesh,
            shard_mesh,
            bias_correction=bias_correction,
            zero_one=1,
            freeze_step=self._freeze_step,
            var_update_scaler=_count(
                "var_update_scaler", var_update_scaler, least=1, most=2**32 - 1
            ),
            local_step_scaler=scaler,
            local_step_clipper=_count(
                "local_step_clipper", local_step_clipper, least=1, most=2**32 - 1
            ),
            **own,
            **codec_options(codec=codec, variance_codec=variance_codec),
            resume_with_other_world_size=resume_with_other_world_size,
        )

    def _why_none_joins(self, state: State) -> Optional[str]:
        return "0/1 Adam updates the variances of all parameters in the same steps"

    def _new_clipping(self, options: Options) -> Optional[Clipping]:
        # Once others exchange nothing any more, a rank that comes back could not join them.
        if self._max_grad_norm is None:
            return None
        if options.min_workers > 0:
            return OwnClipping(self._max_grad_norm, self._shards)
        return GlobalClipping(options, self._max_grad_norm, self._shards)

    def _clipping_of_step(self, member: Member) -> Optional[Clipping]:
        if isinstance(member.clipping, GlobalClipping) and self.steps >= self._freeze_step:
            assert self._max_grad_norm is not None
            member.clipping.leave()
            return OwnClipping(self._max_grad_norm, self._shards)
        return member.clipping
