"""ChatML: every message is a block `<|im_start|>role\\ncontent<|im_end|>\\n`.

Invariant, proved at construction on the model's own template and tokenizer: a conversation's tokens are the tokens of
its beginning followed by those of its blocks. Roles for which the template does something else (a tool result shown as
a user's, say) go through the generic text difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.errors import ConfigError, RequestError
from session_server.families.generic import ChatMessage, Generic
from session_server.model_text import ModelText

START, END = "<|im_start|>", "<|im_end|>"
_PROBES = (
    ({"role": "user", "content": "b"},),
    ({"role": "user", "content": "b c"}, {"role": "user", "content": "d"}),
    ({"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}),
)
_OTHER_ROLES = ("system", "tool")


def block(message: ChatMessage) -> str:
    return f"{START}{message['role']}\n{message['content']}{END}\n"


class ChatML(Generic):
    """Raises ConfigError if the model's tokenizer or template is not ChatML."""

    name = "chatml"
    proved = True

    def __init__(self, text: ModelText) -> None:
        end = text.token_id(END)
        if text.token_id(START) is None or end is None:
            raise ConfigError(f"model.family 'chatml': the tokenizer has no {START} and {END}")
        super().__init__(text)
        if self.closing != END + "\n":
            raise ConfigError(f"model.family 'chatml': the template closes a message with {self.closing!r}")
        self.end_id = end
        self._begin = super().suffix(None, _PROBES[0], None)[len(block(_PROBES[0][0])) :]
        for probe in _PROBES:
            self._prove(probe)
        self._plain_roles = {"user", "assistant", *(role for role in _OTHER_ROLES if self._is_block(role))}

    def suffix(
        self, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> str:
        if all(m["role"] in self._plain_roles and not m.get("tool_calls") for m in messages):
            return "".join(map(block, messages)) + self._begin
        return super().suffix(answer, messages, tools)

    def _is_block(self, role: str) -> bool:
        message = {"role": role, "content": "b"}
        try:
            return super().suffix(None, (message,), None) == block(message) + self._begin
        except RequestError:
            return False

    def _prove(self, appended: Sequence[ChatMessage]) -> None:
        """Text and tokens of the blocks equal those of the template's own render of the whole conversation."""
        blocks = "".join(map(block, appended)) + self._begin
        first = self.text.render(({"role": "user", "content": "a"},), None, prompt=False)
        stored = first + self._begin + "b" + END
        whole = self.text.render(
            ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *appended), None, prompt=True
        )
        if whole != stored + "\n" + blocks:
            raise ConfigError("model.family 'chatml': the template adds more than blocks to a conversation")
        encode = self.text.encode
        pieces = [encode(first + self._begin), encode("b"), encode(END + "\n" + blocks)]
        if [i for piece in pieces for i in piece] != encode(whole):
            raise ConfigError("model.family 'chatml': the tokenizer joins text over the borders of blocks")
