"""What do a sample's bytes cost on their way into and out of a frame?

8,192 tokens with log-probs, mask and route rows (48 layers x 8, uint8). The limit is one copy of the same bytes;
rivals are msgspec's MessagePack of the same fields with arrays as bytes, Arrow IPC (if pyarrow is there) and the form
in which SGLang sends routes: JSON with int32 rows in base64. Ours is measured with and without what a frame proves
(invariants and digest).

    python benchmarks/sample_frame.py [--rounds 30] [--quick]
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from rig import report

from segue.wire.frame import decode_frame, encode_frame
from segue.wire.sample import Sample, sample_from_frame, sample_to_frame

TOKENS, LAYERS, TOP_K = 8192, 48, 8


def make_sample() -> Sample:
    random = np.random.default_rng(0)
    mask = np.ones(TOKENS, np.uint8)
    return Sample(
        sample_id="sample-1", rollout_id="rollout-1", session_id="session-1", group_id="train-1", member=0, reward=1.0,
        temperature=1.0, tokens=random.integers(0, 128_000, TOKENS, np.int32), loss_mask=mask,
        logprobs=-random.random(TOKENS, np.float32), turn_index=np.zeros(TOKENS, np.int32),
        version_spans=np.array([[0, TOKENS, 3]], np.int32), turn_rewards=np.array([1.0], np.float32),
        routes=random.integers(0, 128, (TOKENS - 1, LAYERS, TOP_K), np.uint8),
        routes_provenance=np.zeros(TOKENS - 1, np.uint8),
    )  # fmt: skip


def arrays_of(sample: Sample) -> dict[str, Any]:
    names = (
        "tokens", "loss_mask", "logprobs", "turn_index", "version_spans", "turn_rewards", "routes", "routes_provenance"
    )  # fmt: skip
    return {name: getattr(sample, name) for name in names}


def sglang_form(arrays: dict[str, Any]) -> Callable[[], bytes]:
    def encode() -> bytes:
        routes = base64.b64encode(arrays["routes"].astype(np.int32).tobytes()).decode()
        logprobs = [
            (float(value), int(token), None) for value, token in zip(arrays["logprobs"], arrays["tokens"], strict=True)
        ]
        meta = {"routed_experts": routes, "output_token_logprobs": logprobs}
        return json.dumps({"output_ids": arrays["tokens"].tolist(), "meta_info": meta}).encode()

    return encode


def sglang_read(data: bytes) -> Any:
    answer = json.loads(data)
    routes = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    logprobs = np.array([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]], np.float32)
    return np.array(answer["output_ids"], np.int32), logprobs, routes.reshape(-1, LAYERS, TOP_K)


def contestants(sample: Sample) -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]]:
    arrays = arrays_of(sample)
    flat = b"".join(array.tobytes() for array in arrays.values())
    packer, unpacker = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()

    def pack() -> bytes:
        return packer.encode({name: (a.dtype.str, a.shape, a.data.cast("B")) for name, a in arrays.items()})

    def unpack(data: bytes) -> Any:
        return {
            name: np.frombuffer(raw, dtype).reshape(shape)
            for name, (dtype, shape, raw) in unpacker.decode(data).items()
        }

    found: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]] = {
        "memcpy of the same bytes": (lambda: bytes(memoryview(flat)[:-1]), lambda data: bytes(memoryview(data)[:-1])),
        "frame": (lambda: encode_frame("sample", {}, arrays), decode_frame),
        "sample frame, invariants and digest proved": (lambda: sample_to_frame(sample), sample_from_frame),
        "msgspec MessagePack": (pack, unpack),
        "SGLang's form: JSON, base64 of int32": (sglang_form(arrays), sglang_read),
    }
    if importlib.util.find_spec("pyarrow") is not None:
        found["Arrow IPC"] = arrow(arrays)
    return found


def arrow(arrays: dict[str, Any]) -> tuple[Callable[[], bytes], Callable[[bytes], Any]]:
    arrow, ipc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.ipc")

    def encode() -> bytes:
        columns = {name: arrow.array([array.reshape(-1)]) for name, array in arrays.items()}
        batch = arrow.record_batch(columns)
        sink = arrow.BufferOutputStream()
        with ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())

    def decode(data: bytes) -> Any:
        batch = ipc.open_stream(data).read_next_batch()
        return {name: batch.column(name)[0].values.to_numpy() for name in batch.schema.names}

    return encode, decode


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(rounds: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    made = contestants(make_sample())
    encoded = {name: encode() for name, (encode, _) in made.items()}
    encode_s: dict[str, list[float]] = {name: [] for name in made}
    decode_s: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, (encode, decode) in made.items():
            encode_s[name].append(timed(encode))
            decode_s[name].append(timed(lambda d=decode, n=name: d(encoded[n])))  # type: ignore[misc]
    rows: list[dict[str, object]] = [
        {
            "form": name, "bytes": len(encoded[name]),
            "encode_ms": round(1000 * sorted(encode_s[name])[rounds // 2], 4),
            "decode_ms": round(1000 * sorted(decode_s[name])[rounds // 2], 4),
        }
        for name in made
    ]  # fmt: skip
    copy = "memcpy of the same bytes"
    ratios = {
        "encode_over_memcpy": report.median_ratio(encode_s["frame"], encode_s[copy]),
        "decode_over_memcpy": report.median_ratio(decode_s["frame"], decode_s[copy]),
    }
    whole = "sample frame, invariants and digest proved"
    ratios["proved_encode_over_memcpy"] = report.median_ratio(encode_s[whole], encode_s[copy])
    ratios["proved_decode_over_memcpy"] = report.median_ratio(decode_s[whole], decode_s[copy])
    return rows, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="a few rounds; prints only")
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    rows, ratios = measure(rounds)
    report.table(f"a sample of {TOKENS:,} tokens with route rows", rows)
    report.write("sample_frame", rows, ratios, {"rounds": rounds, "tokens": TOKENS}, quick=options.quick)


if __name__ == "__main__":
    main()
