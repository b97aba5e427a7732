import json
from pathlib import Path

import numpy as np
import pytest
from tests.data.family_templates import QWEN3, REBUILT
from tests.data.many_chats import ORACLES, chats
from tests.data.tiny import MARKED, SPECIAL, byte_tokenizer

from longshore.data.source import SampleError
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer
from longshore.data.training_templates import BY_NAME, FAMILIES

TOKENS = sorted({token for family in FAMILIES for token in family.tokens} - set(SPECIAL))
EACH = 40  # chats for each family, 400 in all


def tokenizer(folder, own, **choice):
    return Tokenizer(byte_tokenizer(folder, template=own, more=TOKENS), **choice)


def expected(made, name, sample):
    """Tokens and mask of a sample, piece by piece."""
    messages, tools = sample["messages"], sample.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    first = [message["role"] for message in messages].index("assistant")
    opening = REBUILT[name].opening(messages[:first], tools)
    tokens, mask = [], []
    for text, counts in [(opening, False), *ORACLES[name](messages[first:])]:
        tokens.append(made.encode(text)[0])
        mask.append(np.full(len(tokens[-1]), counts))
    return np.concatenate(tokens), np.concatenate(mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", REBUILT)
def test_chats_of_every_kind_are_kept_with_exact_masks(tmp_path, name):
    made = tokenizer(tmp_path, REBUILT[name].template)
    rebuilt = REBUILT[name]
    assert made.template_note == (
        f"chat template: Longshore's training template for {rebuilt.title}, because the "
        f"tokenizer's own {rebuilt.reason}"
    )
    samples = chats(list(REBUILT).index(name), EACH)
    assert any("tool_calls" in m for sample in samples for m in sample["messages"])
    for sample in samples:
        sequence = SampleTokenizer(made, Rules())(sample, 0)
        tokens, mask = expected(made, name, sample)
        assert np.array_equal(sequence.tokens, tokens)
        assert np.array_equal(sequence.loss_mask, mask)


def said(role, content, **more):
    return {"role": role, "content": content, **more}


USER, ANSWER = said("user", "Hi"), said("assistant", "Yo.")
THOUGHTS = said("assistant", "Yo.", reasoning_content="Hm.")


def learned(made, *messages, **sample):
    """The text of all targets."""
    sequence = SampleTokenizer(made, Rules())({"messages": list(messages), **sample}, 0)
    return made._backend.decode(sequence.tokens[sequence.loss_mask], skip_special_tokens=False)


def test_a_last_turn_is_learned_as_the_tokenizers_own_template_has_it(tmp_path):
    ours, own = (tokenizer(tmp_path, QWEN3, template=choice) for choice in ("auto", "own"))
    for settings in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        sample = {"chat_template_kwargs": settings}
        empty = "" if settings.get("enable_thinking") is False else "<think>\n\n</think>\n\n"
        for made in (ours, own):
            assert learned(made, USER, ANSWER, **sample) == f"{empty}Yo.<|im_end|>"
    for made in (ours, own):
        assert learned(made, USER, THOUGHTS) == "<think>\nHm.\n</think>\n\nYo.<|im_end|>"
    with pytest.raises(SampleError, match="rewrites earlier turns"):
        learned(own, USER, THOUGHTS, USER, THOUGHTS)


def test_a_template_that_training_can_use_is_kept(tmp_path):
    keeps = QWEN3.replace("loop.index0 > ns.ask and (loop.last or t)", "true")
    for template in (keeps, MARKED):
        made = tokenizer(tmp_path, template)
        assert made.template_note == ""
        assert made.template_digest == tokenizer(tmp_path, template, template="own").template_digest
    assert tokenizer(tmp_path, QWEN3, template="own").template_note == ""


def test_a_layout_that_is_no_familys_is_left_to_its_own_template(tmp_path):
    """One character makes the difference: a family is never guessed at."""
    made = tokenizer(tmp_path, QWEN3.replace("assistant\\n", "assistant:\\n"))
    assert made.template_note == ""
    with pytest.raises(SampleError, match="rewrites earlier turns"):
        learned(made, USER, THOUGHTS, USER, THOUGHTS)
    other = Tokenizer(byte_tokenizer(tmp_path, template=REBUILT["deepseek"].template))
    assert other.template_note == ""  # the layout fits, but its tokens are not in the vocabulary


def test_a_family_by_name(tmp_path):
    for name in BY_NAME:
        made = tokenizer(tmp_path, "", template=name)
        assert "as asked for" in made.template_note
        text = learned(made, said("system", "Be kind."), USER, THOUGHTS, USER, ANSWER)
        assert text.count("Yo.") == 2
        assert text.count("Hm.") == 1
        assert "Hi" not in text
        assert "kind" not in text
    auto = tokenizer(tmp_path, "")
    with pytest.raises(
        ValueError, match=r"has no chat template.* to a file, or to the model's family: qwen3"
    ):
        learned(auto, USER, ANSWER)


def test_the_choice_is_in_the_digest(tmp_path):
    choices = ["auto", "own", "chatml", "llama_3"]
    digests = {tokenizer(tmp_path, QWEN3, template=c).template_digest for c in choices}
    assert len(digests) == len(choices)
    variants = [tokenizer(tmp_path, REBUILT[name].template) for name in ("deepseek", "deepseek_r1")]
    assert variants[0].template_digest != variants[1].template_digest
    with pytest.raises(ValueError, match="there is no file qwen9; give a file, auto, own"):
        tokenizer(tmp_path, QWEN3, template="qwen9")


def test_a_message_without_weight_is_not_learned(tmp_path):
    made = tokenizer(tmp_path, QWEN3)
    text = learned(made, USER, {**THOUGHTS, "weight": 0}, USER, said("assistant", "So."))
    assert text == "<think>\n\n</think>\n\nSo.<|im_end|>"


def test_an_assistant_that_begins(tmp_path):
    assert (
        learned(tokenizer(tmp_path, QWEN3), ANSWER, USER) == "<think>\n\n</think>\n\nYo.<|im_end|>"
    )


def test_the_newline_after_a_turn_as_trl_trains_it(tmp_path):
    """docs/coming-from.md: TRL's template marks it, and what is marked is trained."""
    trl = pytest.importorskip("trl")
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
    assert learned(tokenizer(tmp_path, QWEN3), USER, ANSWER).endswith("Yo.<|im_end|>")
    made = tokenizer(tmp_path, QWEN3, template=str(template))
    assert learned(made, USER, ANSWER).endswith("Yo.<|im_end|>\n")
