"""Token files and the order in which they are read.

A data folder holds `train.bin` and `val.bin`, raw little-endian uint16 token ids (uint32 where the vocabulary
needs it), one after another and without a header, and `meta.json`:

    {"vocab_size": 50257, "dtype": "uint16", "tokenizer": "tokenizer.json", "max_id": 50256}

`tokenizer` is "bytes" (a token is a byte of UTF-8) or a file of the tokenizers package inside the folder;
`max_id`, the largest id that occurs, may be missing. Without meta.json the ids are uint16 and are read once
to find the vocabulary.

    python data.py prepare --input='corpus/*.txt' --tokenizer=bytes --out=data/mine

makes such a folder from text. Without any data the Python standard library's own sources serve as a corpus:
every machine that runs this has them, and a small model learns their look in minutes.

Shapes: `B` sequences, `S` sequence length. Window i is tokens i*S ... i*S+S, the last one shared with window
i+1: S inputs and, shifted by one, S labels.
"""

from __future__ import annotations

import fcntl
import functools
import glob
import itertools
import json
import os
import shutil
import signal
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import settings
from settings import knob

PADDING = -1  # a token that is none
NO_LABEL = -100  # a label that is not predicted; what torch's cross entropy ignores
CHUNK = 2**22  # bytes read at a time


class DataError(Exception):
    """What is wrong with the data, in one line for the user."""


# ---- reading ----


@dataclass
class Tokens:
    """One file of token ids, mapped into memory."""

    ids: np.memmap

    def __len__(self):
        return len(self.ids)

    def n_windows(self, seq_len):
        """How many windows of `seq_len` inputs and labels there are; a rest at the end is left out."""
        return (len(self.ids) - 1) // seq_len


@dataclass
class Data:
    """An opened data folder. vocab_size and tokenizer are the data's own; tokenizer None: it names none."""

    folder: Path
    train: Tokens
    val: Tokens
    vocab_size: int
    tokenizer: str | None

    def encode(self, text):
        """Text to a list of ids, without special tokens around it."""
        if self.tokenizer == "bytes":
            return list(text.encode())
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Ids to text. Bytes that are no UTF-8, and ids that are no byte, show as a replacement sign."""
        ids = [int(i) for i in ids]
        if self.tokenizer == "bytes":
            # A padded vocabulary has ids past 255; byte 255 never occurs in UTF-8.
            return bytes(min(i, 255) for i in ids).decode(errors="replace")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @functools.cached_property
    def _tokenizer(self):
        if self.tokenizer is None:
            raise DataError(f"{self.folder} has no tokenizer: name one in its meta.json")
        return load_tokenizer(self.folder / self.tokenizer)


def open_data(folder, seq_len, vocab_size=0):
    """Open a data folder, "" for the built-in corpus, and check that it can feed a model.

    seq_len: tokens in a window; vocab_size: the model's, 0 to take the data's. Raises DataError.
    """
    folder = Path(folder) if folder else builtin_corpus()
    if not folder.is_dir():
        raise DataError(f"data={folder}: no such folder (python data.py prepare makes one)")
    try:
        meta = _read_meta(folder)
        train, val = (_map_tokens(folder / name, meta["dtype"], seq_len) for name in ("train.bin", "val.bin"))
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror} (data={folder})") from None
    if "vocab_size" not in meta:
        meta["vocab_size"] = 1 + int(max(train.ids.max(), val.ids.max()))
    needed = meta.get("max_id", meta["vocab_size"] - 1) + 1
    if 0 < vocab_size < needed:
        raise DataError(f"vocab_size={vocab_size}, but the ids in {folder} need {needed}: set that, or 0")
    return Data(folder, train, val, meta["vocab_size"], meta["tokenizer"])


def _read_meta(folder):
    path = folder / "meta.json"
    if not path.exists():
        return {"dtype": "uint16", "tokenizer": None}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise DataError(f"{path} holds no JSON object")
    size, tokenizer, max_id = meta.get("vocab_size"), meta.get("tokenizer", ""), meta.get("max_id", 0)
    has_tokenizer = tokenizer in ("bytes", None) or (folder / str(tokenizer)).is_file()
    rules = [
        ("vocab_size", type(size) is int and size > 0, "a positive integer"),
        ("dtype", meta.get("dtype") in ("uint16", "uint32"), "uint16 or uint32"),
        ("tokenizer", has_tokenizer, f"bytes, a file in {folder}, or null for none"),
    ]
    for key, holds, wanted in rules:
        if not holds:
            found = repr(meta[key]) if key in meta else "missing"
            raise DataError(f"{path}: {key} is {found}, but must be {wanted}")
    if type(max_id) is not int or not 0 <= max_id < size:
        raise DataError(f"{path}: max_id is {max_id!r}, but must be an id below vocab_size {size}")
    return meta


def _map_tokens(path, dtype, seq_len):
    dtype = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path} is empty")
    if size % dtype.itemsize:
        raise DataError(f"{path} has {size} bytes, not a multiple of {dtype.itemsize} ({dtype.name} ids)")
    n_tokens = size // dtype.itemsize
    if n_tokens < seq_len + 1:
        raise DataError(
            f"{path} has {n_tokens} tokens, but one window of seq_len={seq_len} needs {seq_len + 1}: "
            "lower seq_len or bring more data"
        )
    return Tokens(np.memmap(path, dtype=dtype, mode="r"))


def load_tokenizer(path):
    """A tokenizer of the tokenizers package from its JSON file; DataError without the file or the package."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(f"tokenizer {path} needs the tokenizers package: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise DataError(f"cannot read tokenizer {path}: {error}") from None
    # Many files say how to fit texts to some model's input; a corpus would lose its text by that.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# ---- order ----


