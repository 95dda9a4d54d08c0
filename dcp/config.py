"""Settings of a training run: where they come from, their types and rules.

Four layers, later ones win: a preset (model and learning rate), a TOML file, `--set KEY=VALUE`
pairs, the options of the command line. All are merged as plain ``{dotted key: value}`` pairs,
each value with the name of the layer it came from, so that a message can say where a wrong one
was written; only the result becomes the frozen dataclasses below. A key that does not exist, or
a name that does not exist (preset, strategy, optimizer ...), is an error that suggests the nearest.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp import _dcp
from dcp._dcp import ArgumentError, UnsupportedError
from dcp.optim import OPTIMIZERS, SCHEDULES, AdamW, Group, Optimizer

if typing.TYPE_CHECKING:
    from dcp.models import Transformer1D

__all__ = [
    "CheckpointSettings",
    "ControlSettings",
    "DataSettings",
    "PlanSettings",
    "Settings",
    "TrainSettings",
    "load",
    "parse_bytes",
    "suggest",
]

DEVICES = ("cpu",)
LATER_DEVICES = ("cuda", "emulated")
MOST_RANKS_PER_CORE = 64
DEFAULT_LR = 3e-4  # where a preset names none
POLICIES = ("static", "precision", "accumulation", "decoupled", "joint")
SIMULATED_POLICIES = ("oracle", "best_fixed")
PRECISIONS = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
MOST_MULTIPLES = 16


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Documents: where they are, how they become tokens, what happens to long ones."""

    source: str = "stdlib"
    max_length: int = 4096
    long: str = "split"
    tokenizer: str | None = None
    eos: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a step is trained and evaluated.

    `precision` is how gradients travel between ranks where no controller chooses it. `eval_every`
    counts `tokens_per_step` tokens, whatever multiple of them a step has.
    """

    weighting: str = "token"
    precision: str = "fp32"
    nonfinite: str = "stop"
    eval_share: float = 0.01
    eval_every: int | None = None
    eval_tokens: int = 32768
    target_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How steps are planned and what of the plan's choices is fixed.

    `sp` and `recompute` are the one setting of strategy "fixed"; `cost` is a file that `dcp
    profile` or :meth:`dcp.CostModel.save` wrote, default: reckoned from the model's shape.
    `gather` says how long weights that were gathered stay without windows: a whole "step", a
    "layer" of a pass, or "auto": a step under a link where memory allows, else a layer.
    """

    sp: int | None = None
    recompute: str | Mapping[str, int] | None = None
    max_tokens: int | None = None
    max_group: int | None = None
    windows: bool = True
    reduce: str = "auto"
    gather: str = "auto"
    prefetch: int = 0
    refit: bool = False
    cost: str | None = None
    sequence_parallel: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ControlSettings:
    """Who chooses gradient precision and tokens of a step while training (None: nobody), and
    among what.

    `feedback`, `hadamard` and `nearest` say how gradients are quantised, also by
    `train.precision`: see :meth:`dcp.ShardedModel.step`.
    """

    policy: str | None = None
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8", "int4")
    base: str = "fp32"
    batch_multiples: tuple[int, ...] = (1, 2, 4, 8)
    feedback: bool = True
    hadamard: bool = False
    nearest: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where checkpoints lie, how often one is written and how, how many are kept."""

    folder: str | None = None
    save_every: int | None = None
    keep: int = 3
    asynchronous: bool = False
    copy_bytes: int = 256 * 10**6
    init: str | None = None  # weights to start from


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a training run. Made by :func:`load`.

    Examples
    --------
    >>> from dcp import config
    >>> settings = config.load(sets=["model.num_hidden_layers=2"], options={"steps": 5})
    >>> settings.steps, settings.model["num_hidden_layers"], settings.data.max_length
    (5, 2, 4096)
    """

    preset: str = "tiny"
    ranks: int = 1
    steps: int = 60
    seed: int = 0
    tokens_per_step: int = 16384
    strategy: str = "dcp"
    device: str = "cpu"
    memory: int | None = None
    link: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=DEFAULT_LR))
    train: TrainSettings = field(default_factory=TrainSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def transformer(self) -> Transformer1D:
        """Return the model's configuration."""
        from dcp.models import Transformer1D

        return Transformer1D(**self.model)

    def check(self) -> None:
        """Check what concerns more than one key; :func:`load` does.

        Raises
        ------
        dcp.ArgumentError
            Names the key, its value and the rule.
        """
        _check(self)

    def to_toml(self) -> str:
        """Return the settings as TOML that :func:`load` reads back.

        TOML has no null: a key that is none is left out, or, where its default is something
        else, written as the word "none".
        """
        import tomli_w

        tree: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Optimizer):
                tree[item.name] = _optimizer_tree(value)
            elif dataclasses.is_dataclass(value):
                inner = {
                    f.name: _plain(getattr(value, f.name), f) for f in dataclasses.fields(value)
                }
                tree[item.name] = {k: v for k, v in inner.items() if v is not None}
            elif isinstance(value, Mapping):
                tree[item.name] = {k: v for k, v in value.items() if v is not None}
            elif value is not None:
                tree[item.name] = value
        return tomli_w.dumps(tree)


