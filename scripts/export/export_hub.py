#!/usr/bin/env python3
"""
Exports a checkpoint as a directory for the Hugging Face Hub, which AutoModelForCausalLM, AutoTokenizer and pipeline()
open. Requires nothing but Python.

OUT contains:
  config.json       with an `auto_map` and modeling_diffv2.py, for trust_remote_code=True. A baseline is a Llama, with
                    windows a Ministral, with QK-norm a Qwen3, and needs no code, unless it is a Llama whose heads do
                    not divide its hidden size, which transformers 5 refuses: it is then a diffv2 with attention
                    "baseline"
  model.safetensors a copy, not a link: a program that saves into OUT must not change the checkpoint
  generation_config.json   the separator of documents begins a text, ends it and pads it
  tokenizer.json, tokenizer_config.json   the tokenizer of the checkpoint, with the separator as bos_token, which
                    train_diffv2 --prompt puts before a text. A post-processor that adds tokens, truncation and padding
                    are omitted: training has not seen them. Where tokens are bytes, one that maps each byte to its
                    value
  tokenizer.bin     for train_diffv2 --init OUT, which reads OUT too
  README.md         a model card (model_card.py)

The separator is --separator; else that of the run (--separator of train_diffv2, the corpora in run.json,
tokenizer.bin); else byte 0 where tokens are bytes. Optimizer and trainer state are not exported.

--as diffllama writes a diff_v1 as Transformers' DiffLlama, which needs no code. Its heads i and i + H are this
program's 2i and 2i + 1, of queries and keys; its value heads g and g + NKV/2 are the halves of wide head g; the weight
of the norm before o_proj is multiplied into o_proj, whose products are stored in F32. DiffLlama has no QK-norm, windows
or YOCO, and uses rms_norm_eps for the norm before o_proj, which is 1e-5 here: other models are refused.
"""

import argparse
import json
import os
import shutil
import struct
import sys
from array import array
from itertools import chain, repeat
from math import prod
from operator import mul
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "data"))
from model_card import model_card
from token_table import added_ids, byte_alphabet

CODE = Path(__file__).resolve().parent / "modeling_diffv2.py"
CLASSES = {  # of modeling_diffv2.py
    "AutoConfig": "DiffV2Config",
    "AutoModel": "DiffV2Model",
    "AutoModelForCausalLM": "DiffV2ForCausalLM",
    "AutoModelForSequenceClassification": "DiffV2ForSequenceClassification",
    "AutoModelForTokenClassification": "DiffV2ForTokenClassification",
    "AutoModelForQuestionAnswering": "DiffV2ForQuestionAnswering",
}
BYTE_VOCABULARY, NONE = 256, 2**32 - 1  # of llmc/text
HEAD_NORM_EPS = 1e-5  # of modeling_diffv2.py
BYTES = {"F32": 4, "BF16": 2}  # of an element


DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)


class BadInput(Exception):
    pass


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table_header(checkpoint):
    """(kind, vocab_size, pattern, flags, separator, ...) of tokenizer.bin; None: there is none"""
    path = checkpoint / "tokenizer.bin"
    if not path.exists():
        return None
    head = path.open("rb").read(8 + 12 * 4)
    if len(head) < 56 or head[:6] != b"DV2TOK":
        raise BadInput(f"{path} is not a token table")
    return struct.unpack_from("<12I", head, 8)


def find_separator(checkpoint, config, table):
    """The token that separates documents, by the rules of llmc/text/run_tokenizer.h; None: unknown"""
    state, run = checkpoint / "trainer_state.json", checkpoint.resolve().parent.parent / "run.json"
    if state.exists() and read_json(state)["options"].get("separator"):
        return int(read_json(state)["options"]["separator"].partition(":")[0])
    corpora = read_json(run)["data"].get("train", []) if state.exists() and run.exists() else []
    tokens = [c["separator"]["token"] for c in corpora if c.get("separator")]
    if tokens or table:
        return tokens[0] if tokens else table[4] if table[4] != NONE else None
    return 0 if config["vocab_size"] == BYTE_VOCABULARY else None


def read_header(file):
    """(description of the tensors, metadata, position of the data) of a safetensors file. Raises BadInput if a size is
    wrong."""
    size, length = os.fstat(file.fileno()).st_size, struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(min(length, size)))
    metadata, end = header.pop("__metadata__", {}), 0
    for name, tensor in header.items():
        first, last = tensor["data_offsets"]
        wanted = prod(tensor["shape"]) * BYTES.get(tensor["dtype"], 0)
        if last - first != wanted and tensor["dtype"] in BYTES:
            raise BadInput(f"{file.name} is damaged: {name} has {last - first} bytes, expected {wanted}")
        end = max(end, last)
    if size != 8 + length + end:
        raise BadInput(f"{file.name} has {size} bytes, expected {8 + length + end}: it is truncated or damaged")
    return header, metadata, 8 + length


