"""Ten turns over the real engine: what each turn asked for and recorded is its slice of the routes of all tokens."""

from __future__ import annotations

import numpy as np
import pytest
from session_server_rig import make_config, text_of, with_r3

from segue.blobs import BlobStore
from segue.config.schema import Rollout
from segue.wire.frame import decode_frame
from segue.wire.sample import ROW_DECODED, sample_from_frame

TURNS = 10


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_increments_of_ten_turns_are_the_slices_of_one_account(rig_of, sglang, tmp_path):
    config = with_r3(make_config(sglang.model, rollout=Rollout(max_turn_tokens=32, turn_deadline_s=60.0)))
    async with rig_of(sglang.url, config=config) as rig:
        await rig.admit(1)
        session = await rig.lease()
        said = ["w1 w2"]
        for turn in range(TURNS):
            said += [text_of(await session.chat(*said, max_tokens=8 + turn)), f"w{turn} w{turn + 7}"]
        await session.finish(reward=1.0)
        blobs = BlobStore(tmp_path / "blobs")
        sample = sample_from_frame(blobs.read((await rig.until("sample.ready"))[0].frame))
        oracle = sglang.rows(sample.tokens.tolist())
        covered = 0
        for fact in await rig.events("turn.committed"):
            frame = decode_frame(blobs.read(fact.rows))
            assert fact.rows_start == covered
            rows, end = frame.arrays["rows"], fact.prompt_tokens + fact.output_tokens - 1
            assert rows.dtype == np.uint8
            assert covered + len(rows) == end
            for row in range(len(rows)):
                assert np.array_equal(np.sort(rows[row]), np.sort(oracle[covered + row])), f"row {covered + row}"
            assert set(frame.arrays["provenance"].tolist()) == {ROW_DECODED}
            covered = end
        assert covered == len(sample.tokens) - 1
        assert np.array_equal(np.sort(sample.routes), np.sort(oracle[:covered]))
