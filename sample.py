"""Text from a checkpoint of any layout, or from a model in Hugging Face's, on one process.

    python sample.py out                                                   from the newest checkpoint in out
    python sample.py out/step_000100 --prompt='class Node' --temperature=0.5
    python sample.py FOLDER                                                with config.json and tokenizer.json
"""

from __future__ import annotations

import codecs
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import data
import model as models
import parallel
import train
from kernels import RECIPES, dtype_of
from settings import knob, load


@dataclass
class SampleConfig:
    """Knobs of `python sample.py OUT_DIR`."""

    program = "sample.py OUT_DIR"

    prompt: str = knob("def ", "text to go on from")
    length: int = knob(300, "tokens to add", least=1)
    temperature: float = knob(0.8, "0: always the likeliest token", least=0)
    top_k: int = knob(40, "draw among so many of the likeliest tokens; 0: among all", least=0)
    seed: int = knob(0, "of the draws", least=0)
    data: str = knob("", "data folder with the tokenizer; empty: where the run had it")
    device: str = knob("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))


def open_text(folder, state):
    """What encodes and decodes: the tokens themselves are not needed, and neither is their folder for bytes."""
    tokenizer = state["tokenizer"]
    if tokenizer != "bytes":
        tokenizer = tokenizer or "tokenizer.json"
        if not (folder / tokenizer).is_file():
            raise data.DataError(f"there is no {folder / tokenizer}: name a folder that has it with --data=FOLDER")
    return data.Data(folder, train=None, val=None, vocab_size=state["config"]["vocab_size"], tokenizer=tokenizer)


def load_model(folder, state, device):
    """The whole model of a checkpoint on this process, without modules for multi-token prediction."""
    cfg = dataclasses.replace(checkpoint.config_of(state, models.Architecture), n_mtp=0)
    if cfg.precision in RECIPES and not cfg.emulate:    # Transformer Engine may not be here, and few tokens need none
        cfg = dataclasses.replace(cfg, precision="bf16")
    layout = parallel.Layout(parallel.sizes_of(cfg, 1), device)
    with torch.device("meta"):
        model = models.Model(cfg, layout)
    # the cast comes first, so that the model is never there twice
    model = model.to(dtype_of(cfg.precision, device)).to_empty(device=device)
    if "step" in state:
        checkpoint.load_weights(folder, model, layout)
    else:
        for buffer in model.buffers():
            buffer.zero_()
        checkpoint.load_hf(folder, model, layout)
    return model


def main(argv):
    named = argv[:1] if argv and not argv[0].startswith("-") else []
    if not named and not {"-h", "--help"} & set(argv):
        print("usage: sample.py OUT_DIR --prompt='def ' (--help: more)", file=sys.stderr)
        sys.exit(2)
    cfg = load(SampleConfig, argv[len(named):])
    device = train.device_of(cfg)
    try:
        parallel.init(device)
        folder, state = checkpoint.open_checkpoint(named[0])
        text = open_text(Path(cfg.data or state["data"]), state)
        prompt = text.encode(cfg.prompt)
        if not prompt:
            raise data.DataError("--prompt is empty: give the text to go on from")
        if max(prompt) >= text.vocab_size:
            raise data.DataError(f"--prompt={cfg.prompt!r} has ids up to {max(prompt)}, but the model knows "
                                 f"{text.vocab_size}")
        model = load_model(folder, state, device)
    except (checkpoint.CheckpointError, data.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    after = f", after {state['step']} steps" if "step" in state else ""
    print(f"{folder}{after}, temperature {cfg.temperature}, top_k {cfg.top_k}, "
          f"seed {cfg.seed}", file=sys.stderr)
    ids = models.generate(model, prompt, cfg.length, cfg.temperature, cfg.top_k, cfg.seed)
    if state["tokenizer"] == "bytes":   # as they come; a character may be several bytes
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        print(cfg.prompt, end="")
        for i in ids:
            print(decoder.decode(bytes([min(i, 255)])), end="", flush=True)
        print(decoder.decode(b"", final=True))
    else:
        print(text.decode([*prompt, *ids]))


if __name__ == "__main__":
    main(sys.argv[1:])
