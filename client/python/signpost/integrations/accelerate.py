"""Hugging Face's accelerate with an optimizer of Signpost:

    import signpost.torch as signpost
    from signpost.integrations.accelerate import Accelerator  # instead of accelerate's own

    accelerator = Accelerator()
    model.to(accelerator.device)  # before the optimizer is made
    optimizer = signpost.OneBitAdam(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

and start the script by `signpost run -n 2 -- python3 script.py`, or by `accelerate launch` with
SIGNPOST_AGGREGATORS. `accelerator.clip_grad_norm_(model.parameters(), 1.0)` may stay: the optimizer
clips by the norm of all ranks' gradients. Needs accelerate 1.
"""

import contextlib
import math
import os
from typing import Any, List, Optional

import accelerate
import torch

import signpost.torch
from signpost.integrations._own_parts import (
    load_own_part,
    original,
    own_part_of,
    with_own_part,
)


class Accelerator(accelerate.Accelerator):
    """accelerate's, with its arguments. save_state() and load_state() keep what each rank has alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        signpost.torch.init()  # behind torch.distributed, whose backend accelerate has chosen

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        prepared: torch.nn.Module = super().prepare_model(model, *args, **kwargs)
        if isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
            prepared.register_comm_hook(None, signpost.torch.local_gradients)
        return prepared

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Leaves it to the optimizer's step(), which clips by the norm over all ranks.

        Returns:
            the norm of the step before; NaN before the first.

        Raises:
            ValueError: an optimizer was made with another max_grad_norm.
        """
        norm: Optional[float] = None
        for prepared in self._optimizers:
            optimizer = original(prepared)
            if norm_type != 2 or optimizer.max_grad_norm != max_norm:
                raise ValueError(
                    f"gradients are to be clipped at a norm of {max_norm}, of each rank by itself, and the "
                    f"optimizer has max_grad_norm={optimizer.max_grad_norm}: make it with "
                    f"max_grad_norm={max_norm}, which clips those of all ranks alike"
                )
            norm = optimizer.grad_norm
        return torch.tensor(math.nan if norm is None else norm)

    def save_state(self, output_dir: Optional[str] = None, *args: Any, **kwargs: Any) -> Any:
        location = super().save_state(output_dir, *args, **kwargs)
        if signpost.torch.rank() > 0:
            for path, optimizer in zip(self._own_parts(location), self._optimizers):
                torch.save(own_part_of(original(optimizer)), path)
        return location

    def load_state(self, input_dir: Optional[str] = None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as inside:

            def find_own_parts(_: Any, directory: str) -> None:
                for path, optimizer in zip(self._own_parts(directory), self._optimizers):
                    own = load_own_part(path)
                    inside.enter_context(with_own_part(original(optimizer), own))

            hook = self.register_load_state_pre_hook(find_own_parts)
            inside.callback(hook.remove)
            return super().load_state(input_dir, *args, **kwargs)

    def _own_parts(self, directory: Any) -> List[str]:
        """Returns a path for each optimizer."""
        rank = signpost.torch.rank()
        names = [f"signpost_{i}_rank_{rank}.pt" for i in range(len(self._optimizers))]
        return [os.path.join(directory, name) for name in names]
