"""Lightning with an optimizer of Signpost:

    import signpost.torch as signpost
    from signpost.integrations.lightning import SignpostStrategy

    class Model(LightningModule):
        def configure_optimizers(self):
            return signpost.OneBitAdam(self.parameters(), lr=1e-3)

    trainer = Trainer(strategy=SignpostStrategy(), devices=2)

and start the script by `signpost run -n 2 -- python3 script.py`, or by torchrun with
SIGNPOST_AGGREGATORS. Clip by the optimizer's max_grad_norm, which clips all ranks' gradients alike.
Bits, norms and waiting go to the trainer's loggers. Needs lightning 2.
"""

import contextlib
from typing import Any, Dict, List, Mapping

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

import signpost.torch
from signpost.integrations._own_parts import (
    load_own_part,
    metrics_of,
    original,
    own_part_of,
    with_own_part,
)


class SignpostStrategy(DDPStrategy):
    """DDPStrategy, whose ranks keep their gradients for Signpost to average. It takes DDPStrategy's
    arguments but for those of communication hooks."""

    strategy_name = "signpost"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        hooks = [name for name in kwargs if name.startswith("ddp_comm_")]
        if hooks:
            raise TypeError(f"SignpostStrategy has a hook of its own: leave out {', '.join(hooks)}")
        super().__init__(*args, **kwargs)

    def setup_environment(self) -> None:
        super().setup_environment()
        signpost.torch.init()  # behind torch.distributed, whose backend the strategy has chosen

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            original(optimizer)  # or says that it is none
        if trainer.gradient_clip_val:
            raise ValueError(
                f"gradient_clip_val={trainer.gradient_clip_val} clips each rank by itself: give the "
                f"optimizer max_grad_norm={trainer.gradient_clip_val} instead"
            )

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, signpost.torch.local_gradients)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        module = self.lightning_module
        if module is not None:
            trainer, step = module.trainer, module.trainer.global_step
            every = trainer.log_every_n_steps
            if every and (step + 1) % every == 0:
                for logger in trainer.loggers:
                    logger.log_metrics(metrics_of(original(optimizer)), step=step)
        return output

    def save_checkpoint(
        self, checkpoint: Dict[str, Any], filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)
        if signpost.torch.rank() > 0 and checkpoint.get("optimizer_states"):
            for path, optimizer in zip(self._own_parts(filepath), self.optimizers):
                self.checkpoint_io.save_checkpoint(own_part_of(original(optimizer)), path)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if signpost.torch.rank() > 0:
            for path in self._own_parts(filepath):
                self.checkpoint_io.remove_checkpoint(path)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        self._loaded = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with contextlib.ExitStack() as inside:
            for path, optimizer in zip(self._own_parts(self._loaded), self.optimizers):
                own = load_own_part(path)
                inside.enter_context(with_own_part(original(optimizer), own))
            super().load_optimizer_state_dict(checkpoint)

    def _own_parts(self, filepath: Any) -> List[str]:
        """Returns a path for each optimizer."""
        rank = signpost.torch.rank()
        return [f"{filepath}.signpost_{i}_rank_{rank}" for i in range(len(self.optimizers))]
