"""XTML, K3's chat markup: markers, elements and attribute escaping, shared by renderer and parser.

An element is `<|open|>tag k="v"<|sep|>` body `<|close|>tag<|sep|>`; a message ends with `<|end_of_msg|>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
END_OF_MSG: Final = "<|end_of_msg|>"
IMAGE_PLACEHOLDER: Final = "<|kimi_image_placeholder|>"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt that is tokenised on its own.

    `allow_special`: markers in it become special ids; set only for text that the renderer itself wrote.
    `is_assistant`: the model is to produce it (training's loss mask).
    """

    text: str
    allow_special: bool = False
    is_assistant: bool = False


Attributes = Sequence[tuple[str, str]]


def escape(value: str) -> str:
    """An attribute's value as written between its quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def value_type(value: object) -> str:
    """The `type` attribute of a tool call argument that holds this JSON value."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, dict) else "array"


def header(tag: str, attributes: Attributes = ()) -> str:
    """What stands between `<|open|>` and `<|sep|>`, as one string."""
    return tag + "".join(f' {key}="{escape(value)}"' for key, value in attributes)


_HEADER: Final = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
_ATTRIBUTE: Final = re.compile(r' ([a-z]+)="([^"]*)"')


def read_header(text: str) -> tuple[str, list[tuple[str, str]]] | None:
    """Tag and attributes of a header, or None unless `header` would write exactly this text."""
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    attributes = [(key, unescape(value)) for key, value in _ATTRIBUTE.findall(match[2])]
    return (match[1], attributes) if header(match[1], attributes) == text else None


class SegmentWriter:
    """Builds a segment list. Where markup is cut is part of the format: each segment is tokenised alone."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.is_assistant = False

    def control(self, text: str) -> None:
        self._add(text, allow_special=True)

    def text(self, text: str) -> None:
        self._add(text, allow_special=False)

    def open(self, tag: str, attributes: Iterable[tuple[str, str]] = ()) -> None:
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(escape(value))
            self.text('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        self.control(CLOSE)
        self.text(tag)
        self.control(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.control(END_OF_MSG)

    def _add(self, text: str, *, allow_special: bool) -> None:
        if text:
            self.segments.append(Segment(text, allow_special, self.is_assistant))
