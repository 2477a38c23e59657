"""Kernel name → class, by rule files, for launches that no plan op owns.

A rule looks at parts of a name, so that what stands inside template arguments, lambdas and parameter lists cannot fool
it: `void at::native::elementwise_kernel<128, 4, gemm_lambda()::[...]>(int)` has the *entry* `at::native::elementwise_kernel`
and the *arguments* `128, 4, gemm_lambda()::[...]`. Rules are tried in order, the user's file first; the first match wins,
and what no rule matches is `other`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from harness.config import yaml_sentence
from harness.errors import HarnessError, one_line
from harness.launches import FAMILIES, text_codes

RULE_FILES = ("llama_cpp", "rocm", "vllm", "sglang", "quantised", "tensorrt_llm", "cuda_libraries", "pytorch")
"""protocols/classes/NAME.yaml in the order in which they are tried: engines, then libraries, then the framework whose
element-wise templates wrap everything else."""

KEYS = ("pattern", "entry", "arguments", "class", "weight_type", "tile", "arithmetic")
GROUPS = ("ggml_type", "weight_type", "tile", "arithmetic")
"""Named groups that a rule's regexes may have; `ggml_type` holds the number of llama.cpp's enum."""

_SPELLINGS = {
    "h": "f16", "t": "bf16", "s": "f32", "q": "fp8", "e4m3": "fp8", "e5m2": "fp8", "e4m3fn": "fp8", "i8": "int8", "s8": "int8",
    "half": "f16", "__half": "f16", "__nv_bfloat16": "bf16", "float": "f32", "fp16": "f16", "fp32": "f32", "H": "f16", "B": "bf16", "S": "f32", "F8": "fp8", "I8": "int8",
}  # fmt: skip
"""A type as kernel names spell it → as this project does (nvjet letters, xmma, Tensile)."""


@dataclass(frozen=True)
class Rule:
    """One line of a rule file. All given regexes must be found; a literal value wins over the group of its name."""

    file: str
    number: int  # 1-based in its file
    cls: str
    pattern: re.Pattern[str] | None = None  # anywhere in the whole name
    entry: re.Pattern[str] | None = None  # in the function's qualified name, without template arguments
    arguments: re.Pattern[str] | None = None  # in the outermost template arguments
    weight_type: str | None = None
    tile: str | None = None
    arithmetic: str | None = None

    def __str__(self) -> str:
        return f"{self.file} rule {self.number}"

    def match(self, name: Name) -> Match | None:
        """The match with what the name tells of weights, tile and arithmetic, or None."""
        groups: dict[str, str] = {}
        for regex, text in ((self.pattern, name.full), (self.entry, name.entry), (self.arguments, name.arguments)):
            if regex is not None:
                found = regex.search(text)
                if found is None:
                    return None
                groups |= {k: v for k, v in found.groupdict().items() if v is not None}
        weight_type = self.weight_type or groups.get("weight_type")
        if weight_type is None and "ggml_type" in groups:
            from engine.tensors import type_name  # loads the gguf package, which few traces need

            weight_type = type_name(int(groups["ggml_type"]))
        tile = self.tile or groups.get("tile")
        return Match(
            self.cls,
            _SPELLINGS.get(weight_type, weight_type) if weight_type else "-",
            self,
            re.sub(r"\D+", "x", tile) if tile else "",
            self.arithmetic or groups.get("arithmetic", ""),
        )


@dataclass(frozen=True)
class Match:
    """What a name was found to be."""

    cls: str  # one of FAMILIES
    weight_type: str  # "-" where the name does not tell
    rule: Rule | None  # None: `other`, or a class that the launch's kind decides
    tile: str = ""  # "256x128x64": M × N × K of a GEMM's tile
    arithmetic: str = ""  # as the name spells it: "int8", "f16f16_f16f16_f16"


OTHER = Match("other", "-", None)
_CLOSES = {"<": ">", "(": ")", "[": "]"}


@dataclass(frozen=True)
class Name:
    """A demangled kernel name and its parts."""

    full: str

    @cached_property
    def _parts(self) -> tuple[str, str]:
        return split_name(self.full)

    @property
    def entry(self) -> str:
        """The function's qualified name: no return type, template arguments or parameters."""
        return self._parts[0]

    @property
    def arguments(self) -> str:
        """Its outermost template arguments, "" where there are none."""
        return self._parts[1]


