from itertools import product

import pytest
import torch

from rlhf.config import SamplingConfig
from rlhf.ops import transform_logits
from rlhf.rollout import sampling as module
from rlhf.rollout.sampling import TokenChooser, sample_tokens, splitmix64, take_best, uniform

MASK = (1 << 64) - 1


def python_splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor | float) -> float:
    """Chi-square statistic as a standard normal deviate (many degrees of freedom: mean k, variance 2k)."""
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def test_splitmix64_published_sequence():
    """First outputs for seed 0: the published test vector of the reference implementation (prng.di.unimi.it)."""
    import numpy as np

    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, (2 * golden) & MASK], dtype=np.uint64)
    assert [hex(value) for value in splitmix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_uniform_equals_python_integers():
    """Oracle: the chain of mixers in unbounded Python integers; wide and negative words included."""
    seeds, steps, uids, samples, positions = (1, -3), (0, 2**40), [7, 2**62 - 1, -5], [0, 1, 2], range(4)
    for seed, step in product(seeds, steps):
        u_BR = uniform(seed, step, uids, samples, positions=positions)
        assert u_BR.dtype == torch.float64 and u_BR.shape == (3, 4)
        for (row, uid), position in product(enumerate(uids), positions):
            state = 0
            for word in (seed, step, uid, samples[row], position):
                state = python_splitmix64(state ^ (word & MASK))
            assert u_BR[row, position].item() == (state >> 11) / 2**53


def test_uniform_never_changes():
    """Pinned: a run that is resumed by another version has to draw the same tokens."""
    assert uniform(1, 0, [2], [0], positions=[0, 1]).tolist() == [[0.6807399763708417, 0.7704014975859622]]


def test_uniform_does_not_depend_on_the_company():
    uids, samples = [11, 12, 13, 11], [0, 0, 5, 1]
    together = uniform(3, 4, uids, samples, positions=range(10))
    for row in range(4):
        alone = uniform(3, 4, [uids[row]], [samples[row]], positions=range(6, 10))
        assert torch.equal(alone[0], together[row, 6:])
    assert not torch.equal(together[0], together[3])


def test_uniform_is_uniform():
    u = uniform(1, 2, range(200), [0] * 200, positions=range(500)).flatten()
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, bins=1000, min=0, max=1)
    assert abs(chi_square_z(counts, len(u) / 1000)) < 4
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / len(u)) ** 0.5
    # The low bits too: position in a cell of width 2**-20.
    counts = torch.histc((u * 2**20) % 1, bins=1000, min=0, max=1)
    assert abs(chi_square_z(counts, len(u) / 1000)) < 4


NEIGHBOURS = {
    "position": lambda d: uniform(1, 2, range(300), [0] * 300, positions=range(d, 300 + d)),
    "sample": lambda d: uniform(1, 2, range(300), [d] * 300, positions=range(300)),
    "uid": lambda d: uniform(1, 2, range(d, 300 + d), [0] * 300, positions=range(300)),
    "step": lambda d: uniform(1, 2 + d, range(300), [0] * 300, positions=range(300)),
    "seed": lambda d: uniform(1 + d, 2, range(300), [0] * 300, positions=range(300)),
}


@pytest.mark.parametrize("coordinate", NEIGHBOURS)
def test_neighbours_are_independent(coordinate):
    """Counts of (u, u at the next value of one coordinate) on a 20 x 20 grid are those of independent uniforms."""
    first, second = (NEIGHBOURS[coordinate](d).flatten() for d in (0, 1))
    cell = (first * 20).long() * 20 + (second * 20).long()
    counts = torch.bincount(cell, minlength=400).double()
    assert abs(chi_square_z(counts, len(first) / 400)) < 4


def test_sample_tokens_by_hand():
    """Probabilities 1/2, 0, 1/4, 1/4: the intervals are [0, .5), none, [.5, .75), [.75, 1)."""
    logits_V = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()
    u_B = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2**-53], dtype=torch.float64)
    token_B, logprob_B = sample_tokens(logits_V.expand(6, 4), u_B)
    assert token_B.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprob_B.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]))


def test_sampled_frequencies_are_the_probabilities():
    torch.manual_seed(0)
    logits_V = torch.randn(64) * 2
    logits_V[[3, 40, 63]] = -torch.inf
    u_B = uniform(5, 0, range(1000), [0] * 1000, positions=range(100)).flatten()
    token_B, logprob_B = sample_tokens(logits_V.expand(len(u_B), -1), u_B)
    counts = torch.bincount(token_B, minlength=64).double()
    assert counts[[3, 40, 63]].sum() == 0
    possible = logits_V.isfinite()
    expected = logits_V.double().softmax(-1) * len(u_B)
    assert abs(chi_square_z(counts[possible], expected[possible])) < 4
    torch.testing.assert_close(logprob_B, logits_V.log_softmax(-1)[token_B], atol=1e-6, rtol=0)


