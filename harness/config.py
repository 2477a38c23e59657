"""Every YAML file that a person writes: arms (experiments/*.yaml) and protocols, checked, with errors that name file and line.

An arm says what runs: engine, model, tokens, levers. `extends: other.yaml` starts from another file (relative to this
one; a protocol also finds the packaged ones by name) and overrides key by key; lists, and an engine of another kind, are
replaced whole. Keys of no effect do not exist: an unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from harness.errors import HarnessError, one_line

Unit = Literal["ns", "us", "ms", "s", "tok/s"]
UNIT_MS: dict[str, float] = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
"""Milliseconds in one unit; tok/s is converted by the token count."""


class Strict(BaseModel):
    """Base of every file's model: no unknown keys, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)


class JsonMetric(Strict):
    """A figure, or a list of them (one per inner run), at a dotted path of the JSON on stdout: `0.samples_ns`."""

    json_path: str = Field(alias="json")
    unit: Unit


class RegexMetric(Strict):
    """Every match's first group on stdout is one inner run's figure."""

    regex: str
    unit: Unit

    @field_validator("regex")
    @classmethod
    def _one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from None
        if groups != 1:
            raise ValueError(f"needs exactly one group around the number, not {groups}")
        return value


def _metric_form(value: Any) -> str:
    if isinstance(value, (dict, BaseModel)):
        return "regex" if isinstance(value, RegexMetric) or (isinstance(value, dict) and "regex" in value) else "json"
    return "wall"


Metric = Annotated[
    Annotated[Literal["wall"], Tag("wall")] | Annotated[JsonMetric, Tag("json")] | Annotated[RegexMetric, Tag("regex")],
    Discriminator(_metric_form),
]
"""How a command's wall is read: its process's own wall, or a figure that it prints."""


class CommandGate(Strict):
    """A gate that a command engine declares: run in both arms, then compared."""

    argv: tuple[str, ...] = Field(min_length=1)
    compare: Literal["stdout", "exit", "npy"] = "stdout"
    """stdout: equal in both arms; exit: status 0 in the lever's arm; npy: arrays in `file` within `rel_l2`."""
    file: str | None = None
    rel_l2: float = Field(default=2e-3, gt=0)

    @model_validator(mode="after")
    def _file_for_npy(self) -> CommandGate:
        if (self.compare == "npy") != (self.file is not None):
            raise ValueError("`file` goes with `compare: npy`, and with nothing else")
        return self


class EmbeddedEngine(Strict):
    """The engine of this project."""

    kind: Literal["embedded"] = "embedded"
    backend: Literal["auto", "cpu", "cuda"] = "auto"


class CommandEngine(Strict):
    """Any program. In argv and env, {model}, {tokens} and {seed} are replaced by the arm's and the forward's values."""

    kind: Literal["command"]
    argv: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_s: float = Field(default=600, gt=0)
    metric: Metric = "wall"
    gates: dict[Literal["parity", "greedy", "bitwise", "determinism"], CommandGate] = {}


class PythonEngine(Strict):
    """Python code: `call` is the forward itself (ids → logits or None), or `setup` makes it.

    `setup` is called once a process with the arm's `levers` and `args` as keywords and returns either a function
    ids → logits, or an object with `prefill(ids)` and, if it likes, `synchronize`, `describe`, `greedy`, `close`.
    """

    kind: Literal["python"]
    call: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    setup: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    args: dict[str, Any] = {}
    path: tuple[str, ...] = ()
    """Directories put before sys.path, relative to the config file."""
    vocab: int = Field(default=32000, gt=0)
    """Random token ids are drawn from [0, vocab)."""

    @model_validator(mode="after")
    def _one_entry(self) -> PythonEngine:
        if (self.call is None) == (self.setup is None):
            raise ValueError("give exactly one of `call` and `setup`, as module:callable")
        return self


EngineConfig = Annotated[EmbeddedEngine | CommandEngine | PythonEngine, Field(discriminator="kind")]


