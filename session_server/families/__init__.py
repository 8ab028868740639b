"""Chat-template families: how messages become tokens without touching a token that is there already.

One file per family. `choose` takes the family that config names, or the first whose proof holds on the model's own
template; "generic" always holds and promises less.
"""

from __future__ import annotations

from collections.abc import Callable

from segue.errors import ConfigError
from session_server.families.chatml import ChatML
from session_server.families.deepseek import DeepSeek
from session_server.families.generic import Generic
from session_server.families.harmony import Harmony
from session_server.families.mistral import Mistral
from session_server.families.qwen import Qwen
from session_server.model_text import ModelText

Factory = Callable[[ModelText], Generic]


FAMILIES: dict[str, Factory] = {
    "harmony": Harmony, "qwen": Qwen, "deepseek": DeepSeek, "mistral": Mistral, "chatml": ChatML, "generic": Generic
}  # fmt: skip
"""In the order in which "auto" tries them. A factory raises ConfigError if the model does not belong to its family."""


def choose(name: str, text: ModelText) -> Generic:
    """The family `name` for this model; "auto" finds it. Raises ConfigError for unknown names and failed proofs."""
    if name != "auto":
        factory = FAMILIES.get(name)
        if factory is None:
            raise ConfigError(f"model.family '{name}' is unknown; there are: auto, {', '.join(FAMILIES)}")
        return factory(text)
    for factory in FAMILIES.values():
        try:
            return factory(text)
        except ConfigError:
            continue
    raise AssertionError("the generic family takes every template")


__all__ = ["FAMILIES", "Generic", "choose"]