def short_name(full: str, width: int | None = 40) -> str:
    """The function of a kernel's name, without namespaces and template arguments: what tells it apart in a sentence. width:
    of the longest, cut there; None: whole."""
    entry = split_name(full)[0].split("::")[-1].strip() or full
    return entry if width is None or len(entry) <= width else entry[: width - 1] + "…"


def split_name(full: str) -> tuple[str, str]:
    """(entry, template arguments) of a kernel's name; a name that is no C++ signature is its own entry.

    Profilers cut long names, and a mangled one that was cut cannot be demangled: of those the identifiers are read.

    >>> split_name("void ns::k<(int)1, f(int)::[lambda(int) (instance 1)]>(T1 *, int)")
    ('ns::k', '(int)1, f(int)::[lambda(int) (instance 1)]')
    """
    if full.startswith("["):
        return full, ""  # "[CUDA memcpy HtoD]": no kernel
    name = _SUFFIX.sub("", full)
    if name.startswith("_Z"):
        return _split_mangled(name)
    # The demanglers' spellings of an unnamed namespace hold brackets that are no template's or parameter list's.
    text = name.replace("(anonymous namespace)", "{unnamed}").replace("<unnamed>", "{unnamed}")
    if text.startswith("std::enable_if"):
        # nsys writes the condition without its parentheses ("enable_if<T2>(int)0&&…>::type f"): no bracket matches there.
        text = text.partition("::type ")[2] or text
    entry: list[str] = []
    arguments: list[str] = []
    open_: list[str] = []
    for i, c in enumerate(text):
        if c in "<([":
            if c == "(" and not open_:
                break  # the parameter list
            open_.append(c)
            if len(open_) == 1:
                continue
        elif open_ and c == _CLOSES[open_[-1]] and text[i - 1 : i + 1] != "->":
            open_.pop()
            if not open_:
                continue
        if open_:
            arguments.append(c)
        elif c == " ":
            entry, arguments = [], []  # what stood before was the return type
        else:
            entry.append(c)
    return ("".join(entry) or name), "".join(arguments)


_SUFFIX = re.compile(r"(\.kd| \[clone [^\]]*\]|\.{3,})+$")
"""What is no part of a name: ROCm's suffix of a kernel descriptor, a compiler's clone, a profiler's cut."""
_LITERAL = re.compile(r"L[a-z]n?\d+E")  # a number among template arguments: Li256E, Lb1E


def _split_mangled(full: str) -> tuple[str, str]:
    """(entry, template arguments as "a::b::c") of a mangled name by the Itanium C++ ABI, cut off or not.

    >>> split_name("_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_34BlockFmhaPipeline")
    ('ck_tile::kentry', 'ck_tile::FmhaFwdKernel::ck_tile::BlockFmhaPipeline')
    """
    at = 3 if full.startswith("_ZN") else 2
    entry: list[str] = []
    while at < len(full) and (full[at].isdigit() or full[at] in "LKS"):
        if not full[at].isdigit():
            at += 2 if full.startswith("St", at) else 1
            continue
        name, at = _identifier(full, at)
        entry.append("{unnamed}" if name.startswith("_GLOBAL__N") else name)
    arguments: list[str] = []
    while entry and at < len(full):
        if literal := _LITERAL.match(full, at):
            at = literal.end()
        elif full.startswith("S_", at):
            arguments.append(entry[0])  # the first thing that was named
            at += 2
        elif full[at].isdigit():
            name, at = _identifier(full, at)
            arguments.append(name)
        else:
            at += 1
    return "::".join(entry) or full, "::".join(arguments)


def _identifier(full: str, at: int) -> tuple[str, int]:
    """The identifier whose length stands at `at`, and where it ends."""
    digits = re.compile(r"\d+").match(full, at)
    assert digits is not None
    end = digits.end() + int(digits[0])
    return full[digits.end() : end], end


class Rules:
    """Rules in the order in which they are tried."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)

    def classify(self, name: str, kind: str = "kernel") -> Match:
        """The first rule's match; copies, memsets and whole graphs are classed by what they are, not by their name."""
        if kind in ("memcpy", "memset", "graph"):
            return Match({"memcpy": "copy"}.get(kind, kind), "-", None)
        parts = Name(name)
        for rule in self.rules:
            found = rule.match(parts)
            if found is not None:
                return found
        return OTHER


