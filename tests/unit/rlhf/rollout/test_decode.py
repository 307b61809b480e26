"""Fault rows A8-A12, A14, D1, D2, D9 of the older pipelines, on each model family."""

import random

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf.config import SamplingConfig
from rlhf.models.build import train_bpe
from rlhf.models.compiled import compile_blocks, compiled_blocks
from rlhf.rollout.decode import generate

VOCAB_SIZE = 97
EOS = 1
GREEDY = SamplingConfig(temperature=0)
# Some tokens stop, so that rows finish at many different lengths, 1 included.
STOPS = tuple(range(1, 9))


def make_prompts(lengths, *, seed=0, vocab_size=VOCAB_SIZE):
    generator = random.Random(seed)
    # Every id can occur, pad, bos and eos included: masks must not come from ids.
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


PROMPTS = make_prompts([1, 9, 4, 17, 2, 5, 9, 1])


def answer(model, prompts=PROMPTS, **changes):
    arguments = {
        "uids": [sum(prompt) * 1000 + len(prompt) for prompt in prompts],
        "sample_ids": list(range(len(prompts))),
        "sampling": SamplingConfig(),
        "stop_token_ids": STOPS,
        "max_new_tokens": 20,
        "seed": 1,
        "step": 3,
        "pad_id": EOS,
        "batch_size": 8,
    }
    return generate(model, prompts, **{**arguments, **changes})


def tokens(responses):
    return [response.token_ids for response in responses]


def huggingface_greedy(model, prompts, *, stop_token_ids, max_new_tokens):
    """Greedy responses of transformers on a left-padded batch, cut after the first stop token."""
    width = max(map(len, prompts))
    token_ids = torch.tensor([[EOS] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    training = model.training
    model.eval()
    sequences = model.generate(
        token_ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(stop_token_ids) or None, pad_token_id=EOS
        ),
    )
    model.train(training)
    responses = []
    for row in sequences[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stop_token_ids), len(row))
        responses.append(row[:end])
    return responses


def rescore(model, prompt, response, sampling, stop_token_ids, *, padding=0):
    """Log-probs of a response by one forward of the right-padded row, transformed by transformers' own processors."""
    row = prompt + response
    ids = torch.tensor([row + [EOS] * padding])
    mask = torch.tensor([[1] * len(row) + [0] * padding])
    positions = {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        logits_TV = model.eval()(input_ids=ids, attention_mask=mask, **positions).logits[0].float()
    processors = LogitsProcessorList()
    if sampling.min_new_tokens:
        processors.append(
            MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_new_tokens, list(stop_token_ids), "cpu")
        )
    processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    logprobs = []
    for i in range(len(prompt), len(row)):
        logits_1V = processors(ids[:, :i], logits_TV[i - 1 : i].clone())
        logprobs.append(logits_1V.log_softmax(-1)[0, row[i]].item())
    return logprobs


