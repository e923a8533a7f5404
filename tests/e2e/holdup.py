"""A middleware for vLLM's API server that holds it up when a header asks for it."""

import gc
import time
from typing import Any

HEADER = "x-hold-up"


async def hold_up(request: Any, call_next: Any) -> Any:
    """`loop`: its event loop for half a second; `gc`: all of it, by a collection of a big heap. The
    answer's own header says for how many seconds."""
    how = request.headers.get(HEADER)
    began = time.monotonic()
    if how == "loop":
        time.sleep(0.5)
    elif how == "gc":
        gc.disable()
        heap = [[number] for number in range(2_000_000)]
        began = time.monotonic()
        gc.collect()
        gc.enable()
        del heap
    held = time.monotonic() - began
    response = await call_next(request)
    response.headers[HEADER] = str(held)
    return response
