"""Plays games of TextArena for segue: lease a rollout, let TextArena's own agent play it, finish it with its reward."""

import json
import os
import threading
import urllib.request

import textarena as ta

BASE, WORKER = os.environ["SEGUE_BASE_URL"], f"{os.environ['SEGUE_WORKER']}/{os.getpid()}"


def post(path: str, token: str, body: dict) -> dict | None:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(BASE + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read()) if answer.status == 200 else None


def play_for_ever() -> None:
    while True:
        lease = post("/rollouts/lease", os.environ["SEGUE_WORKER_TOKEN"], {"worker": WORKER, "wait_s": 20})
        if lease is None:
            continue
        agent = ta.agents.OpenAIAgent("policy", api_key=lease["token"], base_url=lease["base_url"])
        game, done = ta.make("GuessTheNumber-v0"), False
        game.reset(num_players=1, seed=lease["seed"] % 2**32)
        while not done:
            _, observation = game.get_observation()
            done, _ = game.step(action=agent(observation))
        rewards, _ = game.close()
        post(f"/sessions/{lease['session_id']}/finish", lease["token"], {"reward": rewards[0]})


for _ in range(int(os.environ["SEGUE_CONCURRENCY"])):
    threading.Thread(target=play_for_ever).start()