@pytest.mark.parametrize("attention", ["rlhf", "sdpa", "eager"])
def test_greedy_equals_huggingface_before_and_after_an_update(tiny_model, family, attention):
    """E3, E4, E5, A11: token for token on a left-padded batch, again after the weights have moved.

    Grouped queries (Llama, Qwen2) and ALiBi (BLOOM) are among the families.
    """
    if family == "bloom" and attention != "eager":
        pytest.skip("BLOOM has its own attention")
    model = tiny_model(family, attn_implementation=attention)
    before = tokens(answer(model, sampling=GREEDY))
    assert before == huggingface_greedy(model, PROMPTS, stop_token_ids=STOPS, max_new_tokens=20)
    model.train()
    ids = torch.tensor([PROMPTS[3]])
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    after = tokens(answer(model, sampling=GREEDY))
    assert after == huggingface_greedy(model, PROMPTS, stop_token_ids=STOPS, max_new_tokens=20)
    assert after != before


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 3}, {"sync_every": 4}, {"sync_every": 50}])
def test_a_row_does_not_depend_on_its_batch(tiny_model, family, changes):
    """A8, A11: the same tokens and log-probs alone, in another batch, and when finished rows leave late."""
    model = tiny_model(family)
    together, other = answer(model), answer(model, **changes)
    assert tokens(other) == tokens(together)
    assert len({len(response.token_ids) for response in together}) > 3, "rows of different length are the point"
    for a, b in zip(together, other, strict=True):
        assert a.stopped == b.stopped
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.5),
        SamplingConfig(temperature=1.3, top_k=7, top_p=0.8, min_new_tokens=3),
    ],
    ids=["plain", "temperature", "all_transforms"],
)
def test_log_probs_equal_a_rescoring_forward(tiny_model, family, sampling):
    """A9, A10, D9: what was sampled is what is scored, with dropout in the config and the model in train mode."""
    model = tiny_model(family).train()
    for prompt, response in zip(PROMPTS, answer(model, sampling=sampling), strict=True):
        expected = rescore(model, prompt, response.token_ids, sampling, STOPS, padding=6)
        torch.testing.assert_close(torch.tensor(response.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_scoring_without_the_transforms_is_seen(tiny_model):
    """D9: log-probs at temperature 0.5 are not those at 1."""
    model = tiny_model("opt")
    response = answer(model, PROMPTS[:1], sampling=SamplingConfig(temperature=0.5), stop_token_ids=())[0]
    plain = rescore(model, PROMPTS[0], response.token_ids, SamplingConfig(), ())
    assert max(abs(a - b) for a, b in zip(response.logprobs, plain, strict=True)) > 0.1


def test_coordinates_of_sampling(tiny_model):
    model = tiny_model("opt")
    base = tokens(answer(model))
    assert tokens(answer(model)) == base
    backwards = answer(
        model,
        PROMPTS[::-1],
        uids=[sum(prompt) * 1000 + len(prompt) for prompt in PROMPTS[::-1]],
        sample_ids=list(range(len(PROMPTS)))[::-1],
    )
    assert tokens(backwards)[::-1] == base
    for changes in ({"seed": 2}, {"step": 4}, {"uids": list(range(8))}, {"sample_ids": [0] * 8}):
        assert tokens(answer(model, **changes)) != base


def test_samples_follow_the_models_distribution(tiny_model):
    """First tokens of 4000 samples of one prompt against softmax of the model's logits (chi-square)."""
    model = tiny_model("opt").eval()
    num_samples = 4000
    responses = answer(
        model,
        [PROMPTS[1]] * num_samples,
        uids=[7] * num_samples,
        sample_ids=list(range(num_samples)),
        max_new_tokens=1,
        batch_size=500,
    )
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1].softmax(-1) * num_samples
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in responses]), minlength=VOCAB_SIZE).float()
    common = expected > 5
    freedom = int(common.sum()) - 1
    assert freedom >= 5
    statistic = float(((counts - expected) ** 2 / expected)[common].sum())
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_responses_end_at_their_stop_token(tiny_model, family):
    """D1, D2: the stop token is the response's last and only one, nothing follows it, nothing forces a length."""
    model = tiny_model(family)
    free = tokens(answer(model, sampling=GREEDY, stop_token_ids=()))
    assert {len(row) for row in free} == {20}
    for length in (1, 3):
        stop = free[0][length - 1]
        expected = free[0][: free[0].index(stop) + 1]
        for pad_id in (stop, EOS):
            response = answer(model, sampling=GREEDY, stop_token_ids=(stop,), pad_id=pad_id)[0]
            assert response.token_ids == expected and response.stopped
            assert len(response.logprobs) == len(response.token_ids)
    assert not any(response.stopped for response in answer(model, sampling=GREEDY, stop_token_ids=()))


def test_stop_token_as_the_last_allowed_token_counts_as_stopped(tiny_model):
    model = tiny_model("gpt2")
    free = answer(model, PROMPTS[:1], sampling=GREEDY, stop_token_ids=())[0].token_ids
    position = next(i for i, token in enumerate(free) if token not in free[:i] and i > 0)
    ended = answer(model, PROMPTS[:1], sampling=GREEDY, stop_token_ids=(free[position],), max_new_tokens=position + 1)[
        0
    ]
    assert ended.stopped and ended.token_ids == free[: position + 1]
    cut = answer(model, PROMPTS[:1], sampling=GREEDY, stop_token_ids=(free[position],), max_new_tokens=position)[0]
    assert not cut.stopped and cut.token_ids == free[:position]


def test_min_new_tokens(tiny_model):
    """Stop tokens cannot be drawn among the first min_new_tokens, and can right after."""
    model = tiny_model("llama")
    stops = tuple(range(48))
    lengths = [
        len(row) for row in tokens(answer(model, stop_token_ids=stops, sampling=SamplingConfig(min_new_tokens=5)))
    ]
    assert min(lengths) == 6
    assert min(len(row) for row in tokens(answer(model, stop_token_ids=stops))) == 1


