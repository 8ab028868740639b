"""Leases: order, waiting, expiry, seeds; several servers; rewards."""

from __future__ import annotations

import asyncio

import pytest
from session_server_rig import Client, make_config

from segue.config.schema import Evaluation, Rollout
from segue.events.work import GroupDropped, OpenAdmission


async def test_leases_go_in_order_and_members_share_a_seed(rig_of, engine):
    async with rig_of(engine) as rig:
        await rig.call("POST", "/rollouts/lease", {"wait_s": 0}, status=204)
        await rig.admit(1, groups=2, size=2)
        leases = [(await rig.lease()).opened for _ in range(4)]
        assert [lease["rollout_id"] for lease in leases] == ["train-0-0", "train-0-1", "train-1-0", "train-1-1"]
        assert leases[0]["seed"] == leases[1]["seed"] != leases[2]["seed"]
        assert len({lease["token"] for lease in leases}) == 4
        await rig.call("POST", "/rollouts/lease", {"wait_s": 0}, status=204)
        opened = await rig.events("session.opened")
        assert all(lease["token"] not in str(body) for lease in leases for body in opened)


async def test_a_lease_waits_for_work(rig_of, engine):
    async with rig_of(engine) as rig:
        waiting = asyncio.create_task(rig.lease())
        await asyncio.sleep(0.05)
        await rig.admit(1)
        assert (await waiting).opened["rollout_id"] == "train-0-0"


async def test_an_expired_lease_comes_back_until_it_is_final(rig_of, engine, model):
    config = make_config(model, rollout=Rollout(lease_s=0.2, max_returns=1))
    async with rig_of(engine, config=config) as rig:
        await rig.admit(1, groups=1, size=1)
        first = await rig.lease()
        await rig.until("work.rollout_returned")
        await first.chat("w1", status=410)
        again = await rig.lease()
        assert again.opened["rollout_id"] == first.opened["rollout_id"]
        assert again.opened["session_id"] != first.opened["session_id"]
        returned = await rig.until("work.rollout_returned", count=2)
        assert [(body.attempt, body.final) for body in returned] == [(0, False), (1, True)]
        assert [body.reason for body in await rig.events("sample.rejected")] == ["expired"]
        await rig.call("POST", "/rollouts/lease", {"wait_s": 0.1}, status=204)


async def test_a_worker_that_starts_again_gives_back_what_it_had_leased(rig_of, engine):
    async with rig_of(engine) as rig:
        await rig.admit(1, groups=1, size=2)
        lease = ("POST", "/rollouts/lease")
        first = await rig.call(*lease, {"wait_s": 5, "worker": "env-0/a"})
        other = await rig.call(*lease, {"wait_s": 5, "worker": "env-1/a"})
        again = await rig.call(*lease, {"wait_s": 5, "worker": "env-0/b"})
        assert again["rollout_id"] == first["rollout_id"] != other["rollout_id"]
        assert again["session_id"] != first["session_id"]
        ended = await rig.events("session.expired")
        assert [body.session_id for body in ended] == [first["session_id"]]


async def test_a_session_with_an_open_turn_does_not_expire(rig_of, slow_engine, model):
    config = make_config(model, rollout=Rollout(lease_s=0.1, max_turn_tokens=100, turn_deadline_s=20))
    async with rig_of(slow_engine, config=config) as rig:
        await rig.admit(1)
        session = await rig.lease()
        answer = await session.chat("w1", max_tokens=100)
        assert answer["usage"]["completion_tokens"] == 100


async def test_a_dropped_group_gives_no_more_work(rig_of, engine):
    async with rig_of(engine) as rig:
        await rig.admit(1, groups=2, size=2)
        await rig.lease()
        await rig.fact(GroupDropped(purpose="train", group=0, reason="filter"))
        await asyncio.sleep(0.05)
        assert (await rig.lease()).opened["rollout_id"] == "train-1-0"


async def test_evaluation_has_its_own_temperature_and_goes_first(rig_of, engine, model):
    async with rig_of(engine, config=make_config(model, evaluation=Evaluation(temperature=0.25))) as rig:
        await rig.admit(1)
        await rig.admit(2, purpose="eval", groups=1, size=1)
        lease = await rig.lease()
        assert lease.opened["rollout_id"] == "eval-0-0"
        assert (await lease.view())["temperature"] == 0.25


