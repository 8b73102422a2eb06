"""A training job's connection to its aggregators, for memory of any framework."""

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, Dict, Sequence, Tuple

from signpost import _abi
from signpost._joining import join_in_background
from signpost._leaving import Membership
from signpost._state import SavedState


@dataclass(frozen=True)
class Parameter:
    """One fp32 tensor that is trained, in the memory of the host or of options.gpu."""

    name: str
    shape: Tuple[int, ...]  # in elements, none of them 0; () is a scalar
    address: int  # of the first of its values, which lie row-major without gaps
    owner: object  # keeps that memory
    group: int = 0  # index into a step's rates
    gradient_type: str = "fp32"  # of all its gradients; on a GPU "bf16" and "fp16" too
    whole_elements: int = 0  # of the tensor of which this is a shard; 0: it is whole


@dataclass(frozen=True)
class Rates:
    """What may change from step to step, per parameter group."""

    learning_rate: float
    weight_decay: float = 0.0  # decoupled: x -= learning_rate * weight_decay * x
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8  # while the variance is frozen a new one waits for the next refresh


@dataclass(frozen=True)
class StepReport:
    """What a step was, and what it cost. Seconds of this step; bytes since joining."""

    step: int  # the last one that was taken
    steps_caught_up: int  # taken before it in the same call, because the others had gone on
    late_rounds: int  # of single chunks, that closed without this worker's gradient
    codec: str  # in which its numbers travelled: "fp32", "onebit" and so on; "none": nothing did
    # Chunks that a gradient that is not finite kept out of this step; in 0/1 Adam's intervals blocks
    # too, on this rank alone, on a GPU perhaps of a step before.
    skipped_rounds: int
    skipped_by_rank: int  # of the first one, with skipped_rounds > 0
    kernels_s: float  # compressing and applying
    wire_s: float  # blocked on transfer and aggregation
    wait_s: float  # blocked because another worker was late
    sent_bits: float  # of payloads, by parameter and step, on average since joining
    sent_bytes: int  # as the kernel counted them on the sockets
    received_bytes: int

    @property
    def one_bit(self) -> bool:
        return self.codec == "onebit"


def report_of(report: _abi.Report) -> StepReport:
    """As the library has filled it in."""
    names = (field[0] for field in _abi.Report._fields_)
    fields: Dict[str, Any] = {name: getattr(report, name) for name in names}
    fields["codec"] = _abi.CODEC_NAMES[report.codec]
    return StepReport(**fields)


