import pytest

from longshore.hf.generic_keys import check_keys, describe_decoder, generic_decoder

FINE = {
    "model_type": "gemma3_text",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 7,
    "attention_dropout": 0.0,
    "classifier_dropout": 0.1,
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
REFUSED = [
    ({"is_encoder_decoder": True}, "is_encoder_decoder is true: it has cross attention"),
    ({"vision_config": {"depth": 2}}, "it has a vision_config, so it reads more than text"),
    ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
    ({"is_causal": False}, "its attention is not causal"),
    ({"use_bidirectional_attention": True}, "its attention is not causal"),
    ({"model_type": "jamba"}, "model_type is 'jamba': its layers are recurrent"),
    ({"model_type": "mamba2"}, "model_type is 'mamba2': its layers are recurrent"),
    ({"mamba_d_state": 16}, "it has the key mamba_d_state: some of its layers are recurrent"),
    ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
    ({"layer_types": ["chunked_attention"]}, "layer_types has 'chunked_attention'"),
    ({"attention_chunk_size": 8192}, "its attention is chunked"),
    ({"index_topk": 2048}, "index_topk: its attention is sparse"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1; .* set it to 0 in config.json"),
    ({"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
    ({"router_jitter_noise": 0.01}, "router_jitter_noise is 0.01"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
        "rope_type is 'longrope': in transformers it depends on the longest sequence",
    ),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0, but logits are changed"),
    ({"logits_scaling": 0}, "logits_scaling is 0, but logits are changed by a number above 0"),
    ({"output_router_logits": True}, "output_router_logits is true"),
]


def test_a_model_that_can_be_trained():
    check_keys(FINE)
    check_keys({**FINE, "logits_scaling": 8.0, "sliding_window": None, "layer_types": None})


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_refused_by_a_key(change, text):
    with pytest.raises(ValueError, match=text):
        check_keys({**FINE, **change})


def test_what_an_unknown_model_costs():
    decoder = describe_decoder(FINE)
    assert decoder == generic_decoder(FINE)
    assert (decoder.vocab_size, decoder.width, decoder.tied) == (61, 24, True)
    assert [layer.mixer.window for layer in decoder.layers] == [7, 7, None]
    assert {layer.mixer.kv_heads for layer in decoder.layers} == {2}
    assert {layer.mlp.width for layer in decoder.layers} == {40}


def test_experts_of_an_unknown_model():
    changes = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    decoder = describe_decoder({**FINE, **changes, "first_k_dense_replace": 1})
    assert [getattr(layer.mlp, "experts", 0) for layer in decoder.layers] == [0, 8, 8]
    assert decoder.layers[1].mlp.width == 12


def test_older_spellings():
    old = {"vocab_size": 61, "n_embd": 24, "n_head": 4, "n_layer": 2}
    decoder = describe_decoder(old)
    assert len(decoder.layers) == 2
    assert decoder.layers[0].mixer.head_dim == 6
    assert decoder.layers[0].mlp.width == 96


def test_a_missing_size_is_named():
    with pytest.raises(ValueError, match="hidden_size is missing"):
        describe_decoder({"vocab_size": 61})
