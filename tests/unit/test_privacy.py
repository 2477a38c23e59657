"""What is taken out of a text before it is passed on, and what must stay: kernel names, hashes, versions."""

from __future__ import annotations

import json
import string
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from harness.ab.protocol import LandingProtocol
from harness.ab.start import Request, new_round, resumed
from harness.attribution.recorded import names
from harness.cli import group
from harness.config import load_arm, load_protocol
from harness.errors import HarnessError
from harness.privacy import GONE, clean, clean_json, hidden, inherited, is_secret_key, shown, shown_change, shown_config

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"

# text, what must be gone, what must stay
TOLD = [
    ("export HF_TOKEN=abc123 && run", "abc123", "&& run"),
    ("my token is hf_" + "aB3" * 12, "aB3aB3", "my token is"),
    ("clone with ghp_" + "a1B2" * 9 + " now", "ghp_a1B2", "now"),
    ("github_pat_" + "11ABCDEFG0" * 4, "11ABCDEFG0", ""),
    ("sk-ant-api03-" + "x9_-" * 20, "x9_-", ""),
    ("sk-proj-" + "Ab1-" * 12, "Ab1-", ""),
    ("sk-proj-" + "abcDEF" * 5, "abcDEF", ""),
    ("login pw=Tr0ub4dor then", "Tr0ub4dor", "then"),
    ("db?user=x&pass=hunter2&page=2", "hunter2", "&page=2"),
    ("ssh root@10.0.0.5:8080 now", "root", "now"),
    ("scp me@node17:/opt/x.txt", "me@node17", "scp"),
    ("AKIAIOSFODNN7EXAMPLE in prose", "AKIAIOSFODNN7EXAMPLE", "in prose"),
    ("xoxb-123456789012-abcdef", "123456789012", ""),
    ("https://hooks.slack.com/services/T000/B000/XXXX", "T000/B000", "https"),
    ("glpat-abcdefghij0123456789", "abcdefghij", ""),
    ("npm_" + "a0" * 18, "a0a0", ""),
    ("pypi-AgEIcHlwaS5vcmcCJD" + "a" * 20, "AgEIcHlwaS5vcmc", ""),
    ("AIza" + "Sy0-" * 9, "Sy0-", ""),
    ("nvapi-" + "Zz9_" * 12, "Zz9_", ""),
    ("hvs.CAESI" + "a1" * 12, "CAESI", ""),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N", "eyJzdWIi", ""),
    ("Authorization: Bearer abc.def-123", "abc.def", "Authorization"),
    ("curl -H 'authorization: Basic dXNlcjpwYXNz' x", "dXNlcjpwYXNz", "curl"),
    ("sent bearer 0123456789abcdef along", "0123456789abcdef", "along"),
    ('{"password": "hunter2", "layer": 3}', "hunter2", '"layer": 3'),
    ('{"api_key": "a \\"quoted\\" one"}', "quoted", ""),
    (r'{\"client_secret\": \"s3cr3t\"}', "s3cr3t", ""),
    ('password="unfinished quote', "unfinished", "password"),
    ("login with password: tr0ub4dor and go", "tr0ub4dor", "and go"),
    ("run --api-key k3y --tokens 512", "k3y", "--tokens 512"),
    ("AWS_SECRET_ACCESS_KEY='wJalrXUtnFEMI/K7MDENG'", "wJalr", "AWS_SECRET_ACCESS_KEY"),
    ("url?access_token=zzz&page=2", "zzz", "&page=2"),
    ("postgres://bob:pw@db/x", "bob:pw", "postgres://"),
    ("mail to jane.doe+x@mail.example.org please", "jane.doe", "please"),
    ("on 10.20.30.40:8000", "10.20.30.40", ":8000"),
    ("MASTER_ADDR=192.168.7.9 rank 3", "192.168.7.9", "rank 3"),
    ("http://203.0.113.7/x", "203.0.113.7", "http://"),
    ("peer fe80::1ff:fe23:4567:890a%eth2 up", "fe80", "up"),
    ("at 2001:db8:85a3::8a2e:370:7334", "2001:db8", "at"),
    ("loopback ::1 here", "::1", "here"),
    ("mac 00:1b:44:11:3a:b7", "00:1b:44", "mac"),
    ("host ip-172-31-4-9.ec2.internal", "172-31-4-9", "host"),
    ("/home/alice/models/x.gguf loaded", "alice", "loaded"),
    ("/root/.cache/huggingface", "huggingface", ""),
    ("file:///Users/bob/x.py(12): forward", "bob", "(12): forward"),
    ("/mnt/team-rocket/run7", "team-rocket", ""),
    ("/gpfs01/grp/carol/out and /lustre/scratch/dave", "carol", "and"),
    ("/scratch/dave/x", "dave", ""),
    ("/workspace/erin/vllm/attn.py", "erin", ""),
    ("~frank/notes and ~/mine", "frank", "and"),
    (r"C:\Users\Grace Hopper\model.gguf ready", "Grace", "ready"),
    (r"D:\\data\\heidi\\x.bin", "heidi", ""),
    (r"\\fileserver\ivan\x", "ivan", ""),
    ("C:/Users/judy/x", "judy", ""),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----", "b3BlbnNza", ""),
]  # fmt: skip

