"""Qwen2.5 and Qwen3: ChatML, with tool results as a user's `<tool_response>` blocks and calls in `<tool_call>`.

The published templates take reasoning out of answers that a later question follows. A session does not: its tokens
are what the model generated and what it saw, and stay. Only what is appended is the template's.
"""

from __future__ import annotations

from typing import ClassVar

from segue.errors import ConfigError
from session_server.families.chatml import ChatML
from session_server.model_text import ModelText


class Qwen(ChatML):
    """Raises ConfigError if the template does not show tools as Qwen's does."""

    name = "qwen"
    required: ClassVar[tuple[tuple[str, ...], ...]] = (("user",), ("user", "user"), ("tool",), ("tool", "tool", "user"))

    def __init__(self, text: ModelText) -> None:
        if "<tool_response>" not in text.template_text:
            raise ConfigError("model.family 'qwen': the template shows no <tool_response>")
        super().__init__(text)
