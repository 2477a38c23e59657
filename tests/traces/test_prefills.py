"""What a recording's window holds: several prefills, a model's upload, one prefill, and the tok/s that follows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import launches
from harness.attribution.decompose import Decomposition, decompose
from harness.attribution.recorded import load_recorded
from harness.cli import group
from harness.errors import HarnessError

QWEN = "qwen2.5-7b-q4_k_m"
CUBLAS = "nsys_h200_llama_cpp_cublas_ub4096.sqlite"


def recording(path: Path, *, prefills: int, layers: int = 4, head: bool = True, upload: int = 0) -> Path:
    """A launch table as a source reads it: an upload, then forwards of 1 ms a launch, 5 ms apart."""
    names: list[tuple[str, int, int]] = []  # name, ns, bytes
    names += [("[CUDA memcpy HtoD]", 3_000_000, upload // 4)] * (4 if upload else 0)
    for _ in range(prefills):
        names.append(("void k_get_rows_float<float, float>(int)", 1_000_000, -1)) if head else None
        for _ in range(layers):
            names += [(n, 1_000_000, -1) for n in ("nvjet_sm90_hsh_128x240_64x4_2x1_v_bz_TNT", "void flash::flash_fwd_kernel<int>(int)",
                                                   "ampere_fp16_s884gemm_128x64_nn", "void vllm::rms_norm_kernel<float>(float*)")]  # fmt: skip
        names.append(("nvjet_sm90_hsh_384x8_64x4_2x1_v_bz_TNT", 1_000_000, -1)) if head else None
    first = [n in ("void k_get_rows_float<float, float>(int)",) for n, *_ in names]
    ns = np.array([n for _, n, _ in names])
    start = np.cumsum(np.r_[0, ns[:-1]] + np.where(first, 5_000_000, 100))
    table = launches.from_columns(
        name=[n for n, *_ in names], kind=["memcpy" if "HtoD" in n else "kernel" for n, *_ in names], start_ns=start - start[0],
        end_ns=start - start[0] + ns, device=[0] * len(names), grid=["8,8,1"] * len(names), bytes=launches.nullable([b for *_, b in names], "Int64"),
    )  # fmt: skip
    launches.save(table, path)
    return path


def decomposed(path: Path, **more: object) -> Decomposition:
    found = load_recorded(path, **more)  # type: ignore[arg-type]
    return decompose(found.launches, wall_ns=found.wall_ns, roles=found.roles, **found.about)


@pytest.mark.parametrize("prefills", [1, 2, 5])
def test_tok_per_s_is_that_of_one_prefill(tmp_path: Path, prefills: int) -> None:
    path = recording(tmp_path / "t.parquet", prefills=prefills)
    one = 18 * 1e6 + 17 * 100  # ns: 18 launches and what lies between them
    result = decomposed(path, tokens=512)
    assert result.tok_per_s == pytest.approx(512 / one * 1e9)
    assert (result.prefills, result.tokens) == ((prefills, 512 * prefills) if prefills > 1 else (None, 512))
    if prefills > 1:
        assert decomposed(path, tokens=512, occurrence=2).tok_per_s == pytest.approx(512 / one * 1e9)
        assert any(f"--occurrence 1 to {prefills}" in n for n in result.notes)


@pytest.mark.parametrize("prefills", [1, 5])
def test_layers_that_nothing_tells_from_prefills_give_no_tok_per_s(tmp_path: Path, prefills: int) -> None:
    path = recording(tmp_path / "t.parquet", prefills=prefills, head=False)
    result = decomposed(path, tokens=512)
    assert result.tok_per_s is None and result.ok
    assert any(f"repeats {4 * prefills} ×" in n and "--occurrence" in n for n in result.notes)
    with pytest.raises(HarnessError, match=f"holds one prefill as far as .* {4 * prefills} layers"):
        load_recorded(path, occurrence=1)


def test_an_occurrence_of_one_prefill_is_refused_by_name(tmp_path: Path) -> None:
    path = recording(tmp_path / "t.parquet", prefills=1)
    with pytest.raises(HarnessError, match=r"holds one prefill .* so there is no --occurrence 1; leave it out") as why:
        load_recorded(path, occurrence=1)
    assert "\n" not in str(why.value)


@pytest.mark.parametrize(("upload", "named"), [(400 << 20, True), (1 << 20, False), (0, False)])
def test_an_upload_is_named_where_there_is_one(tmp_path: Path, upload: int, named: bool) -> None:
    path = recording(tmp_path / "t.parquet", prefills=3, upload=upload)
    result = decomposed(path, tokens=512)
    assert any("model upload" in n for n in result.notes) == named
    assert result.tok_per_s == pytest.approx(512 / (18 * 1e6 + 17 * 100) * 1e9)


def test_llama_cpps_upload_is_left_out_of_the_models_window_unless_asked_for(traces: Path) -> None:
    result = decomposed(traces / CUBLAS, gguf=QWEN)
    assert result.busy_ms == pytest.approx(507.540, abs=5e-4) and result.prefills == 4 and result.ok
    assert any("338 copies, 4.37 GB" in n and "left out" in n for n in result.notes)
    assert result.tok_per_s == pytest.approx(
        3325 / np.median([decomposed(traces / CUBLAS, occurrence=k).wall_ms for k in (1, 2, 3, 4)]) * 1e3
    )
    whole = decomposed(traces / CUBLAS, gguf=QWEN, with_upload=True)
    assert whole.traced_wall_ms == pytest.approx(1774.598153) and whole.tok_per_s == result.tok_per_s
    assert sum(r.gmac or 0 for r in whole.classes) == pytest.approx(sum(r.gmac or 0 for r in result.classes))
    assert decomposed(traces / CUBLAS).busy_ms == pytest.approx(1107.599966), "no model named: the recording as it is"


@pytest.mark.parametrize("upload", [False, True])
def test_a_single_prefill_is_cut_behind_its_upload_and_keeps_its_inputs(
    traces: Path, tmp_path: Path, upload: bool
) -> None:
    """One occurrence of llama.cpp with the upload ahead of it: nothing repeats, and the input's copies stay."""
    whole = load_recorded(traces / CUBLAS).launches
    one = load_recorded(traces / CUBLAS, occurrence=1)
    first = int((whole["name"].str.contains("rms_norm").to_numpy()).argmax()) - 6  # six input copies
    part = whole.iloc[: first + len(one.launches)] if upload else whole.iloc[first : first + len(one.launches)]
    part = (
        part.reset_index(drop=True)
        .assign(**{"class": "", "weight_type": "-"})
        .astype({"class": "string", "weight_type": "string"})
    )
    launches.save(part, tmp_path / "t.parquet")
    result = decomposed(tmp_path / "t.parquet", gguf=QWEN)
    assert result.ok and result.prefills == 1
    assert result.traced_wall_ms == pytest.approx(one.wall_ns / 1e6) and result.launches == len(one.launches)
    assert result.tok_per_s == pytest.approx(3325 / one.wall_ns * 1e9)
    assert any("model upload" in n for n in result.notes) == upload


