"""The identity of a live model. `accel/execution.py` describes what executes it.

Two models that give different logits for a prompt must never have the same identity. So every byte
is read each time, and no digest is kept for a file or an object: an edit in place (`weight[1] = 3`)
keeps both the array object and its buffer.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash
from mlx.nn.layers.base import Module

from rewarm.accel import replacement

PLAIN = (type(None), bool, int, float, complex, str, bytes)

NOT_COMPUTED_WITH = frozenset({"_no_grad", "rewarm_source"})
"""Attributes of a module that its results do not depend on: how it is trained, and where it was
loaded from."""

NOT_FOLLOWED = frozenset({*sys.stdlib_module_names, "numpy", "transformers", "torch", "rewarm"})
"""Packages whose functions are described by their names."""

HASHERS = 2
"""The number of threads that read arrays: two of them read as fast as memory allows."""


@dataclass(frozen=True)
class Description:
    """A model, or its caches, as text and arrays. Another thread may digest it: its arrays are
    evaluated."""

    text: bytes
    arrays: tuple[mx.array, ...]

    @staticmethod
    def of(model: Any) -> Description:
        """Describe every value that can be reached from a model, or from a list of caches.

        Call it where lazy arrays of the model can be evaluated: on the thread that made them.
        """
        found = _Describer(modules_of(model))
        found.note(model)
        text = "\n".join(found.lines()).encode()
        mx.eval(found.arrays)
        return Description(text, tuple(found.arrays))

    def identity(self, execution: str) -> str:
        """Digest all bytes. This reads every array, at about the speed of memory.

        The weights' digest comes first: it shows which namespaces belong to one model.
        """
        with ThreadPoolExecutor(HASHERS, "rewarm-identity") as pool:
            digests = list(pool.map(_array_digest, self.arrays))
        weights = xxhash.xxh3_128(b"".join(sorted(digests)))
        base = xxhash.xxh3_128(self.text)
        for part in (*digests, execution.encode()):
            base.update(part)
        return f"{weights.hexdigest()}-{base.hexdigest()}"


Slot = tuple[int, str]
"""The number of a module in `modules_of`, and the name of a value that it holds."""


class Watch:
    """Notices cheaply when one of the objects that a model's modules hold is replaced.

    It does not see an edit in place. It holds weak references, so replaced weights can be freed.
    """

    def __init__(self, model: Any, besides: Collection[Slot] = ()) -> None:
        """The slots in `besides` may change, and so may a memo that is still to be filled."""
        self.besides = set(besides)
        self._before: list[tuple[weakref.ref[Module], dict[str, Any]]] = []
        for i, module in enumerate(modules_of(model)):
            values = dict(_values(module))
            self.besides |= {(i, name) for name, value in values.items() if _is_memo(name, value)}
            refs = {name: _ref(value) for name, value in values.items()}
            self._before.append((weakref.ref(module), refs))

    def changes(self) -> Iterator[Slot]:
        """Yield the slots that hold another object now."""
        for i, (module_ref, refs) in enumerate(self._before):
            module = module_ref()
            now = dict(_values(module)) if module is not None else {}
            for name, ref in refs.items():
                was = ref() if type(ref) is weakref.ref else ref
                if now.pop(name, _GONE) is not was and (i, name) not in self.besides:
                    yield i, name
            yield from ((i, name) for name in now if (i, name) not in self.besides)


_GONE = object()


def run_once(model: Any, blank: Callable[[], list[Any]]) -> None:
    """Run a model on two tokens, as a prompt does, and on one, as a decode step does."""
    for tokens in ([[0, 0]], [[0]]):
        mx.eval(model(mx.array(tokens), cache=blank()))


def keeps_memos(model: Any) -> bool:
    """True where a model's first run computes values from its parameters, and keeps them.

    That run changes its identity.
    """
    return any(_is_memo(*item) for module in modules_of(model) for item in vars(module).items())


def modules_of(model: Any) -> list[Module]:
    modules = getattr(model, "modules", None)
    found = modules() if callable(modules) else []
    return [module for module in found if isinstance(module, Module)]


def _is_memo(name: str, value: Any) -> bool:
    return value is None and name.startswith("_")


def _values(module: Module) -> Iterator[tuple[str, Any]]:
    """Yield the values that a module holds itself. A list or tuple is yielded item by item."""
    yield "class", type(module)
    for name, value in module.items():
        if type(value) is list or type(value) is tuple:
            yield from ((f"{name}.{i}", each) for i, each in enumerate(value))
        else:
            yield name, value
    for name, value in vars(module).items():
        if name not in NOT_COMPUTED_WITH:
            yield name, value


def _ref(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, (mx.array, Module)) else value


def evaluate(model: Any) -> None:
    """Evaluate every array that can be reached from a model, and not only its parameters: a lazy
    array belongs to the stream, and so to the thread, that it was made in."""
    Description.of(model)


class _Describer:
    """Writes a line for each object that it is given, and for each object that these hold.

    An object is named by the order in which it was met, so sharing and cycles cost nothing, and
    equal models give equal lines.
    """

    def __init__(self, own: Collection[Module]) -> None:
        self.arrays: list[mx.array] = []
        self._own = {id(module) for module in own}
        self._numbers: dict[int, int] = {}
        self._files: set[str] = set()
        """The modules whose code was met."""
        self._todo: list[Any] = []
        # Objects are told apart by their address, so each one stays alive until the end.

    def lines(self) -> Iterator[str]:
        for number, thing in enumerate(self._todo):  # grows meanwhile
            yield f"#{number} " + " ".join(self._parts(thing))
        # Files cover what objects do not show, such as the source of a GPU kernel.
        for name in sorted(self._files):
            yield f"file {name} {_file_digest(name)}"

    def note(self, thing: Any) -> str:
        """Name an object in a line: a plain value as it is, anything else by its number."""
        if type(thing) in PLAIN:
            return f"{type(thing).__name__}:{thing!r}"
        if isinstance(thing, types.FunctionType):
            thing = replacement.original(thing)
        number = self._numbers.setdefault(id(thing), len(self._todo))
        if number == len(self._todo):
            self._todo.append(thing)
        return f"#{number}"

    def _parts(self, thing: Any) -> Iterator[str]:
        kind = type(thing)
        if isinstance(thing, mx.array):
            yield f"array {len(self.arrays)} {thing.shape} {thing.dtype}"
            self.arrays.append(thing)
        elif isinstance(thing, np.ndarray):
            yield f"array {thing.shape} {thing.dtype} {_digest(np.ascontiguousarray(thing))}"
        elif isinstance(thing, (np.generic, mx.Dtype)):
            yield f"{kind.__name__} {thing!r}"
        elif isinstance(thing, type):
            yield from self._class(thing)
        elif isinstance(thing, Enum):
            yield f"{_name(kind)} {thing.name}"
        elif isinstance(thing, types.ModuleType):
            yield f"module {thing.__name__}"
        elif hasattr(thing, "__code__") and not isinstance(thing, types.MethodType):
            yield from self._function(thing)
        elif isinstance(thing, (list, tuple, dict)):
            yield self.note(kind)
            yield from self._items(thing) if isinstance(thing, dict) else map(self.note, thing)
            yield from self._attributes(thing)
        elif isinstance(thing, (set, frozenset)):
            yield self.note(kind)
            yield from sorted(map(repr, thing))
        elif isinstance(thing, types.MethodType):
            yield f"method {self.note(thing.__func__)} of {self.note(thing.__self__)}"
        elif isinstance(thing, functools.partial):
            yield f"partial {self.note(thing.func)} {self.note(thing.args)}"
            yield self.note(thing.keywords)
        elif hasattr(thing, "__wrapped__"):
            yield f"{_name(kind)} of {self.note(thing.__wrapped__)}"
        elif isinstance(thing, types.BuiltinFunctionType) or not _is_followed(kind.__module__):
            yield f"{_name(kind)} {_name(thing)}"
        else:
            yield self.note(kind)
            yield from self._attributes(thing)

    def _items(self, thing: dict[Any, Any]) -> Iterator[str]:
        if all(isinstance(key, str) for key in thing):
            yield from (f"{key}={self.note(thing[key])}" for key in sorted(thing))
        else:
            yield from (f"{self.note(key)}={self.note(value)}" for key, value in thing.items())

    def _attributes(self, thing: Any) -> Iterator[str]:
        values = dict(getattr(thing, "__dict__", None) or {})
        for kind in type(thing).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__") and hasattr(thing, name):
                    values[name] = getattr(thing, name)
        if isinstance(thing, Module) and id(thing) not in self._own:
            # All models of the process share such a module, for example the default of a function:
            # another model's `eval()` sets its flag.
            values.pop("_training", None)
        for name in sorted(values.keys() - NOT_COMPUTED_WITH):
            yield f".{name}={self.note(values[name])}"

    def _class(self, thing: type) -> Iterator[str]:
        yield f"class {_name(thing)}"
        if not _is_followed(thing.__module__):
            return
        self._files.add(thing.__module__)
        yield from map(self.note, thing.__bases__)
        for name, value in sorted(vars(thing).items()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, property):
                accessors = (value.fget, value.fset)
                yield f".{name}=" + ",".join(self.note(f) for f in accessors if f is not None)
            elif hasattr(value, "__code__") or hasattr(value, "__wrapped__"):
                if not name.startswith("__annotate"):
                    yield f".{name}={self.note(value)}"
            elif isinstance(value, functools.cached_property):
                yield f".{name}={self.note(value.func)}"
            elif not name.startswith("__"):
                yield f".{name}={self.note(value) if _is_constant(value) else _name(value)}"

    def _function(self, thing: Any) -> Iterator[str]:
        """Describe a function by its code, its defaults, its closure and the globals it names.

        The code is what the interpreter runs, not a source file, which may have changed since.
        """
        module = str(getattr(thing, "__module__", ""))
        yield f"function {module}.{getattr(thing, '__qualname__', '')}"
        if not _is_followed(module):
            return
        self._files.add(module)
        code, known = thing.__code__, thing.__globals__
        yield _code_digest(code)
        yield from (self.note(part) for part in (thing.__defaults__, thing.__kwdefaults__) if part)
        for cell in thing.__closure__ or ():
            try:
                yield self.note(cell.cell_contents)
            except ValueError:
                yield "empty"
        names = sorted(_names(code))
        for name in names:
            value = known.get(name)
            if isinstance(value, types.ModuleType) and _is_followed(value.__name__):
                inside = vars(value)
                for each in names:
                    if _is_code(inside.get(each)) or _is_constant(inside.get(each)):
                        yield f"{name}.{each}={self.note(inside.get(each))}"
            elif name in known and (_is_code(value) or _is_constant(value)):
                yield f"{name}={self.note(value)}"


def _file_digest(module: str) -> str:
    """Digest a module's file, where it has one."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return xxhash.xxh3_128(Path(path).read_bytes()).hexdigest() if path else "none"
    except OSError:
        return "unreadable"


