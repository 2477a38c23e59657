"""What a text tells of a person, an account or a machine, and how it is taken out before a file is passed on.

Removed are credentials by the prefixes that their issuers document, values of secret-like names, bearer headers, e-mail,
IP and MAC addresses, and paths below home, temporary and mounted folders. Kernel names, hashes and dotted versions stay.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any

GONE = "scrubbed"

_PREFIXED: tuple[tuple[str, str], ...] = (
    # who issues it, and where its form is written down; the pattern of the whole token
    ("GitHub, docs: about authentication, token formats", r"(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,})"),
    ("GitLab, docs: token overview, token prefixes", r"gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct|wt)-[\w.-]{16,}"),
    ("Hugging Face, docs: user access tokens", r"(?:hf|api_org)_[A-Za-z0-9]{16,}"),
    ("OpenAI and Anthropic, API references (sk-, sk-proj-, sk-ant-)", r"sk-(?:(?:proj|ant|svcacct|admin|or)-|(?=[\w-]*\d))[\w-]{16,}"),
    ("AWS, IAM reference: unique identifiers", r"(?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA|A3T[A-Z0-9])[A-Z0-9]{12,}"),
    ("Google, gitleaks rule gcp-api-key; OAuth 2 tokens", r"(?:AIza[\w-]{30,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,})"),
    ("Slack, docs: token types; incoming webhooks", r"(?:xox[abeoprs]-[\w-]{8,}|xapp-\d-[\w-]{8,}|hooks\.slack\.com/services/[\w/]+)"),
    ("npm, docs: about access tokens", r"npm_[A-Za-z0-9]{16,}"),
    ("PyPI, docs: API tokens", r"pypi-[\w-]{16,}"),
    ("NVIDIA, NGC and build.nvidia.com API keys", r"nvapi-[\w-]{16,}"),
    ("Stripe, docs: API keys", r"(?:[sr]k|pk|whsec)_(?:live_|test_)?(?=\w*\d)[A-Za-z0-9]{16,}"),
    ("SendGrid, gitleaks rule sendgrid-api-token", r"SG\.[\w-]{16,}\.[\w-]{16,}"),
    ("Docker Hub, docs: access tokens", r"dckr_(?:pat|oat)_[\w-]{16,}"),
    ("DigitalOcean, docs: token prefixes", r"do[opr]_v1_[a-f0-9]{32,}"),
    ("Databricks, gitleaks rule databricks-api-token", r"dapi[a-f0-9]{32}(?:-\d)?"),
    ("Replicate, Groq, xAI, Perplexity, Together: API references", r"(?:r8|gsk|tgp_v1)_[\w-]{20,}|(?:xai|pplx)-[\w-]{20,}"),
    ("Weights & Biases, docs: API keys of version 1", r"wandb_v1_[\w-]{16,}"),
    ("Vault, docs: token prefixes; Terraform Cloud", r"hv[sbr]\.[\w-]{16,}|[\w-]{8,}\.atlasv1\.[\w-]{16,}"),
    ("Grafana, Sentry, New Relic, Linear, Tailscale, Atlassian: gitleaks rules", r"(?:gls?[ac]_|sntr[yu]s_|NRAK-|lin_api_|tskey-|ATATT3)[\w=+/-]{12,}"),
    ("RFC 7519, JSON web token", r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
)  # fmt: skip
"""Tokens that are known by how they begin. The lengths are lower bounds, below what is issued today."""

_TOKEN = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(pattern for _, pattern in _PREFIXED)})")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL)

_SECRET_WORD = (
    r"(?:token|secret|passw(?:or)?d|passwd|pwd|passphrase|credentials?|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|secret[_-]?key"
    r"|auth(?:orization)?|cookie|signature|license|client[_-]?secret|webhook(?:[_-]?url)?|dsn|connection[_-]?string|account[_-]?key"
    r"|(?<=[_-])(?:key|pass|pat|sas))"
)
_SECRET_KEY = re.compile(rf"{_SECRET_WORD}(?:[_-]?\d+)?$", re.IGNORECASE)
# A name is found by its end, which keeps the search linear in the text; a flag takes its value after a space.
_NAMED = re.compile(
    rf"(?P<name>{_SECRET_WORD}(?:[_-]?\d+)?)(?P<q1>\\*[\"']?)(?P<by>\s*(?:=>|[:=])\s*|(?<=\w)\s+(?=\S))"
    r"(?P<value>\\+\"(?:(?!\\+\").)*\\+\"|\"(?:[^\"\\]|\\.)*\"|\\*'[^']*'|\\*[\"']\S*|[^\s\"',;&)}\]]+)",
    re.IGNORECASE,
)
_SHORT = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>pw|pass|psw)=(?P<quote>\\*[\"']?)(?!(?:\d{1,7}|forward|backward|fwd|bwd)\b)[^\s\"',;&)}\]\\]+",
    re.IGNORECASE,
)
"""Names too common in prose for another sign than "=", and what a pass may be ("pass=3", "pass=forward")."""
_FLAG = re.compile(r"(?:^|[\s\"'])--?[\w.-]*$")
_BEARER = re.compile(r"\b(?P<word>bearer)\s+(?P<value>[\w.~+/=-]{6,})", re.IGNORECASE)
_HEADER = re.compile(r"\b(?P<word>(?:proxy-)?authorization\"?\s*[:=]\s*\"?)(?:(?:basic|bearer|token|digest|negotiate)\s+)?[^\s\"',;]+", re.IGNORECASE)  # fmt: skip
_USERINFO = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,15}://)[^\s/@\"']+@")

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}(?![\w-])")
_LOGIN = re.compile(r"(?<![\w@.+/-])[\w.+-]+@[A-Za-z0-9][\w.-]*:(?:\d{2,5}\b|(?=[~/]))")
"""An account on a machine: user@host with a port, or with a path as scp takes it."""
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9A-Fa-f]{0,4})(?:%\w+)?(?![\w:])"
)
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_EC2_HOST = re.compile(r"\bip-\d{1,3}(?:-\d{1,3}){3}[\w.-]*")
_VERSION_BEFORE = re.compile(
    r"(?:\b(?:v|ver|version|versions|release|rev|build|driver|toolkit|runtime|firmware|python|torch|pytorch|numpy|linux|kernel|gcc|glibc|nsys|nsight"
    r"|systems|compute|cuda|rocm|hip|tensorrt|trt|nccl|nvrtc|nvjitlink|cutlass|vllm|sglang|cu(?:dnn|blas|blaslt|fft|rand|solver|sparse|file|pti|tensor))"
    r"[a-z_-]*\d*[\"']?\s*[:=]?\s*[\"']?v?|==\s*|[A-Za-z0-9][-_/]v?)$",
    re.IGNORECASE,
)
"""What stands before four numbers with dots that are a version: a name of software, a pin, or a package's own hyphen."""

