"""Hugging Face's files: configurations, safetensors, and transformers' own Llama as the judge."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import dcp

CONFIG = dcp.Transformer1D(
    40, 24, 36, 2, 4, num_key_value_heads=2, rope_theta=500.0, rms_norm_eps=1e-5
)
HF_4 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 172,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "vocab_size": 512,
}
HF_5 = {key: HF_4[key] for key in HF_4.keys() - {"rope_theta", "rope_scaling", "torch_dtype"}} | {
    "dtype": "bfloat16",
    "head_dim": 16,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "transformers_version": "5.24.0",
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def write_raw(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A safetensors file with dtypes that NumPy lacks: length, JSON header, bytes."""
    header, data = {}, b""
    for name, (kind, shape, body) in tensors.items():
        offsets = [len(data), len(data) + len(body)]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        data += body
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def weights() -> dict[str, np.ndarray]:
    return {name: x.copy() for name, x in dcp.Model(CONFIG, seed=3).parameters().items()}


def test_both_ways_of_rotary_settings_read_the_same() -> None:
    old, new = dcp.Transformer1D.from_hf(HF_4), dcp.Transformer1D.from_hf(HF_5)
    assert old == new
    assert (new.rope_theta, new.head_dim, new.tie_word_embeddings) == (500000.0, 16, True)
    both = HF_4 | {"rope_parameters": HF_5["rope_parameters"]}
    assert dcp.Transformer1D.from_hf(both) == old
    plain = {key: HF_4[key] for key in HF_4.keys() - {"rope_theta"}}
    assert dcp.Transformer1D.from_hf(plain).rope_theta == 10000.0
    with pytest.raises(dcp.ArgumentError, match=r"rope_theta 500000.*rope_parameters"):
        dcp.Transformer1D.from_hf(HF_4 | {"rope_parameters": {"rope_theta": 1e4}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp 2"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(dcp.UnsupportedError, match=words):
        dcp.Transformer1D.from_hf(HF_4 | fields)


def test_harmless_fields_are_ignored() -> None:
    more = {
        "rope_scaling": {"rope_type": "default"},
        "layer_types": ["full_attention"] * 3,
        "_name_or_path": "x",
        "pad_token_id": 0,
        "hidden_act": "swish",
        "quantization_config": None,
    }
    assert dcp.Transformer1D.from_hf(HF_4 | more) == dcp.Transformer1D.from_hf(HF_4)
    with pytest.raises(dcp.ArgumentError, match="model_type"):
        dcp.Transformer1D.from_hf({"hidden_size": 64})
    with pytest.raises(dcp.ArgumentError, match="num_attention_heads 5"):
        dcp.Transformer1D.from_hf(HF_4 | {"num_attention_heads": 5})


@pytest.mark.parametrize("tie", [False, True])
def test_round_trip_is_exact(tmp_path: Path, tie: bool) -> None:
    config = dcp.Transformer1D(
        **(CONFIG.core() | {"tie_word_embeddings": tie, "attention_bias": True, "dropout": 0.1})
    )
    model = dcp.Model(config, seed=5)
    model.save_pretrained(tmp_path / "a" / "b")
    back = dcp.Model.from_pretrained(tmp_path / "a" / "b")
    assert back.config == config
    assert list(back.parameters()) == list(model.parameters())
    for name, x in model.parameters().items():
        np.testing.assert_array_equal(back.parameters()[name], x)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    back.parameters()["model.norm.weight"][0] = 3  # the arrays are ours to write


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_narrow_weights_are_widened_exactly(tmp_path: Path, kind: str) -> None:
    want, files = {}, {}
    for name, x in weights().items():
        x *= np.float32(40)
        if kind == "BF16":
            bits = (x.view(np.uint32) >> 16).astype("<u2")
            want[name], body = (bits.astype(np.uint32) << 16).view(np.float32), bits.tobytes()
        else:
            narrow = x.astype("<f2" if kind == "F16" else "<f4")
            want[name], body = narrow.astype(np.float32), narrow.tobytes()
        files[name] = (kind, x.shape, body)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    write_raw(tmp_path / "model.safetensors", files)
    got = dcp.Model.from_pretrained(tmp_path).parameters()
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x.reshape(got[name].shape))


def test_shards_by_index(tmp_path: Path) -> None:
    tensors = weights()
    names = list(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[:7],
        "model-00002-of-00002.safetensors": names[7:],
    }
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    got = dcp.Model.from_pretrained(tmp_path).parameters()
    for name, x in tensors.items():
        np.testing.assert_array_equal(got[name], x)
    index["weight_map"][names[0]] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(dcp.FileError, match=r"does not hold model.embed_tokens.weight"):
        dcp.Model.from_pretrained(tmp_path)
    index["weight_map"][names[0]] = "model-00003-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(dcp.FileError, match="model-00003"):
        dcp.Model.from_pretrained(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = weights()
    missing = {k: x for k, x in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"}
    write(tmp_path, CONFIG.to_hf(), missing)
    with pytest.raises(dcp.ArgumentError, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        dcp.Model.from_pretrained(tmp_path)
    write(tmp_path, CONFIG.to_hf(), tensors | {"model.layers.2.mlp.up_proj.weight": np.zeros(3)})
    with pytest.raises(dcp.UnsupportedError, match=r"layers.2.mlp.up_proj.weight.*F64"):
        dcp.Model.from_pretrained(tmp_path)
    extra = {"model.layers.2.mlp.up_proj.weight": np.zeros(3, np.float32)}
    write(tmp_path, CONFIG.to_hf(), tensors | extra)
    with pytest.raises(dcp.ArgumentError, match=r"model.layers.2.mlp.up_proj.weight is no tensor"):
        dcp.Model.from_pretrained(tmp_path)
    write(tmp_path, CONFIG.to_hf(), tensors | {"model.norm.weight": np.zeros(25, np.float32)})
    with pytest.raises(dcp.ArgumentError, match=r"model.norm.weight has shape \(25,\).*\(24,\)"):
        dcp.Model.from_pretrained(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)}
    write(tmp_path, CONFIG.to_hf(), tensors | old)
    dcp.Model.from_pretrained(tmp_path)


def test_tied_head_is_stored_once_and_must_agree(tmp_path: Path) -> None:
    """Case F-06: one storage after loading; stored copies that differ are an error."""
    config = dcp.Transformer1D(**(CONFIG.core() | {"tie_word_embeddings": True}))
    model = dcp.Model(config, seed=1)
    tensors = model.parameters()
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].copy()
    write(tmp_path, config.to_hf(), tensors | {"lm_head.weight": head})
    loaded = dcp.Model.from_pretrained(tmp_path)
    assert list(loaded.parameters()) == list(tensors)
    head[7, 3] += 1
    write(tmp_path, config.to_hf(), tensors | {"lm_head.weight": head})
    with pytest.raises(dcp.ArgumentError, match=r"lm_head.weight differs.*tie_word_embeddings"):
        dcp.Model.from_pretrained(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(dcp.FileError, match="nowhere"):
        dcp.Model.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{half")
    with pytest.raises(dcp.FileError, match="not JSON"):
        dcp.Model.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(dcp.FileError, match=r"neither model.safetensors nor"):
        dcp.Model.from_pretrained(tmp_path)
    dcp.Model(CONFIG).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(dcp.FileError, match="not a readable safetensors file"):
        dcp.Model.from_pretrained(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(dcp.FileError, match="file"):
        dcp.Model(CONFIG).save_pretrained(tmp_path / "file")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 1, "rope_theta": 1000.0},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "num_key_value_heads": 2},
    ],
)
def test_transformers_agrees(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Logits, loss and gradients of transformers' Llama, and our export opens there."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 172}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    hf_config = transformers.LlamaConfig(**(sizes | depth | fields))
    judge = transformers.LlamaForCausalLM(hf_config).float().eval()
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.normal_(0, 0.08).add_(1.0 if parameter.dim() == 1 else 0.0)
    judge.save_pretrained(tmp_path / "theirs")
    model = dcp.Model.from_pretrained(tmp_path / "theirs")

    lengths = [1, 40, 2, 77]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = torch.randint(0, 300, (sum(lengths),))
    want = torch.cat([judge(tokens[None, a:b]).logits[0] for a, b in itertools.pairwise(offsets)])
    got = model.logits(tokens.numpy(), offsets)
    theirs = want.detach().numpy()
    assert np.abs(got - theirs).max() <= 1e-5 * np.abs(theirs).max()

    labels = torch.full((sum(lengths),), -100)
    for a, b in itertools.pairwise(offsets):
        labels[a : b - 1] = tokens[a + 1 : b]
    loss = torch.nn.functional.cross_entropy(want, labels)
    loss.backward()
    our_loss, gradients = model.loss_and_gradients(tokens.numpy(), offsets)
    assert our_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in judge.named_parameters():
        reference = parameter.grad.numpy()
        assert np.abs(gradients[name] - reference).max() <= 1e-4 * np.abs(reference).max(), name

    model.save_pretrained(tmp_path / "ours")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").float()
    assert back.config.rope_parameters["rope_theta"] == model.config.rope_theta
    for name, tensor in judge.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
