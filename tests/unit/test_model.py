"""Transformer1D against the float64 reference, and what must not change its results."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ref import Reference

import dcp
from dcp import _dcp, models

Arrays = dict[str, np.ndarray]


def random_weights(config: dcp.Transformer1D, rng: np.random.Generator) -> Arrays:
    """Weights of unit gain; norms around 1, biases not 0."""
    weights = {}
    for name, shape in config.tensors():
        x = rng.normal(size=shape)
        if "norm" in name:
            x = 1 + 0.2 * x
        elif len(shape) == 1:
            x = 0.3 * x
        elif "embed" not in name:
            x = x / np.sqrt(shape[1])
        weights[name] = x.astype(np.float32)
    return weights


def make_model(config: dcp.Transformer1D, seed: int = 0, device: str = "cpu") -> dcp.Model:
    model = dcp.Model(config, device=device)
    for name, x in random_weights(config, np.random.default_rng(seed)).items():
        model.parameters()[name][:] = x
    return model


def make_batch(config: dcp.Transformer1D, lengths: list[int], seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    labels = rng.integers(0, config.vocab_size, count)
    labels[rng.random(count) < 0.2] = -100
    return {
        "tokens": rng.integers(0, config.vocab_size, count),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "labels": labels,
    }


def accumulate(
    model: dcp.Model, batches: list[dict[str, Any]], gradients: Arrays | None = None, **more: Any
) -> tuple[float, Arrays]:
    """Loss and gradients of several micro-batches through the core, which adds them up."""
    core = _dcp.Model(model.config.core(), list(model.parameters().values()), device=model.device)
    if gradients is None:
        gradients = {name: np.zeros_like(x) for name, x in model.parameters().items()}
    loss = sum(
        core.forward_backward(gradients=list(gradients.values()), **(more | batch))
        for batch in batches
    )
    return loss, gradients


def assert_close(
    got: Arrays, want: Arrays, tolerance: float = 1e-5, plain: Arrays | None = None
) -> None:
    """Promise 1: the error of each tensor relative to its norm. Where the case is so badly
    conditioned that the textbook computation in float32 (`plain`) errs more, three times as much
    as that. The last term is the rounding of tensors whose true gradient is zero."""
    whole = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in want.values()))
    for name, x in want.items():
        error = np.linalg.norm(got[name].astype(np.float64) - x)
        rounding = 0.0 if plain is None else 3 * np.linalg.norm(plain[name].astype(np.float64) - x)
        limit = max(tolerance * np.linalg.norm(x), rounding)
        assert error <= limit + 0.1 * tolerance * whole, name


def assert_same(got: Arrays, want: Arrays) -> None:
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL = dcp.Transformer1D(
    29, 24, 20, 2, 4, num_key_value_heads=2, head_dim=10, attention_bias=True, mlp_bias=True
)


EITHER = ("float32", "bfloat16")


@st.composite
def configs(draw: st.DrawFn, *compute_dtypes: str) -> dcp.Transformer1D:
    """Small models; without arguments they compute in float32."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    return dcp.Transformer1D(
        vocab_size=draw(st.integers(1, 70)),
        hidden_size=heads * draw(st.integers(-(-8 // heads), 12)),  # a norm of less is a sign
        intermediate_size=draw(st.integers(1, 50)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 32)),
        rope_theta=draw(st.sampled_from([10.0, 10000.0, 500000.0])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        compute_dtype=draw(st.sampled_from(compute_dtypes or ("float32",))),
    )


LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 16, 33, 65]), max_size=5)


@settings(max_examples=50, deadline=None)
@given(config=configs(), lengths=LENGTHS, seed=st.integers(0, 99), weighted=st.booleans())
@example(config=SMALL, lengths=[3, 0, 70, 1], seed=0, weighted=True)
def test_loss_and_gradients_match_reference(
    config: dcp.Transformer1D, lengths: list[int], seed: int, weighted: bool
) -> None:
    model = make_model(config, seed)
    batch = make_batch(config, lengths, seed)
    extra: dict[str, Any] = {"scale": 0.37}
    if weighted:
        extra["weights"] = np.random.default_rng(seed).random(sum(lengths), np.float32)
    want_loss, want = Reference(config, model.parameters()).loss_and_gradients(**batch, **extra)
    _, plain = Reference(config, model.parameters(), np.float32).loss_and_gradients(
        **batch, **extra
    )
    assert all(x.dtype == np.float32 for x in plain.values())
    loss, gradients = accumulate(model, [batch], **extra)
    assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-7)
    assert_close(gradients, want, plain=plain)


