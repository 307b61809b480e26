from typing import Any

import pytest

from rlhf.data.formats import FORMATS, format_named, hh_messages, recognise
from rlhf.data.schema import Message, Record, Response, RowError


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def system(text: str) -> Message:
    return Message("system", text)


PAIR = (Response("good", 1.0), Response("bad", 0.0))
HH = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why\n\nAssistant: "

CASES: list[tuple[str, dict[str, Any], list[Record]]] = [
    ("prompt_response", {"prompt": " Hi ", "response": " good\n"}, [Record((user("Hi"),), (Response("good"),))]),
    ("prompt_completion", {"prompt": "Hi", "completion": "good"}, [Record((user("Hi"),), (Response("good"),))]),
    (
        "prompt_completion",
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "good"}]},
        [Record((user("Hi"),), (Response("good"),))],
    ),
    (
        "prompt_response",  # the form of Dahoas/rm-static, DeepSpeed-Chat's default data
        {"prompt": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why\n\nAssistant:", "response": " good"},
        [Record((user("Hi"), assistant("Yes?"), user("Why")), (Response("good"),))],
    ),
    (
        "alpaca",
        {"instruction": "Add", "input": "1, 2", "output": "3", "system": "Be brief", "history": [["a", "b"]]},
        [Record((system("Be brief"), user("a"), assistant("b"), user("Add\n\n1, 2")), (Response("3"),))],
    ),
    ("alpaca", {"instruction": "Add", "input": "", "output": "3"}, [Record((user("Add"),), (Response("3"),))]),
    (
        "instances",
        {"instruction": "Add", "instances": [{"input": "1", "output": "1"}, {"input": "", "output": "0"}], "id": "s"},
        [
            Record((user("Add\n\n1"),), (Response("1"),), meta={"id": "s"}),
            Record((user("Add"),), (Response("0"),), meta={"id": "s"}),
        ],
    ),
    (
        "question_answer",
        {"question": "How many?", "answer": "So <<2*600=1200>>1200.\n#### 1,200"},
        [
            Record(
                (user("How many?"),),
                (Response("So <<2*600=1200>>1200.\n#### 1,200"),),
                meta={"answer": "1200"},
            )
        ],
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "good"}]},
        [Record((user("Hi"),), (Response("good"),))],
    ),
    (
        "messages",  # ends in a user turn: a prompt
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "level": 3},
        [Record((user("Hi"),), meta={"level": 3})],
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "Be kind"},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "good"},
            ]
        },
        [Record((system("Be kind"), user("Hi")), (Response("good"),))],
    ),
    ("preference", {"prompt": "Hi", "chosen": "good", "rejected": "bad"}, [Record((user("Hi"),), PAIR)]),
    (
        "preference",
        {"prompt": "Hi", "chosen": "good", "rejected": "bad", "margin": 2, "system": "Be kind"},
        [Record((system("Be kind"), user("Hi")), PAIR, margin=2.0)],
    ),
    (
        "preference",  # both sides are whole conversations, the prompt column their first turn
        {
            "prompt": "Hi",
            "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "good"}],
            "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "bad"}],
        },
        [Record((user("Hi"),), PAIR)],
    ),
    (
        "preference",  # LLaMA-Factory
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        [Record((user("Hi"),), PAIR)],
    ),
    (
        "preference",  # Anthropic/hh-rlhf
        {"chosen": HH + "good", "rejected": HH + "bad"},
        [Record((user("Hi"), assistant("Yes?"), user("Why")), PAIR)],
    ),
    (
        "ranked",
        {"prompt": "Hi", "responses": ["a", "b", "c"], "ranks": [1, 3, 1]},
        [Record((user("Hi"),), (Response("a", 1.0), Response("b", 3.0), Response("c", 1.0)))],
    ),
    (
        "ranked",
        {"prompt": "Hi", "responses": [{"text": "a", "score": 0.5}, {"text": "b", "score": -1}]},
        [Record((user("Hi"),), (Response("a", 0.5), Response("b", -1.0)))],
    ),
    ("turns", {"turns": ["Hi", "Again"], "category": "w"}, [Record((user("Hi"),), meta={"category": "w"})]),
    ("prompt", {"prompt": "Hi", "meta": {"answer": "42"}}, [Record((user("Hi"),), meta={"answer": "42"})]),
    ("text", {"text": "Once upon", "url": "x"}, [Record((), text="Once upon")]),
]