def test_sample_tokens_is_the_inverse_of_the_cumulative_distribution():
    """Oracle: a search through float64 partial sums; rows of very different scale and offset."""
    torch.manual_seed(1)
    logits_BV = torch.randn(50, 33) * torch.logspace(-2, 2, 50)[:, None] + torch.linspace(-1e3, 1e3, 50)[:, None]
    u_B = uniform(0, 0, range(50), [0] * 50, positions=[0])[:, 0]
    token_B, _ = sample_tokens(logits_BV, u_B)
    for row in range(50):
        token, prob_V = 0, logits_BV[row].double().softmax(-1)
        while u_B[row] >= prob_V[: token + 1].sum():
            token += 1
        assert token_B[row] == token


def test_only_one_token_left():
    logits_BV = torch.full((3, 5), -torch.inf)
    logits_BV[:, 4] = torch.tensor([-1e30, 0.0, 1e30])
    token_B, logprob_B = sample_tokens(logits_BV, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert token_B.tolist() == [4, 4, 4] and logprob_B.tolist() == [0, 0, 0]


def test_logits_that_are_not_finite_show_in_the_log_probability():
    logits_BV = torch.zeros(3, 4)
    logits_BV[0, 1], logits_BV[1, 2] = torch.nan, torch.inf
    token_B, logprob_B = sample_tokens(logits_BV, torch.full((3,), 0.3, dtype=torch.float64))
    assert ((token_B >= 0) & (token_B < 4)).all()
    assert logprob_B.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_blocks_sum_to_the_running_sum_over_all_tokens(vocab_size):
    """Oracle: Python integers, one token after the other. Same tokens, also at the ends of blocks and of the row."""
    torch.manual_seed(2)
    logits_BV = torch.randn(20, vocab_size) * 4
    logits_BV[torch.rand(logits_BV.shape) < 0.2] = -torch.inf
    logits_BV[:, vocab_size // 2] = 1.0
    u_B = uniform(0, 0, range(20), [0] * 20, positions=[0])[:, 0]
    u_B[0], u_B[1] = 0.0, 1 - 2**-53
    token_B, _ = sample_tokens(logits_BV, u_B)
    for row in range(20):
        weight_V = ((logits_BV[row] - logits_BV[row].max()).exp() * 2.0**40).to(torch.int64).tolist()
        target = min(int(u_B[row] * sum(weight_V)), sum(weight_V) - 1)
        token = upto = 0
        while (upto := upto + weight_V[token]) <= target:
            token += 1
        assert token_B[row] == token


def test_the_logits_are_not_written():
    logits_BV = torch.randn(3, 300)
    before = logits_BV.clone()
    sample_tokens(logits_BV, torch.full((3,), 0.5, dtype=torch.float64))
    TokenChooser(SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, min_new_tokens=2), (1, 2))(
        logits_BV, torch.zeros(3, dtype=torch.int64), torch.full((3,), 0.5, dtype=torch.float64)
    )
    assert torch.equal(logits_BV, before)


def test_take_best():
    token_B, logprob_B = take_best(torch.tensor([[1.0, 5.0, 5.0], [-torch.inf, -2.0, -3.0], [0.0, torch.nan, 1.0]]))
    assert token_B[:2].tolist() == [1, 1] and logprob_B[:2].tolist() == [0, 0] and logprob_B[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0, min_new_tokens=2),
        SamplingConfig(temperature=1.5, top_k=9, top_p=0.7, min_new_tokens=2),
    ],
    ids=["plain", "greedy", "all_transforms"],
)
def test_chunks_of_rows_choose_as_all_rows(monkeypatch, sampling, dtype):
    """Ragged positions: each row's own counts. Greedy choosing is that of the transformed logits."""
    torch.manual_seed(3)
    logits_BV = (torch.randn(7, 50) * 3).to(dtype)
    logits_BV[:, 4] += 9
    position_B = torch.tensor([0, 1, 2, 3, 0, 9, 1])
    u_B = uniform(0, 1, range(7), [0] * 7, positions=[0])[:, 0]
    choose = TokenChooser(sampling, (3, 4))
    expected = sample_tokens(
        transform_logits(logits_BV, sampling, response_position_S=position_B, stop_token_ids=(3, 4)), u_B
    )
    for logits_at_a_time in (1, 100, 10**6):
        monkeypatch.setattr(module, "_CACHED_LOGITS", logits_at_a_time)
        got = choose(logits_BV, position_B, u_B)
        assert torch.equal(got[0], expected[0]) and torch.allclose(got[1], expected[1], atol=1e-6)
    stopped_B = (expected[0] == 3) | (expected[0] == 4)
    assert stopped_B.any() and not (stopped_B & (position_B < sampling.min_new_tokens)).any()
