"""The exchange of gradients during the backward pass."""

import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Any, Callable, List, Optional, Sequence, Set

import torch

from signpost import Rates, Session, StepReport
from signpost.torch import _device
from signpost.torch._node_exchange import NodeExchange
from signpost.torch._tensors import TrainedTensor

_OTHERWISE = (
    "Otherwise this step cannot be finished: go on from the newest checkpoint, on all ranks"
)


@dataclass(frozen=True)
class _Sent:
    """A gradient as it was when the session got it."""

    of_parameter: Optional[torch.Tensor]
    version: int
    values: torch.Tensor  # what the session reads, until the step is finished


class Backward:
    """Gives a session each gradient as soon as the backward pass has accumulated it."""

    def __init__(
        self,
        session: Session,
        tensors: Sequence[TrainedTensor],
        rates: "weakref.WeakMethod[Callable[[], Optional[List[Rates]]]]",
        node: Optional[NodeExchange],
    ) -> None:
        """`rates` tells those of the step that begins, by a method of what keeps this object, which
        must not keep that. None: nothing is sent during this backward pass. `node` has gradients reduced
        within the machine before they are sent, bucket by bucket."""
        self.paused = False
        self._lock = threading.Lock()
        self._session = session
        self._tensors = tensors
        self._rates_now = rates
        self._rates: Optional[List[Rates]] = None  # of the step that has begun
        self._sent: List[Optional[_Sent]] = [None] * len(tensors)
        self._node = node
        self._arrived: Set[int] = set()  # gradients of this step, sent or not
        self._next_bucket = 0  # of the node's
        self._made: List[torch.cuda.Event] = (
            []
        )  # when gradients that wait for their bucket are made
        # Hooks must not keep alive what keeps them.
        this = weakref.ref(self)
        self._hooks: List[Any] = []
        for index, tensor in enumerate(tensors):
            register: Any = tensor.parameter.register_post_accumulate_grad_hook  # is not typed
            self._hooks.append(register(_call_on_gradient(this, index)))

    @property
    def has_begun(self) -> bool:
        return self._rates is not None

    def check(self, rates: List[Rates]) -> None:
        """Refuses to finish the step that has begun at other rates, or if a gradient has changed
        since it was sent.

        Raises:
            RuntimeError: says what has changed, and what to do.
        """
        if rates != self._rates:
            raise RuntimeError(
                f"{_difference(self._rates or [], rates)}, and its step had begun with the backward "
                "pass; with overlap=True set rates before backward(), and let schedulers step after "
                "optimizer.step()"
            )
        for tensor, sent in zip(self._tensors, self._sent):
            if sent is None:
                continue
            gradient = tensor.parameter.grad
            version = -1 if gradient is None else gradient._version
            if gradient is not sent.of_parameter or version != sent.version:
                raise RuntimeError(
                    f"the gradient of {tensor.name} has changed since it was sent during the "
                    "backward pass: to clip, scale or clear gradients before step(), make the "
                    f"optimizer with overlap=False. {_OTHERWISE}"
                )

    def begin(self, rates: List[Rates]) -> None:
        """Begins the step where no backward pass has."""
        self._session.begin_step(rates)
        self._rates = rates

    def finish(self, zeros: Callable[[TrainedTensor], torch.Tensor]) -> StepReport:
        """Sends what has not been sent, `zeros` for what there is no gradient of, and takes the
        step. Call check() before."""
        kept = []  # until the step is finished
        if self._node is not None:
            for tensor in self._tensors:
                tensor.whole_gradient()  # refuses what the machine's other processes would wait for
            while self._next_bucket < len(self._node.buckets):
                self._send_next_bucket(self._node)
        for index, tensor in enumerate(self._tensors):
            if self._sent[index] is None and not self._send(index):
                kept.append(zeros(tensor))
                self._session.gradient_ready(index, kept[-1].data_ptr())
        steps = self._session.steps
        try:
            return self._session.finish_step()
        finally:
            if self._session.steps != steps:  # also when Ctrl-C came behind it
                self._forget()

    def _forget(self) -> None:
        """No step has begun."""
        self._rates = None
        self._sent = [None] * len(self._tensors)
        self._arrived.clear()
        self._next_bucket = 0

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, index: int) -> None:
        with self._lock:  # several threads may run backward passes
            self._take(index)

    def _take(self, index: int) -> None:
        if index in self._arrived:
            raise RuntimeError(
                f"{self._tensors[index].name} got a gradient again after one was sent, before "
                "step(): to accumulate those of several backward passes, do all but the last "
                "inside `with optimizer.no_sync():`, and so those of another network's loss that "
                "passes through this one, as in a GAN; for a module that is checkpointed more than "
                "once, use use_reentrant=False. If a backward pass was interrupted, step() alone "
                f"takes the step with the gradients that are there. {_OTHERWISE}"
            )
        if self.paused:
            return
        if self._rates is None:
            rates_now = self._rates_now()
            if rates_now is None:  # the optimizer goes while a thread of its own computes
                return
            rates = rates_now()
            if rates is None:
                return
            self.begin(rates)
        self._arrived.add(index)
        if self._node is None:
            self._send(index)
            return
        gpu = self._tensors[index].gpu
        if gpu is not None:
            self._made.append(_device.current_stream(gpu).record_event())
        buckets = self._node.buckets
        while self._next_bucket < len(buckets) and self._arrived.issuperset(
            buckets[self._next_bucket]
        ):
            self._send_next_bucket(self._node)

    @torch.no_grad()
    def _send_next_bucket(self, node: NodeExchange) -> None:
        """All processes of the machine have the same buckets, in the same order."""
        for event in self._made:  # gradients may have been made on other streams
            event.wait()
        self._made.clear()
        node.reduce_bucket(self._next_bucket)
        for index in node.buckets[self._next_bucket]:
            self._send(index)
        self._next_bucket += 1

    @torch.no_grad()
    def _send(self, index: int) -> bool:
        """Whether there is a gradient."""
        tensor = self._tensors[index]
        values = tensor.gradient()
        if values is None:
            return False
        gradient = tensor.parameter.grad
        # A process without the gradient has the others' share of it.
        version = -1 if gradient is None else gradient._version
        self._sent[index] = _Sent(gradient, version, values)
        self._session.gradient_ready(index, values.data_ptr())
        return True


def _difference(before: List[Rates], now: List[Rates]) -> str:
    """Names the first group and rate that differ."""
    for g, (old, new) in enumerate(zip(before, now)):
        for name, was in asdict(old).items():
            if getattr(new, name) != was:
                return f"{name} of group {g} was {was} and is {getattr(new, name)}"
    return f"there were {len(before)} param groups and are {len(now)}"


def _call_on_gradient(
    backward: "weakref.ref[Backward]", index: int
) -> Callable[[torch.Tensor], None]:
    def call(_: torch.Tensor) -> None:
        this = backward()
        if this is not None:
            this._on_gradient(index)

    return call
