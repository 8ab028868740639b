"""What an engine's weights must hash to, computed from the trainer's tensors.

SGLang's weights checker reports one checksum for each of *its* parameters: the first 8 bytes of SHA-256 over the raw
bytes, big-endian hex. Its parameters are fused: q, k and v of a layer are one tensor, gate and up another, and the
experts of a layer are two ([experts, 2 * ffn, hidden] and [experts, hidden, ffn]); it pads with zeros: embeddings to a
multiple of 64 rows, every ffn to a multiple of 32. `expected_checksums` builds the same tensors (world size 1, CPU
layout) and hashes them, so that equality is proved bit by bit over all of the engine's weights. Accelerators hash by
another rule and may re-lay weights: there this module does not apply.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import torch

from training.weight_sync.protocol import ChecksumError

VOCAB_MULTIPLE, FFN_MULTIPLE = 64, 32
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_PROJECTION = re.compile(r"^(.*)\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_FUSED = {"q": ("qkv_proj", 0), "k": ("qkv_proj", 1), "v": ("qkv_proj", 2)} | {
    "gate": ("gate_up_proj", 0),
    "up": ("gate_up_proj", 1),
    "down": ("", 0),
}
"""Projection -> (the engine's fused parameter, place in it)."""
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def engine_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Engine parameter name -> tensor; the order of the input does not matter."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    experts: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, plain in tensors:
        tensor = _padded(name, plain)
        if expert := _EXPERT.match(name):
            key = f"{expert[1]}.{'w2' if expert[3] == 'down' else 'w13'}_weight"
            experts.setdefault(key, {})[int(expert[2]), _FUSED[expert[3]][1]] = tensor
        elif projection := _PROJECTION.match(name):
            fused, place = _FUSED[projection[2]]
            parts.setdefault(f"{projection[1]}.{fused}.{projection[3]}", {})[place] = tensor
        else:
            parts[name] = {0: tensor}
    result = {name: torch.cat([rows[i] for i in sorted(rows)]) for name, rows in parts.items()}
    for name, halves in experts.items():
        ids = sorted({expert_id for expert_id, _ in halves})
        result[name] = torch.stack([torch.cat([halves[key] for key in sorted(halves) if key[0] == i]) for i in ids])
    return result


def _padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the zeros that the engine appends to its vocabulary or ffn dimension."""
    if name in _VOCABULARY:
        missing = (0, 0, 0, -len(tensor) % VOCAB_MULTIPLE)
    elif name.endswith((".gate_proj.weight", ".up_proj.weight")):
        missing = (0, 0, 0, -len(tensor) % FFN_MULTIPLE)
    elif name.endswith(".down_proj.weight"):
        missing = (0, -tensor.shape[1] % FFN_MULTIPLE, 0, 0)
    else:
        return tensor
    return torch.nn.functional.pad(tensor, missing) if any(missing) else tensor


def tensor_checksum(tensor: torch.Tensor) -> str:
    """The engine's checksum of one CPU tensor."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(raw)).digest()[:8].hex()


def expected_checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Engine parameter name -> checksum that it must report after loading these tensors."""
    return {name: tensor_checksum(tensor) for name, tensor in engine_tensors(tensors).items()}


def prove_equal(expected: Mapping[str, str], reported: Mapping[str, str]) -> None:
    """Raise ChecksumError unless the engine holds exactly the expected parameters; buffers it adds are named too."""
    wrong = sorted(name for name, value in expected.items() if reported.get(name) != value)
    extra = sorted(set(reported) - set(expected))
    if wrong or extra:
        raise ChecksumError(
            f"{len(wrong)} of {len(expected)} parameters differ at the engine (first: {wrong[:3]}), "
            f"{len(extra)} are not the trainer's (first: {extra[:3]})"
        )
