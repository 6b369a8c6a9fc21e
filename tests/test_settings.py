"""Settings: what the command line and config files mean, and what is said when they are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

import settings
from settings import as_dict, help_text, knob, load, parse


@dataclass
class MeshConfig:
    tp: int = knob(1, "ranks that split a matrix", least=1)
    pp_layout: tuple[int, ...] = knob((), "layers per stage", least=0, most=64)
    recompute: tuple[str, ...] = knob((), "what to recompute", choices=["norm", "attn", "moe"])


@dataclass
class RouteConfig:
    capacity_factor: float = knob(1.25, "slots per expert", least=0)
    score_fn: str = knob("softmax", "router scores", choices=["softmax", "sigmoid"])
    norm_topk: bool = knob(False, "renormalize over the chosen")


@dataclass
class Config(MeshConfig, RouteConfig):
    out_dir: str = knob("out", "where results go")
    lr: float = knob(3e-4, "peak learning rate", most=1.0)
    max_steps: int = knob(100, "optimizer steps")


def read(*argv):
    cfg, problems, bad = parse(Config, argv)
    assert not problems and not bad
    return cfg


def problem_of(*argv):
    _, problems, _ = parse(Config, argv)
    assert len(problems) == 1
    return problems[0]


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """A function that writes config.py in an empty working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "config.py").write_text(text)
        return "config.py"

    return write


# ---- values ----


def test_nothing_given_is_the_defaults():
    assert read() == Config()


@pytest.mark.parametrize(
    "argument, name, value",
    [
        ("--tp=2", "tp", 2),
        ("--max_steps=1_000_000", "max_steps", 1_000_000),
        ("--max_steps=1e6", "max_steps", 1_000_000),
        ("--max_steps=-1", "max_steps", -1),
        ("--max_steps=12345678901234567", "max_steps", 12345678901234567),  # a float would round it
        ("--capacity_factor=2", "capacity_factor", 2.0),
        ("--lr=1e-5", "lr", 1e-5),
        ("--norm_topk", "norm_topk", True),
        ("--norm_topk=true", "norm_topk", True),
        ("--norm_topk=True", "norm_topk", True),
        ("--norm_topk=false", "norm_topk", False),
        ("--out_dir=a=b", "out_dir", "a=b"),
        ("--out_dir=", "out_dir", ""),
        ("--out_dir=7", "out_dir", "7"),
        ("--pp_layout=3,4", "pp_layout", (3, 4)),
        ("--pp_layout=3", "pp_layout", (3,)),
        ("--pp_layout=", "pp_layout", ()),
        ("--recompute=norm, moe", "recompute", ("norm", "moe")),
    ],
)
def test_command_line_values(argument, name, value):
    got = getattr(read(argument), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "line, name, value",
    [
        ("tp = 2", "tp", 2),
        ("max_steps = 1e6", "max_steps", 1_000_000),
        ("capacity_factor = 2", "capacity_factor", 2.0),
        ("max_steps = -1", "max_steps", -1),
        ("norm_topk = True", "norm_topk", True),
        ("out_dir = 'x'", "out_dir", "x"),
        ("pp_layout = [3, 4]", "pp_layout", (3, 4)),
        ("recompute = ('norm',)", "recompute", ("norm",)),
        ("recompute = 'norm,moe'", "recompute", ("norm", "moe")),
    ],
)
def test_config_file_values(config_file, line, name, value):
    got = getattr(read(config_file(line)), name)
    assert got == value
    assert type(got) is type(value)


def test_later_arguments_win(config_file):
    name = config_file('"""A docstring."""\n# A comment.\ntp = 2\nlr = 0.5\nlr = 0.25  # counts\n')
    assert read(name, "--tp=4").tp == 4
    assert read("--tp=4", name).tp == 2
    assert read("--tp=4", "--tp=8").tp == 8
    assert read(name).lr == 0.25