async def test_two_servers_share_the_work_and_pass_requests_on(rig_of, engine):
    async with rig_of(engine, servers=2) as rig:
        await rig.controller.append(
            OpenAdmission(admission=1, purpose="train", step=1, first_group=0, end_group=2, group_size=2),
            targets=("session-0", "session-1"),
        )
        await rig.until("work.admission_opened", count=2)
        urls = [*rig.ctx.endpoints.session_urls] * 2
        answers = await asyncio.gather(*(rig.call("POST", url + "/rollouts/lease", {"wait_s": 5}) for url in urls))
        assert sorted(a["rollout_id"] for a in answers) == ["train-0-0", "train-0-1", "train-1-0", "train-1-1"]
        for opened in answers:
            owner = 0 if opened["base_url"].startswith(urls[0] + "/") else 1
            session = Client(rig, opened)
            wrong = urls[1 - owner] + session.path
            messages = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 3}
            token = opened["token"]
            assert (await rig.call("POST", wrong + "/v1/chat/completions", messages, token))["choices"]
            async with rig.http.post(
                wrong + "/v1/chat/completions", json={**messages, "stream": True},
                headers={"Authorization": f"Bearer {token}"},
            ) as answer:  # fmt: skip
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            assert (await rig.call("POST", wrong + "/finish", {"reward": 1}, token))["sample_id"]


async def test_rewards_are_idempotent_by_key_and_one_reward_counts(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        await session.chat("w1", max_tokens=3)
        await session.call("POST", "/reward", {"value": 0.5, "key": "a"})
        await session.call("POST", "/reward", {"value": 0.5, "key": "a"})
        await session.call("POST", "/reward", {"value": 0.7, "key": "a"}, status=409)
        await session.call("POST", "/reward", {"value": 1, "key": "b", "turn": 5}, status=400)
        await session.call("POST", "/reward", {"value": "x", "key": "c"}, status=400)
        assert len(await rig.events("sample.reward_recorded")) == 1
        assert (await session.finish())["reward"] == 0.5


async def test_the_mean_of_turn_rewards_is_the_rollouts(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        one = await session.chat("w1", max_tokens=3)
        await session.chat("w1", one["choices"][0]["message"]["content"], "w2", max_tokens=3)
        assert (await session.finish(per_turn=[0.0, 1.0]))["reward"] == 0.5


@pytest.mark.parametrize(("turns", "reward", "why"), [(0, 1, "no committed turn"), (1, None, "no reward")])
async def test_a_session_without_turns_or_reward_gives_no_sample(rig_of, engine, turns, reward, why):
    async with rig_of(engine) as rig:
        await rig.admit(1)
        session = await rig.lease()
        for _ in range(turns):
            await session.chat("w1", max_tokens=3)
        done = await session.finish(status="failed", reward=reward)
        assert done["sample_id"] is None
        assert done["rejected"].startswith(why)
        assert (await rig.events("work.rollout_received"))[0].status == "failed"
        assert (await rig.events("sample.rejected"))[0].member == 0


async def test_finishing_releases_the_engine_assignment(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        await session.chat("w1", max_tokens=3)
        await session.finish(reward=1)
        async with asyncio.timeout(5):
            while not rig.router.released:
                await asyncio.sleep(0.01)
        assert rig.router.released == [session.opened["session_id"]]


async def test_samples_can_be_taken_before_the_end(rig_of, engine):
    from segue.wire.sample import sample_from_frame

    async with rig_of(engine) as rig:
        session = await rig.open()
        one = await session.chat("w1", max_tokens=3)
        short = one["usage"]["total_tokens"]
        await session.chat("w1", one["choices"][0]["message"]["content"], "w2", max_tokens=3)
        whole = sample_from_frame(await session.call("GET", "/samples"))
        first = sample_from_frame(await session.call("GET", f"/samples?max_seq_len={short}"))
        assert len(first.tokens) == short < len(whole.tokens)
        await session.call("GET", "/samples?max_seq_len=2", status=422)
        assert await rig.events("sample") == []


async def test_token_level_turns_extend_by_their_ids(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        one = await session.call("POST", "/generate", {"input_ids": [5, 6, 7], "max_new_tokens": 4})
        ids = [5, 6, 7, *one["output_ids"], 9]
        two = await session.call("POST", "/generate", {"input_ids": ids, "max_new_tokens": 4})
        turns = (await session.view())["turns"]
        assert turns[1]["parent_id"] == one["turn_id"]
        assert turns[1]["prompt_ids"] == [9]
        assert two["usage"]["prompt_tokens"] == len(ids)
        await session.call("POST", "/generate", {"input_ids": [64]}, status=400)
        assert (await session.finish(reward=1))["turns"] == 2