_ROOTS = (
    r"home\w*|Users|root|u|users?|tmp|var/tmp|var/home|run/user|private/(?:tmp|var)|export|mnt\w*|media|Volumes|net|nfs\w*|gpfs\w*|lustre\w*|ceph\w*"
    r"|beegfs\w*|fsx\w*|efs\w*|weka\w*|afs|nas\w*|autofs|scratch\w*|work|workspaces?|projects?|proj|data\d*|datasets?|storage\w*|share|shared|srv|tank"
    r"|vol\w*|raid\w*|nvme\w*|ssd\w*|hdd\w*|disk\w*|local_?disk\w*|dbfs|kaggle"
)
_PATH = re.compile(rf"(?<![A-Za-z0-9_.\])>])/(?:root(?![\w-])|(?:{_ROOTS})/)[^\s\"'`<>|*?,;:()\[\]{{}}]*")
_TILDE = re.compile(r"(?<![\w:])~[\w.-]*/[^\s\"'`<>|*?,;:()\[\]{}]*")
_WINDOWS = re.compile(
    r"(?<![A-Za-z0-9])[A-Za-z]:(?:\\+|/)(?:[^\\/:*?\"'<>|\r\n]+(?:\\+|/))*[^\\/:*?\"'<>|\s,;)]*"
    r"|(?<![\w\\])\\{2,4}[\w.-]+(?:\\+[^\\/:*?\"'<>|\s,;)]+)+"
)


def without_secrets(text: str) -> str:
    """A text without credentials: known tokens, values of secret-like names, authorisation headers, private keys."""
    text = _PRIVATE_KEY.sub(GONE, text)
    text = _TOKEN.sub(GONE, text)
    text = _USERINFO.sub(rf"\g<scheme>{GONE}@", text)
    text = _HEADER.sub(rf"\g<word>{GONE}", text)
    text = _BEARER.sub(rf"\g<word> {GONE}", text)
    text = _SHORT.sub(rf"\g<name>=\g<quote>{GONE}", text)
    return _NAMED.sub(_named, text)


def _named(match: re.Match[str]) -> str:
    name, by, value = match["name"], match["by"], match["value"]
    bare = value.strip("\\\"'")
    if by.isspace() and not _FLAG.search(match.string[max(0, match.start() - 48) : match.start()]):
        return match[0]  # prose: "the token embedding"; a flag takes the next word
    if not bare or bare == GONE or bare.lower() in ("true", "false", "none", "null"):
        return match[0]
    if bare.isdigit() and len(bare) <= 7 and name.lower().endswith(("token", "key")):
        return match[0]  # a count or an index: token=17
    quote = re.match(r"\\*[\"']?", value)
    edge = quote[0] if quote else ""
    return f"{name}{match['q1']}{by}{edge}{GONE}{edge}"


