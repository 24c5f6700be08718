"""Cursor: a position in a stream of choices, used as event id, from which a client can resume."""

import re
from collections.abc import Sequence

from detcompile.serving.http_errors import HTTPError

FORM = re.compile(r"(?P<name>[\w-]{1,64}):(?P<places>\d{1,12}\*?(,\d{1,12}\*?)*)(\+(?P<tail>\d{1,2}))?")


class Cursor:
    """How much of each choice was sent.

    It is counted in tokens, so that it does not depend on how the stream was cut into events.

    Args:
        name: id of the answer.
        count: number of choices.

    Attributes:
        num_read: tokens sent, per choice.
        over: True for choices whose end was sent.
        tail: number of events sent after the last choice's end.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.num_read = [0] * count
        self.over = [False] * count
        self.tail = 0
        self._text = ""

    def __str__(self) -> str:
        """Return the event id.

        ``cmpl-12ab:7,9*``: 7 tokens of choice 0, and all 9 tokens of choice 1 including its end.
        """
        places = ",".join(f"{read}{'*' * over}" for read, over in zip(self.num_read, self.over))
        return f"{self.name}:{places}" + (f"+{self.tail}" if self.tail else "")

    @classmethod
    def at(cls, text: str, name: str, count: int, num_tail: int) -> "Cursor":
        """Parse an event id.

        Args:
            num_tail: number of events after the last choice's end.

        Raises:
            HTTPError: the id does not belong to this answer.
        """
        match = FORM.fullmatch(text)
        places: Sequence[str] = () if match is None else match["places"].split(",")
        if match is None or match["name"] != name or len(places) != count:
            raise _unknown(text, name)
        cursor = cls(name, count)
        cursor.num_read = [int(place.rstrip("*")) for place in places]
        cursor.over = [place.endswith("*") for place in places]
        cursor._text = text
        cursor.tail = int(match["tail"] or 0)
        if cursor.tail > (num_tail if all(cursor.over) else 0):
            raise _unknown(text, name)
        return cursor

    def require(self, index: int, num_tokens: int, *, ended: bool) -> None:
        """Reject a position in a choice that was never sent.

        Args:
            num_tokens: tokens of the choice.
            ended: the choice has ended.

        Raises:
            HTTPError: the position does not belong to this answer.
        """
        read, over = self.num_read[index], self.over[index]
        if read > num_tokens or (over and not (ended and read == num_tokens)):
            raise _unknown(self._text, self.name)


def _unknown(text: str, name: str) -> HTTPError:
    return HTTPError(400, f"Last-Event-ID {text[:100]!r} is not an event of {name}", param="Last-Event-ID")
