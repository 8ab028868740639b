"""config.json -> ModelShape: what is read, what is refused. No torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue.errors import ConfigError
from training.megatron.shape import read_shape

PLAIN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(PLAIN | changes))
    return folder


def test_both_spellings_of_newer_and_older_files_are_read(tmp_path: Path) -> None:
    new = read_shape(write(tmp_path))
    old = read_shape(write(tmp_path, num_local_experts=None, num_experts=8, rope_parameters=None, rope_theta=5e5))
    assert new == old
    assert new.rope_theta == 5e5
    assert new.head_dim == 8
    assert new.moe is not None
    assert new.moe.experts == 8
    assert new.moe.layers == (0, 1, 2, 3)


def test_dense_layers_between_sparse_ones_are_known(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert shape.moe is not None
    assert shape.moe.layers == (1,)
    assert shape.is_sparse(1)
    assert not shape.is_sparse(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "yarn"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shape(write(tmp_path, **change))


def test_a_missing_key_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)
    folder = write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="rms_norm_eps"):
        read_shape(folder)