def test_transformers_prefill_by_role(traces: Path) -> None:
    path = traces.parents[1] / "cases" / "traces" / "h200_hf_qwen2_7b_prefill_3325.pt.trace.json.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    result = decomposed(path, gguf=QWEN, tokens=3325)
    assert result.ok and (result.busy_ms, result.gap_ms) == pytest.approx((84.993, 3.442), abs=1e-3)
    assert sum(r.sum_ms for r in result.classes if r.cls == "gemm") == pytest.approx(57.78, abs=5e-3)
    rate = {cls: [r for r in result.roles if r.cls == cls] for cls in ("gate_up", "down", "q_o", "attention")}
    per_gmac = {c: sum(r.sum_ms for r in rows) * 1e3 / sum(r.gmac or 0 for r in rows) for c, rows in rate.items()}
    assert per_gmac == pytest.approx({"gate_up": 2.63, "down": 2.60, "q_o": 2.81, "attention": 4.49}, abs=1e-2)
    small = next(r for r in result.classes if (r.cls, r.weight_type) == ("gemm", "f32"))
    assert small.launches == 1 and small.gmac is None
    assert result.tok_per_s == pytest.approx(3325 / 88.435 * 1e3, rel=1e-4)
    with pytest.raises(HarnessError, match=r"holds one prefill .*28 layers"):
        load_recorded(path, occurrence=1)
    wrong = decomposed(path, gguf=QWEN, tokens=33250)
    assert not wrong.check("plan").ok and wrong.tok_per_s is None


