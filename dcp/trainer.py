"""The training loop of one rank: steps, evaluation, checkpoints, metrics.

Every rank runs the same loop over the same steps; what a step does lies in the sharded model,
which sequences it holds in the loader. Decisions here (stop at the target, evaluate, save) depend
only on numbers that are bitwise equal on all ranks, so no rank can leave the others waiting.
Nothing here knows the command line: a rank's records reach the outside through `on_event`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp._dcp import ArgumentError, FileError, StateError
from dcp.checkpoint_async import AsyncSaver, SaveTimes
from dcp.optim_base import Optimizer
from dcp.refit import Refit
from dcp.trainer_control import Steering
from dcp.trainer_log import Metrics, Replay, Trace

if TYPE_CHECKING:
    from dcp.controller import Controller

__all__ = ["Replay", "Report", "StepRecord", "Trainer"]

WARM_UP_STEPS = 2  # of the throughput figure: caches, page faults, first touches
TARGET_EVAL_EVERY = 10  # of `eval_every` where a target is given and none is said
RESIDUAL = "residual."  # kind of a checkpoint, and the rank whose it is
_logger = logging.getLogger("dcp")


@dataclass(frozen=True)
class StepRecord:
    """What one step did, equal on all ranks but for the times, which rank 0 measured.

    Attributes
    ----------
    step : int
        Number of the step, counted from 0.
    loss : float or None
        Mean loss of its trainable tokens (or sequences); None where it is not finite.
    tokens, sequences : int
        Trainable tokens and sequences of all ranks.
    seconds : float
        From asking for the step's data to the end of the optimizer and of the controller's work.
    grad_norm : float or None
        Global norm before clipping.
    lr : float
        Learning rate.
    plan : str
        Hash of the plan.
    idle_share : float or None
        ``1 - sum(busy) / (world * max(busy))``; None where ranks outnumber cores.
    micro_batches : list of int
        Micro-batches per rank.
    sp : list of int
        Sequence-parallel size of each micro-batch of rank 0.
    winner : str
        The strategy whose candidate the plan is.
    arm : dict or None
        ``{"precision": ..., "multiple": ...}``: how gradients travelled, and how many times
        `tokens_per_step` the step had. None without a controller in fp32.
    skipped : bool
        The parameters were left alone: the gradient was not finite, or no token trainable.
    """

    step: int
    loss: float | None
    tokens: int
    sequences: int
    seconds: float
    grad_norm: float | None
    lr: float
    plan: str
    idle_share: float | None
    micro_batches: list[int]
    sp: list[int]
    winner: str
    arm: dict[str, Any] | None = None
    skipped: bool = False


@dataclass
class Report:
    """Result of :meth:`Trainer.fit`.

    Attributes
    ----------
    steps : list of StepRecord
        The steps of this call.
    first_step, last_step : int
        The first step of this call, and the number of steps done in all.
    eval_loss : float or None
        Held-out loss at the end; None where nothing is held out.
    seconds_to_target : float or None
        Training time, without evaluation and saving, until the held-out loss was at the target:
        on the straight line between the last two evaluations, so that their distance decides no
        comparison. Where the first evaluation is there already, the time of that one. None where
        the target was not reached.
    skipped : int
        Steps that left the parameters alone, since step 0.
    """

    steps: list[StepRecord] = field(default_factory=list)
    first_step: int = 0
    last_step: int = 0
    eval_loss: float | None = None
    seconds_to_target: float | None = None
    skipped: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Trainable tokens a second after two warm-up steps; None for fewer than three steps."""
        counted = self.steps[WARM_UP_STEPS:]
        seconds = sum(record.seconds for record in counted)
        return sum(record.tokens for record in counted) / seconds if seconds > 0 else None


