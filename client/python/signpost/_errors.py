"""What can go wrong, one class for each gRPC status code that is worth telling apart."""

from typing import Dict, Optional, Type


class SignpostError(RuntimeError):
    """What libsignpost.so could not do; `code` is the gRPC status code.

    `exit_code` is what a program should end with because of it, so that launchers and clusters know
    whether to start it again: see docs/errors.md. After init() an error that nobody catches ends the
    process with it.
    """

    code = 2
    exit_code = 70

    def __init__(self, message: str, code: int = 2, exit_code: int = 70) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = exit_code


class InvalidArgumentError(SignpostError):
    """An argument, option or environment variable is wrong; nothing was sent."""


class DeadlineExceededError(SignpostError):
    """A rank or an aggregator did not come in time; the message names it."""


class NotFoundError(SignpostError):
    """There is no checkpoint to resume from."""


class ResourceExhaustedError(SignpostError):
    """Out of memory, or over a limit of the aggregator."""


class FailedPreconditionError(SignpostError):
    """This rank's model, options or step are not those of the job, or a member has left it."""


class UnavailableError(SignpostError):
    """An aggregator cannot be reached, or a GPU has failed."""


class DataLossError(SignpostError):
    """What was saved is damaged, or an aggregator has lost what it had promised to keep."""


_BY_CODE: Dict[int, Type[SignpostError]] = {
    3: InvalidArgumentError,
    4: DeadlineExceededError,
    5: NotFoundError,
    8: ResourceExhaustedError,
    9: FailedPreconditionError,
    14: UnavailableError,
    15: DataLossError,
}


_told: Dict[str, SignpostError] = {}  # by their texts


def will_be_told_by_another(error: SignpostError) -> None:
    """By a RuntimeError with its text in it, which is all that PyTorch keeps of what a future's
    callback raises."""
    text = str(error)
    if not text:  # would be in any other's
        return
    _told[text] = type(error)(text, error.code, error.exit_code)  # without what a traceback holds


def ours(error: Optional[BaseException]) -> Optional[SignpostError]:
    """The SignpostError that this is or tells of, if it is one."""
    if error is None or isinstance(error, SignpostError):
        return error
    return next((told for text, told in list(_told.items()) if text in str(error)), None)


def error_of(code: int, message: str, exit_code: int) -> SignpostError:
    return _BY_CODE.get(code, SignpostError)(message, code, exit_code)
