"""Configuration files: docs/configuration.md. The library reads them."""

import ctypes
import json
import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple, Union

from signpost import _abi
from signpost._codec import Codec
from signpost._errors import InvalidArgumentError

# A file, what would be in one, or None: the file that SIGNPOST_CONFIG names, if it does.
Source = Union[str, "os.PathLike[str]", Mapping[str, Any], None]


def optimizer_section(source: Source) -> Tuple[str, Dict[str, Any]]:
    """Type and params of the section `optimizer`, as they were given, without what is ignored.

    Raises:
        InvalidArgumentError: names the line, or the key, that is wrong; or there is no such
            section.
        NotFoundError: there is no such file.
    """
    text = ctypes.c_char_p()
    with _opened(source) as config:
        _abi.call("config_optimizer_json", config, ctypes.byref(text))
        section = text.value  # a copy
    if section is None:
        raise InvalidArgumentError(
            "there is no configuration with a section 'optimizer': give a file or a dictionary, "
            "or set SIGNPOST_CONFIG",
            code=3,
            exit_code=64,
        )
    read: Dict[str, Any] = json.loads(section)
    params = read["params"]
    for name in params:
        if name.endswith("codec") and not isinstance(params[name], str):
            params[name] = Codec(*params[name])  # from outside: library and options
    return read["type"], params


def deepspeed_settings(source: Source) -> Mapping[str, Any]:
    """The top level of a configuration that optimizer_section() takes, by key, where the library
    reads none of it but that section. Nothing of YAML, which DeepSpeed's files are not."""
    if isinstance(source, Mapping):
        return source
    path = os.environ["SIGNPOST_CONFIG"] if source is None else source
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        read: Dict[str, Any] = json.loads(text)
        return read
    except ValueError:
        return {}


def session_setting(key: str) -> Optional[str]:
    """What the environment and SIGNPOST_CONFIG's file say of a key of sessions. Errors as above."""
    with _opened(None) as config:
        text: Optional[bytes] = _abi.library.signpost_config_session(config, key.encode())
    return None if text is None else text.decode()


def _json_of(source: Mapping[str, Any]) -> str:
    def plain(value: Any) -> Union[Dict[str, Any], Tuple[str, str]]:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Codec):
            return value.library, value.options
        raise TypeError(f"{value!r} in a configuration: its type is {type(value).__name__}")

    # YAML has no pairs of surrogates.
    return json.dumps(source, indent=1, ensure_ascii=False, default=plain)


@contextmanager
def _opened(source: Source) -> Iterator[ctypes.c_void_p]:
    path, text = None, None
    if isinstance(source, Mapping):
        path, text = b"config", _json_of(source).encode()
    elif source is not None:
        path = os.fsencode(source)
    config = ctypes.c_void_p()
    _abi.call("config_open", path, text, ctypes.byref(config))
    try:
        yield config
    finally:
        _abi.library.signpost_config_close(config)