def special_token(id_, text):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": text, **flags, "special": True}


def byte_tokenizer(separator):
    """
    A tokenizer.json whose tokens are bytes. The library writes a byte as a character: as itself if that is visible,
    else as one from 256 on (GPT-2's alphabet). A separator below 128 keeps its own character, which is matched in the
    text as a special token: the character of the alphabet would match other text.
    """
    alphabet = {b: c for c, b in byte_alphabet().items()}
    letters = [alphabet[b] for b in range(256)]
    special = separator is not None and separator < 128
    if special:
        letters[separator] = chr(separator)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special_token(separator, letters[separator])] if special else [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {c: b for b, c in enumerate(letters)}, "merges": []},
    }


def exported_tokenizer(checkpoint, config, table, separator):
    """The text of tokenizer.json and tokenizer_config.json; None: the checkpoint has no tokenizer.json, and tokens are
    not bytes"""
    path = checkpoint / "tokenizer.json"
    if path.exists():
        text = path.read_text(encoding="utf-8")  # other programs know a tokenizer by what it does
        own = json.loads(text)
        omitted = [k for k in ("truncation", "padding", "post_processor") if own.get(k)]
        if omitted and own[omitted[0]].get("type") != "ByteLevel":  # which adds nothing
            text = json.dumps(own | dict.fromkeys(omitted), indent=2, ensure_ascii=False)
    elif table[0] == 0 if table else config["vocab_size"] == BYTE_VOCABULARY:
        text = json.dumps(byte_tokenizer(separator), indent=2, ensure_ascii=False)
    else:
        return None
    own = json.loads(text)
    added = {id_: text for text, id_ in added_ids(own["model"]["vocab"], own.get("added_tokens") or []).items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": config["max_position_embeddings"],
        "padding_side": "left",  # generate() continues the last column of a batch
    }
    if separator in added:  # the text of another token would also match in texts that do not mean it
        settings |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), added[separator])
        settings["add_bos_token"] = True  # for programs that read it; Transformers does not beside a tokenizer.json
    return text, settings


def check_diffllama(config):
    """Refuses a model that DiffLlama does not hold exactly."""
    attention = config.get("attention", "baseline")
    if attention != "diff_v1":
        raise BadInput(f"--as diffllama requires attention diff_v1, not {attention}")
    refused = (("sliding_window", "windows"), ("yoco", "YOCO"), ("use_qk_norm", "QK-norm"))
    for key, name in (*refused, ("num_local_experts", "experts")):
        if config.get(key):
            raise BadInput(
                f"--as diffllama: the model has {name} ({key} is {json.dumps(config[key])}); DiffLlama does not"
            )
    if config["rms_norm_eps"] != HEAD_NORM_EPS:
        raise BadInput(
            f"--as diffllama: rms_norm_eps is {config['rms_norm_eps']:g}; DiffLlama uses it for the norm before o_proj "
            f"too, which has {HEAD_NORM_EPS:g}"
        )