class Plant(Strict):
    """A spin of known duration inside every timed forward: it shows whether the chain decides as it should."""

    spin_us: float | None = Field(default=None, ge=0)
    fraction: float | None = Field(default=None, ge=0, lt=10)
    """Of the arm's own wall without the spin, measured once before the first pair and frozen as microseconds."""

    @model_validator(mode="after")
    def _one(self) -> Plant:
        if (self.spin_us is None) == (self.fraction is None):
            raise ValueError("give exactly one of `spin_us` and `fraction`")
        return self


class ArmConfig(Strict):
    """One arm: what runs, and (for a lever) why it should be faster."""

    name: str
    engine: EngineConfig = EmbeddedEngine()
    model: str | None = None
    """A GGUF's path, a geometry preset, or nothing for the machine's default."""
    tokens: int = Field(default=3325, gt=0)
    levers: dict[str, Any] = {}
    plant: Plant | None = None
    identity: Literal["bitwise", "greedy", "tolerance"] = "greedy"
    """Which identity with the base arm this lever claims; the gates hold it to that and report the rest."""
    kernels: tuple[str, ...] = ()
    """Regexes of launch names (or plan ops) that must appear when this arm runs, and not in the base arm: liveness."""

    hypothesis: str = ""
    mechanism: str = ""
    ops: tuple[str, ...] = ()
    """Classes (roles) whose busy time the mechanism is about; empty: the ops whose plan entry or kernel changes."""
    predicted_gain: float | None = Field(default=None, gt=-1)
    """Fraction of the wall: 0.02 is +2 %."""
    retry_condition: str = ""

    source: Path | None = Field(default=None, exclude=True)
    """The file that it was read from."""

    @model_validator(mode="after")
    def _levers_fit(self) -> ArmConfig:
        if self.engine.kind == "embedded":
            from engine.errors import LeverError
            from engine.levers import Levers

            try:
                Levers.from_dict(self.levers)
            except LeverError as error:
                raise ValueError(str(error)) from None
        elif self.engine.kind == "command" and self.levers:
            raise ValueError("a command's levers are its argv and env; leave `levers` out")
        return self

    def what_runs(self) -> dict[str, Any]:
        """The part of the config that decides what is executed; prose and predictions are not in it.

        Levers are given in full, so that a default written out is the same arm as a default left out.
        """
        parts = self.model_dump(mode="json", include={"engine", "model", "tokens", "levers", "plant"}, by_alias=True)
        if self.engine.kind == "embedded":
            from engine.levers import Levers

            parts["levers"] = Levers.from_dict(self.levers).to_dict()
        return parts

    def hash(self) -> str:
        """SHA-256 of what runs, hexadecimal: the config's part of an arm's identity."""
        return _sha256(self.what_runs())

    def workload_hash(self) -> str:
        """SHA-256 of engine, model and tokens without levers or planted spin: arms of one workload share their noise."""
        return _sha256({k: v for k, v in self.what_runs().items() if k not in ("levers", "plant")})


def _sha256(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def load_arm(path: Path) -> ArmConfig:
    """An arm from its YAML file, `extends:` resolved, named after the file unless it names itself.

    Raises HarnessError naming file, line and key for anything that is wrong.
    """
    document = _load_extended(path, ())
    document.values.setdefault("name", path.stem)
    return _validate(ArmConfig, document, {"source": path})


ModelT = TypeVar("ModelT", bound=BaseModel)


def load_protocol(name_or_path: str | Path, model_class: type[ModelT]) -> ModelT:
    """A protocol by name ("landing" → the packaged protocols/landing.yaml) or by path. Raises HarnessError as above."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        packaged = resources.files("protocols") / f"{name_or_path}.yaml"
        if not packaged.is_file():
            names = sorted(
                p.name.removesuffix(".yaml") for p in resources.files("protocols").iterdir() if p.name.endswith(".yaml")
            )
            near = get_close_matches(str(name_or_path), names, n=1)
            raise HarnessError(
                f"there is no protocol {str(name_or_path)!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"give a .yaml file or one of {', '.join(names)}.")
            )
        path = Path(str(packaged))
    return _validate(model_class, _load_extended(path, (), Path(str(resources.files("protocols")))), {})


def diff_arms(base: ArmConfig, lever: ArmConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (base's value, lever's value) for everything that runs differently; empty for an A/A."""
    a, b = _flatten(base.what_runs()), _flatten(lever.what_runs())
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


# --- reading YAML with positions ---------------------------------------------------------------------------------------


@dataclass
class _Document:
    """Plain values, and where each key of them was written."""

    values: dict[str, Any]
    file: Path
    where: dict[tuple[str, ...], tuple[Path, int]] = field(default_factory=dict)

    def place(self, loc: tuple[str, ...]) -> str:
        """`file:line` of a key, or of its nearest enclosing key."""
        for cut in range(len(loc), 0, -1):
            if loc[:cut] in self.where:
                file, line = self.where[loc[:cut]]
                return f"{file}:{line}"
        return str(self.file)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's booleans only: `concat: on` is the lever's value "on", not true."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_MAX_DEPTH, _MAX_NODES = 64, 100_000
"""More nesting, or more nodes with every alias followed, than any config has: a bomb, or an alias of an alias."""
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))


