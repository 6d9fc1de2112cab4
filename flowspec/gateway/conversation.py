"""A request's messages as the turns of a job."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.run.turns import Turn
from flowspec.gateway.errors import refused
from flowspec.gateway.refusals import REFUSED_IN_MESSAGES
from flowspec.gateway.schema import ChatMessage, ContentPart

#: Roles of OpenAI under the names that templates know.
_ROLES = {"developer": "system"}
_TOOL_ROLES = ("tool", "function")


def turns_of_messages(messages: Sequence[ChatMessage]) -> list[Turn]:
    """The turns of ``messages``; an error that names the first that is not served.

    Text in several parts is joined by line ends, as by other servers.
    """
    return [_turn(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _turn(message: ChatMessage, where: str) -> Turn:
    if message.role in _TOOL_ROLES:
        raise _unsupported(f"{where}.role is {message.role}: this gateway serves no tools")
    for name, neutral in REFUSED_IN_MESSAGES.items():
        value = (message.model_extra or {}).get(name)
        if value is not None and value not in neutral:
            raise _unsupported(f"{where}.{name} is not supported")
    content = message.content
    if content is None:
        raise refused(f"{where}.content is missing; expected text", "messages")
    if not isinstance(content, str):
        content = "\n".join(_text(part, where) for part in content)
    return Turn(_ROLES.get(message.role, message.role), content)


def _text(part: ContentPart, where: str) -> str:
    if part.type != "text" or part.text is None:
        kind = part.type[:40] if part.type.isprintable() else "unknown"
        raise _unsupported(
            f"{where}.content has a part of type {kind!r}: this gateway takes text alone"
        )
    return part.text


def _unsupported(message: str) -> Exception:
    return refused(message, "messages", "unsupported_content")