def sample_ids(step, microbatch, dp_rank, *, global_batch, micro_batch, dp):
    """The samples, counted over the whole run, of one microbatch, as a range of micro_batch numbers.

    Step s (from 0) owns the global_batch samples from s*global_batch on; each of the dp ranks has one
    contiguous slice of them, cut into microbatches. So what a step sees does not depend on the layout.
    global_batch must divide by dp*micro_batch.
    """
    start = step * global_batch + dp_rank * (global_batch // dp) + microbatch * micro_batch
    return range(start, start + micro_batch)


def window_of(seed, index, n_windows):
    """The window that sample `index` reads. Every n_windows samples visit each once, in a new order."""
    epoch, position = divmod(index, n_windows)
    return int(_permutation(seed, epoch, n_windows)[position])


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def _permutation(seed, epoch, n_windows):
    # RandomState and not default_rng: numpy promises that its stream never changes between versions, and a
    # resumed run must find the order it was stopped in.
    return np.random.RandomState([seed % 2**32, epoch]).permutation(n_windows)


def batch(tokens, windows, seq_len):
    """(tokens_BS, labels_BS), int64, of the windows with these numbers.

    Window number -1 gives padding: evaluation needs it, since all ranks must take equally many steps.
    """
    tokens_BS = torch.full((len(windows), seq_len), PADDING)
    labels_BS = torch.full((len(windows), seq_len), NO_LABEL)
    for row, window in enumerate(windows):
        if window != -1:
            start = window * seq_len
            ids = torch.from_numpy(tokens.ids[start : start + seq_len + 1].astype(np.int64))
            tokens_BS[row], labels_BS[row] = ids[:-1], ids[1:]
    return tokens_BS, labels_BS


# ---- the built-in corpus ----

# Tests are most of the library's text; packages and caches differ between machines.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def builtin_corpus(folder="data/stdlib", source=None):
    """The folder with the sources in `source` (the Python standard library) as bytes, built when missing.

    All ranks may call this at once: one builds, the others wait. The same Python gives the same bytes.
    """
    folder, source = Path(folder), Path(source or sysconfig.get_path("stdlib"))
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                for remains in folder.parent.glob(f"{folder.name}.partial-*"):  # of a build that was killed
                    shutil.rmtree(remains)
                _build_corpus(folder, source)
    except OSError as error:
        if folder.is_dir():     # another node built it, which a network's file system may tell late
            return folder
        raise DataError(f"cannot build {folder}: {error} (data=FOLDER names other data)") from None
    return folder


def _build_corpus(folder, source):
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.py"))
    names = [name for name in names if not LEFT_OUT.intersection(name.split("/"))]
    # These two, at the top, say how this machine's Python was compiled.
    names = [name for name in names if not name.startswith(("_sysconfigdata", "config-"))]
    if not names:
        raise DataError(f"no Python sources in {source}: name other data with data=FOLDER")
    # In order of names the end, which is held out, would be one corner of the library.
    np.random.RandomState(0).shuffle(names)
    text = b"\n".join((source / name).read_bytes() for name in names)
    print(f"building {folder} from the Python standard library: {len(text) / 1e6:.1f} MB", flush=True)
    write_data(folder, [np.frombuffer(text, dtype=np.uint8)], 256, "bytes", val_fraction=0.04)


# ---- writing ----


def write_data(out, chunks, vocab_size, tokenizer, val_fraction):
    """Write data folder `out` from `chunks`, an iterable of arrays of ids; returns (train, val) token counts.

    tokenizer: "bytes" or the path of a file, which is copied. The last val_fraction of the tokens is held
    out. The folder gets its name when it is complete, so that nothing looks finished that is not. Only one
    chunk is in memory at a time.
    """
    out = Path(os.path.abspath(out))  # "." too has a name then
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    meta = {"vocab_size": vocab_size, "dtype": dtype.name, "tokenizer": "bytes", "max_id": 0}
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        n_tokens = 0
        with open(partial / "train.bin", "wb") as train:
            for ids in chunks:
                train.write(ids.astype(dtype))
                n_tokens += len(ids)
                meta["max_id"] = max(meta["max_id"], int(ids.max(initial=0)))
        if n_tokens < 2:
            raise DataError(f"the input has {n_tokens} tokens, too few for a train.bin and a val.bin")
        n_val = max(1, int(n_tokens * val_fraction))
        _split(partial, (n_tokens - n_val) * dtype.itemsize)
        if tokenizer != "bytes":
            meta["tokenizer"] = "tokenizer.json"
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        (partial / "meta.json").write_text(json.dumps(meta))
        partial.rename(out)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial)
        raise
    return n_tokens - n_val, n_val


