"""Device memory: one allocation cut into named buffers, so that its bytes are known beforehand and no call allocates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.errors import EngineError

ALIGNMENT = 256  # bytes: what cublasLt's fastest kernels may ask of a pointer
CANARY = 256  # bytes after each buffer that nobody may write
POISON = 0xFF  # every byte at first: NaN as f16 and as f32, so a value that nobody wrote cannot pass for a result


def align(size: int, to: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


class Arena:
    """Named buffers of one `cudaMalloc`. `arena[name]` is a device address."""

    def __init__(self, what: str, sizes: Mapping[str, int]) -> None:
        """sizes: bytes per buffer, laid out in order. Raises EngineError where the device has not that much memory."""
        from cupy.cuda import Memory, runtime
        from cupy.cuda.memory import OutOfMemoryError

        self.sizes = dict(sizes)
        self._offsets: dict[str, int] = {}
        at = 0
        for name, size in self.sizes.items():
            self._offsets[name] = at
            at = align(at + size + CANARY)
        self.bytes = at
        try:
            self._memory = Memory(max(at, ALIGNMENT))
        except (OutOfMemoryError, runtime.CUDARuntimeError) as error:
            free, total = runtime.memGetInfo()
            raise EngineError(
                f"the GPU has {free / 1e9:.1f} of {total / 1e9:.1f} GB free and {what} needs {at / 1e9:.1f} GB; "
                "use a smaller model or fewer tokens, or end what else runs on this GPU."
            ) from error
        runtime.memset(self._memory.ptr, POISON, at)
        runtime.deviceSynchronize()  # the fill runs on the legacy stream, which ours does not wait for

    def __getitem__(self, name: str) -> int:
        return int(self._memory.ptr) + self._offsets[name]

    def overrun(self) -> list[str]:
        """Names of buffers whose canary somebody wrote."""
        from cupy.cuda import runtime

        runtime.deviceSynchronize()
        seen = np.empty(CANARY, np.uint8)
        bad = []
        for name, size in self.sizes.items():
            runtime.memcpy(seen.ctypes.data, self[name] + size, CANARY, runtime.memcpyDeviceToHost)
            if (seen != POISON).any():
                bad.append(name)
        return bad

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._memory = None
