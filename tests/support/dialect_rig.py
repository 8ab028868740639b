"""One conversation with a tool, played in chat completions, to hold the other dialects against."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
from session_server_rig import Client, Rig, make_config
from spoken_engine import SpokenEngine, spoken_engine

from segue.config.schema import Engine, Rollout

ASK = "What is the weather in Köln?"
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOL_RESULT = "19 °C, sunny"
SAID = "It is warm in Köln 😀."


@contextlib.asynccontextmanager
async def speaking(
    rig_of: Callable[..., Any], model: Path, *texts: str, pace_s: float = 0.0
) -> AsyncIterator[tuple[Rig, SpokenEngine]]:
    """A session server whose engine says `texts`."""
    config = make_config(
        model, engine=Engine(kind="fake"), rollout=Rollout(max_turn_tokens=400, turn_deadline_s=20, group_size=2)
    )
    async with spoken_engine(model, *texts, pace_s=pace_s) as engine, rig_of(engine.url, config=config) as rig:
        yield rig, engine


def chat_tool(name: str) -> dict[str, Any]:
    """`strict`, because the client's streaming helper takes no other tools."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "Tells the weather", "strict": True, "parameters": schema},
    }


async def chat_conversation(session: Client, *, stream: bool) -> list[Any]:
    """The conversation with OpenAI's client, history kept as it comes."""
    history: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    given: dict[str, Any] = {"model": "any", "max_tokens": 200, "tools": [chat_tool("weather")]}
    url, token = session.opened["base_url"], session.opened["token"]
    async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:
        while True:
            if stream:
                async with client.chat.completions.stream(messages=history, **given) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(messages=history, **given)
            message = answer.choices[0].message
            history.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                return history
            for call in message.tool_calls:
                history.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT})


async def token_ids(session: Client) -> list[int]:
    """Every token of the session's turns, which must follow one another."""
    turns = (await session.view())["turns"]
    before = [None, *(turn["turn_id"] for turn in turns)]
    assert [turn["parent_id"] for turn in turns] == before[: len(turns)]
    return [token for turn in turns for token in turn["prompt_ids"] + turn["output_ids"]]