STAYS = [
    "the token embedding of layer 3", "tokens=512", "token=17", "prefill tokens: 3325", "next_token: 5", "secret sauce", "key=value order", "KV cache keys",
    "cuDNN 9.10.2.21", "curand==10.3.9.90", "v1.2.3.4", "nvidia_cublas_cu12-12.8.4.1", "driver 580.159.04", "nsys 2025.3.2.367", "NCCL version 2.21.5.1", "CUDA 12.8.0.38",
    "12:34:56", "2026-12-01T02:28:00+00:00", "std::chrono::seconds", "a::b::c", "0000:1b:00.0", "dead::beef", "f16::add",
    "/model/layers.0/self_attn/MatMul", "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "and/or", "tok/s", "GB/s", "8c51daf98e28", "0123456789abcdef" * 4,
    "sha256:" + "ab" * 32, "configuration 9159d1534c97f02d", "[CUDA memcpy HtoD]", "hf_generate", "sk-learn-pipeline-of-steps", "layer3 @ step 7", "µs/GMAC", "author=me", "C::operator()", "a ~ b",
    "ProfilerStep#3", "pass=3", "pass=forward", "kernel@plt", "memcpy@GLIBC_2.14", "foo@bar:baz", "nn.Module: Qwen2Attention_0", "aten::mm", "L03 gate", "", "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize(("text", "gone", "stays"), TOLD, ids=[t[0][:32] for t in TOLD])
def test_what_tells_of_a_person_is_gone_and_the_rest_stays(text: str, gone: str, stays: str) -> None:
    assert gone in text
    cleaned = clean(text)
    assert gone not in cleaned and stays in cleaned and GONE in cleaned
    assert clean(f"before {text} after").startswith("before ") and gone not in clean(f"x={text}")


@pytest.mark.parametrize("text", STAYS, ids=[t[:32] or "empty" for t in STAYS])
def test_what_tells_nothing_stays(text: str) -> None:
    assert clean(text) == text


@given(st.text(max_size=120))
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = clean(text)
    assert clean(once) == once


@given(st.integers(1, 64).flatmap(lambda n: st.text(alphabet="0123456789abcdef", min_size=n, max_size=n)))
def test_a_hash_stays(text: str) -> None:
    assert (
        clean(text) == text and clean(f"identity {text}, config {text[:12]}") == f"identity {text}, config {text[:12]}"
    )


@given(
    st.lists(st.integers(0, 255), min_size=4, max_size=4),
    st.sampled_from(["from ", "on ", "http://", "addr=", "(", '"']),
)
def test_an_ipv4_address_goes_and_the_same_numbers_as_a_version_stay(parts: list[int], before: str) -> None:
    text = ".".join(map(str, parts))
    assert text not in clean(before + text)
    assert clean(f"cuda {text}") == f"cuda {text}" and clean(f"lib-{text}.whl") == f"lib-{text}.whl"
    assert clean(f"{before}{text}.7") == f"{before}{text}.7"  # five numbers are no address


@given(st.ip_addresses(v=6).filter(lambda a: a.compressed.count(":") >= 3 and any(c.isdigit() for c in a.compressed)))
def test_an_ipv6_address_goes_in_either_spelling(address) -> None:  # type: ignore[no-untyped-def]
    for text in (address.compressed, address.exploded):
        assert text not in clean(f"peer {text} up")


@given(st.sampled_from(["ghp_", "gho_", "hf_", "npm_", "glpat-", "nvapi-", "AKIA", "r8_"]), st.text(alphabet=string.ascii_uppercase + string.digits, min_size=36, max_size=60), st.text(alphabet="ab c.,:=", max_size=9))  # fmt: skip
def test_a_token_goes_wherever_it_stands(prefix: str, body: str, around: str) -> None:
    assert body not in clean(f"{around} {prefix}{body} {around}") and body not in clean(
        json.dumps({"note": f"{prefix}{body}"})
    )


@pytest.mark.parametrize("piece", ["a", "token_", "a.b-", "/home/", "1.2.3.", "::", "x@", "C:\\a b", "eyJa.", '"', 'password="', "--token ", "\\", "f:", "~a/"])  # fmt: skip
def test_the_time_grows_with_the_text_and_not_faster(piece: str) -> None:
    """CPU time of 20,000 characters, which is 0.1 s to 0.3 s; patterns that look back over the whole text took 90 s to 200 s."""
    text = (piece * 20_000)[:20_000]
    start = time.process_time()
    clean(text)
    assert time.process_time() - start < 3


def test_json_is_cleaned_at_every_depth_and_its_numbers_stay() -> None:
    value = {"a": [{"password": "x1", "n": 3, "note": "from 10.0.0.1"}], "api_key": "k", "tokens": 5, "ok": None}
    assert clean_json(value) == {
        "a": [{"password": GONE, "n": 3, "note": f"from {GONE}"}],
        "api_key": GONE,
        "tokens": 5,
        "ok": None,
    }


def test_kernel_names_of_every_recorded_trace_and_table_stay() -> None:
    seen = 0
    for folder in (SHARED / "data" / "traces", SHARED / "cases" / "traces"):
        for file in sorted(folder.glob("*")) if folder.is_dir() else []:
            try:
                rows = names(file)
            except HarnessError:
                continue  # not a trace, or one that is refused
            for row in rows:
                assert clean(row["name"]) == row["name"]
                seen += 1
    for table in Path(__file__).parent.glob("kernel_names*.tsv"):
        for line in table.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                name = line.split("\t")[-1]
                assert clean(name) == name
                seen += 1
    assert seen >= 290


def test_committed_reports_stay_as_they_are() -> None:
    files = sorted((ROOT / "reports").rglob("*.json"))
    assert len(files) > 10
    for file in files:
        value = json.loads(file.read_text(encoding="utf-8"))
        assert clean_json(value) == value, file
    for file in (ROOT / "reports").rglob("*.md"):
        text = file.read_text(encoding="utf-8")
        assert clean(text) == text, file


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "dbPassword",
        "aws-secret-key",
        "api_key",
        "OPENAI_API_KEY",
        "token",
        "X_AUTH",
        "SESSION_COOKIE",
        "DB_PASS",
    ],
)
def test_a_name_that_holds_a_credential(name: str) -> None:
    assert is_secret_key(name)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "tokens", "max_tokens", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PATH", "AUTHOR", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES", "bypass"])  # fmt: skip
