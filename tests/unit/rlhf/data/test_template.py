import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.data.schema import Message, RowError
from rlhf.data.template import NAMED, ChatTemplate, load_template

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ m['content'] + eos_token }}{% endfor %}"
)


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def byte_tokenizer(*, bos: str | None, eos: str, pad: str, adds_bos: bool, more: tuple[str, ...] = ()) -> Any:
    """A tokenizer of single bytes with whatever special tokens are asked for."""
    special = list(dict.fromkeys([token for token in (bos, eos, pad, *more) if token]))
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos or ""])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, additional_special_tokens=list(more)
    )


def special(*more: str) -> Any:
    return byte_tokenizer(bos="<b>", eos="<e>", pad="<p>", adds_bos=True, more=more)


def with_template(tokenizer: Any, jinja: str) -> ChatTemplate:
    tokenizer.chat_template = jinja
    return load_template("auto", tokenizer)


def test_hand_worked_human_assistant(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    """Ids of OPT: 2 is bos and eos, 50118 a line feed, 33837 "Human", 46184 "Assistant", 35 ":"."""
    template = load_template("human_assistant", opt_tokenizer)
    prompt = [2, 50118, 50118, 33837, 35, 20920, 50118, 50118, 46184, 35]
    assert template.encode_prompt([user("Hello")])[:5] == prompt[:5]
    assert template.encode_prompt([user("Hello")])[-4:] == prompt[-4:]
    assert opt_tokenizer.decode(template.encode_prompt([user("Hello")])) == "</s>\n\nHuman: Hello\n\nAssistant:"
    assert opt_tokenizer.convert_ids_to_tokens(template.encode_response("Paris")) == ["\u0120Paris", "</s>"]


def test_a_response_ends_in_the_eos_id_once(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    """A2: the terminator is an id, not text that a tokenizer takes apart."""
    for name in ("human_assistant", "plain", "alpaca"):
        template = load_template(name, opt_tokenizer)
        ids = template.encode_response("hi")
        assert ids[-1] == opt_tokenizer.eos_token_id == template.stop_token_id
        assert ids.count(template.stop_token_id) == 1
        assert template.decode_response(ids) == "hi"
        assert opt_tokenizer.decode(ids, skip_special_tokens=True).strip() == "hi"


def test_terminators_of_several_tokens_are_refused(opt_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """A2: `<|endoftext|>` is no token of OPT's but seven."""
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    with pytest.raises(
        ValueError, match=r"data.template=mine.jinja ends a response with '<\|endoftext\|>'.*7 ordinary"
    ):
        load_template(str(path), opt_tokenizer)


def test_chatml_needs_its_markers_as_tokens(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"needs <\|im_start\|> and <\|im_end\|>.*Use data.template=human_assistant"):
        load_template("chatml", opt_tokenizer)
    tokenizer = special("<|im_start|>", "<|im_end|>")
    template = load_template("chatml", tokenizer)
    assert template.stop_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") != tokenizer.eos_token_id
    ids, mask = template.encode_conversation([user("a"), assistant("b"), user("c"), assistant("d")])
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == "b<|im_end|>d<|im_end|>"
    assert tokenizer.decode(ids) == (
        "<b><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    )


def test_unknown_names_and_files_list_what_there_is(tokenizer: PreTrainedTokenizerBase) -> None:
    """B10: an unknown name is answered with the valid ones."""
    with pytest.raises(ValueError, match="auto, human_assistant, plain, alpaca, chatml"):
        load_template("vicuna", tokenizer)
    with pytest.raises(FileNotFoundError, match="missing.jinja does not exist"):
        load_template("missing.jinja", tokenizer)


def test_tokenizers_without_eos_are_refused() -> None:
    tokenizer = special()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        load_template("plain", tokenizer)


def test_only_assistant_turns_are_in_the_mask(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    """B22: two turns each; stop tokens are trained on, user turns and headers are not."""
    template = load_template("human_assistant", opt_tokenizer)
    turns = [Message("system", "Be kind."), user("One?"), assistant("First."), user("Two?"), assistant("Second.")]
    ids, mask = template.encode_conversation(turns)
    trained = opt_tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    other = opt_tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if not on])
    assert trained == " First.</s> Second.</s>"
    assert other == "</s>Be kind.\n\nHuman: One?\n\nAssistant:\n\nHuman: Two?\n\nAssistant:"


@pytest.mark.parametrize("name", ["human_assistant", "plain", "alpaca"])
def test_prompts_equal_hugging_faces_rendering(opt_tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Independent oracle: transformers renders the same source and tokenises it in one piece.

    Over several turns too, although pieces are tokenised apart: byte-level BPE divides at these borders anyway.
    """
    template = load_template(name, opt_tokenizer)
    for turns in (
        [user("What is it?")],
        [Message("system", "Be kind."), user("What is it?")],
        [user("It's 5\u20ac,  ok?\n\n- a\n- b"), assistant("Yes."), user("Caf\u00e9?")],
    ):
        expected = opt_tokenizer.apply_chat_template(
            [dataclasses.asdict(turn) for turn in turns],
            chat_template=template.jinja,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert template.encode_prompt(turns) == expected


@pytest.mark.parametrize("jinja", [LLAMA3, LLAMA2])
def test_the_tokenizers_own_template_is_used(jinja: str) -> None:
    tokenizer = special("<|start|>", "<|end|>", "<|eot|>")
    template = with_template(tokenizer, jinja)
    turns = [user("one"), assistant("two"), user("three")]
    as_dicts = [dataclasses.asdict(turn) for turn in turns]
    expected = tokenizer.apply_chat_template(as_dicts, add_generation_prompt=True, return_dict=False)
    assert template.name == "tokenizer"
    assert template.encode_prompt(turns) == expected
    ids, mask = template.encode_conversation([*turns, assistant("four")])
    whole = tokenizer.apply_chat_template([*as_dicts, {"role": "assistant", "content": "four"}], return_dict=False)
    assert ids == whole
    stop = "<|eot|>" if jinja == LLAMA3 else "<e>"
    assert template.stop_token_id == tokenizer.convert_tokens_to_ids(stop)
    trained = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert trained == (f"two{stop}four{stop}" if jinja == LLAMA3 else f" two {stop} four {stop}")
    assert template.decode_response(template.encode_response("four")) == "four"


def test_templates_that_refuse_turns_drop_the_row_with_a_reason() -> None:
    template = with_template(special(), REFUSES_SYSTEM)
    template.encode_prompt([user("a")])
    with pytest.raises(RowError, match="the template refuses these turns: no system turn"):
        template.encode_prompt([Message("system", "s"), user("a")])


def test_templates_that_lose_turns_are_noticed() -> None:
    template = with_template(special(), "{% for m in messages[-2:] %}{{ m.content + eos_token }}{% endfor %}")
    with pytest.raises(RowError, match="does not keep every turn once and in order"):
        template.encode_prompt([user("a"), assistant("b"), user("c"), assistant("d"), user("e")])


def test_text_that_reads_like_a_special_token_stays_text(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    """A21: a user who writes `</s>` puts no eos into the prompt; the bos that stands there is the only one."""
    for template in (load_template("human_assistant", opt_tokenizer), with_template(special("<|eot|>"), LLAMA2)):
        stop = template.tokenizer.eos_token
        ids, mask = template.encode_conversation([user(f"a {stop} b"), assistant(f"c {stop} d")])
        assert ids.count(template.stop_token_id) == 1 + (template.tokenizer.bos_token_id == template.stop_token_id)
        assert template.tokenizer.decode(ids).count(f"a {stop} b") == 1
        assert mask[-1]


def test_characters_used_as_marks_may_stand_in_a_text(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    template = load_template("human_assistant", opt_tokenizer)
    text = "\ue0000\ue001 and \ue0001\ue001"
    ids, _ = template.encode_conversation([user(text), assistant(text), user("x"), assistant(text)])
    assert opt_tokenizer.decode(ids).count(text) == 3


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(bos="<x>", eos="<e>", pad="<x>", adds_bos=True),
        byte_tokenizer(bos=None, eos="<e>", pad="<e>", adds_bos=False),
        byte_tokenizer(bos="<b>", eos="<e>", pad="<p>", adds_bos=True),
        byte_tokenizer(bos="<b>", eos="<e>", pad="<p>", adds_bos=False),
    ],
    ids=["bos is pad", "no bos", "all differ", "bos not added"],
)
def test_ends_do_not_depend_on_bos_or_pad(tokenizer: Any) -> None:
    """A5: the stop token is the last one, with a bos exactly where the tokenizer itself adds one."""
    template = load_template("human_assistant", tokenizer)
    ids, mask = template.encode_conversation([user("a"), assistant("bb")])
    adds_bos = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    assert (ids[0] == tokenizer.bos_token_id) == adds_bos
    assert len(ids) == len("\n\nHuman: a\n\nAssistant: bb") + 1 + adds_bos
    assert mask.index(True) == len(ids) - len(" bb") - 1
    assert ids[-1] == tokenizer.eos_token_id


def test_tokenizers_trained_here_work_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    """`train_bpe` marks text as never special; what the template writes has to become ids all the same."""
    template = load_template("auto", tokenizer)
    ids, mask = template.encode_conversation([user("What <eos>?"), assistant("<bos>Four.")])
    assert [i for i in ids if i in tokenizer.all_special_ids] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "<bos>\n\nHuman: What <eos>?\n\nAssistant: <bos>Four.<eos>"
    assert mask[-1] and not mask[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=2, max_size=6),
    st.sampled_from(["human_assistant", "alpaca"]),
)
def test_training_rows_and_rollouts_have_equal_ids(texts: list[str], name: str) -> None:
    """A14: what is trained on is what is generated from, token for token; each stop token stands once in its turn."""
    template = load_template(name, _SHARED)
    texts = texts[: len(texts) // 2 * 2]
    turns = [user(text) if i % 2 == 0 else assistant(text) for i, text in enumerate(texts)]
    ids, mask = template.encode_conversation(turns)
    response = template.encode_response(texts[-1])
    assert ids == template.encode_prompt(turns[:-1]) + response
    assert all(mask[-len(response) :])
    assert ids.count(template.stop_token_id) == len(texts) // 2
    assert template.decode_response(response) == texts[-1]
    assert sum(mask) == sum(len(template.encode_response(text)) for text in texts[1::2])


_SHARED = byte_tokenizer(bos="<b>", eos="<e>", pad="<p>", adds_bos=True)


def test_truncation_takes_old_turns_first_then_old_tokens_of_the_last(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    """A13: bos, role headers, system turn and generation prompt stay; limits of max, max - 1 and far less."""
    template = load_template("human_assistant", opt_tokenizer)
    turns = [Message("system", "Be kind."), user("old"), assistant("reply"), user("one two three four five six")]
    full = template.encode_prompt(turns)
    assert template.truncated_prompt(turns, len(full))[0] == full
    without_old = template.encode_prompt([turns[0], turns[-1]])
    ids, mask = template.truncated_prompt(turns, len(full) - 1)
    assert ids == without_old and not any(mask)
    ids, _ = template.truncated_prompt(turns, len(without_old) - 2)
    assert len(ids) == len(without_old) - 2
    assert opt_tokenizer.decode(ids) == "</s>Be kind.\n\nHuman: three four five six\n\nAssistant:"
    with pytest.raises(RowError, match="over max_prompt_tokens with its template"):
        template.truncated_prompt(turns, 5)


def test_truncation_keeps_the_mask_of_turns_that_stay(opt_tokenizer: PreTrainedTokenizerBase) -> None:
    template = load_template("human_assistant", opt_tokenizer)
    turns = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    ids, mask = template.truncated_prompt(turns, len(template.encode_prompt(turns)) - 1)
    assert ids == template.encode_prompt(turns[2:])
    assert opt_tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == " d</s>"


def test_truncation_with_a_template_of_the_tokenizers_own() -> None:
    template = with_template(special("<|start|>", "<|end|>", "<|eot|>"), LLAMA3)
    ids, _ = template.truncated_prompt([user("abcdefgh")], len(template.encode_prompt([user("fgh")])))
    assert ids == template.encode_prompt([user("fgh")])


def test_fingerprint_follows_what_is_written_and_survives_saving(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """B5: another template or bos, another fingerprint. A saved tokenizer finds its named template again."""
    prints = {load_template(name, tokenizer).fingerprint for name in ("human_assistant", "plain", "alpaca")}
    assert len(prints) == 3
    one = load_template("human_assistant", special())
    assert (
        one.fingerprint
        != load_template("human_assistant", byte_tokenizer(bos="<b>", eos="<e>", pad="<p>", adds_bos=False)).fingerprint
    )
    saved = special()
    saved.chat_template = one.jinja
    saved.save_pretrained(tmp_path)
    again = load_template("auto", PreTrainedTokenizerFast.from_pretrained(tmp_path))
    assert (again.name, again.fingerprint) == ("human_assistant", one.fingerprint)


def test_every_named_template_has_the_same_form() -> None:
    tokenizer = special("<|im_start|>", "<|im_end|>")
    for name in NAMED:
        template = load_template(name, tokenizer)
        ids = template.encode_prompt([user("a")])
        assert ids[0] == tokenizer.bos_token_id
        assert template.text_pieces("x")[-1].token_id == tokenizer.eos_token_id


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_with_a_system_turn_of_its_own() -> None:
    """The form of SmolLM2's: eos is the closing marker, and truncation keeps the built-in system turn."""
    tokenizer = byte_tokenizer(bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>", adds_bos=False)
    template = with_template(tokenizer, SMOLLM2)
    assert template.stop_token_id == tokenizer.eos_token_id
    turns = [user("one"), assistant("two"), user("three")]
    expected = tokenizer.apply_chat_template(
        [dataclasses.asdict(turn) for turn in turns], add_generation_prompt=True, return_dict=False
    )
    assert template.encode_prompt(turns) == expected
    ids, _ = template.truncated_prompt(turns, len(template.encode_prompt([user("ree")])))
    text = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nree<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text


def test_tokenizers_that_put_a_space_before_a_text_get_no_second_one() -> None:
    """Llama 2's kind: a text begins with a word mark already."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", "\u2581", *"abPrisHumanAst:\n", "\u2581P"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "P")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    template = load_template("human_assistant", tokenizer)
    ids = template.encode_response("Paris")
    assert tokenizer.convert_ids_to_tokens(ids) == ["\u2581P", "a", "r", "i", "s", "</s>"]
    assert template.decode_response(ids) == "Paris"
