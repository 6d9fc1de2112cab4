"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import Mapping

DONE = b"data: [DONE]\n\n"
#: A comment, which clients skip; it keeps proxies from closing a silent connection.
PING = b": waiting\n\n"
MEDIA_TYPE = "text/event-stream"
#: Proxies such as nginx must not collect the events.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


#: Line ends for some clients, which read events line by line; JSON may write them otherwise.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def event(data: Mapping[str, object]) -> bytes:
    """One event with ``data``, on one line."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n".encode()