@settings(max_examples=25, deadline=None)
@given(config=configs(), lengths=LENGTHS, seed=st.integers(0, 99))
def test_logits_match_reference(config: dcp.Transformer1D, lengths: list[int], seed: int) -> None:
    model = make_model(config, seed)
    batch = make_batch(config, lengths, seed)
    want = Reference(config, model.parameters()).logits(batch["tokens"], batch["offsets"])
    got = model.logits(batch["tokens"], batch["offsets"])
    assert got.dtype == np.float32 and got.shape == want.shape
    plain = Reference(config, model.parameters(), np.float32).logits(
        batch["tokens"], batch["offsets"]
    )
    limit = max(1e-5 * np.abs(want).max(initial=0), 3 * np.abs(plain - want).max(initial=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def test_public_loss_is_the_mean_over_trainable_tokens() -> None:
    model, batch = make_model(SMALL), make_batch(SMALL, [5, 1, 0, 9])
    want, gradients = Reference(SMALL, model.parameters()).loss_and_gradients(**batch)
    loss, got = model.loss_and_gradients(**batch)
    assert loss == pytest.approx(want, rel=1e-5)
    assert model.loss(**batch) == pytest.approx(loss, rel=1e-6)
    assert_close(got, gradients)
    # without labels: the next token of the same sequence
    plain = {key: batch[key] for key in ("tokens", "offsets")}
    labels = np.full(15, -100)
    labels[:4] = plain["tokens"][1:5]
    labels[6:14] = plain["tokens"][7:15]
    assert model.loss(**plain) == model.loss(**plain, labels=labels)
    assert_same(
        model.loss_and_gradients(**plain)[1], model.loss_and_gradients(**plain, labels=labels)[1]
    )


def test_long_sequences_and_many_chunks_match_reference() -> None:
    """More tokens than one chunk of logits holds; an untrained stretch is passed over."""
    config = dcp.Transformer1D(2500, 16, 24, 1, 2, max_position_embeddings=800)
    model, batch = make_model(config), make_batch(config, [700, 1, 300])
    batch["labels"][419:838] = -100  # the second chunk of 419 rows
    want_loss, want = Reference(config, model.parameters()).loss_and_gradients(**batch)
    loss, got = model.loss_and_gradients(**batch)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_close(got, want)
    logits = model.logits(batch["tokens"], batch["offsets"])
    want_logits = Reference(config, model.parameters()).logits(batch["tokens"], batch["offsets"])
    np.testing.assert_allclose(logits, want_logits, atol=1e-5 * np.abs(want_logits).max())


@pytest.mark.parametrize("changed", [0, 1])
def test_packed_sequences_do_not_see_each_other(changed: int) -> None:
    """Case A-08: another content of one sequence changes the other's results by exactly 0."""
    model, batch = make_model(SMALL), make_batch(SMALL, [30, 50])
    rows = slice(0, 30) if changed == 0 else slice(30, 80)
    kept = slice(30, 80) if changed == 0 else slice(0, 30)
    batch["labels"][rows] = -100
    other = batch | {"tokens": batch["tokens"].copy()}
    other["tokens"][rows] = (other["tokens"][rows] + 1) % SMALL.vocab_size
    before = model.logits(batch["tokens"], batch["offsets"])
    after = model.logits(other["tokens"], other["offsets"])
    np.testing.assert_array_equal(before[kept], after[kept])
    assert np.abs(before[rows] - after[rows]).max() > 0
    loss, gradients = accumulate(model, [batch])
    loss_other, gradients_other = accumulate(model, [other])
    assert loss == loss_other
    assert_same(gradients_other, gradients)
    # and each equals running it alone
    alone = model.logits(batch["tokens"][kept], [0, kept.stop - kept.start])
    np.testing.assert_allclose(before[kept], alone, rtol=0, atol=1e-6 * np.abs(alone).max())
    single = {key: batch[key][kept] for key in ("tokens", "labels")}
    single["offsets"] = np.array([0, kept.stop - kept.start])
    assert_close(gradients, accumulate(model, [single])[1])


def test_padding_as_one_untrained_sequence_changes_nothing() -> None:
    """Case A-06: 8 real tokens and 24 of padding."""
    model, real = make_model(SMALL), make_batch(SMALL, [8])
    padded = {
        "tokens": np.concatenate([real["tokens"], np.zeros(24, np.int64)]),
        "offsets": np.array([0, 8, 32]),
        "labels": np.concatenate([real["labels"], np.full(24, -100)]),
    }
    loss, gradients = accumulate(model, [real])
    loss_padded, gradients_padded = accumulate(model, [padded])
    assert loss_padded == pytest.approx(loss, rel=1e-6)
    assert_close(gradients_padded, gradients, 1e-6)


def test_micro_batches_add_up_to_one_batch() -> None:
    """Cases L-01, L-02: samples of 11 and 101 tokens, the first of each untrained: each token
    weighs 1/110 however they are dealt, and never 1/20 and 1/200."""
    model = make_model(SMALL)
    both = make_batch(SMALL, [11, 101])
    both["labels"] = np.where(both["labels"] < 0, 0, both["labels"])
    both["labels"][[0, 11]] = -100
    parts = [
        {"tokens": both["tokens"][a:b], "labels": both["labels"][a:b], "offsets": [0, b - a]}
        for a, b in ((0, 11), (11, 112))
    ]
    want_loss, want = Reference(SMALL, model.parameters()).loss_and_gradients(**both)
    for batches in ([both], parts, parts[::-1]):
        loss, gradients = accumulate(model, batches, scale=1 / 110)
        assert loss == pytest.approx(want_loss, rel=1e-5)
        assert_close(gradients, want)
    mean_of_means = np.mean([model.loss(**part) for part in parts])
    assert abs(mean_of_means - want_loss) > 1e-3


def test_every_micro_batch_reaches_the_gradient() -> None:
    """Case L-05: 32 micro-batches, not the first only."""
    model, batch = make_model(SMALL), make_batch(SMALL, [4, 3])
    _, once = accumulate(model, [batch])
    _, often = accumulate(model, [batch] * 32)
    assert_close(often, {name: 32.0 * x for name, x in once.items()}, 1e-5)


def test_nothing_to_train_on_changes_nothing() -> None:
    """Case L-06: labels that are all ignored, and no tokens at all."""
    model, batch = make_model(SMALL), make_batch(SMALL, [4, 3])
    batch["labels"][:] = -100
    empty = make_batch(SMALL, [0, 0])
    nothing = {"tokens": [], "offsets": [0], "labels": []}
    gradients = {name: np.full_like(x, 7) for name, x in model.parameters().items()}
    loss, got = accumulate(model, [batch, empty, nothing], gradients)
    assert loss == 0
    assert all(np.all(x == 7) for x in got.values())
    loss, got = model.loss_and_gradients(**batch)
    assert loss == 0 and not any(x.any() for x in got.values())
    assert model.loss(**batch) == 0
    assert model.loss([3], [0, 1]) == 0  # one token has no next
    assert model.logits([], [0]).shape == (0, SMALL.vocab_size)


def test_weights_per_token_give_sequence_means() -> None:
    """Case L-07: target tokens 8, 2, 2. Weights 1/(N_i M) weigh sequences equally."""
    model, batch = make_model(SMALL), make_batch(SMALL, [8, 2, 2])
    batch["labels"] = np.where(batch["labels"] < 0, 0, batch["labels"])
    logits = model.logits(batch["tokens"], batch["offsets"]).astype(np.float64)
    lse = np.log(np.exp(logits).sum(axis=1))
    losses = lse - logits[np.arange(12), batch["labels"]]
    means = [losses[:8].mean(), losses[8:10].mean(), losses[10:].mean()]
    weights = np.repeat(np.float32([1 / 8, 1 / 2, 1 / 2]), [8, 2, 2])
    loss, _ = accumulate(model, [batch], weights=weights, scale=1 / 3)
    assert loss == pytest.approx(np.mean(means), rel=1e-5)
    assert model.loss(**batch) == pytest.approx(losses.mean(), rel=1e-5)
    # dealt into packs {1}, {2, 3}: still the mean over sequences, not over packs
    packs = [(0, 8, [0, 8]), (8, 12, [0, 2, 4])]
    dealt = sum(
        accumulate(
            model,
            [{"tokens": batch["tokens"][a:b], "labels": batch["labels"][a:b], "offsets": offsets}],
            weights=weights[a:b],
            scale=1 / 3,
        )[0]
        for a, b, offsets in packs
    )
    assert dealt == pytest.approx(loss, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(config=configs(*EITHER), lengths=LENGTHS, dropout=st.sampled_from([0.0, 0.3]))
def test_late_device_gives_the_same_bits(
    config: dcp.Transformer1D, lengths: list[int], dropout: float
) -> None:
    """A queue that holds everything back until the fence: nothing is read or reused too early."""
    config = dcp.Transformer1D(**(config.core() | {"dropout": dropout}))
    model, late = make_model(config), make_model(config, device="late")
    batches = [make_batch(config, lengths), make_batch(config, [5, 80])]
    loss, gradients = accumulate(model, batches, dropout_seed=5)
    loss_late, gradients_late = accumulate(late, batches, dropout_seed=5)
    assert loss == loss_late
    assert_same(gradients_late, gradients)
    for batch in batches:
        assert model.loss(**batch) == late.loss(**batch)
        np.testing.assert_array_equal(
            model.logits(batch["tokens"], batch["offsets"]),
            late.logits(batch["tokens"], batch["offsets"]),
        )


def choices(layers: int) -> list[tuple[int, int]]:
    return [(n, m) for n in range(layers + 1) for m in range(layers + 1 - n)]


@settings(max_examples=25, deadline=None)
@given(
    config=configs(*EITHER),
    layers=st.integers(1, 4),
    lengths=LENGTHS,
    dropout=st.sampled_from([0.0, 0.3]),
    device=st.sampled_from(["cpu", "late"]),
)
@example(config=SMALL, layers=4, lengths=[30, 0, 70, 1], dropout=0.3, device="late")
def test_recomputing_changes_no_bit(
    config: dcp.Transformer1D, layers: int, lengths: list[int], dropout: float, device: str
) -> None:
    """Case F-10: whatever layers and MLPs are dropped, loss and gradients are those of none. The
    same model goes from choice to choice and back, so nothing of one is left for the next."""
    config = dcp.Transformer1D(
        **(config.core() | {"dropout": dropout, "num_hidden_layers": layers})
    )
    model = make_model(config)
    batch = make_batch(config, lengths) | {"dropout_seed": 5, "scale": 0.3}
    want_loss, want = accumulate(model, [batch])
    core = _dcp.Model(config.core(), list(model.parameters().values()), device=device)
    for counts in [*choices(layers), (0, 0)]:
        got = {name: np.zeros_like(x) for name, x in want.items()}
        loss = core.forward_backward(gradients=list(got.values()), recompute=counts, **batch)
        assert loss == want_loss, counts
        assert_same(got, want)


def test_recompute_by_name() -> None:
    model, batch = make_model(SMALL), make_batch(SMALL, [9, 30])
    loss, want = model.loss_and_gradients(**batch)
    for recompute in ("none", "selective", "full", {"mlp": 1, "layer": 1}, {}):
        got_loss, got = model.loss_and_gradients(**batch, recompute=recompute)
        assert got_loss == loss
        assert_same(got, want)


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ({"layer": 3}, r"layer: 3, mlp: 0.*2 layers"),
        ({"layer": 1, "mlp": 2}, r"layer: 1, mlp: 2"),
        ({"mlp": -1}, r"mlp: -1"),
        ({"attention": 1}, "attention"),
        ("most", "'most'"),
    ],
)
def test_bad_recompute_is_named(recompute: Any, words: str) -> None:
    model, batch = make_model(SMALL), make_batch(SMALL, [9])
    with pytest.raises(dcp.ArgumentError, match=words):
        model.loss_and_gradients(**batch, recompute=recompute)
    with pytest.raises(dcp.ArgumentError, match=words):
        SMALL.activation_bytes(100, recompute=recompute)


@settings(max_examples=30, deadline=None)
@given(config=configs(*EITHER), layers=st.integers(1, 8), tokens=st.integers(0, 5000))
def test_promised_bytes_are_monotone(config: dcp.Transformer1D, layers: int, tokens: int) -> None:
    """Case P-09: the estimate knows what is recomputed; more tokens or layers never hold less."""
    core = config.core()
    config = dcp.Transformer1D(**(core | {"num_hidden_layers": layers}))
    deeper = dcp.Transformer1D(**(core | {"num_hidden_layers": layers + 1}))
    held = {counts: config.activation_bytes(tokens, recompute=counts) for counts in choices(layers)}
    named = [config.activation_bytes(tokens, recompute=r) for r in ("none", "selective", "full")]
    assert named == [held[0, 0], held[0, layers], held[layers, 0]]
    assert named == sorted(named, reverse=True)
    for (n, m), value in held.items():
        assert value <= held.get((n - 1, m), value), "another layer dropped"
        assert value <= held.get((n, m - 1), value), "another MLP dropped"
        assert value <= config.activation_bytes(tokens + 1, recompute=(n, m))
        assert value <= deeper.activation_bytes(tokens, recompute=(n, m))
    saved = named[0] - named[2]
    part = 4 * (config.hidden_size + 2 * config.intermediate_size)
    assert saved >= (layers - 1) * tokens * part  # and what attention keeps
    assert held[min(1, layers), 0] == named[0]  # the only one to use its place keeps it


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield _dcp.set_num_threads
    _dcp.set_num_threads(_dcp.cpu_info()["cores"])


@pytest.mark.parametrize("compute_dtype", EITHER)
def test_thread_count_does_not_change_bits(
    threads: Callable[[int], None], compute_dtype: str
) -> None:
    config = dcp.Transformer1D(
        300, 64, 96, 2, 4, num_key_value_heads=2, dropout=0.1, compute_dtype=compute_dtype
    )
    batch = make_batch(config, [150, 1, 200])
    results = []
    model = make_model(config)
    for count in (1, 2, 3):
        threads(count)
        results.append(model.loss_and_gradients(**batch))
    for loss, gradients in results[1:]:
        assert loss == results[0][0]
        assert_same(gradients, results[0][1])


def test_rotary_table_grows() -> None:
    """A longer sequence after a short one, and the short one again."""
    config = dcp.Transformer1D(40, 16, 16, 1, 2, max_position_embeddings=700)
    model = make_model(config)
    rng = np.random.default_rng(0)
    short, long = rng.integers(0, 40, 7), rng.integers(0, 40, 700)
    first = model.logits(short, [0, 7])
    want = Reference(config, model.parameters()).logits(long, [0, 700])
    np.testing.assert_allclose(model.logits(long, [0, 700]), want, atol=2e-5 * np.abs(want).max())
    np.testing.assert_array_equal(model.logits(short, [0, 7]), first)
    with pytest.raises(dcp.ArgumentError, match=r"701 tokens.*max_position_embeddings 700"):
        model.logits(np.zeros(701, int), [0, 701])


def test_weights_written_between_calls_count() -> None:
    """Packed copies are made again: views are the weights."""
    model, batch = make_model(SMALL), make_batch(SMALL, [9])
    before = model.loss(**batch)
    for x in model.parameters().values():
        x *= np.float32(0.5)
    halved = Reference(SMALL, model.parameters()).loss_and_gradients(**batch)[0]
    assert model.loss(**batch) == pytest.approx(halved, rel=1e-5)
    assert abs(before - halved) > 1e-3


class TestDropout:
    CONFIG = dcp.Transformer1D(31, 24, 20, 2, 2, dropout=0.4)

    def test_matches_reference_under_the_same_masks(self) -> None:
        """Both residual branches of every layer drop, site 2 * layer + place; backward alike."""
        config, (rows, width) = self.CONFIG, (50, self.CONFIG.hidden_size)
        row_ids = np.random.default_rng(1).permutation(1000)[:rows]

        def masks(layer: int, place: int) -> np.ndarray:
            out = np.empty((rows, width), np.float32)
            fields = {"x": np.ones_like(out), "out": out, "row_ids": row_ids, "p": config.dropout}
            fields |= {"rows": rows, "width": width, "seed": 2**40 + 7, "site": 2 * layer + place}
            _dcp.kernel_run("dropout", fields)
            return out

        assert 0.3 < np.mean(masks(0, 0) == 0) < 0.5
        model, batch = make_model(config), make_batch(config, [20, 30])
        loss, gradients = accumulate(
            model, [batch], row_ids=row_ids, dropout_seed=2**40 + 7, scale=0.1
        )
        want_loss, want = Reference(config, model.parameters()).loss_and_gradients(
            **batch, scale=0.1, masks=masks
        )
        assert loss == pytest.approx(want_loss, rel=1e-5)
        assert_close(gradients, want)

    def test_is_a_function_of_seed_and_row(self) -> None:
        model, batch = make_model(self.CONFIG), make_batch(self.CONFIG, [20, 30])
        same = [accumulate(model, [batch], dropout_seed=3) for _ in range(2)]
        assert same[0][0] == same[1][0]
        assert_same(same[0][1], same[1][1])
        assert accumulate(model, [batch], dropout_seed=4)[0] != same[0][0]
        assert (
            accumulate(model, [batch], row_ids=np.arange(50) + 1, dropout_seed=3)[0] != same[0][0]
        )
        assert model.loss(**batch) != same[0][0]  # none without training

    def test_dealt_otherwise_draws_alike(self) -> None:
        """Case F-10 for micro-batches: row numbers of the step go along."""
        model, batch = make_model(self.CONFIG), make_batch(self.CONFIG, [20, 30])
        loss, gradients = accumulate(model, [batch], dropout_seed=3)
        parts = [
            {
                "tokens": batch["tokens"][a:b],
                "labels": batch["labels"][a:b],
                "offsets": [0, b - a],
                "row_ids": np.arange(a, b),
            }
            for a, b in ((20, 50), (0, 20))
        ]
        loss_parts, gradients_parts = accumulate(model, parts, dropout_seed=3)
        assert loss_parts == pytest.approx(loss, rel=1e-6)
        assert_close(gradients_parts, gradients)


def test_initial_values_are_a_function_of_seed_tensor_element() -> None:
    config = dcp.Transformer1D(50, 32, 40, 2, 4, attention_bias=True)
    core, tensors = config.core(), config.tensors()
    model = dcp.Model(config, seed=9)
    rng = np.random.default_rng(0)
    for index, (name, shape) in enumerate(tensors):
        whole = model.parameters()[name].ravel()
        cuts = np.sort(rng.integers(0, len(whole) + 1, 5)).tolist()
        parts = [
            _dcp.transformer1d_initial(core, index, 9, a, b - a)
            for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        if "norm" in name:
            assert np.all(whole == 1)
        elif len(shape) == 1:
            assert not whole.any()
        else:
            spread = 0.02 / 2 if "o_proj" in name or "down_proj" in name else 0.02
            assert whole.std() == pytest.approx(spread, rel=0.1)
            assert abs(whole.mean()) < 0.15 * spread
            other = _dcp.transformer1d_initial(core, index, 10, 0, len(whole))
            assert abs(np.corrcoef(whole, other)[0, 1]) < 0.1
    q = [model.parameters()[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2)]
    assert abs(np.corrcoef(q[0].ravel(), q[1].ravel())[0, 1]) < 0.1


PUBLISHED = {
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    assert dcp.Transformer1D.preset(name).parameter_count() == PUBLISHED[name]


def test_presets_are_whole() -> None:
    for name in dcp.Transformer1D.presets():
        config = dcp.Transformer1D.preset(name)
        assert config == dcp.Transformer1D(**config.core())
        assert 0 < models.preset_lr(name) < 0.1
    assert dcp.Transformer1D.preset("tiny", num_attention_heads=2, hidden_size=64).head_dim == 32
    with pytest.raises(dcp.ArgumentError, match=r"'tny'.*'tiny'"):
        dcp.Transformer1D.preset("tny")


def test_tensor_names_and_groups() -> None:
    names = [name for name, _ in SMALL.tensors()]
    assert names[0] == "model.embed_tokens.weight"
    assert names[1] == "model.layers.0.input_layernorm.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert "model.layers.1.self_attn.o_proj.bias" in names
    assert "model.layers.1.mlp.down_proj.bias" in names
    assert len(set(names)) == len(names) == 1 + 2 * 16 + 2
    tied = dcp.Transformer1D(29, 24, 20, 1, 4, tie_word_embeddings=True)
    assert [name for name, _ in tied.tensors()][-1] == "model.norm.weight"
    assert [group for group, _ in SMALL.groups()] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm",
    ]  # fmt: skip
    assert [name for _, group in SMALL.groups() for name in group] == names


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 25}, "num_attention_heads 4 must divide hidden_size 25"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"hidden_size": -8}, "hidden_size -8"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"intermediate_size": 2**70}, "intermediate_size"),
        ({"rope_theta": 0.0}, "rope_theta 0"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1"),
        ({"dropout": 1.0}, "dropout 1"),
        ({"initializer_range": -0.1}, "initializer_range"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0"),
    ],
)
def test_bad_configurations_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=words):
        dcp.Transformer1D(**(SIZES | fields))


