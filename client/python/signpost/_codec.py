"""How numbers travel: names, and codecs from outside."""

from dataclasses import dataclass
from typing import Dict, Union

from signpost import _abi


@dataclass(frozen=True)
class Codec:
    """A codec from outside: a shared object as signpost_codec.h has it. Aggregators need it too:
    `signpost aggregator --codec-library`, or SIGNPOST_CODEC_LIBRARIES in their environment, which
    `signpost run`'s aggregators, and that of a process alone, have from their parent.

    Attributes:
        library: path of the shared object.
        options: the codec's own, the same on all ranks.
    """

    library: str
    options: str = ""


def codec_options(**codecs: Union[str, Codec]) -> Dict[str, Union[int, bytes]]:
    """What fields of _abi.Options say of the codecs, by the name of their argument.

    Raises:
        ValueError: there is no such codec, or two of them are from outside and differ.
    """
    fields: Dict[str, Union[int, bytes]] = {}
    custom = {codec for codec in codecs.values() if isinstance(codec, Codec)}
    if len(custom) > 1:
        raise ValueError(f"{' and '.join(codecs)} are different codecs from outside: a job has one")
    for codec in custom:
        fields.update(codec_library=codec.library.encode(), codec_options=codec.options.encode())
    for name, codec in codecs.items():
        if isinstance(codec, Codec):
            fields[name] = _abi.CUSTOM
        elif codec in _abi.CODECS:
            fields[name] = _abi.CODECS[codec]
        else:
            wanted = ", ".join(_abi.CODECS)
            raise ValueError(f"{name} is {codec!r}, wanted one of {wanted}, or a signpost.Codec")
    return fields
