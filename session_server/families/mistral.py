"""Mistral with a Tekken vocabulary: questions in [INST] ... [/INST], answers closed by `</s>`, no begin of an answer.

The published templates show the tools before the last question, so they wander as a conversation grows. A session
shows them once, in its opening, and appends only what is new. Call ids are nine letters or digits: the model's own
where it gives one.
"""

from __future__ import annotations

import hashlib

from session_server.answers import CallIds, OutputFormat, Parser
from session_server.families.framed import Framed
from session_server.families.generic import marked_format
from session_server.families.markup import Marks, read_json_calls

ASK, ASKED, CALLS = "[INST]", "[/INST]", "[TOOL_CALLS]"
RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")


class Mistral(Framed):
    name = "mistral"
    marks = (ASK, ASKED, CALLS, *RESULTS)
    control = (*marks, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")

    def make_format(self) -> OutputFormat:
        inner = ("[ARGS]", "[CALL_ID]")
        marks = Marks(read_json_calls, CALLS, "", inner=inner, think_open="[THINK]", think_close="[/THINK]")
        made = marked_format(self.text, marks)

        def parser(begun: bool, tools: bool, call_id: CallIds) -> Parser:
            return made.parser(begun, tools, lambda index: short_id(call_id(index)))

        return OutputFormat(self.text, parser, made.keep, made.think_open)


def short_id(call_id: str) -> str:
    """Nine letters and digits."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
