"""What an engine's weights must hash to, computed from the trainer's tensors.

SGLang's weights checker reports one checksum for each of *its* parameters: the first 8 bytes of SHA-256 over the raw
bytes, big-endian hex. Its parameters are fused: q, k and v of a layer are one tensor, gate and up another, and the
experts of a layer are two ([experts, 2 * ffn, hidden] and [experts, hidden, ffn]); embeddings are padded with zero rows
to a multiple of 64. `expected_checksums` builds the same tensors (world size 1, CPU layout) and hashes them, so that
equality is proved bit by bit over all of the engine's weights. Accelerators hash by another rule and may re-lay
weights: there this module does not apply.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import torch

from training.weight_sync.protocol import ChecksumError

VOCAB_MULTIPLE = 64
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_PADDED = ("model.embed_tokens.weight", "lm_head.weight")


def engine_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Engine parameter name -> tensor, from tensors in export order (q before k before v, gate before up)."""
    parts: dict[str, list[torch.Tensor]] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors:
        expert = _EXPERT.match(name)
        if expert is not None:
            which = "w2_weight" if expert[3] == "down" else "w13_weight"
            experts.setdefault(f"{expert[1]}.{which}", []).append(tensor)
            continue
        for plain, fused in _FUSED.items():
            name = name.replace(f".{plain}.", f".{fused}.")
        parts.setdefault(name, []).append(tensor)
    result = {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}
    for name, rows in experts.items():
        if name.endswith("w13_weight"):
            rows = [torch.cat(rows[i : i + 2]) for i in range(0, len(rows), 2)]
        result[name] = torch.stack(rows)
    for name in _PADDED:
        if name in result and (missing := -len(result[name]) % VOCAB_MULTIPLE):
            result[name] = torch.cat((result[name], result[name].new_zeros(missing, result[name].shape[1])))
    return result


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
