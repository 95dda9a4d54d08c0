"""`dcp train`: check everything here, then train on ranks, show and write what they report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import click

from dcp._env import thread_count
from dcp.cli import InputError, common, log_to_stderr, reading_input
from dcp.cli.compare import compare_table, loss_difference, output_of, settings_of, strategies_of
from dcp.cli.progress import closing_table, progress


@dataclass(frozen=True)
class Job:
    """What a rank needs to train: checked settings and the documents, read once."""

    settings: Any  # dcp.config.Settings
    documents: Any  # dcp.data.Documents; memory-mapped files are opened again by each rank
    cost: Any  # dcp.CostModel
    reduce: str  # "step" or "layer"
    gather: str  # "step" or "layer"
    resume: bool
    metrics: Path | None
    trace: Path | None
    replay: Path | None


@click.command("train")
@click.option("--preset", metavar="NAME", help="Model and learning rate.  [default: tiny]")
@click.option("--config", "config_file", metavar="FILE", help="Settings as TOML.")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="One setting, dotted key.")
@click.option("--print-config", is_flag=True, help="Print the merged settings and end.")
@click.option(
    "--data", metavar="stdlib|FOLDER|FILE", help="Documents to train on.  [default: stdlib]"
)
@click.option("--ranks", type=int, metavar="N", help="Processes.  [default: one a core, at most 8]")
@click.option("--steps", type=int, metavar="N", help="Total steps, from step 0.  [default: 60]")
@click.option(
    "--tokens-per-step", type=int, metavar="N", help="Token budget of a step.  [default: 16384]"
)
@click.option("--seed", type=int, metavar="N", help="Of weights, order, dropout.  [default: 0]")
@click.option("--strategy", metavar="NAME", help="How a step is planned.  [default: dcp]")
@click.option("--memory", metavar="SIZE", help="Most bytes of one rank, for example 300MB.")
@click.option(
    "--optimizer", metavar="NAME", help="adamw, adamw8bit, muon or shampoo.  [default: adamw]"
)
@click.option("--device", metavar="NAME", help="[default: cpu]")
@click.option("--checkpoint", metavar="DIR", help="Folder of checkpoints and metrics.jsonl.")
@click.option("--save-every", type=int, metavar="N", help="Steps between checkpoints.")
@click.option("--keep", type=int, metavar="N", help="Newest checkpoints to keep.  [default: 3]")
@click.option("--resume", is_flag=True, help="Go on from the newest whole checkpoint.")
@click.option(
    "--init",
    metavar="PATH",
    help="Start from these weights (a checkpoint, Hugging Face's folder or file) and, without "
    "--preset and --config, with their model's settings.",
)
@click.option(
    "--eval-every",
    type=int,
    metavar="N",
    help="Evaluate each time that N times --tokens-per-step tokens were trained on.",
)
@click.option("--target-loss", type=float, metavar="X", help="Stop at this held-out loss.")
@click.option(
    "--link",
    metavar="SPEC",
    help="Delay what ranks exchange like this link, for example 1Gbit,background=3,dwell=20s; "
    "no windows then.",
)
@click.option(
    "--controller",
    metavar="POLICY",
    help="Choose gradient precision and tokens of a step while training: static, precision, "
    "accumulation, decoupled or joint.",
)
@click.option(
    "--compare", metavar="A,B,...", help="Train with each of these strategies, and compare."
)
@click.option("--metrics", metavar="DIR", help="Folder of metrics.jsonl.  [default: --checkpoint]")
@click.option(
    "--replay",
    metavar="LOG",
    help="metrics.jsonl of a run with plan.refit or --controller: repeat it.",
)
@click.option("--trace", metavar="FILE", help="Write a Chrome trace of the steps.")
@common
def command(
    json_to: str | None,
    preset: str | None,
    config_file: str | None,
    sets: tuple[str, ...],
    print_config: bool,
    resume: bool,
    compare: str | None,
    metrics: str | None,
    trace: str | None,
    replay: str | None,
    **options: Any,
) -> dict[str, Any] | None:
    """Train a transformer on documents of very different lengths.

    Settings come from --preset, then --config, then --set, then the options; later ones win.
    """
    from dcp import config

    if compare is not None:
        if options["strategy"] is not None:
            raise InputError("--compare names the strategies: leave --strategy out")
        if "fixed" in strategies_of(compare):  # which alone may have plan.sp and plan.recompute
            options["strategy"] = "fixed"
    if options["init"] is not None and preset is None and config_file is None:
        sets = (*_model_of(options["init"]), *sets)
    settings = config.load(
        preset=preset,
        config=config_file,
        sets=sets,
        options={_KEYS.get(name, name): value for name, value in options.items()},
    )
    if print_config:
        click.echo(settings.to_toml(), nl=False)
        return None
    if compare is not None and (settings.checkpoint.folder is not None or resume):
        raise InputError("--compare trains a fresh model each time: leave --checkpoint out")
    if compare is not None and settings.control.policy is not None:
        raise InputError(
            "--compare trains plans on the same steps, and --controller changes what a step is: "
            "leave one of them out"
        )
    if compare is not None and replay is not None:
        raise InputError("--replay repeats one run: leave --compare out")
    if settings.plan.refit and metrics is None and settings.checkpoint.folder is None:
        raise InputError("plan.refit needs a folder for its log: --metrics DIR or --checkpoint DIR")
    every = [settings] if compare is None else settings_of(compare, settings)
    with reading_input():
        _check_init(settings, resume)
        _check_checkpoint(settings, resume)
        _check_outputs(metrics, trace)
        if replay is not None:
            _check_replay(Path(replay), settings)
        documents = _read_documents(settings)
        jobs = []
        for one in every:
            cost, reduce, gather = planned_for(one, documents)
            jobs.append(
                Job(
                    settings=one,
                    documents=documents,
                    cost=cost,
                    reduce=reduce,
                    gather=gather,
                    resume=resume,
                    metrics=_output(metrics, one, compare, folder=True),
                    trace=_output(trace, one, compare, folder=False),
                    replay=Path(replay) if replay is not None else None,
                )
            )
            # what fits nowhere is said before a rank starts
            make_loader(jobs[-1], SimpleNamespace(rank=0, size=one.ranks))
    to = sys.stderr if json_to == "-" else sys.stdout
    if compare is None:
        document = _run(jobs[0])
        closing_table(document, settings, to=to)
        return document
    return _compare(jobs, to)


def _output(path: str | None, settings: Any, compare: str | None, *, folder: bool) -> Path | None:
    given = Path(path) if path is not None else None
    return given if compare is None else output_of(given, settings.strategy, folder=folder)


_KEYS = {
    "data": "data.source",
    "optimizer": "optimizer.name",
    "checkpoint": "checkpoint.folder",
    "save_every": "checkpoint.save_every",
    "keep": "checkpoint.keep",
    "init": "checkpoint.init",
    "eval_every": "train.eval_every",
    "target_loss": "train.target_loss",
    "controller": "control.policy",
}


def _model_of(init: str) -> list[str]:
    """The settings of the model that has these weights, as `--set` takes them."""
    from dcp import checkpoint
    from dcp.cli.checkpoint import find

    with reading_input():
        fields = checkpoint.show(find(init))["config"]
    fields.pop("compute_dtype", None)  # a choice of the run
    return [
        f"model.{key}={'none' if value is None else json.dumps(value)}"
        for key, value in fields.items()
    ]


def _check_init(settings: Any, resume: bool) -> None:
    """Weights to start from are those of this model."""
    init = settings.checkpoint.init
    if init is None:
        return
    if resume:
        raise InputError("--resume goes on with the weights of its checkpoint: leave --init out")
    from dcp import checkpoint
    from dcp.cli.checkpoint import find

    where, model = find(init), settings.transformer()
    shown = checkpoint.show(where)
    if shown["config"]:
        checkpoint.compare_configs(where, shown["config"], dataclasses.asdict(model))
    there = {tensor["name"]: tuple(tensor["shape"]) for tensor in shown["tensors"]}
    for name, shape in model.tensors():
        if there.get(name) != tuple(shape):
            what = f"has shape {there[name]}" if name in there else "is missing"
            raise InputError(f"--init {init}: {name} {what} there, and has shape {shape} here")
    if surplus := there.keys() - {name for name, _ in model.tensors()}:
        raise InputError(f"--init {init}: {min(surplus)} is no tensor of this model")


def _check_checkpoint(settings: Any, resume: bool) -> None:
    """A used folder needs --resume; resuming needs a whole checkpoint of this model."""
    folder = settings.checkpoint.folder
    if folder is None:
        if resume:
            raise InputError("--resume needs --checkpoint DIR, the folder to go on from")
        return
    from dcp import checkpoint

    if Path(folder).exists() and not Path(folder).is_dir():
        raise InputError(f"--checkpoint {folder}: not a folder")
    if not resume:
        if checkpoint.is_used(folder):
            raise InputError(
                f"--checkpoint {folder}: already holds checkpoints; add --resume to go on from "
                "the newest, or name another folder"
            )
        return
    if not Path(folder).is_dir():
        raise InputError(f"--checkpoint {folder} --resume: no such folder")
    with warnings.catch_warnings(action="ignore"):  # rank 0 says what it skips
        newest = checkpoint.latest(folder)
    shown = checkpoint.show(newest)
    if shown["step"] > settings.steps:
        raise InputError(
            f"--steps {settings.steps}: {newest} is at step {shown['step']} already; --steps is "
            "the total, counted from step 0"
        )
    optimizer = shown["state"].get("optimizer", "adamw")  # before there were others
    if optimizer != settings.optimizer.name:
        raise InputError(
            f"{newest} has the state of optimizer {optimizer!r}, and this run is to go on with "
            f"{settings.optimizer.name!r}: --optimizer {optimizer}, or another folder"
        )
    here = dataclasses.asdict(settings.transformer())
    checkpoint.compare_configs(newest, shown["config"], here)


def _check_replay(path: Path, settings: Any) -> None:
    """The log must have all that later plans and arms of every step depend on."""
    from dcp.trainer import Replay

    log = Replay.read(path)
    policy = settings.control.policy
    if log.decisions and policy is None:
        raise InputError(f"--replay {path}: is of a run with a controller: add --controller POLICY")
    if policy is not None and not log.decisions:
        raise InputError(f"--replay {path}: holds no decisions of a controller")
    for step in range(settings.steps) if log.decisions else ():
        if step not in log.decisions:
            raise InputError(f"--replay {path}: holds no decision after step {step}; lower --steps")
    if settings.plan.refit and not log.busy_s:
        raise InputError(f"--replay {path}: holds no times, and plan.refit needs them")
    if not log.busy_s:
        return
    for step in range(settings.steps):
        if step not in log.busy_s:
            raise InputError(f"--replay {path}: holds no times of step {step}; lower --steps")
        if len(log.busy_s[step]) != settings.ranks:
            raise InputError(
                f"--replay {path}: is of {len(log.busy_s[step])} ranks, not {settings.ranks}"
            )


def _check_outputs(metrics: str | None, trace: str | None) -> None:
    if metrics is not None and Path(metrics).exists() and not Path(metrics).is_dir():
        raise InputError(f"--metrics {metrics}: not a folder")
    if trace is not None and not Path(trace).resolve().parent.is_dir():
        raise InputError(f"--trace {trace}: no such folder: {Path(trace).resolve().parent}")


def _read_documents(settings: Any) -> Any:
    """Read the documents once; the ranks get them ready."""
    from dcp import data

    chosen = settings.data
    options = {"max_length": chosen.max_length, "long": chosen.long}
    documents: Any
    if files := data.token_files(chosen.source):
        if chosen.tokenizer is not None:
            raise InputError(f"data.tokenizer is for text, and {chosen.source} holds tokens")
        documents = data.TokenFiles(files, eos=chosen.eos, **options)
    else:
        if chosen.eos is not None:
            raise InputError(f"data.eos = {chosen.eos} is for .npy files of tokens")
        documents = data.TextFiles(chosen.source, tokenizer=chosen.tokenizer, **options)
    vocab = settings.model["vocab_size"]
    if documents.vocab_size > vocab:
        raise InputError(
            f"--data {chosen.source}: tokens go up to {documents.vocab_size - 1}, and "
            f"model.vocab_size = {vocab}; set model.vocab_size={documents.vocab_size} or more"
        )
    return documents


def train_rank(world: Any, job: Job) -> dict[str, Any]:
    """Train on one rank; what it returns is equal on all but for `peak_bytes`."""
    import dcp
    from dcp import _dcp

    log_to_stderr()
    settings = job.settings
    if settings.memory is not None:
        _dcp.set_memory_cap(settings.memory)
    config = settings.transformer()
    loader = make_loader(job, world)
    sharding = {
        "windows": settings.plan.windows,
        "reduce": job.reduce,
        "sequence_parallel": settings.plan.sequence_parallel,
        "prefetch": settings.plan.prefetch,
        "gather": job.gather,
    }
    model = dcp.fully_shard(config, world, seed=settings.seed, **sharding)
    with contextlib.closing(model):
        if settings.checkpoint.init is not None:
            dcp.checkpoint.load(
                settings.checkpoint.init,
                shards={"weights": model.shards()["weights"]},
                shapes=model.shapes,
                world=world,
            )
            model.weights_changed()
        trainer = dcp.Trainer(
            model,
            settings.optimizer,
            loader,
            controller=controller_of(settings),
            precision=settings.train.precision,
            feedback=settings.control.feedback,
            hadamard=settings.control.hadamard,
            nearest=settings.control.nearest,
            checkpoint=settings.checkpoint.folder,
            save_every=settings.checkpoint.save_every,
            keep=settings.checkpoint.keep,
            asynchronous=settings.checkpoint.asynchronous,
            copy_bytes=copy_bytes(settings),
            resume=job.resume,
            eval_every=settings.train.eval_every,
            eval_tokens=settings.train.eval_tokens,
            target_loss=settings.train.target_loss,
            nonfinite=settings.train.nonfinite,
            seed=settings.seed,
            metrics=job.metrics,
            trace=job.trace,
            refit=settings.plan.refit,
            replay=job.replay,
            on_event=world.emit,
        )
        report = trainer.fit(settings.steps)
        sha256 = model.parameters_sha256()
        peak_bytes = int(model.memory()["peak"])
        world.barrier()  # the parameters lie in windows of all ranks: leave together
    return {
        "peak_bytes": peak_bytes,
        "parameters_sha256": sha256,
        "tokens_per_s": report.tokens_per_s,
        "eval_loss": report.eval_loss,
        "seconds_to_target": report.seconds_to_target,
        "skipped": report.skipped,
    }


def controller_of(settings: Any) -> Any:
    """The controller that the settings ask for, or None."""
    if settings.control.policy is None:
        return None
    import dcp

    return dcp.Controller(
        settings.control.policy,
        precisions=settings.control.precisions,
        base=settings.control.base,
        batch_multiples=settings.control.batch_multiples,
    )


def planned_for(settings: Any, documents: Any) -> tuple[Any, str, str]:
    """The cost model, when gradients are reduced and how long gathered weights stay.

    Settled here, the same for all ranks.
    """
    import dcp
    from dcp.analytic import Shape, device_named, host_fixed_fields, host_group_token_bytes
    from dcp.link import cost_under
    from dcp.reduction import choose_reduce

    config, plan = settings.transformer(), settings.plan

    controlled = settings.control.policy is not None or settings.train.precision != "fp32"
    residual = controlled  # the messages are there without feedback too

    def cost(reduce: str, gather: str = "layer") -> Any:
        link = link_of(settings)
        if plan.cost is None:
            threads = thread_count(settings.ranks)
            made = dcp.CostModel.for_model(
                config,
                reduce=reduce,
                windows=plan.windows,
                threads=threads,
                optimizer=settings.optimizer,
                prefetch=plan.prefetch,
                gather=gather,
                residual=residual,
            )
            return made if link is None else cost_under(made, config, link)
        measured = dcp.CostModel.load(plan.cost)
        measured.check_model(config)
        return dataclasses.replace(
            measured,
            group_token_bytes=host_group_token_bytes(Shape.of(config), plan.windows),
            **host_fixed_fields(
                config,
                reduce,
                plan.windows,
                settings.optimizer,
                plan.prefetch,
                gather,
                residual,
            ),
        )

    gather = "layer" if plan.gather == "auto" else plan.gather
    if plan.gather == "auto" and settings.link is not None and not plan.prefetch:
        gather = "step" if _fits(settings, documents, cost("step", "step")) else "layer"
    reduce = plan.reduce
    if reduce == "auto" and (settings.memory is None or controlled):
        reduce = "step"  # never moves more bytes, and codes are summed once a step
    elif reduce == "auto":
        moved = 4 * config.parameter_count() * (settings.ranks - 1) / settings.ranks
        once_s = moved / device_named("cpu").bytes_per_s
        options = {"strategy": settings.strategy, "seed": settings.seed, **plan_options(plan)}
        try:
            reduce = choose_reduce(
                _sampled_lengths(settings, documents),
                cost("step"),
                cost("layer"),
                world_size=settings.ranks,
                memory_bytes=step_memory(settings),
                tokens_per_step=settings.tokens_per_step,
                windows=plan.windows,
                step_s=once_s,
                layer_s=once_s,
                longest=int(documents.lengths.max()),
                **options,
            )
        except dcp.InfeasibleError:
            reduce = "layer"  # the loader names the document
    return cost(reduce, gather), reduce, gather


def _fits(settings: Any, documents: Any, cost: Any) -> bool:
    """Whether the longest document fits into memory with this cost model."""
    import dcp

    if settings.memory is None:
        return True
    longest = int(documents.lengths.max())
    try:
        dcp.plan(
            [longest],
            cost,
            world_size=settings.ranks,
            memory_bytes=step_memory(settings),
            strategy=settings.strategy,
            longest=longest,
            rounds=True,
            **plan_options(settings.plan),
        )
    except dcp.InfeasibleError:
        return False
    return True


def _sampled_lengths(settings: Any, documents: Any) -> Any:
    """Lengths of about four steps, drawn by the seed, and the longest of all."""
    import numpy as np

    lengths = documents.lengths
    drawn = lengths[np.random.default_rng(settings.seed).permutation(len(lengths))]
    count = int(np.searchsorted(np.cumsum(drawn), 4 * settings.tokens_per_step, side="right"))
    return np.append(drawn[:count], lengths.max())


def make_loader(job: Job, world: Any) -> Any:
    """The loader of one rank; it raises where a sequence fits nowhere."""
    import dcp

    settings, plan = job.settings, job.settings.plan
    return dcp.Loader(
        job.documents,
        world,
        job.cost,
        tokens_per_step=settings.tokens_per_step,
        strategy=settings.strategy,
        seed=settings.seed,
        memory_bytes=step_memory(settings),
        weighting=settings.train.weighting,
        eval_share=settings.train.eval_share,
        rounds=not plan.windows or job.reduce == "layer",
        **plan_options(plan),
    )


def copy_bytes(settings: Any) -> int:
    """Most bytes that a rank copies for a save beside training; 0 where there is none."""
    if settings.checkpoint.folder is None or not settings.checkpoint.asynchronous:
        return 0
    share = 12 * settings.transformer().parameter_count() // settings.ranks  # and two moments
    return int(min(settings.checkpoint.copy_bytes, share + share // 8))


def step_memory(settings: Any) -> int | None:
    """What steps may hold of `memory`: that copy stays beside them."""
    if settings.memory is None:
        return None
    return max(1, int(settings.memory) - copy_bytes(settings))


def plan_options(plan: Any) -> dict[str, Any]:
    """What `dcp.plan` is told of the settings beside strategy, seed and memory."""
    return {
        "max_tokens": plan.max_tokens,
        "max_group": plan.max_group,
        "fixed_group": plan.sp or 1,
        "fixed_recompute": plan.recompute or "none",
    }


def _compare(jobs: list[Job], to: IO[str]) -> dict[str, Any]:
    """Run the jobs one after the other, print the table, return the document."""
    runs: list[dict[str, Any]] = []
    for number, job in enumerate(jobs, 1):
        runs.append(_run(job, f"{number}/{len(jobs)} {job.settings.strategy}"))
        losses = [[step["loss"] for step in run["steps"]] for run in (runs[0], runs[-1])]
        runs[-1]["loss_difference"] = loss_difference(*losses)
    compare_table(runs, to=to)
    shared = {key: runs[0][key] for key in ("world", "model", "parameter_count")}
    return shared | {"compare": runs}


def _run(job: Job, label: str = "") -> dict[str, Any]:
    """Launch the ranks, show their progress, return the document."""
    import dcp

    settings = job.settings
    config = settings.transformer()
    parameter_count = config.parameter_count()
    steps: list[dict[str, Any]] = []
    with progress(settings, parameter_count, job.documents, label) as show:

        def on_event(event: dict[str, Any]) -> None:
            if event["kind"] == "step":
                steps.append({key: event[key] for key in STEP_KEYS})
            show(event)

        ranks = dcp.launch(
            train_rank, settings.ranks, (job,), on_event=on_event, link=link_of(settings)
        )
    first = ranks[0]
    peaks = [rank["peak_bytes"] for rank in ranks]
    return {
        "strategy": settings.strategy,
        "link": settings.link,
        "controller": settings.control.policy,
        "world": settings.ranks,
        "model": dataclasses.asdict(config),
        "parameter_count": parameter_count,
        "steps": steps,
        "tokens_per_s": first["tokens_per_s"],
        "peak_memory_bytes": {"node": sum(peaks), "ranks": peaks},
        "parameters_sha256": first["parameters_sha256"],
        "eval_loss": first["eval_loss"],
        "seconds_to_target": first["seconds_to_target"],
        "skipped_steps": first["skipped"],
    }


def link_of(settings: Any) -> Any:
    """The emulated link, or None."""
    if settings.link is None:
        return None
    from dcp.link import Link

    return Link.parse(settings.link)


STEP_KEYS = (
    "step",
    "loss",
    "tokens",
    "sequences",
    "seconds",
    "grad_norm",
    "lr",
    "plan",
    "idle_share",
    "micro_batches",
    "sp",
    "winner",
    "arm",
)
