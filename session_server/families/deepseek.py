"""DeepSeek V3, R1 and their successors: roles as single tokens with fullwidth bars, answers closed by an end token.

System messages belong to the beginning: the templates gather them there, so one in mid-conversation is refused.
"""

from __future__ import annotations

from session_server.answers import OutputFormat
from session_server.families.framed import Framed
from session_server.families.generic import marked_format
from session_server.families.markup import Call, Marks

USER, ASSISTANT, END = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
OUTPUTS = ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_FENCE = "\n```json\n"


class DeepSeek(Framed):
    name = "deepseek"
    marks = (USER, ASSISTANT, END)
    control = (USER, ASSISTANT, *CALLS, *CALL, SEPARATOR, *OUTPUTS)

    def make_format(self) -> OutputFormat:
        return marked_format(self.text, Marks(read_calls, *CALL, wrappers=CALLS, inner=(SEPARATOR,)))


def read_calls(body: str) -> list[Call] | None:
    """`name<sep>arguments`, or `function<sep>name` and the arguments in a fence (V3 and R1)."""
    head, sep, tail = body.partition(SEPARATOR)
    name, fence, fenced = tail.partition(_FENCE)
    if sep and fence and head.strip() == "function":
        return [Call(name.strip(), fenced.rstrip().removesuffix("```").rstrip())] if name.strip() else None
    return [Call(head.strip(), tail.strip())] if sep and head.strip() else None