def _optimizer_tree(optimizer: Optimizer) -> dict[str, Any]:
    """Its name and settings as plain data; groups without what they leave open."""
    tree: dict[str, Any] = {"name": optimizer.name}
    tree |= {f.name: _plain(getattr(optimizer, f.name), f) for f in dataclasses.fields(optimizer)}
    tree["groups"] = [
        {key: value for key, value in dataclasses.asdict(group).items() if value is not None}
        for group in optimizer.groups
        if isinstance(group, Group)
    ]
    return {key: value for key, value in tree.items() if value not in (None, [])}


def _plain(value: Any, item: dataclasses.Field[Any]) -> Any:
    if value is None and item.default is not None:
        return "none"
    return list(value) if isinstance(value, tuple) else value


# A section given as one word sets this key of it: `data = "stdlib"` is `data.source = "stdlib"`.
_SHORT = {
    "data": "data.source",
    "optimizer": "optimizer.name",
    "checkpoint": "checkpoint.folder",
    "control": "control.policy",
}
_SECTIONS: dict[str, Any] = {
    "data": DataSettings,
    "train": TrainSettings,
    "plan": PlanSettings,
    "control": ControlSettings,
    "checkpoint": CheckpointSettings,
}
_CHOICES = {
    "strategy": tuple(_dcp.plan_strategies()),
    "data.long": ("split", "drop", "error"),
    "train.weighting": ("token", "sequence"),
    "train.nonfinite": ("stop", "skip"),
    "train.precision": PRECISIONS,
    "plan.reduce": ("auto", "step", "layer"),
    "plan.gather": ("auto", "step", "layer"),
    "plan.sequence_parallel": ("auto", "ulysses", "ring"),
}


def strategy_names() -> tuple[str, ...]:
    """Names that `strategy` may have."""
    return _CHOICES["strategy"]


def default_ranks() -> int:
    """One rank a core that this process may use, at most 8."""
    return min(8, core_count())


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def suggest(word: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean ...?"`` for the nearest of `names`, or their list.

    Examples
    --------
    >>> from dcp import config
    >>> config.suggest("paked", ["packed", "bucket"])
    "; did you mean 'packed'?"
    """
    names = list(names)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if not near:  # a key without its section: compare with the last part
        by_last = {name.rpartition(".")[2]: name for name in names}
        last = difflib.get_close_matches(word.rpartition(".")[2], by_last, n=1, cutoff=0.6)
        near = [by_last[last[0]]] if last else []
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(names)}" if len(names) <= 24 else ""


def parse_bytes(text: str | int, name: str = "memory") -> int:
    """Return a size in bytes: a number, or one with kB, MB, GB (1000) or KiB, MiB, GiB (1024).

    Examples
    --------
    >>> from dcp import config
    >>> config.parse_bytes("300MB"), config.parse_bytes("1.5 GiB"), config.parse_bytes(4096)
    (300000000, 1610612736, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kKMGT]?)(i?)B?\s*", str(text))
    if match is None or (match[3] and not match[2]):
        raise ArgumentError(f"{name} = {str(text)!r} must be a size such as 300MB, 2GiB or 4096")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size <= 0:
        raise ArgumentError(f"{name} = {str(text)!r} must be more than 0 bytes")
    return size


