"""Hugging Face names and layouts of the model's weights, both ways, and safetensors folders.

Invariants:
- One table (`parameter_map`) serves loading and exporting, so that they cannot disagree.
- Every model parameter appears exactly once in the table; a missing or left-over tensor is an error with its name.
- Exported names are the ones that stand in checkpoint files: one tensor per expert and projection.
- Tensors that loaders fuse (`ATOMIC_GROUPS`) follow each other directly in the export order.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from segue.errors import TrainerError
from training.megatron.shape import ModelShape

ATOMIC_GROUPS: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that an engine stores as one tensor: they must travel in one bucket."""

Layout = Literal["same", "qkv", "cat"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One model parameter and the file tensors it is made of.

    layout: "same" (one tensor, as it is), "cat" (joined on dim 0), "qkv" (rows grouped per query group as
    [query heads of the group, key, value])."""

    parameter: str
    names: tuple[str, ...]
    layout: Layout = "same"


def parameter_map(shape: ModelShape) -> tuple[Entry, ...]:
    """All parameters of the local-spec GPTModel in export order."""
    entries = [Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))]
    for index in range(shape.layers):
        entries += _layer_entries(shape, index)
    entries.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",)))
    if not shape.tied:
        entries.append(Entry("output_layer.weight", ("lm_head.weight",)))
    return tuple(entries)


def _layer_entries(shape: ModelShape, index: int) -> list[Entry]:
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    qkv = tuple(f"{theirs}.self_attn.{name}" for name in ATOMIC_GROUPS[0])
    entries = [
        Entry(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",)),
        Entry(f"{ours}.self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in qkv), "qkv"),
    ]
    if shape.qkv_bias:
        entries.append(Entry(f"{ours}.self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in qkv), "qkv"))
    if shape.qk_norm:
        entries += [
            Entry(f"{ours}.self_attention.{x}_layernorm.weight", (f"{theirs}.self_attn.{x}_norm.weight",))
            for x in ("q", "k")
        ]
    entries += [
        Entry(f"{ours}.self_attention.linear_proj.weight", (f"{theirs}.self_attn.o_proj.weight",)),
        Entry(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",)),
    ]
    if shape.moe is None or not shape.is_sparse(index):
        return entries + _mlp_entries(f"{ours}.mlp", f"{theirs}.mlp")
    entries.append(Entry(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",)))
    for expert in range(shape.moe.experts):
        entries += _mlp_entries(f"{ours}.mlp.experts.local_experts.{expert}", f"{theirs}.mlp.experts.{expert}")
    return entries


def _mlp_entries(ours: str, theirs: str) -> list[Entry]:
    gate_up = tuple(f"{theirs}.{name}.weight" for name in ATOMIC_GROUPS[1])
    return [
        Entry(f"{ours}.linear_fc1.weight", gate_up, "cat"),
        Entry(f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",)),
    ]


def _grouped(shape: ModelShape) -> tuple[int, int]:
    """Rows of one query group: (of its query heads, of its key or value head)."""
    return shape.heads // shape.groups * shape.head_dim, shape.head_dim


def join(entry: Entry, parts: tuple[torch.Tensor, ...], shape: ModelShape) -> torch.Tensor:
    """File tensors -> model parameter."""
    if entry.layout == "same":
        return parts[0]
    if entry.layout == "cat":
        return torch.cat(parts)
    tail = parts[0].shape[1:]
    return torch.cat([part.reshape(shape.groups, -1, *tail) for part in parts], dim=1).reshape(-1, *tail)


def split(entry: Entry, tensor: torch.Tensor, shape: ModelShape) -> tuple[torch.Tensor, ...]:
    """Model parameter -> file tensors (views where the layout allows, contiguous always)."""
    if entry.layout == "same":
        return (tensor,)
    if entry.layout == "cat":
        return tuple(tensor.chunk(len(entry.names)))
    tail = tensor.shape[1:]
    query, key = _grouped(shape)
    parts = torch.split(tensor.reshape(shape.groups, query + 2 * key, *tail), [query, key, key], dim=1)
    return tuple(part.reshape(-1, *tail) for part in parts)


def export(parameters: Mapping[str, torch.Tensor], shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """(file name, detached tensor) of every weight, in table order."""
    for entry in parameter_map(shape):
        yield from zip(entry.names, split(entry, parameters[entry.parameter].detach(), shape), strict=True)


def read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of every tensor in a safetensors folder, with or without an index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for name in files:
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise TrainerError(f"{folder}: weight file {name!r} is not there")
        with safe_open(path, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118 - not a mapping
                yield key, handle.get_tensor(key)


def load(
    parameters: Mapping[str, torch.Tensor], shape: ModelShape, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy file tensors into the model's parameters; names and shapes must match exactly."""
    found = dict(tensors)
    if shape.tied:
        found.pop("lm_head.weight", None)
    table = parameter_map(shape)
    unmapped = set(parameters) - {entry.parameter for entry in table}
    if unmapped:
        raise TrainerError(f"model parameters without a file name: {sorted(unmapped)[:5]}")
    with torch.no_grad():
        for entry in table:
            missing = [name for name in entry.names if name not in found]
            if missing:
                raise TrainerError(f"weights are missing {missing[0]} ({len(missing)} of {entry.parameter})")
            value = join(entry, tuple(found.pop(name) for name in entry.names), shape)
            target = parameters[entry.parameter]
            if value.shape != target.shape:
                raise TrainerError(f"{entry.names[0]}: {tuple(value.shape)} does not fit {tuple(target.shape)}")
            target.copy_(value)
    left = sorted(name for name in found if not name.endswith("rotary_emb.inv_freq"))
    if left:
        raise TrainerError(f"weights hold tensors that the model lacks: {left[:5]} ({len(left)} in all)")


def write_folder(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], source: Path) -> int:
    """Write a complete model folder (weights, plus config and tokenizer files of `source`); returns the weights' bytes.

    Atomic: everything is written and fsynced under a temporary name, then renamed. An existing folder is refused.
    """
    if folder.exists():
        raise TrainerError(f"{folder} exists already")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        # safetensors refuses tensors that share storage: chunks of one parameter do.
        state = {n: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t for n, t in state.items()}
        save_file(state, temporary / "model.safetensors", metadata={"format": "pt"})
        for path in sorted(source.iterdir()):
            if path.suffix in {".json", ".jinja", ".txt", ".model"} and path.name != "model.safetensors.index.json":
                shutil.copyfile(path, temporary / path.name)
        for path in temporary.iterdir():
            sync_path(path)
        sync_path(temporary)
        temporary.rename(folder)
        sync_path(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sum(tensor.nbytes for tensor in state.values())


def sync_path(path: Path) -> None:
    """fsync a file or a directory, so that a rename after it is durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
