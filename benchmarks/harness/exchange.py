"""Values as JSON, for exchange between hosts: reading a pickle from a network would run whatever its sender likes.

| value                                  | JSON                                             |
|----------------------------------------|--------------------------------------------------|
| None, bool, number, str, list          | the same                                         |
| tuple, dict                            | ``{"tuple": [...]}``, ``{"dict": [[key, value]]}`` |
| numpy array                            | ``{"array": "..."}``, an ``.npy`` file in base64 |
| dataclass, NamedTuple of this package  | ``{"of": "module:Class", "fields": [...]}``      |
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np

from torchref.agreement import gather_texts

_PACKAGE = f"{__name__.split('.')[0]}."


def dumps(value: Any) -> str:
    """Writes a value as a line of JSON.

    Example:
        >>> dumps((1, {"a": [2.0]}))
        '{"tuple": [1, {"dict": [["a", [2.0]]]}]}'
        >>> loads(_)
        (1, {'a': [2.0]})
    """
    return json.dumps(_plain(value))


def loads(line: str) -> Any:
    """Reads what ``dumps`` has written.

    Raises:
        ValueError: If it is something else, or names a class that is not plain data of this package.
    """
    return _value(json.loads(line))


def name_of(thing: Callable[..., Any]) -> str:
    """The name under which other processes find a class or a function."""
    return f"{thing.__module__}:{thing.__qualname__}"


def find(name: str) -> Any:
    """Finds a class or function of this package by ``name_of``.

    Raises:
        ValueError: If it belongs to something else.
    """
    module, _, attribute = name.partition(":")
    found = getattr(import_module(module), attribute, None) if module.startswith(_PACKAGE) else None
    if getattr(found, "__module__", None) != module:
        raise ValueError(f"name (={name!r}) must be that of a class or function of {_PACKAGE}*")
    return found


def gather(value: Any) -> list[Any]:
    """Gathers a value of every rank of the process group; every rank must call it."""
    return [loads(text) for text in gather_texts(dumps(value))]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        np.save(file := io.BytesIO(), value, allow_pickle=False)
        return {"array": base64.b64encode(file.getvalue()).decode()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if is_dataclass(value):
        of = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, tuple):
        if type(value) is tuple:
            return {"tuple": [_plain(one) for one in value]}
        of = list(value)
    else:
        raise ValueError(f"value (={value!r}) must be plain data")
    return {"of": name_of(type(value)), "fields": [_plain(one) for one in of]}


def _value(said: Any) -> Any:
    if isinstance(said, list):
        return [_value(one) for one in said]
    if not isinstance(said, dict):
        return said
    if "array" in said:
        return np.load(io.BytesIO(base64.b64decode(said["array"])), allow_pickle=False)
    if "dict" in said:
        return {_value(key): _value(one) for key, one in said["dict"]}
    if "tuple" in said:
        return tuple(_value(one) for one in said["tuple"])
    kind = find(said["of"])
    if not isinstance(kind, type) or not (is_dataclass(kind) or issubclass(kind, tuple)):
        raise ValueError(f"class (={said['of']}) must be plain data")
    return kind(*map(_value, said["fields"]))