def test_heads_beyond_the_kernels_are_named() -> None:
    with pytest.raises(dcp.UnsupportedError, match="head_dim 258"):
        dcp.Transformer1D(**SIZES, head_dim=258)
    assert dcp.Transformer1D(**SIZES, head_dim=256).head_dim == 256


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 24.0}, "hidden_size 24.0 must be an integer"),
        ({"num_attention_heads": "4"}, "num_attention_heads '4'"),
        ({"vocab_size": True}, "vocab_size True"),
        ({"rope_theta": "big"}, "rope_theta 'big' must be a number"),
        ({"mlp_bias": 1}, "mlp_bias 1 must be True or False"),
    ],
)
def test_wrong_types_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(dcp.DTypeError, match=words):
        dcp.Transformer1D(**(SIZES | fields))


@pytest.mark.parametrize(
    ("tokens", "offsets", "labels", "error", "words"),
    [
        ([1, 29], [0, 2], None, dcp.ArgumentError, r"tokens\[1\] 29 must lie in 0..28"),
        ([-1, 2], [0, 2], None, dcp.ArgumentError, r"tokens\[0\] -1"),
        ([1, 2], [0, 3], None, dcp.ArgumentError, "last offset 3"),
        ([1, 2], [0, 1], None, dcp.ArgumentError, "last offset 1"),
        ([1, 2], [1, 2], None, dcp.ArgumentError, r"offsets\[0\] 1"),
        ([1, 2], [0, 2, 1, 2], None, dcp.ArgumentError, r"offsets\[2\] 1"),
        ([1, 2], [0, -1, 2], None, dcp.ArgumentError, r"offsets\[1\] -1"),
        ([1, 2], [], None, dcp.ArgumentError, "offsets"),
        ([1, 2], [0, 2], [5, 29], dcp.ArgumentError, r"labels\[1\] 29"),
        ([1, 2], [0, 2], [5, -1], dcp.ArgumentError, r"labels\[1\] -1"),
        ([1, 2], [0, 2], [5], dcp.ArgumentError, "labels has 1 items, tokens has 2"),
        ([1, 2], [0, 2], [5.0, 1.0], dcp.DTypeError, "labels must be integers"),
        ([1.0, 2.0], [0, 2], None, dcp.DTypeError, "tokens must be integers"),
        ([1, 2], [0.0, 2.0], None, dcp.DTypeError, "offsets"),
        ([[1, 2]], [0, 2], [1, 2], dcp.ArgumentError, "tokens must be 1-D"),
        ([2**40, 2], [0, 2], None, dcp.ArgumentError, "tokens.*does not fit int32"),
    ],
)
def test_bad_batches_are_named(
    tokens: Any, offsets: Any, labels: Any, error: type[Exception], words: str
) -> None:
    model = make_model(SMALL)
    for call in (model.loss, model.loss_and_gradients):
        with pytest.raises(error, match=words):
            call(tokens, offsets, labels)
    if labels is None:
        with pytest.raises(error, match=words):
            model.logits(tokens, offsets)