class Trainer:
    """Trains a sharded model on the steps of a loader. Every rank makes one and calls `fit`.

    Parameters
    ----------
    model : dcp.ShardedModel
        From :func:`dcp.fully_shard`.
    optimizer : dcp.optim.Optimizer
        Rule and learning rate.
    loader : dcp.Loader
        Yields the steps; its `state_dict` goes into checkpoints.
    controller : dcp.Controller or None
        Chooses, between steps, how gradients travel and how many times `tokens_per_step` a step
        has; the learning rate follows. Gradients must be reduced once a step.
    precision : str
        How gradients travel without a controller: "fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8",
        "int4".
    feedback, hadamard, nearest : bool
        How they are quantised: see `dcp.ShardedModel.step`.
    checkpoint : path or None
        Folder of checkpoints, and of `metrics.jsonl` where `metrics` is None.
    save_every : int or None
        Write a checkpoint after every so many steps, and after the last one. None: only after
        the last one.
    keep : int
        Newest checkpoints that are kept.
    asynchronous : bool
        Copy what a checkpoint holds and write it beside the next steps; `fit` waits at its end.
        See :class:`dcp.checkpoint.AsyncSaver`.
    copy_bytes : int
        Most bytes of this copy on one rank; the rest is written before the next step.
    resume : bool
        Go on from the newest whole checkpoint in `checkpoint`; :class:`dcp.FileError` if there is
        none.
    eval_every : int or None
        Evaluate each time that so many times `tokens_per_step` tokens have been trained on, which
        is after so many steps unless a controller makes longer ones; the end is always evaluated
        where documents are held out.
    eval_tokens : int
        Held-out tokens of one evaluation, always the same ones.
    target_loss : float or None
        Stop once the held-out loss is at most this; needs held-out documents. `eval_every` is 10
        unless it says otherwise.
    nonfinite : {"stop", "skip"}
        A loss or gradient that is not finite raises :class:`dcp.NumericError` on every rank, or
        is counted and leaves the parameters alone on every rank.
    seed : int
        Of dropout, and of the random bits of quantising.
    metrics : path or None
        Folder of `metrics.jsonl`, one JSON object a line (a step, an evaluation, a save: see
        :class:`dcp.checkpoint.SaveTimes`), and of
        `tensorboard/` where tensorboardX or TensorBoard with torch is installed.
    refit : bool
        Scale the loader's cost model to the measured times of each step (:class:`dcp.refit.Refit`):
        what step n took counts from step n + 2 on, since step n + 1 is planned while it runs. Plans
        then depend on the clock; every update is a line of `metrics.jsonl`, and checkpoints hold
        where it stands.
    replay : path or None
        The `metrics.jsonl` of a run with `refit` or a controller: take its times and what its
        controller saw instead of the clock's, so that the run repeats bit for bit.
    trace : path or None
        Write a Chrome trace (chrome://tracing, Perfetto) of the steps, one row a rank.
    on_event : callable or None
        Called on rank 0 with a dict: ``{"kind": "step" | "control" | "eval" | "save", ...}``.

    Examples
    --------
    >>> import dcp
    >>> def work(world):
    ...     config = dcp.Transformer1D.preset("tiny", num_hidden_layers=1)
    ...     text = dcp.data.TextFiles("stdlib", max_length=256)
    ...     cost = dcp.CostModel.for_model(config)
    ...     loader = dcp.Loader(text, world, cost, tokens_per_step=512)
    ...     with dcp.fully_shard(config, world) as model:
    ...         trainer = dcp.Trainer(model, dcp.optim.AdamW(lr=0.01), loader)
    ...         return len(trainer.fit(2).steps)
    >>> dcp.launch(work, 2)
    [2, 2]
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        loader: Any,
        *,
        controller: Controller | None = None,
        precision: str = "fp32",
        feedback: bool = True,
        hadamard: bool = False,
        nearest: bool = False,
        checkpoint: str | Path | None = None,
        save_every: int | None = None,
        keep: int = 3,
        asynchronous: bool = False,
        copy_bytes: int = 256 << 20,
        resume: bool = False,
        eval_every: int | None = None,
        eval_tokens: int = 32768,
        target_loss: float | None = None,
        nonfinite: str = "stop",
        seed: int = 0,
        metrics: str | Path | None = None,
        refit: bool = False,
        replay: str | Path | None = None,
        trace: str | Path | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if nonfinite not in ("stop", "skip"):
            raise ArgumentError(f"nonfinite = {nonfinite!r} must be 'stop' or 'skip'")
        for name, value in (("save_every", save_every), ("keep", keep), ("eval_every", eval_every)):
            if value is not None and value < 1:
                raise ArgumentError(f"{name} = {value} must be >= 1")
        if (save_every is not None or resume) and checkpoint is None:
            raise ArgumentError("save_every and resume need checkpoint, the folder")
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.world = model.world
        model.set_optimizer(optimizer, keep=True)
        self.checkpoint = Path(checkpoint) if checkpoint is not None else None
        self.save_every, self.keep = save_every, keep
        self.asynchronous, self.copy_bytes = asynchronous, copy_bytes
        self._saver: AsyncSaver | None = None  # while `fit` runs
        if target_loss is not None and eval_every is None:
            eval_every = TARGET_EVAL_EVERY
        self.eval_every, self.eval_tokens, self.target_loss = eval_every, eval_tokens, target_loss
        self.nonfinite, self.seed = nonfinite, seed
        self.on_event = on_event if self.world.rank == 0 else None
        self.metrics_folder = Path(metrics) if metrics is not None else self.checkpoint
        self.trace = Path(trace) if trace is not None and self.world.rank == 0 else None
        self.step = 0  # steps done since step 0
        self.budgets = 0  # times `tokens_per_step` of all steps done
        self.train_seconds = 0.0  # without evaluation and saving
        self.skipped = 0
        self._saved: int | None = None  # step of the newest checkpoint
        self._evaluated: int | None = None  # step of the newest evaluation
        self._last_loss: tuple[float, float] | None = None  # training seconds, held-out loss
        self._control_line: dict[str, Any] | None = None  # of the newest step
        self._refits: list[dict[str, Any]] = []  # lines of the log that are not written yet
        self.refit: Refit | None = None
        self.replay = Replay.read(replay) if replay is not None else None
        if refit or (self.replay is not None and self.replay.busy_s):
            self.refit = Refit(loader.cost, log=self._refits.append)
        decisions = self.replay.decisions if self.replay is not None else None
        self.steering = Steering(
            model,
            optimizer,
            tokens_per_step=getattr(loader, "tokens_per_step", 0),
            controller=controller,
            precision=precision,
            feedback=feedback,
            hadamard=hadamard,
            nearest=nearest,
            seed=seed,
            replay=decisions or None,
            replay_path=self.replay.path if self.replay is not None else None,
        )
        if resume:
            self._resume()

    def fit(self, steps: int) -> Report:
        """Train until `steps` steps are done in all, counted from step 0.

        Returns
        -------
        Report
            The steps of this call. Where all of them were done before, there are none.

        Raises
        ------
        dcp.NumericError
            The loss or gradient of a step is not finite and `nonfinite` is "stop".
        dcp.RankError, dcp.AbortedError, dcp.MismatchError
            Another rank died, failed, or does not run the same steps.
        """
        if steps < 0:
            raise ArgumentError(f"steps = {steps} must be >= 0")
        report = Report(first_step=self.step, last_step=self.step)
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(self._open_metrics())
            trace = stack.enter_context(Trace(self.trace, self.world.size))
            self._open_saver(stack)
            self._train(steps, report, metrics, trace)
            if self.checkpoint is not None and self._saved != self.step:
                self._save(metrics)
            if self._evaluated != self.step:
                self._evaluate(report, metrics)
            if self._saver is not None:
                self._saved_one(self._saver.wait(), metrics)
        report.last_step, report.skipped = self.step, self.skipped
        return report

    def _train(self, steps: int, report: Report, metrics: Metrics, trace: Trace) -> None:
        """Run the steps, to `steps` or to the target."""
        with contextlib.closing(iter(self.loader)) as steps_of:
            while self.step < steps and report.seconds_to_target is None:
                start = time.perf_counter()
                multiple = self._take_multiple()
                data = next(steps_of)
                record, busy = self._one_step(data, start)
                report.steps.append(record)
                metrics.write("step", dataclasses.asdict(record))
                if self.refit is not None:
                    self._refit(record, data.plan, busy, metrics)
                trace.add(record, busy)
                self._emit("step", dataclasses.asdict(record) | {"memory": self.model.memory()})
                self._log_control(metrics)
                self.step += 1
                due = self._eval_due()
                self.budgets += multiple
                if self._eval_due() > due:
                    self._evaluate(report, metrics)
                if self.save_every is not None and self.step % self.save_every == 0:
                    self._save(metrics)

    def _take_multiple(self) -> int:
        """Let the loader's next step have the multiple that was decided, and return it."""
        multiple = self.steering.multiple
        if multiple != getattr(self.loader, "multiple", 1):
            self.loader.use_multiple(multiple)
        return multiple

    def _eval_due(self) -> int:
        """Evaluations that should have been by now."""
        return self.budgets // self.eval_every if self.eval_every is not None else 0

    def _log_control(self, metrics: Metrics) -> None:
        if (line := self._control_line) is not None:
            head = {} if metrics.has_control else self.steering.head()
            metrics.write("control", line | head)
            self._emit("control", line)

    def _one_step(self, data: Any, start: float) -> tuple[StepRecord, list[float]]:
        """Run one step; its time counts from `start`, so that waiting for data counts."""
        if data.index != self.step:
            raise StateError(
                f"the loader is at step {data.index} and the trainer at step {self.step}: "
                "give each trainer a loader of its own"
            )
        arm = self.steering.shown_arm()
        lr = self.optimizer.lr_at(self.step) * self.steering.lr_factor
        result = self.model.step(
            data.micro_batches,
            scale=data.scale,
            trainable=data.trainable,
            lr=lr,
            step=self.step,
            optimizer=self.optimizer,
            plan_hash=data.plan.hash,
            dropout_seed=_mix(self.seed, self.step),
            nonfinite=self.nonfinite,
            groups=data.plan.groups,
            **self.steering.step_options(),
        )
        self._control_line = self.steering.after(
            self.step, result.loss, time.perf_counter() - start
        )
        seconds = time.perf_counter() - start
        self.train_seconds += seconds
        if result.skipped:
            self.skipped += 1
            if data.trainable > 0 and self.world.rank == 0:
                _logger.warning("step %d: loss or gradient not finite, skipped", self.step)
        busy = [float(b) for b in result.busy_s]
        counts, sizes = _shape_of(data.plan, self.world.size)
        record = StepRecord(
            step=self.step,
            loss=_finite(result.loss),
            tokens=int(data.trainable),
            sequences=int(data.sequence_count),
            seconds=seconds,
            grad_norm=_finite(result.grad_norm),
            lr=lr,
            plan=str(data.plan.hash),
            idle_share=_idle_share(busy),
            micro_batches=counts,
            sp=sizes,
            winner=str(data.plan.winner),
            arm=arm,
            skipped=bool(result.skipped),
        )
        return record, busy

    def _refit(self, record: StepRecord, plan: Any, busy: list[float], metrics: Metrics) -> None:
        """Let the measured times of a step, or those of the replayed run, decide later plans."""
        assert self.refit is not None
        if self.replay is not None:
            busy = self.replay.busy(record, busy)
        cost = self.refit.update(record.step, plan, busy)
        while self._refits:
            metrics.write("refit", self._refits.pop(0))
        self.loader.use_cost(cost, first=record.step + 2)

    def _evaluate(self, report: Report, metrics: Metrics) -> None:
        """Take the loss on the held-out documents, always the same ones; None where none are."""
        total, any_tokens = 0.0, False
        for data in self.loader.evaluation(tokens=self.eval_tokens):
            total += self.model.evaluate(
                data.micro_batches, scale=data.scale, groups=data.plan.groups
            )
            any_tokens = True
        if getattr(self.model, "gather", "layer") == "step":
            # what was gathered here would be free for the next step: then the distance of
            # evaluations would decide what steps take, and a controller would see two kinds
            self.model.weights_changed()
        loss = _finite(total) if any_tokens else None
        self._evaluated = self.step
        report.eval_loss = loss
        if self.target_loss is not None and loss is not None and loss <= self.target_loss:
            now = (self.train_seconds, loss)
            report.seconds_to_target = _crossing(self._last_loss, now, self.target_loss)
        if loss is not None:
            self._last_loss = (self.train_seconds, loss)
        metrics.write("eval", {"step": self.step, "eval_loss": loss})
        self._emit("eval", {"step": self.step, "eval_loss": loss})

    def _open_saver(self, stack: contextlib.ExitStack) -> None:
        if self.checkpoint is None or not self.asynchronous:
            return
        self._saver = stack.enter_context(
            AsyncSaver(self.checkpoint, self.world, copy_bytes=self.copy_bytes, keep=self.keep)
        )
        stack.callback(setattr, self, "_saver", None)

    def _save(self, metrics: Metrics) -> None:
        from dcp import checkpoint

        assert self.checkpoint is not None
        state = {
            "step": self.step,
            "seed": self.seed,
            "train_seconds": self.train_seconds,
            "budgets": self.budgets,
            "last_loss": self._last_loss,
            "control": self.steering.state_dict(),
            "skipped": self.skipped,
            "update_count": self.model.update_count,
            "optimizer": self.optimizer.name,
            "loader": self.loader.state_dict(),
        }
        if self.refit is not None:
            state["refit"] = self.refit.state_dict()
            state["costs"] = self.loader.costs_dict()
        content: dict[str, Any] = {
            "step": self.step,
            "shards": self.model.shards() | self._residual(),
            "shapes": self.model.shapes,
            "kind_shapes": self.model.kind_shapes(),
            "state": state,
            "config": self.model.config,
        }
        if self._saver is not None:
            before = self._saver.last
            self._saver.save(**content)
            if self._saver.last is not before:
                self._saved_one(self._saver.last, metrics)
        else:
            start = time.perf_counter()
            checkpoint.save(self.checkpoint, world=self.world, keep=self.keep, **content)
            size = sum(run.array.nbytes for runs in content["shards"].values() for run in runs)
            seconds = time.perf_counter() - start
            self._saved_one(checkpoint.SaveTimes(self.step, seconds, 0.0, 0, size), metrics)
        self._saved = self.step

    def _residual(self) -> dict[str, Any]:
        """What quantising left out, each rank's own as a kind of its own; nothing before it did."""
        runs = self.model.residual()
        return {f"{RESIDUAL}{self.world.rank}": runs} if runs else {}

    def _load_residual(self, path: Path, shown: dict[str, Any]) -> None:
        """Take over the residuals of the ranks that were; in another world add them up.

        So what was sent and what is still to be sent stay the sum of all gradients.
        """
        from dcp import checkpoint

        saved = sorted(int(k.removeprefix(RESIDUAL)) for k in shown["kinds"] if _is_residual(k))
        if not saved:
            return
        runs = self.model.residual(make=True)
        for count, rank in enumerate(saved[self.world.rank :: self.world.size]):
            parts = [run._replace(array=run.array.copy()) for run in runs]
            checkpoint.load(path, shards={f"{RESIDUAL}{rank}": parts}, shapes=self.model.shapes)
            for run, part in zip(runs, parts, strict=True):
                run.array[:] = part.array if count == 0 else run.array + part.array

    def _saved_one(self, times: SaveTimes | None, metrics: Metrics) -> None:
        """A checkpoint is in its place."""
        if times is not None:
            metrics.write("save", times._asdict())
            self._emit("save", times._asdict() | {"folder": str(self.checkpoint)})

    def _resume(self) -> None:
        from dcp import checkpoint

        assert self.checkpoint is not None
        with warnings.catch_warnings(record=True, action="always") as skipped:
            path = checkpoint.latest(self.checkpoint)
        for warning in skipped if self.world.rank == 0 else ():
            _logger.warning("%s", warning.message)
        shown = checkpoint.show(path)
        self._check_state(path, shown)
        self._keep_state(shown)
        state = checkpoint.load(
            path,
            shards=self.model.shards(),
            shapes=self.model.shapes,
            kind_shapes=self.model.kind_shapes(),
            config=self.model.config,
            world=self.world,
        )
        self._load_residual(path, shown)
        self.model.weights_changed()
        self.model.update_count = int(state["update_count"])
        self.loader.load_state_dict(state["loader"])
        if self.refit is not None and "refit" in state:
            self.refit.load_state_dict(state["refit"])
            self.loader.load_costs_dict(state["costs"])
        self.step = int(state["step"])
        self.train_seconds = float(state["train_seconds"])
        self.budgets = int(state.get("budgets", self.step))  # before there were multiples
        if (last := state.get("last_loss")) is not None:
            self._last_loss = (float(last[0]), float(last[1]))
        self.steering.load_state_dict(state.get("control"))
        self.skipped = int(state["skipped"])
        self._saved = self.step

    def _check_state(self, path: Path, shown: dict[str, Any]) -> None:
        """The checkpoint has the state that this optimizer needs, of every tensor, and no other."""
        have = {
            (kind, tensor["name"])
            for tensor in shown["tensors"]
            for kind in tensor["kinds"]
            if kind != "weights"
            and not _is_residual(kind)
            and tensor["name"] not in self.model.frozen
        }
        need = {(kind, name) for kind, names in self.model.state_names().items() for name in names}
        if have == need:
            return
        (kind, name), verb = min(
            [(pair, "lacks") for pair in need - have] + [(pair, "has") for pair in have - need]
        )
        saved = shown["state"].get("optimizer", "another optimizer")
        raise FileError(
            f"{path} is of {saved!r} and this run of {self.optimizer.name!r}: the checkpoint "
            f"{verb} {kind} of {name}"
        )

    def _keep_state(self, shown: dict[str, Any]) -> None:
        """Let the model hold the saved state of tensors that are frozen now."""
        states: dict[str, dict[str, Any]] = {}
        for tensor in shown["tensors"]:
            for kind in tensor["kinds"] if tensor["name"] in self.model.frozen else ():
                if kind != "weights" and not _is_residual(kind):
                    shape = tensor.get("kind_shapes", {}).get(kind, tensor["shape"])
                    states.setdefault(kind, {})[tensor["name"]] = shape
        if states:
            from dcp.checkpoint_format import DTYPES

            dtypes = {kind: DTYPES[shown["kinds"][kind]["dtype"] or "F32"].name for kind in states}
            self.model.keep_state(states, dtypes=dtypes)

    def _open_metrics(self) -> Metrics:
        folder = self.metrics_folder if self.world.rank == 0 else None
        return Metrics(folder, first_step=self.step)

    def _emit(self, kind: str, values: dict[str, Any]) -> None:
        if self.on_event is not None:
            self.on_event({"kind": kind} | values)


