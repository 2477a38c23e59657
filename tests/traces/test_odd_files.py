"""PyTorch profiler files as they really are: spellings beside the standard, other writers' text, sizes that must not be held."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made import event, trace_file

from harness.errors import HarnessError
from harness.sources import kineto
from harness.sources.kineto import read_kineto

EVENTS = [event(f"k{i}", 10 * i, 5, correlation=i) for i in range(12)]


@pytest.mark.parametrize("spelling", ["inf", "-inf", "nan", "-nan", "Infinity", "NaN", "INF", "nan(ind)", "-nan(snan)"])
@pytest.mark.parametrize("window", [1 << 22, 50])
def test_numbers_that_json_does_not_have_are_read(
    tmp_path: Path, spelling: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kineto, "_WINDOW", window)
    events = [
        e | {"args": e["args"] | {"memory bandwidth (GB/s)": "@", "said": 'an "inf" or a nan, and inf'}} for e in EVENTS
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events, "after": "@"}).replace('"@"', spelling))
    assert read_kineto(path).launches["name"].tolist() == [e["name"] for e in EVENTS]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_byte_order_mark_and_control_characters_are_read(tmp_path: Path, encoding: str, suffix: str) -> None:
    text = json.dumps({"traceEvents": [event("a@b", 1, 2), *EVENTS]}).replace("@", "\x01\x1f\t")
    path = tmp_path / f"t{suffix}"
    raw = text.encode(encoding)
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    assert "a\x01\x1f\tb" in read_kineto(path).launches["name"].tolist()


def test_backslashes_that_escape_nothing_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event("a@models@x", 1, 2), *EVENTS]}).replace("@", "\\"))
    assert read_kineto(path).launches["name"].iloc[1].startswith("a\\models")


@pytest.mark.parametrize("depth", [900, 5000, 300_000])
def test_deep_nesting_is_passed_over_beside_the_events_and_one_sentence_inside(tmp_path: Path, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    path = tmp_path / "t.json"
    events = json.dumps(EVENTS)
    path.write_text(f'{{"deviceProperties": {deep}, "other": {deep}, "traceEvents": {events}}}')
    assert len(read_kineto(path).launches) == 12
    path.write_text(f'{{"traceEvents": [{deep}, {events[1:]}}}')
    try:
        assert len(read_kineto(path).launches) == 12
    except HarnessError as error:
        assert "nests deeper than any profiler writes" in str(error) and depth > 900


def whole(**keys: Any) -> str:
    return json.dumps({"schemaVersion": 1, "traceEvents": EVENTS, **keys})


@pytest.mark.parametrize("cut", range(400, 1100, 90))
@pytest.mark.parametrize("back", [40, 333])
def test_two_writers_in_one_file_are_named(tmp_path: Path, cut: int, back: int) -> None:
    """The second writer's text from some place on, laid over the first one's."""
    path = tmp_path / "t.json"
    text = whole()
    path.write_text(text[:cut] + "," + text[cut - back :])
    try:
        found = read_kineto(path)
    except HarnessError as error:
        assert "two processes (ranks) wrote into one file" in str(error) or "not a whole" in str(error)
        assert "two processes" in str(error) or text[cut - back - 1 : cut - back] in "}, "
    else:
        assert len(found.launches) >= 12  # cut and laid between two values: it is whole JSON


def test_two_documents_in_one_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(whole() + "\n" + whole())
    with pytest.raises(HarnessError, match="holds two traces one after the other"):
        read_kineto(path)
    path.write_text(whole() + "\n\n")
    assert len(read_kineto(path).launches) == 12


@pytest.mark.parametrize(
    "properties", [None, 3, "x", {"id": 0}, [3], [{"id": "0", "name": "x"}], [{"name": 5}], [{"id": 0, "name": "H100"}]]
)
def test_device_properties_of_any_shape_cost_nothing(tmp_path: Path, properties: Any) -> None:
    trace = read_kineto(trace_file(tmp_path / "t.json", EVENTS, deviceProperties=properties))
    assert trace.gpus == ({0: "H100"} if properties == [{"id": 0, "name": "H100"}] else {})


def test_a_file_that_unpacks_to_much_beside_its_events_does_not_take_it(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    events = json.dumps(EVENTS)
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"padding": "')
        for _ in range(150):
            file.write("x" * 1_000_000)
        file.write('", "deep": ')
        file.write("[" * 1_000_000 + "]" * 1_000_000)
        file.write(f', "traceEvents": {events}}}')
    script = (
        "import resource, sys; from pathlib import Path; import pandas; from harness.sources.kineto import read_kineto\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "n = len(read_kineto(Path(sys.argv[1])).launches)\n"
        "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    count, grown_kb = map(int, done.stdout.split())
    assert count == 12 and grown_kb < 60_000