@pytest.mark.parametrize("dtype", ["u1", "i2", "<i4", ">i4", "u4", "i8", ">u8"])
def test_any_integer_dtype_will_do(dtype: str) -> None:
    """Cases A-05, E-05, E-04: any width and byte order, lists, read-only arrays."""
    model, batch = make_model(SMALL), make_batch(SMALL, [3, 4])
    want = model.logits(**{key: batch[key] for key in ("tokens", "offsets")})
    tokens, offsets = (batch[key].astype(dtype) for key in ("tokens", "offsets"))
    tokens.flags.writeable = False
    np.testing.assert_array_equal(model.logits(tokens, offsets), want)
    np.testing.assert_array_equal(model.logits(tokens.tolist(), offsets.tolist()), want)
    np.testing.assert_array_equal(model.logits(np.repeat(tokens, 2)[::2], offsets), want)


def test_arrays_of_the_core_are_checked() -> None:
    core = SMALL.core()
    weights = list(make_model(SMALL).parameters().values())
    with pytest.raises(dcp.ArgumentError, match="weights has 34 arrays"):
        _dcp.Model(core, weights[:-1])
    with pytest.raises(dcp.DTypeError, match=r"embed_tokens.*float32"):
        _dcp.Model(core, [weights[0].astype(np.float64), *weights[1:]])
    with pytest.raises(dcp.ArgumentError, match=r"dimension 0 of model.embed_tokens.weight"):
        _dcp.Model(core, [weights[0][1:], *weights[1:]])
    with pytest.raises(dcp.ArgumentError, match='device "tpu"'):
        _dcp.Model(core, weights, device="tpu")
    with pytest.raises(dcp.ArgumentError, match="key mlp_bias"):
        _dcp.transformer1d_check({key: x for key, x in core.items() if key != "mlp_bias"})
    with pytest.raises(dcp.ArgumentError, match="keys"):
        _dcp.transformer1d_check(core | {"window": 3})
    model = _dcp.Model(core, weights)
    batch = make_batch(SMALL, [2])
    read_only = [x.copy() for x in weights]
    read_only[3].flags.writeable = False
    with pytest.raises(dcp.ArgumentError, match=r"q_proj.bias.*read-only"):
        model.forward_backward(gradients=read_only, **batch)


