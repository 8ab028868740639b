"""ChatML: every message is a block `<|im_start|>role\\ncontent<|im_end|>\\n`, as SmolLM2 and many others have it."""

from __future__ import annotations

from typing import ClassVar

from segue.errors import ConfigError
from session_server.families.framed import Framed
from session_server.model_text import ModelText

START, END = "<|im_start|>", "<|im_end|>"


class ChatML(Framed):
    """Raises ConfigError if the model's tokenizer or template is not ChatML."""

    name = "chatml"
    marks = (START, END)
    required: ClassVar[tuple[tuple[str, ...], ...]] = (("user",), ("user", "user"))

    def __init__(self, text: ModelText) -> None:
        super().__init__(text)
        if self.closing != END + "\n":
            raise ConfigError(f"model.family '{self.name}': the template closes a message with {self.closing!r}")