def exported_config(config, diffllama):
    if config.get("sparse_blocks"):
        raise BadInput(f"{CODE.name} has no block-sparse attention (sparse_blocks is {config['sparse_blocks']})")
    if diffllama:
        check_diffllama(config)
        others = {k: v for k, v in config.items() if k != "attention"}
        changes = {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama", "hidden_act": "silu"}
        return {**others, **changes, "attention_bias": False}
    if "attention" not in config:
        if config["model_type"] != "llama" or config["hidden_size"] % config["num_attention_heads"] == 0:
            return config
        config = {**config, "attention": "baseline"}
    auto_map = {auto: f"{CODE.stem}.{name}" for auto, name in CLASSES.items()}
    return {**config, "architectures": ["DiffV2ForCausalLM"], "model_type": "diffv2", "auto_map": auto_map}


def floats(data, dtype):
    """An array of float32 from little-endian F32 or BF16."""
    if dtype == "BF16":  # the upper half of an F32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        data = wide
    return array("f", bytes(data))


def times_columns(matrix, weights):
    """A matrix whose column j is multiplied by weights[j % len(weights)]"""
    return array("f", map(mul, matrix, chain.from_iterable(repeat(weights)))).tobytes()


def even_then_odd(data, step):
    """Heads 0, 2, 4 .. and then 1, 3, 5 .. of `step` bytes each"""
    heads = [data[i : i + step] for i in range(0, len(data), step)]
    return b"".join(heads[0::2] + heads[1::2])


def write_diffllama(source, to, config):
    """Copies model.safetensors, with the tensors of attention as DiffLlama has them."""
    with source.open("rb") as f, to.open("wb") as out:
        header, metadata, place = read_header(f)

        def read(name):
            begin, end = header[name]["data_offsets"]
            f.seek(place + begin)
            return f.read(end - begin)

        new, end = {"__metadata__": {**metadata, "format": "pt"}}, 0  # which transformers 4 requires
        for name, tensor in header.items():
            if tensor["dtype"] not in BYTES:
                raise BadInput(f"--as diffllama: {name} has type {tensor['dtype']}; supported are {', '.join(BYTES)}")
            if not name.endswith("subln.weight"):
                dtype = "F32" if name.endswith("o_proj.weight") else tensor["dtype"]
                begin, end = end, end + prod(tensor["shape"]) * BYTES[dtype]
                new[name] = {"dtype": dtype, "shape": tensor["shape"], "data_offsets": [begin, end]}
        text = json.dumps(new).encode()
        text += b" " * (-len(text) % 8)
        out.write(struct.pack("<Q", len(text)) + text)
        for name in list(new)[1:]:
            data, kind = read(name), name.split(".")[-2]
            if kind in ("q_proj", "k_proj", "v_proj"):
                data = even_then_odd(data, config["head_dim"] * config["hidden_size"] * BYTES[header[name]["dtype"]])
            elif kind == "o_proj":
                norm = name.replace("o_proj", "subln")
                data = times_columns(*(floats(read(n), header[n]["dtype"]) for n in (name, norm)))
            out.write(data)


def export(options, checkpoint, out):
    """Writes OUT, whose parts are read and checked first."""
    config = read_json(checkpoint / "config.json")
    table = table_header(checkpoint)
    separator = find_separator(checkpoint, config, table) if options.separator is None else options.separator
    if separator is not None and not 0 <= separator < config["vocab_size"]:
        raise BadInput(f"the separator is {separator}; the model has a vocabulary of {config['vocab_size']}")
    tokenizer = exported_tokenizer(checkpoint, config, table, separator)
    config = exported_config(config, options.diffllama)
    with (checkpoint / "model.safetensors").open("rb") as file:
        read_header(file)
    special = {} if separator is None else {"bos_token_id": separator, "eos_token_id": separator}
    pad = {"pad_token_id": separator} if special else {}
    of_class = pad if "auto_map" in config else {}  # with this key, a Llama would not train the embedding of the token
    out.mkdir(parents=True)
    try:
        write_json(out / "config.json", config | special | of_class)
        if special:
            write_json(out / "generation_config.json", special | pad)
        if tokenizer:
            (out / "tokenizer.json").write_text(tokenizer[0], encoding="utf-8")
            write_json(out / "tokenizer_config.json", tokenizer[1])
        if table:
            shutil.copyfile(checkpoint / "tokenizer.bin", out / "tokenizer.bin")
        if "auto_map" in config:
            shutil.copyfile(CODE, out / CODE.name)
        card = model_card(checkpoint, config, separator, bool(tokenizer) and "add_bos_token" in tokenizer[1])
        (out / "README.md").write_text(card, encoding="utf-8")
        write_weights = write_diffllama if options.diffllama else lambda source, to, _: shutil.copyfile(source, to)
        write_weights(checkpoint / "model.safetensors", out / "model.safetensors", config)
    except BaseException:
        shutil.rmtree(out)
        raise
    if not special:
        print("export_hub.py: the separator is unknown, and no token ends a text: give --separator ID", file=sys.stderr)
    if not tokenizer:
        print(f"export_hub.py: {checkpoint} has no tokenizer.json, and {out} has no tokenizer", file=sys.stderr)
    elif special and "pad_token" not in tokenizer[1]:
        print(f"export_hub.py: the tokenizer has no text for the separator {separator} and omits it", file=sys.stderr)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint of train_diffv2")
    parser.add_argument("out", type=Path, metavar="OUT", help="a directory that does not exist")
    parser.add_argument("--as", dest="diffllama", choices=["diffllama"], help="the class that a diff_v1 is written as")
    parser.add_argument("--separator", type=int, metavar="ID", help="token that separates documents")
    options = parser.parse_args(arguments)
    try:
        export(options, options.checkpoint, options.out)
    except (BadInput, OSError) as error:
        print(f"export_hub.py: {error}", file=sys.stderr)
    except DAMAGE as error:
        print(
            f"export_hub.py: {options.checkpoint} is not a checkpoint: {type(error).__name__}: {error}", file=sys.stderr
        )
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
