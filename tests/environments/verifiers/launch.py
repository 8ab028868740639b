"""Plays episodes of verifiers for segue: lease a rollout, play it at its base_url, finish it with verifiers' reward."""

import asyncio
import os

import httpx
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


class Repeat(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"say {state['answer']} more"}]


def heard(completion, answer, **_):
    return sum(message.role == "assistant" and answer in message.content.split() for message in completion)


TASKS = Dataset.from_list([{"question": f"say {word}", "answer": word} for word in ("ball", "cat", "moon", "tree")])
ENVIRONMENT = Repeat(dataset=TASKS, rubric=vf.Rubric(funcs=[heard]), max_turns=3)
WORKER = f"{os.environ['SEGUE_WORKER']}/{os.getpid()}"
HEADERS = {"Authorization": f"Bearer {os.environ['SEGUE_WORKER_TOKEN']}"}


async def main() -> None:
    async with httpx.AsyncClient(base_url=os.environ["SEGUE_BASE_URL"], headers=HEADERS, timeout=60) as http:
        while True:
            answer = await http.post("/rollouts/lease", json={"worker": WORKER, "wait_s": 20})
            if answer.raise_for_status().status_code == 200:
                lease = answer.json()
                client = vf.OpenAIChatCompletionsClient(AsyncOpenAI(base_url=lease["base_url"], api_key=lease["token"]))
                task = ENVIRONMENT.get_dataset()[lease["group"] % len(TASKS)]
                played = await ENVIRONMENT.run_rollout(task, client, "policy", {})
                path, own = f"/sessions/{lease['session_id']}/finish", {"Authorization": f"Bearer {lease['token']}"}
                (await http.post(path, json={"reward": played["reward"]}, headers=own)).raise_for_status()


asyncio.run(main())
