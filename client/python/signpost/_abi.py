"""The C ABI of libsignpost.so (client/signpost.h), by ctypes. That header is the manual."""

import ctypes
import signal
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Dict, List, Tuple

from signpost._errors import error_of

ABI = 22
AUTO = 2**64 - 2  # SIGNPOST_AUTO
NEVER = 2**64 - 1
CODECS = {"fp32": 1, "bf16": 2, "fp16": 11, "int8": 12, "int4": 13, "onebit": 3}
CUSTOM = 14
NONE = 0  # of a step's report
CODEC_NAMES = {NONE: "none", CUSTOM: "custom", **{number: name for name, number in CODECS.items()}}
FIELDS = 8  # SIGNPOST_FIELDS
GRADIENT_TYPES = {"fp32": 0, "bf16": 1, "fp16": 2}

_CANCELLED = 1
_LIBRARY = Path(__file__).with_name("libsignpost.so")
_ERROR_BYTES = 4096


# signpost_sum.
Sum = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(ctypes.c_double), c_size_t)


class Options(ctypes.Structure):
    """signpost_options."""

    _fields_ = [
        ("aggregators", c_char_p),
        ("node", c_char_p),
        ("tls_dir", c_char_p),
        ("token_file", c_char_p),
        ("job", c_char_p),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("join_timeout_s", ctypes.c_double),
        ("exchange_timeout_s", ctypes.c_double),
        ("failure_timeout_s", ctypes.c_double),
        ("round_deadline_s", ctypes.c_double),
        ("min_workers", c_uint32),
        ("gpu", ctypes.c_int32),
        ("block_elements", c_uint32),
        ("chunk_elements", c_uint32),
        ("threads", c_uint32),
        ("gamma", ctypes.c_float),
        ("variance_floor", ctypes.c_double),
        ("max_coeff", ctypes.c_double),
        ("min_coeff", ctypes.c_double),
        ("coeff_beta", ctypes.c_double),
        ("factor_max", ctypes.c_double),
        ("factor_min", ctypes.c_double),
        ("factor_threshold", ctypes.c_double),
        ("freeze_step", c_uint64),
        ("variance_refresh_interval", c_uint64),
        ("local_step_scaler", c_uint64),
        ("var_update_scaler", c_uint32),
        ("local_step_clipper", c_uint32),
        ("warm_up_codec", c_uint32),
        ("codec", c_uint32),
        ("variance_codec", c_uint32),
        ("bias_correction", ctypes.c_uint8),
        ("resume_with_other_world_size", ctypes.c_uint8),
        ("start_from_rank_0", ctypes.c_uint8),
        ("insecure", ctypes.c_uint8),
        ("lamb", ctypes.c_uint8),
        ("zero_one", ctypes.c_uint8),
        ("as_deepspeed", ctypes.c_uint8),
        ("codec_library", c_char_p),
        ("codec_options", c_char_p),
        ("resume", c_char_p),
        ("resume_state", c_void_p),
        ("resume_state_bytes", c_size_t),
        ("shards", c_uint32),
        ("sum_over_shards", Sum),
        ("sum_context", c_void_p),
    ]


class Parameter(ctypes.Structure):
    """signpost_parameter."""

    _fields_ = [
        ("name", c_char_p),
        ("shape", POINTER(c_uint64)),
        ("dimensions", c_size_t),
        ("values", c_void_p),
        ("group", c_uint32),
        ("gradient_type", c_uint32),
        ("whole_elements", c_uint64),
    ]


