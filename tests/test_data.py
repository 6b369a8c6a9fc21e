"""Data: what a folder must hold, in which order it is read, and how folders are made."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import DataError, batch, builtin_corpus, open_data, sample_ids, window_of

BYTES_META = {"vocab_size": 256, "dtype": "uint16", "tokenizer": "bytes"}


def write_folder(folder, train, val, meta=None, dtype="<u2"):
    """A data folder with these token ids; without meta.json unless meta is given."""
    folder.mkdir()
    np.array(train, dtype=dtype).tofile(folder / "train.bin")
    np.array(val, dtype=dtype).tofile(folder / "val.bin")
    if meta is not None:
        (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    return folder


@pytest.fixture
def folder(tmp_path):
    """40 tokens to train on, 20 held out, ids up to 99."""
    return write_folder(tmp_path / "tokens", [*range(39), 99], range(20), BYTES_META)


def error_of(folder, seq_len=4, vocab_size=0):
    with pytest.raises(DataError) as error:
        open_data(str(folder), seq_len, vocab_size)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- opening ----


def test_open_folder_with_meta(folder):
    opened = open_data(str(folder), seq_len=4)
    assert opened.vocab_size == 256
    assert (len(opened.train), len(opened.val)) == (40, 20)
    assert isinstance(opened.train.ids, np.memmap)
    assert opened.train.ids.tolist() == [*range(39), 99]


def test_open_folder_without_meta_scans_the_ids(tmp_path):
    folder = write_folder(tmp_path / "tokens", [1, 2, 3], [1, 700, 3])
    opened = open_data(folder, seq_len=2)
    assert opened.vocab_size == 701
    assert opened.train.ids.tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="has no tokenizer: name one in its meta.json"):
        opened.encode("text")


def test_open_uint32(tmp_path):
    meta = {"vocab_size": 100_000, "dtype": "uint32", "tokenizer": None}
    opened = open_data(write_folder(tmp_path / "tokens", [99_999, 1, 2], [3, 4, 5], meta, "<u4"), seq_len=2)
    assert opened.train.ids.tolist() == [99_999, 1, 2]


def test_missing_folder_and_files(tmp_path, folder):
    assert error_of(tmp_path / "none").startswith(f"data={tmp_path}/none: no such folder")
    (folder / "val.bin").unlink()
    assert error_of(folder) == f"cannot read {folder}/val.bin: No such file or directory (data={folder})"
    (folder / "train.bin").unlink()
    assert f"cannot read {folder}/train.bin" in error_of(folder)


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_empty_odd_and_short_files(folder, name):
    (folder / name).write_bytes(b"")
    assert error_of(folder) == f"{folder}/{name} is empty"
    (folder / name).write_bytes(bytes(7))
    assert error_of(folder) == f"{folder}/{name} has 7 bytes, not a multiple of 2 (uint16 ids)"
    (folder / name).write_bytes(bytes(8))
    assert error_of(folder).startswith(
        f"{folder}/{name} has 4 tokens, but one window of seq_len=4 needs 5: lower seq_len"
    )


def test_exactly_one_window_is_one_sample(tmp_path):
    opened = open_data(write_folder(tmp_path / "tokens", range(5), range(5)), seq_len=4)
    n_windows = opened.train.n_windows(4)
    assert n_windows == 1
    assert [window_of(0, index, n_windows) for index in range(3)] == [0, 0, 0]
    tokens_BS, labels_BS = batch(opened.train, [0], 4)
    assert tokens_BS.tolist() == [[0, 1, 2, 3]]
    assert labels_BS.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vocab_size": None}, "vocab_size is None, but must be a positive integer"),
        ({"vocab_size": "256"}, "vocab_size is '256', but must be a positive integer"),
        ({"vocab_size": 0}, "vocab_size is 0, but must be a positive integer"),
        ({"dtype": "int64"}, "dtype is 'int64', but must be uint16 or uint32"),
        ({"tokenizer": "gone.json"}, "tokenizer is 'gone.json', but must be bytes, a file in "),
        ({"max_id": 256}, "max_id is 256, but must be an id below vocab_size 256"),
        ({"max_id": "9"}, "max_id is '9', but must be an id below vocab_size 256"),
    ],
)
def test_wrong_meta_values(folder, change, message):
    (folder / "meta.json").write_text(json.dumps(BYTES_META | change))
    assert error_of(folder).startswith(f"{folder}/meta.json: {message}")


@pytest.mark.parametrize("key", ["vocab_size", "dtype", "tokenizer"])
def test_missing_meta_keys(folder, key):
    (folder / "meta.json").write_text(json.dumps({k: v for k, v in BYTES_META.items() if k != key}))
    assert error_of(folder).startswith(f"{folder}/meta.json: {key} is missing, but must be ")


@pytest.mark.parametrize(
    "content, message",
    [(b'{"vocab', "is not JSON: "), (b"\xff", "is not JSON: "), (b"[1]", "holds no JSON object")],
)
def test_corrupt_meta(folder, content, message):
    (folder / "meta.json").write_bytes(content)
    assert error_of(folder).startswith(f"{folder}/meta.json {message}")


def test_vocabulary_too_small(folder, tmp_path):
    def message(folder, size, needed):
        return f"vocab_size={size}, but the ids in {folder} need {needed}: set that, or 0"

    assert error_of(folder, vocab_size=255) == message(folder, 255, 256)
    assert open_data(folder, 4, vocab_size=256).vocab_size == 256
    assert open_data(folder, 4, vocab_size=512).vocab_size == 256
    # With max_id it is known which ids really occur.
    (folder / "meta.json").write_text(json.dumps(BYTES_META | {"max_id": 99}))
    assert error_of(folder, vocab_size=99) == message(folder, 99, 100)
    open_data(folder, 4, vocab_size=100)
    scanned = write_folder(tmp_path / "scanned", [1, 2, 3], [1, 700, 3])
    assert error_of(scanned, 2, vocab_size=700) == message(scanned, 700, 701)


def test_bytes_encode_and_decode(folder):
    opened = open_data(folder, seq_len=4)
    assert opened.encode("aé") == [97, 195, 169]
    assert opened.decode(opened.encode("naïve ✓")) == "naïve ✓"
    assert opened.decode([97, 195]) == "a\ufffd"
    assert opened.decode([97, 300]) == "a\ufffd"  # a padded vocabulary's id
    assert opened.decode(torch.tensor([97, 98])) == "ab"


# ---- order ----


@pytest.mark.parametrize("n_windows", [1, 2, 10])
def test_each_epoch_visits_every_window_once(n_windows):
    for epoch in range(3):
        samples = range(epoch * n_windows, (epoch + 1) * n_windows)
        assert sorted(window_of(7, index, n_windows) for index in samples) == list(range(n_windows))


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        return [window_of(seed, epoch * 20 + position, 20) for position in range(20)]

    assert order(7, 0) != order(7, 1)
    assert order(7, 0) != order(8, 0)
    assert order(-1, 0) != order(2**40, 0)  # any integer is a seed


def test_the_order_is_the_same_everywhere_and_forever():
    order = [window_of(1337, index, 8) for index in range(16)]
    assert order == [1, 3, 5, 4, 0, 6, 2, 7, 0, 3, 1, 4, 7, 5, 2, 6]


def test_last_batch_of_an_epoch_fills_from_the_next():
    order = [window_of(3, index, 10) for index in range(20)]
    third_step = sample_ids(2, 0, 0, global_batch=4, micro_batch=4, dp=1)
    last_batch = [window_of(3, index, 10) for index in third_step]
    assert last_batch == order[8:12]
    assert set(last_batch[:2]) == set(range(10)) - set(order[:8])


@pytest.mark.parametrize("dp, micro_batch", [(1, 12), (1, 1), (2, 3), (4, 3), (4, 1), (12, 1)])
def test_a_step_sees_the_same_samples_under_every_layout(dp, micro_batch):
    for step in (0, 5):
        of_rank = []
        for rank in range(dp):
            pieces = range(12 // dp // micro_batch)
            ids = [
                i
                for piece in pieces
                for i in sample_ids(step, piece, rank, global_batch=12, micro_batch=micro_batch, dp=dp)
            ]
            assert ids == list(range(ids[0], ids[0] + 12 // dp))  # one contiguous slice
            of_rank += ids
        assert of_rank == list(range(step * 12, step * 12 + 12))  # disjoint, and the union is the step


def test_every_rank_has_data_past_the_end():
    # 10 windows, 4 ranks, 16 samples a step: the corpus ends in the first step.
    for step in range(3):
        for rank in range(4):
            ids = sample_ids(step, 0, rank, global_batch=16, micro_batch=4, dp=4)
            assert len([window_of(0, index, 10) for index in ids]) == 4


def test_windows_overlap_by_the_label_of_the_last_input(folder):
    tokens = open_data(folder, seq_len=4).train
    assert tokens.n_windows(4) == 9
    assert tokens.n_windows(13) == 3
    tokens_BS, labels_BS = batch(tokens, [2, 0], 4)
    assert tokens_BS.dtype == labels_BS.dtype == torch.int64
    assert tokens_BS.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert labels_BS.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]


def test_window_minus_1_is_padding(folder):
    tokens_BS, labels_BS = batch(open_data(folder, seq_len=4).train, [-1, 0], 4)
    assert tokens_BS.tolist() == [[-1] * 4, [0, 1, 2, 3]]
    assert labels_BS.tolist() == [[-100] * 4, [1, 2, 3, 4]]


# ---- the built-in corpus ----


@pytest.fixture
def fake_library(tmp_path):
    """A library of 30 files that count and of some that must be left out."""
    library = tmp_path / "library"
    for number in range(30):
        path = library / f"package{number % 3}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"kept_{number} = 1\n" * 10)
    left_out = ["test/a.py", "json/tests/a.py", "idlelib/idle_test/a.py", "site-packages/a.py"]
    left_out += ["x/__pycache__/a.py", "_sysconfigdata_linux.py", "config-3.11/a.py", "json/notes.txt"]
    for name in left_out:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("unwanted\n")
    return library


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_builtin_corpus_holds_the_library_and_nothing_else(tmp_path, fake_library, capsys):
    folder = builtin_corpus(tmp_path / "data" / "stdlib", fake_library)
    opened = open_data(folder, seq_len=16)
    text = opened.decode(opened.train.ids) + opened.decode(opened.val.ids)
    for number in range(30):
        assert text.count(f"kept_{number} = 1\n") == 10
    assert "unwanted" not in text
    n_bytes = len(text)
    assert len(opened.val) == int(n_bytes * 0.04)
    assert opened.vocab_size == 256
    # Files are shuffled, so that what is held out comes from all over the library.
    first = [line for line in text.split() if line.startswith("kept_")][::10]
    assert first != sorted(first)
    built = f"building {folder} from the Python standard library: 0.0 MB\n"
    assert capsys.readouterr().out == built
    assert builtin_corpus(folder, fake_library) == folder  # it is there already
    assert capsys.readouterr().out == ""
    again = builtin_corpus(tmp_path / "again", fake_library)
    assert files_of(again) == files_of(folder)


def test_a_corpus_that_another_node_has_built_is_taken(tmp_path, fake_library, monkeypatch):
    """A network's file system may say too late that the folder is there."""
    def build(folder, source):
        folder.mkdir()
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(data, "_build_corpus", build)
    assert builtin_corpus(tmp_path / "stdlib", fake_library) == tmp_path / "stdlib"


