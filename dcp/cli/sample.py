"""`dcp sample`: text from a trained byte model."""

from __future__ import annotations

from typing import Any

import click

from dcp.cli import InputError, common, reading_input
from dcp.cli.checkpoint import find

BYTES = 256  # tokens below are bytes; others end a document


@click.command("sample")
@click.option("--checkpoint", "folder", metavar="DIR", required=True, help="Folder of the run.")
@click.option("--prompt", metavar="TEXT", default="def ", show_default=True)
@click.option("--tokens", type=int, metavar="N", default=200, show_default=True)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True)
@click.option(
    "--temperature",
    type=float,
    metavar="X",
    default=0.8,
    show_default=True,
    help="0: the likeliest",
)
@common
def command(
    json_to: str | None, folder: str, prompt: str, tokens: int, seed: int, temperature: float
) -> dict[str, Any]:
    """Continue PROMPT with text from a checkpoint."""
    if tokens < 0:
        raise InputError(f"--tokens {tokens} must be >= 0")
    if not 0.0 <= temperature < float("inf"):
        raise InputError(f"--temperature {temperature} must be >= 0")
    if seed < 0:
        raise InputError(f"--seed {seed} must be >= 0")
    if not prompt:
        raise InputError("--prompt must not be empty")
    text = sample(_model(folder), prompt, tokens=tokens, seed=seed, temperature=temperature)
    if json_to != "-":
        click.echo(text)
    return {"text": text}


def _model(folder: str) -> Any:
    """The model of the newest checkpoint, with its weights."""
    where = find(folder)
    import dcp
    from dcp import checkpoint

    with reading_input():
        config = checkpoint.show(where)["config"]
        if not config:
            raise InputError(f"{where} holds no settings of a model, only tensors")
        model = dcp.Model(dcp.Transformer1D(**config))
        parameters = model.parameters()
        for _, name, weights in checkpoint.gather(where, kinds=["weights"]):
            parameters[name][...] = weights
    return model


def sample(model: Any, prompt: str, *, tokens: int, seed: int, temperature: float) -> str:
    """Return `prompt` and up to `tokens` bytes after it.

    The logits of the whole window are computed anew for each token; the window slides once it
    is as long as the model's positions.
    """
    import numpy as np

    window = model.config.max_position_embeddings
    rng = np.random.default_rng(seed)
    ids = list(prompt.encode("utf-8"))
    for _ in range(tokens):
        seen = np.array(ids[-window:], dtype=np.int32)
        offsets = np.array([0, len(seen)], dtype=np.int32)
        logits = model.logits(seen, offsets)[-1].astype(np.float64)
        if temperature == 0.0:
            token = int(np.argmax(logits))
        else:
            # the largest of logits / T + Gumbel noise is a draw from softmax(logits / T)
            token = int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape)))
        if token >= BYTES:
            break
        ids.append(token)
    return bytes(ids).decode("utf-8", errors="replace")
