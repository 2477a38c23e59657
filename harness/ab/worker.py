"""The child process of an arm: `python -m harness.ab.worker IN OUT` answers JSON lines on two inherited descriptors.

The first line it reads is {"arm": …, "directory": …}; every later one is {"do": method of Session, …its arguments}.
Every answer is one line: the method's result, or {"error": sentence, "kind": exception's class}, after which it ends.
Standard output is not part of the conversation, so an engine may print what it likes; it goes where stderr goes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    """Serves one session until its input closes."""
    from engine.errors import EngineError
    from harness.ab.engines import die_with_parent
    from harness.errors import HarnessError

    die_with_parent()
    os.dup2(2, 1)
    reader, writer = os.fdopen(int(sys.argv[1]), "r"), os.fdopen(int(sys.argv[2]), "w")

    def answer(value: dict[str, Any]) -> None:
        writer.write(json.dumps(value, default=str) + "\n")
        writer.flush()

    try:
        first = json.loads(reader.readline() or "null")
        if first is None:
            return
        from pathlib import Path

        from harness.ab.session import Session

        session = Session(first["arm"], Path(first["directory"]))
        answer(session.open())
        for line in reader:
            request = json.loads(line)
            answer(getattr(session, request.pop("do"))(**request))
    except BaseException as error:  # whatever it is, the other side must hear of it
        if not isinstance(error, HarnessError | EngineError):  # their sentence says it; keep the program's lines
            traceback.print_exc()
        answer({"error": _sentence(error), "kind": type(error).__name__})
        sys.exit(1)


def _sentence(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return f"out of memory: {text}"
    return text


if __name__ == "__main__":
    main()