def load(
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    sets: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge the layers and check everything that needs no data.

    Parameters
    ----------
    preset : str or None
        Name of a preset; it wins over a `preset` key of the file or of `sets`.
    config : path or None
        TOML file.
    sets : iterable of str
        ``KEY=VALUE`` with dotted keys; the value is TOML, or a bare word.
    options : mapping
        ``{dotted key: value}`` of the command line; values of None are left out.

    Raises
    ------
    dcp.ArgumentError
        Names the key, its value, where it was written and the rule; suggests the nearest name.
    dcp.UnsupportedError
        The device is one that this version cannot drive.
    """
    given: dict[str, tuple[Any, str]] = {}
    if config is not None:
        given |= {k: (v, str(config)) for k, v in _read_toml(Path(config)).items()}
    for text in sets:
        key, value = _split_set(text)
        given[key] = (value, "--set")
    for key, value in (options or {}).items():
        if value is not None:
            given[key] = (value, "option")
    if preset is not None:
        given["preset"] = (preset, "--preset")
    given = {_SHORT.get(key, key): value for key, value in given.items()}

    name = str(given.get("preset", ("tiny", ""))[0])
    lr = _preset_lr(name)
    known = _known_keys()
    for key, (_, source) in given.items():
        if key not in known:
            raise ArgumentError(f"{_at(source)}unknown key {key!r}{suggest(key, known)}")

    values: dict[str, Any] = {"preset": name, "ranks": default_ranks()}
    for key, (value, source) in given.items():
        values[key] = _convert(key, value, known[key], source)
    if values.get("link") is not None:
        _force_for_link(values)
    values["optimizer"] = _optimizer(
        {k.partition(".")[2]: v for k, v in values.items() if k.startswith("optimizer.")}, lr
    )
    return _build(values)


def _optimizer(values: dict[str, Any], adamw_lr: float) -> Optimizer:
    """The optimizer of that name; keys that belong to another one are errors."""
    name = values.pop("name", AdamW.name)
    if name not in OPTIMIZERS:
        raise ArgumentError(f"optimizer.name = {name!r} is unknown{suggest(name, OPTIMIZERS)}")
    cls = OPTIMIZERS[name]
    own = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in own:
            raise ArgumentError(
                f"optimizer.{key} is no setting of optimizer {name!r}, which has {', '.join(own)}"
            )
    schedule = values.get("schedule", "constant")
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f"optimizer.schedule = {schedule!r} is unknown{suggest(schedule, SCHEDULES)}"
        )
    return cls(**{"lr": cls.lr_beside(adamw_lr)} | values)


# What an emulated link needs: messages, since ranks on two sides of it share no memory, and one
# reduction a step, since that is what its delay is modelled for.
_LINK_NEEDS: dict[str, tuple[Any, ...]] = {
    "plan.windows": (False,),
    "plan.reduce": ("auto", "step"),
}


def _force_for_link(values: dict[str, Any]) -> None:
    """Set what a link needs, or say which key was given that contradicts it."""
    for key, allowed in _LINK_NEEDS.items():
        if key in values and values[key] not in allowed:
            found, wanted = (_toml_word(v) for v in (values[key], allowed[-1]))
            raise ArgumentError(
                f"link = {values['link']!r} needs {key} = {wanted}, and {key} = {found} was given: "
                "leave one of them out"
            )
        values[key] = allowed[-1]


def _toml_word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _at(source: str) -> str:
    return "" if source in ("", "option") else f"{source}: "


def _preset_lr(name: str) -> float:
    from dcp import models

    names = models.preset_names()
    if name not in names:
        raise ArgumentError(f"unknown preset {name!r}{suggest(name, names)}")
    return models.preset_lr(name)


def _known_keys() -> dict[str, Any]:
    """{dotted key: type} of every setting."""
    from dcp.models import Transformer1D

    known: dict[str, Any] = {"optimizer.name": str}
    for optimizer in OPTIMIZERS.values():
        fields = typing.get_type_hints(optimizer)
        known |= {f"optimizer.{f.name}": fields[f.name] for f in dataclasses.fields(optimizer)}
    hints = typing.get_type_hints(Settings, localns={"Mapping": Mapping, "Any": Any})
    for item in dataclasses.fields(Settings):
        if item.name == "optimizer":
            continue
        cls = Transformer1D if item.name == "model" else _SECTIONS.get(item.name)
        if cls is None:
            known[item.name] = hints[item.name]
        else:
            fields = typing.get_type_hints(cls)
            known |= {
                f"{item.name}.{field.name}": fields[field.name] for field in dataclasses.fields(cls)
            }
    return known


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ArgumentError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--config {path}: not TOML: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return flat


def _split_set(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ArgumentError(f"--set {text!r} must be KEY=VALUE, for example data.max_length=2048")
    try:
        return key, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()


def _convert(key: str, value: Any, kind: Any, source: str) -> Any:
    """Turn a value into the type of its key, or raise what is wrong with it."""
    if key == "memory":
        return None if value == "none" else parse_bytes(value)
    if key == "checkpoint.copy_bytes":
        return parse_bytes(value, key)
    if key == "plan.recompute":
        return _recompute(value, source)
    if key == "optimizer.groups":
        if not isinstance(value, list):
            raise ArgumentError(
                f"{_at(source)}optimizer.groups = {value!r} must be a list of tables, such as "
                '[{match = "*norm*", lr_scale = 0.1}]'
            )
        return tuple(value)
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    optional = type(None) in options
    wanted = next(option for option in options if option is not type(None))
    if optional and (value is None or value == "none"):
        return None
    if isinstance(value, str) and wanted in (int, float, bool) and source != "option":
        value = _word(value)
    rule = {int: "an integer", float: "a number", bool: "true or false", str: "a word"}.get(wanted)
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        rule = "a finite number"
    if wanted is str and isinstance(value, str | Path):
        return str(value)
    if wanted is str and isinstance(value, int | float):
        return str(value)  # a folder or file named by digits
    if typing.get_args(wanted)[1:] == (Ellipsis,):
        return _convert_list(key, value, typing.get_args(wanted)[0], source)
    if typing.get_origin(wanted) is tuple:
        count = len(typing.get_args(wanted))
        parts = value.split(",") if isinstance(value, str) else value
        numbers = (
            [_word(p) if isinstance(p, str) else p for p in parts]
            if isinstance(parts, list)
            else []
        )
        if len(numbers) == count and all(isinstance(n, int | float) for n in numbers):
            return tuple(float(n) for n in numbers)
        rule = f"{count} numbers, for example [0.9, 0.95]"
    raise ArgumentError(
        f"{_at(source)}{key} = {value!r} must be {rule}{' or none' if optional else ''}"
    )


def _convert_list(key: str, value: Any, kind: Any, source: str) -> tuple[Any, ...]:
    """A list of words or integers, given as a list, as text with commas, or as one of them."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if kind is int:
        parts = [_word(part) if isinstance(part, str) else part for part in parts]
    if not all(isinstance(part, kind) and not isinstance(part, bool) for part in parts):
        rule = "integers, for example [1, 2]" if kind is int else "words"
        raise ArgumentError(f"{_at(source)}{key} = {value!r} must be a list of {rule}")
    return tuple(parts)


RECOMPUTE = ("none", "selective", "full")


def _recompute(value: Any, source: str) -> Any:
    """A word of `RECOMPUTE`, or {block kind: layers}."""
    from dcp.cost import KINDS

    rule = f"must be one of {', '.join(RECOMPUTE)}, or counts such as {{layer = 2, mlp = 1}}"
    if isinstance(value, Mapping):
        for kind, count in value.items():
            if kind not in KINDS:
                raise ArgumentError(
                    f"{_at(source)}plan.recompute: {kind!r} is no block kind{suggest(kind, KINDS)}"
                )
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ArgumentError(
                    f"{_at(source)}plan.recompute.{kind} = {count!r} must be an integer >= 0"
                )
        return dict(value)
    if value in RECOMPUTE:
        return value
    raise ArgumentError(
        f"{_at(source)}plan.recompute = {value!r} {rule}{suggest(str(value), RECOMPUTE)}"
    )


def _word(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _build(values: dict[str, Any]) -> Settings:
    """Make the dataclasses and check what concerns more than one key."""
    from dcp.models import Transformer1D

    def of(name: str) -> dict[str, Any]:
        return {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{name}.")}

    sections = {name: cls(**of(name)) for name, cls in _SECTIONS.items()}
    given = of("model")
    try:
        model = Transformer1D.preset(values["preset"], **given)
        longest = sections["data"].max_length
        if "max_position_embeddings" not in given and model.max_position_embeddings < longest:
            model = dataclasses.replace(model, max_position_embeddings=longest)
    except ArgumentError as error:
        raise ArgumentError(f"model: {error}") from error
    top = {k: v for k, v in values.items() if "." not in k}
    settings = Settings(**top, model=dataclasses.asdict(model), **sections)
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    for key, choices in _CHOICES.items():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(settings, section) if section else settings, name)
        if value not in choices:
            raise ArgumentError(f"{key} = {value!r} is unknown{suggest(value, choices)}")
    if settings.device in LATER_DEVICES:
        raise UnsupportedError(
            f"device = {settings.device!r}: this version runs on the CPU only; use --device cpu"
        )
    if settings.device not in DEVICES:
        raise ArgumentError(
            f"device = {settings.device!r} is unknown{suggest(settings.device, DEVICES)}"
        )
    most = MOST_RANKS_PER_CORE * core_count()
    if not 1 <= settings.ranks <= most:
        raise ArgumentError(
            f"ranks = {settings.ranks} must lie in 1..{most} "
            f"({MOST_RANKS_PER_CORE} ranks a core, {core_count()} cores)"
        )
    for key, value, least in (
        ("steps", settings.steps, 0),
        ("seed", settings.seed, 0),
        ("tokens_per_step", settings.tokens_per_step, 1),
        ("data.max_length", settings.data.max_length, 2),
        ("data.eos", settings.data.eos, 0),
        ("train.eval_every", settings.train.eval_every, 1),
        ("train.eval_tokens", settings.train.eval_tokens, 1),
        ("checkpoint.save_every", settings.checkpoint.save_every, 1),
        ("checkpoint.keep", settings.checkpoint.keep, 1),
        ("plan.sp", settings.plan.sp, 1),
        ("plan.max_tokens", settings.plan.max_tokens, 1),
        ("plan.max_group", settings.plan.max_group, 1),
        ("plan.prefetch", settings.plan.prefetch, 0),
    ):
        if value is not None and value < least:
            raise ArgumentError(f"{key} = {value} must be >= {least}")
    if settings.plan.prefetch > 1:
        raise ArgumentError(f"plan.prefetch = {settings.plan.prefetch} must be 0 or 1")
    if settings.seed >= 2**63:
        raise ArgumentError(f"seed = {settings.seed} must be below 2**63")
    if settings.tokens_per_step < settings.data.max_length:
        raise ArgumentError(
            f"tokens_per_step = {settings.tokens_per_step} is less than data.max_length = "
            f"{settings.data.max_length}: the longest document would not fit into a step; "
            "raise --tokens-per-step or lower data.max_length"
        )
    if not 0.0 <= settings.train.eval_share < 1.0:
        raise ArgumentError(f"train.eval_share = {settings.train.eval_share} must lie in [0, 1)")
    if settings.train.target_loss is not None and settings.train.eval_share == 0.0:
        raise ArgumentError("train.target_loss needs held-out documents: train.eval_share > 0")
    if settings.checkpoint.save_every is not None and settings.checkpoint.folder is None:
        raise ArgumentError("checkpoint.save_every needs a folder: --checkpoint DIR")
    if settings.model["max_position_embeddings"] < settings.data.max_length:
        raise ArgumentError(
            f"model.max_position_embeddings = {settings.model['max_position_embeddings']} is less "
            f"than data.max_length = {settings.data.max_length}"
        )
    _check_plan(settings)
    _check_gather(settings)
    _check_control(settings)
    _check_link(settings)
    settings.optimizer.rules(settings.transformer().tensors())  # every group matches


def _check_plan(settings: Settings) -> None:
    """The one setting of "fixed" belongs to it alone, and must divide the world and the model."""
    plan, ranks = settings.plan, settings.ranks
    if settings.strategy != "fixed":
        for name in ("sp", "recompute"):
            if getattr(plan, name) is not None:
                raise ArgumentError(
                    f"plan.{name} = {getattr(plan, name)!r} is the setting of strategy 'fixed'; "
                    f"strategy {settings.strategy!r} chooses its own: add --strategy fixed, or "
                    f"leave plan.{name} out"
                )
        return
    size = plan.sp or 1
    if ranks % size:
        near = [d for d in range(1, ranks + 1) if ranks % d == 0]
        raise ArgumentError(
            f"plan.sp = {size} does not divide ranks = {ranks} into groups of equal size: "
            f"plan.sp may be {', '.join(map(str, near))}, or change --ranks"
        )
    if plan.max_group is not None and size > plan.max_group:
        raise ArgumentError(f"plan.sp = {size} is more than plan.max_group = {plan.max_group}")
    layers = settings.model["num_hidden_layers"]
    if isinstance(plan.recompute, Mapping) and sum(plan.recompute.values()) > layers:
        raise ArgumentError(
            f"plan.recompute = {dict(plan.recompute)} names {sum(plan.recompute.values())} layers, "
            f"the model has {layers}"
        )


def _check_gather(settings: Settings) -> None:
    """How long gathered weights stay is a choice only where weights are gathered."""
    plan = settings.plan
    if plan.gather != "auto" and plan.windows:
        raise ArgumentError(
            f"plan.gather = {plan.gather!r} is for plan.windows = false: with windows ranks read "
            "each other's weights in place"
        )
    if plan.gather == "step" and plan.prefetch:
        raise ArgumentError(
            "plan.gather = 'step' gathers all weights at once, plan.prefetch = 1 one group ahead "
            "of another: leave one of them out"
        )


def _check_link(settings: Settings) -> None:
    """A link that can be, and what it needs (`load` sets it)."""
    if settings.link is None:
        return
    from dcp.link import Link

    Link.parse(settings.link)
    for key, allowed in _LINK_NEEDS.items():
        value = getattr(settings.plan, key.partition(".")[2])
        if value not in allowed:
            raise ArgumentError(
                f"link = {settings.link!r} needs {key} = {_toml_word(allowed[-1])}, not "
                f"{_toml_word(value)}"
            )


def _check_control(settings: Settings) -> None:
    """The policy, the grid it chooses from, and that gradients are reduced once a step."""
    control, precision = settings.control, settings.train.precision
    policy = control.policy
    if policy in SIMULATED_POLICIES:
        raise ArgumentError(
            f"control.policy = {policy!r} knows what a run cannot know and exists in "
            f"`dcp control simulate` only; here: {', '.join(POLICIES)}"
        )
    if policy is not None and policy not in POLICIES:
        raise ArgumentError(f"control.policy = {policy!r} is unknown{suggest(policy, POLICIES)}")
    for name in (*control.precisions, control.base):
        if name not in PRECISIONS:
            key = "precisions" if name in control.precisions else "base"
            raise ArgumentError(
                f"control.{key}: {name!r} is no precision{suggest(name, PRECISIONS)}"
            )
    for key, grid in (
        ("precisions", control.precisions),
        ("batch_multiples", control.batch_multiples),
    ):
        if not grid:
            raise ArgumentError(f"control.{key} is empty: name at least one")
        if len(set(grid)) < len(grid):
            raise ArgumentError(f"control.{key} = {list(grid)} names one of them twice")
    if control.base not in control.precisions:
        raise ArgumentError(
            f"control.base = {control.base!r} is not among control.precisions = "
            f"{list(control.precisions)}"
        )
    multiples = list(control.batch_multiples)
    if len(multiples) > MOST_MULTIPLES or multiples != sorted(multiples) or multiples[0] < 1:
        raise ArgumentError(
            f"control.batch_multiples = {multiples} must be at most {MOST_MULTIPLES} ascending "
            "integers >= 1"
        )
    if policy is not None and precision != "fp32":
        raise ArgumentError(
            f"train.precision = {precision!r} fixes what control.policy = {policy!r} chooses: "
            "leave one of them out (control.base is where a controller starts)"
        )
    if settings.plan.reduce == "layer" and (policy is not None or precision != "fp32"):
        key, value = (
            ("control.policy", policy) if policy is not None else ("train.precision", precision)
        )
        raise ArgumentError(
            f"{key} = {value!r} needs gradients that are reduced once a step, and plan.reduce = "
            "'layer' was given: leave one of them out"
        )
