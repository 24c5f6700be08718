"""Cursor: a place in a stream of a request's choices, as the id of an event, from which who lost the stream goes on."""

import re
from collections.abc import Sequence

from detcompile.serving.http_errors import HTTPError

__all__ = ["Cursor"]

FORM = re.compile(r"(?P<name>[\w-]{1,64}):(?P<places>\d{1,12}\*?(,\d{1,12}\*?)*)(\+(?P<tail>\d{1,2}))?")


class Cursor:
    """How much of each choice was told: a function of tokens, not of how the stream was cut into events.

    Args:
        name: the id of the answer.
        count: number of choices.

    Attributes:
        num_read: tokens of each choice that were told.
        over: choices whose end was told.
        tail: events told behind the last choice's end.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.num_read = [0] * count
        self.over = [False] * count
        self.tail = 0
        self._given = ""

    def __str__(self) -> str:
        """As an event's id: ``cmpl-12ab:7,9*`` has told 7 tokens of choice 0, and all of choice 1, which has 9."""
        places = ",".join(f"{read}{'*' * over}" for read, over in zip(self.num_read, self.over))
        return f"{self.name}:{places}" + (f"+{self.tail}" if self.tail else "")

    @classmethod
    def at(cls, text: str, name: str, count: int, num_tail: int) -> "Cursor":
        """The place that an event's id names.

        Args:
            num_tail: events that come behind the last choice's end.

        Raises:
            HTTPError: it is none of this answer.
        """
        found = FORM.fullmatch(text)
        places: Sequence[str] = () if found is None else found["places"].split(",")
        if found is None or found["name"] != name or len(places) != count:
            raise _none(text, name)
        cursor = cls(name, count)
        cursor.num_read = [int(place.rstrip("*")) for place in places]
        cursor.over = [place.endswith("*") for place in places]
        cursor._given = text
        cursor.tail = int(found["tail"] or 0)
        if cursor.tail > (num_tail if all(cursor.over) else 0):
            raise _none(text, name)
        return cursor

    def require(self, index: int, num_tokens: int, *, ended: bool) -> None:
        """Refuse a place in a choice that nobody was told of.

        Args:
            num_tokens: tokens that the choice has: all that were ever told, and where it has ended all.

        Raises:
            HTTPError: it is none of this answer.
        """
        read, over = self.num_read[index], self.over[index]
        if read > num_tokens or (over and not (ended and read == num_tokens)):
            raise _none(self._given, self.name)


def _none(text: str, name: str) -> HTTPError:
    return HTTPError(400, f"Last-Event-ID {text[:100]!r} is of no event of {name}", param="Last-Event-ID")
