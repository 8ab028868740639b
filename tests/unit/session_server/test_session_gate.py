"""The gate: who may go to an engine when."""

from __future__ import annotations

import asyncio

import pytest

from session_server.pause import Gate


def test_it_is_open_until_it_is_closed():
    gate = Gate()
    assert gate.admits("a", cut=False)
    gate.close(1)
    assert not gate.admits("a", cut=False)
    assert not gate.admits("a", cut=True)


def test_a_resumed_engine_takes_cut_turns_only():
    gate = Gate()
    gate.close(1)
    gate.resumed("a", 1)
    assert gate.admits("a", cut=True)
    assert gate.admits(None, cut=True)
    assert not gate.admits("b", cut=True)
    assert not gate.admits("a", cut=False)
    gate.open()
    assert gate.admits("b", cut=False)


def test_the_resume_of_an_earlier_pause_opens_nothing():
    gate = Gate()
    gate.close(2)
    gate.resumed("a", 1)
    assert not gate.admits("a", cut=True)


def test_closing_again_for_the_same_pause_keeps_what_was_resumed():
    gate = Gate()
    gate.close(1)
    gate.resumed("a", 1)
    gate.close(1)
    assert gate.admits("a", cut=True)
    gate.close(2)
    assert not gate.admits("a", cut=True)


@pytest.mark.parametrize("event", ["resume", "open", "lost"])
async def test_waiters_look_again_at_every_change(event):
    gate = Gate()
    gate.close(1)
    waiting = asyncio.create_task(gate.changed())
    await asyncio.sleep(0)
    {"resume": lambda: gate.resumed("a", 1), "open": gate.open, "lost": lambda: gate.engine_lost("a")}[event]()
    await asyncio.wait_for(waiting, 1)