def _is_residual(kind: str) -> bool:
    return kind.startswith(RESIDUAL)


def _crossing(
    before: tuple[float, float] | None, after: tuple[float, float], target: float
) -> float:
    """Seconds at which a line through two (seconds, loss) is at the target; the last is below it.

    Examples
    --------
    >>> from dcp.trainer import _crossing
    >>> _crossing((10.0, 3.0), (20.0, 2.0), 2.25), _crossing(None, (20.0, 2.0), 2.25)
    (17.5, 20.0)
    """
    if before is None or not before[1] > target:
        return after[0]
    return before[0] + (after[0] - before[0]) * (before[1] - target) / (before[1] - after[1])


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _idle_share(busy: list[float]) -> float | None:
    """1 - sum / (count * longest); None where ranks outnumber cores: then busy is waiting too."""
    from dcp.config import core_count

    longest = max(busy, default=0.0)
    if longest <= 0.0 or len(busy) > core_count():
        return None
    return 1.0 - sum(busy) / (len(busy) * longest)


def _shape_of(plan: Any, world_size: int) -> tuple[list[int], list[int]]:
    """Micro-batches per rank, and the group size of each of rank 0's."""
    counts, sizes = [0] * world_size, []
    for micro_batch in plan.micro_batches:
        for rank in micro_batch.ranks:
            counts[rank] += 1
        if 0 in micro_batch.ranks:
            sizes.append(len(micro_batch.ranks))
    return counts, sizes


def _mix(seed: int, step: int) -> int:
    """64 bits that differ for every (seed, step): the finalizer of splitmix64."""
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + step + 1) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