def _is_followed(module: str) -> bool:
    return module.partition(".")[0] not in NOT_FOLLOWED


def _is_code(value: Any) -> bool:
    return isinstance(value, (type, functools.partial)) or hasattr(value, "__code__")


def _is_constant(value: Any) -> bool:
    """True where a global or class attribute is data that code computes with.

    Instances are left out: some of them hold counters, or results that they computed.
    """
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(_is_constant(each) or _is_code(each) for each in value.values())
    return isinstance(value, (*PLAIN, mx.array, mx.Dtype, np.ndarray, Enum))


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function looks up, with those of the functions that it defines."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _code_digest(code: types.CodeType) -> str:
    consts = []
    for const in code.co_consts:
        nested = isinstance(const, types.CodeType)
        plain = sorted(map(repr, const)) if isinstance(const, frozenset) else const
        consts.append(_code_digest(const) if nested else repr(plain))
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    text = repr((consts, names, counts, getattr(code, "co_exceptiontable", b"")))
    return xxhash.xxh3_128(code.co_code + text.encode()).hexdigest()


def _name(thing: Any) -> str:
    module = getattr(thing, "__module__", "")
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _array_digest(array: mx.array) -> bytes:
    """Digest one evaluated array."""
    if array.dtype == mx.bfloat16:  # numpy has no such numbers
        array = array.view(mx.uint16)
    return _digest(np.ascontiguousarray(np.asarray(array))).encode()


def _digest(array: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_128(array.reshape(-1).view(np.uint8).data).hexdigest()
