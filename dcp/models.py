"""Model configurations (`Transformer1D`) and a model on one process (`Model`).

A configuration is plain data with Hugging Face's field names. A model is a configuration and one
float32 array a tensor, under Hugging Face's tensor names; forward and backward run in the C core
over sequences laid one after the other (`tokens` of all, `offsets` where each begins), without
padding.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcp import _dcp
from dcp._dcp import ArgumentError
from dcp.cost import recompute_counts

__all__ = ["Model", "Transformer1D", "next_token_labels", "preset_lr", "preset_names"]

IGNORED = -100  # label of a token that is not trained on
COMPUTE_DTYPES = ("float32", "bfloat16")


class _Preset(NamedTuple):
    fields: dict[str, Any]
    lr: float  # AdamW's, where `optimizer.lr` is not given


def _preset(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    *,
    lr: float = 3e-4,
    **more: Any,
) -> _Preset:
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return _Preset(fields | more, lr)


_OURS: dict[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
_LLAMA_2: dict[str, Any] = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA_3: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
_SMOLLM: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

# Vocabulary 257: the 256 bytes and one token for an end. The others: shapes as published with the
# models (their config.json).
PRESETS: dict[str, _Preset] = {
    "tiny": _preset(257, 128, 344, 4, 4, lr=3e-3, initializer_range=0.05, **_OURS),
    "small": _preset(257, 512, 1408, 6, 8, lr=1e-3, **_OURS),
    "medium": _preset(257, 768, 2048, 12, 12, lr=6e-4, **_OURS),
    "smollm-135m": _preset(49152, 576, 1536, 30, 9, num_key_value_heads=3, **_SMOLLM),
    "smollm-360m": _preset(49152, 960, 2560, 32, 15, num_key_value_heads=5, **_SMOLLM),
    "tinyllama-1.1b": _preset(32000, 2048, 5632, 22, 32, num_key_value_heads=4, rms_norm_eps=1e-5),
    "llama-7b": _preset(32000, 4096, 11008, 32, 32),
    "llama-2-7b": _preset(32000, 4096, 11008, 32, 32, **_LLAMA_2),
    "llama-2-13b": _preset(32000, 5120, 13824, 40, 40, **_LLAMA_2),
    "llama-2-70b": _preset(32000, 8192, 28672, 80, 64, num_key_value_heads=8, **_LLAMA_2),
    "llama-3-8b": _preset(128256, 4096, 14336, 32, 32, **_LLAMA_3),
    "llama-3-70b": _preset(128256, 8192, 28672, 80, 64, **_LLAMA_3),
}


def preset_names() -> list[str]:
    """Names of all presets, smallest of ours first.

    Examples
    --------
    >>> preset_names()[:3]
    ['tiny', 'small', 'medium']
    """
    return list(PRESETS)


def _find_preset(name: str) -> _Preset:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(PRESETS)}"
        raise ArgumentError(f"unknown preset {name!r}: {hint}")
    return PRESETS[name]


def preset_lr(name: str) -> float:
    """AdamW's learning rate that goes with a preset.

    Examples
    --------
    >>> preset_lr("small")
    0.001
    """
    return _find_preset(name).lr


@dataclass(frozen=True)
class Transformer1D:
    """Configuration of a Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Field names and meanings are Hugging Face's `LlamaConfig`.

    Parameters
    ----------
    vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads : int
        Sizes, at least 1. `num_attention_heads` divides `hidden_size`.
    num_key_value_heads : int, optional
        Divides `num_attention_heads`; as many where None.
    head_dim : int, optional
        Even; hidden_size / num_attention_heads where None.
    max_position_embeddings : int
        Tokens of the longest sequence that is accepted.
    rope_theta : float
        Base of the rotary angles.
    rms_norm_eps : float
        Added to the mean square in every norm.
    tie_word_embeddings : bool
        The output head is the embedding: one tensor, gradients of both uses summed.
    attention_bias, mlp_bias : bool
        Biases on q, k, v, o; on gate, up, down.
    dropout : float
        On the output of both residual branches in training, 0 <= dropout < 1. Hugging Face's Llama
        has none.
    initializer_range : float
        Standard deviation of initial matrices; what adds to the residual (`o_proj`, `down_proj`)
        starts smaller by sqrt(2 num_hidden_layers).
    compute_dtype : {"float32", "bfloat16"}
        What matrix products and attention multiply. With "bfloat16" a pass reads every weight, and
        every factor of a product, rounded to it; products are summed in float32, and activations,
        gradients and the weights themselves stay float32. A choice of the run and not of the model:
        not part of Hugging Face's `config.json`.

    Raises
    ------
    dcp.ArgumentError
        A field breaks a rule; the message names it.
    dcp.DTypeError
        A field has the wrong type.

    Examples
    --------
    >>> import dcp
    >>> config = dcp.Transformer1D(512, 64, 172, 2, 4)
    >>> config.head_dim, config.parameter_count()
    (16, 164672)
    >>> dcp.Transformer1D(512, 100, 172, 2, 3)
    Traceback (most recent call last):
        ...
    dcp.ArgumentError: num_attention_heads 3 must divide hidden_size 100
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.compute_dtype, str) and self.compute_dtype not in COMPUTE_DTYPES:
            near = difflib.get_close_matches(self.compute_dtype, COMPUTE_DTYPES, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(COMPUTE_DTYPES)}"
            raise ArgumentError(f"compute_dtype {self.compute_dtype!r} is unknown: {hint}")
        heads, hidden = self.num_attention_heads, self.hidden_size
        if cast("int | None", self.num_key_value_heads) is None:
            object.__setattr__(self, "num_key_value_heads", heads)
        if cast("int | None", self.head_dim) is None:
            whole = isinstance(heads, int) and isinstance(hidden, int) and heads > 0
            # the check below names heads or hidden_size where they are not usable
            object.__setattr__(self, "head_dim", hidden // heads if whole else 2)
        _dcp.transformer1d_check(self.core())

    @classmethod
    def preset(cls, name: str, **fields: Any) -> Transformer1D:
        """A named configuration, with some fields replaced.

        Fields that follow from others (`head_dim`, `num_key_value_heads`) follow the replaced ones.

        Examples
        --------
        >>> Transformer1D.preset("llama-3-8b").parameter_count()
        8030261248
        >>> Transformer1D.preset("tiny", num_attention_heads=2).head_dim
        64
        """
        return cls(**(_find_preset(name).fields | fields))

    @staticmethod
    def presets() -> list[str]:
        """Names that `preset` knows.

        Examples
        --------
        >>> "llama-3-70b" in Transformer1D.presets()
        True
        """
        return preset_names()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Transformer1D:
        """Configuration from Hugging Face's `config.json`, parsed.

        Reads the form of transformers 4 (`rope_theta`) and 5 (`rope_parameters`).

        Raises
        ------
        dcp.UnsupportedError
            A field asks for what dcp does not compute (scaled rotary positions, sliding windows,
            other activations ...); the message names it.

        Examples
        --------
        >>> tiny = Transformer1D.preset("tiny")
        >>> Transformer1D.from_hf(tiny.to_hf()) == tiny
        True
        """
        from dcp import huggingface

        return cls(**huggingface.config_fields(config))

    def to_hf(self) -> dict[str, Any]:
        """The content of `config.json`, for transformers 4 and 5.

        Examples
        --------
        >>> Transformer1D.preset("tiny").to_hf()["model_type"]
        'llama'
        """
        from dcp import huggingface

        return huggingface.config_json(self.core())

    def core(self) -> dict[str, Any]:
        """All fields as a dict: what the C core reads."""
        return dataclasses.asdict(self)

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in model order. A tied head is no tensor of its own.

        Examples
        --------
        >>> Transformer1D.preset("tiny").tensors()[0]
        ('model.embed_tokens.weight', (257, 128))
        """
        return [(name, shape) for name, shape, _, _ in _dcp.transformer1d_tensors(self.core())]

    def groups(self) -> list[tuple[str, list[str]]]:
        """Tensors that are gathered and reduced together: (group, names); one group a layer.

        Examples
        --------
        >>> [group for group, _ in Transformer1D.preset("tiny").groups()][:2]
        ['model.embed_tokens', 'model.layers.0']
        """
        groups: dict[str, list[str]] = {}
        for name, _, _, group in _dcp.transformer1d_tensors(self.core()):
            groups.setdefault(group, []).append(name)
        return list(groups.items())

    def parameter_count(self) -> int:
        """Numbers in all tensors together.

        Examples
        --------
        >>> Transformer1D.preset("llama-2-7b").parameter_count()
        6738415616
        """
        return sum(int(np.prod(shape, dtype=np.int64)) for _, shape in self.tensors())

    def activation_bytes(
        self,
        token_count: int,
        *,
        threads: int | None = None,
        recompute: str | Mapping[str, int] | tuple[int, int] = (0, 0),
    ) -> int:
        """Bytes that forward and backward over so many tokens hold at most.

        Activations, packed copies of the weights and scratch of so many threads (None: one a core);
        not weights and gradients.

        Parameters
        ----------
        token_count : int
            Of one micro-batch.
        threads : int, optional
            That compute; None: one a core.
        recompute : str, mapping or (int, int)
            What is dropped and computed again: as in `Model.loss_and_gradients`, or (layers, mlps).

        Raises
        ------
        dcp.ArgumentError
            A negative count, or more layers than there are.

        Examples
        --------
        >>> config = Transformer1D.preset("tiny")
        >>> config.activation_bytes(2048) > config.activation_bytes(1024)
        True
        >>> config.activation_bytes(2048) > config.activation_bytes(2048, recompute="full")
        True
        """
        count = _dcp.cpu_info()["cores"] if threads is None else threads
        counts = _recompute(self, recompute)
        return _dcp.transformer1d_activation_bytes(self.core(), token_count, count, counts)


def _recompute(
    config: Transformer1D, recompute: str | Mapping[str, int] | tuple[int, int]
) -> tuple[int, int]:
    """(layers, mlps); what is wrong with the counts, the core names."""
    if isinstance(recompute, tuple):
        return recompute
    return recompute_counts(recompute, config.num_hidden_layers)


def next_token_labels(tokens: ArrayLike, offsets: ArrayLike) -> NDArray[np.int64]:
    """Label of each position: the next token of the same sequence; -100 at each sequence's end.

    Parameters
    ----------
    tokens : int [T]
        All sequences, one after the other.
    offsets : int [n + 1]
        Where each begins; the last is T.

    Examples
    --------
    >>> next_token_labels([5, 6, 7, 8], [0, 3, 4]).tolist()
    [6, 7, -100, -100]
    """
    sequence, borders = np.asarray(tokens), np.asarray(offsets)
    labels = np.full(sequence.shape[:1], IGNORED, np.int64)
    if all(x.ndim == 1 and (x.dtype.kind in "iu" or not x.size) for x in (sequence, borders)):
        labels[:-1] = sequence[1:]
        ends = borders[1:].astype(np.int64)
        labels[ends[(ends > 0) & (ends <= len(sequence))] - 1] = IGNORED
    # what else is wrong with either, the core names
    return labels


class Model:
    """A Transformer1D with its weights, on one process.

    Parameters
    ----------
    config : Transformer1D
        Sizes.
    device : str
        ``"cpu"``.
    seed : int
        Of the initial weights: a pure function of seed, tensor and element.

    Examples
    --------
    >>> import dcp, numpy as np
    >>> model = dcp.Model(dcp.Transformer1D(11, 8, 12, 1, 2), seed=1)
    >>> tokens, offsets = np.array([1, 2, 3, 4, 5]), np.array([0, 3, 5])
    >>> model.logits(tokens, offsets).shape
    (5, 11)
    >>> loss, gradients = model.loss_and_gradients(tokens, offsets)
    >>> bool(abs(loss - np.log(11)) < 0.1), gradients["lm_head.weight"].shape
    (True, (11, 8))
    """

    def __init__(self, config: Transformer1D, *, device: str = "cpu", seed: int = 0) -> None:
        core = config.core()
        weights = {
            name: _dcp.transformer1d_initial(
                core, index, seed, 0, int(np.prod(shape, dtype=np.int64))
            ).reshape(shape)
            for index, (name, shape) in enumerate(config.tensors())
        }
        self._adopt(config, weights, device)

    def _adopt(
        self, config: Transformer1D, weights: dict[str, NDArray[np.float32]], device: str
    ) -> None:
        self.config = config
        self.device = device
        self._weights = weights
        self._core = _dcp.Model(config.core(), list(weights.values()), device=device)

    def __repr__(self) -> str:
        return f"<dcp.Model of {self.config.parameter_count():,} parameters on {self.device}>"

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """The weights by Hugging Face name, in model order: views, and writing changes the model.

        Examples
        --------
        >>> import dcp
        >>> model = dcp.Model(dcp.Transformer1D(11, 8, 12, 1, 2))
        >>> model.parameters()["model.norm.weight"][:] = 2.0
        """
        return {name: array.view() for name, array in self._weights.items()}

    def logits(self, tokens: ArrayLike, offsets: ArrayLike) -> NDArray[np.float32]:
        """Logits of every position.

        Parameters
        ----------
        tokens : int [T]
            All sequences, one after the other; any integer dtype.
        offsets : int [n + 1]
            Where each sequence begins; starts with 0, ends with T. Empty sequences are fine.

        Returns
        -------
        float32 [T, vocab_size]

        Raises
        ------
        dcp.ArgumentError
            A token, an offset or the length of a sequence is out of range.
        dcp.DTypeError
            Not integers.
        """
        return self._core.logits(tokens, offsets)

    def loss(self, tokens: ArrayLike, offsets: ArrayLike, labels: ArrayLike | None = None) -> float:
        """Mean cross entropy of the trainable tokens, in nats; without dropout.

        Parameters
        ----------
        tokens, offsets
            As for `logits`.
        labels : int [T], optional
            Target of each position, -100: not trained on. None: the next token of the same
            sequence.

        Returns
        -------
        float
            0.0 where no token is trainable.
        """
        labels, scale = self._labels(tokens, offsets, labels)
        return self._core.loss(tokens, offsets, labels, scale=scale)

    def loss_and_gradients(
        self,
        tokens: ArrayLike,
        offsets: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        dropout_seed: int = 0,
        recompute: str | Mapping[str, int] = "none",
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """The loss and its gradient with respect to every tensor.

        Parameters
        ----------
        tokens, offsets, labels
            As for `loss`.
        dropout_seed : int
            Where `config.dropout` is above 0: which elements are dropped is a function of it and of
            the token's number.
        recompute : str or mapping
            What the forward pass drops and the backward pass computes again, to hold less memory:
            "none"; "selective", the inner activations of every layer's MLP; "full", everything but
            every layer's input; or layers per kind, ``{"layer": n, "mlp": m}``: the first n drop
            everything, the next m those of the MLP. Results are the same to the bit.

        Returns
        -------
        loss : float
            Cross entropy summed over the trainable tokens and divided by their number.
        gradients : dict of float32 arrays
            By Hugging Face name, in model order; new arrays.

        Raises
        ------
        dcp.ArgumentError
            As `loss`; and counts to recompute that are negative or more than the layers.

        Examples
        --------
        >>> import dcp
        >>> model = dcp.Model(dcp.Transformer1D(11, 8, 12, 3, 2))
        >>> loss, _ = model.loss_and_gradients([1, 2, 3], [0, 3])
        >>> model.loss_and_gradients([1, 2, 3], [0, 3], recompute="full")[0] == loss
        True
        """
        labels, scale = self._labels(tokens, offsets, labels)
        gradients = {name: np.zeros_like(array) for name, array in self._weights.items()}
        loss = self._core.forward_backward(
            tokens,
            offsets,
            labels,
            list(gradients.values()),
            scale=scale,
            dropout_seed=dropout_seed,
            recompute=_recompute(self.config, recompute),
        )
        return loss, gradients

    @staticmethod
    def _labels(
        tokens: ArrayLike, offsets: ArrayLike, labels: ArrayLike | None
    ) -> tuple[ArrayLike, float]:
        """Labels, and one over the number of those that count."""
        known = next_token_labels(tokens, offsets) if labels is None else np.asarray(labels)
        return known, 1.0 / max(int(np.count_nonzero(known != IGNORED)), 1)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: str = "cpu",
        compute_dtype: str = "float32",
    ) -> Model:
        """A model from a folder that transformers (or `save_pretrained`) wrote.

        Parameters
        ----------
        folder : path
            With `config.json` and `model.safetensors`, or `model.safetensors.index.json` and its
            shards; float32, float16 or bfloat16.
        device : str
            ``"cpu"``.
        compute_dtype : {"float32", "bfloat16"}
            As in `Transformer1D`; whatever the files hold, weights are kept in float32.

        Raises
        ------
        dcp.UnsupportedError
            The configuration asks for what dcp does not compute.
        dcp.FileError
            A file is missing or broken.
        dcp.ArgumentError
            A tensor is missing, is not of the model, or has another shape; a stored head differs
            from the embedding it is tied to.

        Examples
        --------
        >>> import dcp, tempfile
        >>> model = dcp.Model(dcp.Transformer1D(11, 8, 12, 1, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     dcp.Model.from_pretrained(folder)
        <dcp.Model of 744 parameters on cpu>
        """
        from dcp import huggingface

        path = Path(folder)
        config = Transformer1D.from_hf(huggingface.read_config(path))
        config = dataclasses.replace(config, compute_dtype=compute_dtype)
        model = cls.__new__(cls)
        model._adopt(config, _load(config, path), device)
        return model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` (float32) as transformers 4 and 5 read them.

        A tied head is stored once, as the embedding.

        Raises
        ------
        dcp.FileError
            The folder cannot be written.
        """
        from dcp import huggingface

        huggingface.write_folder(Path(folder), self.config.to_hf(), self._weights)


def _load(config: Transformer1D, folder: Path) -> dict[str, NDArray[np.float32]]:
    """The checkpoint's tensors in model order, all there, none too many."""
    from dcp import huggingface

    shapes = dict(config.tensors())
    found: dict[str, NDArray[np.float32]] = {}
    head = None
    for name, array in huggingface.read_weights(folder):
        if name in shapes:
            if array.shape != shapes[name]:
                raise ArgumentError(
                    f"{folder}: {name} has shape {array.shape}, the model's is {shapes[name]}"
                )
            found[name] = np.require(array, requirements=["C", "A", "W"])
        elif name == "lm_head.weight":
            head = array
        elif not name.endswith(".rotary_emb.inv_freq"):  # what old versions stored beside
            raise ArgumentError(f"{folder}: {name} is no tensor of this model")
    missing = [name for name in shapes if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ArgumentError(f"{folder}: {missing[0]}{more} is missing")
    if head is not None and not np.array_equal(head, found["model.embed_tokens.weight"]):
        raise ArgumentError(
            f"{folder}: lm_head.weight differs from model.embed_tokens.weight, though "
            "tie_word_embeddings says that they are one"
        )
    return {name: found[name] for name in shapes}
