import json

import pytest

from longshore.config.check import check_config
from longshore.config.load import load_config

KEYS = {
    "model_type": "gemma3_text",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
DATA = [
    'data.mock={mode="distribution",type="lognormal",min_seq_len=4,max_seq_len=200,'
    "mean_seq_len=40,lognormal_sigma=1.0}"
]
DATA += ["data.count=40", "data.batch=4"]


def checked(folder, *words, ranks=4, **keys):
    (folder / "config.json").write_text(json.dumps(KEYS | keys))
    words = [*DATA, f"model.from_hf={folder}", "model.code=transformers", *words]
    check_config(load_config(None, words), ranks)


def test_a_model_without_code_of_ours(tmp_path):
    checked(tmp_path)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("parallel.tp=2", "parallel.tp is 2, but model.code=transformers has no tensor para"),
        ("parallel.pp=2", "parallel.pp is 2, but model.code=transformers has no pipelines"),
        ("parallel.ep=2", "parallel.ep is 2, but model.code=transformers has no expert parallel"),
        ("graph.layers=all", "graph.layers works only with Longshore's own models"),
        ("model.aux_weight=0.1", "model.aux_weight works only with Longshore's own models"),
        ("model.from_hf=", "model.code=transformers runs the code of a Hugging Face checkpoint"),
    ],
)
def test_settings_of_our_own_models(tmp_path, word, text):
    words = [word, "model.preset=tiny-llama"] if word == "model.from_hf=" else [word]
    with pytest.raises(ValueError, match=text):
        checked(tmp_path, *words)


def test_keys_are_refused_before_torch(tmp_path):
    with pytest.raises(ValueError, match=r"model.from_hf: resid_pdrop is 0.1"):
        checked(tmp_path, resid_pdrop=0.1)