class Session(Membership):
    """One worker's membership in a job. It has one call at a time: another thread's gets a RuntimeError
    that names both. `steps` and `is_synchronised` may be read beside one.

    After every step the parameters are byte-identical on all workers, if `is_synchronised`.

    With `options.gpu`, CUDA's number of one, all addresses are of its memory. Work is put on a
    stream, set_stream()'s: gradients are read and parameters written in its order, in part after
    calls have returned. The bits are those of the host.
    """

    def __init__(self, options: _abi.Options, parameters: Sequence[Parameter]) -> None:
        """Joins the job; blocks until all ranks have.

        With `options.start_from_rank_0`, as World.next_job() has it, parameters get the values that
        they have on rank 0; otherwise they must have the same on all ranks. With `options.resume`
        they get those of the newest whole checkpoint in that directory, and with
        `options.resume_state` those that save_state() of this rank had. What makes parameters on a
        GPU must be done before.

        Raises:
            ValueError: for another gradient_type.
            FailedPreconditionError: names the tensor or option in which this rank differs.
            DeadlineExceededError: names the ranks that did not come.
            InvalidArgumentError: names a parameter of rank 0 that is not finite, or says why the GPU
                cannot be used.
            NotFoundError, DataLossError: there is no checkpoint, or none that is whole; or the
                saved state is damaged.
            UnavailableError, ResourceExhaustedError: the GPU has failed, or has too little
                memory free: 12 bytes for each parameter, with 1-bit LAMB 16, with 0/1 Adam 20,
                and some. Nothing was sent.
        """
        self._parameters = list(parameters)  # whose memory the library has borrowed
        super().__init__()
        self._steps, self._is_synchronised = 0, True
        # Held to close the handle, and to look at it beside another thread's call.
        self._closing = threading.RLock()
        self._handle = join_in_background(
            "",
            options,
            (_abi.Parameter * len(parameters))(*map(_parameter, parameters)),
            len(parameters),
            borrowed=self._parameters,
        )

    @property
    def steps(self) -> int:
        """Steps that were done, those before a resume included: the next one's number."""
        self._look()
        return self._steps

    @property
    def is_synchronised(self) -> bool:
        """Whether all workers have the same parameters: always, but between 0/1 Adam's
        synchronisations. Only then they are worth validating, or saving as the model."""
        self._look()
        return self._is_synchronised

    @property
    def resume_warnings(self) -> str:
        """A line for each newer checkpoint that was damaged; empty as a rule."""
        warnings: bytes = _abi.library.signpost_resume_warnings(self._joined())
        return warnings.decode(errors="replace")

    @property
    def returned(self) -> bool:
        """Whether this worker came to a job that had gone on without its rank, in the place of one
        that is gone. Parameters and optimizer state are then those of the others, and `steps` begins
        where they are."""
        return bool(_abi.library.signpost_returned(self._joined(), None))

    @property
    def lost_error_norm(self) -> float:
        """The most that the Euclidean norm can be of what the worker before had not sent yet, and
        which is lost; NaN if that is not known, and 0 for one that has not `returned`."""
        norm = ctypes.c_double(0)
        _abi.library.signpost_returned(self._joined(), ctypes.byref(norm))
        return norm.value

    def set_stream(self, stream: int) -> None:
        """With `options.gpu`: later calls put their work on this stream of it, a cudaStream_t,
        behind all that they have put on the one before. 0, the default one, at first.

        Raises:
            InvalidArgumentError: it is another GPU's; nothing has changed.
        """
        with self._calls.enter("set_stream"):
            _abi.call("set_stream", self._joined(), stream)

    def step(self, gradients: Sequence[int], rates: Sequence[Rates]) -> StepReport:
        """Takes one optimizer step on the mean of all workers' gradients.

        Args:
            gradients: for each parameter the address of its gradient, of the parameter's size and
                gradient_type, row-major; only read, and during the call, but on a GPU by 0/1 Adam's
                local steps: those read them in the stream's order, perhaps later.
            rates: for each group.

        Raises:
            InvalidArgumentError: nothing was sent, the step can be tried again.
            SignpostError: the parameters may be partly stepped, and the session can only leave.
        """
        report = _abi.Report()
        self._call(
            "step",
            (ctypes.c_void_p * len(gradients))(*gradients),
            len(gradients),
            *_rates(rates),
            ctypes.byref(report),
        )
        return report_of(report)

    def begin_step(self, rates: Sequence[Rates]) -> None:
        """Begins a step whose gradients are sent as they come; it can only be finished.

        Then gradient_ready() for each parameter, in any order, and finish_step(): the same bits as
        step(). Parameters change in finish_step() only.

        Raises:
            FailedPreconditionError: a step has begun already.
        """
        self._call("begin_step", *_rates(rates))

    def gradient_ready(self, parameter: int, gradient: int) -> None:
        """Sends what this gradient completes, without waiting for the network.

        Args:
            parameter: its index.
            gradient: address of its gradient, as in step(); it stays, unchanged, until
                finish_step() has returned.

        Raises:
            FailedPreconditionError: it came twice, or no step has begun; nothing has changed.
            SignpostError: as from step().
        """
        self._call("gradient_ready", parameter, gradient)

    def finish_step(self) -> StepReport:
        """Waits for the rest of the step that has begun, and takes it. Errors as from step().

        Raises:
            FailedPreconditionError: a gradient is missing; the step stays open.
        """
        report = _abi.Report()
        self._call("finish_step", ctypes.byref(report))
        return report_of(report)

    def checkpoint(self, directory: str) -> None:
        """Saves the whole job, as it is after the last step, in a directory that all ranks see.

        Every rank calls it after the same step. Returns once the checkpoint is committed; the
        newest two are kept. If it fails, those before stay, and training may go on, but after a
        DataLossError.
        """
        self._call("checkpoint", directory.encode())

    def save_state(self) -> bytearray:
        """This rank's share of such a checkpoint: 16 bytes for each parameter (with 1-bit LAMB 20,
        with 0/1 Adam between two synchronisations 24), and 4 / n more with n ranks.

        No rank waits for another; but a job goes on only from what all ranks have saved after the
        same step, each rank from its own.
        """
        state = self.save_state_in_parts()  # which has the memory
        address, size = state.bytes
        saved = bytearray(size)
        ctypes.memmove((ctypes.c_char * size).from_buffer(saved), address, size)
        return saved

    def save_state_in_parts(self) -> SavedState:
        """The same, field by field."""
        state = ctypes.c_void_p()
        self._call("save_state", ctypes.byref(state))
        return SavedState(state)

    def parameters_crc32c(self) -> int:
        """CRC-32C over all parameters: equal on all ranks after every step, if
        `is_synchronised`."""
        with self._calls.enter("parameters_crc32c"):
            return int(_abi.library.signpost_parameters_crc32c(self._joined()))

    def leave(self) -> None:
        """Ends the membership, for good. It is done anyway when the process ends; if by an
        exception, unless `signpost run` or torchrun has started it, or the exception is a SignpostError.
        Does nothing the second time."""
        with self._calls.enter("leave"):
            if self._handle is None:
                return
            self._check_process()
            self._look()
            try:
                _abi.call("leave", self._handle)
            finally:
                with self._closing:
                    handle, self._handle = self._handle, None
                    _abi.library.signpost_close(handle)
                self._parameters.clear()

    def _call(self, function: str, *arguments: object) -> None:
        """Calls what puts work on the stream."""
        with self._calls.enter(function):
            _abi.call(function, self._joined(), *arguments)

    def _look(self) -> None:
        """Asks how far the session is; beside another thread's call as it was before that. Once it is left,
        it stays where it was."""
        self._check_process()
        with self._closing:
            if self._handle is not None:
                self._steps = int(_abi.library.signpost_steps(self._handle))
                self._is_synchronised = bool(_abi.library.signpost_is_synchronised(self._handle))

    def _joined(self) -> ctypes.c_void_p:
        self._check_process()
        if self._handle is None:
            raise RuntimeError("this worker has left its job")
        return self._handle


def _parameter(parameter: Parameter) -> _abi.Parameter:
    if parameter.gradient_type not in _abi.GRADIENT_TYPES:
        raise ValueError(
            f"gradient_type of parameter {parameter.name} is {parameter.gradient_type!r}, wanted "
            f"one of {', '.join(_abi.GRADIENT_TYPES)}"
        )
    return _abi.Parameter(
        parameter.name.encode(),
        (ctypes.c_uint64 * len(parameter.shape))(*parameter.shape),
        len(parameter.shape),
        parameter.address,
        parameter.group,
        _abi.GRADIENT_TYPES[parameter.gradient_type],
        parameter.whole_elements,
    )


def _rates(rates: Sequence[Rates]) -> Tuple[Any, int]:
    """An array of them, and its length."""
    groups = [
        _abi.Rates(g.learning_rate, g.weight_decay, g.beta1, g.beta2, g.epsilon) for g in rates
    ]
    return (_abi.Rates * len(groups))(*groups), len(groups)
