"""Knobs: how settings are declared, read, checked and explained.

A knob is a field of a dataclass that stands in the file whose code reads it:

    @dataclass
    class ParallelConfig:
        tp: int = knob(1, "ranks that split each matrix", least=1)

The trainer joins these classes by inheritance, so all names live in one flat space, and reads its command
line with `load`: config files and `--key=value` in any order, later ones win. A config file is plain
assignments of literals. It is parsed and never executed, so a config from a stranger is only data.

Whatever is wrong with the settings is reported together, each problem on a line of its own: a job that
waited an hour in a queue should not fail once per typo.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import os
import re
import sys
from pathlib import Path
from typing import get_args, get_origin, get_type_hints


def knob(default, help, *, choices=None, least=None, most=None):
    """A dataclass field with what a reader and the parser need to know about it.

    choices: the words allowed; least, most: inclusive bounds. For a tuple they hold for each element.
    The annotation gives the type: int, float, bool, str, tuple[int, ...] or tuple[str, ...].
    """
    about = {"help": help, "choices": choices, "least": least, "most": most}
    return dataclasses.field(default=default, metadata=about)


def load(cls, argv, *checks, pass_over=False):
    """Settings of class `cls` from the command line `argv` (without the program's name).

    pass_over: names in config files that cls does not have are meant for other programs, and no problem.
    Each check is a function cfg -> list of problems, for what no single knob can know. Prints help and exits
    0 if asked to. If anything is wrong, rank 0 prints a line per problem and every rank raises SystemExit(2).
    """
    is_rank0 = os.environ.get("RANK", "0") == "0"
    if "--help" in argv or "-h" in argv:
        if is_rank0:
            print(help_text(cls))
        raise SystemExit(0)
    cfg, problems, bad = parse(cls, argv, pass_over)
    found = list(problems)
    for check in checks:
        try:
            # A knob that could not be read stands at its default: what a check says about it means nothing.
            found += [problem for problem in check(cfg) if not _mentions(problem, bad)]
        except Exception:
            if not problems:
                raise
    if found:
        if is_rank0:
            print("\n".join(f"error: {problem}" for problem in found), file=sys.stderr)
        raise SystemExit(2)
    return cfg


def parse(cls, argv, pass_over=False):
    """Read `argv` into (cfg, problems, bad), in order, later settings win.

    problems: one line of text each. bad: names of the knobs whose value could not be read; they keep their
    default.
    """
    knobs = {field.name: field.metadata for field in dataclasses.fields(cls)}
    types = get_type_hints(cls)
    values, problems, bad = {}, [], set()
    for word in argv:
        for place, name, value in _settings_in(word, problems, bad):
            if name not in knobs:
                if not (pass_over and place):
                    problems.append(f"{place}unknown knob --{name}: {_did_you_mean(name, knobs)}")
                continue
            try:
                values[name] = _convert(value, types[name], knobs[name])
                bad.discard(name)
            except (ValueError, OverflowError):
                bad.add(name)
                problems.append(f"{place}--{name} takes {_takes(types[name], knobs[name])}, not {value!r}")
    return cls(**{name: value for name, value in values.items() if name not in bad}), problems, bad


def help_text(cls):
    """Usage and every knob with its default, one line each, grouped by the file that declares it.

    A class may name its command in a plain attribute `program`; otherwise it is the file that declares it.
    """
    lines = [
        f"usage: {getattr(cls, 'program', _file_of(cls))} [config.py ...] [--key=value ...]",
        "Later arguments win. A bare --flag means true; lists are separated by commas.",
    ]
    fields = dataclasses.fields(cls)
    defaults = {field.name: f"--{field.name}={_as_argument(field.default)}" for field in fields}
    width = max(len(text) for text in defaults.values())
    for owner in [*cls.__mro__[1:], cls]:  # the bases as they were listed, then what cls adds itself
        own = [field for field in fields if field.name in inspect.get_annotations(owner)]
        if own:
            lines += ["", f"{_file_of(owner)}:"]
        for field in own:
            choices = field.metadata["choices"]
            suffix = f" ({', '.join(choices)})" if choices else ""
            lines.append(f"  {defaults[field.name]:{width}}  {field.metadata['help']}{suffix}")
    return "\n".join(lines)


def as_dict(cfg):
    """The settings as a dict that JSON gives back unchanged (tuples become lists)."""
    values = dataclasses.asdict(cfg)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _settings_in(word, problems, bad):
    """Yield (place, name, value) for each setting in one argument; place is "config/x.py line 3: " or ""."""
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        yield "", name, text if equals else True
        return
    if not (word.endswith(".py") and os.path.exists(word)):
        problems.append(f"{word}: no such config file (settings are given as --key=value only)")
        return
    try:
        tree = ast.parse(Path(word).read_text(encoding="utf-8"), filename=word)
    except (OSError, SyntaxError, ValueError) as error:
        problems.append(f"{word} cannot be read: {error}")
        return
    statements = tree.body if ast.get_docstring(tree) is None else tree.body[1:]
    for node in statements:
        place = f"{word} line {node.lineno}: "
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                try:
                    value = ast.literal_eval(node.value)
                except (ValueError, TypeError):
                    bad.add(name)
                    problems.append(f"{place}--{name} takes a literal, not {ast.unparse(node.value)}")
                else:
                    yield place, name, value
            case _:
                problems.append(f"{place}a config file holds only lines like name = 1")


def _convert(value, kind, about):
    """`value`, text from the command line or a literal from a config file, as `kind`; or ValueError."""
    if get_origin(kind) is tuple:
        if isinstance(value, str):
            value = [item.strip() for item in value.split(",")] if value else []
        if not isinstance(value, (list, tuple)) or "" in value:
            raise ValueError
        return tuple(_convert(item, get_args(kind)[0], about) for item in value)
    if isinstance(value, str):
        value = _from_text(value, kind)
    if {type(value), kind} == {int, float} and value == kind(value):  # 1 for a float, 1e6 for an int
        value = kind(value)
    # An exact comparison of types, because True is also an int.
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError
    least, most, choices = about["least"], about["most"], about["choices"]
    too_low = least is not None and value < least
    too_high = most is not None and value > most
    if too_low or too_high or (choices and value not in choices):
        raise ValueError
    return value


def _from_text(text, kind):
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower())
    try:
        return int(text)  # first, because a float would round a long integer
    except ValueError:
        return float(text)


def _takes(kind, about):
    """What a knob takes, in words: "an integer of at least 1"."""
    least, most, choices = about["least"], about["most"], about["choices"]
    if choices:
        text = ("one of " if kind is str else "any of ") + ", ".join(choices)
    else:
        text = {
            int: "an integer",
            float: "a number",
            bool: "true or false",
            str: "text",
            tuple[int, ...]: "integers",
            tuple[str, ...]: "words",
        }[kind]
    if least is not None:
        text += f" of at least {least}"
    if most is not None:
        text += f" of at most {most}" if least is None else f" and at most {most}"
    return text + ", separated by commas" if get_origin(kind) is tuple else text


def _did_you_mean(name, knobs):
    near = difflib.get_close_matches(name, knobs, n=1)
    return f"did you mean --{near[0]}?" if near else "--help lists them all"


def _mentions(problem, names):
    return any(re.search(rf"\b{re.escape(name)}\b", problem) for name in names)


def _file_of(cls):
    module = cls.__module__
    if module == "__main__":  # the file that was run, which train.py is unless another tool reads settings
        return os.path.basename(getattr(sys.modules[module], "__file__", "train.py"))
    return module.rpartition(".")[2] + ".py"


def _as_argument(value):
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