# ---- problems ----


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--tp=two", "--tp takes an integer of at least 1, not 'two'"),
        ("--tp=1.5", "--tp takes an integer of at least 1, not '1.5'"),
        ("--tp=0", "--tp takes an integer of at least 1, not '0'"),
        ("--tp=", "--tp takes an integer of at least 1, not ''"),
        ("--tp", "--tp takes an integer of at least 1, not True"),
        ("--max_steps=inf", "--max_steps takes an integer, not 'inf'"),
        ("--lr=nan", "--lr takes a number of at most 1.0, not 'nan'"),
        ("--lr=-inf", "--lr takes a number of at most 1.0, not '-inf'"),
        ("--lr=1e999", "--lr takes a number of at most 1.0, not '1e999'"),
        ("--norm_topk=yes", "--norm_topk takes true or false, not 'yes'"),
        ("--score_fn=relu", "--score_fn takes one of softmax, sigmoid, not 'relu'"),
        (
            "--recompute=norm,mlp",
            "--recompute takes any of norm, attn, moe, separated by commas, not 'norm,mlp'",
        ),
        ("--recompute=norm,", "--recompute takes any of norm, attn, moe, separated by commas, not 'norm,'"),
        (
            "--pp_layout=1,65",
            "--pp_layout takes integers of at least 0 and at most 64, separated by commas, not '1,65'",
        ),
        ("--capcity_factor=2", "unknown knob --capcity_factor: did you mean --capacity_factor?"),
        ("--zzz=2", "unknown knob --zzz: --help lists them all"),
        ("-tp=2", "-tp=2: no such config file (settings are given as --key=value only)"),
        ("gone.py", "gone.py: no such config file (settings are given as --key=value only)"),
    ],
)
def test_command_line_problems(argument, message):
    assert problem_of(argument) == message


def test_a_preset_for_more_programs_is_passed_over_but_not_a_typing_error(tmp_path):
    preset = tmp_path / "preset.py"
    preset.write_text("tp = 2\nof_another_program = 3\n")
    cfg, problems, _ = parse(Config, [str(preset), "--tpp=4"], pass_over=True)
    assert cfg.tp == 2 and problems == ["unknown knob --tpp: did you mean --tp?"]
    assert len(parse(Config, [str(preset)])[1]) == 1


def test_a_value_after_a_space_is_refused():
    _, problems, _ = parse(Config, ["--norm_topk", "false"])
    assert problems == ["false: no such config file (settings are given as --key=value only)"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("tp = 'two'", "config.py line 2: --tp takes an integer of at least 1, not 'two'"),
        ("tp = True", "config.py line 2: --tp takes an integer of at least 1, not True"),
        ("tp = None", "config.py line 2: --tp takes an integer of at least 1, not None"),
        ("out_dir = 7", "config.py line 2: --out_dir takes text, not 7"),
        ("lr = 1e999", "config.py line 2: --lr takes a number of at most 1.0, not inf"),
        ("norm_topk = 1", "config.py line 2: --norm_topk takes true or false, not 1"),
        ("pp_layout = 4", "config.py line 2: --pp_layout takes integers of at least 0 and at most 64"),
        ("tpp = 2", "config.py line 2: unknown knob --tpp: did you mean --tp?"),
        ("tp = 2 * 4", "config.py line 2: --tp takes a literal, not 2 * 4"),
        ("tp = max_steps", "config.py line 2: --tp takes a literal, not max_steps"),
        ("import os", "config.py line 2: a config file holds only lines like name = 1"),
        ("open('made', 'w')", "config.py line 2: a config file holds only lines like name = 1"),
        ("tp = max_steps = 2", "config.py line 2: a config file holds only lines like name = 1"),
        ("tp += 1", "config.py line 2: a config file holds only lines like name = 1"),
        ("if True: tp = 2", "config.py line 2: a config file holds only lines like name = 1"),
        ("tp = = 2", "config.py cannot be read: invalid syntax (config.py, line 2)"),
    ],
)
def test_config_file_problems(config_file, line, message):
    assert problem_of(config_file("# a comment\n" + line)).startswith(message)


def test_nothing_in_a_config_file_is_executed(config_file, tmp_path):
    name = config_file("import os\nout_dir = open('made', 'w').name\nos.mkdir('made_too')\n")
    _, problems, bad = parse(Config, [name])
    assert len(problems) == 3
    assert bad == {"out_dir"}
    assert [path.name for path in tmp_path.iterdir()] == ["config.py"]


def test_unreadable_config_file_is_a_problem(config_file, tmp_path):
    (tmp_path / "config.py").write_bytes(b"tp = \xff")
    assert problem_of("config.py").startswith("config.py cannot be read: ")
    (tmp_path / "folder.py").mkdir()
    assert problem_of("folder.py").startswith("folder.py cannot be read: ")


def test_all_problems_are_collected_in_order(config_file):
    name = config_file("import os\ntp = 'two'\nscore_fn = 'sigmoid'\n")
    cfg, problems, bad = parse(Config, [name, "--lr=x", "--max_step=3", "word", "--max_steps=5"])
    first_words = [problem.split(" ")[0] for problem in problems]
    assert first_words == ["config.py", "config.py", "--lr", "unknown", "word:"]
    assert bad == {"tp", "lr"}
    assert cfg == Config(score_fn="sigmoid", max_steps=5)


