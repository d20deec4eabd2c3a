#!/usr/bin/env python3
"""
Exports a checkpoint as a directory for the Hugging Face Hub.

OUT contains config.json with an `auto_map`, modeling_diffv2.py, and the weights, so that
AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True) opens it anywhere. A baseline is a Llama, with windows
a Ministral, with QK-norm a Qwen3, and needs no code, unless it is a Llama whose heads do not divide its hidden size,
which transformers 5 refuses: it is then exported as diffv2 with attention "baseline". train_diffv2 --init reads OUT
too. Optimizer and trainer state are not exported. Weights are copied, not linked: a program that saves into OUT must
not change the checkpoint. Requires nothing but Python.

Usage: export_hub.py CHECKPOINT OUT
"""

import json
import shutil
import sys
from pathlib import Path

CODE = Path(__file__).resolve().parent / "modeling_diffv2.py"
AUTO_MAP = {"AutoConfig": "modeling_diffv2.DiffV2Config", "AutoModelForCausalLM": "modeling_diffv2.DiffV2ForCausalLM"}


def exported_config(config):
    if "attention" not in config:
        if config["model_type"] != "llama" or config["hidden_size"] % config["num_attention_heads"] == 0:
            return config
        config = {**config, "attention": "baseline"}
    return {**config, "architectures": ["DiffV2ForCausalLM"], "model_type": "diffv2", "auto_map": AUTO_MAP}


def main(arguments):
    if len(arguments) != 2:
        print("usage: export_hub.py CHECKPOINT OUT", file=sys.stderr)
        return 2
    checkpoint, out = map(Path, arguments)
    try:
        config = exported_config(json.loads((checkpoint / "config.json").read_text()))
        out.mkdir(parents=True)
        shutil.copyfile(checkpoint / "model.safetensors", out / "model.safetensors")
        if "auto_map" in config:
            shutil.copyfile(CODE, out / CODE.name)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, ValueError, KeyError) as error:
        print(f"export_hub.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