def test_no_data_means_the_builtin_corpus(tmp_path, fake_library, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data.sysconfig, "get_path", {"stdlib": str(fake_library)}.get)
    assert open_data("", seq_len=16).folder == Path("data/stdlib")
    assert (tmp_path / "data/stdlib/meta.json").exists()


# Import data quickly: in a process that only reads and writes files nothing calls torch.
WITHOUT_TORCH = "import os, sys, time, types; sys.modules['torch'] = types.ModuleType('torch'); import data\n"


def start(program, *arguments):
    """A Python process that runs `program` in the working directory."""
    environment = os.environ | {"PYTHONPATH": str(Path(data.__file__).parent)}
    command = [sys.executable, "-c", WITHOUT_TORCH + program, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ranks_that_start_together_build_once(tmp_path, fake_library, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = """
def slow_write(*arguments, **options):
    time.sleep(0.5)
    write(*arguments, **options)
write, data.write_data = data.write_data, slow_write
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
data.builtin_corpus("data/stdlib", sys.argv[1])
"""
    ranks = [start(program, str(fake_library)) for _ in range(4)]
    for rank in ranks:
        assert rank.stdout.readline() == b"ready\n"
    Path("go").touch()
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert b"".join(out + err for out, err in outputs) == (
        b"building data/stdlib from the Python standard library: 0.0 MB\n"
    )
    assert sorted(os.listdir("data")) == ["stdlib", "stdlib.lock"]
    assert files_of(builtin_corpus("alone", fake_library)) == files_of(Path("data/stdlib"))


def test_a_build_that_was_killed_is_repeated(tmp_path, fake_library):
    remains = tmp_path / "stdlib.partial-123"
    remains.mkdir()
    (remains / "train.bin").write_bytes(b"half")
    folder = builtin_corpus(tmp_path / "stdlib", fake_library)
    assert open_data(folder, seq_len=16)
    assert not remains.exists()


def test_no_library_and_no_place_are_one_line(tmp_path):
    with pytest.raises(DataError, match="no Python sources in .*: name other data with data=FOLDER"):
        builtin_corpus(tmp_path / "stdlib", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot build .*File exists.*data=FOLDER"):
        builtin_corpus(tmp_path / "file" / "stdlib", tmp_path)


# ---- prepare ----


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Three files in an empty working directory; returns their concatenation."""
    monkeypatch.chdir(tmp_path)
    texts = {"a.txt": "one two ✓\n" * 50, "b.txt": "three\r\nfour\n" * 50, "c.txt": "five six seven\n" * 50}
    Path("corpus").mkdir()
    for name, text in texts.items():
        Path("corpus", name).write_bytes(text.encode())
    Path("corpus", "other.md").write_text("not this one")
    return "".join(texts.values())


def prepare(*arguments):
    data.main(["prepare", "--input=corpus/*.txt", "--out=data/mine", *arguments])


def refused(capsys, *argv):
    """The lines on stderr of a command that must exit 2 and leave nothing behind."""
    before = set(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        data.main(list(argv))
    assert stop.value.code == 2
    assert set(Path().rglob("*")) - before <= {Path("data")}
    return capsys.readouterr().err.splitlines()


@pytest.fixture
def tokenizer_file(corpus):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([corpus], trainer)
    tokenizer.save("bpe.json")
    return "bpe.json"


def test_prepare_bytes(corpus, capsys):
    prepare("--val_fraction=0.1")
    opened = open_data("data/mine", seq_len=16)
    n_bytes = len(corpus.encode())
    assert len(opened.val) == n_bytes // 10
    assert bytes([*opened.train.ids, *opened.val.ids]).decode() == corpus
    assert opened.vocab_size == 256
    assert sorted(os.listdir("data/mine")) == ["meta.json", "train.bin", "val.bin"]
    assert os.listdir("data") == ["mine"]
    meta = json.loads(Path("data/mine/meta.json").read_text())
    assert meta == BYTES_META | {"max_id": max(corpus.encode())}
    progress, summary, command = capsys.readouterr().out.splitlines()[-3:]
    assert progress.endswith("file 3 of 3, 0.0 M tokens")
    n_train = f"{len(opened.train):,}"
    assert summary == f"data/mine: {n_train} tokens to train on, {len(opened.val)} held out, vocabulary 256"
    assert command == "torchrun --nproc_per_node=4 train.py --data=data/mine"


def test_prepare_bytes_takes_any_file_in_any_chunks(corpus, monkeypatch):
    monkeypatch.setattr(data, "CHUNK", 7)
    Path("corpus/a.txt").write_bytes(bytes(range(256)))
    prepare()
    opened = open_data("data/mine", seq_len=16)
    assert opened.train.ids[:256].tolist() == list(range(256))


def test_prepare_with_a_tokenizer(corpus, tokenizer_file):
    prepare(f"--tokenizer={tokenizer_file}")
    opened = open_data("data/mine", seq_len=16)
    assert opened.decode([*opened.train.ids, *opened.val.ids]) == corpus
    assert len(opened.train) + len(opened.val) < len(corpus) // 2
    assert opened.decode(opened.encode("one two ✓")) == "one two ✓"
    assert 256 < opened.vocab_size <= 300
    assert Path("data/mine/tokenizer.json").read_bytes() == Path(tokenizer_file).read_bytes()


def test_prepare_ignores_a_tokenizer_s_truncation_and_padding(corpus, tokenizer_file):
    tokenizer = data.load_tokenizer(tokenizer_file)
    whole = tokenizer.encode(corpus).ids
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=10_000)
    tokenizer.save("fitted.json")
    prepare("--tokenizer=fitted.json")
    opened = open_data("data/mine", seq_len=16)
    assert [*opened.train.ids, *opened.val.ids] == whole
    assert opened.encode(corpus) == whole


def test_prepare_cuts_long_texts_at_line_ends(corpus):
    with open("corpus/b.txt", newline="") as file:
        pieces = list(data._pieces(file, size=16))
    assert len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces)
    with open("corpus/b.txt", newline="") as file:
        assert "".join(pieces) == file.read()


def test_large_vocabularies_are_uint32(tmp_path):
    chunks = [np.array([1, 70_000, 3]), np.array([4, 5, 65_536], dtype=np.uint32)]
    assert data.write_data(tmp_path / "big", chunks, 70_001, "bytes", val_fraction=0.34) == (4, 2)
    opened = open_data(tmp_path / "big", seq_len=1)
    assert opened.train.ids.dtype == np.dtype("<u4")
    assert opened.train.ids.tolist() == [1, 70_000, 3, 4]
    assert opened.val.ids.tolist() == [5, 65_536]
    data.write_data(tmp_path / "small", [np.array([1, 2, 3, 65_535])], 65_536, "bytes", val_fraction=0.5)
    assert open_data(tmp_path / "small", seq_len=1, vocab_size=65_536).train.ids.dtype == np.dtype("<u2")


def test_prepare_reports_every_problem(corpus, capsys):
    assert refused(capsys, "prepare", "--input=none/*.txt", "--tokenizer=gone.json", "--val_fraction=2") == [
        "error: --val_fraction takes a number of at least 0.001 and at most 0.5, not '2'",
        "error: --input=none/*.txt matches no files",
        "error: --tokenizer=gone.json: no such file (or bytes)",
        "error: --out names no folder: for example --out=data/mine",
    ]
    assert refused(capsys, "prepare", "--out=data/mine") == [
        "error: --input names no text files: for example --input='corpus/*.txt'"
    ]


def test_prepare_refuses_a_folder_that_holds_something(corpus, capsys):
    prepare()
    before = files_of(Path("data/mine"))
    message = "error: --out=data/mine exists and is not empty: delete it or choose another"
    with pytest.raises(SystemExit):
        prepare()
    assert capsys.readouterr().err.splitlines() == [message]
    assert files_of(Path("data/mine")) == before


def test_prepare_takes_an_empty_folder(corpus, tmp_path, monkeypatch):
    Path("data/mine").mkdir(parents=True)
    prepare()
    assert open_data("data/mine", seq_len=16)
    Path("here").mkdir()
    monkeypatch.chdir("here")
    data.main(["prepare", "--input=../corpus/*.txt", "--out=."])
    assert files_of(tmp_path / "here") == files_of(tmp_path / "data" / "mine")


def test_prepare_refuses_what_it_cannot_read(corpus, capsys, tokenizer_file):
    command = ["prepare", "--input=corpus/*.txt", "--out=data/mine"]
    Path("corpus/d.txt").write_bytes(b"\xff\xff")
    assert refused(capsys, *command, f"--tokenizer={tokenizer_file}") == [
        "error: corpus/d.txt is not UTF-8: only --tokenizer=bytes takes that"
    ]
    [line] = refused(capsys, *command, "--tokenizer=corpus/a.txt")
    assert line.startswith("error: cannot read tokenizer corpus/a.txt: ")
    for path in Path("corpus").glob("*.txt"):
        path.write_bytes(b"")
    [line] = refused(capsys, *command)
    assert line == "error: the input has 0 tokens, too few for a train.bin and a val.bin"


def test_a_missing_tokenizers_package_is_one_line(corpus, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    Path("t.json").write_text("{}")
    assert refused(capsys, "prepare", "--input=corpus/*.txt", "--out=data/mine", "--tokenizer=t.json") == [
        "error: tokenizer t.json needs the tokenizers package: pip install tokenizers"
    ]


@pytest.mark.parametrize("argv", [[], ["prepar"], ["--input=x"]])
def test_wrong_subcommand(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [line] = refused(capsys, *argv)
    assert line == "usage: data.py prepare --input='corpus/*.txt' --out=data/mine (--help: more)"


@pytest.mark.parametrize("argv", [["--help"], ["prepare", "-h"]])
def test_prepare_help(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        data.main(argv)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: data.py prepare [")


def test_interrupted_writing_leaves_nothing(tmp_path):
    def chunks():
        yield np.arange(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.write_data(tmp_path / "mine", chunks(), 256, "bytes", val_fraction=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_killed_prepare_leaves_nothing(corpus, number):
    program = """
def stuck(path):
    yield from bytes_of(path)
    time.sleep(60)
bytes_of, data._read_bytes = data._read_bytes, stuck
data.main(sys.argv[1:])
"""
    process = start(program, "prepare", "--input=corpus/*.txt", "--out=data/mine")
    assert process.stdout.read(7) == b"\rfile 1"
    assert [path.name for path in Path("data").iterdir()] == [f"mine.partial-{process.pid}"]
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""
    assert list(Path("data").iterdir()) == []