class Rates(ctypes.Structure):
    """signpost_rates."""

    _fields_ = [
        ("learning_rate", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("epsilon", ctypes.c_double),
    ]


class Report(ctypes.Structure):
    """signpost_report."""

    _fields_ = [
        ("step", c_uint64),
        ("steps_caught_up", c_uint64),
        ("late_rounds", c_uint32),
        ("codec", c_uint32),
        ("skipped_rounds", c_uint32),
        ("skipped_by_rank", c_uint32),
        ("kernels_s", ctypes.c_double),
        ("wire_s", ctypes.c_double),
        ("wait_s", ctypes.c_double),
        ("sent_bits", ctypes.c_double),
        ("sent_bytes", c_uint64),
        ("received_bytes", c_uint64),
    ]


class Numbers(ctypes.Structure):
    """signpost_numbers."""

    _fields_ = [("values", c_void_p), ("elements", c_size_t)]


# signpost_interrupt.
Interrupt = ctypes.CFUNCTYPE(c_int)

_ERROR: List[Any] = [c_char_p, c_size_t]

# By name without "signpost_": what it returns, and its arguments.
_FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "set_interrupt": (None, [Interrupt]),
    "set_thread_interrupt": (None, [Interrupt]),
    "has_cuda": (c_int, []),
    "exit_code": (c_int, [c_int]),
    "replace_exit_status": (None, [c_int, c_int]),
    "options_init": (None, [POINTER(Options)]),
    "rates_init": (None, [POINTER(Rates)]),
    "options_from_environment": (c_int, [POINTER(Options), *_ERROR]),
    "config_open": (c_int, [c_char_p, c_char_p, POINTER(c_void_p), *_ERROR]),
    "config_close": (None, [c_void_p]),
    "config_optimizer": (c_int, [c_void_p, POINTER(Options), POINTER(Rates), *_ERROR]),
    "config_optimizer_json": (c_int, [c_void_p, POINTER(c_char_p), *_ERROR]),
    "config_session": (c_char_p, [c_void_p, c_char_p]),
    "join": (
        c_int,
        [POINTER(Options), POINTER(Parameter), c_size_t, POINTER(c_void_p), *_ERROR],
    ),
    "step": (
        c_int,
        [
            c_void_p,
            POINTER(c_void_p),
            c_size_t,
            POINTER(Rates),
            c_size_t,
            POINTER(Report),
            *_ERROR,
        ],
    ),
    "set_stream": (c_int, [c_void_p, c_void_p, *_ERROR]),
    "begin_step": (c_int, [c_void_p, POINTER(Rates), c_size_t, *_ERROR]),
    "gradient_ready": (c_int, [c_void_p, c_size_t, c_void_p, *_ERROR]),
    "finish_step": (c_int, [c_void_p, POINTER(Report), *_ERROR]),
    "checkpoint": (c_int, [c_void_p, c_char_p, *_ERROR]),
    "checkpoint_step": (c_int, [c_char_p, POINTER(c_uint64), *_ERROR]),
    "save_state": (c_int, [c_void_p, POINTER(c_void_p), *_ERROR]),
    "state_data": (c_void_p, [c_void_p, POINTER(c_size_t)]),
    "free_state": (None, [c_void_p]),
    "state_description": (c_int, [c_void_p, POINTER(c_char_p), *_ERROR]),
    "state_field": (
        c_int,
        [c_void_p, c_size_t, c_uint32, c_void_p, POINTER(c_size_t), *_ERROR],
    ),
    "state_make": (
        c_int,
        [
            c_char_p,
            c_uint32,
            c_uint32,
            POINTER(Parameter),
            c_size_t,
            POINTER(Numbers),
            POINTER(c_void_p),
            *_ERROR,
        ],
    ),
    "steps": (c_uint64, [c_void_p]),
    "resume_warnings": (c_char_p, [c_void_p]),
    "returned": (c_int, [c_void_p, POINTER(ctypes.c_double)]),
    "is_synchronised": (c_int, [c_void_p]),
    "parameters_crc32c": (c_uint32, [c_void_p]),
    "leave": (c_int, [c_void_p, *_ERROR]),
    "close": (None, [c_void_p]),
    "reduction_join": (
        c_int,
        [
            POINTER(Options),
            c_char_p,
            c_uint32,
            ctypes.c_uint8,
            POINTER(Parameter),
            c_size_t,
            POINTER(c_void_p),
            *_ERROR,
        ],
    ),
    "reduction_set_stream": (c_int, [c_void_p, c_void_p, *_ERROR]),
    "reduce": (c_int, [c_void_p, POINTER(c_void_p), c_size_t, POINTER(Report), *_ERROR]),
    "reduction_leave": (c_int, [c_void_p, *_ERROR]),
    "reduction_close": (None, [c_void_p]),
}


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        raise ImportError(
            f"{error}. Signpost is installed from its wheel, which brings its libraries along: "
            "./signpost wheel"
        ) from error
    if library.signpost_abi() != ABI:
        raise ImportError(
            f"{_LIBRARY} has ABI {library.signpost_abi()}, wanted {ABI}: it is of another version "
            "of signpost; install the wheel again"
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"signpost_{name}")
        function.restype, function.argtypes = result, arguments
    return library


library = _load()


# Whether Ctrl-C was pressed since this was asked last: C all the way, as Python would raise
# KeyboardInterrupt in whatever Python code asks.
_CTRL_C = Interrupt(ctypes.pythonapi.PyOS_InterruptOccurred)
_NEVER = Interrupt(0)


def call(function: str, *arguments: object) -> None:
    """Calls signpost_<function> with `arguments` and room for a message, and raises its error; or
    KeyboardInterrupt, if that is what Ctrl-C does in this program, and it was pressed meanwhile."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    library.signpost_set_interrupt(_CTRL_C if raises else _NEVER)
    message = ctypes.create_string_buffer(_ERROR_BYTES)
    code = getattr(library, f"signpost_{function}")(*arguments, message, len(message))
    if code == _CANCELLED and raises:
        raise KeyboardInterrupt
    if code != 0:
        exit_code = library.signpost_exit_code(code)
        raise error_of(code, message.value.decode(errors="replace"), exit_code)