def clean(text: str) -> str:
    """A text without credentials, addresses of people and machines, and paths that name a person, a team or a mount."""
    if not text:
        return text
    text = without_secrets(text)
    text = _EMAIL.sub(GONE, _LOGIN.sub(GONE, text))
    text = _WINDOWS.sub(GONE, text)
    text = _TILDE.sub(GONE, _PATH.sub(GONE, text))
    text = _MAC.sub(GONE, _EC2_HOST.sub(GONE, text))
    text = _IPV6.sub(lambda m: GONE if _is_ipv6(m[0]) else m[0], text)
    return _IPV4.sub(lambda m: GONE if _is_ipv4(m) else m[0], text)


def clean_json(value: Any) -> Any:
    """A JSON value with every text in it cleaned; keys stay, and the value of a secret-like key goes."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {
            k: GONE if isinstance(v, str) and v and is_secret_key(str(k)) else clean_json(v) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean_json(v) for v in value]
    return value


def is_secret_key(name: str) -> bool:
    """Whether a variable, option or JSON key of this name holds a credential: HF_TOKEN, dbPassword, aws-secret-key."""
    return _SECRET_KEY.search(name) is not None


def _is_ipv4(match: re.Match[str]) -> bool:
    try:
        IPv4Address(match[0])
    except AddressValueError:
        return False
    return _VERSION_BEFORE.search(match.string[max(0, match.start() - 48) : match.start()]) is None


def _is_ipv6(text: str) -> bool:
    """Times of day and C++ names have colons, too: an address has a digit, and is long or begins as real ones do."""
    try:
        address = IPv6Address(text.partition("%")[0])
    except AddressValueError:
        return False
    return bool(re.search(r"\d", text)) and (
        text.count(":") >= 3 or address.is_loopback or bool(re.match(r"(?i)f[cde]|2[0-9a-f]{3}:|::ffff", text))
    )


# --- variables of an environment ---------------------------------------------------------------------------------------

VOLATILE = (
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "COLUMNS",
    "LINES",
    "WINDOWID",
    "TERM_SESSION_ID",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
)
"""Variables that differ from shell to shell and decide nothing."""


def shown(variables: Mapping[str, str], salt: bytes) -> dict[str, str]:
    """Variables that a person wrote into a config: their values, but of credentials a salted hash."""
    return {
        name: hidden(value, salt)
        if is_secret_key(name) or name.lower() in ("pass", "key", "pat") or without_secrets(value) != value
        else value
        for name, value in variables.items()
    }


def shown_config(config: dict[str, Any], salt: bytes) -> dict[str, Any]:
    """An arm's config as a record keeps it: credentials in `env`, `argv` and `args` stand as salted hashes."""
    return {**config, "engine": {key: _shown(key, value, salt) for key, value in config["engine"].items()}}


def shown_change(key: str, value: Any, salt: bytes) -> Any:
    """One value of a diff of configs, by its dotted key: `engine.env.HF_TOKEN`, `engine.argv`."""
    if not key.startswith("engine."):
        return value
    room, _, name = key.removeprefix("engine.").partition(".")
    if isinstance(value, str) and name:
        return shown({name.rpartition(".")[2]: value}, salt)[name.rpartition(".")[2]]
    return _shown(room, value, salt)


def _shown(key: str, value: Any, salt: bytes) -> Any:
    if isinstance(value, Mapping):
        return {k: _shown(str(k), v, salt) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [
            hidden(part, salt)
            if i and isinstance(part, str) and _takes_a_secret(value[i - 1])
            else _shown("", part, salt)
            for i, part in enumerate(value)
        ]
    return shown({key: value}, salt)[key] if isinstance(value, str) else value


def _takes_a_secret(before: Any) -> bool:
    """Whether an argument is a flag such as --api-key, whose value comes next."""
    return (
        isinstance(before, str) and before.startswith("-") and "=" not in before and is_secret_key(before.lstrip("-"))
    )


def hidden(value: str, salt: bytes) -> str:
    """What stands for a value that is not shown: equal for equal values under one salt, and telling nothing else."""
    return f"hidden:{hmac.new(salt, value.encode('utf-8', 'surrogateescape'), hashlib.sha256).hexdigest()[:12]}"


def inherited(environ: Mapping[str, str], salt: bytes) -> dict[str, str]:
    """Names of inherited variables, each with the salted hash of its value; those of VOLATILE are left out."""
    return {name: hidden(environ[name], salt) for name in sorted(environ) if name not in VOLATILE}


def salt_of_this_machine() -> bytes:
    """32 random bytes, made once and kept in the cache for its owner alone; no record holds them."""
    from engine.cache import cache_dir

    path = cache_dir() / "salt"
    try:
        if len(kept := path.read_bytes()) == 32:
            return kept
    except OSError:
        pass
    made = secrets.token_bytes(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(made)
    except OSError:
        pass  # hashes of this run alone agree
    return made
