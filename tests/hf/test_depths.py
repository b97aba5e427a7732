"""Multi-token prediction: its tensors are kept, though transformers leaves them out."""

import pytest
import torch
from tests.hf.folders import add_depth, change_tensors, deepseek, load, qwen3_next
from tests.hf.test_checkpoint import assert_same_tensors, copy, tensors_of
from tests.hf.test_logits import our_decoder
from tests.lazy import transformers

from longshore.batch import whole_context
from longshore.hf.checkpoint import open_weights
from longshore.hf.config_file import read_config
from longshore.model.norm_rope import rope_tables


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("copies", [True, False])
def test_the_tensors_of_a_depth_are_kept(tmp_path, copies, tied):
    base, made = tmp_path / "base", tmp_path / "made"
    deepseek(base, tie_word_embeddings=tied)
    assert read_config(base).mtp == ()
    add_depth(base, copies=copies)
    config = read_config(base)
    assert config.mtp == config.layers[-1:]
    copy(base, made)
    assert_same_tensors(base, made)
    assert ("model.layers.3.embed_tokens.weight" in tensors_of(made)) == copies
    assert (made / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_depth_needs_all_of_its_tensors(tmp_path):
    deepseek(tmp_path)
    add_depth(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.3.hnorm.weight"))
    with pytest.raises(ValueError, match=r"missing model\.layers\.3\.hnorm\.weight$"):
        open_weights(tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_depth_has_no_other_embedding_or_head(tmp_path, name):
    deepseek(tmp_path)
    add_depth(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors[f"model.layers.3.{name}.weight"].add_(1))
    with pytest.raises(
        ValueError, match=rf"share embedding and head, but model\.layers\.3\.{name}"
    ):
        open_weights(tmp_path)


def add_next_depth(folder):
    """Tensors of multi-token prediction, as the public Qwen3-Next names them."""

    def add(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("model.layers.1", "mtp.layers.0")] = tensors[name] * 2
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{name}.weight"] = torch.randn(32)
        tensors["mtp.fc.weight"] = torch.randn(32, 64)

    change_tensors(folder, add)


def test_the_depth_of_qwen3_next_is_kept(tmp_path):
    base, made = tmp_path / "base", tmp_path / "made"
    qwen3_next(base)
    assert read_config(base).mtp == ()
    add_next_depth(base)
    config = read_config(base)
    assert config.mtp == config.layers[1:2]
    copy(base, made)
    assert_same_tensors(base, made)
    weights, theirs = open_weights(base), tensors_of(base)
    assert torch.equal(weights["mtp.0.proj.weight"], theirs["mtp.fc.weight"])
    q_proj = theirs["mtp.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(weights["mtp.0.block.mixer.q_proj.weight"], q_proj)


@torch.no_grad()
def test_a_depth_computes_as_that_of_transformers(tmp_path):
    deepseek(tmp_path)
    add_depth(tmp_path)
    theirs, ours = load(tmp_path), our_decoder(tmp_path)
    # Only the number of layers of the public model is known there.
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    drafter = transformers.modeling_layers.MtpModel.from_pretrained(theirs).eval()
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(20, 32, generator=generator)
    ids = torch.randint(0, 64, (20,), generator=generator)
    ctx = whole_context((20,))
    tables = rope_tables(ours.ropes, ctx, hidden.dtype)
    made = ours.mtp["0"](hidden, ours.embed(ids), ctx, tables).values
    cache = transformers.cache_utils.MtpCache(config=theirs.config.get_mtp_config())
    wanted = drafter.forward_layer(
        0, hidden[None], torch.arange(20)[None], cache, input_ids=ids[None]
    )[0]
    # In a sequence of 20 the last position has no token one place on: our experts leave it out.
    assert (made - wanted)[:-1].abs().max() <= 1e-5 * wanted.abs().max()