def _load_extended(path: Path, seen: tuple[str, ...], packaged: Path | None = None) -> _Document:
    """The file and what it extends: a file beside it, else the one of that name in the `packaged` folder."""
    real = os.path.realpath(path)
    if real in seen:
        chain = " → ".join(Path(p).name for p in (*seen, real))
        raise HarnessError(f"{path}: `extends` goes in a circle ({chain}); remove one of them.")
    document = _read(path)
    base = document.values.pop("extends", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise HarnessError(f"{document.place(('extends',))}: `extends` must be the path of one YAML file.")
    extended = path.parent / base
    if packaged is not None and "\0" not in base and (packaged / base).is_file():
        beside = extended.exists() and os.path.realpath(extended) != real
        extended = extended if beside else packaged / base
    below = _load_extended(extended, (*seen, real), packaged)
    below.values.pop("name", None)
    merged = _merge(below.values, document.values)
    return _Document(merged, path, below.where | document.where)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind"):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _read(path: Path) -> _Document:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise HarnessError(f"{path} does not exist; give the path of a YAML config.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise HarnessError(f"{path} cannot be read ({one_line(error)}); give a UTF-8 YAML file.") from None
    document = _Document({}, path)
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return document
        if not isinstance(node, yaml.MappingNode):
            raise HarnessError(f"{path}:1: a config is a mapping of keys to values, not a list or a single value.")
        _Positions(document).visit(node, ())
        document.values = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise HarnessError(yaml_sentence(error, str(path))) from None
    except RecursionError:
        raise HarnessError(
            f"{path}: its values are nested deeper than {_MAX_DEPTH} levels; no config is, correct it."
        ) from None
    except HarnessError:
        raise
    except Exception as error:  # the library's constructors raise what they stumble over: a date that is none
        raise HarnessError(
            f"{path}: a value cannot be read ({one_line(error)}); correct it, or put it in quotes."
        ) from None
    finally:
        if loader is not None:
            loader.dispose()
    return document


def yaml_sentence(error: yaml.YAMLError, file: str) -> str:
    """The library's error as one sentence, with the line where it knows it."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    if isinstance(error, yaml.reader.ReaderError):
        what = f"the character U+{ord(error.character) if isinstance(error.character, str) else error.character:04X} is not allowed"
        return f"{file}: this is not YAML ({what}); remove it."
    return f"{file}{line}: this is not YAML ({one_line(getattr(error, 'problem', None) or error)}); correct it."


class _Positions:
    """Notes the line of every key, and refuses what no config needs: keys twice, loops, bombs, control characters."""

    def __init__(self, document: _Document) -> None:
        self.document, self.open, self.nodes = document, [], 0  # type: _Document, list[int], int

    def visit(self, node: yaml.Node, loc: tuple[str, ...]) -> None:
        """One node at a place, and all below it."""
        line = f"{self.document.file}:{node.start_mark.line + 1}"
        self.nodes += 1
        if id(node) in self.open:
            raise HarnessError(f"{line}: an alias (*name) stands inside the value that it names; write the value out.")
        if len(self.open) >= _MAX_DEPTH or self.nodes > _MAX_NODES:
            limit = (
                f"nested deeper than {_MAX_DEPTH} levels"
                if self.nodes <= _MAX_NODES
                else f"more than {_MAX_NODES} values"
            )
            raise HarnessError(f"{line}: the values are {limit}; no config is, write it without aliases of aliases.")
        self.open.append(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self.visit(key, loc)
                inner = (*loc, str(key.value))
                if inner in self.document.where and self.document.where[inner][1] != key.start_mark.line + 1:
                    raise HarnessError(
                        f"{self.document.file}:{key.start_mark.line + 1}: key {one_line('.'.join(inner), 120)!r} is given twice; keep one."
                    )
                self.document.where[inner] = (self.document.file, key.start_mark.line + 1)
                self.visit(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                self.document.where[(*loc, str(i))] = (self.document.file, value.start_mark.line + 1)
                self.visit(value, (*loc, str(i)))
        elif bad := _UNPRINTABLE.search(node.value):
            raise HarnessError(f"{line}: a text holds the character U+{ord(bad[0]):04X}, which no name or path can have; remove it.")  # fmt: skip
        elif node.tag.endswith(":float") and not isfinite(float(node.value.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))):  # fmt: skip
            raise HarnessError(f"{line}: {one_line(node.value, 80)!r} is no finite number; give one.")
        self.open.pop()


_UNPRINTABLE = re.compile(r"[\0-\x08\x0b-\x1f\x7f\ud800-\udfff]")


# --- pydantic's errors as one sentence ---------------------------------------------------------------------------------


def _validate(model: type[ModelT], document: _Document, extra: dict[str, Any]) -> ModelT:
    if reserved := sorted(extra.keys() & document.values.keys()):
        raise HarnessError(f"{document.place((reserved[0],))}: key {reserved[0]!r} cannot be set in a file; remove it.")
    try:
        return model.model_validate(document.values | extra)
    except ValidationError as error:
        # An unknown key is the commonest slip and often the cause of the others, so it is told first.
        errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        sentence = _sentence(model, document, errors[0])
        raise HarnessError(sentence if len(sentence) < 900 else f"{sentence[:900]}…") from None


def _sentence(model: type[BaseModel], document: _Document, error: Any) -> str:
    loc = tuple(str(part) for part in error["loc"])
    real, known = _follow(model, loc)
    place, key = document.place(real), ".".join(real) or "config"
    if error["type"] == "extra_forbidden":
        near = get_close_matches(real[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}."
        return f"{place}: unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"{place}: key {key!r} is missing; add it."
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{place}: {key!r}: {message[0].lower() + message[1:]}{'' if message.endswith(('.', '?')) else '.'}"


def _follow(model: type[BaseModel], loc: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """The error's path as the file writes it (pydantic adds a union member's name), and the valid keys at its end."""
    real: list[str] = []
    candidates: list[type[BaseModel]] = [model]
    known = _keys(candidates)
    for i, part in enumerate(loc):
        tagged = [m for m in candidates if _tag(m) == part]
        if len(candidates) > 1 and (tagged or part == "wall"):
            candidates, known = tagged, _keys(tagged)
            continue
        real.append(part)
        inner = [
            m for c in candidates for name, f in c.model_fields.items() if part in (name, f.alias) for m in _models(f.annotation)
        ]  # fmt: skip
        if i < len(loc) - 1 and (inner or not part.isdigit()):
            candidates = inner
            known = _keys(candidates) or known
    return tuple(real), known


def _keys(models: list[type[BaseModel]]) -> list[str]:
    return [f.alias or name for m in models for name, f in m.model_fields.items() if not f.exclude]


def _tag(model: type[BaseModel]) -> str | None:
    if model in (JsonMetric, RegexMetric):
        return "json" if model is JsonMetric else "regex"
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation)[0] if kind and get_args(kind.annotation) else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Every pydantic model inside an annotation: unions, optionals, tuples and mapping values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for inner in get_args(annotation) for m in _models(inner)]