def test_a_name_that_holds_none(name: str) -> None:
    assert not is_secret_key(name)


SALT, OTHER = b"a" * 32, b"b" * 32


def test_a_written_variable_is_shown_unless_its_name_or_form_is_secret() -> None:
    env = {"OMP_NUM_THREADS": "8", "HF_TOKEN": "abc", "NOTE": "ghp_" + "a1" * 18, "MODEL": "/home/me/x.gguf"}
    assert shown(env, SALT) == {
        "OMP_NUM_THREADS": "8",
        "HF_TOKEN": hidden("abc", SALT),
        "NOTE": hidden(env["NOTE"], SALT),
        "MODEL": "/home/me/x.gguf",
    }
    assert shown(env, SALT)["HF_TOKEN"] != shown(env, OTHER)["HF_TOKEN"] and "abc" not in hidden("abc", SALT)


def test_an_inherited_variable_is_a_name_and_a_salted_hash() -> None:
    told = inherited({"USER": "alice", "PWD": "/x", "B": "1"}, SALT)
    assert list(told) == ["B", "USER"] and "alice" not in str(told)
    assert (
        told
        == inherited({"B": "1", "USER": "alice", "SHLVL": "3"}, SALT)
        != inherited({"B": "1", "USER": "alice"}, OTHER)
    )