def test_a_knob_that_cannot_be_read_keeps_its_default():
    cfg, _, bad = parse(Config, ["--tp=4", "--tp=x"])
    assert cfg.tp == 1 and bad == {"tp"}
    cfg, problems, bad = parse(Config, ["--tp=x", "--tp=4"])
    assert cfg.tp == 4 and not bad and len(problems) == 1


# ---- load ----


def failing(capsys, *arguments):
    """What load prints to stderr when it refuses."""
    with pytest.raises(SystemExit) as stop:
        load(Config, *arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_load_returns_the_settings():
    assert load(Config, ["--tp=2"], lambda cfg: []) == Config(tp=2)


def test_load_reports_problems_and_checks_together(capsys):
    lines = failing(
        capsys,
        ["--lr=x", "--tpp=2", "--tp=3"],
        lambda cfg: [f"tp={cfg.tp} does not divide 4: set tp to 1, 2 or 4"],
        lambda cfg: ["max_steps=100 is less than warmup"],
    )
    assert lines == [
        "error: --lr takes a number of at most 1.0, not 'x'",
        "error: unknown knob --tpp: did you mean --tp?",
        "error: tp=3 does not divide 4: set tp to 1, 2 or 4",
        "error: max_steps=100 is less than warmup",
    ]


def test_checks_say_nothing_about_knobs_that_could_not_be_read(capsys):
    lines = failing(capsys, ["--tp=x"], lambda cfg: ["tp*cp = 1 is wrong", "etp=3 is wrong"])
    assert lines == ["error: --tp takes an integer of at least 1, not 'x'", "error: etp=3 is wrong"]


def test_a_check_may_only_crash_on_settings_that_are_already_refused(capsys):
    def crash(cfg):
        return 1 / 0

    assert len(failing(capsys, ["--tp=x"], crash)) == 1
    with pytest.raises(ZeroDivisionError):
        load(Config, [], crash)


def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert failing(capsys, ["--tp=x"]) == []
    with pytest.raises(SystemExit):
        load(Config, ["--help"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_and_exits_0(capsys, flag):
    with pytest.raises(SystemExit) as stop:
        load(Config, ["--tp=x", flag])
    assert stop.value.code == 0
    assert capsys.readouterr().out == help_text(Config) + "\n"


def test_help_lists_every_knob_by_file(monkeypatch):
    monkeypatch.setattr(MeshConfig, "__module__", "foldmoe.mesh")
    monkeypatch.setattr(RouteConfig, "__module__", "route")
    assert help_text(Config).splitlines() == [
        "usage: test_settings.py [config.py ...] [--key=value ...]",
        "Later arguments win. A bare --flag means true; lists are separated by commas.",
        "",
        "mesh.py:",
        "  --tp=1                  ranks that split a matrix",
        "  --pp_layout=            layers per stage",
        "  --recompute=            what to recompute (norm, attn, moe)",
        "",
        "route.py:",
        "  --capacity_factor=1.25  slots per expert",
        "  --score_fn=softmax      router scores (softmax, sigmoid)",
        "  --norm_topk=false       renormalize over the chosen",
        "",
        "test_settings.py:",
        "  --out_dir=out           where results go",
        "  --lr=0.0003             peak learning rate",
        "  --max_steps=100         optimizer steps",
    ]


def test_help_names_the_script_that_was_run(monkeypatch):
    monkeypatch.setattr(Config, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/somewhere/train.py", raising=False)
    assert "usage: train.py [" in help_text(Config)
    assert "\ntrain.py:\n" in help_text(Config)


def test_defaults_shown_by_help_can_be_typed_back():
    arguments = [word for word in help_text(Config).split() if word.startswith("--") and "=" in word]
    knobs = [word for word in arguments if "key=value" not in word]
    assert len(knobs) == 9
    assert read(*knobs) == Config()


def test_as_dict_survives_json():
    values = as_dict(Config(pp_layout=(3, 4), recompute=("moe",)))
    assert json.loads(json.dumps(values)) == values
    assert values["pp_layout"] == [3, 4] and values["lr"] == 3e-4


def test_settings_needs_only_the_standard_library():
    # -S leaves out installed packages.
    subprocess.run([sys.executable, "-S", settings.__file__], check=True)
