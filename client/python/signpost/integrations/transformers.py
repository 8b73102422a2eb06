"""Hugging Face's Trainer with an optimizer of Signpost:

    import signpost.torch as signpost
    from signpost.integrations.transformers import Trainer  # instead of transformers' own

    trainer = Trainer(..., optimizer_cls_and_kwargs=(signpost.OneBitAdam, {}))
    trainer.train()

and start the script by `signpost run -n 2 -- python3 script.py`, or by torchrun with
SIGNPOST_AGGREGATORS. What TrainingArguments say counts: learning_rate, adam_beta1, adam_beta2,
adam_epsilon, weight_decay, and max_grad_norm, by which gradients of all ranks are clipped alike.
Bits, norms and waiting are logged with Trainer's other metrics. Needs transformers 5.
"""

import os
from typing import Any, Dict, Optional

import torch
import transformers

import signpost.torch
from signpost.integrations._own_parts import (
    load_own_part,
    metrics_of,
    original,
    own_part_of,
    with_own_part,
)

_Trainer: Any = object  # that of the class derived from it


class SignpostMixin(_Trainer):
    """For subclasses of Trainer: `class MyTrainer(SignpostMixin, transformers.Trainer)`."""

    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        signpost.torch.init()  # behind torch.distributed, whose backend Trainer has chosen
        if self.args.device.type == "cpu":
            # With several ranks on CPUs the device is "cpu:0", and torch.load() of a checkpoint, which
            # gets it as map_location, fails.
            self.args.__dict__["_setup_devices"] = torch.device("cpu")

    def create_optimizer(self, model: Optional[torch.nn.Module] = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            if self.optimizer_cls_and_kwargs is None:
                raise ValueError(
                    "no optimizer of Signpost is named: give Trainer an optimizer_cls_and_kwargs, such "
                    "as (signpost.torch.OneBitAdam, {})"
                )
            kind, own = self.optimizer_cls_and_kwargs
            args = self.args
            of_args = {
                "lr": args.learning_rate,
                "betas": (args.adam_beta1, args.adam_beta2),
                "eps": args.adam_epsilon,
                "max_grad_norm": args.max_grad_norm or None,
                "params": self._named_groups(self.model if model is None else model),
            }
            self.optimizer = kind(**{**of_args, **own})
        norm = original(self.optimizer).max_grad_norm or 0.0
        if norm != self.args.max_grad_norm:
            raise ValueError(
                f"TrainingArguments have max_grad_norm={self.args.max_grad_norm}, and the optimizer "
                f"max_grad_norm={norm or None}, by which gradients are clipped: give both the same; 0 in "
                "TrainingArguments is None"
            )
        return self.optimizer

    def _named_groups(self, model: torch.nn.Module) -> Any:
        decays = set(self.get_decay_parameter_names(model))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [(name, p) for name, p in trained if name in decays],
                "weight_decay": self.args.weight_decay,
            },
            {
                "params": [(name, p) for name, p in trained if name not in decays],
                "weight_decay": 0.0,
            },
        ]
        return [group for group in groups if group["params"]]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        if is_wrapped and not model._comm_hooks:  # train() may be called again
            model.register_comm_hook(None, signpost.torch.local_gradients)
        return model, loader

    # Trainer's norms are those of each rank's own gradients. step() clips by that of all ranks.
    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        return None

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> None:
        return None

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        norm = original(self.optimizer).grad_norm
        super()._maybe_log_save_evaluate(tr_loss, norm, *args, **kwargs)

    def log(self, logs: Dict[str, float], start_time: Optional[float] = None) -> None:
        if "loss" in logs:
            logs = {**logs, **metrics_of(original(self.optimizer))}
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if signpost.torch.rank() > 0:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(own_part_of(original(self.optimizer)), self._own_part(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        own = None if checkpoint is None else load_own_part(self._own_part(checkpoint))
        with with_own_part(original(self.optimizer), own):
            super()._load_optimizer_and_scheduler(checkpoint)

    @staticmethod
    def _own_part(directory: str) -> str:
        return os.path.join(directory, f"signpost_rank_{signpost.torch.rank()}.pt")


class Trainer(SignpostMixin, transformers.Trainer):
    """Trainer with an optimizer of Signpost; its arguments."""