def test_a_config_hides_credentials_in_argv_args_and_env_and_nothing_else() -> None:
    config = {"name": "x", "tokens": 5, "engine": {"kind": "command", "argv": ["run", "--api-key", "k3y", "--ctx=hf_" + "aB" * 17, "-m", "m.gguf"], "env": {"A": "1", "DB_PASSWORD": "p"},
                                                 "args": {"nested": {"auth_token": "t"}}, "timeout_s": 3.0}}  # fmt: skip
    told = shown_config(config, SALT)
    assert told["engine"]["argv"] == [
        "run",
        "--api-key",
        hidden("k3y", SALT),
        hidden("--ctx=hf_" + "aB" * 17, SALT),
        "-m",
        "m.gguf",
    ]
    assert told["engine"]["env"] == {"A": "1", "DB_PASSWORD": hidden("p", SALT)}
    assert told["engine"]["args"]["nested"]["auth_token"] == hidden("t", SALT) and told["engine"]["timeout_s"] == 3.0
    assert shown_change("engine.env.DB_PASSWORD", "p", SALT) == hidden("p", SALT)
    assert shown_change("engine.env.A", "1", SALT) == "1" and shown_change("tokens", 5, SALT) == 5


def test_a_round_shows_no_credential_and_goes_on_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MY_INHERITED", "of-this-shell")
    for name, secret in (("a", "first-secret"), ("b", "second-secret")):
        (tmp_path / f"{name}.yaml").write_text(
            f"engine: {{kind: command, argv: [x], env: {{HF_TOKEN: {secret}, OMP_NUM_THREADS: '2'}}}}\n",
            encoding="utf-8",
        )
    arms = {letter: load_arm(tmp_path / f"{letter.lower()}.yaml") for letter in "AB"}
    paths = {letter: str(tmp_path / f"{letter.lower()}.yaml") for letter in "AB"}
    path, record = new_round(Request(arms=arms, paths=paths), load_protocol("landing", LandingProtocol), {"cpu": "x"})
    text = (path / "record.json").read_text(encoding="utf-8")
    assert "first-secret" not in text and "second-secret" not in text and "of-this-shell" not in text
    assert record.arms["A"].config["engine"]["env"]["OMP_NUM_THREADS"] == "2"
    assert record.environment["MY_INHERITED"].startswith("hidden:")
    (change,) = record.diff
    assert change.key == "engine.env.HF_TOKEN" and change.before != change.after
    again = resumed(path, record, None)
    assert again["B"].engine.kind == "command" and again["B"].engine.env["HF_TOKEN"] == "second-secret"
    (tmp_path / "b.yaml").unlink()
    with pytest.raises(HarnessError, match=r"arm B .* holds a credential that round 0001 does not show"):
        resumed(path, record, None)


def test_save_writes_no_home_or_token_of_a_range(tmp_path: Path) -> None:
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "GPU"}],
        "traceEvents": [
            {"ph": "X", "cat": "user_annotation", "name": "prefill of /home/alice/run ghp_" + "a1" * 18, "pid": 1, "tid": 1, "ts": 0, "dur": 50},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {"correlation": 7}},
            {"ph": "X", "cat": "kernel", "name": "void k<int>(float*)", "pid": 0, "tid": 7, "ts": 10, "dur": 20, "args": {"device": 0, "stream": 7, "correlation": 7}},
        ],
    }  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(trace), encoding="utf-8")
    range_ = trace["traceEvents"][0]["name"]  # type: ignore[index]
    done = CliRunner().invoke(group, ["decompose", "--trace", str(tmp_path / "t.json"), "--range", range_, "--save", str(tmp_path / "out")], standalone_mode=False)  # fmt: skip
    assert done.exception is None, done.exception
    for file in (tmp_path / "out").iterdir():
        assert b"alice" not in file.read_bytes() and b"ghp_" not in file.read_bytes(), file
    assert (
        "void k<int>(float*)" in str(json.loads((tmp_path / "out" / "decomposition.json").read_text()))
        or (tmp_path / "out" / "launches.parquet").is_file()
    )