@pytest.mark.parametrize("sync_every", [1, 6])
def test_stop_strings(tiny_model, sync_every):
    """The response ends with the token that completes the string, also one spread over several tokens."""
    tokenizer = train_bpe(["the quick brown fox jumps over the lazy dog, said Anna."] * 20, vocab_size=300)
    model = tiny_model("opt", vocab_size=len(tokenizer))
    prompts = make_prompts([1, 7, 3], vocab_size=len(tokenizer))
    # Printable single characters and words only: ids below are bytes that need not be valid text.
    free = tokens(answer(model, prompts, stop_token_ids=(), max_new_tokens=30))
    for row, length in ((0, 4), (1, 9), (2, 1)):
        text = tokenizer.decode(free[row][max(0, length - 3) : length])
        sampling = SamplingConfig(stop_strings=["not to be found", text])
        responses = answer(
            model,
            prompts,
            stop_token_ids=(),
            max_new_tokens=30,
            sampling=sampling,
            tokenizer=tokenizer,
            sync_every=sync_every,
        )
        for whole, response in zip(free, responses, strict=True):
            end = next((i for i in range(1, 31) if text in tokenizer.decode(whole[:i])), None)
            assert response.token_ids == whole[:end]
            assert response.stopped == (end is not None)
        assert responses[row].stopped and len(responses[row].token_ids) <= length


def test_stop_strings_and_stop_tokens_together(tiny_model):
    """Whichever comes first ends the response."""
    tokenizer = train_bpe(["abc def"] * 5, vocab_size=300)
    model = tiny_model("opt", vocab_size=len(tokenizer))
    free = answer(model, PROMPTS[:1], stop_token_ids=(), max_new_tokens=12)[0].token_ids
    for string_at, token_at in ((2, 6), (6, 2)):
        sampling = SamplingConfig(stop_strings=[tokenizer.decode(free[: string_at + 1])])
        for sync_every in (1, 12):
            response = answer(
                model,
                PROMPTS[:1],
                stop_token_ids=(free[token_at],),
                max_new_tokens=12,
                sampling=sampling,
                tokenizer=tokenizer,
                sync_every=sync_every,
            )[0]
            first_token = free.index(free[token_at])
            assert response.token_ids == free[: min(string_at, first_token) + 1]


def test_prompt_ids_reach_the_model_unchanged(tiny_model):
    """A12, A14: left-padded with the last column real, ids as given, in rows that map back to the prompts."""
    model = tiny_model("opt", attn_implementation="sdpa")
    calls = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((kwargs["input_ids"], kwargs["attention_mask"])), with_kwargs=True
    )
    answer(model, [PROMPTS[2], PROMPTS[5]], max_new_tokens=1)
    (token_ids, mask), *rest = calls
    assert not rest and token_ids.shape == (2, 5) and mask[:, -1].all()
    assert sorted(row[row_mask.bool()].tolist() for row, row_mask in zip(token_ids, mask, strict=True)) == sorted(
        [PROMPTS[2], PROMPTS[5]]
    )


def test_prompts_come_in_as_one_row_without_padding(tiny_model):
    """A12, A14: ids as given, longest first, positions from 0 in each; nothing else in the forward."""
    model = tiny_model("opt")
    calls = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((kwargs["input_ids"], kwargs["position_ids"])), with_kwargs=True
    )
    answer(model, [PROMPTS[0], PROMPTS[2], PROMPTS[5]], max_new_tokens=1)
    ((token_ids, positions),) = calls
    assert token_ids.tolist() == [PROMPTS[5] + PROMPTS[2] + PROMPTS[0]]
    assert positions.tolist() == [[*range(5), *range(4), 0]]


def test_mode_of_each_module_comes_back(tiny_model):
    """Sampling is in eval mode without gradients; a model that trains with one frozen part goes on like that."""
    model = tiny_model("opt").train()
    frozen = model.model.decoder.layers[0].eval()
    frozen.train()
    frozen.self_attn.eval()
    modes = [module.training for module in model.modules()]
    seen = []
    model.model.decoder.layers[1].register_forward_hook(
        lambda module, _, output: seen.append((module.training, torch.is_grad_enabled()))
    )
    assert tokens(answer(model)) == tokens(answer(tiny_model("opt").eval()))
    assert set(seen) == {(False, False)}
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()


def test_mode_comes_back_after_an_exception(tiny_model):
    model = tiny_model("gpt2").train()

    def fail(*_):
        raise RuntimeError("device lost")

    handle = model.transformer.h[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="device lost"):
        answer(model)
    handle.remove()
    assert all(module.training for module in model.modules()) and torch.is_grad_enabled()