def test_one_thread_at_a_time() -> None:
    """A second thread gets an error or waits its turn; never a wrong number."""
    model, batch = make_model(dcp.Transformer1D.preset("tiny")), None
    batch = make_batch(model.config, [300])
    want = model.loss(**batch)
    seen: list[Any] = []

    def call() -> None:
        for _ in range(3):
            try:
                seen.append(model.loss(**batch))
            except dcp.StateError as error:
                assert "thread" in str(error)

    workers = [threading.Thread(target=call) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen and set(seen) == {want}


def test_models_of_several_threads_share_the_pool() -> None:
    """One process, one pool: computing calls follow each other, whatever thread they come from."""
    models_ = [make_model(SMALL, seed) for seed in range(3)]
    batch = make_batch(SMALL, [60, 30, 5])
    want = [model.loss_and_gradients(**batch) for model in models_]
    seen: list[bool] = []

    def call(number: int) -> None:
        for _ in range(20):
            loss, gradients = models_[number].loss_and_gradients(**batch)
            same = all(np.array_equal(gradients[name], x) for name, x in want[number][1].items())
            seen.append(loss == want[number][0] and same)

    workers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == [True] * 60


@pytest.mark.parametrize("module", ["models", "huggingface"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(__import__(f"dcp.{module}", fromlist=["x"]))
    assert result.attempted > 0 and result.failed == 0
