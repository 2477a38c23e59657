"""The environment variables that the project reads, and how a shell completes its command: said once, shown by `harness --help`
and docs/cli.md. A test holds the list to the code."""

from __future__ import annotations

VARIABLES = (
    ("PREFILL_HARNESS_CACHE", "folder of fetched models, ceilings and calibrations; default: prefill-harness in XDG_CACHE_HOME, else in ~/.cache"),
    ("XDG_CACHE_HOME", "where caches are, for PREFILL_HARNESS_CACHE's default"),
    ("HARNESS_COMMIT", "the engine's commit, for a copy of the tree without its .git"),
    ("HARNESS_NSYS", "the nsys to run, before PATH and the usual folders"),
    ("HARNESS_NCU", "the ncu to run, likewise"),
    ("CUDA_VISIBLE_DEVICES", "the GPUs to use, as CUDA reads it; the first one is watched"),
    ("CUDA_HOME", "a CUDA toolkit, whose headers kernels are compiled with; then CUDA_PATH, /usr/local/cuda"),
    ("CUDA_PATH", "likewise, after CUDA_HOME"),
    ("LD_LIBRARY_PATH", "where libraries are looked for; cuDNN's and nsys's own folders are added for them alone"),
    ("PYTHONPATH", "kept for the processes that run an arm, behind the project itself"),
    ("COLUMNS", "width of tables and texts; default: the terminal's, in a pipe 80"),
    ("NO_COLOR", "set to anything: no colours"),
    ("FORCE_COLOR", "set to anything: a pipe is treated as a terminal"),
)  # fmt: skip
"""(name, what it does)."""

COMPLETION = (
    ("bash", 'eval "$(_HARNESS_COMPLETE=bash_source harness)"', "~/.bashrc"),
    ("zsh", 'eval "$(_HARNESS_COMPLETE=zsh_source harness)"', "~/.zshrc"),
    ("fish", "_HARNESS_COMPLETE=fish_source harness | source", "~/.config/fish/completions/harness.fish"),
)
"""(shell, the line that switches completion on, the file that it goes into)."""
