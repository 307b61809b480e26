"""FLOPs counted from a model's shape. No torch.

A multiply-add is two FLOPs. Counted are the matrix products: linear layers, attention's two products, the language head
at the positions whose next token is scored. Norms, activations, softmax and the optimiser are left out, as is usual.

"Model" FLOPs are what the algorithm needs for real tokens: no padding, the lower triangle of attention alone, nothing
computed twice. Backward is twice forward: one product for the inputs' gradient, one for the weights'.
"""

from collections.abc import Iterable

from rlhf.plan.shapes import Shape

TRAINING = 3
"""Forward and backward, in units of a forward."""


def forward(shape: Shape, length: float, *, targets: float = 0, causal: bool = True) -> float:
    """Forward FLOPs of one sequence.

    Args:
        shape: of the model.
        length: tokens that go through the layers; a mean length is allowed.
        targets: positions that go through the language head.
        causal: count the pairs at or below the diagonal, as the algorithm needs, or all that a plain kernel computes.
    """
    pairs = length * (length + 1) / 2 if causal else length * length
    return length * shape.linear_per_token + pairs * shape.attention_per_pair + targets * shape.head_per_token


def update(shape: Shape, lengths: Iterable[float], *, targets: float = 0, lora: int = 0) -> float:
    """Model FLOPs of training on some sequences.

    Args:
        shape: of the model.
        lengths: tokens of each sequence.
        targets: positions of all of them that go through the language head.
        lora: rank of adapters on every matrix of the layers, which then are what is trained. The frozen matrices give
            the gradient of their input and none of their own; the adapters are trained in full.
    """
    lengths = list(lengths)
    whole = TRAINING * (sum(forward(shape, length) for length in lengths) + targets * shape.head_per_token)
    if not lora:
        return whole
    return whole + sum(lengths) * (TRAINING * 2 * shape.lora_parameters(lora) - shape.linear_per_token)


def sft_row(policy: Shape, prompt: float, response: float, *, lora: int = 0) -> float:
    """Model FLOPs of one demonstration in an update: loss on the response."""
    return update(policy, [prompt + response], targets=response, lora=lora)


def preference_row(reward: Shape, prompt: float, chosen: float, rejected: float) -> float:
    """Model FLOPs of one pair in an update of the reward model; its head of one output is not worth counting."""
    return update(reward, [prompt + chosen, prompt + rejected])


def rollout_row(policy: Shape, prompt: float, response: float) -> float:
    """Model FLOPs of drawing one response: its last token is drawn and never read."""
    return forward(policy, prompt + response - 1, targets=response)


def ppo_row(
    policy: Shape,
    reward: Shape,
    prompt: float,
    response: float,
    *,
    epochs: int = 1,
    lora: int = 0,
    critic: bool = True,
) -> float:
    """Model FLOPs of one response in a PPO iteration.

    The rollout gives the old log-probabilities; the reference, the reward model and, if there is one, the critic read
    the row once; actor (with adapters of rank `lora`, if that is not 0) and critic are trained on it `epochs` times.
    Critic and reward model have one shape.
    """
    length = prompt + response
    scored = forward(policy, length, targets=response) + (1 + critic) * forward(reward, length)
    trained = update(policy, [length], targets=response, lora=lora) + critic * update(reward, [length])
    return rollout_row(policy, prompt, response) + scored + epochs * trained


def recomputed(shape: Shape, length: float, recompute: str, *, on_chip: bool = True) -> float:
    """FLOPs of the second forward of one sequence: hardware FLOPs are model FLOPs and these.

    "full" computes the layers again and "none" nothing; "selective" every second matrix product, or, where attention
    keeps its pairs in memory, attention's two products. The head is never computed again.
    """
    pairs = length * (length + 1) / 2 * shape.attention_per_pair
    linear = length * shape.linear_per_token
    return {"none": 0.0, "selective": linear / 2 if on_chip else pairs, "full": pairs + linear}[recompute]