def load_rules(user: Sequence[Path] | None = None) -> Rules:
    """The user's rules, file by file, then those of `protocols/classes/` in the order of RULE_FILES.

    Raises HarnessError naming file, rule number and key of the first mistake.
    """
    rules = [rule for path in user or () for rule in parse_rules(_read(path), str(path))]
    shipped = resources.files("protocols") / "classes"
    for name in RULE_FILES:
        rules += parse_rules((shipped / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")
    return Rules(rules)


def parse_rules(text: str, file: str) -> list[Rule]:
    """Rules of one YAML file: a mapping with `rules`, a list of mappings of KEYS. Raises HarnessError as `load_rules`."""
    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise HarnessError(yaml_sentence(error, file)) from None
    except (
        Exception
    ) as error:  # the library's constructors raise what they stumble over: a date that is none, a key that is a list
        raise HarnessError(f"{file} cannot be read as YAML ({one_line(error)}); correct it.") from None
    rows = document.get("rules") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise HarnessError(f"{file} has no list `rules`; write `rules:` and one `- pattern: …, class: …` a rule.")
    unknown = set(document) - {"rules", "engine"} if isinstance(document, dict) else set()
    if unknown:
        raise HarnessError(f"{file} has an unknown key {sorted(map(str, unknown))[0]!r}; use `engine` and `rules`.")
    return [_rule(row, file, number) for number, row in enumerate(rows, 1)]


def _rule(row: Any, file: str, number: int) -> Rule:
    where = f"{file} rule {number}"
    if not isinstance(row, dict):
        raise HarnessError(f"{where} is no mapping; write `pattern` and `class`.")
    for key, value in row.items():
        if key not in KEYS:
            raise HarnessError(f"{where} has an unknown key {key!r}; use {', '.join(KEYS)}.")
        if not isinstance(value, str) or not value:
            raise HarnessError(f"{where}, key {key!r}: {value!r} is no text; put it in quotes.")
    regexes = {key: _regex(row[key], where, key) for key in ("pattern", "entry", "arguments") if key in row}
    if not regexes:
        raise HarnessError(f"{where} has neither `pattern` nor `entry` nor `arguments`; give a regular expression.")
    if row.get("class") not in FAMILIES:
        raise HarnessError(f"{where}, key 'class': {row.get('class')!r} is none of {', '.join(FAMILIES)}.")
    return Rule(
        file, number, row["class"], **regexes,
        weight_type=row.get("weight_type"), tile=row.get("tile"), arithmetic=row.get("arithmetic"),
    )  # fmt: skip


def _regex(text: str, where: str, key: str) -> re.Pattern[str]:
    try:
        regex = re.compile(text)
    except re.error as error:
        raise HarnessError(f"{where}, key {key!r}: {text!r} is no regular expression ({error}); correct it.") from None
    for group in regex.groupindex:
        if group not in GROUPS:
            raise HarnessError(f"{where}, key {key!r}: unknown group {group!r}; use {', '.join(GROUPS)}.")
    return regex


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HarnessError(f"{path} does not exist; give a YAML file of rules.") from None
    except (OSError, UnicodeError) as error:
        raise HarnessError(f"{path} cannot be read as rules ({error}); give a UTF-8 YAML file.") from None


def classify_launches(table: pd.DataFrame, rules: Rules) -> tuple[pd.DataFrame, dict[tuple[str, str], Match]]:
    """The table with `class` and `weight_type` filled, and what each distinct (name, kind) was found to be.

    Rules run once per distinct name: a million launches have some sixty names.
    """
    codes, names = text_codes(table["name"])
    kinds = table["kind"].cat.codes.to_numpy()
    categories = list(table["kind"].cat.categories)
    row, pairs = pd.factorize(codes * len(categories) + kinds)
    found = {}
    for pair in pairs.tolist():
        name, kind = str(names[pair // len(categories)]), categories[pair % len(categories)]
        found[name, kind] = rules.classify(name, kind)
    matches = list(found.values())
    table = table.copy(deep=False)
    for column, values in (("class", [m.cls for m in matches]), ("weight_type", [m.weight_type for m in matches])):
        table[column] = pd.array(np.array(values, object)[row], dtype=pd.StringDtype("python"))
    return table, found