def _split(folder, position):
    """Move what follows byte `position` of train.bin to val.bin."""
    with open(folder / "train.bin", "r+b") as train, open(folder / "val.bin", "wb") as val:
        train.seek(position)
        shutil.copyfileobj(train, val)
        train.truncate(position)


# ---- python data.py prepare ----


@dataclass
class PrepareConfig:
    """Knobs of `python data.py prepare`."""

    program = "data.py prepare"

    input: str = knob("", "text files, a pattern in quotes: 'corpus/*.txt' (** for folders in folders)")
    tokenizer: str = knob("bytes", "bytes, or the tokenizer.json file of a tokenizer")
    out: str = knob("", "the data folder to make")
    val_fraction: float = knob(0.04, "how much of the text, at its end, is held out", least=0.001, most=0.5)


def _check(cfg):
    problems = []
    if not cfg.input:
        problems.append("--input names no text files: for example --input='corpus/*.txt'")
    elif not _input_files(cfg):
        problems.append(f"--input={cfg.input} matches no files")
    if cfg.tokenizer != "bytes" and not os.path.isfile(cfg.tokenizer):
        problems.append(f"--tokenizer={cfg.tokenizer}: no such file (or bytes)")
    if not cfg.out:
        problems.append("--out names no folder: for example --out=data/mine")
    elif os.path.exists(cfg.out) and (not os.path.isdir(cfg.out) or os.listdir(cfg.out)):
        problems.append(f"--out={cfg.out} exists and is not empty: delete it or choose another")
    return problems


def _input_files(cfg):
    return [path for path in sorted(glob.glob(cfg.input, recursive=True)) if os.path.isfile(path)]


def prepare(cfg):
    """Make the data folder cfg.out from the files cfg.input, in order of their names, simply concatenated."""
    if cfg.tokenizer == "bytes":
        vocab_size, read = 256, _read_bytes
    else:
        tokenizer = load_tokenizer(cfg.tokenizer)
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        read = functools.partial(_read_text, tokenizer)
    chunks = _with_progress(_input_files(cfg), read)
    n_train, n_val = write_data(cfg.out, chunks, vocab_size, cfg.tokenizer, cfg.val_fraction)
    print(f"{cfg.out}: {n_train:,} tokens to train on, {n_val:,} held out, vocabulary {vocab_size:,}")
    print(f"torchrun --nproc_per_node=4 train.py --data={cfg.out}")


def _with_progress(paths, read):
    n_tokens = 0
    try:
        for number, path in enumerate(paths, 1):
            for ids in read(path):
                n_tokens += len(ids)
                print(f"\rfile {number} of {len(paths)}, {n_tokens / 1e6:.1f} M tokens", end="", flush=True)
                yield ids
    finally:
        print()  # what comes next, be it an error, starts on a line of its own


def _read_bytes(path):
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            yield np.frombuffer(chunk, dtype=np.uint8)


def _read_text(tokenizer, path):
    with open(path, encoding="utf-8", newline="") as file:  # newline="": line ends stay as they are
        pieces = _pieces(file)
        try:
            while texts := list(itertools.islice(pieces, 64)):
                # A list of texts, because the package spreads it over the cores.
                encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
                yield np.concatenate([np.array(piece.ids, dtype=np.uint32) for piece in encoded])
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8: only --tokenizer=bytes takes that") from None


def _pieces(file, size=2**16):
    # A piece goes on to the end of its line, so that no word is cut in two; a line without end is cut.
    while piece := file.read(size) + file.readline(size):
        yield piece


def main(argv):
    """The command line; exits 2 with one line per problem when something is wrong."""
    if argv[:1] == ["prepare"]:
        argv = argv[1:]
    elif not {"-h", "--help"} & set(argv):
        print("usage: data.py prepare --input='corpus/*.txt' --out=data/mine (--help: more)", file=sys.stderr)
        sys.exit(2)
    cfg = settings.load(PrepareConfig, argv, _check)
    for number in (signal.SIGINT, signal.SIGTERM):  # as an exception, so that a kill cleans up too
        signal.signal(number, lambda *_: sys.exit(130))
    try:
        prepare(cfg)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
