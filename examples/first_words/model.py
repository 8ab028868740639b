"""Make the policy of this example: a random Qwen3-MoE of 0.45 M parameters and its tokenizer, as a model folder.

The vocabulary is 64 whole words, so that a turn is a handful of tokens and everything the model ever reads or writes
can be read by eye. The weights are random: whatever the model can do after training, it learned from its own samples.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import; nothing here is downloaded

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SYMBOLS = ("ball", "cat", "moon", "tree")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE_WORDS = ("system", "user", "assistant", "\n", "say", "right", "wrong")
FILLERS = (
    "a", "and", "apple", "baby", "bird", "blue", "book", "bread", "bye", "car", "cup", "dad", "day", "dog",
    "door", "egg", "eye", "fish", "go", "good", "green", "hand", "hat", "hello", "home", "house", "is", "juice",
    "key", "light", "milk", "more", "mum", "my", "night", "no", "nose", "not", "on", "one", "play", "rain",
    "red", "sea", "shoe", "sun", "the", "two", "water", "yes",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """All 64 tokens with their ids; every id the model can sample is a readable word."""
    words = (*SPECIAL, *TEMPLATE_WORDS, *SYMBOLS, *FILLERS)
    return {word: index for index, word in enumerate(words)}


def tokenizer() -> Tokenizer:
    """Words split at blanks; a line break is a token of its own. No token depends on its neighbours."""
    built = Tokenizer(models.WordLevel(dict(vocabulary()), unk_token="<|endoftext|>"))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" +"), "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    built.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return built


def tokenizer_settings() -> Mapping[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }


def head_dim() -> int:
    """The engine's kernels on accelerators begin at heads of 64; on a CPU smaller ones cost less."""
    return 64 if torch.cuda.is_available() else 16


def config() -> Qwen3MoeConfig:
    ids = vocabulary()
    return Qwen3MoeConfig(
        vocab_size=len(ids), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim(), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=4096, dtype="float32",
        bos_token_id=None, eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"],
    )  # fmt: skip


def build(folder: Path, *, seed: int, init_std: float, head_std: float) -> int:
    """Write config.json, model.safetensors (one tensor per expert) and the tokenizer; returns the parameter count."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config()).float()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights (one dimension) stay 1. The usual 0.02 is meant for wide models: here it leaves the last
            # hidden state all but independent of the prompt.
            if parameter.dim() >= 2:
                parameter.normal_(0.0, init_std)
        # With a head as large as the rest, one of the words starts far ahead of the others whatever the prompt says,
        # and the policy settles on it before it has learned to read. A small head starts from equal chances.
        model.lm_head.weight.normal_(0.0, head_std)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tokenizer().save(str(part / "tokenizer.json"))
    (part / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings(), indent=2))
    model.save_pretrained(part)
    # A folder of this name is always whole, whenever this program was interrupted.
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--init-std", type=float, default=0.2, help="deviation of all weights with two or more dimensions"
    )
    parser.add_argument("--head-std", type=float, default=0.02, help="deviation of the output layer's weights")
    arguments = parser.parse_args()
    count = build(arguments.folder, seed=arguments.seed, init_std=arguments.init_std, head_std=arguments.head_std)
    print(f"{arguments.folder}: {count:,} parameters, {len(vocabulary())} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