def forwards(
    path: Path, each: list[tuple[int, bool, int]], *, layers: int = 4, told: bool = True, first: int = 0, last: int = 0
) -> Path:
    """Forwards of (rows, with a head, cached rows) as an engine of block-a-row norms runs them, cut at `first` and `last`
    launches from the ends. told: the norms are kernels whose grid is known to be their rows."""
    norm = "void vllm::rms_norm_kernel<float>(float*)" if told else "void my::rms_norm_kernel<float>(float*)"
    found: list[tuple[str, str, int]] = []  # name, grid, ns
    for rows, head, past in each:
        found.append(("void k_get_rows_float<float, float>(int)", "8,1,1", 1000))
        for _ in range(layers):
            found += [(norm, f"{rows},1,1", 500), ("nvjet_sm90_hsh_128x240_64x4_2x1_v_bz_TNT", "132,1,1", 100 * rows),
                      ("void flash::flash_fwd_kernel<int>(int)", "132,1,1", 40 * rows + 80 * past), ("ampere_fp16_s884gemm_128x64_nn", "132,1,1", 90 * rows),
                      (norm, f"{rows},1,1", 500), ("ampere_fp16_s884gemm_256x64_nn", "132,1,1", 400 * rows), ("ampere_fp16_s884gemm_256x128_nn", "132,1,1", 200 * rows)]  # fmt: skip
        if head:
            found += [(norm, "1,1,1", 500), ("nvjet_sm90_hsh_384x8_64x4_2x1_v_bz_TNT", "66,1,1", 9000)]
    found = found[first : len(found) - last]
    ns = np.array([f[2] for f in found])
    start = np.cumsum(np.r_[0, ns[:-1] + 100])
    table = launches.from_columns(
        name=[f[0] for f in found], grid=[f[1] for f in found], kind=["kernel"] * len(found), start_ns=start, end_ns=start + ns, device=[0] * len(found),
    )  # fmt: skip
    launches.save(table, path)
    return path


CHUNKS = [(512, False, 0), (512, False, 512), (512, False, 1024), (512, True, 1536)]
HEADS = [(512, True, 512 * i) for i in range(4)]
EACH = 4 * 7 + 3