def test_gradient_checkpointing_is_off_while_sampling(tiny_model, family):
    expected = tokens(answer(tiny_model(family)))
    model = tiny_model(family).train()
    model.gradient_checkpointing_enable()
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert layers

    def recompute(*_, **__):
        raise AssertionError("checkpointing ran inside sampling")

    kept = [module._gradient_checkpointing_func for module in layers]
    for module in layers:
        module._gradient_checkpointing_func = recompute
    assert tokens(answer(model)) == expected
    for module, function in zip(layers, kept, strict=True):
        module._gradient_checkpointing_func = function
    assert all(module.gradient_checkpointing and module.training for module in layers)


def test_compiled_layers_are_left_out_of_sampling(tiny_model, family):
    expected = tokens(answer(tiny_model(family)))
    model = tiny_model(family).train()
    compile_blocks(model)
    forwards = {block: vars(block)["forward"] for block in compiled_blocks(model)}
    assert len(forwards) == 2

    def compute(*_, **__):
        raise AssertionError("a compiled layer ran inside sampling")

    for block in forwards:
        vars(block)["forward"] = compute
    assert tokens(answer(model)) == expected
    assert all(vars(block)["forward"] is compute for block in forwards)


def test_finished_rows_leave_the_batch(tiny_model):
    """Padded forwards are as wide as there are unfinished rows."""
    model = tiny_model("gpt2", attn_implementation="sdpa")
    widths = []
    model.register_forward_pre_hook(lambda _, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True)
    lengths = [len(row) for row in tokens(answer(model))]
    assert widths == [sum(length > position for length in lengths) for position in range(max(lengths))]


class OtherRanks:
    """The other ranks of a job, as the protocol shows them: running until their number of forwards is reached."""

    def __init__(self, num_forwards):
        self.num_forwards = num_forwards
        self.calls = 0

    def __call__(self, running):
        self.calls += 1
        return running or self.calls <= self.num_forwards


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], []])
@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize("family", ["bloom", "gpt_neox"])
def test_forwards_go_on_while_another_rank_runs(tiny_model, family, prompts, batch_size):
    """E1: as many forwards as the longest rank needs, one per agreement, also on a rank without rows."""
    model = tiny_model(family)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    alone = tokens(answer(model, prompts, batch_size=batch_size))
    needed = len(forwards)
    for others in (0, needed + 9):
        forwards.clear()
        ranks = OtherRanks(others)
        assert tokens(answer(model, prompts, batch_size=batch_size, all_ranks_running=ranks)) == alone
        assert len(forwards) == max(needed, others)
        assert ranks.calls == len(forwards) + 1, "the last call finds every rank done"


@pytest.mark.parametrize("sync_every", [1, 4])
def test_progress_is_reported(tiny_model, sync_every):
    """D32: a line per n tokens, with the number of finished rows; tokens after the stop are not counted."""
    reports = []
    responses = answer(
        tiny_model("opt"),
        progress=lambda *numbers: reports.append(numbers),
        progress_every=10,
        batch_size=4,
        sync_every=sync_every,
    )
    total = sum(map(len, tokens(responses)))
    counts = [count for count, _ in reports]
    assert len(reports) >= 3 and counts == sorted(counts) and counts[-1] <= total < counts[-1] + 10
    assert all(b - a >= 10 for a, b in zip([0, *counts], counts, strict=False))


def test_logits_that_are_not_finite_are_an_error(tiny_model):
    model = tiny_model("opt")
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite at response token 0"):
        answer(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[5], []]}, "prompt 1 has no token"),
        ({"prompts": [[5]] * 3}, "one entry per row, got 3, 2, 2"),
        ({"prompts": [[5], [6] * 50]}, "max_position_embeddings=64"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"sync_every": 0}, "sync_every must be >= 1, got 0"),
        ({"sampling": SamplingConfig(stop_strings=["x"])}, "need the tokenizer"),
        ({"sampling": SamplingConfig(stop_token_ids=[96])}, r"lack \[96\]"),
    ],
)
def test_bad_arguments(tiny_model, changes, message):
    """A14: an overlong prompt is an error before the first forward, never a cut or a crash half-way."""
    model = tiny_model("opt")
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    arguments = {"prompts": [[5], [6]], "uids": [1, 2], "sample_ids": [0, 0], **changes}
    with pytest.raises(ValueError, match=message):
        answer(model, **arguments)
    assert not forwards


def test_no_prompts(tiny_model):
    assert answer(tiny_model("opt"), []) == []
