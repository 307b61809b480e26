import pytest

from rlhf.data.schema import Drops, Message, Record, Response, RowError, check_record, prompt_text, split_text

USER, ANSWER, SYSTEM = Message("user", "Hi"), Message("assistant", "Hello"), Message("system", "Be kind")


@pytest.mark.parametrize(
    "record",
    [
        Record((USER,)),
        Record((SYSTEM, USER), (Response("a"),)),
        Record((USER, ANSWER, USER), (Response("a"), Response("b"))),
        Record((), text="plain"),
    ],
)
def test_good_records_pass_unchanged(record: Record) -> None:
    assert check_record(record) is record


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Record(()), "no prompt"),
        (Record((USER,), text="plain"), "plain text beside a prompt"),
        (Record((USER, SYSTEM, USER)), "system turn after the first turn"),
        (Record((Message("user", " \n"),)), "empty user turn"),
        (Record((Message("tool", "x"), USER)), "role 'tool'"),  # type: ignore[arg-type]
        (Record((ANSWER, USER)), "does not start with a user turn"),
        (Record((SYSTEM,)), "does not start with a user turn"),
        (Record((USER, ANSWER)), "does not end in a user turn"),
        (Record((USER,), (Response("a"), Response("  "))), "empty response"),
    ],
)
def test_bad_records_name_the_reason_and_the_place(record: Record, reason: str) -> None:
    import dataclasses

    with pytest.raises(RowError, match=reason) as error:
        check_record(dataclasses.replace(record, where="a.jsonl:7"))
    assert str(error.value).startswith("a.jsonl:7: ")
    assert "a.jsonl" not in error.value.reason  # equal reasons are counted together


def test_continuations_of_a_conversation_share_the_text_that_decides_their_part() -> None:
    first, later = Record((SYSTEM, USER)), Record((USER, ANSWER, Message("user", "And then?")))
    assert split_text(first) == split_text(later) == "Hi"
    assert split_text(Record((), text="plain")) == "plain"


def test_prompt_text_shows_roles_only_when_there_are_several_turns() -> None:
    assert prompt_text(Record((USER,))) == "Hi"
    assert prompt_text(Record((USER, ANSWER, USER))) == "user: Hi\n\nassistant: Hello\n\nuser: Hi"
    assert prompt_text(Record((), text="plain")) == "plain"


def test_drops_keep_the_first_few_places() -> None:
    drops = Drops()
    for line in range(5):
        drops.add("empty", f"a:{line}")
    assert drops.counts == {"empty": 5}
    assert drops.examples == {"empty": ["a:0", "a:1", "a:2"]}