@pytest.mark.parametrize(
    ("each", "tokens", "prefills"),
    [([(700, True, 0)], 700, None), ([(700, True, 0)] * 4, 700, 4), (CHUNKS, 2048, None), (CHUNKS * 4, 2048, 4)],
    ids=["one", "several", "chunked", "several chunked"],
)
def test_tokens_are_held_to_the_rows_in_grids(
    tmp_path: Path, each: list[tuple[int, bool, int]], tokens: int, prefills: int | None
) -> None:
    path = forwards(tmp_path / "t.parquet", each)
    result = decomposed(path, tokens=tokens)
    assert result.ok and "by grids of a block a row" in result.check("plan").detail
    assert result.tok_per_s and result.prefills == prefills
    for wrong in (tokens // 4, tokens - 1, tokens + 1, 2 * tokens, 4096):
        other = decomposed(path, tokens=wrong)
        assert not other.check("plan").ok and other.tok_per_s is None, wrong
        assert f"{tokens} rows, not {wrong}" in other.check("plan").detail
    blind = decomposed(forwards(tmp_path / "b.parquet", each, told=False), tokens=999)
    assert blind.ok and blind.check("plan").detail == "tokens as given, not checked"


@pytest.mark.parametrize(
    ("each", "first", "last", "tokens", "why"),
    [
        ([(700, True, 0)], 9, 0, 700, "starts inside"), ([(700, True, 0)], 0, 12, 700, "ends inside"),
        ([(700, True, 0)] * 2, 9, 12, 700, "inside a forward"), (HEADS, 0, 0, 2048, "attention takes"), (HEADS, 0, 0, 512, "attention takes"),
        ([(700, True, 0), *[(1, True, 700)] * 5], 0, 0, 700, "decode steps"),
    ],
    ids=["cut start", "cut end", "cut both", "heads in chunks", "a chunk as a prefill", "decode steps"],
)  # fmt: skip
def test_what_is_no_whole_prefill_gets_no_tok_per_s(
    tmp_path: Path, each: list[tuple[int, bool, int]], first: int, last: int, tokens: int, why: str
) -> None:
    path = forwards(tmp_path / "t.parquet", each, first=first, last=last)
    result = decomposed(path, tokens=tokens)
    assert result.tok_per_s is None and result.check("plan").ok
    assert any(n.startswith("no tok/s") and why in n for n in result.notes), result.notes


@given(first=st.integers(1, EACH - 1), last=st.integers(1, EACH - 1), tokens=st.sampled_from([350, 700, 1400]))
@settings(deadline=None, max_examples=20)
def test_cut_ends_never_make_another_tok_per_s(
    tmp_path_factory: pytest.TempPathFactory, first: int, last: int, tokens: int
) -> None:
    """Four prefills of which the first and the last are cut: the whole ones tell, or none does."""
    path = forwards(tmp_path_factory.mktemp("cut") / "t.parquet", [(700, True, 0)] * 4, first=first, last=last)
    one = decomposed(forwards(path.parent / "one.parquet", [(700, True, 0)]), tokens=700)
    result = decomposed(path, tokens=tokens)
    if tokens == 700:
        assert result.tok_per_s in (None, pytest.approx(one.tok_per_s, rel=0.01))
    else:
        assert result.tok_per_s is None and not result.check("plan").ok


def test_a_saved_table_says_its_tokens(tmp_path: Path) -> None:
    path = forwards(tmp_path / "t.parquet", [(700, True, 0)])
    table = launches.load(path)
    saved = launches.Saved(source="cupti", tokens=700, wall_ns=10**9)
    launches.save(table.assign(**{"class": "gemm"}).astype({"class": "string"}), tmp_path / "s.parquet", saved)
    assert (
        "700 tokens, as the table was saved of" in decomposed(tmp_path / "s.parquet", tokens=700).check("plan").detail
    )


@pytest.mark.parametrize("layers", [1, 2, 4, 7, 14])
def test_a_transformers_prefill_has_the_layers_that_ran(
    traces: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    from dataclasses import replace

    from harness.attribution import recorded

    path = traces.parents[1] / "cases" / "traces" / "h200_hf_qwen2_7b_prefill_3325.pt.trace.json.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    whole = recorded.geometry_of(QWEN)
    monkeypatch.setattr(recorded, "geometry_of", lambda _: replace(whole, layers=layers))
    result = decomposed(path, gguf=QWEN, tokens=3325)
    assert not result.check("plan").ok and "forwards of 28 layers" in result.check("plan").detail
    assert result.tok_per_s is None and {r.gmac for r in result.classes} == {None}
    with pytest.raises(HarnessError, match="holds forwards of 28 layers, and the model of --gguf has"):
        load_recorded(path, gguf=QWEN, occurrence=1)


def test_the_command_exits_6_where_the_plan_fails(traces: Path) -> None:
    done = CliRunner().invoke(
        group, ["decompose", "--trace", str(traces / CUBLAS), "--gguf", QWEN, "--tokens", "99", "--occurrence", "2", "--json", "-"],
        standalone_mode=False,
    )  # fmt: skip
    assert done.return_value == 6
    check = next(c for c in json.loads(done.output)["checks"] if c["name"] == "plan")
    assert not check["ok"] and "3325 tokens, not 99" in check["detail"]
