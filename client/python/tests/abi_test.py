"""The Python side of the C ABI says what the header says."""

import ctypes
import re
from pathlib import Path

import pytest
from signpost import _abi, _errors, _session

HEADER = Path("client/signpost.h").read_text()

# As the header writes them.
C_TYPES = {
    ctypes.c_char_p: "const char*",
    ctypes.c_double: "double",
    ctypes.c_float: "float",
    ctypes.c_size_t: "size_t",
    ctypes.c_uint8: "uint8_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_void_p: "pointer",
    _abi.Sum: "signpost_sum",
    ctypes.POINTER(ctypes.c_uint64): "const uint64_t*",
}
C_TYPES_OF_8_BYTES = {"size_t", "uint64_t"}  # one type for ctypes


def header_fields(struct):
    """[(type, name), ...] of a struct of the header."""
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    body = re.search(r"typedef struct {([^}]*)} %s;" % struct, text)[1]
    return [tuple(field.rsplit(None, 1)) for field in body.split(";") if field.strip()]


@pytest.mark.parametrize(
    "struct, mirror",
    [
        ("signpost_options", _abi.Options),
        ("signpost_parameter", _abi.Parameter),
        ("signpost_rates", _abi.Rates),
        ("signpost_report", _abi.Report),
    ],
)
def test_struct_has_the_fields_of_the_header_in_their_order(struct, mirror):
    def same(c_type):
        if c_type in ("float*", "void*", "const void*"):
            return "pointer"
        return "8 bytes" if c_type in C_TYPES_OF_8_BYTES else c_type

    wanted = [(same(c_type.strip()), name) for c_type, name in header_fields(struct)]
    assert [(same(C_TYPES[c_type]), name) for name, c_type in mirror._fields_] == wanted


def test_functions_are_those_of_the_header():
    declared = set(re.findall(r"SIGNPOST_API [^(;]*?signpost_(\w+)\(", HEADER))
    assert set(_abi._FUNCTIONS) | {"abi"} == declared


def test_functions_take_as_many_arguments_as_in_the_header():
    for name, (_, arguments) in _abi._FUNCTIONS.items():
        declared = re.search(r"signpost_%s\(([^)]*)\)" % name, HEADER)[1]
        wanted = [] if declared == "void" else declared.split(",")
        assert len(arguments) == len(wanted), name


def test_abi_number_is_that_of_the_header():
    assert f"#define SIGNPOST_ABI {_abi.ABI}\n" in HEADER


def header_enum(first):
    """{name: number} of the enum that begins with that name."""
    body = re.search(r"enum {\s*(%s\b[^}]*)}" % first, HEADER)[1]
    return {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", body)}


def test_codecs_are_those_of_the_header():
    codecs = header_enum("SIGNPOST_CODEC_NONE")
    short = {"SIGNPOST_CODEC_ONE_BIT": "onebit"}
    assert _abi.CODEC_NAMES == {
        n: short.get(name, name[len("SIGNPOST_CODEC_") :].lower()) for name, n in codecs.items()
    }
    assert {"none", "custom"} == set(_abi.CODEC_NAMES.values()) - set(_abi.CODECS)


def test_gradient_types_are_those_of_the_header():
    types = header_enum("SIGNPOST_GRADIENT_FP32")
    assert _abi.GRADIENT_TYPES == {
        name[len("SIGNPOST_GRADIENT_") :].lower(): n for name, n in types.items()
    }


def test_each_code_of_the_header_has_an_exception():
    codes = set(header_enum("SIGNPOST_OK").values())
    assert set(_errors._BY_CODE) == codes - {0, _abi._CANCELLED}  # that is KeyboardInterrupt


def test_report_has_the_fields_of_the_library():
    assert list(_session.StepReport.__dataclass_fields__) == [
        name for name, _ in _abi.Report._fields_
    ]


def test_error_has_the_code_and_the_message_of_the_library():
    options = _abi.Options()
    _abi.library.signpost_options_init(ctypes.byref(options))
    with pytest.raises(_errors.InvalidArgumentError, match="options need aggregators") as raised:
        _session.Session(options, [])
    assert raised.value.code == 3