@pytest.mark.parametrize(("name", "row", "records"), CASES)
def test_formats_are_recognised_and_read(name: str, row: dict[str, Any], records: list[Record]) -> None:
    found = recognise(row)
    assert found is not None
    assert found.name == name
    assert list(found.read(row)) == records


def test_every_format_has_a_case() -> None:
    trees = {"open_assistant_tree", "open_assistant_message"}
    assert {name for name, _, _ in CASES} | trees == set(FORMATS)


def test_open_assistant_tree_gives_each_prompter_message_with_its_ranked_replies() -> None:
    """Rank 0 is best there; deleted replies and replies that nobody ranked beside ranked ones are left out."""
    tree = {
        "message_tree_id": "t",
        "prompt": {
            "text": "Hi",
            "role": "prompter",
            "message_id": "m",
            "replies": [
                {"text": "worse", "rank": 1, "replies": []},
                {"text": "better", "rank": 0, "replies": [{"text": "Why", "replies": []}]},
                {"text": "unranked", "rank": None, "replies": []},
                {"text": "gone", "rank": 2, "deleted": True, "replies": [{"text": "What", "replies": []}]},
            ],
        },
    }
    first, second = FORMATS["open_assistant_tree"].read(tree)
    assert first.prompt == (user("Hi"),)
    assert first.responses == (Response("worse", -1.0), Response("better", 0.0))
    assert second.prompt == (user("Hi"), assistant("better"), user("Why"))
    assert second.responses == ()
    message = {**tree["prompt"], "parent_id": None}
    assert list(FORMATS["open_assistant_message"].read(message)) == [first, second]
    with pytest.raises(RowError, match="without its tree"):
        list(FORMATS["open_assistant_message"].read({**message, "parent_id": "p"}))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Hi", "response": 3}, "`response` is of type int, not text"),
        ({"prompt": "Hi", "chosen": "a", "rejected": []}, "empty `rejected`"),  # B9
        ({"prompt": "Hi", "chosen": "a", "rejected": 1.5}, "`rejected` is of type float"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b", "margin": "big"}, "`margin` is not a number"),
        ({"chosen": HH + "a", "rejected": "\n\nHuman: Other\n\nAssistant: b"}, "differ before the last answer"),
        ({"chosen": HH + "a\n\nHuman: more", "rejected": HH + "b"}, "does not end in an assistant turn"),
        ({"prompt": "Hi", "responses": ["a", "b"]}, "`responses` has no `ranks`"),
        ({"prompt": "Hi", "responses": ["a", "b"], "ranks": [1]}, "not one number for each"),
        ({"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, float("nan")]}, "`ranks` is not a number"),
        ({"prompt": "Hi", "responses": [], "ranks": []}, "empty `responses`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "parts that are not text"),
        ({"messages": ["Hi"]}, "of type str, not a mapping"),
        ({"messages": []}, "`messages` is empty"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "`history` is not a list of"),
        ({"instruction": "a", "instances": [{"input": ""}]}, "has no `output`"),
        ({"turns": []}, "`turns` is empty"),
        ({"text": " "}, "empty text"),
    ],
)
def test_bad_rows_name_the_reason(row: dict[str, Any], reason: str) -> None:
    found = recognise(row)
    assert found is not None
    with pytest.raises(RowError, match=reason):
        list(found.read(row))


def test_hh_text_is_divided_at_its_markers_only() -> None:
    assert hh_messages("Human: a Human: b\n\nAssistant: c") == (user("a Human: b"), assistant("c"))
    with pytest.raises(RowError):
        hh_messages("no marker")


def test_unknown_format_lists_the_known_ones() -> None:
    """B10: an unknown name is answered with the valid ones."""
    with pytest.raises(ValueError, match="question_answer"):
        format_named("gsm8k")
    for name in FORMATS:
        assert format_named(name).name == name
